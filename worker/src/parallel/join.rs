//! Joining the other ranks: from a session to the communicator of the world.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::time::Duration;

use crate::collective::{CollectiveError, Communicator, Executor, Place, connect};
use crate::session::Session;

/// Name of the communicator of all ranks, in errors.
const NAME: &str = "world";

/// How this rank takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinOptions {
    /// Who drives the operations.
    pub executor: Executor,
    /// Threads that this rank computes on; with a core for each of them and the executor, waits may spin.
    pub threads: usize,
    /// Bound of the joining and of each operation.
    pub timeout: Duration,
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
}

/// Finds the other ranks. Every rank of the generation must call it.
pub fn join_world(session: &Session, options: &JoinOptions) -> Result<Communicator, JoinError> {
    let place = place(session, options)?;
    let cancel = session.cancel();
    let store = session.store();
    let transport = connect(&place, store.as_ref(), &cancel, options.timeout);
    let transport = transport.map_err(|failure| CollectiveError {
        rank: place.rank,
        communicator: NAME.into(),
        operation: "connect".into(),
        sequence: 0,
        bytes: 0,
        tag: match place.node_count {
            1 => format!("{} ranks on one node", place.world_size),
            nodes => format!("{} ranks on {nodes} nodes", place.world_size),
        },
        failure,
    })?;
    Ok(Communicator::new(
        NAME,
        transport,
        options.executor,
        options.timeout,
        &cancel,
    ))
}

fn place(session: &Session, options: &JoinOptions) -> Result<Place, JoinError> {
    let env = session.env();
    let node_rank = env.node_rank.get() as usize;
    let host_addr = if env.node_count == 1 {
        IpAddr::V4(Ipv4Addr::LOCALHOST)
    } else {
        resolve(session.node_addrs().get(node_rank), node_rank)?
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = options.threads + usize::from(options.executor == Executor::Thread);
    Ok(Place {
        rank: env.rank.get() as usize,
        world_size: env.world_size.get() as usize,
        local_rank: env.local_rank.get() as usize,
        local_world_size: env.local_world_size as usize,
        node_rank,
        node_count: env.node_count as usize,
        host_addr,
        generation: env.generation.get(),
        spin: env.local_world_size as usize * threads <= cores,
    })
}

fn resolve(address: Option<&String>, node_rank: usize) -> Result<IpAddr, JoinError> {
    let unusable = |cause: String| JoinError::NodeAddress { node_rank, cause };
    let address = address.ok_or_else(|| unusable("the agent did not say it".into()))?;
    if let Ok(ip) = address.trim_matches(['[', ']']).parse() {
        return Ok(ip);
    }
    let mut found = (address.as_str(), 0)
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
        let of = |text: &str| resolve(Some(&text.to_owned()), 1);
        assert_eq!(of("10.1.2.3"), Ok(IpAddr::from([10, 1, 2, 3])));
        assert_eq!(of("[::1]"), Ok(IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])));
        assert!(of("localhost").is_ok_and(|ip| ip.is_loopback()));
    }

    #[test]
    fn a_missing_address_names_the_node() {
        let error = resolve(None, 3).unwrap_err().to_string();
        assert!(
            error.starts_with("address of node 3 cannot be used: the agent did not say it"),
            "{error}"
        );
    }
}
