//! One rank among the others: its device, its stream and the communicator of the world.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::TrainError;
use crate::collective::{CollectiveError, Communicator, Executor, Place, connect};
use crate::config::TrainConfig;
use crate::device::{CpuDevice, Device, Stream};
use crate::session::{Cancel, Session};

/// Name of the communicator of all ranks, in errors.
const NAME: &str = "world";

/// Beyond its own deadline an operation is given this long to say so itself, with the better error.
const GRACE: Duration = Duration::from_secs(5);

/// Longest bound that a wait can have: what `parallel.timeout_s` is cut to.
const MAX_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);

/// See the module. Clones are the same rank.
#[derive(Clone)]
pub(super) struct World {
    /// Runs the operations.
    pub(super) device: Arc<dyn Device>,
    /// The compute stream.
    pub(super) stream: Stream,
    /// All ranks.
    pub(super) comm: Communicator,
    /// Set when the generation is over.
    pub(super) cancel: Cancel,
}

impl World {
    /// Finds the other ranks. Every rank of the generation must call it.
    pub(super) fn connect(
        config: &TrainConfig,
        session: &Session,
        device: Option<Arc<dyn Device>>,
    ) -> Result<Self, TrainError> {
        let threads = threads(config);
        let device = match device {
            Some(device) => device,
            None => Arc::new(CpuDevice::new(threads)?),
        };
        let place = place(config, session, threads)?;
        let timeout = timeout(config);
        let cancel = session.cancel();
        let store = session.store();
        let transport = connect(&place, store.as_ref(), &cancel, timeout).map_err(|failure| CollectiveError {
            rank: place.rank,
            communicator: NAME.into(),
            operation: "connect".into(),
            sequence: 0,
            bytes: 0,
            tag: format!("{} ranks on {} nodes", place.world_size, place.node_count),
            failure,
        })?;
        let executor = if config.parallel.overlap {
            Executor::Thread
        } else {
            Executor::Inline
        };
        Ok(Self {
            stream: device.stream(),
            device,
            comm: Communicator::new(NAME, transport, executor, timeout, &cancel),
            cancel,
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub(super) fn size(&self) -> usize {
        self.comm.size()
    }

    /// When the host stops waiting for one collective that begins now.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.comm.timeout() + GRACE
    }

    /// An error once the generation is over. Called often enough that a rank that only computes notices soon.
    pub(super) fn check(&self) -> Result<(), TrainError> {
        match self.cancel.cause() {
            Some(cause) => Err(TrainError::GenerationOver {
                rank: self.comm.members()[self.rank()],
                cause: cause.to_owned(),
            }),
            None => Ok(()),
        }
    }
}

/// `parallel.timeout_s`
pub(super) fn timeout(config: &TrainConfig) -> Duration {
    let asked = Duration::try_from_secs_f64(config.parallel.timeout_s).unwrap_or(MAX_TIMEOUT);
    asked.min(MAX_TIMEOUT)
}

/// Compute threads of a rank: `train.threads`, else `OMP_NUM_THREADS`, else 1.
fn threads(config: &TrainConfig) -> usize {
    let from_env = || std::env::var("OMP_NUM_THREADS").ok()?.trim().parse().ok();
    config.train.threads.or_else(from_env).unwrap_or(1).max(1)
}

fn place(config: &TrainConfig, session: &Session, threads: usize) -> Result<Place, TrainError> {
    let env = session.env();
    let node_rank = env.node_rank.get() as usize;
    let host_addr = if env.node_count == 1 {
        IpAddr::V4(Ipv4Addr::LOCALHOST)
    } else {
        resolve(session.node_addrs().get(node_rank), node_rank)?
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // While buckets overlap with backward, a rank has one more thread that wants a core.
    let busy = env.local_world_size as usize * (threads + usize::from(config.parallel.overlap));
    Ok(Place {
        rank: env.rank.get() as usize,
        world_size: env.world_size.get() as usize,
        local_rank: env.local_rank.get() as usize,
        local_world_size: env.local_world_size as usize,
        node_rank,
        node_count: env.node_count as usize,
        host_addr,
        generation: env.generation.get(),
        spin: busy <= cores,
    })
}

fn resolve(address: Option<&String>, node_rank: usize) -> Result<IpAddr, TrainError> {
    let unusable = |cause: String| TrainError::NodeAddress { node_rank, cause };
    let address = address.ok_or_else(|| unusable("the agent did not say it".into()))?;
    if let Ok(ip) = address.trim_matches(['[', ']']).parse() {
        return Ok(ip);
    }
    let mut found = (address.as_str(), 0)
        .to_socket_addrs()
        .map_err(|e| unusable(format!("`{address}`: {e}")))?;
    let first = found.next().ok_or_else(|| unusable(format!("`{address}` has no address")))?;
    Ok(first.ip())
}
