//! The costs of a configuration on machines that need not exist: all strategies side by side, which one to take, and
//! settings with which the one that shards most fits if no strategy does.

use super::candidate::{Candidate, PlannedMesh, under};
use super::search::FoundLayout;
use super::step_times::Machines;
use crate::config::{OffloadTarget, Recompute, ReduceDtype, Strategy, TrainConfig};
use crate::costs::Work;
use crate::mesh::GRADIENTS;
use crate::model::ModelPart;
use crate::parallel::Dtypes;
use crate::train::TrainError;
use crate::train::strategy::{network, work};

/// In the order in which they are shown: each saves memory that the one before holds.
const STRATEGIES: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// Of strategies that send as much, the first one is taken: `zero2` sends as much as `zero1`, and holds less.
const PREFERENCE: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero2, Strategy::Zero1, Strategy::Zero3];

/// The costs of all strategies, and which one to take.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Name of the model.
    pub model: String,
    /// Arithmetic of a token.
    pub work: Work,
    /// All strategies that differ on these ranks; `ddp` is one.
    pub candidates: Vec<Candidate>,
    /// Which one to take, if the memory is known.
    pub advice: Option<Advice>,
}

impl Comparison {
    /// Of a configuration on machines. Nothing is allocated.
    pub fn of(config: &TrainConfig, machines: &Machines) -> Result<Self, TrainError> {
        let planned = PlannedMesh::of(&under(config, Strategy::Ddp), machines)?;
        let activations = planned.activations()?;
        let mut candidates = Vec::with_capacity(STRATEGIES.len());
        for strategy in STRATEGIES {
            let shared = planned.sharing(strategy, config.parallel.shard_group)?;
            let found = shared.candidate(&activations, u64::MAX)?;
            // On one rank, or in groups of one, nothing can be sharded.
            if found.estimate.strategy == strategy {
                candidates.push(found);
            }
        }
        let advice = match (machines.memory, choice(&candidates)) {
            (None, _) => None,
            (Some(_), Some(strategy)) => Some(Advice::Take(strategy)),
            (Some(_), None) => {
                let most_sharded = candidates[candidates.len() - 1].estimate.strategy;
                let found = adjustment(config, most_sharded, machines)?;
                Some(Advice::Change(found.map(Box::new)))
            }
        };
        Ok(Self {
            model: network(config, Dtypes::of(config), &ModelPart::WHOLE)?.name,
            work: work(config),
            candidates,
            advice,
        })
    }
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Advice {
    /// This strategy fits, and no strategy that fits sends less.
    Take(Strategy),
    /// No strategy fits as the configuration stands; the one that shards most fits with these settings, if with any.
    Change(Option<Box<FoundLayout>>),
}

/// Of the strategies that fit, the one that sends least.
fn choice(candidates: &[Candidate]) -> Option<Strategy> {
    let sent = |candidate: &Candidate| candidate.sent.state_along(&GRADIENTS);
    let fits = |candidate: &&Candidate| candidate.fits == Some(true);
    let in_order = PREFERENCE.map(|strategy| {
        candidates
            .iter()
            .find(|found| found.estimate.strategy == strategy)
    });
    // A difference of less than 1 % is padding.
    let is_less = |next, best| sent(next) * 100 < sent(best) * 99;
    let fitting = in_order.into_iter().flatten().filter(fits);
    let best = fitting.reduce(|best, next| if is_less(next, best) { next } else { best });
    best.map(|candidate| candidate.estimate.strategy)
}

/// The first combination with which a strategy fits. Recomputation costs less time than offloading, and what is offloaded
/// of the optimizer crosses once a step, parameters with every pass; a reduction in bf16 changes the numbers.
fn adjustment(
    config: &TrainConfig,
    strategy: Strategy,
    machines: &Machines,
) -> Result<Option<FoundLayout>, TrainError> {
    let reductions = match config.parallel.reduce_dtype {
        ReduceDtype::F32 if Dtypes::of(config).has_masters() => vec![ReduceDtype::F32, ReduceDtype::Bf16],
        given => vec![given],
    };
    for reduce_dtype in reductions {
        let (optimizer, parameters) = (config.train.offload.optimizer, config.train.offload.parameters);
        let away = if machines.has_own_memory {
            OffloadTarget::Host
        } else {
            OffloadTarget::File
        };
        for (optimizer, parameters) in [(optimizer, parameters), (away, parameters), (away, away)] {
            for recompute in [Recompute::Norms, Recompute::Selective, Recompute::Full] {
                // On one rank too.
                let is_apart = parameters != OffloadTarget::None;
                let mut changed = under(config, if is_apart { Strategy::Zero3 } else { strategy });
                changed.parallel.reduce_dtype = reduce_dtype;
                (changed.train.offload.optimizer, changed.train.offload.parameters) = (optimizer, parameters);
                changed.train.recompute = recompute;
                let candidate = Candidate::of(&changed, machines)?;
                if candidate.fits == Some(true) {
                    return Ok(Some(FoundLayout::new(candidate, config, &changed)));
                }
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::costs::Cluster;
    use crate::mesh::Axis;

    const GB: u64 = 1_000_000_000;

    /// Seven billion parameters in bf16.
    fn config(overrides: &[&str]) -> TrainConfig {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.yaml");
        let model =
            "{kind: gpt2, n_layer: 32, n_head: 32, n_embd: 4096, block_size: 2048, vocab_size: 50304}";
        let text = format!(
            "model: {model}\ndata: {{train: absent.txt}}\ntrain: {{precision: bf16, micro_batch: 1}}"
        );
        std::fs::write(&path, text).unwrap();
        let overrides: Vec<String> = overrides.iter().map(|&words| words.to_owned()).collect();
        config::load_without_data(&path, &overrides).unwrap().config
    }

    fn machines(memory: u64) -> Machines {
        Machines {
            cluster: Cluster {
                nodes: 1,
                ranks_a_node: 8,
                link: Some(450e9),
                network: None,
            },
            memory: Some(memory),
            flops: Some(989e12),
            has_own_memory: true,
        }
    }

    fn taken(config: &TrainConfig, memory: u64) -> Option<Strategy> {
        match Comparison::of(config, &machines(memory)).unwrap().advice {
            Some(Advice::Take(strategy)) => Some(strategy),
            _ => None,
        }
    }

    #[test]
    fn what_does_not_fit_is_sharded_no_further_than_it_must() {
        // All strategies send as much.
        let once = config(&["parallel.reduce_dtype=bf16"]);
        let takes = |gb| taken(&once, gb * GB);
        // 16, 2 + 14/8 and 16/8 bytes a parameter, and some gigabytes of activations and buffers.
        assert_eq!(takes(180), Some(Strategy::Ddp));
        assert_eq!(takes(40), Some(Strategy::Zero2));
        assert_eq!(takes(26), Some(Strategy::Zero3));
        assert_eq!(takes(12), None);
        let often = config(&["train.grad_accumulation=4"]);
        assert_eq!(
            taken(&often, 70 * GB),
            Some(Strategy::Zero1),
            "sends 2, not k + 1"
        );
        assert_eq!(taken(&often, 40 * GB), Some(Strategy::Zero2));
        let whole = config(&[
            "train.grad_accumulation=4",
            "parallel.strategy=zero2",
            "parallel.accumulate=full",
        ]);
        assert_eq!(taken(&whole, 70 * GB), Some(Strategy::Zero2), "sends 2 as well");
    }

    /// With gradients reduced in f32 `ddp` sends 2 · 4 bytes an element, `zero1` and `zero2` 4 + 2 with one micro-batch.
    #[test]
    fn what_sends_least_is_taken_though_ddp_fits() {
        let taken = |overrides: &[&str]| taken(&config(overrides), 300 * GB);
        let often = "train.grad_accumulation=4";
        assert_eq!(taken(&[]), Some(Strategy::Zero2));
        assert_eq!(taken(&[often]), Some(Strategy::Zero1));
        assert_eq!(taken(&[often, "parallel.reduce_dtype=bf16"]), Some(Strategy::Ddp));
        assert_eq!(taken(&["train.precision=f32"]), Some(Strategy::Ddp));
    }

    #[test]
    fn a_shard_group_needs_the_ranks_of_the_machines_only() {
        let grouped = config(&["parallel.strategy=zero2", "parallel.shard_group=4"]);
        let comparison = Comparison::of(&grouped, &machines(180 * GB)).unwrap();
        assert_eq!(comparison.candidates[1].mesh.size(&[Axis::Shard]), 4);
    }

    #[test]
    fn on_one_rank_there_is_nothing_to_choose() {
        let mut alone = machines(180 * GB);
        alone.cluster.ranks_a_node = 1;
        let comparison = Comparison::of(&config(&[]), &alone).unwrap();
        assert_eq!(comparison.candidates.len(), 1);
        assert_eq!(comparison.candidates[0].communication, Some(0.0));
    }

    #[test]
    fn an_adjustment_recomputes_and_then_offloads_the_optimizer_and_then_all_state() {
        let size = "train.micro_batch=4";
        for (memory, offloads) in [(26, 0), (20, 1), (9, 2)] {
            let comparison = Comparison::of(&config(&[size]), &machines(memory * GB)).unwrap();
            let Some(Advice::Change(Some(found))) = comparison.advice else {
                panic!("{memory} GB: {:?}", comparison.advice);
            };
            let FoundLayout { candidate, settings } = *found;
            let is_offload = |setting: &&String| setting.starts_with("train.offload.");
            assert_eq!(
                settings.iter().filter(is_offload).count(),
                offloads,
                "{settings:?}"
            );
            let overrides = settings.iter().map(String::as_str).chain([size]);
            let changed = config(&overrides.collect::<Vec<_>>());
            let changed = Comparison::of(&changed, &machines(memory * GB)).unwrap();
            let zero3 = changed.candidates.last().unwrap();
            assert_eq!(
                (zero3.held, zero3.fits),
                (candidate.held, Some(true)),
                "{settings:?}"
            );
        }
        let mut alone = machines(20 * GB);
        alone.cluster.ranks_a_node = 1;
        let comparison = Comparison::of(&config(&[size]), &alone).unwrap();
        let Some(Advice::Change(Some(found))) = comparison.advice else {
            panic!("{:?}", comparison.advice);
        };
        assert!(
            found.settings.contains(&"parallel.strategy=zero3".to_owned()),
            "{:?}",
            found.settings
        );
        let comparison = Comparison::of(&config(&[size]), &machines(2 * GB)).unwrap();
        assert_eq!(comparison.advice, Some(Advice::Change(None)));
    }

    #[test]
    fn what_does_not_overlap_takes_the_sum() {
        for (overrides, overlaps) in [(&["parallel.overlap=false"][..], false), (&[], true)] {
            let comparison = Comparison::of(&config(overrides), &machines(80 * GB)).unwrap();
            for candidate in &comparison.candidates {
                let (compute, communication) = (
                    candidate.times.busy.compute.unwrap(),
                    candidate.communication.unwrap(),
                );
                let expected = if overlaps {
                    compute.max(communication)
                } else {
                    compute + communication
                };
                let found = candidate.seconds.unwrap();
                assert!((found / expected - 1.0).abs() < 1e-9, "{found}, not {expected}");
                assert!(communication > 0.0);
            }
        }
    }
}
