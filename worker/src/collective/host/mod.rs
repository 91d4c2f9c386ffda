//! The transport of buffers in host memory. From the bottom, each file knowing those before it:
//!
//! | file | what it holds |
//! |---|---|
//! | `topology` | [`RankInfo`]; the ranks of a group, their nodes, and the order of sums |
//! | `header` | an operation as 64 bytes, which the ranks compare |
//! | `sockets` | connections between ranks: how a group makes them, their handshake, and passing of descriptors |
//! | `probe` | whether large frames reach the other nodes |
//! | `shared_memory` | control segments of a node: barriers, slots, stages; shared arenas |
//! | `exchange` | what one rank exchanges with one other over their connection |
//! | `plan` | one round of sums, copies and exchanges; what each rank does in it, for each operation: here a collective algorithm is added |
//! | `transport` | [`connect`] finds the other ranks of the world; the transport: brief, in place, staged; shared arenas; subgroups |

mod exchange;
mod header;
mod plan;
mod probe;
mod shared_memory;
mod sockets;
mod topology;
mod transport;

pub use topology::RankInfo;
pub use transport::connect;
