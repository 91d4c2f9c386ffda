//! Optimization: the update of flat arenas, the learning rate, clipping by the global norm.
//!
//! | type | what it is |
//! |---|---|
//! | [`Optimizer`] | state, masters and update of what this rank owns |
//! | [`AdamW`], [`Lion`], [`Sgd`] | rules: the formula of one element, its state slots, its kernels |
//! | `muon` | the update of whole matrices; AdamW updates the rest |
//! | [`ParamGroups`] | learning rate and weight decay by parameter |
//! | [`StateMemory`] | where state and masters are: on the device, on the host beside it, in a file |
//! | [`Clip`] | the global norm and the factor that bounds it, both computed on the device |
//! | [`learning_rate`] | warm-up and decay as a pure function of the step |

mod adamw;
mod clip;
mod lion;
mod muon;
mod optimizer;
mod rates;
mod sgd;
mod state_memory;

use std::sync::Arc;

pub use adamw::AdamW;
pub use clip::Clip;
pub use lion::Lion;
pub use optimizer::{Optimizer, UpdateStep};
pub use rates::{GroupRates, ParamGroups, batch_factor, learning_rate};
pub use sgd::Sgd;
pub use state_memory::{HostState, PIECE, StateBytes, StateMemory, evict};

use crate::config::{OptimizerConfig, OptimizerKind};
use crate::device::cuda::CompileUnit;
use crate::ops::UpdateRule;
use crate::ops::cuda::units_of;

/// The rule that a configuration asks for.
#[must_use]
pub fn rule(config: &OptimizerConfig) -> Arc<dyn UpdateRule> {
    let (betas, momentum) = (config.betas(), config.momentum());
    match config.kind {
        // Of what is no matrix of a block: `muon` updates these.
        OptimizerKind::Adamw | OptimizerKind::Muon => Arc::new(AdamW {
            betas,
            eps: config.eps,
        }),
        OptimizerKind::Lion => Arc::new(Lion { betas }),
        OptimizerKind::Sgd => Arc::new(Sgd {
            momentum,
            nesterov: config.nesterov(),
        }),
    }
}

/// Every rule that has kernels, with every number of slots.
#[must_use]
pub fn rules() -> Vec<Arc<dyn UpdateRule>> {
    let of = |kind, momentum| {
        rule(&OptimizerConfig {
            kind,
            momentum,
            ..OptimizerConfig::default()
        })
    };
    let mut rules = vec![
        of(OptimizerKind::Adamw, None),
        of(OptimizerKind::Lion, None),
        of(OptimizerKind::Sgd, None),
        of(OptimizerKind::Sgd, Some(0.0)),
    ];
    rules.extend(muon::rules());
    rules
}

/// All that the rules' CUDA kernels are compiled as.
#[must_use]
pub fn units() -> Vec<CompileUnit> {
    rules().iter().flat_map(|rule| units_of(rule.as_ref())).collect()
}
