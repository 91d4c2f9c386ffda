//! Watches processes: collects their ends, finds workers that hang, kills what is left over.

pub(crate) mod ending;
pub(crate) mod guardian;
pub(crate) mod hang;
pub(crate) mod oom;
pub(crate) mod proc_table;
pub(crate) mod reap;
pub(crate) mod sweep;
pub(crate) mod waits;
