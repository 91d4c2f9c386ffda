//! The transport of buffers in host memory. From the bottom, each file knowing those before it:
//!
//! | file | what it holds |
//! |---|---|
//! | `topology` | [`RankInfo`]; the ranks of a group, their nodes, and the order of sums |
//! | `header` | an operation as 64 bytes, which the ranks compare |
//! | `handshake` | how two ranks prove to each other that they belong to one generation |
//! | `sockets` | connections between ranks: how a group makes them, and passing of descriptors |
//! | `shared_memory` | control segments of a node: barriers, slots, stages; shared arenas |
//! | `exchange` | what one rank exchanges with one other over their connection |
//! | `plan` | one round of sums, copies and exchanges; what each rank does in it, for each operation: here a collective algorithm is added |
//! | `tree` | a small operation between many nodes, in logarithmically many rounds |
//! | `transport` | [`connect`] finds the other ranks of the world; the transport: brief, in place, staged; shared arenas; subgroups |

mod exchange;
mod handshake;
mod header;
mod plan;
mod shared_memory;
mod sockets;
mod topology;
mod transport;
mod tree;

/// Reads bytes of another rank as a header, a handshake and a set-up message, and says which of them are valid. For
/// `tests/fuzz`.
#[doc(hidden)]
pub fn read_foreign(bytes: &[u8]) -> [bool; 3] {
    let header = bytes.first_chunk().map(header::compare_foreign);
    [
        header.is_some_and(|outcome| outcome.is_ok()),
        handshake::read_foreign(bytes),
        transport::read_set_up(bytes).is_ok(),
    ]
}

pub use topology::RankInfo;
pub use transport::connect;
