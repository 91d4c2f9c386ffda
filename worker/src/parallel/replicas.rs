//! Replicas: parameters that must be the same, bit by bit, on every rank.

use std::sync::Arc;

use ddp_proto::words::numbered;

use super::{GradientLayout, Place, Portion, Sharding};
use crate::collective::{CollectiveError, Communicator, Launch, Traffic, WorkError};
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Stream};
use crate::model::ParamId;

/// Bytes of the hash of one parameter.
const HASH_BYTES: usize = 16;

/// Compares parameters across ranks, and makes them the same at the start.
pub struct Replicas {
    comm: Communicator,
    device: Arc<dyn Device>,
    compared: Vec<Compared>,
    /// One slice a rank, in each the hashes of all that is compared.
    hashes: Arena,
}

/// A parameter, or the part of it that the ranks own.
struct Compared {
    name: String,
    place: Place,
}

/// Why parameters cannot be shown to be the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplicasError {
    /// They are not.
    #[error(
        "parameter `{param}` of {} differs from rank {reference} after step {step}\n  hint: ranks that start equal and add the same gradients stay equal; look for a failing machine or different builds",
        numbered("rank", ranks)
    )]
    Differ {
        /// The first parameter that differs, in forward order.
        param: String,
        /// Global rank that the others are compared with.
        reference: usize,
        /// Global ranks whose parameter differs from its.
        ranks: Vec<usize>,
        /// Steps finished.
        step: u64,
    },
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<WorkError> for ReplicasError {
    fn from(error: WorkError) -> Self {
        match error {
            WorkError::Failed(error) => Self::Collective(error),
            WorkError::Pending(error) => Self::Device(error),
        }
    }
}

impl Replicas {
    /// For all parameters, in the ranges of `layout`. Every rank of `comm` must call it.
    pub fn new(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        layout: &GradientLayout,
    ) -> Result<Self, ReplicasError> {
        Self::of_whole(comm, device, layout, &Sharding::replicated(layout))
    }

    /// For all parameters, in the whole arena of `sharding`. Every rank of `comm` must call it.
    pub fn of_whole(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        layout: &GradientLayout,
        sharding: &Sharding,
    ) -> Result<Self, ReplicasError> {
        let compared = (0..layout.params()).map(|id| Compared {
            name: layout.spec(ParamId(id)).name.clone(),
            place: Place {
                whole: sharding.whole_range(ParamId(id)),
                shard: 0..0,
            },
        });
        Self::with(comm, device, compared.collect())
    }

    /// For what `sharding` says that this rank owns, of which every rank of `comm` has a copy: every rank of it must
    /// call it.
    pub fn of_shards(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        layout: &GradientLayout,
        sharding: &Sharding,
    ) -> Result<Self, ReplicasError> {
        let mut compared: Vec<(ParamId, Compared)> = Vec::new();
        for piece in sharding.own_pieces() {
            let name = layout.spec(piece.param).name.clone();
            let place = piece.place;
            compared.push((piece.param, Compared { name, place }));
        }
        // The first that differs is named: in forward order, as above.
        compared.sort_by_key(|(id, _)| *id);
        Self::with(comm, device, compared.into_iter().map(|(_, part)| part).collect())
    }

    fn with(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        compared: Vec<Compared>,
    ) -> Result<Self, ReplicasError> {
        let spec = ArenaSpec::on_node(
            "parameter hashes",
            DType::U8,
            comm.size() * compared.len() * HASH_BYTES,
        );
        Ok(Self {
            hashes: comm.alloc_shared(device, &spec)?,
            comm: comm.clone(),
            device: device.clone(),
            compared,
        })
    }

    /// Overwrites the parameters of all ranks with those of rank 0.
    pub fn broadcast(&self, stream: Stream, params: &Buffer) -> Result<(), ReplicasError> {
        let launch = Launch::after(self.device.record(stream), Traffic::Params, "initial parameters");
        let work = self.comm.broadcast(params, 0, launch);
        work.wait(self.comm.deadline())?;
        Ok(())
    }

    /// Fails on all ranks, naming the first differing parameter and the ranks, unless all have the same parameters.
    /// A rank that owns nothing compares nothing.
    pub fn verify(&self, stream: Stream, params: &Portion, step: u64) -> Result<(), ReplicasError> {
        let count = self.compared.len();
        if count == 0 {
            return Ok(());
        }
        let own_bytes = count * HASH_BYTES;
        let own = self
            .hashes
            .slice(self.comm.rank() * own_bytes..(self.comm.rank() + 1) * own_bytes);
        let mut hashes = Vec::with_capacity(own_bytes);
        for part in &self.compared {
            let bytes = self.device.download(stream, &params.slice(&part.place))?;
            hashes.extend_from_slice(&blake3::hash(&bytes).as_bytes()[..HASH_BYTES]);
        }
        self.device.upload(stream, &own, &hashes);
        let launch = Launch::after(self.device.record(stream), Traffic::Other, "parameter hashes");
        self.comm
            .all_gather(&self.hashes.whole(), launch)
            .wait(self.comm.deadline())?;
        let all = self.device.download(stream, &self.hashes.whole())?;
        let ranks: Vec<&[u8]> = all.chunks(own_bytes).collect();
        let of = |rank: &[u8], id: usize| rank[id * HASH_BYTES..(id + 1) * HASH_BYTES].to_vec();
        let differing = |id: &usize| ranks.iter().any(|rank| of(rank, *id) != of(ranks[0], *id));
        let Some(id) = (0..count).find(differing) else {
            return Ok(());
        };
        let members = self.comm.members().iter().zip(&ranks);
        let ranks = members
            .filter(|(_, rank)| of(rank, id) != of(ranks[0], id))
            .map(|(member, _)| *member);
        Err(ReplicasError::Differ {
            param: self.compared[id].name.clone(),
            reference: self.comm.members()[0],
            ranks: ranks.collect(),
            step,
        })
    }
}
