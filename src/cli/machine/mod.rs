//! This machine, as far as a launch has to know it.
//!
//! | module | what it does | what it must not do |
//! |---|---|---|
//! | [`hardware`] | counts cores, lists GPUs | initialise CUDA in the launcher |
//! | [`topology`] | where cores and GPUs lie | |
//! | [`numa`] | which cores each worker may use | any I/O |
//! | [`limits`] | the stack and the open files that a launch needs | |

pub mod hardware;
pub mod limits;
pub mod numa;
pub mod topology;
