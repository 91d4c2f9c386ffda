//! What comes from the daemon: its messages, and whether it can be reached.

use std::collections::VecDeque;
use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::ids::Generation;
use ddp_proto::rendezvous::DaemonMessage;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use tokio::time::Instant;

use super::super::event::Event;
use super::super::inbox::heartbeat_every;
use super::super::link::LinkEvent;
use super::super::machine::VERDICT_WAIT;
use super::super::suspension::{HeartbeatClock, Suspension, since_boot};
use super::super::tasks;
use super::Driver;
use crate::report::event_log::LogEvent;

/// How the driver and the daemon stand.
pub(super) struct DaemonLink {
    /// What the daemon said last that it waits for.
    last_waiting: String,
    /// The stream is broken.
    pub(super) is_broken: bool,
    /// When it broke.
    broke: Instant,
    /// When the daemon is given up, if it is broken.
    gives_up: Instant,
    /// What goes on at this node cannot wait as long as workers that train.
    is_pressing: bool,
    /// What was said last to go on at this node while it is broken.
    meanwhile: &'static str,
    pub(super) heartbeat_clock: HeartbeatClock,
    /// The last one, until the daemon can be reached after it.
    suspension: Option<Suspension>,
}

impl DaemonLink {
    pub(super) fn begin() -> Self {
        Self {
            last_waiting: String::new(),
            is_broken: false,
            broke: Instant::now(),
            gives_up: Instant::now(),
            is_pressing: false,
            meanwhile: "",
            heartbeat_clock: HeartbeatClock::start(since_boot()),
            suspension: None,
        }
    }
}

impl Driver<'_> {
    pub(super) fn on_link(&mut self, event: LinkEvent, events: &mut VecDeque<Event>) {
        match event {
            LinkEvent::Connected(client) => self.client = Some(client),
            LinkEvent::Message(message) => {
                self.note_message(&message);
                self.note_failures(message.body.as_ref());
                events.push_back(Event::Daemon(message));
            }
            LinkEvent::Unanswered(patience, cause) => {
                let cause = cause.map_or_else(String::new, |cause| format!(" ({cause})"));
                self.console.say(&format!(
                    "rendezvous `{}` is unreachable{cause}; retrying for {} s",
                    self.plan.endpoint,
                    patience.as_secs_f64()
                ));
            }
            LinkEvent::Broken(error) => {
                let exit_code = self.exit_code_without_daemon();
                self.daemon_link.is_broken = true;
                self.daemon_link.broke = Instant::now();
                let patience = self.set_patience();
                self.daemon_link.meanwhile = self.machine.meanwhile();
                self.console.say(&format!(
                    "{error}; {}; retrying for {} s, then exiting with code {exit_code}",
                    self.daemon_link.meanwhile,
                    patience.as_secs_f64()
                ));
                self.look_for_daemon();
            }
            LinkEvent::Restored => {
                self.daemon_link.is_broken = false;
                self.daemon_link.suspension = None;
                if self.machine.is_undecided() {
                    // It may have to wait for other nodes first.
                    self.alarm = Some(Instant::now() + VERDICT_WAIT);
                }
                self.console.say("reconnected to the rendezvous daemon");
                if let Some(store) = self.control.store() {
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

    /// Sets when the daemon is given up: workers that train, or have done all of their work, need it least.
    fn set_patience(&mut self) -> Duration {
        let is_pressing = !self.machine.is_running() && !self.machine.has_succeeded();
        let latest = self.daemon_link.broke + self.plan.outage_timeout;
        self.daemon_link.is_pressing = is_pressing;
        self.daemon_link.gives_up = if is_pressing {
            latest.min(Instant::now() + self.plan.connect_timeout)
        } else {
            latest
        };
        self.link.give_up_at(self.daemon_link.gives_up);
        self.daemon_link
            .gives_up
            .saturating_duration_since(self.daemon_link.broke)
    }

    /// Notices that workers of this node have come to an end while the daemon is out of reach.
    pub(super) fn reconsider_patience(&mut self) {
        let is_pressing = !self.machine.is_running() && !self.machine.has_succeeded();
        if self.daemon_link.is_broken && is_pressing != self.daemon_link.is_pressing {
            self.set_patience();
        }
    }

    /// Says that this node's part has come to an end while the daemon is out of reach, which alone decides what
    /// follows.
    pub(super) fn tell_meanwhile(&mut self) {
        let meanwhile = self.machine.meanwhile();
        if !self.daemon_link.is_broken
            || !self.machine.waits_for_daemon()
            || self.daemon_link.meanwhile == meanwhile
        {
            return;
        }
        self.daemon_link.meanwhile = meanwhile;
        let left = self
            .daemon_link
            .gives_up
            .saturating_duration_since(Instant::now());
        let exit_code = self.exit_code_without_daemon();
        self.console.say(&format!(
            "{meanwhile}; the rendezvous daemon is still unreachable; retrying for {:.0} s, then exiting with code {exit_code}",
            left.as_secs_f64()
        ));
    }

    /// Exit code if the daemon stays out of reach.
    fn exit_code_without_daemon(&self) -> u8 {
        if self.machine.has_succeeded() {
            exit::SUCCESS
        } else {
            exit::DAEMON_UNREACHABLE
        }
    }

    /// What a message of the daemon means for the driver, besides the decisions.
    fn note_message(&mut self, message: &DaemonMessage) {
        let lease_ms = match &message.body {
            Some(Word::Waiting(waiting)) => {
                if self.plan.nodes.max > 1 && waiting.reason != self.daemon_link.last_waiting {
                    self.console.say(&waiting.reason);
                    self.daemon_link.last_waiting.clone_from(&waiting.reason);
                }
                waiting.lease_ms
            }
            Some(Word::Assignment(assignment)) => {
                if self.machine.is_running()
                    && self.machine.is_own(Generation(message.generation), assignment)
                {
                    self.console.say(&format!(
                        "generation {} continues without a restart",
                        message.generation
                    ));
                    self.daemon_link.last_waiting.clear();
                }
                self.event_log.put(LogEvent::Assigned {
                    generation: message.generation,
                    assignment_id: &assignment.assignment_id,
                    node_rank: assignment.node_rank,
                    nodes: assignment.nodes.len(),
                    restart_count: assignment.restart_count,
                    reason: &assignment.reason,
                });
                assignment.lease_ms
            }
            Some(Word::GenerationOver(over)) => {
                self.event_log.put(LogEvent::GenerationOver {
                    generation: message.generation,
                    cause: &over.cause,
                });
                0
            }
            _ => 0,
        };
        let lease = Duration::from_millis(u64::from(lease_ms));
        if !lease.is_zero() {
            self.daemon_link.heartbeat_clock.lease = Some(lease);
        }
        let interval = lease / 3;
        if !interval.is_zero() && interval != self.inbox.heartbeat.period() {
            self.inbox.heartbeat = heartbeat_every(interval);
        }
    }

    /// Notices that this process sent no heartbeat for longer than the daemon waits for one.
    pub(super) fn check_suspension(&mut self) {
        let Some(gap) = self.daemon_link.heartbeat_clock.gap(since_boot()) else {
            return;
        };
        self.console.say(&format!(
            "this launcher was stalled for {:.1} s, longer than its lease of {:.1} s: the process was stopped or \
             its machine suspended; the other nodes may have continued without it",
            gap.as_secs_f64(),
            self.daemon_link.heartbeat_clock.lease.unwrap_or_default().as_secs_f64()
        ));
        self.daemon_link.suspension = Some(Suspension::of(gap));
        self.look_for_daemon();
    }

    /// Looks whether the daemon is gone, if it cannot be reached just after a suspension: it ends with the job where
    /// one of the nodes hosts it, and no message would ever arrive.
    fn look_for_daemon(&mut self) {
        let lease = self.daemon_link.heartbeat_clock.lease.unwrap_or_default();
        let is_recent = self
            .daemon_link
            .suspension
            .is_some_and(|suspension| suspension.is_recent(lease));
        if let (true, true, Some(client)) = (self.daemon_link.is_broken, is_recent, &self.client) {
            tasks::probe(self.task_results.clone(), client.clone());
        }
    }

    pub(super) fn on_probed(&mut self, refused: bool, events: &mut VecDeque<Event>) {
        if let (true, true, Some(suspension)) =
            (refused, self.daemon_link.is_broken, self.daemon_link.suspension)
        {
            events.push_back(Event::DaemonGone {
                exit_code: exit::RENDEZVOUS_TIMED_OUT,
                error: format!(
                    "the job continued without this node, which was suspended for {:.1} s, and the rendezvous daemon at `{}` is \
                     gone\n  hint: see the launchers of the other nodes for how the job ended",
                    suspension.gap.as_secs_f64(),
                    self.plan.endpoint
                ),
            });
        }
    }
}
