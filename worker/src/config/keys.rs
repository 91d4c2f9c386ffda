//! The pass that checks a file against the table of keys, and what it suggests for a key or a word that it does not
//! know. Rules over several keys are in [`super::load`].

use std::ops::RangeInclusive;

use serde::Serialize;
use serde_json::Value as Json;

use super::problem::{ConfigError, Problem};
use super::schema::keys;
use super::source::{Node, Source, Value};
use super::table::Allowed::{Flag, Form, Number, Whole, Word};
use super::table::{Allowed, Key, is_for_a_shell};

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
            let what = format!("{subject} is {found}, expected a section with keys");
            return Err(source.error_at(node.origin, Problem::new(prefix, what)));
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
            let hint = suggestion(prefix, &entry.key);
            let problem = Problem::new(&path, format!("unknown key `{path}`")).with_hint(hint);
            let place = source.place_without_value(entry.origin);
            return Err(ConfigError { place, problem });
        };
        values.insert(entry.key.clone(), value);
    }
    match missing(prefix, &values) {
        None => Ok(values.into()),
        Some(problem) => Err(source.error_at(node.origin, problem)),
    }
}

/// A required section or key with this prefix that `values` lacks, and what to write.
fn missing(prefix: &str, values: &serde_json::Map<String, Json>) -> Option<Problem> {
    let required = keys().filter(|key| key.is_required());
    let mut below = required.filter_map(|key| key.path.strip_prefix(prefix));
    below.find_map(|rest| match rest.split_once('.') {
        None if !values.contains_key(rest) => {
            let hint = format!("add `{rest}: …` under `{}:`", prefix.trim_end_matches('.'));
            Some(Problem::new(prefix, format!("`{prefix}{rest}` is missing")).with_hint(hint))
        }
        Some((section, key)) if prefix.is_empty() && !key.contains('.') && !values.contains_key(section) => {
            let problem = Problem::new("", format!("section `{section}` is missing"));
            Some(problem.with_hint("a configuration needs at least the sections `model` and `data`"))
        }
        _ => None,
    })
}

impl Key {
    fn check(&self, source: &Source, path: &str, node: &Node) -> Result<(), ConfigError> {
        if matches!(node.value, Value::Null) && self.is_nullable {
            return Ok(());
        }
        let Some((found, expected)) = self.allowed.refusal(&node.value) else {
            return Ok(());
        };
        let what = format!("`{path}` is {found}, expected {expected}");
        let problem = Problem::new(path, what).with_optional_hint(self.allowed.hint(&node.value));
        Err(source.error_at(node.origin, problem))
    }
}

/// A whole number of a section that was not read from a file and is out of its key's range.
pub(crate) fn out_of_range(path: &str, section: &impl Serialize) -> Option<Problem> {
    let values = serde_json::to_value(section).ok()?;
    keys().find_map(|key| {
        let name = key.path.strip_prefix(path)?.strip_prefix('.')?;
        let Whole(range) = &key.allowed else { return None };
        let n = values.get(name)?.as_u64().filter(|n| !range.contains(n))?;
        let what = format!("`{}` is {n}, expected {}", key.path, bound(range, n));
        Some(Problem::new(key.path, what))
    })
}

/// The bound of a range that a number breaks.
fn bound(range: &RangeInclusive<u64>, n: u64) -> String {
    if n < *range.start() {
        format!("at least {}", range.start())
    } else {
        format!("at most {}", range.end())
    }
}

impl Allowed {
    /// What was found and what is expected. An allowed value gives `None`.
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
                return (!range.contains(n)).then(|| (n.to_string(), bound(range, *n)));
            }
            (Flag, Value::Bool(_)) => (true, String::new()),
            (Number(_, is_within), Value::Unsigned(_) | Value::Signed(_) | Value::Float(_)) => {
                let x = value.json().as_f64().unwrap_or_default() as f32;
                (x.is_finite() && is_within(x), narrowed(x))
            }
            (Number(..), other) => return Some((found(other), "a number".into())),
            (Word(words), Value::Text(text)) => (words.iter().any(|(word, _)| word == text), quoted(text)),
            (Form(_, fits), Value::Text(text)) => (fits(value), quoted(text)),
            (Form(_, fits), Value::List(nodes)) if (1..5).contains(&nodes.len()) => {
                (fits(value), value.to_string())
            }
            (Form(_, fits), other) => (fits(value), found(other)),
            (_, other) => (false, found(other)),
        };
        let expected = || match self {
            Form(..) if is_for_a_shell(value) => "a path without `~` and `$`".to_owned(),
            _ => self.to_string(),
        };
        (!is_allowed).then(|| (found, expected()))
    }

    /// The next step for a value of another type, where there is an obvious one.
    fn hint(&self, value: &Value) -> Option<String> {
        if let (Word(words), Value::Text(v)) = (self, value) {
            return meant_word(v, words);
        }
        if matches!(self, Form(..)) && is_for_a_shell(value) {
            return Some("`~` and variables are not expanded: write the whole path".into());
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

/// Our words, and those of other programs that mean the same; without hyphens and in lower case.
const WORDS_OF_OTHERS: &[(&str, &str)] = &[
    ("zero1", "stage1"),
    ("zero2", "shardgradop stage2"),
    ("zero3", "fsdp fsdp2 fullshard hybridshard stage3"),
    ("ddp", "dp"),
    ("f32", "fp32 float32"),
    ("bf16", "bfloat16"),
    ("adamw", "adam"),
    ("cpu", "gloo"),
    ("nccl", "cuda gpu"),
];

/// Our keys, and those of other programs that mean the same, in any section.
pub(super) const KEYS_OF_OTHERS: &[(&str, &str)] = &[
    (
        "train.micro_batch",
        "batch_size micro_batch_size per_device_train_batch_size",
    ),
    ("train.steps", "epochs num_epochs max_steps"),
    ("train.optimizer.lr", "learning_rate"),
    (
        "train.grad_accumulation",
        "gradient_accumulation_steps micro_batches num_micro_batches",
    ),
    ("parallel.strategy", "zero zero_stage fsdp"),
    ("parallel.context", "cp cp_size context_parallel"),
    ("parallel.expert", "ep ep_size expert_parallel"),
    ("parallel.tensor", "tp tp_size tensor_parallel"),
    ("parallel.pipeline.stages", "pp pp_size pipeline_parallel"),
    ("model.n_embd", "hidden_size d_model"),
    ("model.n_layer", "num_layers num_hidden_layers"),
    ("model.n_head", "num_heads num_attention_heads"),
    ("model.n_inner", "intermediate_size"),
    ("model.block_size", "seq_len n_ctx max_seq_len context_length"),
    ("parallel.backend", "device"),
    ("run.out_dir", "output_dir"),
    ("train.checkpoint_every", "save_steps"),
    ("train.eval_every", "eval_steps"),
    ("train.log_every", "logging_steps"),
    ("train.grad_clip", "max_grad_norm gradient_clipping"),
    (
        "train.recompute",
        "gradient_checkpointing activation_checkpointing",
    ),
    ("train.precision", "mixed_precision dtype"),
    ("run.resume", "resume_from_checkpoint"),
];

/// Our name for one of another program.
fn ours(table: &[(&'static str, &str)], theirs: &str) -> Option<&'static str> {
    let row = table
        .iter()
        .find(|(_, all)| all.split(' ').any(|name| name == theirs));
    row.map(|(ours, _)| *ours)
}

/// What a word means that other programs have, or that is only spelled otherwise.
fn meant_word(found: &str, words: &[(&str, &str)]) -> Option<String> {
    let plain = |word: &str| word.to_lowercase().replace(['-', '_', ' '], "");
    let found_plain = plain(found);
    if matches!(found_plain.as_str(), "deepspeed" | "zero") && words.iter().any(|(word, _)| *word == "zero1")
    {
        return Some("the stages of DeepSpeed's ZeRO are `zero1`, `zero2` and `zero3` here".into());
    }
    let ours = ours(WORDS_OF_OTHERS, &found_plain).unwrap_or(&found_plain);
    let (word, _) = words.iter().find(|(word, _)| plain(word) == plain(ours))?;
    Some(format!("`{found}` is `{word}` here"))
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
    keys().find(|key| key.path == path)
}

fn is_section(path: &str) -> bool {
    let is_above = |key: &Key| {
        key.path
            .strip_prefix(path)
            .is_some_and(|rest| rest.starts_with('.'))
    };
    keys().any(is_above)
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
    if let Some(ours) = ours(KEYS_OF_OTHERS, key) {
        return format!("did you mean `{ours}`?");
    }
    let mut siblings: Vec<&str> = Vec::new();
    for known in keys().filter_map(|key| key.path.strip_prefix(prefix)) {
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
    let elsewhere = keys().find(|known| known.path.ends_with(&format!(".{key}")));
    elsewhere.map_or_else(
        || format!("the keys of {} are `{}`", subject(prefix), siblings.join("`, `")),
        |known| format!("did you mean `{}`?", known.path),
    )
}
