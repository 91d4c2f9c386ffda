//! The command line: arguments become a plan, a plan becomes a running agent, errors become messages and
//! exit codes.
//!
//! | module | what it does |
//! |---|---|
//! | [`launch`] | `ddp-run`: from flags to a plan that its agent carries out |
//! | [`machine`] | cores, GPUs and limits of this machine |
//! | [`serve`], `operators` | `ddp-rendezvous`: the daemon, and what operators ask of it |
//! | [`train`] | `ddp-train` and its subcommands |
//! | [`native`] | the only place that calls the worker's training |
//! | `interrupts` | signals to a worker that no agent looks after |
//! | [`token`] | where the token of a job comes from |
//! | [`settings`] | the settings of a launch: flags, `PET_*` and the `launch` section of a YAML |
//! | [`values`], [`streams`] | parsers of single values |
//! | [`answer`] | what a program prints: its answer, or its error |
//! | [`error`] | what can go wrong before the agent takes over |

pub mod answer;
pub mod error;
mod interrupts;
pub mod launch;
pub mod machine;
pub mod native;
mod operators;
pub mod serve;
pub mod settings;
pub mod streams;
pub mod token;
pub mod train;
pub mod values;

use std::fmt;
use std::io::Stderr;

use ddp_proto::printable::Look;
use error::CliError;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::SubscriberBuilder;
use tracing_subscriber::fmt::format::{DefaultFields, Format, Writer};
use tracing_subscriber::fmt::time::FormatTime;

/// Of all programs, with the commit.
pub const VERSION: &str = env!("DDP_VERSION");
/// The same, and how they were built.
pub const LONG_VERSION: &str = concat!(env!("DDP_VERSION"), "\n", env!("DDP_BUILD"));

/// Sends events to stderr, filtered by `RUST_LOG`; without it, by `default` (`off`: silence).
pub fn init_tracing(default: &str) {
    events(default).without_time().init();
}

/// The same, each event with the prefix of a launcher's messages.
pub fn init_launcher_tracing(default: &str) {
    events(default).with_timer(Prefix).init();
}

/// In the place of a time.
struct Prefix;

impl FormatTime for Prefix {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        writer.write_str("[ddp-run]")
    }
}

/// The same, each event with its time (UTC).
pub fn init_tracing_with_time(default: &str) {
    events(default).init();
}

/// The same, each event as a line of JSON.
pub fn init_json_tracing(default: &str) {
    events(default).json().flatten_event(true).init();
}

/// An event loop on this thread alone: it waits for events, and the program stays small.
fn event_loop() -> Result<tokio::runtime::Runtime, CliError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CliError::machine("cannot start the event loop"))
}

fn events(default: &str) -> SubscriberBuilder<DefaultFields, Format, EnvFilter, fn() -> Stderr> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let stderr: fn() -> Stderr = std::io::stderr;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Names of modules are for those who have asked for events.
        .with_target(std::env::var_os(EnvFilter::DEFAULT_ENV).is_some())
        .with_ansi(Look::of(&std::io::stderr()).has_colours)
        .with_writer(stderr)
}
