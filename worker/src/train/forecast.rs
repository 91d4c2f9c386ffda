//! What a configuration would cost on machines that need not be here: every strategy beside the others, which one to
//! take, and how the step grows with the ranks.

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::WorldSize;

use super::TrainError;
use super::outlook::Outlook;
use super::remedy::{Remedy, remedies};
use super::setup::network;
use crate::config::{Accumulate, OptimizerOffload, Strategy, Sync, TrainConfig};
use crate::data::Vocabulary;
use crate::parallel::Dtypes;
use crate::plan::{Among, Cluster, GlobalBatch, StepBound, Work};

/// Each saves memory that the one before holds. Of those that send as much the first is preferred.
const STRATEGIES: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// The machines of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machines {
    /// Nodes, ranks, wires.
    pub cluster: Cluster,
    /// Bytes of a device that training may take; none if that is not known.
    pub memory: Option<u64>,
    /// Floating-point operations a second of a device; none if that is not known.
    pub flops: Option<f64>,
    /// Devices with memory of their own: what is offloaded to the host is not in it.
    pub has_own_memory: bool,
}

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
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

/// A strategy on a number of ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// What is sharded.
    pub strategy: Strategy,
    /// On how many ranks, and where.
    pub cluster: Cluster,
    /// What a rank holds and moves.
    pub outlook: Outlook,
    /// Bytes in the device's memory.
    pub held: u64,
    /// Whether the device has room for that, if its memory is known.
    pub fits: Option<bool>,
    /// The least time of arithmetic in a step, in seconds, if the device's rate is known.
    pub compute: Option<f64>,
    /// The least time of communication in a step, in seconds, if the rates of the wires are known.
    pub communication: Option<f64>,
    /// The least time of a step, if both are known.
    pub bound: Option<StepBound>,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Advice {
    /// This strategy fits, and none that fits sends less.
    Take(Strategy, &'static str),
    /// None fits as the configuration stands; with one of these changes `zero3` does. Empty if not even all of them help.
    Change(Vec<Remedy>),
}

impl Forecast {
    /// Of a configuration on machines. Nothing is allocated.
    pub fn of(config: &TrainConfig, machines: &Machines) -> Result<Self, TrainError> {
        let Machines { cluster, .. } = *machines;
        let with = |strategy| candidate(&under(config, strategy), machines, cluster);
        let mut candidates = Vec::with_capacity(STRATEGIES.len());
        for strategy in STRATEGIES {
            let found = with(strategy)?;
            // On one rank, or in groups of one, nothing can be sharded.
            if found.outlook.setting.strategy == strategy {
                candidates.push(found);
            }
        }
        let micro_batches = config.train.grad_accumulation;
        let advice = match machines.memory {
            None => None,
            Some(_) => Some(match choice(&candidates, config) {
                Some((strategy, why)) => Advice::Take(strategy, why),
                None => Advice::Change(remedies(&under(config, Strategy::Zero3), machines)?),
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
        let parameters = first.outlook.parameters;
        Ok(Self {
            model: network(config, Dtypes::of(config))?.name,
            parameters,
            batch: GlobalBatch {
                ranks: cluster.ranks(),
                accumulation: micro_batches as u64,
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

pub(super) fn candidate(
    config: &TrainConfig,
    machines: &Machines,
    cluster: Cluster,
) -> Result<Candidate, TrainError> {
    let env = WorkerEnv {
        world_size: WorldSize(cluster.ranks() as u32),
        local_world_size: cluster.ranks_a_node as u32,
        node_count: cluster.nodes as u32,
        ..WorkerEnv::single()
    };
    let outlook = Outlook::of(config, &env)?;
    let held = held(config, &outlook, machines);
    let exchanges = &outlook.exchanges;
    let communication = cluster.least_seconds(&exchanges.all(), exchanges.shard_ranks);
    let tokens = config.train.grad_accumulation * config.train.micro_batch * config.model.block_size;
    let work = work(config)?;
    let compute = machines
        .flops
        .map(|rate| tokens as f64 * work.total() as f64 / rate);
    let bound = compute
        .zip(communication)
        .map(|(compute, communication)| StepBound {
            compute,
            communication,
            overlaps: config.parallel.overlap && config.parallel.sync != Sync::Naive,
        });
    Ok(Candidate {
        strategy: config.parallel.strategy,
        cluster,
        outlook,
        held,
        fits: machines.memory.map(|memory| held <= memory),
        compute,
        communication,
        bound,
    })
}

/// Arithmetic of a token.
fn work(config: &TrainConfig) -> Result<Work, TrainError> {
    let vocabulary = match config.model.vocab_size {
        Some(size) => size,
        None => Vocabulary::of(&config.data.tokenizer)?.size,
    };
    Ok(Work::of(&config.model, vocabulary as u64, config.train.recompute))
}

/// Bytes in the memory of the device that a rank trains on.
fn held(config: &TrainConfig, outlook: &Outlook, machines: &Machines) -> u64 {
    let held = outlook.held();
    let elsewhere = match config.train.offload.optimizer {
        OptimizerOffload::File => held.optimizer,
        OptimizerOffload::Host if machines.has_own_memory => held.optimizer,
        OptimizerOffload::Host | OptimizerOffload::None => 0,
    };
    held.total() - elsewhere + outlook.buffers.gathered + outlook.activations
}

/// Of the strategies that fit the one that sends least; of those that send as much the first.
fn choice(candidates: &[Candidate], config: &TrainConfig) -> Option<(Strategy, &'static str)> {
    let repeats = config.train.grad_accumulation > 1 && config.parallel.accumulate == Accumulate::Sharded;
    let fits = |strategy| {
        let found = candidates.iter().find(|candidate| candidate.strategy == strategy);
        found.is_some_and(|candidate| candidate.fits == Some(true))
    };
    let reason = |strategy| match strategy {
        Strategy::Ddp => Some("everything fits on every rank, and nothing sends less"),
        Strategy::Zero1 if repeats && fits(Strategy::Ddp) => {
            Some("`ddp` fits too, but sends more; with sharded gradients every micro-batch would reduce them")
        }
        // With one reduction a step `zero2` sends as much and holds less.
        Strategy::Zero1 => repeats.then_some(
            "the optimizer has to be sharded; with sharded gradients every micro-batch would reduce them",
        ),
        Strategy::Zero2 if fits(Strategy::Ddp) => Some(
            "`ddp` fits too, but sends more: gradients are reduced in f32, and parameters gathered in bf16",
        ),
        Strategy::Zero2 if fits(Strategy::Zero1) => {
            Some("the optimizer has to be sharded; `zero2` sends as much as `zero1`, and holds less")
        }
        Strategy::Zero2 => Some("optimizer and gradients have to be sharded; the parameters fit"),
        Strategy::Zero3 => Some("parameters have to be sharded too"),
    };
    candidates
        .iter()
        .filter(|candidate| candidate.fits == Some(true))
        .filter_map(|candidate| Some((candidate, reason(candidate.strategy)?)))
        // Padding alone is no difference.
        .reduce(|best, next| {
            if sent(next.0) * 100 < sent(best.0) * 99 {
                next
            } else {
                best
            }
        })
        .map(|(candidate, why)| (candidate.strategy, why))
}

/// Bytes that a rank sends in a step, within its copy of the state and between the copies.
fn sent(candidate: &Candidate) -> u64 {
    let exchanges = &candidate.outlook.exchanges;
    let ranks = |among| match among {
        Among::Shards => exchanges.shard_ranks,
        Among::Copies => candidate.cluster.ranks() / exchanges.shard_ranks,
    };
    let all = exchanges.all();
    all.iter()
        .map(|exchange| exchange.bytes_a_rank(ranks(exchange.among)))
        .sum()
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
        match candidate(config, machines, machines.cluster.of_ranks(ranks)) {
            // So many ranks are no whole number of groups.
            Err(TrainError::Mesh(_)) => {}
            other => found.extend(Some(other?).filter(|point| point.fits != Some(false))),
        }
    }
    Ok(found)
}

/// `from`, and twice as many again and again.
pub(super) fn doublings(from: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(from), |n| n.checked_mul(2))
}

#[cfg(test)]
mod tests {
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
        match Forecast::of(config, &machines(memory)).unwrap().advice {
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
        let reason = |gb| match Forecast::of(&config(&[]), &machines(gb * GB)).unwrap().advice {
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
        let forecast = Forecast::of(&grouped, &machines(180 * GB)).unwrap();
        assert_eq!(forecast.candidates[1].outlook.exchanges.shard_ranks, 4);
    }

    #[test]
    fn on_one_rank_there_is_nothing_to_choose() {
        let mut alone = machines(180 * GB);
        alone.cluster.ranks_a_node = 1;
        let forecast = Forecast::of(&config(&[]), &alone).unwrap();
        assert_eq!(forecast.candidates.len(), 1);
        assert_eq!(forecast.candidates[0].communication, Some(0.0));
        assert_eq!(forecast.scaling.len(), 1);
    }

    #[test]
    fn each_remedy_helps() {
        let size = "train.micro_batch=8";
        for (memory, number) in [(38, 2), (30, 1), (15, 1)] {
            let Some(Advice::Change(remedies)) = Forecast::of(&config(&[size]), &machines(memory * GB))
                .unwrap()
                .advice
            else {
                panic!("fits into {memory} GB");
            };
            assert!(remedies.len() >= number, "{memory} GB: {remedies:?}");
            for Remedy { change, held } in remedies {
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
                let changed = Forecast::of(&config(&overrides), &machines).unwrap();
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
        let forecast = Forecast::of(&config(&[]), &many).unwrap();
        let ranks: Vec<u64> = forecast
            .scaling
            .iter()
            .map(|point| point.cluster.ranks())
            .collect();
        assert_eq!(ranks, [2, 4, 8, 16, 24], "it does not fit on one");
        let steps = forecast
            .scaling
            .iter()
            .map(|point| point.bound.unwrap().seconds());
        assert!(steps.is_sorted());
    }
}
