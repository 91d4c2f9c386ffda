//! The typed client of the rendezvous service: every call has a deadline, every retry a jittered back-off.
//!
//! ```text
//! let client = Client::connect("node0:29400", &Access::Token(token), Instant::now() + connect_timeout).await?;
//! let mut attempts = client.attempts(connect_timeout);
//! let mut stream = client.agent_stream(identity, &mut attempts).await?;   // and again after ClientError::Broken
//! stream.send(Generation(0), "", Body::Join(join))?;                 // never waits
//! let message = stream.next().await?;                                // cancel safe
//! stream.leave(generation, leave, deadline).await;                   // returns when the daemon has received it
//! ```
//!
//! What the daemon expects of an agent, beyond the comments in `rendezvous.proto`:
//! - The first message of **every** stream is `Join`, carrying the generation last assigned. After a
//!   reconnect it tells the place in that generation too (`Join.place`), and the agent then repeats what it
//!   last reported of that generation (`WorkerExit`, `NodeSucceeded`): it cannot know what was lost, and the
//!   daemon takes each report once.
//! - An `Assignment` of the generation that already runs means "keep your place": nothing is restarted.
//! - Every `GenerationOver` is answered by `NodeStopped`, then `Join`, in whatever state the agent is.
//! - `Heartbeat` every third of `lease_ms`, in every state.
//! - After `JobOver` or `Refused`: stop the workers, [`AgentStream::leave`], exit with that code.

mod attempts;
mod connector;
mod error;

pub use attempts::Attempts;
pub use connector::{ATTEMPT_TIMEOUT, Access, UNIX_PREFIX};
pub use error::{CallError, ClientError};

use std::time::Duration;

use prost::Message as _;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Response, Status, Streaming};

use attempts::Target;
use error::{Setback, broken, is_transport, source_of, unless_unwritten};

use crate::control::whole_ms;
use crate::ids::{Generation, NodeId};
use crate::look_up::LookUpError;
use crate::printable;
use crate::rendezvous::agent_message::Body;
use crate::rendezvous::rendezvous_client::RendezvousClient;
use crate::rendezvous::{
    AgentMessage, CloseRequest, DaemonMessage, JobsReply, JobsRequest, KvEntries, KvGatherReply,
    KvGatherRequest, KvGetRequest, KvPutRequest, Leave, StatusReply, StatusRequest,
};

/// Messages that may wait for the network before [`AgentStream::send`] takes the stream for broken.
const SEND_QUEUE: usize = 64;
/// Time allowed for a call that the daemon answers at once.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest pause of the daemon before a restart: a node that joins again may wait so long for its next assignment.
pub const RESTART_BACKOFF_CAP: Duration = Duration::from_secs(30);
/// What a blocking read may take beyond the deadline that the daemon itself keeps.
const READ_MARGIN: Duration = Duration::from_secs(5);
/// Longest answer: all entries of a generation, within the bounds of the daemon's store.
const MAX_ANSWER_BYTES: usize = 80 << 20;

/// Who speaks on an agent's stream: fences every message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentIdentity {
    /// Name of the job, `--rdzv-id`.
    pub job_id: String,
    /// Name of this agent's process.
    pub incarnation: NodeId,
}

/// The entries of one generation of a job, as one daemon has assigned it: fences every call on the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvScope {
    /// Name of the job, `--rdzv-id`.
    pub job_id: String,
    /// The generation.
    pub generation: Generation,
    /// `Assignment.assignment_id` of that generation.
    pub assignment_id: String,
    /// The member that calls.
    pub incarnation: NodeId,
}

/// A connection to one daemon. Cheap to clone; clones share the connection, and it is opened again when it broke.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: String,
    inner: RendezvousClient<Channel>,
}

/// One attempt to connect to `endpoint`, for other calls than those of [`Client`].
pub async fn open_channel(endpoint: &str, access: &Access) -> Result<Channel, ClientError> {
    let target = Target::of(endpoint, access)?;
    target.connect().await.map_err(|error| {
        let setback = Setback::of(&error);
        if setback.is_distrust {
            return setback.untrusted(endpoint);
        }
        ClientError::Stranger {
            endpoint: endpoint.to_owned(),
            cause: setback.cause,
        }
    })
}

impl Client {
    /// Connects to `endpoint` (`host:port`), again and again with jittered back-off until `deadline`. Each connection
    /// looks the name up.
    pub async fn connect(endpoint: &str, access: &Access, deadline: Instant) -> Result<Self, ClientError> {
        Self::connect_telling(endpoint, access, deadline, |_| {}).await
    }

    /// The same, telling why each attempt failed.
    pub async fn connect_telling(
        endpoint: &str,
        access: &Access,
        deadline: Instant,
        mut tell: impl FnMut(&str),
    ) -> Result<Self, ClientError> {
        let target = Target::of(endpoint, access)?;
        let mut attempts = Attempts::new(endpoint, deadline);
        loop {
            let setback = match timeout_at(attempts.next_deadline(), target.connect()).await {
                Ok(Ok(channel)) => {
                    return Ok(Self {
                        endpoint: endpoint.to_owned(),
                        inner: RendezvousClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES),
                    });
                }
                Ok(Err(error)) => match source_of(&error) {
                    Some(no_thread @ LookUpError::NoThread { .. }) => {
                        return Err(ClientError::NoThread(no_thread.clone()));
                    }
                    _ => Setback::of(&error),
                },
                Err(_) => Setback::silence("no answer to the connection request"),
            };
            if setback.is_distrust {
                return Err(setback.untrusted(endpoint));
            }
            tell(&setback.cause);
            attempts.failed(setback).await?;
        }
    }

    /// Attempts to open a stream, for so long from now on.
    pub fn attempts(&self, patience: Duration) -> Attempts {
        Attempts::new(&self.endpoint, Instant::now() + patience)
    }

    /// Opens the stream of an agent, again and again as long as `attempts` last; also the way back after
    /// [`ClientError::Broken`]. The first message sent on it must be `Join`.
    ///
    /// A peer has answered then, but it is the daemon only when it has sent a message: until then a stream that
    /// breaks is one more of these attempts, see [`Attempts::broke`].
    pub async fn agent_stream(
        &self,
        identity: AgentIdentity,
        attempts: &mut Attempts,
    ) -> Result<AgentStream, ClientError> {
        loop {
            let (queue, messages) = mpsc::channel(SEND_QUEUE);
            let mut inner = self.inner.clone();
            let open = inner.agent(ReceiverStream::new(messages));
            let setback = match timeout_at(attempts.next_deadline(), open).await {
                Ok(Ok(reply)) => {
                    return Ok(AgentStream {
                        identity,
                        endpoint: self.endpoint.clone(),
                        queue,
                        receiver: reply.into_inner(),
                    });
                }
                Ok(Err(status)) if is_transport(&status) => match broken(&self.endpoint, &status) {
                    error if !error.is_broken() => return Err(error),
                    _ => Setback::of(&status),
                },
                Ok(Err(status)) => return Err(self.refused("open a stream", &status)),
                Err(_) => Setback::silence("no answer to the opened stream"),
            };
            attempts.failed(setback).await?;
        }
    }

    /// Writes an entry of the generation's store. The same value again succeeds, another one is refused.
    pub async fn kv_put(&self, scope: &KvScope, key: &str, value: Vec<u8>) -> Result<(), ClientError> {
        let what = format!("store `{key}`");
        let request = KvPutRequest {
            job_id: scope.job_id.clone(),
            generation: scope.generation.0,
            assignment_id: scope.assignment_id.clone(),
            incarnation: scope.incarnation.0.clone(),
            key: key.to_owned(),
            value,
        };
        let mut inner = self.inner.clone();
        self.bounded(&what, CALL_TIMEOUT, inner.kv_put(request))
            .await
            .map(drop)
    }

    /// Reads an entry of the generation's store, waiting up to `timeout` until a rank writes it. `None`: no rank had
    /// when that was over, or when the daemon's own longest wait was.
    pub async fn kv_get(
        &self,
        scope: &KvScope,
        key: &str,
        timeout: Duration,
    ) -> Result<Option<Vec<u8>>, ClientError> {
        let what = format!("read `{key}`");
        let request = KvGetRequest {
            job_id: scope.job_id.clone(),
            generation: scope.generation.0,
            assignment_id: scope.assignment_id.clone(),
            incarnation: scope.incarnation.0.clone(),
            key: key.to_owned(),
            timeout_ms: u32::try_from(whole_ms(timeout)).unwrap_or(u32::MAX),
        };
        let mut inner = self.inner.clone();
        let read = async { unless_unwritten(inner.kv_get(request).await) };
        let reply = self.bounded(&what, timeout + READ_MARGIN, read).await?;
        Ok(reply.map(|reply| reply.into_inner().value.into()))
    }

    /// All entries of the generation's store whose keys begin with `prefix`, in order of their keys, as soon as there are
    /// `count` of them; with 0, those that are there now. `None`: fewer were there when `timeout` was over.
    pub async fn kv_gather(
        &self,
        scope: &KvScope,
        prefix: &str,
        count: u32,
        timeout: Duration,
    ) -> Result<Option<KvEntries>, ClientError> {
        let what = format!("gather `{prefix}`");
        let request = KvGatherRequest {
            job_id: scope.job_id.clone(),
            generation: scope.generation.0,
            assignment_id: scope.assignment_id.clone(),
            incarnation: scope.incarnation.0.clone(),
            prefix: prefix.to_owned(),
            count,
            timeout_ms: u32::try_from(whole_ms(timeout)).unwrap_or(u32::MAX),
        };
        let mut inner = self.inner.clone();
        let gather = async {
            match unless_unwritten(inner.kv_gather(request).await)? {
                Some(parts) => joined(parts.into_inner()).await.map(Some),
                None => Ok(None),
            }
        };
        let encoded = self.bounded(&what, timeout + READ_MARGIN, gather).await?;
        let entries = encoded.map(|encoded| KvEntries::decode(encoded.as_slice()));
        entries.transpose().map_err(|error| ClientError::Call {
            what,
            endpoint: self.endpoint.clone(),
            cause: format!("its answer cannot be read: {error}"),
            why: CallError::Refused,
        })
    }

    /// What the daemon knows of a job.
    pub async fn status(&self, job_id: &str) -> Result<StatusReply, ClientError> {
        let mut inner = self.inner.clone();
        let what = format!("get the status of job `{job_id}`");
        let job_id = job_id.to_owned();
        let call = inner.status(StatusRequest { job_id });
        let status = self.bounded(&what, CALL_TIMEOUT, call).await;
        status.map(Response::into_inner).map_err(ClientError::of_operator)
    }

    /// All jobs of the daemon.
    pub async fn jobs(&self) -> Result<JobsReply, ClientError> {
        let mut inner = self.inner.clone();
        let call = inner.jobs(JobsRequest {});
        let jobs = self.bounded("list the jobs", CALL_TIMEOUT, call).await;
        jobs.map(Response::into_inner)
    }

    /// Ends a job on all of its nodes.
    pub async fn close(&self, request: CloseRequest) -> Result<(), ClientError> {
        let mut inner = self.inner.clone();
        let what = format!("close job `{}`", request.job_id);
        self.bounded(&what, CALL_TIMEOUT, inner.close(request))
            .await
            .map(drop)
    }

    async fn bounded<T>(
        &self,
        what: &str,
        within: Duration,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, ClientError> {
        match tokio::time::timeout(within, call).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(status)) if is_transport(&status) => Err(broken(&self.endpoint, &status)),
            Ok(Err(status)) => Err(self.refused(what, &status)),
            Err(_) => Err(ClientError::Call {
                what: what.to_owned(),
                endpoint: self.endpoint.clone(),
                cause: format!("no answer within {within:?}"),
                why: CallError::TimedOut,
            }),
        }
    }

    fn refused(&self, what: &str, status: &Status) -> ClientError {
        let (what, endpoint) = (what.to_owned(), self.endpoint.clone());
        let cause = printable::text(status.message()).into_owned();
        match status.code() {
            Code::Aborted => ClientError::Superseded { cause },
            Code::Unimplemented => ClientError::Stranger { endpoint, cause },
            code => ClientError::Call {
                what,
                endpoint,
                cause,
                why: CallError::of(code),
            },
        }
    }
}

/// The parts of an answer, one after the other.
async fn joined(mut parts: Streaming<KvGatherReply>) -> Result<Vec<u8>, Status> {
    let mut whole = Vec::new();
    while let Some(part) = parts.message().await? {
        if whole.len() + part.entries.len() > MAX_ANSWER_BYTES {
            let words = format!("the answer has more than {MAX_ANSWER_BYTES} bytes");
            return Err(Status::resource_exhausted(words));
        }
        whole.extend_from_slice(&part.entries);
    }
    Ok(whole)
}

/// The two directions of an agent's stream.
#[derive(Debug)]
pub struct AgentStream {
    identity: AgentIdentity,
    endpoint: String,
    queue: mpsc::Sender<AgentMessage>,
    receiver: Streaming<DaemonMessage>,
}

impl AgentStream {
    /// The next message of the daemon. Cancel safe: a message is either returned or still to come.
    pub async fn next(&mut self) -> Result<DaemonMessage, ClientError> {
        match self.receiver.message().await {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(self.broken("the daemon ended the stream".into())),
            Err(status) => Err(broken(&self.endpoint, &status)),
        }
    }

    /// Queues a message that speaks of this assignment of this generation; never waits, so supervision never does.
    pub fn send(&self, generation: Generation, assignment_id: &str, body: Body) -> Result<(), ClientError> {
        let message = AgentMessage {
            job_id: self.identity.job_id.clone(),
            incarnation: self.identity.incarnation.0.clone(),
            generation: generation.0,
            assignment_id: assignment_id.to_owned(),
            body: Some(body),
        };
        self.queue.try_send(message).map_err(|error| {
            self.broken(match error {
                TrySendError::Full(_) => format!("it accepts no messages, and {SEND_QUEUE} are queued"),
                TrySendError::Closed(_) => "the stream is closed".into(),
            })
        })
    }

    fn broken(&self, cause: String) -> ClientError {
        let endpoint = self.endpoint.clone();
        ClientError::Broken { endpoint, cause }
    }

    /// Says good-bye and waits until the daemon has received it (it ends the stream then), at most until `deadline`.
    ///
    /// Returns false if the deadline passed or the stream broke first.
    pub async fn leave(self, generation: Generation, leave: Leave, deadline: Instant) -> bool {
        // It speaks of the node, whatever it was assigned.
        if self.send(generation, "", Body::Leave(leave)).is_err() {
            return false;
        }
        let Self {
            queue, mut receiver, ..
        } = self;
        drop(queue);
        let end = async {
            loop {
                match receiver.message().await {
                    Ok(Some(_)) => {}
                    Ok(None) => return true,
                    Err(_) => return false,
                }
            }
        };
        timeout_at(deadline, end).await.unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit;

    fn identity() -> AgentIdentity {
        AgentIdentity {
            job_id: "j".into(),
            incarnation: NodeId("a".into()),
        }
    }

    /// An endpoint without a listener, whose port no other program gets meanwhile.
    fn deaf() -> (String, tokio::net::TcpSocket) {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        (socket.local_addr().unwrap().to_string(), socket)
    }

    #[tokio::test]
    async fn an_unreachable_daemon_is_named_and_has_its_exit_code() {
        let (endpoint, _socket) = deaf();
        let error = Client::connect(&endpoint, &Access::Open, Instant::now() + Duration::from_secs(1))
            .await
            .unwrap_err();
        assert_eq!(error.exit_code(), exit::DAEMON_UNREACHABLE);
        let ClientError::Unreachable { attempts, .. } = error else {
            panic!("{error:?}")
        };
        assert!(attempts > 1, "it tries again until the deadline");
        let words = error.to_string();
        assert!(
            words.contains(&format!("cannot reach the rendezvous at `{endpoint}`")),
            "{words}"
        );
        assert!(
            words.contains("refused") && words.contains("\n  hint: "),
            "{words}"
        );
    }

    #[tokio::test]
    async fn a_daemon_that_never_answers_is_unreachable_too() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let deadline = Instant::now() + Duration::from_millis(200);
        let result = match Client::connect(&endpoint, &Access::Open, deadline).await {
            Ok(client) => client
                .agent_stream(identity(), &mut client.attempts(Duration::from_millis(100)))
                .await
                .map(drop),
            Err(error) => Err(error),
        };
        let error = result.unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn an_endpoint_without_host_or_port_is_a_usage_error() {
        for endpoint in ["node0", ":29400", "node0:", "node0:0", "node0:port", "no de:1"] {
            let error = Client::connect(endpoint, &Access::Open, Instant::now())
                .await
                .unwrap_err();
            assert!(
                matches!(error, ClientError::BadEndpoint { .. }),
                "`{endpoint}` gave {error:?}"
            );
            assert_eq!(error.exit_code(), exit::USAGE);
        }
    }
}
