//! What is told to people, to the agent and in files.
//!
//! | file | what it holds |
//! |---|---|
//! | `recorder.rs` | the record of each step: in `metrics.jsonl`, for the agent, on the console |
//! | `profiling_window.rs` | the steps whose timeline is written |
//! | `footprint.rs` | how much memory a rank holds |
//! | `console.rs` | messages, warnings and step lines |

mod console;
mod footprint;
mod profiling_window;
mod recorder;

pub(super) use console::{say, warn};
pub use footprint::Footprint;
pub(super) use profiling_window::ProfilingWindow;
pub(super) use recorder::{Recorder, StepRecord};
