//! What a configuration would cost on machines that need not be here: every strategy beside the others, which one to
//! take, and how the step grows with the ranks.

use super::advice::{Advice, adjustments, choice};
use super::candidate::{Candidate, Machines, doublings, work};
use crate::config::{Strategy, Sync, TrainConfig};
use crate::parallel::Dtypes;
use crate::plan::{Cluster, GlobalBatch, Work};
use crate::train::TrainError;
use crate::train::strategy::network;

/// Each saves memory that the one before holds. Of those that send as much the first is preferred.
const STRATEGIES: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// What every strategy would cost, and which one to take.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Name of the model.
    pub model: String,
    /// Parameters, a tied one counted once.
    pub parameters: u64,
    /// Samples of a step.
    pub batch: GlobalBatch,
    /// Arithmetic of a token.
    pub work: Work,
    /// All strategies that differ on so many ranks.
    pub candidates: Vec<Candidate>,
    /// Which one to take, if the memory is known.
    pub advice: Option<Advice>,
    /// The advised strategy, else that of the configuration, on fewer ranks, up to all of them, where it fits.
    pub scaling: Vec<Candidate>,
}

impl Comparison {
    /// Of a configuration on machines. Nothing is allocated.
    pub fn of(config: &TrainConfig, machines: &Machines) -> Result<Self, TrainError> {
        let Machines { cluster, .. } = *machines;
        let with = |strategy| Candidate::of(&under(config, strategy), machines, cluster);
        let mut candidates = Vec::with_capacity(STRATEGIES.len());
        for strategy in STRATEGIES {
            let found = with(strategy)?;
            // On one rank, or in groups of one, nothing can be sharded.
            if found.estimate.strategy == strategy {
                candidates.push(found);
            }
        }
        let advice = match machines.memory {
            None => None,
            Some(_) => Some(match choice(&candidates, config) {
                Some((strategy, why)) => Advice::Take(strategy, why),
                None => Advice::Change(adjustments(&under(config, Strategy::Zero3), machines)?),
            }),
        };
        let scaled = match advice {
            Some(Advice::Take(strategy, _)) => strategy,
            Some(Advice::Change(_)) => Strategy::Zero3,
            None => config.parallel.strategy,
        };
        let [first, ..] = candidates.as_slice() else {
            unreachable!("`ddp` is possible everywhere");
        };
        let parameters = first.estimate.parameters;
        Ok(Self {
            model: network(config, Dtypes::of(config))?.name,
            parameters,
            batch: GlobalBatch {
                ranks: cluster.ranks(),
                accumulation: config.train.grad_accumulation as u64,
                micro_batch: config.train.micro_batch as u64,
                block_size: config.model.block_size as u64,
            },
            work: work(config)?,
            scaling: scaling(&under(config, scaled), machines)?,
            candidates,
            advice,
        })
    }
}

/// The configuration with another strategy.
fn under(config: &TrainConfig, strategy: Strategy) -> TrainConfig {
    let mut config = config.clone();
    config.parallel.strategy = strategy;
    if strategy != Strategy::Ddp {
        config.parallel.sync = Sync::Bucketed;
    }
    config
}

/// The candidate on 1, 2, 4, … ranks of a node, then 1, 2, 4, … whole nodes, and on all of them, as far as it fits.
fn scaling(config: &TrainConfig, machines: &Machines) -> Result<Vec<Candidate>, TrainError> {
    let Cluster {
        nodes, ranks_a_node, ..
    } = machines.cluster;
    let within = doublings(1).take_while(|ranks| *ranks < ranks_a_node);
    let across = doublings(1).take_while(|n| *n < nodes);
    let sizes = within
        .chain(across.map(|n| n * ranks_a_node))
        .chain([machines.cluster.ranks()]);
    let mut found = Vec::new();
    for ranks in sizes {
        match Candidate::of(config, machines, machines.cluster.of_ranks(ranks)) {
            // So many ranks are no whole number of groups.
            Err(TrainError::Mesh(_)) => {}
            other => found.extend(Some(other?).filter(|point| point.fits != Some(false))),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::advice::Adjustment;
    use super::*;
    use crate::config;

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
            Some(Advice::Take(strategy, _)) => Some(strategy),
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
    fn the_reason_does_not_deny_what_fits_as_well() {
        let reason = |gb| match Comparison::of(&config(&[]), &machines(gb * GB)).unwrap().advice {
            Some(Advice::Take(Strategy::Zero2, reason)) => reason,
            other => panic!("{other:?}"),
        };
        let less =
            "`ddp` fits too, but sends more: gradients are reduced in f32, and parameters gathered in bf16";
        assert_eq!(reason(180), less);
        let smaller = "the optimizer has to be sharded; `zero2` sends as much as `zero1`, and holds less";
        assert_eq!(reason(60), smaller);
        let only = "optimizer and gradients have to be sharded; the parameters fit";
        assert_eq!(reason(40), only);
    }

    #[test]
    fn a_shard_group_needs_the_ranks_of_the_machines_only() {
        let grouped = config(&["parallel.strategy=zero2", "parallel.shard_group=4"]);
        let comparison = Comparison::of(&grouped, &machines(180 * GB)).unwrap();
        assert_eq!(comparison.candidates[1].estimate.shard_ranks, 4);
    }

    #[test]
    fn on_one_rank_there_is_nothing_to_choose() {
        let mut alone = machines(180 * GB);
        alone.cluster.ranks_a_node = 1;
        let comparison = Comparison::of(&config(&[]), &alone).unwrap();
        assert_eq!(comparison.candidates.len(), 1);
        assert_eq!(comparison.candidates[0].communication, Some(0.0));
        assert_eq!(comparison.scaling.len(), 1);
    }

    #[test]
    fn each_adjustment_helps() {
        let size = "train.micro_batch=8";
        for (memory, number) in [(38, 2), (30, 1), (15, 1)] {
            let Some(Advice::Change(adjustments)) = Comparison::of(&config(&[size]), &machines(memory * GB))
                .unwrap()
                .advice
            else {
                panic!("fits into {memory} GB");
            };
            assert!(adjustments.len() >= number, "{memory} GB: {adjustments:?}");
            for Adjustment { change, held } in adjustments {
                assert!(held <= memory * GB);
                let (mut overrides, mut nodes) = (vec![size.to_owned()], 1);
                for part in change.split(", ").flat_map(|part| part.split(" with ")) {
                    match part.split_once(" nodes") {
                        Some((number, _)) => nodes = number.parse().unwrap(),
                        None => overrides.push(part.replace(": ", "=")),
                    }
                }
                let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
                let mut machines = machines(memory * GB);
                machines.cluster.nodes = nodes;
                machines.cluster.network = Some(400e9);
                let changed = Comparison::of(&config(&overrides), &machines).unwrap();
                let zero3 = changed.candidates.last().unwrap();
                assert_eq!((zero3.held, zero3.fits), (held, Some(true)), "{change}");
            }
        }
    }

    #[test]
    fn steps_grow_with_the_ranks_of_a_node_and_then_with_nodes() {
        let mut many = machines(80 * GB);
        many.cluster.nodes = 3;
        many.cluster.network = Some(50e9);
        let comparison = Comparison::of(&config(&[]), &many).unwrap();
        let ranks: Vec<u64> = comparison
            .scaling
            .iter()
            .map(|point| point.cluster.ranks())
            .collect();
        assert_eq!(ranks, [2, 4, 8, 16, 24], "it does not fit on one");
        let steps = comparison.scaling.iter().map(|point| point.seconds().unwrap());
        assert!(steps.is_sorted());
    }
}
