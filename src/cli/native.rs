//! The native worker, as the command line sees it. The only file of this package that calls its training.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ddp_launcher::NodeRange;
use ddp_proto::env::WorkerEnv;
use ddp_proto::exit;
use ddp_proto::ids::WorldSize;
use ddp_worker::checkpoint::CheckpointError;
pub use ddp_worker::checkpoint::{ignore_file_size_signal, read_bounded};
pub use ddp_worker::config::reference as key_reference;
use ddp_worker::config::{self, Located, Resume, Run, Source};
pub use ddp_worker::config::{Backend, Precision, Strategy, TrainConfig};
use ddp_worker::data;
use ddp_worker::device::DeviceError;
pub use ddp_worker::inference::RunSettings;
pub use ddp_worker::libraries;
pub use ddp_worker::mesh::Axis;
use ddp_worker::mesh::check_tensor_groups;
use ddp_worker::metrics::{FoundRun, Request, RunDir, RunFilesError};
use ddp_worker::parallel::AgreementError;
use ddp_worker::parallel::pipeline::PipelinePlan;
pub use ddp_worker::plan::{Advice, Candidate, Comparison, Estimate, FoundLayout, LayoutSearch, Machines};
use ddp_worker::pretrained::PretrainedError;
use ddp_worker::session::{MemoryStore, Session, SessionError};
use ddp_worker::train::{
    Assignment, Ended, TrainError, check_initial_weights, check_resumes, pipeline_plan, run_generations,
};
pub use ddp_worker::{costs, cuda};
use nix::time::ClockId;

use super::answer::fail;
use super::error::CliError;
use super::interrupts::Interrupts;
use super::{init_tracing, machine::limits};

/// The log filter of a worker without `RUST_LOG`: an aborted communicator leaves its last operations in the rank's log.
pub const WORKER_EVENTS: &str = "ddp_worker=warn";

/// Exit code where the machine or the training failed, and not what was asked for.
pub const FAILED: u8 = 1;

/// Exit code of a worker that panicked, as of any program in Rust.
const PANICKED: u8 = 101;

/// Longest wait for a folder that no other rank shares.
const FOLDER_TIMEOUT: Duration = Duration::from_secs(10);

/// Name that tools show instead of the number of a descriptor. At most 15 bytes.
const PROCESS_NAME: &std::ffi::CStr = c"ddp-run-worker";

/// A configuration that its workers will accept.
#[derive(Debug)]
pub struct Validated {
    located: Located,
}

impl Validated {
    /// `run.name`.
    pub fn run_name(&self) -> String {
        self.located.config.run.name.clone()
    }

    /// Where the files of the run called `run_id` go.
    pub fn out_dir(&self, run_id: &str) -> PathBuf {
        RunDir::resolve(&self.located.config.run, run_id)
    }

    /// True if a run is continued in a folder that the job's id names: the next start must have the same one.
    pub fn resumes_by_id(&self) -> bool {
        let run = &self.located.config.run;
        run.resume != Resume::Never && run.out_dir.is_none()
    }

    /// The id of the run that a job without a name continues, if it continues one.
    pub fn newest_run(&self) -> Option<String> {
        let dir = newest_run(&self.located.config.run)?;
        Some(dir.file_name()?.to_string_lossy().into_owned())
    }

    /// What to add to the command to resume the run called `run_id`.
    pub fn resume_words(&self, run_id: &str) -> String {
        RunDir::resume_words(&self.located.config.run, run_id)
    }

    /// `parallel.backend`
    pub fn backend(&self) -> Backend {
        self.located.config.parallel.backend
    }

    /// The keys that are set and their values, as people write them.
    pub fn entries(&self) -> Vec<(String, String)> {
        self.located.source.entries()
    }

    /// Why this number of workers on this node would refuse to start. Other nodes may have other numbers of them.
    pub fn refusal(&self, workers: u32, nodes: NodeRange) -> Option<CliError> {
        let env = WorkerEnv {
            world_size: WorldSize(workers.saturating_mul(nodes.min)),
            local_world_size: workers,
            node_count: nodes.min,
            ..WorkerEnv::single()
        };
        let config = &self.located.config;
        let error = match nodes.max {
            1 => Estimate::of(config, &env).err()?,
            _ => TrainError::Config(check_tensor_groups(&config.parallel, &env).err()?),
        };
        if exit_code(&error) != exit::USAGE {
            return None;
        }
        Some(refused(&self.located.source, &error))
    }

    /// Refuses weights to begin with that the workers would refuse, unless the run called `run_id` goes on from a
    /// checkpoint, which does not need them.
    pub fn check_initial_weights(&self, run_id: &str) -> Result<(), CliError> {
        let config = &self.located.config;
        if !RunDir::begins(&config.run, run_id) {
            return Ok(());
        }
        check_initial_weights(config).map_err(|error| {
            let place = self.located.source.place("model.init_from");
            CliError::Config(format!("{place}: {error}"))
        })
    }

    /// Makes the folder of a run that only this node takes part in, or refuses the one that is there. A job of
    /// several nodes leaves that to rank 0, because it may have begun before this node came.
    pub fn claim_out_dir(&self, run_id: &str) -> Result<(), CliError> {
        let request = Request {
            run: &self.located.config.run,
            run_id,
            // Rank 0 takes it for good.
            token: None,
            is_unique: false,
            restarted: false,
            rank: 0,
            generation: 0,
            world_size: 1,
            deadline: Instant::now() + FOLDER_TIMEOUT,
        };
        RunDir::open(request, &MemoryStore::default())
            .map(|_| ())
            .map_err(|error| self.no_out_dir(&error))
    }

    /// What a job called `run_id` would do with the run in its folder, in words, if it holds one, and an error
    /// if the job would be refused. Only reads.
    pub fn found_run(&self, run_id: &str) -> Result<Option<String>, CliError> {
        let looked = RunDir::look(&self.located.config.run, run_id);
        let (found, step) = looked.map_err(|error| self.no_out_dir(&error))?;
        let dir = self.out_dir(run_id);
        let holds = match step {
            Some(step) => format!("`{}` holds a run (step {step})", dir.display()),
            None => format!("`{}` holds a run without a checkpoint", dir.display()),
        };
        let fate = match (found, step) {
            (FoundRun::None, _) => return Ok(None),
            (FoundRun::Deleted, _) => "deleted".to_owned(),
            (FoundRun::Continued, Some(step)) => {
                check_resumes(&self.located.config, &dir, step)
                    .map_err(|error| CliError::Config(error.to_string()))?;
                format!("resumed after step {step}")
            }
            (FoundRun::Continued, None) => "started at step 0".to_owned(),
        };
        Ok(Some(format!("{holds}: it would be {fate}")))
    }

    /// The error of a run that cannot use its folder, at the key to change.
    fn no_out_dir(&self, error: &RunFilesError) -> CliError {
        let key = match error {
            RunFilesError::NothingToResume { .. } => "run.resume",
            _ => "run.out_dir",
        };
        let words = format!("{}: {error}", self.located.source.place(key));
        match of_run_files(error) {
            exit::FOLDER_IN_USE => CliError::FolderInUse(words),
            exit::DISK => CliError::Disk(words),
            _ => CliError::Config(words),
        }
    }
}

/// A configuration for planning: its data files need not exist.
#[derive(Debug)]
pub struct Draft {
    located: Located,
}

impl Draft {
    /// Reads and checks all but the data.
    pub fn read(file: &Path, overrides: &[String]) -> Result<Self, CliError> {
        let complete = |mut located| data::read_vocabulary(&mut located).map(|()| Self { located });
        let draft = config::load_without_data(file, overrides).and_then(complete);
        draft.map_err(|error| CliError::Config(error.to_string()))
    }

    /// The configuration.
    pub fn config(&self) -> &TrainConfig {
        &self.located.config
    }

    /// Its cost on such machines.
    pub fn comparison(&self, machines: &Machines) -> Result<Comparison, CliError> {
        Comparison::of(&self.located.config, machines).map_err(|error| self.refused(&error))
    }

    /// The schedule of its ranks.
    pub fn pipeline(&self) -> Result<PipelinePlan, CliError> {
        pipeline_plan(&self.located.config).map_err(|error| self.refused(&error))
    }

    /// The `wanted` best layouts on such machines, the best first, of those that can be looked at until this process has used a
    /// `time` of its processor: on a busy machine the same ones. `None` if the configuration gives a layout, or too little is
    /// known of the machines.
    pub fn layouts(
        &self,
        machines: &Machines,
        wanted: usize,
        time: Duration,
    ) -> Result<Option<LayoutSearch>, CliError> {
        let mut may_go_on = || {
            let used = ClockId::CLOCK_PROCESS_CPUTIME_ID.now();
            used.is_ok_and(|used| Duration::from(used) < time)
        };
        let search = LayoutSearch::of(&self.located.config, machines, wanted, &mut may_go_on);
        search.map_err(|error| self.refused(&error))
    }

    fn refused(&self, error: &TrainError) -> CliError {
        refused(&self.located.source, error)
    }
}

/// Checks a configuration before anything is spawned, its data files included.
pub fn validate(file: &Path, overrides: &[String]) -> Result<Validated, CliError> {
    load(file, overrides).map(|located| Validated { located })
}

fn load(file: &Path, overrides: &[String]) -> Result<Located, CliError> {
    data::load_located(file, overrides).map_err(|error| CliError::Config(error.to_string()))
}

/// Main of a worker process: `FILE [--set KEY=VALUE]…`, as [`super::launch::target::Target::command`] writes them.
pub fn worker_main(args: impl Iterator<Item = OsString>) -> ExitCode {
    init_tracing(WORKER_EVENTS);
    // Without it, tools show the number of the descriptor that was executed. Nothing depends on it.
    let _ = nix::sys::prctl::set_name(PROCESS_NAME);
    let mut words = args.filter(|word| word != "--set");
    let file = PathBuf::from(words.next().unwrap_or_default());
    let overrides: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    run(&file, &overrides)
}

/// See [`RunDir::newest`]. The user reads that no new run begins.
fn newest_run(run: &Run) -> Option<PathBuf> {
    let dir = RunDir::newest(run)?;
    let (name, path) = (&run.name, dir.display());
    eprintln!("[ddp-run] continuing the newest run of `{name}`, `{path}`");
    eprintln!("[ddp-run]   hint: for a new run, set a different `run.name`, or `run.resume: never`");
    Some(dir)
}

/// Trains `file` in this process, at the place that the environment gives it, or alone.
pub fn run(file: &Path, overrides: &[String]) -> ExitCode {
    ignore_file_size_signal();
    limits::raise_open_files_fully();
    match load(file, overrides) {
        Ok(located) => {
            // A worker that takes the place of another one reads the file as it is then.
            let is_same = |config: &TrainConfig| load(file, overrides).is_ok_and(|now| now.config == *config);
            train(located.config, is_same)
        }
        Err(error) => fail(&error, error.exit_code()),
    }
}

fn train(mut config: TrainConfig, is_same: impl Fn(&TrainConfig) -> bool) -> ExitCode {
    let mut session = match Session::from_env() {
        Ok(session) => session,
        Err(error) => return fail(&error, session_exit_code(&error)),
    };
    let interrupts = match listen(&session) {
        Ok(interrupts) => interrupts,
        Err(error) => return fail(&error, error.exit_code()),
    };
    if session.env().control.is_none() {
        config.run.out_dir = newest_run(&config.run).or(config.run.out_dir);
    }
    let (first, mut is_reported) = (Assignment::of(&session), false);
    let mut next = |ended: &mut Ended| {
        let goes_on = match ended {
            Ok(summary) => summary.stopped.is_some() && session.stays(),
            Err(error) => matches!(error, TrainError::GenerationOver { .. }) && session.outlives(),
        };
        if !goes_on || !is_same(&config) {
            return None;
        }
        if let Err(TrainError::GenerationOver {
            rank,
            activity,
            cause,
        }) = ended
        {
            let place = activity
                .as_ref()
                .map_or_else(String::new, |place| format!(" ({place})"));
            eprintln!("note: rank {rank} left the step{place} and waits for the next start: {cause}");
        }
        is_reported = true;
        // A worker without a place in the next generation ends with the error of this one.
        session = session.park().ok()?;
        is_reported = false;
        Some(Assignment::of(&session))
    };
    // The hook has written the message of a panic.
    let outcome = catch_unwind(AssertUnwindSafe(|| run_generations(&config, first, &mut next)));
    let Ok(outcome) = outcome else {
        session.shutdown();
        libraries::exit_at_once(PANICKED);
    };
    if let (Err(error), false) = (&outcome, is_reported) {
        fail(error, exit_code(error));
    }
    session.shutdown();
    match outcome {
        Ok(summary) => match interrupts.filter(|_| summary.stopped.is_some()) {
            Some(interrupts) => ExitCode::from(interrupts.exit_code()),
            None => ExitCode::SUCCESS,
        },
        // A thread may still be aborting a communicator.
        Err(error) => libraries::exit_at_once(exit_code(&error)),
    }
}

/// An agent asks its worker to stop. A worker without an agent listens to signals itself.
fn listen(session: &Session) -> Result<Option<Interrupts>, CliError> {
    if session.env().control.is_some() {
        return Ok(None);
    }
    let request = session.stop_request();
    let listening = Interrupts::listen(move |cause| request.ask(cause, false));
    listening
        .map(Some)
        .map_err(CliError::machine("cannot listen to signals"))
}

/// The error at the place of the key whose value it refuses.
fn refused(source: &Source, error: &TrainError) -> CliError {
    let key = match error {
        TrainError::Config(problem) => &problem.key,
        _ => "parallel",
    };
    CliError::Config(format!("{}: {error}", source.place(key)))
}

/// What the user must change ends with the code for that, and is never tried again; what may pass ends as any failure.
/// Numbers that were not finite would not be so the next time either; a card has as much memory as before, the machine
/// too, and a limit of the process (`ulimit`) is the same: the same run does the same.
fn exit_code(error: &TrainError) -> u8 {
    if error.never_fits() {
        return exit::DO_NOT_RESTART;
    }
    let passing = match error {
        TrainError::NonFinite { .. } => return exit::DO_NOT_RESTART,
        TrainError::NodeUnfit(_) => return exit::NODE_UNFIT,
        TrainError::Checkpoint(error) => return of_checkpoint(error),
        TrainError::RunFiles(error) => return of_run_files(error),
        // Training that was done is not done again for a disk that is as full as before; the configuration was right.
        TrainError::NotSaved {
            cause: Some(error), ..
        } if of_checkpoint(error) != FAILED => return exit::DISK,
        TrainError::Refused(_)
        | TrainError::Config(_)
        | TrainError::Device(DeviceError::TooOld { .. } | DeviceError::NoInstructionSet { .. })
        | TrainError::Layout(_)
        | TrainError::Data(_) => false,
        TrainError::Pretrained(error) => {
            matches!(error, PretrainedError::Io { kind, .. } if is_transient(*kind))
        }
        TrainError::Agreement(error) => !matches!(error, AgreementError::Differs(_)),
        TrainError::NotSaved { .. }
        | TrainError::GenerationOver { .. }
        | TrainError::Join(_)
        | TrainError::Reduce(_)
        | TrainError::Replicas(_)
        | TrainError::Collective(_)
        | TrainError::Device(_) => true,
    };
    if passing { FAILED } else { exit::USAGE }
}

fn of_run_files(error: &RunFilesError) -> u8 {
    match error {
        RunFilesError::Store(_) => FAILED,
        RunFilesError::Checkpoint(error) => of_checkpoint(error),
        RunFilesError::Io { kind, .. } => of_io(*kind),
        RunFilesError::Gone(_) => exit::DISK,
        RunFilesError::InUse(_) => exit::FOLDER_IN_USE,
        RunFilesError::Refused(_) | RunFilesError::NothingToResume { .. } | RunFilesError::RankZero(_) => {
            exit::USAGE
        }
    }
}

fn of_checkpoint(error: &CheckpointError) -> u8 {
    match error {
        CheckpointError::Io { kind, .. } => of_io(*kind),
        CheckpointError::Stalled(_) | CheckpointError::NotSaved(_) | CheckpointError::Misuse(_) => FAILED,
        _ => exit::USAGE,
    }
}

/// Exit code of what the file system refused.
pub fn of_io(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => exit::DISK,
        kind if is_transient(kind) => FAILED,
        _ => exit::USAGE,
    }
}

/// Errors of a disk or of a network file system that are not there at the next try.
fn is_transient(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Interrupted
            | ErrorKind::TimedOut
            | ErrorKind::StaleNetworkFileHandle
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::NetworkDown
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::ResourceBusy
            | ErrorKind::Other
    )
}

/// A worker without a place: its environment is wrong, or its agent was lost.
fn session_exit_code(error: &SessionError) -> u8 {
    match error {
        SessionError::Env(_) | SessionError::Refused(_) => exit::USAGE,
        SessionError::Lost(_) => FAILED,
    }
}
