//! The workers of one generation on this node.
//!
//! | file | what it does |
//! |---|---|
//! | `spawn_context` | what they are started from: an assignment, and where this node is |
//! | `exits` | the ends that they came to, as the protocol tells them |
//! | `hang_watch` | finds those that hang, and ends them |
//! | `pace` | steps, step times and losses, for people |

mod exits;
mod hang_watch;
mod pace;
mod spawn_context;

pub(super) use hang_watch::{HangWatch, Threads};
pub(super) use spawn_context::SpawnContext;

use pace::Pace;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use ddp_proto::control::{Collective, PeerWait, Phase, Progress, Sizes, ToAgent};
use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{Generation, GlobalRank, LocalRank};
use ddp_proto::rendezvous::{Assignment, Heartbeat, LostRank, RankProgress};
use ddp_proto::trust::data_key::DataKey;
use ddp_proto::words::numbered;
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, pipe2};
use tokio::sync::watch;

use super::machine::ExitReason;
use crate::output::logs::WorkerFiles;
use crate::output::plan::TIME;
use crate::output::reader::{OutputReader, TailReader, WorkerStream, tail};
use crate::output::repeated_errors::RepeatedErrors;
use crate::output::streams::Stream;
use crate::plan::SignalScope;
use crate::report::facts::LocalEnd;
use crate::spawn::spawner::WorkerSpec;
use crate::supervise::ending::Ending;
use crate::supervise::hang::Beat;
use crate::supervise::oom::OomCounter;
use crate::supervise::waits::ReportedWaits;

/// Longest path that a heartbeat carries.
const MAX_LOG_DIR_BYTES: usize = 1024;
/// Longest message of a worker about its failure; the rest is cut off.
const MAX_MESSAGE_CHARS: usize = 4000;

/// One worker.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent of each other")]
struct Worker {
    rank: GlobalRank,
    pid: Option<i32>,
    /// Its last sign of life.
    beat: Option<Beat>,
    pace: Pace,
    /// Of the whole run, as rank 0 of a native one says.
    progress: Option<Progress>,
    /// It has sent a heartbeat, and not closed its connection since.
    is_watched: bool,
    /// A control connection of it was refused.
    was_refused: bool,
    /// The numbers that a new number of ranks must divide, as the worker reports them.
    sizes: Option<Sizes>,
    /// Its answer to the last question about its state.
    state: Option<String>,
    /// Its last collectives, by the same answer.
    collectives: Vec<Collective>,
    /// Its waits for other ranks, by its last heartbeat.
    waits: Vec<PeerWait>,
    /// Where in a step it is, by its last heartbeat; may be empty.
    activity: String,
    /// The step in which the workers of this node that said nothing new were found to wait for others.
    found_waiting: Option<u64>,
    /// It hung, and was sent SIGABRT.
    aborted: bool,
    /// Its own message about its failure.
    message: Option<String>,
    /// It reports that another rank caused its failure.
    consequence: bool,
    /// The rank to which its data connection broke, as it reports.
    lost_rank: Option<u32>,
    /// The message in its error file, once that has been read.
    in_file: Option<String>,
    files: WorkerFiles,
    /// What its lines on the console begin with.
    prefix: watch::Sender<String>,
    stdout: TailReader,
    stderr: TailReader,
    /// It was started in an earlier generation.
    is_kept: bool,
    sent: Option<i32>,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug)]
struct End {
    ending: Ending,
    at: Instant,
    time: SystemTime,
    out_of_memory: bool,
}

/// All workers of a generation, by local rank.
#[derive(Debug)]
pub(super) struct WorkerGroup {
    workers: BTreeMap<LocalRank, Worker>,
    began: Instant,
    /// The first failure, or the beginning of the stop.
    trouble: Option<Instant>,
    /// The control group that its workers are in.
    group: Option<PathBuf>,
    /// Since the generation began.
    oom: OomCounter,
    reported_waits: ReportedWaits,
    /// The errors that they printed.
    pub(super) repeated: RepeatedErrors,
    signal_scope: SignalScope,
    /// Rank 0 has a port to bind, and the next generation has a different one.
    port_changes: bool,
    /// Tells the spawner to start no more.
    pub(super) cancelled: Arc<AtomicBool>,
}

/// A worker group and what is needed to start it.
pub(super) struct Prepared {
    pub(super) worker_group: WorkerGroup,
    pub(super) specs: Vec<WorkerSpec>,
    pub(super) contracts: Vec<WorkerEnv>,
    /// Files and prefixes of the workers that are parked.
    kept: BTreeMap<LocalRank, (WorkerFiles, String)>,
    /// Address of this node.
    pub(super) node_addr: String,
    /// Of the generation's data connections.
    pub(super) data_key: Option<DataKey>,
}

impl WorkerGroup {
    /// The worker group before the first assignment.
    pub(super) fn none() -> Self {
        Self::empty(None, SignalScope::default())
    }

    fn empty(group: Option<&Path>, signal_scope: SignalScope) -> Self {
        Self {
            workers: BTreeMap::new(),
            began: Instant::now(),
            trouble: None,
            group: group.map(Path::to_owned),
            oom: OomCounter::of_workers(group),
            reported_waits: ReportedWaits::default(),
            repeated: RepeatedErrors::default(),
            signal_scope,
            port_changes: false,
            cancelled: Arc::default(),
        }
    }

    /// Those of the workers that are parked, with their processes, files and pipes, as they begin the next generation.
    pub(super) fn parked(&mut self, is_parked: impl Fn(LocalRank) -> bool) -> Self {
        let mut parked = Self::none();
        parked.group = self.group.take();
        let workers = std::mem::take(&mut self.workers).into_iter();
        let workers = workers.filter(|(local_rank, _)| is_parked(*local_rank));
        parked.workers = workers
            .map(|(local_rank, worker)| (local_rank, worker.renewed()))
            .collect();
        parked
    }

    /// Makes files and pipes of the workers that are not parked, begins to read the pipes.
    pub(super) fn prepare(
        generation: Generation,
        assignment: &Assignment,
        context: &SpawnContext,
        reader: &OutputReader,
    ) -> Result<Prepared, ExitReason> {
        let plan = &*context.plan;
        let mut worker_group = Self::empty(context.group.as_deref(), plan.signals.scope);
        worker_group.port_changes = !context.agent_store && plan.master_port.is_none();
        let attempt = context.attempt(generation, assignment);
        let duplicate = |stream| context.duplicate(stream, attempt);
        let duplicates = [duplicate(Stream::Stdout)?, duplicate(Stream::Stderr)?];
        // Nothing tells the two streams of a worker apart then.
        let merges = reader.merges() && !plan.command.native && plan.log_dir.is_none();
        let (mut specs, mut contracts, mut kept) = (Vec::new(), Vec::new(), BTreeMap::new());
        for mut contract in context.contracts(generation, assignment) {
            let (rank, local_rank) = (contract.rank, contract.local_rank);
            let files = files_of(&mut contract, context, attempt)?;
            let prefix = plan.output.prefix.of(&contract, &context.hostname);
            if context.parked.contains_key(&local_rank) {
                kept.insert(local_rank, (files, prefix));
                contracts.push(contract);
                continue;
            }
            let (prefix_sender, shown_prefix) = watch::channel(prefix.clone());
            let open = |stream: Stream| {
                let name = format!("{}.log", stream.name());
                let log = files.open_log(&name, plan.output.log_max_bytes, prefix.contains(TIME))?;
                let shown = plan.output.shows(rank, local_rank, stream);
                let (pipe, pipe_end) = pipe2(OFlag::O_CLOEXEC).map_err(no_pipes)?;
                let (tail, tail_reader) = tail();
                let worker_stream = WorkerStream {
                    rank,
                    stream,
                    pipe,
                    log,
                    tail,
                    prefix: shown.then(|| shown_prefix.clone()),
                    errors: worker_group.repeated.of_rank(rank, plan.command.native),
                    duplicate: duplicates[stream as usize].clone(),
                };
                if !reader.add(worker_stream) {
                    let silent = "the thread that reads them does not respond";
                    return Err(no_pipes(silent));
                }
                Ok::<_, ExitReason>((pipe_end, tail_reader))
            };
            let (output, [stdout, stderr]) = if plan.output.hands_over(rank, local_rank) {
                (None, [tail().1, tail().1])
            } else {
                let (stderr_pipe, stderr) = open(Stream::Stderr)?;
                let (stdout_pipe, stdout) = if merges {
                    (stderr_pipe.try_clone().map_err(no_pipes)?, stderr.clone())
                } else {
                    open(Stream::Stdout)?
                };
                (Some([stdout_pipe, stderr_pipe]), [stdout, stderr])
            };
            specs.push(WorkerSpec {
                local_rank,
                env: context.environment_of(&contract, assignment),
                output,
                has_stdin: rank == GlobalRank(0),
                cores: context.cores_of(local_rank),
            });
            contracts.push(contract);
            let worker = Worker::new(rank, files, prefix_sender, [stdout, stderr]);
            worker_group.workers.insert(local_rank, worker);
        }
        Ok(Prepared {
            worker_group,
            specs,
            contracts,
            kept,
            node_addr: assignment.own.clone().unwrap_or_default().addr,
            data_key: DataKey::of_assignment(&assignment.data_key),
        })
    }

    /// What runs here: `train.py: ranks 0, 1; pids 4711, 4712; kept: rank 0; logs in /tmp/logs/attempt_1`.
    pub(super) fn introduction(&self, program: &str) -> String {
        let workers = self.workers.values();
        let started = workers.filter_map(|worker| Some((worker.rank.0, worker.pid?)));
        let (ranks, pids): (Vec<_>, Vec<_>) = started.unzip();
        let (ranks, pids) = (numbered("rank", &ranks), numbered("pid", &pids));
        let workers = self.workers.values();
        let kept = workers.filter(|worker| worker.is_kept && worker.end.is_none());
        let kept: Vec<_> = kept.map(|worker| worker.rank.0).collect();
        let kept = (!kept.is_empty()).then(|| format!("; kept: {}", numbered("rank", &kept)));
        let logs = self
            .attempt_dir()
            .map(|dir| format!("; logs in {}", dir.display()));
        let [kept, logs] = [kept, logs].map(Option::unwrap_or_default);
        format!("{program}: {ranks}; {pids}{kept}{logs}")
    }

    fn get(&self, local_rank: LocalRank) -> Option<&Worker> {
        self.workers.get(&local_rank)
    }

    fn get_mut(&mut self, local_rank: LocalRank) -> Option<&mut Worker> {
        self.workers.get_mut(&local_rank)
    }

    /// A worker runs; its rank, if it is one of these.
    pub(super) fn spawned(&mut self, local_rank: LocalRank, pid: i32) -> Option<GlobalRank> {
        let worker = self.get_mut(local_rank)?;
        worker.pid = Some(pid);
        Some(worker.rank)
    }

    /// Rank 0 is this worker.
    pub(super) fn is_rank_0(&self, local_rank: LocalRank) -> bool {
        self.get(local_rank)
            .is_some_and(|worker| worker.rank == GlobalRank(0))
    }

    /// Notes a message of a worker. True if the daemon must get it at once.
    pub(super) fn note(&mut self, local_rank: LocalRank, message: ToAgent) -> bool {
        let Some(worker) = self.get_mut(local_rank) else {
            return false;
        };
        let mut is_urgent = false;
        match message {
            ToAgent::Heartbeat {
                step,
                phase,
                quiet_ms,
                waits,
                activity,
                progress,
                loss,
                waited_s,
            } => {
                let at = Instant::now();
                let fresh = at.checked_sub(Duration::from_millis(quiet_ms)).unwrap_or(at);
                (worker.waits, worker.activity) = (waits, activity);
                let loss = loss.or(progress.as_ref().map(|progress| progress.loss));
                let loss = loss.filter(|_| worker.rank == GlobalRank(0));
                worker.progress = progress.or(worker.progress.take());
                is_urgent = worker.pace.note(fresh, step, phase, loss, waited_s);
                worker.beat = Some(Beat {
                    at,
                    fresh,
                    step,
                    phase,
                });
                worker.is_watched = true;
                tracing::trace!(rank = worker.rank.0, step, ?phase, "heartbeat");
            }
            // Should this node be lost before its next heartbeat, the others have to know.
            ToAgent::Sizes(sizes) => is_urgent = worker.sizes.replace(sizes) != Some(sizes),
            // The daemon may have seen that rank's node go, and wait for a second witness.
            ToAgent::PeerLost { rank } => {
                worker.lost_rank = Some(rank);
                is_urgent = true;
            }
            ToAgent::State { text, collectives } => {
                (worker.state, worker.collectives) = (Some(text), collectives);
            }
            ToAgent::Failure {
                message,
                hint,
                consequence,
            } => {
                let words = match hint {
                    Some(hint) => format!("{message}\nhint: {hint}"),
                    None => message,
                };
                worker.consequence = consequence;
                worker.message = Some(words.chars().take(MAX_MESSAGE_CHARS).collect());
            }
            // Answered by the connection.
            ToAgent::Hello { .. }
            | ToAgent::KvPut { .. }
            | ToAgent::KvGet { .. }
            | ToAgent::KvGather { .. } => {}
        }
        is_urgent
    }

    /// A worker has no connection any more: that it says nothing new means nothing, until it reports again.
    pub(super) fn disconnected(&mut self, local_rank: LocalRank) {
        if let Some(worker) = self.get_mut(local_rank) {
            worker.is_watched = false;
        }
    }

    /// The rank of a worker of which a connection was refused for the first time.
    pub(super) fn first_refused(&mut self, local_rank: LocalRank) -> Option<GlobalRank> {
        let worker = self.get_mut(local_rank).filter(|worker| !worker.was_refused)?;
        worker.was_refused = true;
        Some(worker.rank)
    }

    /// The worker says that it failed only because another rank did.
    pub(super) fn is_consequence(&self, local_rank: LocalRank) -> bool {
        self.get(local_rank).is_some_and(|worker| worker.consequence)
    }

    /// The control group that its workers are in, where there is one.
    pub(super) fn group(&self) -> Option<&Path> {
        self.group.as_deref()
    }

    /// Process ids of the workers that have not been reaped.
    pub(super) fn live_pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.live().map(|(pid, _)| pid)
    }

    /// Those of these workers.
    pub(super) fn pids_of(&self, is_meant: impl Fn(LocalRank) -> bool) -> Vec<(LocalRank, i32)> {
        let live = self.workers.iter().filter(|(_, worker)| worker.end.is_none());
        live.filter_map(|(local_rank, worker)| Some((*local_rank, worker.pid?)))
            .filter(|(local_rank, _)| is_meant(*local_rank))
            .collect()
    }

    /// What a number of ranks has to divide for the job to go on, as the workers say; none if none has said it.
    pub(super) fn sizes(&self) -> Option<Sizes> {
        self.workers.values().find_map(|worker| worker.sizes)
    }

    /// What each heartbeat tells the daemon about the workers.
    pub(super) fn heartbeat(&self) -> Heartbeat {
        let sizes = self.sizes();
        Heartbeat {
            step: self.step(),
            ranks_divide: sizes.and_then(|sizes| sizes.ranks_divide),
            ranks_multiple_of: sizes.and_then(|sizes| sizes.ranks_multiple_of),
            lost_rank: self.workers.values().find_map(|worker| {
                // How ranks of this node ended is reported by itself.
                let is_own = |rank: &u32| self.workers.values().any(|own| own.rank.0 == *rank);
                let rank = worker.lost_rank.filter(|rank| !is_own(rank))?;
                let witness = worker.rank.0;
                Some(LostRank { rank, witness })
            }),
            ranks: self.progress(),
            log_dir: self.reported_log_dir(),
            ..Heartbeat::default()
        }
    }

    /// How far each worker has come that says so.
    fn progress(&self) -> Vec<RankProgress> {
        let now = Instant::now();
        let told = self.workers.values().filter_map(|worker| {
            let beat = worker.beat?;
            let silence = now.saturating_duration_since(beat.fresh);
            let progress = worker.progress.as_ref();
            Some(RankProgress {
                steps: progress.map(|progress| progress.steps),
                tokens_per_s: progress.map(|progress| progress.tokens_per_s),
                model_flops_per_s: progress.and_then(|progress| progress.model_flops_per_s),
                mfu: progress.and_then(|progress| progress.mfu),
                ..worker.pace.report(worker.rank.0, beat.step, silence)
            })
        });
        told.take(pace::MAX_REPORTED).collect()
    }

    /// Where the logs of this generation lie, for people; empty without any.
    fn reported_log_dir(&self) -> String {
        let dir = self.attempt_dir().unwrap_or_default();
        let mut dir = dir.to_string_lossy().into_owned();
        dir.truncate(dir.floor_char_boundary(MAX_LOG_DIR_BYTES));
        dir
    }

    /// All workers have said that they are done with the last step.
    pub(super) fn is_finishing(&self) -> bool {
        let finishes = |worker: &Worker| worker.beat.is_some_and(|beat| beat.phase == Phase::Finishing);
        !self.workers.is_empty() && self.workers.values().all(finishes)
    }

    /// Steps that the farthest worker reported.
    pub(super) fn step(&self) -> Option<u64> {
        self.workers
            .values()
            .filter_map(|worker| Some(worker.beat?.step))
            .max()
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
                .find(|(_, worker)| worker.pid == Some(pid));
            if let Some((local_rank, worker)) = worker {
                // One that hung and was killed for it got no signal that counts as `sent`.
                let out_of_memory = !worker.aborted && self.oom.explains(ending, worker.sent);
                worker.end = Some(End {
                    ending,
                    at,
                    time,
                    out_of_memory,
                });
                ends.push((*local_rank, ending));
            }
        }
        ends
    }

    /// Times are reported from now on.
    pub(super) fn trouble_begins(&mut self) {
        self.trouble.get_or_insert_with(Instant::now);
        self.cancelled.store(true, Ordering::Release);
    }

    /// From the start of the workers to the first failure, or to the beginning of the stop.
    pub(super) fn ran_for(&self) -> Option<Duration> {
        self.trouble.map(|trouble| trouble - self.began)
    }

    /// Sends a signal to the live workers that are meant: to their process groups, or to them alone if that is their
    /// scope. One that got it last does not get it again: a second SIGINT would interrupt what a program does because of
    /// the first.
    pub(super) fn signal(&mut self, signal: i32, is_meant: impl Fn(LocalRank) -> bool) {
        let Ok(number) = Signal::try_from(signal) else {
            return;
        };
        let alone = self.signal_scope == SignalScope::Rank && number != Signal::SIGKILL;
        for (local_rank, worker) in &mut self.workers {
            let meant = is_meant(*local_rank) && worker.sent != Some(signal);
            if let (true, Some(pid), None) = (meant, worker.pid, worker.end) {
                let pid = Pid::from_raw(pid);
                // Dead already, if this fails; it has not been reaped, so the number is still its own.
                let _ = if alone {
                    kill(pid, number)
                } else {
                    killpg(pid, number)
                };
                // One that is stopped would not act on it.
                let _ = killpg(pid, Signal::SIGCONT);
                worker.sent = Some(signal);
            }
        }
    }

    /// Workers that live, with their process ids.
    fn live(&self) -> impl Iterator<Item = (i32, &Worker)> {
        let live = self.workers.values().filter(|worker| worker.end.is_none());
        live.filter_map(|worker| Some((worker.pid?, worker)))
    }

    /// Lines for the console about the workers' waits for other ranks, after a heartbeat.
    pub(super) fn wait_messages(&mut self) -> Vec<String> {
        let live = self.workers.values().filter(|worker| worker.end.is_none());
        let waits: Vec<_> = live
            .map(|worker| (worker.rank.0, worker.waits.as_slice()))
            .collect();
        self.reported_waits.update(&waits, Instant::now())
    }

    /// The workers that say nothing new wait for others: in the steps in which all are, that is known.
    fn found_waiting(&mut self) {
        for worker in self.workers.values_mut() {
            worker.found_waiting = worker.beat.map(|beat| beat.step);
        }
    }

    /// What the workers said that they do is not what they do now.
    fn forget_states(&mut self) {
        for worker in self.workers.values_mut() {
            worker.state = None;
            worker.collectives.clear();
        }
    }

    /// Where the log folders of all workers lie; none without a log directory.
    fn attempt_dir(&self) -> Option<PathBuf> {
        let log = self.workers.first_key_value()?.1.files.stderr_log()?;
        log.ancestors().nth(2).map(Path::to_owned)
    }

    /// The live workers that have said nothing new for `bound`, with their process ids and last heartbeats.
    fn silent(&self, bound: Duration) -> Vec<(i32, &Worker, Beat)> {
        let now = Instant::now();
        let watched = self.live().filter(|(_, worker)| worker.is_watched);
        let beats = watched.filter_map(|(pid, worker)| Some((pid, worker, worker.beat?)));
        beats.filter(|(.., beat)| beat.silence(now) >= bound).collect()
    }

    /// No worker has sent a heartbeat, though they have run for longer than `bound`.
    fn is_unwatched(&self, bound: Duration) -> bool {
        let began = !self.workers.is_empty() && self.began.elapsed() > bound;
        began && self.workers.values().all(|worker| worker.beat.is_none())
    }

    /// Passes a signal of the user's on to the workers themselves, which go on.
    pub(super) fn pass_on(&self, signal: i32) {
        let Ok(number) = Signal::try_from(signal) else {
            return;
        };
        for pid in self.live_pids() {
            // Dead already, if this fails.
            let _ = kill(Pid::from_raw(pid), number);
        }
    }

    /// Readers of the streams of all but these workers, to wait for their ends.
    pub(super) fn streams(&self, spared: &[i32]) -> Vec<TailReader> {
        let is_spared = |worker: &Worker| worker.pid.is_some_and(|pid| spared.contains(&pid));
        let workers = self.workers.values();
        workers
            .filter(|worker| !is_spared(worker))
            .flat_map(|worker| [worker.stdout.clone(), worker.stderr.clone()])
            .collect()
    }

    /// The stream whose last lines tell why a worker failed.
    pub(super) fn stderr_of(&self, local_rank: LocalRank) -> Option<TailReader> {
        Some(self.get(local_rank)?.stderr.clone())
    }

    /// The files of a worker, which only a thread that may wait looks into.
    pub(super) fn files_of(&self, local_rank: LocalRank) -> Option<WorkerFiles> {
        Some(self.get(local_rank)?.files.clone())
    }

    /// The files of workers that failed on their own and have not said why.
    pub(super) fn files_of_failures_without_message(&self) -> Vec<(LocalRank, WorkerFiles)> {
        let is_silent = |worker: &Worker| {
            let failed = worker.end.is_some_and(|end| !end.ending.is_success()) && worker.sent.is_none();
            failed && worker.failure_message().is_none()
        };
        self.workers
            .iter()
            .filter(|(_, worker)| is_silent(worker))
            .map(|(local_rank, worker)| (*local_rank, worker.files.clone()))
            .collect()
    }

    /// Keeps what a worker wrote into its error file before it ended.
    pub(super) fn note_error_file(&mut self, local_rank: LocalRank, words: String) {
        if let Some(worker) = self.get_mut(local_rank) {
            worker.in_file = Some(words);
        }
    }

    /// The error file of a worker, whether it exists or not.
    pub(super) fn error_file_of(&self, rank: GlobalRank) -> Option<PathBuf> {
        let worker = self.workers.values().find(|worker| worker.rank == rank)?;
        Some(worker.files.error_file())
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
                after: end.at.checked_duration_since(zero),
                message: worker.message.clone(),
                consequence: worker.consequence,
            })
        };
        self.workers.values().filter_map(end).collect()
    }
}

/// The files of a worker: new ones, or those that a parked one has.
fn files_of(
    contract: &mut WorkerEnv,
    context: &SpawnContext,
    attempt: u32,
) -> Result<WorkerFiles, ExitReason> {
    let log_dir = context.plan.log_dir.as_deref();
    let files = match context.parked.get(&contract.local_rank) {
        Some(parked) => parked.continued(log_dir, attempt, contract.rank),
        None => WorkerFiles::create(log_dir, &context.scratch_dir, attempt, contract.rank)?,
    };
    contract.error_file = Some(files.error_file().to_string_lossy().into_owned());
    Ok(files)
}

impl Prepared {
    /// Adds workers that were parked; their place may be another one.
    pub(super) fn adopt(&mut self, parked: WorkerGroup) {
        for (local_rank, mut worker) in parked.workers {
            if let Some(contract) = self.contracts.get(local_rank.0 as usize)
                && let Some((files, prefix)) = self.kept.remove(&local_rank)
            {
                (worker.rank, worker.files) = (contract.rank, files);
                worker.prefix.send_replace(prefix);
                self.worker_group.workers.insert(local_rank, worker);
            }
        }
    }
}

pub(super) fn no_pipes(error: impl Display) -> ExitReason {
    ExitReason::internal(format!(
        "cannot create pipes for the workers: {error}\n  hint: check `ulimit -n`"
    ))
}

impl Worker {
    /// One that is about to be started.
    fn new(
        rank: GlobalRank,
        files: WorkerFiles,
        prefix: watch::Sender<String>,
        [stdout, stderr]: [TailReader; 2],
    ) -> Self {
        Self {
            rank,
            pid: None,
            beat: None,
            pace: Pace::default(),
            progress: None,
            is_watched: false,
            was_refused: false,
            sizes: None,
            state: None,
            collectives: Vec::new(),
            waits: Vec::new(),
            activity: String::new(),
            found_waiting: None,
            aborted: false,
            message: None,
            consequence: false,
            lost_rank: None,
            in_file: None,
            files,
            prefix,
            stdout,
            stderr,
            is_kept: false,
            sent: None,
            end: None,
        }
    }

    /// The same process in its next generation.
    fn renewed(self) -> Self {
        Self {
            pid: self.pid,
            is_kept: true,
            ..Self::new(self.rank, self.files, self.prefix, [self.stdout, self.stderr])
        }
    }

    /// Where it was, by its last heartbeat; none if it has sent none.
    fn place(&self) -> Option<String> {
        Some(self.beat?.place(&self.activity))
    }

    /// The same, once it has got beyond its start: before that a place says nothing that the failure does not.
    fn place_in_training(&self) -> Option<String> {
        let beat = self.beat.filter(|beat| beat.phase != Phase::Starting)?;
        Some(beat.place(&self.activity))
    }

    /// The worker's message about its failure: from the control socket, or from its error file.
    fn failure_message(&self) -> Option<String> {
        self.message.clone().or_else(|| self.in_file.clone())
    }
}
