//! The files of a run beside its checkpoints.
//!
//! | file | what it holds |
//! |---|---|
//! | `log.rs` | [`MetricsLog`]: `metrics.jsonl`, a [`MetricsLine`] a step, cut back after a rollback |
//! | `summary.rs` | [`Summary`]: `summary.json` |
//! | `timeline_files.rs` | [`TimelineFiles`]: the folder `timeline` |
//! | `run_dir.rs` | [`RunDir`]: the folder of a run, prepared by rank 0 and seen by all |
//! | `hold.rs` | one process has a folder at a time, and later lives of a run know theirs |
//! | `error.rs` | [`RunFilesError`]: what can be wrong with them; [`Holder`]: who has a folder |

mod error;
mod hold;
mod log;
mod run_dir;
mod summary;
mod timeline_files;

pub use crate::collective::WireBytes;
pub(crate) use error::host_name;
pub use error::{Holder, RunFilesError};
pub use log::{Memory, MetricsLine, MetricsLog};
pub use run_dir::{Request, RunDir, Start};
pub use summary::Summary;
pub use timeline_files::TimelineFiles;
