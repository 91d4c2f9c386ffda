//! `ddp-train plan`: estimates memory, traffic and step time of a run. Neither the machines nor the
//! data need to exist.
//!
//! | file | what it holds |
//! |---|---|
//! | `quantity.rs` | sizes and rates, parsed from text |
//! | `device.rs` | the device of the plan: named, described, or found on this machine |
//! | `report.rs` | the strategies as tables |
//! | `layouts.rs` | the best layouts for the machines |

mod device;
mod layouts;
mod quantity;
mod report;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ddp_proto::words::{bytes, decimal_bytes, grouped};

use crate::cli::answer;
use crate::cli::error::CliError;
use crate::cli::native::costs::Cluster;
use crate::cli::native::{Draft, LayoutSearch, Machines};
use crate::cli::settings::Settings;
use crate::cli::values::{self, ProcCount};
use device::{DeviceArgs, Planned};

/// Most nodes, and most ranks per node: a larger number is a typing error.
const MAX_COUNT: i64 = 1 << 14;
/// Most ranks of all nodes together.
const MAX_RANKS: u64 = 1 << 17;
/// Most layouts to show: more do not fit on a screen.
const MAX_LAYOUTS: i64 = 100;
/// How often a terminal sees that the search goes on.
const TICK: Duration = Duration::from_millis(100);
/// Ranks per node if no setting gives them: most GPU machines have 8 GPUs.
const RANKS_A_NODE: u32 = 8;

/// What to plan, and for which machines.
#[derive(Debug, Args)]
pub(super) struct PlanArgs {
    /// The configuration; its data need not exist
    #[arg(value_name = "FILE.yaml", required_unless_present = "collective")]
    config: Option<PathBuf>,
    /// Override one value, for example `--set train.micro_batch=4`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = values::assignment)]
    overrides: Vec<String>,
    /// Number of nodes [default: the maximum of `launch.nnodes`, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_COUNT))]
    nnodes: Option<u32>,
    /// Ranks per node, one per GPU [default: `launch.nproc_per_node` if it is a number, else 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_COUNT))]
    nproc_per_node: Option<u32>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Bandwidth from a node to the other nodes, all network adapters together, for example
    /// `3200Gb/s`
    #[arg(long, value_name = "RATE", value_parser = quantity::bytes_a_second)]
    network: Option<f64>,
    /// Number of layouts to show, the best first
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=MAX_LAYOUTS))]
    layouts: u32,
    /// Units of sizes: `gib` are powers of 1,024, `gb` of 1,000
    #[arg(long, value_name = "UNITS", default_value = "gib", value_parser = ["gib", "gb"])]
    units: String,
    /// Instead of a run: the cost of one all-reduce, reduce-scatter or all-gather
    #[arg(long, value_name = "NAME", requires_all = ["bytes", "ranks"], value_parser = ["all-reduce", "reduce-scatter", "all-gather"])]
    #[arg(conflicts_with_all = ["config", "overrides", "nnodes", "nproc_per_node"])]
    collective: Option<String>,
    /// With `--collective`: size of the whole buffer
    #[arg(long, value_name = "SIZE", requires = "collective", value_parser = quantity::size)]
    bytes: Option<u64>,
    /// With `--collective`: number of ranks
    #[arg(long, value_name = "N", requires = "collective", value_parser = clap::value_parser!(u32).range(2..=MAX_COUNT))]
    ranks: Option<u32>,
}

/// Main of `ddp-train plan`.
pub(super) fn run(args: &PlanArgs) -> ExitCode {
    let said = match &args.config {
        Some(config) => plan(args, config),
        None => Ok(collective(args)),
    };
    answer::give_or_fail(said)
}

/// What a ring sends of a buffer of S bytes (Patarasuk and Yuan 2009): each of N ranks sends S/N in a step, in N − 1 steps
/// to reduce-scatter and in as many to gather. No algorithm sends less.
fn collective(args: &PlanArgs) -> String {
    let (size, ranks) = (args.bytes.unwrap_or(0), args.ranks.unwrap_or(2));
    let is_all_reduce = args.collective.as_deref() == Some("all-reduce");
    let steps = (1 + u32::from(is_all_reduce)) * (ranks - 1);
    let sent = f64::from(steps) * size as f64 / f64::from(ranks);
    let exact = grouped(sent.ceil() as u64);
    let mut text = format!("sent per rank   {exact} B, by a ring in {steps} steps\n");
    let link = args.device.link.or(args.device.gpu.map(|gpu| gpu.link));
    for (flag, rate) in [("--link", link), ("--network", args.network)] {
        if let Some(rate) = rate {
            let time = report::duration(sent / rate / args.device.mfu);
            let _ = writeln!(text, "time, at least  {time} at `{flag}`");
        }
    }
    text
}

/// Nodes and ranks of the plan, and whether a setting gives them.
struct Size {
    nodes: u32,
    ranks_a_node: u32,
    /// Neither the flag nor the `launch` section sets `ranks_a_node`.
    is_default: bool,
}

/// Nodes, and ranks per node: from the flags, else from the `launch` section. A `nproc_per_node`
/// such as `gpu` is ignored, because it counts the devices of this machine.
fn size(args: &PlanArgs, config: &Path) -> Result<Size, CliError> {
    let text = std::fs::read_to_string(config).map_err(CliError::machine("cannot read the configuration"))?;
    let launch = Settings::from_yaml(config, &text)?;
    let of_launch = match launch.nproc_per_node {
        Some(ProcCount::Fixed(ranks)) => Some(ranks),
        _ => None,
    };
    let ranks = of_launch.unwrap_or(RANKS_A_NODE);
    let nodes = (args.nnodes).unwrap_or_else(|| launch.nnodes.map_or(1, |nodes| nodes.max));
    let ranks_a_node = args.nproc_per_node.unwrap_or(ranks);
    if u64::from(nodes) * u64::from(ranks_a_node) > MAX_RANKS {
        return Err(CliError::Conflict {
            problem: format!(
                "{nodes} nodes × {ranks_a_node} ranks are too many: a plan supports at most {MAX_RANKS} ranks"
            ),
            hint: "set smaller numbers with `--nnodes` or `--nproc-per-node`".to_owned(),
        });
    }
    Ok(Size {
        nodes,
        ranks_a_node,
        is_default: args.nproc_per_node.or(of_launch).is_none(),
    })
}

fn plan(args: &PlanArgs, config: &Path) -> Result<String, CliError> {
    let draft = Draft::read(config, &args.overrides)?;
    let size = size(args, config)?;
    let device = Planned::of(&args.device, draft.config());
    let machines = Machines {
        cluster: Cluster {
            nodes: size.nodes.into(),
            ranks_a_node: size.ranks_a_node.into(),
            link: device.link.map(|rate| rate * args.device.mfu),
            network: args.network.map(|rate| rate * args.device.mfu),
        },
        memory: device.for_training()?,
        flops: device.flops.map(|flops| flops * args.device.mfu),
        has_own_memory: device.has_own_memory,
    };
    // On a terminal only.
    let progress = ddp_launcher::progress_bar("{spinner} planning, {elapsed}");
    progress.enable_steady_tick(TICK);
    let comparison = draft.comparison(&machines)?;
    let search = draft.layouts(&machines, args.layouts as usize, layouts::SEARCH_TIME)?;
    progress.finish_and_clear();
    let gb = args.units == "gb";
    let context = report::Context {
        device: &device,
        bytes: if gb { decimal_bytes } else { bytes },
        mfu: args.device.mfu,
        has_default_ranks: size.is_default,
    };
    let mut text = report::text(&comparison, &machines, &context);
    if let (Some(search), Some(memory)) = (&search, machines.memory) {
        text.push('\n');
        text.push_str(&layouts::text(search, memory, &context));
    } else if let Some(key) = LayoutSearch::given(draft.config()) {
        let note = format!("Other layouts are not searched, because `{key}` is set; with 1, they are.\n");
        text.push_str(&note);
    }
    Ok(text)
}
