//! The clock that counts the sleep of the machine, for deadlines that other machines count on.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Time since the machine was started, its sleep included.
pub(crate) fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}
