//! The flight recorder: the last operations of a communicator, and how far each has come.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::collective::operation::Request;
use crate::collective::work::WorkTimes;
use crate::device::{Buffer, DeviceError, Event};

/// Operations that are remembered after they have ended.
const REMEMBERED: usize = 64;

/// Most operations in a stream; one more waits until the first has ended.
pub(super) const IN_FLIGHT_BOUND: usize = 1024;

/// The events before and behind an operation in its stream, and when the host first saw that they were reached.
pub(super) struct OperationEvents {
    /// The operations before it have ended and its input is ready.
    pub(super) started: Event,
    /// The stream has passed it.
    pub(super) done: Event,
    started_at: OnceLock<Instant>,
    done_at: OnceLock<Instant>,
}

impl OperationEvents {
    pub(super) fn new(started: Event, done: Event) -> Arc<Self> {
        Arc::new(Self {
            started,
            done,
            started_at: OnceLock::new(),
            done_at: OnceLock::new(),
        })
    }

    /// Polls the events. None while the stream has not passed the operation.
    pub(super) fn poll(&self, now: Instant) -> Option<Result<(), DeviceError>> {
        let done = self.done.poll();
        if done.is_some() {
            self.started_at.get_or_init(|| now);
            self.done_at.get_or_init(|| now);
        } else if self.started_at.get().is_none() {
            match self.started.poll()? {
                Ok(()) => self.started_at.get_or_init(|| now),
                // Its input has failed. It may run all the same, and wait for ranks whose input has not.
                Err(error) => return Some(Err(error)),
            };
        }
        done
    }

    /// When it ran, once the stream has passed it: by the device's clock where there is one, else as the host has
    /// seen it.
    pub(super) fn times(&self) -> Option<WorkTimes> {
        let ended = *self.done_at.get()?;
        let ran = self.done.since(&self.started);
        let started = ran.and_then(|ran| ended.checked_sub(ran));
        let started = started.or(self.started_at.get().copied());
        Some(WorkTimes {
            started: started.unwrap_or(ended),
            ended,
        })
    }
}

/// How far an operation has come, as the host has seen it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OperationPhase {
    /// It waits for operations before it, or for its input.
    Queued,
    /// It runs, or waits for the other ranks.
    Running,
    Done,
    /// The device reports an error.
    Failed,
}

impl fmt::Display for OperationPhase {
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
    /// `all-reduce #3 (bucket 3)`
    pub(super) name: String,
    pub(super) phase: OperationPhase,
    /// Begin of the phase; for a queued one, when the operation before it had ended.
    pub(super) since: Instant,
}

/// The operations of one communicator.
#[derive(Default)]
pub(super) struct FlightRecorder {
    in_flight: VecDeque<RecordedOperation>,
    ended: VecDeque<RecordedOperation>,
    /// The operations before this one have ended.
    first_open: u64,
    failed: Option<(u64, DeviceError)>,
}

struct RecordedOperation {
    sequence: u64,
    operation: String,
    tag: String,
    bytes: usize,
    events: Arc<OperationEvents>,
    /// Kept while it is in flight.
    memory: Option<Buffer>,
    phase: OperationPhase,
    since: Instant,
    /// How long it ran, once it is done.
    ran: Duration,
}

impl FlightRecorder {
    /// An operation was put into the stream.
    pub(super) fn enqueued(
        &mut self,
        sequence: u64,
        request: &Request,
        events: Arc<OperationEvents>,
        now: Instant,
    ) {
        self.in_flight.push_back(RecordedOperation {
            sequence,
            operation: request.operation.to_string(),
            tag: request.tag.clone(),
            bytes: request.buffer.bytes(),
            events,
            memory: Some(request.buffer.clone()),
            phase: OperationPhase::Queued,
            since: now,
            ran: Duration::ZERO,
        });
    }

    /// Operations that have not ended, as of the last update.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Operations before this one have ended, as of the last update.
    pub(super) fn first_open(&self) -> u64 {
        self.first_open
    }

    /// Polls the stream. Operations end in order, so only the first that has not is polled.
    pub(super) fn update(&mut self, now: Instant) {
        while let Some(first) = self.in_flight.front_mut() {
            let ended = first.events.poll(now);
            if let (OperationPhase::Queued, Some(&started)) = (first.phase, first.events.started_at.get()) {
                (first.phase, first.since) = (OperationPhase::Running, started);
            }
            let Some(ended) = ended else {
                return;
            };
            let mut entry = self.in_flight.pop_front().expect("polled above");
            self.first_open = entry.sequence + 1;
            if let Err(error) = ended {
                entry.phase = OperationPhase::Failed;
                self.failed.get_or_insert((entry.sequence, error));
            } else {
                entry.phase = OperationPhase::Done;
                let times = entry.events.times();
                entry.ran = times.map_or(Duration::ZERO, |times| {
                    times.ended.saturating_duration_since(times.started)
                });
            }
            drop(entry.memory.take());
            if self.ended.len() == REMEMBERED {
                self.ended.pop_front();
            }
            self.ended.push_back(entry);
            if let Some(next) = self.in_flight.front_mut() {
                next.since = now;
            }
        }
    }

    /// The first error of the device, and the operation in which it occurred.
    pub(super) fn failed(&self) -> Option<&(u64, DeviceError)> {
        self.failed.as_ref()
    }

    /// The first operation that has not ended.
    pub(super) fn oldest(&self) -> Option<Oldest> {
        self.in_flight.front().map(|first| Oldest {
            sequence: first.sequence,
            name: format!("{} #{} ({})", first.operation, first.sequence, first.tag),
            phase: first.phase,
            since: first.since,
        })
    }

    /// A line an operation, the oldest first. The time is how long it ran, or has been in its phase.
    pub(super) fn dump(&self, now: Instant) -> String {
        let mut text = String::new();
        for entry in self.ended.iter().chain(self.in_flight.iter().take(REMEMBERED)) {
            let RecordedOperation {
                sequence,
                operation,
                tag,
                bytes,
                phase,
                ..
            } = entry;
            let time = match phase {
                OperationPhase::Queued | OperationPhase::Running => {
                    now.saturating_duration_since(entry.since)
                }
                OperationPhase::Done | OperationPhase::Failed => entry.ran,
            };
            let ms = time.as_secs_f64() * 1e3;
            writeln!(
                text,
                "  #{sequence:<6} {operation:<16} {bytes:>12} bytes  {phase:<8} {ms:>10.1} ms  {tag}"
            )
            .expect("a string takes everything");
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
    use crate::collective::operation::{Operation, ReduceOp, Traffic};
    use crate::device::{ArenaSpec, CpuDevice, DType, Device, Signal};

    fn enqueue(recorder: &mut FlightRecorder, sequence: u64, now: Instant) -> (Signal, Signal) {
        let spec = ArenaSpec::private("test", DType::F32, 1024);
        let memory = CpuDevice::new(1).unwrap().alloc(&spec).unwrap().whole();
        let ((started, start), (done, end)) = (Event::pair("start"), Event::pair("end"));
        let request = Request {
            operation: Operation::AllReduce,
            reduce: ReduceOp::Max,
            buffer: memory,
            traffic: Traffic::Grads,
            tag: format!("bucket {sequence}"),
        };
        recorder.enqueued(sequence, &request, OperationEvents::new(started, done), now);
        (start, end)
    }

    #[test]
    fn an_operation_is_queued_until_its_input_is_there_and_runs_until_the_stream_has_passed_it() {
        let (mut recorder, begin) = (FlightRecorder::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        let (start, end) = enqueue(&mut recorder, 0, begin);
        let later = enqueue(&mut recorder, 1, begin);
        recorder.update(at(1));
        let oldest = recorder.oldest().unwrap();
        assert_eq!((oldest.phase, oldest.since), (OperationPhase::Queued, begin));
        start.set(Ok(()));
        recorder.update(at(2));
        let oldest = recorder.oldest().unwrap();
        assert_eq!((oldest.phase, oldest.since), (OperationPhase::Running, at(2)));
        end.set(Ok(()));
        recorder.update(at(5));
        // The next one's turn has come.
        let oldest = recorder.oldest().unwrap();
        assert_eq!(
            (oldest.sequence, oldest.phase, oldest.since),
            (1, OperationPhase::Queued, at(5))
        );
        insta::assert_snapshot!(recorder.dump(at(7)), @r"
          #0      all-reduce               4096 bytes  done         3000.0 ms  bucket 0
          #1      all-reduce               4096 bytes  queued       2000.0 ms  bucket 1
        ");
        drop(later);
        recorder.update(at(8));
        let (sequence, _) = recorder.failed().unwrap();
        assert_eq!((*sequence, recorder.in_flight()), (1, 0));
    }

    #[test]
    fn an_operation_whose_input_has_failed_has_failed_though_it_may_run() {
        let (mut recorder, now) = (FlightRecorder::default(), Instant::now());
        let (start, _end) = enqueue(&mut recorder, 7, now);
        let error = DeviceError::Upstream("no gradient".into());
        start.set(Err(error.clone()));
        recorder.update(now);
        assert_eq!(recorder.failed(), Some(&(7, error)));
    }

    #[test]
    fn only_the_last_operations_are_remembered() {
        let (mut recorder, now) = (FlightRecorder::default(), Instant::now());
        for sequence in 0..3 * REMEMBERED as u64 {
            let (start, end) = enqueue(&mut recorder, sequence, now);
            start.set(Ok(()));
            end.set(Ok(()));
            recorder.update(now);
        }
        let dump = recorder.dump(now);
        assert_eq!(dump.lines().count(), REMEMBERED);
        assert!(dump.starts_with(&format!("  #{:<6}", 2 * REMEMBERED)), "{dump}");
    }
}
