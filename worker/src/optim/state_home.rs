//! The home of the optimizer's state: memory of the device, memory of the host beside it, or a mapped file. An optimizer
//! allocates its state there, and puts what touches it on a stream.
//!
//! A file is gone through piece by piece, so that no more than a piece of each slot is resident. An update is element by
//! element: cutting it changes no bit. The kernel reads ahead of the update and writes back behind it; what it keeps of
//! the file beyond that is cache, which gives way where memory is needed.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::host_state::HostState;
use crate::device::{Arena, ArenaSpec, Buffer, Device, DeviceError, FileMemory, Stream, copy_same_length};
use crate::ops::{Cast, Op, Update};

/// Elements of one piece of an update: large enough that copies run at full speed, small enough that the gradients of
/// the next piece arrive while it is in the processor's caches.
pub const PIECE: usize = 1 << 20;

/// What to do where the file cannot be.
const HINT: &str =
    "`train.offload.dir` must be a folder with room for the optimizer's state of all ranks of the node";

/// See the module.
pub struct StateHome {
    device: Arc<dyn Device>,
    place: Place,
}

enum Place {
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
}

impl StateHome {
    /// In the device's memory.
    #[must_use]
    pub const fn on_device(device: Arc<dyn Device>) -> Self {
        let place = Place::Device;
        Self { device, place }
    }

    /// In memory of the host, with so many threads for updates, in pieces of so many elements. In the device's memory
    /// where that is the host's.
    pub fn on_host(device: Arc<dyn Device>, threads: usize, piece: usize) -> Result<Self, DeviceError> {
        let place = HostState::new(&device, threads, piece)?.map_or(Place::Device, Place::Host);
        Ok(Self { device, place })
    }

    /// In files of a folder, for a device whose memory is the host's.
    #[must_use]
    pub fn in_files(device: Arc<dyn Device>, dir: &Path) -> Self {
        let place = Place::File(dir.to_owned());
        Self { device, place }
    }

    /// The device that the parameters are on.
    #[must_use]
    pub const fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// State on the host beside a device with memory of its own: the device does not reach it.
    #[must_use]
    pub const fn host_state(&self) -> Option<&HostState> {
        match &self.place {
            Place::Host(state) => Some(state),
            Place::Device | Place::File(_) => None,
        }
    }

    /// Where so many bytes of state and masters are.
    #[must_use]
    pub fn bytes(&self, state: usize) -> StateBytes {
        let (device, host) = match &self.place {
            Place::Device => (state, 0),
            Place::Host(on_host) => (0, state + on_host.staging_bytes()),
            // A piece of the masters and of two slots, the most that there are, and the next.
            Place::File(_) => (state.min(2 * 3 * PIECE * size_of::<f32>()), 0),
        };
        StateBytes { device, host }
    }

    /// Zeroed private memory for state.
    pub fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        match &self.place {
            Place::Device => self.device.alloc(spec),
            Place::Host(state) => state.alloc(spec),
            Place::File(dir) => {
                let memory = FileMemory::create(dir, &spec.name, spec.bytes(), HINT)?;
                Ok(Arena::new(spec, memory))
            }
        }
    }

    /// Puts updates and conversions at the end of a stream, in this order.
    pub fn enqueue_all(&self, stream: Stream, ops: Vec<Op>) {
        match &self.place {
            Place::Device => self.device.enqueue_all(stream, ops),
            Place::Host(state) => state.enqueue_all(self.device.as_ref(), stream, ops),
            Place::File(_) => ops.into_iter().for_each(|op| self.by_piece(stream, op)),
        }
    }

    /// Puts a copy of `bytes` into a part of the state, or of the parameters, in stream order.
    pub fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        match &self.place {
            Place::Host(state) if state.holds(dst) => state.upload(stream, dst, bytes),
            _ => self.device.upload(stream, dst, bytes),
        }
    }

    /// Blocks until the stream is empty; returns its first error since the last call.
    pub fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.device.synchronize(stream)?;
        self.host_state().map_or(Ok(()), HostState::failure)
    }

    /// Synchronises, then returns the bytes of a part of the state, or of the parameters.
    pub fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        if !self.host_state().is_some_and(|state| state.holds(src)) {
            return self.device.download(stream, src);
        }
        self.synchronize(stream)?;
        Ok(src.host_bytes()?.to_vec())
    }

    /// As [`StateHome::download`], to `dst`, which has as many bytes.
    pub fn download_to(&self, stream: Stream, src: &Buffer, dst: &mut [u8]) -> Result<(), DeviceError> {
        if !self.host_state().is_some_and(|state| state.holds(src)) {
            return self.device.download_to(stream, src, dst);
        }
        self.synchronize(stream)?;
        copy_same_length(&src.host_bytes()?, dst)
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
        for start in (0..len).step_by(PIECE) {
            let (piece, next) = (
                start..len.min(start + PIECE),
                len.min(start + PIECE)..len.min(start + 2 * PIECE),
            );
            in_files(&buffers, FileMemory::prefetch, &next);
            self.device.enqueue(stream, part(&op, &piece));
            // On a device that runs later this comes early; that costs time, never a number.
            in_files(&buffers, FileMemory::evict, &piece);
        }
    }
}

/// An update or a conversion of some of the elements.
fn part(op: &Op, range: &Range<usize>) -> Op {
    match op {
        Op::Update(op) => op.slice(range).into(),
        Op::Cast(Cast { x, out }) => {
            let [x, out] = [x, out].map(|buffer| buffer.slice(range.clone()));
            Cast { x, out }.into()
        }
        other => other.clone(),
    }
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
        if let Some(memory) = buffer.arena().memory().as_any().downcast_ref::<FileMemory>() {
            let byte = |element: usize| buffer.start() + element * buffer.dtype().bytes();
            visit(memory, byte(range.start)..byte(range.end));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{CpuDevice, DType};
    use crate::ops::{Rates, Runs};
    use crate::optim::AdamW;

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
            StateHome::on_device(cpu.clone()),
            StateHome::in_files(cpu.clone(), dir.path()),
        ];
        let stream = cpu.stream();
        let spec = |name: &str, len| ArenaSpec::private(name, DType::F32, len);
        let train = |home: &StateHome| {
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
                    rule: Arc::new(AdamW {
                        betas: [0.9, 0.95],
                        eps: 1e-8,
                    }),
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
            assert!(state.arena().memory().as_any().is::<FileMemory>());
            // Neighbouring pieces share a page.
            assert!(resident(address) <= 4 * 4096, "{} resident", resident(address));
        }
        for (expected, found) in expected.iter().zip(&found) {
            assert!(expected.host_bytes().unwrap()[..] == found.host_bytes().unwrap()[..]);
        }
    }
}
