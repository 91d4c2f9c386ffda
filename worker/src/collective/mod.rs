//! Collectives: an ordered queue of operations between the ranks of a group, carried out by a transport.
//!
//! | file | what it holds |
//! |---|---|
//! | `operation` | [`Operation`], [`ReduceOp`], [`Traffic`], [`Request`]: what is asked of a group; [`Work`]: the handle of one operation, with `wait` for the host and `event` for a stream |
//! | `error` | [`CollectiveError`] names the operation, [`Failure`] says what happened |
//! | `wait` | [`Wait`]: bounded, cancellable waiting for other ranks, which the agent can see; over the key-value store too |
//! | `reduction` | the arithmetic of sums and maxima, in rank order |
//! | `transport` | [`Transport`]: how bytes get to the other ranks; [`SingleRank`] for a group of one |
//! | `communicator` | [`Communicator`]: the queue; operations return at once with a [`Work`] |
//! | `host/` | the transport of host memory: [`connect`] finds the ranks, shared memory on a node, TCP between nodes |
//! | `nccl/` | the transport of GPU memory |
//!
//! Every rank of a group must issue the same operations in the same order. Sums run in rank order, so the result
//! depends neither on message size nor on transport, executor or number of threads.

mod communicator;
mod error;
pub(crate) mod host;
pub mod nccl;
mod operation;
mod reduction;
mod transport;
mod wait;

pub use communicator::{Communicator, Executor, Launch};
pub(crate) use error::name;
pub use error::{CollectiveError, Failure};
pub use host::{RankInfo, connect};
pub use operation::{AllToAll, Operation, ReduceOp, Request, StreamWork, Traffic, Work, WorkError};
pub use transport::{CommPattern, SingleRank, Subgroup, Transport, WireBytes};
pub(crate) use wait::StoreExchange;
pub use wait::Wait;
