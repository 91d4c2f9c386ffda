//! The instruction set that element-wise kernels are compiled for, chosen when the process runs.

use std::fmt;

use pulp::{Arch, WithSimd};

/// An instruction set that this machine has.
///
/// Kernels are written once, in plain arithmetic with a fixed order of additions, and compiled for each set;
/// so they compute the same bits on all of them.
#[derive(Clone, Copy)]
pub struct Isa(Arch);

impl Isa {
    /// The best of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self(Arch::new())
    }

    /// What every machine of the architecture has.
    #[must_use]
    pub const fn baseline() -> Self {
        Self(Arch::Scalar)
    }

    /// All that this machine has, the baseline first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut, reason = "other architectures have one or two")]
        let mut sets = vec![Self::baseline()];
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(pulp::x86::V3::try_new().map(|v3| Self(Arch::V3(v3))));
            sets.extend(pulp::x86::V4::try_new().map(|v4| Self(Arch::V4(v4))));
        }
        sets
    }

    /// Runs a kernel, compiled for this set.
    pub(crate) fn dispatch<K: WithSimd>(self, kernel: K) -> K::Output {
        self.0.dispatch(kernel)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Arch::Scalar => "baseline",
            #[cfg(target_arch = "x86_64")]
            Arch::V3(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Arch::V4(_) => "avx512",
            _ => "simd",
        })
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Isa({self})")
    }
}
