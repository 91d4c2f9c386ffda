//! `ddp-train schedule`: what the ranks of a pipeline do in a step, as a picture, as text, or as a table for PyTorch; of a
//! configuration, of a schedule by its name, of a table, or as a run has measured it.

use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::{fs, io};

use clap::ArgGroup;
use ddp_worker::parallel::pipeline::csv::{self, CsvFormat};
use ddp_worker::parallel::pipeline::{
    Links, MeasuredRun, Panel, PipelinePlan, Schedule, StageCosts, Unit, grid, picture, simulate,
};

use super::error::{CliError, print_error};
use super::native::{Draft, read_bounded};
use super::{answer, values};

/// More ranks, chunks or micro-batches are a slipped digit.
const MAX_COUNT: u64 = 1 << 12;
/// Longest timeline that is read.
const MAX_TRACE_BYTES: u64 = 1 << 30;
/// Where a run's folder has its timeline.
const TIMELINE: &str = "timeline/timeline.json";

/// Show the schedule of a pipeline: who computes what when, who waits, and what is kept for backward.
///
/// In text a row is a rank and a column a unit of time, in which it computes F (forward), I (the gradient of the input)
/// or W (those of the weights) of a stage for a micro-batch: `2F1`; B is I and W at once and takes two.
#[derive(Debug, clap::Args)]
#[command(group(ArgGroup::new("source").required(true).args(["config", "schedule", "file", "measured"])))]
pub(super) struct ScheduleArgs {
    /// A configuration, whose pipeline is shown; its data need not be there
    #[arg(value_name = "FILE.yaml")]
    config: Option<PathBuf>,
    /// Override one value, for example `--set parallel.pipeline.schedule=zbv`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = values::assignment, requires = "config")]
    overrides: Vec<String>,
    /// A schedule by its name: gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev or greedy
    #[arg(long, value_name = "NAME")]
    schedule: Option<String>,
    /// Ranks of the pipeline
    #[arg(long, value_name = "P", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=MAX_COUNT))]
    stages: u64,
    /// Parts of the model on each rank [default: as few as the schedule works with]
    #[arg(long, value_name = "V", value_parser = clap::value_parser!(u64).range(1..=MAX_COUNT))]
    chunks: Option<u64>,
    /// Micro-batches of a step
    #[arg(long, value_name = "M", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=MAX_COUNT))]
    micro_batches: u64,
    /// A schedule as a table, as PyTorch's pipelining and `--csv` write it
    #[arg(long, value_name = "FILE.csv")]
    file: Option<PathBuf>,
    /// The timeline of a run (`run.timeline`), or the run's folder: as measured, beside what the simulator makes of the
    /// durations
    #[arg(long, value_name = "RUN")]
    measured: Option<PathBuf>,
    /// Draw it, as SVG
    #[arg(short, long, value_name = "FILE.svg")]
    output: Option<PathBuf>,
    /// Print it as a table that `parallel.pipeline.file` and PyTorch's pipelining take
    #[arg(long, conflicts_with = "output")]
    csv: bool,
}

/// Main of `ddp-train schedule`.
pub(super) fn run(args: &ScheduleArgs) -> ExitCode {
    let shown = match &args.measured {
        Some(path) => measured(args, path),
        None => planned(args),
    };
    match shown {
        Ok(text) => answer::give(text),
        Err(error) => {
            print_error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn read(path: &Path, most: u64) -> Result<Vec<u8>, CliError> {
    read_bounded(path, most)
        .map_err(|error| CliError::Config(format!("cannot read `{}`: {error}", path.display())))
}

fn refused(error: impl std::fmt::Display) -> CliError {
    CliError::Config(error.to_string())
}

/// Of a configuration, a name or a table, with unit times.
fn planned(args: &ScheduleArgs) -> Result<String, CliError> {
    let plan = match (&args.config, &args.file, &args.schedule) {
        (Some(config), ..) => Draft::read(config, &args.overrides)?.pipeline()?,
        (None, Some(file), _) => {
            let text = read(file, csv::MAX_BYTES)?;
            PipelinePlan::of_csv(&String::from_utf8_lossy(&text)).map_err(refused)?
        }
        (None, None, name) => {
            let [ranks, micro_batches] = [args.stages, args.micro_batches].map(|count| count as usize);
            let sizes = (ranks, args.chunks.map(|chunks| chunks as usize));
            PipelinePlan::named(name.as_deref().unwrap_or_default(), sizes, micro_batches).map_err(refused)?
        }
    };
    let (schedule, placement) = (plan.schedule(), plan.placement());
    if args.csv {
        return Ok(csv::write(schedule, CsvFormat::ComputeOnly));
    }
    let costs = vec![StageCosts::UNIT; placement.stages()];
    let simulation = simulate(schedule, &costs, Links::IDEAL).map_err(refused)?;
    let panel = Panel {
        heading: "simulated",
        placement,
        simulation: &simulation,
        unit: Unit {
            ticks: placement.stages() as f64 / placement.ranks() as f64,
            name: "units",
        },
    };
    let title = format!("{}: {}", plan.name(), sizes(schedule));
    let words = format!(
        "simulated: {}\na unit is F, I or W of a micro-batch over all that a rank holds\n",
        panel.in_words()
    );
    show(args, &title, &[panel], &words, &grid(&simulation))
}

/// Of a run, beside the simulator with the same durations.
fn measured(args: &ScheduleArgs, path: &Path) -> Result<String, CliError> {
    let in_run = path.join(TIMELINE);
    let trace = read(if path.is_dir() { &in_run } else { path }, MAX_TRACE_BYTES)?;
    let run = MeasuredRun::of_trace(&trace).map_err(refused)?;
    if args.csv {
        return Ok(csv::write(run.schedule(), CsvFormat::ComputeOnly));
    }
    let numbers: Vec<String> = run.steps().keys().map(u64::to_string).collect();
    let Some((last, step)) = run.steps().last_key_value() else {
        return Ok(String::new());
    };
    let panel = |heading, simulation| Panel {
        heading,
        placement: run.schedule().placement(),
        simulation,
        unit: Unit {
            ticks: 1e6,
            name: "ms",
        },
    };
    let (measured, predicted) = (run.bubble_fraction(), run.predicted().bubble_fraction());
    let panels = [panel("measured", step), panel("simulated", run.predicted())];
    let words = format!(
        "step {last} measured: {}\nsimulated with the mean durations measured: {}\n\
         bubble of steps {}: measured {:.2} %, simulated {:.2} %\n",
        panels[0].in_words(),
        panels[1].in_words(),
        numbers.join(", "),
        measured * 100.0,
        predicted * 100.0
    );
    let title = format!(
        "Step {last}: {}; simulated with mean durations",
        sizes(run.schedule())
    );
    show(args, &title, &panels, &words, "")
}

/// `4 ranks, 8 micro-batches`
fn sizes(schedule: &Schedule) -> String {
    let placement = schedule.placement();
    let stages = match placement.stages() {
        stages if stages == placement.ranks() => String::new(),
        stages => format!("{stages} stages on "),
    };
    let (ranks, micro_batches) = (placement.ranks(), schedule.micro_batches());
    format!("{stages}{ranks} ranks, {micro_batches} micro-batches")
}

/// Draws it if it is asked for; else the text has the table too.
fn show(
    args: &ScheduleArgs,
    title: &str,
    panels: &[Panel<'_>],
    words: &str,
    table: &str,
) -> Result<String, CliError> {
    let Some(output) = &args.output else {
        return Ok(format!("{title}\n{table}{words}"));
    };
    replace(output, picture(title, panels).as_bytes())
        .map_err(|error| CliError::Config(format!("cannot write `{}`: {error}", output.display())))?;
    Ok(format!("{title}\n{words}picture: {}\n", output.display()))
}

/// Writes a file beside the one that it takes the place of, which is there until then. A device, such as `/dev/stdout`, is
/// written to.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    if path.metadata().is_ok_and(|there| !there.is_file()) {
        return fs::write(path, content);
    }
    let temporary = path.with_added_extension(format!("{}.tmp", process::id()));
    let written = fs::write(&temporary, content).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The error that counts is on its way.
        let _ = fs::remove_file(&temporary);
    }
    written
}
