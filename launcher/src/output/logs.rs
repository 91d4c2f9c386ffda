//! Where the files of a worker lie: `<log_dir>/attempt_N/<global rank>/{stdout.log,stderr.log,error.json}`,
//! and `hang.txt` of workers that hung.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use ddp_proto::ids::GlobalRank;
use ddp_proto::utc::now;

use crate::output::streams::Stream;

/// Most bytes read of an error file.
const MAX_ERROR_FILE_BYTES: u64 = 1 << 20;
/// Longest message taken from an error file.
const MAX_MESSAGE_CHARS: usize = 2000;

/// Name of a link in the folder of an attempt, which points to the name of its run.
const RUN_MARK: &str = ".run";
/// Most runs that may take an attempt of one log directory between looking for a free one and writing there.
const MOST_RUNS_AT_ONCE: u32 = 10_000;

/// A directory or file for a worker's output cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot write `{}`: {cause}\n  hint: {}", .path.display(), hint(.cause))]
pub struct LogError {
    /// The file or directory.
    pub path: PathBuf,
    /// The system's error.
    #[source]
    pub cause: io::Error,
}

impl LogError {
    /// The error of making this file or directory.
    pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        |cause| Self {
            path: path.to_owned(),
            cause,
        }
    }
}

fn hint(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::AlreadyExists => "another run writes there: give each run its own `--log-dir`",
        _ => "choose a writable directory: `--log-dir` for log files, TMPDIR for other files",
    }
}

/// Makes the directory below which all attempts write. Returns the folders that were not there, the innermost first.
pub(crate) fn create_log_dir(path: &Path) -> Result<Vec<PathBuf>, LogError> {
    let missing = path.ancestors().take_while(|folder| !folder.exists());
    let missing = missing.map(Path::to_owned).collect();
    let made = fs::create_dir_all(path).map_err(|cause| match cause.kind() {
        // A directory may be there already; this is something else.
        io::ErrorKind::AlreadyExists => io::Error::from_raw_os_error(libc::ENOTDIR),
        _ => cause,
    });
    made.map(|()| missing).map_err(LogError::at(path))
}

/// Removes folders that are empty, the innermost first.
pub(crate) fn remove_empty(folders: &[PathBuf]) {
    // One that is in use stays, and with it all around it.
    let _ = folders.iter().try_for_each(fs::remove_dir);
}

/// Opens `filtered_stdout.log` or `filtered_stderr.log` of an attempt, for all its workers together.
pub(crate) fn open_filtered(log_dir: &Path, attempt: u32, stream: Stream) -> Result<File, LogError> {
    let directory = log_dir.join(format!("attempt_{attempt}"));
    let path = directory.join(format!("filtered_{}.log", stream.name()));
    fs::create_dir_all(&directory)
        .and_then(|()| {
            fs::write(&path, "")?;
            File::options().append(true).open(&path)
        })
        .map_err(LogError::at(&path))
}

/// The first attempt that has no folder in `log_dir`, nor has any after it.
pub(crate) fn free_attempt(log_dir: &Path) -> u32 {
    let attempts = fs::read_dir(log_dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.strip_prefix("attempt_")?.parse::<u32>().ok()
        });
    attempts.max().map_or(0, |last| last.saturating_add(1))
}

/// The attempt from `first` on whose folder is this `run`'s, which is then marked as such: other runs that have looked
/// into `log_dir` at the same moment take the ones behind it, and all nodes of one run that see the same folder come to
/// the same number.
pub(crate) fn claim_attempt(log_dir: &Path, first: u32, run: &str) -> u32 {
    let is_ours = |attempt: &u32| {
        let directory = log_dir.join(format!("attempt_{attempt}"));
        // A link is there at once with all that it says; nothing needs to be at its end.
        let mark = directory.join(RUN_MARK);
        let made = fs::create_dir_all(&directory).and_then(|()| symlink(run, &mark));
        match made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                fs::read_link(&mark).is_ok_and(|marked| marked == Path::new(run))
            }
            // Where no link can be made, the folders of workers still have one owner each; who makes them says what
            // is wrong with the place.
            _ => true,
        }
    };
    (first..first.saturating_add(MOST_RUNS_AT_ONCE))
        .find(is_ours)
        .unwrap_or(first)
}

/// A log file of a worker.
pub(crate) struct LogFile {
    file: File,
    path: PathBuf,
    /// From this size on, it begins anew.
    max_bytes: u64,
    /// Each line begins with its time.
    has_times: bool,
    /// The next byte begins a line.
    begins_line: bool,
}

impl LogFile {
    /// Appends output. A file that has its full size becomes `NAME.1`, in the place of an earlier one.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.file.metadata()?.len() >= self.max_bytes {
            // Somebody may have moved it.
            let _ = fs::rename(&self.path, self.path.with_added_extension("1"));
            self.file = File::create(&self.path)?;
        }
        let mut text = Vec::new();
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.has_times && self.begins_line {
                text.extend_from_slice(format!("{} ", now()).as_bytes());
            }
            self.begins_line = line.ends_with(b"\n");
            text.extend_from_slice(line);
        }
        self.file.write_all(&text)
    }
}

/// Files of one worker in one attempt.
#[derive(Clone, Debug)]
pub(crate) enum WorkerFiles {
    /// A folder with all files.
    Logged(PathBuf),
    /// Without a log directory: only an error file, beside those of all other workers.
    Scratch(PathBuf),
}

impl WorkerFiles {
    /// Makes the directory. Without a log directory, `scratch` takes the error file.
    pub(crate) fn create(
        log_dir: Option<&Path>,
        scratch: &Path,
        attempt: u32,
        rank: GlobalRank,
    ) -> Result<Self, LogError> {
        let Some(root) = log_dir else {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(scratch);
            made.map_err(LogError::at(scratch))?;
            let file = format!("attempt_{attempt}_rank_{rank}_error.json");
            return Ok(Self::Scratch(scratch.join(file)));
        };
        let attempt = root.join(format!("attempt_{attempt}"));
        let directory = attempt.join(rank.to_string());
        // It is new, or belongs to another run that began at the same moment.
        fs::create_dir_all(&attempt)
            .and_then(|()| fs::create_dir(&directory))
            .map_err(LogError::at(&directory))?;
        Ok(Self::Logged(directory))
    }

    /// The files of a worker that is kept, which the folder of its next attempt shows too.
    pub(crate) fn continued(&self, log_dir: Option<&Path>, attempt: u32, rank: GlobalRank) -> Self {
        let (Self::Logged(directory), Some(root)) = (self, log_dir) else {
            return self.clone();
        };
        let link = root.join(format!("attempt_{attempt}")).join(rank.to_string());
        let target = directory
            .strip_prefix(root)
            .map(|folder| Path::new("..").join(folder));
        match target.map(|target| symlink(target, &link)) {
            Ok(Ok(())) => Self::Logged(link),
            // There are file systems without links.
            _ => self.clone(),
        }
    }

    /// `TORCHELASTIC_ERROR_FILE`.
    pub(crate) fn error_file(&self) -> PathBuf {
        match self {
            Self::Logged(directory) => directory.join("error.json"),
            Self::Scratch(file) => file.clone(),
        }
    }

    /// Path of the stderr log for messages; none without a log directory.
    pub(crate) fn stderr_log(&self) -> Option<PathBuf> {
        self.logged("stderr.log")
    }

    /// What a worker did when one of them hung; none without a log directory.
    pub(crate) fn hang_file(&self) -> Option<PathBuf> {
        self.logged("hang.txt")
    }

    /// Opens `stdout.log` or `stderr.log`, empty; none without a log directory.
    pub(crate) fn open_log(
        &self,
        name: &str,
        max_bytes: Option<u64>,
        has_times: bool,
    ) -> Result<Option<LogFile>, LogError> {
        let open = |path: PathBuf| {
            Ok(LogFile {
                file: File::create(&path).map_err(LogError::at(&path))?,
                path,
                max_bytes: max_bytes.unwrap_or(u64::MAX),
                has_times,
                begins_line: true,
            })
        };
        self.logged(name).map(open).transpose()
    }

    fn logged(&self, name: &str) -> Option<PathBuf> {
        match self {
            Self::Logged(directory) => Some(directory.join(name)),
            Self::Scratch(_) => None,
        }
    }

    /// What the worker wrote into its error file, in one short text; none if it wrote nothing.
    pub(crate) fn error_message(&self) -> Option<String> {
        // A worker may have put anything in its place: a pipe must not hold up the agent.
        let nonblocking = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(self.error_file());
        let file = nonblocking.ok()?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        file.take(MAX_ERROR_FILE_BYTES).read_to_end(&mut bytes).ok()?;
        parse_error_file(&String::from_utf8_lossy(&bytes))
    }
}

/// `{"message": "…"}`, or torch's `{"message": {"message": "…", "extraInfo": {…}}}`; else the text itself.
fn parse_error_file(text: &str) -> Option<String> {
    let message = match serde_json::from_str::<serde_json::Value>(text) {
        Ok(value) => {
            let outer = value.get("message").unwrap_or(&value);
            let inner = outer.get("message").unwrap_or(outer);
            inner.as_str().map_or_else(|| inner.to_string(), str::to_owned)
        }
        Err(_) => text.to_owned(),
    };
    let message: String = message.trim().chars().take(MAX_MESSAGE_CHARS).collect();
    (!message.is_empty()).then_some(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_error_files_are_found() {
        let of = |text| parse_error_file(text);
        assert_eq!(of(r#"{"message": "no data"}"#).unwrap(), "no data");
        let torch =
            r#"{"message": {"message": "RuntimeError: no data", "extraInfo": {"py_callstack": "…"}}}"#;
        assert_eq!(of(torch).unwrap(), "RuntimeError: no data");
        assert_eq!(of("plain words\n").unwrap(), "plain words");
        assert_eq!(of(""), None);
    }

    /// With the usual umask they could.
    #[test]
    fn other_users_cannot_read_error_files() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let scratch = dir.path().join("outer/inner");
        WorkerFiles::create(None, &scratch, 0, GlobalRank(0)).unwrap();
        for folder in [scratch.parent().unwrap(), &scratch] {
            assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        }
    }

    #[test]
    fn a_worker_has_its_folder_for_itself() {
        let dir = tempfile::tempdir().unwrap();
        let create =
            || WorkerFiles::create(Some(dir.path()), Path::new("/dev/null/unused"), 2, GlobalRank(5));
        let files = create().unwrap();
        assert_eq!(files.error_file(), dir.path().join("attempt_2/5/error.json"));
        fs::write(files.error_file(), "last words").unwrap();
        assert_eq!(files.error_message().as_deref(), Some("last words"));
        assert!(files.open_log("stderr.log", None, false).unwrap().is_some());
        let refused = create().unwrap_err().to_string();
        assert!(refused.contains("hint: another run writes there"), "{refused}");
        assert_eq!(
            files.error_message().as_deref(),
            Some("last words"),
            "nothing is lost"
        );
    }

    #[test]
    fn the_folder_of_a_worker_that_is_kept_is_in_each_attempt() {
        let dir = tempfile::tempdir().unwrap();
        let first = WorkerFiles::create(Some(dir.path()), Path::new("unused"), 0, GlobalRank(5)).unwrap();
        fs::write(first.error_file(), "last words").unwrap();
        let mut files = first;
        for (attempt, rank) in [(1, 3), (4, 3)] {
            fs::create_dir(dir.path().join(format!("attempt_{attempt}"))).unwrap();
            files = files.continued(Some(dir.path()), attempt, GlobalRank(rank));
            let file = dir.path().join(format!("attempt_{attempt}/{rank}/error.json"));
            assert_eq!(files.error_file(), file);
            assert_eq!(files.error_message().as_deref(), Some("last words"));
        }
        // Without a place for the link, it stays where it is.
        let here = files.continued(Some(dir.path()), 9, GlobalRank(3)).error_file();
        assert_eq!(here, files.error_file());
    }

    #[test]
    fn a_pipe_in_place_of_an_error_file_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let files = WorkerFiles::Logged(dir.path().to_owned());
        nix::unistd::mkfifo(&files.error_file(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (words, read) = std::sync::mpsc::channel();
        let reader = files.clone();
        std::thread::spawn(move || words.send(reader.error_message()));
        let read = read.recv_timeout(std::time::Duration::from_secs(10));
        assert_eq!(read, Ok(None), "the reader waits for a writer of the pipe");
    }

    #[test]
    fn words_that_are_not_utf8_are_told_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let files = WorkerFiles::Logged(dir.path().to_owned());
        fs::write(files.error_file(), b"caf\xe9 is closed").unwrap();
        assert_eq!(files.error_message().unwrap(), "caf\u{fffd} is closed");
    }

    #[test]
    fn an_earlier_runs_attempts_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(free_attempt(&dir.path().join("missing")), 0);
        assert_eq!(free_attempt(dir.path()), 0);
        for name in ["attempt_0", "attempt_9", "attempt_x", "other"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(free_attempt(dir.path()), 10);
    }

    #[test]
    fn an_attempt_is_one_runs_and_the_same_for_all_its_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let claim = |run| claim_attempt(dir.path(), 3, run);
        assert_eq!((claim("a"), claim("b"), claim("a"), claim("c")), (3, 4, 3, 5));
        assert_eq!(free_attempt(dir.path()), 6);
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(
            claim_attempt(file.path(), 2, "a"),
            2,
            "who makes the files says why"
        );
    }

    #[test]
    fn a_log_file_begins_anew_at_its_full_size_and_has_times_if_asked() {
        let dir = tempfile::tempdir().unwrap();
        let files = WorkerFiles::create(Some(dir.path()), dir.path(), 0, GlobalRank(1)).unwrap();
        let read = |name| fs::read_to_string(dir.path().join("attempt_0/1").join(name)).unwrap();
        let mut log = files.open_log("stdout.log", Some(10), false).unwrap().unwrap();
        for text in ["first\n", "second\n", "third\n", "4\n5\n6\n", "last"] {
            log.write(text.as_bytes()).unwrap();
        }
        assert_eq!(
            (read("stdout.log"), read("stdout.log.1")),
            ("last".into(), "third\n4\n5\n6\n".into())
        );
        let mut log = files.open_log("stdout.log", None, true).unwrap().unwrap();
        for text in ["be", "gun\nen", "ded\n"] {
            log.write(text.as_bytes()).unwrap();
        }
        let lines: Vec<String> = read("stdout.log").lines().map(str::to_owned).collect();
        let cut = |line: &String| {
            line.split_once("Z ")
                .map(|(time, text)| (time.len(), text.to_owned()))
        };
        assert_eq!(
            lines.iter().filter_map(cut).collect::<Vec<_>>(),
            [(19, "begun".into()), (19, "ended".into())]
        );
    }

    #[test]
    fn without_a_log_directory_there_are_error_files_only() {
        let scratch = tempfile::tempdir().unwrap();
        let create = |rank| WorkerFiles::create(None, scratch.path(), 2, GlobalRank(rank)).unwrap();
        let (one, other) = (create(5), create(6));
        assert_ne!(one.error_file(), other.error_file());
        assert_eq!(one.error_file().parent(), Some(scratch.path()));
        assert!(one.open_log("stderr.log", None, false).unwrap().is_none());
        assert_eq!((one.stderr_log(), one.hang_file()), (None, None));
    }

    #[test]
    fn an_unwritable_directory_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = WorkerFiles::create(Some(file.path()), Path::new("/"), 0, GlobalRank(0)).unwrap_err();
        assert!(error.to_string().starts_with("cannot write `"), "{error}");
        assert!(error.to_string().contains("attempt_0/0"), "{error}");
    }
}
