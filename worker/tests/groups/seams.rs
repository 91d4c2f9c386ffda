//! What later parts are built on: an asynchronous device, narrow gradients, and that the tests of them can fail.

use std::sync::Arc;
use std::time::Instant;

use crate::collective_world::{PATIENCE, World};
use crate::train_support::deferred::DeferredDevice;
use ddp_worker::collective::{
    Communicator, Executor, Launch, ReduceOp, SingleRank, Traffic, WireBytes, WorkError,
};
use ddp_worker::config::Sync;
use ddp_worker::device::{ArenaSpec, CpuDevice, DType, Device, Element, Event};
use ddp_worker::model::ParamId;
use ddp_worker::ops::Fill;
use ddp_worker::parallel::{GradSpec, GradientLayout, LayoutConfig, Reducer, ReducerConfig};
use ddp_worker::session::Cancel;

const SIZES: [usize; 3] = [5000, 300, 20_000];

fn layout(sizes: &[usize], world_size: usize, dtype: DType) -> Arc<GradientLayout> {
    let named = sizes.iter().enumerate();
    let specs = named
        .map(|(i, &len)| GradSpec::new(format!("p{i}"), &[len]))
        .collect();
    let order: Vec<ParamId> = (0..sizes.len()).rev().map(ParamId).collect();
    let config = LayoutConfig {
        first_bucket_bytes: 4096,
        bucket_bytes: 16_384,
        dtype,
        accumulated: dtype,
        ..LayoutConfig::new(world_size)
    };
    Arc::new(GradientLayout::new(specs, &order, &config).unwrap())
}

/// Sums of gradients that are `rank + 1 + id` everywhere and still to be computed when they are reported, with
/// the event behind them or, wrongly, with one that is reached already.
fn sums_of_deferred(config: &ReducerConfig, executor: Executor, honest: bool) -> Vec<Vec<f32>> {
    let layout = layout(&SIZES, 2, DType::F32);
    World::of(&[2]).run(executor, |rank| {
        let device: Arc<dyn Device> = Arc::new(DeferredDevice::new());
        let stream = device.stream();
        let mut reducer = Reducer::new(&rank.comm, &device, layout.clone(), config.clone()).unwrap();
        let mut step = reducer.step(1).unwrap();
        for id in layout.order() {
            let out = step.slot(*id).unwrap().buffer;
            let value = (rank.rank() + 1 + id.0) as f64;
            device.enqueue(stream, Fill { out, value }.into());
            let behind = device.record(stream);
            let at = if honest { behind } else { Event::reached() };
            step.ready(*id, at).unwrap();
        }
        let reduced = step.finish(Instant::now() + PATIENCE).unwrap();
        (0..SIZES.len())
            .map(|id| {
                let grad = reduced.grad::<f32>(ParamId(id)).unwrap();
                assert!(grad.iter().all(|g| *g == grad[0]), "p{id} is torn");
                grad[0]
            })
            .collect()
    })
}

#[test]
fn a_bucket_waits_for_the_events_of_its_gradients() {
    for sync in [Sync::Bucketed, Sync::PerParameter, Sync::Naive] {
        for (overlap, executor) in [
            (true, Executor::Thread),
            (false, Executor::Thread),
            (false, Executor::Inline),
        ] {
            let config = ReducerConfig {
                sync,
                overlap,
                ..ReducerConfig::default()
            };
            let sums = sums_of_deferred(&config, executor, true);
            assert_eq!(sums, [[3.0, 5.0, 7.0], [3.0, 5.0, 7.0]], "{config:?}");
        }
    }
}

/// The control of the test above: without the events, what is summed is what was there before.
#[test]
fn without_the_events_yesterdays_gradients_are_summed() {
    let config = ReducerConfig::default();
    let sums = sums_of_deferred(&config, Executor::Thread, false);
    assert_eq!(sums, [[0.0; 3], [0.0; 3]]);
}

/// On a stream the host puts operations behind each other, and waits for none of them before it reads.
#[test]
fn a_world_of_one_reduces_on_a_stream_of_its_device() {
    for accumulation in [1, 4] {
        let device: Arc<dyn Device> = Arc::new(DeferredDevice::new());
        let stream = device.stream();
        let transport = Box::new(SingleRank::on_stream(0));
        let comm = Communicator::new("solo", transport, Executor::Inline, PATIENCE, &Cancel::new());
        let layout = layout(&SIZES, 1, DType::F32);
        let config = ReducerConfig::default();
        let mut reducer = Reducer::new(&comm, &device, layout.clone(), config).unwrap();
        let mut step = reducer.step(accumulation).unwrap();
        for micro_batch in 0..accumulation {
            for id in layout.order() {
                let out = step.slot(*id).unwrap().buffer;
                let value = (micro_batch + id.0) as f64;
                device.enqueue(stream, Fill { out, value }.into());
                step.ready(*id, device.record(stream)).unwrap();
            }
        }
        let reduced = step.finish(Instant::now() + PATIENCE).unwrap();
        for id in 0..SIZES.len() {
            let grad = reduced.grad::<f32>(ParamId(id)).unwrap();
            let expected = (accumulation - 1 + id) as f32;
            assert!(grad.iter().all(|g| *g == expected), "p{id}: {}", grad[0]);
        }
        assert_eq!(comm.wire_bytes(), WireBytes::default());
    }
}

#[test]
fn what_cannot_be_put_into_a_stream_fails_at_once_and_for_good() {
    let device: Arc<dyn Device> = Arc::new(DeferredDevice::new());
    let transport = Box::new(SingleRank::on_stream(7));
    let comm = Communicator::new("solo", transport, Executor::Inline, PATIENCE, &Cancel::new());
    let buffer = device
        .alloc(&ArenaSpec::private("test", DType::F32, 8))
        .unwrap()
        .whole();
    let work = comm.send(&buffer, 1, Launch::now(Traffic::Other, "token"));
    assert!(work.is_done());
    let WorkError::Failed(error) = work.wait(Instant::now()).unwrap_err() else {
        panic!("it has ended");
    };
    let words = "rank 7: send to 1 #0 of `solo` (token, 32 bytes) failed: there is no other rank";
    assert_eq!(error.to_string(), words);
    let later = comm.all_reduce(&buffer, ReduceOp::Max, Launch::now(Traffic::Other, "norm"));
    let error = later.wait(Instant::now()).unwrap_err().to_string();
    assert!(
        error.contains("an earlier operation failed: there is no other rank"),
        "{error}"
    );
}

/// Gradients of `T` through a reducer of four ranks; each rank gives `own(rank, i)`.
fn sum<T: Element>(len: usize, own: impl Fn(usize, usize) -> T + std::marker::Sync) -> Vec<Vec<T>> {
    let layout = layout(&[len], 4, T::DTYPE);
    World::of(&[4]).run(Executor::Thread, |rank| {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        let config = ReducerConfig::default();
        let mut reducer = Reducer::new(&rank.comm, &device, layout.clone(), config.clone()).unwrap();
        assert_eq!(reducer.bytes(), layout.len() * T::DTYPE.bytes());
        let mut step = reducer.step(1).unwrap();
        let mut grad = step.grad_mut::<T>(ParamId(0)).unwrap();
        for (i, g) in grad.iter_mut().enumerate() {
            *g = own(rank.rank(), i);
        }
        drop(grad);
        step.ready(ParamId(0), Event::reached()).unwrap();
        let reduced = step.finish(Instant::now() + PATIENCE).unwrap();
        reduced.grad::<T>(ParamId(0)).unwrap().to_vec()
    })
}

#[test]
fn the_mean_of_four_gradients_is_a_tenth_and_moves_the_parameter_by_a_ten_thousandth() {
    let own = [0.20_f32, 0.10, -0.05, 0.15];
    // The mean is in the gradient of the loss; the reducer adds up.
    for sums in sum(1, |rank, _| own[rank] / 4.0) {
        assert!((sums[0] - 0.10).abs() < 1e-8, "{sums:?}");
        let (parameter, lr) = (0.0_f32, 0.001_f32);
        assert!((parameter - lr * sums[0] + 0.0001).abs() < 1e-11);
    }
}
