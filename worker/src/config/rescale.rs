//! `train.rescale`: what becomes of the global batch when a run goes on with another number of ranks.

use serde::{Deserialize, Serialize};

/// `train.rescale`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rescale {
    /// It stays what it was: the accumulation changes. Where no accumulation does that, the run is refused.
    #[default]
    KeepGlobalBatch,
    /// It changes with the number of ranks: micro-batch and accumulation stay.
    KeepMicroBatch,
}
