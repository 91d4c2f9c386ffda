//! What CPU kernels need of the machine: the threads of a rank, and the instruction set that element-wise kernels are
//! compiled for, chosen when the process runs.

use std::fmt;
use std::sync::OnceLock;

use parking_lot::Mutex;
use pulp::{Arch, WithSimd};

use crate::memory::DeviceError;

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
        Isa::check_limit()?;
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

    /// Runs `work` on every part of a job, on all threads. A part is what one call may touch: slices that do
    /// not overlap, cut so that the number of threads changes no bit: by the problem's size alone where it could.
    pub fn for_each_part<P: Send>(&self, parts: Vec<P>, work: impl Fn(P) + Send + Sync) {
        let parts: Vec<_> = parts.into_iter().map(|part| Mutex::new(Some(part))).collect();
        self.for_each_index(parts.len(), &|i| {
            let part = parts[i].lock().take();
            work(part.expect("each part is taken once"));
        });
    }

    /// Not generic: a copy of the pool's code for each operation would be a tenth of this crate.
    fn for_each_index(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        use rayon::prelude::*;
        match &self.pool {
            Some(pool) if count > 1 => {
                pool.install(|| (0..count).into_par_iter().with_max_len(1).for_each(work));
            }
            _ => (0..count).for_each(work),
        }
    }
}

/// An instruction set that this machine has.
///
/// Kernels are written once, in plain arithmetic with a fixed order of additions, and compiled for each set;
/// so they compute the same bits on all of them.
#[derive(Clone, Copy, Debug)]
pub struct Isa(Arch);

/// This variable names the instruction set to use in place of the machine's best.
const VARIABLE: &str = "DDP_ISA";

impl Isa {
    /// The best of this machine, or the one that `DDP_ISA` names.
    pub fn detect() -> Self {
        Self::limit().unwrap_or_else(|| Self(Arch::new()))
    }

    /// The one that `DDP_ISA` names, for as long as the process lives. One that the machine does not have is refused where
    /// threads are made ([`Cpu::new`]), and not followed elsewhere.
    pub(crate) fn limit() -> Option<Self> {
        static NAMED: OnceLock<Option<Isa>> = OnceLock::new();
        *NAMED.get_or_init(|| Self::named().unwrap_or_default())
    }

    /// Whether the value of `DDP_ISA` can be followed.
    fn check_limit() -> Result<(), DeviceError> {
        Self::named().map(drop)
    }

    fn named() -> Result<Option<Self>, DeviceError> {
        let Some(name) = std::env::var_os(VARIABLE).filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let sets = Self::available();
        if let Some(&set) = sets.iter().find(|set| name == *set.to_string()) {
            return Ok(Some(set));
        }
        let sets: Vec<String> = sets.iter().map(|set| format!("`{set}`")).collect();
        Err(DeviceError::NoInstructionSet {
            named: name.display().to_string(),
            sets: sets.join(", "),
        })
    }

    /// Whether it is what every machine of the architecture has.
    pub(crate) fn is_baseline(self) -> bool {
        matches!(self.0, Arch::Scalar)
    }

    /// Whether it has AVX2, but not AVX-512.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn is_avx2(self) -> bool {
        matches!(self.0, Arch::V3(_))
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
    #[inline]
    pub fn dispatch<K: WithSimd>(self, kernel: K) -> K::Output {
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
