//! The sections of `train.yaml` as types. [`super::keys`] has the default and the range of each key.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A whole `train.yaml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Where the run's files go.
    pub run: Run,
    /// The network.
    pub model: Model,
    /// The tokens.
    pub data: Data,
    /// Steps, batch, optimizer.
    pub train: Train,
    /// How ranks work together.
    pub parallel: Parallel,
    /// Defaults of the command-line flags, by name; read by the launcher.
    #[serde(default)]
    pub launch: std::collections::BTreeMap<String, serde_json::Value>,
}

/// `run:`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
    /// Write event files for TensorBoard.
    pub tensorboard: bool,
}

/// `run.resume`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Resume {
    /// A folder that holds a run is refused. (Restarts within a job always resume.)
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
    pub n_head: usize,
    /// Heads of keys and values, each of which several query heads read (Ainslie et al. 2023); none: [`Model::n_head`].
    pub n_kv_head: Option<usize>,
    /// Channels.
    pub n_embd: usize,
    /// Width of the feed-forward layers; none: that of the kind.
    pub n_inner: Option<usize>,
    /// Positions in a sample.
    pub block_size: usize,
    /// Size of the vocabulary; default: the tokenizer's.
    pub vocab_size: Option<usize>,
    /// Added to the variance, or to the mean square, that a norm divides by.
    pub norm_eps: f64,
    /// Base of the angles of rotary positions.
    pub rope_theta: f64,
    /// Longer positions than the angles were trained for; none: as they are.
    pub rope_scaling: Option<RopeScaling>,
    /// The head's matrix is the token embedding; none: as the kind has it.
    pub tied: Option<bool>,
    /// Weights to begin with, as [`crate::pretrained`] reads them; none: random ones, from the seed. A relative path counts
    /// from the YAML's folder.
    pub init_from: Option<PathBuf>,
    /// Share of the embedding, of attention's probabilities and of what each layer adds to the residual stream that is
    /// dropped in training.
    pub dropout: f32,
}

impl Model {
    /// [`Model::n_kv_head`], or its default.
    pub fn kv_heads(&self) -> usize {
        self.n_kv_head.unwrap_or(self.n_head)
    }

    /// [`Model::n_inner`], or its default: 4 · channels; with SwiGLU 8/3 · channels, rounded up to a multiple of 256
    /// where that is less than the whole (Touvron et al. 2023).
    pub fn inner(&self) -> usize {
        self.n_inner.unwrap_or_else(|| match self.kind {
            ModelKind::Gpt2 | ModelKind::Mlp => self.n_embd.saturating_mul(4),
            ModelKind::Llama => {
                let width = self.n_embd.saturating_mul(8) / 3;
                width
                    .checked_next_multiple_of(if width < 256 { 8 } else { 256 })
                    .unwrap_or(width)
            }
        })
    }

    /// [`Model::tied`], or its default.
    pub fn is_tied(&self) -> bool {
        self.tied.unwrap_or(self.kind == ModelKind::Gpt2)
    }
}

/// `model.rope_scaling`: slower rotation of the channels that turn slowly, as in Llama 3.1 (Grattafiori et al. 2024).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// By how much slower.
    pub factor: f64,
    /// Channels that turn less often than this within the original positions are slowed by all of it.
    pub low_freq_factor: f64,
    /// Channels that turn more often than this are left alone.
    pub high_freq_factor: f64,
    /// Positions that the model was trained for before.
    pub original_positions: usize,
}

impl RopeScaling {
    /// True if all numbers are above 0, and the lower factor below the higher one.
    pub fn is_valid(&self) -> bool {
        let numbers = [self.factor, self.low_freq_factor, self.high_freq_factor];
        numbers.iter().all(|x| x.is_finite() && *x > 0.0)
            && self.low_freq_factor < self.high_freq_factor
            && self.original_positions > 0
    }
}

/// `model.kind`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// GPT-2.
    Gpt2,
    /// Llama: RMS norms, rotary positions, SwiGLU, grouped queries, no biases.
    Llama,
    /// The same without attention: every position sees itself only.
    Mlp,
}

impl ModelKind {
    /// The words of the key.
    pub(super) const WORDS: &'static [&'static str] = &["gpt2", "llama", "mlp"];
}

/// `data:`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Training data: a text, or token files; a relative path counts from the YAML's folder.
    pub train: Paths,
    /// Validation data; default: the last tenth of `train`, held out.
    pub val: Option<Paths>,
    /// How text becomes tokens.
    pub tokenizer: Tokenizer,
    /// Order of the samples.
    pub order: Order,
    /// What becomes of the samples at the end of an epoch that do not fill a global batch.
    pub last_batch: LastBatch,
}

/// `data.order`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// A new permutation each epoch, from (seed, epoch).
    Shuffled,
    /// As they stand in the file.
    Sequential,
}

/// `data.last_batch`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LastBatch {
    /// The next epoch begins within the batch.
    Wrap,
    /// They are a smaller batch of their own, in which every sample weighs the same.
    Short,
}

/// `train:`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
    /// Steps between step lines on the console; none: as many as make one a second at first, fewer later.
    pub log_every: Option<u64>,
    /// Compute threads of a rank; none: `OMP_NUM_THREADS`, else 1.
    pub threads: Option<usize>,
}

/// `train.optimizer`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Which one.
    pub kind: OptimizerKind,
    /// Peak learning rate.
    pub lr: f32,
    /// Decays of the moments; none: [`OptimizerConfig::betas`].
    pub betas: Option<[f32; 2]>,
    /// Added to the denominator.
    pub eps: f32,
    /// λ; norms and biases have none, unless a group has its own.
    pub weight_decay: f32,
    /// Decay of the momentum; none: [`OptimizerConfig::momentum`].
    pub momentum: Option<f32>,
    /// Nesterov's momentum; none: [`OptimizerConfig::nesterov`].
    pub nesterov: Option<bool>,
    /// Parameters with numbers of their own. The first group whose pattern matches counts.
    pub groups: Vec<OptimizerGroup>,
}

impl OptimizerConfig {
    /// Decays of the moments.
    pub fn betas(&self) -> [f32; 2] {
        self.betas.unwrap_or(match self.kind {
            OptimizerKind::Lion => [0.9, 0.99],
            OptimizerKind::Adamw | OptimizerKind::Sgd | OptimizerKind::Muon => [0.9, 0.95],
        })
    }

    /// Decay of the momentum.
    pub fn momentum(&self) -> f32 {
        self.momentum.unwrap_or(match self.kind {
            OptimizerKind::Muon => 0.95,
            OptimizerKind::Adamw | OptimizerKind::Lion | OptimizerKind::Sgd => 0.9,
        })
    }

    /// Nesterov's momentum.
    pub fn nesterov(&self) -> bool {
        self.nesterov.unwrap_or(self.kind == OptimizerKind::Muon)
    }

    /// Keys of `train.optimizer` that its kind reads, beside those that every kind reads.
    pub(super) const fn own_keys(&self) -> &'static [&'static str] {
        match self.kind {
            OptimizerKind::Adamw => &["train.optimizer.betas", "train.optimizer.eps"],
            OptimizerKind::Lion => &["train.optimizer.betas"],
            OptimizerKind::Sgd => &["train.optimizer.momentum", "train.optimizer.nesterov"],
            OptimizerKind::Muon => &[
                "train.optimizer.betas",
                "train.optimizer.eps",
                "train.optimizer.momentum",
                "train.optimizer.nesterov",
            ],
        }
    }
}

/// `train.optimizer.kind`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Loshchilov & Hutter 2019.
    Adamw,
    /// Chen et al. 2023.
    Lion,
    /// As `torch.optim.SGD`: with momentum, and weight decay as a part of the gradient.
    Sgd,
    /// Jordan et al. 2024, of the matrices of the blocks; AdamW of all other parameters.
    Muon,
}

impl OptimizerKind {
    /// The words of the key.
    pub(super) const WORDS: &'static [&'static str] = &["adamw", "lion", "sgd", "muon"];
}

/// One of `train.optimizer.groups`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerGroup {
    /// Pattern of parameter names; `*` stands for any characters.
    pub params: String,
    /// Factor of the learning rate.
    #[serde(default = "one")]
    pub lr_scale: f32,
    /// λ of all of them; none: as without the group.
    #[serde(default)]
    pub weight_decay: Option<f32>,
}

const fn one() -> f32 {
    1.0
}

impl OptimizerGroup {
    /// Most groups.
    pub const MOST: usize = 15;

    /// True if the pattern matches the name of a parameter.
    pub fn matches(&self, name: &str) -> bool {
        star_matches(self.params.as_bytes(), name.as_bytes())
    }
}

/// True if `name` is `pattern` with something for each of its stars. What is between two stars is taken where it
/// occurs first: a later place leaves less for the rest.
pub(crate) fn star_matches(pattern: &[u8], name: &[u8]) -> bool {
    let mut parts = pattern.split(|byte| *byte == b'*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&[u8]> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        if part.is_empty() {
            continue;
        }
        let Some(at) = rest.windows(part.len()).position(|window| window == part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// `train.schedule`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Shape after the warm-up.
    pub kind: LearningRate,
    /// Steps from 0 to the peak, linearly.
    pub warmup_steps: u64,
    /// Of `wsd`: steps of the decay, the last ones of the run.
    pub decay_steps: Option<u64>,
    /// Learning rate at the last step; of `inverse_sqrt` the least one.
    pub min_lr: f32,
}

/// `train.schedule.kind`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LearningRate {
    /// Half a cosine from the peak to `min_lr`.
    Cosine,
    /// A line from the peak to `min_lr`.
    Linear,
    /// The peak for ever.
    Constant,
    /// Warm-up, stable, decay: the peak, then a line to `min_lr`.
    Wsd,
    /// With the root of the number of steps, from the peak.
    InverseSqrt,
}

/// `train.checkpoint_keep`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointKeep {
    /// So many of the newest.
    pub last: usize,
    /// And those whose step is a multiple of it.
    pub every: Option<u64>,
}

/// `train.precision`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f32.
    F32,
    /// Parameters and activations in bf16, with f32 masters and moments.
    Bf16,
    /// As f32, but matrix products round what they multiply to 10 bits of mantissa: GPUs only.
    Tf32,
}

/// `train.on_nonfinite`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnNonFinite {
    /// End the run, and name who saw it first.
    Stop,
    /// Leave parameters and moments as they are, and go on with the next step.
    Skip,
}

/// `train.recompute`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing that takes a pass of its own.
    Never,
    /// No products: what is computed element by element.
    None,
    /// What takes much memory and little arithmetic.
    Selective,
    /// Every block, from its input.
    Full,
}

/// `train.lr_scaling`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LrScaling {
    /// Nothing.
    None,
    /// Goyal et al. 2017: it grows in proportion.
    Linear,
}

/// `train.offload`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offload {
    /// State of the optimizer.
    pub optimizer: OptimizerOffload,
    /// Folder of the file system that takes it; default: the run's.
    pub dir: Option<PathBuf>,
}

/// `train.offload.optimizer`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerOffload {
    /// In memory, beside the parameters.
    None,
    /// In a mapped file without a name.
    File,
    /// In memory of the host, also where a GPU trains.
    Host,
}

/// `train.rescale`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rescale {
    /// It stays what it was: the accumulation changes. Where no accumulation does that, the run is refused.
    KeepGlobalBatch,
    /// It changes with the number of ranks: micro-batch and accumulation stay.
    KeepMicroBatch,
}

/// `parallel:`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "keys of a file, independent of each other"
)]
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
    /// Data-parallel ranks that hold one copy of the state; none: all of them.
    pub shard_group: Option<ShardGroup>,
    /// Ranks of a tensor group: each holds a part of every matrix.
    pub tensor: usize,
    /// Norms and the residual stream hold a part of the rows on each rank of a tensor group.
    pub sequence: bool,
    /// A tensor group may span nodes.
    pub tensor_across_nodes: bool,
    /// Stages of a pipeline.
    pub pipeline: Pipeline,
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

/// `parallel.pipeline`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pipeline {
    /// Ranks of a pipeline.
    pub stages: usize,
    /// In which order they compute.
    pub schedule: PipelineSchedule,
    /// Parts of the model on each rank; none: as few as the schedule works with.
    pub chunks: Option<usize>,
    /// Layers of each part, in the order of the model; none: divided by cost.
    pub layers: Option<Vec<usize>>,
}

/// `parallel.pipeline.schedule`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PipelineSchedule {
    /// All forwards, then all backwards (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward (Narayanan et al. 2019; PipeDream-flush).
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B with several chunks a rank (Narayanan et al. 2021).
    #[serde(rename = "interleaved")]
    Interleaved,
    /// Weight gradients fill the bubble (Qi et al. 2023).
    #[serde(rename = "zb-h1")]
    ZbH1,
    /// The same with two chunks a rank in a V (Qi et al. 2024).
    #[serde(rename = "zbv")]
    Zbv,
    /// What fits next, for few micro-batches.
    #[serde(rename = "greedy")]
    Greedy,
}

impl PipelineSchedule {
    /// The words of the key.
    pub(crate) const WORDS: &'static [&'static str] =
        &["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "greedy"];
}

/// `parallel.strategy`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// Everything on every rank; gradients are averaged.
    Ddp,
    /// The optimizer's state is sharded.
    Zero1,
    /// And the gradients.
    Zero2,
    /// And the parameters, gathered block by block.
    Zero3,
}

/// `parallel.accumulate`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accumulate {
    /// This rank's shard: least memory, gradients are reduced in every micro-batch.
    Sharded,
    /// All of them: gradients are reduced once a step.
    Full,
}

/// `parallel.reduce_dtype`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceDtype {
    /// Exact to f32.
    F32,
    /// Half the traffic, and half the memory of gradients that no micro-batch is added to; each rank's gradients are rounded,
    /// and their sum, by NCCL at each hop. With `train.precision: bf16` only.
    Bf16,
}

/// `parallel.sync`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sync {
    /// Buckets, each as soon as its gradients are ready.
    Bucketed,
    /// Each gradient as soon as it is ready.
    PerParameter,
    /// One all-reduce of everything after backward.
    Naive,
}

/// `parallel.backend`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// `nccl` where the driver shows a GPU, else `cpu`.
    Auto,
    /// CPU, shared memory and TCP.
    Cpu,
    /// One GPU a rank, and NCCL between them.
    Nccl,
}

/// `data.train` and `data.val`: one file, or several that follow each other. A `*` in the last part of a path stands for
/// any characters: see [`crate::data::matching()`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Paths {
    /// As a string.
    One(PathBuf),
    /// As a list.
    Several(Vec<PathBuf>),
}

impl From<PathBuf> for Paths {
    fn from(path: PathBuf) -> Self {
        Self::One(path)
    }
}

impl Paths {
    /// In the order in which their contents follow each other.
    pub fn iter(&self) -> impl Iterator<Item = &Path> {
        let paths = match self {
            Self::One(path) => std::slice::from_ref(path),
            Self::Several(paths) => paths,
        };
        paths.iter().map(PathBuf::as_path)
    }

    /// Relative ones count from `folder`.
    #[must_use]
    pub(super) fn below(&self, folder: &Path) -> Self {
        match self {
            Self::One(path) => Self::One(folder.join(path)),
            Self::Several(paths) => Self::Several(paths.iter().map(|path| folder.join(path)).collect()),
        }
    }
}

/// `data.tokenizer`: how text becomes tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Tokenizer {
    /// Every byte is a token; vocabulary 256. The data are texts.
    Bytes,
    /// The byte-pair encoding of GPT-2 (Radford et al. 2019); vocabulary 50,257. The data are token files.
    Gpt2,
    /// That of a `tokenizer.json`, as Hugging Face's tokenizers write it. The data are token files.
    File(PathBuf),
}

/// The words that are no path.
const BYTES: &str = "bytes";
const GPT2: &str = "gpt2";
/// Extension of a tokenizer's file.
const EXTENSION: &str = "json";

impl Tokenizer {
    /// A relative path counts from `folder`.
    #[must_use]
    pub(super) fn below(&self, folder: &Path) -> Self {
        match self {
            Self::File(path) => Self::File(folder.join(path)),
            word => word.clone(),
        }
    }
}

impl fmt::Display for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes => f.write_str(BYTES),
            Self::Gpt2 => f.write_str(GPT2),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl TryFrom<String> for Tokenizer {
    type Error = String;

    /// From the word or the path that people write.
    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            BYTES => Ok(Self::Bytes),
            GPT2 => Ok(Self::Gpt2),
            path if Path::new(path).extension() == Some(EXTENSION.as_ref()) => Ok(Self::File(text.into())),
            _ => Err(format!("`{text}` is not a tokenizer")),
        }
    }
}

impl From<Tokenizer> for String {
    fn from(tokenizer: Tokenizer) -> Self {
        tokenizer.to_string()
    }
}

/// `run.timeline`: `10-12`, or `10` for one step. Steps count from 1, as in `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value", into = "String")]
pub struct StepRange {
    /// The first one.
    pub first: u64,
    /// The last one, not before the first.
    pub last: u64,
}

impl StepRange {
    /// As a range.
    pub fn steps(self) -> RangeInclusive<u64> {
        self.first..=self.last
    }

    /// How many.
    pub fn count(self) -> u64 {
        self.last - self.first + 1
    }
}

impl fmt::Display for StepRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last } = self;
        if first == last {
            write!(f, "{first}")
        } else {
            write!(f, "{first}-{last}")
        }
    }
}

impl TryFrom<serde_json::Value> for StepRange {
    type Error = String;

    fn try_from(value: serde_json::Value) -> Result<Self, String> {
        let text = value
            .as_str()
            .map_or_else(|| value.to_string(), ToOwned::to_owned);
        let (first, last) = text.split_once('-').unwrap_or((&text, &text));
        let step = |text: &str| text.trim().parse::<u64>().ok();
        match (step(first), step(last)) {
            (Some(first), Some(last)) if first > 0 && first <= last => Ok(Self { first, last }),
            _ => Err(format!("`{text}` is not a range of steps")),
        }
    }
}

impl From<StepRange> for String {
    fn from(range: StepRange) -> Self {
        range.to_string()
    }
}

/// `parallel.shard_group`: ranks that hold one copy of the state together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShardGroup {
    /// The ranks of a node.
    Node,
    /// So many neighbours.
    #[serde(untagged)]
    Ranks(usize),
}
