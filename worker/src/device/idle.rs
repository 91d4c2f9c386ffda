//! A device that carries nothing out and whose memory is not there: for code that is followed to see what it would ask of
//! a device.
#![allow(unsafe_code, reason = "memory of its own kind")]

use std::any::Any;
use std::ptr::NonNull;
use std::time::Instant;

use super::{Arena, ArenaSpec, Buffer, Device, DeviceError, Event, Memory, Stream};
use crate::ops::Op;

/// Whom an [`IdleDevice`] tells what is enqueued.
type Listener = Box<dyn Fn(&Op) + Send + Sync>;

/// Carries nothing out.
#[derive(Default)]
pub struct IdleDevice {
    listener: Option<Listener>,
}

impl IdleDevice {
    /// One that shows `listener` each operation when it is enqueued, whatever its stream.
    #[must_use]
    pub fn heard_by(listener: impl Fn(&Op) + Send + Sync + 'static) -> Self {
        Self {
            listener: Some(Box::new(listener)),
        }
    }
}

impl Device for IdleDevice {
    fn name(&self) -> String {
        "idle".to_owned()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        Ok(Arena::new(spec, Nowhere(spec.bytes())))
    }

    fn stream(&self) -> Stream {
        Stream(0)
    }

    fn enqueue(&self, _stream: Stream, op: Op) {
        if let Some(listener) = &self.listener {
            listener(&op);
        }
    }

    fn record(&self, _stream: Stream) -> Event {
        Event::reached()
    }

    fn wait_event(&self, _stream: Stream, _event: &Event, _deadline: Instant) {}

    fn synchronize(&self, _stream: Stream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn upload(&self, _stream: Stream, _dst: &Buffer, _bytes: &[u8]) {}

    fn download(&self, _stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        Err(DeviceError::NotHost(src.arena().name().to_owned()))
    }
}

/// Memory that is not there: so many bytes.
struct Nowhere(usize);

// SAFETY: there is no host pointer.
unsafe impl Memory for Nowhere {
    fn bytes(&self) -> usize {
        self.0
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
