//! `ddp-run`: guardian, plan, hosting, agent — in that order — and the exit code.
//!
//! | module | what it does | what it must not do |
//! |---|---|---|
//! | [`args`] | stage one: the flags as typed, each value checked alone | any I/O |
//! | [`scheduler`] | the lowest layer of settings: the batch system | know defaults |
//! | [`layers`], [`plan`] | stage two: layers and defaults become a [`Launch`] | bind or connect |
//! | [`output`] | what becomes of the workers' output: console, files, the terminal | |
//! | [`target`] | kinds of target, and their command | |
//! | [`agreement`] | what all nodes of a job must have alike, as hashes, and which values may be shown | any I/O |
//! | [`dry_run`] | shows a plan and where each value comes from | |
//! | `health` | answers the probes of a cluster | |
//! | [`host`] | who hosts the daemon | run it |

pub mod agreement;
pub mod args;
pub mod dry_run;
mod health;
pub mod host;
pub mod layers;
pub mod output;
pub mod plan;
pub mod scheduler;
pub mod target;

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::panic;
use std::process::ExitCode;
use std::time::Duration;

use ddp_launcher::{BoundPlan, Guardian};
use ddp_proto::exit;
use ddp_proto::trust::token::Token;
use tokio::sync::oneshot;

use crate::cli::answer::{OWN_PREFIX, print_own, print_own_error};
use crate::cli::error::CliError;
use crate::cli::machine::hardware::{self, GPU_PROBE_SUBCOMMAND};
use crate::cli::machine::limits;
use crate::cli::serve::Stops;
use crate::cli::{answer, event_loop, init_launcher_tracing, native};
use crate::rendezvous::{self, Monitoring};
use args::Args;
use host::{HostFacts, OwnDaemon};
use plan::Launch;
use target::{SelfExe, WORKER_SUBCOMMAND};

/// What a launcher says without `RUST_LOG`: errors of its rendezvous, that others can reach it without a token, and that it
/// keeps nodes out for want of files, are told nowhere else.
const LAUNCHER_EVENTS: &str = "ddp_run=error,ddp_run::cli::launch::host=warn,\
     ddp_run::rendezvous::service::connection=warn,ddp_run::rendezvous::service::connection_limits=warn";

/// Longest wait for the embedded daemon beyond its own [`rendezvous::Config::shutdown_wait`].
const DAEMON_STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// Main of `ddp-run`. Must be called before any thread exists, because the guardian is forked.
pub fn main(argv: Vec<OsString>) -> ExitCode {
    let first = argv.get(1).and_then(|word| word.to_str());
    match first {
        Some(WORKER_SUBCOMMAND) => return native::worker_main(argv.into_iter().skip(2)),
        Some(GPU_PROBE_SUBCOMMAND) => return hardware::probe_gpus(),
        _ => {}
    }
    if let Err(error) = limits::check_stack() {
        return fail(&error);
    }
    let args = match args::parse(argv) {
        Ok(args) => args,
        Err(words) => return answer::instead_of_arguments(&words, OWN_PREFIX),
    };
    if let Some(shell) = args.completions {
        return answer::completions(shell, args::command());
    }
    if args.dry_run {
        return show(args);
    }
    if let Err(error) = limits::check_open_files() {
        return fail(&error);
    }
    // As early as possible: whatever this process maps before, the guardian holds too.
    let forked = Guardian::fork().map_err(CliError::machine("cannot fork the guardian of the workers"));
    let guardian = match forked {
        Ok(guardian) => guardian,
        Err(error) => return fail(&error),
    };
    init_launcher_tracing(LAUNCHER_EVENTS);
    run(args, guardian)
}

/// `--dry-run`, with the exit code of a launch whose workers cannot be started.
fn show(args: Args) -> ExitCode {
    let shown = SelfExe::open().and_then(|exe| {
        let launch = plan::resolve(args, |name| std::env::var(name).ok(), &exe)?;
        // Whether the workers' program is there is looked at while `exe` is open.
        let missing = ddp_launcher::missing_program(&launch.plan);
        // As it is, to be copied.
        let given = answer::give(dry_run::describe(&launch, missing.as_ref()) + "\n");
        Ok(missing.map_or(given, |error| ExitCode::from(error.exit_code())))
    });
    shown.unwrap_or_else(|error| fail(&error))
}

fn fail(error: &CliError) -> ExitCode {
    print_own_error(error);
    ExitCode::from(error.exit_code())
}

/// No worker was started: the guardian has nothing to kill, and goes.
fn dismiss(guardian: Guardian) {
    if let Err(error) = guardian.shutdown() {
        tracing::warn!(%error, "the guardian did not exit in time");
    }
}

/// A panic of any thread or task ends the launcher, whose guardian then cleans up: the rest would wait for ever for what
/// the thread or task was to do.
fn exit_on_panic() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        print(info);
        std::process::exit(exit::INTERNAL.into());
    }));
}

fn run(args: Args, guardian: Guardian) -> ExitCode {
    exit_on_panic();
    let launched = SelfExe::open().and_then(|exe| {
        let launch = plan::resolve(args, |name| std::env::var(name).ok(), &exe)?;
        let open_files = limits::raise_open_files(&launch.plan)?;
        let runtime = event_loop()?;
        let (plan, daemon) = runtime.block_on(async {
            // Before the launcher waits for anything: a probe may begin at once.
            health::answer_probes(|name| std::env::var(name).ok());
            bind(launch, open_files, guardian.launcher_id()).await
        })?;
        // Workers of later generations are started from `exe`.
        Ok((exe, runtime, plan, daemon))
    });
    let (_exe, runtime, plan, daemon) = match launched {
        Ok(launched) => launched,
        Err(error) => {
            dismiss(guardian);
            return fail(&error);
        }
    };
    runtime.block_on(async {
        let outcome = ddp_launcher::run(plan, guardian).await;
        if let Some(daemon) = daemon {
            daemon.finish().await;
        }
        ExitCode::from(outcome.exit_code)
    })
}

/// Finds the daemon, or starts it in this process.
async fn bind(
    launch: Launch,
    open_files: Option<u64>,
    launcher_id: &str,
) -> Result<(BoundPlan, Option<Daemon>), CliError> {
    let (facts, plan) = (&launch.host, launch.plan);
    let hosting = host::resolve_host(facts).await?;
    // The launcher's own name is in those of control groups, which every user of the machine can read.
    let incarnation = format!("{launcher_id}-{:032x}", rand::random::<u128>());
    let mut monitoring = monitoring(facts, hosting.daemon.is_some())?;
    monitoring.file.clone_from(&facts.metrics_file);
    monitoring.title = launch.title;
    let start = |daemon| Daemon::start(daemon, monitoring, &plan.job_id, &incarnation);
    let daemon = hosting.daemon.map(start);
    let plan = BoundPlan {
        plan,
        endpoint: hosting.endpoint,
        access: hosting.access,
        incarnation,
        open_files,
    };
    Ok((plan, daemon))
}

/// The socket of `--status-port`; none on a node that has no daemon to show. The page has a token of its own, which is
/// printed: other users of this machine can connect to the port too.
fn monitoring(facts: &HostFacts, is_host: bool) -> Result<Monitoring, CliError> {
    let Some(port) = facts.status_port else {
        return Ok(Monitoring::default());
    };
    if !is_host {
        print_own(
            "`--status-port` shows nothing here: another node, or `ddp-rendezvous`, hosts the rendezvous",
        );
        return Ok(Monitoring::default());
    }
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let listener = rendezvous::listen(&[address]).map_err(|source| CliError::Listen {
        address: address.to_string(),
        source,
        hint: "choose a different `--status-port`",
    })?;
    let token = Token::random();
    print_own(&format!(
        "the job is shown at http://{address}/#token={}",
        token.reveal()
    ));
    Ok(Monitoring {
        http: Some(listener),
        read_token: Some(token),
        ..Monitoring::default()
    })
}

/// The daemon in this process.
struct Daemon {
    task: tokio::task::JoinHandle<()>,
    stop: oneshot::Sender<()>,
    shutdown_wait: Duration,
}

impl Daemon {
    /// It ends with this job, so it takes no other.
    fn start(daemon: OwnDaemon, monitoring: Monitoring, job_id: &str, incarnation: &str) -> Self {
        let OwnDaemon { listener, callers } = daemon;
        let (stop, stopped) = oneshot::channel::<()>();
        let config = rendezvous::Config {
            only_job: Some(job_id.to_owned()),
            host: Some(incarnation.to_owned()),
            callers,
            ..rendezvous::Config::default()
        };
        let shutdown_wait = config.shutdown_wait + config.lease;
        let task = tokio::spawn(async move {
            let shutdown = async {
                // A dropped sender means the same.
                let _ = stopped.await;
            };
            if let Err(error) = rendezvous::serve(listener, config, None, monitoring, shutdown).await {
                tracing::error!(%error, "the embedded rendezvous ended");
            }
        });
        Self {
            task,
            stop,
            shutdown_wait,
        }
    }

    /// Stays until every node has left, within the daemon's bounds: a node that fell silent may come for the verdict.
    async fn finish(self) {
        // The task may have ended already; then no receiver is left.
        let _ = self.stop.send(());
        // Cancel safe: whichever comes first, the process ends.
        tokio::select! {
            ended = tokio::time::timeout(self.shutdown_wait + DAEMON_STOP_TIMEOUT, self.task) => if ended.is_err() {
                tracing::warn!("the embedded rendezvous did not end in time");
            },
            () = interrupted() => tracing::warn!("interrupted before every node was told that the job has ended"),
        }
    }
}

/// SIGINT or SIGTERM, which the agent does not listen to any more; never, where they cannot be handled.
async fn interrupted() {
    match Stops::handle() {
        Ok(mut stops) => _ = stops.next().await,
        Err(_) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use tracing::{Level, event_enabled, subscriber};
    use tracing_subscriber::EnvFilter;

    use super::*;

    /// A launcher waited for ever where the task of its connection panicked.
    #[test]
    fn a_panic_of_a_task_ends_the_launcher() {
        const IN_CHILD: &str = "DDP_TEST_PANIC";
        if std::env::var_os(IN_CHILD).is_some() {
            exit_on_panic();
            event_loop().expect("a runtime").block_on(async {
                tokio::spawn(async { panic!("expected by the test") });
                std::future::pending::<()>().await;
            });
        }
        let test = std::thread::current().name().expect("a test's name").to_owned();
        let mut this = std::process::Command::new(std::env::current_exe().expect("a test"));
        let ended = this.args(["--exact", &test]).env(IN_CHILD, "1").output();
        assert_eq!(ended.expect("it ran").status.code(), Some(exit::INTERNAL.into()));
    }

    #[test]
    fn errors_of_the_embedded_rendezvous_are_shown_and_its_decisions_are_not() {
        let events = tracing_subscriber::fmt().with_env_filter(EnvFilter::new(LAUNCHER_EVENTS));
        subscriber::with_default(events.finish(), || {
            assert!(event_enabled!(target: "ddp_run::cli::launch::host", Level::WARN));
            assert!(event_enabled!(target: "ddp_run::rendezvous::service::server", Level::ERROR));
            assert!(event_enabled!(target: "ddp_run::rendezvous::service::connection_limits", Level::WARN));
            assert!(event_enabled!(target: "ddp_run::rendezvous::service::connection", Level::WARN));
            assert!(!event_enabled!(target: "ddp_run::rendezvous::service::actor", Level::INFO));
        });
    }
}
