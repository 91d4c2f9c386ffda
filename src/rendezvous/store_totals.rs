//! What the key-value stores of all jobs take together, within the bounds of [`KvLimits`].

use prost::bytes::Bytes;

use super::config::KvLimits;
use super::event::KvError;

/// What an answer takes besides its entries, while it is on its way.
const ANSWER_BYTES: usize = 16 << 10;

/// What a store takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) entries: usize,
    pub(super) bytes: usize,
    /// Reads that wait.
    pub(super) waiters: usize,
}

impl Load {
    /// One read that waits.
    pub(super) const READ: Self = Self {
        entries: 0,
        bytes: 0,
        waiters: 1,
    };

    fn plus(self, more: Self) -> Self {
        Self {
            entries: self.entries + more.entries,
            bytes: self.bytes + more.bytes,
            waiters: self.waiters + more.waiters,
        }
    }
}

/// The load of all stores. It may be higher than the true one, never lower.
#[derive(Debug, Default)]
pub(super) struct StoreTotals(Load);

impl StoreTotals {
    /// Refuses a load that would exceed a bound.
    pub(super) fn check(&self, limits: &KvLimits, more: Load) -> Result<(), KvError> {
        let sum = self.0.plus(more);
        let fits = |more: usize, sum: usize, bound: usize| more == 0 || sum <= bound;
        if fits(more.entries, sum.entries, limits.entries_of_all)
            && fits(more.bytes, sum.bytes, limits.bytes_of_all)
            && fits(more.waiters, sum.waiters, limits.waiters_of_all)
        {
            return Ok(());
        }
        let Load {
            entries,
            bytes,
            waiters,
        } = self.0;
        Err(KvError::TooMuch(format!(
            "the stores of this daemon are full ({entries} entries, {bytes} bytes, {waiters} waiting reads)"
        )))
    }

    pub(super) fn add(&mut self, more: Load) {
        self.0 = self.0.plus(more);
    }
}

/// Answers to gathers that may still be on their way. Callers that ask for the same share one.
#[derive(Debug, Default)]
pub(super) struct Answers {
    sent: Vec<Bytes>,
    /// Bytes that they take. It may be higher than the true number, never lower.
    bytes: usize,
}

impl Answers {
    /// Tells whether another one may be made. Where there seems to be no room, it forgets those that have arrived.
    pub(super) fn have_room(&mut self, limits: &KvLimits) -> bool {
        if self.bytes >= limits.answer_bytes_of_all / 4 {
            self.sent.retain(|answer| !answer.is_unique());
            self.bytes = self.sent.iter().map(size).sum();
        }
        self.bytes < limits.answer_bytes_of_all
    }

    /// Counts an answer that is about to be sent.
    pub(super) fn add(&mut self, answer: Bytes) {
        // An empty one takes nothing, and never looks taken.
        if !answer.is_empty() {
            self.bytes += size(&answer);
            self.sent.push(answer);
        }
    }
}

fn size(answer: &Bytes) -> usize {
    answer.len() + ANSWER_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_count_until_all_callers_have_taken_them() {
        let limits = KvLimits {
            answer_bytes_of_all: 8 * ANSWER_BYTES,
            ..KvLimits::default()
        };
        let mut answers = Answers::default();
        let kept: Vec<Bytes> = (0..8_u8).map(|n| Bytes::from(vec![n])).collect();
        for answer in &kept {
            assert!(answers.have_room(&limits));
            answers.add(answer.clone());
        }
        assert!(!answers.have_room(&limits), "all of it");
        drop(kept);
        assert!(answers.have_room(&limits));
        assert!(answers.sent.is_empty());
    }
}
