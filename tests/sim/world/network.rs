//! The network of a world: each stream keeps its order, may be slow, and may break with all that is in it.
//!
//! A cut does not lose what is sent: it arrives when the cut is over, as TCP would have it. Both sides ping: an agent
//! gives up a stream whose peer does not answer for 15 s, a daemon after 30 s.

use std::time::Duration;

use ddp_launcher::decisions::Event;
use ddp_proto::ids::Generation;
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::{AgentMessage, DaemonMessage, Leave};
use ddp_run::rendezvous::ConnId;

use super::{SimEvent, World};
use crate::node::NodeEvent;

/// How long an agent's pings go unanswered before it gives up the stream (`proto/src/client/attempts.rs`).
pub(super) const AGENT_PINGS: Duration = Duration::from_secs(15);
/// The same of a daemon (`Config::http2_keepalive_interval` and `_timeout`).
pub(super) const DAEMON_PINGS: Duration = Duration::from_secs(30);

/// Until when nothing passes between a host and the daemons.
#[derive(Clone, Debug, Default)]
pub(super) struct Cut {
    pub(super) to_daemon: Duration,
    pub(super) to_agent: Duration,
}

/// One stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) node: usize,
    pub(crate) daemon: usize,
    /// When the last message each way arrives.
    to_daemon: Duration,
    to_agent: Duration,
    /// The agent reads nothing until then.
    pub(super) slow_until: Duration,
    /// Messages that the agent has not read.
    pub(super) unread: usize,
    /// The daemon has ended its side.
    pub(super) is_ended: bool,
    /// The daemon sends nothing more: too many messages are unread.
    pub(super) is_dropped: bool,
}

impl World {
    pub(crate) fn is_cut(&self, host: usize) -> bool {
        let cut = &self.cuts[host];
        cut.to_daemon > self.now || cut.to_agent > self.now
    }

    /// An agent tries to open a stream.
    pub(crate) fn connect(&mut self, number: usize) {
        let node = &self.nodes[number];
        if node.is_gone() || node.conn.is_some() || node.link_ended || node.memory.is_refused() {
            return;
        }
        let daemon = self.routes[node.host];
        if !self.daemons[daemon].is_alive || self.is_cut(node.host) {
            return self.soon(number, 2000, NodeEvent::Connects);
        }
        let conn = self.open(number, daemon);
        let now = self.epoch + self.now;
        let node = &mut self.nodes[number];
        (node.conn, node.has_client) = (Some(conn), true);
        let (generation, greeting) = node.memory.greeting(now);
        if greeting.len() > 1 {
            self.note("report that is sent again");
        }
        for body in greeting {
            self.send(number, generation, body);
        }
        while let Some((generation, body)) = self.nodes[number].outbox.pop_front() {
            self.report(number, generation, body);
        }
        let interval = Duration::from_secs(1);
        self.later_at(number, interval, NodeEvent::Heartbeats(conn));
    }

    fn open(&mut self, number: usize, daemon: usize) -> ConnId {
        self.ids += 1;
        let conn = ConnId(self.ids);
        let stream = Stream {
            node: number,
            daemon,
            to_daemon: self.now,
            to_agent: self.now,
            slow_until: self.now,
            unread: 0,
            is_ended: false,
            is_dropped: false,
        };
        self.streams.insert(conn, stream);
        conn
    }

    /// The guardian of a killed agent has killed the workers. It tells the daemon if it can reach it, and ends.
    pub(crate) fn tell_launcher_died(&mut self, number: usize) {
        let host = self.nodes[number].host;
        let daemon = self.routes[host];
        if !self.daemons[daemon].is_alive || self.is_cut(host) {
            return;
        }
        let conn = self.open(number, daemon);
        let leave = Leave {
            launcher_died: true,
            ..Leave::default()
        };
        self.send_on(conn, number, Generation(0), Body::Leave(leave));
        self.send_up(conn, |conn| SimEvent::Ends(conn, true));
    }

    /// The agent says something; it waits as long as there is no stream.
    pub(crate) fn report(&mut self, number: usize, generation: Generation, body: Body) {
        let node = &mut self.nodes[number];
        if node.conn.is_none() {
            if !node.link_ended {
                node.outbox.push_back((generation, body));
            }
            return;
        }
        node.memory.note(generation, &body);
        let is_last = matches!(body, Body::Leave(_));
        self.send(number, generation, body);
        let node = &mut self.nodes[number];
        if let (true, Some(conn)) = (is_last, node.conn) {
            node.is_leaving = true;
            self.send_up(conn, |conn| SimEvent::Ends(conn, true));
        }
    }

    fn send(&mut self, number: usize, generation: Generation, body: Body) {
        if let Some(conn) = self.nodes[number].conn {
            self.send_on(conn, number, generation, body);
        }
    }

    fn send_on(&mut self, conn: ConnId, number: usize, generation: Generation, body: Body) {
        let node = &self.nodes[number];
        let message = AgentMessage {
            job_id: self.jobs[node.job].name.clone(),
            incarnation: node.incarnation.clone(),
            generation: generation.0,
            assignment_id: node.memory.assignment_id(generation).to_owned(),
            body: Some(body),
        };
        self.send_up(conn, |conn| SimEvent::Arrives(conn, message));
    }

    /// Schedules what arrives at the daemon after everything sent before on this stream.
    pub(crate) fn send_up(&mut self, conn: ConnId, event: impl FnOnce(ConnId) -> SimEvent) {
        let delay = self.latency();
        let Some(stream) = self.streams.get_mut(&conn) else {
            return;
        };
        let cut = self.cuts[self.nodes[stream.node].host].to_daemon;
        let at = (self.now + delay).max(cut).max(stream.to_daemon);
        stream.to_daemon = at;
        self.at(at, event(conn));
    }

    pub(super) fn send_down(&mut self, conn: ConnId, message: Option<DaemonMessage>) {
        let delay = self.latency();
        let Some(stream) = self.streams.get_mut(&conn) else {
            return;
        };
        let cut = self.cuts[self.nodes[stream.node].host].to_agent;
        let at = (self.now + delay)
            .max(cut)
            .max(stream.to_agent)
            .max(stream.slow_until);
        stream.to_agent = at;
        self.at(at, SimEvent::Delivers(conn, message));
    }

    /// A message, or the end of a stream, arrives at an agent's host.
    pub(super) fn deliver(&mut self, conn: ConnId, message: Option<DaemonMessage>) {
        if let Some(stream) = self.streams.get_mut(&conn) {
            stream.unread = stream.unread.saturating_sub(1);
            let number = stream.node;
            self.on_node(number, NodeEvent::Receives(conn, message));
        }
    }

    /// The link of an agent receives it; the agent reads a message a little later.
    pub(crate) fn receive(&mut self, number: usize, conn: ConnId, message: Option<DaemonMessage>) {
        if self.nodes[number].conn != Some(conn) {
            return;
        }
        let Some(message) = message else {
            return self.lose_stream(number);
        };
        let delay = self.pause(3);
        let now = self.epoch + self.now;
        let node = &mut self.nodes[number];
        if node.is_leaving {
            return;
        }
        node.memory.receive(now, &message);
        node.is_known = true;
        let restored = std::mem::take(&mut node.is_broken);
        node.read_at = node.read_at.max(self.now + delay);
        let at = node.read_at;
        let read = NodeEvent::Reads(restored, message);
        self.at(at, SimEvent::Node(number, read));
    }

    /// The stream of an agent breaks for it; it opens another one.
    pub(crate) fn lose_stream(&mut self, number: usize) {
        if let Some(conn) = self.nodes[number].conn {
            self.send_up(conn, |conn| SimEvent::Ends(conn, false));
        }
        self.stream_is_lost(number);
    }

    /// The same, of which the daemon learns nothing.
    pub(super) fn stream_is_lost(&mut self, number: usize) {
        let patience = self.patience_of(number);
        let now = self.now;
        let node = &mut self.nodes[number];
        node.conn = None;
        if node.is_gone() || node.memory.is_refused() {
            return;
        }
        if node.is_leaving {
            return self.on_node(number, NodeEvent::Decides(Event::Left));
        }
        if !std::mem::replace(&mut node.is_broken, true) && node.is_known {
            node.gives_up = now + patience;
            self.later(patience, SimEvent::Node(number, NodeEvent::GivesUp));
        }
        self.soon(number, 2000, NodeEvent::Connects);
    }

    pub(crate) fn latency(&mut self) -> Duration {
        let slow = self.happens(0.02);
        self.pause(if slow { 2000 } else { 20 })
    }
}
