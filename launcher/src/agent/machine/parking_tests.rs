//! Workers that outlive a generation: spared while others are stopped, told of the next assignment, killed with the launch.

use super::*;

impl Play {
    fn parked(&mut self, local_rank: u32) -> &mut Self {
        self.on(Event::Parked(LocalRank(local_rank)))
    }

    fn is_parked(&self, local_rank: u32) -> bool {
        self.machine.is_parked(LocalRank(local_rank))
    }

    fn is_spared(&self, local_rank: u32) -> bool {
        self.is_parked(local_rank)
            && !self
                .last
                .iter()
                .any(|effect| matches!(effect, Effect::SignalAll(_)))
    }
}

/// Rank 0 was killed, and rank 1 is about to park.
fn failing() -> Play {
    let mut play = Play::begin(true);
    play.assign(1, 2).spawn(2);
    play.machine.set_listening(true);
    play.exit(0, KILLED);
    assert!(play.does(&Effect::Arm(LAST_WORDS)));
    play
}

/// The same node, when it waits for its next assignment.
fn joining() -> Play {
    let mut play = failing();
    assert_eq!(play.parked(1).last, [Effect::Disarm, Effect::Sweep]);
    assert_eq!(play.swept().last, [Effect::Arm(VERDICT_WAIT)]);
    assert!(play.receive(1, over()).joins());
    assert!(play.is_spared(1) && !play.machine.has_workers());
    play
}

#[test]
fn a_parked_worker_runs_again_when_it_is_told_of_the_next_generation() {
    let mut play = joining();
    play.assign(2, 2);
    assert!(matches!(&play.last[..], [Effect::Disarm, Effect::Spawn(_)]) && play.is_parked(1));
    play.spawn(2);
    assert!(!play.is_parked(1));
    // It is a worker like others, and may park again.
    play.exit(0, KILLED);
    assert!(play.parked(1).does(&Effect::Sweep) && play.swept().receive(2, over()).joins());
    play.assign(3, 2).spawn(2).exit(1, Ending::Code(0));
    assert!(play.exit(0, Ending::Code(0)).does(&Effect::Sweep));
}

#[test]
fn a_kept_worker_that_has_not_greeted_again_is_not_killed_when_another_one_dies() {
    let mut play = joining();
    play.assign(2, 2).spawn(2);
    play.machine.set_listening(false);
    assert!(
        play.exit(0, KILLED).does(&Effect::Arm(LAST_WORDS)) && !play.does(&Effect::SignalAll(libc::SIGKILL))
    );
    assert!(play.parked(1).does(&Effect::Sweep) && play.is_spared(1));
    // Nothing is to be waited for where all are new.
    play.swept().receive(2, over()).exit(1, KILLED);
    play.assign(3, 2).spawn(2);
    assert!(play.exit(0, KILLED).does(&Effect::SignalAll(libc::SIGKILL)));
}

#[test]
fn only_workers_that_are_not_parked_are_killed_for_a_generation_that_is_over() {
    let mut play = Play::begin(true);
    play.assign(1, 3).spawn(3);
    play.machine.set_listening(true);
    play.receive(1, over()).parked(0);
    assert_eq!(play.last, []);
    assert!(play.on(Event::Alarm).does(&Effect::SignalAll(libc::SIGKILL)));
    assert!(play.is_parked(0));
    // It was too late: it dies of the signal.
    assert_eq!(play.parked(1).last, []);
    assert!(!play.is_parked(1));
    play.exit(1, KILLED);
    assert!(play.exit(2, KILLED).does(&Effect::Sweep));
    assert!(play.swept().joins() && play.is_parked(0));
}

#[test]
fn a_worker_that_dies_while_it_is_parked_is_replaced() {
    let mut play = joining();
    assert_eq!(play.exit(1, KILLED).last, []);
    play.assign(2, 2);
    assert!(!play.is_parked(1));
    // After the assignment it is a failure of the new generation, though it was not told of it.
    let mut play = joining();
    play.assign(2, 2).exit(1, KILLED);
    assert!(play.notified().is_some() && play.does(&Effect::CancelSpawn));
    assert!(play.spawn_ended(None).does(&Effect::Sweep));
}

#[test]
fn a_worker_stays_parked_if_the_next_generation_ends_before_it_is_told_of_it() {
    let mut play = joining();
    play.assign(2, 2).receive(2, over());
    assert!(play.does(&Effect::CancelSpawn));
    assert!(play.spawn_ended(None).does(&Effect::Sweep) && play.is_spared(1));
    assert!(play.swept().joins() && play.is_spared(1));
}

#[test]
fn no_parked_worker_outlives_the_launch() {
    let gone = Event::DaemonGone {
        exit_code: exit::DAEMON_UNREACHABLE,
        error: "gone".into(),
    };
    let told = |word| {
        Event::Daemon(DaemonMessage {
            generation: 1,
            body: Some(word),
        })
    };
    let mut ends = Vec::new();
    for event in [Event::Signal(libc::SIGTERM), Event::Alarm, gone, told(verdict())] {
        let mut play = joining();
        play.on(event);
        ends.push(play);
    }
    // The verdict comes while what is left of the others is swept, or before the worker parks.
    let mut play = failing();
    play.parked(1).receive(1, verdict()).swept();
    ends.push(play);
    let mut play = failing();
    play.receive(1, verdict()).parked(1);
    ends.push(play);
    // The other worker cannot be started.
    let mut play = joining();
    play.assign(2, 2);
    play.on(Event::CannotBegin(ExitReason::internal("no pipes".into())));
    play.swept();
    ends.push(play);
    for (number, mut play) in ends.into_iter().enumerate() {
        assert_eq!(play.last[0], Effect::SignalAll(libc::SIGKILL), "end {number}");
        assert!(!play.is_parked(1), "end {number}");
        assert!(play.exit(1, KILLED).does(&Effect::Sweep), "end {number}");
        play.swept();
        let is_end = |effect: &Effect| matches!(effect, Effect::Leave(_) | Effect::Finish(_));
        let leaves = play.last.iter().any(is_end);
        assert!(leaves, "end {number}: {:?}", play.last);
    }
}
