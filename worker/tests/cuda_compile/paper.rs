//! A GPU on paper: memory of any size that is not there, and operations that are planned and not run.

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ddp_worker::device::{Arena, ArenaSpec, Buffer, Device, DeviceError, Event, Memory, Stream};
use ddp_worker::ops::cuda::{Call, plan};
use ddp_worker::ops::{GeluBackward, GeluForward, Op};

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
    pub(crate) fn ask(&self, op: &Op) {
        let of = self.of.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(outcome) = plan(op) else { return };
        let outcome = outcome.unwrap_or_else(|error| panic!("{of}: `{}`: {error}", op.name()));
        let mut launches = self.launches.lock().unwrap_or_else(PoisonError::into_inner);
        for call in outcome.calls {
            let defines: Vec<String> = call.defines.iter().map(ToString::to_string).collect();
            let key = format!("{} {} {:?}", call.kernel, defines.join(" "), call.grid);
            launches
                .entry(key)
                .or_insert_with(|| Launch { of: of.clone(), call });
        }
    }
}

/// So many bytes that nobody can reach.
struct Nowhere(usize);

// SAFETY: no address is given, so nobody makes a slice of it.
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

/// The kernel of ours that an operation launches beside its product.
fn beside_product(op: &Op) -> Option<Op> {
    match op {
        Op::LinearGeluForward(op) => Some(
            GeluForward {
                inp: op.wide.clone(),
                out: op.out.clone(),
            }
            .into(),
        ),
        Op::LinearGeluBackward(op) => Some(
            GeluBackward {
                inp_out: op.wide_active.clone(),
                dout_dinp: op.dwide.clone(),
            }
            .into(),
        ),
        _ => None,
    }
}

impl Device for Paper {
    fn name(&self) -> String {
        "a GPU on paper".to_owned()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        let memory = Box::new(Nowhere(spec.len * spec.dtype.bytes()));
        Ok(Arena::new(spec.name.clone(), spec.dtype, spec.len, memory))
    }

    fn stream(&self) -> Stream {
        Stream(0)
    }

    fn enqueue(&self, _stream: Stream, op: Op) {
        self.ask(&op);
        if let Some(op) = beside_product(&op) {
            self.ask(&op);
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
