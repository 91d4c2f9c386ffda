//! Work of the host between operations of a device that has memory of its own.
//!
//! [`HostSide`] is what such a device offers: page-locked memory, copies, and calls of the host in a stream.
//! [`HostPipeline`] makes something safe of it: numbers are brought to the host, worked on, and the results brought back,
//! while the host goes on and neighbours overlap. Each pass takes the next of a few *slots* of page-locked memory and goes
//! through three streams, in which events keep it behind the pass before and behind the last one that used its slot:
//!
//! ```text
//! down   inputs of 0 | inputs of 1 | inputs of 2 | …
//! host               | work of 0   | work of 1   | work of 2 | …
//! up                               | results of 0| results of 1 | …
//! ```
#![allow(
    unsafe_code,
    reason = "copies that run later, into memory that the host can reach"
)]

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Event, Stream};

/// Work of the host in a stream. It is called once, when the stream gets there, maybe by a thread of the device's
/// driver: it must not call the device. What it owns is dropped later, by a thread that may.
pub type HostWork = Box<dyn FnMut() + Send>;

/// What a device offers beside its own memory; [`super::HostPipeline`] makes something safe of it.
pub trait HostSide: Send + Sync {
    /// Zeroed memory of the host, to and from which the device copies while the host goes on: page-locked on a GPU.
    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError>;

    /// A new stream with a name for errors and traces.
    fn named_stream(&self, name: &str) -> Stream;

    /// Puts a copy of `from` into `to`, which has as many bytes, on the stream. One of them is the device's, the
    /// other one from [`HostSide::alloc`].
    ///
    /// # Safety
    /// The device does not borrow the host's side as the host does. From now until the copy has ended nobody but work
    /// that the stream orders before or after it may touch that range.
    unsafe fn copy(&self, stream: Stream, from: &Buffer, to: &Buffer);

    /// Puts `work` on the stream.
    fn run(&self, stream: Stream, work: HostWork);
}

/// Longest wait for what is in flight. Collectives that never end are ended by their communicator long before; this
/// bounds a device that has stopped answering.
const PATIENCE: Duration = Duration::from_mins(30);

/// What the host does with the inputs; every byte of the results is to be written. Both lie in page-locked memory.
pub type PassWork = Box<dyn FnOnce(&[Buffer], &[Buffer]) -> Result<(), DeviceError> + Send>;

/// Some work of the host.
pub struct HostPass {
    /// Read, in the device's memory.
    pub inputs: Vec<Buffer>,
    /// Written, in the device's memory.
    pub outputs: Vec<Buffer>,
    /// Runs in a thread that must not call the device, nor free its memory: it owns memory of the host alone. What it
    /// touches of that is refused to others by its arena meanwhile.
    pub work: PassWork,
}

impl HostPass {
    /// Bytes that it takes in a slot.
    pub fn bytes(&self) -> usize {
        let buffers = self.inputs.iter().chain(&self.outputs);
        buffers
            .map(|b| b.bytes().next_multiple_of(Arena::ALIGNMENT))
            .sum()
    }
}

/// Carries the inputs and outputs of [`HostPass`]es between device and host.
pub struct HostPipeline {
    device: Arc<dyn Device>,
    down: Stream,
    host: Stream,
    up: Stream,
    /// Page-locked memory, the least recently used first, each with the event after which its last pass has left.
    slots: Mutex<VecDeque<(Arena, Event)>>,
    slot_bytes: usize,
    failure: Arc<OnceLock<DeviceError>>,
}

impl HostPipeline {
    /// With three slots, one is filled while one is worked on and one is emptied.
    pub const SLOTS: usize = 3;

    /// For passes of at most so many bytes. None for a device whose memory is the host's: there is nothing to carry.
    pub fn new(device: &Arc<dyn Device>, slot_bytes: usize) -> Result<Option<Self>, DeviceError> {
        let Some(side) = device.host_side() else {
            return Ok(None);
        };
        let slot = |_| {
            let memory = side.alloc(&ArenaSpec::private("page-locked staging", DType::U8, slot_bytes))?;
            Ok((memory, Event::reached()))
        };
        let slots: Result<_, DeviceError> = (0..Self::SLOTS).map(slot).collect();
        Ok(Some(Self {
            slots: Mutex::new(slots?),
            down: side.named_stream("copy to the host"),
            host: side.named_stream("work of the host"),
            up: side.named_stream("copy from the host"),
            failure: Arc::default(),
            device: device.clone(),
            slot_bytes,
        }))
    }

    /// Page-locked memory of all slots.
    pub const fn staging_bytes(&self) -> usize {
        Self::SLOTS * self.slot_bytes
    }

    /// Puts passes on a stream: the first one begins when what is in the stream has run, and what comes later in it
    /// runs after the last one. The work of one is done before that of the next begins. A failure fails the stream at
    /// the next call; [`HostPipeline::failure`] returns it before.
    ///
    /// # Panics
    /// If a pass is larger than a slot.
    pub fn run(&self, stream: Stream, passes: Vec<HostPass>) {
        let deadline = Instant::now() + PATIENCE;
        let device = self.device.as_ref();
        if let Err(error) = self.failure() {
            device.wait_event(stream, &Event::failed(error), deadline);
            return;
        }
        if passes.is_empty() {
            return;
        }
        device.wait_event(self.down, &device.record(stream), deadline);
        for pass in passes {
            self.enqueue(pass, deadline);
        }
        // Passes land in order.
        device.wait_event(stream, &device.record(self.up), deadline);
    }

    /// The first error of any work. After it no work is done any more, and results are arbitrary.
    pub fn failure(&self) -> Result<(), DeviceError> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn enqueue(&self, pass: HostPass, deadline: Instant) {
        assert!(pass.bytes() <= self.slot_bytes, "a pass is larger than its slot");
        let device = self.device.as_ref();
        let side = device.host_side().expect("it had one when this was made");
        let mut slots = self.slots.lock();
        let (memory, free) = slots.pop_front().expect("as many as there are slots");
        let (inputs, outputs) = cut(&memory, &pass);
        device.wait_event(self.down, &free, deadline);
        for (from, to) in pass.inputs.iter().zip(&inputs) {
            // SAFETY: only this file uses the slots. The last pass that used this one has landed before `down` goes
            // on, its work with it; this pass's own work waits for `down` below.
            unsafe { side.copy(self.down, from, to) };
        }
        device.wait_event(self.host, &device.record(self.down), deadline);
        let (failure, mut work) = (self.failure.clone(), Some(pass.work));
        let (read, written) = (inputs, outputs.clone());
        // The slot stays with the closure, which a thread drops that may free it.
        let job = move || {
            if let (Some(work), None) = (work.take(), failure.get())
                && let Err(error) = work(&read, &written)
            {
                // No other work runs meanwhile.
                let _ = failure.set(error);
            }
        };
        side.run(self.host, Box::new(job));
        device.wait_event(self.up, &device.record(self.host), deadline);
        for (from, to) in outputs.iter().zip(&pass.outputs) {
            // SAFETY: the work that writes the range has ended before `up` goes on, and no other pass uses the slot
            // before the event recorded below.
            unsafe { side.copy(self.up, from, to) };
        }
        slots.push_back((memory, device.record(self.up)));
    }
}

/// The parts of a slot that hold inputs and outputs.
fn cut(slot: &Arena, pass: &HostPass) -> (Vec<Buffer>, Vec<Buffer>) {
    let mut end = 0_usize;
    let mut part = |buffer: &Buffer| {
        let start = end.next_multiple_of(Arena::ALIGNMENT);
        end = start + buffer.bytes();
        let name = buffer.arena().name().to_owned();
        slot.part(start, name, buffer.dtype(), buffer.len()).whole()
    };
    let inputs = pass.inputs.iter().map(&mut part).collect();
    (inputs, pass.outputs.iter().map(&mut part).collect())
}
