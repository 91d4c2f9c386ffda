//! Decisions of the state machine, told as scenes: who says what, and what every node receives.

mod failures;
mod fences;
mod gathering;
mod hangs;
mod outcomes;
mod partition;
mod reconnects;
mod records;
mod recovery;
mod scale;
mod server;
mod silence;
mod store;
mod stragglers;
mod strangers;
mod takeover;
mod witnesses;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{
    AgentMessage, Assignment, DaemonMessage, Heartbeat, Join, KvGetRequest, KvPutRequest, Leave, NodeLeaving,
    NodeStopped, NodeSucceeded, StatusRequest, WorkerExit,
};

use ddp_proto::rendezvous::agreed_hash;

use super::event::Stage;
use super::{At, CallId, Config, ConnId, Effect, Event, KvError, Peer, Record, Secret, State, apply};

const JOB: &str = "job1";
const SECOND: Duration = Duration::from_secs(1);

/// A daemon, the time, and what every stream has received. The name of a node is also its host and incarnation,
/// up to a `'`: `b'` is a new process on host `b`.
struct Scene {
    state: State,
    job: &'static str,
    now: Duration,
    streams: BTreeMap<ConnId, Vec<Received>>,
    current: BTreeMap<String, ConnId>,
    answers: BTreeMap<u64, Result<Vec<u8>, KvError>>,
    last_id: u64,
    /// The node whose worker calls the store.
    caller: &'static str,
    last_assignment: u32,
    /// The ledger.
    records: BTreeMap<String, Record>,
    /// What each node tells of its generation.
    assignment_ids: BTreeMap<(String, u64), String>,
}

#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a test holds few of them")]
enum Received {
    Message(DaemonMessage),
    Closed,
}

impl Scene {
    fn new() -> Self {
        Self::with(Config::default())
    }

    fn with(config: Config) -> Self {
        Self {
            state: State::new(config),
            job: JOB,
            now: Duration::ZERO,
            streams: BTreeMap::new(),
            current: BTreeMap::new(),
            answers: BTreeMap::new(),
            last_id: 0,
            caller: "a",
            last_assignment: 0,
            records: BTreeMap::new(),
            assignment_ids: BTreeMap::new(),
        }
    }

    fn apply(&mut self, event: Event) {
        for effect in apply(
            At {
                now: self.now,
                dice: 1.0,
                id: self.next_assignment(),
                secret: Secret::new([1; 32]),
            },
            &mut self.state,
            event,
        ) {
            match effect {
                Effect::Send { conn, message } => {
                    self.receive(conn, Received::Message(Arc::unwrap_or_clone(message)));
                }
                Effect::Close { conn } => self.receive(conn, Received::Closed),
                Effect::Answer { call, result } => {
                    let old = self.answers.insert(call.0, result.map(|value| value.to_vec()));
                    assert_eq!(old, None, "call {} was answered twice", call.0);
                }
                Effect::Record(record) => {
                    self.records.insert(record.job.clone(), *record);
                }
                Effect::Observed(_) => {}
                Effect::Note { words, .. } => println!("{:>9.3}  {words}", self.now.as_secs_f64()),
            }
        }
        self.state.assert_counts();
    }

    /// The state machine's random number. No two daemons have the same.
    fn next_assignment(&mut self) -> u128 {
        self.last_assignment += 1;
        u128::from(self.last_assignment) << 96
    }

    fn receive(&mut self, conn: ConnId, received: Received) {
        let stream = self.streams.entry(conn).or_default();
        assert_ne!(
            stream.last(),
            Some(&Received::Closed),
            "stream {conn:?} received {received:?} after its end"
        );
        if let Received::Message(DaemonMessage {
            generation,
            body: Some(Reply::Assignment(assignment)),
        }) = &received
            && let Some((node, _)) = self.current.iter().find(|(_, current)| **current == conn)
        {
            let of = (node.clone(), *generation);
            self.assignment_ids.insert(of, assignment.assignment_id.clone());
        }
        stream.push(received);
    }

    fn say(&mut self, node: &str, generation: u64, body: Body) -> &mut Self {
        let conn = self.current[node];
        self.say_from(node, conn, [10, 0, 0, 1], generation, body);
        self
    }

    fn say_from(&mut self, node: &str, conn: ConnId, from: [u8; 4], generation: u64, body: Body) {
        let peer = Peer {
            remote: IpAddr::from(from),
            local: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 9)),
        };
        let message = AgentMessage {
            job_id: self.job.into(),
            incarnation: node.into(),
            generation,
            assignment_id: self.assignment_id(node, generation),
            body: Some(body),
        };
        let message = Box::new(message);
        self.apply(Event::Message { conn, peer, message });
    }

    /// Which assignment of the generation this node has received; empty if none.
    fn assignment_id(&self, node: &str, generation: u64) -> String {
        let id = self.assignment_ids.get(&(node.to_owned(), generation));
        id.cloned().unwrap_or_default()
    }

    /// Opens a new stream for the node and joins on it.
    fn join_with(&mut self, node: &str, from: [u8; 4], generation: u64, join: Join) -> &mut Self {
        self.last_id += 1;
        let conn = ConnId(self.last_id);
        self.current.insert(node.into(), conn);
        self.say_from(node, conn, from, generation, Body::Join(join));
        self
    }

    fn join(&mut self, node: &str, min: u32, max: u32) -> &mut Self {
        self.join_with(node, [10, 0, 0, 1], 0, join(node, min, max))
    }

    fn rejoin(&mut self, node: &str, generation: u64, min: u32, max: u32) -> &mut Self {
        self.say(node, generation, Body::NodeStopped(NodeStopped::default()));
        self.say(node, generation, Body::Join(join(node, min, max)))
    }

    fn exit(&mut self, node: &str, generation: u64, exit: WorkerExit) -> &mut Self {
        self.say(node, generation, Body::WorkerExit(exit))
    }

    fn succeed(&mut self, node: &str, generation: u64) -> &mut Self {
        self.say(node, generation, Body::NodeSucceeded(NodeSucceeded {}))
    }

    fn heartbeat(&mut self, node: &str, generation: u64) -> &mut Self {
        self.say(
            node,
            generation,
            Body::Heartbeat(Heartbeat {
                step: Some(7),
                ..Heartbeat::default()
            }),
        )
    }

    fn limit_sizes(&mut self, node: &str, generation: u64, ranks_divide: u64) -> &mut Self {
        let heartbeat = Heartbeat {
            step: Some(7),
            ranks_divide: Some(ranks_divide),
            ..Heartbeat::default()
        };
        self.say(node, generation, Body::Heartbeat(heartbeat))
    }

    fn give_up(&mut self, node: &str, exit_code: i32, reason: &str) -> &mut Self {
        let leave = Leave {
            signal: None,
            reason: reason.into(),
            exit_code: Some(exit_code),
            ..Leave::default()
        };
        self.say(node, 0, Body::Leave(leave))
    }

    fn leave(&mut self, node: &str, signal: Option<i32>, reason: &str) -> &mut Self {
        self.say(
            node,
            0,
            Body::Leave(Leave {
                signal,
                reason: reason.into(),
                ..Leave::default()
            }),
        )
    }

    /// It is stopped by SIGTERM: its workers are to stop, and `leave` follows.
    fn leaving(&mut self, node: &str, generation: u64) -> &mut Self {
        self.say(node, generation, Body::NodeLeaving(NodeLeaving { signal: 15 }))
    }

    fn break_stream(&mut self, node: &str) -> &mut Self {
        self.apply(Event::Closed {
            conn: self.current[node],
            clean: false,
        });
        self
    }

    fn end_stream(&mut self, node: &str) -> &mut Self {
        self.apply(Event::Closed {
            conn: self.current[node],
            clean: true,
        });
        self
    }

    fn put(&mut self, generation: u64, key: &str, value: &[u8]) -> u64 {
        let id = self.assignment_id(self.caller, generation);
        self.put_as(&id, generation, key, value)
    }

    fn put_as(&mut self, assignment_id: &str, generation: u64, key: &str, value: &[u8]) -> u64 {
        self.last_id += 1;
        let request = KvPutRequest {
            assignment_id: assignment_id.into(),
            job_id: JOB.into(),
            incarnation: self.caller.into(),
            generation,
            key: key.into(),
            value: value.into(),
        };
        self.apply(Event::KvPut {
            call: CallId(self.last_id),
            request,
        });
        self.last_id
    }

    fn get(&mut self, generation: u64, key: &str, timeout_ms: u32) -> u64 {
        self.last_id += 1;
        let request = KvGetRequest {
            job_id: JOB.into(),
            incarnation: self.caller.into(),
            generation,
            key: key.into(),
            timeout_ms,
            assignment_id: self.assignment_id(self.caller, generation),
        };
        self.apply(Event::KvGet {
            call: CallId(self.last_id),
            request,
        });
        self.last_id
    }

    /// Lets time pass; timers fire when they are due, and the named nodes send heartbeats.
    fn pass(&mut self, time: Duration, alive: &[&str]) -> &mut Self {
        let end = self.now + time;
        let beat = Config::default().heartbeat_interval();
        let mut next_beat = self.now;
        while self.now < end {
            let wake = self.state.next_wake().unwrap_or(Duration::MAX);
            self.now = wake.min(next_beat).min(end).max(self.now);
            if self.now >= next_beat {
                for node in alive {
                    self.heartbeat(node, 0);
                }
                next_beat = self.now + beat;
            }
            if wake <= self.now {
                self.apply(Event::Tick);
                let again = self.state.next_wake().unwrap_or(Duration::MAX);
                assert!(again > self.now, "the timer would spin at {:?}", self.now);
            }
        }
        self
    }

    /// What the node has received on its stream since the last time.
    fn received(&mut self, node: &str) -> Vec<Received> {
        let received = self.streams.entry(self.current[node]).or_default();
        let news = received.clone();
        received.retain(|h| *h == Received::Closed);
        news
    }

    /// What the node has received since the last time, in short words.
    fn words(&mut self, node: &str) -> String {
        self.received(node)
            .iter()
            .map(short)
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// The one assignment that the node has received since the last time, among other things.
    fn assignment(&mut self, node: &str) -> (u64, Assignment) {
        let found: Vec<_> = self
            .received(node)
            .into_iter()
            .filter_map(|received| match received {
                Received::Message(DaemonMessage {
                    generation,
                    body: Some(Reply::Assignment(a)),
                }) => Some((generation, a)),
                _ => None,
            })
            .collect();
        assert_eq!(found.len(), 1, "node `{node}` has {} assignments", found.len());
        found.into_iter().next().unwrap()
    }

    fn answer(&self, call: u64) -> Option<Result<Vec<u8>, String>> {
        self.answers
            .get(&call)
            .cloned()
            .map(|answer| answer.map_err(|e| e.to_string()))
    }
}

/// A job whose two nodes run.
fn two_nodes() -> Scene {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2);
    s.words("a");
    s.words("b");
    s
}

fn join(node: &str, min_nodes: u32, max_nodes: u32) -> Join {
    Join {
        protocol: 1,
        hostname: node.trim_end_matches('\'').into(),
        node_rank: None,
        min_nodes,
        max_nodes,
        workers: 2,
        max_restarts: 3,
        local_addr: String::new(),
        master_port: 29_500,
        agreed: agreed(&[("target", "train.yaml"), ("train.seed", "1")]),
        join_timeout_ms: 600_000,
        run_token: String::new(),
        role: String::new(),
        last_call_ms: 0,
        free_attempt: 0,
        ..Join::default()
    }
}

fn agreed(entries: &[(&str, &str)]) -> BTreeMap<String, u64> {
    let hashed = entries
        .iter()
        .map(|(key, value)| ((*key).to_owned(), agreed_hash(key, value)));
    hashed.collect()
}

fn killed(rank: u32, signal: i32) -> WorkerExit {
    WorkerExit {
        rank,
        signal: Some(signal),
        stderr_tail: vec!["last words".into()],
        ..WorkerExit::default()
    }
}

fn exited(rank: u32, code: i32) -> WorkerExit {
    WorkerExit {
        rank,
        exit_code: Some(code),
        ..WorkerExit::default()
    }
}

fn short(received: &Received) -> String {
    let Received::Message(DaemonMessage { generation, body }) = received else {
        return "closed".into();
    };
    match body.as_ref().expect("the daemon never sends an empty message") {
        Reply::Waiting(w) => format!("waiting: {}", w.reason),
        Reply::Assignment(a) => {
            let own = a.own.as_ref().expect("every assignment has a node");
            format!(
                "assignment {generation}: node rank {} of {}, first rank {}, master {}:{}, restart {}/{}: {}",
                a.node_rank,
                a.node_count,
                own.first_rank,
                a.master_addr,
                a.master_port,
                a.restart_count,
                a.max_restarts,
                a.reason
            )
        }
        Reply::GenerationOver(g) if g.membership => format!(
            "generation {generation} over{}: {} (no restart spent)",
            if g.at_step_boundary {
                " at a step boundary"
            } else {
                ""
            },
            g.cause
        ),
        Reply::GenerationOver(g) => format!(
            "generation {generation} over: {} (failure on `{}`, restart {}/{}, back-off {} ms)",
            g.cause, g.first_failure_host, g.restart_count, g.max_restarts, g.backoff_ms
        ),
        Reply::JobOver(j) => format!(
            "job over {}: {} (failure on `{}`){}",
            j.exit_code,
            j.reason,
            j.first_failure_host,
            j.signal
                .map_or_else(String::new, |signal| format!(", signal {signal}"))
        ),
        Reply::Refused(r) => format!("refused {:?}: {}", r.code(), r.reason),
        Reply::HangVerdict(verdict) => format!("hang of rank {:?}: {}", verdict.rank, verdict.comparison),
        Reply::Heard(heard) => format!("heard {} ms", heard.sent_ms),
    }
}
