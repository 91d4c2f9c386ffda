//! What a communicator is doing: for the agent, should the rank hang in it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::Request;
use crate::session::{Waiting, Wanted};

/// The operation under way, if there is one.
pub(super) struct Pending {
    communicator: String,
    turn: Mutex<Option<Turn>>,
}

struct Turn {
    request: Arc<Request>,
    sequence: u64,
    since: Instant,
    absent: Vec<usize>,
}

impl Pending {
    pub(super) fn of(communicator: &str) -> Arc<Self> {
        Arc::new(Self {
            communicator: communicator.to_owned(),
            turn: Mutex::default(),
        })
    }

    /// The turn of an operation has come.
    pub(super) fn begin(&self, sequence: u64, request: &Arc<Request>) {
        *self.lock() = Some(Turn {
            request: request.clone(),
            sequence,
            since: Instant::now(),
            absent: Vec::new(),
        });
    }

    /// It waits for these global ranks.
    pub(super) fn waits_for(&self, ranks: Vec<usize>) {
        if let Some(turn) = self.lock().as_mut() {
            turn.absent = ranks;
        }
    }

    /// It has ended.
    pub(super) fn end(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Turn>> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting for Pending {
    fn waiting(&self) -> Option<Wanted> {
        let turn = self.lock();
        let turn = turn.as_ref()?;
        let Request {
            operation,
            buffer,
            tag,
            ..
        } = turn.request.as_ref();
        Some(Wanted {
            what: format!(
                "{operation} #{} of `{}` ({tag}, {} bytes)",
                turn.sequence,
                self.communicator,
                buffer.bytes()
            ),
            waited: turn.since.elapsed(),
            ranks: turn.absent.clone(),
        })
    }
}
