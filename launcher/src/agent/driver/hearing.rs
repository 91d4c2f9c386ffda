//! What comes from the daemon: its messages, and whether it can be reached.

use std::collections::VecDeque;
use std::time::Duration;

use ddp_proto::rendezvous::DaemonMessage;
use ddp_proto::rendezvous::daemon_message::Body as Word;

use super::super::event::Event;
use super::super::inbox::heartbeat_every;
use super::super::link::LinkEvent;
use super::Driver;
use crate::event_log::Happening;

impl Driver<'_> {
    pub(super) fn on_link(&mut self, event: LinkEvent, events: &mut VecDeque<Event>) {
        match event {
            LinkEvent::Connected(client) => self.client = Some(client),
            LinkEvent::Message(message) => {
                self.heed(&message);
                self.note_failures(message.body.as_ref());
                events.push_back(Event::Daemon(message));
            }
            LinkEvent::Broken(error) => {
                let meanwhile = self.machine.meanwhile();
                self.console.say(&format!("{error}; {meanwhile}"));
            }
            LinkEvent::Restored => {
                self.console.say("the rendezvous daemon is back");
                if let Some(store) = self.store.clone() {
                    tokio::spawn(async move { store.write_again().await });
                }
            }
            LinkEvent::Gone(error) => events.push_back(Event::DaemonGone {
                exit_code: error.exit_code(),
                error: error.to_string(),
            }),
            LinkEvent::Left => events.push_back(Event::Left),
        }
    }

    /// What a message of the daemon means for the driver, besides the decisions.
    fn heed(&mut self, message: &DaemonMessage) {
        let lease_ms = match &message.body {
            Some(Word::Waiting(waiting)) => {
                if self.plan.nodes.max > 1 && waiting.reason != self.last_waiting {
                    self.console.say(&waiting.reason);
                    self.last_waiting.clone_from(&waiting.reason);
                }
                waiting.lease_ms
            }
            Some(Word::Assignment(assignment)) => {
                if self.machine.is_running() && message.generation == self.machine.generation().0 {
                    self.console
                        .say(&format!("generation {} runs on", message.generation));
                    self.last_waiting.clear();
                }
                self.event_log.put(Happening::Assigned {
                    generation: message.generation,
                    node_rank: assignment.node_rank,
                    nodes: assignment.nodes.len(),
                    restart_count: assignment.restart_count,
                    reason: &assignment.reason,
                });
                assignment.lease_ms
            }
            Some(Word::GenerationOver(over)) => {
                self.event_log.put(Happening::GenerationOver {
                    generation: message.generation,
                    cause: &over.cause,
                });
                0
            }
            _ => 0,
        };
        let interval = Duration::from_millis(u64::from(lease_ms)) / 3;
        if !interval.is_zero() && interval != self.inbox.heartbeat.period() {
            self.inbox.heartbeat = heartbeat_every(interval);
        }
    }
}
