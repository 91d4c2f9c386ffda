//! A daemon that has a ledger: what it writes down, and what it makes of that when it starts.

use super::*;

/// The nodes of a job run their first generation; then the daemon starts anew, with its ledger.
struct Restart {
    scene: Scene,
    places: BTreeMap<String, (u64, Assignment)>,
}

impl Restart {
    fn of(nodes: &[&str]) -> Self {
        let mut scene = Scene::new();
        for node in nodes {
            scene.join(node, nodes.len() as u32, nodes.len() as u32);
        }
        let mut restart = Self {
            scene,
            places: BTreeMap::new(),
        };
        for node in nodes {
            let assigned = restart.scene.assignment(node);
            restart.places.insert((*node).to_owned(), assigned);
        }
        restart.restart();
        restart
    }

    fn restart(&mut self) {
        let records = self.scene.records.values().cloned().collect();
        self.scene.state = State::recall(Config::default(), records, Duration::ZERO);
        self.scene.now = Duration::ZERO;
    }

    fn back(&mut self, node: &str) -> &mut Self {
        self.back_as(node, None)
    }

    /// With `--node-rank`.
    fn back_as(&mut self, node: &str, node_rank: Option<u32>) -> &mut Self {
        let (generation, assignment) = self.places[node].clone();
        let nodes = assignment.node_count;
        let run_token = assignment.run_token.clone();
        let place = ddp_proto::rendezvous::Place {
            held_ms: 60_000,
            assignment: Some(assignment),
            ..Default::default()
        };
        let join = Join {
            run_token,
            node_rank,
            place: Some(Box::new(place)),
            ..join(node, nodes, nodes)
        };
        self.scene.join_with(node, [10, 0, 0, 1], generation, join);
        self
    }

    fn phase(&self) -> (String, u64) {
        let status = self.scene.state.status(self.scene.now, JOB).unwrap();
        (status.phase, status.generation)
    }
}

#[test]
fn an_assignment_is_written_down_before_it_is_sent_and_so_is_its_end() {
    let mut s = Scene::new();
    s.join("a", 1, 1);
    let first = s.records[JOB].clone();
    let (generation, assignment) = s.assignment("a");
    assert_eq!((first.generation, &first.stage), (generation, &Stage::Running));
    assert_eq!(first.assignment_id, assignment.assignment_id);
    let members: Vec<_> = first.members.iter().map(|m| m.incarnation.as_str()).collect();
    assert_eq!(members, ["a"]);
    s.exit("a", 1, killed(0, 9));
    let ended = s.records[JOB].clone();
    assert_eq!((ended.generation, &ended.stage), (1, &Stage::Ended));
    assert_ne!(ended.account, first.account, "a restart is spent");
    s.rejoin("a", 1, 1, 1).succeed("a", 2);
    assert!(s.records[JOB].is_final(), "{:?}", s.records[JOB]);
    assert_eq!(s.records[JOB].generation, 2);
}

#[test]
fn a_daemon_with_a_ledger_waits_for_the_nodes_that_it_knows_of() {
    let mut r = Restart::of(&["x"]);
    // A node that no daemon knows does not take the place of one that is cut off.
    r.scene.join("y", 1, 1);
    insta::assert_snapshot!(r.scene.words("y"), @"waiting: the rendezvous daemon was restarted; 0 of 1 node reconnected; waiting for node rank 0 (up to 60 s)");
    r.scene.pass(59 * SECOND, &["y"]);
    assert_eq!(r.scene.words("y"), "");
    r.back("x");
    assert_eq!(r.scene.assignment("x"), r.places["x"]);
    assert_eq!(r.phase(), ("running".into(), 1));
    insta::assert_snapshot!(r.scene.words("y"), @"waiting: job `job1` is running with 1 node; this node is on standby");
}

#[test]
fn no_number_of_the_ledger_is_used_again() {
    let mut r = Restart::of(&["x"]);
    r.scene.join("y", 1, 1).pass(599 * SECOND, &["y"]);
    assert_eq!(
        r.phase(),
        ("gathering".into(), 0),
        "`x` may train without a daemon"
    );
    r.scene.pass(2 * SECOND, &["y"]);
    assert_eq!(r.scene.assignment("y").0, 2);
    // It comes too late.
    r.back("x");
    assert!(r.scene.words("x").starts_with("generation 1 over: "));
    assert_eq!(r.phase(), ("running".into(), 2));
}

#[test]
fn nodes_of_another_assignment_do_not_concern_the_one_in_the_ledger() {
    let mut r = Restart::of(&["a", "b"]);
    let stranger = r.places["a"].1.clone();
    let stranger = Assignment {
        assignment_id: "f".repeat(32),
        ..stranger
    };
    r.places.insert("c".into(), (1, stranger));
    r.scene.assignment_ids.insert(("c".into(), 1), "f".repeat(32));
    r.back("c");
    insta::assert_snapshot!(r.scene.words("c"), @"generation 1 over: this rendezvous daemon has assigned generation 1 anew (assignment `00000002`, not `ffffffff`): restarting the workers of node `c` (no restart spent)");
    r.back("b").back("a");
    assert_eq!(r.phase(), ("running".into(), 1));
}

#[test]
fn once_a_node_has_failed_the_others_have_a_lease_to_come_back() {
    let mut r = Restart::of(&["a", "b"]);
    r.scene.now = 10 * SECOND;
    r.back("a")
        .scene
        .exit("a", 1, killed(0, 9))
        .pass(8 * SECOND, &["a"]);
    assert_eq!(r.phase().0, "recovering");
    r.scene.pass(SECOND, &["a"]);
    assert!(r.scene.words("a").contains("died of SIGKILL"));

    let mut r = Restart::of(&["a", "b", "c"]);
    r.back("a").back("b");
    r.scene.break_stream("b").pass(5 * SECOND, &["a"]).words("a");
    r.scene.pass(9 * SECOND, &["a"]);
    assert!(r.scene.words("a").contains("did not reconnect"));
}

#[test]
fn a_node_that_comes_back_too_late_is_still_known_by_name() {
    let mut r = Restart::of(&["a", "b"]);
    r.back("a").scene.pass(60 * SECOND, &["a"]);
    insta::assert_snapshot!(r.scene.words("a"), @r"
    waiting: the rendezvous daemon was restarted; 1 of 2 nodes reconnected; waiting for node rank 1 (up to 60 s)
    generation 1 over: the rendezvous daemon was restarted, and node rank 1 did not reconnect within 60.0 s: restarting the workers (no restart spent)
    ");
    r.back("b").scene.rejoin("a", 1, 2, 2).rejoin("b", 1, 2, 2);
    let (generation, assignment) = r.scene.assignment("b");
    assert_eq!((generation, assignment.node_rank), (2, 1));
    assert!(assignment.reason.contains("kept"), "{}", assignment.reason);
}

#[test]
fn a_generation_that_had_ended_is_not_waited_for() {
    let mut s = Scene::new();
    s.join("a", 1, 1).exit("a", 1, killed(0, 9));
    let records = s.records.values().cloned().collect();
    let mut r = Scene::new();
    r.state = State::recall(Config::default(), records, Duration::ZERO);
    r.join("b", 1, 1);
    assert_eq!(r.assignment("b").0, 2, "at once");
}

#[test]
fn a_verdict_outlives_the_daemon() {
    let mut r = Restart::of(&["x"]);
    r.back("x").scene.succeed("x", 1);
    r.restart();
    r.back("x");
    insta::assert_snapshot!(r.scene.words("x"), @r"
    job over 0: node `x` succeeded (failure on ``)
    closed
    ");
    // A later run of the job has numbers of its own.
    r.scene.join("z", 1, 1);
    assert_eq!(r.scene.assignment("z").0, 2);
}

#[test]
fn a_verdict_before_the_first_generation_outlives_the_daemon_too() {
    let mut s = Scene::new();
    s.join("a", 3, 3).join("b", 3, 3).break_stream("b");
    assert!(s.records.is_empty(), "nothing was assigned");
    s.leave("a", Some(15), "");
    let records = s.records.values().cloned().collect();
    s.state = State::recall(Config::default(), records, Duration::ZERO);
    s.join("b", 3, 3);
    insta::assert_snapshot!(s.words("b"), @r"
    job over 143: node `a` was stopped by SIGTERM (failure on ``)
    closed
    ");
    // Another run has nothing to do with it.
    s.join("c", 1, 1);
    assert_eq!(s.assignment("c").0, 1);
}

#[test]
fn a_job_whose_nodes_are_all_gone_ends_silently() {
    let mut r = Restart::of(&["x"]);
    r.scene.pass(601 * SECOND, &[]);
    assert!(r.scene.state.status(r.scene.now, JOB).is_none());
    r.scene.join("z", 1, 1);
    assert_eq!(r.scene.assignment("z").0, 2);
}

#[test]
fn the_store_of_a_generation_in_the_ledger_is_open_to_it_alone() {
    let mut r = Restart::of(&["x"]);
    let own = r.places["x"].1.assignment_id.clone();
    r.scene.caller = "x";
    let put = r.scene.put_as(&own, 1, "k", b"1");
    assert_eq!(r.scene.answer(put), Some(Ok(vec![])));
    let other = r.scene.put_as("another", 1, "k", b"2");
    assert!(
        r.scene
            .answer(other)
            .unwrap()
            .unwrap_err()
            .contains("assigned generation 1 anew")
    );
}

#[test]
fn a_newcomer_gives_way_to_a_node_that_comes_back() {
    // Its replacement asks for its rank.
    let mut r = Restart::of(&["a", "b"]);
    let asks = |node: &str, node_rank| Join {
        node_rank,
        ..join(node, 2, 2)
    };
    r.scene.join_with("c", [10, 0, 0, 3], 0, asks("c", Some(1)));
    r.back_as("a", Some(0)).scene.words("c");
    r.back_as("b", Some(1));
    insta::assert_snapshot!(r.scene.words("c"), @r"
    refused Invalid: node rank 1 of job `job1` is requested by node `c`, but node `b` already has it
      hint: give each node a different `--node-rank`, or omit the flag on all nodes
    closed
    ");
    assert_eq!(r.phase(), ("running".into(), 1));
    assert_eq!(r.scene.assignment("b"), r.places["b"]);

    // A launch with other settings comes first.
    let mut r = Restart::of(&["a", "b"]);
    r.scene.join("c", 3, 3).words("c");
    r.back("a").back("b");
    let words = r.scene.words("c");
    assert!(
        words.starts_with("refused Disagree: ") && words.ends_with("closed"),
        "{words}"
    );
    assert_eq!(r.phase(), ("running".into(), 1));
}

#[test]
fn an_assignment_that_was_written_down_and_never_sent_is_not_waited_for() {
    // The first one.
    let mut r = Restart::of(&["a", "b"]);
    r.scene.assignment_ids.clear();
    r.scene.join("a", 2, 2).join("b", 2, 2);
    assert_eq!((r.scene.assignment("a").0, r.scene.assignment("b").0), (2, 2));

    // A later one.
    let mut r = Restart::of(&["a", "b"]);
    r.back("a").back("b").scene.exit("a", 1, killed(0, 9));
    r.scene.rejoin("a", 1, 2, 2).rejoin("b", 1, 2, 2);
    assert_eq!(r.scene.records[JOB].generation, 2);
    r.restart();
    r.back("a").back("b");
    r.scene.rejoin("a", 1, 2, 2).rejoin("b", 1, 2, 2);
    let (generation, next) = r.scene.assignment("b");
    assert_eq!((generation, next.restart_count), (3, 1));

    // One node has received it.
    let mut r = Restart::of(&["a", "b"]);
    r.scene.assignment_ids.remove(&("b".to_owned(), 1));
    r.back("a").scene.words("a");
    r.scene.join("b", 2, 2);
    insta::assert_snapshot!(r.scene.words("a"), @"generation 1 over: the rendezvous daemon was restarted, and node `b` never received it: restarting the workers (no restart spent)");
    r.scene.rejoin("a", 1, 2, 2);
    assert_eq!(r.scene.assignment("b").0, 2);
}

#[test]
fn a_job_of_the_ledger_that_ends_before_its_next_assignment_has_a_verdict() {
    let mut r = Restart::of(&["a", "b"]);
    r.back("a").scene.leave("a", Some(15), "");
    assert!(r.scene.records[JOB].is_final(), "{:?}", r.scene.records[JOB]);
    r.restart();
    for node in ["b", "a"] {
        r.back(node);
        assert!(r.scene.words(node).starts_with("job over 143: "), "{node}");
    }
}

#[test]
fn a_job_whose_nodes_never_come_back_is_closed_in_the_ledger_too() {
    // Its generation had ended.
    let mut r = Restart::of(&["x"]);
    r.back("x").scene.exit("x", 1, killed(0, 9));
    assert_eq!(r.scene.records[JOB].stage, Stage::Ended);
    r.restart();
    assert!(r.scene.state.status(r.scene.now, JOB).is_some());
    r.scene.pass(61 * SECOND, &[]);
    assert!(r.scene.state.status(r.scene.now, JOB).is_none());
    assert_eq!(r.scene.records[JOB].stage, Stage::Abandoned);

    // It ran.
    let mut r = Restart::of(&["x"]);
    r.scene.pass(601 * SECOND, &[]);
    assert_eq!(r.scene.records[JOB].stage, Stage::Abandoned);
    r.restart();
    r.scene.join("z", 1, 1);
    assert_eq!(r.scene.assignment("z").0, 2, "at once");

    // Others have come, not enough to start.
    let mut r = Restart::of(&["a", "b"]);
    r.scene.join("z", 2, 2).pass(61 * SECOND, &["z"]);
    r.restart();
    r.scene.join("y", 2, 2).join("z", 2, 2);
    assert_eq!(r.scene.assignment("z").0, 2, "at once");
}

#[test]
fn a_node_of_an_ended_generation_in_the_ledger_has_its_own_time_for_the_others() {
    let mut r = Restart::of(&["a", "b"]);
    r.back("a").back("b").scene.exit("a", 1, killed(0, 9));
    r.restart();
    r.scene.now = 50 * SECOND;
    r.back("a").scene.rejoin("a", 1, 2, 2).pass(100 * SECOND, &["a"]);
    r.back("b").scene.rejoin("b", 1, 2, 2);
    let (generation, next) = r.scene.assignment("a");
    assert_eq!((generation, next.restart_count), (2, 1));
}
