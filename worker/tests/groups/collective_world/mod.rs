//! A world of ranks within one process: each rank a thread with a transport of its own, nodes on loopback addresses.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_proto::trust::data_key::DataKey;
use ddp_worker::collective::{
    Communicator, Executor, Failure, Launch, RankInfo, Traffic, Transport, Work, connect,
};
use ddp_worker::device::{Arena, ArenaSpec, Buffer, CpuDevice, Device, Element};
use ddp_worker::session::{Cancel, MemoryStore};

/// Longer than any operation takes on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_mins(10);

/// Ranks by node.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) nodes: Vec<usize>,
    pub(crate) store: MemoryStore,
    pub(crate) cancel: Cancel,
    pub(crate) timeout: Duration,
    pub(crate) tree: Option<bool>,
}

impl World {
    /// So many ranks on each node.
    pub(crate) fn of(nodes: &[usize]) -> Self {
        Self {
            nodes: nodes.to_vec(),
            store: MemoryStore::default(),
            cancel: Cancel::new(),
            timeout: PATIENCE,
            tree: None,
        }
    }

    pub(crate) fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub(crate) fn size(&self) -> usize {
        self.nodes.iter().sum()
    }

    /// The place of every rank.
    pub(crate) fn places(&self) -> Vec<RankInfo> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut places = Vec::new();
        for (node_rank, &local_world_size) in self.nodes.iter().enumerate() {
            for local_rank in 0..local_world_size {
                places.push(RankInfo {
                    rank: places.len(),
                    world_size: self.size(),
                    local_rank,
                    local_world_size,
                    node_rank,
                    host_addr: IpAddr::from([127, 0, 0, node_rank as u8 + 1]),
                    ports: None,
                    generation: 1,
                    data_key: Some(DataKey::new([7; 32])),
                    spin: self.size() <= cores,
                    tree: self.tree,
                });
            }
        }
        places
    }

    pub(crate) fn connect(&self, place: &RankInfo) -> Result<Box<dyn Transport>, Failure> {
        connect(place, &self.store, &self.cancel, PATIENCE)
    }

    /// Runs `body` on every rank and returns what each returned.
    pub(crate) fn run<R: Send>(&self, executor: Executor, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let (places, body) = (self.places(), &body);
            let threads: Vec<_> = places
                .into_iter()
                .map(|place| {
                    scope.spawn(move || {
                        let transport = self.connect(&place).expect("the ranks connect");
                        let comm =
                            Communicator::new("world", transport, executor, self.timeout, &self.cancel);
                        body(Rank::new(comm))
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|t| t.join().expect("a rank's thread ends well"))
                .collect()
        })
    }
}

/// One rank at work.
pub(crate) struct Rank {
    pub(crate) comm: Communicator,
    pub(crate) device: Arc<dyn Device>,
}

impl Rank {
    pub(crate) fn new(comm: Communicator) -> Self {
        let device = Arc::new(CpuDevice::new(1).expect("one thread"));
        Self { comm, device }
    }

    pub(crate) fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// An arena that peers reach, or a private one, with these elements.
    pub(crate) fn arena<T: Element>(&self, shared: bool, elements: &[T]) -> Arena {
        let arena = if shared {
            let spec = ArenaSpec::on_node("test", T::DTYPE, elements.len());
            let arena = self.comm.alloc_shared(&self.device, &spec);
            arena.expect("there is memory")
        } else {
            let spec = ArenaSpec::private("test", T::DTYPE, elements.len());
            self.device.alloc(&spec).expect("there is memory")
        };
        fill(&arena.whole(), elements);
        arena
    }
}

pub(crate) fn fill<T: Element>(buffer: &Buffer, elements: &[T]) {
    buffer
        .host_mut::<T>()
        .expect("nobody uses it")
        .copy_from_slice(elements);
}

pub(crate) fn read<T: Element>(buffer: &Buffer) -> Vec<T> {
    buffer.host::<T>().expect("nobody writes it").to_vec()
}

pub(crate) fn launch() -> Launch {
    Launch::now(Traffic::Grads, "test")
}

pub(crate) fn done(work: &Work) {
    work.wait(Instant::now() + 2 * PATIENCE)
        .expect("the operation succeeds");
}

pub(crate) fn failure(work: &Work) -> Failure {
    use ddp_worker::collective::WorkError;
    match work.wait(Instant::now() + 2 * PATIENCE) {
        Err(WorkError::Failed(error)) => error.failure,
        other => panic!("expected a failure, got {other:?}"),
    }
}

/// Numbers whose sum depends on the order of additions.
pub(crate) fn numbers(rank: usize, len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(rank as u64 + 1);
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let unit = (state >> 40) as f32 / (1 << 24) as f32 - 0.5;
            unit * [1e-3, 1.0, 1e4][(state >> 33) as usize % 3]
        })
        .collect()
}
