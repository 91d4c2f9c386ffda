//! What one event changes outside the state: the effects that its handlers collect.

use std::sync::Arc;

use ddp_proto::printable;
use ddp_proto::rendezvous::DaemonMessage;
use ddp_proto::rendezvous::daemon_message::Body;

use super::config::Config;
use super::event::{About, At, ConnId, Effect, Observation, Weight, shared};
use super::store_totals::Answers;

/// One call of `apply`: its parameters, and the effects that it collects.
pub(super) struct ApplyContext<'a> {
    pub(super) at: At,
    pub(super) config: &'a Config,
    pub(super) effects: Vec<Effect>,
    /// The subject of its notes.
    pub(super) about: About,
    /// What was gathered, in this turn and before.
    pub(super) answers: Answers,
}

impl ApplyContext<'_> {
    /// The id of a new assignment. One event may start two jobs.
    pub(super) fn assignment_id(&mut self) -> String {
        let id = self.at.id;
        self.at.id = id.wrapping_add(1);
        format!("{id:032x}")
    }

    /// Sends to a node, if it is connected.
    pub(super) fn send(&mut self, conn: Option<ConnId>, generation: u64, body: Body) {
        if conn.is_some() {
            self.send_shared(conn, &shared(generation, body));
        }
    }

    /// Sends a message that several nodes share.
    pub(super) fn send_shared(&mut self, conn: Option<ConnId>, message: &Arc<DaemonMessage>) {
        if let Some(conn) = conn {
            let message = Arc::clone(message);
            self.effects.push(Effect::Send { conn, message });
        }
    }

    pub(super) fn close(&mut self, conn: Option<ConnId>) {
        if let Some(conn) = conn {
            self.effects.push(Effect::Close { conn });
        }
    }

    pub(super) fn decided(&mut self, words: impl Into<String>) {
        self.note(Weight::Decision, &words.into());
    }

    pub(super) fn detail(&mut self, words: impl Into<String>) {
        self.note(Weight::Detail, &words.into());
    }

    fn note(&mut self, weight: Weight, words: &str) {
        let words = printable::text(words).into_owned();
        let about = self.about.clone();
        self.effects.push(Effect::Note { weight, words, about });
    }

    pub(super) fn observe(&mut self, observation: Observation) {
        self.effects.push(Effect::Observed(observation));
    }
}
