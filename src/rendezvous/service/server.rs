//! The gRPC side: streams and calls become events of the actor, and its answers go back.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ddp_proto::printable;
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::rendezvous_server::{Rendezvous, RendezvousServer};
use ddp_proto::rendezvous::{
    AgentMessage, CloseReply, CloseRequest, DaemonMessage, JobsReply, JobsRequest, KvGatherReply,
    KvGatherRequest, KvGetReply, KvGetRequest, KvPutReply, KvPutRequest, StatusReply, StatusRequest,
};
use ddp_proto::trust::token::Token;
use prost::bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Response, Status, Streaming};

use super::actor::{Actor, Request, sleep_until};
use super::connection::{Listener, accept_all};
use super::connection_limits::{Active, Connection, ConnectionLimits, Limited};
use super::http_state::{Http, MAX_PAGES};
use super::ledger::{Ledger, LedgerError};
use super::metrics::Metrics;
use super::{http, metrics_file};
use crate::rendezvous::config::{Callers, Config};
use crate::rendezvous::event::{CallId, ConnId, Event, KvError};
use crate::rendezvous::messages::clip;

/// Bytes of a message beyond the largest value of the store.
const MESSAGE_MARGIN: usize = 256 << 10;
/// Longest part of what was gathered.
const PART_BYTES: usize = 16 << 10;
/// Longest reason of an operator.
const MAX_REASON_BYTES: usize = 1024;
/// Connections that have shaken hands and wait for the server.
const READY_CONNECTIONS: usize = 64;
/// How long pages and connections may take to end when no agent is left.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Why the daemon stopped serving.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The server failed on its socket.
    #[error("rendezvous daemon failed on its socket: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// A decision could not be written down, and so was not sent.
    #[error("rendezvous daemon stopped before it sent what it could not write down: {0}")]
    Ledger(#[from] LedgerError),
}

/// How people and tools watch a daemon.
#[derive(Debug, Default)]
pub struct Monitoring {
    /// Serves liveness, readiness, metrics and the status page.
    pub http: Option<TcpListener>,
    /// Shows the page and the names of jobs in metrics. Without one, they are for the daemon's own machine.
    pub read_token: Option<Token>,
    /// What a job's page is called; empty: like the job.
    pub title: String,
    /// Events carry job, generation and node apart from their words.
    pub log_fields: bool,
    /// Has the numbers of the one job, until its end.
    pub file: Option<PathBuf>,
}

/// Serves rendezvous and gRPC health on `listener` until `shutdown` is ready and every agent has left.
///
/// The caller binds the socket, so it knows the port and reports a bind that fails. It needs a tokio runtime with
/// time and I/O, of either flavour, and no other set-up; the embedded daemon is the same call on a task:
///
/// 1. bind an abstract socket or a port, spawn `serve`, connect the own agent to it;
/// 2. when the own agent has left, make `shutdown` ready and await `serve`: it returns at once if no agent is
///    left, else when the last one has left, at most [`Config::shutdown_wait`] later.
///
/// With a `ledger`, it takes up the jobs of an earlier daemon, and writes its own down before it sends what follows.
///
/// Dropping the future instead ends all streams at once.
pub async fn serve(
    listener: Listener,
    config: Config,
    ledger: Option<Ledger>,
    monitoring: Monitoring,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (actor, requests) = Actor::new(config.clone(), ledger);
    let metrics = Arc::new(Metrics::new());
    // It holds the state of agents, and ends with this function.
    let mut tasks = JoinSet::new();
    let actor = actor.observed_by(metrics.clone(), monitoring.log_fields);
    tasks.spawn(actor.run());
    let has_page = monitoring.http.is_some();
    let [limits, page_limits] = ConnectionLimits::of_ports(&config, &metrics, has_page);
    let (read_token, title) = (monitoring.read_token, monitoring.title);
    let http = Http::new(requests.clone(), metrics.clone(), read_token.as_ref(), title);
    let (page_slots, end_pages) = (http.page_slots.clone(), http.closing.clone());
    if let Some(listener) = monitoring.http {
        tasks.spawn(async move {
            http::serve(listener, http, page_limits).await;
            Ok(())
        });
    }
    let (stop, stopped) = std::sync::mpsc::channel();
    let file = monitoring.file;
    let file = file.map(|path| metrics_file::start(path, requests.clone(), stopped));
    let service = Service {
        requests: requests.clone(),
        last_conn: AtomicU64::new(0),
        last_call: AtomicU64::new(0),
        config: config.clone(),
        metrics,
    };
    let longest = config.kv.value_bytes + MESSAGE_MARGIN;
    let rendezvous = RendezvousServer::new(service).max_decoding_message_size(longest);
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<RendezvousServer<Service>>().await;
    let (admitted, incoming) = mpsc::channel(READY_CONNECTIONS);
    let mut accepting = JoinSet::new();
    accepting.spawn(accept_all(listener, config.clone(), limits, admitted));
    let (close, closing) = oneshot::channel::<()>();
    let server = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(config.http2_keepalive_interval))
        .http2_keepalive_timeout(Some(config.http2_keepalive_timeout))
        .max_concurrent_streams(config.max_streams)
        .add_service(Limited::new(health_service, longest))
        .add_service(Limited::new(rendezvous, longest))
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), async {
            // An error means that the sender is gone: time to stop as well.
            let _ = closing.await;
        });
    tokio::pin!(server);

    let stopped = async {
        shutdown.await;
        health.set_not_serving::<RendezvousServer<Service>>().await;
        await_agents(&requests, &config).await;
        end_pages.send_replace(true);
        // Pages show how their jobs ended. One that does not read does not keep the daemon.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, page_slots.acquire_many(MAX_PAGES as u32)).await;
    };
    // Cancel safe: `server` is polled to its end or dropped for good, and `join_next` loses nothing.
    tokio::select! {
        ended = &mut server => return Ok(ended?),
        Some(ended) = tasks.join_next() => match ended {
            Ok(written) => return Ok(written?),
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        },
        () = stopped => {}
    }
    drop((tasks, accepting, close, stop));
    if let Some(removed) = file {
        // A file that stays grows old.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, removed).await;
    }
    // A peer that keeps its connection open does not keep the daemon.
    let ended = tokio::time::timeout(CLOSE_TIMEOUT, server).await;
    Ok(ended.unwrap_or(Ok(()))?)
}

/// Ends when every agent has left. Late ones are not waited for any longer.
async fn await_agents(requests: &mpsc::Sender<Request>, config: &Config) {
    let shutdown_wait = config.shutdown_wait;
    let (answer, answered) = oneshot::channel();
    let left = async {
        if requests.send(Request::AllLeft(answer)).await.is_err() || answered.await.is_err() {
            // The actor is gone, and says nothing of its agents any more.
            std::future::pending::<()>().await;
        }
    };
    if tokio::time::timeout(shutdown_wait, left).await.is_err() {
        tracing::warn!(
            "launchers are still connected {:.1} s after the daemon was asked to stop",
            shutdown_wait.as_secs_f64()
        );
    }
}

#[derive(Debug)]
struct Service {
    requests: mpsc::Sender<Request>,
    last_conn: AtomicU64,
    last_call: AtomicU64,
    config: Config,
    metrics: Arc<Metrics>,
}

impl Service {
    /// Calls the store of a job. When the caller goes away, so does its place in the store.
    async fn call_store(&self, job: String, event: impl FnOnce(CallId) -> Event) -> Result<Bytes, Status> {
        let call = CallId(self.last_call.fetch_add(1, Ordering::Relaxed) + 1);
        let mut abandoned = AbandonedCall {
            call,
            job: Some(job),
            requests: self.requests.clone(),
        };
        let (answer, result) = oneshot::channel();
        let answered = self.ask(Request::Call(call, event(call), answer), result).await;
        abandoned.job = None;
        answered?.map_err(|error| status(&error))
    }

    async fn ask<T>(&self, request: Request, answer: oneshot::Receiver<T>) -> Result<T, Status> {
        let stopping = || Status::unavailable("the rendezvous daemon is stopping");
        self.requests.send(request).await.map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())
    }

    /// Refuses callers of a daemon without a token, which does not know who they are.
    fn only_for_authenticated(&self) -> Result<(), Status> {
        if self.config.callers == Callers::Authenticated {
            return Ok(());
        }
        self.metrics.refused("forbidden");
        let words = "a daemon with `--insecure` neither lists nor shows nor closes jobs, as it does not know its callers";
        Err(Status::permission_denied(words))
    }
}

#[tonic::async_trait]
impl Rendezvous for Service {
    type AgentStream = Pin<Box<dyn Stream<Item = Result<DaemonMessage, Status>> + Send>>;

    async fn agent(
        &self,
        request: tonic::Request<Streaming<AgentMessage>>,
    ) -> Result<Response<Self::AgentStream>, Status> {
        let conn = ConnId(self.last_conn.fetch_add(1, Ordering::Relaxed) + 1);
        let connection = connection(&request)?;
        let too_many = || Status::resource_exhausted("too many streams on one connection");
        let slot = connection.open_stream().ok_or_else(too_many)?;
        let (agent, messages) = mpsc::channel(self.config.agent_queue);
        self.requests
            .send(Request::Opened(conn, agent))
            .await
            .map_err(|_| Status::unavailable("the rendezvous daemon is stopping"))?;
        let (sending, ended) = oneshot::channel::<()>();
        let stream = AgentSide {
            conn,
            connection,
            _slot: slot,
            ended,
            requests: self.requests.clone(),
            patience: self.config.join_wait,
        };
        tokio::spawn(stream.pump(request.into_inner()));
        let messages = ReceiverStream::new(messages).map(move |message| {
            // Dropped with the stream, which tells the other direction.
            let _ = &sending;
            // A message for several nodes is copied only now, when this one takes it.
            Ok(Arc::unwrap_or_clone(message))
        });
        Ok(Response::new(Box::pin(messages)))
    }

    async fn kv_put(&self, request: tonic::Request<KvPutRequest>) -> Result<Response<KvPutReply>, Status> {
        let request = request.into_inner();
        let job = request.job_id.clone();
        self.call_store(job, |call| Event::KvPut { call, request })
            .await?;
        Ok(Response::new(KvPutReply {}))
    }

    async fn kv_get(&self, request: tonic::Request<KvGetRequest>) -> Result<Response<KvGetReply>, Status> {
        let request = request.into_inner();
        let job = request.job_id.clone();
        let value = self
            .call_store(job, |call| Event::KvGet { call, request })
            .await?;
        Ok(Response::new(KvGetReply { value }))
    }

    type KvGatherStream = Pin<Box<dyn Stream<Item = Result<KvGatherReply, Status>> + Send>>;

    async fn kv_gather(
        &self,
        request: tonic::Request<KvGatherRequest>,
    ) -> Result<Response<Self::KvGatherStream>, Status> {
        let request = request.into_inner();
        let job = request.job_id.clone();
        let mut rest = self
            .call_store(job, |call| Event::KvGather { call, request })
            .await?;
        // A part is copied when there is room for it: a caller that does not read has no copy of the whole.
        let parts = std::iter::from_fn(move || {
            let entries = rest.split_to(rest.len().min(PART_BYTES));
            (!entries.is_empty()).then_some(Ok(KvGatherReply { entries }))
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(parts))))
    }

    async fn status(&self, request: tonic::Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        self.only_for_authenticated()?;
        let StatusRequest { job_id } = request.into_inner();
        if let Some(reason) = self.config.refuses(&job_id) {
            return Err(Status::failed_precondition(format!("it {reason}")));
        }
        let unknown = format!("this daemon has no job `{}`", clip(&job_id, 128));
        let (answer, reply) = oneshot::channel();
        let reply = self.ask(Request::Status(job_id, answer), reply).await?;
        reply.map(Response::new).ok_or_else(|| Status::not_found(unknown))
    }

    async fn jobs(&self, _: tonic::Request<JobsRequest>) -> Result<Response<JobsReply>, Status> {
        self.only_for_authenticated()?;
        let (answer, reply) = oneshot::channel();
        let jobs = self.ask(Request::Jobs(answer), reply).await?;
        Ok(Response::new(jobs))
    }

    async fn close(&self, request: tonic::Request<CloseRequest>) -> Result<Response<CloseReply>, Status> {
        self.only_for_authenticated()?;
        let from = connection(&request)?.peer.remote.to_canonical();
        let CloseRequest { job_id, reason, .. } = request.get_ref();
        if reason.len() > MAX_REASON_BYTES {
            let words = format!("a reason has at most {MAX_REASON_BYTES} bytes");
            return Err(Status::invalid_argument(words));
        }
        let caller = printable::line(clip(&request.get_ref().caller, 128));
        let reason = format!("operator `{caller}` ({from}) closed the job: {reason}");
        let (answer, reply) = oneshot::channel();
        let reason = reason.trim_end_matches(": ").to_owned();
        let close = Request::Close(job_id.clone(), reason, answer);
        if self.ask(close, reply).await? {
            Ok(Response::new(CloseReply {}))
        } else {
            let job = clip(job_id, 128);
            let words = format!("job `{job}` is not at this daemon, or is over already");
            Err(Status::not_found(words))
        }
    }
}

/// Gives a call on the store up when it is dropped.
struct AbandonedCall {
    call: CallId,
    /// None once the call is answered.
    job: Option<String>,
    requests: mpsc::Sender<Request>,
}

impl Drop for AbandonedCall {
    fn drop(&mut self) {
        let Some(job) = self.job.take() else {
            return;
        };
        let call = self.call;
        let cancel = Request::Event(Event::KvCancel { call, job });
        if let Err(mpsc::error::TrySendError::Full(cancel)) = self.requests.try_send(cancel) {
            let requests = self.requests.clone();
            tokio::spawn(async move {
                // An error means that the daemon is stopping.
                let _ = requests.send(cancel).await;
            });
        }
    }
}

/// What an agent says on its stream.
struct AgentSide {
    conn: ConnId,
    connection: Arc<Connection>,
    _slot: OwnedSemaphorePermit,
    /// Over when nothing is sent to the agent any more.
    ended: oneshot::Receiver<()>,
    requests: mpsc::Sender<Request>,
    /// How long it may take to join, and to leave when the daemon has ended the stream.
    patience: Duration,
}

impl AgentSide {
    /// Carries the messages of one agent to the actor, in order, then the end of the stream. A stream on which no node
    /// has joined ends in time, and so does one that the daemon has ended, whatever is said on it.
    async fn pump(mut self, mut messages: impl Stream<Item = Result<AgentMessage, Status>> + Unpin) {
        let conn = self.conn;
        let peer = self.connection.peer;
        let mut deadline = Some(Instant::now() + self.patience);
        let mut has_ended = false;
        let mut joined: Option<Active> = None;
        let clean = loop {
            // Cancel safe: a stream loses nothing that it has not returned, and the others only come once. Messages last:
            // there may always be one more.
            let next = tokio::select! {
                biased;
                _ = &mut self.ended, if !has_ended => {
                    has_ended = true;
                    deadline = Some(Instant::now() + self.patience);
                    continue;
                }
                () = sleep_until(deadline) => {
                    if !has_ended {
                        let waited = self.patience.as_secs_f64();
                        self.connection.refused(format!("no node joined on a stream within {waited:.1} s"));
                    }
                    break false;
                }
                next = messages.next() => next,
            };
            match next {
                Some(Ok(message)) => {
                    let is_greeting = joined.is_none() && matches!(message.body, Some(Body::Join(_)));
                    let message = Box::new(message);
                    let event = Event::Message { conn, peer, message };
                    let Some(is_taken) = self.carry(event, is_greeting).await else {
                        return;
                    };
                    if is_taken {
                        joined = Some(self.connection.begin_node());
                        deadline = deadline.filter(|_| has_ended);
                    }
                }
                None => break true,
                Some(Err(_)) => break false,
            }
        };
        // An error means that the daemon is stopping: no receiver is left.
        let _ = self
            .requests
            .send(Request::Event(Event::Closed { conn, clean }))
            .await;
    }

    /// Carries one message. Returns whether a node has joined by it; none if the daemon is stopping.
    async fn carry(&self, event: Event, is_greeting: bool) -> Option<bool> {
        if !is_greeting {
            self.requests.send(Request::Event(event)).await.ok()?;
            return Some(false);
        }
        let (answer, is_taken) = oneshot::channel();
        let join = Request::Join(self.conn, event, answer);
        self.requests.send(join).await.ok()?;
        is_taken.await.ok()
    }
}

/// The connection of a call.
fn connection<T>(request: &tonic::Request<T>) -> Result<Arc<Connection>, Status> {
    let connection = request.extensions().get::<Arc<Connection>>();
    connection
        .cloned()
        .ok_or_else(|| Status::internal("a call without a connection"))
}

fn status(error: &KvError) -> Status {
    let words = error.to_string();
    match error {
        KvError::Superseded(_) => Status::aborted(words),
        KvError::NotWritten(_) => Status::deadline_exceeded(words),
        KvError::Exists(_) => Status::already_exists(words),
        KvError::TooMuch(_) => Status::resource_exhausted(words),
        KvError::Unknown(_) => Status::failed_precondition(words),
    }
}

#[cfg(test)]
mod tests {
    use ddp_proto::rendezvous::Join;

    use super::super::connection_limits::tests::connection_of;
    use super::*;

    /// One that always had a message ready was never cut, and a `Join` with a wrong token kept its connection.
    #[tokio::test]
    async fn a_refused_caller_that_never_stops_talking_is_cut_in_time() {
        let connection = connection_of(&Config::default());
        let made = connection.expires();
        let (requests, mut inbox) = mpsc::channel(1);
        let (_sending, ended) = oneshot::channel();
        let side = AgentSide {
            conn: ConnId(1),
            connection: connection.clone(),
            _slot: connection.open_stream().unwrap(),
            ended,
            requests,
            patience: Duration::from_millis(50),
        };
        tokio::spawn(async move {
            while let Some(request) = inbox.recv().await {
                if let Request::Join(_, _, answer) = request {
                    answer.send(false).unwrap();
                }
            }
        });
        let joins = tokio_stream::iter(std::iter::repeat_with(|| {
            Ok::<_, Status>(AgentMessage {
                body: Some(Body::Join(Join::default())),
                ..AgentMessage::default()
            })
        }));
        let talked = tokio::time::timeout(Duration::from_mins(1), side.pump(joins));
        talked.await.expect("it is cut");
        assert_eq!(connection.expires(), made, "it counts as untrusted");
    }
}
