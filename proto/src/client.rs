//! The typed client of the rendezvous service: every call has a deadline, every retry a jittered back-off.
//!
//! ```text
//! let client = Client::connect("node0:29400", Instant::now() + connect_timeout).await?;
//! let mut stream = client.agent_stream(identity, deadline).await?;   // and again after ClientError::Broken
//! stream.sender().send(Generation(0), Body::Join(join))?;            // never waits
//! let message = stream.next().await?;                                // cancel safe
//! stream.leave(generation, leave, deadline).await;                   // returns when the daemon has heard it
//! ```
//!
//! What the daemon expects of an agent, beyond the comments in `rendezvous.proto`:
//! - The first message of **every** stream is `Join`, carrying the generation last assigned. After a
//!   reconnect the agent then repeats what it last reported of that generation (`WorkerExit`,
//!   `NodeSucceeded`): it cannot know what was lost, and the daemon takes each report once.
//! - An `Assignment` of the generation that already runs means "keep your place": nothing is restarted.
//! - Every `GenerationOver` is answered by `NodeStopped`, then `Join`, in whatever state the agent is.
//! - `Heartbeat` every third of `lease_ms`, in every state; each is answered by `HeartbeatAck`.
//! - After `JobOver` or `Refused`: stop the workers, [`AgentStream::leave`], exit with that code.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use crate::exit;
use crate::ids::{Generation, NodeId};
use crate::rendezvous::agent_message::Body;
use crate::rendezvous::rendezvous_client::RendezvousClient;
use crate::rendezvous::{
    AgentMessage, DaemonMessage, KvGetRequest, KvPutRequest, Leave, StatusReply, StatusRequest,
};

/// Messages that may wait for the network before [`AgentSender::send`] calls the stream stalled.
pub const SEND_QUEUE: usize = 64;
/// First pause between two attempts to reach the daemon; doubled each time.
pub const BACKOFF_BASE: Duration = Duration::from_millis(20);
/// Longest pause between two attempts.
pub const BACKOFF_CAP: Duration = Duration::from_secs(2);
/// Longest single attempt to open a connection.
pub const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time allowed for a call that the daemon answers at once.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// What a blocking read may take beyond the deadline that the daemon itself keeps.
const READ_MARGIN: Duration = Duration::from_secs(5);
/// Pings on an idle connection, so that a daemon that vanished without a word is noticed.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a ping may stay unanswered.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the daemon could not be reached, or what it answered instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The endpoint is not `host:port`.
    #[error(
        "rendezvous endpoint `{endpoint}` is not an address: {cause}\n  hint: write it as `host:port`, like `node0:29400`"
    )]
    BadEndpoint {
        /// As given.
        endpoint: String,
        /// What is wrong with it.
        cause: String,
    },
    /// No connection within the deadline.
    #[error("rendezvous daemon at `{endpoint}` cannot be reached after {:.1} s and {attempts} attempts: {cause}\n  hint: is `ddp-rendezvous serve` (or the node that hosts it) running there, and its port open?", .waited.as_secs_f64())]
    Unreachable {
        /// Address that was tried.
        endpoint: String,
        /// How long.
        waited: Duration,
        /// How often.
        attempts: u32,
        /// Last error.
        cause: String,
    },
    /// The connection broke while it was in use; opening a new stream may help.
    #[error("connection to the rendezvous daemon at `{endpoint}` broke: {cause}")]
    Broken {
        /// Address of the daemon.
        endpoint: String,
        /// What happened.
        cause: String,
    },
    /// The daemon takes no messages: [`SEND_QUEUE`] of them are waiting. Treat it as broken.
    #[error("rendezvous daemon at `{endpoint}` does not take messages: {SEND_QUEUE} are waiting")]
    Stalled {
        /// Address of the daemon.
        endpoint: String,
    },
    /// The daemon did not answer within the deadline of the call.
    #[error("{what} got no answer from the rendezvous daemon at `{endpoint}` within {:.1} s: {cause}", .waited.as_secs_f64())]
    TimedOut {
        /// The call, in words.
        what: String,
        /// Address of the daemon.
        endpoint: String,
        /// Deadline of the call.
        waited: Duration,
        /// The daemon's words, or that nothing came.
        cause: String,
    },
    /// The generation that the call speaks of is over.
    #[error("{cause}")]
    Superseded {
        /// The daemon's words: "generation superseded: …".
        cause: String,
    },
    /// The daemon answered with an error.
    #[error("rendezvous daemon at `{endpoint}` refused {what}: {cause}")]
    Refused {
        /// The call, in words.
        what: String,
        /// Address of the daemon.
        endpoint: String,
        /// Not allowed at all, as opposed to wrong in itself.
        unauthenticated: bool,
        /// The daemon's words.
        cause: String,
    },
}

impl ClientError {
    /// Exit code of a launcher that ends because of this error.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::BadEndpoint { .. } => exit::USAGE,
            Self::Unreachable { .. } | Self::Broken { .. } | Self::Stalled { .. } | Self::TimedOut { .. } => {
                exit::DAEMON_UNREACHABLE
            }
            Self::Refused {
                unauthenticated: true,
                ..
            } => exit::REFUSED,
            Self::Superseded { .. } | Self::Refused { .. } => exit::INTERNAL,
        }
    }

    /// True if a new stream may help ([`Client::agent_stream`] with a deadline).
    #[must_use]
    pub const fn is_broken(&self) -> bool {
        matches!(self, Self::Broken { .. } | Self::Stalled { .. })
    }
}

/// Who speaks on an agent's stream: fences every message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentIdentity {
    /// Name of the job, `--rdzv-id`.
    pub job_id: String,
    /// Name of this agent's process.
    pub incarnation: NodeId,
}

/// A connection to one daemon. Cheap to clone; clones share the connection, and it is opened again when it broke.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: String,
    inner: RendezvousClient<Channel>,
}

impl Client {
    /// Connects to `endpoint` (`host:port`), again and again with jittered back-off until `deadline`.
    pub async fn connect(endpoint: &str, deadline: Instant) -> Result<Self, ClientError> {
        let target = target(endpoint)?;
        let mut attempts = Attempts::new(endpoint, deadline);
        loop {
            let cause = match timeout_at(attempts.next_deadline(), target.connect()).await {
                Ok(Ok(channel)) => {
                    return Ok(Self {
                        endpoint: endpoint.to_owned(),
                        inner: RendezvousClient::new(channel),
                    });
                }
                Ok(Err(error)) => root_cause(&error),
                Err(_) => "no answer to the connection request".to_owned(),
            };
            attempts.failed(cause).await?;
        }
    }

    /// The address that this client speaks to, as it was given.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Opens the stream of an agent, again and again until `deadline`; also the way back after
    /// [`ClientError::Broken`]. The first message sent on it must be `Join`.
    pub async fn agent_stream(
        &self,
        identity: AgentIdentity,
        deadline: Instant,
    ) -> Result<AgentStream, ClientError> {
        let mut attempts = Attempts::new(&self.endpoint, deadline);
        loop {
            let (queue, messages) = mpsc::channel(SEND_QUEUE);
            let mut inner = self.inner.clone();
            let open = inner.agent(ReceiverStream::new(messages));
            let cause = match timeout_at(attempts.next_deadline(), open).await {
                Ok(Ok(reply)) => {
                    let sender = AgentSender {
                        identity,
                        endpoint: self.endpoint.clone(),
                        queue,
                    };
                    return Ok(AgentStream {
                        sender,
                        receiver: reply.into_inner(),
                    });
                }
                Ok(Err(status)) if is_transport(&status) => root_cause(&status),
                Ok(Err(status)) => return Err(self.refused("the agent's stream", CALL_TIMEOUT, &status)),
                Err(_) => "no answer to the opened stream".to_owned(),
            };
            attempts.failed(cause).await?;
        }
    }

    /// Writes an entry of the generation's store. The same value again succeeds, another one is refused.
    pub async fn kv_put(
        &self,
        job_id: &str,
        generation: Generation,
        key: &str,
        value: Vec<u8>,
    ) -> Result<(), ClientError> {
        let what = format!("to store `{key}`");
        let request = KvPutRequest {
            job_id: job_id.to_owned(),
            generation: generation.0,
            key: key.to_owned(),
            value,
        };
        let mut inner = self.inner.clone();
        self.bounded(&what, CALL_TIMEOUT, inner.kv_put(request))
            .await
            .map(drop)
    }

    /// Reads an entry of the generation's store, waiting up to `timeout` for somebody to write it.
    pub async fn kv_get(
        &self,
        job_id: &str,
        generation: Generation,
        key: &str,
        timeout: Duration,
    ) -> Result<Vec<u8>, ClientError> {
        let what = format!("to read `{key}`");
        let request = KvGetRequest {
            job_id: job_id.to_owned(),
            generation: generation.0,
            key: key.to_owned(),
            timeout_ms: u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX),
        };
        let mut inner = self.inner.clone();
        let reply = self
            .bounded(&what, timeout + READ_MARGIN, inner.kv_get(request))
            .await?;
        Ok(reply.value)
    }

    /// What the daemon knows of a job.
    pub async fn status(&self, job_id: &str) -> Result<StatusReply, ClientError> {
        let mut inner = self.inner.clone();
        let call = inner.status(StatusRequest {
            job_id: job_id.to_owned(),
        });
        self.bounded(&format!("the status of job `{job_id}`"), CALL_TIMEOUT, call)
            .await
    }

    async fn bounded<T>(
        &self,
        what: &str,
        within: Duration,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, ClientError> {
        match tokio::time::timeout(within, call).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) if is_transport(&status) => Err(broken(&self.endpoint, &status)),
            Ok(Err(status)) => Err(self.refused(what, within, &status)),
            Err(_) => Err(ClientError::TimedOut {
                what: what.to_owned(),
                endpoint: self.endpoint.clone(),
                waited: within,
                cause: "nothing came back".into(),
            }),
        }
    }

    fn refused(&self, what: &str, waited: Duration, status: &Status) -> ClientError {
        let (what, endpoint, cause) = (
            what.to_owned(),
            self.endpoint.clone(),
            status.message().to_owned(),
        );
        match status.code() {
            Code::Aborted => ClientError::Superseded { cause },
            Code::DeadlineExceeded => ClientError::TimedOut {
                what,
                endpoint,
                waited,
                cause,
            },
            code => ClientError::Refused {
                what,
                endpoint,
                unauthenticated: matches!(code, Code::Unauthenticated | Code::PermissionDenied),
                cause,
            },
        }
    }
}

/// The two directions of an agent's stream.
#[derive(Debug)]
pub struct AgentStream {
    sender: AgentSender,
    receiver: Streaming<DaemonMessage>,
}

impl AgentStream {
    /// The sending half; cheap to clone.
    #[must_use]
    pub const fn sender(&self) -> &AgentSender {
        &self.sender
    }

    /// The next message of the daemon. Cancel safe: a message is either returned or still to come.
    pub async fn next(&mut self) -> Result<DaemonMessage, ClientError> {
        let endpoint = &self.sender.endpoint;
        match self.receiver.message().await {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(ClientError::Broken {
                endpoint: endpoint.clone(),
                cause: "the daemon ended the stream".into(),
            }),
            Err(status) => Err(broken(endpoint, &status)),
        }
    }

    /// Says good-bye and waits until the daemon has heard it (it ends the stream then), at most until `deadline`.
    ///
    /// Returns false if the deadline passed or the stream broke first.
    pub async fn leave(self, generation: Generation, leave: Leave, deadline: Instant) -> bool {
        let Self { sender, mut receiver } = self;
        if sender.send(generation, Body::Leave(leave)).is_err() {
            return false;
        }
        drop(sender);
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

/// The sending half of an agent's stream.
#[derive(Clone, Debug)]
pub struct AgentSender {
    identity: AgentIdentity,
    endpoint: String,
    queue: mpsc::Sender<AgentMessage>,
}

impl AgentSender {
    /// Queues a message; never waits, so supervision never does.
    pub fn send(&self, generation: Generation, body: Body) -> Result<(), ClientError> {
        let message = AgentMessage {
            job_id: self.identity.job_id.clone(),
            incarnation: self.identity.incarnation.0.clone(),
            generation: generation.0,
            body: Some(body),
        };
        self.queue.try_send(message).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => ClientError::Stalled {
                endpoint: self.endpoint.clone(),
            },
            mpsc::error::TrySendError::Closed(_) => ClientError::Broken {
                endpoint: self.endpoint.clone(),
                cause: "the stream is closed".into(),
            },
        })
    }
}

/// Counts attempts and paces them.
struct Attempts<'a> {
    endpoint: &'a str,
    begun: Instant,
    deadline: Instant,
    count: u32,
}

impl<'a> Attempts<'a> {
    fn new(endpoint: &'a str, deadline: Instant) -> Self {
        Self {
            endpoint,
            begun: Instant::now(),
            deadline,
            count: 0,
        }
    }

    /// Deadline of the attempt that begins now.
    fn next_deadline(&self) -> Instant {
        self.deadline.min(Instant::now() + ATTEMPT_TIMEOUT)
    }

    /// Pauses before the next attempt, or gives up if there is no time for one.
    async fn failed(&mut self, cause: String) -> Result<(), ClientError> {
        let pause = backoff(self.count, rand::random_range(0.5..1.0));
        self.count += 1;
        let now = Instant::now();
        if now + pause >= self.deadline {
            return Err(ClientError::Unreachable {
                endpoint: self.endpoint.to_owned(),
                waited: now - self.begun,
                attempts: self.count,
                cause,
            });
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// Pause after the attempt with number `attempt` (from 0); `jitter` in 0.5..1 spreads the nodes of a job.
fn backoff(attempt: u32, jitter: f64) -> Duration {
    let factor = 1u32.checked_shl(attempt).unwrap_or(u32::MAX);
    BACKOFF_BASE
        .saturating_mul(factor)
        .min(BACKOFF_CAP)
        .mul_f64(jitter)
}

fn target(endpoint: &str) -> Result<Endpoint, ClientError> {
    let bad = |cause: String| ClientError::BadEndpoint {
        endpoint: endpoint.to_owned(),
        cause,
    };
    let (host, port) = endpoint
        .rsplit_once(':')
        .ok_or_else(|| bad("no port is given".into()))?;
    if host.is_empty() {
        return Err(bad("no host is given".into()));
    }
    if port.parse::<u16>().ok().is_none_or(|port| port == 0) {
        return Err(bad(format!("`{port}` is not a port")));
    }
    let target = Endpoint::from_shared(format!("http://{endpoint}")).map_err(|e| bad(root_cause(&e)))?;
    Ok(target
        .connect_timeout(ATTEMPT_TIMEOUT)
        .tcp_nodelay(true)
        .tcp_keepalive(Some(KEEP_ALIVE_INTERVAL))
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true))
}

/// True if the status was made on this side because the connection failed, or the daemon is going away.
fn is_transport(status: &Status) -> bool {
    use std::error::Error as _;
    status.code() == Code::Unavailable
        || (status.source().is_some() && status.code() != Code::DeadlineExceeded)
}

fn broken(endpoint: &str, status: &Status) -> ClientError {
    ClientError::Broken {
        endpoint: endpoint.to_owned(),
        cause: root_cause(status),
    }
}

/// The innermost words of an error: the layers around it only say "transport error".
fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    match error.downcast_ref::<Status>() {
        Some(status) => status.message().to_owned(),
        None => error.to_string(),
    }
}
