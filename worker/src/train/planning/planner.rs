//! What a configuration would cost on machines that need not be here: every strategy beside the others, which one to
//! take, how the step grows with the ranks, and what to change where nothing fits into the memory of a device.

use super::candidate::{Candidate, Machines, under};
use crate::config::{Accumulate, OptimizerOffload, Precision, Recompute, ReduceDtype, Strategy, TrainConfig};
use crate::mesh::DATA;
use crate::model::ModelPart;
use crate::parallel::Dtypes;
use crate::plan::{Cluster, GlobalBatch, Work};
use crate::train::TrainError;
use crate::train::strategy::{layer_work, network};

/// Each saves memory that the one before holds. Of those that send as much the first is preferred.
const STRATEGIES: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// More nodes are no answer.
const MAX_NODES: u64 = 1 << 10;

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
        let (parameters, batch) = (first.estimate.parameters, first.batch);
        Ok(Self {
            model: network(config, Dtypes::of(config), &ModelPart::WHOLE)?.name,
            parameters,
            batch,
            work: work(config)?,
            scaling: scaling(&under(config, scaled), machines)?,
            candidates,
            advice,
        })
    }
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

/// Arithmetic of a token.
fn work(config: &TrainConfig) -> Result<Work, TrainError> {
    let [layer, head] = layer_work(config)?;
    let layers = config.model.n_layer as u64;
    Ok(Work {
        model: layers * layer.model + head.model,
        repeated: layers * layer.repeated,
    })
}

/// `from`, and twice as many again and again.
fn doublings(from: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(from), |n| n.checked_mul(2))
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Advice {
    /// This strategy fits, and none that fits sends less.
    Take(Strategy, &'static str),
    /// None fits as the configuration stands; with one of these changes `zero3` does. Empty if not even all of them help.
    Change(Vec<Adjustment>),
}

/// A change with which a configuration fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adjustment {
    /// Keys and values of the YAML, or a number of nodes.
    pub change: String,
    /// Bytes that a device then holds.
    pub held: u64,
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
    let sent = |candidate: &Candidate| candidate.sent.along(&DATA);
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

/// A configuration that may fit.
#[derive(Clone)]
struct Change {
    /// What differs from the one that does not fit.
    words: Vec<String>,
    config: TrainConfig,
    cluster: Cluster,
}

impl Change {
    /// One more.
    fn with(&self, words: String, change: impl FnOnce(&mut Self)) -> Self {
        let mut next = self.clone();
        next.words.push(words);
        change(&mut next);
        next
    }
}

/// For each kind of change the smallest one with which `config` fits; if there is none, what to do together. Empty if that
/// does not help either.
fn adjustments(config: &TrainConfig, machines: &Machines) -> Result<Vec<Adjustment>, TrainError> {
    let now = Change {
        words: Vec::new(),
        config: config.clone(),
        cluster: machines.cluster,
    };
    let mut found = Vec::new();
    for kind in [
        recomputing(&now),
        smaller_batches(&now),
        offloading(&now, machines),
        narrower_gradients(&now),
        more_nodes(&now),
    ] {
        found.extend(first_fit(kind, machines)?);
    }
    if found.is_empty() {
        found.extend(first_fit(together(&now, machines), machines)?);
    }
    Ok(found)
}

fn first_fit(changes: Vec<Change>, machines: &Machines) -> Result<Option<Adjustment>, TrainError> {
    for change in changes {
        match Candidate::of(&change.config, machines, change.cluster) {
            Ok(candidate) if candidate.fits == Some(true) => {
                return Ok(Some(Adjustment {
                    change: change.words.join(", "),
                    held: candidate.held,
                }));
            }
            // Another number of ranks may be no whole number of groups.
            Ok(_) | Err(TrainError::Mesh(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn recomputing(now: &Change) -> Vec<Change> {
    let further: &[_] = match now.config.train.recompute {
        Recompute::Nothing => &[
            (Recompute::Norms, "norms"),
            (Recompute::Selective, "selective"),
            (Recompute::Full, "full"),
        ],
        Recompute::Norms => &[(Recompute::Selective, "selective"), (Recompute::Full, "full")],
        Recompute::Selective => &[(Recompute::Full, "full")],
        Recompute::Full => &[],
    };
    let change = |(what, name): &(Recompute, &str)| {
        now.with(format!("train.recompute: {name}"), |next| {
            next.config.train.recompute = *what;
        })
    };
    further.iter().map(change).collect()
}

/// The same global batch in smaller passes.
fn smaller_batches(now: &Change) -> Vec<Change> {
    let batch = now.config.train.micro_batch;
    let parts = doublings(2).map(|parts| parts as usize);
    parts
        .take_while(|parts| *parts <= batch)
        .filter(|parts| batch.is_multiple_of(*parts))
        .map(|parts| smaller_batch(now, parts))
        .collect()
}

fn smaller_batch(now: &Change, parts: usize) -> Change {
    let train = &now.config.train;
    let (batch, accumulation) = (train.micro_batch / parts, train.grad_accumulation * parts);
    let words = format!("train.micro_batch: {batch} with train.grad_accumulation: {accumulation}");
    now.with(words, |next| {
        next.config.train.micro_batch = batch;
        next.config.train.grad_accumulation = accumulation;
    })
}

fn offloading(now: &Change, machines: &Machines) -> Vec<Change> {
    if !machines.has_own_memory || now.config.train.offload.optimizer != OptimizerOffload::None {
        return Vec::new();
    }
    vec![now.with("train.offload.optimizer: host".into(), |next| {
        next.config.train.offload.optimizer = OptimizerOffload::Host;
    })]
}

fn narrower_gradients(now: &Change) -> Vec<Change> {
    let config = &now.config;
    if config.train.precision != Precision::Bf16 || config.parallel.reduce_dtype == ReduceDtype::Bf16 {
        return Vec::new();
    }
    vec![now.with("parallel.reduce_dtype: bf16".into(), |next| {
        next.config.parallel.reduce_dtype = ReduceDtype::Bf16;
    })]
}

fn more_nodes(now: &Change) -> Vec<Change> {
    let numbers = doublings(now.cluster.nodes).skip(1);
    let change = |nodes: u64| {
        let ranks = nodes * now.cluster.ranks_a_node;
        now.with(format!("{nodes} nodes: {ranks} ranks"), |next| {
            next.cluster.nodes = nodes;
        })
    };
    numbers.take_while(|n| *n <= MAX_NODES).map(change).collect()
}

/// All that needs no other machines, then that on more of them.
fn together(now: &Change, machines: &Machines) -> Vec<Change> {
    let mut all = now.with("train.recompute: full".to_owned(), |next| {
        next.config.train.recompute = Recompute::Full;
    });
    if now.config.train.micro_batch > 1 {
        all = smaller_batch(&all, now.config.train.micro_batch);
    }
    all = offloading(&all, machines).pop().unwrap_or(all);
    let elsewhere = more_nodes(&all);
    std::iter::once(all).chain(elsewhere).collect()
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

    #[test]
    fn what_does_not_overlap_takes_the_sum() {
        for (overrides, overlaps) in [(&["parallel.overlap=false"][..], false), (&[], true)] {
            let comparison = Comparison::of(&config(overrides), &machines(80 * GB)).unwrap();
            for candidate in &comparison.candidates {
                let (compute, communication) = (candidate.compute.unwrap(), candidate.communication.unwrap());
                let expected = if overlaps {
                    compute.max(communication)
                } else {
                    compute + communication
                };
                let found = candidate.seconds().unwrap();
                assert!((found / expected - 1.0).abs() < 1e-9, "{found}, not {expected}");
                assert!(communication > 0.0);
            }
        }
    }
}
