use ddp_proto::rendezvous::refused::Code;
use ddp_proto::rendezvous::{JobOver, Leave, NodeAssignment, Refused, Waiting};

#[path = "parking_tests.rs"]
mod parking;
#[path = "spawning_tests.rs"]
mod spawning;

use super::stop::LAST_WORDS;
use super::*;

const KILLED: Ending = Ending::Signal {
    signal: 9,
    core_dumped: false,
};

/// A machine after its first join, with what it does next.
struct Play {
    machine: Machine,
    last: Vec<Effect>,
}

impl Play {
    fn begin(native: bool) -> Self {
        let (machine, last) = Machine::start(Rules {
            hostname: "a".into(),
            native,
            resume_hint: Some("`--set run.out_dir=out`".into()),
            join_timeout: Duration::from_mins(1),
            shutdown_timeout: Duration::from_secs(30),
            workers: 2,
            elastic: false,
        });
        Self { machine, last }
    }

    /// With `workers` running workers, of which rank 4 is the first.
    fn running(native: bool, workers: u32) -> Self {
        let mut play = Self::begin(native);
        play.assign(1, workers);
        play.spawn(workers);
        play
    }

    fn on(&mut self, event: Event) -> &mut Self {
        self.last = self.machine.on(event);
        self
    }

    fn receive(&mut self, generation: u64, word: Word) -> &mut Self {
        self.on(Event::Daemon(DaemonMessage {
            generation,
            body: Some(word),
        }))
    }

    fn assign(&mut self, generation: u64, workers: u32) -> &mut Self {
        self.assign_as("a1", generation, workers)
    }

    fn assign_as(&mut self, assignment_id: &str, generation: u64, workers: u32) -> &mut Self {
        self.machine.rules.workers = workers;
        let own = NodeAssignment {
            first_rank: 4,
            workers,
            ..NodeAssignment::default()
        };
        let assignment = Assignment {
            node_rank: 1,
            own: Some(own),
            node_count: 2,
            world_size: 4 + workers,
            assignment_id: assignment_id.into(),
            ..Assignment::default()
        };
        self.receive(generation, Word::Assignment(assignment))
    }

    fn spawn(&mut self, workers: u32) -> &mut Self {
        for local_rank in 0..workers {
            self.spawned(local_rank);
        }
        self.spawn_ended(None)
    }

    fn spawned(&mut self, local_rank: u32) -> &mut Self {
        self.on(Event::Spawn(SpawnEvent::Spawned {
            generation: self.machine.generation(),
            local_rank: LocalRank(local_rank),
            pid: 100 + local_rank as i32,
        }))
    }

    fn spawn_ended(&mut self, failure: Option<SpawnError>) -> &mut Self {
        let generation = self.machine.generation();
        self.on(Event::Spawn(SpawnEvent::Ended { generation, failure }))
    }

    fn exit(&mut self, local_rank: u32, ending: Ending) -> &mut Self {
        let local_rank = LocalRank(local_rank);
        self.on(Event::Exited { local_rank, ending })
    }

    fn control_drained(&mut self, local_rank: u32, consequence: bool) -> &mut Self {
        let local_rank = LocalRank(local_rank);
        self.on(Event::ControlDrained {
            generation: self.machine.generation(),
            local_rank,
            consequence,
        })
    }

    fn notified(&self) -> Option<&str> {
        self.last.iter().find_map(|effect| match effect {
            Effect::Notify(cause) => Some(cause.as_str()),
            _ => None,
        })
    }

    fn swept(&mut self) -> &mut Self {
        self.on(Event::Swept { stuck: vec![] })
    }

    fn does(&self, effect: &Effect) -> bool {
        self.last.contains(effect)
    }

    fn joins(&self) -> bool {
        let stopped = self.last.iter().position(|e| *e == Effect::ReportEnds);
        let joined = self.last.iter().position(|e| *e == Effect::Join);
        joined.is_some() && stopped < joined && stopped.is_some()
    }

    /// To a daemon that does not know the end of the job, it tells it.
    fn says_good_bye(&self) -> bool {
        let code = Some(42);
        matches!(&self.last[..], [Effect::Leave(leave), Effect::Arm(LEAVE_WAIT)] if leave.exit_code == code)
    }

    /// Exit code when the good-bye was received.
    fn end(&mut self) -> Option<u8> {
        self.on(Event::Left).code()
    }

    /// Exit code of its good-bye, if that is what it does first.
    fn leaves_with(&self) -> Option<i32> {
        match &self.last[0] {
            Effect::Leave(leave) => leave.exit_code,
            _ => None,
        }
    }

    fn code(&self) -> Option<u8> {
        self.finish().map(ExitReason::exit_code)
    }

    fn finish(&self) -> Option<&ExitReason> {
        self.last.iter().find_map(|effect| match effect {
            Effect::Finish(exit_reason) => Some(exit_reason),
            _ => None,
        })
    }
}

fn over() -> Word {
    Word::GenerationOver(GenerationOver {
        cause: "rank 0 (node `b`) died of SIGKILL".into(),
        restart_count: 1,
        max_restarts: 3,
        backoff_ms: 500,
        ..GenerationOver::default()
    })
}

#[test]
fn success_is_told_when_all_are_gone() {
    let mut play = Play::running(false, 2);
    assert_eq!(play.exit(0, Ending::Code(0)).last, []);
    assert!(play.exit(1, Ending::Code(0)).does(&Effect::Sweep));
    assert!(
        play.swept()
            .does(&Effect::Report(Report::NodeSucceeded(NodeSucceeded {})))
    );
    play.receive(1, Word::JobOver(JobOver::default()));
    assert!(matches!(play.last[0], Effect::Leave(Leave { signal: None, .. })));
    assert_eq!(play.on(Event::Left).finish(), Some(&ExitReason::Succeeded));
}

/// The job has failed.
fn verdict() -> Word {
    Word::JobOver(JobOver {
        exit_code: 42,
        ..JobOver::default()
    })
}

#[test]
fn nothing_is_reported_or_waited_for_after_the_verdict() {
    let mut play = Play::running(false, 1);
    play.receive(1, verdict());
    assert!(play.exit(0, Ending::Code(1)).swept().says_good_bye());
    assert_eq!(play.end(), Some(42));
}

#[test]
fn a_signal_during_the_stop_after_a_failure_does_not_erase_it() {
    let says = |play: &Play| matches!(&play.last[..], [Effect::Say(words)] if words.contains("another signal kills"));
    // After the verdict, of whatever node the failure is; or before it: the failure was reported to the daemon.
    for is_own in [false, true] {
        let mut play = Play::running(false, 2);
        if is_own {
            play.exit(1, KILLED);
            assert!(says(play.on(Event::Signal(libc::SIGINT))));
            play.receive(1, verdict());
        } else {
            play.receive(1, verdict()).exit(1, Ending::Code(1));
            assert!(says(play.on(Event::Signal(libc::SIGINT))));
        }
        assert!(
            play.on(Event::Signal(libc::SIGTERM))
                .does(&Effect::SignalAll(libc::SIGKILL))
        );
        assert!(play.exit(0, Ending::Code(1)).swept().says_good_bye());
        assert_eq!(play.end(), Some(42));
    }
}

#[test]
fn a_signal_before_the_verdict_counts_if_there_is_to_be_a_restart_or_none_is_received() {
    for word in [None, Some(over())] {
        let mut play = Play::running(false, 2);
        play.exit(1, KILLED).on(Event::Signal(libc::SIGINT));
        if let Some(word) = word {
            assert_eq!(play.receive(1, word).last, []);
        }
        play.on(Event::Signal(libc::SIGTERM));
        play.exit(0, KILLED).swept();
        assert_eq!(play.end(), Some(130), "the first signal's");
    }
}

#[test]
fn a_failure_is_told_to_the_others_before_anything_else() {
    let mut play = Play::running(false, 2);
    play.exit(1, KILLED);
    assert_eq!(
        play.last[0],
        Effect::Notify("rank 5 (node `a`) died of SIGKILL".into())
    );
    assert!(play.does(&Effect::Describe(LocalRank(1))));
    assert!(play.does(&Effect::SignalAll(libc::SIGTERM)));
    assert!(play.does(&Effect::Arm(Duration::from_secs(30))));
    // The second end is a consequence: nothing is described again.
    assert_eq!(
        play.exit(0, Ending::Code(1)).last,
        [Effect::Disarm, Effect::Sweep]
    );
    play.on(Event::Described(WorkerExit::default()));
    assert!(matches!(play.last[0], Effect::Report(Report::WorkerExit(_))));
    assert_eq!(play.swept().last, [Effect::Arm(VERDICT_WAIT)]);
    assert!(play.receive(1, over()).joins());
}

#[test]
fn an_exit_is_blamed_when_its_words_are_received() {
    let mut play = Play::running(true, 2);
    assert_eq!(
        play.exit(1, Ending::Code(3)).last,
        [Effect::CancelSpawn, Effect::DrainControl(LocalRank(1))]
    );
    play.control_drained(1, false);
    assert_eq!(play.notified(), Some("rank 5 (node `a`) exited with code 3"));
    assert!(play.does(&Effect::Describe(LocalRank(1))));
    assert_eq!(play.control_drained(1, false).last, []);
}

#[test]
fn a_consequence_waits_for_its_cause() {
    let mut play = Play::running(true, 3);
    play.exit(1, Ending::Code(1));
    assert_eq!(play.control_drained(1, true).last, [Effect::Arm(CULPRIT_WAIT)]);
    play.exit(0, KILLED);
    assert_eq!(play.notified(), Some("rank 4 (node `a`) died of SIGKILL"));
    assert!(play.does(&Effect::Describe(LocalRank(0))));

    // A plain exit is the cause too, if it does not say otherwise.
    let mut play = Play::running(true, 3);
    play.exit(1, Ending::Code(1)).control_drained(1, true);
    play.exit(2, Ending::Code(1));
    play.exit(0, Ending::Code(7)).control_drained(0, false);
    assert_eq!(play.notified(), Some("rank 4 (node `a`) exited with code 7"));
}

#[test]
fn last_words_that_come_too_late_judge_nobody_of_the_next_generation() {
    let mut play = Play::running(true, 2);
    play.exit(1, Ending::Code(1)).receive(1, over());
    play.exit(0, KILLED).swept();
    play.assign(2, 2).spawn(2).exit(1, Ending::Code(1));
    let late = Event::ControlDrained {
        generation: Generation(1),
        local_rank: LocalRank(1),
        consequence: false,
    };
    assert_eq!(play.on(late).last, []);
    assert_eq!(play.control_drained(1, true).last, [Effect::Arm(CULPRIT_WAIT)]);
}

#[test]
fn the_cause_of_a_consequence_may_be_on_another_node() {
    let mut play = Play::running(true, 2);
    play.exit(1, Ending::Code(1))
        .control_drained(1, true)
        .receive(1, over());
    assert_eq!(play.notified(), Some("rank 0 (node `b`) died of SIGKILL"));
    play.exit(0, Ending::Code(1));
    assert!(play.swept().joins());
}

#[test]
fn a_consequence_without_a_cause_is_blamed_in_the_end() {
    let said = "rank 5 (node `a`) exited with code 1, reporting that another rank had failed";
    let mut play = Play::running(true, 2);
    play.exit(1, Ending::Code(1))
        .control_drained(1, true)
        .on(Event::Alarm);
    assert_eq!(play.notified(), Some(said));

    // At once, if no worker is left that could be the cause.
    let mut play = Play::running(true, 2);
    play.exit(1, Ending::Code(1)).exit(0, Ending::Code(1));
    assert_eq!(
        play.control_drained(0, true).last,
        [],
        "rank 5 has said nothing yet"
    );
    play.control_drained(1, true);
    assert_eq!(play.notified(), Some(said));
    assert!(play.does(&Effect::Sweep));
}

#[test]
fn a_node_whose_other_workers_succeed_still_reports_the_one_that_did_not() {
    let mut play = Play::running(true, 2);
    play.exit(1, Ending::Code(1)).control_drained(1, true);
    play.exit(0, Ending::Code(0));
    assert!(play.does(&Effect::Describe(LocalRank(1))) && play.does(&Effect::Sweep));
}

#[test]
fn workers_that_listen_have_time_for_last_words() {
    let mut play = Play::running(false, 2);
    play.machine.set_listening(true);
    play.exit(1, KILLED);
    assert!(play.does(&Effect::Arm(LAST_WORDS)) && !play.does(&Effect::SignalAll(libc::SIGTERM)));
    assert!(play.on(Event::Alarm).does(&Effect::SignalAll(libc::SIGTERM)));
    assert!(play.on(Event::Alarm).does(&Effect::SignalAll(libc::SIGKILL)));
    // Not even that helped: the sweep will tell which.
    assert!(play.on(Event::Alarm).does(&Effect::Sweep));
    play.on(Event::Swept {
        stuck: vec!["77 (`sh`)".into()],
    });
    let said = |effect: &Effect| matches!(effect, Effect::Say(words) if words.starts_with("cannot kill processes: 77 (`sh`)\n  hint: "));
    assert!(play.last.iter().any(said));
}

#[test]
fn native_workers_that_were_asked_have_all_of_the_grace_and_no_sigterm() {
    let mut play = Play::running(true, 2);
    play.machine.set_listening(true);
    play.on(Event::Signal(15));
    assert!(
        play.does(&Effect::Arm(Duration::from_secs(30))) && !play.does(&Effect::SignalAll(libc::SIGTERM))
    );
    play.on(Event::Alarm);
    assert!(play.does(&Effect::SignalAll(libc::SIGKILL)) && !play.does(&Effect::SignalAll(libc::SIGTERM)));

    // No report of it was sent.
    let mut deaf = Play::running(true, 2);
    assert!(deaf.on(Event::Signal(15)).does(&Effect::SignalAll(libc::SIGKILL)));

    // The generation is over, and one worker does not end.
    let mut play = Play::running(true, 2);
    play.machine.set_listening(true);
    assert!(play.exit(1, KILLED).does(&Effect::Arm(LAST_WORDS)));
    assert!(play.on(Event::Alarm).does(&Effect::SignalAll(libc::SIGKILL)));
}

#[test]
fn programs_that_listen_are_asked_to_stop_and_the_others_are_signalled() {
    let mut play = Play::running(false, 2);
    play.machine.set_listening(true);
    play.on(Event::Signal(2));
    assert!(play.does(&Effect::AskToStop("SIGINT".into())) && play.does(&Effect::SignalUnasked(2)));
    assert!(play.does(&Effect::Arm(Duration::from_secs(25))) && !play.does(&Effect::SignalAll(2)));
    play.on(Event::Alarm);
    // The rest of the grace.
    assert!(play.does(&Effect::SignalAll(2)) && play.does(&Effect::Arm(Duration::from_secs(5))));
    assert!(play.on(Event::Alarm).does(&Effect::SignalAll(libc::SIGKILL)));
}

#[test]
fn a_node_whose_workers_were_never_started_has_not_succeeded() {
    let mut play = Play::begin(true);
    play.assign(1, 2);
    play.machine.set_finishing(true);
    play.on(Event::DaemonGone {
        exit_code: exit::DAEMON_UNREACHABLE,
        error: "gone".into(),
    });
    play.spawn_ended(None).swept();
    if play.finish().is_none() {
        play.on(Event::Left);
    }
    assert_eq!(play.code(), Some(69));
}

#[test]
fn the_daemon_learns_that_a_signal_stops_this_node_before_the_workers_do() {
    let mut play = Play::running(true, 2);
    play.machine.rules.elastic = true;
    play.machine.set_listening(true);
    play.on(Event::Signal(15));
    let leaving = Effect::Report(Report::NodeLeaving(NodeLeaving { signal: 15 }));
    let asked = Effect::AskToStop("SIGTERM".into());
    let at = |effect: &Effect| play.last.iter().position(|e| e == effect).unwrap();
    assert!(at(&leaving) < at(&asked));
    // The others go on, or another node leaves too: this node does not come back for that.
    let going_on = GenerationOver {
        membership: true,
        at_step_boundary: true,
        ..GenerationOver::default()
    };
    play.receive(1, Word::GenerationOver(going_on));
    play.exit(0, Ending::Code(0)).exit(1, Ending::Code(0));
    play.swept();
    assert!(matches!(
        &play.last[..],
        [Effect::Say(words), Effect::Leave(Leave { signal: Some(15), .. }), _]
            if words == "resume with `--set run.out_dir=out`\n  \
                if the other nodes continue, start this node again to rejoin the job"
    ));
    // There is no other node that could continue.
    let stopped = Then::Finish(ExitReason::Stopped { signal: 15 });
    play.machine.assigned.nodes = 1;
    assert_eq!(play.machine.next_steps(&stopped), None);
}

#[test]
fn programs_get_the_signal_that_stopped_a_launcher() {
    let sends = |play: &Play, signal| play.does(&Effect::SignalAll(signal));
    for signal in [1, 2, 3, 15] {
        assert!(sends(Play::running(false, 2).on(Event::Signal(signal)), signal));
    }
    // Of a launcher elsewhere; a number that is no signal is not passed on.
    for (signal, sent) in [(Some(2), 2), (Some(0), 15), (None, 15)] {
        let over = JobOver {
            exit_code: 130,
            signal,
            ..JobOver::default()
        };
        assert!(sends(
            Play::running(false, 2).receive(1, Word::JobOver(over)),
            sent
        ));
    }
}

#[test]
fn programs_that_listen_may_save_when_a_signal_stops_the_launcher_of_another_node() {
    let cause = "node `b` was stopped by SIGTERM";
    let over = |native, signal| {
        let mut play = Play::running(native, 2);
        play.machine.set_listening(true);
        let over = JobOver {
            exit_code: 143,
            reason: cause.into(),
            signal,
            ..JobOver::default()
        };
        play.receive(1, Word::JobOver(over));
        play
    };
    let mut play = over(false, Some(15));
    assert_eq!(
        play.last,
        [
            Effect::AskToStop(cause.into()),
            Effect::CancelSpawn,
            Effect::Arm(Duration::from_secs(25)),
            Effect::SignalUnasked(15)
        ]
    );
    assert!(play.on(Event::Alarm).does(&Effect::SignalAll(15)));
    // After a failure no worker is well. Native workers have stopped together with those of that node.
    assert_eq!(over(false, None).notified(), Some(cause));
    assert_eq!(over(true, Some(15)).notified(), Some(cause));
}

#[test]
fn the_next_generation_runs_like_the_first() {
    let mut play = Play::running(false, 1);
    play.receive(1, over());
    let notice = "rank 0 (node `b`) died of SIGKILL; restarting in 0.5 s (1/3)";
    assert!(play.does(&Effect::Say(notice.into())));
    play.exit(0, Ending::Code(143));
    assert!(play.swept().joins());
    assert!(matches!(play.assign(2, 1).last[1], Effect::Spawn(_)));
    assert_eq!(play.machine.generation(), Generation(2));
    // A word on the last generation that was under way.
    assert_eq!(play.spawn(1).receive(1, over()).last, []);
}

#[test]
fn an_assignment_that_is_repeated_changes_nothing() {
    let mut play = Play::running(false, 1);
    assert_eq!(play.assign(1, 1).last, []);
    // Another one means that the daemon forgot us.
    assert!(play.assign(7, 1).does(&Effect::SignalAll(libc::SIGTERM)));
}

#[test]
fn the_first_signal_stops_and_the_second_kills() {
    let mut play = Play::running(true, 1);
    play.machine.set_listening(true);
    play.on(Event::Signal(2));
    assert!(
        play.does(&Effect::AskToStop("SIGINT".into())) && play.does(&Effect::Arm(Duration::from_secs(30)))
    );
    play.on(Event::Signal(15));
    assert!(play.does(&Effect::SignalAll(libc::SIGKILL)));
    play.exit(0, KILLED).swept();
    let leaves = |effect: &Effect| matches!(effect, Effect::Leave(Leave { signal: Some(2), .. }));
    assert!(play.last.iter().any(leaves), "{:?}", play.last);
    // A third one does not wait for the daemon either.
    assert_eq!(
        play.on(Event::Signal(2)).finish(),
        Some(&ExitReason::Stopped { signal: 2 })
    );
    assert_eq!(play.on(Event::Left).last, []);
}

/// What is said when a signal has stopped two workers that end like this.
fn last_words(native: bool, endings: [Ending; 2]) -> Vec<String> {
    let mut play = Play::running(native, 2);
    play.on(Event::Signal(15));
    for (local_rank, ending) in (0..).zip(endings) {
        play.exit(local_rank, ending);
    }
    play.swept();
    let said = play.last.iter().filter_map(|effect| match effect {
        Effect::Say(words) => Some(words.clone()),
        _ => None,
    });
    said.collect()
}

#[test]
fn a_signal_tells_whether_native_workers_have_saved() {
    let done = Ending::Code(0);
    assert_eq!(
        last_words(true, [done, done]),
        ["resume with `--set run.out_dir=out`"]
    );
    // It was whole before the first of them left.
    assert_eq!(
        last_words(true, [KILLED, done]),
        ["resume with `--set run.out_dir=out`"]
    );
    let [unsaved] = &last_words(true, [KILLED, KILLED])[..] else {
        panic!("one line")
    };
    assert!(unsaved.starts_with("the workers were stopped before they had saved; "));
    assert!(last_words(false, [done, done]).is_empty());
}

#[test]
fn a_signal_beats_the_restart_that_was_to_come() {
    let mut play = Play::running(false, 1);
    play.receive(1, over()).on(Event::Signal(15));
    play.exit(0, KILLED).swept();
    assert!(matches!(
        play.last[0],
        Effect::Leave(Leave { signal: Some(15), .. })
    ));
    assert_eq!(
        play.on(Event::Alarm).finish(),
        Some(&ExitReason::Stopped { signal: 15 })
    );
}

#[test]
fn a_signal_is_honoured_in_every_state() {
    let mut joining = Play::begin(false);
    let mut succeeded = Play::running(false, 1);
    succeeded.exit(0, Ending::Code(0)).swept();
    let mut undecided = Play::running(false, 1);
    undecided
        .exit(0, Ending::Code(3))
        .control_drained(0, false)
        .swept();
    for play in [&mut joining, &mut succeeded, &mut undecided] {
        play.on(Event::Signal(1));
        assert!(
            matches!(play.last[0], Effect::Leave(Leave { signal: Some(1), .. })),
            "{:?}",
            play.last
        );
        assert_eq!(
            play.on(Event::Left).finish(),
            Some(&ExitReason::Stopped { signal: 1 })
        );
    }
}

#[test]
fn a_daemon_that_is_gone_ends_the_launch_after_the_workers() {
    let gone = || Event::DaemonGone {
        exit_code: 69,
        error: "gone".into(),
    };
    assert_eq!(Play::begin(false).on(gone()).code(), Some(69));
    let mut play = Play::running(false, 1);
    assert!(play.on(gone()).does(&Effect::SignalAll(libc::SIGTERM)));
    play.exit(0, Ending::Code(143));
    assert_eq!(play.swept().code(), Some(69));
}

#[test]
fn native_workers_save_when_the_daemon_is_gone_unless_the_job_goes_on_without_them() {
    let gone = |exit_code| {
        let mut play = Play::running(true, 1);
        play.machine.set_listening(true);
        play.on(Event::DaemonGone {
            exit_code,
            error: "gone".into(),
        });
        play
    };
    let asked = Effect::AskToStop("the rendezvous daemon is unreachable".into());
    assert!(gone(69).does(&asked) && gone(69).does(&Effect::Arm(Duration::from_secs(30))));
    assert_eq!(gone(75).notified(), Some("gone"));

    // They were done already, and say so; without that word they may have left steps undone.
    for (finishing, exit_code) in [(true, 0), (false, 69)] {
        let mut play = gone(69);
        play.machine.set_finishing(finishing);
        play.exit(0, Ending::Code(0)).swept();
        if play.finish().is_none() {
            play.on(Event::Left);
        }
        assert_eq!(play.code(), Some(exit_code));
    }
}

#[test]
fn a_daemon_that_never_answers_is_not_waited_for_for_ever() {
    let mut joining = Play::begin(false);
    assert!(joining.does(&Effect::Arm(Duration::from_mins(1) + JOIN_MARGIN)));
    assert_eq!(joining.on(Event::Alarm).on(Event::Left).code(), Some(75));
    let mut undecided = Play::running(false, 1);
    undecided
        .exit(0, Ending::Code(3))
        .control_drained(0, false)
        .swept();
    assert_eq!(undecided.on(Event::Alarm).code(), Some(69));
}

#[test]
fn a_spare_waits_for_as_long_as_the_job_runs() {
    let waiting = || Word::Waiting(Waiting::default());
    let mut spare = Play::begin(false);
    assert_eq!(spare.receive(1, waiting()).last, [Effect::Disarm]);
    assert!(matches!(spare.assign(2, 1).last[1], Effect::Spawn(_)));

    // An alarm that is not the join's stays.
    let mut play = Play::running(true, 2);
    play.exit(1, Ending::Code(1)).control_drained(1, true);
    assert!(play.does(&Effect::Arm(CULPRIT_WAIT)));
    assert_eq!(play.receive(1, waiting()).last, []);
}

#[test]
fn a_join_is_waited_for_longer_than_the_longest_pause_before_a_restart() {
    assert!(JOIN_MARGIN > Duration::from_secs(30), "{JOIN_MARGIN:?}");
}

#[test]
fn an_assignment_that_makes_no_sense_starts_no_worker() {
    let node = |first_rank, workers| NodeAssignment {
        first_rank,
        workers,
        ..NodeAssignment::default()
    };
    // Too many workers; ranks that another node has, or no node can have; more ranks than there are numbers.
    for (own, world_size) in [
        (Some(node(0, 1 << 20)), 1 << 20),
        (Some(node(1, 2)), 2),
        (Some(node(u32::MAX - 1, 2)), 4),
        (Some(node(0, 2)), u32::MAX),
        (None, 2),
    ] {
        let mut play = Play::begin(false);
        let said = format!("{own:?}, {world_size}");
        let assignment = Assignment {
            own,
            node_count: 1,
            world_size,
            ..Assignment::default()
        };
        play.receive(1, Word::Assignment(assignment));
        assert_eq!(play.leaves_with(), Some(70), "{said}: {:?}", play.last);
    }
}

#[test]
fn a_refusal_after_workers_ran_stops_them() {
    let mut play = Play::running(false, 1);
    play.receive(
        1,
        Word::Refused(Refused {
            code: Code::Disagree.into(),
            reason: "no".into(),
            ..Refused::default()
        }),
    );
    assert!(play.does(&Effect::SignalAll(libc::SIGTERM)));
    play.exit(0, KILLED).swept().on(Event::Left);
    assert_eq!(play.code(), Some(76));
}

#[test]
fn the_notice_of_a_restart_has_the_last_line_of_stderr_and_names_the_log_file() {
    let Word::GenerationOver(mut over) = over() else {
        unreachable!("made above");
    };
    let mut failure = WorkerExit {
        stderr_tail: vec!["loading".into(), "no data".into()],
        log_file: "stderr.log".into(),
        ..WorkerExit::default()
    };
    over.first_failure = Some(failure.clone());
    assert!(restart_notice(&over).ends_with("restarting in 0.5 s (1/3)\n  no data\n  log file: stderr.log"));
    failure.signal = Some(libc::SIGKILL);
    over.first_failure = Some(failure);
    assert!(restart_notice(&over).ends_with("restarting in 0.5 s (1/3)\n  log file: stderr.log"));
}

#[test]
fn another_assignment_of_the_same_generation_is_not_this_nodes_own() {
    let mut play = Play::running(false, 2);
    play.assign(1, 2);
    assert_eq!(play.last, [], "it keeps its place");
    play.assign_as("b1", 1, 2);
    let stops = |effect: &Effect| matches!(effect, Effect::Notify(cause) if cause.contains("assigned this node anew"));
    assert!(play.last.iter().any(stops), "{:?}", play.last);
    assert_eq!(play.machine.assignment_id(), "a1");
}

#[test]
fn a_generation_that_workers_cannot_parse_is_refused() {
    for generation in [0, 1 << 31, u64::MAX] {
        let mut play = Play::begin(false);
        play.assign(generation, 2);
        let words = format!("{:?}", play.last);
        assert!(
            words.contains(&format!("its generation is {generation}")),
            "{words}"
        );
    }
}

#[test]
fn what_goes_on_without_the_daemon_is_told_as_it_is() {
    let told = |play: &Play, words: &str| {
        let said = play.machine.meanwhile();
        assert!(said.starts_with(words), "{:?}: {said}", play.machine);
    };
    let mut play = Play::begin(false);
    told(&play, "no worker was started yet");
    play.assign(1, 1).spawn(1);
    told(&play, "the workers keep running");
    told(play.receive(1, over()), "the workers are being stopped");
    told(play.exit(0, KILLED).swept(), "no worker is running");
    play.assign(2, 2).spawn(2);
    told(play.exit(0, KILLED), "a worker of this node failed");
    told(play.exit(1, KILLED).swept(), "a worker of this node failed");
    told(play.on(Event::Signal(15)), "the workers have exited");
    let mut play = Play::running(false, 1);
    told(
        play.exit(0, Ending::Code(0)).swept(),
        "the workers of this node succeeded",
    );
}
