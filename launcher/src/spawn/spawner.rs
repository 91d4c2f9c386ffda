//! Starts workers.
//!
//! All are started by one thread that lives as long as the launcher: `PR_SET_PDEATHSIG` speaks of the death of
//! the *thread* that forked, so a worker started by a short-lived thread would be killed with that thread.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::iter;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::ids::{Generation, LocalRank};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::sync::mpsc;

use crate::cgroup::CgroupEntry;
use crate::plan::WorkerCommand;
use crate::spawn::process::{self, Image, Start, StartError, Streams};
use crate::supervise::guardian::Registrar;

/// Exit code of shells for a program that was not found.
const NOT_FOUND: u8 = 127;
/// Exit code of shells for a program that cannot be executed.
const NOT_EXECUTABLE: u8 = 126;
/// Batches that may wait: that of a generation whose workers are to follow those that the thread is stuck with.
const BATCH_QUEUE: usize = 1;
/// How long a program may take to begin, which is to be read from its file system first.
const START_PATIENCE: Duration = Duration::from_mins(10);
/// Stack of the spawning thread; it only makes new processes.
const STACK_BYTES: usize = 256 << 10;

/// One worker to start.
pub(crate) struct WorkerSpec {
    pub(crate) local_rank: LocalRank,
    pub(crate) env: Vec<(OsString, OsString)>,
    /// Its standard output and standard error; none: those of the launcher.
    pub(crate) output: Option<[OwnedFd; 2]>,
    /// Reads the launcher's standard input; the others read nothing.
    pub(crate) has_stdin: bool,
    /// Cores that it is bound to; none: those of the launcher.
    pub(crate) cores: Option<CpuSet>,
}

/// The workers of one generation.
pub(crate) struct Batch {
    pub(crate) generation: Generation,
    pub(crate) command: WorkerCommand,
    pub(crate) workers: Vec<WorkerSpec>,
    /// Signals that the workers ignore.
    pub(crate) ignored: Vec<i32>,
    /// The way into the workers' control group, where there is one.
    pub(crate) entry: Option<CgroupEntry>,
    /// Set when the generation is stopped before all its workers were started.
    pub(crate) cancelled: Arc<AtomicBool>,
}

/// What becomes of the batch of a generation, which may be over when this arrives.
#[derive(Debug)]
pub enum SpawnEvent {
    /// A worker runs.
    Spawned {
        /// Its generation.
        generation: Generation,
        /// Its place on this node.
        local_rank: LocalRank,
        /// Its process.
        pid: i32,
    },
    /// No more workers of the generation will be started: all were, or the batch was cancelled, or a start failed.
    Ended {
        /// The generation.
        generation: Generation,
        /// Why not all of them could be started.
        failure: Option<SpawnError>,
    },
}

/// A program cannot be started. Trying again would not help, so no restart is spent on it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpawnError {
    /// There is no such file, or its interpreter is missing.
    #[error("program `{program}` was not found\n  hint: {hint}")]
    NotFound {
        /// As given.
        program: String,
        /// What to do.
        hint: String,
    },
    /// The file exists but cannot be executed.
    #[error("program `{program}` cannot be executed: {cause}\n  hint: {hint}")]
    NotExecutable {
        /// As given.
        program: String,
        /// The system's words.
        cause: String,
        /// What to do.
        hint: &'static str,
    },
    /// The system does not let a worker run on the cores chosen for it.
    #[error(
        "worker {local_rank} of this node cannot be bound to its cores: {cause}\n  hint: the cores that this process may use have changed: start again, or omit `--numa-binding`"
    )]
    Cores {
        /// Local rank of the worker.
        local_rank: LocalRank,
        /// The system's words.
        cause: String,
    },
    /// The program is there, but the system has not begun it.
    #[error(
        "program `{program}` did not start on worker {local_rank} of this node within {} s\n  hint: check that the program's file system responds",
        .waited.as_secs_f64()
    )]
    Stuck {
        /// As given.
        program: String,
        /// Local rank of the worker.
        local_rank: LocalRank,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The machine refused another process.
    #[error(
        "worker {local_rank} of this node cannot be started: {cause}\n  hint: check `ulimit -u`, the memory and the pids limit of the cgroup"
    )]
    Machine {
        /// Local rank of the worker.
        local_rank: LocalRank,
        /// The system's words.
        cause: String,
    },
}

impl SpawnError {
    /// Exit code of the launcher, as shells do it.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound { .. } => NOT_FOUND,
            Self::NotExecutable { .. } => NOT_EXECUTABLE,
            Self::Cores { .. } | Self::Stuck { .. } | Self::Machine { .. } => exit::INTERNAL,
        }
    }

    /// The error of a worker that was to be bound to cores, if the cores are its reason: of all that happens before the
    /// program runs, only this can be invalid.
    fn of_binding(error: &io::Error, local_rank: LocalRank) -> Option<Self> {
        let cause = error.to_string();
        (error.raw_os_error() == Some(libc::EINVAL)).then_some(Self::Cores { local_rank, cause })
    }

    fn of(error: &io::Error, program: &Path, local_rank: LocalRank) -> Self {
        let name = program.display().to_string();
        let hint = match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {
                let hint = what_is_there(program);
                return Self::NotFound { program: name, hint };
            }
            Some(libc::EACCES | libc::EPERM) => "make it executable with `chmod +x`, or name its interpreter",
            Some(libc::ENOEXEC) => "is it built for this machine, or a script without a `#!` line?",
            Some(libc::EISDIR | libc::ELOOP | libc::ENAMETOOLONG) => "is the path right?",
            Some(libc::E2BIG) => "the arguments and the environment together are too long",
            _ => {
                return Self::Machine {
                    local_rank,
                    cause: error.to_string(),
                };
            }
        };
        Self::NotExecutable {
            program: name,
            cause: error.to_string(),
            hint,
        }
    }
}

/// What to write instead of the name of a program that is not in `PATH`: something of that name may lie in the current
/// folder, where shells do not look for programs either, or the ending of a script or a configuration is missing.
fn what_is_there(program: &Path) -> String {
    let endings = ["py", "yaml", "yml"].map(|ending| program.with_added_extension(ending));
    if let Some(file) = endings.iter().find(|file| file.is_file()) {
        return format!("did you mean `{}`?", file.display());
    }
    let here = Path::new(".").join(program);
    if program.components().count() != 1 || !here.exists() {
        "give a path, or a name that is in `PATH`".to_owned()
    } else if here.is_dir() {
        format!(
            "`{}` is a directory: give the path of a program in it",
            here.display()
        )
    } else {
        format!(
            "did you mean `{}`? Names without a directory are searched for in `PATH`",
            here.display()
        )
    }
}

/// Finds the program before the node joins, so that a typing error costs the other nodes nothing.
pub(crate) fn check_program(
    command: &WorkerCommand,
    inherited_path: Option<&OsString>,
) -> Result<(), SpawnError> {
    let own_path = command.env.get("PATH").map(OsString::from);
    find_program(&command.program, own_path.as_ref().or(inherited_path))
}

fn find_program(program: &Path, search_path: Option<&OsString>) -> Result<(), SpawnError> {
    use nix::unistd::{AccessFlags, access};
    let executable = |path: &Path| path.is_file() && access(path, AccessFlags::X_OK).is_ok();
    let candidates: Vec<PathBuf> = if program.as_os_str().is_empty() {
        Vec::new()
    } else if program.components().count() > 1 || program.is_absolute() {
        vec![program.to_owned()]
    } else {
        let Some(search_path) = search_path else {
            // The system's own default applies: left to `exec`.
            return Ok(());
        };
        std::env::split_paths(search_path)
            .map(|directory| directory.join(program))
            .collect()
    };
    if candidates.iter().any(|path| executable(path)) {
        return Ok(());
    }
    let errno = match candidates.iter().find(|path| path.exists()) {
        Some(path) if path.is_dir() => libc::EISDIR,
        Some(_) => libc::EACCES,
        None => libc::ENOENT,
    };
    Err(SpawnError::of(
        &io::Error::from_raw_os_error(errno),
        program,
        LocalRank(0),
    ))
}

/// The spawning thread.
pub(crate) struct Spawner {
    batches: mpsc::Sender<Batch>,
}

impl Spawner {
    /// Starts the thread; the results of the batches go to `events`.
    pub(crate) fn start(registrar: Registrar, events: mpsc::Sender<SpawnEvent>) -> io::Result<Self> {
        let (batches, mut requests) = mpsc::channel::<Batch>(BATCH_QUEUE);
        std::thread::Builder::new()
            .name("spawner".into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                while let Some(batch) = requests.blocking_recv() {
                    let generation = batch.generation;
                    let failure = start_batch(batch, registrar, &events);
                    let ended = SpawnEvent::Ended { generation, failure };
                    if events.blocking_send(ended).is_err() {
                        return;
                    }
                }
                // The launcher is about to exit. Its workers are gone: it does not end before them.
            })?;
        Ok(Self { batches })
    }

    /// Asks for the workers of a generation, after those that were asked for before; false if too many batches wait.
    pub(crate) fn request(&self, batch: Batch) -> bool {
        self.batches.try_send(batch).is_ok()
    }
}

fn start_batch(
    mut batch: Batch,
    registrar: Registrar,
    events: &mpsc::Sender<SpawnEvent>,
) -> Option<SpawnError> {
    for worker in std::mem::take(&mut batch.workers) {
        if batch.cancelled.load(Ordering::Acquire) {
            return None;
        }
        let (local_rank, is_bound) = (worker.local_rank, worker.cores.is_some());
        match start_worker(&batch, &worker, registrar) {
            Ok(pid) => {
                // The agent is gone only when the process is ending.
                let _ = events.blocking_send(SpawnEvent::Spawned {
                    generation: batch.generation,
                    local_rank,
                    pid,
                });
            }
            // It is no longer wanted, and its group may be gone.
            Err(_) if batch.cancelled.load(Ordering::Acquire) => return None,
            Err(StartError::Stuck { waited }) => {
                return Some(SpawnError::Stuck {
                    program: batch.command.program.display().to_string(),
                    local_rank,
                    waited,
                });
            }
            Err(StartError::NotBorn(error) | StartError::Ended { cause: error, .. }) => {
                let unbound = is_bound
                    .then(|| SpawnError::of_binding(&error, local_rank))
                    .flatten();
                return unbound.or_else(|| Some(SpawnError::of(&error, &batch.command.program, local_rank)));
            }
        }
    }
    None
}

fn start_worker(batch: &Batch, worker: &WorkerSpec, registrar: Registrar) -> Result<i32, StartError> {
    let (command, entry) = (&batch.command, batch.entry);
    let name = command.arg0.as_deref().unwrap_or(command.program.as_os_str());
    let argv = iter::once(name).chain(command.args.iter().map(OsString::as_os_str));
    let image = Image::new(&command.program, argv, &worker.env)?;
    let nothing = if worker.has_stdin {
        None
    } else {
        Some(File::open("/dev/null")?)
    };
    let (stdout, stderr) = worker
        .output
        .as_ref()
        .map(|[stdout, stderr]| (stdout, stderr))
        .unzip();
    let start = Start {
        image,
        streams: Streams {
            stdin: nothing.as_ref().map(AsFd::as_fd),
            stdout: stdout.map(AsFd::as_fd),
            stderr: stderr.map(AsFd::as_fd),
        },
        entry,
        patience: START_PATIENCE,
        ignored: &batch.ignored,
    };
    let (launcher, cores, open_files) = (Pid::this(), worker.cores.as_ref(), command.open_files);
    let prepare = || enter_session(launcher, registrar, entry, cores, open_files);
    let started = process::start(&start, prepare);
    if let Err(StartError::Ended { child, .. }) = &started {
        // It was announced, and its number is free for others now.
        registrar.forget(child.as_raw());
    }
    // Reaped by pid, with all others.
    started.map(Pid::as_raw)
}

/// Runs in the child between `fork` and `exec`: async-signal-safe, without allocation.
fn enter_session(
    launcher: Pid,
    registrar: Registrar,
    entry: Option<CgroupEntry>,
    cores: Option<&CpuSet>,
    open_files: Option<u64>,
) -> Result<(), Errno> {
    let session = nix::unistd::setsid()?;
    registrar.watch(session.as_raw());
    if let Some(entry) = entry {
        // It was tried; should it fail all the same, the session and the marker are left.
        entry.enter();
    }
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
    // The launcher may have died before the line above. It may be pid 1, so 1 itself proves nothing.
    if nix::unistd::getppid() != launcher {
        return Err(Errno::ESRCH);
    }
    if let Some(cores) = cores {
        sched_setaffinity(Pid::from_raw(0), cores)?;
    }
    if let Some(soft) = open_files {
        setrlimit(
            Resource::RLIMIT_NOFILE,
            soft,
            getrlimit(Resource::RLIMIT_NOFILE)?.1,
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_program_is_looked_up_as_exec_does() {
        let path = OsString::from("/nonexistent:/bin:/usr/bin");
        assert_eq!(find_program(Path::new("sh"), Some(&path)), Ok(()));
        assert_eq!(find_program(Path::new("/bin/sh"), None), Ok(()));
        let missing = find_program(Path::new("no-such-program"), Some(&path)).unwrap_err();
        assert_eq!(missing.exit_code(), 127);
        let nothing = find_program(Path::new(""), Some(&path)).unwrap_err();
        assert_eq!(nothing.exit_code(), 127, "not the first folder of the path");
        let directory = find_program(Path::new("/usr/bin"), Some(&path)).unwrap_err();
        assert_eq!(directory.exit_code(), 126);
    }

    #[test]
    fn what_lies_in_the_current_folder_is_pointed_out() {
        let path = OsString::from("/nonexistent");
        let words = |name: &str| {
            find_program(Path::new(name), Some(&path))
                .unwrap_err()
                .to_string()
        };
        assert!(
            words("src").contains("hint: `./src` is a directory"),
            "{}",
            words("src")
        );
        let file = words("Cargo.toml");
        assert!(file.contains("hint: did you mean `./Cargo.toml`?"), "{file}");
        assert!(words("").contains("hint: give a path"), "{}", words(""));
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ddp.py"), "").unwrap();
        let script = words(dir.path().join("ddp").to_str().unwrap());
        assert!(script.ends_with("/ddp.py`?"), "{script}");
    }

    #[test]
    fn the_guardian_forgets_a_worker_whose_program_could_not_be_started() {
        let (mut guardian, launcher) = UnixStream::pair().unwrap();
        let (events, mut news) = mpsc::channel(4);
        let batch = Batch {
            generation: Generation(1),
            command: WorkerCommand {
                program: "/nonexistent".into(),
                arg0: None,
                args: Vec::new(),
                open_files: None,
                env: BTreeMap::new(),
                display_name: "x".into(),
                agent_store: false,
                native: false,
            },
            workers: vec![WorkerSpec {
                local_rank: LocalRank(0),
                env: Vec::new(),
                output: None,
                has_stdin: false,
                cores: None,
            }],
            ignored: Vec::new(),
            entry: None,
            cancelled: Arc::default(),
        };
        let failure = start_batch(batch, Registrar::to(&launcher), &events);
        assert!(
            matches!(failure, Some(SpawnError::NotFound { .. })),
            "{failure:?}"
        );
        assert!(news.try_recv().is_err());
        drop(launcher);
        let mut told = Vec::new();
        guardian.read_to_end(&mut told).unwrap();
        let (watched, forgotten) = told.split_at(told.len() / 2);
        assert_eq!((watched[0], forgotten[0]), (b'+', b'-'));
        assert_eq!(watched[1..], forgotten[1..], "the same session");
    }

    #[test]
    fn cores_that_are_no_more_are_named() {
        let mut set = CpuSet::new();
        set.set(CpuSet::count() - 1).unwrap();
        let errno = sched_setaffinity(Pid::from_raw(0), &set).unwrap_err();
        let error = SpawnError::of_binding(&errno.into(), LocalRank(3)).unwrap();
        insta::assert_snapshot!(error, @r"
        worker 3 of this node cannot be bound to its cores: Invalid argument (os error 22)
          hint: the cores that this process may use have changed: start again, or omit `--numa-binding`
        ");
        let busy = io::Error::from_raw_os_error(libc::EAGAIN);
        assert_eq!(SpawnError::of_binding(&busy, LocalRank(3)), None);
    }

    #[test]
    fn messages_say_what_to_do() {
        let of = |errno| {
            SpawnError::of(
                &io::Error::from_raw_os_error(errno),
                Path::new("./train"),
                LocalRank(3),
            )
        };
        insta::assert_snapshot!(of(libc::ENOENT), @r"
        program `./train` was not found
          hint: give a path, or a name that is in `PATH`
        ");
        insta::assert_snapshot!(of(libc::EACCES), @r"
        program `./train` cannot be executed: Permission denied (os error 13)
          hint: make it executable with `chmod +x`, or name its interpreter
        ");
        insta::assert_snapshot!(of(libc::EAGAIN), @r"
        worker 3 of this node cannot be started: Resource temporarily unavailable (os error 11)
          hint: check `ulimit -u`, the memory and the pids limit of the cgroup
        ");
        let stuck = SpawnError::Stuck {
            program: "./train".into(),
            local_rank: LocalRank(3),
            waited: START_PATIENCE,
        };
        insta::assert_snapshot!(stuck, @r"
        program `./train` did not start on worker 3 of this node within 600 s
          hint: check that the program's file system responds
        ");
    }
}
