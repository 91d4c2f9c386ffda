//! Waiting with an end.

use std::time::{Duration, Instant};

/// How long an event may take on a machine that is busy with other things. No test measures time by it.
pub(crate) const PATIENCE: Duration = Duration::from_mins(10);

/// Between two looks at something that gives no event, such as `/proc` or a growing file.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Looks until `look` finds something; fails with `what` after [`PATIENCE`].
#[track_caller]
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            Instant::now() < deadline,
            "waited {} s in vain: {what}",
            PATIENCE.as_secs()
        );
        std::thread::sleep(LOOK_INTERVAL);
    }
}
