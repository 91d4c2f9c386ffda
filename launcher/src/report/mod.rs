//! What a person or a program reads when the job has ended, and the log of events before.

pub(crate) mod error_file;
pub(crate) mod event_log;
pub(crate) mod facts;
pub(crate) mod failures;
pub(crate) mod kubeflow;
pub(crate) mod local_ends;
pub(crate) mod text;
