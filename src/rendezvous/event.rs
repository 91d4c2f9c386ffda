//! The state machine's events and effects. No I/O, no clock.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body;
use ddp_proto::rendezvous::{
    AgentMessage, DaemonMessage, GenerationOver, KvGatherRequest, KvGetRequest, KvPutRequest, Refused,
};

use prost::bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::policy::{Account, EndReason};
use super::ranks::Member;

/// A stream of an agent. No two streams of a daemon have the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// A pending call on the key-value store. No two calls at a daemon have the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// The two ends of a connection, as the daemon sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The agent's end.
    pub remote: IpAddr,
    /// The daemon's end: an address under which this agent reaches the daemon's host.
    pub local: IpAddr,
}

impl Peer {
    /// The agent runs on the daemon's machine: a connection from elsewhere never comes from the address that it goes to.
    pub(super) fn is_here(self) -> bool {
        let [remote, local] = [self.remote, self.local].map(|address| address.to_canonical());
        remote.is_loopback() || remote == local
    }
}

/// Time and randomness of an event, as parameters.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// Time since the daemon started, on its monotonic clock.
    pub now: Duration,
    /// A random number in 0..1, for jitter.
    pub dice: f64,
    /// 128 random bits, for the name of an assignment.
    pub id: u128,
    /// 32 secret random bytes, from which data keys are derived.
    pub secret: Secret,
}

/// Random bytes that `Debug` hides.
#[derive(Clone, Copy)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Wraps the bytes.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The data key of an assignment, derived from its id.
    pub(super) fn data_key(&self, assignment_id: &str) -> Vec<u8> {
        blake3::keyed_hash(&self.0, assignment_id.as_bytes())
            .as_bytes()
            .to_vec()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(not shown)")
    }
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A message of an agent.
    Message {
        /// Its stream.
        conn: ConnId,
        /// Where it comes from.
        peer: Peer,
        /// The message.
        message: Box<AgentMessage>,
    },
    /// A stream ended or broke.
    Closed {
        /// The stream.
        conn: ConnId,
        /// True if the agent ended it in order, after reading all that was sent before.
        clean: bool,
    },
    /// An entry is to be written.
    KvPut {
        /// Whom to answer.
        call: CallId,
        /// The entry.
        request: KvPutRequest,
    },
    /// An entry is to be read, now or when it is written.
    KvGet {
        /// Whom to answer.
        call: CallId,
        /// Which entry.
        request: KvGetRequest,
    },
    /// The caller of a read is gone.
    KvCancel {
        /// The read.
        call: CallId,
        /// The job whose store it reads.
        job: String,
    },
    /// An operator ends a job.
    Close {
        /// The job.
        job: String,
        /// Who ends it and why, in words.
        reason: String,
    },
    /// All entries with one prefix are to be read, now or when there are enough.
    KvGather {
        /// Whom to answer.
        call: CallId,
        /// Which entries.
        request: KvGatherRequest,
    },
    /// The time of [`super::State::next_wake`] has come.
    Tick,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Send a message to an agent.
    Send {
        /// Its stream.
        conn: ConnId,
        /// The message, which others may be sent too.
        message: Arc<DaemonMessage>,
    },
    /// End a stream after all that was sent before.
    Close {
        /// The stream.
        conn: ConnId,
    },
    /// Write the record before carrying out any other effect of the same event.
    Record(Box<Record>),
    /// Answer a call on the key-value store.
    Answer {
        /// The call.
        call: CallId,
        /// The value that was read, or what was gathered as a `KvEntries`; empty for a write.
        result: Result<Bytes, KvError>,
    },
    /// A decision and its reason, for the log.
    Note {
        /// Its log level.
        weight: Weight,
        /// The text.
        words: String,
        /// Its subject.
        about: About,
    },
    /// An observation for the metrics.
    Observed(Observation),
}

/// A job in the ledger. The last record of a job counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub(super) job: String,
    /// The highest one that was assigned; 0: none was.
    pub(super) generation: u64,
    pub(super) assignment_id: String,
    /// Nodes of that generation, in order of their ranks.
    pub(super) members: Vec<Member>,
    pub(super) run_token: String,
    /// How long one of its nodes may train without the daemon; none: for the outage time-out.
    #[serde(default)]
    pub(super) takeover: Option<Duration>,
    pub(super) attempt: u32,
    /// What is left of the restarts.
    pub(super) account: Account,
    pub(super) stage: Stage,
}

/// How far the generation has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stage {
    /// Its nodes run.
    Running,
    /// It is over, and another one follows.
    Ended,
    /// So is the generation, and no node has come for another one.
    Abandoned,
    /// So is the job.
    JobOver { exit_code: i32, reason: String },
    /// The daemon has refused to go on with the job.
    Refused { code: i32, reason: String },
}

impl Record {
    /// Which job it is.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// The job has ended.
    pub(super) fn is_final(&self) -> bool {
        !matches!(self.stage, Stage::Running | Stage::Ended)
    }
}

/// The subject of a note; a field is empty where the note has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// The job.
    pub job: String,
    /// Its generation; 0 before the first assignment.
    pub generation: u64,
    /// Host name of the node that caused it.
    pub node: String,
}

/// A count for the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observation {
    /// A generation was assigned; with the time that its nodes took to gather.
    Assigned(Duration),
    /// A generation ended, and another one follows.
    Restarted(EndReason),
    /// A job ended with this exit code.
    Ended(i32),
}

/// The log level of a note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// A decision about a job.
    Decision,
    /// A message that was ignored, a detail.
    Detail,
}

/// Why a call on the key-value store failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// The generation is over.
    #[error("generation superseded: {0}")]
    Superseded(String),
    /// No rank wrote the key in time.
    #[error("{0}")]
    NotWritten(String),
    /// The key has another value already.
    #[error("{0}")]
    Exists(String),
    /// A bound of the store.
    #[error("{0}")]
    TooMuch(String),
    /// The job or the generation is not known.
    #[error("{0}")]
    Unknown(String),
}

/// The sender of a message, and the assignment that the message is about.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    pub(super) incarnation: String,
    /// 0 before the first assignment.
    pub(super) generation: u64,
    /// Which assignment of that generation; empty with generation 0.
    pub(super) assignment_id: String,
}

/// Refuses a node, or all of them.
pub(super) fn refusal(code: impl Into<i32>, reason: String) -> Refused {
    Refused {
        code: code.into(),
        reason,
        ..Refused::default()
    }
}

/// The end of a generation that costs no restart.
pub(super) fn regrouping(cause: String) -> GenerationOver {
    GenerationOver {
        cause,
        membership: true,
        ..GenerationOver::default()
    }
}

/// A message for several nodes.
pub(super) fn shared(generation: u64, body: Body) -> Arc<DaemonMessage> {
    Arc::new(DaemonMessage {
        generation,
        body: Some(body),
    })
}
