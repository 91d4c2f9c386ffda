//! `ddp-train plot`: draws loss, validation loss, learning rate, speed and gradient norm of runs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ddp_proto::printable;
use ddp_proto::words::{counted, grouped};
use ddp_worker::metrics::RunFilesError;
use ddp_worker::metrics::plot::{self, RunCurves};

use super::runs;
use crate::cli::answer;
use crate::cli::error::CliError;

/// Draw the metrics of one or several runs into one HTML or SVG file, which any browser can show.
///
/// If a run has many steps, neighbouring steps are merged: the line shows their mean, and the band
/// reaches from their lowest to their highest value. Restarts are marked.
#[derive(Debug, Args)]
pub(super) struct PlotArgs {
    /// Directories of runs, or their `metrics.jsonl`
    #[arg(value_name = "RUN", required = true, num_args = 1..=plot::MAX_RUNS)]
    runs: Vec<PathBuf>,
    /// Output file; `.svg` contains only the picture [default: `plot.html` in the run's directory,
    /// for several runs `plots.html` here]
    #[arg(short, long, value_name = "FILE.html|FILE.svg", value_parser = output)]
    output: Option<PathBuf>,
}

fn output(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("html" | "svg") => Ok(path),
        _ => Err("expected a path that ends in `.html` or `.svg`".to_owned()),
    }
}

/// Main of `ddp-train plot`.
pub(super) fn run(args: &PlotArgs) -> ExitCode {
    answer::give_or_fail(draw(args).map_err(|error| CliError::Config(words_of(&error))))
}

fn draw(args: &PlotArgs) -> Result<String, RunFilesError> {
    let runs = args.runs.iter().map(|path| RunCurves::read(path));
    let runs: Vec<RunCurves> = runs.collect::<Result<_, _>>()?;
    for line in runs.iter().flat_map(|run| &run.bad_lines) {
        eprintln!("warning: skipped an invalid line: {}", printable::line(line));
    }
    let output = args.output.clone().unwrap_or_else(|| plot_of(&args.runs));
    let picture = match output.extension() {
        Some(ending) if ending == "svg" => plot::svg(&runs),
        _ => plot::html(&runs),
    };
    plot::write(&output, &picture)?;
    let steps = runs.iter().map(|run| run.steps).max().unwrap_or_default();
    let of = counted(runs.len() as u64, "run");
    Ok(format!("{}: {of}, {} steps\n", output.display(), grouped(steps)))
}

/// Without the hint, which is for a run that trains. If the path is a directory of runs, their names are given.
fn words_of(error: &RunFilesError) -> String {
    match error {
        RunFilesError::Io {
            doing, path, cause, ..
        } => {
            let directory = path.parent().filter(|_| path.ends_with(runs::METRICS));
            let hint = directory.map_or_else(String::new, |directory| runs::hint(directory, runs::METRICS));
            format!("cannot {doing} `{}`: {cause}{hint}", path.display())
        }
        other => other.to_string(),
    }
}

/// `plot.html` in the directory of a run, whose path may also be that of a file in it. A picture of several runs goes to the current directory.
fn plot_of(runs: &[PathBuf]) -> PathBuf {
    let [run] = runs else {
        return "plots.html".into();
    };
    let directory = if run.is_dir() {
        Some(run.as_path())
    } else {
        run.parent()
    };
    directory.unwrap_or(Path::new("")).join("plot.html")
}
