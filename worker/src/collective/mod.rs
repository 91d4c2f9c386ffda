//! Collectives: an ordered queue of operations between the ranks of a group, carried out by a transport.
//!
//! | file | what it holds |
//! |---|---|
//! | `operation` | [`Operation`], [`ReduceOp`], [`Traffic`], [`Request`]: what is asked of a group |
//! | `error` | [`CollectiveError`] names the operation, [`Failure`] says what happened |
//! | `wait` | [`Wait`]: bounded, cancellable waiting for other ranks, which the agent can see |
//! | `work` | [`Work`]: the handle of one operation, with `wait` and `wait_on(stream)` |
//! | `reduction` | the arithmetic of sums and maxima, in rank order |
//! | `transport` | [`Transport`]: how bytes get to the other ranks; [`SingleRank`] for a group of one |
//! | `store` | exchange through the key-value store |
//! | `communicator` | [`Communicator`]: the queue; operations return at once with a [`Work`] |
//! | `host/` | the transport of host memory: [`connect`] finds the ranks, shared memory on a node, TCP between nodes |
//! | `nccl/` | the transport of GPU memory |
//!
//! Every rank of a group must issue the same operations in the same order. Sums run in rank order, so the result
//! depends neither on message size nor on transport, executor or number of threads.

mod communicator;
mod error;
mod host;
pub mod nccl;
mod operation;
mod reduction;
mod store;
mod transport;
mod wait;
mod work;

pub use communicator::{Communicator, Executor, Launch};
pub use error::{CollectiveError, Failure, OperationName};
pub use host::{RankInfo, connect};
pub use operation::{Operation, ReduceOp, Request, Traffic};
pub use transport::{Engine, HostEngine, SingleRank, StreamEngine, Transport, WireBytes};
pub use wait::Wait;
pub use work::{StreamWork, Work, WorkError, WorkTimes};
