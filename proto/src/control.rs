//! The control socket between an agent and one worker: newline-delimited JSON, version 1.
//!
//! The agent listens on an abstract Unix address, given to the worker as `DDP_CONTROL` (`@name`), and
//! checks that the peer runs under the same user. A line is one message, at most [`MAX_LINE_BYTES`]
//! long. The worker speaks first, with [`ToAgent::Hello`]; the agent answers with [`ToWorker::Assignment`].
//! Unknown fields are ignored and an unknown `type` is skipped, so that both sides may be of different
//! builds. A client is 20 lines in any language.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::Generation;

/// Version of the messages in this file.
pub const PROTOCOL: u32 = 1;

/// Longest line, its newline included. A longer one ends the connection.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// Longest value in the key-value store. Base64 in a line must fit [`MAX_LINE_BYTES`].
pub const MAX_VALUE_BYTES: usize = 512 << 10;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the form that serde asks for")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What a worker says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// The first line of every connection.
    Hello {
        /// [`PROTOCOL`].
        protocol: u32,
        /// `LOCAL_RANK` of the speaker.
        local_rank: u32,
        /// `DDP_GENERATION` of the speaker.
        generation: Generation,
        /// Process id of the speaker, checked against the peer credentials.
        pid: u32,
        /// The speaker reads what the agent says, and ends by itself when it is told to: it is given time to do so
        /// before signals follow. One that only sends is stopped like a program without a connection.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        listens: bool,
    },
    /// "I live": sent at least every 2 seconds, and at the end of each step.
    Heartbeat {
        /// Steps finished so far.
        step: u64,
        /// What the worker is doing.
        phase: Phase,
        /// A heartbeat that a thread repeats by itself: how long ago the program last had something to say. 0 for
        /// one that the program sent itself.
        #[serde(default, skip_serializing_if = "is_zero")]
        quiet_ms: u64,
        /// For the progress bar; rank 0 only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        progress: Option<Progress>,
    },
    /// With which numbers of ranks the job can go on in another generation. Said once a generation, by one rank; as long
    /// as no rank has said it, any will do.
    Sizes {
        /// The number of ranks has to divide this one.
        ranks_divide: u64,
    },
    /// Answer to [`ToWorker::Describe`].
    State {
        /// What it waits for and where its threads are, in lines.
        text: String,
        /// Global ranks that it waits for, as far as it knows.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        waiting_for: Vec<u32>,
    },
    /// The worker is about to exit with an error; its own words for the failure report.
    Failure {
        /// One line.
        message: String,
        /// What to do next, if the worker knows.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
        /// It failed only because another rank did: the agent looks for that one before it names this one.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        consequence: bool,
    },
    /// Write-once put into the store of this generation. Answered by [`ToWorker::KvReply`].
    KvPut {
        /// Number of the call, chosen by the worker, returned in the answer.
        call: u64,
        /// Name of the entry.
        key: String,
        /// Bytes as base64 (standard alphabet, padded).
        value: String,
    },
    /// Blocking read. Answered by [`ToWorker::KvReply`].
    KvGet {
        /// Number of the call, chosen by the worker, returned in the answer.
        call: u64,
        /// Name of the entry.
        key: String,
        /// How long to wait for it.
        timeout_ms: u64,
    },
}

/// What a native worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Loading, connecting, initial broadcast.
    Starting,
    /// In a training step.
    Training,
    /// In a validation pass.
    Validating,
    /// Writing a checkpoint.
    Saving,
    /// Done with the last step, writing the summary.
    Finishing,
}

/// Numbers for the progress bar.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps of the whole run.
    pub steps: u64,
    /// Mean training loss of the last step, nats a token.
    pub loss: f64,
    /// Tokens a second over all ranks.
    pub tokens_per_s: f64,
    /// Seconds left at this speed.
    pub seconds_left: f64,
    /// Last validation loss, nats a token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
}

/// What an agent says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToWorker {
    /// The truth about the worker's place, in the form of the environment contract ([`crate::env`]).
    Assignment {
        /// [`PROTOCOL`].
        protocol: u32,
        /// Generation of this assignment.
        generation: Generation,
        /// The variables of the environment contract.
        env: BTreeMap<String, String>,
        /// Address of every node, in order of node rank.
        node_addrs: Vec<String>,
    },
    /// Stop at the next step boundary, save, and exit with 0.
    StopAtStepBoundary {
        /// Why, in words.
        cause: String,
    },
    /// The generation is over: every pending collective fails with this cause.
    GenerationOver {
        /// Generation that is over.
        generation: Generation,
        /// Why, in words: "rank 5 (node `b`) died of SIGKILL".
        cause: String,
    },
    /// The worker seems to hang: it should say what it waits for, with [`ToAgent::State`].
    Describe,
    /// Answer to a key-value call.
    KvReply {
        /// Number of the call.
        call: u64,
        /// Value as base64, for a get that succeeded; absent for a put.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        value: Option<String>,
        /// Why it failed, in words; absent when it succeeded.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
}
