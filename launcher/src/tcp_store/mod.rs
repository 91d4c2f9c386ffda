//! The store at `MASTER_PORT` that PyTorch's TCPStore clients speak to, as torchrun's agent hosts one.
//!
//! `wire` turns bytes into commands, `store` carries them out, `server` has the sockets. A store lives for one
//! generation: it outlives rank 0, and the next generation begins with an empty one.

mod server;
mod store;
mod wire;

pub(crate) use server::{TcpStoreServer, UNUSED_BOUND};
pub use wire::read_foreign_commands;
