//! The control socket between an agent and one worker: newline-delimited JSON, version 1.
//!
//! The agent listens on an abstract Unix address, given to the worker as `DDP_CONTROL` (`@name`), and
//! checks that the peer runs under the same user. A line is one message, at most [`MAX_LINE_BYTES`]
//! long. The worker speaks first, with [`ToAgent::Hello`]; the agent answers with [`ToWorker::Assignment`].
//! Unknown fields are ignored and an unknown `type` is skipped, so that both sides may be of different
//! builds. A client is 20 lines in any language.
//!
//! A worker may have [`MAX_CALLS`] key-value calls under way; answers come in any order, by number:
//!
//! ```text
//! {"type":"kv_put","call":1,"key":"id","value":"c2VjcmV0"}
//! {"type":"kv_reply","call":1}
//! {"type":"kv_get","call":2,"key":"id","timeout_ms":60000}
//! {"type":"kv_reply","call":2,"value":"c2VjcmV0"}
//! {"type":"kv_get","call":3,"key":"not there yet","timeout_ms":0}
//! {"type":"kv_reply","call":3,"error":"no rank wrote `not there yet` within 0.0 s","refusal":"not_written"}
//! {"type":"kv_gather","call":4,"prefix":"rank/","count":2,"timeout_ms":60000}
//! {"type":"kv_entries","call":4,"entries":{"rank/0":"YQ==","rank/1":"Yg=="}}
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::Generation;
use crate::trust::data_key::DataKey;
use crate::words::{duration, rate};

/// Version of the messages in this file.
pub const PROTOCOL: u32 = 1;

/// Longest line, its newline included. A longer one ends the connection.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// Longest value in the key-value store. Base64 in a line must fit [`MAX_LINE_BYTES`].
pub const MAX_VALUE_BYTES: usize = 512 << 10;

/// Key-value calls of one connection that may be under way: a worker waits for an answer before it makes one more,
/// which would be refused.
pub const MAX_CALLS: usize = 32;

/// Longest [`ToAgent::Heartbeat`]'s `activity`; the agent cuts a longer one.
pub const MAX_ACTIVITY_BYTES: usize = 256;

/// Most [`ToAgent::State`]'s `collectives`; the agent ignores those before the last ones.
pub const MAX_COLLECTIVES: usize = 256;

/// How long an agent tries to write an entry while the daemon is away.
pub const PUT_BOUND: Duration = Duration::from_secs(30);

/// What an agent may need for its answer to a get beyond the time that the worker gave: its own question to the daemon
/// takes a moment too, also where it is to look once. A worker that waits for less may miss the answer.
pub const ANSWER_GRACE: Duration = Duration::from_millis(500);

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the form that serde asks for")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The numbers of ranks that workers can go on with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// The number has to divide this one; none: any number does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks_divide: Option<u64>,
    /// It has to be a multiple of this one; none: any number is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks_multiple_of: Option<u64>,
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
        /// The speaker reads what the agent says, and ends when it is asked to: it is given time to do so
        /// before signals follow. One that only sends is stopped like a program without a connection.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        listens: bool,
        /// The speaker has left its generation, which is over, and parks: the answer is its assignment in the next one.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        outlives: bool,
    },
    /// "I live": sent at least every 2 seconds, and at the end of each step.
    Heartbeat {
        /// Steps finished so far.
        step: u64,
        /// What the worker is doing.
        phase: Phase,
        /// A heartbeat that a thread repeats without the program: how long ago the program last had something to say. 0
        /// for one that the program sent itself.
        #[serde(default, skip_serializing_if = "is_zero")]
        quiet_ms: u64,
        /// For the progress bar; rank 0 only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        progress: Option<Progress>,
        /// Waits for other ranks that last already, the longest first.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        waits: Vec<PeerWait>,
        /// Where in a step it is, of a worker that says so: `stage 1 of 2, forward of micro-batch 3`. At most
        /// [`MAX_ACTIVITY_BYTES`].
        #[serde(default, skip_serializing_if = "String::is_empty")]
        activity: String,
        /// Mean loss of the last step, of a program that sends no `progress`; rank 0's is shown.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        loss: Option<f64>,
        /// Seconds that it has waited for other ranks since its start, of a worker in lock-step with them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        waited_s: Option<f64>,
    },
    /// With which numbers of ranks the job can go on in another generation. Said once a generation, by one rank; as
    /// long as no rank has said it, any will do.
    Sizes(Sizes),
    /// Answer to [`ToWorker::Describe`].
    State {
        /// What it waits for and where its threads are, in lines.
        text: String,
        /// Its last collectives, oldest first, as PyTorch recorded them: [`MAX_COLLECTIVES`] at most.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        collectives: Vec<Collective>,
    },
    /// The process of another rank ended, or the data connection to it broke. [`ToAgent::Failure`] follows.
    PeerLost {
        /// `RANK` of the other.
        rank: u32,
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
        /// How long to wait for it. 0: look once.
        timeout_ms: u64,
    },
    /// Blocking read of all entries whose keys begin with a prefix. Answered by [`ToWorker::KvEntries`], in parts: the
    /// next one is asked for with the last key of the one before. A refusal is a [`ToWorker::KvReply`].
    KvGather {
        /// Number of the call, chosen by the worker, returned in the answer.
        call: u64,
        /// What the keys begin with.
        prefix: String,
        /// How many there must be. 0: answer at once, with those that are there.
        count: u32,
        /// Only keys after this one.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        after: String,
        /// How long to wait for them.
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

/// A collective that a script has called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collective {
    /// Name of the process group, the same on all of its ranks.
    pub group: String,
    /// It counts the collectives of the group.
    pub number: u64,
    /// `all_reduce of Float[4, 1024]`.
    pub operation: String,
    /// The rank does not wait in it.
    #[serde(default)]
    pub done: bool,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.done { "finished" } else { "waits in" };
        write!(
            f,
            "{state} {} (#{} of `{}`)",
            self.operation, self.number, self.group
        )
    }
}

/// A wait for other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerWait {
    /// The operation that waits: ``all-reduce #12 of `world` (bucket 3, 4096 bytes)``.
    pub operation: String,
    /// How long already.
    pub waited_ms: u64,
    /// Who is waited for: `rank 1`, `ranks 0 to 40, 42`. Empty where the worker does not know.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub peers: String,
}

impl fmt::Display for PeerWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = Duration::from_millis(self.waited_ms).as_secs_f64();
        write!(f, "{} has waited {seconds:.1} s", self.operation)?;
        match self.peers.as_str() {
            "" => Ok(()),
            peers => write!(f, " for {peers}"),
        }
    }
}

/// Numbers for the progress bar.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps of the whole run.
    pub steps: u64,
    /// Mean training loss of the last step, nats per token.
    pub loss: f64,
    /// Tokens a second over all ranks.
    pub tokens_per_s: f64,
    /// Seconds left at this speed.
    pub seconds_left: f64,
    /// Last validation loss, nats per token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// The step after which it was measured. A step line has none: its validation is of its own step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_step: Option<u64>,
    /// Learning rate of the last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Floating-point operations of the model a second, over all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_flops_per_s: Option<f64>,
    /// Their share of the peak rate of all GPUs, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
}

/// What the bar and the step lines show: `loss 2.346  val 2.300 @300  lr 1.6e-3  45.7k tok/s  1:23 left`, with the MFU in
/// place of the learning rate where it is known. It fits into 80 columns: in a line behind `[0] step` and the numbers of steps, without `val_step`; in a bar behind these numbers.
impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "loss {:.3}", self.loss)?;
        if let Some(val_loss) = self.val_loss {
            write!(f, "  val {val_loss:.3}")?;
            if let Some(step) = self.val_step {
                write!(f, " @{step}")?;
            }
        }
        match (self.mfu, self.lr) {
            (Some(mfu), _) => write!(f, "  MFU {:.1}%", mfu * 1e2)?,
            (None, Some(lr)) => write!(f, "  lr {lr:.1e}")?,
            (None, None) => {}
        }
        write!(f, "  {} tok/s", rate(self.tokens_per_s))?;
        // Also false for NaN.
        if self.seconds_left > 0.0 && self.seconds_left.is_finite() {
            write!(f, "  {} left", duration(self.seconds_left))?;
        }
        Ok(())
    }
}

/// The truth about a worker's place, in the form of the environment contract ([`crate::env`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerAssignment {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// Generation of this assignment.
    pub generation: Generation,
    /// The variables of the environment contract.
    pub env: BTreeMap<String, String>,
    /// Address under which other nodes reach this one.
    pub node_addr: String,
    /// With which native workers prove to each other that they are of this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_key: Option<DataKey>,
}

/// What an agent says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToWorker {
    /// The worker's place.
    Assignment(WorkerAssignment),
    /// Stop at the next step boundary, save, and exit with 0. A program that listens has half of `--shutdown-timeout`
    /// for that before it gets a signal; the native worker gets none.
    StopAtStepBoundary {
        /// Why, in words.
        cause: String,
        /// Nodes come or go: a worker that can outlive its generation may park there instead.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        stay: bool,
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
        /// Why it was not done, in words for people; absent when it was.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// The same for programs; there whenever `error` is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        refusal: Option<KvRefusal>,
    },
    /// Answer to a gather.
    KvEntries {
        /// Number of the call.
        call: u64,
        /// Keys and their values as base64: as many as fit a line.
        entries: BTreeMap<String, String>,
        /// More follow after the last of these keys.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        more: bool,
    },
}

/// Why a key-value call was not done: what a program has to tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvRefusal {
    /// A get: no rank has written the entry yet, and the time that the call gave is over. No failure: ask again as long
    /// as there is time.
    NotWritten,
    /// A put: the entry has another value already.
    Conflict,
    /// The generation is over.
    Superseded,
    /// The daemon could not be asked in time. It may be, later.
    Unavailable,
    /// Anything else, also what newer agents say. To ask again does not help.
    #[serde(other)]
    Other,
}

/// A time that is to be waited for, in milliseconds: rounded up, so that who has waited for it has waited long enough.
pub const fn whole_ms(time: Duration) -> u64 {
    time.as_nanos().div_ceil(1_000_000) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_fits_a_line_of_80_columns() {
        let mut progress = Progress {
            steps: 600_000,
            loss: 3.280_94,
            tokens_per_s: 45_678.0,
            seconds_left: 18_760.0,
            val_loss: Some(3.29),
            val_step: None,
            lr: Some(6e-4),
            model_flops_per_s: None,
            mfu: None,
        };
        let line = format!("[0] step 100000/600000 {progress}");
        assert_eq!(
            line,
            "[0] step 100000/600000 loss 3.281  val 3.290  lr 6.0e-4  45.7k tok/s  5h12m left"
        );
        assert_eq!(line.len(), 80);
        progress.val_step = Some(100_000);
        let bar = format!("100000/600000 {progress}");
        assert_eq!(
            bar,
            "100000/600000 loss 3.281  val 3.290 @100000  lr 6.0e-4  45.7k tok/s  5h12m left"
        );
        assert!(bar.len() < 80, "{bar}");
        progress.mfu = Some(0.412);
        assert_eq!(
            format!("100000/600000 {progress}"),
            "100000/600000 loss 3.281  val 3.290 @100000  MFU 41.2%  45.7k tok/s  5h12m left"
        );
        (progress.val_loss, progress.val_step, progress.lr, progress.mfu) = (None, None, None, None);
        (progress.tokens_per_s, progress.seconds_left) = (900.0, f64::NAN);
        assert_eq!(progress.to_string(), "loss 3.281  900 tok/s");
    }

    #[test]
    fn a_refusal_is_a_word_and_unknown_words_are_refusals_too() {
        let reply = |refusal: &str| {
            let line = format!(r#"{{"type":"kv_reply","call":4,"error":"words","refusal":"{refusal}"}}"#);
            serde_json::from_str::<ToWorker>(&line).unwrap()
        };
        let expected = |refusal| ToWorker::KvReply {
            call: 4,
            value: None,
            error: Some("words".into()),
            refusal: Some(refusal),
        };
        assert_eq!(reply("not_written"), expected(KvRefusal::NotWritten));
        assert_eq!(reply("too_blue"), expected(KvRefusal::Other));
    }

    #[test]
    fn no_wait_is_cut_short_by_its_unit() {
        assert_eq!(whole_ms(Duration::from_nanos(49_990_001)), 50);
        assert_eq!(whole_ms(Duration::from_millis(50)), 50);
        assert_eq!(whole_ms(Duration::ZERO), 0);
    }
}
