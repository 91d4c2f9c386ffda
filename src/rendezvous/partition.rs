//! Suspects that the daemon's own network is down: all nodes of all jobs are rarely lost at once.
//!
//! While the suspicion holds, the daemon loses no node, for [`Config::silence_limit`](super::Config) at most. As soon as it
//! hears any node, also a new one, every node has one more lease to reach it.
//!
//! A daemon that was itself stopped is another case: its timer fires late, and it renews all leases.

use std::time::Duration;

use super::config::Config;
use super::event::Event;

/// Whether the daemon is cut off from all nodes, as far as it can tell.
#[derive(Debug, Default)]
pub(super) struct PartitionSuspicion {
    last_contact: Duration,
    is_suspected: bool,
}

impl PartitionSuspicion {
    /// Time since the daemon heard any node.
    pub(super) fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.last_contact)
    }

    /// The suspicion ends with the outage: no message has to arrive for that.
    pub(super) fn holds(&self, now: Duration, config: &Config) -> bool {
        self.is_suspected && self.silence(now) <= config.silence_limit
    }

    /// The event proves that the network works. The daemon's own pings may have closed a stream after a long silence, and
    /// its deadline a stream on which no node has joined.
    pub(super) fn ends_with(&self, event: &Event, now: Duration, config: &Config, has_joined: bool) -> bool {
        match event {
            Event::Message { .. } | Event::KvPut { .. } | Event::KvGet { .. } | Event::KvGather { .. } => {
                true
            }
            Event::Closed { .. } => has_joined && self.silence(now) < config.http2_keepalive_interval,
            Event::KvCancel { .. } | Event::Close { .. } | Event::Tick => false,
        }
    }

    /// The daemon hears a node. True if the suspicion ends.
    pub(super) fn note_contact(&mut self, now: Duration) -> bool {
        self.last_contact = now;
        std::mem::take(&mut self.is_suspected)
    }

    /// The daemon may be cut off now; `has_streams` says whether any node seems to be connected.
    pub(super) fn is_due(&self, now: Duration, config: &Config, has_streams: impl FnOnce() -> bool) -> bool {
        let silence = self.silence(now);
        // Not earlier: each suspicion gives lost nodes one more lease.
        let is_long = silence > config.heartbeat_interval() * 2 && silence <= config.silence_limit;
        is_long && (self.is_suspected || has_streams())
    }

    /// True if the suspicion is new.
    pub(super) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.is_suspected, true)
    }
}
