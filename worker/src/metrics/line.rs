//! One line of `metrics.jsonl`.

use serde::{Deserialize, Deserializer, Serialize};

/// What rank 0 records after each step.
///
/// `step` counts finished steps: the first line has 1, and a checkpoint of step `N` belongs to lines `1..=N`.
/// A number that is not finite is written as `null`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MetricsLine {
    /// Steps finished, this one included.
    pub step: u64,
    /// Passes over the data so far, as a fraction.
    pub epoch: f64,
    /// Training loss, mean over all ranks, nats per token.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Validation loss, nats per token; only after a validation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// Learning rate of this step.
    pub lr: f64,
    /// Global norm of the gradient before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// Steps without effect, because loss or gradient was not finite, since this life of the run began.
    pub skipped: u64,
    /// Tokens consumed by all ranks since the run began.
    pub tokens: u64,
    /// Tokens a second in this step, over all ranks.
    pub tokens_per_s: f64,
    /// Wall time of the step.
    pub step_ms: f64,
    /// Part of it: reading samples.
    pub data_ms: f64,
    /// Part of it: forward, without waiting for communication.
    pub forward_ms: f64,
    /// Part of it: backward, without waiting for communication.
    pub backward_ms: f64,
    /// Averaging of gradients and gathering of parameters, waits for other ranks included, hidden behind arithmetic or
    /// not.
    pub comm_ms: f64,
    /// Part of the step: waits for it, of the host or of the stream that computes, wherever they are: what nothing else
    /// hid.
    pub comm_exposed_ms: f64,
    /// Part of the step: telling the other ranks losses and norms, as far as backward did not hide it; a rank also
    /// waits for slower ones here.
    pub share_ms: f64,
    /// Part of it: clipping and the optimizer.
    pub optimizer_ms: f64,
    /// Before it: time for which checkpoints held training up since the step before.
    pub checkpoint_ms: f64,
    /// Bytes that this rank moved between itself and others in this step, counted at the transport as
    /// [`crate::collective::WireBytes`] says.
    pub wire_bytes: WireBytes,
    /// Number of ranks.
    pub world_size: u32,
    /// Generation of the job.
    pub generation: u64,
    /// Bytes of this rank.
    pub memory: Memory,
}

/// `null` is what became of a number that is not finite.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Bytes moved between ranks, by what they carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WireBytes {
    /// Gradients.
    pub grads: u64,
    /// Parameters.
    pub params: u64,
    /// Everything else.
    pub other: u64,
}

/// Bytes held, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Parameters.
    pub params: u64,
    /// Gradients.
    pub grads: u64,
    /// Moments and master weights.
    pub optimizer: u64,
    /// The same in memory of the host beside a GPU, with the page-locked memory through which updates go; 0 elsewhere.
    pub optimizer_host: u64,
    /// Activations and their gradients: the pool that they share, which keeps the size of its peak.
    pub activations: u64,
    /// Parameters gathered at the moment; 0 where every rank holds all of them.
    pub gathered: u64,
    /// Host memory for the copy of what is being saved, set aside at the start.
    pub checkpoint: u64,
    /// Most bytes of a GPU's memory that this rank held at one time; 0 on the processor.
    pub device_peak: u64,
    /// Largest resident set of the process so far.
    pub peak_rss: u64,
    /// Proportional set: shared pages count by their share. Both as of at most a second ago.
    pub pss: u64,
}
