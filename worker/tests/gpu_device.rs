//! The GPU as a device: memory, streams, events, copies and errors. Needs a GPU.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_worker::cuda::CudaOptions;
use ddp_worker::device::{
    Arena, ArenaSpec, CpuDevice, CudaDevice, DType, Device, DeviceError, Event, StateMemory, Stream,
};
use ddp_worker::ops::{Cast, Fill, Rates, Runs, Update};
use ddp_worker::optim::adamw;

mod gpu_support;

/// True of `tests/emulator`, which takes a microsecond for what a GPU does in a picosecond: tests give it less to do.
fn is_emulated(gpu: &CudaDevice) -> bool {
    gpu.context().facts().name == "Emulated GPU"
}

/// One staging buffer and a bit, several and a bit.
const LENGTHS: [usize; 5] = [1, 3, 1000, (4 << 20) / 4 + 3, (20 << 20) / 4 + 5];

fn arena(device: &dyn Device, name: &str, len: usize) -> Arena {
    let spec = ArenaSpec::private(name, DType::F32, len);
    device.alloc(&spec).unwrap()
}

fn values(device: &dyn Device, stream: Stream, arena: &Arena) -> Vec<f32> {
    floats(&device.download(stream, &arena.whole()).unwrap())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let elements = bytes.chunks_exact(size_of::<f32>());
    elements.map(bytemuck::pod_read_unaligned).collect()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_mins(10)
}

#[test]
fn memory_is_zeroed_and_bytes_come_back() {
    let Some(gpu) = gpu_support::device() else { return };
    let stream = gpu.stream();
    for len in LENGTHS {
        let x = arena(gpu.as_ref(), "x", len + 10);
        assert!(
            values(gpu.as_ref(), stream, &x).iter().all(|v| *v == 0.0),
            "{len} elements"
        );
        let expected: Vec<f32> = (0..len).map(|i| (i % 8191) as f32 + 0.5).collect();
        let part = x.slice(7..7 + len);
        gpu.upload(stream, &part, bytemuck::cast_slice(&expected));
        let found = floats(&gpu.download(stream, &part).unwrap());
        assert!(found == expected, "{len} elements differ");
        let all = values(gpu.as_ref(), stream, &x);
        assert!(
            all[..7].iter().chain(&all[7 + len..]).all(|v| *v == 0.0),
            "outside of {len} elements"
        );
    }
}

#[test]
fn bytes_may_be_reused_once_upload_returns() {
    let Some(gpu) = gpu_support::device() else { return };
    let stream = gpu.stream();
    let rows: Vec<Arena> = (0..64).map(|_| arena(gpu.as_ref(), "row", 300_000)).collect();
    let mut bytes = vec![0_f32; 300_000];
    for (i, row) in rows.iter().enumerate() {
        bytes.fill(i as f32);
        gpu.upload(stream, &row.whole(), bytemuck::cast_slice(&bytes));
    }
    for (i, row) in rows.iter().enumerate() {
        assert!(
            values(gpu.as_ref(), stream, row).iter().all(|v| *v == i as f32),
            "row {i}"
        );
    }
}

/// Enough work that a stream that does not wait would overtake it.
fn busy(gpu: &CudaDevice, stream: Stream, x: &Arena) {
    let fills = if is_emulated(gpu) { 10 } else { 200 };
    for i in 200 - fills..200 {
        let value = f64::from(i);
        gpu.enqueue(
            stream,
            Fill {
                out: x.whole(),
                value,
            }
            .into(),
        );
    }
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let Some(gpu) = gpu_support::device() else { return };
    let (first, second) = (gpu.stream(), gpu.named_stream("communication", true));
    let len = if is_emulated(&gpu) { 64 << 10 } else { 32 << 20 };
    let x = arena(gpu.as_ref(), "x", len);
    busy(&gpu, first, &x);
    gpu.wait_event(second, &gpu.record(first), soon());
    let copy = arena(gpu.as_ref(), "copy", len);
    let (x, out) = (x.whole(), copy.whole());
    gpu.enqueue(second, Cast { x, out }.into());
    // The value of the last fill.
    assert!(values(gpu.as_ref(), second, &copy).iter().all(|v| *v == 199.0));
    let done = gpu.record(first);
    done.wait(soon()).unwrap();
    assert_eq!(done.poll(), Some(Ok(())));
}

#[test]
fn numbers_are_fetched_in_the_order_of_the_stream() {
    let Some(gpu) = gpu_support::device() else { return };
    let stream = gpu.stream();
    let x = arena(gpu.as_ref(), "x", 1000);
    let fetches = (0..50).map(|i| {
        let value = f64::from(i);
        gpu.enqueue(
            stream,
            Fill {
                out: x.whole(),
                value,
            }
            .into(),
        );
        gpu.fetch(stream, &x.whole())
    });
    let fetches: Vec<_> = fetches.collect();
    // Large ones are waited for.
    let large = arena(gpu.as_ref(), "large", 1 << 20);
    let zeros = gpu.fetch(stream, &large.whole()).wait(soon()).unwrap();
    assert_eq!(floats(&zeros), vec![0.0; 1 << 20]);
    for (i, fetch) in fetches.into_iter().enumerate() {
        if i % 7 == 3 {
            // Given up: its memory goes back to the host.
            drop(fetch);
        } else {
            assert_eq!(floats(&fetch.wait(soon()).unwrap()), [i as f32; 1000]);
        }
    }
}

/// An update of all of `results`: parameters on `device`, masters and moments on `state`.
fn update(results: &[Arena; 4], grad: &Arena, scale: &Arena, step: u64) -> Update {
    let [copy, param, m, v] = results.each_ref().map(Arena::whole);
    Update {
        rule: adamw([0.9, 0.95], 1e-8),
        runs: Runs::uniform(param.len(), Rates::new(0.01, 0.1)),
        param,
        copy: Some(copy),
        grad: grad.whole(),
        slots: vec![m, v],
        scale: scale.whole(),
        step,
    }
}

/// Three updates, each with gradients that appear late and are gone at once.
fn updated_on_the_host(gpu: &CudaDevice, state: &StateMemory, len: usize) -> [Vec<f32>; 4] {
    let stream = gpu.stream();
    let [copy, grad] = ["parameters", "gradients"].map(|name| arena(gpu, name, len));
    let scale = arena(gpu, "scale", 1);
    gpu.upload(stream, &scale.whole(), bytemuck::bytes_of(&0.5_f32));
    let [masters, m, v] = ["masters", "m", "v"].map(|name| {
        let spec = ArenaSpec::private(name, DType::F32, len);
        state.alloc(&spec).unwrap()
    });
    let results = [copy, masters, m, v];
    for step in 1..=3 {
        busy(gpu, stream, &grad);
        state.enqueue_all(stream, vec![update(&results, &grad, &scale, step).into()]);
        let gone = Fill {
            out: grad.whole(),
            value: 1e9,
        };
        gpu.enqueue(stream, gone.into());
    }
    let found = results
        .each_ref()
        .map(|arena| floats(&state.download(stream, &arena.whole()).unwrap()));
    // The work that is done holds its slots until more work comes.
    state.upload(stream, &results[1].whole(), bytemuck::cast_slice(&found[1]));
    state.synchronize(stream).unwrap();
    found
}

#[test]
fn state_on_the_host_is_updated_in_the_order_of_the_stream() {
    let Some(gpu) = gpu_support::device() else { return };
    let len = if is_emulated(&gpu) { 100_003 } else { 1_000_003 };
    let shared: Arc<dyn Device> = gpu.clone();
    let cpu = CpuDevice::new(1).unwrap();
    // What the processor makes of the same gradients: the last of those that `busy` leaves.
    let [param, m, v, grad] = ["masters", "m", "v", "gradients"].map(|name| arena(&cpu, name, len));
    let scale = arena(&cpu, "scale", 1);
    scale.whole().host_mut::<f32>().unwrap()[0] = 0.5;
    grad.whole().host_mut::<f32>().unwrap().fill(199.0);
    let stream = cpu.stream();
    for step in 1..=3 {
        let results = [&param, &param, &m, &v].map(Arena::clone);
        let update = Update {
            copy: None,
            ..update(&results, &grad, &scale, step)
        };
        cpu.enqueue(stream, update.into());
    }
    cpu.synchronize(stream).unwrap();
    let [param, m, v] = [param, m, v].map(|arena| values(&cpu, stream, &arena));
    // One piece, and many more than there are slots.
    for piece in [1 << 20, 30_000] {
        let state = StateMemory::on_host(shared.clone(), 4, piece).unwrap();
        assert!(state.host_state().is_some(), "memory of its own");
        let found = updated_on_the_host(&gpu, &state, len);
        let expected = [&param, &param, &m, &v];
        for (name, (found, expected)) in ["parameters", "masters", "m", "v"]
            .iter()
            .zip(found.iter().zip(expected))
        {
            assert!(found == expected, "{name}, pieces of {piece}");
        }
    }
}

#[test]
fn a_stream_waits_for_the_host() {
    let Some(gpu) = gpu_support::device() else { return };
    let stream = gpu.stream();
    let x = arena(gpu.as_ref(), "x", 1000);
    let (event, signal) = Event::pair("a fact of the host");
    std::thread::scope(|scope| {
        scope.spawn(|| signal.set(Ok(())));
        gpu.wait_event(stream, &event, soon());
        gpu.enqueue(
            stream,
            Fill {
                out: x.whole(),
                value: 3.0,
            }
            .into(),
        );
    });
    assert_eq!(values(gpu.as_ref(), stream, &x), [3.0; 1000]);
}

#[test]
fn after_an_error_a_stream_skips_until_it_is_synchronised() {
    let Some(gpu) = gpu_support::device() else { return };
    let stream = gpu.stream();
    let x = arena(gpu.as_ref(), "x", 10);
    let (event, signal) = Event::pair("a collective");
    signal.set(Err(DeviceError::Upstream("rank 3 is gone".to_owned())));
    gpu.wait_event(stream, &event, soon());
    let fill = Fill {
        out: x.whole(),
        value: 1.0,
    };
    gpu.enqueue(stream, fill.clone().into());
    let failed = Err(DeviceError::Upstream("rank 3 is gone".to_owned()));
    assert_eq!(gpu.record(stream).poll(), Some(failed.clone()));
    assert_eq!(gpu.synchronize(stream), failed);
    assert_eq!(values(gpu.as_ref(), stream, &x), [0.0; 10]);
    gpu.enqueue(stream, fill.into());
    assert_eq!(values(gpu.as_ref(), stream, &x), [1.0; 10]);
}

#[test]
fn memory_of_the_host_is_refused_by_name() {
    let Some(gpu) = gpu_support::device() else { return };
    let stream = gpu.stream();
    let x = arena(&CpuDevice::new(1).unwrap(), "on the host", 10);
    gpu.enqueue(
        stream,
        Fill {
            out: x.whole(),
            value: 1.0,
        }
        .into(),
    );
    let error = gpu.synchronize(stream).unwrap_err().to_string();
    assert!(
        error.starts_with("`on the host` is not in the memory of GPU 0 ("),
        "{error}"
    );
}

#[test]
fn a_lack_of_memory_names_what_was_wanted_and_who_holds_the_rest() {
    let Some(gpu) = gpu_support::device() else { return };
    let _held = arena(gpu.as_ref(), "gradients", 1 << 20);
    let spec = ArenaSpec::private(
        "activation everything",
        DType::F32,
        gpu.context().facts().memory_bytes,
    );
    let error = gpu
        .alloc(&spec)
        .expect_err("four times the card's memory")
        .to_string();
    for part in [
        "`activation everything`",
        "gradients 4.0 MiB",
        "hint: lower `train.micro_batch`",
    ] {
        assert!(error.contains(part), "{error}");
    }
    // The device still works.
    let x = arena(gpu.as_ref(), "x", 10);
    assert_eq!(values(gpu.as_ref(), gpu.stream(), &x), [0.0; 10]);
}

#[test]
fn the_peak_of_memory_is_remembered() {
    let Some(gpu) = gpu_support::device() else { return };
    let before = gpu.peak_bytes().unwrap();
    drop(arena(gpu.as_ref(), "x", 3 << 20));
    drop(arena(gpu.as_ref(), "x", 1 << 20));
    assert_eq!(gpu.peak_bytes().unwrap() - before, 12 << 20);
}

#[test]
fn a_gpu_that_is_not_there_is_refused() {
    if gpu_support::device().is_none() {
        return;
    }
    let options = CudaOptions {
        ordinal: 1000,
        ..CudaOptions::default()
    };
    let error = CudaDevice::open(options).unwrap_err().to_string();
    assert!(
        error.starts_with("cannot open GPU 1000: the driver reports "),
        "{error}"
    );
}

/// The copy reads its source when the stream comes to it, not when it is enqueued.
#[test]
fn a_stamp_tells_that_the_device_was_abandoned_before_the_stream_came_to_it() {
    let Some(gpu) = gpu_support::device() else { return };
    let (stream, other) = (gpu.stream(), gpu.named_stream("communication", true));
    let stamps = gpu.alloc(&ArenaSpec::private("stamps", DType::F64, 3)).unwrap();
    gpu.upload(stream, &stamps.whole(), bytemuck::cast_slice(&[5.0_f64; 3]));
    gpu.stamp(stream, &stamps.slice(0..1));
    gpu.synchronize(stream).unwrap();
    let (go_on, waits) = std::sync::mpsc::channel();
    let wait = move || waits.recv().unwrap();
    gpu.host_side().unwrap().run(stream, Box::new(wait));
    gpu.stamp(stream, &stamps.slice(1..2));
    gpu.abandon();
    go_on.send(()).unwrap();
    // The stream skips what comes behind a collective that has failed.
    let aborted = Event::failed(DeviceError::Upstream("aborted".into()));
    gpu.wait_event(stream, &aborted, soon());
    gpu.stamp(stream, &stamps.slice(2..3));
    gpu.recover(stream, Duration::from_mins(1)).unwrap();
    gpu.stamp(stream, &stamps.slice(2..3));
    let bytes = gpu.download(stream, &stamps.whole()).unwrap();
    let [before, behind, recovered]: [f64; 3] = bytemuck::pod_read_unaligned(&bytes);
    assert!(
        before == 0.0 && behind.is_nan() && recovered == 0.0,
        "{before} {behind} {recovered}"
    );
    assert!(
        gpu.raw_stream(other).is_err(),
        "a stream of the generation before"
    );
}

/// A device that has not come to rest is used no more, and neither is one with an error of its own.
#[test]
fn a_device_does_not_recover_from_what_is_no_abort() {
    let Some(gpu) = gpu_support::device() else { return };
    let stream = gpu.stream();
    let (go_on, waits) = std::sync::mpsc::channel();
    let wait = move || waits.recv().unwrap();
    gpu.host_side().unwrap().run(stream, Box::new(wait));
    let error = gpu.recover(stream, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, DeviceError::TimedOut { .. }), "{error}");
    go_on.send(()).unwrap();
    let short = arena(gpu.as_ref(), "x", 1);
    gpu.upload(stream, &short.whole(), &[0; 8]);
    let error = gpu.recover(stream, Duration::from_mins(1)).unwrap_err();
    assert!(matches!(error, DeviceError::Shape { .. }), "{error}");
}

#[test]
fn a_device_is_found_again_behind_its_trait() {
    let Some(gpu) = gpu_support::device() else { return };
    let device: Arc<dyn Device> = gpu;
    assert!(CudaDevice::of(device.as_ref()).is_some());
    assert!(CudaDevice::of(&CpuDevice::new(1).unwrap()).is_none());
    assert!(device.name().starts_with("cuda:0 ("), "{}", device.name());
}
