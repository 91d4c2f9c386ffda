//! NCCL as a transport: operations on device memory, enqueued on a stream.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::comm::{AbortReason, Comm, CommStream, Membership};
use super::library::{Handle, Nccl, UniqueId};
use super::watchdog::Watchdog;
use crate::collective::error::Failure;
use crate::collective::operation::{Request, StreamWork};
use crate::collective::transport::{CommPattern, SingleRank, Subgroup, Transport, check_members};
use crate::collective::wait::{StoreExchange, Wait};
use crate::device::{Device, Event};
use crate::session::KeyValue;

/// Longest wait for aborts at the end of a process that failed: a lost rank must be named within seconds.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);

/// A communicator of NCCL as a transport.
pub struct NcclTransport {
    comm: Arc<Comm>,
    watchdog: Watchdog,
}

impl NcclTransport {
    /// The transport of the whole world over GPUs. Every rank of the generation must call it, each with a GPU of its own.
    /// `store` must be scoped to the job and the generation: the ranks meet there before NCCL begins, which names no rank
    /// that does not come. It is also used when an operation times out, to find out which rank is late. The time-out of
    /// `world` bounds the meeting, and then the rest of this call.
    pub fn connect(
        nccl: &Nccl,
        device: &Arc<dyn Device>,
        store: Arc<dyn KeyValue>,
        world: Membership,
    ) -> Result<Self, Failure> {
        let (name, rank, size) = (world.name.clone(), world.rank, world.size());
        let stream = CommStream::new(device, &name)
            .ok_or_else(|| Failure::Invalid(format!("NCCL needs a GPU, the device is {}", device.name())))?;
        let id = exchange_id(nccl, &world, store.as_ref())?;
        let wait = Wait::new(world.timeout, &world.cancel);
        let watchdog = Watchdog::start(store)?;
        let comm = Comm::make(world, stream, || Handle::init(nccl, id, size, rank));
        let transport = comm.and_then(|comm| Self::ready(comm, watchdog.clone(), &wait));
        let connected = |world: &Self| world.comm.connect(&wait);
        let transport = transport.and_then(|world| connected(&world).map(|()| world));
        transport.inspect_err(|_| await_aborts(&watchdog, &name))
    }

    /// Over a communicator that is being made. The watchdog has it from here on, and aborts it if it does not get ready.
    fn ready(comm: Arc<Comm>, watchdog: Watchdog, wait: &Wait) -> Result<Self, Failure> {
        watchdog.add(&comm);
        comm.await_ready(wait)?;
        Ok(Self { comm, watchdog })
    }
}

impl Transport for NcclTransport {
    fn rank(&self) -> usize {
        self.comm.membership().rank
    }

    fn members(&self) -> &[usize] {
        &self.comm.membership().members
    }

    fn split(&mut self, subgroup: &Subgroup, wait: &Wait) -> Result<Box<dyn Transport>, Failure> {
        let (ours, stream) = (self.comm.membership(), self.comm.stream());
        let members = &subgroup.members;
        check_members(members, ours.rank, ours.size())?;
        if members.len() == 1 {
            self.comm.split(None, 0, subgroup.pattern, wait)?;
            return Ok(Box::new(SingleRank::on_stream(ours.global())));
        }
        let rank = members.binary_search(&ours.rank).expect("checked above");
        let membership = Membership {
            name: subgroup.name.clone(),
            rank,
            members: members.iter().map(|&rank| ours.members[rank]).collect(),
            ..ours.clone()
        };
        let address = self.comm.split(Some(members[0]), rank, subgroup.pattern, wait)?;
        let comm = Comm::make(membership, stream.sibling(&subgroup.name), || {
            self.comm.part(address)
        })?;
        let part = Self::ready(comm, self.watchdog.clone(), wait)?;
        self.comm.add_subgroup(&part.comm);
        // Ranks that send messages connect by their first ones.
        if subgroup.pattern == CommPattern::Collectives {
            part.comm.connect(wait)?;
        }
        Ok(Box::new(part))
    }

    fn is_on_stream(&self) -> bool {
        true
    }

    fn enqueue(
        &mut self,
        sequence: u64,
        request: &Request,
        after: &Event,
        wait: &Wait,
    ) -> Result<Arc<dyn StreamWork>, Failure> {
        self.comm.enqueue(sequence, request, after, wait)
    }

    fn shutdown(&mut self, wait: &Wait) {
        if let Err(failure) = self.comm.leave(wait) {
            let name = &self.comm.membership().name;
            tracing::warn!("cannot leave communicator `{name}`: {failure}");
            await_aborts(&self.watchdog, name);
        }
    }

    fn abandon(&mut self) {
        self.comm.fail(AbortReason {
            failure: Failure::Invalid("this rank has left the generation".to_owned()),
            sequence: None,
        });
        await_aborts(&self.watchdog, &self.comm.membership().name);
    }
}

fn await_aborts(watchdog: &Watchdog, name: &str) {
    if !watchdog.end(ABORT_TIMEOUT) {
        tracing::warn!(
            "communicator `{name}` or one next to it is still being aborted after {} s",
            ABORT_TIMEOUT.as_secs()
        );
    }
}

/// What rank 0 publishes.
#[derive(Debug, Serialize, Deserialize)]
struct PublishedId {
    /// Version of its library.
    version: String,
    id: Vec<u8>,
}

/// The id of a new communicator: made by rank 0 when all ranks have come, and told over the store.
fn exchange_id(nccl: &Nccl, world: &Membership, store: &dyn KeyValue) -> Result<UniqueId, Failure> {
    let exchange = StoreExchange {
        store,
        wait: &Wait::of_set_up("connect", &world.name, world.timeout, &world.cancel),
        what: "exchanging the id of NCCL",
        prefix: format!("nccl/{}", world.name),
        rank: world.rank,
        ranks: world.size(),
    };
    let version = nccl.version().to_string();
    let published = exchange.decide(b"here", |_| {
        let published = PublishedId {
            version: version.clone(),
            id: nccl.unique_id()?.0.to_vec(),
        };
        Ok(serde_json::to_vec(&published).expect("an id has no map keys that could fail"))
    })?;
    published_id(&published, &version, nccl.path())
}

/// The id that rank 0 has published, if its library is of this version.
pub(super) fn published_id(bytes: &[u8], own: &str, library: &Path) -> Result<UniqueId, Failure> {
    let malformed = || Failure::Invalid("rank 0 published a malformed NCCL id".into());
    let PublishedId { version, id } = serde_json::from_slice(bytes).map_err(|_| malformed())?;
    if version != own {
        return Err(Failure::Invalid(format!(
            "rank 0 has NCCL {version}, but this rank has NCCL {own} (`{}`)\n  hint: install the same version on all nodes",
            library.display()
        )));
    }
    id.try_into().map(UniqueId).map_err(|_| malformed())
}
