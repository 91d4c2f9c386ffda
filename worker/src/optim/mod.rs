//! Optimization: the update of flat arenas, the learning rate, clipping by the global norm.
//!
//! | type | what it is |
//! |---|---|
//! | [`AdamW`] | moments and update of what this rank owns |
//! | [`FileBacked`] | moments and masters in a mapped file instead of memory |
//! | [`HostBacked`] | moments and masters in memory of the host, beside a GPU |
//! | [`Clip`] | the global norm and the factor that bounds it, both computed on the device |
//! | [`learning_rate`] | warm-up and decay as a pure function of the step |

mod adamw;
mod clip;
mod file_backed;
mod host_backed;
mod schedule;

pub use adamw::{AdamW, Moment, UpdateStep};
pub use clip::Clip;
pub use file_backed::{FileBacked, evict, resident_bytes};
pub use host_backed::{HOST_PIECE, HostBacked};
pub use schedule::{batch_factor, learning_rate};
