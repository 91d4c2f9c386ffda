//! The words of decisions that people read: failures and time-outs.

use std::fmt::Write as _;
use std::time::Duration;

use ddp_proto::rendezvous::WorkerExit;
use ddp_proto::words::{counted, numbered};
use nix::sys::signal::Signal;

/// Most hosts that are named one by one.
const MAX_NAMED: usize = 8;

/// At most `bytes` bytes of `text`, cut at a character.
pub(super) fn clip(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

/// Why a node is refused that asks for the rank of another one.
pub(super) fn same_rank(job: &str, rank: u32, asks: &str, has: &str) -> String {
    format!(
        "node rank {rank} of job `{job}` is requested by node `{asks}`, but node `{has}` already has it\n  \
         hint: give each node a different `--node-rank`, or omit the flag on all nodes"
    )
}

/// What a node learns that was away when its generation ended.
pub(super) fn continued_without(generation: u64, hostname: &str) -> String {
    format!("generation {generation} continued without node `{hostname}`")
}

/// "node `b`", or "node `b` (node rank 1)".
pub(super) fn node(hostname: &str, rank: Option<u32>) -> String {
    match rank {
        Some(rank) => format!("node `{hostname}` (node rank {rank})"),
        None => format!("node `{hostname}`"),
    }
}

/// "1 node", "2 nodes".
pub(super) fn nodes(count: u32) -> String {
    counted(count, "node")
}

/// How many nodes came, and how many a job wants: "1 of 2 nodes joined", "1 node joined (of 2 to 4)".
pub(super) fn joined(ready: u32, min: u32, max: u32) -> String {
    if min == max {
        format!("{ready} of {} joined", nodes(min))
    } else {
        format!("{} joined (of {min} to {max})", nodes(ready))
    }
}

/// " (up to 540 s)": how long something is waited for until `until`; nothing where that has no end yet.
pub(super) fn time_left(until: Duration, now: Duration) -> String {
    match until {
        Duration::MAX => String::new(),
        until => format!(" (up to {:.0} s)", until.saturating_sub(now).as_secs_f64()),
    }
}

/// "the only node", "all 2 nodes".
pub(super) fn all(count: u32) -> String {
    if count == 1 {
        "the only node".into()
    } else {
        format!("all {count} nodes")
    }
}

/// "node rank 1", "node ranks 1, 3", at most [`MAX_NAMED`] of the `count` that there are.
pub(super) fn node_ranks(ranks: impl Iterator<Item = u32>, count: usize) -> String {
    let named: Vec<u32> = ranks.take(MAX_NAMED).collect();
    let mut words = numbered("node rank", &named);
    if count > named.len() {
        let _ = write!(words, " and {} more", count - named.len());
    }
    words
}

/// "`a`, `b`", at most [`MAX_NAMED`] of the `count` names.
pub(super) fn list<'a>(names: impl IntoIterator<Item = &'a str>, count: usize) -> String {
    let quoted = names.into_iter().take(MAX_NAMED).map(|name| format!("`{name}`"));
    let mut words = quoted.collect::<Vec<_>>().join(", ");
    if count > MAX_NAMED {
        let _ = write!(words, " and {} more", count - MAX_NAMED);
    }
    words
}

/// "rank 5 (node `b`) died of SIGKILL", and where it was, if it said so.
pub(super) fn worker_exit(exit: &WorkerExit, hostname: &str) -> String {
    let rank = exit.rank;
    let mut words = match (exit.signal, exit.exit_code) {
        (Some(signal), _) => format!("rank {rank} (node `{hostname}`) died of {}", signal_name(signal)),
        (None, Some(code)) => format!("rank {rank} (node `{hostname}`) exited with code {code}"),
        (None, None) => format!("rank {rank} (node `{hostname}`) failed"),
    };
    if exit.core_dumped {
        words.push_str(" (core dumped)");
    }
    if !exit.activity.is_empty() {
        words.push_str(&last_seen(&exit.activity));
    }
    if exit.out_of_memory {
        words.push_str(", possibly out of memory");
    }
    if exit.port_taken {
        words.push_str(", because its port was in use");
    }
    if exit.consequence {
        words.push_str(", reporting that another rank had failed");
    }
    words
}

/// Where the last heartbeat came from: `phase training, step 3` is " at step 3".
fn last_seen(activity: &str) -> String {
    let place = activity
        .strip_prefix("phase ")
        .and_then(|rest| rest.split_once(", "));
    match place {
        Some(("training", place)) => format!(" at {place}"),
        Some((phase, place)) => format!(" while {phase} at {place}"),
        None => format!(" (last heartbeat: {activity})"),
    }
}

/// Exit code of a job whose first failure is this one; never 0.
pub(super) fn exit_code(exit: &WorkerExit) -> i32 {
    match (exit.signal, exit.exit_code) {
        (Some(signal), _) => i32::from(ddp_proto::exit::of_signal(signal)),
        (None, Some(code)) if code & 0xff != 0 => code & 0xff,
        _ => 1,
    }
}

/// The name of a signal on Linux, or its number.
pub(super) fn signal_name(signal: i32) -> String {
    Signal::try_from(signal).map_or_else(
        |_| format!("signal {signal}"),
        |signal| signal.as_str().to_owned(),
    )
}

/// What the nodes that came are still waiting for when the time is over.
pub(super) struct TimedOut<'a> {
    pub(super) job: &'a str,
    pub(super) waited: Duration,
    pub(super) came: Vec<&'a str>,
    /// Connected or not, but not ready: still stopping the workers of the last generation.
    pub(super) stopping: Vec<&'a str>,
    /// Hosts of the last generation that are gone.
    pub(super) gone: Vec<&'a str>,
    pub(super) missing_ranks: Vec<u32>,
    pub(super) min: u32,
    pub(super) max: u32,
    /// Enough nodes came, but for this time a lost node may still train.
    pub(super) may_train: Option<Duration>,
}

impl TimedOut<'_> {
    pub(super) fn words(&self) -> String {
        let came = self.came.len() as u32;
        let mut words = format!(
            "rendezvous of job `{}` timed out after {:.1} s: {}",
            self.job,
            self.waited.as_secs_f64(),
            joined(came, self.min, self.max),
        );
        if came > 0 {
            let _ = write!(words, ": {}", list(self.came.iter().copied(), self.came.len()));
        }
        if let Some(left) = self.may_train {
            let _ = write!(
                words,
                "; a node that was lost may still train for {:.0} s, and no other takes its place before\n  \
                 hint: start this node again then; a launcher that is stopped or killed frees its place at once",
                left.as_secs_f64()
            );
            return words;
        }
        let missing = self.min.saturating_sub(came);
        let _ = write!(words, "; missing: {}", nodes(missing));
        let mut details = Vec::new();
        if !self.missing_ranks.is_empty() {
            let ranks = self.missing_ranks.iter().copied();
            details.push(node_ranks(ranks, self.missing_ranks.len()));
        }
        for (what, hosts) in [("lost", &self.gone), ("still stopping", &self.stopping)] {
            if !hosts.is_empty() {
                details.push(format!("{what}: {}", list(hosts.iter().copied(), hosts.len())));
            }
        }
        if !details.is_empty() {
            let _ = write!(words, " ({})", details.join("; "));
        }
        words.push_str(
            "\n  hint: start the missing nodes with the same `--rdzv-endpoint`, `--rdzv-id` and `--nnodes`",
        );
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_in_words_and_codes() {
        let mut exit = WorkerExit {
            rank: 5,
            signal: Some(9),
            ..WorkerExit::default()
        };
        assert_eq!(worker_exit(&exit, "b"), "rank 5 (node `b`) died of SIGKILL");
        assert_eq!(exit_code(&exit), 137);
        exit.out_of_memory = true;
        assert_eq!(
            worker_exit(&exit, "b"),
            "rank 5 (node `b`) died of SIGKILL, possibly out of memory"
        );
        exit.out_of_memory = false;
        exit.signal = Some(11);
        exit.core_dumped = true;
        assert_eq!(
            worker_exit(&exit, "b"),
            "rank 5 (node `b`) died of SIGSEGV (core dumped)"
        );
        let exit = WorkerExit {
            exit_code: Some(42),
            ..WorkerExit::default()
        };
        assert_eq!(worker_exit(&exit, "a"), "rank 0 (node `a`) exited with code 42");
        assert_eq!(exit_code(&exit), 42);
        assert_eq!(
            exit_code(&WorkerExit {
                exit_code: Some(0),
                ..WorkerExit::default()
            }),
            1
        );
        assert_eq!(
            exit_code(&WorkerExit {
                exit_code: Some(256),
                ..WorkerExit::default()
            }),
            1
        );
        assert_eq!(signal_name(64), "signal 64");
        assert_eq!(signal_name(0), "signal 0");
        assert_eq!(signal_name(-1), "signal -1");
    }

    #[test]
    fn a_time_out_says_who_came_and_who_is_missing() {
        let first = TimedOut {
            job: "job1",
            waited: Duration::from_mins(10),
            came: vec!["a", "b"],
            stopping: vec![],
            gone: vec![],
            missing_ranks: vec![1, 3],
            min: 4,
            max: 4,
            may_train: None,
        };
        insta::assert_snapshot!(first.words(), @r"
        rendezvous of job `job1` timed out after 600.0 s: 2 of 4 nodes joined: `a`, `b`; missing: 2 nodes (node ranks 1, 3)
          hint: start the missing nodes with the same `--rdzv-endpoint`, `--rdzv-id` and `--nnodes`
        ");
        let restart = TimedOut {
            came: vec!["a"],
            stopping: vec!["c"],
            gone: vec!["b"],
            missing_ranks: vec![],
            min: 2,
            max: 3,
            ..first
        };
        insta::assert_snapshot!(restart.words(), @r"
        rendezvous of job `job1` timed out after 600.0 s: 1 node joined (of 2 to 3): `a`; missing: 1 node (lost: `b`; still stopping: `c`)
          hint: start the missing nodes with the same `--rdzv-endpoint`, `--rdzv-id` and `--nnodes`
        ");
    }

    #[test]
    fn long_lists_are_cut() {
        let names: Vec<String> = (0..10).map(|n| n.to_string()).collect();
        assert_eq!(
            list(names.iter().map(String::as_str), names.len()),
            "`0`, `1`, `2`, `3`, `4`, `5`, `6`, `7` and 2 more"
        );
    }
}
