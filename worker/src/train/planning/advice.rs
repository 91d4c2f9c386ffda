//! Which strategy to take, and what to change where none fits into the memory of a device.

use super::candidate::{Candidate, Machines, candidate, doublings};
use crate::config::{Accumulate, OptimizerOffload, Precision, Recompute, ReduceDtype, Strategy, TrainConfig};
use crate::plan::Cluster;
use crate::train::TrainError;

/// More nodes are no answer.
const MAX_NODES: u64 = 1 << 10;

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
pub(super) fn choice(candidates: &[Candidate], config: &TrainConfig) -> Option<(Strategy, &'static str)> {
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
            if next.0.sent() * 100 < best.0.sent() * 99 {
                next
            } else {
                best
            }
        })
        .map(|(candidate, why)| (candidate.strategy, why))
}

/// A configuration that differs from the one that does not fit.
struct Change {
    words: String,
    config: TrainConfig,
    cluster: Cluster,
}

/// For each kind of change the smallest one with which `config` fits; if there is none, what to do together. Empty if that
/// does not help either.
pub(super) fn adjustments(config: &TrainConfig, machines: &Machines) -> Result<Vec<Adjustment>, TrainError> {
    let cluster = machines.cluster;
    let mut found = Vec::new();
    for kind in [
        recomputing(config, cluster),
        smaller_batches(config, cluster),
        offloading(config, machines),
        narrower_gradients(config, cluster),
        more_nodes(config, cluster),
    ] {
        found.extend(first_fit(kind, machines)?);
    }
    if found.is_empty() {
        found.extend(first_fit(together(config, machines), machines)?);
    }
    Ok(found)
}

fn first_fit(changes: Vec<Change>, machines: &Machines) -> Result<Option<Adjustment>, TrainError> {
    for Change {
        words,
        config,
        cluster,
    } in changes
    {
        match candidate(&config, machines, cluster) {
            Ok(candidate) if candidate.fits == Some(true) => {
                return Ok(Some(Adjustment {
                    change: words,
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

fn recomputing(config: &TrainConfig, cluster: Cluster) -> Vec<Change> {
    let further: &[_] = match config.train.recompute {
        Recompute::None => &[(Recompute::Selective, "selective"), (Recompute::Full, "full")],
        Recompute::Selective => &[(Recompute::Full, "full")],
        Recompute::Full => &[],
    };
    let change = |(what, name): &(Recompute, &str)| {
        let mut config = config.clone();
        config.train.recompute = *what;
        Change {
            words: format!("train.recompute: {name}"),
            config,
            cluster,
        }
    };
    further.iter().map(change).collect()
}

/// The same global batch in smaller passes.
fn smaller_batches(config: &TrainConfig, cluster: Cluster) -> Vec<Change> {
    let (batch, accumulation) = (config.train.micro_batch, config.train.grad_accumulation);
    let parts = doublings(2)
        .map(|parts| parts as usize)
        .take_while(|parts| *parts <= batch);
    let whole = parts.filter(|parts| batch.is_multiple_of(*parts));
    whole
        .map(|parts| {
            let mut config = config.clone();
            config.train.micro_batch = batch / parts;
            config.train.grad_accumulation = accumulation * parts;
            Change {
                words: batch_words(&config),
                config,
                cluster,
            }
        })
        .collect()
}

fn batch_words(config: &TrainConfig) -> String {
    let train = &config.train;
    format!(
        "train.micro_batch: {} with train.grad_accumulation: {}",
        train.micro_batch, train.grad_accumulation
    )
}

fn offloading(config: &TrainConfig, machines: &Machines) -> Vec<Change> {
    let mut config = config.clone();
    if !machines.has_own_memory || config.train.offload.optimizer != OptimizerOffload::None {
        return Vec::new();
    }
    config.train.offload.optimizer = OptimizerOffload::Host;
    vec![Change {
        words: "train.offload.optimizer: host".into(),
        config,
        cluster: machines.cluster,
    }]
}

fn narrower_gradients(config: &TrainConfig, cluster: Cluster) -> Vec<Change> {
    if config.train.precision != Precision::Bf16 || config.parallel.reduce_dtype == ReduceDtype::Bf16 {
        return Vec::new();
    }
    let mut config = config.clone();
    config.parallel.reduce_dtype = ReduceDtype::Bf16;
    vec![Change {
        words: "parallel.reduce_dtype: bf16".into(),
        config,
        cluster,
    }]
}

fn more_nodes(config: &TrainConfig, cluster: Cluster) -> Vec<Change> {
    let numbers = doublings(cluster.nodes).skip(1).take_while(|n| *n <= MAX_NODES);
    let change = |nodes| {
        let cluster = Cluster { nodes, ..cluster };
        Change {
            words: format!("{nodes} nodes: {} ranks", cluster.ranks()),
            config: config.clone(),
            cluster,
        }
    };
    numbers.map(change).collect()
}

/// All that needs no other machines, then that on more of them.
fn together(config: &TrainConfig, machines: &Machines) -> Vec<Change> {
    let mut config = config.clone();
    let mut words = Vec::new();
    config.train.recompute = Recompute::Full;
    words.push("train.recompute: full".to_owned());
    if config.train.micro_batch > 1 {
        config.train.grad_accumulation *= config.train.micro_batch;
        config.train.micro_batch = 1;
        words.push(batch_words(&config));
    }
    if let Some(offloaded) = offloading(&config, machines).pop() {
        config = offloaded.config;
        words.push(offloaded.words);
    }
    let words = words.join(", ");
    let here = Change {
        words: words.clone(),
        config: config.clone(),
        cluster: machines.cluster,
    };
    let elsewhere = more_nodes(&config, machines.cluster);
    let elsewhere = elsewhere.into_iter().map(|change| Change {
        words: format!("{words}, {}", change.words),
        ..change
    });
    std::iter::once(here).chain(elsewhere).collect()
}
