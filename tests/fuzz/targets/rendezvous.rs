//! What nodes and callers tell the daemon, and what its ledger may hold.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{
    AgentMessage, Heartbeat, Join, KvGatherRequest, KvGetRequest, KvPutRequest, Leave, LostRank, NodeStopped,
    NodeSucceeded, Place, RankProgress, WorkerExit,
};
use ddp_run::rendezvous::{At, CallId, Config, ConnId, Effect, Event, Ledger, Peer, Secret, State, apply};
use prost::Message;

use super::{joined, parts};
use crate::runner::Target;

/// Memory for each byte of protobuf: an element of a list is two bytes on the wire, and a few hundred in memory, twice
/// while the list grows. The daemon bounds its messages' length.
const BYTES_PER_BYTE: usize = 1024;

const WORDS: &[&str] = &["job", "node-a", "node-b", "key"];

/// Kinds of steps, in the first byte of one.
#[derive(Clone, Copy)]
enum Step {
    Message = 0,
    Closed = 1,
    Put = 2,
    Get = 3,
    Tick = 4,
    Gather = 5,
    Close = 6,
    Cancel = 7,
}

/// How many kinds there are.
const KINDS: u8 = 9;

/// A step: its kind, a stream or call, time in 100 ms, and bytes.
fn step(kind: Step, number: u8, time: u8, bytes: Vec<u8>) -> Vec<u8> {
    [vec![kind as u8, number, time], bytes].concat()
}

fn message(node: &str, generation: u64, body: Body) -> Vec<u8> {
    let message = AgentMessage {
        job_id: "job".into(),
        incarnation: node.into(),
        generation,
        assignment_id: if generation == 0 {
            String::new()
        } else {
            assignment_id(generation)
        },
        body: Some(body),
    };
    message.encode_to_vec()
}

/// As the target's daemon gives them.
fn assignment_id(generation: u64) -> String {
    format!("{:032x}", u128::from(generation))
}

fn join(node: &str, place: Option<Place>) -> Body {
    Body::Join(Join {
        protocol: 1,
        hostname: node.into(),
        min_nodes: 2,
        max_nodes: 3,
        workers: 2,
        max_restarts: 1,
        master_port: 29500,
        agreed: [("target".to_owned(), 1), ("arguments".to_owned(), 2)].into(),
        join_timeout_ms: 60_000,
        role: "default".into(),
        last_call_ms: 100,
        place: place.map(Box::new),
        ..Join::default()
    })
}

fn exit(rank: u32) -> WorkerExit {
    WorkerExit {
        rank,
        pid: 77,
        exit_code: Some(1),
        unix_time_ns: 1_700_000_000_000_000_000,
        stderr_tail: vec!["Traceback".into(), "ValueError".into()],
        message: "it failed".into(),
        ..WorkerExit::default()
    }
}

fn heartbeat() -> Heartbeat {
    Heartbeat {
        step: Some(7),
        ranks_divide: Some(8),
        ranks_multiple_of: Some(1),
        lost_rank: Some(LostRank { rank: 2, witness: 0 }),
        ranks: vec![RankProgress {
            rank: 1,
            step: 7,
            step_time_s: Some(0.5),
            loss: Some(3.5),
            silent_ms: 3,
            ..RankProgress::default()
        }],
        log_dir: "logs".into(),
        sent_ms: 7,
    }
}

/// A job of two nodes from its beginning to its end.
fn life() -> Vec<Vec<u8>> {
    let say =
        |conn, node: &str, generation, body| step(Step::Message, conn, 1, message(node, generation, body));
    let heartbeat = heartbeat();
    let put = KvPutRequest {
        job_id: "job".into(),
        generation: 1,
        key: "key".into(),
        value: vec![1; 40],
        assignment_id: assignment_id(1),
        incarnation: "node-a".into(),
    };
    let get = KvGetRequest {
        job_id: "job".into(),
        generation: 1,
        key: "other".into(),
        timeout_ms: 500,
        assignment_id: assignment_id(1),
        incarnation: "node-a".into(),
    };
    let gather = KvGatherRequest {
        job_id: "job".into(),
        generation: 1,
        prefix: "k".into(),
        count: 2,
        timeout_ms: 500,
        assignment_id: assignment_id(1),
        incarnation: "node-a".into(),
    };
    let stopped = NodeStopped {
        exits: vec![exit(0), exit(1)],
        ..NodeStopped::default()
    };
    vec![
        say(0, "node-a", 0, join("node-a", None)),
        say(1, "node-b", 0, join("node-b", None)),
        step(Step::Tick, 0, 20, Vec::new()),
        say(0, "node-a", 1, Body::Heartbeat(heartbeat.clone())),
        step(Step::Put, 0, 1, put.encode_to_vec()),
        step(Step::Get, 1, 1, get.encode_to_vec()),
        step(Step::Gather, 2, 1, gather.encode_to_vec()),
        say(1, "node-b", 1, Body::Heartbeat(heartbeat)),
        say(0, "node-a", 1, Body::WorkerExit(exit(0))),
        step(Step::Tick, 0, 100, Vec::new()),
        say(0, "node-a", 1, Body::NodeStopped(stopped)),
        say(1, "node-b", 1, Body::NodeStopped(NodeStopped::default())),
        say(0, "node-a", 1, join("node-a", None)),
        say(1, "node-b", 1, join("node-b", None)),
        step(Step::Tick, 0, 100, Vec::new()),
        step(Step::Closed, 1, 1, Vec::new()),
        say(2, "node-b", 2, join("node-b", None)),
        say(0, "node-a", 2, Body::NodeSucceeded(NodeSucceeded {})),
        say(2, "node-b", 2, Body::NodeSucceeded(NodeSucceeded {})),
        say(0, "node-a", 2, Body::Leave(Leave::default())),
        step(Step::Closed, 0, 1, Vec::new()),
    ]
}

/// The nodes of a job that a daemon knows nothing of come with their places.
fn recovery() -> Vec<Vec<u8>> {
    let place = |rank: u32, node: &str| Place {
        assignment: Some(ddp_proto::rendezvous::Assignment {
            node_rank: rank,
            max_restarts: 1,
            own: Some(ddp_proto::rendezvous::NodeAssignment {
                hostname: node.into(),
                addr: "10.0.0.1".into(),
                first_rank: 2 * rank,
                workers: 2,
                role: "default".into(),
            }),
            node_count: 2,
            world_size: 4,
            master_addr: "10.0.0.1".into(),
            master_port: 29500,
            lease_ms: 9000,
            run_token: "00ff".into(),
            assignment_id: assignment_id(5),
            data_key: vec![7; 32],
            ..ddp_proto::rendezvous::Assignment::default()
        }),
        heartbeat: Some(Heartbeat::default()),
        held_ms: 4000,
        over: false,
    };
    let come = |conn, rank, node: &str| {
        let Body::Join(join) = join(node, Some(place(rank, node))) else {
            unreachable!("it is one");
        };
        let join = Join {
            run_token: "00ff".into(),
            latest_generation: 5,
            ..join
        };
        step(Step::Message, conn, 3, message(node, 5, Body::Join(join)))
    };
    let exit = step(
        Step::Message,
        1,
        1,
        message("node-b", 5, Body::WorkerExit(exit(2))),
    );
    vec![
        come(0, 0, "node-a"),
        come(1, 1, "node-b"),
        exit,
        step(Step::Tick, 0, 200, Vec::new()),
    ]
}

/// A caller gives up a read; then an operator closes the job.
fn operators() -> Vec<Vec<u8>> {
    // The read is the last one of these, and calls are numbered as steps.
    let mut steps = life()[..6].to_vec();
    let read = steps.len() as u8;
    steps.extend([
        step(Step::Cancel, read, 0, b"job".to_vec()),
        step(Step::Close, 0, 1, b"job\nmaintenance".to_vec()),
        step(Step::Tick, 0, 100, Vec::new()),
    ]);
    steps
}

/// A daemon with small bounds, so that inputs reach them.
fn config() -> Config {
    Config {
        max_jobs: 4,
        ..Config::default()
    }
}

/// What a step is to a daemon; none if its bytes are no message.
fn event_of(step: &[u8], call: CallId) -> Option<Event> {
    let [kind, number, time, message @ ..] = step else {
        return None;
    };
    let conn = ConnId(u64::from(*number));
    let text = || String::from_utf8_lossy(message);
    match kind % KINDS {
        0 => AgentMessage::decode(message).ok().map(|message| Event::Message {
            conn,
            peer: Peer {
                remote: IpAddr::V4(Ipv4Addr::new(10, 0, 0, *number)),
                local: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 9)),
            },
            message: Box::new(message),
        }),
        1 => Some(Event::Closed {
            conn,
            clean: time % 2 == 0,
        }),
        2 => {
            let request = KvPutRequest::decode(message).ok()?;
            Some(Event::KvPut { call, request })
        }
        3 => {
            let request = KvGetRequest::decode(message).ok()?;
            Some(Event::KvGet { call, request })
        }
        5 => {
            let request = KvGatherRequest::decode(message).ok()?;
            Some(Event::KvGather { call, request })
        }
        6 => {
            let text = text();
            let mut parts = text.splitn(2, '\n').map(str::to_owned);
            Some(Event::Close {
                job: parts.next().unwrap_or_default(),
                reason: parts.next().unwrap_or_default(),
            })
        }
        7 => Some(Event::KvCancel {
            call: CallId(u64::from(*number)),
            job: text().into_owned(),
        }),
        _ => Some(Event::Tick),
    }
}

/// What came of steps.
#[derive(Debug, Default, PartialEq)]
struct Played {
    /// The last generation.
    generation: u64,
    /// Code of the verdict that nodes were told last.
    exit_code: Option<i32>,
    /// Calls that were answered.
    answers: usize,
}

/// Plays the steps to a daemon, as its streams would: who was sent away says nothing more.
fn play(bytes: &[u8]) -> Played {
    let (mut state, mut played) = (State::new(config()), Played::default());
    let (mut now, mut calls) = (Duration::ZERO, 0_u64);
    let mut closed = Vec::new();
    for step in parts(bytes) {
        let [kind, number, time, ..] = step else {
            continue;
        };
        now += Duration::from_millis(100) * u32::from(*time);
        calls += 1;
        let conn = ConnId(u64::from(*number));
        let is_of_stream = kind % KINDS < 2;
        if is_of_stream && closed.contains(&conn) {
            continue;
        }
        if kind % KINDS == Step::Closed as u8 {
            closed.push(conn);
        }
        let event = event_of(step, CallId(calls));
        let Some(event) = event else { continue };
        if let (Event::Tick, Some(wake)) = (&event, state.next_wake()) {
            now = now.max(wake.min(now + Duration::from_mins(10)));
        }
        let at = At {
            now,
            dice: 0.5,
            // See `assignment_id`.
            id: u128::from(played.generation) + 1,
            secret: Secret::new([1; 32]),
        };
        for effect in apply(at, &mut state, event) {
            match effect {
                Effect::Note { words, .. } => assert!(!words.contains(['\u{1b}', '\u{202e}']), "{words:?}"),
                Effect::Close { conn } => closed.push(conn),
                Effect::Answer { .. } => played.answers += 1,
                Effect::Send { message, .. } => match &message.body {
                    Some(Reply::Assignment(_)) => played.generation = message.generation,
                    Some(Reply::JobOver(over)) => played.exit_code = Some(over.exit_code),
                    _ => {}
                },
                _ => {}
            }
        }
        state.status(now, "job");
    }
    played
}

pub(crate) fn events() -> Target {
    let seeds = vec![joined(&life()), joined(&recovery()), joined(&operators())];
    assert_eq!(play(&seeds[0]).generation, 2, "the seed is no life of a job");
    let operated = Played {
        generation: 1,
        exit_code: Some(i32::from(ddp_proto::exit::CLOSED)),
        // The write, and not the read.
        answers: 1,
    };
    assert_eq!(play(&seeds[2]), operated);
    Target {
        words: WORDS,
        bytes_per_byte: BYTES_PER_BYTE,
        ..Target::new("rendezvous_events", seeds, |bytes| {
            play(bytes);
        })
    }
}

/// The messages alone, to a daemon in which a job runs.
pub(crate) fn messages() -> Target {
    let all = [life(), recovery()].concat();
    let seeds = all
        .iter()
        .filter(|step| step[0] == 0)
        .map(|step| step[3..].to_vec());
    Target {
        words: WORDS,
        bytes_per_byte: BYTES_PER_BYTE,
        ..Target::new("rendezvous_messages", seeds.collect(), |bytes| {
            let mut steps = life()[..4].to_vec();
            steps.push(step(
                Step::Message,
                0,
                1,
                bytes[..bytes.len().min(60_000)].to_vec(),
            ));
            steps.push(step(Step::Tick, 0, 200, Vec::new()));
            play(&joined(&steps));
        })
    }
}

/// Lets a daemon go on from lines of a ledger, each with the checksum that it has; how many jobs it knows then.
fn recall(folder: &Path, header: &str, bytes: &[u8]) -> usize {
    let text = String::from_utf8_lossy(bytes);
    let summed = text.split('\n').map(|json| {
        let sum = blake3::hash(json.as_bytes()).to_hex();
        format!("{} {json}\n", &sum[..16])
    });
    let content = header.to_owned() + &summed.collect::<String>();
    std::fs::write(folder.join("ledger"), content).expect("memory");
    let Ok(ledger) = Ledger::open(folder) else {
        return 0;
    };
    let mut state = State::recall(config(), ledger.records(), Duration::ZERO);
    let count = state.jobs(Duration::ZERO).jobs.len();
    let at = At {
        now: state.next_wake().unwrap_or_default(),
        dice: 0.5,
        id: 1,
        secret: Secret::new([1; 32]),
    };
    apply(at, &mut state, Event::Tick);
    count
}

/// Lines of a ledger that another build, or another user, has written.
pub(crate) fn ledger() -> Target {
    let folder = tempfile::tempdir_in("/dev/shm").expect("memory");
    drop(Ledger::open(folder.path()).expect("writable"));
    let header = std::fs::read_to_string(folder.path().join("ledger")).expect("it was written");
    let lines = records().join("\n");
    assert!(lines.contains("running"), "{lines}");
    assert_eq!(recall(folder.path(), &header, lines.as_bytes()), 1, "{lines}");
    Target {
        words: &[
            "\n",
            "\"running\"",
            "\"stage\":{\"job_over\":{\"exit_code\":1,\"reason\":\"a\"}}",
        ],
        ..Target::new("ledger", vec![lines.into_bytes()], move |bytes| {
            recall(folder.path(), &header, bytes);
        })
    }
}

/// What a daemon writes down of a job.
fn records() -> Vec<String> {
    let (mut state, mut records) = (State::new(config()), Vec::new());
    for (second, step) in (1..).zip(&life()[..3]) {
        let event = match AgentMessage::decode(&step[3..]) {
            Ok(message) if step[0] == Step::Message as u8 => Event::Message {
                conn: ConnId(u64::from(step[1])),
                peer: Peer {
                    remote: IpAddr::V4(Ipv4Addr::LOCALHOST),
                    local: IpAddr::V4(Ipv4Addr::LOCALHOST),
                },
                message: Box::new(message),
            },
            _ => Event::Tick,
        };
        let at = At {
            now: Duration::from_secs(second),
            dice: 0.5,
            id: u128::from(second),
            secret: Secret::new([1; 32]),
        };
        for effect in apply(at, &mut state, event) {
            if let Effect::Record(record) = effect {
                records.push(serde_json::to_string(&record).expect("JSON"));
            }
        }
    }
    records
}
