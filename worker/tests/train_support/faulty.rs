//! A CPU that goes wrong in a chosen step.

use std::sync::Arc;
use std::time::Instant;

use ddp_worker::device::{Arena, ArenaSpec, Buffer, CpuDevice, Device, DeviceError, Event, Stream};
use ddp_worker::ops::Op;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The update of the step never happens, and the stream says so.
    Fails,
    /// A bit of the first parameter that is updated flips, and nobody says so.
    FlipsBit,
}

/// See the module.
pub struct FaultyDevice {
    cpu: CpuDevice,
    fault: Fault,
    /// From 1.
    step: u64,
}

impl FaultyDevice {
    pub fn going_wrong(fault: Fault, step: u64) -> Arc<dyn Device> {
        Arc::new(Self {
            cpu: CpuDevice::new(1).unwrap(),
            fault,
            step,
        })
    }
}

impl Device for FaultyDevice {
    fn name(&self) -> String {
        format!("faulty {}", self.cpu.name())
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        self.cpu.alloc(spec)
    }

    fn stream(&self) -> Stream {
        self.cpu.stream()
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        let hit = match &op {
            Op::AdamW(update) if update.hyper.step == self.step => Some(update.param.clone()),
            _ => None,
        };
        match (hit, self.fault) {
            (Some(_), Fault::Fails) => {
                let (event, signal) = Event::pair("the update");
                signal.set(Err(DeviceError::Upstream("the device broke".into())));
                self.cpu.wait_event(stream, &event, Instant::now());
            }
            (Some(param), Fault::FlipsBit) if param.range().start == 0 => {
                self.cpu.enqueue(stream, op);
                let mut elements = param.host_mut::<f32>().unwrap();
                elements[0] = f32::from_bits(elements[0].to_bits() ^ 1);
            }
            _ => self.cpu.enqueue(stream, op),
        }
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
        self.cpu.download(stream, src)
    }
}
