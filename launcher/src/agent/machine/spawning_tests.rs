//! The start of a generation's workers, and reports of it that come too late.

use super::*;

#[test]
fn workers_that_end_before_the_others_are_spawned_do_not_end_the_job() {
    let mut play = Play::begin(false);
    play.assign(1, 2).spawned(0);
    assert_eq!(play.exit(0, Ending::Code(0)).last, []);
    play.spawned(1);
    assert_eq!(play.exit(1, Ending::Code(0)).last, []);
    assert!(play.spawn_ended(None).does(&Effect::Sweep));
}

#[test]
fn a_worker_that_is_started_too_late_is_stopped_like_the_others() {
    let mut play = Play::begin(false);
    play.assign(1, 3).spawned(0);
    assert!(play.exit(0, Ending::Code(1)).does(&Effect::CancelSpawn));
    play.control_drained(0, false);
    assert!(
        play.spawned(1)
            .does(&Effect::SignalLate(LocalRank(1), libc::SIGTERM))
    );
    play.exit(1, KILLED);
    // Rank 2 was never started.
    assert!(play.spawn_ended(None).does(&Effect::Sweep));
}

#[test]
fn a_worker_that_is_started_while_others_are_asked_to_stop_is_signalled_unless_it_is_native() {
    for native in [false, true] {
        let mut play = Play::begin(native);
        play.assign(1, 2).spawned(0);
        play.machine.set_listening(true);
        assert!(
            play.on(Event::Signal(2))
                .does(&Effect::AskToStop("SIGINT".into()))
        );
        assert_eq!(play.spawned(1).does(&Effect::SignalUnasked(2)), !native);
    }
}

#[test]
fn a_program_that_cannot_be_started_is_no_failure_of_a_worker() {
    let error = SpawnError::NotFound {
        program: "x".into(),
        hint: "look".into(),
    };
    let mut play = Play::begin(false);
    play.assign(1, 2).spawn_ended(Some(error.clone()));
    assert!(play.does(&Effect::Sweep));
    play.swept();
    assert!(
        matches!(&play.last[0], Effect::Leave(Leave { signal: None, reason, exit_code: Some(127), .. }) if reason.contains("not found"))
    );
    assert_eq!(play.end(), Some(127));
}

/// Generation 2, when the start of a worker of generation 1 has outlasted all of the stop routine.
fn while_the_last_start_hangs() -> Play {
    let mut play = Play::begin(false);
    play.assign(1, 2).receive(1, over());
    while !play.does(&Effect::Sweep) {
        play.on(Event::Alarm);
    }
    let stuck = vec!["77 (`python3`, state D in nfs_wait)".to_owned()];
    assert!(play.on(Event::Swept { stuck }).joins());
    play.assign(2, 2);
    play
}

fn late_end() -> Event {
    Event::Spawn(SpawnEvent::Ended {
        generation: Generation(1),
        failure: None,
    })
}

#[test]
fn the_end_of_a_batch_that_was_given_up_does_not_end_the_next_generation_as_a_success() {
    let mut play = while_the_last_start_hangs();
    assert_eq!(play.on(late_end()).last, []);
    assert!(play.machine.is_running() && play.machine.is_spawning());
    play.spawn(2).exit(0, Ending::Code(0));
    assert!(play.exit(1, Ending::Code(0)).does(&Effect::Sweep));
}

#[test]
fn a_program_that_could_not_be_started_for_the_last_generation_does_not_end_the_next_one() {
    let mut play = while_the_last_start_hangs();
    let late = Event::Spawn(SpawnEvent::Ended {
        generation: Generation(1),
        failure: Some(SpawnError::NotFound {
            program: "x".into(),
            hint: "look".into(),
        }),
    });
    assert_eq!(play.on(late).last, []);
    assert!(play.machine.is_running());
}

#[test]
fn a_worker_of_a_generation_that_was_given_up_is_killed_and_takes_no_place_in_the_next_one() {
    let late = |pid| {
        Event::Spawn(SpawnEvent::Spawned {
            generation: Generation(1),
            local_rank: LocalRank(0),
            pid,
        })
    };
    let mut play = while_the_last_start_hangs();
    assert_eq!(play.on(late(77)).last, [Effect::KillStray(77)]);
    play.on(late_end());
    let mut waiting = Members::default();
    waiting.assign(2);
    assert_eq!(play.machine.members, waiting);

    // Nor does it live while the next generation gathers.
    let mut play = Play::begin(false);
    play.assign(1, 1).receive(1, over());
    while !play.does(&Effect::Sweep) {
        play.on(Event::Alarm);
    }
    assert_eq!(play.swept().on(late(78)).last, [Effect::KillStray(78)]);
}

#[test]
fn a_generation_without_workers_is_no_success() {
    let mut play = Play::begin(false);
    play.assign(1, 2).spawn_ended(None);
    play.swept();
    assert_eq!(play.leaves_with(), Some(70), "{:?}", play.last);
}

/// It leaves instead of failing: the others may go on without it, and no restart is spent.
#[test]
fn a_native_node_that_says_that_it_is_unfit_leaves_with_its_words() {
    for native in [true, false] {
        let mut play = Play::begin(native);
        play.assign(2, 1)
            .spawn(1)
            .exit(0, Ending::Code(71))
            .control_drained(0, false);
        play.on(Event::Described(WorkerExit {
            exit_code: Some(71),
            message: "no GPU".into(),
            ..WorkerExit::default()
        }));
        assert_eq!(play.last.is_empty(), native, "{:?}", play.last);
        play.swept();
        assert_eq!(play.leaves_with(), native.then_some(71), "{:?}", play.last);
    }
}
