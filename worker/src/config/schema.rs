//! The sections of `train.yaml`. Values that do not exist yet in this build are not in these types.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

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
}

impl Default for Run {
    fn default() -> Self {
        Self {
            name: "train".into(),
            out_dir: None,
            seed: 1337,
            resume: Resume::Never,
            overwrite: false,
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

/// `data:`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Training text; a relative path counts from the YAML's folder.
    pub train: PathBuf,
    /// Validation text; default: the last tenth of `train`, held out.
    #[serde(default)]
    pub val: Option<PathBuf>,
    /// How text becomes tokens.
    #[serde(default)]
    pub tokenizer: Tokenizer,
    /// Order of the samples.
    #[serde(default)]
    pub order: Order,
}

/// `data.tokenizer`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tokenizer {
    /// Every byte is a token; vocabulary 256.
    #[default]
    Bytes,
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
    /// Largest global norm of the gradient; none: not clipped.
    pub grad_clip: Option<f32>,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The learning rate over the steps.
    pub schedule: Schedule,
    /// Steps between validations; 0: only at the end.
    pub eval_every: u64,
    /// Steps between checkpoints; 0: only at the end.
    pub checkpoint_every: u64,
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
            grad_clip: Some(1.0),
            optimizer: Optimizer::default(),
            schedule: Schedule::default(),
            eval_every: 0,
            checkpoint_every: 0,
            verify_every: 0,
            threads: None,
        }
    }
}

/// `train.precision`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f32.
    #[default]
    F32,
}

/// `train.optimizer`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Optimizer {
    /// Which one.
    pub kind: OptimizerKind,
    /// Peak learning rate.
    pub lr: f32,
    /// Decay of the two moments.
    pub betas: [f32; 2],
    /// Added to the denominator.
    pub eps: f32,
    /// Decoupled weight decay; norms and biases have none.
    pub weight_decay: f32,
}

impl Default for Optimizer {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::Adamw,
            lr: 3e-4,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
        }
    }
}

/// `train.optimizer.kind`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Loshchilov & Hutter 2019.
    #[default]
    Adamw,
}

/// `train.schedule`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Schedule {
    /// Shape after the warm-up.
    pub kind: LearningRate,
    /// Steps from 0 to the peak, linearly.
    pub warmup_steps: u64,
    /// Learning rate at the last step.
    pub min_lr: f32,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            kind: LearningRate::Cosine,
            warmup_steps: 0,
            min_lr: 0.0,
        }
    }
}

/// `train.schedule.kind`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LearningRate {
    /// Half a cosine from the peak to `min_lr`.
    #[default]
    Cosine,
    /// The peak for ever.
    Constant,
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
    /// How gradients are synchronised.
    pub sync: Sync,
    /// Communicate while backward runs.
    pub overlap: bool,
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
            sync: Sync::Bucketed,
            overlap: true,
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

/// `parallel.backend`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The best that this build and machine have.
    #[default]
    Auto,
    /// CPU, shared memory and TCP.
    Cpu,
}
