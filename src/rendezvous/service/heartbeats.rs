//! Heartbeats wait a moment for others, so that the actor is woken for many of them and not for each.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use prost::Message as _;
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::rendezvous::event::{ConnId, Event};

/// How long one waits for others: little beside the time between two of a node.
const GATHER: Duration = Duration::from_millis(50);
/// How many may wait, and the bytes and ranks of one: some 30 MiB in all.
const MAX_WAITING: usize = 1024;
const MAX_BYTES: usize = 16 << 10;
const MAX_RANKS: usize = 256;

/// Those that wait.
#[derive(Debug, Default)]
pub(super) struct Heartbeats {
    waiting: Mutex<Waiting>,
    /// The first one has come.
    has_first: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    events: Vec<Event>,
    /// Their streams: a stream that says more takes its turn among the requests of all.
    streams: HashSet<ConnId>,
}

impl Heartbeats {
    /// Takes a heartbeat that can wait. Gives back anything else, and heartbeats for which there is no room.
    pub(super) fn take(&self, event: Event) -> Result<(), Event> {
        let Some(stream) = stream_if_calm(&event) else {
            return Err(event);
        };
        let mut waiting = self.waiting();
        if waiting.events.len() == MAX_WAITING || !waiting.streams.insert(stream) {
            return Err(event);
        }
        waiting.events.push(event);
        if waiting.events.len() == 1 {
            self.has_first.notify_one();
        }
        Ok(())
    }

    /// Ready when some have waited long enough. Cancel safe only if [`Heartbeats::drain`] is called afterwards.
    pub(super) async fn gathered(&self) {
        self.has_first.notified().await;
        sleep(GATHER).await;
    }

    /// All that wait, in the order in which they came.
    pub(super) fn drain(&self) -> Vec<Event> {
        std::mem::take(&mut *self.waiting()).events
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stream of a heartbeat that can wait. What a node saw of another's lost rank is urgent.
fn stream_if_calm(event: &Event) -> Option<ConnId> {
    let Event::Message { conn, message, .. } = event else {
        return None;
    };
    let Some(Body::Heartbeat(heartbeat)) = &message.body else {
        return None;
    };
    let is_small = heartbeat.ranks.len() <= MAX_RANKS && message.encoded_len() <= MAX_BYTES;
    (heartbeat.lost_rank.is_none() && is_small).then_some(*conn)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use ddp_proto::rendezvous::{AgentMessage, Heartbeat, Leave, LostRank, RankProgress};

    use super::*;
    use crate::rendezvous::event::Peer;

    fn event(conn: usize, body: Body) -> Event {
        let here = Ipv4Addr::LOCALHOST.into();
        Event::Message {
            conn: ConnId(conn as u64),
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
        let beat = |conn| event(conn, Body::Heartbeat(Heartbeat::default()));
        let urgent = [
            Body::Leave(Leave::default()),
            Body::Heartbeat(Heartbeat {
                lost_rank: Some(LostRank::default()),
                ..Heartbeat::default()
            }),
            Body::Heartbeat(Heartbeat {
                log_dir: "x".repeat(MAX_BYTES),
                ..Heartbeat::default()
            }),
            Body::Heartbeat(Heartbeat {
                ranks: vec![RankProgress::default(); MAX_RANKS + 1],
                ..Heartbeat::default()
            }),
        ];
        for body in urgent {
            heartbeats.take(event(1, body)).unwrap_err();
        }
        assert!(heartbeats.drain().is_empty());
        for conn in 0..MAX_WAITING {
            heartbeats.take(beat(conn)).unwrap();
        }
        heartbeats.take(beat(MAX_WAITING)).unwrap_err();
        let began = tokio::time::Instant::now();
        heartbeats.gathered().await;
        assert!(began.elapsed() >= GATHER);
        assert_eq!(heartbeats.drain().len(), MAX_WAITING);
        heartbeats.take(beat(1)).unwrap();
        heartbeats.take(beat(1)).expect_err("a second one of a stream");
        heartbeats.gathered().await;
        assert_eq!(heartbeats.drain().len(), 1);
    }
}
