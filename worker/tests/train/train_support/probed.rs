//! A CPU that tells before each allocation, forward pass and download, for measurements at well-defined moments.

use std::sync::Arc;
use std::time::Instant;

use ddp_worker::device::{Arena, ArenaSpec, Buffer, CpuDevice, Device, DeviceError, Event, Stream};
use ddp_worker::ops::Op;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The forward pass of a micro-batch: before the first step, all of the state is in its place.
    Forward,
    /// So many bytes of memory of its own; what ranks share is allocated elsewhere.
    Allocation(usize),
    /// A download: a save makes one for each part of what it writes.
    Download,
}

/// Is told.
pub type Probe = Arc<dyn Fn(Moment) + Send + Sync>;

/// See the module.
pub struct ProbedDevice {
    cpu: CpuDevice,
    probe: Probe,
}

impl ProbedDevice {
    pub fn telling(probe: Probe) -> Arc<dyn Device> {
        let cpu = CpuDevice::new(1).unwrap();
        Arc::new(Self { cpu, probe })
    }
}

impl Device for ProbedDevice {
    fn name(&self) -> String {
        format!("probed {}", self.cpu.name())
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        (self.probe)(Moment::Allocation(spec.bytes()));
        self.cpu.alloc(spec)
    }

    fn stream(&self) -> Stream {
        self.cpu.stream()
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        if matches!(op, Op::EncoderForward(_)) {
            (self.probe)(Moment::Forward);
        }
        self.cpu.enqueue(stream, op);
    }

    fn record(&self, stream: Stream) -> Event {
        self.cpu.record(stream)
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        self.cpu.wait_event(stream, event, deadline);
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.cpu.synchronize(stream)
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        self.cpu.upload(stream, dst, bytes);
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        (self.probe)(Moment::Download);
        self.cpu.download(stream, src)
    }
}
