//! The device that is planned for.

use ddp_proto::words::bytes;

use super::quantity;
use crate::cli::error::CliError;
use crate::cli::native::costs::Accelerator;
use crate::cli::native::cuda::GpuFacts;
use crate::cli::native::{Backend, Precision, TrainConfig};
use crate::cli::train::doctor::gpus;

/// What driver and libraries use of a GPU's memory, if no flag says it.
const RESERVE_OF_A_GPU: u64 = 2_000_000_000;

/// The device as flags describe it.
#[derive(Debug, clap::Args)]
pub(super) struct DeviceArgs {
    /// Use the data sheet of this GPU: a100-40gb, a100, h100, h200 or b200 [default: the first GPU
    /// of this machine]
    #[arg(long, value_name = "NAME", value_parser = named)]
    pub(super) gpu: Option<Accelerator>,
    /// Memory of a device, for example `80GB`; with `parallel.backend: cpu`, the host memory that
    /// one rank may use
    #[arg(long, value_name = "SIZE", value_parser = quantity::size)]
    memory: Option<u64>,
    /// Part of this memory that driver and libraries use [default: 2GB for GPUs, 0 with
    /// `parallel.backend: cpu`]
    #[arg(long, value_name = "SIZE", value_parser = quantity::size_or_zero)]
    reserve: Option<u64>,
    /// Peak floating-point operations per second of a device in `train.precision`, for example
    /// `989T`
    #[arg(long, value_name = "RATE", value_parser = quantity::operations_a_second)]
    flops: Option<f64>,
    /// Share of this peak, and of bandwidths, that training reaches (MFU); with 1, times are lower bounds
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = quantity::share)]
    pub(super) mfu: f64,
    /// Bandwidth from a rank to the other ranks of its node, for example `450GB/s`
    #[arg(long, value_name = "RATE", value_parser = quantity::bytes_a_second)]
    pub(super) link: Option<f64>,
}

/// What is known of a device: flags first, then the data sheet of the one that is named or found.
#[derive(Debug, Default)]
pub(super) struct Planned {
    /// Where the numbers come from, in words.
    pub(super) source: String,
    /// All of its memory, in bytes.
    pub(super) memory: Option<u64>,
    /// Bytes of it that training cannot have.
    pub(super) reserve: u64,
    /// `train.precision`, which all numbers assume.
    pub(super) precision: &'static str,
    /// Floating-point operations a second in this precision.
    pub(super) flops: Option<f64>,
    /// Bytes a second to the devices of the same node.
    pub(super) link: Option<f64>,
    /// It has memory of its own, apart from the host's.
    pub(super) has_own_memory: bool,
}

impl Planned {
    /// As flags and configuration say; this machine's driver is asked where they name no device.
    pub(super) fn of(args: &DeviceArgs, config: &TrainConfig) -> Self {
        let is_gpu = config.parallel.backend != Backend::Cpu;
        let is_described = args.memory.is_some() || args.flops.is_some();
        let found = match (is_gpu, args.gpu, is_described) {
            (true, None, false) => gpus::ask().and_then(|described| described.gpus().first().cloned()),
            _ => None,
        };
        let sheet = args.gpu.or_else(|| found.as_ref().and_then(Accelerator::of));
        let of_sheet = sheet.map(|sheet| sheet.flops(config.train.precision));
        let driver_says = found.as_ref().map(|gpu| gpu.memory_bytes as u64);
        Self {
            source: source(args.gpu, found.as_ref(), is_described, is_gpu),
            memory: args.memory.or(driver_says).or(sheet.map(|sheet| sheet.memory)),
            reserve: args.reserve.unwrap_or(if is_gpu { RESERVE_OF_A_GPU } else { 0 }),
            precision: Precision::WORDS[config.train.precision as usize],
            flops: args.flops.or(of_sheet),
            link: args.link.or(sheet.map(|sheet| sheet.link)),
            has_own_memory: is_gpu,
        }
    }

    /// Bytes that are left for training, if its memory is known.
    pub(super) fn for_training(&self) -> Result<Option<u64>, CliError> {
        match self.memory {
            Some(memory) if memory <= self.reserve => Err(CliError::Conflict {
                problem: format!(
                    "`--reserve` is {}, and a device has {}: nothing is left for training",
                    bytes(self.reserve),
                    bytes(memory)
                ),
                hint: "set a smaller `--reserve`: by default it is 2GB for GPUs, and 0 with `parallel.backend: cpu`"
                    .to_owned(),
            }),
            memory => Ok(memory.map(|memory| memory - self.reserve)),
        }
    }
}

fn source(named: Option<Accelerator>, found: Option<&GpuFacts>, is_described: bool, is_gpu: bool) -> String {
    match (named, found) {
        (Some(named), _) => format!("{}, by its data sheet", named.name),
        (None, Some(found)) => format!("{}, found on this machine", found.name),
        (None, None) if is_described => "as described".to_owned(),
        (None, None) if !is_gpu => "a CPU: give `--memory`, `--flops` and `--link` for its limits".to_owned(),
        (None, None) => {
            "not known: name one, as `--gpu h100`, or give `--memory`, `--flops` and `--link`".to_owned()
        }
    }
}

/// A flag's value.
fn named(name: &str) -> Result<Accelerator, String> {
    Accelerator::named(name).ok_or_else(|| {
        let names = Accelerator::ALL.map(|accelerator| accelerator.name).join(", ");
        format!("known are {names}; describe another by `--memory`, `--flops` and `--link`")
    })
}
