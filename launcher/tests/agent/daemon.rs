//! A daemon for one agent: does what its policy says, and passes on all that it receives.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use ddp_proto::rendezvous::rendezvous_server::{Rendezvous, RendezvousServer};
use ddp_proto::rendezvous::{
    AgentMessage, Assignment, CloseReply, CloseRequest, DaemonMessage, Failure, Failures, GenerationOver,
    HangVerdict, JobOver, JobsReply, JobsRequest, Join, KvGatherReply, KvGatherRequest, KvGetReply,
    KvGetRequest, KvPutReply, KvPutRequest, NodeAssignment, Refused, StatusReply, StatusRequest, Waiting,
    WorkerExit,
};
use tokio::sync::{Notify, broadcast, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// No test waits longer for anything.
pub(crate) const DEADLINE: Duration = Duration::from_mins(10);

/// What the daemon does.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    /// Answers `Join` with an assignment; else only with `Waiting`.
    pub(crate) assigns: bool,
    /// Answers a worker's failure and a node's success; else says nothing, like a daemon that hangs.
    pub(crate) decides: bool,
    /// Answers `Join` with this instead.
    pub(crate) refuses: Option<Refused>,
    /// Failures on other nodes, told with the verdict after this node's own.
    pub(crate) failures: Vec<Failure>,
    /// Workers of a node 0 that does not exist; this agent is node 1 then.
    pub(crate) workers_of_node_0: u32,
    /// Its longest blocking read.
    pub(crate) longest_read: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            assigns: true,
            decides: true,
            refuses: None,
            failures: Vec::new(),
            workers_of_node_0: 0,
            longest_read: Duration::MAX,
        }
    }
}

#[derive(Default)]
struct Job {
    generation: u64,
    restart_count: u32,
    join: Join,
    over: bool,
}

struct Shared {
    policy: Policy,
    job: Mutex<Job>,
    received: Mutex<mpsc::Sender<AgentMessage>>,
    broken: broadcast::Sender<()>,
    said: broadcast::Sender<DaemonMessage>,
    store: Mutex<HashMap<String, Vec<u8>>>,
    written: Notify,
    /// New streams are served; else they wait.
    serves: watch::Sender<bool>,
}

/// A running daemon; ends when it is dropped.
pub(crate) struct Daemon {
    address: SocketAddr,
    shared: Arc<Shared>,
    received: mpsc::Receiver<AgentMessage>,
    runtime: tokio::runtime::Runtime,
}

impl Daemon {
    /// A daemon that decides as the real one does.
    pub(crate) fn start() -> Self {
        Self::with(Policy::default())
    }

    /// A daemon that says nothing of failures and successes.
    pub(crate) fn undecided() -> Self {
        Self::with(Policy {
            decides: false,
            ..Policy::default()
        })
    }

    /// Listens on a free port of the loopback device.
    pub(crate) fn with(policy: Policy) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (sender, received) = mpsc::channel();
        let shared = Arc::new(Shared {
            policy,
            job: Mutex::default(),
            received: Mutex::new(sender),
            broken: broadcast::Sender::new(4),
            said: broadcast::Sender::new(4),
            store: Mutex::default(),
            written: Notify::new(),
            serves: watch::Sender::new(true),
        });
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
            .unwrap();
        let address = listener.local_addr().unwrap();
        let service = RendezvousServer::new(Service(shared.clone()));
        let incoming = TcpListenerStream::new(listener);
        runtime.spawn(
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(incoming),
        );
        Self {
            address,
            shared,
            received,
            runtime,
        }
    }

    pub(crate) fn endpoint(&self) -> String {
        self.address.to_string()
    }

    /// The next message that `pick` wants; the others are forgotten.
    pub(crate) fn expect<T>(&self, what: &str, mut pick: impl FnMut(AgentMessage) -> Option<T>) -> T {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let message = self
                .received
                .recv_timeout(left)
                .unwrap_or_else(|_| panic!("the agent never sent {what}"));
            if let Some(found) = pick(message) {
                return found;
            }
        }
    }

    /// All that was received and not asked for yet.
    pub(crate) fn received(&self) -> Vec<AgentMessage> {
        self.received.try_iter().collect()
    }

    /// Loses what workers wrote, as a daemon does that is started anew.
    pub(crate) fn lose_store(&self) {
        self.shared.store.lock().unwrap().clear();
    }

    /// What a worker wrote, or writes soon.
    pub(crate) fn read(&self, key: &str) -> Vec<u8> {
        let read = async { tokio::time::timeout(DEADLINE, self.shared.read(key)).await };
        self.runtime.block_on(read).expect("a rank writes it")
    }

    /// Ends all streams.
    pub(crate) fn break_streams(&self) {
        self.shared.broken.send(()).unwrap();
    }

    /// Ends all streams, and serves no new one until [`Daemon::go_on`].
    pub(crate) fn stand_still(&self) {
        self.shared.serves.send_replace(false);
        self.break_streams();
    }

    /// Serves again.
    pub(crate) fn go_on(&self) {
        self.shared.serves.send_replace(true);
    }

    /// Says something on all streams, in the current generation.
    pub(crate) fn say(&self, word: Word) {
        let generation = self.shared.job.lock().unwrap().generation;
        let body = Some(word);
        self.shared.said.send(DaemonMessage { generation, body }).unwrap();
    }
}

impl Shared {
    /// An entry, when it is written.
    async fn read(&self, key: &str) -> Vec<u8> {
        loop {
            let written = self.written.notified();
            let found = self.store.lock().unwrap().get(key).cloned();
            match found {
                Some(value) => return value,
                None => written.await,
            }
        }
    }

    /// The answer to one message; none ends the stream.
    fn answer(&self, message: AgentMessage) -> Option<Vec<DaemonMessage>> {
        let mut job = self.job.lock().unwrap();
        let words = match message.body? {
            Report::Join(join) => vec![self.on_join(&mut job, message.generation, join)],
            Report::Heartbeat(_) => Vec::new(),
            Report::WorkerExit(exit) if self.policy.decides && message.generation == job.generation => {
                vec![self.on_failure(&mut job, &exit)]
            }
            Report::NodeSucceeded(_) if self.policy.decides => {
                job.over = true;
                vec![Word::JobOver(JobOver::default())]
            }
            // The rank that is behind.
            Report::HungWorkers(hung) => {
                let behind = hung.ranks.iter().min_by_key(|rank| rank.step);
                let rank = behind.map(|behind| behind.rank);
                vec![Word::HangVerdict(HangVerdict {
                    rank,
                    ..HangVerdict::default()
                })]
            }
            Report::WorkerExit(_)
            | Report::NodeStopped(_)
            | Report::NodeLeaving(_)
            | Report::NodeSucceeded(_) => vec![],
            Report::Leave(_) => return None,
        };
        let generation = job.generation;
        let message = |word| DaemonMessage {
            generation,
            body: Some(word),
        };
        Some(words.into_iter().map(message).collect())
    }

    fn on_join(&self, job: &mut Job, generation: u64, join: Join) -> Word {
        if let Some(refused) = &self.policy.refuses {
            return Word::Refused(refused.clone());
        }
        if !self.policy.assigns {
            return Word::Waiting(Waiting {
                reason: "waiting for 1 more node".into(),
                lease_ms: 3000,
            });
        }
        // An agent that comes back to the running generation keeps its place.
        let runs = job.generation > 0 && generation == job.generation && !job.over;
        if !runs {
            job.generation += 1;
            job.over = false;
        }
        let others = self.policy.workers_of_node_0;
        let node_rank = u32::from(others > 0);
        let assignment = Assignment {
            node_rank,
            own: Some(NodeAssignment {
                hostname: join.hostname.clone(),
                addr: "127.0.0.1".into(),
                first_rank: others,
                workers: join.workers,
                role: join.role.clone(),
            }),
            node_count: node_rank + 1,
            world_size: others + join.workers,
            role_first_rank: others,
            role_world_size: others + join.workers,
            restart_count: job.restart_count,
            max_restarts: join.max_restarts,
            master_addr: "127.0.0.1".into(),
            master_port: join.master_port,
            lease_ms: 3000,
            reason: "all are there".into(),
            run_token: "run".into(),
            assignment_id: assignment_id(job.generation),
            attempt: job.restart_count,
            ..Assignment::default()
        };
        job.join = join;
        Word::Assignment(assignment)
    }

    /// None where no other node has any.
    fn all_failures(&self, job: &Job, own: &WorkerExit) -> Option<Failures> {
        let own = Failure {
            generation: job.generation,
            hostname: job.join.hostname.clone(),
            exit: Some(own.clone()),
            ..Failure::default()
        };
        let others = &self.policy.failures;
        (!others.is_empty()).then(|| Failures {
            failures: [vec![own], others.clone()].concat(),
            ..Failures::default()
        })
    }

    fn on_failure(&self, job: &mut Job, exit: &WorkerExit) -> Word {
        job.over = true;
        let cause = format!("rank {} failed", exit.rank);
        let (first_failure, first_failure_host) = (Some(exit.clone()), job.join.hostname.clone());
        if job.restart_count < job.join.max_restarts {
            job.restart_count += 1;
            return Word::GenerationOver(GenerationOver {
                cause,
                first_failure,
                first_failure_host,
                restart_count: job.restart_count,
                max_restarts: job.join.max_restarts,
                backoff_ms: 0,
                ..GenerationOver::default()
            });
        }
        Word::JobOver(JobOver {
            exit_code: exit.exit_code.unwrap_or_else(|| 128 + exit.signal.unwrap_or(0)),
            reason: cause,
            first_failure,
            first_failure_host,
            failures: self.all_failures(job, exit),
            ..JobOver::default()
        })
    }
}

/// The name of the assignment of a generation.
fn assignment_id(generation: u64) -> String {
    format!("{generation:032x}")
}

/// Whether a message names the assignment of which it speaks. Those before the first one and good-byes have none to name.
fn is_fenced(message: &AgentMessage) -> bool {
    let told = &message.assignment_id;
    let may_be_empty = message.generation == 0 || matches!(message.body, Some(Report::Leave(_)));
    *told == assignment_id(message.generation) || (told.is_empty() && may_be_empty)
}

struct Service(Arc<Shared>);

#[tonic::async_trait]
impl Rendezvous for Service {
    type AgentStream = ReceiverStream<Result<DaemonMessage, Status>>;

    async fn agent(
        &self,
        request: Request<Streaming<AgentMessage>>,
    ) -> Result<Response<Self::AgentStream>, Status> {
        let shared = self.0.clone();
        let mut serves = shared.serves.subscribe();
        let _ = serves.wait_for(|serves| *serves).await;
        let mut incoming = request.into_inner();
        let (outgoing, answers) = tokio::sync::mpsc::channel(64);
        let (mut broken, mut said) = (shared.broken.subscribe(), shared.said.subscribe());
        tokio::spawn(async move {
            loop {
                let answers = tokio::select! {
                    message = incoming.message() => {
                        let Ok(Some(message)) = message else { return };
                        if !is_fenced(&message) {
                            // The test waits in vain for what it expects.
                            eprintln!("a message without its assignment: {message:?}");
                            return;
                        }
                        // The test may be over already.
                        let _ = shared.received.lock().unwrap().send(message.clone());
                        let Some(answers) = shared.answer(message) else { return };
                        answers
                    }
                    word = said.recv() => vec![word.unwrap()],
                    _ = broken.recv() => return,
                };
                for answer in answers {
                    if outgoing.send(Ok(answer)).await.is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(answers)))
    }

    async fn kv_put(&self, request: Request<KvPutRequest>) -> Result<Response<KvPutReply>, Status> {
        let KvPutRequest {
            generation,
            key,
            value,
            assignment_id: told,
            ..
        } = request.into_inner();
        if told != assignment_id(generation) {
            return Err(Status::aborted(format!("of assignment `{told}`")));
        }
        let old = self.0.store.lock().unwrap().insert(key.clone(), value.clone());
        self.0.written.notify_waiters();
        match old {
            Some(old) if old != value => Err(Status::already_exists(format!("`{key}` has another value"))),
            _ => Ok(Response::new(KvPutReply {})),
        }
    }

    async fn kv_get(&self, request: Request<KvGetRequest>) -> Result<Response<KvGetReply>, Status> {
        let request = request.into_inner();
        if request.assignment_id != assignment_id(request.generation) {
            return Err(Status::aborted(format!(
                "of assignment `{}`",
                request.assignment_id
            )));
        }
        let bound = Duration::from_millis(u64::from(request.timeout_ms)).min(self.0.policy.longest_read);
        match tokio::time::timeout(bound, self.0.read(&request.key)).await {
            Ok(value) => Ok(Response::new(KvGetReply { value: value.into() })),
            Err(_) => Err(Status::deadline_exceeded(format!(
                "no rank wrote `{}`",
                request.key
            ))),
        }
    }

    type KvGatherStream = ReceiverStream<Result<KvGatherReply, Status>>;

    async fn kv_gather(&self, _: Request<KvGatherRequest>) -> Result<Response<Self::KvGatherStream>, Status> {
        Err(Status::unimplemented("not needed here"))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        Err(Status::unimplemented("not needed here"))
    }

    // No agent calls the rest.
    async fn jobs(&self, _: Request<JobsRequest>) -> Result<Response<JobsReply>, Status> {
        Err(Status::unimplemented("for operators"))
    }

    async fn close(&self, _: Request<CloseRequest>) -> Result<Response<CloseReply>, Status> {
        Err(Status::unimplemented("for operators"))
    }
}
