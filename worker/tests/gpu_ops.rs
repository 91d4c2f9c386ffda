//! Operations on an NVIDIA GPU against the CPU device, in f32 and bf16, at odd sizes and at those of training.
//!
//! Where there is no GPU the tests say so and pass, unless `DDP_REQUIRE_GPU=1` says that there must be one.

mod gpu_support;
mod op_cases;

use op_cases::{Size, Types, catalogue};

/// Runs everything in every precision, and says everything that differs.
fn check(size: Size) {
    let Some(device) = gpu_support::device() else {
        return;
    };
    let cases = catalogue(size);
    let mut differences = Vec::new();
    for case in &cases {
        for types in Types::ALL {
            differences.extend(case.check(device.as_ref(), types).err());
        }
    }
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
    for case in catalogue(Size::Small) {
        for types in Types::ALL {
            let bits = || -> Vec<Vec<u64>> {
                let tensors = case.run(device.as_ref(), types).unwrap();
                let bits = tensors.iter().map(|t| t.iter().map(|x| x.to_bits()).collect());
                bits.collect()
            };
            assert!(bits() == bits(), "{}", case.name);
        }
    }
}
