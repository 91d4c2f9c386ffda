//! Names and paths below `checkpoints/`.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use super::manifest::TensorKind;
use super::storage;

pub(super) const LATEST: &str = "latest";
/// What it is called while it is written.
pub(super) const LATEST_TEMPORARY: &str = ".latest.tmp";
pub(super) const MANIFEST: &str = "manifest.json";
const DATA_ENDING: &str = ".safetensors";
const STEP_PREFIX: &str = "step_";
const TEMPORARY_PREFIX: &str = ".saving_";
const TOMBSTONE_PREFIX: &str = ".deleting_";

/// Name of the file, without its ending, of one of several writers: `state-exp_avg-0-of-2`.
#[must_use]
pub fn file_stem(kind: &TensorKind, writer: usize, writers: usize) -> String {
    let stem = match kind {
        TensorKind::Parameter => "parameters".to_owned(),
        TensorKind::State(slot) => format!("state-{slot}"),
    };
    match writers {
        1 => stem,
        _ => format!("{stem}-{writer}-of-{writers}"),
    }
}

/// Name of a file of tensors, by its stem.
pub(super) fn data_name(stem: &str) -> String {
    format!("{stem}{DATA_ENDING}")
}

/// Whether it is a file of tensors, by its name.
pub(super) fn is_data(name: &str) -> bool {
    name.ends_with(DATA_ENDING)
}

/// What a file of tensors is called where its own name is taken, by an older state of the same step.
pub(super) fn revised_name(name: &str, revision: usize) -> String {
    let stem = name.strip_suffix(DATA_ENDING).unwrap_or(name);
    data_name(&format!("{stem}-r{revision}"))
}

/// Name of the folder of a step: `step_00000120`.
#[must_use]
pub fn step_name(step: u64) -> String {
    format!("{STEP_PREFIX}{step:08}")
}

/// The step that `checkpoints/latest` of a run's folder names; `None` where there is none.
pub fn latest_step(out_dir: &Path) -> io::Result<Option<u64>> {
    let path = folder(out_dir).join(LATEST);
    let mut bytes = Vec::new();
    let read = |mut file: fs::File| file.read_to_end(&mut bytes);
    let text = match storage::open_to_read(&path).and_then(read) {
        Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    let step = parse_step(text.trim()).ok_or_else(|| {
        let name = path.display();
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "`{name}` names no step: `{}`\n  hint: write the name of a checkpoint into it, such as `{}`, or delete it: the newest one is taken then",
                text.trim(),
                step_name(40)
            ),
        )
    })?;
    Ok(Some(step))
}

/// The newest step that has a whole checkpoint, whatever `latest` says; `None` where there is none. A folder has its
/// name only once all of it is written.
pub(super) fn newest_step(out_dir: &Path) -> io::Result<Option<u64>> {
    let root = folder(out_dir);
    let steps = match saved_steps(&root) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Vec::new(),
        steps => steps?,
    };
    let is_whole = |step: &u64| root.join(step_name(*step)).join(MANIFEST).is_file();
    Ok(steps.into_iter().rev().find(is_whole))
}

/// The step that a run goes on from: what `latest` names. Where that is lost, or was never written because the run died
/// with its first checkpoint just complete, the newest there is: nobody wants to train again what is saved.
pub fn step_to_go_on_from(out_dir: &Path) -> io::Result<Option<u64>> {
    if let Some(step) = latest_step(out_dir)? {
        return Ok(Some(step));
    }
    let newest = newest_step(out_dir)?;
    if let Some(step) = newest {
        tracing::warn!(
            "`{}` has no `latest`: its newest checkpoint is taken, of step {step}",
            folder(out_dir).display()
        );
    }
    Ok(newest)
}

/// `<out_dir>/checkpoints`
pub(super) fn folder(out_dir: &Path) -> PathBuf {
    out_dir.join("checkpoints")
}

/// Folder of a checkpoint that is being written. The generation keeps a rank of an earlier life of the job,
/// that has not yet noticed its end, out of it.
pub(super) fn temporary_name(step: u64, generation: u64) -> String {
    format!("{TEMPORARY_PREFIX}{}.g{generation}", step_name(step))
}

/// What the folder of a step is called while it is being deleted.
pub(super) fn tombstone_name(step: u64) -> String {
    format!("{TOMBSTONE_PREFIX}{}", step_name(step))
}

/// The steps that have a folder, ascending. Links and names that only resemble one do not count.
pub(super) fn saved_steps(root: &Path) -> io::Result<Vec<u64>> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            steps.extend(entry.file_name().to_str().and_then(parse_step));
        }
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Generation in the name of a temporary folder; `None` for every other name. A name that only begins like
/// one, and what was being deleted, belongs to generation 0, so that everybody may delete it.
pub(super) fn generation_of_temporary(name: &str) -> Option<u64> {
    if name.starts_with(TOMBSTONE_PREFIX) {
        return Some(0);
    }
    let rest = name.strip_prefix(TEMPORARY_PREFIX)?;
    let generation = rest.rsplit_once(".g").and_then(|(_, digits)| digits.parse().ok());
    Some(generation.unwrap_or(0))
}

/// Whether a run calls something so below its `checkpoints`.
pub(super) fn is_of_a_run(name: &str) -> bool {
    matches!(name, LATEST | LATEST_TEMPORARY)
        || parse_step(name).is_some()
        || generation_of_temporary(name).is_some()
}

/// The step whose folder has this name.
pub(super) fn parse_step(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(STEP_PREFIX)?;
    let step = digits.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_names_round_trip_and_nothing_else_is_one() {
        for step in [0, 7, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(parse_step(&step_name(step)), Some(step));
        }
        for name in [
            "",
            "step_",
            "step_7",
            "step_-0000007",
            "../step_00000007",
            "step_00000007/x",
            "step_+0000007",
        ] {
            assert_eq!(parse_step(name), None, "{name}");
        }
        assert_eq!(generation_of_temporary(&temporary_name(3, 12)), Some(12));
        assert_eq!(generation_of_temporary(".saving_"), Some(0));
        assert_eq!(generation_of_temporary(&tombstone_name(3)), Some(0));
        assert_eq!(generation_of_temporary(&step_name(3)), None);
    }
}
