//! Ranks for which the others wait.

use ddp_proto::rendezvous::RankProgress;

use super::*;

impl Scene {
    /// A node reports how long its two ranks waited in a step of a second: in a quarter of the steps less, and in a
    /// quarter more.
    fn waits(&mut self, node: &str, first_rank: u32, seconds: [[f64; 2]; 2]) -> &mut Self {
        let ranks = (first_rank..)
            .zip(seconds)
            .map(|(rank, [low, high])| RankProgress {
                rank,
                step_time_s: Some(1.0),
                waited_low_s: Some(low),
                waited_high_s: Some(high),
                // The daemon's own word.
                holds_up_s: Some(7.0),
                ..RankProgress::default()
            });
        let heartbeat = Heartbeat {
            step: Some(20),
            ranks: ranks.collect(),
            ..Heartbeat::default()
        };
        self.say(node, 1, Body::Heartbeat(heartbeat))
    }

    fn held_up(&self) -> Vec<Option<f64>> {
        let status = self.state.status(self.now, JOB).expect("a job");
        let ranks = status.nodes.iter().flat_map(|node| &node.ranks);
        ranks.map(|rank| rank.holds_up_s).collect()
    }
}

#[test]
fn a_rank_for_which_the_others_wait_is_named_once_when_all_nodes_have_reported() {
    let mut s = two_nodes();
    s.waits("a", 0, [[0.25, 0.3], [0.25, 0.4]]);
    assert_eq!(s.words("a"), "");
    s.waits("b", 2, [[0.0, 0.0], [0.3, 0.3]]);
    let line = "waiting: rank 2 (node `b`) holds the other ranks up: they wait 250 ms longer in each step, 25 % of it";
    assert_eq!(s.words("a"), line);
    assert_eq!(s.words("b"), line);
    assert_eq!(s.held_up(), [None, None, Some(0.25), None]);
    for _ in 0..3 {
        s.waits("a", 0, [[0.25, 0.3], [0.25, 0.4]]);
        s.waits("b", 2, [[0.0, 0.0], [0.3, 0.3]]);
    }
    assert_eq!(s.words("a"), "", "once");
    // It has recovered.
    s.waits("a", 0, [[0.0, 0.3], [0.0, 0.4]]);
    s.waits("b", 2, [[0.0, 0.2], [0.0, 0.3]]);
    assert_eq!(s.held_up(), [None; 4]);
}

#[test]
fn what_is_no_time_names_no_rank() {
    let mut s = two_nodes();
    s.waits("a", 0, [[f64::INFINITY, 0.3], [f64::NAN, 0.4]]);
    s.waits("b", 2, [[-1.0, 0.0], [0.0, 0.0]]);
    assert_eq!(s.words("a"), "");
    assert_eq!(s.held_up(), [None; 4]);
}
