//! A launch from outside: what it is given, what comes out of it.

use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{getpgrp, tcgetpgrp};

use super::context::LaunchContext;
use super::driver::Driver;
use super::machine::ExitReason;
use super::signals::{SignalAction, Signals};
use crate::cgroup;
use crate::output::streams::OWN_PREFIX;
use crate::plan::{BoundPlan, SignalPlan};
use crate::supervise::guardian::Guardian;
use crate::supervise::proc_table;

/// How long a console that takes nothing is waited for at the end.
const CONSOLE_PATIENCE: Duration = Duration::from_secs(1);
/// How long all that is left to be put away may take, which has bounds of its own: only a file system that does not
/// answer takes longer.
const CLOSING_BOUND: Duration = Duration::from_mins(1);

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
    let launch = match LaunchContext::new(plan, &guardian) {
        Ok(launch) => launch,
        Err(error) => return refuse(error.into(), guardian),
    };
    // Standard input may be no terminal.
    let terminal = || tcgetattr(io::stdin()).ok();
    let terminal = launch.plan.output.direct.then(terminal).flatten();
    let LaunchContext {
        plan,
        console,
        processes,
        group,
        ..
    } = launch.clone();
    let (exit_reason, report) = match Driver::start(launch) {
        Ok(driver) => driver.run().await,
        Err(exit_reason) => {
            let report = format!("error: {exit_reason}");
            (exit_reason, Some(report))
        }
    };
    if let Some(terminal) = terminal {
        restore(&terminal);
    }
    if let Some(report) = &report {
        console.say(report);
    }
    // The runtime goes on: it may host the daemon, which other nodes still need.
    let scratch_dir = guardian.scratch_dir().to_owned();
    let closing = processes.give(move || {
        if let Some(words) = group.and_then(|group| remove_group(group.dir())) {
            console.say(&words);
        }
        console.close(CONSOLE_PATIENCE);
        // Usually it was never made.
        let _ = std::fs::remove_dir_all(scratch_dir);
    });
    if !is_closed(closing, CLOSING_BOUND, &plan.signals).await {
        tracing::debug!("the launcher exits before its cleanup is complete");
    }
    dismiss(guardian);
    Outcome {
        exit_code: exit_reason.exit_code(),
        exit_reason,
        report,
    }
}

/// Waits until all is put away, but no longer than `bound` or until a signal comes that stops the launcher: the one that
/// stopped the job was taken before. False if it was not waited for.
async fn is_closed<T>(
    closing: impl Future<Output = Option<T>>,
    bound: Duration,
    signals: &SignalPlan,
) -> bool {
    let interrupted = async {
        let Ok(mut signals) = Signals::listen(signals) else {
            return std::future::pending().await;
        };
        while !matches!(signals.next().await, SignalAction::Stop(_)) {}
    };
    // Cancel safe: whichever comes first, the launch ends.
    tokio::select! {
        // Listens before anything is waited for.
        biased;
        () = interrupted => false,
        closed = tokio::time::timeout(bound, closing) => closed.is_ok(),
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

    #[tokio::test]
    async fn a_signal_ends_the_closing_of_a_launch() {
        // No other test of this binary listens to it or sends it.
        let stop = SignalPlan {
            stop: vec![Signal::SIGURG as i32],
            ..SignalPlan::default()
        };
        let never = std::future::poll_fn(|_| {
            // The wait has begun.
            raise(Signal::SIGURG).unwrap();
            std::task::Poll::<Option<()>>::Pending
        });
        let patience = Duration::from_mins(1);
        let ended = tokio::time::timeout(patience, is_closed(never, Duration::MAX, &stop)).await;
        assert_eq!(ended, Ok(false));
        assert!(is_closed(async { Some(()) }, patience, &stop).await);
    }
}
