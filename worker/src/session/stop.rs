//! The word that training is to stop at the next step boundary.

use std::sync::{Arc, OnceLock};

/// Asked for once, with the cause in words. Clones are the same request.
#[derive(Clone, Debug, Default)]
pub struct StopRequest(Arc<OnceLock<String>>);

impl StopRequest {
    /// Asks for a stop; the first cause stays.
    pub fn ask(&self, cause: impl Into<String>) {
        let _ = self.0.set(cause.into());
    }

    /// The cause, once it was asked for.
    #[must_use]
    pub fn cause(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}
