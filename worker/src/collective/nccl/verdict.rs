//! The watchdog's decision: a pure function of what it sees.

use std::time::{Duration, Instant};

use super::recorder::{Oldest, Phase};
use crate::collective::Failure;
use crate::device::DeviceError;

/// What is seen of a communicator at one moment.
#[derive(Clone, Debug)]
pub(super) struct Observation<'a> {
    /// Why the generation is over, if it is.
    pub(super) over: Option<&'a str>,
    /// What the library reports, if that is an error.
    pub(super) reported: Option<Failure>,
    /// What the device reports of an operation.
    pub(super) device: Option<(u64, DeviceError)>,
    /// The operation whose turn it is.
    pub(super) oldest: Option<Oldest>,
    /// Bound of each phase of an operation.
    pub(super) timeout: Duration,
    /// Global ranks of the others.
    pub(super) others: &'a [usize],
}

/// Why a communicator is given up.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Verdict {
    /// What happened.
    pub(super) failure: Failure,
    /// The operation that met it; for the others it is an earlier or a later one.
    pub(super) culprit: Option<u64>,
}

impl Verdict {
    /// The failure of an operation that had not ended: of the one that met it, the failure itself; for another one it
    /// was an earlier or a later operation's.
    pub(super) fn of(&self, sequence: Option<u64>) -> Failure {
        match (self.culprit, sequence) {
            (Some(culprit), Some(sequence)) if culprit < sequence => match &self.failure {
                // This rank's own, whichever operation is asked; it is told on as it is, because its size counts.
                Failure::Device(DeviceError::OutOfMemory { .. }) => Failure::GivenUp {
                    because_of: format!("an earlier operation, #{culprit}"),
                    failure: Box::new(self.failure.clone()),
                },
                failure => Failure::Poisoned(format!("#{culprit}: {failure}")),
            },
            (Some(culprit), Some(sequence)) if culprit > sequence => match &self.failure {
                // Everybody's, whichever operation has heard of it.
                Failure::GenerationOver(_) => self.failure.clone(),
                failure => Failure::GivenUp {
                    because_of: format!("a later operation, #{culprit}"),
                    failure: Box::new(failure.clone()),
                },
            },
            _ => self.failure.clone(),
        }
    }

    /// That on the other communicators of the process, where this one is on `communicator`.
    pub(super) fn on_others(&self, communicator: &str) -> Self {
        let because_of = match self.culprit {
            Some(culprit) => format!("#{culprit} of `{communicator}`"),
            None => format!("communicator `{communicator}`"),
        };
        let failure = match &self.failure {
            // It says itself whose it is, or is everybody's.
            Failure::GenerationOver(_) | Failure::GivenUp { .. } => self.failure.clone(),
            failure => Failure::GivenUp {
                because_of,
                failure: Box::new(failure.clone()),
            },
        };
        Self {
            failure,
            culprit: None,
        }
    }
}

/// What is to be given up, and why; none: nothing. The agent's word comes first, since it explains the rest.
pub(super) fn judge(now: Instant, seen: Observation<'_>) -> Option<Verdict> {
    if let Some(cause) = seen.over {
        return Some(Verdict {
            failure: Failure::GenerationOver(cause.to_owned()),
            culprit: None,
        });
    }
    if let Some((sequence, error)) = seen.device {
        return Some(Verdict {
            failure: Failure::Device(error),
            culprit: Some(sequence),
        });
    }
    let culprit = seen.oldest.as_ref().map(|oldest| oldest.sequence);
    if let Some(failure) = seen.reported {
        return Some(Verdict { failure, culprit });
    }
    let oldest = seen.oldest?;
    let waited = now.saturating_duration_since(oldest.since);
    if waited < seen.timeout {
        return None;
    }
    let waited_ms = waited.as_millis() as u64;
    let failure = match oldest.phase {
        Phase::Queued => Failure::Device(DeviceError::TimedOut {
            what: format!("the input of {}", oldest.name),
            waited_ms,
        }),
        Phase::Running | Phase::Done | Phase::Failed => Failure::TimedOut {
            waiting_for: seen.others.to_vec(),
            waited_ms,
        },
    };
    Some(Verdict { failure, culprit })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn at_rest<'a>() -> Observation<'a> {
        Observation {
            over: None,
            reported: None,
            device: None,
            oldest: None,
            timeout: TIMEOUT,
            others: &[1, 2],
        }
    }

    fn oldest(phase: Phase, since: Instant) -> Oldest {
        Oldest {
            sequence: 3,
            name: "all-reduce #3 (bucket 0)".into(),
            phase,
            since,
        }
    }

    #[test]
    fn nothing_is_given_up_while_all_goes_on() {
        let now = Instant::now();
        assert_eq!(judge(now, at_rest()), None);
        for phase in [Phase::Queued, Phase::Running] {
            let seen = Observation {
                oldest: Some(oldest(phase, now)),
                ..at_rest()
            };
            assert_eq!(judge(now + TIMEOUT / 2, seen), None);
        }
    }

    #[test]
    fn a_time_out_says_whether_input_or_ranks_are_late() {
        let since = Instant::now();
        let verdict = |phase| {
            let seen = Observation {
                oldest: Some(oldest(phase, since)),
                ..at_rest()
            };
            let verdict = judge(since + TIMEOUT, seen).unwrap();
            assert_eq!(verdict.culprit, Some(3));
            verdict.failure.to_string()
        };
        assert_eq!(
            verdict(Phase::Queued),
            "waited 10000 ms for the input of all-reduce #3 (bucket 0)"
        );
        assert!(verdict(Phase::Running).starts_with("waited 10000 ms for ranks 1, 2\n"));
    }

    #[test]
    fn operations_before_and_behind_the_culprit_and_elsewhere_are_told_so() {
        let verdict = Verdict {
            failure: Failure::Invalid("broken".into()),
            culprit: Some(31),
        };
        let words = |sequence| verdict.of(Some(sequence)).to_string();
        assert_eq!(words(29), "given up because of a later operation, #31: broken");
        let over = Failure::GenerationOver("rank 2 died of SIGKILL".into());
        let found = Verdict {
            failure: over.clone(),
            culprit: Some(31),
        };
        assert_eq!(found.of(Some(29)), over);
        assert_eq!(words(31), "broken");
        assert_eq!(words(32), "an earlier operation failed: #31: broken");
        let others = verdict.on_others("world");
        let elsewhere = "given up because of #31 of `world`: broken";
        assert_eq!(others.of(Some(29)).to_string(), elsewhere);
        // Passed on, it stays as it is.
        assert_eq!(others.on_others("parameters"), others);
    }

    #[test]
    fn a_lack_of_memory_is_one_for_the_operations_behind_it_too() {
        let verdict = Verdict {
            failure: Failure::Device(DeviceError::OutOfMemory {
                what: "scratch".into(),
                bytes: 1,
                cause: "full".into(),
                hint: "less".into(),
                never_fits: true,
            }),
            culprit: Some(1),
        };
        for sequence in 0..3 {
            let failure = verdict.of(Some(sequence));
            let device = failure.device();
            assert!(
                matches!(device, Some(DeviceError::OutOfMemory { never_fits: true, .. })),
                "{failure}"
            );
        }
    }

    #[test]
    fn the_agents_word_comes_before_what_the_library_says() {
        let reported = Failure::Library {
            call: "ncclCommGetAsyncError".into(),
            words: "remote process exited".into(),
            of_peer: true,
        };
        let mut seen = Observation {
            oldest: Some(oldest(Phase::Running, Instant::now())),
            reported: Some(reported.clone()),
            ..at_rest()
        };
        let verdict = judge(Instant::now(), seen.clone()).unwrap();
        assert_eq!((verdict.failure, verdict.culprit), (reported, Some(3)));
        seen.over = Some("rank 2 died of SIGKILL");
        let verdict = judge(Instant::now(), seen).unwrap();
        assert_eq!(
            verdict.failure.to_string(),
            "the generation is over: rank 2 died of SIGKILL"
        );
    }
}
