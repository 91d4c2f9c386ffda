//! The failure report: who failed first in the whole job, why, and what became of the others.
//!
//! Everything here is words; the facts come from the daemon and from the agent.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use ddp_proto::ids::GlobalRank;
use ddp_proto::rendezvous::WorkerExit;
use ddp_proto::words::numbered;

use crate::agent::ExitReason;
use crate::report::facts::{LocalEnd, ReportFacts, indented, seconds};
use crate::report::failures::{earlier, elsewhere};
use crate::report::local_ends::others;
use crate::supervise::ending::{Ending, signal_name};
use crate::supervise::hang::HUNG;

/// The report as text, without a trailing newline; none if all went well.
pub(crate) fn report(facts: &ReportFacts) -> Option<String> {
    let text = match &facts.exit_reason {
        ExitReason::Succeeded => return None,
        ExitReason::Stopped { signal } => {
            let mut text = format!("stopped by {}", signal_name(*signal));
            others(&mut text, facts, None);
            text
        }
        ExitReason::JobOver {
            reason,
            no_restart,
            signal,
            ..
        } => {
            let mut text = if let Some((failure, host)) = facts.exit_reason.first_failure() {
                job_failed(facts, no_restart, failure, host)
            } else {
                // A person or the batch system has stopped the job on another node.
                let lead = if signal.is_some() { "" } else { "error: " };
                let mut text = format!("{lead}{reason}");
                others(&mut text, facts, None);
                text
            };
            elsewhere(&mut text, facts);
            earlier(&mut text, facts);
            text
        }
        ExitReason::DaemonGone { error, .. } | ExitReason::Broken { error, .. } => after_error(facts, error),
        ExitReason::Refused { .. } | ExitReason::CannotStart(_) => format!("error: {}", facts.exit_reason),
    };
    Some(text)
}

fn job_failed(facts: &ReportFacts, no_restart: &str, failure: &WorkerExit, host: &str) -> String {
    let mut text = format!("error: `{}` failed", facts.program);
    if !no_restart.is_empty() {
        let _ = write!(text, "; {no_restart}");
    }
    describe_failure(&mut text, facts, failure, host);
    let first_here = (host == facts.hostname).then_some(GlobalRank(failure.rank));
    others(&mut text, facts, first_here);
    early(&mut text, facts);
    text
}

/// Adds the ranks that ended with 0 before the first failure.
fn early(text: &mut String, facts: &ReportFacts) {
    let is_early = |end: &&LocalEnd| end.ending.is_success() && end.after.is_none();
    let here = facts.local_ends.iter().filter(is_early).map(|end| end.rank.0);
    let ranks: BTreeSet<u32> = here
        .chain(facts.failures.succeeded_ranks.iter().copied())
        .collect();
    if !ranks.is_empty() {
        let ranks = numbered("rank", &Vec::from_iter(ranks));
        let _ = write!(
            text,
            "\n  {ranks}: exited with code 0 before; ranks that wait for such a rank fail or hang"
        );
    }
}

fn after_error(facts: &ReportFacts, error: &str) -> String {
    let mut text = format!("error: {error}");
    if let Some(failure) = &facts.local_failure {
        text.push_str("\nearlier, on this node:");
        describe_failure(&mut text, facts, failure, &facts.hostname);
        others(&mut text, facts, Some(GlobalRank(failure.rank)));
    }
    text
}

fn describe_failure(text: &mut String, facts: &ReportFacts, failure: &WorkerExit, host: &str) {
    let ending = Ending::of_message(failure);
    let here = host == facts.hostname;
    let _ = write!(
        text,
        "\n  first failure: rank {} (node `{host}`, pid {}) {ending}",
        failure.rank, failure.pid
    );
    if let (true, Some(ran_for)) = (here, facts.ran_for) {
        let _ = write!(text, " after {}", seconds(ran_for));
    }
    if let Some(time) = clock_time(failure.unix_time_ns) {
        // Clocks of different nodes may differ, and this one's is what people compare with.
        let whose = if here { "" } else { " by that node's clock" };
        let _ = write!(text, " at {time}{whose}");
    }
    let found_hung = failure.message.starts_with(HUNG);
    if let Some(hint) = hint_for(ending, failure.out_of_memory).filter(|_| !found_hung) {
        let _ = write!(text, "\n    {hint}");
    }
    if !failure.message.is_empty() {
        // What the agent found out about a worker that hung are not its words.
        let lead = if found_hung { "" } else { "message: " };
        let indent = " ".repeat(4 + lead.len());
        let _ = write!(text, "\n    {lead}{}", indented(&failure.message, &indent));
    }
    if !failure.activity.is_empty() && !found_hung {
        let _ = write!(text, "\n    last heartbeat: {}", failure.activity);
    }
    if !failure.log_file.is_empty() {
        let on = if here {
            String::new()
        } else {
            format!(" on `{host}`")
        };
        let _ = write!(text, "\n    log file{on}: {}", failure.log_file);
    }
    if failure.stderr_tail.is_empty() {
        // What was not seen is right above.
        if !facts.output_unseen {
            text.push_str("\n    no output on stderr");
        }
    } else if !repeats(&failure.stderr_tail, &failure.message) {
        let both = failure.stdout_in_tail;
        let streams = if both { "stdout and stderr" } else { "stderr" };
        let _ = write!(text, "\n    last lines of {streams}:");
        for line in &failure.stderr_tail {
            // What a terminal shows of a line that was written over and over, as of a progress bar.
            let shown = line
                .trim_end_matches('\r')
                .rsplit('\r')
                .next()
                .unwrap_or_default();
            let _ = write!(text, "\n      {shown}");
        }
    }
    if let Some(module) = missing_module(failure, &facts.executable).filter(|_| here) {
        let next = if module == "ddp_run" {
            "install the wheel of ddp-run there, which contains this module, or set PYTHONPATH=<repository>/python"
        } else {
            "install the module there, or choose a different interpreter with PYTHON_EXEC or by activating its \
             environment"
        };
        let interpreter = facts.executable.display();
        let _ = write!(text, "\n    hint: the interpreter was `{interpreter}`: {next}");
    }
}

/// The package that Python did not find, if that is what it says: often it is not the interpreter that the user meant.
fn missing_module<'a>(failure: &'a WorkerExit, executable: &Path) -> Option<&'a str> {
    let name = executable.file_name().unwrap_or_default().to_string_lossy();
    let mut said = failure.stderr_tail.iter().chain([&failure.message]);
    let module = said.find_map(|line| Some(line.split_once("No module named ")?.1))?;
    let ends = |c: char| !c.is_alphanumeric() && c != '_';
    let package = module.trim_start_matches('\'').split(ends).next();
    package.filter(|_| name.starts_with("python"))
}

/// True if the lines say nothing but the message.
fn repeats(lines: &[String], message: &str) -> bool {
    let line_of = |line: &str| line.trim().trim_start_matches("error: ").to_owned();
    let said: Vec<String> = message.lines().map(line_of).collect();
    lines.iter().all(|line| said.contains(&line_of(line)))
}

/// What a signal usually means, for those that programs do not send themselves.
fn hint_for(ending: Ending, out_of_memory: bool) -> Option<&'static str> {
    let Ending::Signal { signal, .. } = ending else {
        return None;
    };
    match signal {
        libc::SIGKILL if out_of_memory => Some(
            "possibly out of memory: the kernel's OOM killer killed a process of this control group at that time",
        ),
        libc::SIGKILL => Some(
            "not sent by ddp-run: the kernel's OOM killer (see `dmesg`), or a `kill -9` by a person or program",
        ),
        libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT => {
            Some("not sent by ddp-run: the batch system, or a `kill` by a person or program")
        }
        libc::SIGSEGV | libc::SIGILL | libc::SIGFPE => Some("the program crashed"),
        libc::SIGBUS => Some("the program crashed: often too little shared memory, or a truncated file"),
        libc::SIGABRT => Some("the program aborted: its last lines say why"),
        _ => None,
    }
}

/// Time of day in UTC: nodes of one job may be set to different time zones.
fn clock_time(unix_time_ns: u64) -> Option<String> {
    let seconds = unix_time_ns / 1_000_000_000;
    let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
    (seconds > 0).then(|| format!("{hours:02}:{minutes:02}:{:02} UTC", seconds % 60))
}

#[cfg(test)]
#[path = "text_tests.rs"]
mod tests;
