//! The state machine's events and effects. No I/O, no clock.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::printable;
use ddp_proto::rendezvous::daemon_message::Body;
use ddp_proto::rendezvous::{
    AgentMessage, DaemonMessage, GenerationOver, KvGatherRequest, KvGetRequest, KvPutRequest, Refused,
};

use prost::bytes::Bytes;

use super::config::Config;
use super::job::Record;
use super::store_totals::Answers;

/// One stream of an agent. Never used again for another stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// One pending call on the key-value store. Never used again for another call.
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

/// When an event happens: time and randomness are parameters.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// Time since the daemon started, on its monotonic clock.
    pub now: Duration,
    /// A random number in 0..1, for jitter.
    pub dice: f64,
    /// 128 random bits, for the name of an assignment.
    pub id: u128,
    /// 32 random bytes that nobody else knows, from which data keys are made.
    pub secret: Secret,
}

/// Random bytes that no log shows.
#[derive(Clone, Copy)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Of these bytes.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
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
    /// An agent said something.
    Message {
        /// Its stream.
        conn: ConnId,
        /// Where it comes from.
        peer: Peer,
        /// What it said.
        message: Box<AgentMessage>,
    },
    /// A stream is gone.
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
    /// Nobody waits for the answer of a read any more.
    KvCancel {
        /// The read.
        call: CallId,
        /// Whose store it reads.
        job: String,
    },
    /// An operator ends a job.
    Close {
        /// The job.
        job: String,
        /// Why, in words.
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
    /// Write this down before anything else of the same turn is carried out.
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
        /// How much it matters to people.
        weight: Weight,
        /// In words.
        words: String,
        /// Of what it speaks.
        about: About,
    },
    /// Something to be counted.
    Observed(Observation),
}

/// What a note speaks of; empty where it speaks of none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// The job.
    pub job: String,
    /// Its generation; 0: none was assigned yet.
    pub generation: u64,
    /// Host name of the node that gave the occasion.
    pub node: String,
}

/// What operators count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observation {
    /// A generation was assigned, so long after its nodes began to gather.
    Assigned(Duration),
    /// A generation is over, and another one follows.
    Restarted(RestartReason),
    /// A job is over with this exit code.
    Ended(i32),
}

/// Why another generation follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RestartReason {
    /// A worker failed.
    WorkerFailed,
    /// Rank 0 could not bind its port.
    PortTaken,
    /// A node is gone, and the others are too few without it.
    NodeLost,
    /// Nodes came or went, and enough are there.
    Membership,
}

/// How much a note matters to people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// A decision about a job.
    Decision,
    /// A message that was ignored, a detail.
    Detail,
}

/// Why a call on the key-value store failed, in words.
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

/// Which node speaks, and of what.
#[derive(Clone, Debug)]
pub(super) struct Speech {
    pub(super) incarnation: String,
    /// 0: none.
    pub(super) generation: u64,
    /// Which assignment of that generation; empty from older builds.
    pub(super) assignment_id: String,
}

/// Sends a node away, or all of them.
pub(super) fn refusal(code: impl Into<i32>, reason: String) -> Body {
    Body::Refused(Refused {
        code: code.into(),
        reason,
        failures: None,
    })
}

/// The end of a generation for which no restart is spent.
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

/// One call of `apply`: its parameters, and the effects as they are decided.
pub(super) struct Turn<'a> {
    pub(super) at: At,
    pub(super) config: &'a Config,
    pub(super) effects: Vec<Effect>,
    /// Of what its notes speak.
    pub(super) about: About,
    /// What was gathered, in this turn and before.
    pub(super) answers: Answers,
}

impl Turn<'_> {
    /// The name of a new assignment. Two jobs may start in one turn.
    pub(super) fn assignment_id(&mut self) -> String {
        let id = self.at.id;
        self.at.id = id.wrapping_add(1);
        format!("{id:032x}")
    }

    /// The data key of an assignment. Each assignment of a turn has another name, and so another key.
    pub(super) fn data_key(&self, assignment_id: &str) -> Vec<u8> {
        let Secret(secret) = &self.at.secret;
        let key = blake3::keyed_hash(secret, assignment_id.as_bytes());
        key.as_bytes().to_vec()
    }

    /// Sends to a node, if it is connected.
    pub(super) fn send(&mut self, conn: Option<ConnId>, generation: u64, body: Body) {
        if conn.is_some() {
            self.send_shared(conn, &shared(generation, body));
        }
    }

    /// Sends what others are sent too: there is one copy of it.
    pub(super) fn send_shared(&mut self, conn: Option<ConnId>, message: &Arc<DaemonMessage>) {
        if let Some(conn) = conn {
            let message = Arc::clone(message);
            self.effects.push(Effect::Send { conn, message });
        }
    }

    pub(super) fn close(&mut self, conn: Option<ConnId>) {
        if let Some(conn) = conn {
            self.effects.push(Effect::Close { conn });
        }
    }

    pub(super) fn decided(&mut self, words: impl Into<String>) {
        self.note(Weight::Decision, &words.into());
    }

    pub(super) fn detail(&mut self, words: impl Into<String>) {
        self.note(Weight::Detail, &words.into());
    }

    fn note(&mut self, weight: Weight, words: &str) {
        let words = printable::text(words).into_owned();
        let about = self.about.clone();
        self.effects.push(Effect::Note { weight, words, about });
    }

    pub(super) fn observe(&mut self, observation: Observation) {
        self.effects.push(Effect::Observed(observation));
    }
}
