//! A node that dies, as its peers' data connections and the daemon's own show.

use ddp_proto::rendezvous::LostRank;

use super::*;

/// Three nodes of two workers each, of which two are enough.
fn three_nodes() -> Scene {
    let mut s = Scene::new();
    s.join("a", 2, 3).join("b", 2, 3).join("c", 2, 3);
    for node in ["a", "b", "c"] {
        s.assignment(node);
    }
    s
}

impl Scene {
    /// Rank `witness` of a node loses its data connection to another rank.
    fn lost(&mut self, node: &str, witness: u32, rank: u32) -> &mut Self {
        let heartbeat = Heartbeat {
            lost_rank: Some(LostRank { rank, witness }),
            ..Heartbeat::default()
        };
        self.say(node, 1, Body::Heartbeat(heartbeat))
    }
}

#[test]
fn a_node_that_two_witnesses_saw_die_is_lost_at_once() {
    // Its stream may break before a peer reports, or after.
    let mut s = three_nodes();
    s.break_stream("c").lost("a", 0, 5);
    let words = s.words("a");
    insta::assert_snapshot!(words, @"generation 1 over: node `c` (node rank 2) was lost: its connection broke, and rank 0 lost its connection to rank 5 there (no restart spent)");
    let mut s = three_nodes();
    s.lost("a", 0, 5).break_stream("c");
    assert_eq!(s.words("a"), words);
    assert!(
        s.words("b")
            .starts_with("generation 1 over: node `c` (node rank 2) was lost")
    );
}

#[test]
fn one_witness_alone_is_not_believed() {
    // Its agent is there, and reports itself what happened to the worker.
    let mut s = three_nodes();
    s.lost("a", 0, 5);
    s.pass(SECOND / 10, &["a", "b", "c"]).exit("c", 1, killed(5, 11));
    assert!(s.words("a").contains("rank 5 (node `c`) died of SIGSEGV"));
    // Its link to the daemon is cut, and the data plane works.
    let mut s = three_nodes();
    s.break_stream("c").pass(SECOND, &["a", "b"]);
    assert_eq!(s.words("a"), "");
    // Another node is away than the one whose rank was lost.
    let mut s = three_nodes();
    s.break_stream("b").lost("a", 0, 5);
    assert_eq!(s.words("c"), "");
}

#[test]
fn a_worker_is_no_witness_against_its_own_node_nor_against_ranks_that_do_not_exist() {
    let mut s = three_nodes();
    s.lost("c", 4, 5).lost("a", 0, 77).break_stream("c");
    assert_eq!(s.words("a"), "");
}
