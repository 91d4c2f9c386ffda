//! The GPU as a device.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use cudarc::driver::sys;

use super::event::{CudaEvent, EventPool};
use super::fetch::{FETCH_BYTES, FetchPool};
use super::kernel::Modules;
use super::launch::address_of;
use super::memory::{Account, DeviceMemory};
use super::stream::CudaStream;
use super::{Context, CubinCache, DevicePtr, Launch};
use crate::device::{Arena, ArenaSpec, Buffer, Device, DeviceError, Event, Fetch, HostSide, Stream};
use crate::ops::Op;

/// How a device is opened.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Which one, among those that `CUDA_VISIBLE_DEVICES` shows.
    pub ordinal: usize,
    /// Matrix products of f32 may round their inputs to tf32.
    pub tf32: bool,
    /// On Hopper, in bf16, a GELU belongs to the matrix product beside it where cuBLASLt does both in one pass.
    pub fused_gelu: bool,
    /// Where compiled kernels are kept.
    pub cache: CubinCache,
}

/// See the module.
#[derive(Debug)]
pub struct CudaDevice {
    context: Arc<Context>,
    options: CudaOptions,
    account: Arc<Account>,
    events: Arc<EventPool>,
    fetches: FetchPool,
    modules: Modules,
    streams: RwLock<Vec<Result<Arc<CudaStream>, DeviceError>>>,
    attached: Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
}

impl CudaDevice {
    /// Starts the driver and opens a device.
    pub fn open(options: CudaOptions) -> Result<Self, DeviceError> {
        let context = Context::open(options.ordinal)?;
        context.bind()?;
        Ok(Self {
            events: EventPool::new(context.clone()),
            modules: Modules::new(context.clone(), options.cache.clone()),
            account: Arc::default(),
            fetches: FetchPool::default(),
            streams: RwLock::default(),
            attached: Mutex::default(),
            context,
            options,
        })
    }

    /// `device` as a GPU, if it is one.
    #[must_use]
    pub fn of(device: &dyn Device) -> Option<&Self> {
        (device as &dyn Any).downcast_ref()
    }

    /// What it was opened with.
    #[must_use]
    pub const fn options(&self) -> &CudaOptions {
        &self.options
    }

    /// The driver's side of it.
    #[must_use]
    pub const fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A stream with a name for errors and traces. Work of an `urgent` one goes before that of others: a
    /// collective that waits for a multiprocessor would make all ranks wait.
    #[must_use]
    pub fn named_stream(&self, name: &str, urgent: bool) -> Stream {
        let stream = CudaStream::new(name, urgent, &self.account, &self.events, &self.context);
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        streams.push(stream.map(Arc::new));
        Stream(streams.len() as u32 - 1)
    }

    /// A stream as CUDA's own libraries take it.
    pub fn raw_stream(&self, stream: Stream) -> Result<sys::CUstream, DeviceError> {
        self.find(stream).map(|stream| stream.raw())
    }

    /// Address of a buffer in its memory.
    pub fn address(&self, buffer: &Buffer) -> Result<DevicePtr, DeviceError> {
        address_of(buffer, &self.context)
    }

    /// Something that is made once and kept: one value of each type.
    pub fn attached<T: Any + Send + Sync>(
        &self,
        make: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<Arc<T>, DeviceError> {
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        let found = attached.get(&TypeId::of::<T>()).cloned();
        let value = if let Some(value) = found {
            value
        } else {
            let made: Arc<dyn Any + Send + Sync> = Arc::new(make()?);
            attached.insert(TypeId::of::<T>(), made.clone());
            made
        };
        Ok(value
            .downcast()
            .unwrap_or_else(|_| unreachable!("kept by its type")))
    }

    pub(super) const fn modules(&self) -> &Modules {
        &self.modules
    }

    /// # Panics
    /// If the stream is another device's.
    fn find(&self, stream: Stream) -> Result<Arc<CudaStream>, DeviceError> {
        let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        streams
            .get(stream.0 as usize)
            .expect("a stream of this device")
            .clone()
    }

    /// Enqueues something of the driver's, unless the stream has failed.
    pub(super) fn attempt(
        &self,
        stream: Stream,
        what: &'static str,
        work: impl FnOnce(sys::CUstream) -> Result<(), DeviceError>,
    ) {
        if let Ok(stream) = self.find(stream) {
            stream.attempt(what, |_| work(stream.raw()));
        }
    }

    fn record_by(
        &self,
        stream: Stream,
        record: impl FnOnce(&CudaStream) -> Result<CudaEvent, DeviceError>,
    ) -> Event {
        let recorded = self.find(stream).and_then(|stream| match stream.error() {
            Some(error) => Err(error),
            None => record(&stream),
        });
        recorded.map_or_else(Self::failed, Event::new)
    }

    fn begin_fetch(&self, stream: Stream, src: &Buffer) -> Result<Fetch, DeviceError> {
        let stream = self.find(stream)?;
        if let Some(error) = stream.error() {
            return Err(error);
        }
        self.context.bind()?;
        let copy = self
            .fetches
            .copy(&self.context, stream.raw(), self.address(src)?, src.bytes())?;
        Ok(Fetch::new(Event::new(stream.record()?), move || Ok(copy.read())))
    }

    /// An event that has failed already.
    fn failed(error: DeviceError) -> Event {
        let (event, signal) = Event::pair("a failed stream");
        signal.set(Err(error));
        event
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        let context = &self.context;
        let gib = context.memory_bytes() as f64 / f64::from(1 << 30);
        format!(
            "cuda:{} ({}, {}, {gib:.1} GiB)",
            context.ordinal(),
            context.name(),
            context.arch()
        )
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        let bytes = spec.bytes();
        let memory = DeviceMemory::new(&self.context, &self.account, &spec.name, bytes)?;
        Ok(Arena::new(spec, memory))
    }

    fn stream(&self) -> Stream {
        let first = self
            .streams
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .is_empty();
        self.named_stream(if first { "compute" } else { "auxiliary" }, false)
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        if let Ok(stream) = self.find(stream) {
            let name = op.name();
            stream.attempt(name, |state| {
                op.launch(&mut Launch::new(name, self, &stream, state))
            });
        }
    }

    fn record(&self, stream: Stream) -> Event {
        self.record_by(stream, CudaStream::record)
    }

    fn record_timed(&self, stream: Stream) -> Event {
        self.record_by(stream, CudaStream::record_timed)
    }

    /// An event of CUDA's holds up the stream alone, and so does one made of them; for any other the host waits,
    /// here and now.
    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        let Ok(found) = self.find(stream) else {
            return;
        };
        if let Some(event) = event.state().as_any().downcast_ref::<CudaEvent>() {
            found.attempt("wait for an event", |_| event.hold(found.raw()));
        } else if event.state().parts().is_empty() {
            let outcome = event.wait(deadline);
            found.attempt("wait for an event", |_| outcome);
        } else {
            for part in event.state().parts() {
                self.wait_event(stream, part, deadline);
            }
        }
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.find(stream)?.synchronize()
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        let Ok(stream) = self.find(stream) else {
            return;
        };
        stream.attempt("upload", |state| {
            if dst.bytes() != bytes.len() {
                return Err(DeviceError::Shape {
                    op: "upload",
                    what: format!("{} bytes into a buffer of {}", bytes.len(), dst.bytes()),
                });
            }
            stream.upload(state, self.address(dst)?, bytes)
        });
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        let stream = self.find(stream)?;
        stream.synchronize()?;
        stream.download(self.address(src)?, src.bytes())
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn fetch(&self, stream: Stream, src: &Buffer) -> Fetch {
        if src.bytes() > FETCH_BYTES {
            return Fetch::arrived(self.download(stream, src));
        }
        self.begin_fetch(stream, src)
            .unwrap_or_else(|error| Fetch::arrived(Err(error)))
    }

    fn host_side(&self) -> Option<&dyn HostSide> {
        Some(self)
    }

    fn peak_bytes(&self) -> Option<usize> {
        Some(self.account.peak())
    }

    fn taken_bytes(&self) -> Option<usize> {
        let (free, all) = self.context.free_and_all_bytes()?;
        Some(all.saturating_sub(free))
    }
}
