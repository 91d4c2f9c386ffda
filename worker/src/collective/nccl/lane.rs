//! What a communicator needs of a device: a stream, addresses, and that calls of the library go to it.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use super::sys::RawStream;
use crate::device::cuda::CudaDevice;
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Event, Stream};
use crate::ops::Scale;

/// What NCCL must know of a device that others need not.
pub(super) trait Native: Send + Sync {
    /// Calls of this thread go to the device.
    fn bind(&self) -> Result<(), DeviceError>;
    /// A new stream for operations that other ranks wait for.
    fn stream(&self, name: &str) -> Stream;
    /// The stream as the library takes it; alive as long as the device.
    fn raw_stream(&self, stream: Stream) -> Result<RawStream, DeviceError>;
    /// Address of the first element in the device's memory.
    fn address(&self, buffer: &Buffer) -> Result<*mut c_void, DeviceError>;
    /// Something in flight may never end: nobody waits for the device any more to give memory back.
    fn abandon(&self);
}

/// See the module.
#[derive(Clone)]
pub(super) struct Lane {
    device: Arc<dyn Device>,
    native: Arc<dyn Native>,
    stream: Stream,
}

impl Lane {
    /// A lane on a stream of its own.
    pub(super) fn new(device: Arc<dyn Device>, native: Arc<dyn Native>, name: &str) -> Self {
        Self {
            stream: native.stream(name),
            device,
            native,
        }
    }

    /// Another one on the same device.
    pub(super) fn beside(&self, name: &str) -> Self {
        Self::new(self.device.clone(), self.native.clone(), name)
    }

    pub(super) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        self.native.bind()
    }

    pub(super) fn raw_stream(&self) -> Result<RawStream, DeviceError> {
        self.native.raw_stream(self.stream)
    }

    pub(super) fn address(&self, buffer: &Buffer) -> Result<*mut c_void, DeviceError> {
        self.native.address(buffer)
    }

    pub(super) fn abandon(&self) {
        self.native.abandon();
    }

    /// What comes later in the stream runs after `event`.
    pub(super) fn wait(&self, event: &Event, deadline: Instant) {
        self.device.wait_event(self.stream, event, deadline);
    }

    pub(super) fn record(&self) -> Event {
        self.device.record_timed(self.stream)
    }

    pub(super) fn scale(&self, x: Buffer, factor: f32) {
        self.device.enqueue(self.stream, Scale { x, factor }.into());
    }

    /// One element, for operations that carry nothing.
    pub(super) fn token(&self) -> Result<Arena, DeviceError> {
        self.device.alloc(&ArenaSpec::private("barrier", DType::I32, 1))
    }
}

/// A GPU.
pub(super) struct Gpu(Arc<dyn Device>);

impl Gpu {
    /// None if the device is another kind.
    pub(super) fn of(device: &Arc<dyn Device>) -> Option<Self> {
        CudaDevice::of(device.as_ref())?;
        Some(Self(device.clone()))
    }

    fn cuda(&self) -> &CudaDevice {
        CudaDevice::of(self.0.as_ref()).expect("checked when it was made")
    }
}

impl Native for Gpu {
    fn bind(&self) -> Result<(), DeviceError> {
        self.cuda().context().bind()
    }

    fn stream(&self, name: &str) -> Stream {
        self.cuda().named_stream(name, true)
    }

    fn raw_stream(&self, stream: Stream) -> Result<RawStream, DeviceError> {
        Ok(self.cuda().raw_stream(stream)?.cast())
    }

    fn address(&self, buffer: &Buffer) -> Result<*mut c_void, DeviceError> {
        Ok(self.cuda().address(buffer)?.as_ptr())
    }

    fn abandon(&self) {
        self.cuda().context().abandon();
    }
}
