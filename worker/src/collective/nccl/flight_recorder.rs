//! The flight recorder of a communicator: its last operations, and how far each has come.
#![cfg_attr(test, allow(unsafe_code, reason = "memory that shows when it is freed"))]

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::time::{Duration, Instant};

use crate::collective::operation::{Operation, Request};
use crate::device::{Buffer, DeviceError, Event};
use crate::timeline::Interval;

/// Operations that are remembered after they have ended.
const REMEMBERED: usize = 64;

/// The events before and behind an operation in its stream.
#[derive(Clone)]
pub(super) struct OperationEvents {
    /// The operations before it have ended and its input is ready.
    pub(super) started: Event,
    /// The stream has passed it.
    pub(super) done: Event,
}

impl OperationEvents {
    /// None while the stream has not passed the operation.
    pub(super) fn poll(&self) -> Option<Result<(), DeviceError>> {
        self.done.poll().or_else(|| match self.started.poll()? {
            Ok(()) => None,
            // Its input has failed. It may run all the same, and wait for ranks whose input has not.
            Err(error) => Some(Err(error)),
        })
    }

    pub(super) fn interval(&self) -> Interval {
        Interval::Stream([self.started.clone(), self.done.clone()])
    }
}

/// How far an operation has come, as the host has seen it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OperationPhase {
    /// The call that puts it into the stream goes on: NCCL connects to the other ranks.
    Connecting,
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
            Self::Connecting => "connecting",
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
    /// The rank of the group at the other end of a message.
    pub(super) peer: Option<usize>,
    /// For errors and traces.
    pub(super) tag: String,
    /// `all-reduce #3 (bucket 3)`
    pub(super) name: String,
    pub(super) phase: OperationPhase,
    /// Begin of the phase; for a queued one, when the operation before it had ended.
    pub(super) since: Instant,
}

impl Oldest {
    /// What all its ranks call it: the number of a collective, or the tag of a message, of which ranks send different numbers.
    pub(super) fn common_name(&self) -> String {
        self.peer
            .map_or_else(|| self.sequence.to_string(), |_| self.tag.clone())
    }
}

/// The operations of one communicator, as of the last update.
#[derive(Default)]
pub(super) struct FlightRecorder {
    pub(super) in_flight: VecDeque<RecordedOperation>,
    ended: VecDeque<RecordedOperation>,
    /// The operations before this one have ended.
    pub(super) first_open: u64,
    /// The first error of the device, and the operation in which it occurred.
    pub(super) failed: Option<(u64, DeviceError)>,
    /// Memory of the operations that have failed. Each is in the stream all the same, and may run: only an abort ends it.
    adrift: Vec<Buffer>,
}

pub(super) struct RecordedOperation {
    sequence: u64,
    operation: Operation,
    tag: String,
    bytes: usize,
    /// Once it is in the stream.
    events: Option<OperationEvents>,
    /// Kept while it is in flight.
    memory: Vec<Buffer>,
    phase: OperationPhase,
    since: Instant,
    /// How long it ran, once it is done: by the device's clock where there is one, else as the host has seen it.
    ran: Duration,
}

impl FlightRecorder {
    /// NCCL is about to be called.
    pub(super) fn called(&mut self, sequence: u64, request: &Request, now: Instant) {
        self.in_flight.push_back(RecordedOperation {
            sequence,
            operation: request.operation,
            tag: request.tag.clone(),
            bytes: request.buffer.bytes(),
            events: None,
            memory: request.buffers().cloned().collect(),
            phase: OperationPhase::Connecting,
            since: now,
            ran: Duration::ZERO,
        });
    }

    /// The operation that was called last is in the stream.
    pub(super) fn enqueued(&mut self, events: OperationEvents, now: Instant) {
        let last = self.in_flight.back_mut().expect("it was called before");
        (last.events, last.phase, last.since) = (Some(events), OperationPhase::Queued, now);
    }

    /// Polls the stream. Operations end in order, so only the first that has not is polled.
    pub(super) fn update(&mut self, now: Instant) {
        while let Some(first) = self.in_flight.front_mut() {
            let Some(events) = &first.events else {
                return;
            };
            let ended = events.poll();
            if first.phase == OperationPhase::Queued && events.started.poll() == Some(Ok(())) {
                (first.phase, first.since) = (OperationPhase::Running, now);
            }
            let Some(ended) = ended else {
                return;
            };
            let mut entry = self.in_flight.pop_front().expect("polled above");
            self.first_open = entry.sequence + 1;
            if let Err(error) = ended {
                entry.phase = OperationPhase::Failed;
                self.failed.get_or_insert((entry.sequence, error));
                self.adrift.append(&mut entry.memory);
            } else {
                entry.phase = OperationPhase::Done;
                let ran = entry
                    .events
                    .as_ref()
                    .and_then(|events| events.interval().length());
                entry.ran = ran.unwrap_or_else(|| now.saturating_duration_since(entry.since));
            }
            entry.memory.clear();
            if self.ended.len() == REMEMBERED {
                self.ended.pop_front();
            }
            self.ended.push_back(entry);
            if let Some(next) = self.in_flight.front_mut() {
                next.since = now;
            }
        }
    }

    /// The first operation that has not ended.
    pub(super) fn oldest(&self) -> Option<Oldest> {
        let first = self.in_flight.front()?;
        Some(Oldest {
            sequence: first.sequence,
            peer: first.operation.peer(),
            tag: first.tag.clone(),
            name: format!("{} #{} ({})", first.operation, first.sequence, first.tag),
            phase: first.phase,
            since: first.since,
        })
    }

    /// A line an operation, the oldest first. The time is how long it ran, or has been in its phase.
    pub(super) fn dump(&self, now: Instant) -> String {
        let mut text = String::new();
        for entry in self.ended.iter().chain(self.in_flight.iter().take(REMEMBERED)) {
            let time = match entry.phase {
                OperationPhase::Done | OperationPhase::Failed => entry.ran,
                _ => now.saturating_duration_since(entry.since),
            };
            writeln!(
                text,
                "  #{:<6} {:<16} {:>12} bytes  {:<10} {:>8.1} ms  {}",
                entry.sequence,
                entry.operation.to_string(),
                entry.bytes,
                entry.phase,
                time.as_secs_f64() * 1e3,
                entry.tag,
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
    use std::sync::{Arc, Weak};

    use super::*;
    use crate::collective::operation::{Operation, ReduceOp, Traffic};
    use crate::device::{Arena, ArenaSpec, DType, Memory, Signal};

    fn enqueue(recorder: &mut FlightRecorder, sequence: u64, now: Instant) -> (Signal, Signal) {
        let (buffer, _) = buffer();
        enqueue_on(recorder, buffer, sequence, now)
    }

    /// Memory that shows when it is freed.
    struct Traced {
        _alive: Arc<()>,
    }

    // SAFETY: there is no host pointer.
    unsafe impl Memory for Traced {
        fn bytes(&self) -> usize {
            4096
        }
    }

    /// A buffer, and what is alive as long as its memory.
    fn buffer() -> (Buffer, Weak<()>) {
        let alive = Arc::new(());
        let trace = Arc::downgrade(&alive);
        let spec = ArenaSpec::private("test", DType::F32, 1024);
        (Arena::new(&spec, Traced { _alive: alive }).whole(), trace)
    }

    fn enqueue_on(
        recorder: &mut FlightRecorder,
        buffer: Buffer,
        sequence: u64,
        now: Instant,
    ) -> (Signal, Signal) {
        let ((started, start), (done, end)) = (Event::pair("start"), Event::pair("end"));
        let request = Request {
            operation: Operation::AllReduce(ReduceOp::Max),
            buffer,
            all_to_all: None,
            traffic: Traffic::Grads,
            tag: format!("bucket {sequence}"),
        };
        recorder.called(sequence, &request, now);
        recorder.enqueued(OperationEvents { started, done }, now);
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
        let (sequence, _) = recorder.failed.as_ref().unwrap();
        assert_eq!((*sequence, recorder.in_flight.len()), (1, 0));
    }

    #[test]
    fn an_operation_whose_input_has_failed_has_failed_though_it_may_run() {
        let (mut recorder, now) = (FlightRecorder::default(), Instant::now());
        let (start, _end) = enqueue(&mut recorder, 7, now);
        let error = DeviceError::Upstream("no gradient".into());
        start.set(Err(error.clone()));
        recorder.update(now);
        assert_eq!(recorder.failed, Some((7, error)));
    }

    #[test]
    fn the_memory_of_an_operation_is_kept_until_the_stream_has_passed_it_but_of_a_failed_one_for_longer() {
        let (mut recorder, now) = (FlightRecorder::default(), Instant::now());
        let traces = [Ok(()), Err(DeviceError::Upstream("no gradient".into()))].map(|input| {
            let (buffer, trace) = buffer();
            let (start, end) = enqueue_on(&mut recorder, buffer, 0, now);
            start.set(input.clone());
            // A device may say of both events that they have failed, though the operation is in its stream.
            end.set(input);
            assert!(trace.upgrade().is_some());
            recorder.update(now);
            trace
        });
        // Also when it is no more among those that are remembered.
        for sequence in 1..=REMEMBERED as u64 {
            drop(enqueue(&mut recorder, sequence, now));
            recorder.update(now);
        }
        assert_eq!(
            traces.each_ref().map(|trace| trace.upgrade().is_some()),
            [false, true]
        );
        drop(recorder);
        assert!(traces[1].upgrade().is_none());
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
