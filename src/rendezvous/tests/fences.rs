//! Two assignments of one generation: a daemon that lost its state has counted it again.

use ddp_proto::rendezvous::Place;

use super::*;

/// Where `x` and `y` run generation 1 of one job, each by the word of another daemon; `y`'s is the one that is left.
struct Split {
    scene: Scene,
    of_x: String,
    of_y: String,
    place: Place,
}

impl Split {
    fn new() -> Self {
        let mut scene = Scene::new();
        scene.join("x", 1, 1);
        let (_, assignment) = scene.assignment("x");
        let of_x = assignment.assignment_id.clone();
        let place = Place {
            assignment: Some(assignment),
            ..Place::default()
        };
        scene.state = State::new(Config::default());
        scene.now = Duration::ZERO;
        scene.join("y", 1, 1);
        let (generation, assignment) = scene.assignment("y");
        assert_eq!(generation, 1, "the daemon knows of no other");
        Self {
            scene,
            of_x,
            of_y: assignment.assignment_id,
            place,
        }
    }

    /// `x` reaches the daemon of `y`.
    fn reconnect(&mut self) -> String {
        let join = Join {
            run_token: self.place.assignment.as_ref().unwrap().run_token.clone(),
            place: Some(Box::new(self.place.clone())),
            ..join("x", 1, 1)
        };
        self.scene.join_with("x", [10, 0, 0, 2], 1, join);
        self.scene.words("x")
    }
}

#[test]
fn every_assignment_has_a_name_of_its_own() {
    let split = Split::new();
    assert_ne!(split.of_x, split.of_y);
    for id in [&split.of_x, &split.of_y] {
        assert!(
            id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()),
            "{id}"
        );
    }
}

#[test]
fn a_node_of_another_assignment_is_told_that_its_generation_is_over() {
    let mut split = Split::new();
    insta::assert_snapshot!(split.reconnect(), @"generation 1 over: this rendezvous daemon has assigned generation 1 anew (assignment `00000002`, not `00000001`): restarting the workers of node `x` (no restart spent)");
    let s = &mut split.scene;
    assert_eq!(s.words("y"), "");
    s.rejoin("x", 1, 1, 1);
    insta::assert_snapshot!(s.words("x"), @"waiting: job `job1` is running with 1 node; this node is on standby");
    // The next number is one that neither has.
    s.exit("y", 1, killed(0, 9)).rejoin("y", 1, 1, 1);
    assert_eq!(s.assignment("y").0, 2);
}

#[test]
fn what_is_reported_of_another_assignment_changes_nothing() {
    let mut split = Split::new();
    split.reconnect();
    let s = &mut split.scene;
    s.exit("x", 1, killed(0, 9)).succeed("x", 1).leaving("x", 1);
    let stopped = NodeStopped {
        exits: vec![killed(0, 9)],
        more_failures: 7,
        more_victims: 0,
    };
    s.say("x", 1, Body::NodeStopped(stopped));
    assert_eq!((s.words("x"), s.words("y")), (String::new(), String::new()));
    s.exit("y", 1, exited(0, 3));
    // One of this generation is listed, and it is not `x`'s.
    let status = s.state.status(s.now, JOB).unwrap();
    assert_eq!((status.generation, status.assignment_id), (1, split.of_y));
    s.rejoin("y", 1, 1, 1).words("y");
    s.exit(
        "y",
        2,
        WorkerExit {
            permanent: true,
            ..exited(0, 3)
        },
    );
    let over = s.received("y").into_iter().find_map(|received| match received {
        Received::Message(DaemonMessage {
            body: Some(Reply::JobOver(over)),
            ..
        }) => over.failures,
        _ => None,
    });
    let failures = over.unwrap();
    let hosts: Vec<_> = failures.failures.iter().map(|f| f.hostname.as_str()).collect();
    assert_eq!((hosts, failures.more_failures), (vec!["y", "y"], 0));
}

#[test]
fn a_member_that_speaks_of_another_assignment_is_answered_and_changes_nothing() {
    let mut split = Split::new();
    let s = &mut split.scene;
    s.assignment_ids.insert(("y".into(), 1), split.of_x.clone());
    s.succeed("y", 1);
    insta::assert_snapshot!(s.words("y"), @"generation 1 over: this rendezvous daemon has assigned generation 1 anew (assignment `00000002`, not `00000001`) (no restart spent)");
    assert_eq!(s.state.status(s.now, JOB).unwrap().phase, "running");
}

#[test]
fn the_store_of_an_assignment_is_closed_to_others() {
    let mut split = Split::new();
    let s = &mut split.scene;
    s.caller = "x";
    let stranger = s.put_as(&split.of_y, 1, "nccl/world/meeting", b"of x");
    assert!(s.answer(stranger).unwrap().is_err());
    s.caller = "y";
    let old = s.put_as(&split.of_x, 1, "nccl/world/meeting", b"of x");
    insta::assert_snapshot!(s.answer(old).unwrap().unwrap_err(), @"generation superseded: this rendezvous daemon has assigned generation 1 anew (assignment `00000002`, not `00000001`)");
    let own = s.put_as(&split.of_y, 1, "nccl/world/meeting", b"of y");
    assert_eq!(s.answer(own), Some(Ok(vec![])));
    let read = s.get(1, "nccl/world/meeting", 0);
    assert_eq!(s.answer(read), Some(Ok(b"of y".to_vec())));
    let nameless = s.put_as("", 1, "nccl/world/meeting", b"of y");
    assert!(
        s.answer(nameless).unwrap().is_err(),
        "no id is the id of no assignment"
    );
}

#[test]
fn of_two_assignments_that_a_new_daemon_hears_of_one_goes_on() {
    // Both nodes reach a third daemon.
    let mut split = Split::new();
    split.scene.state = State::new(Config::default());
    assert!(split.reconnect().starts_with("assignment 1: "));
    let s = &mut split.scene;
    s.join_with("y", [10, 0, 0, 3], 1, join("y", 1, 1));
    assert!(s.words("y").starts_with("generation 1 over: "));
    assert_eq!(s.words("x"), "");
    let status = s.state.status(s.now, JOB).unwrap();
    assert_eq!(
        (status.phase.as_str(), status.assignment_id),
        ("running", split.of_x)
    );
}

#[test]
fn a_node_that_was_assigned_elsewhere_has_lost_its_place() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2);
    s.words("a");
    // Another daemon counts further.
    s.assignment_ids.insert(("b".into(), 5), "elsewhere".into());
    s.join_with("b", [10, 0, 0, 1], 5, join("b", 2, 2));
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was assigned to generation 5 elsewhere (failure on ``, restart 1/3, back-off 0 ms)");
    assert!(s.words("b").starts_with("generation 5 over: "));
    s.rejoin("a", 1, 2, 2).rejoin("b", 5, 2, 2);
    assert_eq!(s.assignment("b").0, 6);
}
