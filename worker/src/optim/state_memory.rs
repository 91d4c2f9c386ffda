//! Where the optimizer's state lives: memory of the device, memory of the host beside it, or a mapped file. An optimizer
//! allocates its state there, and puts what touches it on a stream. An update is element by element, so cutting it changes
//! no bit.
//!
//! - A file is gone through piece by piece, so that no more than a piece of each slot is resident. The kernel reads ahead of
//!   the update and writes back behind it; what it keeps of the file beyond that is cache, which gives way where memory is
//!   needed.
//! - Beside a device with memory of its own (ZeRO-Offload, Ren et al. 2021) state and masters never cross. An update brings
//!   gradients to the host piece by piece, updates there, and takes the parameters back; pieces overlap, and the host goes on
//!   meanwhile ([`HostPipeline`]). The kernel is the processor's: the numbers are those of a run without a device.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::device::{
    Arena, ArenaSpec, Buffer, CpuDevice, DType, Device, DeviceError, FileMemory, HostMemory, HostPass,
    HostPipeline, Stream, copy_same_length,
};
use crate::ops::{Cast, HostUpdate, Op, Update, cast_bytes};

/// Elements of one piece of an update: large enough that copies run at full speed, small enough that the gradients of
/// the next piece arrive while it is in the processor's caches.
pub const PIECE: usize = 1 << 20;

/// Hint if the file cannot be created.
const HINT: &str =
    "`train.offload.dir` must be a directory with room for the optimizer state of all ranks of the node";

/// Allocates the optimizer's state, and puts what touches it on a stream.
pub struct StateMemory {
    device: Arc<dyn Device>,
    location: StateLocation,
}

enum StateLocation {
    /// Beside the parameters.
    Device,
    Host(HostState),
    /// Files without a name in this folder.
    File(PathBuf),
}

/// Bytes of state and masters by where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBytes {
    /// In memory of the device: of a file, what an update keeps resident.
    pub device: usize,
    /// In memory of the host beside a device with memory of its own, and page-locked memory for the way there.
    pub host: usize,
    /// In a file.
    pub file: usize,
}

impl StateMemory {
    /// In the device's memory.
    pub const fn on_device(device: Arc<dyn Device>) -> Self {
        let location = StateLocation::Device;
        Self { device, location }
    }

    /// In memory of the host, with so many threads for updates, in pieces of so many elements. In the device's memory
    /// where that is the host's.
    pub fn on_host(device: Arc<dyn Device>, threads: usize, piece: usize) -> Result<Self, DeviceError> {
        // The largest pass brings gradients and a factor in f32, and takes parameters in f32.
        let slot = 2 * piece * size_of::<f32>() + 4096;
        let location = match HostPipeline::new(&device, slot)? {
            None => StateLocation::Device,
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

    /// The device that the parameters are on.
    pub const fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// State on the host beside a device with memory of its own: the device does not reach it.
    pub const fn host_state(&self) -> Option<&HostState> {
        match &self.location {
            StateLocation::Host(state) => Some(state),
            StateLocation::Device | StateLocation::File(_) => None,
        }
    }

    /// Where so many bytes of state and masters are.
    pub fn bytes(&self, state: usize) -> StateBytes {
        let [device, host, file] = match &self.location {
            StateLocation::Device => [state, 0, 0],
            StateLocation::Host(on_host) => [0, state + on_host.staging_bytes(), 0],
            // A piece of the masters and of two slots, the most that there are, and the next.
            StateLocation::File(_) => [state.min(2 * 3 * PIECE * size_of::<f32>()), 0, state],
        };
        StateBytes { device, host, file }
    }

    /// Zeroed private memory for state.
    pub fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        match &self.location {
            StateLocation::Device => self.device.alloc(spec),
            StateLocation::Host(state) => state.alloc(spec),
            StateLocation::File(dir) => {
                let memory = FileMemory::create(dir, &spec.name, spec.bytes(), HINT)?;
                Ok(Arena::new(spec, memory))
            }
        }
    }

    /// Puts updates and conversions at the end of a stream, in this order.
    pub fn enqueue_all(&self, stream: Stream, ops: Vec<Op>) {
        match &self.location {
            StateLocation::Device => self.device.enqueue_all(stream, ops),
            StateLocation::Host(state) => state.enqueue_all(self.device.as_ref(), stream, ops),
            StateLocation::File(_) => ops.into_iter().for_each(|op| self.by_piece(stream, op)),
        }
    }

    /// Puts a copy of `bytes` into a part of the state, or of the parameters, in stream order.
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

    /// Synchronises, then returns the bytes of a part of the state, or of the parameters.
    pub fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        if self.held_by(src).is_none() {
            return self.device.download(stream, src);
        }
        self.synchronize(stream)?;
        Ok(src.host_bytes()?.to_vec())
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
    fn by_piece(&self, stream: Stream, op: Op) {
        // What may lie in files.
        let (len, buffers) = match &op {
            Op::Update(Update { param, slots, .. }) => {
                (param.len(), slots.iter().chain([param]).cloned().collect())
            }
            Op::Cast(Cast { x, out }) => (x.len(), vec![x.clone(), out.clone()]),
            _ => return self.device.enqueue(stream, op),
        };
        for piece in pieces(len, PIECE) {
            let next = piece.end..len.min(piece.end + PIECE);
            in_files(&buffers, FileMemory::prefetch, &next);
            let op = match &op {
                Op::Update(op) => op.slice(&piece).into(),
                Op::Cast(op) => op.slice(&piece).into(),
                other => other.clone(),
            };
            self.device.enqueue(stream, op);
            // On a device that runs later this comes early; that costs time, never a number.
            in_files(&buffers, FileMemory::evict, &piece);
        }
    }
}

/// Ranges of `most` elements, and what is left.
fn pieces(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = (0..len).step_by(most);
    starts.map(move |start| start..len.min(start + most))
}

/// What of `buffer` lies in a file need not be resident for a while; other memory stays. To be called behind each part of
/// the state that is read or written outside an update.
pub fn evict(buffer: &Buffer) {
    in_files(
        std::slice::from_ref(buffer),
        FileMemory::evict,
        &(0..buffer.len()),
    );
}

/// `visit`s the bytes that elements `range` of each buffer are, where they lie in files.
fn in_files(buffers: &[Buffer], visit: impl Fn(&FileMemory, Range<usize>), range: &Range<usize>) {
    for buffer in buffers {
        if let Some(memory) = buffer.arena().memory_as::<FileMemory>() {
            let byte = |element: usize| buffer.start() + element * buffer.dtype().bytes();
            visit(memory, byte(range.start)..byte(range.end));
        }
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
    /// Page-locked memory of the host through which pieces go.
    pub const fn staging_bytes(&self) -> usize {
        self.pipeline.staging_bytes()
    }

    /// Threads that update.
    pub fn threads(&self) -> usize {
        self.host.cpu().threads()
    }

    /// All of it is there on return.
    pub(super) fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        HostMemory::check_room(&spec.name, spec.bytes(), 1)?;
        let arena = self.host.alloc(spec)?;
        // The system gives the pages now, not in the middle of the first step.
        arena.whole().host_bytes_mut()?.fill(0);
        self.state.lock().push(arena.clone());
        Ok(arena)
    }

    /// Puts operations that touch the state on the stream, others on that of the device. Updates that are given together
    /// overlap, and share passes where they are neighbours.
    pub(super) fn enqueue_all(&self, device: &dyn Device, stream: Stream, ops: Vec<Op>) {
        let (mut updates, mut passes) = (Vec::new(), Vec::new());
        for op in ops {
            match op {
                Op::Update(op) if self.holds(&op.param) => updates.push(op),
                Op::Cast(op) if self.holds(&op.x) || self.holds(&op.out) => {
                    passes.extend(pieces(op.x.len(), self.piece).map(|piece| self.convert(op.slice(&piece))));
                }
                other => device.enqueue(stream, other),
            }
        }
        let pieces = UpdatePiece::all(&updates, self.piece).into_iter();
        passes.extend(pieces.map(|piece| piece.pass(&self.host)));
        self.pipeline.run(stream, passes);
    }

    /// Puts a copy of `bytes` into a part of the state, in stream order.
    pub(super) fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        let (state, bytes) = (dst.clone(), bytes.to_vec());
        let pass = HostPass {
            inputs: Vec::new(),
            outputs: Vec::new(),
            work: Box::new(move |_, _| copy_same_length(&bytes, &mut state.host_bytes_mut()?)),
        };
        self.pipeline.run(stream, vec![pass]);
    }

    /// True if this was allocated here.
    pub(super) fn holds(&self, buffer: &Buffer) -> bool {
        self.state.lock().iter().any(|arena| arena.same(buffer.arena()))
    }

    /// A conversion between state and memory of the device.
    fn convert(&self, Cast { x, out }: Cast) -> HostPass {
        let host = self.host.clone();
        let (from, to) = (x.dtype(), out.dtype());
        if self.holds(&x) {
            return HostPass {
                inputs: Vec::new(),
                outputs: vec![out],
                work: Box::new(move |_, written| {
                    cast_bytes(host.cpu(), from, &x.host_bytes()?, to, written[0])
                }),
            };
        }
        HostPass {
            inputs: vec![x],
            outputs: Vec::new(),
            work: Box::new(move |read, _| {
                cast_bytes(host.cpu(), from, read[0], to, &mut out.host_bytes_mut()?)
            }),
        }
    }
}

/// Elements that lie side by side in gradients, parameters and state, and the updates of parts of them.
struct UpdatePiece {
    /// Gradients, masters, and the parameters on the device.
    buffers: [Buffer; 3],
    updates: Vec<(Range<usize>, Update)>,
}

impl UpdatePiece {
    /// Joins updates up to `most` elements, and cuts longer ones. Between two that are joined lies padding.
    fn all(ops: &[Update], most: usize) -> Vec<Self> {
        let mut pieces: Vec<Self> = Vec::new();
        for op in ops {
            let mut start = 0;
            while start < op.param.len() {
                let room = pieces.last().and_then(|piece| piece.room_for(op, start, most));
                let end = op.param.len().min(start + room.unwrap_or(most));
                let update = op.slice(&(start..end));
                match (room, pieces.last_mut()) {
                    (Some(_), Some(piece)) => piece.join(update),
                    _ => pieces.push(Self::of(update)),
                }
                start = end;
            }
        }
        pieces
    }

    fn of(update: Update) -> Self {
        Self {
            buffers: buffers(&update).map(Buffer::clone),
            updates: vec![(0..update.param.len(), update)],
        }
    }

    /// How many elements of `op`, from its element `start` on, can join. None if it does not follow with the same
    /// distance everywhere; if it does, what lies between belongs to no parameter.
    fn room_for(&self, op: &Update, start: usize, most: usize) -> Option<usize> {
        let mut gaps = self.buffers.iter().zip(buffers(op)).map(|(own, next)| {
            let gap = (next.range().start + start).checked_sub(own.range().end);
            gap.filter(|_| own.arena().same(next.arena()))
        });
        let gap = gaps.next()??;
        let scale = &self.updates[0].1.scale;
        let follows = gaps.all(|other| other == Some(gap)) && scale.arena().same(op.scale.arena());
        let room = most.checked_sub(self.buffers[0].len() + gap)?;
        (follows && room > 0).then_some(room)
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
    fn pass(self, host: &Arc<CpuDevice>) -> HostPass {
        let Self { buffers, updates } = self;
        let [grad, param, copy] = buffers;
        let host = host.clone();
        let (each, to) = (grad.dtype().bytes(), copy.dtype());
        let scale = updates[0].1.scale.clone();
        // The closure keeps no memory of the device: a thread of the driver drops it.
        let updates: Vec<(Range<usize>, HostUpdate)> = updates
            .into_iter()
            .map(|(range, update)| (range, update.on_host()))
            .collect();
        HostPass {
            inputs: vec![grad, scale],
            outputs: vec![copy],
            work: Box::new(move |read, written| {
                let scale = read[1].chunks_exact(size_of::<f32>());
                let scale: Vec<f32> = scale.map(bytemuck::pod_read_unaligned).collect();
                for (range, update) in &updates {
                    let grad = &read[0][range.start * each..range.end * each];
                    update.run(host.cpu(), grad, None, &scale)?;
                }
                cast_bytes(host.cpu(), DType::F32, &param.host_bytes()?, to, written[0])
            }),
        }
    }
}

/// Gradients, masters, and the parameters that an update leaves on the device.
fn buffers(op: &Update) -> [&Buffer; 3] {
    let copy = op.copy.as_ref().expect("state on the host has masters");
    [&op.grad, &op.param, copy]
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
