//! The handle of one operation in flight.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::CollectiveError;
use crate::device::{Device, DeviceError, Event, Signal, Stream};

/// One operation of a communicator. Dropping it does not cancel the operation.
#[derive(Clone)]
pub struct Work {
    event: Event,
    shared: Arc<Mutex<Option<Outcome>>>,
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
            Self {
                event,
                shared: shared.clone(),
            },
            Completion { signal, shared },
        )
    }

    /// Blocks the host until the operation is done.
    pub fn wait(&self, deadline: Instant) -> Result<WorkTimes, WorkError> {
        let waited = self.event.wait(deadline);
        match self.shared.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            Some(outcome) => Ok(outcome?),
            None => Err(WorkError::Pending(waited.err().unwrap_or_else(|| {
                DeviceError::Upstream("the communicator was shut down".into())
            }))),
        }
    }

    /// Later operations of `stream` run after this one.
    pub fn wait_on(&self, device: &dyn Device, stream: Stream, deadline: Instant) {
        device.wait_event(stream, &self.event, deadline);
    }

    /// True once it is done or failed.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.event.poll().is_some()
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
