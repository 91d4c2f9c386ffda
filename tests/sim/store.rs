//! What workers write in the store and read from it.

use std::time::Duration;

use ddp_proto::rendezvous::{KvGetRequest, KvPutRequest};
use ddp_run::rendezvous::{CallId, Event, KvError};

use crate::witness::{AssignmentId, Origin};
use crate::world::{SimEvent, World};

/// How long a call is tried again while no daemon answers it.
const PATIENCE: Duration = Duration::from_secs(20);
/// Pause before it is tried again.
const RETRY: Duration = Duration::from_millis(500);

/// A call of a worker, until it has an answer.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    node: usize,
    origin: Origin,
    key: String,
    /// None: it reads.
    value: Option<Vec<u8>>,
    timeout: Duration,
    gives_up: Duration,
}

/// A call that a daemon has received.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) daemon: usize,
    call: Call,
    /// By the daemon's clock.
    deadline: Duration,
}

impl World {
    /// Each node writes its own key, the first also the meeting's; each reads the key of the next node, the meeting's,
    /// and one that is never written.
    pub(crate) fn use_store(&mut self, number: usize) {
        let Some((origin, assignment)) = self.nodes[number].group.assignment.clone() else {
            return;
        };
        let rank = assignment.node_rank;
        let next = (rank + 1) % assignment.node_count;
        let mut writes = vec![format!("node/{rank}")];
        if rank == 0 {
            writes.push("meeting".into());
        }
        let reads = [format!("node/{next}"), "meeting".into(), "never".into()];
        let call = Call {
            node: number,
            origin,
            key: String::new(),
            value: None,
            timeout: Duration::from_millis(0),
            gives_up: Duration::ZERO,
        };
        for key in writes {
            let value = self.value_of(&call.origin, number);
            let delay = self.pause(self.put_ms);
            let gives_up = self.now + delay + PATIENCE;
            let write = Call {
                key,
                value: Some(value),
                gives_up,
                ..call.clone()
            };
            self.later(delay, SimEvent::Asks(write));
        }
        for key in reads {
            let (delay, timeout) = (self.pause(1000), self.pause(30_000));
            let gives_up = self.now + delay + PATIENCE;
            let read = Call {
                key,
                timeout,
                gives_up,
                ..call.clone()
            };
            self.later(delay, SimEvent::Asks(read));
        }
    }

    /// What the workers have written goes to a daemon that may have lost it.
    pub(crate) fn write_again(&mut self, number: usize) {
        let Some((origin, _)) = self.nodes[number].group.assignment.clone() else {
            return;
        };
        for (key, value) in self.nodes[number].written.clone() {
            let call = Call {
                node: number,
                origin: origin.clone(),
                key,
                value: Some(value),
                timeout: Duration::ZERO,
                gives_up: self.now + PATIENCE,
            };
            self.later(Duration::ZERO, SimEvent::Asks(call));
        }
    }

    /// A value that tells who has written it.
    fn value_of(&self, origin: &Origin, number: usize) -> Vec<u8> {
        let Origin {
            run_token,
            generation,
            id,
            ..
        } = origin;
        let incarnation = &self.nodes[number].incarnation;
        format!("{run_token} {generation} {} {incarnation}", id.as_str()).into_bytes()
    }

    /// A call goes on its way, if its worker's generation still runs there.
    pub(crate) fn ask(&mut self, call: Call) {
        let node = &self.nodes[call.node];
        let is_current = node
            .group
            .assignment
            .as_ref()
            .is_some_and(|(origin, _)| *origin == call.origin);
        if node.is_gone() || !is_current || self.now > call.gives_up {
            return;
        }
        let daemon = match node.conn.and_then(|conn| self.streams.get(&conn)) {
            Some(stream) => stream.daemon,
            None => self.routes[node.host],
        };
        if !self.daemons[daemon].is_alive || self.is_cut(node.host) || node.stalled.is_some() {
            return self.later(RETRY, SimEvent::Asks(call));
        }
        let delay = self.latency();
        if call.value.is_some() && self.happens(0.05) {
            self.note("store: a write that is sent twice");
            self.later(delay * 2, SimEvent::Receives(daemon, call.clone()));
        }
        self.later(delay, SimEvent::Receives(daemon, call));
    }

    /// A daemon receives a call.
    pub(crate) fn receive_call(&mut self, daemon: usize, call: Call) {
        if !self.daemons[daemon].is_alive {
            return self.later(RETRY, SimEvent::Asks(call));
        }
        self.ids += 1;
        let id = CallId(self.ids);
        let (job_id, generation, key) = (call.origin.job.clone(), call.origin.generation, call.key.clone());
        let assignment_id = call.origin.id.as_str().to_owned();
        let incarnation = self.nodes[call.node].incarnation.clone();
        let event = match call.value.clone() {
            Some(value) => Event::KvPut {
                call: id,
                request: KvPutRequest {
                    job_id,
                    generation,
                    key,
                    value,
                    assignment_id,
                    incarnation,
                },
            },
            None => Event::KvGet {
                call: id,
                request: KvGetRequest {
                    job_id,
                    generation,
                    key,
                    timeout_ms: call.timeout.as_millis() as u32,
                    assignment_id,
                    incarnation,
                },
            },
        };
        let deadline = self.daemons[daemon].clock(self.now) + call.timeout;
        self.calls.insert(
            id,
            Asked {
                daemon,
                call,
                deadline,
            },
        );
        self.tell_daemon(daemon, event);
    }

    /// A daemon answers a call.
    pub(crate) fn answer(&mut self, id: CallId, result: Result<&[u8], KvError>) {
        let Asked { call, .. } = self
            .calls
            .remove(&id)
            .unwrap_or_else(|| panic!("{id:?} was answered twice"));
        let Call {
            node, origin, key, ..
        } = &call;
        match (result, &call.value) {
            (Ok(_), Some(value)) => {
                self.witness.register(origin, origin, key, value);
                let written = &mut self.nodes[*node].written;
                if !written.iter().any(|(other, _)| other == key) {
                    written.push((key.clone(), value.clone()));
                }
            }
            (Ok(value), None) => {
                let writer = writer(origin, value);
                self.witness.register(origin, &writer, key, value);
            }
            (Err(KvError::Exists(_)), _) => self.witness.conflict(origin, key),
            // It does not know the generation yet.
            (Err(KvError::Unknown(_)), _) => self.later(RETRY, SimEvent::Asks(call)),
            (Err(KvError::Superseded(_) | KvError::NotWritten(_) | KvError::TooMuch(_)), _) => {}
        }
    }

    /// Calls that a dead daemon has received are tried again elsewhere.
    pub(crate) fn calls_break(&mut self, daemon: usize) {
        let broken: Vec<CallId> = self
            .calls
            .iter()
            .filter(|(_, asked)| asked.daemon == daemon)
            .map(|(id, _)| *id)
            .collect();
        for id in broken {
            if let Some(asked) = self.calls.remove(&id) {
                self.later(RETRY, SimEvent::Asks(asked.call));
            }
        }
    }

    /// A daemon that was stopped begins now with the calls that have come meanwhile.
    pub(crate) fn calls_begin_late(&mut self, daemon: usize) {
        let now = self.daemons[daemon].clock(self.now);
        for asked in self.calls.values_mut().filter(|asked| asked.daemon == daemon) {
            asked.deadline = asked.deadline.max(now + asked.call.timeout);
        }
    }

    /// No call waits for longer than it may.
    pub(crate) fn check_calls(&self, daemon: usize) {
        let now = self.daemons[daemon].clock(self.now);
        let slack = Duration::from_millis(1);
        for (id, asked) in self.calls.iter().filter(|(_, asked)| asked.daemon == daemon) {
            assert!(now <= asked.deadline + slack, "{id:?} is past its deadline");
        }
    }
}

/// The assignment in which this value was written.
fn writer(reader: &Origin, value: &[u8]) -> Origin {
    let words = String::from_utf8_lossy(value).into_owned();
    let mut words = words.split(' ');
    Origin {
        job: reader.job.clone(),
        run_token: words.next().unwrap_or_default().to_owned(),
        generation: words.next().and_then(|word| word.parse().ok()).unwrap_or(0),
        id: AssignmentId::named(words.next().unwrap_or_default()),
    }
}
