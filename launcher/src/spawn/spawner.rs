//! Starts workers.
//!
//! All are started by one thread that lives as long as the launcher: `PR_SET_PDEATHSIG` speaks of the death of
//! the *thread* that forked, so a worker started by a short-lived thread would be killed with that thread.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::iter;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ddp_proto::ids::{Generation, LocalRank};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::sync::mpsc;

use crate::cgroup::{self, CgroupEntry};
use crate::output::plan::substitute;
use crate::plan::WorkerCommand;
use crate::spawn::process::{self, Image, Start, StartError};
use crate::spawn::program::SpawnError;
use crate::supervise::guardian::Registrar;

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
    /// Its standard output and standard error; without them it has those of the launcher.
    pub(crate) output: Option<[OwnedFd; 2]>,
    /// Reads the launcher's standard input; the others read nothing.
    pub(crate) has_stdin: bool,
    /// Cores that it is bound to; without them it has those of the launcher.
    pub(crate) cores: Option<CpuSet>,
}

/// The workers of one generation.
pub(crate) struct Batch {
    pub(crate) generation: Generation,
    pub(crate) command: WorkerCommand,
    pub(crate) workers: Vec<WorkerSpec>,
    /// Soft limit of the workers' open files, if it differs from the launcher's.
    pub(crate) open_files: Option<u64>,
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

/// Starts the spawning thread, which takes one batch after the other; its results go to `events`.
pub(crate) fn start(
    registrar: Registrar,
    events: mpsc::Sender<SpawnEvent>,
) -> io::Result<mpsc::Sender<Batch>> {
    let (batches, mut requests) = mpsc::channel::<Batch>(BATCH_QUEUE);
    let run = move || {
        while let Some(batch) = requests.blocking_recv() {
            let generation = batch.generation;
            let failure = start_batch(batch, registrar, &events);
            let ended = SpawnEvent::Ended { generation, failure };
            if events.blocking_send(ended).is_err() {
                return;
            }
        }
        // The launcher is about to exit. Its workers are gone: it does not end before them.
    };
    let thread = std::thread::Builder::new().name("spawner".into());
    thread.stack_size(STACK_BYTES).spawn(run)?;
    Ok(batches)
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

/// An argument of the command as this worker gets it.
fn argument_of<'a>(command: &WorkerCommand, arg: &'a OsStr, local_rank: LocalRank) -> Cow<'a, OsStr> {
    let value = |name: &str| (name == "local_rank").then(|| local_rank.to_string());
    match arg.to_str().filter(|_| command.macros) {
        Some(text) => Cow::Owned(substitute(text, value).into()),
        None => Cow::Borrowed(arg),
    }
}

fn start_worker(batch: &Batch, worker: &WorkerSpec, registrar: Registrar) -> Result<i32, StartError> {
    let (command, entry) = (&batch.command, batch.entry);
    let name = command.arg0.as_deref().unwrap_or(command.program.as_os_str());
    let args: Vec<_> = (command.args.iter())
        .map(|arg| argument_of(command, arg, worker.local_rank))
        .collect();
    let argv = iter::once(name).chain(args.iter().map(AsRef::as_ref));
    let image = Image::new(&command.program, argv, &worker.env)?;
    let nothing = if worker.has_stdin {
        None
    } else {
        Some(File::open("/dev/null")?)
    };
    let [stdout, stderr] = match &worker.output {
        Some([stdout, stderr]) => [Some(stdout.as_fd()), Some(stderr.as_fd())],
        None => [None, None],
    };
    let start = Start {
        image,
        streams: [nothing.as_ref().map(AsFd::as_fd), stdout, stderr],
        entry,
        patience: START_PATIENCE,
        ignored: &batch.ignored,
    };
    let (launcher, cores, open_files) = (Pid::this(), worker.cores.as_ref(), batch.open_files);
    let prepare = || enter_session(launcher, registrar, entry, cores, open_files);
    let started = process::start(&start, prepare);
    if let Err(StartError::Ended { child, .. }) = &started {
        // It was announced, and its number is free for others once it is reaped.
        registrar.forget(child.as_raw());
        // The thread that reaps all children may have reaped it.
        let _ = cgroup::wait_for(*child);
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
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_guardian_forgets_a_worker_whose_program_could_not_be_started() {
        let (mut guardian, launcher) = UnixStream::pair().unwrap();
        let (events, mut news) = mpsc::channel(4);
        let dir = tempfile::tempdir().unwrap();
        let batch = Batch {
            generation: Generation(1),
            command: WorkerCommand {
                program: dir.path().join("absent"),
                arg0: None,
                args: Vec::new(),
                display_name: "x".into(),
                agent_store: false,
                macros: false,
                native: false,
            },
            workers: vec![WorkerSpec {
                local_rank: LocalRank(0),
                env: Vec::new(),
                output: None,
                has_stdin: false,
                cores: None,
            }],
            open_files: None,
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
}
