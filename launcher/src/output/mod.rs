//! The output of the workers, on its way to the console and to files.
//!
//! One pipeline: the thread `reader` reads every pipe ([`reader`]) and cuts it into lines ([`lines`]). It writes them to
//! log files ([`logs`]), leaves out errors that another rank already printed ([`repeated_errors`]) and hands the rest
//! over bounded queues to the threads `console` ([`console`]), which write them to standard output and standard error
//! ([`streams`]). [`plan`] says which worker is shown where.

pub(crate) mod console;
pub(crate) mod lines;
pub(crate) mod logs;
pub(crate) mod plan;
pub(crate) mod reader;
pub(crate) mod repeated_errors;
pub(crate) mod streams;
