//! Rules over several keys, and what the files of the data must hold.

use std::sync::Arc;

use super::optimizer::{LearningRate, OptimizerConfig, OptimizerKind};
use super::schema::{
    Accumulate, LrScaling, Model, ModelKind, OptimizerOffload, Precision, ReduceDtype, Resume, Strategy,
    Sync, TrainConfig,
};
use super::source::{ConfigError, Source};
use super::values::Paths;
use crate::data::{DataError, Dataset, FileProblem, HELD_OUT_PART, Vocabulary};

/// More steps than a person looks at side by side.
const MAX_TIMELINE_STEPS: u64 = 100;

/// A rule that a configuration breaks: the key to blame, the problem, the next step.
type Broken = (&'static str, String, String);

/// Checks all that needs neither the data nor another rank.
pub(super) fn check(config: &TrainConfig, source: &Source) -> Result<(), ConfigError> {
    let vocabulary = vocabulary(config, source)?;
    let rules = rules(config, vocabulary.size);
    let broken = rules.into_iter().find(|(is_broken, ..)| *is_broken);
    let broken = broken.map(|(_, key, problem, hint)| (key, problem, hint.to_owned()));
    match broken.or_else(|| heads(&config.model, source)) {
        Some((key, problem, hint)) => Err(source.error(key, problem, (!hint.is_empty()).then_some(hint))),
        None => Ok(()),
    }
}

/// Each rule as (is it broken?, key, problem, hint or nothing). A value that equals the default contradicts no other.
fn rules(config: &TrainConfig, tokens: usize) -> Vec<(bool, &'static str, String, &'static str)> {
    let TrainConfig {
        run, model, train, ..
    } = config;
    let (steps, lr) = (train.steps, train.optimizer.lr);
    let vocab = model.vocab_size.unwrap_or(tokens);
    let due = train.checkpoint_every;
    let min_lr = train.schedule.min_lr;
    let mut rules = vec![
        (
            run.overwrite && run.resume != Resume::Never,
            "run.overwrite",
            "`run.overwrite: true` contradicts `run.resume`: the run would be deleted and continued".into(),
            "set one of the two",
        ),
        (
            vocab < tokens,
            "model.vocab_size",
            format!("`model.vocab_size` is {vocab}, expected at least {tokens}, the number of tokens of `data.tokenizer`"),
            "leave it out to take the tokenizer's",
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
            "add `base_batch: …` below `train:`",
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
    rules
}

/// Keys that only some optimizers or schedules read.
fn optimizer(config: &TrainConfig) -> Vec<(bool, &'static str, String, &'static str)> {
    let (train, optimizer, schedule) = (&config.train, &config.train.optimizer, &config.train.schedule);
    let steps = train.steps;
    let kind = serde_json::to_value(optimizer.kind).unwrap_or_default();
    let unread = [
        ("train.optimizer.betas", optimizer.betas.is_some()),
        (
            "train.optimizer.eps",
            optimizer.eps.to_bits() != OptimizerConfig::default().eps.to_bits(),
        ),
        ("train.optimizer.momentum", optimizer.momentum.is_some()),
        ("train.optimizer.nesterov", optimizer.nesterov.is_some()),
    ]
    .map(|(path, is_set)| {
        let key = path.trim_start_matches("train.optimizer.");
        let kind = kind.as_str().unwrap_or_default();
        let problem = format!("`{path}` has no effect with `train.optimizer.kind: {kind}`");
        (
            is_set && !optimizer.own_keys().contains(&key),
            path,
            problem,
            "leave it out",
        )
    });
    let decays = schedule.kind == LearningRate::Wsd;
    let mut rules = Vec::from(unread);
    rules.extend([
        (
            optimizer.kind == OptimizerKind::Muon && train.offload.optimizer != OptimizerOffload::None,
            "train.offload.optimizer",
            "`train.optimizer.kind: muon` needs its state on the device: matrices are multiplied there"
                .into(),
            "leave out `train.offload.optimizer`, or take another optimizer",
        ),
        (
            decays && schedule.decay_steps.is_none(),
            "train.schedule.kind",
            "`train.schedule.kind: wsd` needs `train.schedule.decay_steps`: the steps of its decay".into(),
            "add `decay_steps: …` below `schedule:`; a tenth of `train.steps` is usual",
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

/// Keys that only some strategies or precisions read.
fn strategy(config: &TrainConfig) -> [(bool, &'static str, String, &'static str); 6] {
    let parallel = &config.parallel;
    let strategy = parallel.strategy;
    let releases = strategy == Strategy::Zero3;
    let holds_shards = matches!(strategy, Strategy::Zero2 | Strategy::Zero3);
    let is_narrowed = parallel.reduce_dtype == ReduceDtype::Bf16;
    [
        (
            strategy != Strategy::Ddp && parallel.sync != Sync::Bucketed,
            "parallel.sync",
            "`parallel.sync` can be chosen for `parallel.strategy: ddp` only: shards are those of buckets".into(),
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
    ]
}

/// Heads divide the channels. The one of the two that an override gave is blamed.
fn heads(model: &Model, source: &Source) -> Option<Broken> {
    let (channels, heads) = (model.n_embd, model.n_head);
    if model.kind != ModelKind::Gpt2 || channels.is_multiple_of(heads) {
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
            format!("take {nearest}, or another number of channels"),
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
        format!("take {nearest}, or another number of heads"),
    ))
}

/// Checks the files of the data.
pub(super) fn check_data(config: &TrainConfig, source: &Source) -> Result<(), ConfigError> {
    let vocabulary = vocabulary(config, source)?;
    // Opened, not only looked at, so that a file without permission is noticed before anything starts.
    let tokens = |key: &str, paths: &Paths| {
        let found = Dataset::survey(paths, &config.data.tokenizer, &vocabulary);
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
            let hint = "take a smaller `model.block_size` or a longer text";
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
    let DataError::File { path, problem } = error else {
        return source.error(key, error.to_string(), None);
    };
    let hint = match problem {
        FileProblem::Unreadable { .. } => {
            Some("a relative path of `data` counts from the folder of the configuration".to_owned())
        }
        other => other.hint(),
    };
    let words = format!("`{key}` is `{}`, which {problem}", path.display());
    source.error(key, words, hint)
}
