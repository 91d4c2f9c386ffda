//! The listener, and what all its connections share.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ddp_proto::control::{ToAgent, ToWorker};
use ddp_proto::ids::{Generation, LocalRank};
use ddp_proto::printable;
use ddp_proto::trust::data_key::DataKey;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::connection;
use super::store::Store;

/// Messages that may wait for one worker; a worker that lets more pile up is cut off.
pub(super) const WORKER_QUEUE: usize = 64;
/// Connections at one time, over all workers.
const MAX_CONNECTIONS: usize = 4096;

/// What the agent learns of a worker.
#[derive(Debug)]
pub(crate) struct ControlEvent {
    pub(crate) generation: Generation,
    pub(crate) local_rank: LocalRank,
    pub(crate) news: News,
}

/// See [`ControlEvent`].
#[derive(Debug)]
pub(crate) enum News {
    Said(ToAgent),
    /// A connection of it was refused, because of this.
    Refused(String),
    /// Its last connection has ended, and it opened no other.
    HungUp,
}

/// The place of this node's workers in one generation.
pub(crate) struct Place {
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
    /// Why the workers were asked to stop at the next step boundary, once they were.
    pub(crate) asked_to_stop: Option<String>,
    /// Why the generation is over, once it is.
    pub(crate) over: Option<String>,
}

/// What the connections share with the server.
pub(super) struct Hub {
    pub(super) place: watch::Receiver<Option<Place>>,
    pub(super) events: mpsc::Sender<ControlEvent>,
    connections: Mutex<HashMap<u64, Member>>,
    /// Changes when a connection has ended, after all it said was passed on.
    departures: watch::Sender<u64>,
}

/// A worker's connection.
pub(super) struct Member {
    pub(super) local_rank: LocalRank,
    /// It says that it reads, and acts on messages.
    pub(super) listens: bool,
    pub(super) queue: mpsc::Sender<Arc<[u8]>>,
}

impl Hub {
    fn connections(&self) -> MutexGuard<'_, HashMap<u64, Member>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the connection gets what is sent to all.
    pub(super) fn enter(&self, id: u64, member: Member) {
        self.connections().insert(id, member);
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

/// The control socket of this launcher.
pub(crate) struct ControlServer {
    address: String,
    place: watch::Sender<Option<Place>>,
    hub: Arc<Hub>,
    /// Aborted with the server.
    _tasks: JoinSet<()>,
}

impl ControlServer {
    /// Binds an abstract address with a random name and begins to accept.
    pub(crate) fn start(events: mpsc::Sender<ControlEvent>) -> io::Result<Self> {
        let name = format!("ddp-control-{:016x}", rand::random::<u64>());
        let listener = StdListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        let (place, receiver) = watch::channel(None);
        let hub = Arc::new(Hub {
            place: receiver,
            events,
            connections: Mutex::default(),
            departures: watch::Sender::new(0),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, hub.clone()));
        Ok(Self {
            address: format!("@{name}"),
            place,
            hub,
            _tasks: tasks,
        })
    }

    /// Value of `DDP_CONTROL`.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// A generation begins: each worker that connects gets its place in it.
    pub(crate) fn begin(&self, place: Place) {
        self.place.send_replace(Some(place));
    }

    /// The store of the generation that began last.
    pub(crate) fn store(&self) -> Option<Arc<Store>> {
        self.place.borrow().as_ref().map(|place| place.store.clone())
    }

    /// A worker runs, or has ended: then its process id means nothing any more.
    pub(crate) fn set_pid(&self, local_rank: LocalRank, pid: Option<i32>) {
        self.update(|place| {
            if let Some(slot) = place.pids.get_mut(local_rank.0 as usize) {
                *slot = pid;
            }
        });
    }

    /// No more workers will come.
    pub(crate) fn spawned(&self) {
        self.update(|place| place.spawned = true);
    }

    /// Tells all workers that the generation is over, those that connect later too.
    pub(crate) fn generation_over(&self, cause: &str) {
        let generation = match &*self.place.borrow() {
            Some(place) if place.over.is_none() => place.generation,
            _ => return,
        };
        // Workers print it.
        let cause = printable::text(cause).into_owned();
        self.update(|place| place.over = Some(cause.clone()));
        self.tell_all(&ToWorker::GenerationOver { generation, cause });
    }

    /// Asks all workers to stop at the next step boundary, those that connect later too.
    pub(crate) fn ask_to_stop(&self, cause: &str) {
        let cause = printable::text(cause).into_owned();
        self.update(|place| place.asked_to_stop = Some(cause.clone()));
        self.tell_all(&ToWorker::StopAtStepBoundary { cause });
    }

    /// Asks all workers what they wait for.
    pub(crate) fn describe(&self) {
        self.tell_all(&ToWorker::Describe);
    }

    /// True if any worker listens on the control socket: one that only sends heartbeats does not.
    pub(crate) fn has_listeners(&self) -> bool {
        self.hub.connections().values().any(|member| member.listens)
    }

    /// True if this worker listens on the control socket.
    pub(crate) fn listens(&self, local_rank: LocalRank) -> bool {
        let connections = self.hub.connections();
        connections
            .values()
            .any(|member| member.listens && member.local_rank == local_rank)
    }

    /// Returns when a worker has no connection, and all that it said was passed on. Cancel safe.
    pub(crate) fn silence_of(&self, local_rank: LocalRank) -> impl Future<Output = ()> + use<> {
        let hub = self.hub.clone();
        let mut departures = hub.departures.subscribe();
        async move {
            // The sender lives as long as the hub.
            while hub.has_connection_of(local_rank) && departures.changed().await.is_ok() {}
        }
    }

    fn update(&self, change: impl FnOnce(&mut Place)) {
        self.place.send_if_modified(|place| {
            place.as_mut().map(change);
            place.is_some()
        });
    }

    fn tell_all(&self, message: &ToWorker) {
        let line = connection::encode(message);
        // A worker whose queue is full has not read for a long time: dropping its queue cuts it off.
        self.hub
            .connections()
            .retain(|_, member| member.queue.try_send(line.clone()).is_ok());
    }
}

async fn accept(listener: UnixListener, hub: Arc<Hub>) {
    let mut connections = JoinSet::new();
    let mut next_id = 0;
    loop {
        // Cancel safe: `accept` takes no connection it does not return, `join_next` likewise.
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => {
                    next_id += 1;
                    connections.spawn(connection::serve(next_id, stream, hub.clone()));
                }
                Err(error) => {
                    // Out of descriptors, most likely: one of the connections has to end first.
                    tracing::warn!("control socket cannot accept: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}
