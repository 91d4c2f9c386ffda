//! Which strategy to take, and what to change where none fits into the memory of a device.

use super::candidate::{Candidate, Machines, doublings};
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
    let sent = |candidate: &Candidate| candidate.estimate.sent.total();
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
pub(super) fn adjustments(config: &TrainConfig, machines: &Machines) -> Result<Vec<Adjustment>, TrainError> {
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
        Recompute::None => &[(Recompute::Selective, "selective"), (Recompute::Full, "full")],
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
