//! `ddp-train doctor`: what this machine offers to training, what is missing, and what to do.
//!
//! [`facts`] and [`fabric`] look, [`report`] writes. Only [`gpus`] loads the
//! driver, in a process of its own, because a broken one can hang or crash.

pub mod fabric;
pub mod facts;
pub mod gpus;
pub mod report;

pub use facts::Facts;
pub use report::render;
