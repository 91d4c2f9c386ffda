//! What CPU kernels need of the machine: the threads of a rank, and the instruction set that element-wise kernels are
//! compiled for, chosen when the process runs.

use std::fmt;

use pulp::{Arch, WithSimd};

use super::DeviceError;

/// The threads of this rank, and the instruction set of its kernels.
#[derive(Debug)]
pub struct Cpu {
    threads: usize,
    pool: Option<rayon::ThreadPool>,
    isa: Isa,
}

impl Cpu {
    /// A rank with this many threads. One thread needs no pool.
    pub fn new(threads: usize) -> Result<Self, DeviceError> {
        Self::with_isa(threads, Isa::detect())
    }

    /// The same, with an instruction set other than the best.
    pub fn with_isa(threads: usize, isa: Isa) -> Result<Self, DeviceError> {
        let pool = (threads > 1).then(|| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|i| format!("ddp-compute-{i}"));
            let failed = |e| DeviceError::Upstream(format!("cannot start {threads} compute threads: {e}"));
            pool.build().map_err(failed)
        });
        Ok(Self {
            threads: threads.max(1),
            pool: pool.transpose()?,
            isa,
        })
    }

    /// Threads of this rank.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Instruction set of the element-wise kernels.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Runs `work(i)` for every `i < count`, on all threads. What `work` computes must not depend on which
    /// thread runs it.
    pub fn for_each(&self, count: usize, work: impl Fn(usize) + Send + Sync) {
        self.for_each_part((0..count).collect(), work);
    }

    /// Runs `work` on every part of a job, on all threads. A part is what one call may touch: slices that do
    /// not overlap, cut so that the number of threads changes no bit: by the problem's size alone where it could.
    pub fn for_each_part<P: Send>(&self, parts: Vec<P>, work: impl Fn(P) + Send + Sync) {
        use rayon::prelude::*;
        match &self.pool {
            Some(pool) if parts.len() > 1 => {
                pool.install(|| parts.into_par_iter().with_max_len(1).for_each(&work));
            }
            _ => parts.into_iter().for_each(work),
        }
    }
}

/// An instruction set that this machine has.
///
/// Kernels are written once, in plain arithmetic with a fixed order of additions, and compiled for each set;
/// so they compute the same bits on all of them.
#[derive(Clone, Copy, Debug)]
pub struct Isa(Arch);

impl Isa {
    /// The best of this machine.
    pub fn detect() -> Self {
        Self(Arch::new())
    }

    /// What every machine of the architecture has.
    pub const fn baseline() -> Self {
        Self(Arch::Scalar)
    }

    /// All that this machine has, the baseline first.
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
