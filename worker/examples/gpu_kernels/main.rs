//! Kernels of a GPU beside what the card can do: copy and matrix-product ceilings first, then each operation of a
//! training step of GPT-2 124M and 350M, Llama 3.2 1B and 3 8B in bf16, with its bytes, its floating-point operations and
//! its share of the roofline.
//!
//! ```text
//! cargo run --release -p ddp-worker --example gpu_kernels
//! cargo run --release -p ddp-worker --example gpu_kernels -- --tokens FILE # with ids of a file of GPT-2's tokens
//! cargo run --release -p ddp-worker --example gpu_kernels -- --rehearse    # at hardly a size, to see that all of it runs
//! compute-sanitizer --tool racecheck gpu_kernels --sanitize                # few operations, at sizes for such a tool
//! ```
//!
//! | file | what lives there |
//! |---|---|
//! | `bench` | buffers, times, rows of the table |
//! | `driver_copy` | the driver's own copy within the card |
//! | `model` | the operations of GPT-2 |
//! | `llama` | those that Llama has beside them |
//! | `token_ids` | token ids, of a file or as uneven as those of a text |
//!
//! The time of an operation is that of many in a row on one stream, by the host's clock. They take turns on several sets of
//! buffers, so that none finds in the card's L2 what it read or wrote before. `roof` is the time that its bytes take at
//! the measured copy rate, the faster of the driver's copy and our kernel's, or its operations at the measured rate of
//! products, whichever is longer.

mod bench;
mod driver_copy;
mod llama;
mod model;
mod token_ids;

use std::error::Error;
use std::path::Path;

use ddp_worker::cuda::{CudaOptions, KernelCache};
use ddp_worker::device::{CudaDevice, DType, Device, DeviceError};
use ddp_worker::ops::{Cast, LinearShape, WeightLayout};

use bench::{Bench, Effort};
use driver_copy::DriverCopy;
use llama::Llama;
use model::Model;
use token_ids::TokenIds;

/// What is done.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Measure,
    Rehearse,
    Sanitize,
}

/// What is measured.
struct Plan {
    effort: Effort,
    /// Elements of f32 that are copied.
    copied: usize,
    /// Rows and columns of the product that is the ceiling.
    side: usize,
    models: Vec<(&'static str, Model)>,
    llamas: Vec<(&'static str, Llama)>,
}

impl Plan {
    fn of_a_card() -> Self {
        let model = |channels, heads| Model {
            batch: 16,
            positions: 1024,
            channels,
            heads,
            vocab: 50_304,
        };
        Self {
            effort: Effort {
                span: 0.02,
                // Twice the L2 of the largest card so far, 126 MB.
                rotated: 256 << 20,
            },
            copied: 1 << 29,
            side: 8192,
            models: vec![("124M", model(768, 12)), ("350M", model(1024, 16))],
            llamas: vec![
                ("3.2 1B", Llama::of([4, 2048, 32, 8, 64], 8192)),
                ("3 8B", Llama::of([2, 4096, 32, 8, 128], 14_336)),
            ],
        }
    }

    fn rehearsed() -> Self {
        let model = Model {
            batch: 1,
            positions: 32,
            channels: 64,
            heads: 2,
            vocab: 256,
        };
        Self {
            effort: Effort {
                span: 0.0,
                rotated: 32 << 10,
            },
            copied: 1 << 18,
            side: 32,
            models: vec![("of hardly a size", model)],
            llamas: vec![("of hardly a size", Llama::of([1, 32, 4, 2, 32], 64))],
        }
    }

    /// Several thread blocks of each kernel, whose last ones are not full, and each operation few times.
    fn sanitized() -> Self {
        let model = Model {
            batch: 2,
            positions: 200,
            channels: 128,
            heads: 2,
            // Rows that shared memory keeps: shorter ones are a warp's.
            vocab: 4_096,
        };
        Self {
            effort: Effort {
                span: 0.0,
                rotated: 0,
            },
            copied: 0,
            side: 0,
            models: vec![("for a sanitizer", model)],
            llamas: vec![("for a sanitizer", Llama::of([1, 200, 4, 2, 64], 64))],
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (purpose, ids) = match words[..] {
        [] => (Purpose::Measure, TokenIds::zipf()),
        ["--tokens", file] => (Purpose::Measure, TokenIds::of_file(Path::new(file))?),
        ["--rehearse"] => (Purpose::Rehearse, TokenIds::zipf().through_a_file()?),
        ["--sanitize"] => (Purpose::Sanitize, TokenIds::zipf()),
        _ => panic!(
            "`{}`: expected `--tokens FILE`, `--rehearse` or `--sanitize`",
            words.join(" ")
        ),
    };
    let plan = match purpose {
        Purpose::Measure => Plan::of_a_card(),
        Purpose::Rehearse => Plan::rehearsed(),
        Purpose::Sanitize => Plan::sanitized(),
    };
    let device = CudaDevice::open(CudaOptions {
        cache: KernelCache::of_user(),
        ..CudaOptions::default()
    })?;
    println!("{}\n{}", device.name(), ids.description());
    let mut bench = Bench::new(device, plan.effort, ids.ids);
    // The library's kernels are not ours to check, and take such a tool long.
    if purpose != Purpose::Sanitize {
        bench.copy_rate = copy_rate(&bench, plan.copied)?;
        bench.product_rate = product_rate(&bench, plan.side)?;
    }
    Ok(measure(&plan, purpose, &bench)?)
}

/// Prints a table for each model.
fn measure(plan: &Plan, purpose: Purpose, bench: &Bench) -> Result<(), DeviceError> {
    for (name, model) in &plan.models {
        println!(
            "\nGPT-2 {name}: {} samples of {} positions, vocabulary {}",
            model.batch, model.positions, model.vocab
        );
        heading();
        match purpose {
            Purpose::Sanitize => model.measure_for_sanitizer(bench)?,
            Purpose::Measure | Purpose::Rehearse => model.measure(bench)?,
        }
    }
    for (name, llama) in &plan.llamas {
        println!("\nLlama {name}: {:?}", llama.shape);
        heading();
        match purpose {
            Purpose::Sanitize => llama.measure_for_sanitizer(bench)?,
            Purpose::Measure | Purpose::Rehearse => llama.measure(bench)?,
        }
    }
    Ok(())
}

fn heading() {
    println!(
        "{:34} {:>10} {:>9} {:>9} {:>7}",
        "operation", "µs", "GB/s", "TFLOP/s", "of roof"
    );
}

/// Bytes a second, read and written, of so many elements of f32.
fn copy_rate(bench: &Bench, elements: usize) -> Result<f64, DeviceError> {
    let (x, out) = (
        bench.zeros(DType::F32, elements)?,
        bench.zeros(DType::F32, elements)?,
    );
    let rate = |seconds: f64| (8 * elements) as f64 / seconds;
    let driver = DriverCopy::load()?;
    let by_driver = rate(bench.seconds(|_| driver.enqueue(&bench.device, bench.stream, &x, &out))?);
    let by_kernel = rate(bench.seconds_of(&[Cast { x, out }.into()])?);
    println!(
        "copy of {} MiB: {:.0} GB/s by the driver, {:.0} by our kernel",
        (4 * elements) >> 20,
        by_driver / 1e9,
        by_kernel / 1e9
    );
    Ok(by_driver.max(by_kernel))
}

/// Floating-point operations a second of a product of two square matrices in bf16.
fn product_rate(bench: &Bench, side: usize) -> Result<f64, DeviceError> {
    let shape = LinearShape {
        rows: side,
        inputs: side,
        outputs: side,
        layout: WeightLayout::InOut,
    };
    let seconds = bench.seconds_of(&[bench.linear_forward(shape, false)?.into()])?;
    let rate = 2.0 * (side as f64).powi(3) / seconds;
    println!("bf16 product of {side} × {side}: {:.0} TFLOP/s", rate / 1e12);
    Ok(rate)
}
