//! A CPU that tells before each allocation, forward pass and download, and behind each update, for measurements at well-defined moments.

use std::sync::Arc;

use super::hooked::{Hooks, hooked};
use ddp_worker::device::{ArenaSpec, CpuDevice, Device, Stream};
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
    /// The release of what an update has touched: all of it is resident.
    Updated,
}

/// Is told.
pub type Probe = Arc<dyn Fn(Moment) + Send + Sync>;

/// See the module.
pub struct ProbedDevice(Probe);

impl ProbedDevice {
    pub fn telling(probe: Probe) -> Arc<dyn Device> {
        hooked(Self(probe))
    }
}

impl Hooks for ProbedDevice {
    fn allocates(&self, spec: &ArenaSpec) {
        (self.0)(Moment::Allocation(spec.bytes()));
    }

    fn downloads(&self) {
        (self.0)(Moment::Download);
    }

    fn enqueue(&self, cpu: &CpuDevice, stream: Stream, op: Op) {
        if matches!(op, Op::EncoderForward(_)) {
            (self.0)(Moment::Forward);
        }
        let is_update = matches!(op, Op::Update(_));
        cpu.enqueue(stream, op);
        if is_update {
            (self.0)(Moment::Updated);
        }
    }
}
