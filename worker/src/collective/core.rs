//! What carries the operations of a communicator out, or puts them into a stream: one at a time, numbered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::Named;
use super::pending::Pending;
use super::segment::SharedSegment;
use super::stream_transport::Route;
use super::work::Completion;
use super::{CollectiveError, Failure, Request, Wait, Work, WorkTimes};
use crate::device::{DeviceError, Event};
use crate::session::Cancel;
use crate::timeline::{Collective, Lane, Timeline};

/// Longest wait for a buffer to be ready between two looks at the cancel token, which events do not know.
const INPUT_SLICE: Duration = Duration::from_millis(10);

/// An operation that waits for its turn.
pub(super) struct Job {
    pub(super) request: Request,
    pub(super) after: Event,
    pub(super) completion: Completion,
}

/// What the driver of the queue owns.
pub(super) struct Core {
    pub(super) name: String,
    pub(super) global_rank: usize,
    pub(super) timeout: Duration,
    pub(super) cancel: Cancel,
    pub(super) route: Route,
    pub(super) sequence: u64,
    pub(super) poison: Option<String>,
    pub(super) pending: Arc<Pending>,
    pub(super) timeline: Timeline,
}

impl Core {
    pub(super) fn drive(&mut self, job: Job) {
        let Job {
            request,
            after,
            completion,
        } = job;
        let sequence = self.next();
        let request = Arc::new(request);
        self.pending.begin(sequence, &request);
        let outcome = self.run(sequence, &request, &after).map_err(|failure| {
            self.poison.get_or_insert_with(|| failure.to_string());
            self.named(sequence, &request).error(failure)
        });
        self.pending.end();
        if let Ok(WorkTimes { started, ended }) = outcome
            && self.timeline.is_open()
        {
            let (lane, name, what) = self.label(&request, sequence);
            (self.timeline).moved(lane, request.traffic.kind(), name, what, [started, ended]);
        }
        completion.set(outcome);
    }

    /// Puts an operation into the stream. If that fails, the work has ended already.
    pub(super) fn enqueue(&mut self, request: &Request, after: &Event) -> Work {
        let sequence = self.next();
        let wait = Wait::new(self.timeout, &self.cancel);
        let named = self.named(sequence, request);
        let flight = match (&self.poison, &mut self.route) {
            (Some(earlier), _) => Err(Failure::Poisoned(earlier.clone())),
            (None, Route::Stream(transport)) => transport.enqueue(sequence, request, after, &wait),
            (None, Route::Host(_)) => Err(Failure::Invalid("the transport has no stream".into())),
        };
        match flight {
            Ok(flight) => {
                if let (true, Some(started)) = (self.timeline.is_open(), flight.started()) {
                    let (lane, name, what) = self.label(request, sequence);
                    let points = [started.clone(), flight.done().clone()];
                    (self.timeline).moved_in_stream(lane, request.traffic.kind(), name, what, points);
                }
                Work::flying(flight, named)
            }
            Err(failure) => {
                self.poison.get_or_insert_with(|| failure.to_string());
                let (work, completion) = Work::pair(&format!("{} ({})", request.operation, request.tag));
                completion.set(Err(named.error(failure)));
                work
            }
        }
    }

    /// Of a span.
    fn label(&self, request: &Request, sequence: u64) -> (Lane, String, Collective) {
        let name = format!("{} ({})", request.operation, request.tag);
        let members = self.route.members();
        let what = Collective {
            bytes: request.buffer.bytes() as u64,
            first_rank: members[0] as u32,
            ranks: members.len() as u32,
            sequence: request.operation.needs_all_ranks().then_some(sequence),
        };
        (Lane::Communicator(self.name.clone()), name, what)
    }

    fn next(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence - 1
    }

    fn run(&mut self, sequence: u64, request: &Request, after: &Event) -> Result<WorkTimes, Failure> {
        if let Some(earlier) = &self.poison {
            return Err(Failure::Poisoned(earlier.clone()));
        }
        self.await_input(after)?;
        let started = Instant::now();
        let mut held = request.buffer.hold()?;
        let wait = Wait::new(self.timeout, &self.cancel).told_to(&self.pending);
        let Route::Host(transport) = &mut self.route else {
            return Err(Failure::Invalid("the transport has a stream".into()));
        };
        if let Err(failure) = transport.execute(sequence, request, &mut held, &wait) {
            // Ranks that have not failed yet may still write here: no slice of it may exist any more.
            if SharedSegment::behind(&request.buffer).is_some() {
                held.abandon();
            }
            return Err(failure);
        }
        Ok(WorkTimes {
            started,
            ended: Instant::now(),
        })
    }

    /// Waits until the buffer is ready, the time is over or the generation is.
    fn await_input(&self, after: &Event) -> Result<(), Failure> {
        let deadline = Instant::now() + self.timeout;
        loop {
            let until = deadline.min(Instant::now() + INPUT_SLICE);
            match after.wait(until) {
                // Not the failure of what came before the event, which may be a time-out as well.
                Err(DeviceError::TimedOut { what, .. }) if after.poll().is_none() => {
                    if let Some(cause) = self.cancel.cause() {
                        return Err(Failure::GenerationOver(cause.to_owned()));
                    }
                    if until == deadline {
                        let waited_ms = self.timeout.as_millis() as u64;
                        return Err(DeviceError::TimedOut { what, waited_ms }.into());
                    }
                }
                outcome => return Ok(outcome?),
            }
        }
    }

    /// A collective call that is not an operation of the queue. A refusal, which all ranks hear, leaves the
    /// communicator usable; anything else may have left the ranks at different points.
    pub(super) fn set_up<T>(
        &mut self,
        what: &str,
        bytes: usize,
        tag: &str,
        call: impl FnOnce(&mut Route) -> Result<T, Failure>,
    ) -> Result<T, CollectiveError> {
        let outcome = match &self.poison {
            Some(earlier) => Err(Failure::Poisoned(earlier.clone())),
            None => call(&mut self.route),
        };
        outcome.map_err(|failure| {
            if !matches!(failure, Failure::Refused { .. } | Failure::Device(_)) {
                self.poison.get_or_insert_with(|| failure.to_string());
            }
            let sequence = self.sequence;
            let named = Named {
                sequence,
                bytes,
                operation: what.to_owned(),
                tag: tag.to_owned(),
                rank: self.global_rank,
                communicator: self.name.clone(),
            };
            named.error(failure)
        })
    }

    fn named(&self, sequence: u64, request: &Request) -> Named {
        Named {
            rank: self.global_rank,
            communicator: self.name.clone(),
            operation: request.operation.to_string(),
            sequence,
            bytes: request.buffer.bytes(),
            tag: request.tag.clone(),
        }
    }
}
