//! From a file and its overrides to a checked configuration: the table of keys, and rules over several keys. No other
//! file is opened.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use super::keys::{self, out_of_range};
use super::problem::{ConfigError, Problem, nearest_multiples};
use super::schema::{
    Accumulate, Experts, LearningRate, LrScaling, Model, ModelKind, OffloadTarget, OptimizerKind, Parallel,
    Pipeline, Precision, Resume, Run, Strategy, Sync, Train, TrainConfig, section,
};
use super::source::Source;
use super::tokenizer::Vocabulary;

/// Longest configuration file.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// A configuration that still knows where its values came from.
#[derive(Clone, Debug)]
pub struct Located {
    /// The configuration; its paths of `data` and `model.init_from` can be opened from the current
    /// directory.
    pub config: TrainConfig,
    /// The origin of each value.
    pub source: Source,
}

/// Reads the YAML at `path`, applies the overrides (`train.steps=20`) in order, and checks everything that needs neither
/// another file nor another rank. The caller then calls [`Located::complete`].
pub fn load_without_data(path: &Path, overrides: &[String]) -> Result<Located, ConfigError> {
    let source = Source::parse(path, &read(path)?, overrides)?;
    let values: Result<TrainConfig, _> = section("", keys::read(&source)?);
    let mut config = values.map_err(|error| source.locate(Problem::new("", error.to_string())))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let data = &mut config.data;
    data.train = data.train.below(folder);
    data.val = data.val.as_ref().map(|val| val.below(folder));
    data.tokenizer = data.tokenizer.below(folder);
    config.model.init_from = config.model.init_from.map(|weights| folder.join(weights));
    let broken = run(&config)
        .or_else(|| without_effect(&config))
        .or_else(|| offload(&config))
        .or_else(|| training(&config))
        .or_else(|| check_rows(&config).err())
        .or_else(|| expert_ranks(&config))
        .or_else(|| accumulate(&config, &source));
    match broken {
        Some(problem) => Err(source.locate(problem)),
        None => Ok(Located { config, source }),
    }
}

impl Located {
    /// Completes the configuration with the tokenizer's vocabulary, and checks the sizes of the model.
    pub fn complete(&mut self, vocabulary: Vocabulary) -> Result<(), ConfigError> {
        let Self { config, source } = self;
        let checked = checked_vocab(&config.model, vocabulary.size, config.parallel.tensor);
        config.vocabulary = Arc::new(vocabulary);
        checked.map(|_| ()).map_err(|mut problem| {
            // The number of channels is to blame only if the other number is not an override.
            if problem.key == "model.n_embd"
                && source.is_set("model.n_head")
                && !source.is_set("model.n_embd")
            {
                problem.key = "model.n_head".into();
            }
            source.locate(problem)
        })
    }

    /// Refuses a schedule without `stages`, which would train without a pipeline. `stages: 1` requests that explicitly. A search
    /// for layouts finds the stages itself.
    pub fn check_schedule(&self) -> Result<(), ConfigError> {
        let (key, stages) = ("parallel.pipeline.schedule", "parallel.pipeline.stages");
        let schedule = self.config.parallel.pipeline.schedule;
        if schedule == Pipeline::default().schedule || self.source.has(stages) {
            return Ok(());
        }
        let what = format!("`{key}` is set, but `{stages}` is not: there is no pipeline");
        let hint = format!("set `{stages}`, or leave `schedule` out");
        Err(self.source.locate(Problem::new(key, what).with_hint(hint)))
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let error = |what: String, hint: Option<&str>| ConfigError {
        place: path.display().to_string(),
        problem: Problem::new("", what).with_optional_hint(hint.map(ToOwned::to_owned)),
    };
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => error(
            "no such file".into(),
            Some("the path of the configuration is relative to the current directory"),
        ),
        _ => error(format!("cannot read the configuration: {e}"), None),
    };
    let file = std::fs::File::open(path).map_err(failed)?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err(error(
            "is a directory, expected a configuration: a YAML file".into(),
            Some("give the file in it, such as `train.yaml`"),
        ));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(error(
            format!("longer than {MAX_FILE_BYTES} bytes: not a configuration"),
            None,
        ));
    }
    String::from_utf8(bytes).map_err(|e| {
        let (at, bytes) = (e.utf8_error().valid_up_to(), e.as_bytes());
        let hint = match bytes {
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "it is UTF-16: save it as UTF-8 (`iconv -f UTF-16 -t UTF-8`)",
            _ if !bytes.contains(&0) => "save it as UTF-8 (from Latin-1: `iconv -f LATIN1 -t UTF-8`)",
            _ => "a target that ends in `.yaml` or `.yml` is read as a configuration; any other target is run as a program",
        };
        let what = format!("is not text (byte {at} is not UTF-8), expected a configuration: a YAML file");
        error(what, Some(hint))
    })
}

/// Most steps of a timeline: a person does not compare more side by side.
const MAX_TIMELINE_STEPS: u64 = 100;

/// A key that has an effect only where other keys have certain values: the key, the other keys and values as a message
/// names them, and whether a configuration has those.
type Condition = (&'static str, &'static str, fn(&TrainConfig) -> bool);

#[rustfmt::skip]
const CONDITIONS: &[Condition] = &[
    ("model.n_kv_head", "`model.kind: llama` or `mixtral`", |c| c.model.kind.is_llama()),
    ("model.norm_eps", "`model.kind: llama` or `mixtral`", |c| c.model.kind.is_llama()),
    ("model.rope_theta", "`model.kind: llama` or `mixtral`", |c| c.model.kind.is_llama()),
    ("model.rope_scaling", "`model.kind: llama` or `mixtral`", |c| c.model.kind.is_llama()),
    ("model.experts", "`model.kind: mixtral`", |c| c.model.kind == ModelKind::Mixtral),
    ("train.optimizer.betas", "`train.optimizer.kind: adamw`, `lion` or `muon`", |c| c.train.optimizer.kind != OptimizerKind::Sgd),
    ("train.optimizer.eps", "`train.optimizer.kind: adamw` or `muon`", |c| matches!(c.train.optimizer.kind, OptimizerKind::Adamw | OptimizerKind::Muon)),
    ("train.optimizer.momentum", "`train.optimizer.kind: sgd` or `muon`", has_momentum),
    ("train.optimizer.nesterov", "`train.optimizer.kind: sgd` or `muon`", has_momentum),
    ("train.offload.dir", "`train.offload.optimizer: file`", |c| c.train.offload.optimizer == OffloadTarget::File),
    ("train.schedule.decay_steps", "`train.schedule.kind: wsd`", |c| c.train.schedule.kind == LearningRate::Wsd),
    ("train.recovery", "`parallel.strategy: zero1`, `zero2` or `zero3`, an optimizer other than `muon`, and none of `parallel.shard_group`, `parallel.expert` and `train.offload`", can_have_buddies),
    ("train.base_batch", "`train.lr_scaling: linear`", |c| c.train.lr_scaling == LrScaling::Linear),
    ("parallel.sync", "`parallel.strategy: ddp`", |c| c.parallel.strategy == Strategy::Ddp),
    ("parallel.sync_each_batch", "`parallel.strategy: ddp`, `parallel.sync: bucketed` and one pipeline stage", |c| c.parallel.strategy == Strategy::Ddp && c.parallel.sync == Sync::Bucketed && c.parallel.pipeline.stages == 1),
    ("parallel.reduce_dtype", "`train.precision: bf16`", |c| c.train.precision == Precision::Bf16),
    ("parallel.shard_group", "`parallel.strategy: zero1`, `zero2` or `zero3`", |c| c.parallel.strategy != Strategy::Ddp),
    ("parallel.accumulate", "`parallel.strategy: zero2` or `zero3`", holds_shards),
    ("parallel.persist_below", "`parallel.strategy: zero3`", |c| c.parallel.strategy == Strategy::Zero3),
    ("parallel.reshard_after_forward", "`parallel.strategy: zero3`", |c| c.parallel.strategy == Strategy::Zero3),
    ("parallel.context_algorithm", "`parallel.context` above 1", |c| c.parallel.context > 1),
    ("parallel.expert", "`model.kind: mixtral`", |c| c.model.kind == ModelKind::Mixtral),
    ("parallel.sequence", "`parallel.tensor` above 1", |c| c.parallel.tensor > 1),
];

fn has_momentum(config: &TrainConfig) -> bool {
    matches!(
        config.train.optimizer.kind,
        OptimizerKind::Sgd | OptimizerKind::Muon
    )
}

/// Whether each part of the state is on one rank, which keeps it in memory when another rank dies.
pub(crate) fn can_have_buddies(config: &TrainConfig) -> bool {
    let (train, parallel) = (&config.train, &config.parallel);
    let is_kept =
        train.offload.optimizer == OffloadTarget::None && train.optimizer.kind != OptimizerKind::Muon;
    let is_on_one_rank = parallel.shard_group.is_none() && parallel.expert == 1;
    parallel.strategy != Strategy::Ddp && is_on_one_rank && is_kept
}

fn holds_shards(config: &TrainConfig) -> bool {
    matches!(config.parallel.strategy, Strategy::Zero2 | Strategy::Zero3)
}

/// A key whose condition does not hold. A value that equals the default contradicts no other.
fn without_effect(config: &TrainConfig) -> Option<Problem> {
    let defaults = TrainConfig {
        run: Run::default(),
        model: Model::default(),
        data: config.data.clone(),
        train: Train::default(),
        parallel: Parallel::default(),
        launch: BTreeMap::new(),
        vocabulary: Arc::default(),
    };
    let [values, defaults] =
        [config, &defaults].map(|config| serde_json::to_value(config).unwrap_or_default());
    let (key, needs, _) = CONDITIONS.iter().find(|(key, _, holds)| {
        let pointer = format!("/{}", key.replace('.', "/"));
        values.pointer(&pointer) != defaults.pointer(&pointer) && !holds(config)
    })?;
    Some(Problem::new(*key, format!("`{key}` has no effect without {needs}")).with_hint("leave it out"))
}

fn run(config: &TrainConfig) -> Option<Problem> {
    let (run, steps) = (&config.run, config.train.steps);
    if run.overwrite && run.resume != Resume::Never {
        let what = "`run.overwrite: true` contradicts `run.resume`: the run would be deleted and continued";
        return Some(Problem::new("run.overwrite", what).with_hint("set only one of the two"));
    }
    let range = run.timeline?;
    let expected = if range.last > steps {
        format!("steps up to `train.steps`, which is {steps}")
    } else if range.count() > MAX_TIMELINE_STEPS {
        format!("at most {MAX_TIMELINE_STEPS} steps")
    } else {
        return None;
    };
    Some(Problem::new(
        "run.timeline",
        format!("`run.timeline` is {range}, expected {expected}"),
    ))
}

/// State and parameters outside the memory of the device.
fn offload(config: &TrainConfig) -> Option<Problem> {
    let (home, parameters) = (config.train.offload.optimizer, config.train.offload.parameters);
    let place = OffloadTarget::WORDS[parameters as usize];
    let keys = [("optimizer", home), ("parameters", parameters)];
    let offloaded = keys.iter().find(|(_, target)| *target != OffloadTarget::None);
    if let (OptimizerKind::Muon, Some((key, _))) = (config.train.optimizer.kind, offloaded) {
        let key = format!("train.offload.{key}");
        let what = "`train.optimizer.kind: muon` needs parameters and state on the device, where matrices are multiplied";
        let hint = "leave out `train.offload`, or use a different optimizer";
        return Some(Problem::new(key, what).with_hint(hint));
    }
    let (needed, why) = match config.parallel.strategy {
        _ if parameters == OffloadTarget::None => return None,
        Strategy::Zero3 if home == parameters => return None,
        Strategy::Zero3 => (
            format!("train.offload.optimizer: {place}"),
            "an update works on both in one place",
        ),
        _ => (
            "parallel.strategy: zero3".to_owned(),
            "elsewhere every rank computes with a whole copy of the parameters",
        ),
    };
    let what = format!("`train.offload.parameters: {place}` needs `{needed}`: {why}");
    let hint = format!("set `{needed}`, or leave out `train.offload.parameters`");
    Some(Problem::new("train.offload.parameters", what).with_hint(hint))
}

/// Learning rate and checkpoints.
fn training(config: &TrainConfig) -> Option<Problem> {
    let train = &config.train;
    let (schedule, lr, steps, due) = (
        &train.schedule,
        train.optimizer.lr,
        train.steps,
        train.checkpoint_every,
    );
    if train.lr_scaling == LrScaling::Linear && train.base_batch.is_none() {
        let what = "`train.lr_scaling: linear` needs `train.base_batch`: the global batch, in samples, that `train.optimizer.lr` is meant for";
        return Some(Problem::new("train.lr_scaling", what).with_hint("add `base_batch: …` under `train:`"));
    }
    if schedule.min_lr > lr {
        let min_lr = schedule.min_lr;
        let what = format!(
            "`train.schedule.min_lr` is {min_lr}, expected at most `train.optimizer.lr`, which is {lr}"
        );
        return Some(Problem::new("train.schedule.min_lr", what));
    }
    match schedule.decay_steps {
        None if schedule.kind == LearningRate::Wsd => {
            let what =
                "`train.schedule.kind: wsd` needs `train.schedule.decay_steps`: the steps of its decay";
            let hint = "add `decay_steps: …` under `schedule:`; a tenth of `train.steps` is usual";
            return Some(Problem::new("train.schedule.kind", what).with_hint(hint));
        }
        Some(decay) if decay > steps => {
            let what = format!(
                "`train.schedule.decay_steps` is {decay}, expected at most `train.steps`, which is {steps}"
            );
            return Some(Problem::new("train.schedule.decay_steps", what));
        }
        _ => {}
    }
    let every = train.checkpoint_keep.and_then(|keep| keep.every)?;
    (due > 0 && !every.is_multiple_of(due)).then(|| {
        let what = format!("`train.checkpoint_keep.every` is {every}, expected a multiple of `train.checkpoint_every`, which is {due}");
        let hint = "other steps have no checkpoint to keep";
        Problem::new("train.checkpoint_keep.every", what).with_hint(hint)
    })
}

/// A rank of a pipeline accumulates full gradients. Only an explicit `sharded` is refused, not the
/// default.
fn accumulate(config: &TrainConfig, source: &Source) -> Option<Problem> {
    let (key, parallel) = ("parallel.accumulate", &config.parallel);
    let is_contradicted = parallel.pipeline.stages > 1
        && holds_shards(config)
        && parallel.accumulate == Accumulate::Sharded
        && source.has(key);
    is_contradicted.then(|| {
        let what = "`parallel.accumulate: sharded` is not supported with `parallel.pipeline.stages` above 1: each rank accumulates full gradients of its stages and reduces them once per step";
        Problem::new(key, what).with_hint("leave it out, or set `parallel.accumulate: full`")
    })
}

/// Rows of the token embedding, if all sizes fit each other and `tensor` ranks can share them. `tokens` is the number of
/// tokens that the tokenizer makes; `vocab_size`, where it is given, may be larger.
pub fn checked_vocab(model: &Model, tokens: usize, tensor: usize) -> Result<usize, Problem> {
    let vocab = model.vocab_size.unwrap_or(tokens);
    let broken = out_of_range("model", model)
        .or_else(|| out_of_range("model.experts", &model.experts))
        .or_else(|| heads(model))
        .or_else(|| rotary(model))
        .or_else(|| experts(model))
        .or_else(|| vocabulary(vocab, tokens))
        .or_else(|| parts(model, vocab, tensor));
    broken.map_or(Ok(vocab), Err)
}

fn heads(model: &Model) -> Option<Problem> {
    let (channels, heads, kv_heads) = (model.n_embd, model.n_head, model.kv_heads());
    if model.kind == ModelKind::Mlp {
        return None;
    }
    if !channels.is_multiple_of(heads) {
        let what =
            format!("`model.n_embd` is {channels}, expected a multiple of `model.n_head`, which is {heads}");
        let hint = format!(
            "use {}, or a different number of heads",
            nearest_multiples(channels, heads)
        );
        return Some(Problem::new("model.n_embd", what).with_hint(hint));
    }
    if !heads.is_multiple_of(kv_heads) {
        let what = format!(
            "`model.n_head` is {heads}, expected a multiple of `model.n_kv_head`, which is {kv_heads}"
        );
        let hint = "each key and value head must serve the same number of query heads";
        return Some(Problem::new("model.n_kv_head", what).with_hint(hint));
    }
    let size = channels / heads;
    (model.kind.is_llama() && !size.is_multiple_of(2)).then(|| {
        let what = format!("a head has {size} channels, but rotary positions need an even number");
        let hint = "use a different `model.n_head`, so that `model.n_embd` / `model.n_head` is even";
        Problem::new("model.n_head", what).with_hint(hint)
    })
}

fn rotary(model: &Model) -> Option<Problem> {
    let theta = model.rope_theta;
    let (key, what) = match model.rope_scaling {
        _ if !model.kind.is_llama() => return None,
        _ if !theta.is_normal() || theta <= 0.0 => {
            ("model.rope_theta", format!("`model.rope_theta` is {theta}"))
        }
        Some(scaling) if !scaling.is_valid() => (
            "model.rope_scaling",
            format!("`model.rope_scaling` is `{scaling}`"),
        ),
        _ => return None,
    };
    let hint = "all numbers must be above 0, and `low_freq_factor` below `high_freq_factor`";
    Some(Problem::new(key, what).with_hint(hint))
}

fn experts(model: &Model) -> Option<Problem> {
    let Experts {
        count, top_k, every, ..
    } = model.experts;
    let (key, found, most, of) = if top_k > count {
        ("model.experts.top_k", top_k, count, "model.experts.count")
    } else {
        ("model.experts.every", every, model.n_layer, "model.n_layer")
    };
    (model.kind == ModelKind::Mixtral && found > most).then(|| {
        let what = format!("`{key}` is {found}, expected at most `{of}`, which is {most}");
        Problem::new(key, what).with_hint(format!("set `{key}` to {most} or less, or a larger `{of}`"))
    })
}

/// The ranks that hold the experts of a layer together have as many each.
fn expert_ranks(config: &TrainConfig) -> Option<Problem> {
    let (count, ranks) = (config.model.experts.count, config.parallel.expert);
    (!count.is_multiple_of(ranks)).then(|| {
        let what =
            format!("`model.experts.count` ({count}) cannot be divided over {ranks} expert-parallel ranks");
        let nearest = nearest_multiples(count, ranks);
        let divides = |ranks: &usize| count.is_multiple_of(*ranks);
        let fits = (1..=ranks.min(count)).rev().find(divides).unwrap_or(1);
        let hint = format!("set `parallel.expert` to {fits}, or `model.experts.count` to {nearest}");
        Problem::new("parallel.expert", what).with_hint(hint)
    })
}

fn vocabulary(vocab: usize, tokens: usize) -> Option<Problem> {
    (vocab < tokens).then(|| {
        let what = format!(
            "`model.vocab_size` is {vocab}, expected at least {tokens}, the number of tokens of `data.tokenizer`"
        );
        Problem::new("model.vocab_size", what).with_hint("leave it out to use the tokenizer's")
    })
}

/// The ranks of a tensor group share the heads, the width of the feed-forward layers and the vocabulary.
fn parts(model: &Model, vocab: usize, tensor: usize) -> Option<Problem> {
    let heads = (model.kind != ModelKind::Mlp).then_some([
        ("model.n_head", model.n_head),
        ("model.n_kv_head", model.kv_heads()),
    ]);
    let widths = [("model.n_inner", model.inner()), ("model.vocab_size", vocab)];
    let mut sizes = heads.into_iter().flatten().chain(widths);
    let (key, size) = sizes.find(|(_, size)| !size.is_multiple_of(tensor))?;
    let fits = match key {
        // A smaller one has no room for the tokenizer's.
        "model.vocab_size" => size.next_multiple_of(tensor).to_string(),
        _ => nearest_multiples(size, tensor),
    };
    let what = format!("`{key}` ({size}) cannot be divided over {tensor} tensor ranks");
    Some(
        Problem::new(key, what).with_hint(format!("set `{key}` to {fits}, or a different `parallel.tensor`")),
    )
}

/// The ranks of a context group share the positions of a sample evenly; with sequence parallelism, those of a tensor group share
/// the positions of a micro-batch.
pub fn check_rows(config: &TrainConfig) -> Result<(), Problem> {
    let (tensor, context) = (config.parallel.tensor, config.parallel.context);
    let (samples, all) = (config.train.micro_batch, config.model.block_size);
    if context > 1 && !all.is_multiple_of(2 * context) {
        let what = format!(
            "`model.block_size` ({all}) cannot be divided over {context} context ranks, each of which computes two chunks of the positions of a sample"
        );
        let fits = nearest_multiples(all, 2 * context);
        let hint = format!("set `model.block_size` to {fits}, or a different `parallel.context`");
        return Err(Problem::new("model.block_size", what).with_hint(hint));
    }
    let positions = all / context;
    let fits = |samples: &usize| (samples * positions).is_multiple_of(tensor);
    if !config.parallel.sequence || fits(&samples) {
        return Ok(());
    }
    let above = (samples..samples + tensor).find(fits).unwrap_or(samples);
    let what = format!(
        "`parallel.sequence: true` shares the positions of a micro-batch, but {samples} × {positions} of them cannot be divided over {tensor} tensor ranks; `train.micro_batch: {above}` would work"
    );
    let hint = "change `train.micro_batch` or `model.block_size`, or leave out `parallel.sequence`";
    Err(Problem::new("parallel.sequence", what).with_hint(hint))
}
