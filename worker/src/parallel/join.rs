//! Joining the other ranks: from a session to the communicator of the world.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use crate::collective::nccl::{Membership, Nccl, NcclTransport};
use crate::collective::{
    CollectiveError, Communicator, Executor, Failure, RankInfo, SingleRank, Transport, connect, name,
};
use crate::device::{CudaDevice, Device};
use crate::libraries::LibraryError;
use crate::session::{Cancel, Session};

/// Name of the communicator of all ranks, in errors.
const NAME: &str = "world";

/// How this rank takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinOptions {
    /// What drives the operations: a thread, or the caller.
    pub executor: Executor,
    /// Threads that this rank computes on; with a core for each of them and the executor, waits may spin.
    pub threads: usize,
    /// Bound of the joining and of each operation.
    pub timeout: Duration,
}

impl JoinOptions {
    fn communicator(&self, transport: Box<dyn Transport>, cancel: &Cancel) -> Communicator {
        Communicator::new(NAME, transport, self.executor, self.timeout, cancel)
    }
}

impl Default for JoinOptions {
    /// Operations on a thread of their own, one compute thread, five minutes.
    fn default() -> Self {
        Self {
            executor: Executor::Thread,
            threads: 1,
            timeout: Duration::from_mins(5),
        }
    }
}

/// Why a rank could not join the others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The address of this node cannot be used.
    #[error(
        "address of node {node_rank} cannot be used: {cause}\n  hint: `--local-addr` sets the address under which other nodes reach this one"
    )]
    NodeAddress {
        /// This node.
        node_rank: usize,
        /// In words.
        cause: String,
    },
    /// Connecting failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// What moves bytes between GPUs cannot be loaded.
    #[error(transparent)]
    Library(#[from] LibraryError),
}

/// Finds the other ranks, for buffers in host memory. Every rank of the generation must call it.
pub fn join_world(session: &Session, options: &JoinOptions) -> Result<Communicator, JoinError> {
    join_world_through(session, options, |transport| transport)
}

/// The same, with something of the caller's between communicator and transport.
pub fn join_world_through(
    session: &Session,
    options: &JoinOptions,
    wrap: impl FnOnce(Box<dyn Transport>) -> Box<dyn Transport>,
) -> Result<Communicator, JoinError> {
    let info = rank_info(session, options)?;
    let cancel = session.cancel();
    let store = session.store();
    let transport = connect(&info, store.as_ref(), &cancel, options.timeout)
        .map_err(|failure| refused(session, "connect", failure))?;
    Ok(options.communicator(wrap(transport), &cancel))
}

/// Finds the other ranks, for buffers on `device`, which on a GPU NCCL moves. Every rank of the generation must call
/// it, all with the same kind of device.
pub fn join_world_on(
    session: &Session,
    device: &Arc<dyn Device>,
    options: &JoinOptions,
) -> Result<Communicator, JoinError> {
    if CudaDevice::of(device.as_ref()).is_none() {
        return join_world(session, options);
    }
    let env = session.env();
    let (rank, world_size) = (env.rank.get() as usize, env.world_size.get() as usize);
    let cancel = session.cancel();
    if world_size == 1 {
        let transport = Box::new(SingleRank::on_stream(rank));
        return Ok(options.communicator(transport, &cancel));
    }
    let nccl = Nccl::load()?;
    let world = Membership {
        name: NAME.into(),
        rank,
        members: (0..world_size).collect(),
        timeout: options.timeout,
        cancel: cancel.clone(),
    };
    let transport = NcclTransport::connect(&nccl, device, session.store(), world)
        .map_err(|failure| refused(session, &format!("connect by NCCL {}", nccl.version()), failure))?;
    Ok(options.communicator(Box::new(transport), &cancel))
}

/// The failure of a call that made no communicator.
fn refused(session: &Session, operation: &str, failure: Failure) -> CollectiveError {
    let env = session.env();
    let tag = match env.node_count {
        1 => format!("{} ranks on one node", env.world_size),
        nodes => format!("{} ranks on {nodes} nodes", env.world_size),
    };
    CollectiveError {
        rank: env.rank.get() as usize,
        operation: name(operation, 0, NAME, &tag, 0),
        failure,
    }
}

fn rank_info(session: &Session, options: &JoinOptions) -> Result<RankInfo, JoinError> {
    let env = session.env();
    let node_rank = env.node_rank.get() as usize;
    let host_addr = if env.node_count == 1 {
        IpAddr::V4(Ipv4Addr::LOCALHOST)
    } else {
        resolve(session.node_addr(), node_rank)?
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = options.threads + usize::from(options.executor == Executor::Thread);
    Ok(RankInfo {
        rank: env.rank.get() as usize,
        world_size: env.world_size.get() as usize,
        local_rank: env.local_rank.get() as usize,
        local_world_size: env.local_world_size as usize,
        node_rank,
        host_addr,
        ports: env.worker_ports,
        generation: env.generation.get(),
        data_key: session.data_key().cloned(),
        spin: env.local_world_size as usize * threads <= cores,
        tree: None,
    })
}

fn resolve(address: &str, node_rank: usize) -> Result<IpAddr, JoinError> {
    let unusable = |cause: String| JoinError::NodeAddress { node_rank, cause };
    if let Ok(ip) = address.trim_matches(['[', ']']).parse() {
        return Ok(ip);
    }
    let mut found = (address, 0)
        .to_socket_addrs()
        .map_err(|e| unusable(format!("`{address}`: {e}")))?;
    let first = found
        .next()
        .ok_or_else(|| unusable(format!("`{address}` has no address")))?;
    Ok(first.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_nodes_are_read_in_every_form() {
        let of = |text: &str| resolve(text, 1);
        assert_eq!(of("10.1.2.3"), Ok(IpAddr::from([10, 1, 2, 3])));
        assert_eq!(of("[::1]"), Ok(IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])));
        assert!(of("localhost").is_ok_and(|ip| ip.is_loopback()));
    }

    #[test]
    fn a_missing_address_names_the_node() {
        let error = resolve("", 3).unwrap_err().to_string();
        assert!(error.starts_with("address of node 3 cannot be used: "), "{error}");
    }
}
