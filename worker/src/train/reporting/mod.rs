//! What is told to files, agent and people.
//!
//! | file | what it holds |
//! |---|---|
//! | `console.rs` | messages, warnings and step lines |
//! | `recorder.rs` | what is told of each step |
//! | `startup_table.rs` | what rank 0 says before the first step |
//! | `profiling_window.rs` | the steps whose timeline is written |

mod console;
mod profiling_window;
mod recorder;
mod startup_table;

pub(super) use console::{say, warn};
pub(super) use profiling_window::ProfilingWindow;
pub(super) use recorder::Recorder;
pub(super) use startup_table::startup_table;
