//! NCCL as a transport: operations on device memory, enqueued on a stream.

use std::sync::Arc;
use std::time::Duration;

use super::comm::{Comm, Membership};
use super::handle::Handle;
use super::lane::{Gpu, Lane, Native};
use super::library::Nccl;
use super::meeting::meet;
use super::watchdog::Watchdog;
use super::witness::Witness;
use crate::collective::{Failure, Flight, Request, SoloStream, StreamTransport, Wait, WireBytes};
use crate::device::{Arena, ArenaSpec, Device, Event};
use crate::session::{Cancel, KeyValue};

/// How long the end of a process that failed is held up by what is being aborted: a lost rank must be named within
/// seconds.
const FAREWELL: Duration = Duration::from_secs(2);

/// See the module.
pub struct NcclTransport {
    comm: Arc<Comm>,
    watchdog: Watchdog,
    wire: WireBytes,
}

/// This rank among all ranks, and how they find each other.
pub struct NcclPlace<'a> {
    /// In errors and logs; the same on all ranks.
    pub name: &'a str,
    /// Global rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Scoped to the job and the generation. Also used when an operation times out, to find out who is late.
    pub store: Arc<dyn KeyValue>,
    /// Bound of the set-up, and of each phase of an operation: waiting for its input, and for the other ranks.
    pub timeout: Duration,
    /// Ends every wait, and lets operations on the device be aborted.
    pub cancel: Cancel,
}

impl NcclTransport {
    /// The transport of the whole world over GPUs. Every rank of the generation must call it, each with a device of
    /// its own, which must be a GPU.
    pub fn connect(nccl: &Nccl, device: &Arc<dyn Device>, place: &NcclPlace<'_>) -> Result<Self, Failure> {
        let gpu = Gpu::of(device)
            .ok_or_else(|| Failure::Invalid(format!("NCCL needs a GPU, the device is {}", device.name())))?;
        Self::connect_on(nccl, device, Arc::new(gpu), place)
    }

    /// The same, with what NCCL must know of the device.
    pub(super) fn connect_on(
        nccl: &Nccl,
        device: &Arc<dyn Device>,
        native: Arc<dyn Native>,
        place: &NcclPlace<'_>,
    ) -> Result<Self, Failure> {
        let NcclPlace {
            name,
            rank,
            world_size,
            ..
        } = *place;
        let wait = Wait::new(place.timeout, &place.cancel);
        let id = meet(nccl, name, rank, place.store.as_ref(), &wait)?;
        let membership = Membership {
            name: name.to_owned(),
            rank,
            members: (0..world_size).collect(),
            timeout: place.timeout,
            cancel: place.cancel.clone(),
        };
        let lane = Lane::new(device.clone(), native, name);
        let watchdog = Watchdog::start(Witness::new(place.store.clone()))?;
        let made = Comm::make(membership, lane, &watchdog, &wait, || {
            Ok(Handle::init(nccl, id, world_size, rank)?)
        });
        match made {
            Ok(comm) => Ok(Self::over(comm, watchdog)),
            Err(failure) => {
                farewell(&watchdog, name);
                Err(failure)
            }
        }
    }

    fn over(comm: Arc<Comm>, watchdog: Watchdog) -> Self {
        Self {
            comm,
            watchdog,
            wire: WireBytes::default(),
        }
    }
}

impl StreamTransport for NcclTransport {
    fn rank(&self) -> usize {
        self.comm.membership().rank
    }

    fn members(&self) -> &[usize] {
        &self.comm.membership().members
    }

    fn enqueue(
        &mut self,
        sequence: u64,
        request: &Request,
        after: &Event,
        wait: &Wait,
    ) -> Result<Arc<dyn Flight>, Failure> {
        let flight = self.comm.issue(sequence, request, after, wait)?;
        self.wire
            .add(request.traffic, self.comm.share(request).wire_bytes());
        Ok(flight)
    }

    fn alloc_shared(
        &mut self,
        device: &Arc<dyn Device>,
        spec: &ArenaSpec,
        _wait: &Wait,
    ) -> Result<Arena, Failure> {
        Ok(device.alloc(spec)?)
    }

    fn split(
        &mut self,
        name: &str,
        members: &[usize],
        wait: &Wait,
    ) -> Result<Box<dyn StreamTransport>, Failure> {
        let ours = self.comm.membership();
        let ascending = members.windows(2).all(|pair| pair[0] < pair[1]);
        let known = members.iter().all(|&rank| rank < ours.size());
        let Some(rank) = members.iter().position(|&rank| rank == ours.rank) else {
            return Err(not_a_group(members, ours.rank));
        };
        if !ascending || !known {
            return Err(not_a_group(members, ours.rank));
        }
        if members.len() == 1 {
            self.comm.split(None, &self.watchdog, wait)?;
            return Ok(Box::new(SoloStream::new(
                ours.global(),
                self.comm.lane().device(),
            )));
        }
        let membership = Membership {
            name: name.to_owned(),
            rank,
            members: members.iter().map(|&rank| ours.members[rank]).collect(),
            ..ours.clone()
        };
        let part = Some((members[0], membership));
        let part = self.comm.split(part, &self.watchdog, wait)?;
        let part = part.expect("asked for with a color");
        Ok(Box::new(Self::over(part, self.watchdog.clone())))
    }

    fn wire_bytes(&self) -> WireBytes {
        self.wire
    }

    fn shutdown(&mut self, wait: &Wait) {
        if let Err(failure) = self.comm.leave(wait) {
            let name = &self.comm.membership().name;
            tracing::warn!("communicator `{name}` could not be left: {failure}");
            farewell(&self.watchdog, name);
        }
    }

    fn abandon(&mut self) {
        farewell(&self.watchdog, &self.comm.membership().name);
    }
}

/// Waits a bounded time for what is being aborted.
fn farewell(watchdog: &Watchdog, name: &str) {
    if !watchdog.end(FAREWELL) {
        tracing::warn!(
            "communicator `{name}`, or one beside it, is still being aborted after {} s",
            FAREWELL.as_secs()
        );
    }
}

fn not_a_group(members: &[usize], rank: usize) -> Failure {
    Failure::Invalid(format!(
        "{members:?} are not ascending ranks of this group with rank {rank} among them"
    ))
}
