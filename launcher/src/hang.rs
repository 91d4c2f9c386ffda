//! Workers that say nothing any more: who, since when, and what its threads wait in.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use ddp_proto::control::Phase;

/// Threads that are described; the rest are counted.
const MAX_THREADS: usize = 16;

/// The last sign of life of a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beat {
    pub(crate) at: Instant,
    pub(crate) step: u64,
    pub(crate) phase: Phase,
}

/// The worker whose silence is the longest, if it is longer than `bound`. A rank that waits for another one beats as
/// little as the other, but it fell silent later: the one that was silent first is the cause.
pub(crate) fn longest_silence(
    beats: impl Iterator<Item = (usize, Beat)>,
    now: Instant,
    bound: Duration,
) -> Option<(usize, Beat)> {
    beats
        .filter(|(_, beat)| now.saturating_duration_since(beat.at) >= bound)
        .min_by_key(|(_, beat)| (beat.step, beat.at))
}

/// In words: how long it has been silent, where it was, and what its threads do.
pub(crate) fn describe(pid: i32, beat: Beat, now: Instant) -> String {
    let silence = now.saturating_duration_since(beat.at).as_secs_f64();
    let mut words = format!(
        "hung: no heartbeat for {silence:.1} s (phase {:?}, step {})",
        beat.phase, beat.step
    );
    let threads = threads(Path::new(&format!("/proc/{pid}/task")));
    for thread in threads.iter().take(MAX_THREADS) {
        let _ = write!(words, "\n  {thread}");
    }
    if threads.len() > MAX_THREADS {
        let _ = write!(words, "\n  and {} more threads", threads.len() - MAX_THREADS);
    }
    words
}

/// `thread 123 (ddp-comm-world): S (sleeping) in futex_do_wait`
fn threads(tasks: &Path) -> Vec<String> {
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let mut threads: Vec<(u32, String)> = fs::read_dir(tasks)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let id: u32 = entry.file_name().to_str()?.parse().ok()?;
            let path = entry.path();
            let status = read(&path.join("status"));
            let state = status
                .lines()
                .find_map(|line| line.strip_prefix("State:"))?
                .trim()
                .to_owned();
            let place = match read(&path.join("wchan")).as_str() {
                "" | "0" => String::new(),
                place => format!(" in {place}"),
            };
            Some((
                id,
                format!("thread {id} ({}): {state}{place}", read(&path.join("comm"))),
            ))
        })
        .collect();
    threads.sort();
    threads.into_iter().map(|(_, words)| words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat(now: Instant, seconds_ago: u64, step: u64) -> Beat {
        Beat {
            at: now.checked_sub(Duration::from_secs(seconds_ago)).unwrap(),
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
    fn threads_are_described() {
        let now = Instant::now();
        let words = describe(std::process::id() as i32, beat(now, 3, 7), now);
        let mut lines = words.lines();
        assert_eq!(
            lines.next(),
            Some("hung: no heartbeat for 3.0 s (phase Training, step 7)")
        );
        assert!(
            lines.all(|line| line.starts_with("  thread ") || line.starts_with("  and ")),
            "{words}"
        );
        assert!(
            words.contains(": R (running)") || words.contains(": S (sleeping)"),
            "{words}"
        );
    }
}
