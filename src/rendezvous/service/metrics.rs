//! What Prometheus scrapes, as OpenMetrics. Counters and histograms grow with the actor's events; gauges are taken from
//! the state when they are asked for. No label has more values than are written in this file, but for the names of the
//! first [`MAX_LABELLED_JOBS`] jobs that run, which need the same access as the status page.

use std::fs;
use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body;
use ddp_proto::rendezvous::refused::Code;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::rendezvous::event::{Effect, KvError, Observation};
use crate::rendezvous::policy::EndReason;
use crate::rendezvous::report::Census;

/// Jobs whose generation has a sample of its own.
pub(super) const MAX_LABELLED_JOBS: usize = 64;
/// From a round on one machine to nodes that are waited for.
const ROUND_BUCKETS: [f64; 12] = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Around a third of a lease of 9 s, which is when heartbeats come.
const AGE_BUCKETS: [f64; 10] = [0.5, 1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 6.0, 9.0, 30.0];

type Label = [(&'static str, &'static str); 1];
type JobLabel = [(&'static str, String); 1];

/// All of them.
#[derive(Debug)]
pub(in crate::rendezvous) struct Metrics {
    registry: Registry,
    restarts: Family<Label, Counter>,
    ended: Family<Label, Counter>,
    refusals: Family<Label, Counter>,
    rounds: Histogram,
    heartbeat_age: Histogram,
    streams: Gauge,
}

impl Metrics {
    pub(in crate::rendezvous) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("ddp"),
            restarts: Family::default(),
            ended: Family::default(),
            refusals: Family::default(),
            rounds: Histogram::new(ROUND_BUCKETS),
            heartbeat_age: Histogram::new(AGE_BUCKETS),
            streams: Gauge::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let Self { registry, .. } = self;
        registry.register(
            "restarts",
            "Generations that ended and were followed by another one",
            self.restarts.clone(),
        );
        registry.register("jobs_ended", "Jobs that ended", self.ended.clone());
        registry.register(
            "refusals",
            "Connections, streams, nodes and calls that were refused",
            self.refusals.clone(),
        );
        registry.register(
            "rendezvous_round_seconds",
            "From the first node that waits for a generation to its assignment",
            self.rounds.clone(),
        );
        registry.register(
            "heartbeat_age_seconds",
            "Time between two heartbeats of a node",
            self.heartbeat_age.clone(),
        );
        registry.register("streams", "Streams of agents that are open", self.streams.clone());
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The program", version);
        // A counter that is absent until it grows looks as if it had grown by nothing.
        for reason in RESTART_REASONS {
            self.restarts
                .get_or_create(&[("reason", restart_name(reason))])
                .inc_by(0);
        }
        for code in REFUSAL_CODES {
            self.refusals.get_or_create(&[("code", code)]).inc_by(0);
        }
        for result in RESULTS {
            self.ended.get_or_create(&[("result", result)]).inc_by(0);
        }
    }

    /// Counts what the state machine has decided.
    pub(super) fn note(&self, effect: &Effect) {
        match effect {
            Effect::Observed(Observation::Assigned(waited)) => self.rounds.observe(waited.as_secs_f64()),
            Effect::Observed(Observation::Restarted(reason)) => {
                self.restarts
                    .get_or_create(&[("reason", restart_name(*reason))])
                    .inc();
            }
            Effect::Observed(Observation::Ended(code)) => {
                self.ended.get_or_create(&[("result", result_name(*code))]).inc();
            }
            Effect::Send { message, .. } => {
                if let Some(Body::Refused(refused)) = &message.body {
                    self.refused(refusal_name(refused.code()));
                }
            }
            Effect::Answer {
                result: Err(error), ..
            } => {
                if let Some(code) = kv_name(error) {
                    self.refused(code);
                }
            }
            Effect::Answer { .. } | Effect::Close { .. } | Effect::Record(_) | Effect::Note { .. } => {}
        }
    }

    /// Something was refused, with one of [`REFUSAL_CODES`].
    pub(super) fn refused(&self, code: &'static str) {
        self.refusals.get_or_create(&[("code", code)]).inc();
    }

    /// A node has sent a heartbeat, so long after the last one.
    pub(super) fn heartbeat(&self, age: Duration) {
        self.heartbeat_age.observe(age.as_secs_f64());
    }

    /// So many streams of agents are open.
    pub(super) fn set_streams(&self, streams: usize) {
        self.streams.set(streams as i64);
    }

    /// All of it as text with the numbers of now: for everyone, and with the names of jobs.
    pub(super) fn text(&self, census: &Census) -> [String; 2] {
        let mut text = String::new();
        // A `String` takes everything.
        let _ = encode_registry(&mut text, &self.registry);
        let _ = encode_registry(&mut text, &gauges(census));
        let mut with_names = text.clone();
        let _ = encode_registry(&mut with_names, &generations(census));
        [text, with_names].map(|mut text| {
            let _ = encode_eof(&mut text);
            text
        })
    }
}

/// What the daemon looks like now.
fn gauges(census: &Census) -> Registry {
    let mut registry = Registry::with_prefix("ddp");
    let mut by_state = |name: &str, help: &str, counts: &[(&'static str, u64)]| {
        let family = Family::<Label, Gauge>::default();
        for (state, count) in counts {
            family.get_or_create(&[("state", *state)]).set(*count as i64);
        }
        registry.register(name, help, family);
    };
    let jobs = [
        ("gathering", census.gathering),
        ("recovering", census.recovering),
        ("running", census.running),
        ("over", census.over),
    ];
    by_state("jobs", "Jobs by state", &jobs);
    let away = census.nodes - census.connected;
    let nodes = [("connected", census.connected), ("away", away)];
    by_state("nodes", "Nodes of all jobs by connection", &nodes);
    let is_ready = i64::from(census.why_unready().is_none());
    for (name, help, value) in [
        ("ranks", "Ranks of running generations", census.ranks as i64),
        (
            "stragglers",
            "Ranks for which others wait more than 10 % of a step",
            census.stragglers as i64,
        ),
        (
            "kv_bytes",
            "Bytes in the key-value stores",
            census.kv_bytes as i64,
        ),
        ("ready", "1 if `/readyz` answers 200", is_ready),
        (
            "open_descriptors",
            "Open file descriptors",
            open_descriptors().unwrap_or(-1),
        ),
        (
            "max_descriptors",
            "Limit of open file descriptors",
            max_descriptors().unwrap_or(-1),
        ),
    ] {
        registry.register(name, help, ConstGauge::new(value));
    }
    registry.register(
        "longest_silence_seconds",
        "For how long the quietest node has sent nothing",
        ConstGauge::new(census.longest_silence.as_secs_f64()),
    );
    registry.register(
        "longest_gathering_seconds",
        "For how long nodes have been waited for, of the job that waits longest",
        ConstGauge::new(census.longest_gathering.as_secs_f64()),
    );
    registry
}

/// The names of jobs.
fn generations(census: &Census) -> Registry {
    let family = Family::<JobLabel, Gauge>::default();
    for (job, generation) in &census.generations {
        let of_job = family.get_or_create_owned(&[("job_id", job.clone())]);
        of_job.set(*generation as i64);
    }
    let mut registry = Registry::with_prefix("ddp");
    registry.register(
        "job_generation",
        "Generation of a job; of the first 64 jobs that run, by name",
        family,
    );
    registry
}

const RESTART_REASONS: [EndReason; 4] = [
    EndReason::Failure,
    EndReason::PortTaken,
    EndReason::NodeMissing,
    EndReason::Membership,
];

/// Of streams and nodes; of calls on the store; of calls and pages that need a token; of connections to the status page, and
/// of nodes.
const REFUSAL_CODES: [&str; 12] = [
    "disagree",
    "timed_out",
    "invalid",
    "job_over",
    "unspecified",
    "kv_superseded",
    "kv_conflict",
    "kv_full",
    "kv_unknown",
    "forbidden",
    "http",
    "connection",
];

const RESULTS: [&str; 3] = ["success", "failure", "closed"];

fn restart_name(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Failure | EndReason::Permanent => "worker_failed",
        EndReason::PortTaken => "port_taken",
        EndReason::NodeMissing => "node_lost",
        EndReason::Membership => "membership",
    }
}

fn result_name(code: i32) -> &'static str {
    match u8::try_from(code) {
        Ok(ddp_proto::exit::SUCCESS) => "success",
        Ok(ddp_proto::exit::CLOSED) => "closed",
        _ => "failure",
    }
}

fn refusal_name(code: Code) -> &'static str {
    match code {
        Code::Disagree => "disagree",
        Code::TimedOut => "timed_out",
        Code::Invalid => "invalid",
        Code::JobOver => "job_over",
        Code::Unspecified => "unspecified",
    }
}

/// None for a key that is not there yet, which is no refusal.
fn kv_name(error: &KvError) -> Option<&'static str> {
    match error {
        KvError::NotWritten(_) => None,
        KvError::Superseded(_) => Some("kv_superseded"),
        KvError::Exists(_) => Some("kv_conflict"),
        KvError::TooMuch(_) => Some("kv_full"),
        KvError::Unknown(_) => Some("kv_unknown"),
    }
}

/// Open descriptors of this process, without the one that reads the list.
fn open_descriptors() -> Option<i64> {
    let entries = fs::read_dir("/proc/self/fd").ok()?;
    Some(entries.count() as i64 - 1)
}

fn max_descriptors() -> Option<i64> {
    use nix::sys::resource::{Resource, getrlimit};
    let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    i64::try_from(soft).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn manifest(text: &str) -> Vec<Value> {
        serde_saphyr::from_multiple(text).unwrap()
    }

    /// On Kubernetes the job had another name, and no alert told that the daemon was down.
    #[test]
    fn the_daemon_is_asked_under_the_name_that_alerts_know() {
        let alerts = include_str!("../../../deploy/monitoring/alerts.yaml");
        let name = "ddp-rendezvous";
        let up = format!("up{{job=\"{name}\"}}");
        assert!(alerts.contains(&format!("{up} == 0 or absent({up})")), "{alerts}");
        let prometheus = &manifest(include_str!("../../../deploy/monitoring/prometheus.yaml"))[0];
        assert_eq!(prometheus["scrape_configs"][0]["job_name"], name);
        let monitor = &manifest(include_str!("../../../deploy/monitoring/servicemonitor.yaml"))[0]["spec"];
        let service = &manifest(include_str!("../../../deploy/kubernetes/rendezvous.yaml"))[0];
        let labels = &service["metadata"]["labels"];
        assert_eq!(labels[monitor["jobLabel"].as_str().unwrap()], name);
        assert_eq!(labels["app"], monitor["selector"]["matchLabels"]["app"]);
        let ports = service["spec"]["ports"].as_array().unwrap();
        let asked = &monitor["endpoints"][0]["port"];
        assert!(ports.iter().any(|port| port["name"] == *asked), "{service}");
    }

    #[test]
    fn every_alert_of_refusals_names_codes_that_exist() {
        let alerts = include_str!("../../../deploy/monitoring/alerts.yaml");
        let (_, rest) = alerts.split_once("ddp_refusals_total{code=~\"").unwrap();
        let (codes, _) = rest.split_once('"').unwrap();
        let codes: Vec<_> = codes.split('|').collect();
        assert!(codes.contains(&"connection"), "a wrong token shows there");
        for code in codes {
            assert!(REFUSAL_CODES.contains(&code), "`{code}`");
        }
    }

    #[test]
    fn everything_is_there_from_the_start_and_no_label_is_made_up() {
        let metrics = Metrics::new();
        metrics.note(&Effect::Observed(Observation::Restarted(EndReason::NodeMissing)));
        metrics.note(&Effect::Observed(Observation::Ended(78)));
        metrics.heartbeat(Duration::from_secs(3));
        let census = Census {
            nodes: 3,
            connected: 2,
            recovering: 1,
            longest_gathering: Duration::from_millis(42_500),
            generations: vec![("a \"job\"\n".into(), 7)],
            ..Census::default()
        };
        let [for_all, text] = metrics.text(&census);
        assert!(
            for_all.contains("ddp_restarts_total{reason=\"node_lost\"} 1") && for_all.ends_with("# EOF\n"),
            "{for_all}"
        );
        assert!(!for_all.contains("job_id"), "names need a token: {for_all}");
        for line in [
            "ddp_restarts_total{reason=\"node_lost\"} 1",
            "ddp_restarts_total{reason=\"worker_failed\"} 0",
            "ddp_jobs_ended_total{result=\"closed\"} 1",
            "ddp_nodes{state=\"away\"} 1",
            "ddp_jobs{state=\"recovering\"} 1",
            "ddp_longest_gathering_seconds 42.5",
            "ddp_job_generation{job_id=\"a \\\"job\\\"\\n\"} 7",
            "ddp_heartbeat_age_seconds_count 1",
            "ddp_ready 0",
            "# EOF",
        ] {
            assert!(text.lines().any(|l| l == line), "`{line}` is missing in\n{text}");
        }
        assert!(text.contains(concat!(
            "ddp_build_info{version=\"",
            env!("CARGO_PKG_VERSION"),
            "\"} 1"
        )));
        let [_, text] = metrics.text(&Census::default());
        assert!(!text.contains("job_id="), "a job that is gone has no sample");
    }
}
