//! The GPU of the machine, for tests that need one.
//!
//! Where there is none such a test says so on stderr and passes, unless `DDP_REQUIRE_GPU=1` says that there must be
//! one: `tests/gpu/run.sh` does.

use std::sync::Arc;

use ddp_worker::device::cuda::{CubinCache, CudaDevice, CudaOptions};

/// True of `tests/emulator`, which takes a microsecond for what a GPU does in a picosecond: tests give it less to do.
pub(crate) fn is_emulated(gpu: &CudaDevice) -> bool {
    gpu.context().name() == "Emulated GPU"
}

/// The first GPU, or none after a loud word.
pub(crate) fn device() -> Option<Arc<CudaDevice>> {
    open(false)
}

/// The same, with GELUs within products or without.
pub(crate) fn open(fused_gelu: bool) -> Option<Arc<CudaDevice>> {
    let options = CudaOptions {
        fused_gelu,
        cache: CubinCache::of_user(),
        ..CudaOptions::default()
    };
    match CudaDevice::open(options) {
        Ok(device) => Some(Arc::new(device)),
        Err(error) => {
            let required = std::env::var("DDP_REQUIRE_GPU").is_ok_and(|value| value == "1");
            assert!(!required, "{error}");
            eprintln!("SKIPPED, not run on a GPU: {error}");
            None
        }
    }
}
