//! What ranks exchange through the key-value store while they are not connected, or a connection has failed.

use std::time::{Duration, Instant};

use super::error::Failure;
use super::wait::Wait;
use crate::session::{KeyValue, StoreError};

/// Longest single wait for a key: between two, the cancel token is checked, which the store need not know.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// For so long after its deadline ranks are asked for that were not yet.
const GRACE: Duration = Duration::from_secs(1);

/// The store, within the bounds of a wait.
#[derive(Clone, Copy)]
pub(super) struct StoreExchange<'a> {
    pub(super) store: &'a dyn KeyValue,
    /// Bounds each call.
    pub(super) wait: &'a Wait,
    /// For errors.
    pub(super) what: &'static str,
}

impl StoreExchange<'_> {
    pub(super) fn publish(&self, key: &str, value: &[u8]) -> Result<(), Failure> {
        loop {
            match self.store.put(key, value, self.wait.deadline) {
                Ok(()) => return Ok(()),
                Err(error) => self.tolerate(error)?,
            }
        }
    }

    /// Waits for `key`, which global rank `writer` publishes; if it does not in time, the error names the ranks that
    /// `missing` returns.
    pub(super) fn await_key(
        &self,
        key: &str,
        writer: usize,
        missing: impl Fn() -> Vec<usize>,
    ) -> Result<Vec<u8>, Failure> {
        loop {
            self.wait.report(|| vec![writer]);
            let until = self.wait.deadline.min(Instant::now() + POLL_INTERVAL);
            match self.store.get(key, until) {
                Ok(Some(value)) => return Ok(value),
                Ok(None) => self.wait.check_end(&missing)?,
                Err(error) => self.tolerate(error)?,
            }
        }
    }

    /// Fails with an error of the store. While there is time, a store that is out of reach is asked again; at the end
    /// the error names it instead of a rank.
    fn tolerate(&self, error: StoreError) -> Result<(), Failure> {
        let may_pass = matches!(error, StoreError::Unavailable(_));
        let failure = match error {
            StoreError::Superseded(cause) => Failure::GenerationOver(cause),
            error => Failure::System {
                what: self.what.to_owned(),
                cause: error.to_string(),
            },
        };
        if !may_pass {
            return Err(failure);
        }
        self.wait.check_end(Vec::new).map_err(|over| match over {
            Failure::TimedOut { .. } => failure,
            over => over,
        })
    }
}

/// Which ranks have arrived somewhere, as far as the store knows.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Arrivals {
    /// These have not.
    pub(super) absent: Vec<usize>,
    /// The store could not be asked in time.
    pub(super) unknown: Vec<usize>,
}

impl Arrivals {
    /// Asks `has_arrived` for each of `ranks`, which may wait for it until `deadline` and then looks once. Ends a second
    /// later, or once the store is out of reach.
    pub(super) fn ask(
        ranks: &[usize],
        deadline: Instant,
        has_arrived: impl Fn(usize) -> Result<bool, StoreError>,
    ) -> Self {
        let mut found = Self::default();
        for (i, &rank) in ranks.iter().enumerate() {
            let answer = (Instant::now() < deadline + GRACE).then(|| has_arrived(rank));
            match answer {
                Some(Ok(true)) => {}
                Some(Ok(false)) => found.absent.push(rank),
                Some(Err(_)) | None => {
                    found.unknown = ranks[i..].to_vec();
                    break;
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::session::{Cancel, MemoryStore};

    const PATIENCE: Duration = Duration::from_mins(1);

    /// A store whose next calls fail with these, the last first.
    struct Failing {
        errors: Mutex<Vec<StoreError>>,
        store: MemoryStore,
    }

    impl Failing {
        fn with(errors: Vec<StoreError>) -> Self {
            let store = MemoryStore::default();
            store.put("there", b"value", Instant::now()).unwrap();
            Self {
                errors: Mutex::new(errors),
                store,
            }
        }

        fn error(&self) -> Result<(), StoreError> {
            self.errors.lock().unwrap().pop().map_or(Ok(()), Err)
        }
    }

    impl KeyValue for Failing {
        fn put(&self, key: &str, value: &[u8], deadline: Instant) -> Result<(), StoreError> {
            self.error()?;
            self.store.put(key, value, deadline)
        }

        fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
            self.error()?;
            self.store.get(key, deadline)
        }
    }

    fn away() -> StoreError {
        StoreError::Unavailable("the daemon did not answer".into())
    }

    fn await_there(errors: Vec<StoreError>, timeout: Duration) -> Result<Vec<u8>, Failure> {
        let (store, wait) = (Failing::with(errors), Wait::new(timeout, &Cancel::new()));
        let lookup = StoreExchange {
            store: &store,
            wait: &wait,
            what: "meeting",
        };
        lookup.await_key("there", 0, || panic!("it was written"))
    }

    #[test]
    fn a_store_that_is_away_for_a_while_is_waited_for() {
        let value = await_there(vec![away(), away()], PATIENCE);
        assert_eq!(value, Ok(b"value".to_vec()));
        let (store, wait) = (Failing::with(vec![away()]), Wait::new(PATIENCE, &Cancel::new()));
        let lookup = StoreExchange {
            store: &store,
            wait: &wait,
            what: "meeting",
        };
        assert_eq!(lookup.publish("here", b"1"), Ok(()));
        assert_eq!(lookup.await_key("here", 0, Vec::new), Ok(b"1".to_vec()));
    }

    #[test]
    fn a_store_that_stays_away_is_named_instead_of_a_rank() {
        let error = await_there(vec![away()], Duration::ZERO).unwrap_err();
        assert_eq!(
            error.to_string(),
            "meeting: key-value store: the daemon did not answer"
        );
    }

    #[test]
    fn what_the_store_refuses_is_not_asked_again() {
        let refused = StoreError::Refused("too much".into());
        let error = await_there(vec![refused], PATIENCE).unwrap_err();
        assert_eq!(error.to_string(), "meeting: key-value store: too much");
        let over = StoreError::Superseded("rank 1 died".into());
        assert_eq!(
            await_there(vec![over], PATIENCE),
            Err(Failure::GenerationOver("rank 1 died".into()))
        );
    }

    #[test]
    fn asking_ends_where_the_store_is_out_of_reach() {
        let has_arrived = |rank| match rank {
            2 => Ok(false),
            4 => Err(away()),
            _ => Ok(true),
        };
        let found = Arrivals::ask(&[1, 2, 3, 4, 5], Instant::now(), has_arrived);
        assert_eq!((found.absent, found.unknown), (vec![2], vec![4, 5]));
    }
}
