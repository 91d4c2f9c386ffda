//! The streams of a context, and whether anything is in them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::driver::RawStream;
use super::event::wait_until;
use crate::device::DeviceError;

/// All that are alive.
#[derive(Debug, Default)]
pub(super) struct Streams(Mutex<Vec<RawStream>>);

impl Streams {
    pub(super) fn add(&self, stream: RawStream) {
        self.alive().push(stream);
    }

    /// From now on it is asked nothing, so that it can be destroyed.
    pub(super) fn remove(&self, stream: RawStream) {
        self.alive().retain(|other| *other != stream);
    }

    /// Waits, no longer than `patience`, until `is_empty` has said of each of these streams that it is, or the stream is
    /// gone; an error of `is_empty` ends the wait. Nobody can destroy a stream while it is asked: what the driver does with the
    /// handle of one that was destroyed is not defined.
    pub(super) fn come_to_rest(
        &self,
        patience: Duration,
        is_empty: impl Fn(RawStream) -> Option<Result<(), DeviceError>>,
    ) -> Result<(), DeviceError> {
        let mut left = self.alive().clone();
        let poll = || {
            let alive = self.alive();
            left.retain(|stream| alive.contains(stream));
            while let Some(&stream) = left.last() {
                if let Err(error) = is_empty(stream)? {
                    return Some(Err(error));
                }
                left.pop();
            }
            Some(Ok(()))
        };
        wait_until(poll, Instant::now() + patience, || {
            "memory to be freed".to_owned()
        })
    }

    fn alive(&self) -> MutexGuard<'_, Vec<RawStream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const LONG: Duration = Duration::from_mins(1);

    fn streams() -> (Streams, [RawStream; 2]) {
        let [first, second] = [1, 2].map(|handle| RawStream(std::ptr::without_provenance_mut(handle)));
        let streams = Streams::default();
        streams.add(first);
        streams.add(second);
        (streams, [first, second])
    }

    /// Whoever would destroy one waits for the lock, or is done before: then it is asked no more.
    #[test]
    fn a_stream_is_asked_only_while_nobody_can_destroy_it() {
        let (streams, [first, second]) = streams();
        let asked = RefCell::new(Vec::new());
        let rounds = RefCell::new(0);
        let outcome = streams.come_to_rest(LONG, |stream| {
            assert!(streams.0.try_lock().is_err(), "it can be destroyed meanwhile");
            asked.borrow_mut().push(stream);
            *rounds.borrow_mut() += 1;
            (*rounds.borrow() > 3).then_some(Ok(()))
        });
        assert_eq!(outcome, Ok(()));
        // Each until it is empty, and then the next.
        assert_eq!(*asked.borrow(), [second, second, second, second, first]);
    }

    #[test]
    fn a_stream_that_is_destroyed_is_waited_for_no_longer() {
        let (streams, [first, second]) = streams();
        let asked = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                asked.wait();
                streams.remove(second);
            });
            let met = RefCell::new(false);
            let outcome = streams.come_to_rest(LONG, |stream| {
                if stream == first {
                    return Some(Ok(()));
                }
                if !met.replace(true) {
                    asked.wait();
                }
                None
            });
            assert_eq!(outcome, Ok(()));
        });
    }

    #[test]
    fn a_stream_that_never_empties_is_waited_for_as_long_as_was_said() {
        let (streams, _) = streams();
        let outcome = streams.come_to_rest(Duration::ZERO, |_| None);
        let Err(DeviceError::TimedOut { what, .. }) = outcome else {
            panic!("{outcome:?}");
        };
        assert_eq!(what, "memory to be freed");
        let failed = DeviceError::Upstream("failed".into());
        let outcome = streams.come_to_rest(LONG, |_| Some(Err(failed.clone())));
        assert_eq!(outcome, Err(failed));
    }
}
