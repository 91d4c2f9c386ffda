//! Who did not come: NCCL does not know, so ranks whose operation timed out tell each other where they were.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::comm::Membership;
use crate::collective::lookup::RollCall;
use crate::session::{KeyValue, StoreError};

/// How long a rank takes to say where it is and to wait for the words of all others. Ranks that came to the operation
/// later than that after this one are named too, though they wait themselves.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// See the module.
pub(super) struct Witness(Arc<dyn KeyValue>);

impl Witness {
    /// Over the store of the generation.
    pub(super) fn new(store: Arc<dyn KeyValue>) -> Self {
        Self(store)
    }

    /// Says by `deadline` in which operation of each communicator this rank waits. Of a communicator it is said once.
    pub(super) fn say<'a>(&self, waits: impl IntoIterator<Item = (&'a Membership, u64)>, deadline: Instant) {
        for (membership, sequence) in waits {
            let key = key(membership, membership.global());
            if let Err(error) = self.0.put(&key, sequence.to_string().as_bytes(), deadline) {
                tracing::warn!("`{key}` could not be said: {error}");
                if matches!(error, StoreError::Unavailable(_)) {
                    // The others would only wait for the same.
                    return;
                }
            }
        }
    }

    /// The global ranks that do not wait in operation `sequence` too, as far as they have said by `deadline`. Where that
    /// is nobody, those that the store could not be asked for; all others if everybody waits.
    pub(super) fn absent(&self, membership: &Membership, sequence: u64, deadline: Instant) -> Vec<usize> {
        let others = membership.others();
        let said = sequence.to_string();
        let waits = |rank| {
            let theirs = self.0.get(&key(membership, rank), deadline)?;
            Ok(theirs.is_some_and(|theirs| theirs == said.as_bytes()))
        };
        let found = RollCall::hold(&others, deadline, waits);
        let named = [found.absent, found.unknown, others];
        named
            .into_iter()
            .find(|ranks| !ranks.is_empty())
            .unwrap_or_default()
    }
}

fn key(membership: &Membership, rank: usize) -> String {
    format!("nccl/{}/waits/{rank}", membership.name)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

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
        let deadline = Instant::now() + PATIENCE;
        store.put("nccl/world/waits/5", b"17", deadline).unwrap();
        // Rank 6 waits in an operation before.
        store.put("nccl/world/waits/6", b"16", deadline).unwrap();
        assert_eq!(Witness::new(store).absent(&member(0), 17, deadline), [6]);
    }

    /// The wait for rank 4 uses up the time; rank 5 has said its word long before.
    #[test]
    fn an_absent_rank_does_not_make_those_after_it_absent() {
        let store: Arc<dyn KeyValue> = Arc::new(MemoryStore::default());
        let witness = Witness::new(store);
        let deadline = Instant::now() + Duration::from_millis(50);
        witness.say([(&member(1), 17)], deadline);
        assert_eq!(witness.absent(&member(2), 17, deadline), [4]);
        assert!(Instant::now() >= deadline);
    }

    #[test]
    fn if_all_wait_nobody_is_to_blame_more_than_others() {
        let store: Arc<dyn KeyValue> = Arc::new(MemoryStore::default());
        let witness = Witness::new(store);
        let deadline = Instant::now() + PATIENCE;
        for rank in 0..2 {
            witness.say([(&member(rank), 17)], deadline);
        }
        assert_eq!(witness.absent(&member(2), 17, deadline), [4, 5]);
    }

    /// A store that is out of reach: each call takes until its deadline, and fails.
    struct Away(AtomicUsize);

    impl KeyValue for Away {
        fn put(&self, _: &str, _: &[u8], deadline: Instant) -> Result<(), StoreError> {
            self.get("", deadline).map(drop)
        }

        fn get(&self, _: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            // Nobody writes there.
            MemoryStore::default().get("never", deadline)?;
            Err(StoreError::Unavailable("the daemon did not answer".into()))
        }
    }

    /// Of four communicators with two late operations: one put and one get of each, not twelve.
    #[test]
    fn a_store_out_of_reach_is_not_asked_again_and_again() {
        let away = Arc::new(Away(AtomicUsize::new(0)));
        let witness = Witness::new(away.clone());
        let deadline = Instant::now() + Duration::from_millis(20);
        let member = member(0);
        witness.say(
            [(&member, 17), (&member, 3), (&member, 5), (&member, 8)],
            deadline,
        );
        assert_eq!(away.0.load(Ordering::Relaxed), 1);
        for _ in 0..2 {
            assert_eq!(witness.absent(&member, 17, deadline), [5, 6]);
        }
        assert_eq!(away.0.load(Ordering::Relaxed), 3);
    }
}
