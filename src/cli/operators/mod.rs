//! `ddp-rendezvous status`, `jobs` and `close`, for everyone who has the daemon's token.
//!
//! | file | what it does |
//! |---|---|
//! | `tables` | the daemon's answers for people |

mod tables;

use std::process::ExitCode;
use std::time::Duration;

use ddp_proto::client::{Access, Client};
use ddp_proto::printable;
use ddp_proto::rendezvous::CloseRequest;
use nix::unistd::gethostname;
use tokio::time::Instant;

use super::answer::{fail, give_or_fail};
use super::error::CliError;
use super::event_loop;
use super::token::TokenSource;
use super::values::{self, Endpoint};
use crate::rendezvous::report::{self, Bounds};

/// How long a daemon may take to answer the connection.
const PATIENCE: Duration = Duration::from_secs(5);

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
    let shown = async {
        let client = args.daemon.connect().await?;
        let job = match args.job {
            Some(job) => job,
            None => only_job(&client, &args.daemon.endpoint).await?,
        };
        let status = client.status(&job).await?;
        Ok(if args.json {
            format!("{}\n", report::job(&job, &status, Bounds::NONE))
        } else {
            printable::text(&tables::job(&job, &status)).into_owned()
        })
    };
    give_or_fail(shown.await)
}

async fn only_job(client: &Client, endpoint: &Endpoint) -> Result<String, CliError> {
    match client.jobs().await?.jobs.as_slice() {
        [only] => Ok(only.job_id.clone()),
        jobs => Err(CliError::Conflict {
            problem: format!(
                "the daemon at `{endpoint}` has {} jobs: which one is meant?",
                jobs.len()
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
    let host = gethostname().unwrap_or_default();
    let request = CloseRequest {
        job_id: args.job.clone(),
        reason: args.reason,
        caller: format!("{}@{}", ddp_launcher::user_name(), host.to_string_lossy()),
    };
    let closed = async {
        args.daemon.connect().await?.close(request).await?;
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
