//! The transport of host memory: shared memory between ranks of one node, TCP to the ranks of other nodes. The ranks of the
//! world find each other over the key-value store ([`connect`]), those of a subgroup over the connections of its group.
//!
//! Every operation begins in the same way: each rank writes a header of what it does, the ranks of a node pass a
//! barrier, and each compares its header with those of all peers. Then, by where the elements are:
//! - *brief*: the elements are beside the header; each rank reads what it needs; between many nodes they cross along a tree;
//! - *in place*: the buffers are in shared arenas; rank r works on slice r of all buffers, and a second barrier follows;
//! - *staged*: other buffers go through small stages in the same way, three rounds in flight.
//!
//! Messages and an all-to-all go over the connections, also within a node: their sizes differ by pair of ranks.
//!
//! A group on several nodes with several ranks on one of them works in place only if all ranks use the same
//! shared arena, and refuses a mixture; on one node, a mixture is staged.
#![allow(unsafe_code, reason = "memory that other ranks map")]

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::exchange::{MemoryRange, Transfer};
use super::handshake::{GroupProof, connect_group};
use super::header::{OperationHeader, SetUpCall};
use super::plan::{Peers, Round, RoundPlan, given, is_brief};
use super::shared_memory::{ControlSegments, STAGE_BYTES, SharedArena};
use super::sockets::{Address, Connection, Listener};
use super::topology::{Member, RankInfo, Topology};
use super::tree::{gather, is_along_tree};
use crate::collective::error::Failure;
use crate::collective::operation::{AllToAll, Descriptor, Operation, Request, slice};
use crate::collective::transport::{SingleRank, Subgroup, Transport, check_members};
use crate::collective::wait::{StoreExchange, Wait};
use crate::device::{Arena, ArenaSpec, Device, Held, HostMemory};
use crate::session::{Cancel, KeyValue};

/// Size of a [`SetUpMessage`]; a longer refusal is cut.
const MESSAGE_BYTES: usize = 1280;
const REFUSAL_BOUND: usize = 240;

/// Name of the group of all ranks in messages.
const WORLD: &str = "world";

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
    info.check()?;
    if info.world_size == 1 {
        return Ok(Box::new(SingleRank::new(info.rank)));
    }
    let wait = Wait::of_set_up("connect", WORLD, timeout, cancel);
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
    let proof = GroupProof::new(info, WORLD);
    let connections = connect_group(&listener, proof, &topology, &addresses, &wait)?;
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
        prefix: "collective".into(),
        rank: info.rank,
        ranks: info.world_size,
    };
    let bytes = serde_json::to_vec(own).expect("an address has no map keys that could fail");
    let published = exchange.all_gather(&bytes)?;
    let published = published.iter().enumerate().map(|(rank, bytes)| {
        let malformed = |e| Failure::Invalid(format!("rank {rank} published a malformed address: {e}"));
        serde_json::from_slice(bytes).map_err(malformed)
    });
    published.collect()
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

/// What a rank publishes about itself.
#[derive(Debug, Serialize, Deserialize)]
struct PublishedRank {
    node: usize,
    local: usize,
    #[serde(flatten)]
    address: Address,
}

/// The transport of one group of ranks over host memory.
struct HostTransport {
    info: RankInfo,
    peers: Peers,
    /// Number of the next collective.
    collectives: u64,
    /// By rank of the group: number of the next message from or to it.
    messages: Vec<u64>,
}

impl HostTransport {
    /// Over connections to the other ranks, by rank.
    fn new(
        info: RankInfo,
        topology: Topology,
        connections: Vec<Option<Connection>>,
        wait: &Wait,
    ) -> Result<Self, Failure> {
        let local = topology.local_ranks().iter();
        let local: Vec<_> = local.map(|&rank| connections[rank].as_ref()).collect();
        let control = ControlSegments::new(info.rank, &local, info.spin, wait)?;
        Ok(Self {
            info,
            collectives: 0,
            messages: vec![0; topology.size()],
            peers: Peers {
                topology,
                control,
                connections,
                gathered: Vec::new(),
            },
        })
    }

    /// `base` is the start of the held buffer.
    fn collective(&mut self, request: &Request, base: *mut u8, wait: &Wait) -> Result<u64, Failure> {
        let descriptor = Descriptor::of(request);
        let number = self.next_collective();
        let topology = &self.peers.topology;
        let (rank, size) = (topology.rank(), topology.size());
        let in_one_way = topology.has_one_rank_per_node() || topology.is_one_node();
        let mut header = OperationHeader::of(request, rank, number);
        if let Some(arena) = SharedArena::of(&request.buffer) {
            (header.arena, header.offset) = (arena.number(), request.buffer.start() as u64);
        }
        if !in_one_way {
            // Between nodes the rounds must match, so all ranks must take the same of the ways above.
            header.require_common_arena();
        }
        let brief = is_brief(&descriptor, size);
        self.peers.control.announce(&header);
        if brief {
            let given = given(&descriptor, size, rank);
            let (start, len) = (given.start, given.len());
            let [start, len] = [start, len].map(|elements| elements * descriptor.dtype.bytes());
            let slot = self.peers.control.own_slot();
            // SAFETY: a slot has room for a brief operation, it is ours until the barrier, and the buffer is held.
            unsafe { std::ptr::copy_nonoverlapping(base.add(start), slot.add(start), len) };
        }
        self.peers.control.barrier(wait)?;
        self.compare(&header)?;
        descriptor.check(rank, size)?;
        let views = if brief && is_along_tree(&descriptor, topology, self.info.tree) {
            // SAFETY: all ranks of the node have written their slots before the barrier.
            Some(unsafe { gather(&mut self.peers, &descriptor, header, wait) }?)
        } else if brief {
            Some(topology.local_views(|index| self.peers.control.slot(index)))
        } else {
            self.mapped_views(request, base)?
        };
        let Some(views) = views else {
            // SAFETY: the buffer is held.
            return unsafe { self.staged(descriptor, base, header, wait) };
        };
        let plan = RoundPlan {
            descriptor,
            topology: &self.peers.topology,
            views,
            own: base,
            brief,
        };
        let round = plan.round(header);
        // SAFETY: all ranks hold their buffers. Brief: each only reads the slots, and writes its own buffer. Else each
        // writes slices that no other touches.
        let counted = unsafe { round.run(&mut self.peers, !brief, wait) }?;
        if !brief {
            self.peers.control.barrier(wait)?;
        }
        Ok(counted)
    }

    /// Sends or receives the request's buffer. Both ranks compare headers first: of two ranks that both send to each other
    /// first, both fail at once.
    fn message(
        &mut self,
        peer: usize,
        request: &Request,
        start: *mut u8,
        wait: &Wait,
    ) -> Result<u64, Failure> {
        let topology = &self.peers.topology;
        request.check(topology.rank(), topology.size())?;
        let mut round = Round::new(OperationHeader::of(request, topology.rank(), self.messages[peer]));
        self.messages[peer] += 1;
        let mut transfer = Transfer::header_only(peer);
        let is_sent = matches!(request.operation, Operation::Send { .. });
        let Transfer {
            result_out,
            result_in,
            ..
        } = &mut transfer;
        *(if is_sent { result_out } else { result_in }) = MemoryRange::new(start, request.buffer.bytes());
        round.transfers.push(transfer);
        // SAFETY: the range is that of a held buffer, which no other rank touches.
        unsafe { round.run(&mut self.peers, false, wait) }
    }

    /// Exchanges the parts of an all-to-all with all other ranks at once, each over the connection to it. The header for a
    /// rank says how much follows. `start` is that of the held buffer.
    fn all_to_all(
        &mut self,
        request: &Request,
        parts: &AllToAll,
        start: *mut u8,
        wait: &Wait,
    ) -> Result<u64, Failure> {
        let number = self.next_collective();
        let topology = &self.peers.topology;
        request.check(topology.rank(), topology.size())?;
        let mut round = Round::new(OperationHeader::of(request, topology.rank(), number));
        let (sent, width) = (parts.sent.host_bytes()?, request.buffer.dtype().bytes());
        for (rank, [out, into]) in parts.parts().enumerate() {
            let out = &sent[out.start * width..out.end * width];
            let into = MemoryRange::new(start.wrapping_add(into.start * width), into.len() * width);
            if rank == topology.rank() {
                // SAFETY: the part has this length in both buffers, of which one is borrowed and the other held.
                unsafe { std::ptr::copy_nonoverlapping(out.as_ptr(), into.start, into.len) };
                continue;
            }
            round.transfers.push(Transfer {
                result_out: MemoryRange::new(out.as_ptr().cast_mut(), out.len()),
                result_in: into,
                ..Transfer::header_only(rank)
            });
        }
        // SAFETY: what is sent is only read, and borrowed; what is received is held, each part for one rank.
        unsafe { round.run(&mut self.peers, false, wait) }
    }

    /// Compares the headers of all ranks of the node with ours.
    fn compare(&self, header: &OperationHeader) -> Result<(), Failure> {
        let (topology, control) = (&self.peers.topology, &self.peers.control);
        for (index, &rank) in topology.local_ranks().iter().enumerate() {
            header.agree(&control.header(index), topology.globals()[rank])?;
        }
        Ok(())
    }

    fn next_collective(&mut self) -> u64 {
        self.collectives += 1;
        self.collectives - 1
    }

    /// Where the buffers of all ranks of the node are mapped, if all are in the same shared arena, or there is one rank.
    fn mapped_views(
        &self,
        request: &Request,
        base: *mut u8,
    ) -> Result<Option<Vec<Option<*mut u8>>>, Failure> {
        let (topology, control) = (&self.peers.topology, &self.peers.control);
        if topology.has_one_rank_per_node() {
            return Ok(Some(topology.local_views(|_| base)));
        }
        let Some(arena) = SharedArena::of(&request.buffer) else {
            return Ok(None);
        };
        let headers: Vec<OperationHeader> = (0..control.ranks()).map(|rank| control.header(rank)).collect();
        if headers.iter().any(|header| header.arena != arena.number()) {
            return Ok(None);
        }
        let views = topology.local_ranks().iter().zip(headers);
        let views = views.map(|(&rank, header)| {
            if rank == topology.rank() {
                return Ok(base);
            }
            let global = topology.globals()[rank];
            let view = arena.of_rank(global, header.offset, request.buffer.bytes());
            view.ok_or_else(|| {
                let arena = request.buffer.arena();
                Failure::Invalid(format!("the buffer of rank {global} is not in `{arena:?}`"))
            })
        });
        let views: Vec<_> = views.collect::<Result<_, _>>()?;
        Ok(Some(topology.local_views(|index| views[index])))
    }

    /// Takes a private buffer through the stages. In each step one round is filled, the round before it is worked
    /// on, the one before that is emptied, and a barrier follows.
    ///
    /// # Safety
    /// `base` must be the held buffer of the operation.
    unsafe fn staged(
        &mut self,
        descriptor: Descriptor,
        base: *mut u8,
        header: OperationHeader,
        wait: &Wait,
    ) -> Result<u64, Failure> {
        let topology = &self.peers.topology;
        let rounds = StagedRounds::new(descriptor, base, topology.rank(), topology.size())?;
        let (count, me) = (rounds.count(), topology.own_index());
        let mut counted = 0;
        for step in 0..count + 2 {
            if step < count {
                // SAFETY: what was in this stage was emptied in the step before, and worked on before that.
                unsafe { rounds.fill(step, self.peers.control.stage(me, step)) };
            }
            if (1..=count).contains(&step) {
                let round = step - 1;
                let (topology, control) = (&self.peers.topology, &self.peers.control);
                let views = topology.local_views(|index| control.stage(index, round));
                let plan = RoundPlan {
                    descriptor: rounds.descriptor(round),
                    topology,
                    own: control.stage(me, round),
                    views,
                    brief: false,
                };
                let round = plan.round(header);
                // SAFETY: all have filled this stage before the last barrier and leave it alone until the next,
                // but for this work, in which each writes slices that no other touches.
                counted += unsafe { round.run(&mut self.peers, true, wait) }?;
            }
            if step >= 2 {
                // SAFETY: all have worked on this stage before the last barrier.
                unsafe { rounds.empty(step - 2, self.peers.control.stage(me, step - 2)) };
            }
            if step <= count {
                self.peers.control.barrier(wait)?;
            }
        }
        Ok(counted)
    }

    /// Sends a message to all ranks of the group and returns theirs, by rank. All must make the same call.
    /// If a rank refuses, all get an error that says which and why; the first refusal in rank order wins.
    fn exchange(
        &mut self,
        header: &OperationHeader,
        message: &SetUpMessage,
        wait: &Wait,
    ) -> Result<Vec<SetUpMessage>, Failure> {
        let mut ours = message.encode()?;
        let mut all = vec![[b' '; MESSAGE_BYTES]; self.peers.topology.size()];
        let control = &mut self.peers.control;
        control.announce(header);
        let slot = control.own_slot().cast::<[u8; MESSAGE_BYTES]>();
        // SAFETY: a slot has room for a message, and is ours until the barrier.
        unsafe { slot.write(ours) };
        control.barrier(wait)?;
        self.compare(header)?;
        let range = |bytes: &mut [u8; MESSAGE_BYTES]| MemoryRange::new(bytes.as_mut_ptr(), MESSAGE_BYTES);
        let topology = &self.peers.topology;
        let mut round = Round::new(*header);
        for (index, &rank) in topology.local_ranks().iter().enumerate() {
            let slot = self.peers.control.slot(index);
            round.copies.push((slot, range(&mut all[rank])));
        }
        let result_out = range(&mut ours);
        let transfers = topology.remote().map(|rank| Transfer {
            result_out,
            result_in: range(&mut all[rank]),
            ..Transfer::header_only(rank)
        });
        round.transfers = transfers.collect();
        // SAFETY: slots are only read now; the messages are ours, each the target of one rank.
        unsafe { round.run(&mut self.peers, false, wait) }?;
        let globals = self.peers.topology.globals();
        let decoded = globals.iter().zip(&all).map(|(&rank, bytes)| {
            let message: SetUpMessage = serde_json::from_slice(bytes)
                .map_err(|e| Failure::Invalid(format!("rank {rank} sent a malformed message: {e}")))?;
            match message.refusal {
                Some(why) => Err(Failure::Refused { rank, why }),
                None => Ok(message),
            }
        });
        decoded.collect()
    }

    /// Allocates an arena on every rank of the group; operations on it, of this group and of its subgroups, work
    /// in place. Either all ranks get theirs or none does. A rank that cannot allocate returns its own failure, the others
    /// the first refusal.
    fn share(&mut self, spec: &ArenaSpec, wait: &Wait) -> Result<Arena, Failure> {
        let (call, bytes) = (SetUpCall::Allocation(spec.dtype, spec.len), spec.bytes());
        let ranks = self.peers.control.ranks();
        // Before any rank allocates, all see that there is room for all of them.
        let room = HostMemory::check_room(&spec.name, bytes, ranks).map_err(Failure::from);
        let number = rand::random::<u64>() | 1;
        let ((), messages) = self.exchange_outcomes(call, &spec.name, number, room, wait)?;
        let number = messages[0].number;
        let own = if ranks == 1 {
            // Not shared with any rank; private memory can have huge pages.
            HostMemory::private(&spec.name, bytes)
        } else {
            HostMemory::shared(&spec.name, bytes)
        };
        let (own, _) = self.exchange_outcomes(call, &spec.name, 0, own.map_err(Failure::from), wait)?;
        let local = self.peers.topology.local_ranks().iter();
        let local: Vec<_> = local
            .filter_map(|&rank| self.peers.connections[rank].as_ref())
            .collect();
        let memory = SharedArena::exchange(number, &spec.name, own, &local, wait)?;
        Ok(Arena::new(spec, memory))
    }

    fn exchange_outcomes<T>(
        &mut self,
        call: SetUpCall,
        name: &str,
        number: u64,
        outcome: Result<T, Failure>,
        wait: &Wait,
    ) -> Result<(T, Vec<SetUpMessage>), Failure> {
        let header = OperationHeader::of_call(call, self.next_collective(), name);
        let mut message = SetUpMessage {
            number,
            ..SetUpMessage::default()
        };
        message.refuse(outcome.as_ref().map_err(Clone::clone));
        match (outcome, self.exchange(&header, &message, wait)) {
            (Err(own), Err(Failure::Refused { .. })) => Err(own),
            (outcome, exchanged) => {
                let exchanged = exchanged?;
                Ok((outcome?, exchanged))
            }
        }
    }
}

impl Transport for HostTransport {
    fn rank(&self) -> usize {
        self.peers.topology.rank()
    }

    fn members(&self) -> &[usize] {
        self.peers.topology.globals()
    }

    fn alloc_shared(
        &mut self,
        _device: &Arc<dyn Device>,
        spec: &ArenaSpec,
        wait: &Wait,
    ) -> Result<Arena, Failure> {
        self.share(spec, wait)
    }

    /// The subgroup has segments and connections of its own, so that two groups of one rank can be driven by two threads.
    fn split(&mut self, subgroup: &Subgroup, wait: &Wait) -> Result<Box<dyn Transport>, Failure> {
        let Subgroup { name, members, .. } = subgroup;
        let header = OperationHeader::of_call(SetUpCall::Split, self.next_collective(), name);
        let mut message = SetUpMessage {
            number: number_of(name, members),
            ..SetUpMessage::default()
        };
        let topology = &self.peers.topology;
        let me = topology.rank();
        message.refuse(check_members(members, me, topology.size()));
        let remote = topology.remote().filter(|rank| members.contains(rank)).count();
        let listener = (members.len() > 1).then(|| Listener::open(&self.info, members.len(), remote));
        let listener = message.refuse(listener.transpose()).flatten();
        let (listener, address) = listener.unzip();
        message.address = address;
        let messages = self.exchange(&header, &message, wait)?;
        if let Some(&rank) = members
            .iter()
            .find(|&&rank| messages[rank].number != message.number)
        {
            return Err(Failure::Mismatch {
                rank: self.peers.topology.globals()[rank],
                ours: format!("split into `{name}` of ranks {members:?}"),
                theirs: "split into a group of another name or with other members".to_owned(),
            });
        }
        if members.len() == 1 {
            return Ok(Box::new(SingleRank::new(self.info.rank)));
        }
        let member = |&rank: &usize| self.peers.topology.member(rank);
        let topology = Topology::new(
            members.iter().map(member).collect(),
            members.binary_search(&me).expect("checked above"),
        );
        let addresses = members.iter().map(|&rank| messages[rank].address.as_ref());
        let addresses: Option<Vec<&Address>> = addresses.collect();
        let (Some(listener), Some(addresses)) = (listener, addresses) else {
            unreachable!("a rank without a listener refuses");
        };
        let proof = GroupProof::new(&self.info, name);
        let connections = connect_group(&listener, proof, &topology, &addresses, wait)?;
        // From here on the others wait for this rank's segment: not a refusal, after which all ranks could go on.
        let failed = |failure| match failure {
            Failure::Device(error) => Failure::System {
                what: format!("shared memory of `{name}`"),
                cause: error.to_string(),
            },
            other => other,
        };
        let transport = Self::new(self.info.clone(), topology, connections, wait).map_err(failed)?;
        Ok(Box::new(transport))
    }

    fn execute(&mut self, request: &Request, held: Held, wait: &Wait) -> Result<u64, Failure> {
        let base = held.host_ptr()?;
        let outcome = match request.operation {
            Operation::AllToAll => {
                let parts = request.all_to_all.as_ref();
                self.all_to_all(request, parts.expect("it comes with its parts"), base, wait)
            }
            Operation::Send { to: peer } | Operation::Recv { from: peer } => {
                self.message(peer, request, base, wait)
            }
            _ => self.collective(request, base, wait),
        };
        // Ranks that have not failed yet may still write here: no slice of it may exist any more.
        if outcome.is_err() && SharedArena::of(&request.buffer).is_some() {
            let topology = &self.peers.topology;
            match request.operation {
                // What this rank contributes they only read.
                Operation::AllGather => {
                    held.abandon_but(slice(request.buffer.len(), topology.size(), topology.rank()));
                }
                _ => held.abandon(),
            }
        }
        outcome
    }
}

/// The message of one rank to the others while all of them set something up.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct SetUpMessage {
    /// Why this rank cannot go on.
    refusal: Option<String>,
    /// Number of a shared arena, or hash of the name and the members of a subgroup.
    number: u64,
    /// Where this rank listens.
    address: Option<Address>,
}

impl SetUpMessage {
    /// A message of a rank that can go on only with `outcome`.
    fn refuse<T>(&mut self, outcome: Result<T, Failure>) -> Option<T> {
        let refusal = |failure: Failure| failure.to_string().chars().take(REFUSAL_BOUND).collect();
        outcome
            .map_err(|failure| self.refusal = Some(refusal(failure)))
            .ok()
    }

    fn encode(&self) -> Result<[u8; MESSAGE_BYTES], Failure> {
        let mut bytes = [b' '; MESSAGE_BYTES];
        let too_long = |e: serde_json::Error| Failure::Invalid(format!("a message does not fit: {e}"));
        serde_json::to_writer(&mut bytes[..], self).map_err(too_long)?;
        Ok(bytes)
    }
}

/// What another rank publishes, or says while a group sets something up; the error is in words. For `tests/fuzz`.
pub(super) fn read_set_up(bytes: &[u8]) -> Result<(), String> {
    let message: Result<SetUpMessage, _> = serde_json::from_slice(bytes);
    let published: Result<PublishedRank, _> = serde_json::from_slice(bytes);
    match (message, published) {
        (Err(message), Err(published)) => Err(format!("{message}; {published}")),
        (Ok(message), _) => message.encode().map(drop).map_err(|e| e.to_string()),
        _ => Ok(()),
    }
}

fn number_of(name: &str, members: &[usize]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (name, members).hash(&mut hasher);
    hasher.finish()
}

/// How a buffer that other ranks do not map goes through the stages, piece by piece.
///
/// A round takes a part of the buffer that is itself a small operation of the same kind: a run of elements, or,
/// where the buffer is one slice a rank, the same run of every slice.
struct StagedRounds {
    descriptor: Descriptor,
    base: *mut u8,
    rank: usize,
    /// Slices of the buffer: one a rank, or one in all.
    slices: usize,
    /// Elements of a slice in a round.
    each: usize,
}

impl StagedRounds {
    /// The rounds for the buffer at `base`.
    fn new(descriptor: Descriptor, base: *mut u8, rank: usize, size: usize) -> Result<Self, Failure> {
        let (slices, multiple) = match descriptor.operation {
            Operation::ReduceScatter(_) | Operation::AllGather => (size, 1),
            // With equal slices in a round, each rank moves as many bytes as in place.
            Operation::AllReduce(_) => (1, size),
            _ => (1, 1),
        };
        let each = STAGE_BYTES / (slices * descriptor.dtype.bytes()) / multiple * multiple;
        if each == 0 {
            return Err(Failure::Invalid(format!(
                "a group of {size} is too large for a stage"
            )));
        }
        Ok(Self {
            descriptor,
            base,
            rank,
            slices,
            each,
        })
    }

    /// Number of rounds.
    fn count(&self) -> usize {
        (self.descriptor.len / self.slices).div_ceil(self.each)
    }

    /// The operation of one round.
    fn descriptor(&self, round: usize) -> Descriptor {
        Descriptor {
            len: self.run(round).len() * self.slices,
            ..self.descriptor
        }
    }

    /// Copies what this rank contributes in a round to its stage.
    ///
    /// # Safety
    /// The stage must have room and no other rank may access it; the buffer must be held.
    unsafe fn fill(&self, round: usize, stage: *mut u8) {
        let slices = match self.descriptor.operation {
            Operation::AllGather => self.rank..self.rank + 1,
            Operation::Broadcast { root } if root != self.rank => 0..0,
            _ => 0..self.slices,
        };
        for [in_buffer, in_stage, len] in self.pieces(round, slices) {
            // SAFETY: the caller's promise; both ranges are within the buffer and the stage.
            unsafe { std::ptr::copy_nonoverlapping(self.base.add(in_buffer), stage.add(in_stage), len) };
        }
    }

    /// Copies this rank's result of a round from its stage.
    ///
    /// # Safety
    /// As [`StagedRounds::fill`].
    unsafe fn empty(&self, round: usize, stage: *const u8) {
        let slices = match self.descriptor.operation {
            Operation::ReduceScatter(_) => self.rank..self.rank + 1,
            Operation::Broadcast { root } if root == self.rank => 0..0,
            _ => 0..self.slices,
        };
        for [in_buffer, in_stage, len] in self.pieces(round, slices) {
            // SAFETY: the caller's promise; both ranges are within the buffer and the stage.
            unsafe { std::ptr::copy_nonoverlapping(stage.add(in_stage), self.base.add(in_buffer), len) };
        }
    }

    fn run(&self, round: usize) -> Range<usize> {
        let len = self.descriptor.len / self.slices;
        let start = (round * self.each).min(len);
        start..(start + self.each).min(len)
    }

    /// Byte offsets in the buffer and in the stage, and lengths, of some slices' parts of a round.
    fn pieces(&self, round: usize, slices: Range<usize>) -> impl Iterator<Item = [usize; 3]> {
        let run = self.run(round);
        slices.map(move |index| {
            let in_buffer = slice(self.descriptor.len, self.slices, index).start + run.start;
            let elements = [in_buffer, index * run.len(), run.len()];
            elements.map(|elements| elements * self.descriptor.dtype.bytes())
        })
    }
}
