//! The flight recorder: the last operations of a communicator, and how far each has come.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::collective::WorkTimes;
use crate::device::{Buffer, DeviceError, Event};

/// Operations that are remembered after they have ended.
const REMEMBERED: usize = 64;

/// Most operations in a stream; one more waits until the first has ended.
pub(super) const IN_FLIGHT_BOUND: usize = 1024;

/// Where an operation begins and ends in its stream, and when the host first saw that the stream got there.
pub(super) struct Points {
    /// Its turn has come and its input is there.
    pub(super) started: Event,
    /// The stream has passed it.
    pub(super) done: Event,
    started_at: OnceLock<Instant>,
    done_at: OnceLock<Instant>,
}

impl Points {
    pub(super) fn new(started: Event, done: Event) -> Arc<Self> {
        Arc::new(Self {
            started,
            done,
            started_at: OnceLock::new(),
            done_at: OnceLock::new(),
        })
    }

    /// Looks at the stream. None while it has not passed the operation.
    pub(super) fn look(&self, now: Instant) -> Option<Result<(), DeviceError>> {
        let done = self.done.poll();
        if done.is_some() {
            self.started_at.get_or_init(|| now);
            self.done_at.get_or_init(|| now);
        } else if self.started_at.get().is_none() {
            match self.started.poll()? {
                Ok(()) => self.started_at.get_or_init(|| now),
                // Its input has failed. It may run all the same, and wait for ranks that know better.
                Err(error) => return Some(Err(error)),
            };
        }
        done
    }

    /// When it was first seen to have started.
    fn started_at(&self) -> Option<Instant> {
        self.started_at.get().copied()
    }

    /// When it ran, once the stream has passed it: by the device's clock where there is one, else as the host has
    /// seen it.
    pub(super) fn times(&self) -> Option<WorkTimes> {
        let ended = *self.done_at.get()?;
        let ran = self.done.state().since(&self.started);
        let started = ran.and_then(|ran| ended.checked_sub(ran)).or(self.started_at());
        Some(WorkTimes {
            started: started.unwrap_or(ended),
            ended,
        })
    }
}

/// An operation in the stream.
pub(super) struct Entry {
    pub(super) sequence: u64,
    /// `all-reduce`
    pub(super) operation: String,
    /// `bucket 3`
    pub(super) tag: String,
    pub(super) bytes: usize,
    pub(super) points: Arc<Points>,
    /// Its memory, which must stay meanwhile.
    pub(super) _memory: Buffer,
}

/// How far an operation has come, as the host has seen it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It waits for operations before it, or for its input.
    Queued,
    /// It is under way with the other ranks.
    Running,
    /// It has ended.
    Done,
    /// The device reports an error in it.
    Failed,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
        })
    }
}

/// The first operation that has not ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Oldest {
    pub(super) sequence: u64,
    /// In words: `all-reduce #3 (bucket 3)`.
    pub(super) name: String,
    pub(super) phase: Phase,
    /// When it came into that phase; for a queued one, when its turn came.
    pub(super) since: Instant,
}

/// See the module.
#[derive(Default)]
pub(super) struct Recorder {
    in_flight: VecDeque<Flown<Entry>>,
    ended: VecDeque<Flown<Summary>>,
    /// The operations before this one have ended.
    first_open: u64,
    failed: Option<(u64, DeviceError)>,
}

struct Flown<T> {
    what: T,
    phase: Phase,
    since: Instant,
    /// How long it ran, once it is done.
    ran: Duration,
}

struct Summary {
    sequence: u64,
    operation: String,
    tag: String,
    bytes: usize,
}

impl Recorder {
    /// An operation was put into the stream.
    pub(super) fn launched(&mut self, entry: Entry, now: Instant) {
        self.in_flight.push_back(Flown {
            what: entry,
            phase: Phase::Queued,
            since: now,
            ran: Duration::ZERO,
        });
    }

    /// Operations that have not ended, as of the last look.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Operations before this one have ended, as of the last look.
    pub(super) fn first_open(&self) -> u64 {
        self.first_open
    }

    /// Looks how far the stream has come. Operations end in order, so only the first that has not is asked about.
    pub(super) fn look(&mut self, now: Instant) {
        while let Some(first) = self.in_flight.front_mut() {
            let ended = first.what.points.look(now);
            if let (Phase::Queued, Some(started)) = (first.phase, first.what.points.started_at()) {
                (first.phase, first.since) = (Phase::Running, started);
            }
            let Some(ended) = ended else {
                return;
            };
            let mut flown = self.in_flight.pop_front().expect("looked at above");
            if let Err(error) = ended {
                flown.phase = Phase::Failed;
                self.failed.get_or_insert((flown.what.sequence, error));
            } else {
                let times = flown.what.points.times();
                flown.ran = times.map_or(Duration::ZERO, |times| {
                    times.ended.saturating_duration_since(times.started)
                });
                flown.phase = Phase::Done;
            }
            self.first_open = flown.what.sequence + 1;
            flown.since = now;
            self.remember(flown);
            if let Some(next) = self.in_flight.front_mut() {
                // Its turn has come.
                next.since = now;
            }
        }
    }

    /// The first error of the device, and the operation that met it.
    pub(super) fn failed(&self) -> Option<&(u64, DeviceError)> {
        self.failed.as_ref()
    }

    /// The operation whose turn it is.
    pub(super) fn oldest(&self) -> Option<Oldest> {
        self.in_flight.front().map(|first| Oldest {
            sequence: first.what.sequence,
            name: format!(
                "{} #{} ({})",
                first.what.operation, first.what.sequence, first.what.tag
            ),
            phase: first.phase,
            since: first.since,
        })
    }

    fn remember(&mut self, flown: Flown<Entry>) {
        if self.ended.len() == REMEMBERED {
            self.ended.pop_front();
        }
        let Flown {
            what,
            phase,
            since,
            ran,
        } = flown;
        let what = Summary {
            sequence: what.sequence,
            operation: what.operation,
            tag: what.tag,
            bytes: what.bytes,
        };
        self.ended.push_back(Flown {
            what,
            phase,
            since,
            ran,
        });
    }

    /// All of it, a line an operation, the oldest first.
    pub(super) fn dump(&self, now: Instant) -> String {
        let mut text = String::new();
        let mut line =
            |sequence: u64, operation: &str, bytes: usize, phase: Phase, time: Duration, tag: &str| {
                let ms = time.as_secs_f64() * 1e3;
                writeln!(
                    text,
                    "  #{sequence:<6} {operation:<16} {bytes:>12} bytes  {phase:<8} {ms:>10.1} ms  {tag}"
                )
                .expect("a string takes everything");
            };
        for Flown { what, phase, ran, .. } in &self.ended {
            line(
                what.sequence,
                &what.operation,
                what.bytes,
                *phase,
                *ran,
                &what.tag,
            );
        }
        for Flown {
            what, phase, since, ..
        } in self.in_flight.iter().take(REMEMBERED)
        {
            let time = now.saturating_duration_since(*since);
            line(
                what.sequence,
                &what.operation,
                what.bytes,
                *phase,
                time,
                &what.tag,
            );
        }
        match self.in_flight.len().saturating_sub(REMEMBERED) {
            0 => {}
            more => writeln!(text, "  and {more} more that are queued").expect("a string takes everything"),
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{ArenaSpec, CpuDevice, DType, Device, Signal};

    fn launched(recorder: &mut Recorder, sequence: u64, now: Instant) -> (Signal, Signal) {
        let spec = ArenaSpec::private("test", DType::F32, 1);
        let memory = CpuDevice::new(1).unwrap().alloc(&spec).unwrap().whole();
        let ((started, start), (done, end)) = (Event::pair("start"), Event::pair("end"));
        let entry = Entry {
            sequence,
            operation: "all-reduce".into(),
            tag: format!("bucket {sequence}"),
            bytes: 4096,
            points: Points::new(started, done),
            _memory: memory,
        };
        recorder.launched(entry, now);
        (start, end)
    }

    #[test]
    fn an_operation_is_queued_until_its_input_is_there_and_runs_until_the_stream_has_passed_it() {
        let (mut recorder, begin) = (Recorder::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        let (start, end) = launched(&mut recorder, 0, begin);
        let later = launched(&mut recorder, 1, begin);
        recorder.look(at(1));
        let oldest = recorder.oldest().unwrap();
        assert_eq!((oldest.phase, oldest.since), (Phase::Queued, begin));
        start.set(Ok(()));
        recorder.look(at(2));
        let oldest = recorder.oldest().unwrap();
        assert_eq!((oldest.phase, oldest.since), (Phase::Running, at(2)));
        end.set(Ok(()));
        recorder.look(at(5));
        // The next one's turn has come.
        let oldest = recorder.oldest().unwrap();
        assert_eq!(
            (oldest.sequence, oldest.phase, oldest.since),
            (1, Phase::Queued, at(5))
        );
        insta::assert_snapshot!(recorder.dump(at(7)), @r"
          #0      all-reduce               4096 bytes  done         3000.0 ms  bucket 0
          #1      all-reduce               4096 bytes  queued       2000.0 ms  bucket 1
        ");
        drop(later);
        recorder.look(at(8));
        let (sequence, _) = recorder.failed().unwrap();
        assert_eq!((*sequence, recorder.in_flight()), (1, 0));
    }

    #[test]
    fn an_operation_whose_input_has_failed_has_failed_though_it_may_run() {
        let (mut recorder, now) = (Recorder::default(), Instant::now());
        let (start, _end) = launched(&mut recorder, 7, now);
        let error = DeviceError::Upstream("no gradient".into());
        start.set(Err(error.clone()));
        recorder.look(now);
        assert_eq!(recorder.failed(), Some(&(7, error)));
    }

    #[test]
    fn only_the_last_operations_are_remembered() {
        let (mut recorder, now) = (Recorder::default(), Instant::now());
        for sequence in 0..3 * REMEMBERED as u64 {
            let (start, end) = launched(&mut recorder, sequence, now);
            start.set(Ok(()));
            end.set(Ok(()));
            recorder.look(now);
        }
        let dump = recorder.dump(now);
        assert_eq!(dump.lines().count(), REMEMBERED);
        assert!(dump.starts_with(&format!("  #{:<6}", 2 * REMEMBERED)), "{dump}");
    }
}
