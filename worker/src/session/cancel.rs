//! What everyone who waits or trains looks at: the generation is over ([`Cancel`]), stop at the next step boundary
//! ([`StopRequest`]); and what this process waits for, which heartbeats and answers to the agent report.

use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use ddp_proto::control::PeerWait;
use ddp_proto::words::numbered;

/// Set once, with the cause in words. Clones are the same token.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Inner>);

#[derive(Default)]
struct Inner {
    cause: OnceLock<String>,
    wakers: Mutex<Vec<Box<dyn Fn() + Send>>>,
    /// All waiters. The entries of dropped waiters are removed when the next one is added.
    waiting: Mutex<Vec<Weak<dyn Waiting>>>,
}

impl Cancel {
    /// A token that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets it; the first cause stays.
    pub fn cancel(&self, cause: impl Into<String>) {
        let _ = self.0.cause.set(cause.into());
        let wakers = self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        wakers.iter().for_each(|wake| wake());
    }

    /// The cause, once it is set. Cheap enough for a spin loop.
    pub fn cause(&self) -> Option<&str> {
        self.0.cause.get().map(String::as_str)
    }

    /// Calls `wake` when it is set (at once if it is): it must not block. For waits that do not poll.
    pub fn on_cancel(&self, wake: impl Fn() + Send + 'static) {
        let mut wakers = self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        if self.cause().is_some() {
            wake();
        }
        wakers.push(Box::new(wake));
    }

    /// Adds a waiter under this token. The agent learns of waits in heartbeats and when it asks.
    pub fn listen_to(&self, waiting: Weak<dyn Waiting>) {
        let mut all = self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(waiting);
    }

    /// What is waited for under this token, the longest wait first.
    pub fn waits(&self) -> Vec<Wanted> {
        let all = self
            .0
            .waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let waits = all.iter().filter_map(|waiting| waiting.upgrade()?.waiting());
        let mut waits: Vec<Wanted> = waits.collect();
        waits.sort_by_key(|wanted| std::cmp::Reverse(wanted.waited));
        waits
    }
}

/// Something that may wait for other ranks.
pub trait Waiting: Send + Sync {
    /// What it waits for now; `None` if it does not wait. Must not block, because a rank that hangs must answer.
    fn waiting(&self) -> Option<Wanted>;
}

/// One wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// In words: ``all-reduce #12 of `world` (bucket 3, 4096 bytes)``.
    pub what: String,
    /// How long already.
    pub waited: Duration,
    /// Global ranks that have not come, as far as they are known.
    pub ranks: Vec<usize>,
}

impl Wanted {
    /// Converts it for a message to the agent.
    pub(super) fn to_wire(&self) -> PeerWait {
        PeerWait {
            operation: self.what.clone(),
            waited_ms: self.waited.as_millis() as u64,
            peers: match self.ranks.as_slice() {
                [] => String::new(),
                ranks => numbered("rank", ranks),
            },
        }
    }
}

/// In words, a line each; empty if nothing waits.
pub(super) fn in_words(waits: &[Wanted]) -> String {
    let line = |wanted: &Wanted| format!("{}\n", wanted.to_wire());
    waits.iter().map(line).collect()
}

/// Asked for once, with the cause in words. Clones are the same request.
#[derive(Clone, Debug, Default)]
pub struct StopRequest(Arc<Request>);

#[derive(Debug, Default)]
struct Request {
    asked: Mutex<Option<Asked>>,
    is_asked: Condvar,
}

#[derive(Debug)]
struct Asked {
    cause: String,
    stay: bool,
}

impl StopRequest {
    /// Asks for a stop; the first cause stays. Another generation follows if this process may `stay`.
    pub fn ask(&self, cause: impl Into<String>, stay: bool) {
        let mut asked = self.0.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let cause = cause.into();
        asked.get_or_insert(Asked { cause, stay });
        self.0.is_asked.notify_all();
    }

    /// The cause, once it was asked for.
    pub fn cause(&self) -> Option<String> {
        let asked = self.0.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.as_ref().map(|asked| asked.cause.clone())
    }

    /// Whether this process may stay. Waits for the request for at most `patience`: another rank may have got its own first.
    pub(super) fn stays(&self, patience: Duration) -> bool {
        let asked = self.0.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = (self.0.is_asked).wait_timeout_while(asked, patience, |asked| asked.is_none());
        let (asked, _) = waited.unwrap_or_else(PoisonError::into_inner);
        asked.as_ref().is_some_and(|asked| asked.stay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(Option<Wanted>);

    impl Waiting for Fixed {
        fn waiting(&self) -> Option<Wanted> {
            self.0.clone()
        }
    }

    fn wanted(what: &str, seconds: u64, ranks: &[usize]) -> Wanted {
        Wanted {
            what: what.into(),
            waited: Duration::from_secs(seconds),
            ranks: ranks.to_vec(),
        }
    }

    #[test]
    fn the_longest_wait_comes_first_and_those_that_are_gone_say_nothing() {
        let cancel = Cancel::new();
        let listen = |waiting: &Arc<Fixed>| {
            let weak = Arc::downgrade(waiting);
            cancel.listen_to(weak);
        };
        let kept = [
            Some(wanted("barrier #3 of `data`", 2, &[1, 5])),
            None,
            Some(wanted("all-reduce #7 of `world`", 9, &[5])),
        ]
        .map(|wanted| Arc::new(Fixed(wanted)));
        kept.iter().for_each(listen);
        let gone = Arc::new(Fixed(Some(wanted("gone", 99, &[]))));
        listen(&gone);
        drop(gone);
        assert_eq!(
            in_words(&cancel.waits()),
            "all-reduce #7 of `world` has waited 9.0 s for rank 5\n\
             barrier #3 of `data` has waited 2.0 s for ranks 1, 5\n"
        );
    }
}
