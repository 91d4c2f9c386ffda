//! The files of a run beside its checkpoints.
//!
//! | file | what it holds |
//! |---|---|
//! | `line.rs` | [`MetricsLine`]: one line of `metrics.jsonl` |
//! | `log.rs` | [`MetricsLog`]: `metrics.jsonl` itself, cut back after a rollback |
//! | `summary.rs` | [`Summary`]: `summary.json` |
//! | `timeline_files.rs` | [`TimelineFiles`]: the folder `timeline` |
//! | `run_dir.rs` | [`RunDir`]: the folder of a run, prepared by rank 0 and seen by all |
//! | `hold.rs` | one process has a folder at a time, and later lives of a run know theirs |
//! | `replace.rs` | a file replaced as a whole or not at all |

mod error;
mod hold;
mod line;
mod log;
mod replace;
mod run_dir;
mod summary;
mod timeline_files;

pub use error::RunFilesError;
pub use hold::Holder;
pub(crate) use hold::host_name;
pub use line::{Memory, MetricsLine, WireBytes};
pub use log::MetricsLog;
pub use run_dir::{Request, RunDir, Start};
pub use summary::Summary;
pub use timeline_files::TimelineFiles;
