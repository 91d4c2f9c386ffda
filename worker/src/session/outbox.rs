//! What is still to be written to the agent: a bounded queue of lines, and the last heartbeat.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ddp_proto::control::ToAgent;

use super::Cancel;

/// A wait this long is told.
const LASTING: Duration = Duration::from_millis(250);
/// Waits that a heartbeat tells of, the longest.
const MAX_TOLD_WAITS: usize = 4;
/// Lines that may wait; a caller beyond that waits itself, up to its deadline.
const MAX_QUEUED_LINES: usize = 64;

/// Filled by anyone, emptied by the writer thread.
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
    /// Knows what is waited for.
    cancel: Cancel,
}

struct State {
    lines: VecDeque<Vec<u8>>,
    /// Lines taken by the writer but not yet written.
    in_hand: usize,
    /// The last one; repeated when nothing newer came.
    heartbeat: ToAgent,
    heartbeat_due: Instant,
    /// When the program said it.
    said_at: Instant,
    /// It was handed out already.
    is_repeated: bool,
    interval: Duration,
    /// The last line handed out was a heartbeat: the queue is next, so that heartbeats cannot starve it.
    beat_last: bool,
    closed: bool,
}

impl State {
    /// The last heartbeat, with what is waited for; a repetition says how old it is.
    fn take_heartbeat(&mut self, now: Instant, cancel: &Cancel) -> ToAgent {
        let mut heartbeat = self.heartbeat.clone();
        if let ToAgent::Heartbeat { quiet_ms, waits, .. } = &mut heartbeat {
            if self.is_repeated {
                *quiet_ms = now.saturating_duration_since(self.said_at).as_millis() as u64;
            }
            let lasting = cancel
                .waits()
                .into_iter()
                .filter(|wanted| wanted.waited >= LASTING);
            *waits = lasting
                .take(MAX_TOLD_WAITS)
                .map(|wanted| wanted.to_wire())
                .collect();
        }
        self.is_repeated = true;
        heartbeat
    }
}

/// Why a line was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// The connection is over.
    Closed,
    /// The agent does not read.
    Full,
}

impl Outbox {
    pub(super) fn new(first: ToAgent, interval: Duration, cancel: &Cancel) -> Self {
        Self {
            cancel: cancel.clone(),
            state: Mutex::new(State {
                lines: VecDeque::new(),
                in_hand: 0,
                heartbeat: first,
                heartbeat_due: Instant::now(),
                said_at: Instant::now(),
                is_repeated: false,
                interval,
                beat_last: false,
                closed: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Replaces the heartbeat and makes it due: never blocks, and never queues more than one.
    pub(super) fn beat(&self, heartbeat: ToAgent) {
        let mut state = self.lock();
        state.heartbeat = heartbeat;
        state.heartbeat_due = Instant::now();
        state.said_at = state.heartbeat_due;
        state.is_repeated = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Says the last heartbeat anew: it still holds, and the program has got on.
    pub(super) fn beat_again(&self) {
        let last = self.lock().heartbeat.clone();
        self.beat(last);
    }

    /// Queues a line, waiting for room until the deadline.
    pub(super) fn push(&self, message: &ToAgent, deadline: Instant) -> Result<(), Refused> {
        let line = to_line(message);
        let mut state = self.lock();
        loop {
            if state.closed {
                return Err(Refused::Closed);
            }
            if state.lines.len() < MAX_QUEUED_LINES {
                state.lines.push_back(line);
                drop(state);
                self.changed.notify_all();
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Err(Refused::Full);
            }
            state = self.wait(state, left);
        }
    }

    /// The next line to write: heartbeats that are due and the queue take turns. `None` once closed.
    /// The line counts as unwritten until the next call.
    pub(super) fn next(&self) -> Option<Vec<u8>> {
        let mut state = self.lock();
        state.in_hand = 0;
        self.changed.notify_all();
        loop {
            if state.closed {
                return None;
            }
            let now = Instant::now();
            let queue_first = state.beat_last && !state.lines.is_empty();
            if now >= state.heartbeat_due && !queue_first {
                state.heartbeat_due = now + state.interval;
                state.beat_last = true;
                state.in_hand = 1;
                return Some(to_line(&state.take_heartbeat(now, &self.cancel)));
            }
            if let Some(line) = state.lines.pop_front() {
                state.beat_last = false;
                state.in_hand = 1;
                return Some(line);
            }
            let left = state.heartbeat_due - now;
            state = self.wait(state, left);
        }
    }

    /// Waits until all that was queued is written, closed, or the deadline passes. True if it is written.
    pub(super) fn flush(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        loop {
            if state.lines.is_empty() && state.in_hand == 0 && state.heartbeat_due > Instant::now() {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.closed || left == Duration::ZERO {
                return false;
            }
            state = self.wait(state, left);
        }
    }

    /// Refuses and forgets everything from now on.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, left: Duration) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, left);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn to_line(message: &ToAgent) -> Vec<u8> {
    // The messages have string keys and no maps, so that serialising cannot fail; a non-finite number
    // becomes `null`, which the agent would refuse, so that heartbeats are made finite before.
    let mut line = serde_json::to_vec(message).expect("control messages serialise");
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use ddp_proto::control::Phase;

    use super::*;

    fn beat(step: u64) -> ToAgent {
        ToAgent::Heartbeat {
            step,
            phase: Phase::Training,
            quiet_ms: 0,
            progress: None,
            waits: Vec::new(),
        }
    }

    fn get(call: u64) -> ToAgent {
        ToAgent::KvGet {
            call,
            key: "k".into(),
            timeout_ms: 1,
        }
    }

    #[test]
    fn a_flood_of_heartbeats_does_not_starve_calls() {
        let outbox = Outbox::new(beat(0), Duration::from_hours(1), &Cancel::new());
        let deadline = Instant::now() + Duration::from_mins(1);
        for call in 0..3 {
            outbox.push(&get(call), deadline).unwrap();
        }
        let mut calls = Vec::new();
        for step in 0..6 {
            outbox.beat(beat(step));
            match serde_json::from_slice(&outbox.next().unwrap()).unwrap() {
                ToAgent::KvGet { call, .. } => calls.push(call),
                other => assert!(matches!(other, ToAgent::Heartbeat { .. })),
            }
        }
        assert_eq!(calls, [0, 1, 2]);
    }

    #[test]
    fn a_repeated_heartbeat_says_how_old_it_is() {
        let outbox = Outbox::new(beat(0), Duration::from_millis(5), &Cancel::new());
        let quiet = || match serde_json::from_slice(&outbox.next().unwrap()).unwrap() {
            ToAgent::Heartbeat { quiet_ms, .. } => quiet_ms,
            other => panic!("{other:?}"),
        };
        assert_eq!(quiet(), 0);
        assert!(quiet() >= 5);
        outbox.beat(beat(1));
        assert_eq!(quiet(), 0, "something new");
    }

    #[test]
    fn the_queue_is_bounded_and_closing_ends_waits() {
        let outbox = Outbox::new(beat(0), Duration::from_hours(1), &Cancel::new());
        for call in 0..MAX_QUEUED_LINES as u64 {
            outbox.push(&get(call), Instant::now()).unwrap();
        }
        assert_eq!(outbox.push(&get(0), Instant::now()), Err(Refused::Full));
        std::thread::scope(|scope| {
            let patient = scope.spawn(|| outbox.push(&get(0), Instant::now() + Duration::from_mins(1)));
            outbox.close();
            assert_eq!(patient.join().unwrap(), Err(Refused::Closed));
        });
        assert_eq!(outbox.next(), None);
        assert!(!outbox.flush(Instant::now() + Duration::from_mins(1)));
    }
}
