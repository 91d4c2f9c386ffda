//! NCCL: collectives between GPUs, enqueued on a stream of the device.
//!
//! The library is loaded at run time; 2.18 is the least. From the bottom, each file knowing those before it:
//!
//! | file | what it holds |
//! |---|---|
//! | `library` | types and functions of NCCL, as its header has them; [`Nccl`]: version and error messages; a communicator, used by one thread at a time |
//! | `flight_recorder` | the last operations of a communicator, and how far each has come |
//! | `comm` | one communicator: made, connected, used, left or aborted; its stream; one operation in the stream |
//! | `watchdog` | the thread that looks after communicators, and decides when one is aborted; which ranks are late |
//! | `transport` | [`NcclTransport`]: all of it as a [`super::Transport`]; how ranks find each other |
//!
//! NCCL reads its own environment (`NCCL_DEBUG`, `NCCL_SOCKET_IFNAME` and so on); what it prints goes to the rank's
//! standard output, and so to the rank's log.
//!
//! Sums of bf16 are rounded by NCCL at each step of its algorithm, not once as on the CPU.

mod comm;
mod flight_recorder;
mod library;
mod transport;
mod watchdog;

pub use comm::Membership;
pub use library::Nccl;
pub use transport::NcclTransport;

/// Whether bytes in the place of rank 0's id are one. For `tests/fuzz`.
#[doc(hidden)]
pub fn read_foreign_id(bytes: &[u8]) -> bool {
    transport::published_id(bytes, "2.30.4", std::path::Path::new("libnccl.so.2")).is_ok()
}
