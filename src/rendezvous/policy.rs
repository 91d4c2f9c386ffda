//! Restart policy: what a generation that ended costs, and when starting again is no use.
//!
//! - A worker that fails, or a lost node without which too few are left, costs one restart of the job's budget (`--max-restarts`).
//! - The first restart after progress is at once; from the second in a row without progress on, a pause that doubles.
//! - A change of membership is free: a node that comes, and one that goes while enough are left without it.
//! - So is a port of rank 0's that a stranger took before it was bound, [`MAX_TAKEN_PORTS`] times in a row: the next
//!   generation has another one.
//! - Progress refunds the budget: a generation that reached a training step beyond all before it.
//! - A worker that dies within [`Config::quick_failure`] of the start without progress, [`Config::quick_failures`]
//!   times in a row, ends the job: something is wrong that time does not mend.

use std::time::Duration;

use ddp_proto::rendezvous::Assignment;
use serde::{Deserialize, Serialize};

use super::config::Config;

/// Upper bound for counters that come from an earlier daemon.
const MAX_ROW: u32 = 1 << 16;

/// Generations in a row that may end for nothing because rank 0's port was taken.
pub(super) const MAX_TAKEN_PORTS: u32 = 3;

/// What is known of a generation when it ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    /// How long it ran.
    pub(super) ran: Duration,
    /// Highest step that any node reported in it.
    pub(super) step: Option<u64>,
    /// Why it ended.
    pub(super) why: EndReason,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// A worker failed.
    Failure,
    /// A worker failed, and says that a restart cannot help.
    Permanent,
    /// Rank 0 could not bind its port.
    PortTaken,
    /// A node is gone, and the others are too few without it.
    NodeMissing,
    /// Nodes came or went, and enough are there.
    Membership,
}

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The next generation; one restart of the budget is spent, this being number `spent`.
    Restart { spent: u32 },
    /// The next generation, for nothing.
    Regroup,
    /// The end: a restart cannot help.
    Permanent,
    /// The end: the budget is used up.
    UsedUp,
    /// The end: so many quick failures in a row.
    Hopeless { times: u32 },
}

/// The account of one job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Account {
    /// Restarts spent since the last progress.
    spent: u32,
    /// Highest step of all generations.
    best: Option<u64>,
    /// Quick failures in a row.
    quick: u32,
    /// Generations in a row that ended because rank 0's port was taken.
    taken: u32,
}

impl Account {
    /// Restarts spent since the last progress.
    pub(super) fn spent(&self) -> u32 {
        self.spent
    }

    /// Highest step of all generations.
    pub(super) fn best(&self) -> Option<u64> {
        self.best
    }

    /// Grows with all that happens to a job: of two accounts of it the one with the larger age is the later one.
    /// Progress comes first, because it refunds what was spent.
    pub(super) fn age(&self) -> (Option<u64>, u32) {
        (self.best, self.spent)
    }

    /// Puts the account into an assignment: agents give it back to a daemon that has lost its state.
    pub(super) fn write_to(&self, assignment: &mut Assignment) {
        assignment.restart_count = self.spent;
        assignment.best_step = self.best;
        assignment.quick_failures = self.quick;
        assignment.ports_taken = self.taken;
    }

    /// The account as an earlier daemon has put it into an assignment.
    pub(super) fn read_from(assignment: &Assignment) -> Self {
        Self {
            spent: assignment.restart_count,
            best: assignment.best_step,
            quick: assignment.quick_failures.min(MAX_ROW),
            taken: assignment.ports_taken.min(MAX_ROW),
        }
    }

    /// Closes the account of a generation.
    pub(super) fn close(&mut self, config: &Config, max_restarts: u32, ended: Ended) -> Verdict {
        let progress = ended.step.is_some_and(|step| step > 0) && ended.step > self.best;
        if progress {
            self.best = ended.step;
            self.spent = 0;
            self.quick = 0;
        }
        match ended.why {
            EndReason::PortTaken if self.taken < MAX_TAKEN_PORTS => {
                self.taken += 1;
                return Verdict::Regroup;
            }
            EndReason::PortTaken | EndReason::Membership => {}
            EndReason::Failure | EndReason::Permanent | EndReason::NodeMissing => self.taken = 0,
        }
        let quick = !progress && ended.ran < config.quick_failure;
        match ended.why {
            EndReason::Permanent => return Verdict::Permanent,
            EndReason::Membership => return Verdict::Regroup,
            EndReason::Failure | EndReason::PortTaken if quick => self.quick += 1,
            EndReason::Failure | EndReason::PortTaken | EndReason::NodeMissing => self.quick = 0,
        }
        if self.spent >= max_restarts {
            return Verdict::UsedUp;
        }
        if self.quick >= config.quick_failures {
            return Verdict::Hopeless { times: self.quick };
        }
        self.spent += 1;
        Verdict::Restart { spent: self.spent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(seconds: u64, step: Option<u64>, why: EndReason) -> Ended {
        Ended {
            ran: Duration::from_secs(seconds),
            step,
            why,
        }
    }

    #[test]
    fn failures_use_up_the_budget_and_membership_does_not() {
        let (config, mut account) = (Config::default(), Account::default());
        let mut close = |why| account.close(&config, 2, ended(60, None, why));
        assert_eq!(close(EndReason::Failure), Verdict::Restart { spent: 1 });
        assert_eq!(close(EndReason::Membership), Verdict::Regroup);
        assert_eq!(close(EndReason::NodeMissing), Verdict::Restart { spent: 2 });
        assert_eq!(close(EndReason::Membership), Verdict::Regroup);
        assert_eq!(close(EndReason::Failure), Verdict::UsedUp);
    }

    #[test]
    fn progress_refunds_the_budget() {
        let (config, mut account) = (Config::default(), Account::default());
        let mut close = |step| account.close(&config, 1, ended(60, step, EndReason::Failure));
        assert_eq!(close(Some(10)), Verdict::Restart { spent: 1 });
        assert_eq!(close(Some(11)), Verdict::Restart { spent: 1 });
        assert_eq!(
            close(Some(11)),
            Verdict::UsedUp,
            "the same step again is no progress"
        );
    }

    #[test]
    fn a_port_that_is_taken_costs_nothing_three_times_in_a_row() {
        let (config, mut account) = (Config::default(), Account::default());
        let mut close = |why| account.close(&config, 1, ended(1, None, why));
        for _ in 0..MAX_TAKEN_PORTS {
            assert_eq!(close(EndReason::PortTaken), Verdict::Regroup);
        }
        assert_eq!(close(EndReason::PortTaken), Verdict::Restart { spent: 1 });
        assert_eq!(close(EndReason::PortTaken), Verdict::UsedUp);

        let mut account = Account::default();
        let mut close = |why| account.close(&config, 1, ended(1, None, why));
        assert_eq!(close(EndReason::PortTaken), Verdict::Regroup);
        assert_eq!(close(EndReason::Failure), Verdict::Restart { spent: 1 });
        for _ in 0..MAX_TAKEN_PORTS {
            assert_eq!(close(EndReason::PortTaken), Verdict::Regroup, "a new row");
        }
        assert_eq!(close(EndReason::PortTaken), Verdict::UsedUp);
    }

    #[test]
    fn progress_interrupts_the_row_of_quick_failures_however_the_generation_ended() {
        let config = Config {
            quick_failures: 2,
            ..Config::default()
        };
        let mut account = Account::default();
        let mut close = |seconds, step, why| account.close(&config, 100, ended(seconds, step, why));
        assert!(matches!(
            close(1, None, EndReason::Failure),
            Verdict::Restart { .. }
        ));
        assert_eq!(close(3600, Some(1000), EndReason::Membership), Verdict::Regroup);
        assert!(matches!(
            close(1, None, EndReason::Failure),
            Verdict::Restart { .. }
        ));
        assert_eq!(close(1, None, EndReason::Failure), Verdict::Hopeless { times: 2 });
    }

    #[test]
    fn quick_failures_in_a_row_end_the_job() {
        let config = Config {
            quick_failures: 3,
            ..Config::default()
        };
        let mut account = Account::default();
        let mut close = |seconds, step| account.close(&config, 100, ended(seconds, step, EndReason::Failure));
        for round in 0..2 {
            assert!(matches!(close(1, None), Verdict::Restart { .. }), "{round}");
        }
        assert!(
            matches!(close(60, None), Verdict::Restart { .. }),
            "a long one interrupts the row"
        );
        assert!(matches!(close(1, None), Verdict::Restart { .. }));
        assert!(
            matches!(close(1, Some(1)), Verdict::Restart { spent: 1 }),
            "so does progress"
        );
        for _ in 0..2 {
            assert!(matches!(close(1, Some(1)), Verdict::Restart { .. }));
        }
        assert_eq!(close(1, Some(1)), Verdict::Hopeless { times: 3 });
    }
}
