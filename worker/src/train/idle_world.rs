//! A rank of a planned mesh, on a device that does nothing, among ranks that do nothing. The run's own types, made for it,
//! show what a rank will hold and send before anything is allocated.

use std::sync::Arc;
use std::time::Duration;

use super::world::World;
use crate::collective::{Communicator, Executor, Failure, Request, StreamWork, Subgroup, Transport, Wait};
use crate::device::{Compute, Device, Event, IdleDevice};
use crate::mesh::{Mesh, MeshShape};
use crate::session::Cancel;

/// Bound of waits, which all end at once.
const TIMEOUT: Duration = Duration::from_mins(1);

/// One rank of a mesh.
pub(crate) fn idle_world(mesh: MeshShape, rank: usize) -> World {
    idle_world_on(Arc::new(IdleDevice), mesh, rank)
}

/// The same on another device without memory.
pub(crate) fn idle_world_on(device: Arc<dyn Device>, mesh: MeshShape, rank: usize) -> World {
    let cancel = Cancel::default();
    let ranks = IdleRanks {
        members: (0..mesh.ranks()).collect(),
        rank,
    };
    let comm = Communicator::new("planned", Box::new(ranks), Executor::Inline, TIMEOUT, &cancel);
    World {
        mesh: Arc::new(Mesh::new(mesh, comm.clone(), Executor::Inline)),
        compute: Compute::new(device),
        comm,
        cancel,
    }
}

/// A group whose operations are done as soon as they are asked for. Its communicator counts what they would send.
struct IdleRanks {
    /// Global ranks.
    members: Vec<usize>,
    /// Which of them this one is.
    rank: usize,
}

impl Transport for IdleRanks {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn split(&mut self, subgroup: &Subgroup, _: &Wait) -> Result<Box<dyn Transport>, Failure> {
        let members = &subgroup.members;
        let rank = members.iter().position(|&member| member == self.rank);
        Ok(Box::new(Self {
            members: members.iter().map(|&member| self.members[member]).collect(),
            rank: rank.ok_or_else(|| Failure::Invalid("a rank is in its own group".into()))?,
        }))
    }

    fn is_on_stream(&self) -> bool {
        true
    }

    fn enqueue(
        &mut self,
        _sequence: u64,
        _request: &Request,
        after: &Event,
        _wait: &Wait,
    ) -> Result<Arc<dyn StreamWork>, Failure> {
        Ok(Arc::new(after.clone()))
    }
}
