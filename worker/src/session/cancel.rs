//! The word that the generation is over, for everyone who waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use super::waits::{Waiting, Waits, Wanted};

/// Set once, with the cause in words. Clones are the same token.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Inner>);

#[derive(Default)]
struct Inner {
    set: AtomicBool,
    cause: OnceLock<String>,
    wakers: Mutex<Vec<Box<dyn Fn() + Send>>>,
    waits: Waits,
}

impl Cancel {
    /// A token that is not set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets it; the first cause stays.
    pub fn cancel(&self, cause: impl Into<String>) {
        let _ = self.0.cause.set(cause.into());
        self.0.set.store(true, Ordering::Release);
        for wake in self
            .0
            .wakers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
        {
            wake();
        }
    }

    /// The cause, once it is set. Cheap enough for a spin loop.
    #[must_use]
    pub fn cause(&self) -> Option<&str> {
        if self.0.set.load(Ordering::Acquire) {
            self.0.cause.get().map(String::as_str)
        } else {
            None
        }
    }

    /// Who waits under this token says what for: the agent is told, in heartbeats and when it asks.
    pub fn listen_to(&self, waiting: Weak<dyn Waiting>) {
        self.0.waits.add(waiting);
    }

    /// What is waited for under this token, the longest wait first.
    #[must_use]
    pub fn waits(&self) -> Vec<Wanted> {
        self.0.waits.list()
    }

    /// Calls `wake` when it is set (at once if it is): it must not block. For waits that do not poll.
    pub fn on_cancel(&self, wake: impl Fn() + Send + 'static) {
        let mut wakers = self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        if self.0.set.load(Ordering::Acquire) {
            wake();
        }
        wakers.push(Box::new(wake));
    }
}
