//! Workers that say nothing new any more: who, since when, and what its threads wait in.
//!
//! A *lost* worker sends no heartbeats any more: it is stopped, or stuck where not even its own threads run. A *stuck*
//! one still sends them, but its program does not go on.

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
    pub(crate) fn is_lost(&self, now: Instant, bound: Duration) -> bool {
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
}

/// What waits for other ranks in PyTorch: collectives, and backward, which reduces the gradients.
const WAITING_PLACES: [&str; 3] = [
    "/torch/distributed/",
    "/torch/autograd/",
    "/torch/nn/parallel/distributed.py:",
];
/// Files there that wait for a disk.
const SAVING_PLACE: &str = "/torch/distributed/checkpoint/";
/// Passes a call on to the function that is meant.
const DISPATCHER: &str = "/torch/_ops.py:";
/// What a script's own line calls that waits for a collective, or for the GPU that is in one.
const WAITING_CALLS: [&str; 5] = [".wait(", ".item(", ".cpu(", ".tolist(", ".synchronize("];

/// True if the main thread of a Python script waits for other ranks, by the stack that `ddp_run` reports: the innermost
/// frame comes first, as `NAME at FILE:LINE: SOURCE`.
pub(crate) fn waits_for_ranks(state: &str) -> bool {
    let frames = state.lines().skip_while(|line| !line.starts_with("thread "));
    let mut frames = frames.skip(1).filter(|frame| !frame.contains(DISPATCHER));
    frames.next().is_some_and(|frame| {
        let is_library = WAITING_PLACES.iter().any(|place| frame.contains(place));
        let is_call = WAITING_CALLS.iter().any(|call| frame.contains(call));
        is_call || is_library && !frame.contains(SAVING_PLACE)
    })
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

    /// Stacks as PyTorch 2 leaves them, with gloo.
    #[test]
    fn a_script_waits_for_ranks_where_its_innermost_frame_is_in_a_collective_or_in_backward() {
        let waits = |frames: &[&str]| {
            let frames = frames.join("\n  ");
            waits_for_ranks(&format!(
                "thread MainThread\n  {frames}\nthread other\n  wait at /lib/python3.12/threading.py:1: x\n"
            ))
        };
        let site = "/venv/lib/site-packages/torch";
        let backward = format!("_engine_run_backward at {site}/autograd/graph.py:824: return engine(");
        let reduce = format!("all_reduce at {site}/distributed/distributed_c10d.py:2501: work.wait()");
        let script = "<module> at train.py:30: loss.backward()";
        assert!(waits(&[&backward, script]));
        assert!(waits(&[&reduce, script]));
        let functional = format!("wait_tensor at {site}/distributed/_functional_collectives.py:9: return");
        assert!(waits(&[
            &format!("__call__ at {site}/_ops.py:1: return"),
            &functional,
            script
        ]));
        assert!(waits(&["train at train.py:9: total += loss.item()", script]));
        assert!(!waits(&["log_metrics at train.py:18: time.sleep(60)", script]));
        assert!(!waits(&[
            "backward at /app/my_function.py:3: time.sleep(60)",
            &backward,
            script
        ]));
        let write =
            format!("_write_item at {site}/distributed/checkpoint/filesystem.py:300: stream.write(data)");
        assert!(!waits(&[&write, script]));
        assert!(!waits(&[
            "wait at /usr/lib/python3.12/subprocess.py:1264: return self._wait(timeout)",
            script
        ]));
        assert!(!waits_for_ranks(""), "it did not answer");
    }

    #[test]
    fn a_repeated_heartbeat_is_nothing_new_but_at_the_beginning() {
        let now = Instant::now();
        let bound = Duration::from_mins(1);
        let mut stuck = Beat {
            at: now,
            ..beat(now, 61, 3)
        };
        let silent = |beat: Beat| beat.silence(now) >= bound;
        assert!(silent(stuck));
        stuck.phase = Phase::Starting;
        assert!(!silent(stuck));
    }

    #[test]
    fn stuck_and_lost_are_told_apart() {
        let now = Instant::now();
        let bound = Duration::from_mins(1);
        let stuck = Beat {
            at: now,
            ..beat(now, 61, 3)
        };
        insta::assert_snapshot!(stuck.trouble("", now, bound), @"hung: heartbeats arrive, but no progress for 61.0 s (phase training, step 3)");
        insta::assert_snapshot!(beat(now, 62, 3).trouble("stage 1 of 2, forward of micro-batch 3", now, bound), @"hung: no heartbeat for 62.0 s (phase training, step 3, stage 1 of 2, forward of micro-batch 3)");
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
