//! A worker's link to its job: place, key-value store, heartbeats, and the word that the generation is over.

mod cancel;
mod store;

pub use cancel::Cancel;
pub use store::{KeyValue, MemoryStore, StoreError};
