//! Who did not come: NCCL does not know, so ranks whose operation timed out tell each other where they were.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::comm::Membership;
use crate::session::KeyValue;

/// How long a rank waits for the words of all others. Ranks that came to the operation later than that after this
/// one are named too, though they wait themselves.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// See the module.
pub(super) struct Witness(Arc<dyn KeyValue>);

impl Witness {
    /// Over the store of the generation.
    pub(super) fn new(store: Arc<dyn KeyValue>) -> Self {
        Self(store)
    }

    /// Says that this rank waits in operation `sequence`. Of a communicator it is said once.
    pub(super) fn say(&self, membership: &Membership, sequence: u64) {
        let key = key(membership, membership.global());
        if let Err(error) = self.0.put(&key, sequence.to_string().as_bytes()) {
            tracing::warn!("`{key}` could not be said: {error}");
        }
    }

    /// The global ranks that are not known by `deadline` to wait in operation `sequence` too; all others if everybody
    /// waits.
    pub(super) fn absent(&self, membership: &Membership, sequence: u64, deadline: Instant) -> Vec<usize> {
        let others = membership.others();
        let said = sequence.to_string();
        let waits = |rank: &usize| {
            self.0
                .get(&key(membership, *rank), deadline)
                .is_ok_and(|theirs| theirs == said.as_bytes())
        };
        let absent: Vec<usize> = others.iter().copied().filter(|rank| !waits(rank)).collect();
        if absent.is_empty() { others } else { absent }
    }
}

fn key(membership: &Membership, rank: usize) -> String {
    format!("nccl/{}/waits/{rank}", membership.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::{Cancel, MemoryStore};

    fn member(rank: usize) -> Membership {
        Membership {
            name: "world".into(),
            rank,
            members: vec![4, 5, 6],
            timeout: PATIENCE,
            cancel: Cancel::new(),
        }
    }

    #[test]
    fn ranks_that_wait_too_are_not_named() {
        let store: Arc<dyn KeyValue> = Arc::new(MemoryStore::default());
        store.put("nccl/world/waits/5", b"17").unwrap();
        // Rank 6 waits in an operation before.
        store.put("nccl/world/waits/6", b"16").unwrap();
        let deadline = Instant::now() + PATIENCE;
        assert_eq!(Witness::new(store).absent(&member(0), 17, deadline), [6]);
    }

    #[test]
    fn if_all_wait_nobody_is_to_blame_more_than_others() {
        let store: Arc<dyn KeyValue> = Arc::new(MemoryStore::default());
        let witness = Witness::new(store);
        for rank in 0..2 {
            witness.say(&member(rank), 17);
        }
        let deadline = Instant::now() + PATIENCE;
        assert_eq!(witness.absent(&member(2), 17, deadline), [4, 5]);
    }
}
