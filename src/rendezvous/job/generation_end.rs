//! Ends generations: failures, success, restarts within the budget.

use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{GenerationOver, JobOver, WorkerExit};
use ddp_proto::{exit, printable};

use super::gathering::Gathering;
use super::node::Node;
use super::running::Running;
use super::{Job, Phase};
use crate::rendezvous::config::Config;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::{Observation, Origin, Stage};
use crate::rendezvous::messages;
use crate::rendezvous::messages::clip;
use crate::rendezvous::policy::{EndReason, Ended, Verdict};

/// Why a generation ended.
#[derive(Debug)]
pub(super) struct GenerationEnd {
    cause: String,
    /// Exit code of the job if the restart budget is used up.
    exit_code: i32,
    /// The worker that failed, and its host; none if a node is gone.
    failure: Option<(WorkerExit, String)>,
    why: EndReason,
}

impl Job {
    /// The first failure to arrive ends the generation; later ones are its consequences. One that says that it is a
    /// consequence itself is held back for a moment, for the cause to arrive; if a node's connection is broken, any
    /// failure is, until that node is lost or has come back: a script whose peer is gone fails like any other.
    pub(super) fn worker_exit(&mut self, context: &mut ApplyContext<'_>, from: &Origin, exit: WorkerExit) {
        self.note_exits(context, from, std::slice::from_ref(&exit));
        if !self.is_of_member(from) {
            return self.ignore(context, from, "a worker's exit");
        }
        let node = self.table.get(&from.incarnation);
        let hostname = node.map_or_else(String::new, |node| node.hostname().to_owned());
        let away = self.away().min_by_key(|(rank, _)| *rank);
        let away = away.map(|(_, node)| node.hostname().to_owned());
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        let end = GenerationEnd::of(clamp(context.config, exit), hostname);
        let may_follow = end.is_consequence() || (away.is_some() && end.may_be_a_lost_peer());
        // The agent of a single node has looked for a better cause already.
        if self.table.members().len() == 1 || !may_follow {
            return self.end_generation(context, end);
        }
        let cause = end.cause.clone();
        if running.hold_back(context, end) {
            let awaited = away.map_or_else(
                || {
                    format!(
                        "waiting {} ms for the cause",
                        context.config.culprit_wait.as_millis()
                    )
                },
                |node| format!("node `{node}` is away and may be the cause: waiting for it"),
            );
            context.decided(format!("job `{}`: {cause}; {awaited}", self.id));
            self.table.end_lease_extensions(context.at.now);
        }
    }

    /// Ends the generation with the failure that was held back, if its time has come.
    pub(super) fn judge_suspect(&mut self, context: &mut ApplyContext<'_>) {
        let away: Vec<Duration> = self.away_until().collect();
        let running = self.phase.running_mut();
        let end = running.and_then(|running| running.take_due_suspect(context.at.now, &away));
        if let Some(end) = end {
            self.end_generation(context, end);
        }
    }

    /// Ends the generation with a failure that was held back, if there is one and it is no consequence.
    pub(super) fn end_with_held_failure(&mut self, context: &mut ApplyContext<'_>) {
        if let Some(end) = self.phase.running_mut().and_then(Running::take_cause) {
            self.end_generation(context, end);
        }
    }

    /// Members that are out of reach and have not succeeded, with their ranks, in no order.
    pub(super) fn away(&self) -> impl Iterator<Item = (u32, &Node)> {
        let members = self.table.members_away();
        let at_work = members.filter(|(_, incarnation, _)| !self.has_succeeded(incarnation));
        at_work.map(|(rank, _, node)| (rank, node))
    }

    /// When each of them is lost.
    pub(super) fn away_until(&self) -> impl Iterator<Item = Duration> {
        self.away().map(|(_, node)| node.lease_until())
    }

    /// All workers of a node ended with 0. The job succeeds with the last node.
    pub(super) fn node_succeeded(&mut self, context: &mut ApplyContext<'_>, from: &Origin) {
        if !self.is_of_member(from) {
            return self.ignore(context, from, "success");
        }
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        let members = self.table.members();
        if running.succeed(&from.incarnation, context.at.now) == members.len() {
            let reason = match members {
                [alone] => format!("node `{}` succeeded", alone.hostname),
                all => format!("all {} nodes succeeded", all.len()),
            };
            self.job_over(context, exit::SUCCESS, reason);
        }
    }

    /// All workers of the node ended with 0 in the running generation.
    pub(super) fn has_succeeded(&self, incarnation: &str) -> bool {
        let running = self.phase.running();
        running.is_some_and(|running| running.has_succeeded(incarnation))
    }

    /// Ends the generation without a failure; the next one follows.
    pub(super) fn break_up(&mut self, context: &mut ApplyContext<'_>, cause: String) {
        let end = GenerationEnd::without_a_node(cause, exit::RENDEZVOUS_TIMED_OUT, EndReason::Membership);
        self.end_generation(context, end);
    }

    /// Ends the running generation: the next one if the policy allows it, else the end of the job.
    pub(super) fn end_generation(&mut self, context: &mut ApplyContext<'_>, end: GenerationEnd) {
        let Some(running) = self.phase.running() else {
            return;
        };
        let max_restarts = running.assignment().max_restarts;
        let ended = Ended {
            ran: running.ran(context.at.now),
            step: self.table.step(),
            why: end.why,
        };
        let verdict = self.account.close(context.config, max_restarts, ended);
        let no_restart = match verdict {
            Verdict::Restart { .. } | Verdict::Regroup => None,
            Verdict::Permanent => Some("a restart cannot help".to_owned()),
            Verdict::UsedUp if max_restarts == 0 => Some(String::new()),
            Verdict::UsedUp => Some(format!("no restarts left ({max_restarts}/{max_restarts} used)")),
            Verdict::Hopeless { times } => Some(format!(
                "the last {times} starts failed within {} s each, without progress",
                context.config.quick_failure.as_secs_f64()
            )),
        };
        let (first_failure, host) = end.failure.unzip();
        let first_failure_host = host.unwrap_or_default();
        if let Some(no_restart) = no_restart {
            let reason = if no_restart.is_empty() {
                end.cause
            } else {
                format!("{}; {no_restart}", end.cause)
            };
            let over = JobOver {
                exit_code: end.exit_code,
                reason,
                first_failure,
                first_failure_host,
                no_restart: if max_restarts == 0 {
                    String::new()
                } else {
                    no_restart
                },
                ..JobOver::default()
            };
            return self.end(context, Reply::JobOver(over));
        }
        let membership = verdict == Verdict::Regroup;
        let spent = self.account.spent();
        let backoff = if membership {
            Duration::ZERO
        } else {
            context.config.backoff(spent, context.at.dice)
        };
        let over = GenerationOver {
            cause: end.cause,
            first_failure,
            first_failure_host,
            restart_count: spent,
            max_restarts,
            backoff_ms: backoff.as_millis() as u32,
            membership,
            at_step_boundary: false,
            best_step: self.account.best(),
        };
        context.observe(Observation::Restarted(end.why));
        self.regroup(context, over);
    }

    /// Tells all members that the generation is over, and gathers them for the next one.
    pub(super) fn regroup(&mut self, context: &mut ApplyContext<'_>, over: GenerationOver) {
        let (now, generation) = (context.at.now, self.counter.generation());
        let next = if over.membership {
            "this does not count as a restart".to_owned()
        } else {
            let when = match over.backoff_ms {
                0 => "now".to_owned(),
                pause => format!("in {pause} ms"),
            };
            format!("restarting {when} ({}/{})", over.restart_count, over.max_restarts)
        };
        context.decided(format!(
            "job `{}`: generation {generation} ended: {}; {next}",
            self.id, over.cause
        ));
        self.history.end(now, &over.cause);
        self.counter.end_attempt();
        self.table.end_lease_extensions(now);
        self.table.stop_members(context, generation, &over);
        self.kv.end(context, &over.cause);
        let not_before = now + Duration::from_millis(over.backoff_ms.into());
        self.last_over = Some(over);
        self.record(context, Stage::Ended);
        let timeout = self.table.join_timeout(context.config);
        self.phase = Phase::Gathering(Gathering::new(now, not_before, timeout));
    }
}

impl GenerationEnd {
    /// A worker has failed.
    fn of(exit: WorkerExit, hostname: String) -> Self {
        Self {
            cause: messages::worker_exit(&exit, &hostname),
            exit_code: messages::exit_code(&exit),
            why: match &exit {
                exit if exit.permanent => EndReason::Permanent,
                exit if exit.port_taken => EndReason::PortTaken,
                _ => EndReason::Failure,
            },
            failure: Some((exit, hostname)),
        }
    }

    /// A node is gone, or leaves.
    pub(super) fn without_a_node(cause: String, exit_code: u8, why: EndReason) -> Self {
        Self {
            cause,
            exit_code: i32::from(exit_code),
            failure: None,
            why,
        }
    }

    /// A script whose peer is gone exits with some code, or aborts as NCCL's watchdog does. Other signals have causes of
    /// their own.
    fn may_be_a_lost_peer(&self) -> bool {
        let aborts = |signal| signal == nix::libc::SIGABRT;
        let worker = self.failure.as_ref().map(|(exit, _)| exit);
        matches!(self.why, EndReason::Failure) && worker.is_some_and(|exit| exit.signal.is_none_or(aborts))
    }

    pub(super) fn is_consequence(&self) -> bool {
        self.failure.as_ref().is_some_and(|(exit, _)| exit.consequence)
    }
}

/// A worker's exit within the daemon's bounds: it is sent to every node. The last lines of stderr are kept.
fn clamp(config: &Config, mut exit: WorkerExit) -> WorkerExit {
    let mut left = config.max_tail_bytes;
    let kept = exit.stderr_tail.iter().rev().map_while(|line| {
        left = left.checked_sub(line.len() + 1)?;
        Some(())
    });
    let kept = kept.count();
    exit.stderr_tail.drain(..exit.stderr_tail.len() - kept);
    let line = |text: &str, bytes| clip(&printable::line(text), bytes).to_owned();
    exit.message
        .truncate(clip(&exit.message, config.max_tail_bytes).len());
    exit.log_file = line(&exit.log_file, config.max_name_bytes.max(4096));
    exit.activity = line(&exit.activity, config.max_name_bytes);
    exit
}
