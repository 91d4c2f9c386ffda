//! Numbers on their way from a device to the host.

use std::fmt;
use std::time::Instant;

use super::{DeviceError, Event};

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
    #[must_use]
    pub fn arrived(bytes: Result<Vec<u8>, DeviceError>) -> Self {
        Self::new(Event::reached(), move || bytes)
    }

    /// Blocks the host until the bytes are there.
    pub fn wait(self, deadline: Instant) -> Result<Vec<u8>, DeviceError> {
        self.arrived.wait(deadline)?;
        (self.take)()
    }
}

impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fetch({:?})", self.arrived)
    }
}
