//! Worlds that follow a script.

use std::time::Duration;

use crate::world::{Outcome, World};

/// The daemon dies under a node that is cut off, and another node joins the new daemon; the first one comes back.
fn split(has_ledgers: bool) -> Outcome {
    let mut world = World::of_one_node(1, has_ledgers);
    let seconds = Duration::from_secs;
    world.start(0);
    world.advance(seconds(5));
    world.crash_daemon();
    world.cut_host(0, true, true, seconds(20));
    world.advance(seconds(10));
    // Y's workers write only when X is back.
    world.put_ms = 30_000;
    world.start(1);
    world.run()
}

/// The new daemon counts from 1 again. That is another assignment: no two living workers hold the same rank of one
/// assignment, and no value of one assignment is read in the other.
#[test]
fn a_daemon_that_lost_its_state_gives_no_place_twice() {
    let outcome = split(false);
    assert_eq!(outcome.breaches, [""; 0], "{outcome:#?}");
    assert_eq!(
        (outcome.generations, outcome.counted_twice),
        (2, 1),
        "{outcome:#?}"
    );
}

/// The new daemon knows of the node that is cut off and waits for it: the other one never starts.
#[test]
fn a_daemon_that_recalls_its_ledger_makes_no_second_assignment() {
    let outcome = split(true);
    assert_eq!(outcome.breaches, [""; 0], "{outcome:#?}");
    assert_eq!(outcome.generations, 1, "{outcome:#?}");
}
