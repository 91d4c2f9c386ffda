//! The sharded strategies on other worlds than one node of ranks that compute at once: several copies of the state,
//! several nodes, many ranks, and a device that runs later; and what may lie elsewhere, or stay for longer.

use std::path::Path;
use std::sync::{Arc, Mutex};

use super::zero::{self, SHARDED};
use crate::train_support::deferred::DeferredDevice;
use crate::train_support::faulty::{Fault, FaultyDevice};
use crate::train_support::probed::{Moment, ProbedDevice};
use crate::train_support::{Job, assert_close, assert_same, assert_within};
use ddp_worker::config::{
    Accumulate, OffloadTarget, OptimizerGroup, OptimizerKind, Precision, Resume, ShardGroup, Strategy,
    TrainConfig,
};
use ddp_worker::device::Device;
use ddp_worker::mesh::MeshShape;
use ddp_worker::model;
use ddp_worker::parallel::{GradientLayout, LayoutConfig, Sharding};

fn job(strategy: Strategy, change: impl FnOnce(&mut TrainConfig)) -> Job {
    zero::job(strategy, |c| {
        c.train.steps = 8;
        c.train.grad_clip = Some(0.8);
        c.train.verify_every = 2;
        change(c);
    })
}

#[test]
fn eight_ranks_train_the_same_numbers_under_every_strategy() {
    let reference = job(Strategy::Ddp, |_| ()).train(8);
    for strategy in SHARDED {
        assert_same(
            &reference,
            &job(strategy, |_| ()).train(8),
            &format!("{strategy:?}"),
        );
    }
}

/// With parameter groups. Muon makes whole matrices orthogonal, of which ranks own parts.
#[test]
fn every_optimizer_trains_the_same_numbers_under_every_strategy() {
    for kind in [OptimizerKind::Lion, OptimizerKind::Sgd, OptimizerKind::Muon] {
        let run = |strategy, precision| {
            let job = job(strategy, |c| {
                c.train.steps = 3;
                c.train.precision = precision;
                c.train.optimizer.kind = kind;
                c.train.optimizer.groups = vec![OptimizerGroup {
                    params: "*.bias".to_owned(),
                    lr_scale: 0.5,
                    weight_decay: Some(0.2),
                }];
            });
            job.train(2)
        };
        let reference = run(Strategy::Ddp, Precision::F32);
        assert!(
            reference.metrics.last().unwrap().loss < reference.metrics[0].loss,
            "{kind:?}"
        );
        for strategy in SHARDED {
            assert_same(
                &reference,
                &run(strategy, Precision::F32),
                &format!("{kind:?}, {strategy:?}"),
            );
        }
        let (zero2, zero3) = (
            run(Strategy::Zero2, Precision::Bf16),
            run(Strategy::Zero3, Precision::Bf16),
        );
        assert_same(&zero2, &zero3, &format!("{kind:?} in bf16"));
    }
}

#[test]
fn several_copies_of_the_state_train_the_numbers_of_one() {
    for accumulation in [1, 2] {
        let run = |strategy, group| {
            let job = job(strategy, |c| {
                c.parallel.shard_group = group;
                c.train.grad_accumulation = accumulation;
                c.train.eval_every = 3;
                c.train.checkpoint_every = 3;
            });
            job.train(4)
        };
        for strategy in SHARDED {
            let one = run(strategy, None);
            let what = format!("{strategy:?}, accumulation {accumulation}");
            // One group of all ranks is plain sharding, bit by bit; copies are summed in another order.
            assert_same(&one, &run(strategy, Some(ShardGroup::Ranks(4))), &what);
            assert_same(&one, &run(strategy, Some(ShardGroup::Node)), &what);
            let copies = run(strategy, Some(ShardGroup::Ranks(2)));
            assert_close(&one, &copies, &what);
            // With a group of one rank, everything is whole.
            assert_close(&one, &run(strategy, Some(ShardGroup::Ranks(1))), &what);
        }
    }
}

/// Every second step verifies that the copies are the same.
#[test]
fn muon_updates_several_copies_as_one() {
    for strategy in SHARDED {
        let run = |group| {
            let job = job(strategy, |c| {
                c.train.steps = 3;
                c.train.optimizer.kind = OptimizerKind::Muon;
                c.parallel.shard_group = group;
            });
            job.train(4)
        };
        let (one, copies) = (run(None), run(Some(ShardGroup::Ranks(2))));
        assert_within(1e-3, &one, &copies, &format!("{strategy:?}"));
    }
}

/// Sums within a group are rounded on the wire before they are added over the copies. That the copies are the same bit
/// by bit is what every second step verifies.
#[test]
fn several_copies_in_bf16_stay_the_same_and_close_to_one() {
    let run = |strategy, group| {
        let job = job(strategy, |c| {
            c.train.precision = Precision::Bf16;
            c.train.grad_accumulation = 2;
            c.parallel.shard_group = group;
        });
        job.train(4)
    };
    for strategy in SHARDED {
        let one = run(strategy, None);
        let what = format!("{strategy:?}");
        assert_same(&one, &run(strategy, Some(ShardGroup::Ranks(4))), &what);
        assert_within(1e-2, &one, &run(strategy, Some(ShardGroup::Ranks(2))), &what);
    }
}

#[test]
fn a_bit_that_flips_in_one_copy_is_found_and_named() {
    let mut job = job(Strategy::Zero3, |c| {
        c.parallel.shard_group = Some(ShardGroup::Ranks(2));
        c.train.verify_every = 1;
    });
    job.device = Some(Box::new(|session| {
        let broken = session.env().rank.get() == 2;
        FaultyDevice::going_wrong(Fault::FlipsBit, if broken { 3 } else { u64::MAX })
    }));
    let outcomes = job.run(4);
    let words: Vec<String> = outcomes
        .iter()
        .map(|o| o.as_ref().unwrap_err().to_string())
        .collect();
    let found = words
        .iter()
        .any(|word| word.contains("of rank 2 differs from rank 0 after step 3"));
    assert!(found, "{words:#?}");
}

#[test]
fn several_nodes_train_the_numbers_of_one() {
    for (nodes, ranks) in [(2, 2), (2, 4)] {
        let run = |nodes, strategy, group| {
            let mut job = job(strategy, |c| c.parallel.shard_group = group);
            job.nodes = nodes;
            job.train(ranks)
        };
        let one = run(1, Strategy::Ddp, None);
        for strategy in SHARDED {
            let what = format!("{strategy:?}, {ranks} ranks on {nodes} nodes");
            assert_close(&one, &run(nodes, strategy, None), &what);
            let by_node = run(nodes, strategy, Some(ShardGroup::Node));
            assert_close(&one, &by_node, &format!("{what}, a copy a node"));
        }
    }
}

/// Every operation runs when somebody waits for it: what does not wait where it must reads yesterday's numbers, and
/// what waits for itself never ends.
#[test]
fn a_device_that_runs_later_trains_the_same_numbers() {
    for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3] {
        for (accumulation, group, precision) in [
            (1, None, Precision::F32),
            (2, None, Precision::F32),
            (2, Some(ShardGroup::Ranks(2)), Precision::F32),
            (1, None, Precision::Bf16),
            (2, None, Precision::Bf16),
            (1, Some(ShardGroup::Ranks(2)), Precision::Bf16),
            (2, Some(ShardGroup::Ranks(2)), Precision::Bf16),
        ] {
            if strategy == Strategy::Ddp && group.is_some() {
                continue;
            }
            let ranks = if group.is_some() { 4 } else { 3 };
            let mut job = job(strategy, |c| {
                c.train.steps = 4;
                c.train.precision = precision;
                c.train.eval_every = 2;
                c.train.grad_accumulation = accumulation;
                c.parallel.shard_group = group;
            });
            let at_once = job.train(ranks);
            job.config.run.overwrite = true;
            job.device = Some(Box::new(|_| Arc::new(DeferredDevice::new()) as Arc<dyn Device>));
            let what = format!("{strategy:?} {precision:?}, accumulation {accumulation}, {group:?}");
            assert_same(&at_once, &job.train(ranks), &what);
        }
    }
}

#[test]
fn small_groups_that_persist_are_gathered_once_a_step() {
    const MICRO_BATCHES: usize = 2;
    const RANKS: u32 = 2;
    let run = |strategy, persist_below| {
        let job = job(strategy, |c| {
            c.train.steps = 4;
            c.train.eval_every = 2;
            c.train.checkpoint_every = 3;
            c.train.grad_accumulation = MICRO_BATCHES;
            c.parallel.accumulate = Accumulate::Full;
            c.parallel.persist_below = persist_below;
        });
        (job.train(RANKS), job)
    };
    let (reference, job) = run(Strategy::Ddp, 0);
    let model = model::build(&job.config.model, 256).unwrap();
    let config = LayoutConfig::of(&job.config.parallel, RANKS as usize);
    let layout = GradientLayout::of_model(&model, &config).unwrap();
    let sharding = Sharding::of_groups(&layout, MeshShape::of_shards(RANKS as usize), 0);
    // The head has 128 elements, the positions 1,024, the tied weight 16,384, a block 49,984.
    for (persist_below, persistent) in [(129, 1), (2_000, 2), (20_000, 3), (50_000, 5)] {
        let (trained, _) = run(Strategy::Zero3, persist_below);
        let what = format!("below {persist_below}");
        assert_same(&reference, &trained, &what);
        let units = sharding.units().iter().map(|unit| {
            let elements: usize = unit.params.iter().map(|id| model.params[id.0].len()).sum();
            let is_block = model.params[unit.params[0].0].key.starts_with("h.");
            (unit.whole.len(), elements < persist_below, is_block)
        });
        let units: Vec<_> = units.collect();
        assert_eq!(
            units.iter().filter(|(_, persists, _)| *persists).count(),
            persistent
        );
        // Once a step, or in each pass that reads it: backward reads blocks again, and has the others still or not at
        // all.
        let gathered: usize = units
            .iter()
            .map(|&(len, persists, is_block)| match (persists, is_block) {
                (true, _) => len,
                (false, true) => 2 * MICRO_BATCHES * len,
                (false, false) => MICRO_BATCHES * len,
            })
            .sum();
        let sent = (4 * gathered / RANKS as usize) as u64;
        for line in &trained.metrics {
            assert_eq!(line.wire_bytes.params, sent, "step {}, {what}", line.step);
        }
        let blocks = units
            .iter()
            .filter(|(_, persists, is_block)| *is_block && !persists);
        let largest = blocks.clone().map(|(len, ..)| *len).max().unwrap_or(0);
        let apart = units
            .iter()
            .filter(|(_, persists, is_block)| !is_block || *persists);
        let slots = blocks.count().min(2) * largest + apart.map(|(len, ..)| len).sum::<usize>();
        assert_eq!(trained.metrics[0].memory.gathered, 4 * slots as u64, "{what}");
    }
}

#[test]
fn groups_that_persist_and_state_in_a_file_train_the_same_numbers_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let run = |strategy, persist_below, home: OffloadTarget| {
        let job = job(strategy, |c| {
            c.train.precision = Precision::Bf16;
            c.train.offload.optimizer = home;
            c.train.offload.dir = (home == OffloadTarget::File).then(|| folder.path().to_owned());
            c.parallel.persist_below = persist_below;
        });
        job.train(3)
    };
    let reference = run(Strategy::Ddp, 0, OffloadTarget::None);
    let found = run(Strategy::Zero3, 20_000, OffloadTarget::File);
    assert_same(&reference, &found, "zero3");
}

/// Number and resident bytes of the mappings of files in a folder.
pub(crate) fn resident(folder: &Path) -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let folder = folder.to_str().unwrap();
    let mut found = (0, 0);
    let mut lines = maps.lines();
    while lines.by_ref().any(|line| line.contains(folder)) {
        let line = lines.find(|line| line.starts_with("Rss:")).unwrap();
        let kibibytes: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        found = (found.0 + 1, found.1 + 1024 * kibibytes);
    }
    found
}

/// The kernel maps this much around a page that is touched, of each of the three files, if it still caches it.
const FAULT_AROUND: usize = 3 * (64 << 10);

/// Whoever puts the state into a file has no memory for it: not for first values, nor for reading or writing a
/// checkpoint.
#[test]
fn state_in_a_file_is_not_resident_after_a_start_and_during_a_save() {
    let folder = tempfile::tempdir().unwrap();
    let most: Arc<Mutex<Vec<(Moment, usize)>>> = Arc::default();
    let mut job = job(Strategy::Ddp, |c| {
        c.train.precision = Precision::Bf16;
        c.train.steps = 2;
        c.train.offload.optimizer = OffloadTarget::File;
        c.train.offload.dir = Some(folder.path().to_owned());
        c.run.resume = Resume::Auto;
    });
    let (dir, told) = (folder.path().to_owned(), most.clone());
    job.device = Some(Box::new(move |_| {
        let (dir, told) = (dir.clone(), told.clone());
        ProbedDevice::telling(Arc::new(move |moment| {
            let (files, bytes) = resident(&dir);
            // Masters and two moments are mapped.
            if files == 3 {
                told.lock().unwrap().push((moment, bytes));
            }
        }))
    }));
    for steps in [2, 4] {
        job.config.train.steps = steps;
        let state = job.train(1).metrics[0].memory.optimizer;
        assert!(state > 1 << 20, "too little to see: {state}");
        let seen = std::mem::take(&mut *most.lock().unwrap());
        for expected in [Moment::Forward, Moment::Download] {
            let of_moment = seen.iter().filter(|(moment, _)| *moment == expected);
            let bytes = of_moment.map(|(_, bytes)| *bytes).max();
            assert!(
                bytes.is_some_and(|bytes| bytes <= FAULT_AROUND),
                "{bytes:?} of {state} before a {expected:?}"
            );
        }
    }
}

#[test]
fn a_folder_that_cannot_take_the_optimizer_is_named() {
    let job = job(Strategy::Zero1, |c| {
        c.train.offload.optimizer = OffloadTarget::File;
        c.train.offload.dir = Some("/nowhere/at/all".into());
    });
    let words: Vec<String> = job
        .run(2)
        .into_iter()
        .map(|o| o.unwrap_err().to_string())
        .collect();
    let expected = "for `exp_avg`: `/nowhere/at/all`: No such file or directory";
    // One says it first, and ends the generation for the others.
    assert!(words.iter().any(|words| words.contains(expected)), "{words:#?}");
}
