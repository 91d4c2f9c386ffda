//! Saves and deletions that are stopped after each of their steps, by a loss of power or by an error.

use std::collections::BTreeSet;

use super::super::{delete_unfinished, retain};
use super::journal::{Journal, Tree, make};
use super::*;
use crate::config::CheckpointKeep;

const KEEP: CheckpointKeep = CheckpointKeep { last: 1, every: None };

/// A state of the run. In another life the same step has other numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Saved {
    step: u64,
    life: u64,
}

const fn saved(step: u64, life: u64) -> Saved {
    Saved { step, life }
}

impl Saved {
    fn w(self) -> Vec<u8> {
        weights(self.step + 10_000 * self.life)
    }

    fn m(self) -> Vec<u8> {
        weights(self.step + 10_000 * self.life + 1000)
    }

    fn save(self, storage: Arc<dyn Storage>, out_dir: &Path) -> Result<(), CheckpointError> {
        let (w, m) = (self.w(), self.m());
        let writer = Writer::on(storage, out_dir, self.step, self.life);
        writer.lead()?;
        writer.write("part-0", &[piece("w", 0..12, &w), piece("m", 0..5, &m)])?;
        writer.write("part-1", &[piece("m", 5..12, &m)])?;
        writer.commit(&state(self.step), &["part-0", "part-1"]).map(drop)
    }
}

/// The run's folder is not yet there when the first checkpoint is saved.
fn out_dir(base: &Path) -> PathBuf {
    base.join("runs/tiny")
}

/// The latest checkpoint, which is whole and of one life. None only where `latest` names none.
fn latest(base: &Path) -> Option<Saved> {
    let reader = match Reader::open(&out_dir(base), Which::Latest) {
        Err(CheckpointError::None { .. }) => return None,
        reader => reader.unwrap(),
    };
    reader.verify().unwrap();
    let found = reader.manifest().state.clone();
    assert_eq!(found, state(found.step));
    let w = read(&reader, "w", 0..12).unwrap();
    let lives = (1..=4).map(|life| saved(found.step, life));
    let saved = lives
        .into_iter()
        .find(|saved| saved.w() == w)
        .expect("a life's numbers");
    assert_eq!(read(&reader, "m", 0..12).unwrap(), saved.m());
    Some(saved)
}

/// The next life of the job: it cleans up, saves, and keeps one. Nothing else is left then.
fn go_on(base: &Path, what: &str) {
    let out_dir = out_dir(base);
    delete_unfinished(&out_dir).unwrap();
    // Nothing has to reach the disk here.
    let disk = Journal::new(base);
    let kept = latest(base).filter(|latest| latest.step == 20);
    let again = saved(20, 4);
    again.save(disk.clone(), &out_dir).unwrap();
    assert_eq!(latest(base), kept.or(Some(again)), "{what}");
    assert_eq!(names(&out_dir.join("checkpoints/step_00000020")), PARTS, "{what}");
    saved(30, 4).save(disk.clone(), &out_dir).unwrap();
    retain(disk.as_ref(), &out_dir, KEEP, &[]).unwrap();
    assert_eq!(latest(base), Some(saved(30, 4)), "{what}");
    assert_eq!(
        names(&out_dir.join("checkpoints")),
        ["latest", "step_00000030"],
        "{what}"
    );
}

/// Everything that can befall `act`, in a folder where `prepare` was done: power that goes after each step, and an error
/// of each operation, after which power may go too. What is left is always one of `usable`, and `done` when `act` said
/// that it is; the next life can go on from it.
struct Ordeal {
    prepare: fn(&Path),
    act: fn(&Arc<dyn Storage>, &Path) -> Result<(), CheckpointError>,
    usable: [Option<Saved>; 2],
    done: Saved,
}

impl Ordeal {
    /// Steps of an undisturbed `act`.
    fn run(&self) -> usize {
        let mut seen = BTreeSet::new();
        let (undisturbed, result) = self.act(|_| false);
        result.unwrap();
        self.check(&mut seen, (&undisturbed, 0), true, "no error");
        for failing in 0.. {
            // A disk that has gone: what a loss of power leaves then was looked at above.
            let _ = self.act(move |number| number >= failing);
            let (journal, result) = self.act(move |number| number == failing);
            let Some(steps) = journal.failed() else {
                result.unwrap();
                return undisturbed.steps();
            };
            let what = format!("operation {failing} fails");
            self.check(&mut seen, (&journal, steps), result.is_ok(), &what);
        }
        unreachable!("an operation that is not there cannot fail")
    }

    fn act(
        &self,
        fails: impl Fn(usize) -> bool + Send + Sync + 'static,
    ) -> (Arc<Journal>, Result<(), CheckpointError>) {
        let base = tempfile::tempdir().unwrap();
        (self.prepare)(base.path());
        let journal = Journal::failing(base.path(), fails);
        let storage: Arc<dyn Storage> = journal.clone();
        let result = (self.act)(&storage, &out_dir(base.path()));
        // The process alone is gone, or goes on.
        let found = latest(base.path());
        assert!(self.usable.contains(&found), "{found:?}");
        if result.is_ok() {
            assert_eq!(found, Some(self.done));
        }
        go_on(base.path(), "after the act");
        (journal, result)
    }

    /// From so many steps on. What was seen is not looked at again.
    fn check(
        &self,
        seen: &mut BTreeSet<(bool, Tree)>,
        (journal, from): (&Journal, usize),
        is_done: bool,
        what: &str,
    ) {
        for (number, (steps, tree)) in journal.outcomes(from).into_iter().enumerate() {
            let must_be_done = is_done && steps == journal.steps();
            if !seen.insert((must_be_done, tree.clone())) {
                continue;
            }
            let base = make(&tree);
            let what = format!(
                "{what}, power goes after {steps} steps and leaves {:?}",
                tree.keys()
            );
            let found = latest(base.path());
            assert!(self.usable.contains(&found), "{found:?}: {what}");
            if must_be_done {
                assert_eq!(found, Some(self.done), "{what}");
            }
            // Most differ only in what is deleted unread.
            if number % 16 == 0 {
                go_on(base.path(), &what);
            }
        }
    }
}

/// A run with these checkpoints, one saved after the other.
fn saves(base: &Path, all: &[Saved]) {
    fs::create_dir_all(out_dir(base)).unwrap();
    let disk = Journal::new(base);
    for saved in all {
        saved.save(disk.clone(), &out_dir(base)).unwrap();
    }
}

/// Somebody writes the name of an older checkpoint into `latest`.
fn roll_back(base: &Path, step: u64) {
    let path = out_dir(base).join("checkpoints/latest");
    fs::write(path, format!("{}\n", step_name(step))).unwrap();
}

#[test]
fn the_first_save_of_a_run_is_whole_or_not_there() {
    let ordeal = Ordeal {
        prepare: |_| (),
        act: |disk, out_dir| {
            disk.run(DiskStep::CreateFolder(out_dir))?;
            saved(20, 1).save(disk.clone(), out_dir)
        },
        usable: [None, Some(saved(20, 1))],
        done: saved(20, 1),
    };
    assert!(ordeal.run() > 30);
}

#[test]
fn a_save_that_is_stopped_leaves_the_checkpoint_before_it() {
    let ordeal = Ordeal {
        prepare: |base| saves(base, &[saved(10, 1)]),
        act: |disk, out_dir| saved(20, 1).save(disk.clone(), out_dir),
        usable: [Some(saved(10, 1)), Some(saved(20, 1))],
        done: saved(20, 1),
    };
    assert!(ordeal.run() > 25);
}

#[test]
fn a_save_over_a_checkpoint_that_was_rolled_back_leaves_the_one_before() {
    let ordeal = Ordeal {
        prepare: |base| {
            saves(base, &[saved(10, 1), saved(20, 1)]);
            roll_back(base, 10);
        },
        act: |disk, out_dir| saved(20, 2).save(disk.clone(), out_dir),
        usable: [Some(saved(10, 1)), Some(saved(20, 2))],
        done: saved(20, 2),
    };
    assert!(ordeal.run() > 25);
}

#[test]
fn a_save_over_the_latest_checkpoint_keeps_it() {
    let ordeal = Ordeal {
        // No other checkpoint exists.
        prepare: |base| saves(base, &[saved(20, 1)]),
        act: |disk, out_dir| saved(20, 2).save(disk.clone(), out_dir),
        usable: [Some(saved(20, 1)); 2],
        done: saved(20, 1),
    };
    assert!(ordeal.run() > 15);
}

/// A run that was resumed at its end without `latest` saves its newest step again.
#[test]
fn a_save_over_the_newest_checkpoint_keeps_it_when_latest_is_lost() {
    let ordeal = Ordeal {
        prepare: |base| {
            saves(base, &[saved(10, 1), saved(20, 1)]);
            fs::remove_file(out_dir(base).join("checkpoints/latest")).unwrap();
        },
        act: |disk, out_dir| saved(20, 2).save(disk.clone(), out_dir),
        usable: [Some(saved(20, 1)); 2],
        done: saved(20, 1),
    };
    assert!(ordeal.run() > 15);
}

/// Its folder was deleted by hand: `latest` names the step before it is there again.
#[test]
fn a_save_of_the_step_that_latest_names_already_is_on_the_disk_when_it_is_done() {
    let base = tempfile::tempdir().unwrap();
    saves(base.path(), &[saved(20, 1)]);
    fs::remove_dir_all(out_dir(base.path()).join("checkpoints/step_00000020")).unwrap();
    let journal = Journal::new(base.path());
    saved(20, 2).save(journal.clone(), &out_dir(base.path())).unwrap();
    for (_, tree) in journal.outcomes(journal.steps()) {
        let left = make(&tree);
        assert_eq!(latest(left.path()), Some(saved(20, 2)), "{:?}", tree.keys());
    }
}

#[test]
fn retention_that_is_stopped_never_costs_the_newest_checkpoint() {
    let ordeal = Ordeal {
        prepare: |base| saves(base, &[saved(5, 1), saved(10, 1)]),
        act: |disk, out_dir| {
            saved(20, 1).save(disk.clone(), out_dir)?;
            retain(disk.as_ref(), out_dir, KEEP, &[]).map(drop)
        },
        usable: [Some(saved(10, 1)), Some(saved(20, 1))],
        done: saved(20, 1),
    };
    assert!(ordeal.run() > 35);
}

/// What is left of a checkpoint that was being deleted is whole, or no checkpoint by name.
#[test]
fn a_deletion_that_is_stopped_leaves_no_half_of_a_checkpoint() {
    let base = tempfile::tempdir().unwrap();
    saves(base.path(), &[saved(5, 1), saved(10, 1), saved(20, 1)]);
    let journal = Journal::new(base.path());
    let gone = retain(journal.as_ref(), &out_dir(base.path()), KEEP, &[]).unwrap();
    assert_eq!(gone, [5, 10]);
    let mut left = [0; 3];
    for (steps, tree) in journal.outcomes(0) {
        let base = make(&tree);
        let root = out_dir(base.path()).join("checkpoints");
        let names = names(&root);
        let whole: Vec<&String> = names.iter().filter(|name| name.starts_with("step_")).collect();
        for name in &whole {
            let reader = Reader::open_folder(&root.join(name)).unwrap();
            reader
                .verify()
                .unwrap_or_else(|error| panic!("after {steps} steps: {error}"));
        }
        left[whole.len() - 1] += 1;
    }
    assert!(left.iter().all(|&found| found > 0), "{left:?}");
}
