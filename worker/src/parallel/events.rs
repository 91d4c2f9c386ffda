//! One event for several: a bucket is ready when all of its gradients are.

use std::any::Any;
use std::time::Instant;

use crate::device::{DeviceError, Event, EventState};

/// Reached when all parts are; failed with the error of the first part that failed.
pub(super) fn all_of(parts: impl IntoIterator<Item = Event>) -> Event {
    let mut open: Vec<Event> = parts
        .into_iter()
        .filter(|e| !matches!(e.poll(), Some(Ok(()))))
        .collect();
    match open.len() {
        0 => Event::reached(),
        1 => open.remove(0),
        _ => Event::new(AllOf(open)),
    }
}

struct AllOf(Vec<Event>);

impl EventState for AllOf {
    fn poll(&self) -> Option<Result<(), DeviceError>> {
        // An unreached part hides a failed one behind it: the first failure in order is the one reported.
        self.0.iter().try_fold(Ok(()), |before, part| match before {
            Ok(()) => part.poll(),
            failed => Some(failed),
        })
    }

    fn wait(&self, deadline: Instant) -> Result<(), DeviceError> {
        self.0.iter().try_for_each(|part| part.wait(deadline))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn parts(&self) -> &[Event] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_reached_with_its_last_part() {
        let (first, first_signal) = Event::pair("first");
        let (second, second_signal) = Event::pair("second");
        let both = all_of([first, Event::reached(), second]);
        assert_eq!(both.poll(), None);
        second_signal.set(Ok(()));
        assert_eq!(both.poll(), None);
        first_signal.set(Ok(()));
        assert_eq!(both.poll(), Some(Ok(())));
        assert_eq!(both.wait(Instant::now()), Ok(()));
    }

    #[test]
    fn it_fails_with_its_first_failed_part() {
        let (first, first_signal) = Event::pair("first");
        let (second, second_signal) = Event::pair("second");
        let both = all_of([first, second]);
        drop(second_signal);
        first_signal.set(Ok(()));
        let failed = DeviceError::Upstream("second was given up".into());
        assert_eq!(both.poll(), Some(Err(failed.clone())));
        assert_eq!(both.wait(Instant::now()), Err(failed));
    }
}
