//! The files of a run beside its checkpoints.
//!
//! | file | what it holds |
//! |---|---|
//! | `reports.rs` | [`MetricsLog`]: `metrics.jsonl`, a [`MetricsLine`] a step; [`Summary`]: `summary.json`; [`TimelineFiles`]: the folder `timeline` |
//! | `run_dir.rs` | [`RunDir`]: the folder of a run, prepared by rank 0 and seen by all |
//! | `hold.rs` | one process has a folder at a time, and later lives of a run know theirs |
//! | `run_file.rs` | a file that is replaced as a whole; [`RunFilesError`]: what can be wrong with the files of a run |
//! | `tensorboard.rs` | [`EventFile`]: the same numbers for TensorBoard |

mod hold;
mod reports;
mod run_dir;
mod run_file;
mod tensorboard;

pub use crate::collective::WireBytes;
pub(crate) use hold::host_name;
pub use reports::{
    Achieved, ExpertMetrics, Memory, MetricsLine, MetricsLog, Summary, TimelineFiles, Validations,
};
pub use run_dir::{FoundRun, Request, RunDir};
pub use run_file::RunFilesError;
pub use tensorboard::EventFile;
