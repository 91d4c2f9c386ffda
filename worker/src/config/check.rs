//! What types cannot say: ranges, divisibility, files.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::load::Source;
use super::node::{Node, Value};
use super::{
    Accumulate, ConfigError, LrScaling, ModelKind, OptimizerHome, Paths, Precision, ReduceDtype, Resume,
    ShardGroup, Strategy, Sync, TrainConfig,
};
use crate::data::{DataError, Dataset, FileProblem, HELD_OUT_PART, Vocabulary};

/// Larger values are mistakes; the bound keeps products of sizes far from overflow.
const MAX_SIZE: usize = 1 << 24;
const MAX_LAYERS: usize = 1 << 16;
const MAX_THREADS: usize = 1 << 12;
const MAX_MIB: f64 = 65_536.0;
const MAX_TIMEOUT_S: f64 = 86_400.0;
const MAX_STEPS: u64 = 1 << 40;
/// Nobody looks at more of them side by side.
const MAX_TIMELINE_STEPS: u64 = 100;

/// Checks all that needs neither the data nor another rank.
pub(super) fn check(config: &TrainConfig, source: &Source) -> Result<(), ConfigError> {
    let check = Check { config, source };
    check.run()?;
    let vocabulary = check.vocabulary()?;
    check.model(&vocabulary)?;
    check.train()?;
    check.optimizer()?;
    check.parallel()
}

/// Checks the files of the data.
pub(super) fn data(config: &TrainConfig, source: &Source) -> Result<(), ConfigError> {
    let check = Check { config, source };
    check.data(&check.vocabulary()?)
}

struct Check<'a> {
    config: &'a TrainConfig,
    source: &'a Source,
}

type Checked = Result<(), ConfigError>;

impl Check<'_> {
    fn vocabulary(&self) -> Result<Arc<Vocabulary>, ConfigError> {
        Vocabulary::of(&self.config.data.tokenizer)
            .map(Arc::new)
            .map_err(|error| self.data_error("data.tokenizer", &error))
    }

    fn run(&self) -> Checked {
        let run = &self.config.run;
        if run.name.is_empty() || run.name.contains(['/', '\0']) || run.name.starts_with('.') {
            return self.refuse(
                "run.name",
                format!("`{}`", run.name),
                "a name for a folder: not empty, without `/`, not starting with a dot",
                None,
            );
        }
        if run.out_dir.as_ref().is_some_and(|dir| dir.as_os_str().is_empty()) {
            return self.refuse("run.out_dir", "empty", "the path of a folder", None);
        }
        if run.overwrite && run.resume != Resume::Never {
            let problem =
                "`run.overwrite: true` contradicts `run.resume`: the run would be deleted and continued";
            return Err(self.source.error(
                "run.overwrite",
                problem.into(),
                Some("set one of the two".into()),
            ));
        }
        let steps = self.config.train.steps;
        match run.timeline {
            Some(range) if range.last > steps => self.refuse(
                "run.timeline",
                range,
                &format!("steps up to `train.steps`, which is {steps}"),
                None,
            ),
            Some(range) if range.count() > MAX_TIMELINE_STEPS => self.refuse(
                "run.timeline",
                range,
                &format!("at most {MAX_TIMELINE_STEPS} steps"),
                Some("a few show what there is to see".into()),
            ),
            _ => Ok(()),
        }
    }

    fn model(&self, vocabulary: &Vocabulary) -> Checked {
        let model = &self.config.model;
        self.within("model.n_layer", model.n_layer, 1..=MAX_LAYERS)?;
        self.within("model.n_head", model.n_head, 1..=MAX_SIZE)?;
        self.within("model.n_embd", model.n_embd, 1..=MAX_SIZE)?;
        self.within("model.block_size", model.block_size, 1..=MAX_SIZE)?;
        if self.is_blank("model.init_from") {
            return self.refuse(
                "model.init_from",
                "empty",
                "the path of a folder or of a `.safetensors` file",
                None,
            );
        }
        let (channels, heads) = (model.n_embd, model.n_head);
        if model.kind == ModelKind::Gpt2 && channels % heads != 0 {
            if self.source.is_set("model.n_head") && !self.source.is_set("model.n_embd") {
                let divides = |n: &usize| channels.is_multiple_of(*n);
                let below = (1..heads).rev().find(divides).unwrap_or(1);
                let nearest = match (heads + 1..=channels).find(divides) {
                    Some(above) => format!("{below} or {above}"),
                    None => format!("{below}"),
                };
                return self.refuse(
                    "model.n_head",
                    heads,
                    &format!("a divisor of `model.n_embd`, which is {channels}"),
                    Some(format!("take {nearest}, or another number of channels")),
                );
            }
            let (below, above) = (channels / heads * heads, channels.next_multiple_of(heads));
            let nearest = if below == 0 {
                format!("{above}")
            } else {
                format!("{below} or {above}")
            };
            return self.refuse(
                "model.n_embd",
                channels,
                &format!("a multiple of `model.n_head`, which is {heads}"),
                Some(format!("take {nearest}, or another number of heads")),
            );
        }
        let tokens = vocabulary.size;
        match model.vocab_size {
            Some(size) if size < tokens => self.refuse(
                "model.vocab_size",
                size,
                &format!("at least {tokens}, the number of tokens of `data.tokenizer`"),
                Some("leave it out to take the tokenizer's".into()),
            ),
            Some(size) => self.within("model.vocab_size", size, 1..=MAX_SIZE),
            None => Ok(()),
        }
    }

    fn train(&self) -> Checked {
        let train = &self.config.train;
        self.within("train.steps", train.steps, 1..=MAX_STEPS)?;
        self.within("train.micro_batch", train.micro_batch, 1..=MAX_SIZE)?;
        self.within("train.grad_accumulation", train.grad_accumulation, 1..=MAX_SIZE)?;
        if let Some(clip) = train.grad_clip
            && !(clip > 0.0 && clip.is_finite())
        {
            return self.refuse(
                "train.grad_clip",
                narrowed(clip),
                "a number above 0",
                Some("leave it empty not to clip".into()),
            );
        }
        self.checkpoint_keep()?;
        self.above_zero(
            "train.checkpoint_timeout_s",
            train.checkpoint_timeout_s,
            MAX_TIMEOUT_S,
        )?;
        if train.offload.dir.is_some() && train.offload.optimizer != OptimizerHome::File {
            let problem = "`train.offload.dir` is set, but nothing is offloaded to it";
            let hint = "set `train.offload.optimizer: file`, or leave it out";
            return Err(self
                .source
                .error("train.offload.dir", problem.into(), Some(hint.into())));
        }
        self.within("train.max_skips", train.max_skips, 1..=MAX_STEPS)?;
        match (train.lr_scaling, train.base_batch) {
            (LrScaling::Linear, None) => {
                let problem = "`train.lr_scaling: linear` needs `train.base_batch`: the global batch, in samples, that `train.optimizer.lr` is meant for";
                let hint = "add `base_batch: …` below `train:`";
                return Err(self
                    .source
                    .error("train.lr_scaling", problem.into(), Some(hint.into())));
            }
            (LrScaling::None, Some(_)) => {
                let problem = "`train.base_batch` has no effect without `train.lr_scaling: linear`";
                return Err(self.source.error("train.base_batch", problem.into(), None));
            }
            (_, Some(samples)) => self.within("train.base_batch", samples, 1..=MAX_STEPS)?,
            (LrScaling::None, None) => {}
        }
        match train.threads {
            Some(threads) => self.within("train.threads", threads, 1..=MAX_THREADS),
            None => Ok(()),
        }
    }

    fn checkpoint_keep(&self) -> Checked {
        let train = &self.config.train;
        let Some(keep) = train.checkpoint_keep else {
            return Ok(());
        };
        self.within("train.checkpoint_keep.last", keep.last, 1..=MAX_SIZE)?;
        let (Some(every), due) = (keep.every, train.checkpoint_every) else {
            return Ok(());
        };
        self.within("train.checkpoint_keep.every", every, 1..=MAX_STEPS)?;
        if due > 0 && !every.is_multiple_of(due) {
            return self.refuse(
                "train.checkpoint_keep.every",
                every,
                &format!("a multiple of `train.checkpoint_every`, which is {due}"),
                Some("other steps have no checkpoint to keep".into()),
            );
        }
        Ok(())
    }

    fn optimizer(&self) -> Checked {
        let optimizer = &self.config.train.optimizer;
        let not_negative = |key: &str, value: f32| {
            if value >= 0.0 && value.is_finite() {
                Ok(())
            } else {
                self.refuse(key, narrowed(value), "a number, 0 or more", None)
            }
        };
        not_negative("train.optimizer.lr", optimizer.lr)?;
        not_negative("train.optimizer.weight_decay", optimizer.weight_decay)?;
        not_negative("train.schedule.min_lr", self.config.train.schedule.min_lr)?;
        for beta in optimizer.betas {
            if !(0.0..1.0).contains(&beta) {
                let found = format!("{:?}", optimizer.betas);
                return self.refuse(
                    "train.optimizer.betas",
                    found,
                    "two numbers from 0 to below 1",
                    None,
                );
            }
        }
        if !(optimizer.eps > 0.0 && optimizer.eps.is_finite()) {
            return self.refuse(
                "train.optimizer.eps",
                narrowed(optimizer.eps),
                "a number above 0",
                None,
            );
        }
        let (min_lr, lr) = (self.config.train.schedule.min_lr, optimizer.lr);
        if min_lr > lr {
            let expected = format!("at most `train.optimizer.lr`, which is {lr}");
            return self.refuse("train.schedule.min_lr", min_lr, &expected, None);
        }
        Ok(())
    }

    fn parallel(&self) -> Checked {
        let parallel = &self.config.parallel;
        self.strategy()?;
        if parallel.shard_group == Some(ShardGroup::Ranks(0)) {
            return self.refuse(
                "parallel.shard_group",
                0,
                "`node` or a number of ranks, at least 1",
                None,
            );
        }
        self.above_zero("parallel.bucket_mb", parallel.bucket_mb, MAX_MIB)?;
        self.above_zero("parallel.first_bucket_mb", parallel.first_bucket_mb, MAX_MIB)?;
        self.above_zero("parallel.timeout_s", parallel.timeout_s, MAX_TIMEOUT_S)
    }

    fn above_zero(&self, key: &str, value: f64, max: f64) -> Checked {
        if value > 0.0 && value <= max {
            return Ok(());
        }
        self.refuse(key, value, &format!("a number above 0, at most {max}"), None)
    }

    /// Keys that only some strategies or precisions read. What is as if it were left out contradicts none.
    fn strategy(&self) -> Checked {
        let parallel = &self.config.parallel;
        let strategy = parallel.strategy;
        let releases = strategy == Strategy::Zero3;
        let holds_shards = matches!(strategy, Strategy::Zero2 | Strategy::Zero3);
        let is_narrowed = parallel.reduce_dtype == Some(ReduceDtype::Bf16);
        for (is_idle, key, problem, hint) in [
            (
                strategy != Strategy::Ddp && parallel.sync != Sync::Bucketed,
                "parallel.sync",
                "`parallel.sync` can be chosen for `parallel.strategy: ddp` only: shards are those of buckets",
                "leave it out, or train with `ddp`",
            ),
            (
                is_narrowed && self.config.train.precision != Precision::Bf16,
                "parallel.reduce_dtype",
                "`parallel.reduce_dtype: bf16` needs `train.precision: bf16`: gradients have the parameters' type or a wider one",
                "leave it out, or train in bf16",
            ),
            (
                strategy == Strategy::Ddp && parallel.shard_group.is_some(),
                "parallel.shard_group",
                "`parallel.shard_group` is set, but `parallel.strategy: ddp` shards nothing",
                "leave it out, or train with `zero1`, `zero2` or `zero3`",
            ),
            (
                !releases && parallel.persist_below > 0,
                "parallel.persist_below",
                "`parallel.persist_below` is set, but only `parallel.strategy: zero3` releases parameters",
                "leave it out, or train with `zero3`",
            ),
            (
                !releases && !parallel.reshard_after_forward,
                "parallel.reshard_after_forward",
                "`parallel.reshard_after_forward: false` is set, but only `parallel.strategy: zero3` releases parameters",
                "leave it out, or train with `zero3`",
            ),
            (
                !holds_shards && parallel.accumulate == Accumulate::Full,
                "parallel.accumulate",
                "`parallel.accumulate: full` is set, but only `parallel.strategy: zero2` and `zero3` hold less than whole gradients",
                "leave it out, or train with `zero2` or `zero3`",
            ),
        ] {
            if is_idle {
                return Err(self.source.error(key, problem.into(), Some(hint.into())));
            }
        }
        Ok(())
    }

    fn data(&self, vocabulary: &Arc<Vocabulary>) -> Checked {
        let data = &self.config.data;
        let tokens = self.tokens("data.train", &data.train, vocabulary)?;
        let (training, validation) = if let Some(val) = &data.val {
            (tokens, self.tokens("data.val", val, vocabulary)?)
        } else {
            let held_out = tokens / HELD_OUT_PART as u64;
            (tokens - held_out, held_out)
        };
        let needed = self.config.model.block_size as u64 + 1;
        let too_short = |part: &str, found: u64| {
            let problem = format!(
                "`model.block_size` is {}, but {part} has only {found} tokens, and a sample needs {needed}",
                needed - 1
            );
            Err(self.source.error(
                "model.block_size",
                problem,
                Some("take a smaller `model.block_size` or a longer text".into()),
            ))
        };
        if training < needed {
            return too_short("`data.train`", training);
        }
        if validation < needed {
            let part = if data.val.is_some() {
                "`data.val`"
            } else {
                "the held-out tenth of `data.train`"
            };
            return too_short(part, validation);
        }
        Ok(())
    }

    /// Number of tokens of the files of a key, as far as their headers tell.
    fn tokens(&self, key: &str, paths: &Paths, vocabulary: &Arc<Vocabulary>) -> Result<u64, ConfigError> {
        if self.is_blank(key) {
            let problem = format!("`{key}` is empty, expected the path of a file");
            return Err(self.source.error(key, problem, None));
        }
        // Opened, not only looked at, so that a file without permission is noticed before anything starts.
        let tokens = Dataset::survey(paths, &self.config.data.tokenizer, vocabulary);
        tokens.map_err(|error| self.data_error(key, &error))
    }

    /// What is wrong with a file, at the key that names it.
    fn data_error(&self, key: &str, error: &DataError) -> ConfigError {
        let DataError::File { path, problem } = error else {
            return self.source.error(key, error.to_string(), None);
        };
        let hint = match problem {
            FileProblem::Unreadable { .. } => {
                Some("a relative path of `data` counts from the folder of the configuration".to_owned())
            }
            other => other.hint(),
        };
        let words = format!("`{key}` is `{}`, which {problem}", path.display());
        self.source.error(key, words, hint)
    }

    /// True if the value is given as no characters, which is not left out.
    fn is_blank(&self, key: &str) -> bool {
        self.source.root.find(key).is_some_and(names_nothing)
    }

    fn within<T: PartialOrd + Display + Copy>(
        &self,
        key: &str,
        value: T,
        range: RangeInclusive<T>,
    ) -> Checked {
        if range.contains(&value) {
            return Ok(());
        }
        let expected = if value < *range.start() {
            format!("at least {}", range.start())
        } else {
            format!("at most {}", range.end())
        };
        self.refuse(key, value, &expected, None)
    }

    fn refuse(&self, key: &str, found: impl Display, expected: &str, hint: Option<String>) -> Checked {
        Err(self
            .source
            .error(key, format!("`{key}` is {found}, expected {expected}"), hint))
    }
}

/// True for an empty path, also in a list.
fn names_nothing(node: &Node) -> bool {
    match &node.value {
        Value::Text(text) => text.is_empty(),
        Value::List(nodes) => nodes.iter().any(names_nothing),
        _ => false,
    }
}

/// A number that was finite before it was made one of 32 bits.
fn narrowed(value: f32) -> String {
    match value {
        f32::INFINITY => "too large".into(),
        f32::NEG_INFINITY => "too far below 0".into(),
        value => value.to_string(),
    }
}
