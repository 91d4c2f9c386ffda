//! GPUs as the CUDA driver describes them, asked in a process of its own.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cli::hardware;

/// First argument of the invocation that describes the GPUs.
pub const GPU_DESCRIBE_SUBCOMMAND: &str = "__describe-gpus";

/// Longest wait: the driver makes a context on every device.
const DESCRIBE_TIMEOUT: Duration = Duration::from_mins(1);

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// As the driver calls it.
    pub name: String,
    /// Major and minor number, which kernels are compiled for.
    pub compute_capability: (i32, i32),
    /// All of its memory.
    pub memory_bytes: usize,
}

/// What the driver says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DriverAnswer {
    /// It started, and these devices are visible.
    Devices(Vec<Gpu>),
    /// It did not start, or a device refused; its own words.
    Failed(String),
}

/// The child's main: prints the answer as one line of JSON.
pub fn describe_main() -> std::process::ExitCode {
    // cudarc panics where the driver's library is missing. That is an answer here, not a bug.
    std::panic::set_hook(Box::new(|_| ()));
    let answer = match std::panic::catch_unwind(describe) {
        Ok(Ok(gpus)) => DriverAnswer::Devices(gpus),
        Ok(Err(error)) => DriverAnswer::Failed(error),
        Err(_) => DriverAnswer::Failed("`libcuda` cannot be loaded, or lacks a function".to_owned()),
    };
    match serde_json::to_string(&answer) {
        Ok(line) => println!("{line}"),
        Err(_) => return std::process::ExitCode::FAILURE,
    }
    std::process::ExitCode::SUCCESS
}

fn describe() -> Result<Vec<Gpu>, String> {
    let words = |error: cudarc::driver::DriverError| format!("{error}");
    let count = cudarc::driver::CudaContext::device_count().map_err(words)?;
    (0..count.max(0) as usize)
        .map(|ordinal| {
            let context = cudarc::driver::CudaContext::new(ordinal).map_err(words)?;
            Ok(Gpu {
                name: context.name().map_err(words)?,
                compute_capability: context.compute_capability().map_err(words)?,
                memory_bytes: context.total_mem().map_err(words)?,
            })
        })
        .collect()
}

/// Asks, with a deadline.
pub fn ask() -> DriverAnswer {
    match hardware::ask_in_child(GPU_DESCRIBE_SUBCOMMAND, DESCRIBE_TIMEOUT) {
        Ok(line) => serde_json::from_str(line.trim()).unwrap_or_else(|_| {
            DriverAnswer::Failed("the driver crashed the process that asked it".to_owned())
        }),
        Err(error) => DriverAnswer::Failed(error.to_string()),
    }
}
