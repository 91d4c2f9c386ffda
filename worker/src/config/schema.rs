//! The sections of `train.yaml` as types. [`super::keys`] says which values each key takes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::optimizer::{OptimizerConfig, Schedule};
use super::values::{Paths, ShardGroup, StepRange, Tokenizer};

/// A whole `train.yaml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Where the run's files go.
    #[serde(default)]
    pub run: Run,
    /// The network.
    pub model: Model,
    /// The tokens.
    pub data: Data,
    /// Steps, batch, optimizer.
    #[serde(default)]
    pub train: Train,
    /// How ranks work together.
    #[serde(default)]
    pub parallel: Parallel,
    /// Defaults of the command-line flags, by name; read by the launcher.
    #[serde(default)]
    pub launch: std::collections::BTreeMap<String, serde_json::Value>,
}

/// `run:`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Run {
    /// Name of the run; part of the default `out_dir`.
    pub name: String,
    /// Folder for metrics, checkpoints and logs; default `runs/<name>/<run id>`.
    pub out_dir: Option<PathBuf>,
    /// Seed of initial values, data order and everything random.
    pub seed: u64,
    /// What to do when `out_dir` holds a run.
    pub resume: Resume,
    /// Delete the run that `out_dir` holds.
    pub overwrite: bool,
    /// Steps of which a timeline is written.
    pub timeline: Option<StepRange>,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            name: "train".into(),
            out_dir: None,
            seed: 1337,
            resume: Resume::Never,
            overwrite: false,
            timeline: None,
        }
    }
}

/// `run.resume`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Resume {
    /// A folder that holds a run is refused. (Restarts within a job always resume.)
    #[default]
    Never,
    /// Resume if there is a checkpoint, else start.
    Auto,
    /// Resume, or fail.
    Require,
}

/// `model:`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Architecture.
    pub kind: ModelKind,
    /// Number of blocks.
    pub n_layer: usize,
    /// Attention heads; not for `mlp`.
    #[serde(default = "one")]
    pub n_head: usize,
    /// Channels.
    pub n_embd: usize,
    /// Positions in a sample.
    pub block_size: usize,
    /// Size of the vocabulary; default: the tokenizer's.
    #[serde(default)]
    pub vocab_size: Option<usize>,
    /// Weights to begin with, as [`crate::pretrained`] reads them; none: random ones, from the seed. A relative path counts
    /// from the YAML's folder.
    #[serde(default)]
    pub init_from: Option<PathBuf>,
    /// Share of the embedding, of attention's probabilities and of what each layer adds to the residual stream that is
    /// dropped in training.
    #[serde(default)]
    pub dropout: f32,
}

const fn one() -> usize {
    1
}

/// `model.kind`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// GPT-2.
    Gpt2,
    /// The same without attention: every position sees itself only.
    Mlp,
}

impl ModelKind {
    /// The words of the key.
    pub(super) const WORDS: &'static [&'static str] = &["gpt2", "mlp"];
}

/// `data:`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Training data: a text, or token files; a relative path counts from the YAML's folder.
    pub train: Paths,
    /// Validation data; default: the last tenth of `train`, held out.
    #[serde(default)]
    pub val: Option<Paths>,
    /// How text becomes tokens.
    #[serde(default)]
    pub tokenizer: Tokenizer,
    /// Order of the samples.
    #[serde(default)]
    pub order: Order,
    /// What becomes of the samples at the end of an epoch that do not fill a global batch.
    #[serde(default)]
    pub last_batch: LastBatch,
}

/// `data.order`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// A new permutation each epoch, from (seed, epoch).
    #[default]
    Shuffled,
    /// As they stand in the file.
    Sequential,
}

/// `data.last_batch`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LastBatch {
    /// The next epoch begins within the batch.
    #[default]
    Wrap,
    /// They are a smaller batch of their own, in which every sample weighs the same.
    Short,
}

/// `train:`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Train {
    /// Optimizer steps of the run.
    pub steps: u64,
    /// Samples of one forward pass on one rank.
    pub micro_batch: usize,
    /// Micro-batches of one step on one rank.
    pub grad_accumulation: usize,
    /// Arithmetic and storage.
    pub precision: Precision,
    /// What to do about a step whose loss or gradient is not finite.
    pub on_nonfinite: OnNonFinite,
    /// With `skip`: most steps in a row that may be skipped.
    pub max_skips: u64,
    /// What backward computes again instead of keeping it.
    pub recompute: Recompute,
    /// Largest global norm of the gradient; none: not clipped.
    pub grad_clip: Option<f32>,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// Where the optimizer's state is kept.
    pub offload: Offload,
    /// The learning rate over the steps.
    pub schedule: Schedule,
    /// What becomes of the global batch on another number of ranks.
    pub rescale: Rescale,
    /// What the size of the global batch does to the learning rate.
    pub lr_scaling: LrScaling,
    /// With `linear`: samples of the global batch that `optimizer.lr` is meant for.
    pub base_batch: Option<u64>,
    /// Steps between validations; 0: only at the end.
    pub eval_every: u64,
    /// Steps between checkpoints; 0: only at the end.
    pub checkpoint_every: u64,
    /// Write checkpoints while training goes on, from a copy in host memory.
    pub checkpoint_async: bool,
    /// A disk that takes nothing of a checkpoint for so long is given up.
    pub checkpoint_timeout_s: f64,
    /// Which checkpoints stay; none: all of them.
    pub checkpoint_keep: Option<CheckpointKeep>,
    /// Steps between comparisons of all parameters across ranks; 0: never.
    pub verify_every: u64,
    /// Compute threads of a rank; none: `OMP_NUM_THREADS`, else 1.
    pub threads: Option<usize>,
}

impl Default for Train {
    fn default() -> Self {
        Self {
            steps: 1000,
            micro_batch: 8,
            grad_accumulation: 1,
            precision: Precision::F32,
            on_nonfinite: OnNonFinite::Stop,
            max_skips: 10,
            recompute: Recompute::None,
            grad_clip: Some(1.0),
            optimizer: OptimizerConfig::default(),
            offload: Offload::default(),
            schedule: Schedule::default(),
            rescale: Rescale::default(),
            lr_scaling: LrScaling::None,
            base_batch: None,
            eval_every: 0,
            checkpoint_every: 0,
            checkpoint_async: true,
            checkpoint_timeout_s: 300.0,
            checkpoint_keep: None,
            verify_every: 0,
            threads: None,
        }
    }
}

/// `train.checkpoint_keep`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointKeep {
    /// So many of the newest.
    pub last: usize,
    /// And those whose step is a multiple of it.
    #[serde(default)]
    pub every: Option<u64>,
}

/// `train.precision`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f32.
    #[default]
    F32,
    /// Parameters and activations in bf16, with f32 masters and moments.
    Bf16,
    /// As f32, but matrix products round what they multiply to 10 bits of mantissa: GPUs only.
    Tf32,
}

/// `train.on_nonfinite`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnNonFinite {
    /// End the run, and say who saw it first.
    #[default]
    Stop,
    /// Leave parameters and moments as they are, and go on with the next step.
    Skip,
}

/// `train.recompute`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// What takes much memory and little arithmetic.
    Selective,
    /// Every block, from its input.
    Full,
}

/// `train.lr_scaling`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LrScaling {
    /// Nothing.
    #[default]
    None,
    /// Goyal et al. 2017: it grows in proportion.
    Linear,
}

/// `train.offload`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Offload {
    /// State of the optimizer.
    pub optimizer: OptimizerOffload,
    /// Folder of the file system that takes it; default: the run's.
    pub dir: Option<PathBuf>,
}

/// `train.offload.optimizer`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerOffload {
    /// In memory, beside the parameters.
    #[default]
    None,
    /// In a mapped file without a name.
    File,
    /// In memory of the host, also where a GPU trains.
    Host,
}

/// `train.rescale`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rescale {
    /// It stays what it was: the accumulation changes. Where no accumulation does that, the run is refused.
    #[default]
    KeepGlobalBatch,
    /// It changes with the number of ranks: micro-batch and accumulation stay.
    KeepMicroBatch,
}

/// `parallel:`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parallel {
    /// What every rank holds.
    pub strategy: Strategy,
    /// What `zero2` and `zero3` hold of the gradients between the micro-batches of a step.
    pub accumulate: Accumulate,
    /// `zero3`: release the parameters of a block after its forward, and gather them again for its backward.
    pub reshard_after_forward: bool,
    /// `zero3`: groups of fewer elements stay gathered from step to step.
    pub persist_below: usize,
    /// Type of the gradients while they are averaged.
    pub reduce_dtype: ReduceDtype,
    /// Ranks that hold one copy of the state; none: all of them.
    pub shard_group: Option<ShardGroup>,
    /// How gradients are synchronised.
    pub sync: Sync,
    /// Communicate while backward runs.
    pub overlap: bool,
    /// What to do about a parameter that takes no part in a backward.
    pub unused: Unused,
    /// Size of a gradient bucket, MiB.
    pub bucket_mb: f64,
    /// Size of the first bucket, MiB: smaller, so that communication starts early.
    pub first_bucket_mb: f64,
    /// Device and transport.
    pub backend: Backend,
    /// Seconds that a collective waits for the other ranks.
    pub timeout_s: f64,
}

impl Default for Parallel {
    fn default() -> Self {
        Self {
            strategy: Strategy::Ddp,
            accumulate: Accumulate::Sharded,
            reshard_after_forward: true,
            persist_below: 0,
            reduce_dtype: ReduceDtype::F32,
            shard_group: None,
            sync: Sync::Bucketed,
            overlap: true,
            unused: Unused::Error,
            bucket_mb: 25.0,
            first_bucket_mb: 1.0,
            backend: Backend::Auto,
            timeout_s: 300.0,
        }
    }
}

/// `parallel.strategy`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// Everything on every rank; gradients are averaged.
    #[default]
    Ddp,
    /// The optimizer's state is sharded.
    Zero1,
    /// And the gradients.
    Zero2,
    /// And the parameters, gathered block by block.
    Zero3,
}

/// `parallel.accumulate`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accumulate {
    /// This rank's shard: least memory, gradients are reduced in every micro-batch.
    #[default]
    Sharded,
    /// All of them: gradients are reduced once a step.
    Full,
}

/// `parallel.reduce_dtype`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceDtype {
    /// Exact to f32.
    #[default]
    F32,
    /// Half the traffic, and half the memory of gradients that no micro-batch is added to; each rank's gradients are rounded,
    /// and their sum, by NCCL at each hop. With `train.precision: bf16` only.
    Bf16,
}

/// `parallel.sync`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sync {
    /// Buckets, each as soon as its gradients are ready.
    #[default]
    Bucketed,
    /// Each gradient as soon as it is ready.
    PerParameter,
    /// One all-reduce of everything after backward.
    Naive,
}

/// `parallel.unused`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unused {
    /// End the run, and name it and its block.
    #[default]
    Error,
    /// Its gradient is zero, on the ranks and in the micro-batches that do not use it.
    Zero,
}

/// `parallel.backend`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// `nccl` where the driver shows a GPU, else `cpu`.
    #[default]
    Auto,
    /// CPU, shared memory and TCP.
    Cpu,
    /// One GPU a rank, and NCCL between them.
    Nccl,
}
