//! Ranks as threads over the fake library.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::{FakeDevice, FakeNative};
use super::fake::{FakeWorld, Fault};
use super::functions::{functions, version};
use crate::collective::nccl::library::Nccl;
use crate::collective::nccl::transport::{NcclPlace, NcclTransport};
use crate::collective::{Communicator, Failure, Launch, Traffic, Work, WorkError};
use crate::device::{Arena, ArenaSpec, Buffer, Device, Element, Stream};
use crate::session::{Cancel, MemoryStore};

/// No test waits longer for anything.
const PATIENCE: Duration = Duration::from_mins(1);

pub(super) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

pub(super) fn nccl() -> Nccl {
    Nccl::with(functions(version), Path::new("fake")).unwrap()
}

/// Several ranks, and what is to go wrong with them.
pub(super) struct World {
    pub(super) fake: Arc<FakeWorld>,
    pub(super) cancel: Cancel,
    pub(super) timeout: Duration,
    size: usize,
    store: MemoryStore,
}

impl World {
    pub(super) fn of(size: usize, faults: &[Fault]) -> Self {
        Self {
            fake: FakeWorld::new(faults),
            cancel: Cancel::new(),
            timeout: PATIENCE,
            size,
            store: MemoryStore::default(),
        }
    }

    pub(super) fn within(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    pub(super) fn connect(&self, rank: usize, device: &Arc<FakeDevice>) -> Result<NcclTransport, Failure> {
        self.fake.enter();
        let place = NcclPlace {
            name: "world",
            rank,
            world_size: self.size,
            store: Arc::new(self.store.clone()),
            timeout: self.timeout,
            cancel: self.cancel.clone(),
        };
        let shared: Arc<dyn Device> = device.clone();
        NcclTransport::connect_on(&nccl(), &shared, Arc::new(FakeNative(device.clone())), &place)
    }

    /// Runs `body` on ranks `0..present` and returns what each returned.
    pub(super) fn run_some<R: Send>(&self, present: usize, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
        let body = &body;
        std::thread::scope(|scope| {
            let rank = |rank| {
                move || {
                    let device = FakeDevice::new();
                    let transport = self.connect(rank, &device).expect("the ranks connect");
                    body(self.rank(transport, device))
                }
            };
            let threads: Vec<_> = (0..present).map(|r| scope.spawn(rank(r))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    pub(super) fn run<R: Send>(&self, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
        self.run_some(self.size, body)
    }

    fn rank(&self, transport: NcclTransport, device: Arc<FakeDevice>) -> Rank {
        let comm = Communicator::on_stream("world", Box::new(transport), self.timeout, &self.cancel);
        let shared: Arc<dyn Device> = device;
        Rank {
            compute: shared.stream(),
            device: shared,
            comm,
        }
    }
}

/// One rank at work.
pub(super) struct Rank {
    pub(super) comm: Communicator,
    pub(super) device: Arc<dyn Device>,
    pub(super) compute: Stream,
}

impl Rank {
    pub(super) fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// An arena with these elements.
    pub(super) fn arena<T: Element>(&self, elements: &[T]) -> Arena {
        let spec = ArenaSpec::private("test", T::DTYPE, elements.len());
        let arena = self.device.alloc(&spec).unwrap();
        arena.whole().host_mut::<T>().unwrap().copy_from_slice(elements);
        arena
    }
}

pub(super) fn read<T: Element>(buffer: &Buffer) -> Vec<T> {
    buffer.host::<T>().unwrap().to_vec()
}

pub(super) fn launch(tag: &str) -> Launch {
    Launch::now(Traffic::Grads, tag)
}

pub(super) fn done(work: &Work) {
    work.wait(deadline()).expect("the operation succeeds");
}

/// The error of an operation, in words and as a failure.
pub(super) fn failure(work: &Work) -> (String, Failure) {
    match work.wait(deadline()) {
        Err(WorkError::Failed(error)) => (error.to_string(), error.failure),
        other => panic!("expected a failure, got {other:?}"),
    }
}
