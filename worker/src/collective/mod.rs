//! Collectives: an ordered queue of operations between ranks, driven by an executor over a transport.
//!
//! | type | what it is |
//! |---|---|
//! | [`Communicator`] | the queue of one group of ranks; operations return at once with a [`Work`] |
//! | [`Executor`] | who drives it: a thread of its own, or the calling thread |
//! | [`Transport`] | how bytes get to the other ranks |
//! | [`Work`] | handle of one operation: `wait`, `wait_on(stream)` |
//!
//! Every rank of a group must issue the same operations in the same order. Sums run in rank order, so the result
//! depends neither on message size nor on transport, executor or number of threads.

mod communicator;
mod connect;
mod error;
mod place;
mod request;
mod solo;
mod transport;
mod work;

pub use communicator::{Communicator, Executor, Launch};
pub use connect::connect;
pub use error::{CollectiveError, Failure};
pub use place::Place;
pub use request::{Operation, ReduceOp, Request, Traffic};
pub use solo::Solo;
pub use transport::{Transport, Wait, WireBytes};
pub use work::{Work, WorkError, WorkTimes};
