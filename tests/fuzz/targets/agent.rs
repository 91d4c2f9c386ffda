//! What the daemon, and programs on this node, tell an agent; and what the agent tells its workers.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ddp_launcher::Ending;
use ddp_launcher::decisions::{Event, Machine, Memory, Rules, SpawnEvent};
use ddp_launcher::fuzzing::{read_foreign_commands, read_foreign_lines};
use ddp_proto::control::{PROTOCOL, Phase, ToAgent, ToWorker, WorkerAssignment};
use ddp_proto::ids::{Generation, LocalRank};
use ddp_proto::rendezvous::daemon_message::Body;
use ddp_proto::rendezvous::{
    Assignment, DaemonMessage, Failure, Failures, GenerationOver, JobOver, NodeAssignment, Refused, Waiting,
    WorkerExit,
};
use ddp_proto::trust::data_key::DataKey;
use prost::Message;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::Instant;

use super::{joined, parts};
use crate::runner::Target;

fn assignment() -> Assignment {
    Assignment {
        node_rank: 0,
        max_restarts: 3,
        own: Some(NodeAssignment {
            hostname: "node-a".into(),
            addr: "10.0.0.1".into(),
            workers: 2,
            role: "default".into(),
            ..NodeAssignment::default()
        }),
        node_count: 2,
        world_size: 4,
        role_world_size: 4,
        master_addr: "10.0.0.1".into(),
        master_port: 29500,
        lease_ms: 9000,
        reason: "generation 1: enough nodes".into(),
        run_token: "00ff".into(),
        assignment_id: "0123".into(),
        data_key: vec![7; 32],
        ..Assignment::default()
    }
}

/// All that a daemon says in the life of a job.
fn daemon_messages() -> Vec<Vec<u8>> {
    let exit = WorkerExit {
        rank: 3,
        exit_code: Some(1),
        stderr_tail: vec!["ValueError".into()],
        message: "it failed".into(),
        ..WorkerExit::default()
    };
    let failures = Failures {
        failures: vec![Failure {
            generation: 1,
            hostname: "node-b".into(),
            exit: Some(exit.clone()),
            ..Failure::default()
        }],
        ..Failures::default()
    };
    let say = |generation, body| {
        let message = DaemonMessage {
            generation,
            body: Some(body),
        };
        message.encode_to_vec()
    };
    vec![
        say(
            0,
            Body::Waiting(Waiting {
                reason: "waiting for nodes".into(),
                lease_ms: 9000,
            }),
        ),
        say(1, Body::Assignment(assignment())),
        say(
            1,
            Body::GenerationOver(GenerationOver {
                cause: "rank 3 failed".into(),
                first_failure: Some(exit.clone()),
                restart_count: 1,
                max_restarts: 3,
                backoff_ms: 100,
                ..GenerationOver::default()
            }),
        ),
        say(2, Body::Assignment(assignment())),
        say(
            2,
            Body::JobOver(JobOver {
                exit_code: 1,
                reason: "rank 3 failed".into(),
                first_failure: Some(exit),
                failures: Some(failures),
                ..JobOver::default()
            }),
        ),
        say(
            2,
            Body::Refused(Refused {
                code: 2,
                reason: "timed out".into(),
                ..Refused::default()
            }),
        ),
    ]
}

/// What the workers do between two messages. In odd generations one has failed when the next message comes; in even
/// ones they have all ended by then, and the daemon is to decide.
fn live(machine: &mut Machine) {
    let generation = machine.generation();
    let exited = |rank, code| Event::Exited {
        local_rank: LocalRank(rank),
        ending: Ending::Code(code),
    };
    if machine.is_running() {
        for local_rank in [0, 1].map(LocalRank) {
            machine.on(Event::Spawn(SpawnEvent::Spawned {
                generation,
                local_rank,
                pid: 77,
            }));
        }
        machine.on(Event::Spawn(SpawnEvent::Ended {
            generation,
            failure: None,
        }));
        machine.on(exited(1, 1));
        if !generation.0.is_multiple_of(2) {
            return;
        }
        machine.on(Event::ControlDrained {
            generation,
            local_rank: LocalRank(1),
            consequence: false,
        });
    }
    machine.on(exited(0, 0));
    machine.on(Event::Swept { stuck: Vec::new() });
}

/// Takes messages as an agent does whose workers run and end in between. Returns the last generation.
fn agent(bytes: &[u8]) -> Generation {
    let (mut machine, _) = Machine::start(Rules {
        hostname: "node-a".into(),
        native: true,
        resume_hint: None,
        join_timeout: Duration::from_mins(1),
        shutdown_timeout: Duration::from_secs(30),
        workers: 2,
        elastic: true,
    });
    let mut memory = Memory::default();
    for message in parts(bytes) {
        let Ok(message) = DaemonMessage::decode(message) else {
            continue;
        };
        memory.receive(Instant::now(), &message);
        machine.on(Event::Daemon(message));
        live(&mut machine);
        memory.greeting(Instant::now());
    }
    machine.on(Event::Alarm);
    machine.on(Event::Signal(15));
    machine.generation()
}

pub(crate) fn agent_messages() -> Target {
    let messages = daemon_messages();
    let life = joined(&messages);
    assert_eq!(agent(&life), Generation(2), "the seed is no life of an agent");
    let mut seeds: Vec<Vec<u8>> = messages
        .iter()
        .map(|message| joined(std::slice::from_ref(message)))
        .collect();
    seeds.push(life);
    Target {
        words: &["node-a", "default"],
        // As for the daemon.
        bytes_per_byte: 1024,
        ..Target::new("agent_messages", seeds, |bytes| {
            agent(bytes);
        })
    }
}

/// Gives its bytes in small pieces.
struct Pieces<'a> {
    bytes: &'a [u8],
    sizes: std::iter::Cycle<std::slice::Iter<'a, u8>>,
}

impl AsyncRead for Pieces<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let size = self.sizes.next().map_or(1, |size| usize::from(*size).max(1));
        let size = size.min(buf.remaining()).min(self.bytes.len());
        let (now, later) = self.bytes.split_at(size);
        buf.put_slice(now);
        self.bytes = later;
        Poll::Ready(Ok(()))
    }
}

/// Reads lines that come in small pieces; how many are messages, and how many a newer build's.
fn read_lines(bytes: &[u8]) -> [usize; 2] {
    let sizes: &[u8] = if bytes.is_empty() {
        &[1]
    } else {
        &bytes[..bytes.len().min(16)]
    };
    let pieces = Pieces {
        bytes,
        sizes: sizes.iter().cycle(),
    };
    let mut reading = std::pin::pin!(read_foreign_lines(pieces));
    match reading.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(counts) => counts,
        Poll::Pending => panic!("it waits for bytes that are there"),
    }
}

fn lines(messages: &[ToAgent]) -> Vec<u8> {
    let lines = messages
        .iter()
        .map(|message| serde_json::to_string(message).expect("JSON") + "\n");
    lines.collect::<String>().into_bytes()
}

pub(crate) fn control_lines() -> Target {
    let hello = ToAgent::Hello {
        protocol: PROTOCOL,
        local_rank: 0,
        generation: Generation(1),
        pid: 77,
        listens: true,
        outlives: false,
    };
    let heartbeat = ToAgent::Heartbeat {
        step: 7,
        phase: Phase::Training,
        quiet_ms: 0,
        progress: None,
        waits: Vec::new(),
        activity: "stage 1 of 2".into(),
        loss: Some(3.5),
        waited_s: Some(0.5),
    };
    let put = ToAgent::KvPut {
        call: 1,
        key: "collective/0".into(),
        value: "c2VjcmV0".into(),
    };
    let get = ToAgent::KvGet {
        call: 2,
        key: "collective/1".into(),
        timeout_ms: 60_000,
    };
    let failure = ToAgent::Failure {
        message: "it failed".into(),
        hint: None,
        consequence: true,
    };
    let seeds = vec![
        lines(&[hello, heartbeat, put, get, failure]),
        b"{\"type\":\"new\",\"a\":[1]}\n".to_vec(),
    ];
    assert_eq!(read_lines(&seeds[0]), [5, 0], "each line is a message");
    assert_eq!(read_lines(&seeds[1]), [0, 1], "it is a message of a newer build");
    Target {
        words: &["\"type\":\"heartbeat\"", "\n"],
        // The reader's buffer and the runtime's are part of the base.
        ..Target::new("control_lines", seeds, |bytes| {
            read_lines(bytes);
        })
    }
}

/// A line as a worker would show it; none for a line of another build, which it skips.
fn worker_line(bytes: &[u8]) -> Option<String> {
    let value = serde_json::from_slice::<serde_json::Value>(bytes).ok()?;
    let message = serde_json::from_value::<ToWorker>(value).ok()?;
    Some(format!("{message:?}"))
}

pub(crate) fn worker_lines() -> Target {
    let assignment = ToWorker::Assignment(WorkerAssignment {
        protocol: PROTOCOL,
        generation: Generation(1),
        env: [("RANK".to_owned(), "0".to_owned())].into(),
        node_addr: "10.0.0.1".into(),
        data_key: Some(DataKey::new(std::array::from_fn(|byte| 0xa0 + byte as u8))),
    });
    let reply = ToWorker::KvReply {
        call: 1,
        value: Some("c2VjcmV0".into()),
        error: None,
        refusal: None,
    };
    let seeds = [assignment, reply].map(|message| serde_json::to_vec(&message).expect("JSON"));
    assert!(
        String::from_utf8_lossy(&seeds[0]).contains("a1a2"),
        "it has a key"
    );
    for seed in &seeds {
        let shown = worker_line(seed).expect("it is a message");
        for part in ["161, 162", "a1a2"] {
            assert!(!shown.to_lowercase().contains(part), "the key is shown: {shown}");
        }
    }
    Target::new("worker_lines", seeds.to_vec(), |bytes| {
        worker_line(bytes);
    })
}

pub(crate) fn tcp_store_commands() -> Target {
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let hello = [&[0][..], &0x3c85_f7ce_u32.to_le_bytes()].concat();
    let list = [&[5][..], &2_u64.to_le_bytes(), &string("a"), &string("b")].concat();
    let set = [&[1][..], &string("key"), &string("value")].concat();
    let add = [&[4][..], &string("counter"), &1_u64.to_le_bytes()].concat();
    let seed = [hello, set, add, list, vec![7, 17]].concat();
    assert_eq!(read_foreign_commands([&seed[..]]), 5, "each is a command");
    Target::new("tcp_store_commands", vec![seed], |bytes| {
        let whole = read_foreign_commands([bytes]);
        assert_eq!(
            whole,
            read_foreign_commands(bytes.chunks(3)),
            "in pieces it is another number"
        );
    })
}
