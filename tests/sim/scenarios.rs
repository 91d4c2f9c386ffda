//! Worlds that follow a script.

use std::time::Duration;

use crate::world::World;

/// The daemon dies under a node that is cut off, and another node joins the new daemon, which counts from 1 again: no
/// two living workers hold the same rank of one assignment, and no value of one assignment is read in the other.
#[test]
fn a_daemon_that_lost_its_state_gives_no_place_twice() {
    let mut world = World::of_one_node(1, false);
    let seconds = Duration::from_secs;
    world.start(0);
    world.advance(seconds(5));
    world.crash_daemon();
    world.cut_host(0, true, true, seconds(20));
    world.advance(seconds(10));
    // Y's workers write only when X is back.
    world.put_ms = 30_000;
    world.start(1);
    let outcome = world.run();
    assert_eq!(outcome.breaches, [""; 0], "exit codes: {:?}", outcome.exit_codes);
}
