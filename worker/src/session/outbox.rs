//! What is still to be written to the agent: a bounded queue of lines, and the last heartbeat.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ddp_proto::control::{MAX_ACTIVITY_BYTES, Phase, Progress, ToAgent};

use super::{Cancel, Wanted};

/// A heartbeat reports waits that are longer.
const LASTING: Duration = Duration::from_millis(250);
/// Waits that a heartbeat reports, the longest.
const MAX_REPORTED_WAITS: usize = 4;
/// Shortest time between two heartbeats that only an activity is the reason for.
const ACTIVITY_INTERVAL: Duration = Duration::from_millis(10);
/// Lines that may wait: more than the calls that may be under way.
const MAX_QUEUED_LINES: usize = 64;

/// Filled by anyone, emptied by the writer thread. Nobody waits for room.
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
    /// Between repetitions of the last heartbeat.
    interval: Duration,
    /// Knows what is waited for.
    cancel: Cancel,
}

#[expect(clippy::struct_excessive_bools, reason = "independent of each other")]
struct State {
    lines: VecDeque<Vec<u8>>,
    /// The writer has taken a line that is not yet written.
    in_hand: bool,
    /// Of the last heartbeat, which is repeated when nothing newer came.
    progress: (u64, Phase, Option<Progress>),
    /// Where in a step it is, in words; empty if it does not say.
    activity: String,
    /// For other ranks, since the start; none if it does not say.
    waited: Option<Duration>,
    heartbeat_due: Instant,
    /// When the last one was handed out.
    beat_at: Instant,
    /// When the program reported its progress.
    reported_at: Instant,
    /// It was handed out already.
    is_repeated: bool,
    /// The last line handed out was a heartbeat: the queue is next, so that heartbeats cannot starve it.
    beat_last: bool,
    closed: bool,
}

impl State {
    /// The last heartbeat, with what is waited for; a repetition has its age.
    fn take_heartbeat(&mut self, now: Instant, cancel: &Cancel) -> ToAgent {
        let quiet = if std::mem::replace(&mut self.is_repeated, true) {
            now.saturating_duration_since(self.reported_at)
        } else {
            Duration::ZERO
        };
        let all = cancel.waits();
        let lasting = all.iter().filter(|wanted| wanted.waited >= LASTING);
        let (step, phase, progress) = self.progress.clone();
        ToAgent::Heartbeat {
            step,
            phase,
            quiet_ms: quiet.as_millis() as u64,
            progress,
            waits: lasting.take(MAX_REPORTED_WAITS).map(Wanted::to_wire).collect(),
            activity: self.activity.clone(),
            // It is in `progress`.
            loss: None,
            waited_s: self.waited.map(|waited| waited.as_secs_f64()),
        }
    }

    /// Makes the heartbeat due.
    fn renew(&mut self) {
        self.reported_at = Instant::now();
        self.heartbeat_due = self.reported_at;
        self.is_repeated = false;
    }

    fn is_written(&self) -> bool {
        self.lines.is_empty() && !self.in_hand && self.heartbeat_due > Instant::now()
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
    pub(super) fn new(interval: Duration, cancel: &Cancel) -> Self {
        let now = Instant::now();
        Self {
            interval,
            cancel: cancel.clone(),
            state: Mutex::new(State {
                lines: VecDeque::new(),
                in_hand: false,
                progress: (0, Phase::Starting, None),
                activity: String::new(),
                waited: None,
                heartbeat_due: now,
                beat_at: now,
                reported_at: now,
                is_repeated: false,
                beat_last: false,
                closed: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Replaces the heartbeat and makes it due: never blocks, and never queues more than one.
    pub(super) fn beat(&self, step: u64, phase: Phase, progress: Option<Progress>) {
        let mut state = self.lock();
        if state.progress.1 != phase {
            state.activity.clear();
        }
        state.progress = (step, phase, progress);
        state.renew();
        self.changed.notify_all();
    }

    /// Reports the last heartbeat anew: it still holds, and the program has got on.
    pub(super) fn beat_again(&self) {
        self.lock().renew();
        self.changed.notify_all();
    }

    /// The program has got on, and says where it is: a heartbeat says so soon. Never blocks.
    pub(super) fn set_activity(&self, mut activity: String) {
        activity.truncate(activity.floor_char_boundary(MAX_ACTIVITY_BYTES));
        let mut state = self.lock();
        state.activity = activity;
        state.reported_at = Instant::now();
        state.is_repeated = false;
        let due = state.beat_at + ACTIVITY_INTERVAL;
        if due < state.heartbeat_due {
            state.heartbeat_due = due;
            self.changed.notify_all();
        }
    }

    /// The program waited for other ranks; its next heartbeat says so.
    pub(super) fn add_wait(&self, waited: Duration) {
        let mut state = self.lock();
        state.waited = Some(state.waited.unwrap_or_default() + waited);
    }

    /// What the program said of itself last; empty if it said nothing in this phase.
    pub(super) fn activity(&self) -> String {
        self.lock().activity.clone()
    }

    /// Queues a line.
    pub(super) fn push(&self, message: &ToAgent) -> Result<(), Refused> {
        let mut state = self.lock();
        if state.closed {
            return Err(Refused::Closed);
        }
        if state.lines.len() >= MAX_QUEUED_LINES {
            return Err(Refused::Full);
        }
        state.lines.push_back(to_line(message));
        self.changed.notify_all();
        Ok(())
    }

    /// The next line to write: heartbeats that are due and the queue take turns. `None` once closed.
    /// The line counts as unwritten until the next call.
    pub(super) fn next(&self) -> Option<Vec<u8>> {
        let mut state = self.lock();
        state.in_hand = false;
        self.changed.notify_all();
        while !state.closed {
            let now = Instant::now();
            let queue_first = state.beat_last && !state.lines.is_empty();
            state.beat_last = now >= state.heartbeat_due && !queue_first;
            if state.beat_last {
                (state.beat_at, state.heartbeat_due) = (now, now + self.interval);
                state.in_hand = true;
                return Some(to_line(&state.take_heartbeat(now, &self.cancel)));
            }
            if let Some(line) = state.lines.pop_front() {
                state.in_hand = true;
                return Some(line);
            }
            let left = state.heartbeat_due - now;
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        None
    }

    /// Waits until all that was queued is written, closed, or the deadline passes. True if it is written.
    pub(super) fn flush(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let is_under_way = |state: &mut State| !state.closed && !state.is_written();
        let waited = self.changed.wait_timeout_while(self.lock(), left, is_under_way);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_written()
    }

    /// Refuses and forgets everything from now on.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn to_line(message: &ToAgent) -> Vec<u8> {
    // The messages have string keys and no maps, so that serialising cannot fail; a non-finite number
    // becomes `null`, which the agent would refuse, so that heartbeats are made finite before.
    let mut line = serde_json::to_vec(message).expect("control messages serialise");
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(call: u64) -> ToAgent {
        ToAgent::KvGet {
            call,
            key: "k".into(),
            timeout_ms: 1,
        }
    }

    #[test]
    fn a_flood_of_heartbeats_does_not_starve_calls() {
        let outbox = Outbox::new(Duration::from_hours(1), &Cancel::new());
        for call in 0..3 {
            outbox.push(&get(call)).unwrap();
        }
        let mut calls = Vec::new();
        for step in 0..6 {
            outbox.beat(step, Phase::Training, None);
            match serde_json::from_slice(&outbox.next().unwrap()).unwrap() {
                ToAgent::KvGet { call, .. } => calls.push(call),
                other => assert!(matches!(other, ToAgent::Heartbeat { .. })),
            }
        }
        assert_eq!(calls, [0, 1, 2]);
    }

    #[test]
    fn a_repeated_heartbeat_says_how_old_it_is() {
        let outbox = Outbox::new(Duration::from_millis(5), &Cancel::new());
        let quiet = || match serde_json::from_slice(&outbox.next().unwrap()).unwrap() {
            ToAgent::Heartbeat { quiet_ms, .. } => quiet_ms,
            other => panic!("{other:?}"),
        };
        assert_eq!(quiet(), 0);
        assert!(quiet() >= 5);
        outbox.beat(1, Phase::Training, None);
        assert_eq!(quiet(), 0, "something new");
    }

    #[test]
    fn the_queue_is_bounded_and_closing_ends_waits() {
        let outbox = Outbox::new(Duration::from_hours(1), &Cancel::new());
        for call in 0..MAX_QUEUED_LINES as u64 {
            outbox.push(&get(call)).unwrap();
        }
        assert_eq!(outbox.push(&get(0)), Err(Refused::Full));
        std::thread::scope(|scope| {
            let patient = scope.spawn(|| outbox.flush(Instant::now() + Duration::from_mins(1)));
            outbox.close();
            assert!(!patient.join().unwrap());
        });
        assert_eq!(outbox.push(&get(0)), Err(Refused::Closed));
        assert_eq!(outbox.next(), None);
        assert!(!outbox.flush(Instant::now() + Duration::from_mins(1)));
    }
}
