//! Key-value calls that are under way, and whose answer belongs to whom.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ddp_proto::control::{KvRefusal, MAX_CALLS};

use super::Cancel;

/// Blocking reads that may be under way: some calls are left for writes, for which this program's reads may wait.
pub(super) const MAX_READS: usize = MAX_CALLS - 4;

/// What the agent says to a call: a value for a get, or why it was not done, for this program and in words.
pub(super) type Answer = Result<Option<String>, (KvRefusal, String)>;

/// See the module. No more are under way than the agent takes: a caller beyond that waits.
#[derive(Default)]
pub(super) struct Calls {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By number.
    open: HashMap<u64, Call>,
    next: u64,
}

/// One that the agent has still to answer, or has just answered.
enum Call {
    Awaited,
    /// Its caller has gone; the agent is still at it.
    Abandoned,
    Answered(Answer),
}

impl Calls {
    /// Hands an answer to its caller; one without a caller is dropped.
    pub(super) fn answer(&self, number: u64, answer: Answer) {
        let mut state = self.lock();
        match state.open.get_mut(&number) {
            Some(call @ Call::Awaited) => *call = Call::Answered(answer),
            Some(Call::Abandoned) => {
                state.open.remove(&number);
            }
            // The agent answers once; it never made up a number.
            Some(Call::Answered(_)) | None => return,
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Lets every caller look again whether the generation is over.
    pub(super) fn wake(&self) {
        // Taken so that a caller between its check and its wait cannot miss the word.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// The number of a new call, as soon as fewer than `bound` are under way; `None` at the deadline or when `cancel`
    /// is set.
    pub(super) fn begin(&self, bound: usize, deadline: Instant, cancel: &Cancel) -> Option<u64> {
        let mut state = self.lock();
        while state.open.len() >= bound {
            state = self.wait(state, time_left(deadline, cancel)?);
        }
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Call::Awaited);
        Some(number)
    }

    /// A call that the agent was not told of.
    pub(super) fn forget(&self, number: u64) {
        self.lock().open.remove(&number);
        self.changed.notify_all();
    }

    /// Waits for the answer; `None` at the deadline or when `cancel` is set.
    pub(super) fn finish(&self, number: u64, deadline: Instant, cancel: &Cancel) -> Option<Answer> {
        let mut state = self.lock();
        loop {
            if let Some(Call::Answered(_)) = state.open.get(&number)
                && let Some(Call::Answered(answer)) = state.open.remove(&number)
            {
                drop(state);
                self.changed.notify_all();
                return Some(answer);
            }
            let Some(left) = time_left(deadline, cancel) else {
                state.open.insert(number, Call::Abandoned);
                return None;
            };
            state = self.wait(state, left);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, left: Duration) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, left);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// How long to wait on; `None` at the deadline or when `cancel` is set.
fn time_left(deadline: Instant, cancel: &Cancel) -> Option<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    (left > Duration::ZERO && cancel.cause().is_none()).then_some(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_mins(1);

    #[test]
    fn a_caller_beyond_the_bound_waits_for_an_answer() {
        let (calls, cancel) = (Calls::default(), Cancel::new());
        let soon = Instant::now() + PATIENCE;
        let numbers: Vec<_> = (0..MAX_CALLS)
            .map(|_| calls.begin(MAX_CALLS, soon, &cancel).unwrap())
            .collect();
        assert_eq!(calls.begin(MAX_CALLS, Instant::now(), &cancel), None);
        std::thread::scope(|scope| {
            let one_more = scope.spawn(|| calls.begin(MAX_CALLS, soon, &cancel));
            calls.answer(numbers[3], Ok(None));
            assert_eq!(calls.finish(numbers[3], soon, &cancel), Some(Ok(None)));
            assert!(one_more.join().unwrap().is_some());
        });
    }

    /// The agent is still at a call whose caller has gone, and counts it.
    #[test]
    fn an_abandoned_call_keeps_its_place_until_it_is_answered() {
        let (calls, cancel) = (Calls::default(), Cancel::new());
        let soon = Instant::now() + PATIENCE;
        let numbers: Vec<_> = (0..MAX_CALLS)
            .map(|_| calls.begin(MAX_CALLS, soon, &cancel).unwrap())
            .collect();
        assert_eq!(calls.finish(numbers[0], Instant::now(), &cancel), None);
        assert_eq!(calls.begin(MAX_CALLS, Instant::now(), &cancel), None);
        calls.answer(numbers[0], Ok(None));
        assert!(calls.begin(MAX_CALLS, Instant::now(), &cancel).is_some());
    }

    #[test]
    fn the_end_of_the_generation_ends_the_wait_for_a_place() {
        let (calls, cancel) = (Calls::default(), Cancel::new());
        let soon = Instant::now() + PATIENCE;
        for _ in 0..MAX_CALLS {
            calls.begin(MAX_CALLS, soon, &cancel).unwrap();
        }
        std::thread::scope(|scope| {
            let one_more = scope.spawn(|| calls.begin(MAX_CALLS, soon, &cancel));
            cancel.cancel("rank 1 died");
            calls.wake();
            assert_eq!(one_more.join().unwrap(), None);
        });
    }
}
