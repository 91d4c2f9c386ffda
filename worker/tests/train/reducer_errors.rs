//! Wrong use of the reducer is an error that names the parameter and the bucket, on one rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_worker::collective::{Communicator, Executor, SingleRank};
use ddp_worker::config::Sync;
use ddp_worker::device::{CpuDevice, Device, DeviceError, Event};
use ddp_worker::model::ParamId;
use ddp_worker::parallel::{
    GradSpec, GradientLayout, LayoutConfig, ReduceError, Reducer, ReducerConfig, Step,
};
use ddp_worker::session::Cancel;

/// `tied` is used in two places and lies last.
fn reducer(sync: Sync, overlap: bool) -> Reducer {
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
    let mut specs = vec![
        GradSpec::new("tied", &[4]),
        GradSpec::new("w", &[2, 3]),
        GradSpec::new("b", &[3]),
    ];
    specs[0].contributions = 2;
    specs[0].group = 1;
    let order = [ParamId(2), ParamId(1), ParamId(0)];
    let config = LayoutConfig {
        first_bucket_bytes: 40,
        ..LayoutConfig::new(1)
    };
    let layout = Arc::new(GradientLayout::new(specs, &order, &config).unwrap());
    assert_eq!(layout.buckets().len(), 2);
    let timeout = Duration::from_mins(10);
    let comm = Communicator::new(
        "world",
        Box::new(SingleRank::new(0)),
        Executor::Thread,
        timeout,
        &Cancel::new(),
    );
    let config = ReducerConfig {
        sync,
        overlap,
        ..ReducerConfig::default()
    };
    Reducer::new(&comm, &device, layout, config).unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_mins(10)
}

fn contribute(step: &mut Step<'_>, id: usize, value: f32) {
    step.grad_mut::<f32>(ParamId(id))
        .unwrap()
        .iter_mut()
        .for_each(|x| *x += value);
    step.ready(ParamId(id), Event::reached()).unwrap();
}

fn contribute_all(step: &mut Step<'_>) {
    for id in [2, 0, 1, 0] {
        contribute(step, id, 1.0);
    }
}

#[test]
fn contributions_of_all_micro_batches_are_summed() {
    for sync in [Sync::Naive, Sync::PerParameter, Sync::Bucketed] {
        for overlap in [false, true] {
            let mut reducer = reducer(sync, overlap);
            // Twice: the second step must not see the first one's numbers.
            for _ in 0..2 {
                let mut step = reducer.step(4).unwrap();
                for _ in 0..4 {
                    contribute_all(&mut step);
                }
                let reduced = step.finish(soon()).unwrap();
                assert_eq!(&reduced.grad::<f32>(ParamId(0)).unwrap()[..], &[8.0; 4]);
                assert_eq!(&reduced.grad::<f32>(ParamId(1)).unwrap()[..], &[4.0; 6]);
                assert_eq!(&reduced.grad::<f32>(ParamId(2)).unwrap()[..], &[4.0; 3]);
            }
        }
    }
}

#[test]
fn a_report_too_many_names_the_parameter_and_the_bucket() {
    let mut reducer = reducer(Sync::Bucketed, true);
    let mut step = reducer.step(1).unwrap();
    contribute(&mut step, 2, 1.0);
    let error = step.ready(ParamId(2), Event::reached()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "gradient of `b` (bucket 0) was reported 2 times, expected 1"
    );
    // A step that failed stays failed, with the first error.
    assert_eq!(step.ready(ParamId(0), Event::reached()).unwrap_err(), error);
    assert_eq!(step.finish(soon()).err().unwrap(), error);
}

#[test]
fn a_missing_report_names_the_first_parameter_in_layout_order() {
    let mut reducer = reducer(Sync::Bucketed, true);
    let mut step = reducer.step(1).unwrap();
    contribute(&mut step, 2, 1.0);
    contribute(&mut step, 0, 1.0);
    let error = step.finish(soon()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "gradient of `w` (bucket 0) was reported 0 times, expected 1; 2 gradients are missing in all\n  hint: every parameter must take part in every micro-batch"
    );
}

#[test]
fn micro_batches_may_finish_in_any_order() {
    let mut reducer = reducer(Sync::Bucketed, true);
    let mut step = reducer.step(2).unwrap();
    for id in [2, 2, 1, 1, 0, 0, 0] {
        contribute(&mut step, id, 1.0);
    }
    let error = step.finish(soon()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "gradient of `tied` (bucket 1) was reported 3 times, expected 4; 1 gradients are missing in all\n  hint: every parameter must take part in every micro-batch"
    );
    let mut reducer = self::reducer(Sync::Bucketed, true);
    let mut step = reducer.step(2).unwrap();
    for id in [0, 2, 2, 0, 1, 0, 1, 0] {
        contribute(&mut step, id, 1.0);
    }
    let reduced = step.finish(soon()).unwrap();
    assert_eq!(&reduced.grad::<f32>(ParamId(0)).unwrap()[..], &[4.0; 4]);
    assert_eq!(&reduced.grad::<f32>(ParamId(1)).unwrap()[..], &[2.0; 6]);
}

#[test]
fn an_unknown_parameter_is_refused() {
    let mut reducer = reducer(Sync::Bucketed, true);
    let error = reducer
        .step(1)
        .unwrap()
        .ready(ParamId(3), Event::reached())
        .unwrap_err();
    let unknown = |id| {
        let message = format!("a gradient of parameter {id} was reported, but there are 3 parameters");
        ReduceError::Misuse(message)
    };
    assert_eq!(error, unknown(3));
    assert_eq!(reducer.step(1).unwrap().slot(ParamId(9)).err(), Some(unknown(9)));
}

#[test]
fn a_gradient_that_may_be_on_its_way_cannot_be_written() {
    let mut reducer = reducer(Sync::Bucketed, true);
    let mut step = reducer.step(1).unwrap();
    contribute(&mut step, 2, 1.0);
    let error = step.grad_mut::<f32>(ParamId(2)).err().unwrap();
    assert_eq!(
        error.to_string(),
        "gradient of `b` (bucket 0) was asked for after it was reported ready"
    );
}

#[test]
fn a_step_dropped_before_anything_was_launched_leaves_the_reducer_usable() {
    let mut reducer = reducer(Sync::Bucketed, true);
    let mut step = reducer.step(1).unwrap();
    contribute(&mut step, 0, 5.0);
    drop(step);
    let mut step = reducer.step(1).unwrap();
    contribute_all(&mut step);
    let reduced = step.finish(soon()).unwrap();
    assert_eq!(&reduced.grad::<f32>(ParamId(0)).unwrap()[..], &[2.0; 4]);
}

#[test]
fn a_step_dropped_after_a_launch_says_so_at_the_next() {
    let mut reducer = reducer(Sync::Bucketed, true);
    let mut step = reducer.step(1).unwrap();
    contribute(&mut step, 2, 1.0);
    contribute(&mut step, 1, 1.0);
    drop(step);
    let error = reducer.step(1).err().unwrap().to_string();
    assert_eq!(
        error,
        "the reducer cannot be used any more: a step ended after 1 of 2 operations were launched, so this rank no longer agrees with the others: the step was dropped"
    );
}

#[test]
fn a_failed_gradient_fails_the_step() {
    let mut reducer = reducer(Sync::Bucketed, true);
    let mut step = reducer.step(1).unwrap();
    contribute(&mut step, 2, 1.0);
    contribute(&mut step, 0, 1.0);
    contribute(&mut step, 0, 1.0);
    let (event, signal) = Event::pair("backward of `w`");
    step.ready(ParamId(1), event).unwrap();
    signal.set(Err(DeviceError::Upstream("the kernel failed".into())));
    let error = step.finish(soon()).err().unwrap().to_string();
    assert!(
        error.contains("bucket 0, from `b`") && error.contains("the kernel failed"),
        "{error}"
    );
}

#[test]
fn work_in_flight_outlives_the_reducer() {
    let mut reducer = reducer(Sync::Bucketed, true);
    let mut step = reducer.step(1).unwrap();
    contribute(&mut step, 2, 1.0);
    let (event, signal) = Event::pair("backward of `w`");
    step.ready(ParamId(1), event).unwrap();
    drop(step);
    drop(reducer);
    // The executor's thread is still waiting with the arena in its hands; it ends by itself.
    signal.set(Ok(()));
}
