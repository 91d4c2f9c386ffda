//! What communication of one step took, on a device that runs it when the host has long begun the next one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::SyncTimes;

/// Clones are the same account. Whoever launches communication writes into the one that was open then, however late it
/// ends: whole once the device has run all of it and the launching side was asked for failures. Stays empty on a device
/// that runs in step with its host.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Arc<Mutex<SyncTimes>>);

impl Ledger {
    /// What is written in it so far.
    #[must_use]
    pub fn times(&self) -> SyncTimes {
        *self.lock()
    }

    /// The same, which is forgotten.
    pub(super) fn take(&self) -> SyncTimes {
        std::mem::take(&mut *self.lock())
    }

    pub(super) fn add(&self, times: SyncTimes) {
        *self.lock() += times;
    }

    fn lock(&self) -> MutexGuard<'_, SyncTimes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
