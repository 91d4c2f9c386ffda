//! Kernels of a GPU beside what the card can do: copy and matrix-product ceilings first, then each operation of a
//! training step of GPT-2 124M and 350M and of Llama 3.2 1B in bf16, with its bytes, its floating-point operations and its share of the
//! roofline.
//!
//! ```text
//! cargo run --release -p ddp-worker --example gpu_kernels
//! cargo run --release -p ddp-worker --example gpu_kernels -- --rehearse    # at hardly a size, to see that all of it runs
//! ```
//!
//! | file | what lives there |
//! |---|---|
//! | `bench` | buffers, times, rows of the table |
//! | `driver_copy` | the driver's own copy within the card |
//! | `model` | the operations of GPT-2 |
//! | `llama` | those that Llama has beside them |
//!
//! The time of an operation is that of many in a row on one stream, by the host's clock. They take turns on several sets of
//! buffers, so that none finds in the card's L2 what it read or wrote before. `roof` is the time that its bytes take at
//! the measured copy rate, the faster of the driver's copy and our kernel's, or its operations at the measured rate of
//! products, whichever is longer.

mod bench;
mod driver_copy;
mod llama;
mod model;

use ddp_worker::device::cuda::{CubinCache, CudaDevice, CudaOptions};
use ddp_worker::device::{DType, Device, DeviceError};
use ddp_worker::ops::{Cast, LinearShape, WeightLayout};

use bench::{Bench, Effort};
use driver_copy::DriverCopy;
use llama::Llama;
use model::Model;

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
            llamas: vec![("3.2 1B", Llama::of([4, 2048, 32, 8, 64], 8192))],
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
}

fn main() -> Result<(), DeviceError> {
    let plan = match std::env::args().nth(1).as_deref() {
        None => Plan::of_a_card(),
        Some("--rehearse") => Plan::rehearsed(),
        Some(other) => panic!("`{other}` is no argument: there is `--rehearse`"),
    };
    let device = CudaDevice::open(CudaOptions {
        cache: CubinCache::of_user(),
        // The rows `widen + gelu` are its measure; no other operation asks for it.
        fused_gelu: true,
        ..CudaOptions::default()
    })?;
    println!("{}", device.name());
    let mut bench = Bench::new(device, plan.effort);
    bench.copy_rate = copy_rate(&bench, plan.copied)?;
    bench.product_rate = product_rate(&bench, plan.side)?;
    for (name, model) in &plan.models {
        println!(
            "\nGPT-2 {name}: {} samples of {} positions, vocabulary {}",
            model.batch, model.positions, model.vocab
        );
        heading();
        model.measure(&bench)?;
    }
    for (name, llama) in &plan.llamas {
        println!("\nLlama {name}: {:?}", llama.shape);
        heading();
        llama.measure(&bench)?;
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
