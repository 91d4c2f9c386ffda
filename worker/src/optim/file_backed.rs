//! Optimizer state in a file: moments and masters are mapped, and an update goes through them piece by piece, so that
//! no more than a piece of each is resident.
//!
//! AdamW is element by element: cutting it changes no bit. The kernel reads ahead of the update and writes back behind
//! it; what it keeps of the file beyond that is cache, which gives way to whoever needs memory.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::device::{
    Arena, ArenaSpec, Buffer, Device, DeviceError, Event, Fetch, FileMemory, Sharing, Stream,
};
use crate::ops::{AdamW, Cast, Op};

/// Elements of one piece of an update.
const PIECE: usize = 1 << 20;

/// What to do where the file cannot be.
const HINT: &str =
    "`train.offload.dir` must be a folder with room for the optimizer's state of all ranks of the node";

/// A device whose private memory lies in files of a folder: made for [`super::AdamW`], which allocates its state here,
/// and whose updates and conversions are cut. All else is the device beneath.
pub struct FileBacked {
    device: Arc<dyn Device>,
    dir: PathBuf,
}

impl FileBacked {
    /// Over a device whose memory is the host's.
    #[must_use]
    pub fn new(device: Arc<dyn Device>, dir: &Path) -> Self {
        Self {
            device,
            dir: dir.to_owned(),
        }
    }

    fn update(&self, stream: Stream, op: &AdamW) {
        self.by_piece(stream, &[&op.param, &op.m, &op.v], |range| op.slice(range).into());
    }

    fn cast(&self, stream: Stream, op: &Cast) {
        self.by_piece(stream, &[&op.x, &op.out], |range| {
            let of = |buffer: &Buffer| buffer.slice(range.clone());
            let (x, out) = (of(&op.x), of(&op.out));
            Cast { x, out }.into()
        });
    }

    /// Puts the operations of all pieces on the stream. `buffers`, equally long, are what may lie in files.
    fn by_piece(&self, stream: Stream, buffers: &[&Buffer], op: impl Fn(&Range<usize>) -> Op) {
        let len = buffers[0].len();
        let mut start = 0;
        while start < len {
            let end = len.min(start + PIECE);
            let next = end..len.min(end + PIECE);
            in_files(buffers, FileMemory::prefetch, &next);
            self.device.enqueue(stream, op(&(start..end)));
            // On a device that runs later this comes early; that costs time, never a number.
            in_files(buffers, FileMemory::evict, &(start..end));
            start = end;
        }
    }
}

/// What of `buffer` lies in a file need not be resident for a while; other memory stays. For whoever reads or writes
/// the optimizer's state outside an update, behind each part of it.
pub fn evict(buffer: &Buffer) {
    in_files(&[buffer], FileMemory::evict, &(0..buffer.len()));
}

/// Most bytes of `state` (bytes of the moments and masters) that an update keeps resident: a piece of each and the next.
#[must_use]
pub const fn resident_bytes(state: usize) -> usize {
    let most = 2 * 3 * PIECE * size_of::<f32>();
    if state < most { state } else { most }
}

/// `visit`s the bytes that elements `range` of each buffer are, where they lie in files.
fn in_files(buffers: &[&Buffer], visit: impl Fn(&FileMemory, Range<usize>), range: &Range<usize>) {
    for buffer in buffers {
        if let Some(memory) = buffer.arena().memory().as_any().downcast_ref::<FileMemory>() {
            let byte = |element: usize| buffer.start() + element * buffer.dtype().bytes();
            visit(memory, byte(range.start)..byte(range.end));
        }
    }
}

impl Device for FileBacked {
    fn name(&self) -> String {
        self.device.name()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        if spec.sharing != Sharing::Private {
            return self.device.alloc(spec);
        }
        let bytes = spec.bytes();
        let memory = FileMemory::create(&self.dir, &spec.name, bytes, HINT)?;
        Ok(Arena::new(spec, memory))
    }

    fn stream(&self) -> Stream {
        self.device.stream()
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        match op {
            Op::AdamW(op) => self.update(stream, &op),
            Op::Cast(op) => self.cast(stream, &op),
            other => self.device.enqueue(stream, other),
        }
    }

    fn record(&self, stream: Stream) -> Event {
        self.device.record(stream)
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        self.device.wait_event(stream, event, deadline);
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.device.synchronize(stream)
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        self.device.upload(stream, dst, bytes);
    }

    fn is_asynchronous(&self) -> bool {
        self.device.is_asynchronous()
    }

    fn fetch(&self, stream: Stream, src: &Buffer) -> Fetch {
        self.device.fetch(stream, src)
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.device.download(stream, src)
    }

    fn peak_bytes(&self) -> Option<usize> {
        self.device.peak_bytes()
    }

    fn taken_bytes(&self) -> Option<usize> {
        self.device.taken_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{CpuDevice, DType};
    use crate::ops::AdamWStep;

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
        let file: Arc<dyn Device> = Arc::new(FileBacked::new(cpu.clone(), dir.path()));
        let stream = cpu.stream();
        let spec = |name: &str, len| ArenaSpec::private(name, DType::F32, len);
        let train = |device: &Arc<dyn Device>| {
            let [param, grad] = ["p", "g"].map(|name| cpu.alloc(&spec(name, LEN)).unwrap().whole());
            let [m, v] = ["m", "v"].map(|name| device.alloc(&spec(name, LEN)).unwrap().whole());
            let scale = cpu.alloc(&spec("scale", 1)).unwrap().whole();
            scale.host_mut::<f32>().unwrap()[0] = 0.5;
            for (i, g) in grad.host_mut::<f32>().unwrap().iter_mut().enumerate() {
                *g = (i % 997) as f32 - 300.0;
            }
            for step in 1..=3 {
                let update = AdamW {
                    param: param.clone(),
                    copy: None,
                    grad: grad.clone(),
                    m: m.clone(),
                    v: v.clone(),
                    scale: scale.clone(),
                    weight_decay: 0.1,
                    spared: [].into(),
                    hyper: AdamWStep {
                        lr: 0.01,
                        beta1: 0.9,
                        beta2: 0.95,
                        eps: 1e-8,
                        step,
                    },
                };
                device.enqueue(stream, update.into());
            }
            cpu.synchronize(stream).unwrap();
            [param, m, v]
        };
        let (expected, found) = (train(&cpu), train(&file));
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
