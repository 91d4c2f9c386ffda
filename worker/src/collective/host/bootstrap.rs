//! Finds the other ranks of the world, over the key-value store.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::sockets::{Address, Listener};
use super::topology::{Member, RankInfo, Topology};
use super::transport::HostTransport;
use crate::collective::error::Failure;
use crate::collective::transport::{SingleRank, Transport};
use crate::collective::wait::{Arrivals, StoreExchange};
use crate::collective::wait::{Pending, Wait};
use crate::session::{Cancel, KeyValue};

/// Name of the group in messages.
const WORLD: &str = "world";

/// What a rank publishes about itself.
#[derive(Debug, Serialize, Deserialize)]
struct PublishedRank {
    node: usize,
    local: usize,
    #[serde(flatten)]
    address: Address,
}

/// The transport of the whole world: shared memory to the ranks of this node, TCP to the others.
///
/// Every rank of the generation must call it. `store` must be scoped to the job and the generation; it is not
/// used after the call returns. `timeout` bounds the whole call, and `cancel` ends it within 100 ms, or when a store
/// that is out of reach has said so. Later waits are bounded and ended by the [`Wait`] of each operation.
pub fn connect(
    info: &RankInfo,
    store: &dyn KeyValue,
    cancel: &Cancel,
    timeout: Duration,
) -> Result<Box<dyn Transport>, Failure> {
    check_info(info)?;
    if info.world_size == 1 {
        return Ok(Box::new(SingleRank::new(info.rank)));
    }
    let pending = Pending::register(WORLD, cancel);
    pending.begin_set_up("connect");
    let wait = Wait::new(timeout, cancel).reporting_to(&pending);
    let remote = info.world_size - info.local_world_size;
    let (listener, address) = Listener::open(info, info.local_world_size, remote)?;
    let own = PublishedRank {
        node: info.node_rank,
        local: info.local_rank,
        address,
    };
    let published = exchange_addresses(info, &own, store, &wait)?;
    check_node(info, &published)?;
    let members = published.iter().enumerate().map(|(global, rank)| Member {
        global,
        node: rank.node,
        local: rank.local,
    });
    let topology = Topology::new(members.collect(), info.rank);
    let addresses: Vec<&Address> = published.iter().map(|rank| &rank.address).collect();
    let connections = listener.connect(info, &topology, &addresses, &wait)?;
    let transport = HostTransport::new(info.clone(), topology, connections, &wait)?;
    Ok(Box::new(transport))
}

fn exchange_addresses(
    info: &RankInfo,
    own: &PublishedRank,
    store: &dyn KeyValue,
    wait: &Wait,
) -> Result<Vec<PublishedRank>, Failure> {
    let exchange = StoreExchange {
        store,
        wait,
        what: "exchanging addresses with the other ranks",
    };
    let bytes = serde_json::to_vec(own).expect("an address has no map keys that could fail");
    exchange.publish(&key(info.rank), &bytes)?;
    let ranks = 0..info.world_size;
    let published = ranks.map(|rank| {
        let bytes = exchange.await_key(&key(rank), rank, || absent(rank, info.world_size, store))?;
        serde_json::from_slice(&bytes)
            .map_err(|e| Failure::Invalid(format!("rank {rank} published a malformed address: {e}")))
    });
    published.collect()
}

/// `first` did not publish its address in time: which ranks after it did not either.
fn absent(first: usize, world: usize, store: &dyn KeyValue) -> Vec<usize> {
    let now = Instant::now();
    let others: Vec<usize> = (first + 1..world).collect();
    let found = Arrivals::ask(&others, now, |rank| Ok(store.get(&key(rank), now)?.is_some()));
    std::iter::once(first).chain(found.absent).collect()
}

fn key(rank: usize) -> String {
    format!("collective/{rank}")
}

fn check_info(info: &RankInfo) -> Result<(), Failure> {
    let RankInfo {
        rank,
        world_size,
        local_rank,
        local_world_size,
        ..
    } = *info;
    if rank < world_size && local_rank < local_world_size && local_world_size <= world_size {
        return Ok(());
    }
    Err(Failure::Invalid(format!(
        "rank {rank} of {world_size} cannot be rank {local_rank} of {local_world_size} on its node\n  hint: the environment of this worker is not the one its launcher set"
    )))
}

/// The ranks of this node must be as many as it has, each with another local rank.
fn check_node(info: &RankInfo, published: &[PublishedRank]) -> Result<(), Failure> {
    let of_node = published.iter().filter(|address| address.node == info.node_rank);
    let mut local_ranks: Vec<usize> = of_node.map(|address| address.local).collect();
    local_ranks.sort_unstable();
    if local_ranks.iter().copied().eq(0..info.local_world_size) {
        return Ok(());
    }
    Err(Failure::Invalid(format!(
        "node {} should have {} ranks, but ranks with these local ranks came: {local_ranks:?}\n  hint: the environment of some worker is not the one its launcher set",
        info.node_rank, info.local_world_size
    )))
}
