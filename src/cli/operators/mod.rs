//! `ddp-rendezvous status`, `jobs` and `close`, for everyone who has the daemon's token.
//!
//! | file | what it does |
//! |---|---|
//! | `tables` | the daemon's answers for people |

mod tables;

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use ddp_proto::client::{Access, Client};
use ddp_proto::printable;
use ddp_proto::rendezvous::StatusReply;
use tokio::time::{Instant, sleep};

use super::answer::{fail, give_or_fail, given};
use super::error::CliError;
use super::event_loop;
use super::token::TokenSource;
use super::values::{self, Endpoint};
use crate::rendezvous::report::{self, Bounds};

/// How long a daemon may take to answer the connection.
const PATIENCE: Duration = Duration::from_secs(5);
/// `--watch` looks so often.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Moves to the top of the screen, and clears it.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Where the daemon is.
#[derive(Debug, clap::Args)]
pub(super) struct Daemon {
    /// Address of the daemon, whose token is in DDP_TOKEN, DDP_TOKEN_FILE or `~/.config/ddp-run/token`
    #[arg(long, value_name = "HOST[:PORT]", default_value = "127.0.0.1:29400", value_parser = values::endpoint)]
    endpoint: Endpoint,
}

/// What is shown of a job.
#[derive(Debug, clap::Args)]
pub(super) struct StatusArgs {
    /// Name of the job, `--rdzv-id` of its launchers; may be omitted if the daemon has one job
    job: Option<String>,
    #[command(flatten)]
    daemon: Daemon,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Show it again every second until the job is over; with `--json`, a line each time
    #[arg(long)]
    watch: bool,
}

/// What is listed.
#[derive(Debug, clap::Args)]
pub(super) struct JobsArgs {
    #[command(flatten)]
    daemon: Daemon,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Which job is ended.
#[derive(Debug, clap::Args)]
pub(super) struct CloseArgs {
    /// Name of the job, `--rdzv-id` of its launchers
    job: String,
    /// Why, for the people of the job
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    #[command(flatten)]
    daemon: Daemon,
}

/// Runs one of them to its exit code.
pub(super) fn run(question: impl Future<Output = ExitCode>) -> ExitCode {
    match event_loop() {
        Ok(runtime) => runtime.block_on(question),
        Err(error) => fail(&error, error.exit_code()),
    }
}

/// `ddp-rendezvous status`
pub(super) async fn status(args: StatusArgs) -> ExitCode {
    let shown = show_status(args).await;
    shown.map_or_else(|error| fail(&error, error.exit_code()), given)
}

/// What came of writing the answer; an error where there is none.
async fn show_status(args: StatusArgs) -> Result<io::Result<()>, CliError> {
    let client = args.daemon.connect().await?;
    let job = match args.job {
        Some(job) => job,
        None => only_job(&client, &args.daemon.endpoint).await?,
    };
    let is_screen = args.watch && !args.json && io::stdout().is_terminal();
    let mut was_there = false;
    loop {
        let status = match client.status(&job).await {
            // The daemon answers, and has forgotten the job with its last node.
            Err(error) if was_there && !error.is_broken() => {
                eprintln!(
                    "job `{job}` is over and its nodes have left: its launchers and the daemon's log tell how it ended"
                );
                return Ok(Ok(()));
            }
            answer => answer?,
        };
        was_there = true;
        let mut text = if is_screen {
            CLEAR.to_owned()
        } else {
            String::new()
        };
        text.push_str(&rendered(&job, &status, args.json));
        if args.watch && !args.json && !is_screen {
            text.push('\n');
        }
        let mut out = io::stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        drop(out);
        if written.is_err() || !args.watch || status.phase == "over" {
            return Ok(written);
        }
        sleep(WATCH_INTERVAL).await;
    }
}

fn rendered(job: &str, status: &StatusReply, as_json: bool) -> String {
    if as_json {
        format!("{}\n", report::job(job, status, Bounds::NONE))
    } else {
        printable::text(&tables::job(job, status)).into_owned()
    }
}

async fn only_job(client: &Client, endpoint: &Endpoint) -> Result<String, CliError> {
    let mut jobs = client.jobs().await?.jobs;
    match (jobs.pop(), jobs.len()) {
        (Some(only), 0) => Ok(only.job_id),
        (last, others) => Err(CliError::Conflict {
            problem: format!(
                "the daemon at `{endpoint}` has {} jobs: which one is meant?",
                others + usize::from(last.is_some())
            ),
            hint: "`ddp-rendezvous jobs` lists them".to_owned(),
        }),
    }
}

/// `ddp-rendezvous jobs`
pub(super) async fn jobs(args: JobsArgs) -> ExitCode {
    let listed = async {
        let reply = args.daemon.connect().await?.jobs().await?;
        Ok(if args.json {
            format!("{}\n", report::jobs(&reply, Bounds::NONE))
        } else {
            printable::text(&tables::jobs(&reply)).into_owned()
        })
    };
    give_or_fail(listed.await)
}

/// `ddp-rendezvous close`
pub(super) async fn close(args: CloseArgs) -> ExitCode {
    let closed = async {
        args.daemon
            .connect()
            .await?
            .close(&args.job, &args.reason)
            .await?;
        Ok(format!("closed job `{}`\n", args.job))
    };
    give_or_fail(closed.await)
}

impl Daemon {
    async fn connect(&self) -> Result<Client, CliError> {
        // The daemon runs, so its token is made already.
        let token = TokenSource::find(|name| std::env::var(name).ok())
            .wait(Duration::ZERO)
            .await?;
        let deadline = Instant::now() + PATIENCE;
        Ok(Client::connect(&self.endpoint.to_string(), &Access::Token(token), deadline).await?)
    }
}
