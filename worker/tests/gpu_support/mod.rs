//! The GPU of the machine, for tests that need one.
//!
//! Where there is none such a test says so on stderr and passes, unless `DDP_REQUIRE_GPU=1` says that there must be
//! one: `tests/gpu/run.sh` does.

use std::sync::Arc;

use ddp_worker::cuda::{CudaOptions, KernelCache};
use ddp_worker::device::CudaDevice;

/// The first GPU, or none after a loud word.
pub(crate) fn device() -> Option<Arc<CudaDevice>> {
    let options = CudaOptions {
        cache: KernelCache::of_user(),
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
