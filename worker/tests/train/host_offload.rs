//! `train.offload`: state in memory of the host beside a device with memory of its own, or in a file; the optimizer's, and
//! under `zero3` parameters and gradients too.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::train_support::deferred::DeferredDevice;
use crate::train_support::probed::{Moment, ProbedDevice};
use crate::train_support::{Job, Trained};
use crate::zero_worlds::resident;
use ddp_worker::config::{
    Accumulate, OffloadTarget, OnNonFinite, Precision, Recompute, Resume, ShardGroup, Strategy, TrainConfig,
};
use ddp_worker::device::{
    Arena, ArenaSpec, Buffer, CpuDevice, DType, Device, DeviceError, StateMemory, Stream,
};
use ddp_worker::ops::{CHUNK, Cast, ColumnSum, Fill, Op, Rates, Runs, SquaredNorm, Update};
use ddp_worker::optim::adamw;
use ddp_worker::plan::Estimate;
use half::bf16;

/// Large enough that every rank owns parameters, in several units.
fn job(change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.n_layer = 2;
        c.model.n_embd = 64;
        c.train.steps = 3;
        c.train.micro_batch = 1;
        c.train.optimizer.lr = 3e-3;
        c.train.grad_clip = Some(0.5);
        c.parallel.first_bucket_mb = 0.06;
        c.parallel.bucket_mb = 0.2;
        c.run.resume = Resume::Auto;
        change(c);
    })
}

/// Trains with the state where it is asked for: beside a device that puts everything off, if that is the host.
fn train(job: &mut Job, home: OffloadTarget, world: u32) -> Trained {
    job.config.train.offload.optimizer = home;
    job.device = (home == OffloadTarget::Host)
        .then(|| -> crate::train_support::DeviceOf { Box::new(|_| Arc::new(DeferredDevice::beside_host())) });
    job.train(world)
}

fn assert_same(one: &Trained, other: &Trained, what: &str) {
    let numbers = |trained: &Trained| -> Vec<[u64; 3]> {
        let lines = trained.metrics.iter();
        lines
            .map(|l| [l.loss.to_bits(), l.grad_norm.to_bits(), l.skipped])
            .collect()
    };
    assert_eq!(numbers(one), numbers(other), "losses and norms: {what}");
    assert_eq!(one.state, other.state, "masters and moments: {what}");
}

#[test]
fn state_on_the_host_trains_the_same_numbers_and_goes_on_anywhere() {
    use OffloadTarget::{Host, None};
    for precision in [Precision::F32, Precision::Bf16] {
        for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero3] {
            // Twice as many steps, the second half resumed from a checkpoint.
            let run = |[begun, ended]: [OffloadTarget; 2]| {
                let mut job = job(|c| {
                    c.train.precision = precision;
                    c.train.grad_accumulation = 2;
                    c.parallel.strategy = strategy;
                });
                let first = train(&mut job, begun, 2);
                job.config.train.steps = 6;
                (first, train(&mut job, ended, 2))
            };
            let (first, second) = run([None, None]);
            for homes in [[Host, Host], [Host, None], [None, Host]] {
                let what = format!("{precision:?}, {strategy:?}, {homes:?}");
                let (begun, ended) = run(homes);
                assert_same(&first, &begun, &what);
                assert_same(&second, &ended, &format!("{what}, resumed"));
            }
        }
    }
}

#[test]
fn a_skipped_step_leaves_state_on_the_host_as_it_was() {
    for precision in [Precision::F32, Precision::Bf16] {
        let run = |home, steps| {
            let mut job = job(|c| {
                c.train.precision = precision;
                c.train.steps = steps;
                c.train.on_nonfinite = OnNonFinite::Skip;
                // The first step ruins the parameters: no loss after it is a number.
                c.train.optimizer.lr = 1e30;
                c.train.schedule.kind = ddp_worker::config::LearningRate::Constant;
                c.parallel.strategy = Strategy::Zero1;
            });
            train(&mut job, home, 2)
        };
        let (expected, found) = (run(OffloadTarget::None, 4), run(OffloadTarget::Host, 4));
        assert_eq!(found.metrics[3].skipped, 3);
        assert_eq!(expected.state, found.state, "{precision:?}");
        assert_eq!(found.state, run(OffloadTarget::Host, 1).state, "{precision:?}");
    }
}

#[test]
fn a_save_while_training_goes_on_has_the_state_of_its_step() {
    let run = |home| {
        let mut job = job(|c| {
            c.train.steps = 5;
            c.train.checkpoint_every = 2;
            c.train.verify_every = 0;
            c.train.checkpoint_keep = Option::None;
        });
        let trained = train(&mut job, home, 2);
        assert!(trained.metrics[0].memory.checkpoint > 0, "there is a copy");
        // Step 4 is resumed from.
        std::fs::remove_dir_all(job.out_dir().join("checkpoints/step_00000005")).unwrap();
        std::fs::write(job.out_dir().join("checkpoints/latest"), "step_00000004").unwrap();
        (trained, train(&mut job, OffloadTarget::None, 2))
    };
    let ((expected, again), (found, resumed)) = (run(OffloadTarget::None), run(OffloadTarget::Host));
    assert_same(&expected, &found, "five steps");
    assert_same(&again, &resumed, "the fifth once more");
}

#[test]
fn the_host_goes_on_while_the_state_is_updated() {
    for parameters in [OffloadTarget::None, OffloadTarget::Host] {
        let devices: Arc<Mutex<Vec<Arc<DeferredDevice>>>> = Arc::default();
        let made = devices.clone();
        let mut job = job(|c| {
            c.train.steps = 8;
            c.train.verify_every = 0;
            c.train.checkpoint_every = 5;
            c.train.offload.optimizer = OffloadTarget::Host;
            c.train.offload.parameters = parameters;
            c.parallel.strategy = match parameters {
                OffloadTarget::None => Strategy::Ddp,
                _ => Strategy::Zero3,
            };
        });
        job.device = Some(Box::new(move |_| {
            let device = Arc::new(DeferredDevice::beside_host());
            made.lock().unwrap().push(device.clone());
            device
        }));
        job.train(2);
        for device in devices.lock().unwrap().iter() {
            // All but the first step and the one after a save.
            assert_eq!(device.ran_ahead(), 6, "parameters: {parameters:?}");
        }
    }
}

#[test]
fn memory_of_the_state_is_counted_where_it_is() {
    for (precision, bytes) in [(Precision::F32, 4 + 8), (Precision::Bf16, 2 + 12)] {
        let memory = |home| {
            let mut job = job(|c| {
                c.train.steps = 1;
                c.train.precision = precision;
            });
            train(&mut job, home, 1).metrics[0].memory
        };
        let (usual, host) = (memory(OffloadTarget::None), memory(OffloadTarget::Host));
        assert_eq!(
            usual.params + usual.optimizer,
            host.params / usual_width(precision) * bytes
        );
        assert_eq!(
            (usual.optimizer_host, host.optimizer, host.optimizer_file),
            (0, 0, 0)
        );
        // Masters and moments, and three slots for a piece of gradients and one of parameters.
        let staging = 3 * (2 * 4 * (1 << 20) + 4096);
        assert_eq!(
            host.optimizer_host,
            host.params / usual_width(precision) * 12 + staging
        );
    }
}

fn usual_width(precision: Precision) -> u64 {
    if precision == Precision::Bf16 { 2 } else { 4 }
}

#[test]
fn a_device_whose_memory_is_the_hosts_keeps_the_state_where_it_is() {
    let mut job = job(|c| c.train.offload.optimizer = OffloadTarget::Host);
    let found = job.train(2);
    job = self::job(|_| ());
    assert_same(&job.train(2), &found, "on the processor");
    let memory = found.metrics[0].memory;
    assert!(memory.optimizer > 0 && memory.optimizer_host == 0);
}

/// Memory of some updates, on a device and where its state is.
struct Updates {
    ops: Vec<Op>,
    results: [Arena; 4],
}

const LEN: usize = 10_000;

/// Runs of parameters with padding between them, of which some decay. Gradients as `grads`, parameters as `params`.
fn update(device: &dyn Device, state: &StateMemory, stream: Stream, types: [DType; 2], step: u64) -> Updates {
    let spec = |name: &str, dtype, len| ArenaSpec::private(name, dtype, len);
    let alloc = |name, dtype, len| device.alloc(&spec(name, dtype, len)).unwrap();
    let kept = |name| state.alloc(&spec(name, DType::F32, LEN)).unwrap();
    let [grads, params] = types;
    let gradient: Vec<f32> = (0..LEN).map(|i| (i % 997) as f32 - 300.0).collect();
    let grad = alloc("gradients", grads, LEN);
    match grads {
        DType::Bf16 => {
            let narrow: Vec<bf16> = gradient.iter().copied().map(bf16::from_f32).collect();
            device.upload(stream, &grad.whole(), bytemuck::cast_slice(&narrow));
        }
        _ => device.upload(stream, &grad.whole(), bytemuck::cast_slice(&gradient)),
    }
    // With bias corrections that are not those of the step.
    let scale = alloc("scale", DType::F32, 3);
    device.upload(stream, &scale.whole(), bytemuck::bytes_of(&[0.5_f32, 7.5, 2.25]));
    let copy = alloc("parameters", params, LEN);
    let [masters, m, v] = ["master weights", "exp_avg", "exp_avg_sq"].map(kept);
    let values: Vec<f32> = (0..LEN).map(|i| (i % 31) as f32 * 0.1).collect();
    let runs = [0..10, 16..1500, 1504..1510, 1520..9990, 9992..LEN];
    let ops = runs.into_iter().enumerate().map(|(index, range)| {
        let of = |arena: &Arena| arena.slice(range.clone());
        state.upload(
            stream,
            &of(&masters),
            bytemuck::cast_slice(&values[range.clone()]),
        );
        // Pieces are cut anywhere within them.
        let spared: Vec<_> = (0..range.len() / 100).map(|i| 100 * i..100 * i + 37).collect();
        let decay = if index % 2 == 1 { 0.1 } else { 0.0 };
        let update = Update {
            rule: adamw([0.9, 0.95], 1e-8),
            runs: Runs::sparing(range.len(), &spared, Rates::new(0.01, decay)),
            param: of(&masters),
            copy: Some(of(&copy)),
            grad: of(&grad),
            slots: vec![of(&m), of(&v)],
            scale: scale.whole(),
            step,
        };
        update.into()
    });
    Updates {
        ops: ops.collect(),
        results: [copy.clone(), masters.clone(), m.clone(), v.clone()],
    }
}

fn beside(piece: usize) -> (Arc<DeferredDevice>, StateMemory) {
    let device = Arc::new(DeferredDevice::beside_host());
    let shared: Arc<dyn Device> = device.clone();
    let state = StateMemory::on_host(shared, 2, piece).unwrap();
    assert!(state.host_state().is_some(), "it has a host beside it");
    (device, state)
}

/// Two updates on the processor: parameters, masters, moments.
fn expected(grads: DType) -> Vec<Vec<u8>> {
    let cpu = Arc::new(CpuDevice::new(1).unwrap());
    let (stream, state) = (cpu.stream(), StateMemory::on_device(cpu.clone()));
    let update = update(cpu.as_ref(), &state, stream, [grads, DType::Bf16], 1);
    for _ in 0..2 {
        cpu.enqueue_all(stream, update.ops.clone());
    }
    let bytes = |arena: &Arena| cpu.download(stream, &arena.whole()).unwrap();
    update.results.iter().map(bytes).collect()
}

#[test]
fn pieces_of_any_size_give_the_bits_of_one_update_whichever_stream_hurries() {
    for grads in [DType::F32, DType::Bf16] {
        let expected = expected(grads);
        for piece in [7, 999, 1000, LEN, 2 * LEN] {
            // Three streams of the host's, and the one that computes.
            for hurried in 0..4 {
                let (device, state) = beside(piece);
                let stream = device.stream();
                let found = update(device.as_ref(), &state, stream, [grads, DType::Bf16], 1);
                for _ in 0..2 {
                    // The second is put behind the first before that has run.
                    state.enqueue_all(stream, found.ops.clone());
                }
                // As far as it gets without the others: what it does not wait for it overtakes.
                device.synchronize(device.streams()[hurried]).unwrap();
                for (expected, arena) in expected.iter().zip(&found.results) {
                    let bytes = state.download(stream, &arena.whole()).unwrap();
                    assert!(
                        bytes == *expected,
                        "{arena:?}, pieces of {piece}, gradients in {grads}, stream {hurried} first"
                    );
                }
            }
        }
    }
}

#[test]
fn gradients_and_parameters_cross_in_the_order_of_the_stream_whichever_stream_hurries() {
    const LEN: usize = 2 * CHUNK + 4321;
    let run = |device: &dyn Device, state: &StateMemory, stream: Stream| {
        let spec = |name: &str, dtype, len| ArenaSpec::private(name, dtype, len);
        let alloc = |name, dtype, len| device.alloc(&spec(name, dtype, len)).unwrap().whole();
        let (x, out) = (
            alloc("in flight", DType::F32, LEN),
            alloc("gathered", DType::Bf16, LEN),
        );
        let partials = alloc("partial norms", DType::F64, LEN.div_ceil(CHUNK));
        let sum = state.alloc(&spec("gradients", DType::F32, LEN)).unwrap().whole();
        let values: Vec<f32> = (0..LEN).map(|i| (i % 997) as f32 - 300.0).collect();
        device.upload(stream, &x, bytemuck::cast_slice(&values));
        let stored = Cast {
            x: x.clone(),
            out: sum.clone(),
        };
        state.enqueue_all(stream, vec![stored.into()]);
        // The next gradients take the slot.
        let value = 0.375;
        device.enqueue(
            stream,
            Fill {
                out: x.clone(),
                value,
            }
            .into(),
        );
        let added = ColumnSum {
            x,
            out: sum.clone(),
            accumulate: true,
        };
        let squares = SquaredNorm {
            x: sum.clone(),
            partials: partials.clone(),
        };
        let gathered = Cast {
            x: sum.clone(),
            out: out.clone(),
        };
        state.enqueue_all(stream, vec![added.into(), squares.into(), gathered.into()]);
        [sum, partials, out]
    };
    let cpu = Arc::new(CpuDevice::new(1).unwrap());
    let stream = cpu.stream();
    let expected = run(cpu.as_ref(), &StateMemory::on_device(cpu.clone()), stream);
    let expected = expected.map(|buffer| cpu.download(stream, &buffer).unwrap());
    for piece in [999, LEN] {
        for hurried in 0..4 {
            let (device, state) = beside(piece);
            let stream = device.stream();
            let found = run(device.as_ref(), &state, stream);
            device.synchronize(device.streams()[hurried]).unwrap();
            for (expected, buffer) in expected.iter().zip(&found) {
                let bytes = state.download(stream, buffer).unwrap();
                assert!(
                    bytes == *expected,
                    "{buffer:?}, pieces of {piece}, stream {hurried} first"
                );
            }
        }
    }
}

#[test]
fn parameters_in_f32_are_the_masters() {
    let (device, state) = beside(999);
    let stream = device.stream();
    let found = update(device.as_ref(), &state, stream, [DType::F32; 2], 1);
    state.enqueue_all(stream, found.ops);
    let [copy, masters, ..] = found
        .results
        .map(|arena| state.download(stream, &arena.whole()).unwrap());
    assert!(copy == masters && copy.iter().any(|byte| *byte != 0));
}

#[test]
fn what_goes_wrong_on_the_host_fails_the_stream() {
    let (device, state) = beside(1000);
    let stream = device.stream();
    let found = update(device.as_ref(), &state, stream, [DType::F32; 2], 1);
    state.synchronize(stream).unwrap();
    let moments = found.results[2].slice(5000..5001);
    let held = moments.host::<f32>().unwrap();
    state.enqueue_all(stream, found.ops.clone());
    let expected = |result: Result<(), DeviceError>| {
        let words = result.unwrap_err().to_string();
        assert!(words.starts_with("`exp_avg` elements "), "{words}");
    };
    expected(state.synchronize(stream));
    drop(held);
    // It does not go away: part of the state is of another step.
    state.enqueue_all(stream, found.ops);
    expected(device.synchronize(stream));
}

#[test]
fn bytes_reach_the_state_in_the_order_of_the_stream() {
    let (device, state) = beside(1000);
    let stream = device.stream();
    let found = update(device.as_ref(), &state, stream, [DType::F32; 2], 1);
    let masters: Buffer = found.results[1].slice(0..4);
    state.enqueue_all(stream, found.ops);
    state.upload(stream, &masters, bytemuck::cast_slice(&[1.0_f32, 2.0, 3.0, 4.0]));
    let bytes = state.download(stream, &masters).unwrap();
    assert_eq!(bytemuck::cast_slice::<u8, f32>(&bytes), [1.0, 2.0, 3.0, 4.0]);
}

/// What a rank holds is what `plan` says, to 2 %.
fn assert_planned(job: &Job, world: u32, trained: &Trained) {
    let planned = Estimate::of(&job.config, &job.env(0, world)).unwrap().held;
    let [host, file] = planned.offloaded_params;
    let planned = [
        planned.params,
        planned.gathered,
        planned.grads,
        planned.optimizer,
        planned.activations,
    ]
    .into_iter()
    .chain(planned.offloaded)
    .chain([host, file]);
    let held = trained.metrics.last().unwrap().memory;
    let held = [
        held.params,
        held.gathered,
        held.grads,
        held.optimizer,
        held.activations,
        held.optimizer_host,
        held.optimizer_file,
        held.params_host,
        held.params_file,
    ];
    for (planned, held) in planned.zip(held) {
        assert!(planned.abs_diff(held) * 50 <= held, "{planned} planned of {held}");
    }
}

/// As [`train`], with parameters and gradients in the same place.
fn train_offloaded(job: &mut Job, home: OffloadTarget, world: u32) -> Trained {
    let offload = &mut job.config.train.offload;
    (offload.optimizer, offload.parameters) = (home, home);
    // Whole gradients stay on the device.
    let is_full = job.config.parallel.accumulate == Accumulate::Full;
    let arenas = if is_full {
        &["parameters"][..]
    } else {
        &["parameters", "gradients"]
    };
    job.device = (home == OffloadTarget::Host).then(|| -> crate::train_support::DeviceOf {
        Box::new(|_| Arc::new(DeferredDevice::beside_host_with(arenas)))
    });
    let trained = job.train(world);
    assert_planned(job, world, &trained);
    trained
}

#[test]
fn offloaded_parameters_train_the_same_numbers_and_go_on_anywhere() {
    use OffloadTarget::{File, Host, None};
    type Change = fn(&mut TrainConfig);
    let variants: [(&str, u32, Change); 6] = [
        // Without offloading it accumulates in place, which rounds otherwise.
        ("one rank", 1, |_| ()),
        ("two ranks", 2, |c| c.train.grad_accumulation = 2),
        ("whole gradients in bf16", 2, |c| {
            c.train.precision = Precision::Bf16;
            c.train.grad_accumulation = 2;
            c.parallel.accumulate = Accumulate::Full;
        }),
        ("bf16, small groups persist", 2, |c| {
            c.train.precision = Precision::Bf16;
            c.train.grad_accumulation = 2;
            c.parallel.persist_below = 2000;
            c.parallel.reshard_after_forward = false;
        }),
        ("two context ranks", 2, |c| {
            c.parallel.context = 2;
            c.train.grad_accumulation = 2;
        }),
        ("two copies, two stages", 4, |c| {
            c.parallel.shard_group = Some(ShardGroup::Ranks(1));
            c.parallel.pipeline.stages = 2;
            c.parallel.accumulate = Accumulate::Full;
            c.train.grad_accumulation = 2;
        }),
    ];
    for (what, world, change) in variants {
        // Twice as many steps, the second half resumed from a checkpoint.
        let run = |[begun, ended]: [OffloadTarget; 2]| {
            let mut job = job(|c| {
                c.parallel.strategy = Strategy::Zero3;
                c.train.eval_every = 2;
                change(c);
            });
            let first = train_offloaded(&mut job, begun, world);
            job.config.train.steps = 6;
            (first, train_offloaded(&mut job, ended, world))
        };
        let (first, second) = run([None, None]);
        for homes in [[Host, File], [File, None], [None, Host]] {
            let what = format!("{what}, {homes:?}");
            let (begun, ended) = run(homes);
            assert_same(&first, &begun, &what);
            assert_same(&second, &ended, &format!("{what}, resumed"));
            let validations = |trained: &Trained| -> Vec<_> {
                let lines = trained.metrics.iter();
                lines.map(|line| line.val_loss.map(f64::to_bits)).collect()
            };
            assert_eq!(validations(&second), validations(&ended), "{what}");
        }
    }
}

/// The device holds groups that are gathered or in flight, and activations. Of the rest, which lies in files, no more is
/// resident than an update of a group touches: not at a start, in a step or during a save.
#[test]
fn a_model_whose_state_is_four_times_the_memory_of_the_device_trains() {
    const LAYERS: usize = 40;
    let folder = tempfile::tempdir().unwrap();
    let run = |home: OffloadTarget| {
        let (allocated, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut job = job(|c| {
            c.model.n_layer = LAYERS;
            c.model.block_size = 4;
            c.train.recompute = Recompute::Full;
            c.train.verify_every = 1;
            c.train.offload.dir = (home == OffloadTarget::File).then(|| folder.path().to_owned());
            c.parallel.strategy = Strategy::Zero3;
        });
        (
            job.config.train.offload.optimizer,
            job.config.train.offload.parameters,
        ) = (home, home);
        let (dir, bytes, told) = (folder.path().to_owned(), allocated.clone(), most.clone());
        job.device = Some(Box::new(move |_| {
            let (dir, bytes, told) = (dir.clone(), bytes.clone(), told.clone());
            let moments = AtomicUsize::new(0);
            ProbedDevice::telling(Arc::new(move |moment| match moment {
                Moment::Allocation(more) => drop(bytes.fetch_add(more, Ordering::Relaxed)),
                // To ask the kernel takes long.
                _ if !moments.fetch_add(1, Ordering::Relaxed).is_multiple_of(7) => {}
                _ => drop(told.fetch_max(resident(&dir).1, Ordering::Relaxed)),
            }))
        }));
        let trained = [2, 4].map(|steps| {
            job.config.train.steps = steps;
            allocated.store(0, Ordering::Relaxed);
            let trained = job.train(1);
            assert_planned(&job, 1, &trained);
            trained
        });
        (
            trained,
            allocated.load(Ordering::Relaxed),
            most.load(Ordering::Relaxed),
        )
    };
    let (expected, ..) = run(OffloadTarget::None);
    let (found, device, most) = run(OffloadTarget::File);
    for (expected, found) in expected.iter().zip(&found) {
        assert_same(expected, found, "in files");
    }
    let memory = found[1].metrics[0].memory;
    let state = (memory.params_file + memory.optimizer_file) as usize;
    assert!(state > 30 << 20, "{state}");
    assert!(
        device * 4 <= state,
        "{device} bytes on the device, {state} of state"
    );
    // Each of the four arrays: a layer, and what the kernel maps around it.
    let layer = state / 4 / LAYERS;
    assert!(
        most <= 4 * (layer + (128 << 10)),
        "{most} bytes of {state} were resident"
    );
    assert!(most >= 2 * layer, "{most} bytes of layers of {layer} were seen");
}
