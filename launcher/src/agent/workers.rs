//! The workers of one generation on this node.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{Generation, GlobalRank, LocalRank, NodeRank, WorldSize};
use ddp_proto::rendezvous::{Assignment, WorkerExit};
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, pipe2};

use crate::console::Stream;
use crate::ending::Ending;
use crate::environment::{self, Common};
use crate::logs::{LogError, WorkerFiles};
use crate::pump::{Pump, TailReader, Tap, tail};
use crate::report::LocalEnd;
use crate::spawn::WorkerSpec;

/// The one role that workers have.
const ROLE: &str = "default";

/// Why the workers of a generation cannot be started.
#[derive(Debug, thiserror::Error)]
pub(super) enum PrepareError {
    #[error(transparent)]
    Log(#[from] LogError),
    #[error("cannot make pipes for the workers: {0}\n  hint: check `ulimit -n`")]
    Pipe(#[from] io::Error),
    #[error("the daemon's assignment makes no sense: {0}")]
    Assignment(String),
}

/// What is needed to prepare workers, beyond the assignment.
pub(super) struct Site<'a> {
    pub(super) common: Common<'a>,
    pub(super) log_dir: Option<&'a Path>,
    pub(super) scratch_dir: &'a Path,
    pub(super) job_id: &'a str,
    pub(super) control: &'a str,
}

/// One worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) rank: GlobalRank,
    pub(super) pid: Option<i32>,
    /// Steps that it reported.
    pub(super) step: Option<u64>,
    /// Its own words on its failure.
    pub(super) said: Option<String>,
    /// It says that it failed only because another rank did.
    pub(super) consequence: bool,
    files: WorkerFiles,
    stdout: TailReader,
    stderr: TailReader,
    sent: Option<i32>,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug)]
struct End {
    ending: Ending,
    at: Instant,
    time: SystemTime,
}

/// All workers of a generation, by local rank.
#[derive(Debug)]
pub(super) struct Crew {
    workers: Vec<Worker>,
    began: Instant,
    /// The first failure, or the beginning of the stop.
    trouble: Option<Instant>,
    /// Tells the spawner to start no more.
    pub(super) cancelled: Arc<AtomicBool>,
}

/// A crew and what is needed to start it.
pub(super) struct Prepared {
    pub(super) crew: Crew,
    pub(super) specs: Vec<WorkerSpec>,
    pub(super) contracts: Vec<WorkerEnv>,
}

impl Crew {
    /// The crew before the first assignment.
    pub(super) fn none() -> Self {
        Self {
            workers: Vec::new(),
            began: Instant::now(),
            trouble: None,
            cancelled: Arc::default(),
        }
    }

    /// Makes files and pipes, begins to read the pipes.
    pub(super) fn prepare(
        generation: Generation,
        assignment: &Assignment,
        site: &Site<'_>,
        pump: &Pump,
    ) -> Result<Prepared, PrepareError> {
        let mut crew = Self::none();
        let (mut specs, mut contracts) = (Vec::new(), Vec::new());
        for mut contract in contracts_of(generation, assignment, site)? {
            let (rank, local_rank) = (contract.rank, contract.local_rank);
            let attempt = assignment.restart_count;
            let files = WorkerFiles::create(site.log_dir, site.scratch_dir, attempt, rank)?;
            contract.error_file = Some(files.error_file().to_string_lossy().into_owned());
            let (stdout_log, stderr_log) = files.open_logs()?.unzip();
            let open = |stream, log| open_stream(rank, stream, log, pump);
            let (stdout_pipe, stdout) = open(Stream::Stdout, stdout_log)?;
            let (stderr_pipe, stderr) = open(Stream::Stderr, stderr_log)?;
            specs.push(WorkerSpec {
                local_rank,
                env: environment::of_worker(&site.common, &contract),
                stdout: stdout_pipe,
                stderr: stderr_pipe,
            });
            contracts.push(contract);
            crew.workers.push(Worker {
                rank,
                pid: None,
                step: None,
                said: None,
                consequence: false,
                files,
                stdout,
                stderr,
                sent: None,
                end: None,
            });
        }
        Ok(Prepared {
            crew,
            specs,
            contracts,
        })
    }

    pub(super) fn get_mut(&mut self, local_rank: LocalRank) -> Option<&mut Worker> {
        self.workers.get_mut(local_rank.0 as usize)
    }

    pub(super) fn len(&self) -> usize {
        self.workers.len()
    }

    /// Process ids of the workers that have not been reaped.
    pub(super) fn live_pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.workers
            .iter()
            .filter(|worker| worker.end.is_none())
            .filter_map(|worker| worker.pid)
    }

    /// Steps that the farthest worker reported.
    pub(super) fn step(&self) -> Option<u64> {
        self.workers.iter().filter_map(|worker| worker.step).max()
    }

    /// Notes ends, and gives them in the order in which they are to be believed: when several workers are found
    /// dead together, one that was killed is rather the cause than one that exited with an error.
    pub(super) fn ended(&mut self, mut dead: Vec<(i32, Ending)>) -> Vec<(LocalRank, Ending)> {
        let (at, time) = (Instant::now(), SystemTime::now());
        dead.sort_by_key(|(_, ending)| !matches!(ending, Ending::Signal { .. }));
        let mut ends = Vec::new();
        for (pid, ending) in dead {
            let worker = self
                .workers
                .iter_mut()
                .enumerate()
                .find(|(_, worker)| worker.pid == Some(pid));
            if let Some((local_rank, worker)) = worker {
                worker.end = Some(End { ending, at, time });
                ends.push((LocalRank(local_rank as u32), ending));
            }
        }
        ends
    }

    /// Times are told from now on.
    pub(super) fn trouble_begins(&mut self) {
        self.trouble.get_or_insert_with(Instant::now);
        self.cancelled.store(true, Ordering::Release);
    }

    /// From the start of the workers to the first failure, or to the beginning of the stop.
    pub(super) fn ran_for(&self) -> Option<Duration> {
        self.trouble.map(|trouble| trouble - self.began)
    }

    /// Sends a signal to the process groups of live workers, all or one.
    pub(super) fn signal(&mut self, signal: i32, only: Option<LocalRank>) {
        let Ok(number) = Signal::try_from(signal) else {
            return;
        };
        for (local_rank, worker) in self.workers.iter_mut().enumerate() {
            let meant = only.is_none_or(|only| only.0 as usize == local_rank);
            if let (true, Some(pid), None) = (meant, worker.pid, worker.end) {
                // Dead already, if this fails; it has not been reaped, so the number is still its own.
                let _ = killpg(Pid::from_raw(pid), number);
                worker.sent = Some(signal);
            }
        }
    }

    /// Readers of all streams, to wait for their ends.
    pub(super) fn streams(&self) -> Vec<TailReader> {
        self.workers
            .iter()
            .flat_map(|worker| [worker.stdout.clone(), worker.stderr.clone()])
            .collect()
    }

    /// The stream whose last lines tell why a worker failed.
    pub(super) fn stderr_of(&self, local_rank: LocalRank) -> Option<TailReader> {
        self.workers
            .get(local_rank.0 as usize)
            .map(|worker| worker.stderr.clone())
    }

    /// The end of a worker as the protocol tells it; none while it lives.
    pub(super) fn describe(&self, local_rank: LocalRank) -> Option<WorkerExit> {
        let worker = self.workers.get(local_rank.0 as usize)?;
        let end = worker.end?;
        let (exit_code, signal, core_dumped) = match end.ending {
            Ending::Code(code) => (Some(code), None, false),
            Ending::Signal { signal, core_dumped } => (None, Some(signal), core_dumped),
        };
        let since_epoch = end.time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Some(WorkerExit {
            rank: worker.rank.0,
            local_rank: local_rank.0,
            pid: worker.pid.unwrap_or(0) as u32,
            exit_code,
            signal,
            core_dumped,
            unix_time_ns: since_epoch.as_nanos() as u64,
            stderr_tail: worker.stderr.lines(),
            message: worker.words().unwrap_or_default(),
            log_file: worker
                .files
                .stderr_log()
                .map_or_else(String::new, |path| path.display().to_string()),
            consequence: worker.consequence,
            // The driver knows what the program means by its exit codes.
            permanent: false,
        })
    }

    /// How the workers ended, for the report.
    pub(super) fn local_ends(&self) -> Vec<LocalEnd> {
        let zero = self.trouble.unwrap_or(self.began);
        let end = |worker: &Worker| {
            let end = worker.end?;
            Some(LocalEnd {
                rank: worker.rank,
                ending: end.ending,
                sent: worker.sent,
                after: end.at.saturating_duration_since(zero),
                message: worker.said.clone(),
                consequence: worker.consequence,
            })
        };
        self.workers.iter().filter_map(end).collect()
    }
}

impl Worker {
    /// What the worker itself said of its failure: on the control socket, or in its error file.
    fn words(&self) -> Option<String> {
        self.said.clone().or_else(|| self.files.error_message())
    }
}

/// A pipe whose reading end goes to the pump.
fn open_stream(
    rank: GlobalRank,
    stream: Stream,
    log: Option<std::fs::File>,
    pump: &Pump,
) -> Result<(OwnedFd, TailReader), PrepareError> {
    let (read_end, write_end) = pipe2(OFlag::O_CLOEXEC).map_err(io::Error::from)?;
    let (writer, reader) = tail();
    let tap = Tap {
        rank,
        stream,
        pipe: read_end,
        log,
        tail: writer,
    };
    if !pump.add(tap) {
        return Err(PrepareError::Pipe(io::Error::other(
            "the thread that reads them does not answer",
        )));
    }
    Ok((write_end, reader))
}

/// The place of each of this node's workers.
fn contracts_of(
    generation: Generation,
    assignment: &Assignment,
    site: &Site<'_>,
) -> Result<Vec<WorkerEnv>, PrepareError> {
    let nonsense = |what: String| PrepareError::Assignment(what);
    let node = assignment
        .nodes
        .get(assignment.node_rank as usize)
        .ok_or_else(|| nonsense(format!("there is no node {}", assignment.node_rank)))?;
    let world_size = assignment.nodes.iter().map(|node| node.workers).sum();
    let master_port = u16::try_from(assignment.master_port)
        .map_err(|_| nonsense(format!("{} is no port", assignment.master_port)))?;
    let contract = |local_rank: u32| WorkerEnv {
        rank: GlobalRank(node.first_rank + local_rank),
        local_rank: LocalRank(local_rank),
        node_rank: NodeRank(assignment.node_rank),
        world_size: WorldSize(world_size),
        local_world_size: node.workers,
        node_count: assignment.nodes.len() as u32,
        role: ROLE.into(),
        master_addr: assignment.master_addr.clone(),
        master_port,
        restart_count: assignment.restart_count,
        max_restarts: assignment.max_restarts,
        run_id: site.job_id.to_owned(),
        run_token: Some(assignment.run_token.clone()).filter(|token| !token.is_empty()),
        error_file: None,
        generation,
        control: Some(site.control.to_owned()),
    };
    Ok((0..node.workers).map(contract).collect())
}

/// Environment of the launcher itself.
pub(super) fn inherited() -> Vec<(OsString, OsString)> {
    std::env::vars_os().collect()
}
