//! A model that trains in moments, and the files that a run leaves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Launch, eventually, launch, temp_dir};

/// A configuration with its text, in a folder of its own.
pub(crate) struct TinyJob {
    dir: tempfile::TempDir,
}

/// Large enough for several buckets of work a step, small enough for hundreds of steps a second.
const TINY: &str = "\
run: { name: tiny, out_dir: out, seed: 7 }
model: { kind: gpt2, n_layer: 2, n_head: 2, n_embd: 32, block_size: 32 }
data: { train: text.txt }
train:
  steps: 40
  micro_batch: 2
  checkpoint_every: 5
  optimizer: { kind: adamw, lr: 1.0e-3 }
  threads: 1
";

impl TinyJob {
    pub(crate) fn new() -> Self {
        Self::with(str::to_owned)
    }

    /// The tiny configuration after `edit`.
    pub(crate) fn with(edit: impl FnOnce(&str) -> String) -> Self {
        let dir = temp_dir();
        // Period 61, prime to the block size: every block differs from its neighbours.
        let text: String = (0..8192_u32).map(|i| char::from(b'0' + (i % 61) as u8)).collect();
        std::fs::write(dir.path().join("text.txt"), text).expect("writable");
        std::fs::write(dir.path().join("tiny.yaml"), edit(TINY)).expect("writable");
        Self { dir }
    }

    /// A launch that trains this job.
    pub(crate) fn launch(&self) -> Launch {
        launch().dir(self.dir()).target("tiny.yaml")
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where the run's files are, unless the configuration was edited.
    pub(crate) fn out(&self) -> PathBuf {
        self.dir().join("out")
    }
}

/// The lines of `metrics.jsonl` that are complete.
pub(crate) fn metrics(out: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line of JSON"))
        .collect()
}

/// The only run below `runs/<name>` of `dir`.
#[track_caller]
pub(crate) fn run_dir(dir: &Path, name: &str) -> PathBuf {
    let runs = dir.join("runs").join(name);
    let mut found: Vec<_> = std::fs::read_dir(&runs)
        .expect("a folder of runs")
        .flatten()
        .map(|e| e.path())
        .collect();
    assert_eq!(found.len(), 1, "one run in `{}`", runs.display());
    found.remove(0)
}

/// All files of the latest checkpoint but its manifest: parameters and moments, to the last bit.
#[track_caller]
pub(crate) fn parameters(out: &Path) -> BTreeMap<String, Vec<u8>> {
    let dir = latest(out);
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(&dir).expect("a checkpoint").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("manifest") {
            files.insert(name, std::fs::read(entry.path()).expect("a readable piece"));
        }
    }
    assert!(
        files.values().map(Vec::len).sum::<usize>() > 0,
        "`{}` holds no data",
        dir.display()
    );
    files
}

/// Elements of parameters that `rank` of `ranks` wrote into the latest checkpoint.
#[track_caller]
pub(crate) fn parameters_of(out: &Path, rank: &str, ranks: u32) -> u64 {
    let manifest = std::fs::read(latest(out).join("manifest.json")).expect("a manifest");
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).expect("a manifest of JSON");
    let file = format!("parameters-{rank}-of-{ranks}.safetensors");
    let tensors = manifest["tensors"].as_array().expect("tensors").iter();
    let regions = tensors.flat_map(|tensor| tensor["regions"].as_array().expect("regions"));
    let ranges = regions.flat_map(|region| region["ranges"].as_array().expect("ranges"));
    let number = |value: &serde_json::Value| value.as_u64().expect("a number");
    ranges
        .filter(|range| range["file"] == file)
        .map(|range| number(&range["end"]) - number(&range["start"]))
        .sum()
}

/// Folder of the latest checkpoint.
#[track_caller]
fn latest(out: &Path) -> PathBuf {
    let latest = out.join("checkpoints/latest");
    let meta = std::fs::symlink_metadata(&latest).expect("a latest checkpoint");
    if meta.is_symlink() || meta.is_dir() {
        return latest;
    }
    let name = std::fs::read_to_string(&latest).expect("a readable pointer");
    out.join("checkpoints").join(name.trim())
}

/// Waits until `metrics.jsonl` has the line of `step`, on which the run goes on to the next.
#[track_caller]
pub(crate) fn wait_for_step(out: &Path, step: u64) {
    eventually(&format!("step {step}"), || {
        metrics(out)
            .iter()
            .any(|line| line["step"].as_u64() >= Some(step))
            .then_some(())
    });
}

/// Losses, one a step.
pub(crate) fn losses(out: &Path) -> Vec<f64> {
    metrics(out)
        .iter()
        .filter_map(|line| line["loss"].as_f64())
        .collect()
}

/// The same losses up to the order of additions.
#[track_caller]
pub(crate) fn expect_same_losses(how: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{how}");
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let relative = (found - expected).abs() / expected.abs();
        assert!(
            relative <= 1e-5,
            "{how}: step {}: {found} against {expected}",
            step + 1
        );
    }
}
