//! What workers write, on its way to the console and to files.
//!
//! The thread `pump` reads every pipe ([`pump`]) and cuts it into lines ([`lines`]). [`sinks`] decides where a line goes:
//! into log files ([`logs`]) and, over a bounded queue ([`feed`]), to the thread `console` ([`console`]). An error that
//! several ranks print at once is shown once ([`repeated_errors`]).

pub(crate) mod console;
pub(crate) mod feed;
pub(crate) mod lines;
pub(crate) mod logs;
pub(crate) mod plan;
pub(crate) mod progress;
pub(crate) mod pump;
pub(crate) mod repeated_errors;
pub(crate) mod sinks;
pub(crate) mod terminal;
