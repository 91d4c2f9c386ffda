//! Where the state of a rank lives: memory of the device, memory of the host beside it, or a mapped file. The optimizer
//! allocates its state there, and under ZeRO-3 parameters and gradients may lie there too (`train.offload`). The owner of
//! state puts what touches it on a stream. These operations work element by element, so cutting them changes no bit.
//!
//! - A file is gone through piece by piece, so that no more than a piece of each array is resident. The kernel reads ahead
//!   of an operation and writes back behind it; what it keeps of the file beyond that is cache, which gives way where memory
//!   is needed.
//! - State beside a device with memory of its own (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity, Rajbhandari et al. 2021) is
//!   worked on there. Only what the device makes or reads crosses, piece by piece: gradients to the host, parameters back.
//!   Pieces overlap, and the host goes on meanwhile ([`HostPipeline`]). The kernel is the processor's: the numbers are those
//!   of a run without a device.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::cpu::CpuDevice;
use super::host_work::{HostPass, HostPipeline};
use super::{
    Arena, ArenaSpec, Buffer, Device, DeviceError, FileMemory, HostMemory, Stream, copy_same_length,
};
use crate::ops::{CHUNK, Cast, ColumnSum, HostUpdate, Op, SquaredNorm, Update};

/// Elements of one piece of an operation: large enough that copies run at full speed, small enough that the gradients of
/// the next piece arrive while it is in the processor's caches.
pub const PIECE: usize = 1 << 20;

/// Hint if the file cannot be created.
const HINT: &str =
    "`train.offload.dir` must be a directory with room for the offloaded state of all ranks of the node";

/// Allocates state, and puts what touches it on a stream.
pub struct StateMemory {
    device: Arc<dyn Device>,
    location: StateLocation,
}

enum StateLocation {
    /// On the device, which may stand for another place in a plan.
    Device(StatePlace),
    Host(HostState),
    /// Files without a name in this folder.
    File(PathBuf),
}

/// The memory that holds state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePlace {
    /// That of the device.
    Device,
    /// That of the host, beside a device with memory of its own.
    Host,
    /// A mapped file.
    File,
}

/// Bytes of state by where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateBytes {
    /// In memory of the device: of a file, what an operation keeps resident.
    pub device: usize,
    /// In memory of the host beside a device with memory of its own, and page-locked memory for the way there.
    pub host: usize,
    /// In a file.
    pub file: usize,
}

impl fmt::Debug for StateMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {}", self.place(), self.device.name())
    }
}

impl StateMemory {
    /// In the device's memory.
    pub const fn on_device(device: Arc<dyn Device>) -> Self {
        Self::planned(device, StatePlace::Device)
    }

    /// In the memory of an idle device, counted as if it were in another place.
    pub const fn planned(device: Arc<dyn Device>, place: StatePlace) -> Self {
        let location = StateLocation::Device(place);
        Self { device, location }
    }

    /// In memory of the host, with so many threads for updates, in pieces of so many elements. In the device's memory
    /// where that is the host's.
    pub fn on_host(device: Arc<dyn Device>, threads: usize, piece: usize) -> Result<Self, DeviceError> {
        let location = match HostPipeline::new(&device, slot_bytes(piece))? {
            None => StateLocation::Device(StatePlace::Device),
            Some(pipeline) => StateLocation::Host(HostState {
                host: Arc::new(CpuDevice::new(threads)?),
                pipeline,
                piece,
                state: Mutex::default(),
            }),
        };
        Ok(Self { device, location })
    }

    /// In files of a folder, for a device whose memory is the host's.
    pub fn in_files(device: Arc<dyn Device>, dir: &Path) -> Self {
        let location = StateLocation::File(dir.to_owned());
        Self { device, location }
    }

    /// The device that computes.
    pub const fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The memory that holds what is allocated here.
    pub const fn place(&self) -> StatePlace {
        match self.location {
            StateLocation::Device(place) => place,
            StateLocation::Host(_) => StatePlace::Host,
            StateLocation::File(_) => StatePlace::File,
        }
    }

    /// State on the host beside a device with memory of its own: the device does not reach it.
    pub const fn host_state(&self) -> Option<&HostState> {
        match &self.location {
            StateLocation::Host(state) => Some(state),
            StateLocation::Device(_) | StateLocation::File(_) => None,
        }
    }

    /// Where `state` bytes are, if an operation touches `arrays` arrays at a time.
    pub fn bytes(&self, state: usize, arrays: usize) -> StateBytes {
        let [device, host, file] = match self.place() {
            StatePlace::Device => [state, 0, 0],
            StatePlace::Host => [0, state, 0],
            // A piece of each array, and the next.
            StatePlace::File => [state.min(2 * arrays * PIECE * size_of::<f32>()), 0, state],
        };
        StateBytes { device, host, file }
    }

    /// Page-locked memory through which pieces go.
    pub fn staging_bytes(&self) -> usize {
        match (self.place(), self.host_state()) {
            (StatePlace::Host, Some(state)) => state.pipeline.staging_bytes(),
            (StatePlace::Host, None) => HostPipeline::SLOTS * slot_bytes(PIECE),
            _ => 0,
        }
    }

    /// Zeroed private memory for state.
    pub fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        match &self.location {
            StateLocation::Device(_) => self.device.alloc(spec),
            StateLocation::Host(state) => state.alloc(spec),
            StateLocation::File(dir) => {
                let memory = FileMemory::create(dir, &spec.name, spec.bytes(), HINT)?;
                Ok(Arena::new(spec, memory))
            }
        }
    }

    /// Puts operations at the end of a stream. Those on state are updates, conversions, sums of two arrays and squared norms.
    /// They run in this order, except with state on the host: there those of the device come first and updates last, so
    /// that an operation that needs the result of a later kind belongs in a later call.
    pub fn enqueue_all(&self, stream: Stream, ops: Vec<Op>) {
        match &self.location {
            StateLocation::Device(_) => self.device.enqueue_all(stream, ops),
            StateLocation::Host(state) => state.enqueue_all(self.device.as_ref(), stream, ops),
            StateLocation::File(_) => ops.iter().for_each(|op| self.by_piece(stream, op)),
        }
    }

    /// Puts a copy of `bytes` into a part of the state, or of the device's memory, in stream order.
    pub fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        match self.held_by(dst) {
            Some(state) => state.upload(stream, dst, bytes),
            None => self.device.upload(stream, dst, bytes),
        }
    }

    /// Blocks until the stream is empty; returns its first error since the last call.
    pub fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.device.synchronize(stream)?;
        let on_host = self.host_state();
        on_host.map_or(Ok(()), |state| state.pipeline.failure())
    }

    /// Synchronises, then returns the bytes of a part of the state, or of the device's memory.
    pub fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = vec![0; src.bytes()];
        self.download_to(stream, src, &mut bytes).map(|()| bytes)
    }

    /// As [`StateMemory::download`], to `dst`, which has as many bytes.
    pub fn download_to(&self, stream: Stream, src: &Buffer, dst: &mut [u8]) -> Result<(), DeviceError> {
        if self.held_by(src).is_none() {
            return self.device.download_to(stream, src, dst);
        }
        self.synchronize(stream)?;
        copy_same_length(&src.host_bytes()?, dst)
    }

    /// The state on the host that a buffer is a part of.
    fn held_by(&self, buffer: &Buffer) -> Option<&HostState> {
        self.host_state().filter(|state| state.holds(buffer))
    }

    /// Puts an operation on the stream piece by piece.
    fn by_piece(&self, stream: Stream, op: &Op) {
        let pieces = pieces(op, PIECE);
        for (index, piece) in pieces.iter().enumerate() {
            let next = pieces.get(index + 1);
            next.into_iter()
                .flat_map(buffers)
                .for_each(|next| prefetch(&next));
            self.device.enqueue(stream, piece.clone());
            // On a device that runs later this comes early; that costs time, never a number.
            buffers(piece).iter().for_each(evict);
        }
    }
}

/// Bytes of a slot of page-locked memory: the largest pass brings gradients and a factor in f32, and takes parameters in
/// f32.
const fn slot_bytes(piece: usize) -> usize {
    2 * piece * size_of::<f32>() + 4096
}

/// Parts of an operation on state, each of about `most` elements. Any other operation is not cut.
fn pieces(op: &Op, most: usize) -> Vec<Op> {
    match (op, Elementwise::of(op)) {
        (Op::Update(op), _) => {
            let ranges = ranges(op.param.len(), most);
            ranges.map(|range| op.slice(&range).into()).collect()
        }
        (_, Some(Elementwise { x, out, each, of })) => {
            let part = |range: Range<usize>| {
                let out = out.slice(range.start / each..range.end.div_ceil(each));
                of(x.slice(range), out)
            };
            ranges(x.len(), most.next_multiple_of(each)).map(part).collect()
        }
        _ => vec![op.clone()],
    }
}

/// Ranges of `most` elements, and what is left.
fn ranges(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = (0..len).step_by(most);
    starts.map(move |start| start..len.min(start + most))
}

/// What of `buffer` lies in a file need not be resident for a while; other memory stays. To be called behind each part of
/// the state that is read or written outside an operation.
pub fn evict(buffer: &Buffer) {
    if let Some(memory) = buffer.arena().memory_as::<FileMemory>() {
        memory.evict(buffer.start()..buffer.start() + buffer.bytes());
    }
}

/// What of `buffer` lies in a file will be wanted soon; other memory is there.
pub fn prefetch(buffer: &Buffer) {
    if let Some(memory) = buffer.arena().memory_as::<FileMemory>() {
        memory.prefetch(buffer.start()..buffer.start() + buffer.bytes());
    }
}

/// What of an operation may lie in files.
fn buffers(op: &Op) -> Vec<Buffer> {
    match (op, Elementwise::of(op)) {
        (Op::Update(op), _) => {
            let arrays = op.slots.iter().chain(&op.copy);
            arrays.chain([&op.param, &op.grad]).cloned().collect()
        }
        (_, Some(Elementwise { x, out, .. })) => vec![x, out],
        _ => Vec::new(),
    }
}

/// An operation that makes each element of `out` of the one at its place in `x`, or of a chunk of `x`.
struct Elementwise {
    x: Buffer,
    out: Buffer,
    /// Elements of `x` for one of `out`.
    each: usize,
    of: fn(Buffer, Buffer) -> Op,
}

impl Elementwise {
    fn of(op: &Op) -> Option<Self> {
        let (x, out, each, of): (_, _, _, fn(Buffer, Buffer) -> Op) = match op {
            Op::Cast(Cast { x, out }) => (x, out, 1, |x, out| Cast { x, out }.into()),
            Op::ColumnSum(ColumnSum { x, out, accumulate }) if *accumulate && x.len() == out.len() => {
                (x, out, 1, |x, out| {
                    let accumulate = true;
                    ColumnSum { x, out, accumulate }.into()
                })
            }
            Op::SquaredNorm(SquaredNorm { x, partials }) => (x, partials, CHUNK, |x, partials| {
                SquaredNorm { x, partials }.into()
            }),
            _ => return None,
        };
        let (x, out) = (x.clone(), out.clone());
        Some(Self { x, out, each, of })
    }
}

/// State on the host. What touches it is done by the processor, in the order of the stream.
pub struct HostState {
    host: Arc<CpuDevice>,
    pipeline: HostPipeline,
    piece: usize,
    state: Mutex<Vec<Arena>>,
}

impl HostState {
    /// Threads that update.
    pub fn threads(&self) -> usize {
        self.host.cpu().threads()
    }

    /// All of it is there on return.
    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        HostMemory::check_room(&spec.name, spec.bytes(), 1)?;
        let arena = self.host.alloc(spec)?;
        // The system gives the pages now, not in the middle of the first step.
        arena.whole().host_bytes_mut()?.fill(0);
        self.state.lock().push(arena.clone());
        Ok(arena)
    }

    /// Puts operations on the stream: those that touch no state, then conversions, sums and squared norms, then updates,
    /// each kind in the order given. Updates that are given together overlap, and share passes where they are neighbours.
    fn enqueue_all(&self, device: &dyn Device, stream: Stream, ops: Vec<Op>) {
        let (mut updates, mut passes) = (Vec::new(), Vec::new());
        for op in ops {
            let is_here = |op: Elementwise| self.holds(&op.x) || self.holds(&op.out);
            match op {
                Op::Update(op) if self.holds(&op.param) => updates.push(op),
                op if Elementwise::of(&op).is_some_and(is_here) => {
                    let pieces = pieces(&op, self.piece);
                    passes.extend(pieces.iter().filter_map(Elementwise::of).map(|op| self.pass(op)));
                }
                op => device.enqueue(stream, op),
            }
        }
        let pieces = UpdatePiece::all(&updates, self.piece).into_iter();
        passes.extend(pieces.map(|piece| piece.pass(self)));
        self.pipeline.run(stream, passes);
    }

    /// Puts a copy of `bytes` into a part of the state, in stream order.
    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        let (state, bytes) = (dst.clone(), bytes.to_vec());
        let pass = HostPass {
            inputs: Vec::new(),
            outputs: Vec::new(),
            work: Box::new(move |_, _| copy_same_length(&bytes, &mut state.host_bytes_mut()?)),
        };
        self.pipeline.run(stream, vec![pass]);
    }

    /// True if this was allocated here.
    fn holds(&self, buffer: &Buffer) -> bool {
        self.state.lock().iter().any(|arena| arena.same(buffer.arena()))
    }

    /// The buffer, if it is a part of the state. Work of the host keeps no other: a thread of the driver drops it.
    fn kept(&self, buffer: &Buffer) -> Option<Buffer> {
        self.holds(buffer).then(|| buffer.clone())
    }

    /// An operation on state alone, or between state and memory of the device.
    fn pass(&self, Elementwise { x, out, of, .. }: Elementwise) -> HostPass {
        let (host, kept_x, kept_out) = (self.host.clone(), self.kept(&x), self.kept(&out));
        HostPass {
            inputs: if kept_x.is_some() { vec![] } else { vec![x] },
            outputs: if kept_out.is_some() { vec![] } else { vec![out] },
            work: Box::new(move |read, written| {
                let x = kept_x.unwrap_or_else(|| read[0].clone());
                let out = kept_out.unwrap_or_else(|| written[0].clone());
                of(x, out).run(host.cpu())
            }),
        }
    }
}

/// Elements that lie side by side in gradients, parameters and state, and the updates of parts of them.
struct UpdatePiece {
    /// Gradients, masters, and the parameters that follow them: the masters themselves where they are no copy.
    buffers: [Buffer; 3],
    updates: Vec<(Range<usize>, Update)>,
}

impl UpdatePiece {
    /// Cuts updates, and joins neighbours up to `most` elements. Between two that are joined lies padding.
    fn all(ops: &[Update], most: usize) -> Vec<Self> {
        let mut pieces: Vec<Self> = Vec::new();
        for op in ops {
            for range in ranges(op.param.len(), most) {
                let update = op.slice(&range);
                match pieces.last_mut().filter(|piece| piece.takes(&update, most)) {
                    Some(piece) => piece.join(update),
                    None => pieces.push(Self::of(update)),
                }
            }
        }
        pieces
    }

    fn of(update: Update) -> Self {
        Self {
            buffers: updated(&update).map(Buffer::clone),
            updates: vec![(0..update.param.len(), update)],
        }
    }

    /// True if the next update follows with the same distance everywhere, and both have `most` elements at most. What lies
    /// between belongs to no parameter.
    fn takes(&self, next: &Update, most: usize) -> bool {
        let mut gaps = self.buffers.iter().zip(updated(next)).map(|(own, next)| {
            let gap = next.range().start.checked_sub(own.range().end);
            gap.filter(|_| own.arena().same(next.arena()))
        });
        let Some(Some(gap)) = gaps.next() else {
            return false;
        };
        gaps.all(|other| other == Some(gap))
            && self.updates[0].1.scale.arena().same(next.scale.arena())
            && self.buffers[0].len() + gap + next.param.len() <= most
    }

    fn join(&mut self, update: Update) {
        let start = update.grad.range().start - self.buffers[0].range().start;
        let end = start + update.param.len();
        for buffer in &mut self.buffers {
            let first = buffer.range().start;
            *buffer = buffer.arena().slice(first..first + end);
        }
        self.updates.push((start..end, update));
    }

    /// The last operation reads all masters of the piece: where an update is skipped, and between two, parameters
    /// become what they are.
    fn pass(self, state: &HostState) -> HostPass {
        let Self { buffers, updates } = self;
        let [grad, param, copy] = buffers;
        let (host, each) = (state.host.clone(), grad.dtype().bytes());
        let [kept_grad, kept_copy] = [&grad, &copy].map(|buffer| state.kept(buffer));
        let mut inputs = vec![updates[0].1.scale.clone()];
        inputs.extend(kept_grad.is_none().then_some(grad));
        let updates: Vec<(Range<usize>, HostUpdate)> = updates
            .into_iter()
            .map(|(range, update)| (range, update.on_host()))
            .collect();
        HostPass {
            inputs,
            outputs: kept_copy.is_none().then_some(copy).into_iter().collect(),
            work: Box::new(move |read, written| {
                let scale = read[0].host::<f32>()?;
                let grads = kept_grad.as_ref().unwrap_or_else(|| &read[1]).host_bytes()?;
                for (range, update) in &updates {
                    let grad = &grads[range.start * each..range.end * each];
                    update.run(host.cpu(), grad, None, &scale)?;
                }
                let out = kept_copy.unwrap_or_else(|| written[0].clone());
                if out.same(&param) {
                    return Ok(());
                }
                Op::from(Cast { x: param, out }).run(host.cpu())
            }),
        }
    }
}

/// Gradients, masters, and the parameters that an update leaves: the masters, where they are no copy.
fn updated(op: &Update) -> [&Buffer; 3] {
    [&op.grad, &op.param, op.copy.as_ref().unwrap_or(&op.param)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{CpuDevice, DType};
    use crate::ops::{Rates, Runs};
    use crate::optim::adamw;

    /// Resident bytes of the mapping that begins at an address.
    fn resident(address: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{address:x}-");
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let line = lines
            .find(|line| line.starts_with("Rss:"))
            .expect("the mapping is listed");
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
    }

    #[test]
    fn an_update_in_a_file_has_the_same_bits_and_leaves_nothing_resident() {
        // The last piece is a short one.
        const LEN: usize = 3 * PIECE + 4321;
        let dir = tempfile::tempdir().unwrap();
        let cpu: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        let homes = [
            StateMemory::on_device(cpu.clone()),
            StateMemory::in_files(cpu.clone(), dir.path()),
        ];
        let stream = cpu.stream();
        let spec = |name: &str, len| ArenaSpec::private(name, DType::F32, len);
        let train = |home: &StateMemory| {
            let [param, grad] = ["p", "g"].map(|name| cpu.alloc(&spec(name, LEN)).unwrap().whole());
            let [m, v] = ["m", "v"].map(|name| home.alloc(&spec(name, LEN)).unwrap().whole());
            let scale = cpu.alloc(&spec("scale", 1)).unwrap().whole();
            scale.host_mut::<f32>().unwrap()[0] = 0.5;
            for (i, g) in grad.host_mut::<f32>().unwrap().iter_mut().enumerate() {
                *g = (i % 997) as f32 - 300.0;
            }
            for step in 1..=3 {
                let rates = Rates {
                    lr: 0.01,
                    weight_decay: 0.1,
                };
                let update = Update {
                    rule: adamw([0.9, 0.95], 1e-8),
                    param: param.clone(),
                    copy: None,
                    grad: grad.clone(),
                    slots: vec![m.clone(), v.clone()],
                    scale: scale.clone(),
                    runs: Runs::uniform(LEN, rates),
                    step,
                };
                home.enqueue_all(stream, vec![update.into()]);
            }
            cpu.synchronize(stream).unwrap();
            [param, m, v]
        };
        let [expected, found] = homes.each_ref().map(train);
        for state in &found[1..] {
            let address = state.arena().memory().host_ptr().unwrap().as_ptr() as usize;
            assert!(state.arena().memory_as::<FileMemory>().is_some());
            // Neighbouring pieces share a page.
            assert!(resident(address) <= 4 * 4096, "{} resident", resident(address));
        }
        for (expected, found) in expected.iter().zip(&found) {
            assert!(expected.host_bytes().unwrap()[..] == found.host_bytes().unwrap()[..]);
        }
    }
}
