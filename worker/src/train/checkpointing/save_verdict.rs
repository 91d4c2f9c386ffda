//! What follows from how far each rank is with a save, and what people are told of one that failed.

use std::fmt;
use std::time::Duration;

use ddp_proto::words::{counted, numbered};

use super::save_thread::Stage;
use crate::checkpoint::{CheckpointError, step_name};

const WRITING: f64 = 0.0;
const WRITTEN: f64 = 1.0;
const COMMITTED: f64 = 2.0;
const FAILED: f64 = 3.0;

/// A stage as a number, for the other ranks.
pub(super) fn code(stage: &Stage) -> f64 {
    match stage {
        Stage::Writing => WRITING,
        Stage::Written => WRITTEN,
        Stage::Committed(_) => COMMITTED,
        Stage::Failed(_) => FAILED,
    }
}

/// What this rank has told the others of a save. A failure is final: they may act on it later, when a disk that
/// was given up has moved again.
#[derive(Debug, Default)]
pub(super) struct Told(Option<CheckpointError>);

impl Told {
    /// What it tells now that the save has come to `stage`.
    pub(super) fn now(&mut self, stage: Stage) -> Stage {
        if let (None, Stage::Failed(error)) = (&self.0, &stage) {
            self.0 = Some(error.clone());
        }
        self.0.clone().map_or(stage, Stage::Failed)
    }
}

/// How far a save is on all ranks together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Somebody writes.
    Pending,
    /// All have written: rank 0 may commit.
    Written,
    /// It is the latest checkpoint.
    Saved,
    /// Nobody writes any more, and these ranks have failed.
    Failed { ranks: Vec<usize> },
}

/// The verdict on the stages of all ranks, in rank order: the same on every rank, because they are.
pub(super) fn of(codes: &[f64]) -> Verdict {
    let ranks_at =
        |code: f64| -> Vec<usize> { (0..codes.len()).filter(|&rank| codes[rank] == code).collect() };
    let failed = ranks_at(FAILED);
    if !ranks_at(WRITING).is_empty() {
        // Also if others have failed: what is to be deleted must not be written meanwhile.
        Verdict::Pending
    } else if !failed.is_empty() {
        Verdict::Failed { ranks: failed }
    } else if codes.first() == Some(&COMMITTED) {
        Verdict::Saved
    } else {
        Verdict::Written
    }
}

/// A save that went wrong, for people.
pub(super) struct SaveReport<'a> {
    pub(super) step: u64,
    pub(super) verdict: &'a Verdict,
    pub(super) error: &'a CheckpointError,
    pub(super) next_due: Option<u64>,
    /// When it is tried again, if it is.
    pub(super) retry: Option<Duration>,
    /// Step of the latest checkpoint.
    pub(super) latest: Option<u64>,
}

impl fmt::Display for SaveReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (step, error) = (self.step, self.error);
        let Verdict::Failed { ranks } = self.verdict else {
            return write!(
                f,
                "the checkpoint of step {step} is saved, but older ones that are not kept could not be deleted: {error}"
            );
        };
        write!(
            f,
            "the checkpoint of step {step} was not saved on {}; ",
            numbered("rank", ranks)
        )?;
        match (self.retry, self.next_due) {
            (Some(pause), _) => write!(f, "it is tried again in {} s", pause.as_secs())?,
            (None, Some(next)) => write!(f, "training goes on, and the next one is due after step {next}")?,
            (None, None) => write!(f, "training goes on")?,
        }
        match self.latest {
            Some(latest) => write!(f, " (the latest is `{}`)", step_name(latest))?,
            None => write!(f, " (there is none yet)")?,
        }
        write!(f, "\n  {error}")
    }
}

/// Training stood still because a save took long.
pub(super) fn waited(before: u64, step: u64, waited: Duration) -> String {
    format!(
        "training stood still for {:.1} s: the checkpoint of step {step} was due before that of step {before} was written\n  hint: raise `train.checkpoint_every`, or save to a faster disk",
        waited.as_secs_f64()
    )
}

/// At the end of a run: how many of its saves were lost on the way, and what is left.
pub(crate) fn failed_saves(saves: u64, latest: Option<&str>) -> Option<String> {
    if saves == 0 {
        return None;
    }
    let latest = latest.map_or_else(
        || "there is none".to_owned(),
        |name| format!("the latest is `{name}`"),
    );
    Some(format!(
        "{} of this run could not be saved, as said above; {latest}",
        counted(saves, "checkpoint")
    ))
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn all_ranks_must_have_written_and_one_that_fails_fails_for_all() {
        let failed = |ranks: &[usize]| Verdict::Failed {
            ranks: ranks.to_vec(),
        };
        assert_eq!(of(&[WRITTEN, WRITING, FAILED]), Verdict::Pending);
        assert_eq!(of(&[WRITTEN, WRITTEN]), Verdict::Written);
        assert_eq!(of(&[COMMITTED, WRITTEN]), Verdict::Saved);
        assert_eq!(of(&[WRITTEN, FAILED, FAILED]), failed(&[1, 2]));
        // Rank 0 could not commit.
        assert_eq!(of(&[FAILED, WRITTEN]), failed(&[0]));
        assert_eq!(of(&[WRITTEN]), Verdict::Written);
    }

    #[test]
    fn a_failure_that_was_told_is_told_again_whatever_becomes_of_the_save() {
        let mut told = Told::default();
        assert_eq!(told.now(Stage::Writing), Stage::Writing);
        let error = CheckpointError::Source {
            step: 4,
            cause: "none".into(),
        };
        let failed = Stage::Failed(error);
        assert_eq!(told.now(failed.clone()), failed);
        for later in [Stage::Writing, Stage::Written, Stage::Committed(None)] {
            assert_eq!(told.now(later), failed);
        }
    }

    #[test]
    fn a_failed_save_says_where_why_and_what_comes_next() {
        let error = CheckpointError::Io {
            doing: "write",
            path: PathBuf::from("out/x"),
            cause: "No space left on device (os error 28)".into(),
            kind: io::ErrorKind::StorageFull,
        };
        let verdict = Verdict::Failed { ranks: vec![1, 2] };
        let report = SaveReport {
            step: 40,
            verdict: &verdict,
            error: &error,
            next_due: Some(60),
            retry: None,
            latest: Some(20),
        };
        insta::assert_snapshot!(report, @r"
        the checkpoint of step 40 was not saved on ranks 1, 2; training goes on, and the next one is due after step 60 (the latest is `step_00000020`)
          cannot write `out/x`: No space left on device (os error 28)
          hint: free space there
        ");
        insta::assert_snapshot!(SaveReport { next_due: None, retry: Some(Duration::from_secs(2)), latest: None, ..report }, @r"
        the checkpoint of step 40 was not saved on ranks 1, 2; it is tried again in 2 s (there is none yet)
          cannot write `out/x`: No space left on device (os error 28)
          hint: free space there
        ");
        insta::assert_snapshot!(SaveReport { verdict: &Verdict::Saved, ..report }, @r"
        the checkpoint of step 40 is saved, but older ones that are not kept could not be deleted: cannot write `out/x`: No space left on device (os error 28)
          hint: free space there
        ");
        assert_eq!(failed_saves(0, None), None);
        insta::assert_snapshot!(failed_saves(2, Some("step_00000060")).unwrap(), @"2 checkpoints of this run could not be saved, as said above; the latest is `step_00000060`");
        insta::assert_snapshot!(waited(20, 40, Duration::from_millis(2340)), @r"
        training stood still for 2.3 s: the checkpoint of step 40 was due before that of step 20 was written
          hint: raise `train.checkpoint_every`, or save to a faster disk
        ");
    }
}
