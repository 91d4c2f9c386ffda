//! The handle of one operation in flight.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::Named;
use super::{CollectiveError, Flight};
use crate::device::{Device, DeviceError, Event, Signal, Stream};

/// Longest wait for a point in a stream between two looks at what became of the operation.
const FLIGHT_SLICE: Duration = Duration::from_millis(10);

/// One operation of a communicator. Dropping it does not cancel the operation.
#[derive(Clone)]
pub struct Work(State);

#[derive(Clone)]
enum State {
    /// Somebody will say how it ended.
    Queued {
        event: Event,
        shared: Arc<Mutex<Option<Outcome>>>,
    },
    /// It is in a stream.
    Flying {
        flight: Arc<dyn Flight>,
        named: Arc<Named>,
    },
}

type Outcome = Result<WorkTimes, CollectiveError>;

/// When an operation ran.
#[derive(Clone, Copy, Debug)]
pub struct WorkTimes {
    /// Its turn came and its input was ready.
    pub started: Instant,
    /// It was done.
    pub ended: Instant,
}

impl Work {
    /// A handle and the means to complete it.
    pub(super) fn pair(what: &str) -> (Self, Completion) {
        let (event, signal) = Event::pair(what);
        let shared = Arc::new(Mutex::new(None));
        (
            Self(State::Queued {
                event,
                shared: shared.clone(),
            }),
            Completion { signal, shared },
        )
    }

    /// The handle of an operation that was put into a stream.
    pub(super) fn flying(flight: Arc<dyn Flight>, named: Named) -> Self {
        let named = Arc::new(named);
        Self(State::Flying { flight, named })
    }

    /// Blocks the host until the operation is done.
    pub fn wait(&self, deadline: Instant) -> Result<WorkTimes, WorkError> {
        match &self.0 {
            State::Queued { event, shared } => {
                let waited = event.wait(deadline);
                match shared.lock().unwrap_or_else(PoisonError::into_inner).clone() {
                    Some(outcome) => Ok(outcome?),
                    None => Err(WorkError::Pending(waited.err().unwrap_or_else(|| {
                        DeviceError::Upstream("the communicator was shut down".into())
                    }))),
                }
            }
            State::Flying { flight, named } => land(flight.as_ref(), named, deadline),
        }
    }

    /// Later operations of `stream` run after this one. Of an operation that fails in a stream of its own they
    /// learn only through [`Work::wait`]: they may read what it left behind.
    pub fn wait_on(&self, device: &dyn Device, stream: Stream, deadline: Instant) {
        device.wait_event(stream, self.event(), deadline);
    }

    /// True once it is done or failed.
    #[must_use]
    pub fn is_done(&self) -> bool {
        match &self.0 {
            State::Queued { event, .. } => event.poll().is_some(),
            State::Flying { flight, .. } => flight.outcome().is_some(),
        }
    }

    /// Reached when the operation is done: for another one that begins with its result.
    #[must_use]
    pub fn event(&self) -> &Event {
        match &self.0 {
            State::Queued { event, .. } => event,
            State::Flying { flight, .. } => flight.done(),
        }
    }
}

/// Waits in slices: an operation can fail without its stream getting any further.
fn land(flight: &dyn Flight, named: &Named, deadline: Instant) -> Result<WorkTimes, WorkError> {
    loop {
        if let Some(outcome) = flight.outcome() {
            return outcome.map_err(|failure| named.clone().error(failure).into());
        }
        let until = deadline.min(Instant::now() + FLIGHT_SLICE);
        if let Err(error) = flight.done().wait(until)
            && until == deadline
            && flight.outcome().is_none()
        {
            return Err(WorkError::Pending(error));
        }
    }
}

/// Why waiting for an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkError {
    /// The operation failed.
    #[error(transparent)]
    Failed(#[from] CollectiveError),
    /// The operation has not ended yet, or never will.
    #[error(transparent)]
    Pending(DeviceError),
}

/// Completes a [`Work`].
pub(super) struct Completion {
    signal: Signal,
    shared: Arc<Mutex<Option<Outcome>>>,
}

impl Completion {
    pub(super) fn set(self, outcome: Outcome) {
        let result = match &outcome {
            Ok(_) => Ok(()),
            Err(error) => Err(DeviceError::Upstream(error.to_string())),
        };
        *self.shared.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.signal.set(result);
    }
}
