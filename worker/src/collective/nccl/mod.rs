//! NCCL: collectives between GPUs, enqueued on a stream of the device.
//!
//! The library is loaded at run time; 2.18 is the least. From the bottom, each knowing those before it:
//!
//! | file | what it holds |
//! |---|---|
//! | `sys` | types and functions of NCCL, as its header has them |
//! | `library` | [`Nccl`]: the library as a whole, its version and its words for errors |
//! | `handle` | one communicator of the library, used by one thread at a time; no call waits for other ranks |
//! | `lane` | what NCCL needs of a device: a stream, addresses |
//! | `reduction`, `translate` | requests in NCCL's terms: scaled sums, addresses, counts |
//! | `recorder` | the last operations, and how far each has come |
//! | `verdict` | whether a communicator is to be given up: a pure function |
//! | `comm` | one communicator through its life: made, used, given up and aborted, or left |
//! | `ticket` | one operation in the stream |
//! | `meeting`, `witness` | over the key-value store: how ranks find each other, and who is late |
//! | `watchdog` | the thread that looks after communicators |
//! | `transport` | [`NcclTransport`]: all of it as a [`super::StreamTransport`] |
//!
//! NCCL reads its own environment (`NCCL_DEBUG`, `NCCL_SOCKET_IFNAME` and so on); what it prints goes to the rank's
//! standard output, and so to the rank's log.
//!
//! Sums of bf16 are rounded by NCCL at each step of its algorithm, not once as on the CPU.

mod comm;
mod handle;
mod lane;
mod library;
mod meeting;
mod recorder;
mod reduction;
mod sys;
#[cfg(test)]
mod tests;
mod ticket;
mod translate;
mod transport;
mod verdict;
mod watchdog;
mod witness;

pub use library::Nccl;
pub use sys::Version;
pub use transport::{NcclPlace, NcclTransport};
