//! State that lies elsewhere than in memory.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `train.offload`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Offload {
    /// State of the optimizer.
    pub optimizer: OptimizerHome,
    /// Folder of the file system that takes it; default: the run's.
    pub dir: Option<PathBuf>,
}

/// `train.offload.optimizer`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerHome {
    /// In memory, beside the parameters.
    #[default]
    None,
    /// In a mapped file without a name.
    File,
    /// In memory of the host, also where a GPU trains.
    Host,
}
