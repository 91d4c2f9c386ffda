//! The network of a world: each stream keeps its order, may be slow, and may break with all that is in it.

use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::{AgentMessage, DaemonMessage};
use ddp_run::rendezvous::ConnId;
use rand::Rng;

use super::{JOB, SimEvent, World};
use crate::agent::Life;

/// Whose stream it is, and when the last message each way arrives.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) agent: usize,
    pub(super) to_daemon: Duration,
    pub(super) to_agent: Duration,
    /// The daemon has ended its side.
    pub(super) ended: bool,
}

impl World {
    pub(super) fn connect(&mut self, number: usize) {
        if self.agents[number].life == Life::Gone || self.agents[number].conn.is_some() {
            return;
        }
        self.ids += 1;
        let conn = ConnId(self.ids);
        let stream = Stream {
            agent: number,
            to_daemon: self.now,
            to_agent: self.now,
            ended: false,
        };
        self.streams.insert(conn, stream);
        self.agents[number].conn = Some(conn);
        for body in self.agents[number].greeting() {
            self.send(number, body);
        }
        self.later(
            self.config.heartbeat_interval(),
            SimEvent::Heartbeats(number, conn),
        );
    }

    pub(super) fn send(&mut self, number: usize, body: Body) {
        let agent = &self.agents[number];
        let Some(conn) = agent.conn else { return };
        let message = AgentMessage {
            job_id: JOB.into(),
            incarnation: agent.incarnation.clone(),
            generation: agent.generation,
            assignment_id: agent.assignment_id(),
            body: Some(body),
        };
        self.send_up(conn, |conn| SimEvent::Arrives(conn, message));
    }

    /// Schedules what arrives at the daemon after everything sent before on this stream.
    pub(super) fn send_up(&mut self, conn: ConnId, event: impl FnOnce(ConnId) -> SimEvent) {
        let delay = self.latency();
        let Some(stream) = self.streams.get_mut(&conn) else {
            return;
        };
        stream.to_daemon = stream.to_daemon.max(self.now + delay);
        let at = stream.to_daemon;
        self.at(at, event(conn));
    }

    pub(super) fn send_down(&mut self, conn: ConnId, message: Option<DaemonMessage>) {
        let delay = self.latency();
        let Some(stream) = self.streams.get_mut(&conn) else {
            return;
        };
        stream.to_agent = stream.to_agent.max(self.now + delay);
        let at = stream.to_agent;
        self.at(at, SimEvent::Delivers(conn, message));
    }

    pub(super) fn deliver(&mut self, conn: ConnId, message: Option<DaemonMessage>) {
        let number = self.streams[&conn].agent;
        if self.agents[number].conn != Some(conn) {
            return;
        }
        match message {
            Some(message) => {
                let actions = self.agents[number].receive(message);
                self.grant(number, actions);
            }
            None => self.lose_stream(number, true),
        }
    }

    /// The stream of an agent breaks for it; it comes back soon if it lives.
    pub(super) fn lose_stream(&mut self, number: usize, comes_back: bool) {
        if let Some(conn) = self.agents[number].conn.take() {
            self.send_up(conn, |conn| SimEvent::Ends(conn, false));
        }
        if comes_back {
            self.outcome.reconnects += 1;
            let delay = self.pause(self.away_ms);
            self.later(delay, SimEvent::Connects(number));
        }
    }

    /// Breaks streams and drops what is on its way in them, in both directions.
    pub(super) fn break_network(&mut self, numbers: &[usize]) {
        for &number in numbers {
            let conn = self.agents[number].conn;
            self.agenda.retain(|_, event| match event {
                SimEvent::Arrives(c, _) | SimEvent::Delivers(c, _) => Some(*c) != conn,
                _ => true,
            });
            self.lose_stream(number, true);
        }
    }

    pub(super) fn latency(&mut self) -> Duration {
        let slow = self.rng.random_bool(0.02);
        self.pause(if slow { 2000 } else { 20 })
    }
}
