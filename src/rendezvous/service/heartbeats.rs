//! Heartbeats wait a moment for others, so that the actor is woken for many of them and not for each.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use prost::Message as _;
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::rendezvous::event::Event;

/// How long one waits for others: little beside the time between two of a node.
const GATHER: Duration = Duration::from_millis(50);
/// How many may wait, and the bytes of one: 16 MiB in all.
const MOST: usize = 1024;
const MAX_BYTES: usize = 16 << 10;

/// Those that wait.
#[derive(Debug, Default)]
pub(super) struct Heartbeats {
    waiting: Mutex<Vec<Event>>,
    /// The first one has come.
    begun: Notify,
}

impl Heartbeats {
    /// Takes a heartbeat that can wait. Gives back anything else, and heartbeats for which there is no room.
    pub(super) fn take(&self, event: Event) -> Result<(), Event> {
        if !can_wait(&event) {
            return Err(event);
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() == MOST {
            return Err(event);
        }
        waiting.push(event);
        if waiting.len() == 1 {
            self.begun.notify_one();
        }
        Ok(())
    }

    /// Ready when some have waited long enough. Cancel safe only if [`Heartbeats::drain`] is called afterwards.
    pub(super) async fn gathered(&self) {
        self.begun.notified().await;
        sleep(GATHER).await;
    }

    /// All that wait, in the order in which they came.
    pub(super) fn drain(&self) -> Vec<Event> {
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What a node saw of another's lost rank is urgent.
fn can_wait(event: &Event) -> bool {
    let Event::Message { message, .. } = event else {
        return false;
    };
    let is_calm = |body: &Body| matches!(body, Body::Heartbeat(heartbeat) if heartbeat.lost_rank.is_none());
    message.body.as_ref().is_some_and(is_calm) && message.encoded_len() <= MAX_BYTES
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use ddp_proto::rendezvous::{AgentMessage, Heartbeat, Leave, LostRank};

    use super::*;
    use crate::rendezvous::event::{ConnId, Peer};

    fn event(body: Body) -> Event {
        let here = Ipv4Addr::LOCALHOST.into();
        Event::Message {
            conn: ConnId(1),
            peer: Peer {
                remote: here,
                local: here,
            },
            message: Box::new(AgentMessage {
                body: Some(body),
                ..AgentMessage::default()
            }),
        }
    }

    #[tokio::test]
    async fn only_what_can_wait_waits_and_not_for_long() {
        let heartbeats = Heartbeats::default();
        let beat = || event(Body::Heartbeat(Heartbeat::default()));
        let alarm = event(Body::Heartbeat(Heartbeat {
            lost_rank: Some(LostRank::default()),
            ..Heartbeat::default()
        }));
        heartbeats.take(alarm).unwrap_err();
        heartbeats.take(event(Body::Leave(Leave::default()))).unwrap_err();
        let long = event(Body::Heartbeat(Heartbeat {
            log_dir: "x".repeat(MAX_BYTES),
            ..Heartbeat::default()
        }));
        heartbeats.take(long).unwrap_err();
        assert!(heartbeats.drain().is_empty());
        for _ in 0..MOST {
            heartbeats.take(beat()).unwrap();
        }
        heartbeats.take(beat()).unwrap_err();
        let began = tokio::time::Instant::now();
        heartbeats.gathered().await;
        assert!(began.elapsed() >= GATHER);
        assert_eq!(heartbeats.drain().len(), MOST);
        heartbeats.take(beat()).unwrap();
        heartbeats.gathered().await;
        assert_eq!(heartbeats.drain().len(), 1);
    }
}
