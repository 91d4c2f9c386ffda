//! What a checkpoint holds, as a table.

use std::collections::BTreeSet;

use ddp_proto::words::counted;
use ddp_worker::checkpoint::{Reader, TensorKind, TensorRecord};
use serde_json::Value;

use crate::cli::answer;

/// Keys of the configuration that are shown, by section.
const SHOWN: [(&str, &[&str]); 4] = [
    (
        "model",
        &["kind", "n_layer", "n_head", "n_embd", "block_size", "vocab_size"],
    ),
    ("data", &["train", "tokenizer", "order"]),
    (
        "train",
        &["precision", "micro_batch", "grad_accumulation", "steps"],
    ),
    ("parallel", &["strategy"]),
];

/// Explains the table's last columns.
const LEGEND: &str =
    "regions: the boxes of the tensor that were written; ranges: the pieces of these boxes in the files\n";

/// The table.
pub(super) fn table(reader: &Reader) -> String {
    let manifest = reader.manifest();
    let state = &manifest.state;
    let mut rows = vec![
        ("checkpoint".to_owned(), reader.path().display().to_string()),
        (
            "step".into(),
            format!("{}, after {} samples", state.step, state.consumed_samples),
        ),
        (
            "written by".into(),
            format!(
                "{}, format {}",
                counted(writers(reader), "rank"),
                manifest.format_version
            ),
        ),
        ("size".into(), size(reader)),
    ];
    for (section, keys) in SHOWN {
        rows.push((section.into(), settings(&state.config[section], keys)));
    }
    rows.push(("seed".into(), state.rng.seed.to_string()));
    rows.push(("training text".into(), state.data.clone()));
    let mut text = aligned(rows.into_iter().map(|(k, v)| vec![k, v]).collect());
    text.push('\n');
    let head = ["tensor", "type", "shape", "regions", "ranges", "bytes"]
        .map(str::to_owned)
        .to_vec();
    let tensors = manifest.tensors.iter().map(|tensor| {
        vec![
            tensor.name.to_string(),
            tensor.dtype.to_string(),
            format!("{:?}", tensor.shape),
            tensor.regions.len().to_string(),
            tensor.ranges().count().to_string(),
            bytes_of(tensor).to_string(),
        ]
    });
    let lines: Vec<Vec<String>> = std::iter::once(head).chain(tensors).collect();
    text + &aligned(lines) + LEGEND
}

/// That nothing is wrong with a checkpoint, and how much was read to know it.
pub(super) fn sound(reader: &Reader) -> String {
    let manifest = reader.manifest();
    format!(
        "the checkpoint of step {} is complete: {} in {}; all sizes and hashes match\n",
        manifest.state.step,
        counted(manifest.tensors.len(), "tensor"),
        size(reader)
    )
}

/// Ranks that wrote parameters: each wrote one file of them.
fn writers(reader: &Reader) -> usize {
    let tensors = reader.manifest().tensors.iter();
    let parameters = tensors.filter(|tensor| tensor.name.kind == TensorKind::Parameter);
    let files: BTreeSet<&str> = parameters
        .flat_map(TensorRecord::ranges)
        .map(|(_, range)| range.file.as_str())
        .collect();
    files.len()
}

fn size(reader: &Reader) -> String {
    let files = &reader.manifest().files;
    let bytes: u64 = files.iter().map(|file| file.bytes).sum();
    format!("{bytes} bytes in {}", counted(files.len(), "file"))
}

fn bytes_of(tensor: &TensorRecord) -> u64 {
    tensor.elements().unwrap_or(0) * tensor.dtype.bytes() as u64
}

/// `kind gpt2, n_layer 2`
fn settings(section: &Value, keys: &[&str]) -> String {
    let set = keys.iter().filter_map(|key| match &section[key] {
        Value::Null => None,
        Value::String(text) => Some(format!("{key} {text}")),
        value => Some(format!("{key} {value}")),
    });
    set.collect::<Vec<_>>().join(", ")
}

/// Columns as wide as their widest cell, two blanks between them, and none at the end of a line.
fn aligned(rows: Vec<Vec<String>>) -> String {
    let table = answer::table(rows, |_| false);
    // Without the padding of the first column.
    table.lines().flat_map(|line| [line.trim_start(), "\n"]).collect()
}
