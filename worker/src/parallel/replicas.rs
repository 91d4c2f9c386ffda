//! Replicas: parameters that must be the same, bit by bit, on every rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::GradientLayout;
use crate::collective::{CollectiveError, Communicator, Launch, Traffic, WorkError};
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Sharing, Stream};
use crate::model::ParamId;

/// Bytes of the hash of one parameter.
const HASH_BYTES: usize = 16;

/// Beyond its own deadline an operation is given this long to say so itself, with the better error.
const GRACE: Duration = Duration::from_secs(5);

/// Compares parameters across ranks, and makes them the same at the start.
pub struct Replicas {
    comm: Communicator,
    device: Arc<dyn Device>,
    layout: Arc<GradientLayout>,
    /// One slice a rank, in each the hashes of all parameters.
    hashes: Arena,
}

/// Why parameters cannot be shown to be the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplicasError {
    /// They are not.
    #[error(
        "parameter `{param}` of rank {} differs from rank 0 after step {step}\n  hint: ranks that start equal and add the same gradients stay equal; look for a failing machine or different builds",
        list(ranks)
    )]
    Differ {
        /// The first parameter that differs, in forward order.
        param: String,
        /// Global ranks whose parameter differs from rank 0's.
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

fn list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    names.join(", ")
}

impl Replicas {
    /// For parameters in the ranges of `layout`. Every rank of `comm` must call it.
    pub fn new(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        layout: &Arc<GradientLayout>,
    ) -> Result<Self, ReplicasError> {
        let spec = ArenaSpec {
            name: "parameter hashes".into(),
            dtype: DType::U8,
            len: comm.size() * layout.params() * HASH_BYTES,
            sharing: Sharing::Node,
        };
        Ok(Self {
            hashes: comm.alloc_shared(device, &spec)?,
            comm: comm.clone(),
            device: device.clone(),
            layout: layout.clone(),
        })
    }

    /// Overwrites the parameters of all ranks with those of rank 0.
    pub fn broadcast(&self, stream: Stream, params: &Buffer) -> Result<(), ReplicasError> {
        let launch = Launch::after(self.device.record(stream), Traffic::Params, "initial parameters");
        let work = self.comm.broadcast(params, 0, launch);
        work.wait(self.deadline())?;
        Ok(())
    }

    /// Fails on all ranks, naming the first differing parameter and the ranks, unless all have the same parameters.
    pub fn verify(&self, stream: Stream, params: &Arena, step: u64) -> Result<(), ReplicasError> {
        let count = self.layout.params();
        let own_bytes = count * HASH_BYTES;
        let own = self
            .hashes
            .slice(self.comm.rank() * own_bytes..(self.comm.rank() + 1) * own_bytes);
        let mut hashes = Vec::with_capacity(own_bytes);
        for id in (0..count).map(ParamId) {
            let bytes = self
                .device
                .download(stream, &params.slice(self.layout.range(id)))?;
            hashes.extend_from_slice(&blake3::hash(&bytes).as_bytes()[..HASH_BYTES]);
        }
        self.device.upload(stream, &own, &hashes);
        let launch = Launch::after(self.device.record(stream), Traffic::Other, "parameter hashes");
        self.comm
            .all_gather(&self.hashes.whole(), launch)
            .wait(self.deadline())?;
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
            param: self.layout.spec(ParamId(id)).name.clone(),
            ranks: ranks.collect(),
            step,
        })
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.comm.timeout() + GRACE
    }
}
