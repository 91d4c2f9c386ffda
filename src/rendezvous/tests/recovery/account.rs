//! Restarts that were spent, and refunds, over the end of a daemon.

use super::*;

#[test]
fn what_was_spent_before_the_outage_is_not_given_back() {
    let mut scene = Scene::new();
    scene
        .join("a", 1, 1)
        .exit("a", 1, killed(0, 9))
        .rejoin("a", 1, 1, 1);
    scene.words("a");
    scene
        .exit("a", 2, killed(0, 9))
        .rejoin("a", 2, 1, 1)
        .pass(SECOND, &["a"]);
    let mut o = Outage::after(scene, &["a"], (1, 1));
    assert_eq!((o.held["a"].0, o.held["a"].1.attempt), (3, 2));
    o.back("a");
    assert_eq!(o.phase(), ("running".into(), 3, 2));
    o.scene.words("a");
    for generation in 3..=4 {
        o.scene
            .exit("a", generation, killed(0, 9))
            .rejoin("a", generation, 1, 1);
        o.scene.pass(SECOND, &["a"]);
    }
    assert!(o.received("a").contains("no restarts left (3/3 used)"));
}

#[test]
fn a_refund_that_one_node_has_received_is_not_lost() {
    for receives_first in [true, false] {
        let mut scene = Scene::new();
        scene.join("a", 2, 2).join("b", 2, 2);
        for generation in 1..=2 {
            scene
                .exit("a", generation, killed(0, 9))
                .rejoin("a", generation, 2, 2)
                .rejoin("b", generation, 2, 2);
            let _ = (scene.received("a"), scene.received("b"));
            scene.pass(SECOND, &["a", "b"]);
        }
        let held = [("a", scene.assignment("a")), ("b", scene.assignment("b"))];
        assert_eq!(held[0].1.1.restart_count, 2);
        // Progress, then a failure: one restart is spent. `b` is out of reach.
        scene
            .heartbeat("a", 3)
            .break_stream("b")
            .exit("a", 3, killed(0, 9));
        let received = scene.received("a");
        let [
            Received::Message(DaemonMessage {
                body: Some(Reply::GenerationOver(cost)),
                ..
            }),
        ] = received.as_slice()
        else {
            panic!("{received:?}")
        };
        assert_eq!((cost.restart_count, cost.best_step), (1, Some(7)));

        let mut o = Outage {
            scene,
            held: held.map(|(node, held)| (node.to_owned(), held)).into(),
            range: (2, 2),
        };
        o.crash();
        let mut over = o.place("a");
        over.over = true;
        let told = over.assignment.as_mut().unwrap();
        (told.restart_count, told.best_step) = (cost.restart_count, cost.best_step);
        if receives_first {
            o.back_with("a", over).back("b");
        } else {
            o.back("b").back_with("a", over);
        }
        o.scene
            .rejoin("a", 3, 2, 2)
            .rejoin("b", 3, 2, 2)
            .pass(SECOND, &["a", "b"]);
        let (generation, next) = o.scene.assignment("b");
        let expected = (4, 1, Some(7));
        assert_eq!(
            (generation, next.restart_count, next.best_step),
            expected,
            "{receives_first}"
        );
    }
}

/// A restart that another daemon has spent, of which a node tells after this one has given up the same generation, or
/// has assigned it by another name.
#[test]
fn a_restart_that_another_daemon_has_spent_counts_when_this_one_has_state_of_its_own() {
    for is_another in [false, true] {
        let mut scene = Scene::new();
        scene.join("a", 2, 2).join("b", 2, 2);
        let mut o = Outage::after(scene, &["a", "b"], (2, 2));
        o.back("a");
        o.scene.pass(10 * SECOND, &["a"]);
        assert!(o.received("a").contains("no restart spent"));
        let mut over = o.place("b");
        over.over = true;
        let told = over.assignment.as_mut().unwrap();
        // The step of the heartbeats: there was no progress since.
        (told.restart_count, told.best_step) = (1, Some(7));
        if is_another {
            told.assignment_id = "elsewhere".into();
            let ids = &mut o.scene.assignment_ids;
            ids.insert(("b".into(), 1), "elsewhere".into());
        }
        o.back_with("b", over);
        o.scene
            .rejoin("a", 1, 2, 2)
            .rejoin("b", 1, 2, 2)
            .pass(SECOND, &["a", "b"]);
        let (generation, next) = o.scene.assignment("b");
        assert_eq!((generation, next.restart_count), (2, 1), "{is_another}");
    }
}

/// A daemon that did not know of it went on with `a`, in generation 2.
#[test]
fn what_only_an_older_generation_knows_was_spent_counts_too() {
    for newest_first in [true, false] {
        let mut o = outage_with_an_older_place();
        let mut older = Place {
            over: true,
            ..o.place("b")
        };
        older.assignment.as_mut().unwrap().restart_count = 2;
        if newest_first {
            o.back("a").back_with("b", older);
        } else {
            o.back_with("b", older).back("a");
        }
        assert_eq!(o.phase(), ("running".into(), 2, 2), "{newest_first}");
    }
}
