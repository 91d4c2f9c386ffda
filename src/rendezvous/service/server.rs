//! The gRPC side: streams and calls become events of the actor, and its answers go back.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::rendezvous_server::{Rendezvous, RendezvousServer};
use ddp_proto::rendezvous::{
    AgentMessage, CloseReply, CloseRequest, DaemonMessage, DrainReply, DrainRequest, JobsReply, JobsRequest,
    KvGatherReply, KvGatherRequest, KvGetReply, KvGetRequest, KvPutReply, KvPutRequest, NodeStatus,
    StatusReply, StatusRequest,
};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::metadata::MetadataValue;
use tonic::{Response, Status, Streaming};

use super::actor::{Actor, Request};
use super::admin::{Admin, Claim};
use super::admission::{Admission, AgentStreamPlace, Busy, Caller};
use super::arrivals::{Bounded, Room};
use super::http::{self, Http, Operators};
use super::incoming::{Listener, accept_all};
use super::ledger::{Ledger, LedgerError};
use super::metrics::Metrics;
#[cfg(feature = "otlp")]
use super::otlp::Exporter;
use super::page::Viewers;
use crate::rendezvous::config::{Callers, Config};
use crate::rendezvous::event::{CallId, ConnId, Event, KvError};
use crate::rendezvous::kv::clip;

/// Bytes of a message beyond the largest value of the store.
const MESSAGE_MARGIN: usize = 256 << 10;
/// Longest part of what was gathered.
const PART_BYTES: usize = 16 << 10;
/// Longest reason of an operator.
const MAX_REASON_BYTES: usize = 1024;
/// Connections that have shaken hands and wait for the server.
const READY_CONNECTIONS: usize = 64;
/// After the drain: how long open connections may take to end.
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

/// Serves rendezvous and gRPC health on `listener` until `shutdown` is ready and every agent has left.
///
/// The caller binds the socket, so it knows the port and reports a bind that fails. It needs a tokio runtime with
/// time and I/O, of either flavour, and no other set-up; the embedded daemon is the same call on a task:
///
/// 1. bind an abstract socket or a port, spawn `serve`, connect the own agent to it;
/// 2. when the own agent has left, make `shutdown` ready and await `serve`: it returns at once if no agent is
///    left, else when the last one has left, at most [`Config::drain`] later.
///
/// With a `ledger`, it takes up the jobs of an earlier daemon, and writes its own down before it sends what follows.
///
/// Dropping the future instead ends all streams at once.
pub async fn serve(
    listener: Listener,
    config: Config,
    ledger: Option<Ledger>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    serve_with(listener, config, ledger, Operators::default(), shutdown).await
}

/// The same for operators who look at it. They may end it too: it returns when they have drained it and no job is left.
pub async fn serve_with(
    listener: Listener,
    config: Config,
    ledger: Option<Ledger>,
    operators: Operators,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let drain = config.drain;
    let (actor, requests) = Actor::new(config.clone(), ledger);
    let service = Service::new(requests.clone(), config.clone(), operators.admin);
    // It holds the state of agents, and ends with this function.
    let mut tasks = JoinSet::new();
    #[cfg(feature = "otlp")]
    let exporter = Exporter::start(operators.collector, &requests, &service.metrics, &mut tasks);
    let actor = actor.observed_by(service.metrics.clone(), operators.log_fields);
    tasks.spawn(actor.run());
    let admission = Admission::new(&config, service.metrics.clone(), operators.http.is_some());
    if let Some(listener) = operators.http {
        service.show(listener, operators.viewers, admission.pages(), &mut tasks);
    }
    let limit = config.kv.value_bytes + MESSAGE_MARGIN;
    let rendezvous = RendezvousServer::new(service).max_decoding_message_size(limit);
    let room = Room::new(limit);
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<RendezvousServer<Service>>().await;
    let (admitted, incoming) = mpsc::channel(READY_CONNECTIONS);
    let mut accepting = JoinSet::new();
    accepting.spawn(accept_all(listener, config.clone(), admission, admitted));
    let (close, closing) = oneshot::channel::<()>();
    let server = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(config.http2_keepalive_interval))
        .http2_keepalive_timeout(Some(config.http2_keepalive_timeout))
        .max_concurrent_streams(config.max_streams)
        .add_service(Bounded::new(health_service, &room))
        .add_service(Bounded::new(rendezvous, &room))
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), async {
            // An error means that the sender is gone: time to stop as well.
            let _ = closing.await;
        });
    tokio::pin!(server);

    // Cancel safe: `server` is polled to its end or dropped for good, and `join_next` loses nothing.
    tokio::select! {
        ended = &mut server => return Ok(ended?),
        Some(ended) = tasks.join_next() => return result_of(ended),
        () = shutdown => {}
        () = answered(&requests, Request::Drained) => tracing::info!("no job is left on the drained daemon"),
    }
    health.set_not_serving::<RendezvousServer<Service>>().await;
    tokio::select! {
        ended = &mut server => return Ok(ended?),
        Some(ended) = tasks.join_next() => return result_of(ended),
        drained = tokio::time::timeout(drain, answered(&requests, Request::Drain)) => if drained.is_err() {
            tracing::warn!("launchers are still connected {:.1} s after the daemon was asked to stop", drain.as_secs_f64());
        },
    }
    #[cfg(feature = "otlp")]
    Exporter::finish(exporter).await;
    drop((tasks, accepting, close));
    // A peer that keeps its connection open does not keep the daemon.
    let ended = tokio::time::timeout(CLOSE_TIMEOUT, server).await;
    Ok(ended.unwrap_or(Ok(()))?)
}

/// An actor that ends by itself could not write its ledger.
fn result_of(ended: Result<Result<(), LedgerError>, JoinError>) -> Result<(), ServeError> {
    match ended {
        Ok(written) => Ok(written?),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Asks the actor, and ends with its answer. If the actor is gone, it never ends.
async fn answered(requests: &mpsc::Sender<Request>, ask: impl FnOnce(oneshot::Sender<()>) -> Request) {
    let (answer, answered) = oneshot::channel();
    if requests.send(ask(answer)).await.is_err() || answered.await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[derive(Debug)]
struct Service {
    requests: mpsc::Sender<Request>,
    last_conn: Arc<AtomicU64>,
    last_call: Arc<AtomicU64>,
    config: Config,
    admin: Admin,
    metrics: Arc<Metrics>,
}

impl Service {
    fn new(requests: mpsc::Sender<Request>, config: Config, admin: Admin) -> Self {
        Self {
            requests,
            last_conn: Arc::new(AtomicU64::new(0)),
            last_call: Arc::new(AtomicU64::new(0)),
            config,
            admin,
            metrics: Arc::new(Metrics::new()),
        }
    }

    fn begin_read(&self, job: &str) -> Read {
        Read {
            call: CallId(self.last_call.fetch_add(1, Ordering::Relaxed) + 1),
            job: Some(job.to_owned()),
            requests: self.requests.clone(),
        }
    }

    async fn ask<T>(&self, request: Request, answer: oneshot::Receiver<T>) -> Result<T, Status> {
        let stopping = || Status::unavailable("the rendezvous daemon is stopping");
        self.requests.send(request).await.map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())
    }

    /// Shows the same daemon in browsers, as one of `tasks`: to so many at a time.
    fn show<E: Send + 'static>(
        &self,
        listener: TcpListener,
        admin: Admin,
        most: usize,
        tasks: &mut JoinSet<Result<(), E>>,
    ) {
        let http = Http {
            requests: self.requests.clone(),
            metrics: self.metrics.clone(),
            admin,
            viewers: Viewers::default(),
            seen: tokio::sync::Mutex::default(),
        };
        tasks.spawn(async move {
            http::serve(listener, Arc::new(http), most).await;
            Ok(())
        });
    }

    fn is_admin<T>(&self, request: &tonic::Request<T>) -> bool {
        // The other end of an abstract Unix socket is this machine. Where callers may be of several users, being here
        // proves nothing.
        let caller = caller(request)
            .ok()
            .filter(|_| self.config.callers == Callers::Proven);
        let authorization = request.metadata().get("authorization");
        self.admin.is_admin(Claim {
            peer: caller.map(|caller| caller.peer),
            authorization: authorization.map(MetadataValue::as_encoded_bytes),
        })
    }

    /// Refuses all others. A connection with a node is in use until the result is dropped.
    fn only_for_admin<T>(&self, request: &tonic::Request<T>) -> Result<Busy, Status> {
        let busy = caller(request)?.is_used();
        if self.is_admin(request) {
            return Ok(busy);
        }
        self.metrics.refused("admin");
        Err(Status::permission_denied(self.admin.refusal()))
    }
}

/// What is for operators only is left out.
fn without_details(reply: StatusReply) -> StatusReply {
    let nodes = reply.nodes.into_iter().map(|node| NodeStatus {
        silent_ms: 0,
        connected: false,
        first_rank: 0,
        ranks: Vec::new(),
        log_dir: String::new(),
        ..node
    });
    StatusReply {
        generation: reply.generation,
        phase: reply.phase,
        restart_count: reply.restart_count,
        nodes: nodes.collect(),
        reason: reply.reason,
        assignment_id: reply.assignment_id,
        ..StatusReply::default()
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
        let caller = caller(&request)?;
        let too_many = || Status::resource_exhausted("too many streams on one connection");
        let place = caller.opens_stream().ok_or_else(too_many)?;
        let (agent, messages) = mpsc::channel(self.config.agent_queue);
        self.requests
            .send(Request::Opened(conn, agent))
            .await
            .map_err(|_| Status::unavailable("the rendezvous daemon is stopping"))?;
        let (sending, ended) = oneshot::channel::<()>();
        let stream = AgentSide {
            conn,
            caller,
            _place: place,
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
        let busy = caller(&request)?.is_used();
        let (answer, result) = oneshot::channel();
        self.ask(Request::KvPut(request.into_inner(), answer), result)
            .await?
            .map_err(|error| status(&error))?;
        busy.accepted();
        Ok(Response::new(KvPutReply {}))
    }

    async fn kv_get(&self, request: tonic::Request<KvGetRequest>) -> Result<Response<KvGetReply>, Status> {
        let busy = caller(&request)?.is_used();
        let (answer, result) = oneshot::channel();
        let request = request.into_inner();
        let read = self.begin_read(&request.job_id);
        let call = read.call();
        let value = self.ask(Request::KvGet(call, request, answer), result).await;
        read.finish();
        let value = value?.map_err(|error| status(&error))?;
        busy.accepted();
        Ok(Response::new(KvGetReply { value }))
    }

    type KvGatherStream = Pin<Box<dyn Stream<Item = Result<KvGatherReply, Status>> + Send>>;

    async fn kv_gather(
        &self,
        request: tonic::Request<KvGatherRequest>,
    ) -> Result<Response<Self::KvGatherStream>, Status> {
        let caller = caller(&request)?;
        let busy = caller.is_used();
        let (answer, result) = oneshot::channel();
        let request = request.into_inner();
        let read = self.begin_read(&request.job_id);
        let call = read.call();
        let entries = self.ask(Request::KvGather(call, request, answer), result).await;
        read.finish();
        let mut rest = entries?.map_err(|error| status(&error))?;
        let sending = caller.is_used();
        busy.accepted();
        // A part is copied when there is room for it: a caller that does not read has no copy of the whole.
        let parts = std::iter::from_fn(move || {
            // Dropped with the stream.
            let _ = &sending;
            let entries = rest.split_to(rest.len().min(PART_BYTES));
            (!entries.is_empty()).then_some(Ok(KvGatherReply { entries }))
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(parts))))
    }

    async fn status(&self, request: tonic::Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let busy = caller(&request)?.is_used();
        let is_admin = self.is_admin(&request);
        let request = request.into_inner();
        // Who has the token may know whose port this is.
        let refusal = self.config.refuses(&request.job_id);
        if let Some(reason) = refusal.filter(|_| is_admin || self.config.callers == Callers::Proven) {
            return Err(Status::failed_precondition(format!("it {reason}")));
        }
        let unknown = format!(
            "this daemon has no job `{}` that you may see",
            clip(&request.job_id, 128)
        );
        let (answer, reply) = oneshot::channel();
        let reply = self
            .ask(Request::Status(request, is_admin, answer), reply)
            .await?
            .ok_or_else(|| Status::not_found(unknown))?;
        busy.accepted();
        Ok(Response::new(if is_admin {
            reply
        } else {
            without_details(reply)
        }))
    }

    async fn jobs(&self, request: tonic::Request<JobsRequest>) -> Result<Response<JobsReply>, Status> {
        let busy = self.only_for_admin(&request)?;
        let (answer, reply) = oneshot::channel();
        let jobs = self.ask(Request::Jobs(answer), reply).await?;
        busy.accepted();
        Ok(Response::new(jobs))
    }

    async fn close(&self, request: tonic::Request<CloseRequest>) -> Result<Response<CloseReply>, Status> {
        let busy = self.only_for_admin(&request)?;
        let CloseRequest { job_id, reason } = request.into_inner();
        if reason.len() > MAX_REASON_BYTES {
            let words = format!("a reason has at most {MAX_REASON_BYTES} bytes");
            return Err(Status::invalid_argument(words));
        }
        let (answer, reply) = oneshot::channel();
        let close = Request::Close(job_id.clone(), reason, answer);
        if self.ask(close, reply).await? {
            busy.accepted();
            Ok(Response::new(CloseReply {}))
        } else {
            let job = clip(&job_id, 128);
            let words = format!("job `{job}` is not at this daemon, or is over already");
            Err(Status::not_found(words))
        }
    }

    async fn drain(&self, request: tonic::Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let busy = self.only_for_admin(&request)?;
        if let Some(owner) = &self.config.only_job {
            let words = format!(
                "it belongs to job `{0}` and ends with it\n  hint: `ddp-rendezvous close {0}` ends the job",
                clip(owner, 128)
            );
            return Err(Status::failed_precondition(words));
        }
        let (answer, reply) = oneshot::channel();
        let jobs = self.ask(Request::TakeNoJobs(answer), reply).await?;
        busy.accepted();
        Ok(Response::new(DrainReply { jobs }))
    }
}

/// A read that waits. When its caller goes away, so does its place in the store.
struct Read {
    call: CallId,
    /// Empty once it is answered.
    job: Option<String>,
    requests: mpsc::Sender<Request>,
}

impl Read {
    fn call(&self) -> CallId {
        self.call
    }

    fn finish(mut self) {
        self.job = None;
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        let Some(job) = self.job.take() else {
            return;
        };
        let cancel = Request::KvCancel(self.call, job);
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
    caller: Arc<Caller>,
    _place: AgentStreamPlace,
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
        let peer = self.caller.peer;
        let mut deadline = Some(Instant::now() + self.patience);
        let mut has_ended = false;
        let mut joined: Option<Busy> = None;
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
                () = until(deadline) => {
                    if !has_ended {
                        let waited = self.patience.as_secs_f64();
                        self.caller.refused(format!("no node joined on a stream within {waited:.1} s"));
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
                        self.caller.prove();
                        joined = Some(self.caller.is_used());
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

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// The connection of a call. Every connection that is served has passed the admission.
fn caller<T>(request: &tonic::Request<T>) -> Result<Arc<Caller>, Status> {
    let caller = request.extensions().get::<Arc<Caller>>();
    caller
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

    use super::*;
    use crate::rendezvous::event::Peer;

    /// One that always had a message ready was never cut, and a `Join` with a wrong token kept its connection.
    #[tokio::test]
    async fn who_is_refused_and_never_stops_talking_is_cut_in_time() {
        let here = std::net::Ipv4Addr::LOCALHOST.into();
        let peer = Peer {
            remote: here,
            local: here,
        };
        let admission = Admission::new(&Config::default(), Arc::new(Metrics::new()), false);
        let caller = Caller::new(peer, admission.enter(here).unwrap());
        let (requests, mut inbox) = mpsc::channel(1);
        let (_sending, ended) = oneshot::channel();
        let side = AgentSide {
            conn: ConnId(1),
            caller: caller.clone(),
            _place: caller.opens_stream().unwrap(),
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
        assert!(!caller.is_proven() && caller.idle_since().is_some());
    }
}
