//! One loop that turns all that happens into events for the machine, and carries out its effects.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::client::{AgentIdentity, Client};
use ddp_proto::exit;
use ddp_proto::ids::{Generation, NodeId};
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use ddp_proto::rendezvous::{Assignment, DaemonMessage, Heartbeat, Join, WorkerExit};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::aside::{self, Aside};
use super::conclusion::Conclusion;
use super::event::{Effect, Event};
use super::inbox::{Inbox, Mail, heartbeat_every};
use super::launch::LaunchError;
use super::link::{Link, LinkConfig, LinkEvent};
use super::machine::{LEAVE_WAIT, Machine, Rules};
use super::signals::{Call, Signals};
use super::workers::{Crew, PrepareError, Site, inherited};
use crate::console::Console;
use crate::control::{ControlEvent, ControlServer, News, Place, Store};
use crate::environment::{Common, threads_per_worker};
use crate::guardian::Guardian;
use crate::logs::LogError;
use crate::master_port::MasterPort;
use crate::plan::LaunchPlan;
use crate::pump::Pump;
use crate::reap;
use crate::report::{self, Facts};
use crate::spawn::{Batch, SpawnEvent, Spawner, check_program};

/// Version of the protocol that this agent speaks.
const PROTOCOL: u32 = 1;
/// Events of one kind that may wait for the loop.
const QUEUE: usize = 1024;
/// Longest message of a worker on its own failure; the rest is cut off.
const MAX_WORDS_CHARS: usize = 4000;
/// Heartbeats before the daemon has told its lease.
const FIRST_HEARTBEAT: Duration = Duration::from_secs(1);

/// The agent with all its parts.
pub(super) struct Driver<'a> {
    plan: LaunchPlan,
    guardian: &'a Guardian,
    console: Console,
    hostname: String,
    inherited: Vec<(OsString, OsString)>,
    machine: Machine,
    opening: Vec<Effect>,
    crew: Crew,
    pump: Pump,
    spawner: Spawner,
    control: ControlServer,
    link: Link,
    client: Option<Client>,
    master_port: Option<MasterPort>,
    inbox: Inbox,
    aside: mpsc::Sender<Aside>,
    alarm: Option<Instant>,
    last_waiting: String,
    /// Of the last assignment.
    run_token: String,
    local_failure: Option<WorkerExit>,
    finished: Option<Conclusion>,
}

impl<'a> Driver<'a> {
    /// Checks the plan, and starts all threads and tasks.
    pub(super) fn new(
        plan: LaunchPlan,
        guardian: &'a Guardian,
        console: Console,
    ) -> Result<Self, LaunchError> {
        let inherited = inherited();
        let search_path = plan.command.env.get("PATH").map(OsString::from);
        let inherited_path = inherited
            .iter()
            .find(|(name, _)| name == "PATH")
            .map(|(_, value)| value.clone());
        check_program(&plan.command.program, search_path.or(inherited_path).as_ref())?;
        if let Some(path) = &plan.log_dir {
            std::fs::create_dir_all(path).map_err(|cause| LogError {
                path: path.clone(),
                cause,
            })?;
        }
        nix::sys::prctl::set_child_subreaper(true).map_err(std::io::Error::from)?;
        let signals = Signals::listen()?;
        let (spawn_events, spawns) = mpsc::channel(QUEUE);
        let (control_events, control_inbox) = mpsc::channel(QUEUE);
        let (aside, aside_inbox) = mpsc::channel(QUEUE);
        let hostname = nix::unistd::gethostname().map_err(std::io::Error::from)?;
        let hostname = hostname.to_string_lossy().into_owned();
        let (link, link_inbox) = Link::start(LinkConfig {
            endpoint: plan.endpoint.clone(),
            identity: AgentIdentity {
                job_id: plan.job_id.clone(),
                incarnation: NodeId(guardian.launcher_id().to_owned()),
            },
            connect_timeout: plan.connect_timeout,
        });
        let (machine, opening) = Machine::start(Rules {
            hostname: hostname.clone(),
            native: plan.command.native,
            join_timeout: plan.join_timeout,
            shutdown_timeout: plan.shutdown_timeout,
        });
        Ok(Self {
            pump: Pump::start(console.clone())?,
            spawner: Spawner::start(guardian.registrar(), spawn_events)?,
            control: ControlServer::start(control_events)?,
            inbox: Inbox {
                signals,
                spawns,
                control: control_inbox,
                link: link_inbox,
                aside: aside_inbox,
                heartbeat: heartbeat_every(FIRST_HEARTBEAT),
            },
            crew: Crew::none(),
            client: None,
            master_port: None,
            alarm: None,
            last_waiting: String::new(),
            run_token: String::new(),
            local_failure: None,
            finished: None,
            plan,
            guardian,
            console,
            hostname,
            inherited,
            machine,
            opening,
            link,
            aside,
        })
    }

    /// Runs until the launch is over; returns the failure report too.
    pub(super) async fn run(mut self) -> (Conclusion, Option<String>) {
        let mut events = VecDeque::new();
        for effect in std::mem::take(&mut self.opening) {
            self.carry_out(effect, &mut events);
        }
        loop {
            while let Some(event) = events.pop_front() {
                self.machine.set_listening(self.control.has_listeners());
                for effect in self.machine.on(event) {
                    self.carry_out(effect, &mut events);
                }
            }
            if let Some(conclusion) = self.finished.take() {
                let report = self.report(&conclusion);
                return (conclusion, report);
            }
            let mail = self.inbox.next(self.alarm).await;
            self.open(mail, &mut events);
        }
    }

    fn open(&mut self, mail: Mail, events: &mut VecDeque<Event>) {
        match mail {
            Mail::Signal(Call::Stop(signal)) => events.push_back(Event::Signal(signal)),
            Mail::Signal(Call::Child) => self.reap(events),
            Mail::Spawn(event) => self.on_spawn(event, events),
            Mail::Control(event) => self.on_control(event),
            Mail::Link(event) => self.on_link(event, events),
            Mail::Aside(Aside::Heard(local_rank)) => {
                self.read_control();
                let consequence = self
                    .crew
                    .get_mut(local_rank)
                    .is_some_and(|worker| worker.consequence);
                events.push_back(Event::Heard {
                    local_rank,
                    consequence,
                });
            }
            Mail::Aside(Aside::Described(local_rank)) => {
                self.read_control();
                if let Some(mut exit) = self.crew.describe(local_rank) {
                    exit.permanent =
                        self.plan.command.native && exit.exit_code == Some(i32::from(exit::USAGE));
                    self.local_failure = Some(exit.clone());
                    events.push_back(Event::Described(exit));
                }
            }
            Mail::Aside(Aside::Swept(stuck)) => events.push_back(Event::Swept { stuck }),
            Mail::Alarm => {
                self.alarm = None;
                events.push_back(Event::Alarm);
            }
            Mail::Heartbeat => {
                let heartbeat = Heartbeat {
                    step: self.crew.step(),
                };
                self.link
                    .send(self.machine.generation(), Report::Heartbeat(heartbeat));
            }
        }
    }

    fn on_spawn(&mut self, event: SpawnEvent, events: &mut VecDeque<Event>) {
        match event {
            SpawnEvent::Spawned { local_rank, pid } => {
                if let Some(worker) = self.crew.get_mut(local_rank) {
                    worker.pid = Some(pid);
                }
                self.control.joined(local_rank, pid);
                events.push_back(Event::Spawned(local_rank));
            }
            SpawnEvent::Finished { failure } => {
                self.control.spawned();
                events.push_back(Event::SpawnEnded(failure));
            }
        }
        // A worker may have ended before it was known.
        self.reap(events);
    }

    fn reap(&mut self, events: &mut VecDeque<Event>) {
        let dead = reap::collect_workers(self.crew.live_pids());
        for (pid, _) in &dead {
            self.guardian.forget(*pid);
        }
        for (local_rank, ending) in self.crew.ended(dead) {
            self.control.left(local_rank);
            events.push_back(Event::Exited { local_rank, ending });
        }
        if self.machine.is_spawning() {
            return;
        }
        let live: BTreeSet<i32> = self.crew.live_pids().collect();
        let orphans = reap::collect_orphans(|pid| live.contains(&pid));
        if orphans.contains(&self.guardian.pid()) {
            self.console
                .say("the guardian process was killed: workers will outlive a launcher that is killed too");
        }
    }

    /// Takes what workers said and was passed on, but still lies there.
    fn read_control(&mut self) {
        for _ in 0..QUEUE {
            let Ok(event) = self.inbox.control.try_recv() else {
                break;
            };
            self.on_control(event);
        }
    }

    fn on_control(&mut self, event: ControlEvent) {
        if event.generation != self.machine.generation() {
            return;
        }
        let Some(worker) = self.crew.get_mut(event.local_rank) else {
            return;
        };
        match event.news {
            News::Heartbeat {
                step,
                phase,
                progress,
            } => {
                worker.step = Some(step);
                tracing::trace!(rank = worker.rank.0, step, ?phase, "heartbeat");
                if let Some(progress) = progress
                    && self.plan.progress_bar
                    && worker.rank.0 == 0
                {
                    self.console.progress(step, progress);
                }
            }
            News::Failure {
                message,
                hint,
                consequence,
            } => {
                let words = match hint {
                    Some(hint) => format!("{message}\nhint: {hint}"),
                    None => message,
                };
                worker.consequence = consequence;
                worker.said = Some(words.chars().take(MAX_WORDS_CHARS).collect());
            }
        }
    }

    fn on_link(&mut self, event: LinkEvent, events: &mut VecDeque<Event>) {
        match event {
            LinkEvent::Connected(client) => self.client = Some(client),
            LinkEvent::Message(message) => {
                self.heed(&message);
                events.push_back(Event::Daemon(message));
            }
            LinkEvent::Broken(error) => self.console.say(&format!("{error}; the workers keep running")),
            LinkEvent::Restored => self.console.say("the rendezvous daemon is back"),
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
            Some(Word::Assignment(assignment)) => assignment.lease_ms,
            _ => 0,
        };
        let interval = Duration::from_millis(u64::from(lease_ms)) / 3;
        if !interval.is_zero() && interval != self.inbox.heartbeat.period() {
            self.inbox.heartbeat = heartbeat_every(interval);
        }
    }

    fn carry_out(&mut self, effect: Effect, events: &mut VecDeque<Event>) {
        let generation = self.machine.generation();
        match effect {
            Effect::Join => self.join(generation),
            Effect::Report(report) => self.link.send(generation, report),
            Effect::Spawn(assignment) => {
                if let Err(error) = self.spawn(generation, &assignment) {
                    let exit_code = match error {
                        PrepareError::Log(_) => exit::USAGE,
                        PrepareError::Pipe(_) | PrepareError::Assignment(_) => exit::INTERNAL,
                    };
                    let error = error.to_string();
                    events.push_back(Event::CannotBegin { exit_code, error });
                }
            }
            Effect::CancelSpawn => self.crew.trouble_begins(),
            Effect::Notify(cause) => self.control.generation_over(&cause),
            Effect::AskToStop(cause) => self.control.ask_to_stop(&cause),
            Effect::SignalAll(signal) => self.crew.signal(signal, None),
            Effect::SignalLate(local_rank, signal) => self.crew.signal(signal, Some(local_rank)),
            Effect::Hear(local_rank) => {
                aside::hear(
                    self.aside.clone(),
                    local_rank,
                    self.control.silence_of(local_rank),
                );
            }
            Effect::Describe(local_rank) => {
                let (stderr, silence) = (
                    self.crew.stderr_of(local_rank),
                    self.control.silence_of(local_rank),
                );
                aside::describe(self.aside.clone(), local_rank, stderr, silence);
            }
            Effect::Sweep => {
                let (guardian, streams) = (self.guardian.pid(), self.crew.streams());
                aside::sweep(self.aside.clone(), guardian, streams, self.console.clone());
            }
            Effect::Arm(after) => self.alarm = Some(Instant::now() + after),
            Effect::Disarm => self.alarm = None,
            Effect::Say(text) => self.console.say(&text),
            Effect::Leave(leave) => {
                if self.client.is_some() {
                    self.link.leave(generation, leave, Instant::now() + LEAVE_WAIT);
                } else {
                    // The daemon never heard of us.
                    events.push_back(Event::Left);
                }
            }
            Effect::Finish(conclusion) => self.finished = Some(conclusion),
        }
    }

    fn join(&mut self, generation: Generation) {
        // Released before the next one is reserved; a machine without a free port says so when rank 0 binds.
        self.master_port = None;
        self.master_port = MasterPort::reserve().ok();
        let join = Join {
            protocol: PROTOCOL,
            hostname: self.hostname.clone(),
            node_rank: self.plan.node_rank.map(|rank| rank.0),
            min_nodes: self.plan.nodes.min,
            max_nodes: self.plan.nodes.max,
            workers: self.plan.workers,
            max_restarts: self.plan.max_restarts,
            local_addr: self.plan.local_addr.clone().unwrap_or_default(),
            master_port: self.master_port.as_ref().map_or(0, |port| u32::from(port.get())),
            job_signature: self.plan.job_signature.clone(),
            job_description: self.plan.job_description.clone(),
            join_timeout_ms: u32::try_from(self.plan.join_timeout.as_millis()).unwrap_or(u32::MAX),
            run_token: self.run_token.clone(),
        };
        self.link.send(generation, Report::Join(join));
    }

    fn spawn(&mut self, generation: Generation, assignment: &Assignment) -> Result<(), PrepareError> {
        let scratch_dir = self.guardian.scratch_dir();
        let site = Site {
            common: Common {
                inherited: &self.inherited,
                extra: &self.plan.command.env,
                marker: self.guardian.marker(),
                threads: threads_per_worker(self.plan.workers),
                progress_bar: self.plan.progress_bar,
            },
            log_dir: self.plan.log_dir.as_deref(),
            scratch_dir: &scratch_dir,
            job_id: &self.plan.job_id,
            control: self.control.address(),
        };
        self.run_token.clone_from(&assignment.run_token);
        self.crew = Crew::none();
        let prepared = Crew::prepare(generation, assignment, &site, &self.pump)?;
        let Some(client) = self.client.clone() else {
            return Err(PrepareError::Assignment("it came from nowhere".into()));
        };
        self.crew = prepared.crew;
        self.local_failure = None;
        self.control.begin(Place {
            generation,
            contracts: prepared
                .contracts
                .iter()
                .map(ddp_proto::env::WorkerEnv::to_vars)
                .collect(),
            node_addrs: assignment.nodes.iter().map(|node| node.addr.clone()).collect(),
            store: Arc::new(Store::new(client, self.plan.job_id.clone(), generation)),
            pids: vec![None; self.crew.len()],
            spawned: false,
            over: None,
        });
        let batch = Batch {
            command: self.plan.command.clone(),
            workers: prepared.specs,
            cancelled: self.crew.cancelled.clone(),
        };
        if !self.spawner.request(batch) {
            let busy = "workers of the last generation are still being started";
            return Err(PrepareError::Pipe(std::io::Error::other(busy)));
        }
        Ok(())
    }

    fn report(&self, conclusion: &Conclusion) -> Option<String> {
        report::report(&Facts {
            conclusion,
            program: &self.plan.command.display_name,
            hostname: &self.hostname,
            local_failure: self.local_failure.as_ref(),
            local_ends: &self.crew.local_ends(),
            ran_for: self.crew.ran_for(),
        })
    }
}
