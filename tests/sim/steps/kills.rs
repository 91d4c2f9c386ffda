//! Many seeds, and rules without which some of them fail.

use super::*;

/// Seeds of one test; they take a few seconds.
const SEEDS: u64 = 3000;
/// Seeds among which one must show that a rule is needed.
const MAX_SEEDS: u64 = 50_000;

#[test]
fn deaths_change_no_step() {
    if let Some(seed) = number("DDP_SIM_SEED") {
        println!("seed {seed}: {:#?}", Run::new(seed, Rules::default()).run());
        return;
    }
    let (first, seeds) = (
        number("DDP_SIM_FIRST").unwrap_or(0),
        number("DDP_SIM_SEEDS").unwrap_or(SEEDS),
    );
    let mut all = Tally::default();
    for seed in first..first + seeds {
        let replay = Replay(seed, "deaths_change_no_step");
        all.add(Run::new(seed, Rules::default()).run().unwrap());
        std::mem::forget(replay);
    }
    println!("{all:#?}");
    for action in Action::ALL {
        assert!(
            all.kills.contains_key(&action),
            "no kill before {action:?}: {all:#?}"
        );
    }
    for event in [
        "kept",
        "received",
        "received from a buddy",
        "finished alone",
        "skipped alone",
        "reloaded",
        "cut off",
        "all dead",
    ] {
        assert!(all.events.contains_key(event), "not `{event}`: {all:#?}");
    }
}

/// Without the barrier a rank may update while another one lacks what it needs for it, or knows better than to update.
#[test]
fn without_the_barrier_shards_of_different_steps_mix() {
    let rules = Rules {
        barrier: false,
        ..Rules::default()
    };
    assert_fails(&rules, 0, "cannot finish step");
    assert_fails(&rules, 0, "mixed");
}

/// A rank may finish a step and die before its buddy has what the copy needs for it.
#[test]
fn copies_whose_gradients_are_not_behind_the_barrier_lack_a_step() {
    let rules = Rules {
        copies_before_barrier: false,
        ..Rules::default()
    };
    assert_fails(&rules, 0, "mixed");
}

/// A node that was cut off has finished a step that others did again, on other ranks.
#[test]
fn without_generations_states_of_different_worlds_mix() {
    let rules = Rules {
        generations: false,
        ties: false,
        ..Rules::default()
    };
    assert_fails(&rules, 0, "mixed");
}

/// A node that was cut off comes back with a step that others did again and saved.
#[test]
fn a_state_that_others_left_behind_does_not_stand_in_for_a_checkpoint() {
    let rules = Rules {
        ties: false,
        ..Rules::default()
    };
    // It is rare: the search begins near a run that shows it.
    assert_fails(&rules, 37_500, "is not in the checkpoint of its step");
}

/// Some run from the first seed on must fail so under these rules.
#[track_caller]
fn assert_fails(rules: &Rules, first: u64, how: &str) {
    let mut errors = (first..first + MAX_SEEDS).filter_map(|seed| Run::new(seed, rules.clone()).run().err());
    assert!(
        errors.any(|error| error.contains(how)),
        "no run fails with `{how}`"
    );
}
