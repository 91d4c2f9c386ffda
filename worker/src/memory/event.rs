//! Events: points in a stream, or facts of the host, that others can wait for; and bytes that arrive with one.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::DeviceError;

/// State behind an event; devices bring their own.
pub trait EventState: Any + Send + Sync {
    /// None while it is not reached; then success, or the error of what came before it.
    fn poll(&self) -> Option<Result<(), DeviceError>>;
    /// Blocks the host until it is reached or `deadline` passes.
    fn wait(&self, deadline: Instant) -> Result<(), DeviceError>;
    /// The points of which it is made, if it is reached with the last of them: a device that knows how to wait for
    /// each in its stream need not block the host for all.
    fn parts(&self) -> &[Event] {
        &[]
    }
    /// Time on the device since an earlier point, of this stream or another. None unless both are reached and were
    /// recorded to be timed.
    fn since(&self, _earlier: &Event) -> Option<Duration> {
        None
    }
}

/// A point that is reached once; what can be asked of it are the methods of [`EventState`]. Clones are the same point.
#[derive(Clone)]
pub struct Event(Arc<dyn EventState>);

impl Event {
    /// An event with a state of the device's own.
    pub fn new(state: impl EventState) -> Self {
        Self(Arc::new(state))
    }

    /// An event that is reached already.
    pub fn reached() -> Self {
        Self::new(Over(Ok(())))
    }

    /// An event that has failed already.
    pub fn failed(error: DeviceError) -> Self {
        Self::new(Over(Err(error)))
    }

    /// An event that the host signals, and its signal.
    #[must_use]
    pub fn pair(what: impl Into<String>) -> (Self, Signal) {
        let shared = Arc::new(SignalState {
            what: what.into(),
            result: Mutex::default(),
            reached: Condvar::new(),
        });
        (Self(shared.clone()), Signal(shared))
    }

    /// The state, if it is of this type: for the device that made it.
    pub fn state_as<T: EventState>(&self) -> Option<&T> {
        (self.0.as_ref() as &dyn Any).downcast_ref()
    }
}

impl Deref for Event {
    type Target = dyn EventState;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref()
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:?})", self.poll())
    }
}

/// What is over already.
struct Over(Result<(), DeviceError>);

impl EventState for Over {
    fn poll(&self) -> Option<Result<(), DeviceError>> {
        Some(self.0.clone())
    }

    fn wait(&self, _deadline: Instant) -> Result<(), DeviceError> {
        self.0.clone()
    }
}

struct SignalState {
    what: String,
    result: Mutex<Option<Result<(), DeviceError>>>,
    reached: Condvar,
}

impl EventState for SignalState {
    fn poll(&self) -> Option<Result<(), DeviceError>> {
        self.result.lock().clone()
    }

    fn wait(&self, deadline: Instant) -> Result<(), DeviceError> {
        let started = Instant::now();
        let mut result = self.result.lock();
        (self.reached).wait_while_until(&mut result, |result| result.is_none(), deadline);
        result.clone().unwrap_or_else(|| {
            Err(DeviceError::TimedOut {
                what: self.what.clone(),
                waited_ms: started.elapsed().as_millis() as u64,
            })
        })
    }
}

/// Signals its event once. If it is dropped before that, the event fails, so that nobody waits for ever.
pub struct Signal(Arc<SignalState>);

impl Signal {
    /// The event is reached, or failed.
    pub fn set(self, result: Result<(), DeviceError>) {
        self.complete(|_| result);
    }

    fn complete(&self, made: impl FnOnce(&str) -> Result<(), DeviceError>) {
        let mut result = self.0.result.lock();
        if result.is_none() {
            *result = Some(made(&self.0.what));
            self.0.reached.notify_all();
        }
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        self.complete(|what| Err(DeviceError::Upstream(format!("{what} was given up"))));
    }
}

/// Bytes that are on the host once the device gets there. Dropping it gives them up.
pub struct Fetch {
    arrived: Event,
    take: Box<dyn FnOnce() -> Result<Vec<u8>, DeviceError> + Send>,
}

impl Fetch {
    /// Bytes that `take` returns once `arrived` is reached.
    pub fn new(arrived: Event, take: impl FnOnce() -> Result<Vec<u8>, DeviceError> + Send + 'static) -> Self {
        Self {
            arrived,
            take: Box::new(take),
        }
    }

    /// Bytes that are there, or the reason why they are not.
    pub fn arrived(bytes: Result<Vec<u8>, DeviceError>) -> Self {
        Self::new(Event::reached(), move || bytes)
    }

    /// Blocks the host until the bytes are there.
    pub fn wait(self, deadline: Instant) -> Result<Vec<u8>, DeviceError> {
        self.arrived.wait(deadline)?;
        (self.take)()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_signal_fails_its_event() {
        let (event, signal) = Event::pair("a collective");
        assert!(event.poll().is_none());
        drop(signal);
        assert_eq!(
            event.poll(),
            Some(Err(DeviceError::Upstream("a collective was given up".into())))
        );
    }

    #[test]
    fn a_wait_ends_at_its_deadline() {
        let (event, _signal) = Event::pair("nothing");
        let error = event.wait(Instant::now() + Duration::from_millis(5)).unwrap_err();
        assert!(matches!(error, DeviceError::TimedOut { .. }));
    }

    #[test]
    fn a_signal_wakes_a_waiter() {
        let (event, signal) = Event::pair("x");
        std::thread::scope(|s| {
            let waiter = s.spawn(|| event.wait(Instant::now() + Duration::from_secs(10)));
            signal.set(Ok(()));
            assert_eq!(waiter.join().unwrap(), Ok(()));
        });
    }
}
