//! A job that hangs: which rank is the cause.
//!
//! When one rank stops, all others wait for it, on every node. So the daemon compares the hung ranks of all nodes before
//! any is named or ended.

mod collective;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{HangVerdict, HungRank, HungWorkers};
use ddp_proto::words::numbered;
use ddp_proto::{exit, printable};

use super::Job;
use super::generation_end::GenerationEnd;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::Origin;
use crate::rendezvous::messages::clip;
use crate::rendezvous::policy::EndReason;

/// Reports of one node after which the daemon waits for no other node: that one makes progress, or is not watched.
const REPORTS_ALONE: u32 = 3;
/// Ranks that are read from one report.
const MAX_RANKS: usize = 256;
/// Collectives that are read of one rank.
const MAX_COLLECTIVES: usize = 64;
/// Longest message to people.
const MAX_WORDS_BYTES: usize = 32 << 10;

/// What the nodes reported of their hung workers, by node rank.
#[derive(Debug, Default)]
pub(super) struct HangReports(BTreeMap<u32, HangReport>);

/// The last report of a node.
#[derive(Debug)]
struct HangReport {
    workers: HungWorkers,
    /// Reports in a row.
    count: u32,
    fresh_until: Duration,
}

impl HangReports {
    /// Keeps a report of one of `nodes` nodes. Gives the hung ranks of all once they are to be compared, and whether all
    /// nodes have reported.
    fn note(
        &mut self,
        now: Duration,
        node: u32,
        mut workers: HungWorkers,
        nodes: usize,
    ) -> Option<(Vec<HungRank>, bool)> {
        workers.ranks.truncate(MAX_RANKS);
        for rank in &mut workers.ranks {
            rank.collectives.truncate(MAX_COLLECTIVES);
        }
        let is_fresh = |report: &HangReport| report.fresh_until >= now;
        let before = self.0.remove(&node).filter(is_fresh);
        let count = before.map_or(0, |report| report.count) + 1;
        let report = HangReport {
            fresh_until: now + 2 * Duration::from_millis(workers.period_ms.into()),
            workers,
            count,
        };
        self.0.insert(node, report);
        if self.0.len() < nodes && count < REPORTS_ALONE {
            return None;
        }
        self.0.retain(|_, report| is_fresh(report));
        let are_all = self.0.len() >= nodes;
        let hung = |report: &HangReport| report.workers.ranks.clone();
        (are_all || count >= REPORTS_ALONE).then(|| (self.0.values().flat_map(hung).collect(), are_all))
    }
}

/// The rank that is the cause of the hang, if the comparison shows one.
///
/// A rank that no longer sends heartbeats is the cause before one that still sends them, and a rank that does not wait
/// for others before one that does. Of those left, it is the one that is behind. If all wait, that counts only where
/// `are_all` nodes have reported: else the cause may be on another node.
fn cause(hung: &[HungRank], are_all: bool) -> Option<u32> {
    let key = |rank: &HungRank| (!rank.lost, rank.waits, rank.step);
    let least = hung.iter().map(key).min()?;
    let mut causes = hung.iter().filter(|rank| key(rank) == least);
    let cause = causes.next().filter(|rank| are_all || !rank.waits)?;
    causes.next().is_none().then_some(cause.rank)
}

/// What the ranks do, in words: those that do the same share a paragraph.
fn comparison(hung: &[HungRank]) -> String {
    let mut groups: BTreeMap<(u64, &str), Vec<u32>> = BTreeMap::new();
    for rank in hung {
        let ranks = groups.entry((rank.step, &rank.stack)).or_default();
        ranks.push(rank.rank);
    }
    let mut words =
        "no rank makes progress, and neither their steps nor their stacks show which one is the cause"
            .to_owned();
    for ((step, stack), ranks) in groups {
        let stack = if stack.is_empty() { "no answer" } else { stack };
        let (ranks, stack) = (numbered("rank", &ranks), stack.replace('\n', "\n    "));
        let _ = write!(words, "\n  {ranks}, after step {step}:\n    {stack}");
    }
    words
}

impl Job {
    /// Workers of a node hang. Once all nodes have been compared, the cause is ended, or the generation without naming one.
    pub(super) fn hung_workers(&mut self, context: &mut ApplyContext<'_>, from: &Origin, hung: HungWorkers) {
        let node = self.table.rank_of(&from.incarnation);
        let Some(node) = node.filter(|_| self.is_of_member(from)) else {
            return self.ignore(context, from, "a report of a hang");
        };
        let members = self.table.members().len();
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        let nodes = members - running.succeeded().len();
        let Some((hung, are_all)) = running.hang_reports().note(context.at.now, node, hung, nodes) else {
            return;
        };
        if hung.is_empty() {
            return;
        }
        let collective = collective::find(&hung).unwrap_or_default();
        let rank = cause(&hung, are_all).or(collective.only_absent.filter(|_| are_all));
        *running.hang_reports() = HangReports::default();
        let mut words = collective.words;
        if rank.is_none() {
            words.push_str(&comparison(&hung));
        }
        let comparison = clip(&words, MAX_WORDS_BYTES).to_owned();
        let verdict = HangVerdict { rank, comparison };
        self.table
            .send_all(context, from.generation, &Reply::HangVerdict(verdict));
        if let Some(rank) = rank {
            let line = words
                .lines()
                .next()
                .map(|line| format!(": {}", printable::line(line)));
            let line = line.unwrap_or_default();
            return context.decided(format!("job `{}`: rank {rank} hangs{line}", self.id));
        }
        let cause = "the job hung, and no rank could be named as the cause".to_owned();
        // As if a rank had been named and ended.
        let code = exit::of_signal(nix::libc::SIGABRT);
        let end = GenerationEnd::without_a_node(cause, code, EndReason::Failure);
        self.end_generation(context, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLEEPS: &str = "thread MainThread\n  log_metrics at train.py:9";
    const REDUCES: &str = "thread MainThread\n  _engine_run_backward at torch/autograd/graph.py:1";

    fn doing(rank: u32, step: u64, stack: &str) -> HungRank {
        HungRank {
            rank,
            step,
            lost: true,
            waits: stack == REDUCES,
            stack: stack.into(),
            collectives: Vec::new(),
        }
    }

    #[test]
    fn of_ranks_at_the_same_step_the_one_outside_of_a_collective_is_the_cause() {
        for victim in 0..4 {
            // One that is stopped, or holds Python's lock, does not answer.
            for stack in [SLEEPS, ""] {
                let what = |rank| if rank == victim { stack } else { REDUCES };
                let hung: Vec<_> = (0..4).map(|rank| doing(rank, 4, what(rank))).collect();
                assert_eq!(cause(&hung, true), Some(victim));
                assert_eq!(cause(&hung, false), Some(victim), "another node is silent");
            }
        }
    }

    #[test]
    fn the_rank_that_is_behind_is_the_cause() {
        assert_eq!(cause(&[doing(0, 5, SLEEPS), doing(1, 4, SLEEPS)], true), Some(1));
        let hung = [doing(0, 5, REDUCES), doing(1, 4, REDUCES)];
        assert_eq!(cause(&hung, true), Some(1));
        assert_eq!(
            cause(&hung, false),
            None,
            "they may wait for a node that has not reported"
        );
    }

    #[test]
    fn the_rank_without_heartbeats_is_the_cause() {
        let lives = HungRank {
            lost: false,
            ..doing(0, 3, SLEEPS)
        };
        assert_eq!(cause(&[lives, doing(1, 4, "")], true), Some(1));
    }

    #[test]
    fn where_nothing_tells_the_ranks_apart_all_stacks_are_shown_and_no_rank_is_named() {
        let hung = [
            doing(0, 4, SLEEPS),
            doing(1, 4, SLEEPS),
            doing(2, 4, REDUCES),
            doing(3, 4, SLEEPS),
        ];
        assert_eq!(cause(&hung, true), None);
        assert_eq!(cause(&[doing(0, 4, ""), doing(1, 4, "")], true), None);
        insta::assert_snapshot!(comparison(&hung), @r"
        no rank makes progress, and neither their steps nor their stacks show which one is the cause
          rank 2, after step 4:
            thread MainThread
              _engine_run_backward at torch/autograd/graph.py:1
          ranks 0, 1, 3, after step 4:
            thread MainThread
              log_metrics at train.py:9
        ");
    }

    #[test]
    fn a_node_that_does_not_report_is_not_waited_for_for_ever() {
        let mut reports = HangReports::default();
        let mut note = |second, node| {
            let workers = HungWorkers {
                ranks: vec![doing(node, 4, SLEEPS)],
                period_ms: 4000,
            };
            let told = reports.note(Duration::from_secs(second), node, workers, 2);
            told.map(|(hung, are_all)| (hung.len(), are_all))
        };
        assert_eq!(note(0, 0), None);
        assert_eq!(note(4, 0), None);
        assert_eq!(note(8, 0), Some((1, false)));
        assert_eq!(note(60, 1), None, "the other node has gone on since");
        assert_eq!(note(61, 0), Some((2, true)));
    }
}
