//! The end of the agent: it reports how its workers ended, waits for the daemon's last word on a job that failed, and
//! says good-bye.
//!
//! The workers are gone by then: only the launcher's own exit waits for the last word, and not for long.

use std::time::Duration;

use super::event::Effect;
use super::exit_reason::ExitReason;
use super::machine::{LEAVE_WAIT, Machine, Phase};

/// Longest wait for the last word, whatever the daemon says.
const LAST_WORD_BOUND: Duration = Duration::from_secs(1);

impl Machine {
    /// The job is over; the daemon may have more to say of it when all nodes have reported.
    pub(super) fn on_verdict(&mut self, exit_reason: ExitReason, last_word_ms: u32) -> Vec<Effect> {
        let wait = Duration::from_millis(last_word_ms.into()).min(LAST_WORD_BOUND);
        self.last_word = (!wait.is_zero()).then_some(wait);
        match (&self.phase, self.last_word) {
            // It was said while the stream was broken.
            (Phase::Listening(_), None) => self.on_last_word(),
            _ => self.end(exit_reason),
        }
    }

    /// All has been said.
    pub(super) fn on_last_word(&mut self) -> Vec<Effect> {
        self.last_word = None;
        match &self.phase {
            Phase::Listening(exit_reason) => {
                let exit_reason = exit_reason.clone();
                self.say_good_bye(exit_reason)
            }
            _ => Vec::new(),
        }
    }

    /// The workers are gone: waits for the last word on a job that failed, else says good-bye.
    pub(super) fn leave(&mut self, exit_reason: ExitReason) -> Vec<Effect> {
        match (&exit_reason, self.last_word) {
            (ExitReason::DaemonGone { .. }, _) => self.finish(exit_reason),
            (ExitReason::JobOver { .. }, Some(wait)) => {
                self.phase = Phase::Listening(exit_reason);
                vec![Effect::ReportEnds, Effect::Arm(wait)]
            }
            _ => self.say_good_bye(exit_reason),
        }
    }

    fn say_good_bye(&mut self, exit_reason: ExitReason) -> Vec<Effect> {
        let leave = exit_reason.farewell();
        self.phase = Phase::Leaving(exit_reason);
        vec![Effect::Leave(leave), Effect::Arm(LEAVE_WAIT)]
    }

    pub(super) fn finish(&mut self, exit_reason: ExitReason) -> Vec<Effect> {
        self.phase = Phase::Done;
        vec![Effect::Finish(exit_reason)]
    }
}

#[cfg(test)]
mod tests {
    use ddp_proto::ids::LocalRank;
    use ddp_proto::rendezvous::daemon_message::Body as Word;
    use ddp_proto::rendezvous::{
        Assignment, DaemonMessage, Failures, GenerationOver, JobOver, Leave, NodeAssignment,
    };

    use super::super::event::Event;
    use super::super::machine::Rules;
    use super::*;
    use crate::supervise::ending::Ending;

    fn receive(machine: &mut Machine, word: Word) -> Vec<Effect> {
        machine.on(Event::Daemon(DaemonMessage {
            generation: 1,
            body: Some(word),
        }))
    }

    fn verdict(last_word_ms: u32) -> Word {
        Word::JobOver(JobOver {
            exit_code: 42,
            last_word_ms,
            ..JobOver::default()
        })
    }

    /// One whose only worker runs.
    fn running() -> Machine {
        with_workers(1)
    }

    /// One of whose two workers the second has failed; the first takes its time.
    fn failed() -> Machine {
        let mut machine = with_workers(2);
        machine.on(Event::Exited {
            local_rank: LocalRank(1),
            ending: Ending::Signal {
                signal: libc::SIGSEGV,
                core_dumped: false,
            },
        });
        machine
    }

    fn with_workers(workers: u32) -> Machine {
        let (mut machine, _) = Machine::start(Rules {
            hostname: "a".into(),
            native: false,
            resume_words: None,
            join_timeout: Duration::from_mins(1),
            shutdown_timeout: Duration::from_secs(30),
            workers,
            elastic: false,
        });
        let nodes = vec![NodeAssignment {
            workers,
            ..NodeAssignment::default()
        }];
        let assignment = Assignment {
            nodes,
            ..Assignment::default()
        };
        receive(&mut machine, Word::Assignment(assignment));
        for local_rank in 0..workers {
            machine.on(Event::Spawned {
                generation: machine.generation(),
                local_rank: LocalRank(local_rank),
                pid: 100,
            });
        }
        machine.on(Event::SpawnEnded {
            generation: machine.generation(),
            failure: None,
        });
        machine
    }

    /// What it does when the job is over and its worker gone.
    fn end(machine: &mut Machine, verdict: Word) -> Vec<Effect> {
        receive(machine, verdict);
        end_of_worker(machine)
    }

    fn end_of_worker(machine: &mut Machine) -> Vec<Effect> {
        machine.on(Event::Exited {
            local_rank: LocalRank(0),
            ending: Ending::Code(1),
        });
        machine.on(Event::Swept { stuck: vec![] })
    }

    fn listening() -> Machine {
        let mut machine = running();
        assert_eq!(
            end(&mut machine, verdict(700)),
            [Effect::ReportEnds, Effect::Arm(Duration::from_millis(700))]
        );
        machine
    }

    fn says_good_bye(effects: &[Effect]) -> bool {
        matches!(effects, [Effect::Leave(Leave { signal: None, .. }), Effect::Arm(wait)] if *wait == LEAVE_WAIT)
    }

    fn finish(effects: &[Effect]) -> Option<u8> {
        effects.iter().find_map(|effect| match effect {
            Effect::Finish(exit_reason) => Some(exit_reason.exit_code()),
            _ => None,
        })
    }

    #[test]
    fn the_last_word_is_waited_for_when_the_workers_are_gone() {
        let mut machine = listening();
        let effects = receive(&mut machine, Word::LastWord(Failures::default()));
        assert!(says_good_bye(&effects), "{effects:?}");
        assert_eq!(finish(&machine.on(Event::Left)), Some(42));
    }

    #[test]
    fn a_last_word_that_comes_while_workers_are_stopped_is_not_waited_for_again() {
        let mut machine = running();
        receive(&mut machine, verdict(700));
        assert_eq!(receive(&mut machine, Word::LastWord(Failures::default())), []);
        assert!(says_good_bye(&end_of_worker(&mut machine)));
    }

    #[test]
    fn a_daemon_of_an_older_build_has_no_last_word() {
        assert!(says_good_bye(&end(&mut running(), verdict(0))));
    }

    #[test]
    fn the_wait_is_bounded_and_a_signal_ends_it() {
        let mut machine = running();
        let effects = end(&mut machine, verdict(u32::MAX));
        assert!(effects.contains(&Effect::Arm(LAST_WORD_BOUND)), "{effects:?}");
        assert!(says_good_bye(&machine.on(Event::Alarm)));
        let mut machine = listening();
        assert!(says_good_bye(&machine.on(Event::Signal(libc::SIGINT))));
        assert_eq!(
            finish(&machine.on(Event::Left)),
            Some(42),
            "the job had failed before"
        );
    }

    #[test]
    fn a_stream_that_breaks_meanwhile_does_no_harm() {
        let mut machine = listening();
        assert_eq!(receive(&mut machine, verdict(700)), [], "the wait goes on");
        assert!(
            says_good_bye(&receive(&mut machine, verdict(0))),
            "it was said meanwhile"
        );
        let mut machine = listening();
        let gone = Event::DaemonGone {
            exit_code: 69,
            error: "gone".into(),
        };
        assert_eq!(finish(&machine.on(gone)), Some(42));
    }

    #[test]
    fn a_signal_during_the_stop_after_a_failure_does_not_erase_it() {
        let say = |effects: &[Effect]| matches!(effects, [Effect::Say(words)] if words.contains("another signal kills"));
        let kills = |effects: &[Effect]| effects.contains(&Effect::SignalAll(libc::SIGKILL));
        // After the verdict, of whatever node the failure is.
        let mut machine = running();
        receive(&mut machine, verdict(0));
        assert!(say(&machine.on(Event::Signal(libc::SIGINT))));
        assert!(kills(&machine.on(Event::Signal(libc::SIGTERM))));
        assert!(says_good_bye(&end_of_worker(&mut machine)));
        assert_eq!(finish(&machine.on(Event::Left)), Some(42));

        // Before it: the failure was reported to the daemon.
        let mut machine = failed();
        assert!(say(&machine.on(Event::Signal(libc::SIGINT))));
        receive(&mut machine, verdict(0));
        assert!(kills(&machine.on(Event::Signal(libc::SIGTERM))));
        assert!(says_good_bye(&end_of_worker(&mut machine)));
        assert_eq!(finish(&machine.on(Event::Left)), Some(42));
    }

    #[test]
    fn a_signal_before_the_verdict_counts_if_there_is_to_be_a_restart_or_none_is_received() {
        for word in [None, Some(Word::GenerationOver(GenerationOver::default()))] {
            let mut machine = failed();
            machine.on(Event::Signal(libc::SIGINT));
            if let Some(word) = word {
                assert_eq!(receive(&mut machine, word), []);
            }
            machine.on(Event::Signal(libc::SIGTERM));
            end_of_worker(&mut machine);
            assert_eq!(finish(&machine.on(Event::Left)), Some(130), "the first signal's");
        }
    }

    #[test]
    fn a_daemon_that_does_not_know_the_end_of_the_job_learns_it_from_the_good_bye() {
        let effects = end(&mut running(), verdict(0));
        let [Effect::Leave(leave), _] = effects.as_slice() else {
            panic!("{effects:?}")
        };
        assert_eq!(leave.exit_code, Some(42));
    }

    #[test]
    fn who_was_stopped_by_a_signal_waits_for_nothing() {
        let mut machine = running();
        machine.on(Event::Signal(libc::SIGTERM));
        let effects = end(&mut machine, verdict(700));
        assert!(
            matches!(effects[..], [Effect::Leave(Leave { signal: Some(_), .. }), _]),
            "{effects:?}"
        );
    }
}
