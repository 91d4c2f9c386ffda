//! The state machine against a library that is not there: functions of the same signatures, whose "kernels" run on
//! the streams of a device that is a thread each. Ranks are threads. Errors, delays and hangs are injected.

mod device;
mod failures;
mod fake;
mod functions;
mod kernels;
mod operations;
mod real;
mod world;
