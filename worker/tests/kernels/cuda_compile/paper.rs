//! A GPU on paper: operations are planned and written down, and do not run.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ddp_worker::device::{Arena, ArenaSpec, Buffer, Device, DeviceError, Event, IdleDevice, Stream};
use ddp_worker::ops::Op;
use ddp_worker::ops::cuda::{Call, plan};

/// A launch that something asked for.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// Whose, for people: `a step of GPT-2 124M`.
    pub(crate) of: String,
    pub(crate) call: Call,
}

/// Remembers each different launch once, by kernel, definitions and grid.
#[derive(Default)]
pub(crate) struct Paper {
    launches: Mutex<BTreeMap<String, Launch>>,
    of: Mutex<String>,
}

impl Paper {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A device with memory of any size, whose operations come to this paper.
    pub(crate) fn device(self: &Arc<Self>) -> Arc<dyn Device> {
        Arc::new(PaperDevice(self.clone()))
    }

    /// Whose all operations are from now on.
    pub(crate) fn begin(&self, of: &str) {
        of.clone_into(&mut self.of.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// All so far, those of one kernel together.
    pub(crate) fn launches(&self) -> Vec<Launch> {
        let launches = self.launches.lock().unwrap_or_else(PoisonError::into_inner);
        launches.values().cloned().collect()
    }

    /// Plans an operation; without a word if it has no kernel of ours.
    fn ask(&self, op: &Op) {
        let of = self.of.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(outcome) = plan(op) else { return };
        let outcome = outcome.unwrap_or_else(|error| panic!("{of}: `{}`: {error}", op.name()));
        let mut launches = self.launches.lock().unwrap_or_else(PoisonError::into_inner);
        for call in outcome.calls {
            let defines: Vec<String> = call.unit.defines.iter().map(ToString::to_string).collect();
            let key = format!("{} {} {:?}", call.kernel, defines.join(" "), call.grid);
            launches
                .entry(key)
                .or_insert_with(|| Launch { of: of.clone(), call });
        }
    }
}

/// An idle device whose operations come to a paper.
struct PaperDevice(Arc<Paper>);

impl Device for PaperDevice {
    fn name(&self) -> String {
        IdleDevice.name()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        IdleDevice.alloc(spec)
    }

    fn stream(&self) -> Stream {
        IdleDevice.stream()
    }

    fn enqueue(&self, _stream: Stream, op: Op) {
        self.0.ask(&op);
    }

    fn record(&self, stream: Stream) -> Event {
        IdleDevice.record(stream)
    }

    fn wait_event(&self, _stream: Stream, _event: &Event, _deadline: Instant) {}

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        IdleDevice.synchronize(stream)
    }

    fn upload(&self, _stream: Stream, _dst: &Buffer, _bytes: &[u8]) {}

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        IdleDevice.download(stream, src)
    }
}
