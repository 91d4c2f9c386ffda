//! What a rank will hold and move, before anything is allocated: the formulas, and the buffers beside them by name.

use ddp_proto::env::WorkerEnv;

use super::TrainError;
use super::setup::Blueprint;
use super::strategy::Scheme;
use crate::config::{Accumulate, Strategy, TrainConfig};
use crate::model::Model;
use crate::parallel::{
    Between, Dtypes, GradientLayout, Residence, StepTraffic, gathered_elements, gathering_slots,
    in_flight_slots,
};
use crate::plan::{Footprint, Setting, Traffic};

/// A pure function of the configuration and the rank's place. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outlook {
    /// What the formulas depend on.
    pub setting: Setting,
    /// Parameters of the model, Ψ: without padding, a tied one counted once.
    pub parameters: u64,
    /// What the formulas say of so many.
    pub formula: Footprint,
    /// What comes on top.
    pub buffers: Buffers,
    /// Bytes of the activations of a micro-batch.
    pub activations: u64,
    /// Elements of parameters, or of gradients, with their padding.
    pub padded: u64,
    /// What a step moves, over padded units; with `sync: per-parameter`, which has no padding, at most.
    pub traffic: Traffic,
}

/// Bytes that a rank holds beside the formula's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// Of parameters, gradients and optimizer: so that ranks have equal slices of whole chunks.
    pub padding: Footprint,
    /// Slots for gradients that are being reduced.
    pub in_flight: u64,
    /// Slots for parameters that are gathered at the moment.
    pub gathered: u64,
}

impl Outlook {
    /// Of a configuration on the rank that `env` describes.
    pub fn of(config: &TrainConfig, env: &WorkerEnv) -> Result<Self, TrainError> {
        let Blueprint {
            model,
            layout,
            scheme,
            activations,
            ..
        } = Blueprint::of(config, env)?;
        Ok(Self::new(config, &model, &layout, scheme, activations))
    }

    pub(super) fn new(
        config: &TrainConfig,
        model: &Model,
        layout: &GradientLayout,
        scheme: Scheme,
        activations: usize,
    ) -> Self {
        let (parallel, micro_batches) = (&config.parallel, config.train.grad_accumulation);
        let dtypes = Dtypes::of(config);
        let residence = Residence {
            reshard: parallel.reshard_after_forward,
            persist_below: parallel.persist_below,
        };
        // Replicas have no shards: the formula of their traffic counts the replicas.
        let ranks = match scheme.strategy {
            Strategy::Ddp => scheme.copies,
            _ => scheme.shard_ranks,
        };
        let setting = Setting {
            strategy: scheme.strategy,
            ranks: ranks as u64,
            micro_batches: micro_batches as u64,
            accumulate: match scheme.between {
                Some(Between::Shard) => Accumulate::Sharded,
                _ => Accumulate::Full,
            },
            reshard_after_forward: parallel.reshard_after_forward,
            dtypes,
        };
        // Of which rank does not matter: all hold and move the same.
        let sharding = scheme.sharding(layout, 0);
        let (gathered, gathering) = match scheme.strategy {
            Strategy::Ddp => (0, 0),
            Strategy::Zero1 | Strategy::Zero2 => (sharding.whole_len(), 0),
            Strategy::Zero3 => (
                gathered_elements(model, &sharding, residence, micro_batches),
                gathering_slots(model, &sharding, residence),
            ),
        };
        let sharded = StepTraffic::of(&sharding, scheme.copies, gathered, dtypes);
        let (parameters, padded) = (model.param_count() as u64, sharding.whole_len() as u64);
        let formula = Footprint::of(&setting, parameters);
        let in_flight = in_flight_slots(layout, &sharding, scheme.between, parallel.sync);
        Self {
            setting,
            parameters,
            formula,
            buffers: Buffers {
                padding: Footprint::of(&setting, padded) - formula,
                in_flight: (in_flight * dtypes.reduced.bytes()) as u64,
                gathered: (gathering * dtypes.params.bytes()) as u64,
            },
            activations: activations as u64,
            padded,
            traffic: match scheme.strategy {
                Strategy::Ddp => Traffic::of(&setting, padded),
                _ => Traffic {
                    grads: sharded.step(setting.reductions() as usize) - sharded.params(),
                    params: sharded.params(),
                },
            },
        }
    }

    /// What the formulas say and its padding, and with the gradients those in flight: what `metrics.jsonl` records.
    /// Gathered parameters are apart.
    #[must_use]
    pub fn held(&self) -> Footprint {
        let mut held = self.formula + self.buffers.padding;
        held.grads += self.buffers.in_flight;
        held
    }
}
