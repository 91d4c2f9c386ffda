//! The daemon's settings: every bound and every interval has its name here.

use std::time::Duration;

use ddp_proto::client::RESTART_BACKOFF_CAP;
use ddp_proto::control::MAX_VALUE_BYTES;
use ddp_proto::ids::{MAX_NODES, MAX_WORKERS};

use super::messages::clip;

/// Name of a job of several nodes whose nodes were given none, as with torchrun.
pub const DEFAULT_JOB_ID: &str = "none";

/// What a daemon knows of its callers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Callers {
    /// Each caller has shown that it has the daemon's token, or that it is a process of the daemon's user.
    #[default]
    Authenticated,
    /// Nothing (`--insecure`): an invalid request of a caller ends that caller's connection only.
    Anybody,
}

/// Settings of one daemon. [`Config::default`] is right for production.
#[derive(Clone, Debug)]
pub struct Config {
    /// The one job that is served, by a daemon that ends with it; none: any.
    pub only_job: Option<String>,
    /// Incarnation of the agent in whose process the daemon runs: the job cannot go on without that node.
    pub host: Option<String>,
    /// Whether callers are authenticated.
    pub callers: Callers,
    /// Connections at a time, if the descriptors suffice.
    pub max_connections: usize,
    /// Streams and calls at a time on one connection: more than the workers of a node make.
    pub max_streams: u32,
    /// A connection that has not begun to speak after this long is ended, and so is a stream on which no node has
    /// joined.
    pub join_wait: Duration,
    /// A node that says nothing for this long is lost, unless its peers show that it is at work. Agents send a heartbeat every third of it.
    pub lease: Duration,
    /// A node whose connection broke is lost after this long, unless its peers show that it is at work (for 60 s at most).
    pub reconnect_grace: Duration,
    /// A silent node is lost after this long at the latest, however much its peers advance; after 60 s if its connection was
    /// closed.
    pub silence_limit: Duration,
    /// How long a node may train without the daemon where other nodes can take its place. See `job/takeover`.
    pub takeover: Duration,
    /// A daemon that was restarted with its ledger waits so long for the nodes of a generation that runs.
    pub reattach_wait: Duration,
    /// A worker that names another rank as the cause of its failure is not blamed for this long.
    pub culprit_wait: Duration,
    /// With `--nnodes MIN:MAX`: how long to wait for more nodes once MIN are there.
    pub last_call: Duration,
    /// With `--nnodes MIN:MAX`: how long to wait for more nodes once one has come to a job that runs.
    pub scale_up_wait: Duration,
    /// A failure within this time of the start, without progress, is a quick one.
    pub quick_failure: Duration,
    /// So many quick failures in a row end the job, whatever is left of its restarts.
    pub quick_failures: u32,
    /// Pause before the second restart without progress in between; doubled for each further one. The first is at once.
    pub backoff_base: Duration,
    /// Longest pause before a restart.
    pub backoff_cap: Duration,
    /// Longest time that an agent may ask the daemon to wait for other nodes.
    pub join_timeout_cap: Duration,
    /// A job that is over forgets nodes that do not leave within this time.
    pub linger: Duration,
    /// How long a daemon that shuts down waits until every agent has left.
    pub shutdown_wait: Duration,
    /// Jobs at a time.
    pub max_jobs: usize,
    /// Nodes of one job, spares included.
    pub max_nodes: u32,
    /// Workers of one node.
    pub max_workers: u32,
    /// Bytes of one name: job, host, incarnation, address, signature.
    pub max_name_bytes: usize,
    /// Bytes of the description of a job.
    pub max_description_bytes: usize,
    /// Bytes of stderr that are kept of the first failing worker and sent to every node.
    pub max_tail_bytes: usize,
    /// Bounds of the key-value store of one generation.
    pub kv: KvLimits,
    /// Messages that may wait for one agent; an agent that does not read them is disconnected.
    pub agent_queue: usize,
    /// Events that may wait for the daemon; streams wait when it is full.
    pub inbox: usize,
    /// TCP keep-alive of accepted connections.
    pub tcp_keepalive: Duration,
    /// HTTP/2 pings on accepted connections.
    pub http2_keepalive_interval: Duration,
    /// How long such a ping may stay unanswered.
    pub http2_keepalive_timeout: Duration,
}

/// Bounds of the key-value store of one generation.
#[derive(Clone, Copy, Debug)]
pub struct KvLimits {
    /// Bytes of a key.
    pub key_bytes: usize,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Entries.
    pub entries: usize,
    /// Bytes of all keys and values.
    pub total_bytes: usize,
    /// Entries of all jobs.
    pub entries_of_all: usize,
    /// Bytes of all jobs.
    pub bytes_of_all: usize,
    /// Bytes of gathered answers that not all callers have taken, of all jobs.
    pub answer_bytes_of_all: usize,
    /// Blocked reads.
    pub waiters: usize,
    /// Blocked reads of all jobs.
    pub waiters_of_all: usize,
    /// Longest blocked read.
    pub wait: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            only_job: None,
            host: None,
            callers: Callers::Authenticated,
            max_connections: 65_536,
            max_streams: 4096 + 64,
            join_wait: Duration::from_secs(5),
            lease: Duration::from_secs(9),
            reconnect_grace: Duration::from_secs(5),
            silence_limit: Duration::from_mins(10),
            takeover: Duration::from_secs(15),
            reattach_wait: Duration::from_mins(1),
            culprit_wait: Duration::from_millis(500),
            last_call: Duration::from_secs(10),
            scale_up_wait: Duration::from_secs(10),
            quick_failure: Duration::from_secs(5),
            quick_failures: 5,
            backoff_base: Duration::from_millis(100),
            backoff_cap: RESTART_BACKOFF_CAP,
            join_timeout_cap: Duration::from_hours(24),
            linger: Duration::from_mins(1),
            shutdown_wait: Duration::from_secs(5),
            max_jobs: 1024,
            max_nodes: MAX_NODES,
            max_workers: MAX_WORKERS,
            max_name_bytes: 512,
            max_description_bytes: 16 << 10,
            max_tail_bytes: 16 << 10,
            kv: KvLimits::default(),
            agent_queue: 64,
            inbox: 256,
            tcp_keepalive: Duration::from_secs(15),
            http2_keepalive_interval: Duration::from_secs(10),
            http2_keepalive_timeout: Duration::from_secs(20),
        }
    }
}

impl Default for KvLimits {
    fn default() -> Self {
        Self {
            key_bytes: 512,
            value_bytes: MAX_VALUE_BYTES,
            entries: 131_072,
            total_bytes: 64 << 20,
            entries_of_all: 1 << 20,
            bytes_of_all: 512 << 20,
            answer_bytes_of_all: 1 << 30,
            waiters: 65_536,
            waiters_of_all: 262_144,
            wait: Duration::from_hours(1),
        }
    }
}

impl Config {
    /// Why `job` is not served here, without the subject "the daemon"; none if it is.
    pub fn refuses(&self, job: &str) -> Option<String> {
        let owner = self.only_job.as_deref().filter(|owner| *owner != job)?;
        let owner = clip(owner, 128);
        Some(format!(
            "belongs to job `{owner}` and ends with it: it does not serve job `{}`",
            clip(job, 128)
        ))
    }

    /// How often an agent should send a heartbeat.
    pub fn heartbeat_interval(&self) -> Duration {
        self.lease / 3
    }

    /// The lease as it goes over the wire.
    pub fn lease_ms(&self) -> u32 {
        u32::try_from(self.lease.as_millis()).unwrap_or(u32::MAX)
    }

    /// Pause before restart number `restart` (from 1) since the last progress, for a `dice` in 0..1.
    ///
    /// No pause before the first restart: most failures do not repeat, and every rank would wait for nothing. After that
    /// between half and all of `base * 2^(restart - 2)`, never above the cap.
    pub fn backoff(&self, restart: u32, dice: f64) -> Duration {
        let Some(doublings) = restart.checked_sub(2).map(|further| further.min(31)) else {
            return Duration::ZERO;
        };
        let full = self
            .backoff_base
            .saturating_mul(1 << doublings)
            .min(self.backoff_cap);
        full.mul_f64(0.5 + dice.clamp(0.0, 1.0) / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backoff_doubles_up_to_its_cap_and_jitter_only_shortens_it() {
        let config = Config::default();
        assert_eq!(config.backoff(1, 1.0), Duration::ZERO, "at once");
        assert_eq!(config.backoff(2, 1.0), Duration::from_millis(100));
        assert_eq!(config.backoff(4, 1.0), Duration::from_millis(400));
        assert_eq!(config.backoff(4, 0.0), Duration::from_millis(200));
        assert_eq!(config.backoff(1000, 1.0), config.backoff_cap);
    }

    /// `123456` as `123,456`.
    fn grouped(number: usize) -> String {
        let digits = number.to_string();
        let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().collect();
        String::from_utf8(groups.join(&b',')).unwrap()
    }

    /// The entries of a store were half of what they are.
    #[test]
    fn the_documented_limits_are_those_of_the_settings() {
        let text = include_str!("../../docs/security.md");
        let Config {
            max_streams,
            max_jobs,
            max_nodes,
            kv,
            ..
        } = Config::default();
        let stored = |entries: usize, bytes: usize| format!("{} and {} MiB |", grouped(entries), bytes >> 20);
        for (what, limit) in [
            ("calls on one connection at a time", grouped(max_streams as usize)),
            (
                "jobs, nodes of one job",
                format!("{} and {} |", grouped(max_jobs), grouped(max_nodes as usize)),
            ),
            (
                "entries and bytes of a job's store",
                stored(kv.entries, kv.total_bytes),
            ),
            (
                "entries and bytes of all stores",
                stored(kv.entries_of_all, kv.bytes_of_all),
            ),
        ] {
            let row = format!("| {what} | {limit}");
            assert!(text.contains(&row), "docs/security.md has no row `{row}`");
        }
    }
}
