//! A device whose streams are threads: operations run later, in order, and beside each other.

use std::any::Any;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::collective::nccl::lane::Native;
use crate::collective::nccl::sys::RawStream;
use crate::device::{Arena, ArenaSpec, Buffer, CpuDevice, Device, DeviceError, Event, Stream};
use crate::ops::Op;

thread_local! {
    /// Address of the device that the thread's calls go to; 0 if it has chosen none.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Which device the calls of this thread go to; 0 if it has chosen none.
pub(super) fn current() -> usize {
    CURRENT.get()
}

type Job = Box<dyn FnOnce() + Send>;
type Slot = Arc<Mutex<Option<DeviceError>>>;

/// See the module.
pub(super) struct FakeDevice {
    cpu: Arc<CpuDevice>,
    streams: Mutex<Vec<Arc<FakeStream>>>,
    /// As with a GPU, memory is not gone while something that is in flight may use it.
    arenas: Mutex<Vec<Arena>>,
}

/// One stream; its address is what the fake library is given.
pub(super) struct FakeStream {
    jobs: Mutex<Sender<Job>>,
    error: Slot,
}

impl FakeDevice {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            cpu: Arc::new(CpuDevice::new(1).unwrap()),
            streams: Mutex::default(),
            arenas: Mutex::default(),
        })
    }

    fn with<T>(&self, stream: Stream, act: impl FnOnce(&FakeStream) -> T) -> T {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        act(&streams[stream.0 as usize])
    }

    /// Work that may fail: skipped once something before it in the stream has.
    fn attempt(&self, stream: Stream, work: impl FnOnce() -> Result<(), DeviceError> + Send + 'static) {
        self.with(stream, |stream| {
            let error = stream.error.clone();
            stream.push(move || {
                if error.lock().unwrap().is_none()
                    && let Err(failed) = work()
                {
                    *error.lock().unwrap() = Some(failed);
                }
            });
        });
    }
}

impl FakeStream {
    fn start() -> Arc<Self> {
        let (jobs, queue) = channel::<Job>();
        std::thread::spawn(move || queue.into_iter().for_each(|job| job()));
        Arc::new(Self {
            jobs: Mutex::new(jobs),
            error: Arc::default(),
        })
    }

    /// Puts work at the end of the stream.
    pub(super) fn push(&self, work: impl FnOnce() + Send + 'static) {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.send(Box::new(work))
            .expect("the thread lives as long as the stream");
    }
}

impl Device for FakeDevice {
    fn name(&self) -> String {
        "fake".into()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        let arena = self.cpu.alloc(spec)?;
        self.arenas.lock().unwrap().push(arena.clone());
        Ok(arena)
    }

    fn stream(&self) -> Stream {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.push(FakeStream::start());
        Stream(streams.len() as u32 - 1)
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        let cpu = self.cpu.clone();
        self.attempt(stream, move || op.run(cpu.cpu()));
    }

    fn record(&self, stream: Stream) -> Event {
        let (event, signal) = Event::pair("a stream");
        self.with(stream, |stream| {
            let error = stream.error.clone();
            stream.push(move || {
                let outcome = error.lock().unwrap().clone().map_or(Ok(()), Err);
                signal.set(outcome);
            });
        });
        event
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        let event = event.clone();
        self.attempt(stream, move || event.wait(deadline));
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.record(stream).wait(super::world::deadline())
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        let (dst, bytes) = (dst.clone(), bytes.to_vec());
        self.attempt(stream, move || {
            dst.host_bytes_mut()?.copy_from_slice(&bytes);
            Ok(())
        });
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.synchronize(stream)?;
        Ok(src.host_bytes()?.to_vec())
    }
}

/// The device as NCCL sees it.
pub(super) struct FakeNative(pub(super) Arc<FakeDevice>);

impl Native for FakeNative {
    fn bind(&self) -> Result<(), DeviceError> {
        CURRENT.set(Arc::as_ptr(&self.0) as usize);
        Ok(())
    }

    fn stream(&self, _name: &str) -> Stream {
        self.0.stream()
    }

    fn raw_stream(&self, stream: Stream) -> Result<RawStream, DeviceError> {
        // Never moved, and kept as long as the device.
        Ok(self.0.with(stream, |stream| {
            std::ptr::from_ref::<FakeStream>(stream).cast_mut().cast()
        }))
    }

    fn address(&self, buffer: &Buffer) -> Result<*mut c_void, DeviceError> {
        let memory: &dyn Any = buffer.arena().memory().as_any();
        let host = memory.downcast_ref::<crate::device::HostMemory>();
        let base = host.expect("allocated by the fake device").ptr().as_ptr();
        Ok(base.wrapping_add(buffer.start()).cast())
    }

    /// An operation of which nobody has heard that it ended may still come: its memory stays for ever.
    fn abandon(&self) {
        std::mem::forget(std::mem::take(&mut *self.0.arenas.lock().unwrap()));
    }
}
