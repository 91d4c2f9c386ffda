//! Devices as their makers describe them.

use crate::config::Precision;

const GB: u64 = 1_000_000_000;

/// A GPU by its data sheet: rates of dense matrices without sparsity, which no program exceeds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accelerator {
    /// As people call it.
    pub name: &'static str,
    /// Bytes of its memory.
    pub memory: u64,
    /// Floating-point operations a second in f32, in tf32 and in bf16 with sums in f32.
    flops: [f64; 3],
    /// Bytes a second that it sends to the other GPUs of its node over NVLink: half of what data sheets say, which
    /// add both directions.
    pub link: f64,
}

impl Accelerator {
    /// Those with a name of their own, as SXM modules. Sources: NVIDIA's data sheets of A100 (June 2021), H100 and H200
    /// (2024), and HGX B200 (2025, a GPU's eighth).
    pub const ALL: [Self; 5] = [
        Self {
            name: "a100-40gb",
            memory: 40 * GB,
            flops: [19.5e12, 156e12, 312e12],
            link: 300e9,
        },
        Self {
            name: "a100",
            memory: 80 * GB,
            flops: [19.5e12, 156e12, 312e12],
            link: 300e9,
        },
        Self {
            name: "h100",
            memory: 80 * GB,
            flops: [67e12, 494.7e12, 989.4e12],
            link: 450e9,
        },
        Self {
            name: "h200",
            memory: 141 * GB,
            flops: [67e12, 494.7e12, 989.4e12],
            link: 450e9,
        },
        Self {
            name: "b200",
            memory: 180 * GB,
            flops: [75e12, 1100e12, 2250e12],
            link: 900e9,
        },
    ];

    /// The one of that name, in capitals or not.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let known = |accelerator: &Self| accelerator.name.eq_ignore_ascii_case(name);
        Self::ALL.into_iter().find(known)
    }

    /// Operations a second of matrix products in a precision.
    #[must_use]
    pub const fn flops(&self, precision: Precision) -> f64 {
        let [f32, tf32, bf16] = self.flops;
        match precision {
            Precision::F32 => f32,
            Precision::Tf32 => tf32,
            Precision::Bf16 => bf16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_however_they_are_written() {
        let h100 = Accelerator::named("H100").unwrap();
        assert_eq!(h100.flops(Precision::Bf16), 989.4e12);
        assert_eq!(Accelerator::named("h1000"), None);
    }
}
