//! Workers that say nothing new any more: who, since when, and what its threads wait in.
//!
//! A *slow* worker has said nothing new for half of `--hang-timeout`. A *lost* one sends no heartbeats any more: it is
//! stopped, or stuck where not even its own threads run. A *stuck* one still sends them, but its program does not go
//! on.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use ddp_proto::control::Phase;

use crate::supervise::proc_table;

/// Threads that are described; the rest are counted.
const MAX_THREADS: usize = 16;
/// Heartbeats come at least every two seconds: a worker without one for this long is lost, not stuck.
const BEATS_BOUND: Duration = Duration::from_millis(2500);
/// Begins the words on a worker that hung, where its own words would stand.
pub(crate) const HUNG: &str = "hung: ";

/// The last sign of life of a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beat {
    /// A heartbeat came.
    pub(crate) at: Instant,
    /// The program itself had something to say; later ones were repeated for it.
    pub(crate) fresh: Instant,
    pub(crate) step: u64,
    pub(crate) phase: Phase,
}

impl Beat {
    /// Since when there is nothing new. The beginning has time-outs of its own, and its length says nothing: there a
    /// repeated heartbeat is as good as any.
    pub(crate) fn silent_since(&self) -> Instant {
        match self.phase {
            Phase::Starting => self.at,
            _ => self.fresh,
        }
    }

    /// How long there is nothing new.
    pub(crate) fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.silent_since())
    }

    /// No heartbeat comes any more, not even a repeated one.
    fn is_lost(&self, now: Instant, bound: Duration) -> bool {
        now.saturating_duration_since(self.at) >= bound.min(BEATS_BOUND)
    }

    /// Where the worker was: `phase training, step 3, stage 1 of 2, forward of micro-batch 3`. `activity` is what it said
    /// itself, if it did.
    pub(crate) fn place(&self, activity: &str) -> String {
        let comma = if activity.is_empty() { "" } else { ", " };
        // As it is on the wire.
        let phase = serde_json::to_string(&self.phase).unwrap_or_default();
        let phase = phase.trim_matches('"');
        format!("phase {phase}, step {}{comma}{activity}", self.step)
    }

    /// What is wrong, in words.
    pub(crate) fn trouble(&self, activity: &str, now: Instant, bound: Duration) -> String {
        let silence = self.silence(now).as_secs_f64();
        let place = self.place(activity);
        if self.is_lost(now, bound) {
            format!("hung: no heartbeat for {silence:.1} s ({place})")
        } else {
            format!("hung: heartbeats arrive, but no progress for {silence:.1} s ({place})")
        }
    }

    /// That it is slow, in words.
    pub(crate) fn slowness(&self, activity: &str, now: Instant, bound: Duration) -> String {
        format!(
            "is slow: no progress for {:.1} s ({}); treated as hung after {} s",
            self.silence(now).as_secs_f64(),
            self.place(activity),
            bound.as_secs_f64()
        )
    }
}

/// A worker that has said nothing new for too long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Silent {
    pub(crate) beat: Beat,
    /// It lives, and waits for other ranks: the rank that it waits for is to blame, on any node, or the network to it.
    pub(crate) waits: bool,
}

/// The worker that is to blame for a silence of at least `bound`, if there is one; of each it is known whether it says
/// that it waits for others.
///
/// All ranks fall silent when one does. One that sends no heartbeats is the cause before one that does, one that waits
/// for no other rank before one that waits; then the one that is behind, and of equals the one that was silent first.
pub(crate) fn longest_silence(
    beats: impl Iterator<Item = (usize, Beat, bool)>,
    now: Instant,
    bound: Duration,
) -> Option<(usize, Silent)> {
    let (index, beat, says_it_waits) = beats
        .filter(|(_, beat, _)| beat.silence(now) >= bound)
        .min_by_key(|(_, beat, waits)| (!beat.is_lost(now, bound), *waits, beat.step, beat.silent_since()))?;
    let waits = says_it_waits && !beat.is_lost(now, bound);
    Some((index, Silent { beat, waits }))
}

/// What the kernel knows of each thread of a process, a line each:
/// `thread 123 (ddp-comm-world): S (sleeping) in futex_do_wait`. Reads files of `/proc`, which may take its time.
pub(crate) fn threads_of(pid: i32) -> String {
    let tasks = proc_table::path(pid, "task").unwrap_or_default();
    let entries = fs::read_dir(&tasks).into_iter().flatten().flatten();
    let mut ids: Vec<u32> = entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    ids.sort_unstable();
    let mut words = String::new();
    for id in ids.iter().take(MAX_THREADS) {
        // It may have ended meanwhile.
        if let Some(thread) = thread(*id, &tasks.join(id.to_string())) {
            let _ = writeln!(words, "{thread}");
        }
    }
    if ids.len() > MAX_THREADS {
        let _ = writeln!(words, "and {} more threads", ids.len() - MAX_THREADS);
    }
    words
}

fn thread(id: u32, task: &Path) -> Option<String> {
    let read = |file: &str| {
        let text = fs::read_to_string(task.join(file)).unwrap_or_default();
        text.trim().to_owned()
    };
    let status = read("status");
    let state = status.lines().find_map(|line| line.strip_prefix("State:"))?;
    let place = match read("wchan").as_str() {
        "" | "0" => String::new(),
        place => format!(" in {place}"),
    };
    // The number of the call comes first; `running` for a thread that is not in one.
    let call = match read("syscall").split(' ').next() {
        Some(number) if number.parse::<u32>().is_ok() => format!(", system call {number}"),
        _ => String::new(),
    };
    let mut words = format!("thread {id} ({}): {}{place}{call}", read("comm"), state.trim());
    // Only root can read the kernel stack.
    for frame in read("stack").lines() {
        let _ = write!(words, "\n  kernel: {}", frame.trim_start_matches("[<0>] "));
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat(now: Instant, seconds_ago: u64, step: u64) -> Beat {
        let at = now.checked_sub(Duration::from_secs(seconds_ago)).unwrap();
        Beat {
            at,
            fresh: at,
            step,
            phase: Phase::Training,
        }
    }

    #[test]
    fn the_rank_that_is_behind_is_the_cause() {
        let now = Instant::now();
        let bound = Duration::from_secs(10);
        let silent = |beats: &[Beat]| {
            let numbered = beats.iter().copied().enumerate();
            let numbered = numbered.map(|(rank, beat)| (rank, beat, false));
            longest_silence(numbered, now, bound).map(|(rank, _)| rank)
        };
        assert_eq!(
            silent(&[beat(now, 1, 5), beat(now, 9, 4)]),
            None,
            "a slow rank is not lost"
        );
        assert_eq!(silent(&[beat(now, 12, 5), beat(now, 11, 4)]), Some(1));
        assert_eq!(
            silent(&[beat(now, 12, 5), beat(now, 11, 5)]),
            Some(0),
            "silent first"
        );
    }

    #[test]
    fn who_is_gone_or_waits_for_nobody_is_the_cause_rather_than_who_waits() {
        let now = Instant::now();
        let bound = Duration::from_secs(10);
        let repeated = |beat: Beat| Beat { at: now, ..beat };
        let cause = |beats: [(usize, Beat, bool); 2]| {
            longest_silence(beats.into_iter(), now, bound).map(|(rank, _)| rank)
        };
        // Rank 1 was stopped in the step after the one in which rank 0 waits for it.
        assert_eq!(
            cause([
                (0, repeated(beat(now, 12, 4)), false),
                (1, beat(now, 11, 5), false)
            ]),
            Some(1)
        );
        assert_eq!(
            cause([
                (0, repeated(beat(now, 12, 4)), true),
                (1, repeated(beat(now, 11, 5)), false)
            ]),
            Some(1)
        );
    }

    #[test]
    fn a_rank_that_lives_and_waits_for_others_is_not_to_blame() {
        let now = Instant::now();
        let bound = Duration::from_secs(10);
        let waits = |beat: Beat| {
            let silent = longest_silence(std::iter::once((0, beat, true)), now, bound);
            silent.map(|(_, silent)| silent.waits)
        };
        let repeated = Beat {
            at: now,
            ..beat(now, 3600, 4)
        };
        assert_eq!(waits(repeated), Some(true), "however long it waits");
        assert_eq!(
            waits(beat(now, 11, 4)),
            Some(false),
            "what it said last holds no more"
        );
    }

    #[test]
    fn a_repeated_heartbeat_is_nothing_new_but_at_the_beginning() {
        let now = Instant::now();
        let bound = Duration::from_mins(1);
        let mut stuck = Beat {
            at: now,
            ..beat(now, 61, 3)
        };
        let silent = |beat: Beat| longest_silence(std::iter::once((0, beat, false)), now, bound).is_some();
        assert!(silent(stuck));
        stuck.phase = Phase::Starting;
        assert!(!silent(stuck));
    }

    #[test]
    fn slow_stuck_and_lost_are_told_apart() {
        let now = Instant::now();
        let bound = Duration::from_mins(1);
        let stuck = Beat {
            at: now,
            ..beat(now, 61, 3)
        };
        insta::assert_snapshot!(stuck.trouble("", now, bound), @"hung: heartbeats arrive, but no progress for 61.0 s (phase training, step 3)");
        insta::assert_snapshot!(beat(now, 62, 3).trouble("stage 1 of 2, forward of micro-batch 3", now, bound), @"hung: no heartbeat for 62.0 s (phase training, step 3, stage 1 of 2, forward of micro-batch 3)");
        insta::assert_snapshot!(beat(now, 31, 3).slowness("", now, bound), @"is slow: no progress for 31.0 s (phase training, step 3); treated as hung after 60 s");
    }

    #[test]
    fn threads_are_described() {
        let words = threads_of(std::process::id() as i32);
        let plain = |line: &str| {
            ["thread ", "and ", "  kernel: "]
                .iter()
                .any(|begin| line.starts_with(begin))
        };
        assert!(words.lines().all(plain), "{words}");
        assert!(
            words.contains(": R (running)") || words.contains(": S (sleeping)"),
            "{words}"
        );
    }
}
