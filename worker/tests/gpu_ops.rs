//! Operations on an NVIDIA GPU against the CPU device, in f32 and bf16, at odd sizes and at those of training.
//!
//! Where there is no GPU the tests say so and pass, unless `DDP_REQUIRE_GPU=1` says that there must be one.

mod gpu_support;
#[path = "kernels/op_cases/mod.rs"]
mod op_cases;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

use ddp_worker::device::Device;
use op_cases::{Bench, Case, Size, Types, catalogue};

/// Runs everything in every precision, and says everything that differs.
fn check(size: Size) {
    if let Some(device) = gpu_support::device() {
        check_on(device.as_ref(), &catalogue(size));
    }
}

/// On several threads: the host's part, in f64, takes the time, and so do kernels that are compiled. Neighbours have the
/// same kernels, so each thread takes a case far from the one before.
fn check_on(device: &dyn Device, cases: &[Case]) {
    /// Cases from one to the next; a prime that divides no number of cases leaves none out.
    const STRIDE: usize = 1_000_003;
    assert!(!cases.len().is_multiple_of(STRIDE));
    let next = AtomicUsize::new(0);
    let differences = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                let bench = Bench::new(device);
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= cases.len() {
                        break;
                    }
                    let case = &cases[number * STRIDE % cases.len()];
                    for types in Types::ALL {
                        let difference = case.check(&bench, types).err();
                        differences.lock().unwrap().extend(difference);
                    }
                }
            });
        }
    });
    let differences = differences.into_inner().unwrap();
    let runs = cases.len() * Types::ALL.len();
    assert!(
        differences.is_empty(),
        "{} of {runs} differ:\n{}",
        differences.len(),
        differences.join("\n")
    );
    println!("{runs} runs of {} cases agree", cases.len());
}

#[test]
fn odd_sizes_agree_with_the_cpu() {
    check(Size::Small);
}

#[test]
fn sizes_of_training_agree_with_the_cpu() {
    check(Size::Large);
}

#[test]
fn the_same_inputs_give_the_same_bits() {
    let Some(device) = gpu_support::device() else {
        return;
    };
    let bench = Bench::new(device.as_ref());
    for case in catalogue(Size::Small) {
        for types in Types::ALL {
            let bits = || -> Vec<Vec<u64>> {
                let tensors = case.run(&bench, types).unwrap();
                let bits = tensors.iter().map(|t| t.iter().map(|x| x.to_bits()).collect());
                bits.collect()
            };
            assert!(bits() == bits(), "{}", case.name);
        }
    }
}
