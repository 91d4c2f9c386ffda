//! A daemon that was restarted, and agents whose workers run on.

mod account;

use ddp_proto::rendezvous::Place;

use super::*;

/// What the nodes of a job hold when their daemon dies.
struct Outage {
    scene: Scene,
    held: BTreeMap<String, (u64, Assignment)>,
    range: (u32, u32),
}

impl Outage {
    /// The nodes run their first generation; then another daemon comes.
    fn of(nodes: &[&str], range: (u32, u32)) -> Self {
        let mut scene = Scene::new();
        for node in nodes {
            scene.join(node, range.0, range.1);
        }
        // The last call, if there is one.
        scene.pass(11 * SECOND, nodes);
        Self::after(scene, nodes, range)
    }

    fn after(mut scene: Scene, nodes: &[&str], range: (u32, u32)) -> Self {
        let held = nodes
            .iter()
            .map(|node| ((*node).to_owned(), scene.assignment(node)))
            .collect();
        let mut outage = Self { scene, held, range };
        outage.crash();
        outage
    }

    /// Another daemon takes the place of the one that there is.
    fn crash(&mut self) -> &mut Self {
        self.scene.state = State::new(Config::default());
        self.scene.now = Duration::ZERO;
        self
    }

    fn place(&self, node: &str) -> Place {
        let (_, assignment) = &self.held[node];
        Place {
            assignment: Some(assignment.clone()),
            heartbeat: None,
            held_ms: 60_000,
            over: false,
        }
    }

    fn back(&mut self, node: &str) -> &mut Self {
        let place = self.place(node);
        self.back_with(node, place)
    }

    fn back_with(&mut self, node: &str, place: Place) -> &mut Self {
        let (generation, assignment) = &self.held[node];
        let (generation, join) = (
            *generation,
            Join {
                run_token: assignment.run_token.clone(),
                place: Some(Box::new(place)),
                ..join(node, self.range.0, self.range.1)
            },
        );
        self.scene.join_with(node, [10, 0, 0, 1], generation, join);
        self
    }

    fn received(&mut self, node: &str) -> String {
        self.scene.words(node)
    }

    fn phase(&self) -> (String, u64, u32) {
        let status = self.scene.state.status(self.scene.now, JOB).unwrap();
        (status.phase, status.generation, status.restart_count)
    }
}

#[test]
fn a_generation_whose_nodes_all_come_back_runs_on() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a");
    insta::assert_snapshot!(o.received("a"), @"waiting: the rendezvous daemon was restarted; 1 of 2 nodes reconnected; waiting for node rank 1 (up to 9 s)");
    o.scene.pass(2 * SECOND, &["a"]);
    let before = o.held["b"].clone();
    o.back("b");
    assert_eq!(o.scene.assignment("b"), before, "it keeps its place");
    assert_eq!(o.scene.assignment("a"), o.held["a"]);
    o.scene.pass(60 * SECOND, &["a", "b"]);
    assert_eq!((o.received("a"), o.received("b")), (String::new(), String::new()));
    assert_eq!(o.phase(), ("running".into(), 1, 0));
    o.scene.succeed("a", 1).succeed("b", 1);
    assert!(o.received("a").starts_with("job over 0"));
}

#[test]
fn a_generation_of_one_node_runs_on_at_once() {
    let mut o = Outage::of(&["a"], (1, 1));
    o.back("a");
    assert_eq!(o.scene.assignment("a"), o.held["a"]);
    assert_eq!(o.phase(), ("running".into(), 1, 0));
}

#[test]
fn what_happened_during_the_outage_counts() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a").scene.exit("a", 1, killed(0, 9));
    assert!(
        !o.received("a").contains("over"),
        "the other node has not come back"
    );
    o.back("b");
    let said =
        "generation 1 over: rank 0 (node `a`) died of SIGKILL (failure on `a`, restart 1/3, back-off 0 ms)";
    assert!(o.received("a").ends_with(said) && o.received("b").ends_with(said));

    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a").scene.succeed("a", 1);
    o.back("b").scene.succeed("b", 1);
    assert!(
        o.received("a")
            .ends_with("job over 0: all 2 nodes succeeded (failure on ``)")
    );
}

#[test]
fn a_generation_whose_node_does_not_come_back_is_over_and_costs_nothing() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a").scene.join("b'", 2, 2);
    insta::assert_snapshot!(o.received("b'"), @"waiting: the rendezvous daemon was restarted; 1 of 2 nodes reconnected; waiting for node rank 1 (up to 9 s)");
    o.scene.pass(8 * SECOND, &["a", "b'"]);
    assert!(!o.received("a").contains("over"));
    o.scene.pass(SECOND, &["a", "b'"]);
    insta::assert_snapshot!(o.received("a"), @"generation 1 over: the rendezvous daemon was restarted, and node rank 1 did not reconnect within 9.0 s: restarting the workers (no restart spent)");
    o.scene.rejoin("a", 1, 2, 2);
    let (generation, next) = o.scene.assignment("b'");
    assert_eq!(
        (generation, next.node_rank, next.restart_count, next.attempt),
        (2, 1, 0, 1)
    );
}

#[test]
fn a_failure_during_the_outage_costs_a_restart_even_if_a_node_is_gone_too() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a")
        .scene
        .exit("a", 1, killed(0, 9))
        .pass(10 * SECOND, &["a"]);
    assert!(
        o.received("a")
            .contains("died of SIGKILL (failure on `a`, restart 1/3")
    );
}

#[test]
fn a_node_that_was_started_anew_is_not_waited_for() {
    let mut scene = Scene::new();
    let asks = |node: &str, rank| Join {
        node_rank: Some(rank),
        ..join(node, 2, 2)
    };
    scene
        .join_with("a", [10, 0, 0, 1], 0, asks("a", 0))
        .join_with("b", [10, 0, 0, 2], 0, asks("b", 1));
    let mut o = Outage::after(scene, &["a", "b"], (2, 2));
    o.back("a");
    o.scene.join_with("b'", [10, 0, 0, 2], 0, asks("b'", 1));
    insta::assert_snapshot!(o.received("a"), @r"
    waiting: the rendezvous daemon was restarted; 1 of 2 nodes reconnected; waiting for node rank 1 (up to 9 s)
    generation 1 over: the rendezvous daemon was restarted, and node `b` was restarted: restarting the workers (no restart spent)
    ");
}

#[test]
fn a_spare_that_comes_first_waits_for_the_generation_that_it_knows_of() {
    let spare = |latest_generation| Join {
        latest_generation,
        ..join("c", 1, 1)
    };
    let mut o = Outage::of(&["a"], (1, 1));
    o.scene.join_with("c", [10, 0, 0, 3], 0, spare(1));
    insta::assert_snapshot!(o.received("c"), @"waiting: the rendezvous daemon was restarted; waiting for the nodes of the job to reconnect (up to 9 s)");
    o.back("a");
    assert_eq!(o.scene.assignment("a"), o.held["a"]);
    insta::assert_snapshot!(o.received("c"), @"waiting: job `job1` is running with 1 node; this node is on standby");

    // No node comes.
    o.crash();
    o.scene
        .join_with("c", [10, 0, 0, 3], 0, spare(1))
        .pass(10 * SECOND, &["c"]);
    assert_eq!(o.scene.assignment("c").0, 2, "no number is used twice");
}

#[test]
fn a_node_that_can_be_taken_in_waits_until_the_generation_has_come_back() {
    let mut o = Outage::of(&["a", "b"], (1, 3));
    o.back("a").scene.join("c", 1, 3);
    o.back("b");
    insta::assert_snapshot!(o.received("b"), @r"
    assignment 1: node rank 1 of 2, first rank 2, master 10.0.0.1:29500, restart 0/3: generation 1: 2 nodes joined (of 1 to 3) within `last_call_timeout`; node ranks by host name
    generation 1 over at a step boundary: `c` joined; continuing with 3 nodes (no restart spent)
    ");
}

#[test]
fn sizes_that_the_workers_can_go_on_with_are_known_before_anybody_is_taken_in() {
    let mut o = Outage::of(&["a", "b"], (1, 3));
    let place = |o: &Outage, node: &str| Place {
        heartbeat: Some(Heartbeat {
            step: Some(7),
            ranks_divide: Some(4),
            ..Heartbeat::default()
        }),
        ..o.place(node)
    };
    let (a, b) = (place(&o, "a"), place(&o, "b"));
    o.back_with("a", a).scene.join("c", 1, 3);
    o.back_with("b", b).scene.pass(30 * SECOND, &["a", "b", "c"]);
    assert_eq!(o.phase(), ("running".into(), 1, 0));
    assert!(o.received("c").contains("divides 4"));
}

#[test]
fn a_daemon_may_crash_again_before_all_are_back() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a").crash().back("b").crash().back("a").back("b");
    assert_eq!(o.phase(), ("running".into(), 1, 0));
    assert_eq!(o.scene.assignment("b"), o.held["b"]);
}

#[test]
fn a_connection_that_breaks_again_before_all_are_back_does_no_harm() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a").scene.break_stream("a").pass(SECOND, &[]);
    o.back("a").back("b");
    assert_eq!(o.phase(), ("running".into(), 1, 0));

    // Lost after it had come back: it has to come again.
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a").scene.break_stream("a").pass(6 * SECOND, &[]);
    o.back("b");
    assert_eq!(o.phase(), ("recovering".into(), 0, 0));
    o.back("a");
    assert_eq!(o.phase(), ("running".into(), 1, 0));
}

#[test]
fn nodes_that_are_away_longer_than_the_daemon_waits_still_come_together_again() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    // `a` is lost before the daemon gives the generation up: no node is there then.
    o.back("a").scene.break_stream("a").pass(15 * SECOND, &[]);
    o.back("a").back("b");
    for node in ["a", "b"] {
        let words = o.received(node);
        assert!(words.contains("generation 1 over"), "{words}");
        assert!(!words.contains("refused"), "{words}");
    }
    o.scene
        .rejoin("a", 1, 2, 2)
        .rejoin("b", 1, 2, 2)
        .pass(SECOND, &["a", "b"]);
    assert_eq!(o.scene.assignment("b").0, 2);
}

#[test]
fn a_generation_that_was_over_on_one_node_is_not_taken_up() {
    for over_first in [true, false] {
        let mut o = Outage::of(&["a", "b"], (2, 2));
        let mut over = Place {
            over: true,
            ..o.place("a")
        };
        over.assignment.as_mut().unwrap().restart_count = 1;
        if over_first {
            o.back_with("a", over).back("b");
        } else {
            o.back("b").back_with("a", over);
        }
        assert!(
            o.received("a").contains("generation 1 over") && o.received("b").contains("generation 1 over")
        );
        o.scene
            .rejoin("a", 1, 2, 2)
            .rejoin("b", 1, 2, 2)
            .pass(SECOND, &["a", "b"]);
        let (generation, next) = o.scene.assignment("a");
        assert_eq!(
            (generation, next.restart_count, next.attempt),
            (2, 1, 1),
            "{over_first}"
        );
    }
}

/// Of two nodes `b` was lost, and `a` went on without it: `b` still holds its place of generation 1.
fn outage_with_an_older_place() -> Outage {
    let mut scene = Scene::new();
    scene.join("a", 1, 2).join("b", 1, 2);
    let old = scene.assignment("b");
    scene.pass(10 * SECOND, &["a"]).rejoin("a", 1, 1, 2);
    scene.words("a");
    scene.pass(10 * SECOND, &["a"]);
    let mut o = Outage::after(scene, &["a"], (1, 2));
    o.held.insert("b".into(), old);
    o
}

#[test]
fn the_newest_generation_is_the_one_that_is_taken_up() {
    for newest_first in [true, false] {
        let mut o = outage_with_an_older_place();
        assert_eq!(o.held["a"].0, 2);
        if newest_first {
            o.back("a").back("b");
        } else {
            o.back("b").back("a");
        }
        assert_eq!(o.phase(), ("running".into(), 2, 0), "{newest_first}");
        assert!(o.received("b").contains("generation 1 over"));
    }
}

fn assignment_of(place: &mut Place) -> &mut Assignment {
    place.assignment.as_mut().unwrap()
}

#[test]
fn places_that_cannot_be_are_not_believed() {
    let lies: [fn(&mut Place); 12] = [
        |place| place.assignment = None,
        |place| assignment_of(place).node_count = 0,
        |place| assignment_of(place).node_count = u32::MAX,
        |place| assignment_of(place).own = None,
        |place| assignment_of(place).own.as_mut().unwrap().hostname = "x".into(),
        |place| assignment_of(place).own.as_mut().unwrap().first_rank = u32::MAX,
        |place| assignment_of(place).attempt = u32::MAX,
        |place| assignment_of(place).restart_count = 4,
        |place| assignment_of(place).run_token = "x".repeat(1000),
        |place| assignment_of(place).master_port = 0,
        |place| assignment_of(place).assignment_id.clear(),
        |place| assignment_of(place).data_key.clear(),
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let mut o = Outage::of(&["a"], (1, 1));
        let mut place = o.place("a");
        lie(&mut place);
        o.back_with("a", place);
        let words = o.received("a");
        assert!(words.starts_with("generation 1 over: "), "{number}: {words}");
        assert_eq!(o.phase(), ("gathering".into(), 0, 0), "{number}");
    }
}

#[test]
fn nodes_that_disagree_on_their_generation_start_again() {
    let lies: [fn(&mut Assignment); 3] = [
        |told| told.node_rank = 0,
        |told| told.own.as_mut().unwrap().first_rank = 3,
        |told| told.master_addr = "elsewhere".into(),
    ];
    for lie in lies {
        let mut o = Outage::of(&["a", "b"], (2, 2));
        let mut place = o.place("b");
        lie(place.assignment.as_mut().unwrap());
        o.back("a").back_with("b", place);
        assert!(o.received("a").contains("disagree") && o.received("b").contains("disagree"));
        o.scene
            .rejoin("a", 1, 2, 2)
            .rejoin("b", 1, 2, 2)
            .pass(SECOND, &["a", "b"]);
        assert_eq!(o.scene.assignment("b").0, 2);
    }
}

#[test]
fn agents_without_a_place_start_again_under_a_new_generation() {
    let mut s = Scene::new();
    s.join_with("a", [10, 0, 0, 1], 4, join("a", 2, 2));
    insta::assert_snapshot!(s.words("a"), @"generation 4 over: the rendezvous daemon was restarted: restarting the workers (no restart spent)");
    s.join_with("b", [10, 0, 0, 1], 4, join("b", 2, 2));
    s.rejoin("a", 4, 2, 2).rejoin("b", 4, 2, 2);
    assert_eq!(s.assignment("b").0, 5, "no generation is counted twice");
}

#[test]
fn a_daemon_that_ends_with_its_job_has_nobody_to_wait_for() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.scene.state = State::new(Config {
        only_job: Some(JOB.into()),
        ..Config::default()
    });
    o.scene.join("a'", 2, 2);
    o.back("b");
    insta::assert_snapshot!(o.received("b"), @"generation 1 over: the rendezvous daemon was restarted together with the node that hosts it: restarting the workers (no restart spent)");
    o.scene.rejoin("b", 1, 2, 2);
    assert_eq!(o.scene.assignment("b").0, 2);
}

#[test]
fn a_signal_to_a_node_that_only_waits_does_not_stop_the_generation() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a").scene.join("c", 2, 2).leave("c", Some(15), "");
    o.back("b");
    assert_eq!(o.phase(), ("running".into(), 1, 0));
    o.crash().back("a").scene.leave("a", Some(15), "");
    // A node that comes back later receives the same.
    for node in ["b", "a"] {
        o.back(node);
        assert!(o.received(node).contains("job over 143: node `a`"), "{node}");
    }
}

#[test]
fn the_store_is_open_before_all_are_back() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a");
    let read = o.scene.get(1, "k", 30_000);
    o.back("b").scene.caller = "b";
    o.scene.put(1, "k", b"v");
    assert_eq!(o.scene.answer(read), Some(Ok(b"v".to_vec())));
    o.crash().back("a").scene.caller = "a";
    let read = o.scene.get(1, "k", 30_000);
    o.scene.pass(10 * SECOND, &["a"]);
    assert!(
        o.scene
            .answer(read)
            .unwrap()
            .unwrap_err()
            .contains("generation superseded")
    );
}

#[test]
fn what_was_stored_again_for_an_older_generation_goes_with_it() {
    let mut o = outage_with_an_older_place();
    o.back("b").scene.caller = "b";
    o.scene.put(1, "k", b"old");
    let read = o.scene.get(1, "other", 30_000);
    o.back("a");
    let gone = o.scene.answer(read).expect("an answer at once").unwrap_err();
    assert_eq!(gone, "generation superseded: generation 1 continued elsewhere");
    o.scene.caller = "a";
    let written = o.scene.put(2, "k", b"new");
    assert_eq!(o.scene.answer(written), Some(Ok(vec![])), "the old value is gone");
    let read = o.scene.get(2, "k", 10);
    assert_eq!(o.scene.answer(read), Some(Ok(b"new".to_vec())));
}

#[test]
fn a_read_of_a_run_that_nobody_is_left_of_is_answered_when_the_next_one_begins() {
    let mut o = Outage::of(&["a", "b"], (2, 2));
    o.back("a");
    let get = o.scene.get(1, "k", 60_000);
    o.scene.leave("a", None, "").join("c", 1, 1);
    insta::assert_snapshot!(o.scene.answer(get).unwrap().unwrap_err(), @"generation superseded: a new run of the job has started");
}
