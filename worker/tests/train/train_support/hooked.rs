//! A CPU that passes through the hands of a test what it is given.

use std::sync::Arc;
use std::time::Instant;

use ddp_worker::device::{Arena, ArenaSpec, Buffer, CpuDevice, Device, DeviceError, Event, Stream};
use ddp_worker::ops::Op;

/// Sees what the device is about to do, or does it in its place.
pub trait Hooks: Send + Sync + 'static {
    /// What ranks share is allocated elsewhere.
    fn allocates(&self, _spec: &ArenaSpec) {}
    fn downloads(&self) {}
    fn enqueue(&self, cpu: &CpuDevice, stream: Stream, op: Op) {
        cpu.enqueue(stream, op);
    }
    fn wait_event(&self, cpu: &CpuDevice, stream: Stream, event: &Event, deadline: Instant) {
        cpu.wait_event(stream, event, deadline);
    }
}

struct HookedDevice<H> {
    cpu: CpuDevice,
    hooks: H,
}

pub fn hooked(hooks: impl Hooks) -> Arc<dyn Device> {
    let cpu = CpuDevice::new(1).unwrap();
    Arc::new(HookedDevice { cpu, hooks })
}

impl<H: Hooks> Device for HookedDevice<H> {
    fn name(&self) -> String {
        format!("hooked {}", self.cpu.name())
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        self.hooks.allocates(spec);
        self.cpu.alloc(spec)
    }

    fn stream(&self) -> Stream {
        self.cpu.stream()
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        self.hooks.enqueue(&self.cpu, stream, op);
    }

    fn record(&self, stream: Stream) -> Event {
        self.cpu.record(stream)
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        self.hooks.wait_event(&self.cpu, stream, event, deadline);
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.cpu.synchronize(stream)
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        self.cpu.upload(stream, dst, bytes);
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.hooks.downloads();
        self.cpu.download(stream, src)
    }
}
