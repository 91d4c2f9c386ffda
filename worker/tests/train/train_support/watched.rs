//! A CPU and a transport that tell of all that they are given, to somebody who may hold it up.

use std::sync::Arc;
use std::time::Instant;

use ddp_worker::collective::{Failure, Request, Transport, Wait};
use ddp_worker::device::{Arena, ArenaSpec, Buffer, CpuDevice, Device, DeviceError, Event, Held, Stream};
use ddp_worker::ops::Op;
use ddp_worker::train::WrapTransport;

/// Is told what one rank does: by the rank's thread of the device, by those of its communicators of the transport.
pub trait Watch: Send + Sync + 'static {
    /// An operation is about to run.
    fn computes(&self, _op: &Op) {}
    /// The rank is about to wait for something that has not happened yet.
    fn waits(&self) {}
    /// It has happened; the wait began then.
    fn waited(&self, _since: Instant) {}
    /// The turn of a collective operation has come.
    fn began(&self, _request: &Request) {}
    /// It is done; its turn came then.
    fn ended(&self, _request: &Request, _since: Instant) {}
    /// Memory is shared with the other ranks.
    fn shared(&self, _arena: &Arena) {}
}

/// See the module.
pub struct WatchedDevice {
    cpu: CpuDevice,
    watch: Arc<dyn Watch>,
}

impl WatchedDevice {
    pub fn telling(watch: Arc<dyn Watch>) -> Arc<dyn Device> {
        let cpu = CpuDevice::new(1).unwrap();
        Arc::new(Self { cpu, watch })
    }
}

impl Device for WatchedDevice {
    fn name(&self) -> String {
        format!("watched {}", self.cpu.name())
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        self.cpu.alloc(spec)
    }

    fn stream(&self) -> Stream {
        self.cpu.stream()
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        self.watch.computes(&op);
        self.cpu.enqueue(stream, op);
    }

    fn record(&self, stream: Stream) -> Event {
        self.cpu.record(stream)
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        if event.poll().is_some() {
            return self.cpu.wait_event(stream, event, deadline);
        }
        let since = Instant::now();
        self.watch.waits();
        self.cpu.wait_event(stream, event, deadline);
        self.watch.waited(since);
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.cpu.synchronize(stream)
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        self.cpu.upload(stream, dst, bytes);
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.cpu.download(stream, src)
    }
}

struct WatchedTransport {
    inner: Box<dyn Transport>,
    watch: Arc<dyn Watch>,
}

/// Watches the transport of a rank, and those of its subgroups.
pub fn watching(watch: Arc<dyn Watch>) -> WrapTransport {
    Arc::new(move |inner: Box<dyn Transport>| -> Box<dyn Transport> {
        let watch = watch.clone();
        Box::new(WatchedTransport { inner, watch })
    })
}

impl Transport for WatchedTransport {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn members(&self) -> &[usize] {
        self.inner.members()
    }

    fn alloc_shared(
        &mut self,
        device: &Arc<dyn Device>,
        spec: &ArenaSpec,
        wait: &Wait,
    ) -> Result<Arena, Failure> {
        let arena = self.inner.alloc_shared(device, spec, wait)?;
        self.watch.shared(&arena);
        Ok(arena)
    }

    fn split(&mut self, name: &str, members: &[usize], wait: &Wait) -> Result<Box<dyn Transport>, Failure> {
        let inner = self.inner.split(name, members, wait)?;
        let watch = self.watch.clone();
        Ok(Box::new(Self { inner, watch }))
    }

    fn execute(&mut self, request: &Request, held: Held, wait: &Wait) -> Result<u64, Failure> {
        let since = Instant::now();
        self.watch.began(request);
        let bytes = self.inner.execute(request, held, wait)?;
        self.watch.ended(request, since);
        Ok(bytes)
    }
}
