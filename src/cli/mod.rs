//! The command line: arguments become a plan, a plan becomes a running agent, errors become messages and
//! exit codes.
//!
//! | module | what it does | what it must not do |
//! |---|---|---|
//! | [`args`] | stage one: the flags as typed, each value checked alone | any I/O |
//! | [`values`], [`streams`] | parsers of single values | any I/O |
//! | [`settings`], [`scheduler`] | layers: command line, `PET_*`, the YAML's `launch` section, the batch system | know defaults |
//! | [`layers`], [`plan`] | stage two: layers and defaults become a [`ddp_launcher::LaunchPlan`] | bind or connect |
//! | [`target`] | kinds of target, their command, the job's signature | |
//! | [`secrets`] | hides passwords among the arguments that are sent to other nodes | any I/O |
//! | [`absentees`] | names ranks that are asked for and not there | any I/O |
//! | [`dry_run`] | shows a plan and where each value comes from | |
//! | [`numa`] | which cores each worker may use | any I/O |
//! | [`topology`] | where cores and GPUs lie | |
//! | [`hardware`] | counts cores, lists GPUs | initialise CUDA in the launcher |
//! | [`limits`] | the stack and the open files that a launch needs | |
//! | [`host`] | who hosts the daemon | run it |
//! | [`launch`] | `ddp-run`: puts the pieces together | |
//! | [`serve`] | `ddp-rendezvous` | |
//! | [`train`], [`planner`], [`plot`], [`schedule`], [`doctor`], [`ckpt`], [`tokenize`], [`inference`] | `ddp-train` | |
//! | [`native`] | the only place that calls the worker's training | |
//! | [`answer`] | prints what a program is only asked for | |
//! | [`error`] | what can go wrong before the agent takes over | |

pub mod absentees;
pub mod answer;
pub mod args;
pub mod ckpt;
pub mod doctor;
pub mod dry_run;
pub mod error;
pub mod hardware;
pub mod host;
pub mod inference;
mod interrupts;
pub mod launch;
pub mod layers;
pub mod limits;
pub mod native;
pub mod numa;
pub mod plan;
pub mod planner;
pub mod plot;
pub mod schedule;
pub mod scheduler;
pub mod secrets;
pub mod serve;
pub mod settings;
pub mod streams;
pub mod target;
pub mod tokenize;
pub mod topology;
pub mod train;
pub mod values;

use std::io::{IsTerminal, Stderr};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::SubscriberBuilder;
use tracing_subscriber::fmt::format::{DefaultFields, Format};

/// Sends events to stderr, filtered by `RUST_LOG`; without it, by `default` (`off`: silence).
pub fn init_tracing(default: &str) {
    events(default).without_time().init();
}

/// The same, each event with its time (UTC).
pub fn init_tracing_with_time(default: &str) {
    events(default).init();
}

fn events(default: &str) -> SubscriberBuilder<DefaultFields, Format, EnvFilter, fn() -> Stderr> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let stderr: fn() -> Stderr = std::io::stderr;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Names of modules are for those who have asked for events.
        .with_target(std::env::var_os(EnvFilter::DEFAULT_ENV).is_some())
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(stderr)
}
