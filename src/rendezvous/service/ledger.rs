//! The daemon's memory on disk: an append-only file of [`Record`]s, each synced before anything that follows from it is
//! sent.
//!
//! ```text
//! ddp-rendezvous ledger 1
//! 5f0c1a2b3c4d5e6f {"job":"nightly","generation":3,"assignment_id":"…","members":[…],…}
//! ```
//!
//! A line is a checksum and a record; the last line of a job counts. A crash while a line is written leaves one without
//! its end, or with zeros in it: nothing of it was sent, and it is passed over. Any other damage is an error, because a daemon that takes an
//! older line for the last one would count a generation twice. The file is written anew, with one line a job, when it
//! is opened and when it has grown.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::rendezvous::Record;

/// First line of the file.
const HEADER: &str = "ddp-rendezvous ledger 1";
/// Hexadecimal digits of a line's checksum.
const CHECKSUM_DIGITS: usize = 16;
/// Jobs that have ended and are still written down: their nodes may come late for the verdict.
const MAX_FINISHED: usize = 256;
/// The file is written anew when it has grown by more than this.
const MAX_GROWTH_BYTES: u64 = 4 << 20;
/// Records have the tokens of runs.
const MODE: u32 = 0o600;

/// Why the ledger cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The system refused.
    #[error("cannot {what} `{path}`: {source}{}", hint_of(what))]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file or the directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another daemon has it open.
    #[error(
        "another daemon uses the state in `{}`\n  hint: give each daemon its own `--state-dir`",
        .0.display()
    )]
    InUse(PathBuf),
    /// It was changed by something else than a daemon, or the disk has lost some of it.
    #[error(
        "line {line} of `{path}` is damaged: {why}\n  hint: a daemon without its ledger may count a generation twice: \
         wait until no job of this daemon runs, move the file away, then start the daemon again"
    )]
    Damaged {
        /// Counted from 1.
        line: usize,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// An open ledger. No other process has it.
#[derive(Debug)]
pub struct Ledger {
    path: PathBuf,
    file: File,
    /// Unlocked with it.
    _lock: File,
    /// By job; the number is that of its last line, to keep them in order.
    latest: BTreeMap<String, (u64, Record)>,
    last_line: u64,
    /// Bytes appended since the file was written anew.
    grown: u64,
    /// Each record waits for a message from it.
    #[cfg(test)]
    stalled_by: Option<std::sync::mpsc::Receiver<()>>,
}

impl Ledger {
    /// Opens the ledger in this directory, and makes both if they are not there.
    pub fn open(dir: &Path) -> Result<Self, LedgerError> {
        create_dir(dir).map_err(|source| failed("create", dir, source))?;
        let lock_path = dir.join("ledger.lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(MODE)
            .open(&lock_path);
        let lock = lock.map_err(|source| failed("open", &lock_path, source))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(LedgerError::InUse(dir.to_owned())),
            Err(TryLockError::Error(source)) => return Err(failed("lock", &lock_path, source)),
        }
        let path = dir.join("ledger");
        let records = match fs::read(&path) {
            Ok(bytes) => parse(&path, &bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(source) => return Err(failed("read", &path, source)),
        };
        let mut latest = BTreeMap::new();
        let last_line = records.len() as u64;
        for (line, record) in (1..).zip(records) {
            latest.insert(record.job.clone(), (line, record));
        }
        forget_oldest(&mut latest);
        let file = write_anew(&path, &latest)?;
        Ok(Self {
            path,
            file,
            _lock: lock,
            latest,
            last_line,
            grown: 0,
            #[cfg(test)]
            stalled_by: None,
        })
    }

    /// One that cannot be written.
    #[cfg(test)]
    pub(in crate::rendezvous) fn on_a_full_disk(dir: &Path) -> Self {
        let mut ledger = Self::open(dir).expect("writable");
        ledger.file = File::options().append(true).open("/dev/full").expect("a device");
        ledger
    }

    /// One on a disk that takes a record for each message.
    #[cfg(test)]
    pub(in crate::rendezvous) fn on_a_slow_disk(dir: &Path) -> (Self, std::sync::mpsc::Sender<()>) {
        let mut ledger = Self::open(dir).expect("writable");
        let (proceed, stalled_by) = std::sync::mpsc::channel();
        ledger.stalled_by = Some(stalled_by);
        (ledger, proceed)
    }

    /// What is known of each job, in the order in which it was written.
    pub fn records(&self) -> Vec<Record> {
        in_order(&self.latest).cloned().collect()
    }

    /// Writes a record down; it is on the disk when this returns.
    pub(super) fn append(&mut self, record: &Record) -> Result<(), LedgerError> {
        #[cfg(test)]
        if let Some(stalled_by) = &self.stalled_by {
            let _ = stalled_by.recv();
        }
        self.last_line += 1;
        self.latest
            .insert(record.job.clone(), (self.last_line, record.clone()));
        if self.grown > MAX_GROWTH_BYTES {
            forget_oldest(&mut self.latest);
            self.file = write_anew(&self.path, &self.latest)?;
            self.grown = 0;
            return Ok(());
        }
        let line = line_of(record);
        self.grown += line.len() as u64;
        let written = self.file.write_all(line.as_bytes());
        written
            .and_then(|()| self.file.sync_data())
            .map_err(|source| failed("write", &self.path, source))
    }
}

/// Makes a directory that outlives a power cut, as its entry in the one above does.
fn create_dir(dir: &Path) -> io::Result<()> {
    let missing: Vec<_> = dir.ancestors().take_while(|dir| !dir.exists()).collect();
    fs::create_dir_all(dir)?;
    for parent in missing.into_iter().filter_map(Path::parent) {
        File::open(ddp_proto::paths::or_here(parent))?.sync_all()?;
    }
    Ok(())
}

/// What helps where it cannot even be opened.
fn hint_of(what: &str) -> &'static str {
    match what {
        "create" | "open" => {
            "\n  hint: name a directory with `--state-dir` that this user can create or write"
        }
        _ => "",
    }
}

fn failed(what: &'static str, path: &Path, source: io::Error) -> LedgerError {
    let path = path.to_owned();
    LedgerError::Io { what, path, source }
}

fn in_order(latest: &BTreeMap<String, (u64, Record)>) -> impl Iterator<Item = &Record> {
    let mut lines: Vec<_> = latest.values().collect();
    lines.sort_by_key(|(line, _)| *line);
    lines.into_iter().map(|(_, record)| record)
}

/// Drops the jobs that ended first, beyond [`MAX_FINISHED`].
fn forget_oldest(latest: &mut BTreeMap<String, (u64, Record)>) {
    let mut finished: Vec<u64> = latest
        .values()
        .filter(|(_, record)| record.is_final())
        .map(|(line, _)| *line)
        .collect();
    finished.sort_unstable();
    if let Some(surplus) = finished.len().checked_sub(MAX_FINISHED + 1) {
        let newest = finished[surplus];
        latest.retain(|_, (line, record)| !record.is_final() || *line > newest);
    }
}

/// Replaces the file by one with these records only.
fn write_anew(path: &Path, latest: &BTreeMap<String, (u64, Record)>) -> Result<File, LedgerError> {
    let mut text = format!("{HEADER}\n");
    for record in in_order(latest) {
        text.push_str(&line_of(record));
    }
    let new = path.with_extension("new");
    let replace = || {
        let mut file = File::options()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(MODE)
            .open(&new)?;
        // One that a crash has left.
        file.set_permissions(fs::Permissions::from_mode(MODE))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        if let Some(dir) = path.parent() {
            File::open(dir)?.sync_all()?;
        }
        File::options().append(true).open(path)
    };
    replace().map_err(|source| failed("write", path, source))
}

fn line_of(record: &Record) -> String {
    let json = serde_json::to_string(record).expect("a record has only strings and numbers");
    format!("{} {json}\n", checksum(json.as_bytes()))
}

fn checksum(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..CHECKSUM_DIGITS].to_owned()
}

/// The records of all lines that were written to their end.
fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<Record>, LedgerError> {
    let damaged = |line: usize, why: &str| LedgerError::Damaged {
        line,
        path: path.to_owned(),
        why: why.to_owned(),
    };
    let whole = length_of_whole_lines(bytes);
    if whole < bytes.len() {
        tracing::info!(
            "passed over an unfinished line at the end of `{}`",
            path.display()
        );
    }
    let mut records = Vec::new();
    for (number, line) in (1..).zip(bytes[..whole].split_inclusive(|byte| *byte == b'\n')) {
        let line = std::str::from_utf8(line).map_err(|_| damaged(number, "it is no text"))?;
        let line = line.trim_end_matches('\n');
        if number == 1 {
            if line != HEADER {
                return Err(damaged(number, &format!("expected `{HEADER}`")));
            }
            continue;
        }
        let (sum, json) = line
            .split_once(' ')
            .ok_or_else(|| damaged(number, "it has no checksum"))?;
        if sum != checksum(json.as_bytes()) {
            return Err(damaged(number, "its checksum does not match"));
        }
        let record: Record =
            serde_json::from_str(json).map_err(|error| damaged(number, &error.to_string()))?;
        if record.generation == 0 && !record.is_final() {
            return Err(damaged(number, "it has no generation"));
        }
        records.push(record);
    }
    Ok(records)
}

/// Without a last line that has no end, or zeros in it: after a power cut, of a line that was not synced, a later block
/// may be on the disk and an earlier one not.
fn length_of_whole_lines(bytes: &[u8]) -> usize {
    let end_of = |bytes: &[u8]| bytes.iter().rposition(|byte| *byte == b'\n');
    let Some(end) = end_of(bytes) else { return 0 };
    match end_of(&bytes[..end]) {
        Some(before) if bytes[before..end].contains(&0) => before + 1,
        _ => end + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::event::Stage;
    use crate::rendezvous::policy::Account;
    use crate::rendezvous::ranks::Member;

    fn record(job: &str, generation: u64) -> Record {
        Record {
            job: job.into(),
            generation,
            assignment_id: format!("{generation:032x}"),
            members: vec![Member::new("i0".into(), "a".into())],
            run_token: "run".into(),
            takeover: None,
            attempt: 0,
            account: Account::default(),
            stage: Stage::Running,
        }
    }

    fn ended(job: &str) -> Record {
        Record {
            stage: Stage::JobOver {
                exit_code: 0,
                reason: "node `a` succeeded".into(),
            },
            ..record(job, 1)
        }
    }

    /// A process that another test starts may have the lock until it has begun its program.
    fn reopened(path: &Path) -> Ledger {
        let mut attempts = std::iter::repeat_with(|| Ledger::open(path)).take(100_000);
        let opened = attempts.find(|opened| !matches!(opened, Err(LedgerError::InUse(_))));
        opened.expect("it is free in the end").unwrap()
    }

    #[test]
    fn what_was_written_is_read_again_and_the_last_line_counts() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        assert_eq!(ledger.records(), []);
        for record in [record("a", 1), record("b", 1), record("a", 2)] {
            ledger.append(&record).unwrap();
        }
        drop(ledger);
        for _ in 0..2 {
            let ledger = Ledger::open(dir.path()).unwrap();
            assert_eq!(ledger.records(), [record("b", 1), record("a", 2)]);
        }
        let text = fs::read_to_string(dir.path().join("ledger")).unwrap();
        assert_eq!(text.lines().count(), 3, "one line a job: {text}");
    }

    #[test]
    fn a_line_that_was_being_written_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger");
        let mut ledger = Ledger::open(dir.path()).unwrap();
        ledger.append(&record("a", 1)).unwrap();
        let whole = fs::read(&path).unwrap();
        ledger.append(&record("a", 2)).unwrap();
        drop(ledger);
        let longer = fs::read(&path).unwrap();
        for end in whole.len()..longer.len() {
            fs::write(&path, &longer[..end]).unwrap();
            assert_eq!(reopened(dir.path()).records(), [record("a", 1)]);
        }
        let tail = &longer[longer.len() - 9..];
        let zeros: &[u8] = &[0; 100];
        for torn in [zeros, &[zeros, tail].concat(), &[b"5f0c {", zeros, tail].concat()] {
            fs::write(&path, [whole.as_slice(), torn].concat()).unwrap();
            assert_eq!(Ledger::open(dir.path()).unwrap().records(), [record("a", 1)]);
        }
    }

    #[test]
    fn a_verdict_needs_no_generation() {
        let dir = tempfile::tempdir().unwrap();
        let verdict = Record {
            generation: 0,
            ..ended("a")
        };
        Ledger::open(dir.path()).unwrap().append(&verdict).unwrap();
        assert_eq!(Ledger::open(dir.path()).unwrap().records(), [verdict]);
    }

    #[test]
    fn any_other_damage_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger");
        let mut ledger = Ledger::open(dir.path()).unwrap();
        ledger.append(&record("a", 1)).unwrap();
        ledger.append(&record("a", 2)).unwrap();
        drop(ledger);
        let whole = fs::read_to_string(&path).unwrap();
        let damages = [
            whole.replacen("\"generation\":1", "\"generation\":7", 1),
            whole.replacen('\n', "\n\n", 1),
            whole.replacen("\"generation\":1", "\"generation\":\0", 1),
            whole.replacen("ledger 1", "ledger 2", 1),
            "\0\n".into(),
        ];
        for damage in damages {
            fs::write(&path, damage).unwrap();
            let error = Ledger::open(dir.path()).unwrap_err();
            assert!(matches!(error, LedgerError::Damaged { .. }), "{error}");
        }
        fs::write(&path, whole.replacen("\"generation\":1", "\"generation\":7", 1)).unwrap();
        let error = Ledger::open(dir.path()).unwrap_err().to_string();
        insta::assert_snapshot!(error.replace(&dir.path().display().to_string(), "DIR"), @r"
        line 2 of `DIR/ledger` is damaged: its checksum does not match
          hint: a daemon without its ledger may count a generation twice: wait until no job of this daemon runs, move the file away, then start the daemon again
        ");
    }

    #[test]
    fn nobody_else_can_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("new/state");
        fs::create_dir_all(&state).unwrap();
        fs::write(state.join("ledger.new"), "left by a crash").unwrap();
        drop(Ledger::open(&state).unwrap());
        for file in ["ledger", "ledger.lock"] {
            let mode = fs::metadata(state.join(file)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{file}");
        }
        Ledger::open(&dir.path().join("another/new/state")).unwrap();
    }

    #[test]
    fn two_daemons_do_not_share_it() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(dir.path()).unwrap();
        let error = Ledger::open(dir.path()).unwrap_err();
        assert!(matches!(error, LedgerError::InUse(_)), "{error}");
        drop(ledger);
        Ledger::open(dir.path()).unwrap();
    }

    #[test]
    fn jobs_that_ended_long_ago_are_forgotten_and_those_that_run_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        ledger.append(&record("runs", 1)).unwrap();
        for job in 0..MAX_FINISHED + 2 {
            ledger.append(&ended(&format!("job {job}"))).unwrap();
        }
        ledger.grown = MAX_GROWTH_BYTES + 1;
        ledger.append(&record("new", 1)).unwrap();
        let jobs: Vec<_> = ledger.records().into_iter().map(|record| record.job).collect();
        assert_eq!(jobs.len(), MAX_FINISHED + 2);
        assert_eq!((jobs[0].as_str(), jobs[1].as_str()), ("runs", "job 2"));
        drop(ledger);
        assert_eq!(Ledger::open(dir.path()).unwrap().records().len(), jobs.len());
    }
}
