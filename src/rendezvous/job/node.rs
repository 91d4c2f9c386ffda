//! One agent process as the daemon sees it: its stream, its lease, and whether it is free to run workers.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::printable;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{DaemonMessage, Heartbeat, Join, NodeStatus, RankProgress};

use super::joining::Joining;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::{ConnId, Peer};
use crate::rendezvous::messages::clip;
use crate::rendezvous::ranks::Candidate;

/// Number of workers of a node whose progress the daemon keeps.
const MAX_RANKS: usize = 256;

/// A node.
#[derive(Debug)]
pub(super) struct Node {
    conn: Option<ConnId>,
    peer: Peer,
    join: Join,
    /// Number of its arrival at the job.
    arrival: u64,
    lease_until: Duration,
    /// Time of its last message, or when its connection broke.
    last_word: Duration,
    /// The other end, or a machine between, closed its connection.
    was_closed: bool,
    /// Why it is not lost although its lease has ended.
    extension: Option<LeaseExtension>,
    readiness: Readiness,
    /// Another node has the rank that it asks for.
    waits_for_place: bool,
    step: Option<u64>,
    /// The progress of each of its workers, for the status.
    ranks: Vec<RankProgress>,
    /// The log directory of its workers, as it reported it.
    log_dir: String,
}

/// Whether a node is free for the next generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    /// Joined: in the running generation, or free for the next one.
    Joined,
    /// It has not confirmed yet that its workers of this generation are gone.
    Stopping(u64),
    /// Its workers are gone, and it has not joined again.
    Stopped,
}

/// Why a silent node is not lost yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseExtension {
    /// The daemon waits for its peers to report progress.
    Asked,
    /// Its peers reported progress.
    Proven,
}

impl Node {
    pub(super) fn new(context: &ApplyContext<'_>, joining: Joining, arrival: u64) -> Self {
        let mut join = joining.join;
        let place = join.place.take();
        Self {
            conn: Some(joining.conn),
            peer: joining.peer,
            join,
            arrival,
            lease_until: context.at.now + context.config.lease,
            last_word: context.at.now,
            was_closed: false,
            extension: None,
            readiness: Readiness::Joined,
            waits_for_place: false,
            step: place.and_then(|place| place.heartbeat?.step),
            ranks: Vec::new(),
            log_dir: String::new(),
        }
    }

    pub(super) fn join(&self) -> &Join {
        &self.join
    }

    pub(super) fn hostname(&self) -> &str {
        &self.join.hostname
    }

    pub(super) fn readiness(&self) -> Readiness {
        self.readiness
    }

    pub(super) fn step(&self) -> Option<u64> {
        self.step
    }

    pub(super) fn lease_until(&self) -> Duration {
        self.lease_until
    }

    pub(super) fn last_word(&self) -> Duration {
        self.last_word
    }

    pub(super) fn is_connected(&self) -> bool {
        self.conn.is_some()
    }

    pub(super) fn speaks_on(&self, conn: ConnId) -> bool {
        self.conn == Some(conn)
    }

    /// Its peers made progress, so it is at work though it is silent.
    pub(super) fn is_proven(&self) -> bool {
        self.extension == Some(LeaseExtension::Proven)
    }

    /// Its connection was closed, rather than silent as on a cut link.
    pub(super) fn was_closed(&self) -> bool {
        self.was_closed
    }

    pub(super) fn is_away(&self) -> bool {
        self.conn.is_none() || self.extension.is_some()
    }

    /// Not free for the next generation: workers of an ended one may still run there.
    pub(super) fn is_stopping(&self) -> bool {
        self.readiness != Readiness::Joined
    }

    /// Workers of a generation that is over may still run there.
    pub(super) fn has_workers(&self) -> bool {
        matches!(self.readiness, Readiness::Stopping(_))
    }

    /// Free for the next generation, and connected.
    pub(super) fn is_ready(&self) -> bool {
        self.readiness == Readiness::Joined && self.conn.is_some() && !self.waits_for_place
    }

    /// The node as a candidate for the next generation.
    pub(super) fn candidate(&self, incarnation: &str) -> Candidate {
        Candidate {
            incarnation: incarnation.to_owned(),
            hostname: self.join.hostname.clone(),
            asked: self.join.node_rank,
            arrival: self.arrival,
            workers: self.join.workers,
        }
    }

    /// The daemon's host, as this node reaches it; none if it is on that host itself.
    pub(super) fn far_address(&self) -> Option<IpAddr> {
        (!self.peer.remote.is_loopback()).then_some(self.peer.local)
    }

    /// Address under which the other members reach it.
    ///
    /// A node on the daemon's own host may come from the loopback, which is no address for the others; they
    /// reach that host under the address at which they reach the daemon: `far` is the one of the first that does.
    pub(super) fn address(&self, far: Option<IpAddr>) -> String {
        match far {
            Some(far) if self.join.local_addr.is_empty() && self.peer.remote.is_loopback() => far.to_string(),
            _ => self.address_alone(),
        }
    }

    /// Its address, without regard to the other nodes.
    fn address_alone(&self) -> String {
        if self.join.local_addr.is_empty() {
            self.peer.remote.to_string()
        } else {
            self.join.local_addr.clone()
        }
    }

    /// Its status.
    pub(super) fn status(&self, now: Duration, node_rank: Option<u32>) -> NodeStatus {
        NodeStatus {
            hostname: self.join.hostname.clone(),
            addr: self.address_alone(),
            node_rank,
            workers: self.join.workers,
            lease_left_ms: self.lease_until.saturating_sub(now).as_millis() as u32,
            step: self.step,
            silent_ms: now.saturating_sub(self.last_word).as_millis() as u64,
            connected: self.is_connected(),
            first_rank: 0,
            ranks: self.ranks.clone(),
            log_dir: self.log_dir.clone(),
        }
    }

    pub(super) fn ranks(&self) -> &[RankProgress] {
        &self.ranks
    }

    /// Keeps the reported progress of its workers, within bounds.
    pub(super) fn note_progress(&mut self, context: &ApplyContext<'_>, heartbeat: &Heartbeat) {
        let is_time = |time: &f64| time.is_finite() && *time >= 0.0;
        let told = heartbeat.ranks.iter().take(MAX_RANKS).map(|rank| RankProgress {
            step_time_s: rank.step_time_s.filter(is_time),
            waited_low_s: rank.waited_low_s.filter(is_time),
            waited_high_s: rank.waited_high_s.filter(is_time),
            holds_up_s: None,
            loss: rank.loss.filter(|loss| loss.is_finite()),
            ..*rank
        });
        self.ranks.clear();
        self.ranks.extend(told);
        let log_dir = printable::line(&heartbeat.log_dir);
        clip(&log_dir, context.config.max_name_bytes.max(1024)).clone_into(&mut self.log_dir);
    }

    pub(super) fn send_shared(&self, context: &mut ApplyContext<'_>, message: &Arc<DaemonMessage>) {
        context.send_shared(self.conn, message);
    }

    pub(super) fn send(&self, context: &mut ApplyContext<'_>, generation: u64, body: Reply) {
        context.send(self.conn, generation, body);
    }

    pub(super) fn close(&self, context: &mut ApplyContext<'_>) {
        context.close(self.conn);
    }

    /// Moves the node to this stream, and ends the other one. True if the stream is new.
    pub(super) fn connect(&mut self, context: &mut ApplyContext<'_>, conn: ConnId, peer: Peer) -> bool {
        let is_new = self.conn != Some(conn);
        if is_new {
            self.close(context);
            (self.conn, self.peer) = (Some(conn), peer);
        }
        is_new
    }

    /// Its stream ended or broke. False if the node was out of reach before.
    pub(super) fn disconnect(&mut self, context: &ApplyContext<'_>) -> bool {
        self.conn = None;
        if self.extension.is_some() {
            return false;
        }
        // After a longer silence, the daemon's own pings may have ended it.
        let silence = context.at.now.saturating_sub(self.last_word);
        self.was_closed = silence < context.config.http2_keepalive_interval;
        self.last_word = context.at.now;
        self.lease_until = self
            .lease_until
            .min(context.at.now + context.config.reconnect_grace);
        true
    }

    /// A message arrived. Returns how long the node was silent, if its lease had been extended for that.
    pub(super) fn heard(&mut self, context: &ApplyContext<'_>) -> Option<Duration> {
        let silence = context.at.now.saturating_sub(self.last_word);
        self.last_word = context.at.now;
        self.was_closed = false;
        self.lease_until = context.at.now + context.config.lease;
        self.extension.take().map(|_| silence)
    }

    /// It joins again, on the same stream or on a new one; the rank that it asked for first stands. Returns what
    /// [`heard`](Self::heard) does.
    pub(super) fn join_again(
        &mut self,
        context: &mut ApplyContext<'_>,
        joining: Joining,
    ) -> Option<Duration> {
        let is_new_stream = self.connect(context, joining.conn, joining.peer);
        self.join = Join {
            node_rank: self.join.node_rank,
            place: None,
            ..joining.join
        };
        let generation = joining.from.generation;
        if is_new_stream && matches!(self.readiness, Readiness::Stopping(stopping) if generation < stopping) {
            // It has missed the assignment with the stream that broke, and never had workers of that generation. On the
            // same stream its `Join` may have crossed the assignment.
            self.readiness = Readiness::Stopped;
        }
        self.heard(context)
    }

    pub(super) fn wait_for_place(&mut self, waits: bool) {
        self.waits_for_place = waits;
    }

    /// What a node waits for that asks for the rank of this one.
    pub(super) fn succession_words(&self) -> String {
        let rank = self.join.node_rank.unwrap_or_default();
        format!(
            "node `{}` has node rank {rank}: this node takes its place if it is lost",
            self.hostname()
        )
    }

    pub(super) fn become_free(&mut self) {
        self.readiness = Readiness::Joined;
    }

    /// Sends the message that ends the generation; the node has to stop its workers.
    pub(super) fn stop_workers(
        &mut self,
        context: &mut ApplyContext<'_>,
        generation: u64,
        message: &Arc<DaemonMessage>,
    ) {
        self.readiness = Readiness::Stopping(generation);
        self.send_shared(context, message);
    }

    /// Its workers of this generation are gone. False if that was not expected.
    pub(super) fn confirm_stopped(&mut self, generation: u64) -> bool {
        let is_expected = self.readiness == Readiness::Stopping(generation);
        if is_expected {
            self.readiness = Readiness::Stopped;
        }
        is_expected
    }

    /// Its workers reached this step; none at the start of a generation.
    pub(super) fn reached(&mut self, step: Option<u64>) {
        self.step = step;
        self.ranks.clear();
    }

    pub(super) fn renew_lease(&mut self, until: Duration) {
        self.lease_until = self.lease_until.max(until);
    }

    /// Extends its lease to `until`. True if that changes why.
    pub(super) fn extend_lease(&mut self, extension: LeaseExtension, until: Duration) -> bool {
        self.lease_until = until;
        let before = self.extension.replace(extension);
        before != Some(extension) && before != Some(LeaseExtension::Proven)
    }

    pub(super) fn end_lease_extension(&mut self, now: Duration) {
        if self.extension.is_some() {
            self.lease_until = self.lease_until.min(now);
        }
    }

    /// Why it is lost when its lease has run out.
    pub(super) fn lease_words(&self, context: &ApplyContext<'_>) -> String {
        // Longer than usual, if its lease was renewed.
        let silence = context.at.now.saturating_sub(self.last_word);
        if self.extension.is_some() && !self.was_closed {
            format!("no word of it for {:.1} s", silence.as_secs_f64())
        } else if self.is_connected() {
            let lease = context.config.lease.max(silence).as_secs_f64();
            format!("no heartbeat for {lease:.1} s")
        } else {
            let grace = context.config.reconnect_grace.max(silence).as_secs_f64();
            format!("its connection broke and it did not reconnect within {grace:.1} s")
        }
    }
}
