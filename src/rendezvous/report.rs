//! What the daemon tells of its jobs, as JSON: for the status page and for `--json`.

use std::time::Duration;

use ddp_proto::rendezvous::{JobSummary, JobsReply, NodeStatus, RankProgress, StatusReply};
use serde_json::{Value, json};

/// All jobs of a daemon in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Nodes are to come before the next generation.
    pub gathering: u64,
    /// An earlier daemon's generation runs, whose nodes have not all come back.
    pub recovering: u64,
    /// A generation runs.
    pub running: u64,
    /// The job is over, and some nodes have not left.
    pub over: u64,
    /// Nodes that are there.
    pub nodes: u64,
    /// Those of them that are connected.
    pub connected: u64,
    /// Ranks of running generations.
    pub ranks: u64,
    /// Those of them that hold the others up.
    pub stragglers: u64,
    /// Bytes in the key-value stores.
    pub kv_bytes: u64,
    /// For how long the quietest node has said nothing.
    pub longest_silence: Duration,
    /// For how long the nodes of a job have been waited for, of the job that waits longest.
    pub longest_gathering: Duration,
    /// The daemon's own network may be down.
    pub suspects_network: bool,
    /// Generations of the first jobs that run one, as many as were asked for.
    pub generations: Vec<(String, u64)>,
}

impl Census {
    /// What keeps the daemon from being ready, if anything.
    pub(in crate::rendezvous) fn why_unready(&self) -> Option<String> {
        if self.suspects_network {
            return Some("no node is heard: this machine's network may be down".to_owned());
        }
        let jobs = ddp_proto::words::counted(self.recovering as u32, "job");
        (self.recovering > 0).then(|| format!("waiting for the nodes of {jobs} of an earlier daemon"))
    }
}

/// How much a document holds at most; the rest is counted.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Jobs of the list.
    pub jobs: usize,
    /// Nodes of a job.
    pub nodes: usize,
    /// Ranks of all of its nodes.
    pub ranks: usize,
}

impl Bounds {
    /// All that a daemon tells.
    pub const NONE: Self = Self {
        jobs: usize::MAX,
        nodes: usize::MAX,
        ranks: usize::MAX,
    };
}

/// All jobs.
pub fn jobs(reply: &JobsReply, bounds: Bounds) -> Value {
    let line = |job: &JobSummary| {
        json!({
            "job": job.job_id,
            "state": job.phase,
            "generation": job.generation,
            "restarts": job.restart_count,
            "max_restarts": job.max_restarts,
            "nodes": job.nodes,
            "ranks": job.ranks,
            "step": job.step,
            "reason": job.reason,
            "kv_bytes": job.kv_bytes,
            "user": job.user,
            "host": job.hostname,
            "target": job.target,
            "age_s": job.age_ms as f64 / 1e3,
            "ended_s_ago": job.ended_ms.map(|ms| ms as f64 / 1e3),
            "loss": job.loss,
            "step_time_s": job.step_time_s,
        })
    };
    let listed = |jobs: &[JobSummary]| jobs.iter().take(bounds.jobs).map(line).collect::<Value>();
    json!({
        "jobs": listed(&reply.jobs),
        "ended": listed(&reply.ended),
        "more_jobs": left_over(reply.jobs.len(), bounds.jobs, reply.more_jobs),
    })
}

/// One job.
pub fn job(name: &str, status: &StatusReply, bounds: Bounds) -> Value {
    let mut room = bounds.ranks;
    let nodes = status.nodes.iter().take(bounds.nodes).map(|node| {
        let shown = &node.ranks[..node.ranks.len().min(room)];
        room -= shown.len();
        as_json(node, shown)
    });
    let nodes: Vec<Value> = nodes.collect();
    let generations = status.generations.iter().map(|generation| {
        json!({
            "generation": generation.generation,
            "nodes": generation.nodes,
            "ranks": generation.ranks,
            "began": generation.began,
            "began_ms_ago": generation.began_ms,
            "ended": generation.ended,
            "ended_ms_ago": generation.ended_ms,
            "step": generation.step,
        })
    });
    json!({
        "job": name,
        "state": status.phase,
        "reason": status.reason,
        "generation": status.generation,
        "restarts": status.restart_count,
        "max_restarts": status.max_restarts,
        "min_nodes": status.min_nodes,
        "max_nodes": status.max_nodes,
        "kv_bytes": status.kv_bytes,
        "nodes": nodes,
        "more_nodes": left_over(status.nodes.len(), bounds.nodes, status.more_nodes),
        "generations": generations.collect::<Vec<_>>(),
        "more_generations": status.more_generations,
        "losses": status.losses.iter().map(|point| json!([point.step, point.loss])).collect::<Vec<_>>(),
    })
}

fn as_json(node: &NodeStatus, shown: &[RankProgress]) -> Value {
    let ranks = shown.iter().map(|rank| {
        json!({
            "rank": rank.rank,
            "step": rank.step,
            "step_time_s": rank.step_time_s,
            "holds_up_s": rank.holds_up_s,
            "silent_ms": rank.silent_ms,
            "steps": rank.steps,
            "tokens_per_s": rank.tokens_per_s,
            "model_flops_per_s": rank.model_flops_per_s,
            "mfu": rank.mfu,
        })
    });
    json!({
        "host": node.hostname,
        "address": node.addr,
        "node_rank": node.node_rank,
        "first_rank": node.first_rank,
        "workers": node.workers,
        "connected": node.connected,
        "silent_ms": node.silent_ms,
        "lease_left_ms": node.lease_left_ms,
        "step": node.step,
        "log_dir": node.log_dir,
        "ranks": ranks.collect::<Vec<_>>(),
        "more_ranks": node.ranks.len() - shown.len(),
    })
}

fn left_over(have: usize, bound: usize, more: u32) -> u64 {
    have.saturating_sub(bound) as u64 + u64::from(more)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_counted() {
        let rank = |rank| RankProgress {
            rank,
            step_time_s: Some(0.5),
            ..RankProgress::default()
        };
        let node = |first: u32| NodeStatus {
            hostname: format!("node{first}"),
            ranks: (first..first + 4).map(rank).collect(),
            ..NodeStatus::default()
        };
        let status = StatusReply {
            nodes: [0, 4, 8].map(node).to_vec(),
            more_nodes: 7,
            ..StatusReply::default()
        };
        let bounds = Bounds {
            jobs: 1,
            nodes: 2,
            ranks: 6,
        };
        let value = job("j", &status, bounds);
        assert_eq!(value["more_nodes"], 8);
        let nodes = value["nodes"].as_array().unwrap();
        assert_eq!(nodes.len(), 2);
        assert_eq!(
            (nodes[0]["more_ranks"].as_u64(), nodes[1]["more_ranks"].as_u64()),
            (Some(0), Some(2))
        );
        let listed = jobs(
            &JobsReply {
                jobs: vec![ddp_proto::rendezvous::JobSummary::default(); 3],
                more_jobs: 1,
                ended: Vec::new(),
            },
            bounds,
        );
        assert_eq!(listed["more_jobs"], 3);
    }

    #[test]
    fn a_daemon_is_unready_while_it_recovers_or_may_be_cut_off() {
        assert_eq!(Census::default().why_unready(), None);
        let recovering = Census {
            recovering: 2,
            ..Census::default()
        };
        assert_eq!(
            recovering.why_unready().unwrap(),
            "waiting for the nodes of 2 jobs of an earlier daemon"
        );
        let cut_off = Census {
            suspects_network: true,
            ..Census::default()
        };
        assert!(cut_off.why_unready().is_some());
    }
}
