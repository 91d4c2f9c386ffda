//! The native worker, as the command line sees it. The only file of this package that calls `ddp_worker`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ddp_worker::config::TrainConfig;

use super::error::CliError;

/// Checks a configuration before anything is spawned, and says where the run's files go.
pub fn validate(file: &Path, overrides: &[String], job_id: &str) -> Result<PathBuf, CliError> {
    let config = load(file, overrides)?;
    let default = || Path::new("runs").join(&config.run.name).join(job_id);
    Ok(config.run.out_dir.clone().unwrap_or_else(default))
}

fn load(file: &Path, _overrides: &[String]) -> Result<TrainConfig, CliError> {
    let text = std::fs::read_to_string(file).map_err(|source| CliError::Target {
        path: file.to_owned(),
        source,
    })?;
    serde_saphyr::from_str(&text).map_err(|error| CliError::Yaml {
        file: file.to_owned(),
        message: error.to_string(),
    })
}

/// Main of a worker process: `__worker FILE [--set KEY=VALUE]…`, arguments that [`super::target`] wrote.
pub fn worker_main(_args: impl Iterator<Item = OsString>) -> ExitCode {
    ExitCode::FAILURE
}

/// Trains `file` in this process.
pub fn run(_file: &Path, _overrides: &[String]) -> ExitCode {
    ExitCode::FAILURE
}
