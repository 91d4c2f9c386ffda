//! What is told to people and to trace files.
//!
//! | file | what it holds |
//! |---|---|
//! | `console.rs` | messages, warnings and step lines |
//! | `footprint.rs` | how much memory a rank holds |
//! | `profiling_window.rs` | the steps whose timeline is written |

mod console;
mod footprint;
mod profiling_window;

pub(super) use console::{Pace, say, warn};
pub use footprint::Footprint;
pub(super) use profiling_window::ProfilingWindow;
