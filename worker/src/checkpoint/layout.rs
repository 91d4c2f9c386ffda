//! Names and paths below `checkpoints/`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub(super) const LATEST: &str = "latest";
pub(super) const MANIFEST: &str = "manifest.json";
const STEP_PREFIX: &str = "step_";
const TEMPORARY_PREFIX: &str = ".saving_";

/// Name of the folder of a step: `step_00000120`.
#[must_use]
pub fn step_name(step: u64) -> String {
    format!("{STEP_PREFIX}{step:08}")
}

/// The step that `checkpoints/latest` of a run's folder names; `None` where there is none.
pub fn latest_step(out_dir: &Path) -> io::Result<Option<u64>> {
    let path = folder(out_dir).join(LATEST);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    let step = parse_step(text.trim()).ok_or_else(|| {
        let name = path.display();
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("`{name}` names no step: `{}`", text.trim()),
        )
    })?;
    Ok(Some(step))
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

/// Generation in the name of a temporary folder; `None` for every other name. A name that only begins like
/// one belongs to generation 0, so that everybody may delete it.
pub(super) fn generation_of_temporary(name: &str) -> Option<u64> {
    let rest = name.strip_prefix(TEMPORARY_PREFIX)?;
    let generation = rest.rsplit_once(".g").and_then(|(_, digits)| digits.parse().ok());
    Some(generation.unwrap_or(0))
}

fn parse_step(name: &str) -> Option<u64> {
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
        assert_eq!(generation_of_temporary(&step_name(3)), None);
    }
}
