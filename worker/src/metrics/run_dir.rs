//! The folder of a run: prepared by rank 0, and seen by all ranks.

use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::RunFilesError;
use super::claim::{CLAIM, Claim};
use crate::checkpoint;
use crate::config::{Resume, Run};
use crate::session::KeyValue;

const DECISION_KEY: &str = "run_dir/decision";
/// A shared file system may show a new file late.
const VISIBILITY_TIMEOUT: Duration = Duration::from_secs(10);
const VISIBILITY_POLL: Duration = Duration::from_millis(50);

const CHECKPOINTS: &str = "checkpoints";
/// What they are called while they are deleted.
const DELETED_CHECKPOINTS: &str = ".deleting_checkpoints";

/// By these names a folder is known to hold a run.
const MARKS: &[&str] = &[CHECKPOINTS, "metrics.jsonl", "summary.json"];

/// The folder of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
}

/// Where the run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// At step 0.
    Fresh,
    /// From the checkpoint after this many steps.
    Resume {
        /// Steps finished.
        step: u64,
    },
}

/// Who asks for the folder, and what for.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The `run` section.
    pub run: &'a Run,
    /// Run id of the job, for the default folder.
    pub run_id: &'a str,
    /// Random name of this run of the job, by which its later lives know the folder of the first; none: nothing is
    /// claimed.
    pub token: Option<&'a str>,
    /// True for a life of the job after its first: resumes, whatever `run` says, if an earlier life of the same run
    /// had taken the folder.
    pub restarted: bool,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// When the ranks must have agreed.
    pub deadline: Instant,
}

/// What rank 0 tells the others.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum Decision {
    Ready { start: Start, nonce: String },
    Failed(String),
}

impl RunDir {
    /// `run.out_dir`, relative to the current folder, or `runs/<name>/<run id>`. Touches nothing.
    #[must_use]
    pub fn resolve(run: &Run, run_id: &str) -> PathBuf {
        let default = || Path::new("runs").join(&run.name).join(run_id);
        run.out_dir.clone().unwrap_or_else(default)
    }

    /// Opens the folder on every rank: rank 0 prepares it and decides where the run begins; the others check
    /// that they see the same folder. All ranks return the same decision, or an error.
    pub fn open(request: Request<'_>, store: &dyn KeyValue) -> Result<(Self, Start), RunFilesError> {
        let dir = Self {
            path: Self::resolve(request.run, request.run_id),
        };
        let start = if request.rank == 0 {
            dir.lead(request, store)?
        } else {
            dir.follow(request, store)?
        };
        Ok((dir, start))
    }

    /// The folder itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `metrics.jsonl`.
    #[must_use]
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// `summary.json`.
    #[must_use]
    pub fn summary(&self) -> PathBuf {
        self.path.join("summary.json")
    }

    fn lead(&self, request: Request<'_>, store: &dyn KeyValue) -> Result<Start, RunFilesError> {
        let nonce = format!("{:016x}", RandomState::new().hash_one(std::process::id()));
        let mark = self.nonce_path(&nonce);
        let prepared = self.prepare(request).and_then(|start| {
            fs::write(&mark, &nonce).map_err(|e| RunFilesError::io("write to", &self.path, &e))?;
            Ok(start)
        });
        let decision = match &prepared {
            Ok(start) => Decision::Ready { start: *start, nonce },
            Err(error) => Decision::Failed(error.to_string()),
        };
        let bytes = serde_json::to_vec(&decision).expect("a decision serialises");
        let put = store.put(DECISION_KEY, &bytes, request.deadline);
        let start = prepared?;
        let agreed = put
            .map_err(RunFilesError::from)
            .and_then(|()| self.await_others(request, store));
        // Also when they do not agree; a left-over would be harmless.
        let _ = fs::remove_file(&mark);
        agreed.map(|()| start)
    }

    fn await_others(&self, request: Request<'_>, store: &dyn KeyValue) -> Result<(), RunFilesError> {
        for rank in 1..request.world_size {
            let words = store.wait_for(&seen_key(rank), request.deadline)?;
            if !words.is_empty() {
                return Err(RunFilesError::NotShared {
                    rank,
                    path: self.path.clone(),
                    cause: String::from_utf8_lossy(&words).into_owned(),
                });
            }
        }
        Ok(())
    }

    fn follow(&self, request: Request<'_>, store: &dyn KeyValue) -> Result<Start, RunFilesError> {
        let bytes = store.wait_for(DECISION_KEY, request.deadline)?;
        let (start, nonce) = match serde_json::from_slice(&bytes) {
            Ok(Decision::Ready { start, nonce }) => (start, nonce),
            Ok(Decision::Failed(words)) => return Err(RunFilesError::RankZero(words)),
            Err(e) => {
                return Err(RunFilesError::RankZero(format!(
                    "its decision cannot be read: {e}"
                )));
            }
        };
        let seen = self.await_nonce(&nonce, request.deadline.min(Instant::now() + VISIBILITY_TIMEOUT));
        let words = seen.as_ref().err().cloned().unwrap_or_default();
        store.put(&seen_key(request.rank), words.as_bytes(), request.deadline)?;
        match seen {
            Ok(()) => Ok(start),
            Err(cause) => Err(RunFilesError::NotShared {
                rank: request.rank,
                path: self.path.clone(),
                cause,
            }),
        }
    }

    /// Looks until rank 0's file is there. A file system offers no event for that across machines.
    fn await_nonce(&self, nonce: &str, deadline: Instant) -> Result<(), String> {
        loop {
            let cause = match fs::read_to_string(self.nonce_path(nonce)) {
                Ok(found) if found == nonce => return Ok(()),
                Ok(_) => "the file has another content".into(),
                Err(e) => e.to_string(),
            };
            if Instant::now() >= deadline {
                return Err(cause);
            }
            std::thread::sleep(VISIBILITY_POLL);
        }
    }

    fn nonce_path(&self, nonce: &str) -> PathBuf {
        self.path.join(format!(".seen-by-all-ranks-{nonce}"))
    }

    /// Creates the folder, or decides what becomes of the run that it holds.
    fn prepare(&self, request: Request<'_>) -> Result<Start, RunFilesError> {
        let run = request.run;
        let found = MARKS.iter().find(|mark| self.path.join(mark).exists());
        let claim = Claim::of(&self.path);
        let continued = match request.token {
            Some(token) if request.restarted => claim.is_of(token)?,
            _ => false,
        };
        // Before anything is written: what is refused leaves nothing behind.
        if run.resume == Resume::Require && !continued && self.checkpoint()?.is_none() {
            return Err(RunFilesError::NothingToResume {
                path: self.path.clone(),
            });
        }
        fs::create_dir_all(&self.path).map_err(|e| RunFilesError::io("create", &self.path, &e))?;
        if !continued
            && run.resume == Resume::Never
            && let Some(found) = found
        {
            if !run.overwrite {
                return Err(RunFilesError::HoldsRun {
                    path: self.path.clone(),
                    found,
                });
            }
            self.delete_run()?;
        }
        if let Some(token) = request.token {
            claim.take(token)?;
        }
        checkpoint::delete_unfinished(&self.path)?;
        Ok(match self.checkpoint()? {
            Some(step) => Start::Resume { step },
            None => Start::Fresh,
        })
    }

    /// The step to go on from: what `latest` names. Where that is lost, or was never written because the run died with
    /// its first checkpoint just complete, the newest there is: nobody wants to train again what is saved.
    fn checkpoint(&self) -> Result<Option<u64>, RunFilesError> {
        let failed = |e: io::Error| RunFilesError::io("read the latest checkpoint of", &self.path, &e);
        if let Some(step) = checkpoint::latest_step(&self.path).map_err(failed)? {
            return Ok(Some(step));
        }
        let newest = checkpoint::newest_step(&self.path).map_err(failed)?;
        if let Some(step) = newest {
            let folder = self.path.join(CHECKPOINTS);
            tracing::warn!(
                "`{}` has no `latest`: going on from its newest checkpoint, of step {step}",
                folder.display()
            );
        }
        Ok(newest)
    }

    /// Deletes what a run writes, and nothing else that lies in the folder. All checkpoints lose their name at once,
    /// so that a deletion that was interrupted leaves no run that looks whole.
    fn delete_run(&self) -> Result<(), RunFilesError> {
        let (named, nameless) = (self.path.join(CHECKPOINTS), self.path.join(DELETED_CHECKPOINTS));
        if named.is_dir() {
            // Of a deletion that was interrupted.
            match fs::remove_dir_all(&nameless) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(RunFilesError::io("delete", &nameless, &e));
                }
                _ => {}
            }
            fs::rename(&named, &nameless).map_err(|e| RunFilesError::io("delete", &named, &e))?;
        }
        for name in [
            CHECKPOINTS,
            DELETED_CHECKPOINTS,
            "metrics.jsonl",
            "summary.json",
            CLAIM,
        ] {
            let path = self.path.join(name);
            let removed = if path.is_dir() {
                fs::remove_dir_all(&path)
            } else {
                fs::remove_file(&path)
            };
            match removed {
                Err(e) if e.kind() != io::ErrorKind::NotFound && e.kind() != io::ErrorKind::NotADirectory => {
                    return Err(RunFilesError::io("delete", &path, &e));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn seen_key(rank: u32) -> String {
    format!("run_dir/seen/{rank}")
}

#[cfg(test)]
#[path = "run_dir_tests.rs"]
mod tests;
