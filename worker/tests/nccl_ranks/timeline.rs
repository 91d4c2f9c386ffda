//! When the kernels of a rank and its collectives ran, by the events of both streams.

use std::fmt::Write;
use std::time::Instant;

use ddp_worker::collective::{Launch, ReduceOp, Traffic};
use ddp_worker::device::{ArenaSpec, Buffer, DType, Device, Event};
use ddp_worker::ops::{LinearForward, LinearShape, Op, WeightLayout};

use super::{Rank, TIMEOUT};

/// Buckets of a backward.
const BUCKETS: usize = 8;

/// Elements of one: 16 MiB in f32.
const ELEMENTS: usize = 4 << 20;

/// Matrix products that compute one.
const PRODUCTS: usize = 8;

/// Rows and columns of each matrix.
const SIDE: usize = 2048;

/// The same where a processor multiplies them by the definition (`tests/emulator`).
const EMULATED_SIDE: usize = 192;

/// Milliseconds since the first kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) began: f64,
    pub(crate) ended: f64,
}

/// One bucket: the kernels that compute it, and the collective that reduces it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bucket {
    pub(crate) kernels: Span,
    pub(crate) collective: Span,
}

/// A backward of [`BUCKETS`] buckets, each reduced as soon as its kernels are through.
pub(crate) fn backward(rank: &Rank) -> Vec<Bucket> {
    let gpu = rank.gpu.as_ref();
    let stream = gpu.stream();
    let product = product(gpu);
    let buckets: Vec<Buffer> = (0..BUCKETS).map(|_| zeros(gpu, DType::F32, ELEMENTS)).collect();
    let reduce = |buffer: &Buffer, after: Event| {
        let launch = Launch::after(after, Traffic::Grads, "timeline");
        rank.over_nccl.all_reduce(buffer, ReduceOp::Sum, launch)
    };
    // Kernels are compiled, ranks are connected.
    gpu.enqueue(stream, product.clone());
    let work = reduce(&buckets[0], gpu.record(stream));
    work.wait(Instant::now() + TIMEOUT).unwrap();

    let base = gpu.record_timed(stream);
    let mut launched = Vec::new();
    for bucket in &buckets {
        let began = gpu.record_timed(stream);
        for _ in 0..PRODUCTS {
            gpu.enqueue(stream, product.clone());
        }
        let ended = gpu.record_timed(stream);
        launched.push((began, ended.clone(), reduce(bucket, ended)));
    }
    gpu.synchronize(stream).unwrap();
    // Events of two streams of one device share its clock.
    let at = |event: &Event| {
        let since = event.since(&base);
        since.expect("both are timed and reached").as_secs_f64() * 1e3
    };
    let launched = launched.into_iter().map(|(began, ended, work)| {
        let interval = work.wait(Instant::now() + TIMEOUT).unwrap();
        let done = at(work.event());
        let ran = interval.and_then(|ran| ran.length());
        let ran = ran.expect("its events are timed").as_secs_f64() * 1e3;
        Bucket {
            kernels: Span {
                began: at(&began),
                ended: at(&ended),
            },
            collective: Span {
                began: done - ran,
                ended: done,
            },
        }
    });
    launched.collect()
}

/// A table for people, a line a bucket, and the share of the communication that ran beside kernels. Lines begin with
/// `overlap |`.
pub(crate) fn table(buckets: &[Bucket]) -> String {
    let last = buckets.last().map_or(0.0, |bucket| bucket.kernels.ended);
    let (mut all, mut beside) = (0.0, 0.0);
    let mut text = "overlap | bucket        kernels     collective\n".to_owned();
    for (i, Bucket { kernels, collective }) in buckets.iter().enumerate() {
        all += collective.ended - collective.began;
        beside += (collective.ended.min(last) - collective.began).max(0.0);
        writeln!(
            text,
            "overlap | {i:6} {:6.2}-{:6.2}  {:6.2}-{:6.2}",
            kernels.began, kernels.ended, collective.began, collective.ended
        )
        .expect("a string takes everything");
    }
    let share = 100.0 * beside / all;
    text + &format!("overlap | {share:.0}% of {all:.2} ms of communication beside kernels\n")
}

fn product(gpu: &dyn Device) -> Op {
    let is_emulated = gpu.name().contains("Emulated GPU");
    let side = if is_emulated { EMULATED_SIDE } else { SIDE };
    let matrix = || zeros(gpu, DType::Bf16, side * side);
    LinearForward {
        inp: matrix(),
        weight: matrix(),
        bias: None,
        residual: None,
        out: matrix(),
        exact: false,
        shape: LinearShape {
            rows: side,
            inputs: side,
            outputs: side,
            layout: WeightLayout::InOut,
        },
    }
    .into()
}

fn zeros(gpu: &dyn Device, dtype: DType, len: usize) -> Buffer {
    let spec = ArenaSpec::private("timeline", dtype, len);
    gpu.alloc(&spec).unwrap().whole()
}
