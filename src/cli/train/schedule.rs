//! `ddp-train schedule`: what the ranks of a pipeline do in a step, as text or as a picture. The
//! schedule comes from a configuration or a name.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::ArgGroup;
use ddp_launcher::replace_file;
use ddp_proto::words::counted;
use ddp_worker::parallel::pipeline::{PipelinePlan, Schedule, SchedulePicture, StageCosts, grid, simulate};

use crate::cli::error::CliError;
use crate::cli::native::Draft;
use crate::cli::{answer, values};

/// Most ranks, chunks and micro-batches: a larger number is a typing error.
const MAX_COUNT: u64 = 1 << 12;
/// Of an action in the table that [`grid`] makes: the columns after its first.
const REST: &str = "---";

/// Show the schedule of a pipeline: what each rank computes when, where it waits, and what it keeps
/// for backward.
///
/// In the text, each row is a rank and each column is the time of one F. `2F1` is the forward pass
/// (F) of stage 2 for micro-batch 1. I is the gradient of the input, W the gradient of the weights.
/// B is I and W together and takes two columns. A unit of the summary is the F of all stages of a
/// rank.
#[derive(Debug, clap::Args)]
#[command(group(ArgGroup::new("source").required(true).args(["config", "schedule"])))]
pub(super) struct ScheduleArgs {
    /// Show the pipeline of this configuration; its data need not exist
    #[arg(value_name = "FILE.yaml")]
    config: Option<PathBuf>,
    /// Override one value, for example `--set parallel.pipeline.schedule=zbv`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = values::assignment, requires = "config")]
    overrides: Vec<String>,
    /// Show the schedule of this name: gpipe, 1f1b, interleaved, zb-h1, zbv or greedy
    #[arg(long, value_name = "NAME")]
    schedule: Option<String>,
    /// Number of pipeline ranks
    #[arg(long, value_name = "P", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=MAX_COUNT))]
    stages: u64,
    /// Chunks of the model (virtual stages) per rank [default: the fewest that the schedule
    /// supports]
    #[arg(long, value_name = "V", value_parser = clap::value_parser!(u64).range(1..=MAX_COUNT))]
    chunks: Option<u64>,
    /// Micro-batches per step
    #[arg(long, value_name = "M", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=MAX_COUNT))]
    micro_batches: u64,
    /// Draw the schedule into this SVG file
    #[arg(short, long, value_name = "FILE.svg")]
    output: Option<PathBuf>,
}

/// Main of `ddp-train schedule`.
pub(super) fn run(args: &ScheduleArgs) -> ExitCode {
    answer::give_or_fail(planned(args))
}

/// Names the flags of this command instead of keys of a configuration.
fn with_flags(words: &str) -> String {
    [
        ("`parallel.pipeline.chunks` (chunks per rank)", "`--chunks`"),
        ("`train.grad_accumulation` (micro-batches)", "`--micro-batches`"),
        ("`parallel.pipeline.schedule`", "`--schedule`"),
    ]
    .into_iter()
    .fold(words.to_owned(), |words, (key, flag)| words.replace(key, flag))
}

/// Shows a schedule from a configuration or a name, with unit times.
fn planned(args: &ScheduleArgs) -> Result<String, CliError> {
    let plan = if let Some(config) = &args.config {
        Draft::read(config, &args.overrides)?.pipeline()?
    } else {
        let [ranks, micro_batches] = [args.stages, args.micro_batches].map(|count| count as usize);
        let chunks = args.chunks.map(|chunks| chunks as usize);
        let name = args.schedule.as_deref().unwrap_or_default();
        PipelinePlan::named(name, ranks, chunks, micro_batches)
            .map_err(|error| CliError::Config(with_flags(&error.to_string())))?
    };
    let (schedule, placement) = (plan.schedule(), plan.placement());
    let costs = vec![StageCosts::UNIT; placement.stages()];
    let simulation = simulate(schedule, &costs, 0).map_err(|error| CliError::Config(error.to_string()))?;
    let picture = SchedulePicture {
        placement,
        simulation: &simulation,
    };
    let title = format!("{}: {}", plan.name(), sizes(schedule));
    let words = format!(
        "simulated: {}\none unit is the time of F, I or W for one micro-batch in all stages of a rank\n",
        picture.in_words()
    );
    let table = grid(&simulation);
    let rest = if table.contains(REST) {
        format!(", `{REST}` the rest of the action before it")
    } else {
        String::new()
    };
    let legend = format!("`.` is a time in which the rank does not compute{rest}\n");
    let Some(output) = &args.output else {
        return Ok(format!("{title}\n{table}{legend}{words}"));
    };
    replace_file(output, picture.draw(&title).as_bytes())
        .map_err(|error| CliError::Config(format!("cannot write `{}`: {error}", output.display())))?;
    Ok(format!("{title}\n{words}picture: {}\n", output.display()))
}

/// `4 ranks, 8 micro-batches`
fn sizes(schedule: &Schedule) -> String {
    let placement = schedule.placement();
    let stages = match placement.stages() {
        stages if stages == placement.ranks() => String::new(),
        stages => format!("{} on ", counted(stages, "stage")),
    };
    let ranks = counted(placement.ranks(), "rank");
    format!(
        "{stages}{ranks}, {}",
        counted(schedule.micro_batches(), "micro-batch")
    )
}
