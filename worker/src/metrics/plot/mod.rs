//! Curves of runs to look at: from `metrics.jsonl` to an SVG, or to an HTML page that needs nothing else.
//!
//! | file | what it holds |
//! |---|---|
//! | `curves.rs` | [`RunCurves`]: the numbers of a run over its steps, merged until they are no more than a picture shows |
//! | `picture.rs` | [`svg`], [`html`]: one panel per number, several runs in each |

mod curves;
mod picture;

pub use curves::RunCurves;
pub use picture::{MAX_RUNS, html, svg, write};
