//! The data-parallel training worker.
//!
//! | module | what lives there | what it must not know |
//! |---|---|---|
//! | [`device`] | memory, streams, events | models, ranks |
//! | [`ops`] | operations as data, with their CPU kernels | models, ranks |
//! | [`model`] | parameters, blocks, GPT-2 and MLP | ranks, gradients' way to other ranks |
//! | [`collective`] | communicators, transports, work handles | models, gradients |
//! | [`parallel`] | gradient layout, reducer, checks that ranks agree | which model it is |
//! | [`optim`] | AdamW, clipping, learning rate | ranks |
//! | [`config`] | `train.yaml` as types | ranks |
//! | [`data`] | from a token file to the samples of a rank | models |
//! | [`checkpoint`] | tensors and manifest on disk | which rank held what |
//! | [`inference`] | a trained model at work: text from a prompt | ranks, training |
//! | [`libraries`] | which files of the machine are loaded at run time | what their functions do |
//! | [`mesh`] | axes, coordinates, groups: all that is known about numbers of ranks | what the ranks do |
//! | [`metrics`] | the files of a run beside its checkpoints | how the numbers came about |
//! | [`pretrained`] | published weights as first values | ranks |
//! | [`plan`] | what a run costs before it runs | how it runs |
//! | [`timeline`] | what ran when, as a trace and as a picture | what it was good for |
//! | [`tokenize`] | from texts to a token file | training |
//! | [`train`] | the loop of one rank | who started it |
//! | [`session`] | the worker's link to its job | who started it |
//!
//! The worker reads the environment contract and a control socket; it does not know its launcher.
#![deny(unsafe_code)]

pub mod checkpoint;
pub mod collective;
pub mod config;
pub mod data;
pub mod device;
pub mod inference;
pub mod libraries;
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
