//! `ddp-rendezvous`: the daemon as a program of its own.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ddp_proto::resolver::Resolver;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

use super::error::{CliError, print_error};
use super::host::RESOLVE_TIMEOUT;
use super::values::{self, Endpoint};
use crate::rendezvous;

/// The place where the nodes of a job meet.
#[derive(Debug, Parser)]
#[command(name = "ddp-rendezvous", version, max_term_width = 100)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve until SIGTERM or SIGINT. The first line of the output is the address that is served.
    Serve {
        /// Address to listen on; port 0 takes a free one
        #[arg(long, value_name = "HOST[:PORT]", default_value = "[::]:29400", value_parser = values::endpoint)]
        listen: Endpoint,
    },
}

/// Main of `ddp-rendezvous`.
pub fn main(argv: Vec<OsString>) -> ExitCode {
    let args = match Args::try_parse_from(argv) {
        Ok(args) => args,
        Err(error) => error.exit(),
    };
    let Command::Serve { listen } = args.command;
    match serve(&listen) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn serve(listen: &Endpoint) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| CliError::Machine {
            what: "cannot start the event loop",
            source,
        })?;
    runtime.block_on(async {
        let stop = stop_signal()?;
        let listener = bind(listen).await?;
        announce(&listener)?;
        rendezvous::serve(listener, rendezvous::Config::default(), stop)
            .await
            .map_err(|error| CliError::Machine {
                what: "the rendezvous ended",
                source: std::io::Error::other(error),
            })
    })
}

/// Ends with the first SIGTERM or SIGINT. A second one ends the process at once, however long the daemon
/// still waits for its nodes. Handlers are in place when this returns.
fn stop_signal() -> Result<impl Future<Output = ()> + Send + 'static, CliError> {
    let failed = |source| CliError::Machine {
        what: "cannot handle signals",
        source,
    };
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        tokio::spawn(async move {
            let code = tokio::select! {
                _ = terminate.recv() => ddp_proto::exit::TERMINATED,
                _ = interrupt.recv() => ddp_proto::exit::INTERRUPTED,
            };
            std::process::exit(i32::from(code));
        });
    })
}

async fn bind(listen: &Endpoint) -> Result<TcpListener, CliError> {
    let resolver = Resolver::start(&listen.host)?;
    let bound = async {
        let found = timeout(RESOLVE_TIMEOUT, resolver.addresses(listen.port)).await??;
        TcpListener::bind(found.as_slice()).await
    };
    bound.await.map_err(|source| CliError::Listen {
            address: listen.to_string(),
            hint: match source.kind() {
                ErrorKind::AddrInUse => {
                    "another program holds the port: choose another one, or 0 for a free one"
                }
                ErrorKind::PermissionDenied => "ports below 1024 need privileges: choose a higher one",
                _ => {
                    "give an address of this machine, for example `[::]:29400` for all of them, or `0.0.0.0:29400` where it has no IPv6"
                }
            },
            source,
        })
}

/// Tells people and scripts where the daemon is, before anything else is printed.
fn announce(listener: &TcpListener) -> Result<(), CliError> {
    let failed = |source| CliError::Machine {
        what: "cannot print the address",
        source,
    };
    let address = listener.local_addr().map_err(failed)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{address}")
        .and_then(|()| out.flush())
        .map_err(failed)
}
