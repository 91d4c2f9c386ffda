//! A CPU and a transport that tell of all that they are given, to somebody who may hold it up.

use std::sync::Arc;
use std::time::Instant;

use super::hooked::{Hooks, hooked};
use ddp_worker::collective::{Failure, Request, Subgroup, Transport, Wait};
use ddp_worker::device::{Arena, ArenaSpec, CpuDevice, Device, Event, Held, Stream};
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
pub struct WatchedDevice(Arc<dyn Watch>);

impl WatchedDevice {
    pub fn telling(watch: Arc<dyn Watch>) -> Arc<dyn Device> {
        hooked(Self(watch))
    }
}

impl Hooks for WatchedDevice {
    fn enqueue(&self, cpu: &CpuDevice, stream: Stream, op: Op) {
        self.0.computes(&op);
        cpu.enqueue(stream, op);
    }

    fn wait_event(&self, cpu: &CpuDevice, stream: Stream, event: &Event, deadline: Instant) {
        if event.poll().is_some() {
            return cpu.wait_event(stream, event, deadline);
        }
        let since = Instant::now();
        self.0.waits();
        cpu.wait_event(stream, event, deadline);
        self.0.waited(since);
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

    fn split(&mut self, subgroup: &Subgroup, wait: &Wait) -> Result<Box<dyn Transport>, Failure> {
        let inner = self.inner.split(subgroup, wait)?;
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
