//! What is told to people, to the agent and in files.
//!
//! | file | what it holds |
//! |---|---|
//! | `recorder.rs` | the record of each step, in `metrics.jsonl`, for the agent, on the console; the memory that a rank holds |
//! | `profiling_window.rs` | the steps whose timeline is written |
//! | `console.rs` | messages, warnings and step lines |

mod console;
mod profiling_window;
mod recorder;

pub(super) use console::{say, warn};
pub(super) use profiling_window::ProfilingWindow;
pub use recorder::Footprint;
pub(super) use recorder::{Recorder, StepRecord};
