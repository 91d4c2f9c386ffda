//! The CPU as a device: every operation runs when it is enqueued, in the caller's thread and its rank's pool.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use ddp_proto::words::counted;
use parking_lot::Mutex;

use super::{Arena, ArenaSpec, Buffer, Cpu, Device, DeviceError, Event, HostMemory, Sharing, Stream};
use crate::ops::Op;

/// The CPU.
#[derive(Debug)]
pub struct CpuDevice {
    cpu: Cpu,
    streams: AtomicU32,
    errors: Mutex<HashMap<Stream, DeviceError>>,
}

impl CpuDevice {
    /// A device with this many threads.
    pub fn new(threads: usize) -> Result<Self, DeviceError> {
        Ok(Self::with_cpu(Cpu::new(threads)?))
    }

    /// A device with these threads and this instruction set.
    pub fn with_cpu(cpu: Cpu) -> Self {
        Self {
            cpu,
            streams: AtomicU32::new(0),
            errors: Mutex::default(),
        }
    }

    /// The threads and instruction set that kernels use.
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    fn attempt(&self, stream: Stream, work: impl FnOnce() -> Result<(), DeviceError>) {
        let has_failed = self.errors.lock().contains_key(&stream);
        if !has_failed && let Err(error) = work() {
            self.errors.lock().insert(stream, error);
        }
    }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        format!(
            "cpu ({}, {})",
            counted(self.cpu.threads(), "thread"),
            self.cpu.isa()
        )
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        let bytes = spec.bytes();
        let memory = match spec.sharing {
            Sharing::Private => HostMemory::private(&spec.name, bytes)?,
            Sharing::Node => HostMemory::shared(&spec.name, bytes)?,
        };
        Ok(Arena::new(spec, memory))
    }

    fn stream(&self) -> Stream {
        Stream(self.streams.fetch_add(1, Ordering::Relaxed))
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        self.attempt(stream, || op.run(&self.cpu));
    }

    fn record(&self, stream: Stream) -> Event {
        let error = self.errors.lock().get(&stream).cloned();
        error.map_or_else(Event::reached, Event::failed)
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        self.attempt(stream, || event.wait(deadline));
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.errors.lock().remove(&stream).map_or(Ok(()), Err)
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        self.attempt(stream, || {
            super::expect_same_bytes("upload", bytes.len(), dst.bytes())?;
            dst.host_bytes_mut()?.copy_from_slice(bytes);
            Ok(())
        });
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.synchronize(stream)?;
        Ok(src.host_bytes()?.to_vec())
    }

    fn download_to(&self, stream: Stream, src: &Buffer, dst: &mut [u8]) -> Result<(), DeviceError> {
        self.synchronize(stream)?;
        super::copy_same_length(&src.host_bytes()?, dst)
    }
}
