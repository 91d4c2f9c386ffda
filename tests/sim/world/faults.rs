//! What may go wrong at any moment.

use std::net::IpAddr;
use std::time::Duration;

use ddp_launcher::decisions::Event as AgentEvent;
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::{
    AgentMessage, Join, KvGetRequest, KvPutRequest, NodeSucceeded, Place, WorkerExit,
};
use ddp_run::rendezvous::{CallId, ConnId, Event, Peer};
use rand::Rng;

use super::network::{AGENT_PINGS, DAEMON_PINGS};
use super::{SimEvent, World};
use crate::node::NodeEvent;

/// Every kind of fault and of world, as [`World::note`] counts them: a run of the simulation that lacks one proves less.
pub(crate) const KINDS: [&str; 28] = [
    "agent killed",
    "agent stalled",
    "agent stopped by a signal",
    "clocks that differ",
    "cut both ways",
    "cut from the daemon",
    "cut to the daemon",
    "daemon killed",
    "daemon with a ledger",
    "daemon stalled",
    "half-open stream at the agent",
    "half-open stream at the daemon",
    "hostile message",
    "job that may shrink and grow",
    "job with spares",
    "late message on an old stream",
    "late node",
    "peer that sees a node die",
    "report that is sent again",
    "several jobs",
    "slow reader",
    "slow reader that is disconnected",
    "store: a write that is sent twice",
    "stream broken",
    "streams of all nodes broken",
    "two daemons",
    "worker that outlives a generation",
    "workers that the guardian killed",
];

impl World {
    /// Something happens to a node that lives, or to a daemon.
    pub(super) fn fault(&mut self) {
        let alive: Vec<usize> = (0..self.nodes.len())
            .filter(|&number| !self.nodes[number].is_gone())
            .collect();
        if alive.is_empty() {
            return;
        }
        let number = alive[self.rng.random_range(0..alive.len())];
        match self.rng.random_range(0..60) {
            0..=13 => {
                self.note("stream broken");
                self.break_stream(number);
            }
            14..=16 => {
                self.note("streams of all nodes broken");
                for number in alive {
                    self.break_stream(number);
                }
            }
            17..=24 => self.agent_dies(number),
            25..=27 => self.stop_node(number),
            28..=31 => self.crash_daemon(),
            32..=34 => self.two_daemons(),
            35..=40 => self.cut(number),
            41..=43 => self.half_open(number),
            44..=47 => self.stall_node(number),
            48..=50 => self.stall_daemon(),
            51..=53 => self.read_slowly(number),
            _ => self.hostile(number),
        }
    }

    /// The stream of a node breaks for both sides. What is on the way is lost, or still arrives at the daemon.
    fn break_stream(&mut self, number: usize) {
        let Some(conn) = self.nodes[number].conn else {
            return;
        };
        let to_daemon = |event: &SimEvent| matches!(event, SimEvent::Arrives(other, _) if *other == conn);
        if self.happens(0.5) {
            self.agenda.retain(|_, event| !to_daemon(event));
        } else if self.agenda.values().any(to_daemon) {
            self.note("late message on an old stream");
        }
        self.lose_stream(number);
    }

    /// An agent is killed; often a new one is started there.
    fn agent_dies(&mut self, number: usize) {
        self.note("agent killed");
        self.kill_agent(number);
        if self.happens(0.7) {
            let (host, delay) = (self.nodes[number].host, self.pause(20_000));
            self.later(delay, SimEvent::Starts(host));
        }
    }

    /// A user stops an agent, and may lose patience.
    fn stop_node(&mut self, number: usize) {
        self.note("agent stopped by a signal");
        let signal = if self.happens(0.5) { 2 } else { 15 };
        self.nodes[number].stopped_by.get_or_insert(signal);
        let stop = || NodeEvent::Decides(AgentEvent::Signal(signal));
        self.on_node(number, stop());
        if self.happens(0.3) {
            self.soon(number, 3000, stop());
        }
    }

    /// The daemon that new streams reach dies with all that it knows; another one takes its place soon.
    pub(crate) fn crash_daemon(&mut self) {
        let newest = self.daemons.len() - 1;
        if !self.daemons[newest].is_alive {
            return;
        }
        self.note("daemon killed");
        self.kill_daemon(newest);
        let delay = self.pause(1500);
        self.later(delay, SimEvent::DaemonStarts(newest));
    }

    fn kill_daemon(&mut self, daemon: usize) {
        self.daemons[daemon].is_alive = false;
        self.daemons[daemon].backlog.clear();
        let broken: Vec<ConnId> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.daemon == daemon)
            .map(|(conn, _)| *conn)
            .collect();
        for conn in broken {
            let Some(stream) = self.streams.remove(&conn) else {
                continue;
            };
            let number = stream.node;
            if self.nodes[number].conn != Some(conn) {
                continue;
            }
            if self.is_cut(self.nodes[number].host) {
                // No word of it arrives.
                self.later(AGENT_PINGS, SimEvent::Node(number, NodeEvent::Pings(conn)));
            } else {
                self.on_node(number, NodeEvent::Pings(conn));
            }
        }
        self.calls_break(daemon);
    }

    /// A new daemon is started while the old one still lives, which some hosts reach for a while.
    fn two_daemons(&mut self) {
        let old = self.daemons.len() - 1;
        let others_live = self.daemons[..old].iter().any(|daemon| daemon.is_alive);
        if !self.daemons[old].is_alive || others_live {
            return;
        }
        self.note("two daemons");
        self.start_daemon(None);
        for host in 0..self.routes.len() {
            if self.happens(0.5) {
                self.routes[host] = old;
            }
        }
        for number in 0..self.nodes.len() {
            let is_moved = self.routes[self.nodes[number].host] != old;
            if is_moved && !self.nodes[number].is_gone() && self.happens(0.5) {
                self.break_stream(number);
            }
        }
        let delay = Duration::from_secs(5) + self.pause(35_000);
        self.later(delay, SimEvent::DaemonLeaves(old));
    }

    pub(super) fn daemon_leaves(&mut self, old: usize) {
        let newest = self.daemons.len() - 1;
        self.routes.fill(newest);
        if self.daemons[old].is_alive {
            self.kill_daemon(old);
        }
    }

    /// Nothing passes between a host and the daemons for a while, one way or both.
    fn cut(&mut self, number: usize) {
        let host = self.nodes[number].host;
        let seconds = [3, 8, 20, 90][self.rng.random_range(0..4)];
        let (up, down) = [(true, true), (true, false), (false, true)][self.rng.random_range(0..3)];
        self.note(match (up, down) {
            (true, true) => "cut both ways",
            (true, false) => "cut to the daemon",
            _ => "cut from the daemon",
        });
        self.cut_host(host, up, down, Duration::from_secs(seconds));
    }

    pub(crate) fn cut_host(&mut self, host: usize, up: bool, down: bool, time: Duration) {
        let until = self.now + time;
        let cut = &mut self.cuts[host];
        if up {
            cut.to_daemon = cut.to_daemon.max(until);
        }
        if down {
            cut.to_agent = cut.to_agent.max(until);
        }
        for number in 0..self.nodes.len() {
            let node = &self.nodes[number];
            let Some(conn) = node.conn.filter(|_| node.host == host) else {
                continue;
            };
            if time > AGENT_PINGS {
                self.later(AGENT_PINGS, SimEvent::Node(number, NodeEvent::Pings(conn)));
            }
            if time > DAEMON_PINGS {
                self.later(DAEMON_PINGS, SimEvent::Ends(conn, false));
            }
        }
    }

    /// A stream breaks for one side only; the other one learns of it by its pings.
    fn half_open(&mut self, number: usize) {
        let Some(conn) = self.nodes[number].conn else {
            return;
        };
        if self.happens(0.5) {
            self.note("half-open stream at the daemon");
            self.later(DAEMON_PINGS, SimEvent::Ends(conn, false));
            self.stream_is_lost(number);
        } else {
            self.note("half-open stream at the agent");
            self.later(Duration::ZERO, SimEvent::Ends(conn, false));
            self.later(AGENT_PINGS, SimEvent::Node(number, NodeEvent::Pings(conn)));
        }
    }

    /// An agent is stopped for a while; its workers work.
    fn stall_node(&mut self, number: usize) {
        self.note("agent stalled");
        let time = Duration::from_secs([5, 15, 60][self.rng.random_range(0..3)]);
        let until = self.now + time;
        let node = &mut self.nodes[number];
        node.stalled = Some(node.stalled.map_or(until, |other| other.max(until)));
        self.later(time, SimEvent::NodeWakes(number));
    }

    fn stall_daemon(&mut self) {
        let newest = self.daemons.len() - 1;
        if !self.daemons[newest].is_alive {
            return;
        }
        self.note("daemon stalled");
        let time = Duration::from_secs([3, 10, 30][self.rng.random_range(0..3)]);
        let until = self.now + time;
        let daemon = &mut self.daemons[newest];
        daemon.stalled = Some(daemon.stalled.map_or(until, |other| other.max(until)));
        self.later(time, SimEvent::DaemonWakes(newest));
    }

    /// As the actor does: what is due comes first, then what has waited.
    pub(super) fn daemon_wakes(&mut self, number: usize) {
        let daemon = &mut self.daemons[number];
        if daemon.stalled.is_none_or(|until| until > self.now) || !daemon.is_alive {
            return;
        }
        daemon.stalled = None;
        self.calls_begin_late(number);
        let daemon = &mut self.daemons[number];
        let slack = self.config.heartbeat_interval() / 2;
        let backlog = std::mem::take(&mut daemon.backlog);
        if daemon.wakes_at().is_some_and(|wake| wake + slack <= self.now) {
            self.tick(number);
        }
        for event in backlog {
            self.tell_daemon(number, event);
        }
    }

    /// An agent reads nothing for a while.
    fn read_slowly(&mut self, number: usize) {
        let until = self.now + Duration::from_secs(25);
        if let Some(stream) = self.nodes[number]
            .conn
            .and_then(|conn| self.streams.get_mut(&conn))
        {
            stream.slow_until = until;
            self.note("slow reader");
        }
    }

    /// A hostile peer says what no agent says: it is refused, and nothing changes for the others.
    fn hostile(&mut self, number: usize) {
        let newest = self.daemons.len() - 1;
        if !self.daemons[newest].is_alive || self.daemons[newest].stalled.is_some() {
            return;
        }
        self.note("hostile message");
        self.ids += 1;
        let (conn, call) = (ConnId(self.ids), CallId(self.ids));
        let message = self.hostile_message(number, call);
        self.is_hostile = true;
        match message {
            Ok(message) => {
                let anywhere = IpAddr::from([10, 9, 9, 9]);
                let peer = Peer {
                    remote: anywhere,
                    local: anywhere,
                };
                let message = Box::new(message);
                self.tell_daemon(newest, Event::Message { conn, peer, message });
                self.tell_daemon(newest, Event::Closed { conn, clean: false });
            }
            Err(event) => self.tell_daemon(newest, event),
        }
        self.is_hostile = false;
    }

    /// What no agent says, on a stream or to the store.
    fn hostile_message(&mut self, number: usize, call: CallId) -> Result<AgentMessage, Event> {
        let node = &self.nodes[number];
        let job_id = self.jobs[node.job].name.clone();
        let own = node.machine.generation().0;
        let own_id = node.memory.assignment_id(node.machine.generation()).to_owned();
        let message = |incarnation: &str, generation, body| AgentMessage {
            job_id: job_id.clone(),
            incarnation: incarnation.to_owned(),
            generation,
            assignment_id: own_id.clone(),
            body,
        };
        let nonsense = Join {
            protocol: 7,
            place: Some(Box::new(Place::default())),
            ..node.join.clone()
        };
        let is_long = Join {
            hostname: "h".repeat(10_000),
            ..node.join.clone()
        };
        let exit = Body::WorkerExit(WorkerExit {
            rank: u32::MAX,
            ..WorkerExit::default()
        });
        let success = Some(Body::NodeSucceeded(NodeSucceeded {}));
        let put = |generation, assignment_id: &str, key: &str, bytes| Event::KvPut {
            call,
            request: KvPutRequest {
                job_id: job_id.clone(),
                generation,
                key: key.to_owned(),
                value: vec![0; bytes],
                assignment_id: assignment_id.to_owned(),
                incarnation: node.incarnation.clone(),
            },
        };
        let get = KvGetRequest {
            job_id: "no such job".into(),
            generation: own,
            key: "meeting".into(),
            timeout_ms: u32::MAX,
            assignment_id: own_id.clone(),
            incarnation: node.incarnation.clone(),
        };
        match self.rng.random_range(0..10) {
            0 => Ok(message(&node.incarnation, own, success)),
            1 => Ok(message(&node.incarnation, own, Some(exit))),
            2 => Ok(message("stranger", u64::MAX, Some(Body::Join(node.join.clone())))),
            3 => Ok(message("stranger", 0, Some(Body::Join(nonsense)))),
            4 => Ok(message("stranger", 0, Some(Body::Join(is_long)))),
            5 => Ok(message("", 0, None)),
            6 => Err(put(u64::MAX, &own_id, "meeting", 1)),
            7 => Err(put(own, &own_id, &"k".repeat(10_000), 1)),
            8 => Err(put(own, "another assignment", "meeting", 1)),
            _ => Err(Event::KvGet { call, request: get }),
        }
    }
}
