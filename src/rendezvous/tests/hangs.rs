//! A job that hangs: the ranks of all nodes are compared before one is named.

use ddp_proto::rendezvous::{Collective, HungRank, HungWorkers};

use super::*;

impl Scene {
    /// The two workers of a node hang after step 4; each waits for others or not.
    fn hangs(&mut self, node: &str, first_rank: u32, waits: [bool; 2]) -> &mut Self {
        let ranks = (first_rank..).zip(waits);
        let ranks = ranks.map(|(rank, waits)| HungRank {
            rank,
            step: 4,
            lost: true,
            waits,
            stack: if waits { "all_reduce" } else { "log_metrics" }.into(),
            ..HungRank::default()
        });
        let hung = HungWorkers {
            ranks: ranks.collect(),
            period_ms: 4000,
        };
        self.say(node, 1, Body::HungWorkers(hung))
    }
}

/// Each launcher named the rank of its own node that had been silent for longest.
#[test]
fn the_cause_of_a_hang_is_named_once_all_nodes_have_reported() {
    let mut s = two_nodes();
    s.hangs("a", 0, [true, true]);
    assert_eq!(s.words("a"), "");
    s.hangs("b", 2, [true, false]);
    assert_eq!(s.words("a"), "hang of rank Some(3): ");
    assert_eq!(s.words("b"), "hang of rank Some(3): ");
}

#[test]
fn a_node_that_does_not_report_holds_up_no_verdict_for_ever() {
    let mut s = two_nodes();
    s.hangs("a", 0, [true, false]).hangs("a", 0, [true, false]);
    assert_eq!(s.words("a"), "");
    s.hangs("a", 0, [true, false]);
    assert_eq!(s.words("a"), "hang of rank Some(1): ");
    // A node whose workers have all ended is not waited for.
    let mut s = two_nodes();
    s.succeed("b", 1).hangs("a", 0, [true, false]);
    assert_eq!(s.words("a"), "hang of rank Some(1): ");
}

#[test]
fn a_hang_whose_cause_is_not_known_ends_the_generation_and_no_rank_is_named() {
    let mut s = two_nodes();
    s.hangs("a", 0, [true, false]).hangs("b", 2, [true, false]);
    insta::assert_snapshot!(s.words("b"), @r"
    hang of rank None: no rank makes progress, and neither their steps nor their stacks show which one is the cause
      ranks 0, 2, after step 4:
        all_reduce
      ranks 1, 3, after step 4:
        log_metrics
    generation 1 over: the job hung, and no rank could be named as the cause (failure on ``, restart 1/3, back-off 0 ms)
    ");
    assert!(s.words("a").contains("ranks 1, 3, after step 4"));
}

/// Where all wait by their stacks, PyTorch's records name the one that has not joined.
#[test]
fn a_hang_names_the_collective_and_the_rank_of_the_other_node_that_has_not_joined_it() {
    let mut s = two_nodes();
    for (node, number, done) in [("a", 12, false), ("b", 11, true)] {
        let first_rank = if done { 2 } else { 0 };
        let rank = HungRank {
            rank: first_rank,
            step: 4,
            lost: true,
            waits: true,
            stack: format!("data at train.py:{number}: total.item()"),
            collectives: vec![Collective {
                group: "default_pg:0".into(),
                number,
                operation: "all_reduce of Float[4]".into(),
                done,
            }],
        };
        let hung = HungWorkers {
            ranks: vec![rank],
            period_ms: 4000,
        };
        s.say(node, 1, Body::HungWorkers(hung));
    }
    insta::assert_snapshot!(s.words("b"), @r"
    hang of rank Some(2): rank 2 has not joined all_reduce of Float[4] (#12 of group `default_pg:0`), in which rank 0 waits; rank 2 is at train.py:11 in data
      rank 2: finished all_reduce of Float[4] (#11), after step 4, at train.py:11 in data
      rank 0: in all_reduce of Float[4] (#12), after step 4, at train.py:12 in data
    ");
}
