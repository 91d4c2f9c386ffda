//! The names of all keys, and the one that was meant.

use std::path::PathBuf;
use std::sync::OnceLock;

use super::schema::{
    CheckpointKeep, Data, LastBatch, Model, ModelKind, Order, Parallel, Run, Train, TrainConfig,
};
use super::tokenizer::Tokenizer;

/// What to write instead of the unknown key `key` of section `section` (empty at the top), whose keys are
/// `expected`.
pub(super) fn suggestion(section: &str, key: &str, expected: &[&str]) -> String {
    let join = |key: &str| {
        if section.is_empty() {
            key.to_owned()
        } else {
            format!("{section}.{key}")
        }
    };
    let nearest = expected
        .iter()
        .map(|k| (strsim::damerau_levenshtein(k, key), *k))
        .min();
    if let Some((distance, nearest)) = nearest
        && distance <= (key.chars().count() / 3).max(1)
    {
        return format!("did you mean `{}`?", join(nearest));
    }
    let elsewhere = all().iter().find(|path| path.rsplit('.').next() == Some(key));
    if let Some(path) = elsewhere {
        return format!("did you mean `{path}`?");
    }
    let names: Vec<String> = expected.iter().map(|k| format!("`{k}`")).collect();
    let of = if section.is_empty() {
        "the file".into()
    } else {
        format!("`{section}`")
    };
    format!("the keys of {of} are {}", names.join(", "))
}

/// Dotted paths of all keys, sections before what is in them.
pub(super) fn all() -> &'static [String] {
    static ALL: OnceLock<Vec<String>> = OnceLock::new();
    ALL.get_or_init(|| {
        // Absent values serialise as `null`, so that one example shows every key.
        let example = TrainConfig {
            run: Run::default(),
            model: Model {
                kind: ModelKind::Gpt2,
                n_layer: 1,
                n_head: 1,
                n_embd: 1,
                block_size: 1,
                vocab_size: None,
                init_from: None,
            },
            data: Data {
                train: PathBuf::new().into(),
                val: None,
                tokenizer: Tokenizer::default(),
                order: Order::default(),
                last_batch: LastBatch::default(),
            },
            train: Train {
                checkpoint_keep: Some(CheckpointKeep { last: 1, every: None }),
                ..Train::default()
            },
            parallel: Parallel::default(),
            launch: std::collections::BTreeMap::new(),
        };
        let mut paths = Vec::new();
        collect("", &serde_json::to_value(example).unwrap_or_default(), &mut paths);
        paths
    })
}

fn collect(above: &str, value: &serde_json::Value, paths: &mut Vec<String>) {
    let serde_json::Value::Object(entries) = value else {
        return;
    };
    for (key, value) in entries {
        let path = if above.is_empty() {
            key.clone()
        } else {
            format!("{above}.{key}")
        };
        paths.push(path.clone());
        collect(&path, value, paths);
    }
}
