//! The daemon's answers as tables. Names come from anyone's launcher: no character of them moves the cursor.

use std::fmt::Write as _;
use std::time::Duration;

use ddp_proto::printable;
use ddp_proto::rendezvous::{GenerationStatus, JobsReply, NodeStatus, RankProgress, StatusReply};
use ddp_proto::words::{bytes, counted, duration};

use crate::cli::answer;

/// The cell of an unknown number.
const UNKNOWN: &str = "–";
/// Generations that are shown, the last ones; `--json` has more.
const MAX_GENERATIONS: usize = 10;

/// All jobs of a daemon.
pub(super) fn jobs(reply: &JobsReply) -> String {
    if reply.jobs.is_empty() && reply.ended.is_empty() {
        return "no jobs\n".to_owned();
    }
    let title = [
        "job", "user", "host", "nodes", "age", "target", "step", "state", "reason",
    ];
    let rows = reply.jobs.iter().chain(&reply.ended).map(|job| {
        let ended = |ms| format!("ended {} ago", ago(ms));
        vec![
            visible(&job.job_id),
            visible(&job.user),
            visible(&job.hostname),
            job.nodes.to_string(),
            ago(job.age_ms),
            visible(&job.target),
            known(job.step, UNKNOWN),
            job.ended_ms.map_or_else(|| visible(&job.phase), ended),
            visible(job.reason.lines().next().unwrap_or_default()),
        ]
    });
    table(&title, &[3, 4, 6], rows) + &more(reply.more_jobs.into(), "job")
}

/// One job.
pub(super) fn job(name: &str, status: &StatusReply) -> String {
    let mut text = format!(
        "job `{}`: {}, generation {}, restarts {}/{}\n",
        visible(name),
        visible(&status.phase),
        status.generation,
        status.restart_count,
        status.max_restarts,
    );
    // What a generation began with stands below, with the generation.
    if status
        .generations
        .last()
        .is_none_or(|last| last.began != status.reason)
    {
        let _ = writeln!(text, "{}", visible(&status.reason));
    }
    if let Some(last) = status.losses.last() {
        let _ = writeln!(text, "loss {:.4} at step {}", last.loss, last.step);
    }
    if status.kv_bytes > 0 {
        let _ = writeln!(text, "key-value store: {}", bytes(status.kv_bytes));
    }
    text + "\n" + &nodes(status) + &ranks(status) + &generations(status)
}

fn nodes(status: &StatusReply) -> String {
    let title = ["node", "host", "address", "workers", "state", "logs"];
    // Ranks are given when all have gathered.
    let without_rank = if status.phase == "running" {
        "standby"
    } else {
        UNKNOWN
    };
    let rows = status.nodes.iter().map(|node| {
        vec![
            known(node.node_rank, without_rank),
            visible(&node.hostname),
            visible(&node.addr),
            node.workers.to_string(),
            match (node.connected, ago(node.silent_ms)) {
                (true, silence) => format!("heard {silence} ago"),
                (false, silence) => format!("away for {silence}"),
            },
            visible(&node.log_dir),
        ]
    });
    table(&title, &[3], rows) + &more(status.more_nodes.into(), "node")
}

/// Nothing where no rank says how far it has come.
fn ranks(status: &StatusReply) -> String {
    let waits = |seconds| format!(", others wait {}", step_time(seconds));
    let row = |host: &str, rank: &RankProgress| {
        vec![
            rank.rank.to_string(),
            visible(host),
            rank.step.to_string(),
            known(rank.step_time_s.map(step_time), UNKNOWN)
                + &rank.holds_up_s.map_or_else(String::new, waits),
            ago(rank.silent_ms),
        ]
    };
    let of_node = |node: &NodeStatus| {
        node.ranks
            .iter()
            .map(|rank| row(&node.hostname, rank))
            .collect::<Vec<_>>()
    };
    let mut rows = status.nodes.iter().flat_map(of_node).peekable();
    if rows.peek().is_none() {
        return String::new();
    }
    let title = ["rank", "host", "step", "step time", "quiet for"];
    format!("\n{}", table(&title, &[0, 2, 3, 4], rows))
}

fn generations(status: &StatusReply) -> String {
    let all = &status.generations;
    let shown = &all[all.len().saturating_sub(MAX_GENERATIONS)..];
    let left = (all.len() - shown.len()) as u64 + status.more_generations;
    let gap = if shown.is_empty() { "" } else { "\n" };
    let periods: String = shown.iter().map(period).collect();
    format!("{gap}{periods}{}", more(left, "earlier generation"))
}

fn period(period: &GenerationStatus) -> String {
    // Its number is on the line above.
    let number = format!("generation {}: ", period.generation);
    let began = period.began.strip_prefix(&number).unwrap_or(&period.began);
    let mut text = format!(
        "generation {} ({}, {}) began {} ago\n  {}\n",
        period.generation,
        counted(period.nodes, "node"),
        counted(period.ranks, "rank"),
        ago(period.began_ms),
        visible(began),
    );
    if let Some(ended) = period.ended_ms {
        let _ = writeln!(text, "  ended {} ago: {}", ago(ended), visible(&period.ended));
    }
    text
}

fn table(title: &[&str], right: &[usize], rows: impl Iterator<Item = Vec<String>>) -> String {
    let title = title.iter().map(|cell| (*cell).to_owned()).collect();
    answer::table(std::iter::once(title).chain(rows), |column| {
        right.contains(&column)
    })
}

fn more(left: u64, noun: &str) -> String {
    match left {
        0 => String::new(),
        left => format!("and {}\n", counted(left, &format!("more {noun}"))),
    }
}

fn known(value: Option<impl ToString>, unknown: &str) -> String {
    value.map_or_else(|| unknown.to_owned(), |value| value.to_string())
}

/// `3.2 s`, `1:23`.
fn ago(ms: u64) -> String {
    let time = Duration::from_millis(ms);
    if time < Duration::from_mins(1) {
        format!("{:.1} s", time.as_secs_f64())
    } else {
        duration(time.as_secs_f64())
    }
}

fn step_time(seconds: f64) -> String {
    if seconds < 1.0 {
        format!("{:.1} ms", seconds * 1000.0)
    } else {
        format!("{seconds:.2} s")
    }
}

/// On one line, without what a terminal acts on.
fn visible(text: &str) -> String {
    printable::line(text).replace('\t', " ")
}

#[cfg(test)]
mod tests {
    use ddp_proto::rendezvous::{JobSummary, LossPoint};

    use super::*;

    #[test]
    fn jobs_are_listed_with_what_operators_ask_first() {
        let job = |name: &str, step| JobSummary {
            job_id: name.into(),
            phase: "running".into(),
            nodes: 2,
            step,
            reason: "generation 1: all 2 nodes joined".into(),
            user: "anna".into(),
            hostname: "node0".into(),
            target: "train.py".into(),
            age_ms: 3_723_000,
            ..JobSummary::default()
        };
        let ended = JobSummary {
            ended_ms: Some(95_000),
            reason: "rank 1 (node `node0`) died of SIGKILL\n  hint: none".into(),
            ..job("weekly", Some(7))
        };
        let reply = JobsReply {
            jobs: vec![job("nightly", Some(1200)), job("evil\x1b[2J", None)],
            more_jobs: 1,
            ended: vec![ended],
        };
        insta::assert_snapshot!(jobs(&reply), @r"
         job       user  host   nodes    age  target    step  state           reason
         nightly   anna  node0      2  1h02m  train.py  1200  running         generation 1: all 2 nodes joined
         evil�[2J  anna  node0      2  1h02m  train.py     –  running         generation 1: all 2 nodes joined
         weekly    anna  node0      2  1h02m  train.py     7  ended 1:35 ago  rank 1 (node `node0`) died of SIGKILL
        and 1 more job
        ");
        insta::assert_snapshot!(jobs(&JobsReply::default()), @"no jobs");
    }

    fn status() -> StatusReply {
        let rank = |rank, step, step_time_s| RankProgress {
            rank,
            step,
            step_time_s,
            silent_ms: 300,
            ..RankProgress::default()
        };
        StatusReply {
            generation: 2,
            phase: "running".into(),
            restart_count: 1,
            max_restarts: 3,
            reason: "generation 2: all 2 nodes rejoined".into(),
            nodes: vec![NodeStatus {
                hostname: "node0".into(),
                addr: "10.0.0.5".into(),
                node_rank: Some(0),
                workers: 2,
                connected: true,
                silent_ms: 1200,
                ranks: vec![rank(0, 40, Some(0.5)), rank(1, 9, Some(2.25))],
                log_dir: "/data/logs/x/attempt_1".into(),
                ..NodeStatus::default()
            }],
            more_nodes: 1,
            generations: vec![
                GenerationStatus {
                    generation: 1,
                    nodes: 2,
                    ranks: 4,
                    began: "generation 1: all 2 nodes joined".into(),
                    ended: "rank 1 (node `node0`) died of SIGKILL".into(),
                    began_ms: 95_000,
                    ended_ms: Some(30_000),
                    step: None,
                },
                GenerationStatus {
                    generation: 2,
                    nodes: 2,
                    ranks: 4,
                    began: "generation 2: all 2 nodes rejoined".into(),
                    began_ms: 29_000,
                    ..GenerationStatus::default()
                },
            ],
            losses: vec![LossPoint { step: 40, loss: 3.25 }],
            kv_bytes: 2048,
            ..StatusReply::default()
        }
    }

    #[test]
    fn a_job_is_shown_with_its_ranks_and_its_past() {
        insta::assert_snapshot!(job("nightly", &status()), @r"
        job `nightly`: running, generation 2, restarts 1/3
        loss 3.2500 at step 40
        key-value store: 2.0 KiB

         node  host   address   workers  state            logs
         0     node0  10.0.0.5        2  heard 1.2 s ago  /data/logs/x/attempt_1
        and 1 more node

         rank  host   step  step time  quiet for
            0  node0    40   500.0 ms      0.3 s
            1  node0     9     2.25 s      0.3 s

        generation 1 (2 nodes, 4 ranks) began 1:35 ago
          all 2 nodes joined
          ended 30.0 s ago: rank 1 (node `node0`) died of SIGKILL
        generation 2 (2 nodes, 4 ranks) began 29.0 s ago
          all 2 nodes rejoined
        ");
        let waiting = StatusReply {
            reason: "1 of 2 nodes joined".into(),
            ..status()
        };
        let text = job("nightly", &waiting);
        assert_eq!(text.lines().nth(1), Some("1 of 2 nodes joined"), "{text}");
    }
}
