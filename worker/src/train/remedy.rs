//! What to change where no strategy fits into the memory of a device.

use super::TrainError;
use super::forecast::{Machines, candidate, doublings};
use crate::config::{OptimizerOffload, Precision, Recompute, ReduceDtype, TrainConfig};
use crate::plan::Cluster;

/// More nodes are no answer.
const MAX_NODES: u64 = 1 << 10;

/// A change with which a configuration fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remedy {
    /// Keys and values of the YAML, or a number of nodes.
    pub change: String,
    /// Bytes that a device then holds.
    pub held: u64,
}

/// A configuration that differs from the one that does not fit.
struct Change {
    words: String,
    config: TrainConfig,
    cluster: Cluster,
}

/// For each kind of change the smallest one with which `config` fits; if there is none, what to do together. Empty if that
/// does not help either.
pub(super) fn remedies(config: &TrainConfig, machines: &Machines) -> Result<Vec<Remedy>, TrainError> {
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

fn first_fit(changes: Vec<Change>, machines: &Machines) -> Result<Option<Remedy>, TrainError> {
    for Change {
        words,
        config,
        cluster,
    } in changes
    {
        match candidate(&config, machines, cluster) {
            Ok(candidate) if candidate.fits == Some(true) => {
                return Ok(Some(Remedy {
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
