//! A daemon that receives nothing from any node suspects its own network: all nodes are rarely lost at once.
//!
//! It loses no node then, for [`Config::outage_timeout`](super::Config) at most. As soon as any node speaks, also a new
//! one, every node has one more lease to speak too.

use std::time::Duration;

use super::config::Config;
use super::event::{Event, Turn};
use super::job::Job;
use super::state::Daemon;

/// Whether the daemon is cut off, as far as it can tell.
#[derive(Debug, Default)]
pub(super) struct Isolation {
    last_contact: Duration,
    is_suspected: bool,
}

impl Isolation {
    /// How long nothing has come from any node.
    pub(super) fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.last_contact)
    }
}

impl Event {
    /// Proves that the network works. A stream that ends after a long `silence` may have been given up by the daemon's
    /// own pings, and one on which no node has joined by its deadline.
    pub(super) fn is_contact(&self, silence: Duration, turn: &Turn<'_>, has_joined: bool) -> bool {
        match self {
            Self::Message { .. } | Self::KvPut { .. } | Self::KvGet { .. } | Self::KvGather { .. } => true,
            Self::Closed { .. } => has_joined && silence < turn.config.http2_keepalive_interval,
            Self::KvCancel { .. } | Self::Close { .. } | Self::Tick => false,
        }
    }
}

impl Daemon {
    /// The daemon's own network may be down, and nodes are kept for that. A suspicion ends with the outage, and with
    /// the last node: no message has to come for it.
    pub(super) fn suspects_network(&self, now: Duration, config: &Config) -> bool {
        self.isolation.is_suspected && self.isolation.silence(now) <= config.outage_timeout && !self.is_idle()
    }

    pub(super) fn note_contact(&mut self, turn: &mut Turn<'_>) {
        let silence = self.isolation.silence(turn.at.now);
        self.isolation.last_contact = turn.at.now;
        if std::mem::take(&mut self.isolation.is_suspected) && !self.is_idle() {
            turn.decided(format!(
                "the daemon hears from nodes again after {:.1} s; all leases are renewed",
                silence.as_secs_f64()
            ));
            self.renew_leases(turn.at.now + turn.config.lease);
        }
    }

    /// Gives all nodes more time if none of them is heard, though streams are open.
    pub(super) fn consider_isolation(&mut self, turn: &mut Turn<'_>) {
        let (silence, beat) = (
            self.isolation.silence(turn.at.now),
            turn.config.heartbeat_interval(),
        );
        // Not earlier: each suspicion gives nodes that are really gone a lease more.
        if silence <= beat * 2 || silence > turn.config.outage_timeout {
            return;
        }
        if !self.isolation.is_suspected {
            if !self.jobs.values().any(Job::has_open_streams) {
                return;
            }
            self.isolation.is_suspected = true;
            turn.decided(format!(
                "no node has been heard for {:.1} s: the daemon's own network may be down; no node is lost for that, \
                 for up to {:.0} s",
                silence.as_secs_f64(),
                turn.config.outage_timeout.as_secs_f64()
            ));
        }
        self.renew_leases(turn.at.now + beat);
    }

    /// No node loses its lease before `until`.
    pub(super) fn renew_leases(&mut self, until: Duration) {
        self.jobs.values_mut().for_each(|job| job.renew_leases(until));
        self.replan_all();
    }
}
