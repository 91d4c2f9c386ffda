//! What becomes of the workers' output: which of it is shown, what goes to files and where these are, and whether one
//! worker has the terminal to itself.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use ddp_launcher::{OutputPlan, SignalPlan};
use nix::sys::signal::Signal;

use crate::cli::error::CliError;
use crate::cli::settings::Settings;
use crate::cli::streams::{OutputStyle, Words};

/// The output of this node's `workers`; `alone`: the job has no other node.
pub fn output_plan(settings: &Settings, alone: bool, workers: u32) -> Result<OutputPlan, CliError> {
    let words = |words: &Option<Words>| words.clone().unwrap_or_default().0;
    let output = OutputPlan {
        redirects: settings.redirects.clone().unwrap_or_default(),
        tee: settings.tee.clone().unwrap_or_default(),
        local_ranks: settings.local_ranks_filter.clone(),
        global_ranks: settings.global_ranks_filter.clone(),
        log_max_bytes: settings.log_max_mb.map(|mb| u64::from(mb.get()) << 20),
        prefix: settings.log_line_prefix_template.clone().unwrap_or_default(),
        stdout_filters: words(&settings.duplicate_stdout_filters),
        stderr_filters: words(&settings.duplicate_stderr_filters),
        direct: false,
        raw: settings.output == Some(OutputStyle::Raw),
    };
    if output.raw {
        check_raw(
            &output,
            settings.log_dir.is_some(),
            output.most_shown(workers, alone),
        )?;
    }
    Ok(output)
}

/// `--output raw` is for one rank, whose bytes the launcher does not see.
fn check_raw(output: &OutputPlan, has_log_dir: bool, shown: u32) -> Result<(), CliError> {
    if has_log_dir || output.needs_files() {
        return Err(CliError::Conflict {
            problem:
                "`--output raw` passes the output of a rank by the launcher, which cannot write it to files"
                    .into(),
            hint:
                "omit `--log-dir`, `--redirects`, `--tee` and `--duplicate-…-filters`, or omit `--output raw`"
                    .into(),
        });
    }
    if shown > 1 {
        return Err(CliError::Conflict {
            problem: format!(
                "`--output raw` shows one rank, but up to {shown} ranks of this node would be shown"
            ),
            hint: "`--local-ranks-filter 0` shows local rank 0 only; or use `--nproc-per-node 1`".into(),
        });
    }
    Ok(())
}

/// Where log files go, if there are any: where the settings say, or into the directory of the native run.
pub fn log_dir(
    settings: &Settings,
    out_dir: Option<PathBuf>,
    output: &OutputPlan,
    new: NewLogs<'_>,
) -> Result<Option<PathBuf>, CliError> {
    let of_the_run = out_dir.filter(|_| !output.raw).map(|dir| dir.join("logs"));
    match settings.log_dir.clone().or(of_the_run) {
        Some(named) => absolute(named).map(Some),
        None if output.needs_files() => new.directory().map(Some),
        None => Ok(None),
    }
}

/// A directory for log files that were asked for without a place.
#[derive(Clone, Copy, Debug)]
pub struct NewLogs<'a> {
    /// Job name, a part of the directory's name.
    pub job: &'a str,
    /// It is only named, and not made.
    pub dry_run: bool,
}

impl NewLogs<'_> {
    /// As torchrun. It is new and only this user may read it, whatever other users of the machine have put beside it.
    fn directory(self) -> Result<PathBuf, CliError> {
        let parent = absolute(std::env::temp_dir())?;
        let template = parent.join(format!("ddp-run-{}-XXXXXX", self.job));
        if self.dry_run {
            return Ok(template);
        }
        let directory = nix::unistd::mkdtemp(&template).map_err(|errno| CliError::TemporaryLogs {
            path: parent,
            source: errno.into(),
        })?;
        Ok(directory)
    }
}

/// A worker that changes its directory still has to find its error file.
fn absolute(path: PathBuf) -> Result<PathBuf, CliError> {
    std::path::absolute(path).map_err(CliError::machine("cannot determine the directory for log files"))
}

/// Gives a worker that is alone the terminal, as torchrun does, if input and all output are one and nothing is asked of
/// the output.
pub fn hand_over_terminal(output: &mut OutputPlan, signals: &mut SignalPlan) {
    let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal() && io::stderr().is_terminal();
    output.direct = is_terminal && *output == OutputPlan::default();
    let resized = Signal::SIGWINCH as i32;
    if output.direct && !signals.stop.contains(&resized) && !signals.forward.contains(&resized) {
        // The system tells only those whose terminal controls them.
        signals.forward.push(resized);
    }
}
