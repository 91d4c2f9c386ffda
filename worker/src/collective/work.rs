//! The handle of one operation.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::{CollectiveError, Failure, OperationName};
use crate::device::{Device, DeviceError, Event, Signal, Stream};

/// Longest wait for an event of a stream between two checks whether the operation has failed.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// One operation of a communicator. Dropping it does not cancel the operation.
#[derive(Clone)]
pub struct Work(WorkState);

#[derive(Clone)]
enum WorkState {
    /// A [`Completion`] reports the outcome.
    Queued {
        event: Event,
        outcome: Arc<Mutex<Option<Outcome>>>,
    },
    /// It is in a stream.
    Enqueued {
        work: Arc<dyn StreamWork>,
        name: Arc<OperationName>,
    },
}

type Outcome = Result<WorkTimes, CollectiveError>;

/// When an operation ran.
#[derive(Clone, Copy, Debug)]
pub struct WorkTimes {
    /// The operations before it had ended and its input was ready.
    pub started: Instant,
    /// It was done.
    pub ended: Instant,
}

/// One operation in a stream.
pub trait StreamWork: Send + Sync {
    /// The event behind it. It is also reached when the operation was aborted: only [`StreamWork::outcome`] tells.
    fn done(&self) -> &Event;

    /// The event before it: the operations before it have ended and its input is ready. None if it is not timed.
    fn started(&self) -> Option<&Event> {
        None
    }

    /// How it ended, once it has. It has when [`StreamWork::done`] is reached; if it failed, perhaps before.
    fn outcome(&self) -> Option<Result<WorkTimes, Failure>>;
}

impl Work {
    /// A handle and the means to complete it.
    pub(super) fn pair(what: &str) -> (Self, Completion) {
        let (event, signal) = Event::pair(what);
        let outcome = Arc::new(Mutex::new(None));
        let completion = Completion {
            signal,
            outcome: outcome.clone(),
        };
        (Self(WorkState::Queued { event, outcome }), completion)
    }

    /// The handle of an operation in a stream.
    pub(super) fn enqueued(work: Arc<dyn StreamWork>, name: OperationName) -> Self {
        let name = Arc::new(name);
        Self(WorkState::Enqueued { work, name })
    }

    /// Blocks the host until the operation is done.
    pub fn wait(&self, deadline: Instant) -> Result<WorkTimes, WorkError> {
        match &self.0 {
            WorkState::Queued { event, outcome } => {
                let waited = event.wait(deadline);
                match outcome.lock().unwrap_or_else(PoisonError::into_inner).clone() {
                    Some(outcome) => Ok(outcome?),
                    None => Err(WorkError::Pending(waited.err().unwrap_or_else(|| {
                        DeviceError::Upstream("the communicator was shut down".into())
                    }))),
                }
            }
            WorkState::Enqueued { work, name } => wait_for_stream(work.as_ref(), name, deadline),
        }
    }

    /// Later operations of `stream` run after this one. They run also if this one fails in a stream of its own, and
    /// may then read incomplete results: only [`Work::wait`] reports the failure.
    pub fn wait_on(&self, device: &dyn Device, stream: Stream, deadline: Instant) {
        device.wait_event(stream, self.event(), deadline);
    }

    /// True once it is done or failed.
    #[must_use]
    pub fn is_done(&self) -> bool {
        match &self.0 {
            WorkState::Queued { event, .. } => event.poll().is_some(),
            WorkState::Enqueued { work, .. } => work.outcome().is_some(),
        }
    }

    /// Reached when the operation is done: for an operation that starts with its result.
    #[must_use]
    pub fn event(&self) -> &Event {
        match &self.0 {
            WorkState::Queued { event, .. } => event,
            WorkState::Enqueued { work, .. } => work.done(),
        }
    }
}

/// Polls: an operation can fail without its event being reached.
fn wait_for_stream(
    work: &dyn StreamWork,
    name: &OperationName,
    deadline: Instant,
) -> Result<WorkTimes, WorkError> {
    loop {
        if let Some(outcome) = work.outcome() {
            return outcome.map_err(|failure| {
                let name = name.clone();
                CollectiveError { name, failure }.into()
            });
        }
        let until = deadline.min(Instant::now() + POLL_INTERVAL);
        if let Err(error) = work.done().wait(until)
            && until == deadline
            && work.outcome().is_none()
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
    outcome: Arc<Mutex<Option<Outcome>>>,
}

impl Completion {
    pub(super) fn set(self, outcome: Outcome) {
        let result = match &outcome {
            Ok(_) => Ok(()),
            Err(error) => Err(DeviceError::Upstream(error.to_string())),
        };
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.signal.set(result);
    }
}
