//! Writes records on a thread of their own, so that a slow disk delays no heartbeat. What follows from a record waits
//! until the record is on disk.

use std::collections::VecDeque;

use tokio::sync::{mpsc, oneshot};

use super::ledger::{Ledger, LedgerError};
use crate::rendezvous::event::{Effect, Record};

/// Turns that may wait for the disk. From there on the daemon handles no more requests.
const MAX_WAITING: usize = 4096;

/// The effects of one event.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) effects: Vec<Effect>,
    /// Whom to tell that a job is closed, and whether there was one.
    pub(super) closed: Option<(oneshot::Sender<bool>, bool)>,
}

/// The records that are not on disk yet, and the turns that wait for them. The status and the list of jobs do not wait:
/// nothing follows from what they show.
#[derive(Debug)]
pub(super) struct LedgerQueue {
    /// None for a daemon without a ledger.
    writer: Option<Writer>,
    waiting: VecDeque<Turn>,
}

#[derive(Debug)]
struct Writer {
    /// One message for each turn that has records.
    records: mpsc::UnboundedSender<Vec<Record>>,
    written: mpsc::UnboundedReceiver<Result<(), LedgerError>>,
}

fn records(turn: &Turn) -> impl Iterator<Item = &Record> {
    turn.effects.iter().filter_map(|effect| match effect {
        Effect::Record(record) => Some(&**record),
        _ => None,
    })
}

impl LedgerQueue {
    /// Needs a tokio runtime. The thread ends when it has written all that was queued before this value was dropped.
    pub(super) fn start(ledger: Option<Ledger>) -> Self {
        let writer = ledger.map(|mut ledger| {
            let (records, mut queued) = mpsc::unbounded_channel::<Vec<Record>>();
            let (done, written) = mpsc::unbounded_channel();
            tokio::task::spawn_blocking(move || {
                while let Some(records) = queued.blocking_recv() {
                    let result = records.iter().try_for_each(|record| ledger.append(record));
                    let has_failed = result.is_err();
                    if done.send(result).is_err() || has_failed {
                        return;
                    }
                }
            });
            Writer { records, written }
        });
        Self {
            writer,
            waiting: VecDeque::new(),
        }
    }

    /// Returns a turn that may be carried out at once, and queues another one.
    pub(super) fn write(&mut self, turn: Turn) -> Option<Turn> {
        let Some(writer) = &self.writer else {
            return Some(turn);
        };
        let new: Vec<Record> = records(&turn).cloned().collect();
        if new.is_empty() && self.waiting.is_empty() {
            return Some(turn);
        }
        if !new.is_empty() {
            // Where the thread has ended, `written` says why.
            let _ = writer.records.send(new);
        }
        self.waiting.push_back(turn);
        None
    }

    /// Waits until the first queued records are on disk, and returns the turns that waited for them. Cancel safe: it
    /// takes a result only when it returns.
    pub(super) async fn written(&mut self) -> Result<Vec<Turn>, LedgerError> {
        let written = match &mut self.writer {
            Some(writer) => writer.written.recv().await,
            None => None,
        };
        match written {
            Some(written) => written?,
            None if self.writer.is_some() => panic!("the thread that writes the ledger has panicked"),
            // There is no ledger.
            None => std::future::pending().await,
        }
        let mut turns: Vec<Turn> = self.waiting.pop_front().into_iter().collect();
        while let Some(next) = self.waiting.pop_front_if(|next| records(next).next().is_none()) {
            turns.push(next);
        }
        Ok(turns)
    }

    /// All records are on disk.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// No more turns may wait.
    pub(super) fn is_behind(&self) -> bool {
        self.waiting.len() >= MAX_WAITING
    }
}
