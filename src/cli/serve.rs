//! `ddp-rendezvous`: the daemon as a program of its own.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use ddp_proto::env::DDP_READ_TOKEN_FILE;
use ddp_proto::exit;
use ddp_proto::look_up::{LookUpError, look_up};
use ddp_proto::trust::token::Token;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

use super::answer;
use super::answer::fail;
use super::error::CliError;
use super::launch::host::{RESOLVE_TIMEOUT, reach};
use super::machine::limits;
use super::token::{TokenSource, read_token_file};
use super::values::{self, Endpoint};
use super::{LONG_VERSION, VERSION, init_json_tracing, init_tracing_with_time, operators};
use crate::rendezvous::{self, Callers, Listener, Monitoring, Transport};

/// Whose events are shown unless `RUST_LOG` says otherwise.
const RENDEZVOUS_LOG: &str = "ddp_run::rendezvous";

/// Threads for connections: one task decides for all of them, so more would wait for it.
const MAX_THREADS: usize = 4;

/// A shorter one would be lost to the scheduling of any loaded machine.
const SHORTEST_LEASE: Duration = Duration::from_millis(300);

/// How to serve one address of several.
const LIMIT: &str = "; `--listen ADDRESS:PORT` limits it to the network of one address";

/// Ends `--help`.
const EXIT_CODES: &str = "\
Exit codes: 0 success; 2 usage, or no such job; 65 the ledger is damaged; 69 the port is taken, or the daemon cannot be \
reached; 70 the machine or the daemon refused something; 73 another daemon uses the state directory; 77 no token, \
or a different one; 130, 143 stopped by SIGINT, SIGTERM before it served.";

/// The rendezvous daemon: the nodes of a job join here.
#[derive(Debug, Parser)]
#[command(name = "ddp-rendezvous", version = VERSION, long_version = LONG_VERSION, max_term_width = 100, after_help = EXIT_CODES)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve until SIGTERM or SIGINT; the first line of output is the address
    Serve(ServeArgs),
    /// Show one job: its nodes, the step and step time of each rank, its generations and why each ended
    Status(operators::StatusArgs),
    /// List the jobs
    Jobs(operators::JobsArgs),
    /// End a job on all of its nodes: its launchers exit with 78
    Close(operators::CloseArgs),
    /// Print the completions of a shell
    Completions {
        /// The shell
        shell: Shell,
    },
}

#[derive(Debug, clap::Args)]
struct ServeArgs {
    /// Address to listen on; port 0 picks a free port. `[::]` is all addresses of this machine
    #[arg(long, value_name = "HOST[:PORT]", default_value = "[::]:29400", value_parser = values::endpoint)]
    listen: Endpoint,
    /// Do without token and TLS: every host that reaches the port can join jobs, read their data and stop them
    #[arg(long)]
    insecure: bool,
    /// Keep the ledger of running jobs in this directory, so that a restarted daemon waits for their nodes
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// A node that is silent for this long is lost, unless its peers still make progress
    #[arg(long, value_name = "S", default_value = "9", value_parser = lease)]
    lease: Duration,
    /// A node whose connection broke is lost after this long, unless it reconnects or its peers still make progress
    #[arg(long, value_name = "S", default_value = "5", value_parser = values::seconds)]
    reconnect_grace: Duration,
    /// A silent node is lost after this long, even if its peers make progress
    #[arg(long, alias = "outage-timeout", value_name = "S", default_value = "600", value_parser = values::seconds)]
    silence_limit: Duration,
    /// With `--state-dir`: how long a restarted daemon waits for the nodes of a running generation
    #[arg(long, value_name = "S", default_value = "60", value_parser = values::seconds)]
    reattach_wait: Duration,
    /// When a worker blames another rank for its failure, wait this long for the failure of that rank
    #[arg(long, value_name = "S", default_value = "0.5", value_parser = values::seconds)]
    culprit_wait: Duration,
    /// Elastic jobs: once MIN nodes have joined, wait this long for more; `last_call_timeout` of a job overrides it
    #[arg(long, value_name = "S", default_value = "10", value_parser = values::seconds)]
    last_call: Duration,
    /// Elastic jobs: once a node has joined a running job, wait this long for more before it grows
    #[arg(long, value_name = "S", default_value = "10", value_parser = values::seconds)]
    scale_up_wait: Duration,
    /// Keep the result of a finished job this long for nodes that have not left
    #[arg(long, value_name = "S", default_value = "60", value_parser = values::seconds)]
    linger: Duration,
    /// Serve `/livez`, `/readyz`, `/metrics` and the status page at this address; port 0 picks a free port. Without
    /// `--read-token-file`, the page and the names of jobs in metrics are for this machine only
    #[arg(long, value_name = "HOST:PORT", env = "DDP_METRICS_ADDR", value_parser = with_port)]
    metrics_addr: Option<Endpoint>,
    /// File with a token that can only read: the status page, and the names of jobs in metrics. HTTP does not encrypt it, so
    /// it must differ from the token of the nodes
    #[arg(long, value_name = "FILE", env = DDP_READ_TOKEN_FILE)]
    read_token_file: Option<PathBuf>,
    /// How events are written to stderr: for people, or as JSON lines with time, job, generation and node
    #[arg(long, value_name = "FORMAT", env = "DDP_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
}

/// How events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum LogFormat {
    /// For people.
    Text,
    /// A line of JSON each.
    Json,
}

/// An address whose port is given: no port is the usual one.
fn with_port(text: &str) -> Result<Endpoint, String> {
    let has_port = text
        .rsplit_once(':')
        .is_some_and(|(host, _)| !host.contains(':') || host.ends_with(']'));
    if !has_port {
        return Err("expected `host:port`, for example `127.0.0.1:9400`".to_owned());
    }
    values::endpoint(text)
}

impl ServeArgs {
    fn config(&self) -> rendezvous::Config {
        rendezvous::Config {
            lease: self.lease,
            reconnect_grace: self.reconnect_grace,
            silence_limit: self.silence_limit,
            reattach_wait: self.reattach_wait,
            culprit_wait: self.culprit_wait,
            last_call: self.last_call,
            scale_up_wait: self.scale_up_wait,
            linger: self.linger,
            ..rendezvous::Config::default()
        }
    }

    /// How callers prove that the daemon may let them in: by its token (DDP_TOKEN, DDP_TOKEN_FILE or
    /// `~/.config/ddp-run/token`, which is made if it is missing), unless it is insecure.
    fn protection(&self, read_token: Option<&Token>) -> Result<(Transport, Callers), CliError> {
        if self.insecure {
            return Ok((Transport::Plain, Callers::Anybody));
        }
        let source = TokenSource::find(|name| std::env::var(name).ok());
        let token = source.read_or_make_telling(|made| tracing::info!(target: RENDEZVOUS_LOG, "{made}"))?;
        if let Some(file) = self
            .read_token_file
            .as_deref()
            .filter(|_| read_token == Some(&token))
        {
            return Err(CliError::BadToken {
                place: file.display().to_string(),
                problem: "it is the token of the nodes, which HTTP must not carry\n  hint: make one of its own with `(umask 077; openssl rand -hex 32 > FILE)`".to_owned(),
            });
        }
        Ok((Transport::of_token(&token)?, Callers::Authenticated))
    }
}

/// A lease: launchers send a heartbeat every third of it.
fn lease(text: &str) -> Result<Duration, String> {
    let lease = values::seconds(text)?;
    if lease < SHORTEST_LEASE {
        return Err(format!("expected at least {} s", SHORTEST_LEASE.as_secs_f64()));
    }
    Ok(lease)
}

/// The command line, for its manual page.
pub fn command() -> clap::Command {
    Args::command()
}

/// Main of `ddp-rendezvous`.
pub fn main(argv: Vec<OsString>) -> ExitCode {
    let args = match Args::try_parse_from(argv) {
        Ok(args) => args,
        Err(words) => return answer::instead_of_arguments(&words, ""),
    };
    let args = match args.command {
        Command::Serve(args) => args,
        Command::Status(args) => return operators::run(operators::status(args)),
        Command::Jobs(args) => return operators::run(operators::jobs(args)),
        Command::Close(args) => return operators::run(operators::close(args)),
        Command::Completions { shell } => return answer::completions(shell, command()),
    };
    let default = format!("{RENDEZVOUS_LOG}=info");
    match args.log_format {
        LogFormat::Text => init_tracing_with_time(&default),
        LogFormat::Json => init_json_tracing(&default),
    }
    limits::raise_open_files_fully();
    match serve(&args) {
        Ok(code) => ExitCode::from(code),
        Err(error)
            if args.log_format == LogFormat::Json
                && tracing::enabled!(target: RENDEZVOUS_LOG, tracing::Level::ERROR) =>
        {
            tracing::error!(target: RENDEZVOUS_LOG, "{error}");
            ExitCode::from(error.exit_code())
        }
        Err(error) => fail(&error, error.exit_code()),
    }
}

/// Connections are read and written, and messages encoded, beside the one task that decides; on one thread where the
/// system has no more.
fn threaded_event_loop() -> io::Result<tokio::runtime::Runtime> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.min(MAX_THREADS);
    // tokio panics where it can start none of them.
    let mut builder = if can_start(threads) {
        tokio::runtime::Builder::new_multi_thread()
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    builder.worker_threads(threads).enable_all().build()
}

/// Whether so many threads can be there at once.
fn can_start(threads: usize) -> bool {
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    std::thread::scope(|scope| {
        let wait = || {
            // Until `hold` is dropped.
            let _ = held.lock().map(|held| held.recv());
        };
        let are_there = (0..threads).all(|_| std::thread::Builder::new().spawn_scoped(scope, wait).is_ok());
        drop(hold);
        are_there
    })
}

/// Exit code: success, if it was stopped while it served.
fn serve(args: &ServeArgs) -> Result<u8, CliError> {
    let read_token = args.read_token_file.as_deref().map(read_token_file).transpose()?;
    let (transport, callers) = args.protection(read_token.as_ref())?;
    let config = rendezvous::Config {
        callers,
        ..args.config()
    };
    let state_dir = args.state_dir.as_deref();
    let ledger = state_dir.map(rendezvous::Ledger::open).transpose()?;
    let runtime = threaded_event_loop().map_err(CliError::machine("cannot start the event loop"))?;
    runtime.block_on(async {
        let mut stops = Stops::handle()?;
        let binding = async {
            let listener = bind_at(&args.listen).await?;
            let http = match &args.metrics_addr {
                Some(endpoint) => Some(bind_at(endpoint).await?),
                None => None,
            };
            Ok::<_, CliError>((listener, http))
        };
        // Cancel safe: a signal ends the process, so no connection is lost with the listeners.
        let (listener, http) = tokio::select! {
            code = stops.next() => return Ok(code),
            bound = binding => bound?,
        };
        let address = announce(&listener)?;
        if let Some(reach) = reach(address, LIMIT).filter(|_| callers == Callers::Anybody) {
            tracing::warn!(target: RENDEZVOUS_LOG, "{reach}");
        }
        let listener = Listener::Tcp(listener, transport);
        if let Some(address) = http.as_ref().and_then(|http| http.local_addr().ok()) {
            tracing::info!(target: RENDEZVOUS_LOG, "metrics and the status page are at http://{address}/");
        }
        let monitoring = Monitoring {
            http,
            read_token,
            log_fields: args.log_format == LogFormat::Json,
            ..Monitoring::default()
        };
        rendezvous::serve(listener, config, ledger, monitoring, stops.stop())
            .await
            .map_err(std::io::Error::other)
            .map_err(CliError::machine("the rendezvous ended"))?;
        Ok(exit::SUCCESS)
    })
}

/// SIGTERM and SIGINT, from when they are handled on.
pub(super) struct Stops {
    terminate: Signal,
    interrupt: Signal,
}

impl Stops {
    pub(super) fn handle() -> Result<Self, CliError> {
        let handle = |kind| signal(kind).map_err(CliError::machine("cannot handle signals"));
        Ok(Self {
            terminate: handle(SignalKind::terminate())?,
            interrupt: handle(SignalKind::interrupt())?,
        })
    }

    /// The exit code of a process that the next one ends. Cancel safe: a signal is either told of or still to come.
    pub(super) async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.terminate.recv() => exit::TERMINATED,
            _ = self.interrupt.recv() => exit::INTERRUPTED,
        }
    }

    /// Ends with the first one. A second one ends the process at once, however long the daemon still waits for its
    /// nodes.
    async fn stop(mut self) {
        self.next().await;
        tracing::info!(target: RENDEZVOUS_LOG, "stopping");
        tokio::spawn(async move {
            std::process::exit(i32::from(self.next().await));
        });
    }
}

async fn bind_at(endpoint: &Endpoint) -> Result<TcpListener, CliError> {
    bind(endpoint, look_up(&endpoint.host, endpoint.port), RESOLVE_TIMEOUT).await
}

async fn bind(
    listen: &Endpoint,
    look_up: impl Future<Output = Result<Vec<SocketAddr>, LookUpError>>,
    patience: Duration,
) -> Result<TcpListener, CliError> {
    let looked_up = timeout(patience, look_up).await;
    let found = looked_up.map_err(|_| CliError::SlowLookUp {
        host: listen.host.clone(),
        waited: patience,
    })?;
    let bound = match found {
        Ok(addresses) => rendezvous::listen(&addresses),
        Err(error @ LookUpError::NoThread { .. }) => return Err(CliError::NoThread(error)),
        Err(error @ LookUpError::Unknown { .. }) => Err(io::Error::other(error)),
    };
    bound.map_err(|source| CliError::Listen {
            address: listen.to_string(),
            hint: match source.kind() {
                ErrorKind::AddrInUse => {
                    "another program uses the port: choose a different one, or 0 for a free port"
                }
                ErrorKind::PermissionDenied => "ports below 1024 need privileges: choose a higher port",
                _ => {
                    "give an address of this machine, for example `[::]:29400` for all addresses, or `0.0.0.0:29400` without IPv6"
                }
            },
            source,
        })
}

/// Tells people and scripts where the daemon is, before anything else is printed.
fn announce(listener: &TcpListener) -> Result<SocketAddr, CliError> {
    let failed = |source| CliError::Machine {
        what: "cannot print the address",
        source,
    };
    let address = listener.local_addr().map_err(failed)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{address}")
        .and_then(|()| out.flush())
        .map_err(failed)?;
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_are_the_daemons_defaults_unless_they_are_given() {
        let settings = |flags: &[&str]| {
            let argv = ["ddp-rendezvous", "serve"].iter().chain(flags);
            let Command::Serve(args) = Args::try_parse_from(argv).expect("valid").command else {
                panic!("another command");
            };
            format!("{:?}", args.config())
        };
        let defaults = rendezvous::Config::default();
        assert_eq!(settings(&[]), format!("{defaults:?}"));
        let given = rendezvous::Config {
            lease: Duration::from_secs(30),
            reattach_wait: Duration::from_millis(1500),
            ..defaults
        };
        assert_eq!(
            settings(&["--lease", "30", "--reattach-wait", "1.5"]),
            format!("{given:?}")
        );
        assert!(Args::try_parse_from(["ddp-rendezvous", "serve", "--lease", "0"]).is_err());
    }

    #[test]
    fn it_warns_of_addresses_that_others_reach() {
        let of = |address: &str| reach(address.parse().expect("an address"), LIMIT);
        assert_eq!(
            ["127.0.0.1:29400", "[::1]:29400", "[::ffff:127.0.0.1]:1"].map(of),
            [None, None, None]
        );
        insta::assert_snapshot!(of("10.0.0.5:29400").unwrap(), @"every host that reaches 10.0.0.5:29400 can join jobs, read their data and stop them: `--insecure` is on");
        insta::assert_snapshot!(of("[::]:29400").unwrap(), @"every host that reaches [::]:29400 can join jobs, read their data and stop them: `--insecure` is on; `--listen ADDRESS:PORT` limits it to the network of one address");
    }

    #[test]
    fn a_look_up_that_takes_too_long_is_no_mistake_of_the_user() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let listen = values::endpoint("node0:29400").expect("valid");
        let bound = bind(&listen, std::future::pending(), Duration::from_millis(1));
        let error = runtime
            .expect("a runtime")
            .block_on(bound)
            .expect_err("nothing was found");
        assert_eq!(error.exit_code(), exit::INTERNAL);
        insta::assert_snapshot!(error, @r"
        looking up the host name `node0` took longer than 0.001 s
          hint: `getent hosts node0` shows whether this machine's name servers respond; or use an address instead of the name
        ");
    }
}
