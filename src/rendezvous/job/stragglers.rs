//! Stragglers: ranks for which the others wait.
//!
//! Ranks that train in lock-step have the same step at any time, so steps show no slow rank. The slow one is the one
//! that waits least.

use std::collections::{BTreeMap, BTreeSet};

use ddp_proto::rendezvous::{NodeStatus, RankProgress};
use ddp_proto::words::numbered;

use super::Job;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::Origin;

/// Part of a step by which a straggler holds the others up.
const LEAST_SHARE: f64 = 0.1;
/// Ranks that are named in a generation.
const MAX_NAMED: usize = 64;

/// What is known of the generation's stragglers.
#[derive(Debug, Default)]
pub(super) struct Stragglers {
    /// Nodes that have sent a heartbeat since the last comparison: a comparison visits all of them.
    reported: BTreeSet<u32>,
    /// Seconds a step that the others wait for these ranks at least.
    held_up: BTreeMap<u32, f64>,
    named: BTreeSet<u32>,
}

impl Stragglers {
    pub(super) fn count(&self) -> u64 {
        self.held_up.len() as u64
    }

    /// Adds what is known to the status.
    pub(super) fn tell(&self, nodes: &mut [NodeStatus]) {
        for rank in nodes.iter_mut().flat_map(|node| &mut node.ranks) {
            rank.holds_up_s = self.held_up.get(&rank.rank).copied();
        }
    }

    /// Keeps the stragglers of the last comparison. Gives those that are to be named.
    fn replace(&mut self, found: &[Straggler]) -> Vec<Straggler> {
        self.held_up = found.iter().map(|one| (one.rank, one.holds_up_s)).collect();
        let mut news = found.to_vec();
        news.retain(|one| self.named.len() < MAX_NAMED && self.named.insert(one.rank));
        news
    }
}

/// A rank for which the others wait.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Straggler {
    rank: u32,
    /// Seconds a step.
    holds_up_s: f64,
    step_time_s: f64,
}

/// The stragglers among ranks in lock-step, a quarter of them at most, or one.
///
/// The others wait longer than each of them by a tenth of a step. That holds in three quarters of the last steps, for the
/// times of a rank are compared by their quartiles.
fn find<'a>(ranks: impl Iterator<Item = &'a RankProgress>) -> Vec<Straggler> {
    let mut ranks: Vec<_> = ranks
        .filter_map(|rank| {
            Some((
                rank.waited_low_s?,
                rank.waited_high_s?,
                rank.step_time_s?,
                rank.rank,
            ))
        })
        .collect();
    let most = (ranks.len() / 4).max(1);
    if ranks.len() <= most {
        return Vec::new();
    }
    let (least, (others, ..), _) = ranks.select_nth_unstable_by(most, |a, b| a.0.total_cmp(&b.0));
    let compared = least.iter().map(|(_, high, step_time_s, rank)| Straggler {
        rank: *rank,
        holds_up_s: *others - high,
        step_time_s: *step_time_s,
    });
    let mut found: Vec<_> = compared
        .filter(|one| one.holds_up_s > LEAST_SHARE * one.step_time_s)
        .collect();
    found.sort_unstable_by_key(|one| one.rank);
    found
}

impl Job {
    /// A node has sent a heartbeat. Once all have, their ranks are compared, and new stragglers are named on all nodes.
    pub(super) fn compare_waits(&mut self, context: &mut ApplyContext<'_>, from: &Origin) {
        let members = self.table.members().len();
        let (Some(node), Some(running)) = (self.table.rank_of(&from.incarnation), self.phase.running_mut())
        else {
            return;
        };
        let stragglers = running.stragglers_mut();
        stragglers.reported.insert(node);
        if stragglers.reported.len() < members {
            return;
        }
        stragglers.reported.clear();
        let found = find(self.table.members_there().flat_map(|(_, node)| node.ranks()));
        let news = stragglers.replace(&found);
        let Some(worst) = news.iter().max_by(|a, b| a.holds_up_s.total_cmp(&b.holds_up_s)) else {
            return;
        };
        let mut hosts = BTreeSet::new();
        for (_, node) in self.table.members_there() {
            let is_of = |one: &Straggler| node.ranks().iter().any(|rank| rank.rank == one.rank);
            if news.iter().any(is_of) {
                hosts.insert(format!("`{}`", node.hostname()));
            }
        }
        let ranks: Vec<u32> = news.iter().map(|one| one.rank).collect();
        let verb = if ranks.len() == 1 { "holds" } else { "hold" };
        let words = format!(
            "{} ({} {}) {verb} the other ranks up: they wait {:.0} ms longer in each step, {:.0} % of it",
            numbered("rank", &ranks),
            if hosts.len() == 1 { "node" } else { "nodes" },
            hosts.into_iter().take(8).collect::<Vec<_>>().join(", "),
            1000.0 * worst.holds_up_s,
            100.0 * worst.holds_up_s / worst.step_time_s
        );
        context.decided(format!("job `{}`: {words}", self.id));
        self.tell_others(context, "", &words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(rank: u32, low: f64, high: f64) -> RankProgress {
        RankProgress {
            rank,
            step_time_s: Some(1.0),
            waited_low_s: Some(low),
            waited_high_s: Some(high),
            ..RankProgress::default()
        }
    }

    fn found(ranks: &[RankProgress]) -> Vec<u32> {
        find(ranks.iter()).iter().map(|one| one.rank).collect()
    }

    #[test]
    fn the_rank_that_waits_least_is_the_straggler() {
        // Slowed by a fifth: 0.17 of a step.
        let ranks = [
            waits(0, 0.16, 0.18),
            waits(1, 0.0, 0.02),
            waits(2, 0.15, 0.2),
            waits(3, 0.14, 0.3),
        ];
        assert_eq!(found(&ranks), [1]);
        assert_eq!(found(&ranks[..2]), [1]);
        assert!(found(&ranks[1..2]).is_empty(), "alone");
    }

    #[test]
    fn times_that_overlap_name_no_rank() {
        assert!(found(&[waits(0, 0.0, 0.3), waits(1, 0.1, 0.4)]).is_empty());
        assert!(
            found(&[waits(0, 0.0, 0.0), waits(1, 0.09, 0.1)]).is_empty(),
            "too little"
        );
        // Two of four share a core: no rank is slower than all others.
        let pairs = [
            waits(0, 0.0, 0.01),
            waits(1, 0.01, 0.02),
            waits(2, 0.3, 0.3),
            waits(3, 0.3, 0.3),
        ];
        assert!(found(&pairs).is_empty());
        let silent = [
            waits(0, 0.0, 0.0),
            RankProgress {
                waited_low_s: None,
                ..waits(1, 0.5, 0.5)
            },
        ];
        assert!(found(&silent).is_empty());
    }

    #[test]
    fn a_slow_node_of_many_has_several_stragglers() {
        let seconds = |rank| if rank / 8 == 3 { 0.0 } else { 0.2 };
        let ranks: Vec<_> = (0..64)
            .map(|rank| waits(rank, seconds(rank), seconds(rank)))
            .collect();
        assert_eq!(found(&ranks), (24..32).collect::<Vec<_>>());
    }
}
