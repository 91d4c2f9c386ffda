//! What may go wrong at any moment.

use ddp_run::rendezvous::State;
use rand::Rng;

use super::{SimEvent, World};
use crate::agent::Life;

impl World {
    /// Something happens to an agent that lives, or to all of them.
    pub(super) fn trouble(&mut self) {
        let alive: Vec<usize> = (0..self.agents.len())
            .filter(|&n| self.agents[n].life != Life::Gone)
            .collect();
        if alive.is_empty() {
            return;
        }
        let number = alive[self.rng.random_range(0..alive.len())];
        match self.rng.random_range(0..46) {
            // The network breaks, for one agent or for all; messages on the way are lost.
            0..=21 => self.break_network(&[number]),
            22..=25 => self.break_network(&alive),
            // An agent is killed; often a new one is started there.
            26..=36 => {
                self.outcome.deaths += 1;
                self.break_network(&[number]);
                self.agents[number].life = Life::Gone;
                if self.rng.random_bool(0.7) {
                    let (host, delay) = (self.agents[number].host, self.pause(20_000));
                    self.later(delay, SimEvent::Starts(host));
                }
            }
            // A user stops one agent: it leaves when its workers are gone.
            37 | 44..=45 => {
                let signal = if self.rng.random_bool(0.5) { 2 } else { 15 };
                self.agents[number].exit_code = None;
                if let Life::Running(_) = self.agents[number].life {
                    let actions = self.agents[number].leaving(signal);
                    self.grant(number, actions);
                    let delay = self.pause(5000);
                    self.later(delay, SimEvent::Leaves(number, signal));
                } else {
                    self.exit(number, Some(signal));
                }
            }
            // An agent gives up for reasons of its own.
            38 => self.exit(number, None),
            39..=42 => self.crash_daemon(),
            // The agent freezes for longer than its lease: a stream that is open and says nothing.
            _ => {
                let Some(conn) = self.agents[number].conn else {
                    return;
                };
                let until = self.now + self.config.lease * 2;
                if let Some(stream) = self.streams.get_mut(&conn) {
                    stream.to_daemon = stream.to_daemon.max(until);
                    stream.to_agent = stream.to_agent.max(until);
                }
            }
        }
    }

    /// The workers of all nodes run, or have succeeded while those of others run.
    pub(super) fn is_well(&self) -> bool {
        let runs = |life: &Life| matches!(life, Life::Running(_));
        self.agents.len() == self.max_nodes as usize
            && self
                .agents
                .iter()
                .all(|agent| runs(&agent.life) || agent.life == Life::Succeeded)
            && self.agents.iter().any(|agent| runs(&agent.life))
    }

    /// The daemon dies with all that it knows and that is on its way; another one takes its place.
    pub(super) fn crash_daemon(&mut self) {
        self.outcome.crashes += 1;
        let records = self.ledger.clone().unwrap_or_default();
        self.state = State::recall(self.config.clone(), records, self.now);
        self.fresh = true;
        self.calls.clear();
        self.agenda.retain(|_, event| {
            !matches!(
                event,
                SimEvent::Arrives(..) | SimEvent::Ends(..) | SimEvent::Delivers(..)
            )
        });
        let is_decided = |life: &Life| matches!(life, Life::Listening(_) | Life::Gone);
        let undecided = self.agents.iter().filter(|agent| !is_decided(&agent.life));
        let undecided: Vec<String> = undecided.map(|agent| agent.incarnation.clone()).collect();
        self.witness.daemon_died(&undecided);
        for number in 0..self.agents.len() {
            if self.agents[number].conn.is_some() {
                self.lose_stream(number, true);
            }
        }
    }
}
