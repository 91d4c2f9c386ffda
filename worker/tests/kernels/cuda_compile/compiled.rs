//! The real NVRTC, and what it made: kept in the target folder by contents, and compiled once for all tests.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use ddp_worker::cuda::{Arch, CompileUnit, Cubin, KernelCache, Nvrtc};
use ddp_worker::device::DeviceError;

/// The compiler, or none after a loud word.
pub(crate) fn nvrtc() -> Option<Nvrtc> {
    match Nvrtc::open() {
        Ok(nvrtc) => {
            eprintln!(
                "NVRTC {} in {}",
                nvrtc.version(),
                nvrtc.library().path().display()
            );
            Some(nvrtc)
        }
        Err(error) => {
            let required = std::env::var("DDP_REQUIRE_NVRTC").is_ok_and(|value| value == "1");
            assert!(!required, "{error}");
            eprintln!("SKIPPED: kernels were not compiled: {error}");
            None
        }
    }
}

/// Machine code of each unit, in their order. One test at a time, on all processors.
pub(crate) fn compiled(nvrtc: &Nvrtc, units: &[CompileUnit], arch: Arch) -> Vec<Result<Cubin, DeviceError>> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = KernelCache::at(Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_compile"));
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(unit) = units.get(index) else { break };
                    let outcome = cache.compile(nvrtc, unit, arch);
                    done.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push((index, outcome));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}
