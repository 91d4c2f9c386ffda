//! Collectives: an ordered queue of operations between ranks, driven by an executor over a transport.
//!
//! | type | what it is |
//! |---|---|
//! | [`Communicator`] | the queue of one group of ranks; operations return at once with a [`Work`] |
//! | [`Executor`] | who drives it: a thread of its own, or the calling thread |
//! | [`Transport`] | how bytes get to the other ranks: the host carries an operation out |
//! | [`StreamTransport`] | the same, where the host only enqueues an operation on a stream of the device |
//! | [`Work`] | handle of one operation: `wait`, `wait_on(stream)` |
//! | [`Mesh`] | the ranks as a grid, with a communicator along each dimension |
//! | [`connect`] | finds the other ranks: shared memory on this node, TCP to the others |
//!
//! Beneath `connect`, from the bottom: `kernel` sums; `futex` wakes, `door` passes descriptors and
//! `link` carries bytes; `board` is the memory through which the ranks of a node meet, `flow` a conversation
//! with one remote rank; `moves` is one round of both; `plan` says what an operation moves, `staging` cuts
//! private buffers into rounds; `flat` puts them together; `core` carries the operations of a queue out, one at a time.
//!
//! Every rank of a group must issue the same operations in the same order. Sums run in rank order, so the result
//! depends neither on message size nor on transport, executor or number of threads.

mod board;
mod communicator;
mod connect;
mod core;
mod door;
mod error;
mod flat;
mod flow;
mod futex;
mod group;
mod header;
mod kernel;
mod link;
mod lookup;
mod mesh;
mod message;
mod moves;
pub mod nccl;
mod node_part;
mod note;
mod partition;
mod patience;
mod pending;
mod place;
mod plan;
mod reception;
mod request;
mod segment;
mod sharing;
mod solo;
mod solo_stream;
mod staging;
mod stream_transport;
mod subgroup;
mod transport;
mod work;

pub use communicator::{Communicator, Executor, Launch};
pub use connect::connect;
pub use error::{CollectiveError, Failure};
pub use mesh::Mesh;
pub use place::Place;
pub use request::{Operation, ReduceOp, Request, Traffic};
pub use solo::Solo;
pub use solo_stream::SoloStream;
pub use stream_transport::{Flight, StreamTransport};
pub use transport::{Transport, Wait, WireBytes};
pub use work::{Work, WorkError, WorkTimes};
