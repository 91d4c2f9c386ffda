//! The connection to the daemon: whether it is reachable, how long the agent waits for it, and the messages about that.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::client::{ATTEMPT_TIMEOUT, AgentIdentity, Client};
use ddp_proto::exit;
use ddp_proto::ids::{Generation, NodeId};
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use ddp_proto::rendezvous::{DaemonMessage, Heartbeat, Leave, Refused};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::super::machine::{Event, LEAVE_WAIT, Machine};
use super::link::{Link, LinkEvent};
use super::memory::TakeoverClock;
use crate::output::console::Console;
use crate::plan::{BoundPlan, LaunchPlan};
use crate::supervise::guardian::since_boot;

/// The other nodes do not know whether the daemon was a program of its own or part of a launcher.
const HOST_MAY_BE_GONE: &str =
    "if a node hosted the rendezvous, that node may be gone: resume from the last checkpoint";

/// The state of the connection.
pub(in crate::agent) struct DaemonConnection {
    link: Link,
    plan: Arc<BoundPlan>,
    console: Console,
    /// None until a daemon has answered.
    client: Option<Client>,
    /// While the stream is broken.
    outage: Option<Outage>,
    /// What the daemon said last that it waits for.
    last_waiting: String,
    /// How long it waits for a heartbeat; none while that is not known.
    lease: Option<Duration>,
    /// When the last heartbeat was sent, as [`since_boot`]: the daemon counts the lease from a little later.
    last_heartbeat: Duration,
    /// This process was stopped or its machine suspended, and no stream was opened since.
    was_stalled: bool,
    /// When the workers have to stop if the daemon says nothing, by [`since_boot`].
    takeover: TakeoverClock,
}

/// The time that is left to workers while the daemon says nothing.
#[derive(Clone, Copy, Debug)]
pub(in crate::agent) struct WorkersEnd {
    /// They are asked to stop after this time.
    pub(in crate::agent) stop_in: Duration,
    /// They are gone after this time.
    pub(in crate::agent) end_in: Duration,
    /// The same moment, as time since boot.
    pub(in crate::agent) ends_at: Duration,
}

/// The daemon is out of reach.
struct Outage {
    begun: Instant,
    /// When the daemon is given up.
    gives_up: Instant,
    /// What goes on at this node cannot wait as long as workers that train.
    is_pressing: bool,
    /// What was said last to go on at this node.
    meanwhile: &'static str,
    /// This process was stalled just before, or meanwhile: the daemon may have given up this node.
    was_stalled: bool,
}

impl DaemonConnection {
    /// Begins to connect.
    pub(in crate::agent) fn start(
        plan: Arc<BoundPlan>,
        console: Console,
    ) -> (Self, mpsc::Receiver<LinkEvent>) {
        let identity = AgentIdentity {
            job_id: plan.job_id.clone(),
            incarnation: NodeId(plan.incarnation.clone()),
        };
        let (link, events) = Link::start(plan.clone(), identity);
        let connection = Self {
            link,
            plan,
            console,
            client: None,
            outage: None,
            last_waiting: String::new(),
            lease: None,
            last_heartbeat: since_boot(),
            was_stalled: false,
            takeover: TakeoverClock::default(),
        };
        (connection, events)
    }

    /// For the key-value calls.
    pub(in crate::agent) fn client(&self) -> Option<&Client> {
        self.client.as_ref()
    }

    pub(in crate::agent) fn is_broken(&self) -> bool {
        self.outage.is_some()
    }

    /// How often the daemon wants a heartbeat, once that is known.
    pub(in crate::agent) fn heartbeat_interval(&self) -> Option<Duration> {
        let by_takeover = self.takeover.heartbeat_interval();
        self.lease
            .map(|lease| by_takeover.map_or(lease / 3, |interval| interval.min(lease / 3)))
    }

    pub(in crate::agent) fn report(&mut self, generation: Generation, report: Report) {
        if let Report::Join(_) = report {
            self.takeover.join(since_boot());
        }
        self.link.report(generation, report);
    }

    pub(in crate::agent) fn beat(&self, generation: Generation, mut heartbeat: Heartbeat) {
        heartbeat.sent_ms = since_boot().as_millis() as u64;
        self.link.beat(generation, heartbeat);
    }

    /// Sends the heartbeat that is due; without a connection the daemon would not receive it.
    pub(in crate::agent) fn beat_in_time(&mut self, generation: Generation, heartbeat: Heartbeat) {
        self.last_heartbeat = since_boot();
        if !self.is_broken() && self.client.is_some() {
            self.beat(generation, heartbeat);
        }
    }

    /// Says good-bye. False if the daemon does not know this agent, or cannot be reached any more.
    pub(in crate::agent) fn leave(&self, generation: Generation, leave: Leave) -> bool {
        let deadline = Instant::now() + LEAVE_WAIT;
        self.client.is_some() && self.link.leave(generation, leave, deadline)
    }

    /// Takes what the link tells, says what people should know, and gives what is to be decided on.
    pub(in crate::agent) fn on_event(&mut self, event: LinkEvent, machine: &Machine) -> Option<Event> {
        match event {
            LinkEvent::Connected(client) => self.client = Some(client),
            LinkEvent::Message(mut message) => {
                self.takeover.receive(&message);
                self.note_message(&message, machine);
                if let Some(Word::Refused(refused)) = &mut message.body {
                    self.add_own_values(refused);
                }
                return Some(Event::Daemon(message));
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
                let now = Instant::now();
                let mut outage = Outage {
                    begun: now,
                    gives_up: now,
                    is_pressing: false,
                    meanwhile: machine.meanwhile(),
                    was_stalled: self.was_stalled,
                };
                outage.set_patience(now, machine, &self.plan);
                self.link.give_up_at(outage.gives_up);
                self.console.say(&format!(
                    "{error}; {}; retrying for {} s, then exiting with code {}",
                    outage.meanwhile,
                    // To a millisecond: it is what a setting says, plus the time since it was read.
                    (outage.gives_up - outage.begun).as_millis() as f64 / 1e3,
                    Outage::exit_code(machine)
                ));
                self.outage = Some(outage);
            }
            LinkEvent::Restored => {
                (self.outage, self.was_stalled) = (None, false);
                self.console.say("reconnected to the rendezvous daemon");
            }
            LinkEvent::Gone(error) => {
                let exit_code = error.exit_code();
                let is_outage = exit_code == exit::DAEMON_UNREACHABLE && self.outage.is_some();
                let error = if is_outage && !machine.has_succeeded() {
                    format!("{error}; {HOST_MAY_BE_GONE}")
                } else {
                    error.to_string()
                };
                return Some(Event::DaemonGone { exit_code, error });
            }
            LinkEvent::Left => return Some(Event::Left),
        }
        None
    }

    /// When the workers have to be asked to stop, and when they have to be gone; none if no node could take the place of
    /// this one.
    pub(in crate::agent) fn takeover(&self) -> Option<WorkersEnd> {
        Some(WorkersEnd {
            stop_in: self.takeover.stops_at()?.saturating_sub(since_boot()),
            end_in: self.takeover.ends_at()?.saturating_sub(since_boot()),
            ends_at: self.takeover.ends_at()?,
        })
    }

    /// Notices that workers of this node have come to an end while the daemon is out of reach, which alone decides what
    /// follows, and says so.
    pub(in crate::agent) fn reconsider(&mut self, machine: &Machine) {
        let Some(outage) = &mut self.outage else {
            return;
        };
        if outage.is_pressing != outage.is_pressing_now(machine) {
            outage.set_patience(Instant::now(), machine, &self.plan);
            self.link.give_up_at(outage.gives_up);
        }
        let meanwhile = machine.meanwhile();
        if machine.waits_for_daemon() && outage.meanwhile != meanwhile {
            outage.meanwhile = meanwhile;
            let left = outage.gives_up.saturating_duration_since(Instant::now());
            self.console.say(&format!(
                "{meanwhile}; the rendezvous daemon is still unreachable; retrying for {:.0} s, then exiting with code {}",
                left.as_secs_f64(),
                Outage::exit_code(machine)
            ));
        }
    }

    /// Notices that this process sent no heartbeat for longer than the daemon waits for one: it was stopped, or its
    /// machine suspended. The daemon may have given up this node, and have ended with the job: then no message would
    /// ever arrive.
    pub(in crate::agent) fn check_stall(&mut self) {
        let now = since_boot();
        let gap = now.saturating_sub(self.last_heartbeat);
        let Some(lease) = self.lease.filter(|lease| gap > *lease) else {
            return;
        };
        // Said once.
        self.last_heartbeat = now;
        self.console.say(&format!(
            "this launcher was stalled for {:.1} s, longer than its lease of {:.1} s: the process was stopped or \
             its machine suspended; the other nodes may have continued without it",
            gap.as_secs_f64(),
            lease.as_secs_f64()
        ));
        self.was_stalled = true;
        if let Some(outage) = &mut self.outage {
            outage.was_stalled = true;
        }
    }

    /// The daemon knows only hashes: users see the values that differ in the output of their own launchers.
    fn add_own_values(&self, refused: &mut Refused) {
        for key in &refused.differing {
            let own = self.plan.agreed.get(key);
            let own = own.map_or("not set".to_owned(), |value| format!("`{}`", value.shown));
            let _ = write!(refused.reason, "\n  `{key}` on this node: {own}");
        }
    }

    fn note_message(&mut self, message: &DaemonMessage, machine: &Machine) {
        let lease_ms = match &message.body {
            Some(Word::Waiting(waiting)) => {
                let is_news = waiting.reason != self.last_waiting;
                if is_news && (self.plan.nodes.max > 1 || machine.is_running()) {
                    self.console.say(&waiting.reason);
                    self.last_waiting.clone_from(&waiting.reason);
                }
                waiting.lease_ms
            }
            Some(Word::Assignment(assignment)) => {
                let generation = Generation(message.generation);
                if machine.is_running() && machine.is_own(generation, assignment) {
                    self.console.say("the workers continue without a restart");
                }
                // The wait after this generation is another one, even if the words are the same.
                self.last_waiting.clear();
                assignment.lease_ms
            }
            _ => 0,
        };
        if lease_ms > 0 {
            self.lease = Some(Duration::from_millis(lease_ms.into()));
        }
    }
}

impl Outage {
    /// Workers that train need the daemon least. Where none runs, a person waits for the end; and a daemon that has given
    /// up this node may never come back.
    fn is_pressing_now(&self, machine: &Machine) -> bool {
        self.was_stalled || !machine.is_running()
    }

    /// Sets when the daemon is given up.
    fn set_patience(&mut self, now: Instant, machine: &Machine, plan: &LaunchPlan) {
        let latest = self.begun + plan.outage_timeout;
        self.is_pressing = self.is_pressing_now(machine);
        self.gives_up = if self.is_pressing {
            latest.min(now + plan.connect_timeout)
        } else {
            latest
        };
        if self.was_stalled {
            // No attempt was made while this process was stopped.
            self.gives_up = self.gives_up.max(now + ATTEMPT_TIMEOUT);
        }
    }

    /// Exit code if the daemon stays out of reach.
    fn exit_code(machine: &Machine) -> u8 {
        if machine.has_succeeded() {
            exit::SUCCESS
        } else {
            exit::DAEMON_UNREACHABLE
        }
    }
}
