//! From a file and its overrides to a checked configuration: the table of keys, rules over several keys, and what the
//! files of the data must hold.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use super::keys;
use super::schema::{
    Accumulate, LearningRate, LrScaling, Model, ModelKind, OptimizerConfig, OptimizerKind, OptimizerOffload,
    Paths, Pipeline, Precision, ReduceDtype, Resume, Strategy, Sync, TrainConfig,
};
use super::source::{ConfigError, Source};
use crate::data::{DataError, HELD_OUT_PART, Tokens, Vocabulary};

/// Longest configuration file.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// A configuration that still knows where its values came from.
#[derive(Clone, Debug)]
pub struct Located {
    /// The configuration; its paths of `data` and `model.init_from` can be opened from the current
    /// directory.
    pub config: TrainConfig,
    /// Where they came from.
    pub source: Source,
}

/// Reads the YAML at `path`, applies the overrides (`train.steps=20`) in order, and checks the result,
/// the data files included.
pub fn load(path: &Path, overrides: &[String]) -> Result<TrainConfig, ConfigError> {
    load_located(path, overrides).map(|located| located.config)
}

/// As [`load`], for callers that report their own errors at the place of a key.
pub fn load_located(path: &Path, overrides: &[String]) -> Result<Located, ConfigError> {
    let located = load_without_data(path, overrides)?;
    check_schedule(&located.config, &located.source)?;
    check_data(&located.config, &located.source)?;
    Ok(located)
}

/// As [`load_located`], for callers that train nothing: the data files need not exist.
pub fn load_without_data(path: &Path, overrides: &[String]) -> Result<Located, ConfigError> {
    let source = Source::parse(path, &read(path)?, overrides)?;
    let values: Result<TrainConfig, _> = keys::section("", keys::read(&source)?);
    let mut config = values.map_err(|error| source.error("", error.to_string(), None))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let data = &mut config.data;
    data.train = data.train.below(folder);
    data.val = data.val.as_ref().map(|val| val.below(folder));
    data.tokenizer = data.tokenizer.below(folder);
    config.model.init_from = config.model.init_from.map(|weights| folder.join(weights));
    check(&config, &source)?;
    Ok(Located { config, source })
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let error = |problem: String, hint: Option<&str>| ConfigError {
        place: path.display().to_string(),
        problem,
        hint: hint.map(ToOwned::to_owned),
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
        let at = e.utf8_error().valid_up_to();
        error(
            format!("is not text (byte {at} is not UTF-8), expected a configuration: a YAML file"),
            Some("a target that ends in `.yaml` or `.yml` is read as a configuration; any other target is run as a program"),
        )
    })
}

/// Most steps of a timeline: a person does not compare more side by side.
const MAX_TIMELINE_STEPS: u64 = 100;

/// A rule that a configuration breaks: the key, the problem, the next step.
type Broken = (&'static str, String, String);

/// Checks everything that needs neither the data nor another rank.
fn check(config: &TrainConfig, source: &Source) -> Result<(), ConfigError> {
    let vocabulary = vocabulary(config, source)?;
    let rules = rules(config, vocabulary.size);
    let broken = rules.into_iter().find(|(is_broken, ..)| *is_broken);
    let broken = broken.map(|(_, key, problem, hint)| (key, problem, hint.to_owned()));
    let broken = broken.or_else(|| heads(&config.model, source));
    match broken.or_else(|| accumulate(config, source)) {
        Some((key, problem, hint)) => Err(source.error(key, problem, (!hint.is_empty()).then_some(hint))),
        None => Ok(()),
    }
}

/// Is it broken?, key, problem, hint or nothing.
type Rule = (bool, &'static str, String, &'static str);

/// Each rule. A value that equals the default contradicts no other.
fn rules(config: &TrainConfig, tokens: usize) -> Vec<Rule> {
    let (run, model, train) = (&config.run, &config.model, &config.train);
    let (steps, lr) = (train.steps, train.optimizer.lr);
    let vocab = model.vocab_size.unwrap_or(tokens);
    let due = train.checkpoint_every;
    let min_lr = train.schedule.min_lr;
    let mut rules = vec![
        (
            run.overwrite && run.resume != Resume::Never,
            "run.overwrite",
            "`run.overwrite: true` contradicts `run.resume`: the run would be deleted and continued".into(),
            "set only one of the two",
        ),
        (
            vocab < tokens,
            "model.vocab_size",
            format!("`model.vocab_size` is {vocab}, expected at least {tokens}, the number of tokens of `data.tokenizer`"),
            "leave it out to use the tokenizer's",
        ),
        (
            train.offload.dir.is_some() && train.offload.optimizer != OptimizerOffload::File,
            "train.offload.dir",
            "`train.offload.dir` is set, but nothing is offloaded to it".into(),
            "set `train.offload.optimizer: file`, or leave it out",
        ),
        (
            train.lr_scaling == LrScaling::Linear && train.base_batch.is_none(),
            "train.lr_scaling",
            "`train.lr_scaling: linear` needs `train.base_batch`: the global batch, in samples, that `train.optimizer.lr` is meant for".into(),
            "add `base_batch: …` under `train:`",
        ),
        (
            train.lr_scaling == LrScaling::None && train.base_batch.is_some(),
            "train.base_batch",
            "`train.base_batch` has no effect without `train.lr_scaling: linear`".into(),
            "",
        ),
        (
            min_lr > lr,
            "train.schedule.min_lr",
            format!("`train.schedule.min_lr` is {min_lr}, expected at most `train.optimizer.lr`, which is {lr}"),
            "",
        ),
    ];
    if let Some(range) = run.timeline {
        let expected = if range.last > steps {
            format!("steps up to `train.steps`, which is {steps}")
        } else {
            format!("at most {MAX_TIMELINE_STEPS} steps")
        };
        rules.push((
            range.last > steps || range.count() > MAX_TIMELINE_STEPS,
            "run.timeline",
            format!("`run.timeline` is {range}, expected {expected}"),
            "",
        ));
    }
    if let Some(every) = train.checkpoint_keep.and_then(|keep| keep.every) {
        rules.push((
            due > 0 && !every.is_multiple_of(due),
            "train.checkpoint_keep.every",
            format!("`train.checkpoint_keep.every` is {every}, expected a multiple of `train.checkpoint_every`, which is {due}"),
            "other steps have no checkpoint to keep",
        ));
    }
    rules.extend(optimizer(config).into_iter().chain(strategy(config)));
    rules.extend(model_kind(&config.model));
    rules
}

/// Keys that only some optimizers or schedules read.
fn optimizer(config: &TrainConfig) -> Vec<Rule> {
    let (train, optimizer, schedule) = (&config.train, &config.train.optimizer, &config.train.schedule);
    let steps = train.steps;
    let kind = serde_json::to_value(optimizer.kind).unwrap_or_default();
    let kind = kind.as_str().unwrap_or_default();
    let of_some_kinds = [
        ("train.optimizer.betas", optimizer.betas.is_some()),
        (
            "train.optimizer.eps",
            optimizer.eps != OptimizerConfig::default().eps,
        ),
        ("train.optimizer.momentum", optimizer.momentum.is_some()),
        ("train.optimizer.nesterov", optimizer.nesterov.is_some()),
    ];
    let mut rules = Vec::from(of_some_kinds.map(|(path, is_set)| {
        let is_read = optimizer.own_keys().contains(&path);
        let problem = format!("`{path}` has no effect with `train.optimizer.kind: {kind}`");
        (is_set && !is_read, path, problem, "leave it out")
    }));
    let decays = schedule.kind == LearningRate::Wsd;
    rules.extend([
        (
            optimizer.kind == OptimizerKind::Muon && train.offload.optimizer != OptimizerOffload::None,
            "train.offload.optimizer",
            "`train.optimizer.kind: muon` needs its state on the device, where matrices are multiplied"
                .into(),
            "leave out `train.offload.optimizer`, or use a different optimizer",
        ),
        (
            decays && schedule.decay_steps.is_none(),
            "train.schedule.kind",
            "`train.schedule.kind: wsd` needs `train.schedule.decay_steps`: the steps of its decay".into(),
            "add `decay_steps: …` under `schedule:`; a tenth of `train.steps` is usual",
        ),
        (
            !decays && schedule.decay_steps.is_some(),
            "train.schedule.decay_steps",
            "`train.schedule.decay_steps` has no effect without `train.schedule.kind: wsd`".into(),
            "",
        ),
        (
            schedule.decay_steps.is_some_and(|decay| decay > steps),
            "train.schedule.decay_steps",
            format!(
                "`train.schedule.decay_steps` is {}, expected at most `train.steps`, which is {steps}",
                schedule.decay_steps.unwrap_or_default()
            ),
            "",
        ),
    ]);
    rules
}

/// Keys that only some kinds of models read.
fn model_kind(model: &Model) -> [Rule; 4] {
    let default = |key: f64, default: f64| key.to_bits() != default.to_bits();
    let of_llama = [
        ("model.n_kv_head", model.n_kv_head.is_some()),
        ("model.norm_eps", default(model.norm_eps, 1e-5)),
        ("model.rope_theta", default(model.rope_theta, 10_000.0)),
        ("model.rope_scaling", model.rope_scaling.is_some()),
    ];
    of_llama.map(|(path, is_set)| {
        let problem = format!("`{path}` has no effect without `model.kind: llama`");
        (
            is_set && model.kind != ModelKind::Llama,
            path,
            problem,
            "leave it out",
        )
    })
}

/// Keys that only some strategies or precisions read.
fn strategy(config: &TrainConfig) -> [Rule; 8] {
    let (parallel, tensor) = (&config.parallel, config.parallel.tensor);
    let strategy = parallel.strategy;
    let releases = strategy == Strategy::Zero3;
    let holds_shards = matches!(strategy, Strategy::Zero2 | Strategy::Zero3);
    let is_narrowed = parallel.reduce_dtype == ReduceDtype::Bf16;
    let (samples, positions) = (config.train.micro_batch, config.model.block_size);
    let fits = |samples: &usize| (samples * positions).is_multiple_of(tensor);
    let above = (samples..samples + tensor).find(fits).unwrap_or(samples);
    [
        (
            strategy != Strategy::Ddp && parallel.sync != Sync::Bucketed,
            "parallel.sync",
            "`parallel.sync` applies only to `parallel.strategy: ddp`".into(),
            "leave it out, or train with `ddp`",
        ),
        (
            is_narrowed && config.train.precision != Precision::Bf16,
            "parallel.reduce_dtype",
            "`parallel.reduce_dtype: bf16` needs `train.precision: bf16`: gradients have the parameters' type or a wider one".into(),
            "leave it out, or train in bf16",
        ),
        (
            strategy == Strategy::Ddp && parallel.shard_group.is_some(),
            "parallel.shard_group",
            "`parallel.shard_group` is set, but `parallel.strategy: ddp` shards nothing".into(),
            "leave it out, or train with `zero1`, `zero2` or `zero3`",
        ),
        (
            !releases && parallel.persist_below > 0,
            "parallel.persist_below",
            "`parallel.persist_below` is set, but only `parallel.strategy: zero3` releases parameters".into(),
            "leave it out, or train with `zero3`",
        ),
        (
            !releases && !parallel.reshard_after_forward,
            "parallel.reshard_after_forward",
            "`parallel.reshard_after_forward: false` is set, but only `parallel.strategy: zero3` releases parameters".into(),
            "leave it out, or train with `zero3`",
        ),
        (
            !holds_shards && parallel.accumulate == Accumulate::Full,
            "parallel.accumulate",
            "`parallel.accumulate: full` is set, but only `parallel.strategy: zero2` and `zero3` hold less than whole gradients".into(),
            "leave it out, or train with `zero2` or `zero3`",
        ),
        (
            parallel.sequence && tensor == 1,
            "parallel.sequence",
            "`parallel.sequence: true` is set, but `parallel.tensor` is 1: there are no other tensor ranks to share the rows with".into(),
            "set `parallel.tensor`, or leave it out",
        ),
        (
            parallel.sequence && !fits(&samples),
            "parallel.sequence",
            format!(
                "`parallel.sequence: true` shares the positions of a micro-batch, but {samples} × {positions} of them cannot be divided over {tensor} tensor ranks; `train.micro_batch: {above}` would work"
            ),
            "change `train.micro_batch` or `model.block_size`, or leave out `parallel.sequence`",
        ),
    ]
}

/// A rank of a pipeline accumulates full gradients. Only an explicit `sharded` is refused, not the
/// default.
fn accumulate(config: &TrainConfig, source: &Source) -> Option<Broken> {
    let (key, parallel) = ("parallel.accumulate", &config.parallel);
    let holds_shards = matches!(parallel.strategy, Strategy::Zero2 | Strategy::Zero3);
    let is_contradicted =
        parallel.pipeline.stages > 1 && holds_shards && parallel.accumulate == Accumulate::Sharded;
    let is_given = source.entries().iter().any(|(entry, _)| entry == key);
    (is_contradicted && is_given).then(|| {
        (
            key,
            "`parallel.accumulate: sharded` is not supported with `parallel.pipeline.stages` above 1: each rank accumulates full gradients of its stages and reduces them once per step".into(),
            "leave it out, or set `parallel.accumulate: full`".into(),
        )
    })
}

/// A schedule without `stages` would train without a pipeline. With `stages: 1` that is asked for; and a search for
/// layouts, which reads no data, finds the stages itself.
fn check_schedule(config: &TrainConfig, source: &Source) -> Result<(), ConfigError> {
    let (key, stages) = ("parallel.pipeline.schedule", "parallel.pipeline.stages");
    let has_default = config.parallel.pipeline.schedule == Pipeline::default().schedule;
    if has_default || source.entries().iter().any(|(entry, _)| entry == stages) {
        return Ok(());
    }
    let problem = format!("`{key}` is set, but `{stages}` is not: there is no pipeline");
    let hint = format!("set `{stages}`, or leave `schedule` out");
    Err(source.error(key, problem, Some(hint)))
}

/// The number of heads must divide the number of channels. The error names the key of the two that
/// an override has set.
fn heads(model: &Model, source: &Source) -> Option<Broken> {
    let (channels, heads) = (model.n_embd, model.n_head);
    if model.kind == ModelKind::Mlp || channels.is_multiple_of(heads) {
        return None;
    }
    let nearest = |below: Option<usize>, above: Option<usize>| {
        let found: Vec<String> = below.into_iter().chain(above).map(|n| n.to_string()).collect();
        found.join(" or ")
    };
    if source.is_set("model.n_head") && !source.is_set("model.n_embd") {
        let divides = |n: &usize| channels.is_multiple_of(*n);
        let nearest = nearest(
            (1..heads).rev().find(divides),
            (heads + 1..=channels).find(divides),
        );
        return Some((
            "model.n_head",
            format!("`model.n_head` is {heads}, expected a divisor of `model.n_embd`, which is {channels}"),
            format!("use {nearest}, or a different number of channels"),
        ));
    }
    let below = channels / heads * heads;
    let nearest = nearest(
        (below > 0).then_some(below),
        Some(channels.next_multiple_of(heads)),
    );
    Some((
        "model.n_embd",
        format!("`model.n_embd` is {channels}, expected a multiple of `model.n_head`, which is {heads}"),
        format!("use {nearest}, or a different number of heads"),
    ))
}

/// Checks the files of the data.
fn check_data(config: &TrainConfig, source: &Source) -> Result<(), ConfigError> {
    let vocabulary = vocabulary(config, source)?;
    // Opened, not only looked at, so that a file without permission is noticed before anything starts.
    let tokens = |key: &str, paths: &Paths| {
        let found = Tokens::count(paths, &config.data.tokenizer, &vocabulary);
        found.map_err(|error| data_error(source, key, &error))
    };
    let (mut training, mut validation) = (tokens("data.train", &config.data.train)?, 0);
    let mut held_out = "the held-out tenth of `data.train`";
    if let Some(val) = &config.data.val {
        (validation, held_out) = (tokens("data.val", val)?, "`data.val`");
    } else {
        validation += training / HELD_OUT_PART as u64;
        training -= validation;
    }
    let needed = config.model.block_size as u64 + 1;
    for (part, found) in [("`data.train`", training), (held_out, validation)] {
        if found < needed {
            let problem = format!(
                "`model.block_size` is {}, but {part} has only {found} tokens, and a sample needs {needed}",
                needed - 1
            );
            let hint = "use a smaller `model.block_size` or a longer text";
            return Err(source.error("model.block_size", problem, Some(hint.into())));
        }
    }
    Ok(())
}

fn vocabulary(config: &TrainConfig, source: &Source) -> Result<Arc<Vocabulary>, ConfigError> {
    let read = Vocabulary::of(&config.data.tokenizer);
    read.map(Arc::new)
        .map_err(|error| data_error(source, "data.tokenizer", &error))
}

/// What is wrong with a file, at the key that names it.
fn data_error(source: &Source, key: &str, error: &DataError) -> ConfigError {
    let (path, problem, hint) = match error {
        DataError::File { path, problem, hint } => (path, problem.clone(), hint.clone()),
        DataError::Unreadable { path, cause } => (
            path,
            format!("cannot be read: {cause}"),
            Some("relative paths in `data` are resolved from the YAML's directory".into()),
        ),
    };
    let words = format!("`{key}` is `{}`, which {problem}", path.display());
    source.error(key, words, hint)
}
