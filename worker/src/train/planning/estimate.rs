//! What a rank will hold and move, before anything is allocated: the formulas, and the buffers beside them by name.

use ddp_proto::env::WorkerEnv;

use crate::config::{Accumulate, Strategy, TrainConfig};
use crate::device::DType;
use crate::model::Model;
use crate::optim;
use crate::parallel::{
    Dtypes, GradientLayout, StepTraffic, gathered_elements, gathering_slots, in_flight_slots,
};
use crate::plan::{Among, Exchange, Footprint, Setting, Traffic};
use crate::train::TrainError;
use crate::train::strategy::{Blueprint, Scheme};

/// A pure function of the configuration and the rank's place. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
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
    /// The collectives of which that is a rank's part.
    pub exchanges: Exchanges,
}

/// The collectives of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchanges {
    /// Gradients, within a copy of the state where it is sharded.
    pub grads: Exchange,
    /// Parameters, each counted as often as it is gathered.
    pub params: Exchange,
    /// Shards of gradients over the copies.
    pub copies: Exchange,
    /// Ranks of a copy.
    pub shard_ranks: u64,
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

impl Exchanges {
    fn of(sharded: &StepTraffic, setting: &Setting) -> Self {
        let StepTraffic {
            whole,
            ranks,
            copies,
            gathered,
            dtypes,
        } = *sharded;
        let exchange = |elements: usize, dtype: DType, times: u64, among| Exchange {
            bytes: (elements * dtype.bytes()) as u64,
            times,
            among,
        };
        let grads = match setting.strategy {
            Strategy::Ddp => exchange(whole, dtypes.reduced, 2, Among::Copies),
            _ => exchange(whole, dtypes.reduced, setting.reductions(), Among::Shards),
        };
        let over_copies = match setting.strategy {
            Strategy::Ddp => 0,
            _ if copies == 1 => 0,
            _ => 2,
        };
        Self {
            grads,
            params: exchange(gathered, dtypes.params, 1, Among::Shards),
            copies: exchange(whole / ranks, dtypes.accumulated, over_copies, Among::Copies),
            shard_ranks: ranks as u64,
        }
    }

    /// All of them.
    #[must_use]
    pub const fn all(&self) -> [Exchange; 3] {
        [self.grads, self.params, self.copies]
    }
}

impl Estimate {
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

    pub(in crate::train) fn new(
        config: &TrainConfig,
        model: &Model,
        layout: &GradientLayout,
        scheme: Scheme,
        activations: usize,
    ) -> Self {
        let (parallel, micro_batches) = (&config.parallel, config.train.grad_accumulation);
        let dtypes = Dtypes::of(config);
        let policy = scheme.reshard_policy(parallel);
        // Replicas have no shards: the formula of their traffic counts the replicas.
        let ranks = match scheme.strategy {
            Strategy::Ddp => scheme.copies(),
            _ => scheme.shard_ranks(),
        };
        let setting = Setting {
            strategy: scheme.strategy,
            ranks: ranks as u64,
            micro_batches: micro_batches as u64,
            accumulate: scheme.accumulate.unwrap_or(Accumulate::Full),
            reshard_after_forward: parallel.reshard_after_forward,
            dtypes,
            state_slots: optim::rule(&config.train.optimizer).slots.len() as u64,
        };
        // Of which rank does not matter: all hold and move the same.
        let sharding = scheme.sharding(layout, 0);
        let gathered = gathered_elements(model, &sharding, policy, micro_batches);
        let gathering = gathering_slots(model, &sharding, policy);
        let sharded = StepTraffic::of(&sharding, scheme.copies(), gathered, dtypes);
        let (parameters, padded) = (model.param_count() as u64, sharding.whole_len() as u64);
        let formula = Footprint::of(&setting, parameters);
        let in_flight = in_flight_slots(layout, &sharding, setting.accumulate, parallel.sync);
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
            exchanges: Exchanges::of(&sharded, &setting),
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

#[cfg(test)]
mod tests {
    use ddp_proto::ids::WorldSize;

    use super::*;
    use crate::config;

    /// A small GPT on 2 nodes of 4 ranks.
    fn estimate(more: &str) -> Estimate {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.yaml");
        let text = format!(
            "model: {{kind: gpt2, n_layer: 2, n_head: 4, n_embd: 64, block_size: 32}}\ndata: {{train: absent.txt}}\n{more}"
        );
        std::fs::write(&path, text).unwrap();
        let config = config::load_without_data(&path, &[]).unwrap().config;
        let env = WorkerEnv {
            world_size: WorldSize(8),
            local_world_size: 4,
            node_count: 2,
            ..WorkerEnv::single()
        };
        Estimate::of(&config, &env).unwrap()
    }

    #[test]
    fn a_ranks_part_of_all_exchanges_is_its_traffic() {
        for strategy in ["ddp", "zero1", "zero2", "zero3"] {
            for group in ["", ", shard_group: 2", ", shard_group: node"] {
                let more = format!(
                    "train: {{grad_accumulation: 3, precision: bf16}}\nparallel: {{strategy: {strategy}{group}}}"
                );
                if strategy == "ddp" && !group.is_empty() {
                    continue;
                }
                let Estimate {
                    exchanges, traffic, ..
                } = estimate(&more);
                let shards = exchanges.shard_ranks;
                let part = |exchange: Exchange| match exchange.among {
                    Among::Shards => exchange.bytes_a_rank(shards),
                    Among::Copies => exchange.bytes_a_rank(8 / shards),
                };
                let all: u64 = exchanges.all().into_iter().map(part).sum();
                assert!(all > 0, "{more}");
                assert_eq!(all, traffic.total(), "{more}");
                assert_eq!(part(exchanges.params), traffic.params, "{more}");
            }
        }
    }
}
