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

/// By these names a folder is known to hold a run.
const MARKS: &[&str] = &["checkpoints", "metrics.jsonl", "summary.json"];

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
        let put = store.put(DECISION_KEY, &bytes);
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
            let words = store.get(&seen_key(rank), request.deadline)?;
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
        let bytes = store.get(DECISION_KEY, request.deadline)?;
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
        store.put(&seen_key(request.rank), words.as_bytes())?;
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
        fs::create_dir_all(&self.path).map_err(|e| RunFilesError::io("create", &self.path, &e))?;
        let run = request.run;
        let found = MARKS.iter().find(|mark| self.path.join(mark).exists());
        let claim = Claim::of(&self.path);
        let continued = match request.token {
            Some(token) if request.restarted => claim.is_of(token)?,
            _ => false,
        };
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
        let checkpoint = checkpoint::latest_step(&self.path)
            .map_err(|e| RunFilesError::io("read the latest checkpoint of", &self.path, &e))?;
        match checkpoint {
            Some(step) => Ok(Start::Resume { step }),
            None if run.resume == Resume::Require && !continued => Err(RunFilesError::NothingToResume {
                path: self.path.clone(),
            }),
            None => Ok(Start::Fresh),
        }
    }

    /// Deletes what a run writes, and nothing else that lies in the folder. `checkpoints/latest` goes first,
    /// so that a deletion that was interrupted leaves no run that looks whole.
    fn delete_run(&self) -> Result<(), RunFilesError> {
        let latest = Path::new("checkpoints").join("latest");
        for name in [
            latest.as_path(),
            Path::new("checkpoints"),
            Path::new("metrics.jsonl"),
            Path::new("summary.json"),
            Path::new(CLAIM),
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
mod tests {
    use super::*;
    use crate::session::MemoryStore;

    fn run(out_dir: &Path) -> Run {
        Run {
            out_dir: Some(out_dir.to_owned()),
            ..Run::default()
        }
    }

    fn request(run: &Run, rank: u32, world_size: u32) -> Request<'_> {
        Request {
            run,
            run_id: "job",
            token: None,
            restarted: false,
            rank,
            world_size,
            deadline: Instant::now() + Duration::from_mins(1),
        }
    }

    fn open(run: &Run) -> Result<(RunDir, Start), RunFilesError> {
        RunDir::open(request(run, 0, 1), &MemoryStore::default())
    }

    fn error(run: &Run, folder: &Path) -> String {
        open(run)
            .unwrap_err()
            .to_string()
            .replace(folder.to_str().unwrap(), "DIR")
    }

    #[test]
    fn the_default_folder_is_named_for_run_and_job() {
        let run = Run {
            name: "gpt".into(),
            ..Run::default()
        };
        assert_eq!(RunDir::resolve(&run, "j1"), Path::new("runs/gpt/j1"));
    }

    #[test]
    fn all_ranks_agree_on_a_new_folder() {
        let folder = tempfile::tempdir().unwrap();
        let run = run(&folder.path().join("a/b"));
        let store = MemoryStore::default();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    scope.spawn({
                        let (run, store) = (&run, &store);
                        move || RunDir::open(request(run, rank, 3), store)
                    })
                })
                .collect();
            for rank in ranks {
                assert_eq!(rank.join().unwrap().unwrap().1, Start::Fresh);
            }
        });
        let left: Vec<_> = fs::read_dir(folder.path().join("a/b")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn a_rank_on_another_file_system_is_named_on_both_sides() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, theirs) = (run(&folder.path().join("a")), run(&folder.path().join("b")));
        let store = MemoryStore::default();
        std::thread::scope(|scope| {
            let lead = scope.spawn(|| RunDir::open(request(&ours, 0, 2), &store));
            let mut short = request(&theirs, 1, 2);
            // Long enough for rank 0's word, which is awaited first; then the file is looked for once.
            store.get(DECISION_KEY, short.deadline).unwrap();
            short.deadline = Instant::now();
            let error = RunDir::open(short, &store).unwrap_err();
            assert!(
                matches!(error, RunFilesError::NotShared { rank: 1, .. }),
                "{error}"
            );
            let error = lead.join().unwrap().unwrap_err();
            assert!(
                matches!(error, RunFilesError::NotShared { rank: 1, .. }),
                "{error}"
            );
        });
    }

    #[test]
    fn when_rank_zero_fails_the_others_know_why() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("metrics.jsonl"), "").unwrap();
        let run = run(folder.path());
        let store = MemoryStore::default();
        let lead = RunDir::open(request(&run, 0, 2), &store).unwrap_err();
        let follow = RunDir::open(request(&run, 1, 2), &store).unwrap_err();
        assert_eq!(
            follow.to_string(),
            format!("rank 0 could not prepare the folder of the run: {lead}")
        );
    }

    #[test]
    fn a_folder_that_holds_a_run_is_refused_unless_told() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = run(folder.path());
        fs::create_dir_all(folder.path().join("checkpoints/step_00000001")).unwrap();
        fs::write(folder.path().join("notes.txt"), "mine").unwrap();
        insta::assert_snapshot!(error(&run, folder.path()), @r"
        `DIR` already holds a run (found `checkpoints`)
          hint: set `run.resume: auto` to continue it, `run.overwrite: true` to delete it, or another `run.out_dir`
        ");
        run.resume = Resume::Require;
        insta::assert_snapshot!(error(&run, folder.path()), @r"
        `run.resume` is `require`, but `DIR` holds no checkpoint
          hint: set `run.resume: auto` to start where there is nothing to resume
        ");
        run.resume = Resume::Auto;
        assert_eq!(open(&run).unwrap().1, Start::Fresh);
        run.resume = Resume::Never;
        run.overwrite = true;
        assert_eq!(open(&run).unwrap().1, Start::Fresh);
        let left: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(
            left,
            ["notes.txt"],
            "overwriting deletes the run, and only the run"
        );
    }

    fn save(folder: &Path, step: u64) {
        let state = checkpoint::State {
            step,
            consumed_samples: step,
            rng: checkpoint::Rng {
                seed: 1,
                data_order: "test/1".into(),
            },
            config: serde_json::Value::Null,
        };
        let writer = checkpoint::Writer::begin(folder, step, 1).unwrap();
        writer.write("a", &[]).unwrap();
        writer.commit(&state, &["a"]).unwrap();
    }

    #[test]
    fn only_the_run_that_took_the_folder_goes_on_in_it_unasked() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = run(&folder.path().join("out"));
        let life = |run: &Run, token: &'static str, restarted: bool| {
            let request = Request {
                token: Some(token),
                restarted,
                ..request(run, 0, 1)
            };
            RunDir::open(request, &MemoryStore::default()).map(|(_, start)| start)
        };
        assert_eq!(life(&run, "a", false).unwrap(), Start::Fresh);
        save(&folder.path().join("out"), 20);
        assert_eq!(life(&run, "a", true).unwrap(), Start::Resume { step: 20 });
        // The first life of another run was killed before it had looked at the folder.
        assert!(matches!(
            life(&run, "b", true),
            Err(RunFilesError::HoldsRun { .. })
        ));
        assert_eq!(life(&run, "a", true).unwrap(), Start::Resume { step: 20 });
        run.overwrite = true;
        assert_eq!(life(&run, "b", true).unwrap(), Start::Fresh);
        save(&folder.path().join("out"), 40);
        assert_eq!(life(&run, "b", true).unwrap(), Start::Resume { step: 40 });
    }

    #[test]
    fn a_run_is_resumed_from_its_latest_checkpoint_or_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = run(folder.path());
        save(folder.path(), 20);
        save(folder.path(), 40);
        // A save of a job that had come to its fifth generation, and was killed.
        drop(checkpoint::Writer::begin(folder.path(), 60, 5).unwrap());
        assert!(matches!(open(&run), Err(RunFilesError::HoldsRun { .. })));
        for resume in [Resume::Auto, Resume::Require] {
            run.resume = resume;
            assert_eq!(open(&run).unwrap().1, Start::Resume { step: 40 });
        }
        assert!(
            !folder
                .path()
                .join("checkpoints/.saving_step_00000060.g5")
                .exists()
        );
        run.resume = Resume::Never;
        run.overwrite = true;
        // A later life of a job goes on, also of one that began by overwriting.
        Claim::of(folder.path()).take("token").unwrap();
        let restarted = Request {
            token: Some("token"),
            restarted: true,
            ..request(&run, 0, 1)
        };
        let start = RunDir::open(restarted, &MemoryStore::default()).unwrap().1;
        assert_eq!(start, Start::Resume { step: 40 });
        assert_eq!(open(&run).unwrap().1, Start::Fresh);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_in_the_way_is_an_error_with_a_hint() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        insta::assert_snapshot!(error(&run(&file), folder.path()), @r"
        cannot create `DIR/file`: File exists (os error 17)
          hint: a file stands where a folder is needed; set another `run.out_dir`
        ");
        insta::assert_snapshot!(error(&run(&file.join("below")), folder.path()), @r"
        cannot create `DIR/file/below`: Not a directory (os error 20)
          hint: a file stands where a folder is needed; set another `run.out_dir`
        ");
    }
}
