//! The folder of a run: prepared and kept by rank 0, and seen by all ranks.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::hold::{Hold, Holder};
use super::run_file::{RunFilesError, delete_file, replace_file};
use super::{EventFile, Summary, TimelineFiles};
use crate::checkpoint::{self, Fence};
use crate::config::{Resume, Run};
use crate::session::KeyValue;

const DECISION_KEY: &str = "run_dir/decision";
/// A shared file system may show a new file late.
const VISIBILITY_TIMEOUT: Duration = Duration::from_secs(10);
const VISIBILITY_POLL: Duration = Duration::from_millis(50);

/// A job that has just been killed, or a launcher that looks at the folder, is gone by then.
const HOLDER_PATIENCE: Duration = Duration::from_secs(3);

/// The table before the first step.
const STARTUP: &str = "startup.txt";

/// By these names a folder is known to hold a run.
const MARKS: &[&str] = &["checkpoints", "metrics.jsonl", "summary.json"];

/// Folders of a run whose content is deleted.
const FOLDERS: &[&str] = &["checkpoints", "timeline", "timeline/ranks", "tensorboard"];

/// The folder of a run. On rank 0 it is kept from other jobs as long as this lives.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// On rank 0, if the folder was claimed.
    hold: Option<Hold>,
    fence: Option<Fence>,
}

/// What a job that begins does with the run in its folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundRun {
    /// There is none.
    None,
    /// The job goes on with it.
    Continued,
    /// The job deletes it.
    Deleted,
}

/// A request for the folder, by one rank of a run.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The `run` section.
    pub run: &'a Run,
    /// Run id of the job, for the default folder.
    pub run_id: &'a str,
    /// Name of this run of the job, by which its later lives recognise the folder of the first. Without one, nothing is claimed.
    pub token: Option<&'a str>,
    /// No other run has this token: a process that holds the folder under it is a former life of this run, and dead.
    pub is_unique: bool,
    /// True for a life of the job after its first: resumes, whatever `run` says, if an earlier life of the same run
    /// had taken the folder.
    pub restarted: bool,
    /// This rank.
    pub rank: u32,
    /// The generation that this process belongs to; 0 without a launcher.
    pub generation: u64,
    /// Number of ranks.
    pub world_size: u32,
    /// When the ranks must have agreed.
    pub deadline: Instant,
}

/// The message of rank 0 to the others: the step of the checkpoint to continue from, and the name of a file that they
/// must see; or why rank 0 could not prepare the directory.
type Decision = Result<(Option<u64>, String), String>;

impl RunDir {
    /// `run.out_dir`, relative to the current folder, or `runs/<name>/<run id>`. Touches nothing.
    pub fn resolve(run: &Run, run_id: &str) -> PathBuf {
        let default = || Path::new("runs").join(&run.name).join(run_id);
        run.out_dir.clone().unwrap_or_else(default)
    }

    /// The run that a job without an id of its own continues, if `run` resumes and names no folder: of all runs of that
    /// name, the one that saved a checkpoint last. A checkpoint that cannot be read counts: the job then fails with the reason.
    pub fn newest(run: &Run) -> Option<PathBuf> {
        let asks = run.resume != Resume::Never && run.out_dir.is_none();
        let runs = fs::read_dir(Self::resolve(run, "")).ok().filter(|_| asks)?;
        let saved = runs.filter_map(|entry| {
            let dir = entry.ok()?.path();
            let time = fs::metadata(dir.join("checkpoints")).ok()?.modified().ok()?;
            (!matches!(checkpoint::step_to_go_on_from(&dir), Ok(None))).then_some((time, dir))
        });
        saved.max().map(|(_, dir)| dir)
    }

    /// True if the first life of a job would begin at step 0 in its folder, or be refused. Touches nothing.
    pub fn begins(run: &Run, run_id: &str) -> bool {
        let found = checkpoint::step_to_go_on_from(&Self::resolve(run, run_id));
        run.overwrite || !found.is_ok_and(|step| step.is_some())
    }

    /// What the first life of a job would make of the run in its folder, and the step of the checkpoint there; an error
    /// if it would be refused. Only reads: it takes no lock, so a folder in use is like any other.
    pub fn look(run: &Run, run_id: &str) -> Result<(FoundRun, Option<u64>), RunFilesError> {
        let dir = Self {
            path: Self::resolve(run, run_id),
            hold: None,
            fence: None,
        };
        let found = dir.judge(run, run_id)?;
        let step = match found {
            // Whatever is wrong with it.
            FoundRun::Deleted => dir.checkpoint().unwrap_or(None),
            FoundRun::None | FoundRun::Continued => dir.checkpoint()?,
        };
        Ok((found, step))
    }

    /// What to add to the command to go on with a run, in words.
    pub fn resume_words(run: &Run, run_id: &str) -> String {
        let overwrite = if run.overwrite {
            "--set run.overwrite=false "
        } else {
            ""
        };
        let dir = Self::resolve(run, run_id);
        format!(
            "`--set run.resume=auto {overwrite}--set run.out_dir={}`",
            dir.display()
        )
    }

    /// The device that the last life of the run in this folder trained on, as its start-up table has it. Touches nothing.
    pub fn last_device(run: &Run, run_id: &str) -> Option<String> {
        let table = fs::read_to_string(Self::resolve(run, run_id).join(STARTUP)).ok()?;
        let device = table.lines().find_map(|line| line.strip_prefix("device "))?;
        Some(device.trim().to_owned())
    }

    /// Opens the folder on every rank: rank 0 prepares it and decides where the run begins; the others check
    /// that they see the same folder. All ranks return the step of the same checkpoint to continue from, `None` if the run
    /// begins at step 0, or an error.
    pub fn open(request: Request<'_>, store: &dyn KeyValue) -> Result<(Self, Option<u64>), RunFilesError> {
        let mut dir = Self {
            path: Self::resolve(request.run, request.run_id),
            hold: None,
            fence: None,
        };
        let start = if request.rank == 0 {
            dir.lead(request, store)?
        } else {
            dir.follow(request, store)?
        };
        Ok((dir, start))
    }

    /// What shows on rank 0 that no later generation has taken the folder.
    pub fn fence(&self) -> Option<Fence> {
        self.fence.clone()
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `metrics.jsonl`.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// `summary.json`.
    pub fn summary(&self) -> PathBuf {
        self.path.join("summary.json")
    }

    /// Writes down the lines that introduce this life of the run. Returns those that the life before did not have; none if
    /// it has not written them. They are for people: a full disk does not matter.
    #[must_use]
    pub fn exchange_startup(&self, lines: &[String]) -> Option<Vec<String>> {
        let path = self.path.join(STARTUP);
        let before = fs::read_to_string(&path).ok();
        let _ = replace_file(&path, (lines.join("\n") + "\n").as_bytes());
        let before = before?;
        let is_new = |line: &&String| before.lines().all(|known| known != *line);
        Some(lines.iter().filter(is_new).cloned().collect())
    }

    fn lead(&mut self, request: Request<'_>, store: &dyn KeyValue) -> Result<Option<u64>, RunFilesError> {
        let nonce = format!("{:016x}", rand::random::<u64>());
        let mark = self.nonce_path(&nonce);
        let prepared = self.prepare(request).and_then(|start| {
            fs::write(&mark, &nonce).map_err(|e| RunFilesError::io("write to", &self.path, &e))?;
            Ok(start)
        });
        let step = prepared.as_ref().copied().map_err(ToString::to_string);
        let decision: Decision = step.map(|step| (step, nonce));
        let bytes = serde_json::to_vec(&decision).expect("a decision serialises");
        let put = store.put(DECISION_KEY, &bytes, request.deadline);
        let agreed = prepared.and_then(|start| {
            put?;
            self.await_others(request, store)?;
            Ok(start)
        });
        // Also when they do not agree, or when a full disk took the name and not the content.
        let _ = fs::remove_file(&mark);
        agreed
    }

    fn await_others(&self, request: Request<'_>, store: &dyn KeyValue) -> Result<(), RunFilesError> {
        for rank in 1..request.world_size {
            let words = store.wait_for(&seen_key(rank), request.deadline)?;
            if !words.is_empty() {
                return Err(self.not_shared(rank, &String::from_utf8_lossy(&words)));
            }
        }
        Ok(())
    }

    fn follow(&self, request: Request<'_>, store: &dyn KeyValue) -> Result<Option<u64>, RunFilesError> {
        let bytes = store.wait_for(DECISION_KEY, request.deadline)?;
        let (start, nonce) = match serde_json::from_slice::<Decision>(&bytes) {
            Ok(Ok(decision)) => decision,
            Ok(Err(words)) => return Err(RunFilesError::RankZero(words)),
            Err(e) => {
                return Err(RunFilesError::RankZero(format!(
                    "its decision cannot be read: {e}"
                )));
            }
        };
        let seen = self.await_nonce(&nonce, request.deadline.min(Instant::now() + VISIBILITY_TIMEOUT));
        let words = seen.as_ref().err().cloned().unwrap_or_default();
        store.put(&seen_key(request.rank), words.as_bytes(), request.deadline)?;
        seen.map_err(|cause| self.not_shared(request.rank, &cause))?;
        Ok(start)
    }

    /// `rank` looks at another file system than rank 0.
    fn not_shared(&self, rank: u32, cause: &str) -> RunFilesError {
        RunFilesError::Refused(format!(
            "rank {rank} does not see what rank 0 wrote to `{}` ({cause})\n  hint: all ranks must see the same `run.out_dir`: use an absolute path on a shared file system",
            self.path.display()
        ))
    }

    /// Looks until rank 0's file is there. A file system offers no event for that across machines.
    fn await_nonce(&self, nonce: &str, deadline: Instant) -> Result<(), String> {
        loop {
            let cause = match fs::read_to_string(self.nonce_path(nonce)) {
                Ok(found) if found == nonce => return Ok(()),
                Ok(_) => "the file has different content".into(),
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

    /// Creates the folder, or decides what becomes of the run that it holds, and keeps it if there is a token.
    fn prepare(&mut self, request: Request<'_>) -> Result<Option<u64>, RunFilesError> {
        // Before anything is written: what is refused leaves nothing behind.
        if !self.path.exists() {
            self.require_checkpoint(request.run)?;
        }
        fs::create_dir_all(&self.path).map_err(|e| RunFilesError::io("create", &self.path, &e))?;
        let succeeds = request.token.filter(|_| request.restarted && request.is_unique);
        let succeeds = succeeds.map(|name| (name, request.generation));
        let deadline = request.deadline.min(Instant::now() + HOLDER_PATIENCE);
        let mut hold = Hold::take(&self.path, succeeds, deadline)?;
        let start = self.prepare_held(request, &mut hold);
        match (&start, request.token) {
            (Ok(_), Some(_)) => self.hold = Some(hold),
            _ => hold.release(),
        }
        start
    }

    fn require_checkpoint(&self, run: &Run) -> Result<(), RunFilesError> {
        if run.resume == Resume::Require && self.checkpoint()?.is_none() {
            return Err(RunFilesError::NothingToResume(self.path.clone()));
        }
        Ok(())
    }

    /// What a job called `run_id` that begins makes of the run in the folder, or that it is refused. Only reads.
    fn judge(&self, run: &Run, run_id: &str) -> Result<FoundRun, RunFilesError> {
        self.require_checkpoint(run)?;
        let Some(found) = MARKS.iter().find(|mark| self.path.join(mark).exists()) else {
            return Ok(FoundRun::None);
        };
        if run.resume != Resume::Never {
            Ok(FoundRun::Continued)
        } else if run.overwrite {
            self.check_inside()?;
            Ok(FoundRun::Deleted)
        } else if self.was_stopped(run_id) {
            Ok(FoundRun::Continued)
        } else {
            Err(RunFilesError::Refused(format!(
                "`{}` already holds a run (found `{found}`)\n  hint: set `run.resume: auto` to continue it, `run.overwrite: true` to delete it, or a different `run.out_dir`",
                self.path.display()
            )))
        }
    }

    fn prepare_held(&mut self, request: Request<'_>, hold: &mut Hold) -> Result<Option<u64>, RunFilesError> {
        let holder = Holder::here(request.run_id, request.generation);
        let continued = match request.token {
            Some(token) if request.restarted => hold.is_of(token)?,
            _ => false,
        };
        if !continued && self.judge(request.run, request.run_id)? == FoundRun::Deleted {
            hold.announce(None, &holder)?;
            self.delete_run()?;
        }
        if request.token.is_some() {
            self.fence = Some(hold.announce(request.token, &holder)?);
        }
        checkpoint::delete_unfinished(&self.path)?;
        self.checkpoint()
    }

    /// True if the last life of the job called `run_id` was asked to stop, and saved its state: started again, it means
    /// to go on.
    fn was_stopped(&self, run_id: &str) -> bool {
        Summary::read(&self.summary()).is_some_and(|last| last.run_id == run_id && last.stopped.is_some())
    }

    /// The step to go on from.
    fn checkpoint(&self) -> Result<Option<u64>, RunFilesError> {
        checkpoint::step_to_go_on_from(&self.path)
            .map_err(|e| RunFilesError::io("read the latest checkpoint of", &self.path, &e))
    }

    /// Refuses to delete a run of which a part is elsewhere.
    fn check_inside(&self) -> Result<(), RunFilesError> {
        let mut folders = FOLDERS.iter().map(|name| self.path.join(name));
        let Some(link) = folders.find(|folder| folder.is_symlink()) else {
            return Ok(());
        };
        let link = link.display();
        Err(RunFilesError::Refused(format!(
            "`{link}` is a link, and `run.overwrite` deletes nothing outside of the directory of the run\n  hint: delete the link (`rm {link}`) and what it names yourself, or set a different `run.out_dir`"
        )))
    }

    /// Deletes what a run writes, and nothing else that lies in the folder.
    fn delete_run(&self) -> Result<(), RunFilesError> {
        checkpoint::delete_all(&self.path)?;
        TimelineFiles::of_run(&self.path).delete()?;
        EventFile::delete_all(&self.path)?;
        delete_file(&self.path.join(STARTUP))?;
        delete_file(&self.metrics())?;
        delete_file(&self.summary())
    }
}

fn seen_key(rank: u32) -> String {
    format!("run_dir/seen/{rank}")
}

#[cfg(test)]
#[path = "run_dir_tests.rs"]
mod tests;
