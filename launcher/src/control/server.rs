//! The listener, and messages to all workers.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ddp_proto::control::ToWorker;
use ddp_proto::ids::LocalRank;
use ddp_proto::printable;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::connection;
use super::hub::{ControlEvent, Hub, WorkerContext, encode};
use super::store::Store;

/// Connections at one time, over all workers.
const MAX_CONNECTIONS: usize = 4096;

/// The control socket of this launcher.
pub(crate) struct ControlServer {
    address: String,
    context: watch::Sender<Option<WorkerContext>>,
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
        let (context, receiver) = watch::channel(None);
        let hub = Arc::new(Hub {
            context: receiver,
            events,
            connections: Mutex::default(),
            departures: watch::Sender::new(0),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, hub.clone()));
        Ok(Self {
            address: format!("@{name}"),
            context,
            hub,
            _tasks: tasks,
        })
    }

    /// Value of `DDP_CONTROL`.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// A generation begins: each worker that connects gets its assignment.
    pub(crate) fn begin(&self, context: WorkerContext) {
        self.context.send_replace(Some(context));
    }

    /// The store of the generation that began last.
    pub(crate) fn store(&self) -> Option<Arc<Store>> {
        self.context
            .borrow()
            .as_ref()
            .map(|context| context.store.clone())
    }

    /// Notes the process id of a worker that runs, or that it has ended.
    pub(crate) fn set_pid(&self, local_rank: LocalRank, pid: Option<i32>) {
        self.update(|context| {
            if let Some(slot) = context.pids.get_mut(local_rank.0 as usize) {
                *slot = pid;
            }
        });
    }

    /// No more workers will come.
    pub(crate) fn spawned(&self) {
        self.update(|context| context.spawned = true);
    }

    /// Tells all workers that the generation is over, those that connect later too.
    pub(crate) fn generation_over(&self, cause: &str) {
        let generation = match &*self.context.borrow() {
            Some(context) if context.over.is_none() => context.generation,
            _ => return,
        };
        // Workers print it.
        let cause = printable::text(cause).into_owned();
        self.update(|context| context.over = Some(cause.clone()));
        self.tell_all(&ToWorker::GenerationOver { generation, cause });
    }

    /// Asks all workers to stop at the next step boundary, those that connect later too.
    /// They may `stay` if another generation is to follow.
    pub(crate) fn ask_to_stop(&self, cause: &str, stay: bool) {
        let cause = printable::text(cause).into_owned();
        let asked = ToWorker::StopAtStepBoundary { cause, stay };
        self.update(|context| context.asked_to_stop = Some(asked.clone()));
        self.tell_all(&asked);
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

    /// Returns when a worker has no connection, and all its messages were passed on. Cancel safe.
    pub(crate) fn disconnected(&self, local_rank: LocalRank) -> impl Future<Output = ()> + use<> {
        let hub = self.hub.clone();
        let mut departures = hub.departures.subscribe();
        async move {
            // The sender lives as long as the hub.
            while hub.has_connection_of(local_rank) && departures.changed().await.is_ok() {}
        }
    }

    fn update(&self, change: impl FnOnce(&mut WorkerContext)) {
        self.context.send_if_modified(|context| {
            context.as_mut().map(change);
            context.is_some()
        });
    }

    fn tell_all(&self, message: &ToWorker) {
        let line = encode(message);
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
