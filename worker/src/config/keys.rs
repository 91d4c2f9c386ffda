//! The keys of `train.yaml`: one table of path, default, allowed values and words, and the pass that checks a file
//! against it.
//!
//! A new key is a field in [`super::schema`], a row here, and a row of the table in `docs/configuration.md`. Tests
//! compare the three. Rules over several keys are in [`super::load`].

use std::fmt;
use std::ops::RangeInclusive;

use serde::de::DeserializeOwned;
use serde_json::{Value as Json, json};

use super::schema::{
    Model, ModelKind, OptimizerConfig, OptimizerGroup, OptimizerKind, Parallel, Pipeline, PipelineSchedule,
    Run, Schedule, ShardGroup, StepRange, Tokenizer, Train,
};
use super::source::{ConfigError, Node, Origin, Source, Value};

/// A row of the table.
pub(super) struct Key {
    pub(super) path: &'static str,
    pub(super) presence: Presence,
    pub(super) allowed: Allowed,
}

/// What it means to leave a key out. Defaults are written as in YAML.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    /// This default counts.
    Or(&'static str),
    /// The same, and `null` is a value too: there is none. It is the default where no other is given.
    Nullable(Option<&'static str>),
    /// It is an error.
    Required,
}

/// The values of a key.
pub(super) enum Allowed {
    /// `true` or `false`.
    Flag,
    /// A whole number of this range.
    Whole(RangeInclusive<u64>),
    /// A finite number; the words, and the test of it as f32.
    Number(&'static str, fn(f32) -> bool),
    /// One of these words.
    Word(&'static [&'static str]),
    /// Any value that passes the test; the words.
    Form(&'static str, fn(&Value) -> bool),
}

use Allowed::{Flag, Form, Number, Whole, Word};
use Presence::{Nullable, Or, Required};

/// The default of a nullable key.
const NONE: Presence = Nullable(None);

/// Larger sizes are mistakes; the bound keeps products of sizes far from overflow.
const SIZE: Allowed = Whole(1..=1 << 24);
/// Ranks along an axis, or chunks of a rank.
const DEGREE: Allowed = Whole(1..=1 << 12);
const STEPS: Allowed = Whole(1..=1 << 40);
const FROM_ZERO: Allowed = Whole(0..=u64::MAX);
const ABOVE_ZERO: Allowed = Number("a number above 0", |x| x > 0.0);
const NOT_NEGATIVE: Allowed = Number("a number, 0 or more", |x| x >= 0.0);
const BELOW_ONE: Allowed = Number("a number from 0 to below 1", |x| (0.0..1.0).contains(&x));
const MIB: Allowed = Number("a number above 0, at most 65536", |x| x > 0.0 && x <= 65_536.0);
const SECONDS: Allowed = Number("a number above 0, at most 86400", |x| x > 0.0 && x <= 86_400.0);
const NAME: Allowed = Form(
    "a name for a directory: not empty, without `/`, not starting with a dot",
    |value| matches!(value, Value::Text(name) if !name.is_empty() && !name.contains(['/', '\0']) && !name.starts_with('.')),
);
const DIRECTORY: Allowed = Form("the path of a directory", is_path);
const WEIGHTS: Allowed = Form("the path of a directory or of a `.safetensors` file", is_path);
const TOKENIZER: Allowed = Form(
    "`bytes`, `gpt2` or the path of a `tokenizer.json`",
    is_read_as::<Tokenizer>,
);
const GROUPS: Allowed = Form(
    "a list of at most 15 sections of `params`, `lr_scale` and `weight_decay`",
    are_groups,
);
const DATA: Allowed = Form("a path (a string), or a list of them", names_files);

const fn key(path: &'static str, presence: Presence, allowed: Allowed) -> Key {
    Key {
        path,
        presence,
        allowed,
    }
}

/// In the order of the schema. A section has no row: it is what stands before a dot.
#[rustfmt::skip]
pub(super) const KEYS: &[Key] = &[
    key("run.name", Or("train"), NAME),
    key("run.out_dir", NONE, DIRECTORY),
    key("run.seed", Or("1337"), FROM_ZERO),
    key("run.resume", Or("never"), Word(&["never", "auto", "require"])),
    key("run.overwrite", Or("false"), Flag),
    key("run.timeline", NONE, Form("steps as `10-12`, or one step, from 1 on", is_read_as::<StepRange>)),
    key("run.tensorboard", Or("false"), Flag),
    key("model.kind", Required, Word(ModelKind::WORDS)),
    key("model.n_layer", Required, Whole(1..=1 << 12)),
    key("model.n_head", Or("1"), Whole(1..=1 << 12)),
    key("model.n_kv_head", NONE, Whole(1..=1 << 12)),
    key("model.n_embd", Required, Whole(1..=1 << 17)),
    key("model.n_inner", NONE, Whole(1..=1 << 20)),
    key("model.block_size", Required, Whole(1..=1 << 20)),
    key("model.vocab_size", NONE, Whole(1..=1 << 22)),
    key("model.norm_eps", Or("1e-5"), ABOVE_ZERO),
    key("model.rope_theta", Or("10000.0"), ABOVE_ZERO),
    key("model.rope_scaling.factor", Required, ABOVE_ZERO),
    key("model.rope_scaling.low_freq_factor", Required, ABOVE_ZERO),
    key("model.rope_scaling.high_freq_factor", Required, ABOVE_ZERO),
    key("model.rope_scaling.original_positions", Required, SIZE),
    key("model.tied", NONE, Flag),
    key("model.init_from", NONE, WEIGHTS),
    key("model.dropout", Or("0.0"), BELOW_ONE),
    key("data.train", Required, DATA),
    key("data.val", NONE, DATA),
    key("data.tokenizer", Or("bytes"), TOKENIZER),
    key("data.order", Or("shuffled"), Word(&["shuffled", "sequential"])),
    key("data.last_batch", Or("wrap"), Word(&["wrap", "short"])),
    key("train.steps", Or("1000"), STEPS),
    key("train.micro_batch", Or("8"), SIZE),
    key("train.grad_accumulation", Or("1"), SIZE),
    key("train.precision", Or("f32"), Word(&["f32", "bf16", "tf32"])),
    key("train.on_nonfinite", Or("stop"), Word(&["stop", "skip"])),
    key("train.max_skips", Or("10"), STEPS),
    key("train.recompute", Or("none"), Word(&["never", "none", "selective", "full"])),
    key("train.grad_clip", Nullable(Some("1.0")), Number("a number above 0, or empty not to clip", |x| x > 0.0)),
    key("train.optimizer.kind", Or("adamw"), Word(OptimizerKind::WORDS)),
    key("train.optimizer.lr", Or("3e-4"), NOT_NEGATIVE),
    key("train.optimizer.betas", NONE, Form("two numbers from 0 to below 1", are_betas)),
    key("train.optimizer.eps", Or("1e-8"), ABOVE_ZERO),
    key("train.optimizer.weight_decay", Or("0.1"), NOT_NEGATIVE),
    key("train.optimizer.momentum", NONE, BELOW_ONE),
    key("train.optimizer.nesterov", NONE, Flag),
    key("train.optimizer.groups", Or("[]"), GROUPS),
    key("train.offload.optimizer", Or("none"), Word(&["none", "file", "host"])),
    key("train.offload.dir", NONE, DIRECTORY),
    key("train.schedule.kind", Or("cosine"), Word(&["cosine", "linear", "constant", "wsd", "inverse_sqrt"])),
    key("train.schedule.warmup_steps", Or("0"), FROM_ZERO),
    key("train.schedule.decay_steps", NONE, STEPS),
    key("train.schedule.min_lr", Or("0.0"), NOT_NEGATIVE),
    key("train.rescale", Or("keep_global_batch"), Word(&["keep_global_batch", "keep_micro_batch"])),
    key("train.lr_scaling", Or("none"), Word(&["none", "linear"])),
    key("train.base_batch", NONE, STEPS),
    key("train.eval_every", Or("0"), FROM_ZERO),
    key("train.checkpoint_every", Or("0"), FROM_ZERO),
    key("train.checkpoint_async", Or("true"), Flag),
    key("train.checkpoint_timeout_s", Or("300.0"), SECONDS),
    key("train.checkpoint_keep.last", Required, SIZE),
    key("train.checkpoint_keep.every", NONE, STEPS),
    key("train.verify_every", Or("0"), FROM_ZERO),
    key("train.log_every", NONE, STEPS),
    key("train.threads", NONE, Whole(1..=1 << 12)),
    key("parallel.strategy", Or("ddp"), Word(&["ddp", "zero1", "zero2", "zero3"])),
    key("parallel.accumulate", Or("sharded"), Word(&["sharded", "full"])),
    key("parallel.reshard_after_forward", Or("true"), Flag),
    key("parallel.persist_below", Or("0"), FROM_ZERO),
    key("parallel.reduce_dtype", Or("f32"), Word(&["f32", "bf16"])),
    key("parallel.shard_group", NONE, Form("`node` or a number of ranks, at least 1", is_shard_group)),
    key("parallel.tensor", Or("1"), DEGREE),
    key("parallel.sequence", Or("false"), Flag),
    key("parallel.tensor_across_nodes", Or("false"), Flag),
    key("parallel.pipeline.stages", Or("1"), DEGREE),
    key("parallel.pipeline.schedule", Or("1f1b"), Word(PipelineSchedule::WORDS)),
    key("parallel.pipeline.chunks", NONE, DEGREE),
    key("parallel.pipeline.layers", NONE, Form("a list of numbers, each at least 1", are_layers)),
    key("parallel.sync", Or("bucketed"), Word(&["bucketed", "per-parameter", "naive"])),
    key("parallel.overlap", Or("true"), Flag),
    key("parallel.bucket_mb", Or("25.0"), MIB),
    key("parallel.first_bucket_mb", Or("1.0"), MIB),
    key("parallel.backend", Or("auto"), Word(&["auto", "cpu", "nccl"])),
    key("parallel.timeout_s", Or("300.0"), SECONDS),
    key("launch.<flag>", NONE, Form("finite numbers", is_finite)),
];

fn is_read_as<T: DeserializeOwned>(value: &Value) -> bool {
    serde_json::from_value::<T>(value.json()).is_ok()
}

fn is_shard_group(value: &Value) -> bool {
    !matches!(value, Value::Unsigned(0)) && is_read_as::<ShardGroup>(value)
}

fn are_betas(value: &Value) -> bool {
    let betas = serde_json::from_value::<[f32; 2]>(value.json());
    betas.is_ok_and(|betas| betas.iter().all(|beta| (0.0..1.0).contains(beta)))
}

fn are_layers(value: &Value) -> bool {
    let layers = serde_json::from_value::<Vec<u32>>(value.json());
    layers.is_ok_and(|layers| !layers.is_empty() && layers.iter().all(|layers| *layers > 0))
}

fn are_groups(value: &Value) -> bool {
    let is_rate = |x: &f32| *x >= 0.0 && x.is_finite();
    let groups = serde_json::from_value::<Vec<OptimizerGroup>>(value.json());
    groups.is_ok_and(|groups| {
        let is_good = |group: &OptimizerGroup| {
            is_rate(&group.lr_scale) && group.weight_decay.as_ref().is_none_or(is_rate)
        };
        groups.len() <= OptimizerGroup::MOST && groups.iter().all(is_good)
    })
}

fn is_path(value: &Value) -> bool {
    matches!(value, Value::Text(text) if !text.is_empty())
}

/// True for a path, or a list of paths, none of them empty.
fn names_files(value: &Value) -> bool {
    match value {
        Value::List(nodes) => !nodes.is_empty() && nodes.iter().all(|node| is_path(&node.value)),
        one => is_path(one),
    }
}

fn is_finite(value: &Value) -> bool {
    match value {
        Value::Float(x) => x.is_finite(),
        Value::List(nodes) => nodes.iter().all(|node| is_finite(&node.value)),
        Value::Map(entries) => entries.iter().all(|entry| is_finite(&entry.node.value)),
        _ => true,
    }
}

/// A section, from values in which some keys may be left out: in a checkpoint of an older build, those that were added
/// since. `path` is that of the section, or nothing for the whole configuration.
pub fn section<T: DeserializeOwned>(path: &str, mut values: Json) -> serde_json::Result<T> {
    for key in KEYS {
        let (Or(default) | Nullable(Some(default))) = key.presence else {
            continue;
        };
        let Some(below) = key.path.strip_prefix(path) else {
            continue;
        };
        let (sections, name) = below.rsplit_once('.').unwrap_or(("", below));
        let mut sections = sections.split('.').filter(|section| !section.is_empty());
        let section = sections.try_fold(&mut values, |above, section| {
            let above = above.as_object_mut()?.entry(section);
            Some(above.or_insert_with(|| json!({})))
        });
        if let Some(Json::Object(section)) = section {
            let default = || serde_json::from_str(default).unwrap_or_else(|_| default.into());
            section.entry(name).or_insert_with(default);
        }
    }
    serde_json::from_value(values)
}

fn defaults<T: DeserializeOwned>(path: &str) -> T {
    section(path, json!({})).expect("the table has a default for each key of the section")
}

impl Default for Run {
    fn default() -> Self {
        defaults("run")
    }
}

/// One layer of GPT-2 with one channel: for those who set what they need.
impl Default for Model {
    fn default() -> Self {
        let smallest = json!({ "kind": "gpt2", "n_layer": 1, "n_embd": 1, "block_size": 1 });
        section("model", smallest).expect("the table has a default for each other key")
    }
}

impl Default for Train {
    fn default() -> Self {
        defaults("train")
    }
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        defaults("train.optimizer")
    }
}

impl Default for Schedule {
    fn default() -> Self {
        defaults("train.schedule")
    }
}

impl Default for Pipeline {
    fn default() -> Self {
        defaults("parallel.pipeline")
    }
}

impl Default for Parallel {
    fn default() -> Self {
        defaults("parallel")
    }
}

/// Checks a configuration against the table; the values as JSON. The first error in the order of the file counts.
pub(super) fn read(source: &Source) -> Result<Json, ConfigError> {
    checked(source, "", source.root())
}

/// The section whose keys begin with `prefix`: nothing, or a path and its dot.
fn checked(source: &Source, prefix: &str, node: &Node) -> Result<Json, ConfigError> {
    let entries = match &node.value {
        Value::Map(entries) => entries.as_slice(),
        Value::Null => &[],
        other => {
            let (subject, found) = (subject(prefix), found(other));
            let problem = format!("{subject} is {found}, expected a section with keys");
            return Err(source.error_at(node.origin, problem, meant_key(prefix, other)));
        }
    };
    let mut values = serde_json::Map::new();
    for entry in entries {
        let (path, node) = (format!("{prefix}{}", entry.key), &entry.node);
        let value = if let Some(key) = find(&path) {
            key.check(source, &path, node)?;
            node.value.json()
        } else if is_section(&path) {
            // All of its keys are commented out.
            if matches!(node.value, Value::Null) && path.contains('.') {
                continue;
            }
            checked(source, &format!("{path}."), node)?
        } else {
            let problem = format!("unknown key `{path}`");
            let place = source.place_without_value(entry.origin);
            let hint = Some(suggestion(prefix, &entry.key));
            return Err(ConfigError { place, problem, hint });
        };
        values.insert(entry.key.clone(), value);
    }
    match missing(source, prefix, &values) {
        None => Ok(values.into()),
        Some((problem, hint)) => Err(source.error_at(node.origin, problem, Some(hint))),
    }
}

/// A required section or key with this prefix that `values` lacks, and what to write.
fn missing(
    source: &Source,
    prefix: &str,
    values: &serde_json::Map<String, Json>,
) -> Option<(String, String)> {
    let required = KEYS.iter().filter(|key| key.presence == Required);
    let mut below = required.filter_map(|key| key.path.strip_prefix(prefix));
    below.find_map(|rest| match rest.split_once('.') {
        None if !values.contains_key(rest) => Some((
            format!("`{prefix}{rest}` is missing"),
            outside(source, prefix, rest)
                .unwrap_or_else(|| format!("add `{rest}: …` under `{}:`", prefix.trim_end_matches('.'))),
        )),
        Some((section, key)) if prefix.is_empty() && !key.contains('.') && !values.contains_key(section) => {
            Some((
                format!("section `{section}` is missing"),
                "a configuration needs at least the sections `model` and `data`".into(),
            ))
        }
        _ => None,
    })
}

/// What to write if a key of this section stands outside of all sections in the file.
fn outside(source: &Source, prefix: &str, key: &str) -> Option<String> {
    let Value::Map(entries) = &source.root().value else {
        return None;
    };
    let entry = entries.iter().find(|entry| entry.key == key)?;
    let Origin::Line(line) = entry.origin else {
        return None;
    };
    let section = prefix.trim_end_matches('.');
    Some(format!(
        "line {line} has `{key}` at the top level: indent it under `{section}:`"
    ))
}

impl Key {
    fn check(&self, source: &Source, path: &str, node: &Node) -> Result<(), ConfigError> {
        if matches!(node.value, Value::Null) && matches!(self.presence, Nullable(_)) {
            return Ok(());
        }
        let Some((found, expected)) = self.allowed.refusal(&node.value) else {
            return Ok(());
        };
        let problem = format!("`{path}` is {found}, expected {expected}");
        let hint = self.allowed.hint(&node.value);
        Err(source.error_at(
            node.origin,
            problem,
            hint.or_else(|| size_hint(path, &node.value)),
        ))
    }
}

impl Allowed {
    /// What was found and what is expected, in words; none for a value that is allowed.
    fn refusal(&self, value: &Value) -> Option<(String, String)> {
        let (is_allowed, found) = match (self, value) {
            (_, Value::Float(x)) if !x.is_finite() => {
                let expected = match self {
                    Number(..) | Form("finite numbers", _) => "a finite number".into(),
                    other => other.to_string(),
                };
                return Some((not_finite(*x).into(), expected));
            }
            (Whole(range), Value::Unsigned(n)) => {
                let bound = if n < range.start() {
                    format!("at least {}", range.start())
                } else {
                    format!("at most {}", range.end())
                };
                return (!range.contains(n)).then(|| (n.to_string(), bound));
            }
            (Flag, Value::Bool(_)) => (true, String::new()),
            (Number(_, is_within), Value::Unsigned(_) | Value::Signed(_) | Value::Float(_)) => {
                let x = value.json().as_f64().unwrap_or_default() as f32;
                (x.is_finite() && is_within(x), narrowed(x))
            }
            (Number(..), other) => return Some((found(other), "a number".into())),
            (Word(words), Value::Text(text)) => (words.contains(&text.as_str()), quoted(text)),
            (Form(_, fits), Value::Text(text)) => (fits(value), quoted(text)),
            (Form(_, fits), Value::List(nodes)) if (1..5).contains(&nodes.len()) => {
                (fits(value), value.to_string())
            }
            (Form(_, fits), other) => (fits(value), found(other)),
            (_, other) => (false, found(other)),
        };
        (!is_allowed).then(|| (found, self.to_string()))
    }

    /// The next step for a value of another type, where there is an obvious one.
    fn hint(&self, value: &Value) -> Option<String> {
        if let (Word(words), Value::Text(v)) = (self, value) {
            return meant_word(v, words);
        }
        let is_text = |value: &Value| self.refusal(&Value::Text(value.to_string())).is_none();
        match value {
            Value::Float(v) if !v.is_finite() => None,
            Value::Unsigned(_) | Value::Signed(_) | Value::Float(_) if is_text(value) => {
                Some("put the value in quotes to make it a string".into())
            }
            Value::Float(v) if matches!(self, Whole(_)) => match *v {
                v if v >= u64::MAX as f64 => Some(format!("the largest value is {}", u64::MAX)),
                v if v >= 0.0 && v.fract() == 0.0 => {
                    Some(format!("write it without a point or an exponent: `{v}`"))
                }
                _ => None,
            },
            Value::Text(v) if matches!(self, Whole(_)) && v.parse::<u64>().is_ok() => {
                Some("remove the quotes to make it a number".into())
            }
            _ => None,
        }
    }
}

/// Words of other programs, with what they are here; without hyphens and in lower case.
const WORDS_OF_OTHERS: &[(&str, &str)] = &[
    ("fsdp", "zero3"),
    ("fsdp2", "zero3"),
    ("fullshard", "zero3"),
    ("hybridshard", "zero3"),
    ("shardgradop", "zero2"),
    ("stage1", "zero1"),
    ("stage2", "zero2"),
    ("stage3", "zero3"),
    ("dp", "ddp"),
    ("fp32", "f32"),
    ("float32", "f32"),
    ("bfloat16", "bf16"),
    ("adam", "adamw"),
    ("gloo", "cpu"),
    ("cuda", "nccl"),
    ("gpu", "nccl"),
];

/// Keys of other programs, in whichever section, with what they are here.
pub(super) const KEYS_OF_OTHERS: &[(&str, &str)] = &[
    ("batch_size", "train.micro_batch"),
    ("micro_batch_size", "train.micro_batch"),
    ("per_device_train_batch_size", "train.micro_batch"),
    ("epochs", "train.steps"),
    ("num_epochs", "train.steps"),
    ("max_steps", "train.steps"),
    ("learning_rate", "train.optimizer.lr"),
    ("gradient_accumulation_steps", "train.grad_accumulation"),
    ("micro_batches", "train.grad_accumulation"),
    ("num_micro_batches", "train.grad_accumulation"),
    ("zero", "parallel.strategy"),
    ("zero_stage", "parallel.strategy"),
    ("fsdp", "parallel.strategy"),
    ("tp", "parallel.tensor"),
    ("tp_size", "parallel.tensor"),
    ("pp", "parallel.pipeline.stages"),
    ("pp_size", "parallel.pipeline.stages"),
    ("hidden_size", "model.n_embd"),
    ("d_model", "model.n_embd"),
    ("num_layers", "model.n_layer"),
    ("num_hidden_layers", "model.n_layer"),
    ("num_heads", "model.n_head"),
    ("num_attention_heads", "model.n_head"),
    ("intermediate_size", "model.n_inner"),
    ("seq_len", "model.block_size"),
    ("n_ctx", "model.block_size"),
    ("max_seq_len", "model.block_size"),
    ("context_length", "model.block_size"),
    ("device", "parallel.backend"),
    ("tensor_parallel", "parallel.tensor"),
    ("pipeline_parallel", "parallel.pipeline.stages"),
    ("output_dir", "run.out_dir"),
    ("save_steps", "train.checkpoint_every"),
    ("eval_steps", "train.eval_every"),
    ("logging_steps", "train.log_every"),
    ("max_grad_norm", "train.grad_clip"),
    ("gradient_clipping", "train.grad_clip"),
    ("gradient_checkpointing", "train.recompute"),
    ("activation_checkpointing", "train.recompute"),
    ("mixed_precision", "train.precision"),
    ("dtype", "train.precision"),
    ("resume_from_checkpoint", "run.resume"),
];

/// The key that a value was meant for which stands in the place of its section: the section's first, if it takes it.
fn meant_key(prefix: &str, value: &Value) -> Option<String> {
    let (key, name) = KEYS
        .iter()
        .find_map(|key| Some((key, key.path.strip_prefix(prefix)?)))?;
    let is_meant = !prefix.is_empty() && name != "<flag>" && key.allowed.refusal(value).is_none();
    let section = prefix
        .trim_end_matches('.')
        .rsplit('.')
        .next()
        .unwrap_or_default();
    is_meant.then(|| format!("did you mean `{section}: {{ {name}: {value} }}`?"))
}

/// What a word means that other programs have, or that is only spelled otherwise.
fn meant_word(found: &str, words: &[&str]) -> Option<String> {
    let plain = |word: &str| word.to_lowercase().replace(['-', '_', ' '], "");
    let found_plain = plain(found);
    if matches!(found_plain.as_str(), "deepspeed" | "zero") && words.contains(&"zero1") {
        return Some("the stages of DeepSpeed's ZeRO are `zero1`, `zero2` and `zero3` here".into());
    }
    let known = WORDS_OF_OTHERS.iter().find(|(theirs, _)| *theirs == found_plain);
    let ours = known.map_or(found_plain.as_str(), |(_, ours)| ours);
    let word = words.iter().find(|word| plain(word) == plain(ours))?;
    Some(format!("`{found}` is `{word}` here"))
}

/// The number to write for a size with its unit. As elsewhere in training, `GB` is taken for GiB.
fn size_hint(path: &str, value: &Value) -> Option<String> {
    let Value::Text(text) = value else { return None };
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(unit_at);
    let mib = match unit.trim().to_ascii_lowercase().as_str() {
        "k" | "kb" | "kib" => 1.0 / 1024.0,
        "m" | "mb" | "mib" => 1.0,
        "g" | "gb" | "gib" => 1024.0,
        _ => return None,
    };
    let number = number.parse::<f64>().ok().filter(|_| path.ends_with("_mb"))?;
    Some(format!("write the number of MiB: `{}`", number * mib))
}

/// What is expected.
impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flag => f.write_str("`true` or `false`"),
            Whole(range) => write!(f, "a whole number, {} or more", range.start()),
            Word(words) => write!(f, "`{}`", words.join("` or `")),
            Number(words, _) | Form(words, _) => f.write_str(words),
        }
    }
}

/// A value of another type than expected, as people would write or call it.
fn found(value: &Value) -> String {
    match value {
        Value::Null => "empty".into(),
        Value::Bool(_) => format!("`{value}`"),
        Value::Float(v) => format!("the number `{v:?}`"),
        Value::Unsigned(_) | Value::Signed(_) => format!("the number `{value}`"),
        Value::Text(v) => format!("the string `{v}`"),
        Value::List(nodes) if nodes.is_empty() => "an empty list".into(),
        Value::List(_) => "a list".into(),
        Value::Map(_) => "a section".into(),
    }
}

fn quoted(text: &str) -> String {
    if text.is_empty() {
        "empty".into()
    } else {
        format!("`{text}`")
    }
}

/// YAML has numbers that are not finite, and makes one of what is too large; no key takes them.
fn not_finite(value: f64) -> &'static str {
    match value {
        v if v.is_nan() => "`.nan`",
        v if v > 0.0 => "`.inf`, or too large",
        _ => "`-.inf`, or too far below 0",
    }
}

/// A number that was finite before it was narrowed to 32 bits.
fn narrowed(value: f32) -> String {
    match value {
        f32::INFINITY => "too large".into(),
        f32::NEG_INFINITY => "too far below 0".into(),
        value => value.to_string(),
    }
}

fn find(path: &str) -> Option<&'static Key> {
    let path = if path.starts_with("launch.") {
        "launch.<flag>"
    } else {
        path
    };
    KEYS.iter().find(|key| key.path == path)
}

fn is_section(path: &str) -> bool {
    let is_above = |key: &Key| {
        key.path
            .strip_prefix(path)
            .is_some_and(|rest| rest.starts_with('.'))
    };
    KEYS.iter().any(is_above)
}

/// The section with this prefix.
fn subject(prefix: &str) -> String {
    match prefix.trim_end_matches('.') {
        "" => "the file".into(),
        path => format!("`{path}`"),
    }
}

/// What to write instead of an unknown key of a section.
fn suggestion(prefix: &str, key: &str) -> String {
    if let Some((name, value)) = key.split_once(':')
        && (find(&format!("{prefix}{name}")).is_some() || is_section(&format!("{prefix}{name}")))
    {
        return format!("put a space after the colon: `{name}: {}`", value.trim_start());
    }
    if let Some((_, ours)) = KEYS_OF_OTHERS.iter().find(|(theirs, _)| *theirs == key) {
        return format!("did you mean `{ours}`?");
    }
    let mut siblings: Vec<&str> = Vec::new();
    for known in KEYS.iter().filter_map(|key| key.path.strip_prefix(prefix)) {
        let name = known.split('.').next().unwrap_or(known);
        if !siblings.contains(&name) {
            siblings.push(name);
        }
    }
    let distances = siblings
        .iter()
        .map(|name| (strsim::damerau_levenshtein(name, key), *name));
    if let Some((distance, nearest)) = distances.min()
        && distance <= (key.chars().count() / 3).max(1)
    {
        return format!("did you mean `{prefix}{nearest}`?");
    }
    let elsewhere = KEYS.iter().find(|known| known.path.ends_with(&format!(".{key}")));
    elsewhere.map_or_else(
        || format!("the keys of {} are `{}`", subject(prefix), siblings.join("`, `")),
        |known| format!("did you mean `{}`?", known.path),
    )
}
