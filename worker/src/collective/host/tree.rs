//! A small operation between many nodes: its elements reach every rank in ⌈log₂ nodes⌉ rounds, with two messages in each.
//! Directly, each rank sends one to every rank of the other nodes at once.
//!
//! Rank i of a node exchanges with rank i of two others, for all ranks of its node. In round k it sends what it has of 2^k
//! nodes, from its own on, to the node 2^k before it, and receives as much from the node 2^k behind it (Bruck et al., 1997,
//! "Efficient algorithms for all-to-all communications"). What is gathered is summed as if all ranks were on this node: in
//! the order, and so to the bits, of a direct exchange, of which each rank also takes as many bytes.
#![allow(unsafe_code, reason = "slots that other ranks map")]

use super::exchange::{MemoryRange, Transfer};
use super::header::OperationHeader;
use super::plan::{Peers, Round, given};
use super::topology::Topology;
use crate::collective::error::Failure;
use crate::collective::operation::{Descriptor, Operation};
use crate::collective::wait::Wait;

/// True if a brief operation goes along the tree. All ranks must contribute equally, on nodes of equal size.
pub(super) fn is_along_tree(descriptor: &Descriptor, topology: &Topology, forced: Option<bool>) -> bool {
    let (nodes, ranks) = (topology.nodes(), topology.local_ranks().len());
    let is_possible = match descriptor.operation {
        Operation::AllReduce(_) | Operation::ReduceScatter(_) | Operation::AllGather | Operation::Barrier => {
            nodes.len() > 1 && nodes.iter().all(|node| node.len() == ranks)
        }
        _ => false,
    };
    is_possible && forced.unwrap_or_else(|| is_faster(nodes.len(), ranks))
}

/// Compares the messages of a rank: with fewer of them the way was the faster one wherever `run.py collectives` measured it.
/// The bytes are the same.
fn is_faster(nodes: usize, ranks_of_node: usize) -> bool {
    let rounds = nodes.next_power_of_two().ilog2() as usize;
    // At half the number of nodes, the node before is the one behind.
    let messages = 2 * rounds - usize::from(nodes.is_power_of_two());
    messages < (nodes - 1) * ranks_of_node
}

/// Where this rank reads what each rank contributes, by rank.
///
/// # Safety
/// The ranks of this node must have written what they contribute to their slots.
pub(super) unsafe fn gather(
    peers: &mut Peers,
    descriptor: &Descriptor,
    header: OperationHeader,
    wait: &Wait,
) -> Result<Vec<Option<*mut u8>>, Failure> {
    let topology = peers.topology.clone();
    let (nodes, own, ranks) = (
        topology.nodes(),
        topology.own_node(),
        topology.local_ranks().len(),
    );
    let bytes = |rank| {
        let given = given(descriptor, topology.size(), rank);
        (
            given.start * descriptor.dtype.bytes(),
            given.len() * descriptor.dtype.bytes(),
        )
    };
    let (_, each) = bytes(topology.rank());
    let block = ranks * each;
    peers
        .gathered
        .resize((nodes.len() * block).div_ceil(size_of::<u64>()), 0);
    // The blocks of the nodes, from this one on.
    let start: *mut u8 = peers.gathered.as_mut_ptr().cast();
    for (index, &rank) in topology.local_ranks().iter().enumerate() {
        let slot = peers.control.slot(index).wrapping_add(bytes(rank).0);
        // SAFETY: the caller's promise; the first block has room for what every rank of the node contributes.
        unsafe { std::ptr::copy_nonoverlapping(slot, start.add(index * each), each) };
    }
    let rank_of = |node: usize| nodes[node % nodes.len()][topology.own_index()];
    let mut distance = 1;
    while distance < nodes.len() {
        let len = distance.min(nodes.len() - distance) * block;
        let (behind, before) = (rank_of(own + distance), rank_of(own + nodes.len() - distance));
        let mut transfers = vec![Transfer::header_only(behind)];
        transfers[0].result_in = MemoryRange {
            start: start.wrapping_add(distance * block),
            len,
        };
        if before != behind {
            transfers.push(Transfer::header_only(before));
        }
        transfers.last_mut().expect("pushed above").result_out = MemoryRange { start, len };
        transfers.sort_by_key(|transfer| transfer.rank);
        let round = Round {
            transfers,
            ..Round::new(header)
        };
        // SAFETY: the memory is this rank's, and what it sends ends before what it receives begins.
        unsafe { round.run(peers, false, wait) }?;
        distance *= 2;
    }
    let view = |rank| {
        let block_of = (topology.node_of(rank) + nodes.len() - own) % nodes.len();
        let at = block_of * block + topology.index_of(rank) * each;
        Some(start.wrapping_add(at).wrapping_sub(bytes(rank).0))
    };
    Ok((0..topology.size()).map(view).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The faster way in each row of the table in `docs/performance.md`.
    #[test]
    fn many_ranks_of_several_nodes_exchange_along_the_tree() {
        let faster = |ranks| [2, 4, 8, 16, 64].map(|nodes| is_faster(nodes, ranks));
        assert_eq!(faster(1), [false, false, true, true, true]);
        assert_eq!(faster(2), [true; 5]);
        assert_eq!(faster(8), [true; 5]);
    }
}
