//! The agent's side of the control socket, played by a test.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ddp_proto::control::{KvRefusal, PROTOCOL, ToAgent, ToWorker, WorkerAssignment};
use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{Generation, GlobalRank, WorldSize};

use super::super::Session;
use super::super::link::Times;
use super::PATIENCE;

static NEXT: AtomicU32 = AtomicU32::new(0);

pub(super) struct FakeAgent {
    pub(super) listener: UnixListener,
    pub(super) address: String,
}

/// The agent's end of one connection.
pub(super) struct Peer {
    pub(super) lines: BufReader<UnixStream>,
    pub(super) stream: UnixStream,
}

impl FakeAgent {
    pub(super) fn listen() -> Self {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ddp-session-test-{}-{n}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        Self {
            listener: UnixListener::bind_addr(&address).unwrap(),
            address: format!("@{name}"),
        }
    }

    /// The environment of rank 1 of 4, as this agent would set it.
    pub(super) fn env(&self) -> WorkerEnv {
        let mut env = WorkerEnv::single();
        env.rank = GlobalRank(1);
        env.world_size = WorldSize(4);
        env.generation = Generation(3);
        env.control = Some(self.address.clone());
        env
    }

    pub(super) fn accept(&self) -> Peer {
        let (stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Peer {
            lines: BufReader::new(stream.try_clone().unwrap()),
            stream,
        }
    }

    /// A session that has begun, with both ends of it.
    pub(super) fn session(&self) -> (Session, Peer) {
        self.session_assigned(&self.env())
    }

    pub(super) fn session_assigned(&self, assigned: &WorkerEnv) -> (Session, Peer) {
        self.begin(assigned, times())
    }

    /// The same with times of its own.
    pub(super) fn session_within(&self, times: Times) -> (Session, Peer) {
        self.begin(&self.env(), times)
    }

    fn begin(&self, assigned: &WorkerEnv, times: Times) -> (Session, Peer) {
        let vars = self.env().to_vars();
        std::thread::scope(|scope| {
            let session = scope.spawn(move || Session::from_vars_within(|n| vars.get(n).cloned(), times));
            let mut peer = self.accept();
            let hello = peer.receive();
            assert!(
                matches!(hello, ToAgent::Hello { protocol: PROTOCOL, generation: Generation(3), pid, .. } if pid == std::process::id()),
                "{hello:?}"
            );
            peer.say(&assignment(assigned));
            (session.join().unwrap().unwrap(), peer)
        })
    }
}

impl Peer {
    pub(super) fn receive(&mut self) -> ToAgent {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("`{line}`: {e}"))
    }

    /// The next message that is no heartbeat.
    pub(super) fn receive_call(&mut self) -> ToAgent {
        loop {
            match self.receive() {
                ToAgent::Heartbeat { .. } => {}
                other => return other,
            }
        }
    }

    /// Answers a key-value call.
    pub(super) fn answer(&mut self, call: u64, answer: Result<Option<&str>, (KvRefusal, &str)>) {
        self.say(&ToWorker::KvReply {
            call,
            value: answer.ok().flatten().map(str::to_owned),
            error: answer.err().map(|(_, words)| words.to_owned()),
            refusal: answer.err().map(|(refusal, _)| refusal),
        });
    }

    pub(super) fn say(&mut self, message: &ToWorker) {
        self.say_raw(&serde_json::to_string(message).unwrap());
    }

    pub(super) fn say_raw(&mut self, line: &str) {
        self.stream.write_all(format!("{line}\n").as_bytes()).unwrap();
    }
}

pub(super) fn times() -> Times {
    Times {
        handshake: PATIENCE,
        heartbeat: Duration::from_millis(20),
        grace: PATIENCE,
    }
}

pub(super) fn assignment(env: &WorkerEnv) -> ToWorker {
    ToWorker::Assignment(WorkerAssignment {
        protocol: PROTOCOL,
        generation: env.generation,
        env: env.to_vars(),
        node_addr: "10.0.0.1".into(),
        data_key: None,
    })
}
