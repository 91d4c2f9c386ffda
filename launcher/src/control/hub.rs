//! The state that the control server and its connections share.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ddp_proto::control::{ToAgent, ToWorker};
use ddp_proto::ids::{Generation, LocalRank};
use ddp_proto::trust::data_key::DataKey;
use tokio::sync::{mpsc, watch};

use super::store::Store;

/// Messages that may wait for one worker; a worker that lets more pile up is cut off.
pub(super) const WORKER_QUEUE: usize = 64;
/// An event on the connection of a worker.
#[derive(Debug)]
pub(crate) struct ControlEvent {
    pub(crate) generation: Generation,
    pub(crate) local_rank: LocalRank,
    pub(crate) news: ControlNews,
}

/// A message, or a change of the connection.
#[derive(Debug)]
pub(crate) enum ControlNews {
    Message(ToAgent),
    /// The agent closed a connection, for this reason.
    Refused(String),
    /// The worker has left its generation and waits for the next one.
    Parked,
    /// The last connection of the worker has ended.
    Disconnected,
}

/// What the workers of this node get to know in one generation.
pub(crate) struct WorkerContext {
    pub(crate) generation: Generation,
    /// Environment contract of each worker, by local rank.
    pub(crate) contracts: Vec<BTreeMap<String, String>>,
    pub(crate) node_addr: String,
    pub(crate) data_key: Option<DataKey>,
    pub(crate) store: Arc<Store>,
    /// Process ids of the workers that run, by local rank.
    pub(crate) pids: Vec<Option<i32>>,
    /// No worker will be added to `pids`.
    pub(crate) spawned: bool,
    /// With which message the workers were asked to stop at the next step boundary, once they were.
    pub(crate) asked_to_stop: Option<ToWorker>,
    /// Why the generation is over, once it is.
    pub(crate) over: Option<String>,
}

/// What the connections share with the server.
pub(super) struct Hub {
    pub(super) context: watch::Receiver<Option<WorkerContext>>,
    pub(super) events: mpsc::Sender<ControlEvent>,
    pub(super) connections: Mutex<HashMap<u64, Member>>,
    /// Changes when a connection has ended and all its messages were passed on.
    pub(super) departures: watch::Sender<u64>,
}

/// A worker's connection.
pub(super) struct Member {
    pub(super) local_rank: LocalRank,
    /// The worker declared that it reads messages and acts on them.
    pub(super) listens: bool,
    pub(super) queue: mpsc::Sender<Arc<[u8]>>,
}

impl Hub {
    pub(super) fn connections(&self) -> MutexGuard<'_, HashMap<u64, Member>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_connection_of(&self, local_rank: LocalRank) -> bool {
        let connections = self.connections();
        connections.values().any(|member| member.local_rank == local_rank)
    }

    pub(super) fn leave(&self, id: u64) {
        self.connections().remove(&id);
        self.departures.send_modify(|count| *count += 1);
    }
}

/// A message as a line.
pub(super) fn encode(message: &ToWorker) -> Arc<[u8]> {
    // Maps with string keys and plain fields: serde_json cannot fail on them.
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    line.push(b'\n');
    line.into()
}
