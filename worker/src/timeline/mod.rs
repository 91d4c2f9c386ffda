//! What ran when: the computing stream and the communicators of some steps, to be looked at.
//!
//! | file | what it holds |
//! |---|---|
//! | `span.rs` | [`Span`]: one thing that ran, on a lane; how clocks of several processes are brought together; [`Timeline`], which takes spans while it is open |
//! | `overlap.rs` | [`Overlap`]: how much of the communication was hidden behind arithmetic; which ranks waited for which |
//! | `trace_file.rs` | [`TraceFile`]: spans in the Trace Event Format, which <https://ui.perfetto.dev> shows |
//! | `svg.rs` | the elements of pictures, and the axis of time |
//! | `lanes.rs` | pictures of lanes below each other |
//! | `picture.rs` | [`picture`]: one step of some ranks as an SVG |
//!
//! A communicator has a timeline, closed until the run opens it; so has, through it, whatever waits for the
//! communicator or computes beside it. A closed one costs a load and a branch. On a device that runs asynchronously spans
//! are points in its streams, whose times are asked for when the timeline is closed: the host waits for nothing.

pub(crate) mod lanes;
mod overlap;
mod picture;
mod span;
pub(crate) mod svg;
mod trace_file;

pub use overlap::Overlap;
pub use picture::picture;
pub use span::{About, ClockReading, Collective, Interval, Kind, Lane, Mark, Recording, Span, Timeline};
pub use trace_file::{TraceFile, TraceFileError};
