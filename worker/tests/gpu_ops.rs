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
use ddp_worker::device::cuda::KernelChoices;
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

/// In one pass of cuBLASLt where it has one (for GELUs on Hopper only), elsewhere as without; rows of logits in shared
/// memory where they fit.
fn check_other_kernels(size: Size) {
    for (kind, layout) in [
        ("linear and gelu", ""),
        ("linear dweight and dbias", "InOut"),
        ("linear dweight and dbias", "OutIn"),
        ("cross entropy and gradient", ""),
    ] {
        let Some(device) = gpu_support::open(OTHER_KERNELS) else {
            return;
        };
        let mut cases = catalogue(size);
        cases.retain(|case| case.name.starts_with(kind) && case.name.contains(layout));
        assert!(!cases.is_empty(), "{kind}");
        check_on(device.as_ref(), &cases);
        let refused = device.products_refused().unwrap();
        println!("{kind} {layout}: {refused} kinds of products took more than one pass");
        if !layout.is_empty() {
            // Of each size, in bf16 and with gradients of f32, what is not added to a gradient.
            let asked = cases.len() / 2 * 2;
            assert!(refused < asked, "all {asked} were refused");
        }
    }
}

const OTHER_KERNELS: KernelChoices = KernelChoices {
    fused_gelu: true,
    fused_bias_gradients: true,
    shared_logits: true,
};

#[test]
fn rows_in_shared_memory_give_the_same_bits() {
    let (Some(plain), Some(other)) = (gpu_support::device(), gpu_support::open(OTHER_KERNELS)) else {
        return;
    };
    let (plain, other) = (Bench::new(plain.as_ref()), Bench::new(other.as_ref()));
    let mut cases = catalogue(Size::Small);
    cases.retain(|case| case.name.starts_with("cross entropy and gradient"));
    assert!(!cases.is_empty());
    for case in cases {
        for types in Types::ALL {
            let bits = |bench| -> Vec<Vec<u64>> {
                let tensors: Vec<Vec<f64>> = case.run(bench, types).unwrap();
                let bits = tensors.iter().map(|t| t.iter().map(|x| x.to_bits()).collect());
                bits.collect()
            };
            assert_eq!(bits(&plain), bits(&other), "{}", case.name);
        }
    }
}

#[test]
fn other_kernels_agree_with_the_cpu() {
    check_other_kernels(Size::Small);
}

#[test]
fn other_kernels_agree_with_the_cpu_at_sizes_of_training() {
    check_other_kernels(Size::Large);
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
