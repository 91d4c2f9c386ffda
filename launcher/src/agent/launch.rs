//! A launch from outside: what it is given, what comes out of it.

use std::io::{self, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use ddp_proto::words::duration;
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{getpgrp, tcgetpgrp};
use tokio::time::timeout;

use super::context::LaunchContext;
use super::driver::Driver;
use super::machine::ExitReason;
use super::signals::{SignalAction, Signals};
use crate::cgroup;
use crate::output::streams::OWN_PREFIX;
use crate::plan::BoundPlan;
use crate::supervise::guardian::Guardian;
use crate::supervise::proc_table;

/// How long a reader of the output that takes nothing is waited for at the end.
const READER_PATIENCE: Duration = Duration::from_mins(5);
/// The same after a signal, whose sender waits.
const READER_PATIENCE_WHEN_STOPPED: Duration = Duration::from_secs(5);
/// How long control group and files may take to be removed, which has bounds of its own: only a file system that does
/// not answer takes longer.
const CLEANUP_BOUND: Duration = Duration::from_mins(1);

/// How a launch ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Exit code for the launcher's caller.
    pub exit_code: u8,
    /// Why.
    pub exit_reason: ExitReason,
    /// The failure report; it has been shown on standard error already.
    pub report: Option<String>,
}

/// Runs this node's part of a job until it is over, restarts included.
///
/// All children of the calling process belong to the agent: it becomes a child subreaper, reaps every child and
/// kills every descendant but the guardian at the end of a generation. Must run on a tokio runtime with I/O and
/// time enabled.
pub async fn run(plan: BoundPlan, guardian: Guardian) -> Outcome {
    let begun = Instant::now();
    // Native workers say it themselves.
    let says_end = plan.output.is_seen() && !plan.command.native;
    let launch = LaunchContext::new(plan, &guardian);
    let (launch, mut signals) = match launch.and_then(|launch| {
        let signals = Signals::listen(&launch.plan.signals)?;
        Ok((launch, signals))
    }) {
        Ok(parts) => parts,
        Err(error) => return refuse(error.into(), guardian),
    };
    // Standard input may be no terminal.
    let terminal = || tcgetattr(io::stdin()).ok();
    let terminal = launch.plan.output.direct.then(terminal).flatten();
    let LaunchContext {
        console,
        reader,
        processes,
        group,
        ..
    } = launch.clone();
    let (exit_reason, report) = match Driver::start(launch, &mut signals) {
        Ok(driver) => driver.run().await,
        Err(exit_reason) => {
            let report = format!("error: {exit_reason}");
            (exit_reason, Some(report))
        }
    };
    if let Some(terminal) = terminal {
        restore(&terminal);
    }
    let scratch_dir = guardian.scratch_dir().to_owned();
    let cleanup = processes.give(move || {
        // Usually it was never made.
        let _ = std::fs::remove_dir_all(scratch_dir);
        group.and_then(|group| remove_group(group.dir()))
    });
    let patience = match exit_reason {
        ExitReason::Stopped { .. } => READER_PATIENCE_WHEN_STOPPED,
        _ => READER_PATIENCE,
    };
    let closing = async {
        if let Some(message) = timeout(CLEANUP_BOUND, cleanup).await.ok().flatten().flatten() {
            console.say(&message);
        }
        // The report follows the last line of the workers.
        !console.is_one_place() || console.drained(reader.ended(), patience).await
    };
    // The runtime goes on: it may host the daemon, which other nodes still need.
    let is_read = is_complete(closing, &mut signals).await;
    if let Some(report) = &report {
        console.say(report);
    } else if says_end {
        let took = duration(begun.elapsed().as_secs_f64());
        console.say(&format!("finished in {took}"));
    }
    if is_read {
        is_complete(console.drained(reader.ended(), patience), &mut signals).await;
    }
    console.close().await;
    dismiss(guardian);
    Outcome {
        exit_code: exit_reason.exit_code(),
        exit_reason,
        report,
    }
}

/// Waits for `closing`, but only until another signal stops the launcher. False if it was not waited for.
async fn is_complete(closing: impl Future<Output = bool>, signals: &mut Signals) -> bool {
    let interrupted = async { while !matches!(signals.next().await, SignalAction::Stop(_)) {} };
    // Cancel safe: whichever comes first, the launch ends.
    tokio::select! {
        // It begins its work, also where a signal waits already.
        biased;
        is_complete = closing => is_complete,
        () = interrupted => false,
    }
}

/// The end of a launch that has not even a console.
fn refuse(exit_reason: ExitReason, guardian: Guardian) -> Outcome {
    let report = format!("error: {exit_reason}");
    for line in report.lines() {
        // Nothing is left to do when that fails too.
        let _ = writeln!(io::stderr(), "{OWN_PREFIX}{line}");
    }
    dismiss(guardian);
    Outcome {
        exit_code: exit_reason.exit_code(),
        exit_reason,
        report: Some(report),
    }
}

fn dismiss(guardian: Guardian) {
    if let Err(error) = guardian.shutdown() {
        tracing::debug!("guardian: {error}");
    }
}

/// Removes the workers' control group. If that fails, gives a message that names its members.
fn remove_group(dir: &Path) -> Option<String> {
    let cause = cgroup::remove(dir).err()?;
    let members = cgroup::members(dir).into_iter().map(proc_table::describe);
    let members = match members.collect::<Vec<_>>().join(", ") {
        none if none.is_empty() => String::new(),
        members => format!(", because of {members}"),
    };
    Some(format!(
        "cannot remove control group `{}`{members}: {cause}\n  \
         hint: the next launch in the same parent group removes it once it is empty",
        dir.display()
    ))
}

/// Puts back the settings of the terminal at standard input: a worker that was given it, and was killed while it edited a
/// line, leaves a terminal that does not echo. In the background the terminal belongs to another process.
fn restore(terminal: &Termios) {
    let stdin = io::stdin();
    let is_changed = tcgetattr(&stdin).is_ok_and(|now| now != *terminal);
    if is_changed && tcgetpgrp(&stdin) == Ok(getpgrp()) {
        // The terminal has gone, if this fails.
        let _ = tcsetattr(&stdin, SetArg::TCSANOW, terminal);
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::{Signal, raise};

    use super::*;
    use crate::plan::SignalPlan;

    #[tokio::test]
    async fn a_signal_ends_the_closing_of_a_launch() {
        // No other test of this binary listens to it or sends it.
        let stop = SignalPlan {
            stop: vec![Signal::SIGURG as i32],
            ..SignalPlan::default()
        };
        let mut signals = Signals::listen(&stop).unwrap();
        assert!(is_complete(async { true }, &mut signals).await);
        // Between two waits, a signal is kept.
        raise(Signal::SIGURG).unwrap();
        let ended = is_complete(std::future::pending(), &mut signals);
        assert_eq!(timeout(Duration::from_mins(1), ended).await, Ok(false));
    }
}
