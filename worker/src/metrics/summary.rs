//! `summary.json`: the run in one object.

use std::io::{self, Read as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::RunFilesError;
use super::hold::replace_file;
use crate::checkpoint::open_to_read;
use crate::data::Entropies;

/// What is known when a run ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// `run.name`.
    pub name: String,
    /// Run id of the job.
    pub run_id: String,
    /// Steps finished since the run began.
    pub steps: u64,
    /// True when all steps of the configuration are done and saved; false when the run was asked to stop before its last
    /// step, or when its last state could not be saved.
    pub complete: bool,
    /// Why the run was asked to stop before its last step, such as the name of a signal; none unless its state was saved
    /// then. Started again, the same job goes on.
    #[serde(default)]
    pub stopped: Option<String>,
    /// Samples consumed since the run began.
    pub samples: u64,
    /// Tokens consumed since the run began.
    pub tokens: u64,
    /// Number of parameters.
    pub parameters: u64,
    /// Training loss of the last step, nats per token.
    pub loss: Option<f64>,
    /// Validation loss at the end, nats per token.
    pub val_loss: Option<f64>,
    /// What a model without context reaches on the same data.
    pub entropies: Entropies,
    /// Bytes of text to a token of the validation data; none if their files do not tell.
    #[serde(default)]
    pub bytes_per_token: Option<f64>,
    /// Wall time of this life of the run, start to end.
    pub seconds: f64,
    /// Tokens a second over the steps of this life, over all ranks.
    pub tokens_per_s: f64,
    /// Number of ranks at the end.
    pub world_size: u32,
    /// Generation at the end.
    pub generation: u64,
    /// Restarts of the job before this life.
    pub restarts: u32,
    /// Name of the last checkpoint below `checkpoints/`, if there is one.
    pub checkpoint: Option<String>,
    /// Checkpoints of this life that could not be saved.
    #[serde(default)]
    pub failed_saves: u64,
    /// Bytes that are taken of rank 0's GPU at the end, by whatever process and library; none without a GPU.
    #[serde(default)]
    pub device_taken: Option<u64>,
}

impl Summary {
    /// What an earlier life of the run has written to `path`; none if there is nothing, or nothing that can be read.
    #[must_use]
    pub fn read(path: &Path) -> Option<Self> {
        let mut bytes = Vec::new();
        open_to_read(path).ok()?.read_to_end(&mut bytes).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Deletes the file at `path`; one that is not there is fine.
    pub fn delete(path: &Path) -> Result<(), RunFilesError> {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(RunFilesError::io("delete", path, &e)),
            _ => Ok(()),
        }
    }

    /// Replaces the file at `path` as a whole.
    pub fn write(&self, path: &Path) -> Result<(), RunFilesError> {
        // String keys, numbers and strings only: cannot fail.
        let mut bytes = serde_json::to_vec_pretty(self).expect("a summary serialises");
        bytes.push(b'\n');
        replace_file(path, &bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_replaces_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        let mut summary = Summary {
            name: "train".into(),
            run_id: "r".into(),
            steps: 3,
            complete: true,
            stopped: None,
            samples: 48,
            tokens: 6144,
            parameters: 10,
            loss: Some(2.5),
            val_loss: None,
            entropies: Entropies {
                unigram: 3.26,
                bigram: Some(2.45),
            },
            bytes_per_token: Some(1.0),
            seconds: 1.5,
            tokens_per_s: 4096.0,
            world_size: 2,
            generation: 1,
            restarts: 0,
            checkpoint: Some("step_00000003".into()),
            failed_saves: 1,
            device_taken: Some(1 << 30),
        };
        summary.write(&path).unwrap();
        summary.steps = 4;
        summary.write(&path).unwrap();
        assert_eq!(Summary::read(&path), Some(summary));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_pipe_is_no_summary_and_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(Summary::read(&path), None);
    }
}
