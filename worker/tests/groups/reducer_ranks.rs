//! The reducer over several ranks, without any model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_worker::collective::{Communicator, Executor, RankInfo, connect};
use ddp_worker::config::{self, Accumulate, ModelKind, Sync};
use ddp_worker::device::{Compute, CpuDevice, Device, Event};
use ddp_worker::mesh::MeshShape;
use ddp_worker::model::{self, ParamId};
use ddp_worker::parallel::{
    GradSpec, GradientLayout, LayoutConfig, Parameters, ReduceError, Reducer, ReducerConfig, ReplicaSet,
    ReshardPolicy, Sharding,
};
use ddp_worker::session::{Cancel, MemoryStore};
use proptest::prelude::*;

const TIMEOUT: Duration = Duration::from_mins(10);

/// Runs `work(rank)` on every rank of one node, each with a communicator of its own.
fn ranks<T: Send>(
    size: usize,
    executor: Executor,
    cancel: &Cancel,
    work: impl Fn(Communicator, Arc<dyn Device>) -> T + std::marker::Sync,
) -> Vec<T> {
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (store, work) = (store.clone(), &work);
                scope.spawn(move || {
                    let transport =
                        connect(&RankInfo::on_one_node(rank, size), &store, cancel, TIMEOUT).unwrap();
                    let comm = Communicator::new("world", transport, executor, TIMEOUT, cancel);
                    work(comm, Arc::new(CpuDevice::new(1).unwrap()))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn layout(sizes: &[usize], bucket_bytes: usize, world_size: usize) -> Arc<GradientLayout> {
    let named = sizes.iter().enumerate();
    let specs = named
        .map(|(i, &len)| GradSpec::new(format!("p{i}"), &[len]))
        .collect();
    let order: Vec<ParamId> = (0..sizes.len()).rev().map(ParamId).collect();
    let config = LayoutConfig {
        first_bucket_bytes: bucket_bytes / 2,
        bucket_bytes,
        ..LayoutConfig::new(world_size)
    };
    Arc::new(GradientLayout::new(specs, &order, &config).unwrap())
}

/// Element `i` of the gradient of `id` in one micro-batch of one rank: not a round number.
fn contribution(rank: usize, micro_batch: usize, id: usize, i: usize) -> f32 {
    let number = 1 + rank * 7919 + micro_batch * 104_729 + id * 1_299_709 + i * 31;
    (number % 10_007) as f32 / 997.0 - 5.0
}

/// What every rank must read: micro-batches added on each rank, ranks added in order.
fn expected(size: usize, accumulation: usize, id: usize, i: usize) -> f32 {
    let of_rank = |rank| (0..accumulation).fold(0.0, |sum, m| sum + contribution(rank, m, id, i));
    (1..size).fold(of_rank(0), |sum, rank| sum + of_rank(rank))
}

/// One step; each rank reports its gradients in an order of its own. Returns all sums.
fn step(
    comm: &Communicator,
    reducer: &mut Reducer,
    sizes: &[usize],
    accumulation: usize,
) -> Result<Vec<Vec<f32>>, ReduceError> {
    let mut step = reducer.step(accumulation)?;
    for micro_batch in 0..accumulation {
        for k in 0..sizes.len() {
            let id = (k * 5 + comm.rank() * 3) % sizes.len();
            let id = if sizes.len().is_multiple_of(5) { k } else { id };
            let mut grad = step.grad_mut::<f32>(ParamId(id))?;
            for (i, x) in grad.iter_mut().enumerate() {
                *x += contribution(comm.rank(), micro_batch, id, i);
            }
            drop(grad);
            step.ready(ParamId(id), Event::reached())?;
        }
    }
    let reduced = step.finish(Instant::now() + TIMEOUT)?;
    (0..sizes.len())
        .map(|id| Ok(reduced.grad::<f32>(ParamId(id))?.to_vec()))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn gradients_are_summed_in_rank_order_bit_by_bit(
        sizes in prop::collection::vec(1_usize..3000, 1..9),
        bucket_bytes in 0_usize..20_000,
        size in 1_usize..5,
        accumulation in 1_usize..4,
        mode in 0_usize..6,
    ) {
        let sync = [Sync::Bucketed, Sync::PerParameter, Sync::Naive][mode % 3];
        let overlap = mode < 3;
        let executor = if overlap { Executor::Thread } else { Executor::Inline };
        let layout = layout(&sizes, bucket_bytes, size);
        let all = ranks(size, executor, &Cancel::new(), |comm, device| {
            let config = ReducerConfig {
                sync,
                overlap,
                ..ReducerConfig::default()
            };
            let mut reducer = Reducer::new(&comm, &device, layout.clone(), config).unwrap();
            let first = step(&comm, &mut reducer, &sizes, accumulation).unwrap();
            let second = step(&comm, &mut reducer, &sizes, accumulation).unwrap();
            assert_eq!(first, second);
            first
        });
        for sums in all {
            for (id, grad) in sums.iter().enumerate() {
                for (i, found) in grad.iter().enumerate() {
                    let expected = expected(size, accumulation, id, i);
                    prop_assert_eq!(found.to_bits(), expected.to_bits(), "p{} element {}", id, i);
                }
            }
        }
    }
}

/// A reducer whose every micro-batch is reduced to shards; each parameter is a unit.
fn staged(comm: &Communicator, device: &Arc<dyn Device>, layout: &Arc<GradientLayout>) -> Reducer {
    let sharding = Arc::new(Sharding::of_buckets(
        layout,
        MeshShape::of_shards(comm.size()),
        comm.rank(),
    ));
    let config = ReducerConfig {
        accumulate: Accumulate::Sharded,
        ..ReducerConfig::default()
    };
    let (set, compute) = (ReplicaSet::of_all(comm.clone()), Compute::new(device.clone()));
    Reducer::over(&set, &compute, layout.clone(), &sharding, config).unwrap()
}

#[test]
fn a_gradient_reported_twice_is_refused_where_every_micro_batch_is_reduced() {
    let layout = layout(&[40, 50], 0, 2);
    for micro_batches in [1, 2] {
        let outcomes = ranks(2, Executor::Thread, &Cancel::new(), |comm, device| {
            let mut reducer = staged(&comm, &device, &layout);
            let mut step = reducer.step(micro_batches).unwrap();
            step.grad_mut::<f32>(ParamId(1)).unwrap()[0] += 1.0;
            step.ready(ParamId(1), Event::reached()).unwrap();
            let twice = step.ready(ParamId(1), Event::reached()).unwrap_err();
            // The first error of a step is its last.
            assert_eq!(step.slot(ParamId(0)).err(), Some(twice.clone()));
            drop(step);
            (twice.to_string(), reducer.step(1).err().unwrap().to_string())
        });
        let what = match micro_batches {
            1 => "was reported 2 times, expected 1".to_owned(),
            _ => "was reported, but its memory was not asked for since it was reported last\n  hint: report each contribution once, after it was written".to_owned(),
        };
        let twice = format!("gradient of `p1` (bucket 0) {what}");
        let launches = 2 * micro_batches;
        let poisoned = format!(
            "the reducer cannot be used any more: a step ended after 1 of {launches} operations were launched, so this rank no longer agrees with the others: {twice}"
        );
        assert_eq!(outcomes, vec![(twice, poisoned); 2]);
    }
}

#[test]
fn a_gradient_that_nobody_wrote_is_refused_where_every_micro_batch_is_reduced() {
    let layout = layout(&[40, 50], 0, 2);
    let outcomes = ranks(2, Executor::Thread, &Cancel::new(), |comm, device| {
        let mut reducer = staged(&comm, &device, &layout);
        let error = reducer
            .step(1)
            .unwrap()
            .ready(ParamId(0), Event::reached())
            .unwrap_err();
        // Nothing was launched.
        assert!(reducer.step(1).is_ok());
        error.to_string()
    });
    for message in outcomes {
        assert!(
            message.starts_with("gradient of `p0` (bucket 1) was reported, but its memory was not asked for"),
            "{message}"
        );
    }
}

fn small_model() -> model::Model {
    let config = config::Model {
        kind: ModelKind::Mlp,
        n_layer: 1,
        n_head: 1,
        n_embd: 8,
        block_size: 8,
        vocab_size: None,
        dropout: 0.0,
        ..config::Model::default()
    };
    model::build(&config, 16).unwrap()
}

#[test]
fn replicas_start_as_rank_0_and_differences_are_found() {
    let model = small_model();
    let layout = GradientLayout::of_model(&model, &LayoutConfig::new(3)).unwrap();
    let sharding = Arc::new(Sharding::replicated(&layout));
    let outcomes = ranks(3, Executor::Thread, &Cancel::new(), |comm, device| {
        let (set, compute) = (ReplicaSet::of_all(comm.clone()), Compute::new(device));
        let keep = ReshardPolicy::KeepAll;
        let parameters = Parameters::new(&set, &compute, &model, &sharding, keep.into()).unwrap();
        let params = parameters.own().arena().whole();
        params.host_mut::<f32>().unwrap().fill(comm.rank() as f32 + 1.0);
        parameters.broadcast(&params).unwrap();
        assert!(params.host::<f32>().unwrap().iter().all(|&p| p == 1.0));
        assert_eq!(parameters.difference(0).unwrap(), None);
        if comm.rank() > 0 {
            let wrong = if comm.rank() == 1 { 2 } else { 1 };
            let param = params.slice(sharding.whole_range(ParamId(wrong)));
            param.host_mut::<f32>().unwrap()[7] = 3.0;
        }
        let difference = parameters.difference(12).unwrap().unwrap();
        assert!(difference.is_of_all());
        difference.to_string()
    });
    let name = &model.params[1].key;
    for message in outcomes {
        assert!(
            message.starts_with(&format!(
                "parameter `{name}` of rank 2 differs from rank 0 after step 12"
            )),
            "{message}"
        );
    }
}
