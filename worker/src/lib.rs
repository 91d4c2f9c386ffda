//! The data-parallel training worker.
//!
//! ARCHITECTURE.md lists the modules and what each must not know.
//!
//! The worker reads the environment contract and a control socket; it does not know its launcher.
#![deny(unsafe_code)]

pub mod checkpoint;
pub mod collective;
pub mod config;
pub mod costs;
pub mod cuda;
pub mod data;
pub mod device;
pub mod inference;
pub mod libraries;
pub mod memory;
pub mod mesh;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod optim;
pub mod parallel;
pub mod plan;
pub mod pretrained;
pub mod session;
pub mod timeline;
pub mod tokenize;
pub mod train;

/// For `tests/fuzz`: parsers of what other processes send that have no public function.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::collective::host::read_foreign;
    pub use crate::collective::nccl::read_foreign_id;
}
