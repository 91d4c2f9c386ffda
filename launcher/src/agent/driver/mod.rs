//! One loop that turns all that happens into events for the machine, and carries out its effects.

mod daemon_link;
mod ending;
mod hanging;
mod starting;

pub(super) use starting::Ready;

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::client::{AgentIdentity, Client};
use ddp_proto::ids::{Generation, LocalRank, NodeId};
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::{Failures, WorkerExit};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::blocking_thread::BlockingThread;
use super::event::{Effect, Event};
use super::exit_reason::ExitReason;
use super::inbox::{Inbox, Mail, heartbeat_every};
use super::launch::{LaunchError, LaunchParts};
use super::link::{Link, LinkConfig};
use super::machine::{LEAVE_WAIT, Machine, Rules, VERDICT_WAIT};
use super::signals::{Call, Signals};
use super::suspension::since_boot;
use super::tasks::{self, Leftovers, TaskResult};
use super::workers::{WorkerGroup, inherited};
use crate::cgroup::WorkerCgroup;
use crate::control::{ControlEvent, ControlServer, News};
use crate::output::console::Console;
use crate::output::logs::{create_log_dir, free_attempt};
use crate::output::pump::Pump;
use crate::plan::LaunchPlan;
use crate::report::event_log::{EventLog, LogEvent};
use crate::spawn::master_port::MasterPort;
use crate::spawn::spawner::{SpawnEvent, SpawnNews, Spawner, check_program};
use crate::supervise::guardian::Guardian;
use crate::supervise::hang::Beat;
use crate::supervise::reap;
use crate::tcp_store::TcpStoreServer;
use daemon_link::DaemonLink;

/// Version of the protocol that this agent speaks.
const PROTOCOL: u32 = 1;
/// Events of one kind that may wait for the loop.
const QUEUE: usize = 1024;
/// Longest message of a worker on its own failure; the rest is cut off.
const MAX_WORDS_CHARS: usize = 4000;
/// How often hung workers are looked for within the time that makes them hung.
const LOOKS: u32 = 10;
/// Interval of heartbeats until the daemon sends its lease.
const FIRST_HEARTBEAT: Duration = Duration::from_secs(1);

/// The agent with all its parts.
pub(super) struct Driver<'a> {
    plan: Arc<LaunchPlan>,
    guardian: &'a Guardian,
    group: Option<Arc<WorkerCgroup>>,
    console: Console,
    processes: BlockingThread,
    /// For all that may have to wait for a file system once the launch has begun: the loop does not.
    files: BlockingThread,
    hostname: String,
    inherited: Arc<[(OsString, OsString)]>,
    /// Folders made for log files, the innermost first.
    made: Vec<PathBuf>,
    /// The first attempt without log files.
    free_attempt: u32,
    machine: Machine,
    opening: Vec<Effect>,
    worker_group: WorkerGroup,
    pump: Pump,
    spawner: Spawner,
    control: ControlServer,
    link: Link,
    client: Option<Client>,
    master_port: Option<MasterPort>,
    /// On node 0, if the workers' PyTorch uses one; it stays open until the next generation begins.
    tcp_store: Option<TcpStoreServer>,
    inbox: Inbox,
    task_results: mpsc::Sender<TaskResult>,
    /// What the workers of the current generation need is being made.
    preparing: bool,
    /// Signals for the workers that came while these were being started.
    deferred: BTreeSet<i32>,
    /// The generation whose workers were asked what they do, and may answer still.
    asking: Option<Generation>,
    /// It was said that no worker sends heartbeats, though hung ones are looked for.
    told_unwatched: bool,
    alarm: Option<Instant>,
    daemon_link: DaemonLink,
    /// Of the last assignment.
    run_token: String,
    local_failure: Option<WorkerExit>,
    /// All failures of the job, as the daemon told them last.
    failures: Failures,
    finished: Option<ExitReason>,
    event_log: EventLog,
}

impl<'a> Driver<'a> {
    /// Checks the plan, and starts all threads and tasks.
    pub(super) fn new(
        plan: LaunchPlan,
        guardian: &'a Guardian,
        parts: LaunchParts,
    ) -> Result<Self, LaunchError> {
        let LaunchParts {
            console,
            processes,
            files,
            group,
        } = parts;
        let inherited = inherited();
        let made = check(&plan, &inherited)?;
        let free_attempt = plan.log_dir.as_deref().map_or(0, free_attempt);
        nix::sys::prctl::set_child_subreaper(true).map_err(std::io::Error::from)?;
        let signals = Signals::listen(&plan.signals)?;
        let (spawn_events, spawns) = mpsc::channel(QUEUE);
        let (control_events, control_inbox) = mpsc::channel(QUEUE);
        let (task_results, task_inbox) = mpsc::channel(QUEUE);
        let hostname = nix::unistd::gethostname().map_err(std::io::Error::from)?;
        let hostname = hostname.to_string_lossy().into_owned();
        let event_log = plan.event_log.as_deref().map(EventLog::open).transpose()?;
        let event_log = EventLog::start(event_log, &plan.job_id, &hostname)?;
        let (link, link_inbox) = Link::start(link_of(&plan, guardian));
        let (machine, opening) = Machine::start(rules_of(&plan, &hostname));
        Ok(Self {
            pump: Pump::start(console.clone())?,
            spawner: Spawner::start(guardian.registrar(), spawn_events)?,
            control: ControlServer::start(control_events)?,
            inbox: Inbox {
                signals,
                spawns,
                control: control_inbox,
                link: link_inbox,
                task_results: task_inbox,
                heartbeat: heartbeat_every(FIRST_HEARTBEAT),
                watch: plan.hang_timeout.map(|bound| heartbeat_every(bound / LOOKS)),
            },
            worker_group: WorkerGroup::none(),
            client: None,
            master_port: None,
            tcp_store: None,
            preparing: false,
            deferred: BTreeSet::new(),
            asking: None,
            told_unwatched: false,
            alarm: None,
            daemon_link: DaemonLink::begin(),
            run_token: String::new(),
            local_failure: None,
            failures: Failures::default(),
            finished: None,
            event_log,
            plan: Arc::new(plan),
            guardian,
            group,
            console,
            processes,
            files,
            hostname,
            inherited: inherited.into(),
            made,
            free_attempt,
            machine,
            opening,
            link,
            task_results,
        })
    }

    /// Runs until the launch is over; returns the failure report too.
    pub(super) async fn run(mut self) -> (ExitReason, Option<String>) {
        let mut events = VecDeque::new();
        for effect in std::mem::take(&mut self.opening) {
            self.carry_out(effect, &mut events);
        }
        loop {
            while let Some(event) = events.pop_front() {
                self.machine.set_listening(self.control.has_listeners());
                self.machine.set_finishing(self.worker_group.is_finishing());
                for effect in self.machine.on(event) {
                    self.carry_out(effect, &mut events);
                }
            }
            self.reconsider_patience();
            self.tell_meanwhile();
            if let Some(exit_reason) = self.finished.take() {
                let report = self.report(&exit_reason);
                self.publish(&exit_reason, report.as_deref()).await;
                self.event_log.shutdown().await;
                return (exit_reason, report);
            }
            let mail = self.inbox.next(self.alarm).await;
            self.open(mail, &mut events);
        }
    }

    fn open(&mut self, mail: Mail, events: &mut VecDeque<Event>) {
        self.check_suspension();
        match mail {
            Mail::Signal(Call::Stop(signal)) => events.push_back(Event::Signal(signal)),
            // A worker may run already, before its start is reported.
            Mail::Signal(Call::Forward(signal)) if self.machine.is_spawning() => {
                self.deferred.insert(signal);
            }
            Mail::Signal(Call::Forward(signal)) => self.worker_group.pass_on(signal),
            Mail::Signal(Call::Child) => self.reap(events),
            Mail::Spawn(event) => self.on_spawn(event, events),
            Mail::Control(event) => self.on_control(event),
            Mail::Link(event) => self.on_link(event, events),
            Mail::TaskResult(TaskResult::ControlDrained(generation, local_rank)) => {
                self.read_control();
                let consequence = self
                    .worker_group
                    .get_mut(local_rank)
                    .is_some_and(|worker| worker.consequence);
                events.push_back(Event::ControlDrained {
                    generation,
                    local_rank,
                    consequence,
                });
            }
            Mail::TaskResult(TaskResult::Prepared(generation, ready)) => {
                self.spawn(generation, *ready, events);
            }
            Mail::TaskResult(TaskResult::Described(generation, local_rank, in_file)) => {
                events.extend(self.on_described(generation, local_rank, in_file));
            }
            Mail::TaskResult(TaskResult::Probed { refused }) => self.on_probed(refused, events),
            Mail::TaskResult(TaskResult::Answered { threads }) => self.judge_hung(&threads),
            Mail::TaskResult(TaskResult::Swept(stuck, left)) => {
                self.read_control();
                self.note_files(left);
                events.push_back(Event::Swept { stuck });
            }
            // Who cannot be reached decides nothing; how long that may last has a bound of its own.
            Mail::Alarm if self.daemon_link.is_broken && self.machine.is_undecided() => {
                self.alarm = Some(Instant::now() + VERDICT_WAIT);
            }
            Mail::Alarm => {
                self.alarm = None;
                events.push_back(Event::Alarm);
            }
            Mail::Watch => self.look_for_hung_workers(),
            Mail::Heartbeat => {
                self.daemon_link.heartbeat_clock.beat(since_boot());
                // Without a connection the daemon does not receive it.
                if !self.daemon_link.is_broken && self.client.is_some() {
                    self.send_heartbeat();
                }
            }
        }
    }

    fn on_spawn(&mut self, event: SpawnEvent, events: &mut VecDeque<Event>) {
        let SpawnEvent { generation, news } = event;
        let is_current = generation == self.machine.generation();
        match news {
            SpawnNews::Spawned { local_rank, pid } => {
                if is_current && let Some(worker) = self.worker_group.get_mut(local_rank) {
                    worker.pid = Some(pid);
                    self.event_log.put(LogEvent::WorkerStarted {
                        generation: generation.0,
                        rank: worker.rank.0,
                        local_rank: local_rank.0,
                        pid,
                    });
                    self.control.joined(local_rank, pid);
                }
                events.push_back(Event::Spawned {
                    generation,
                    local_rank,
                    pid,
                });
            }
            SpawnNews::Finished { failure } => {
                if is_current {
                    self.control.spawned();
                    for signal in std::mem::take(&mut self.deferred) {
                        self.worker_group.pass_on(signal);
                    }
                }
                events.push_back(Event::SpawnEnded { generation, failure });
            }
        }
        // A worker may have ended before it was known.
        self.reap(events);
    }

    fn reap(&mut self, events: &mut VecDeque<Event>) {
        let dead = reap::collect_workers(self.worker_group.live_pids(), self.worker_group.group());
        for (pid, _) in &dead {
            self.guardian.forget(*pid);
        }
        for (local_rank, ending) in self.worker_group.ended(dead) {
            self.control.left(local_rank);
            self.event_log.put(LogEvent::WorkerEnded {
                generation: self.machine.generation().0,
                local_rank: local_rank.0,
                ending: ending.to_string(),
            });
            events.push_back(Event::Exited { local_rank, ending });
        }
        if self.machine.is_spawning() {
            return;
        }
        let live: BTreeSet<i32> = self.worker_group.live_pids().collect();
        let orphans = reap::collect_orphans(|pid| live.contains(&pid));
        for pid in &orphans {
            // It may have been a worker of a generation that was given up before it was started.
            self.guardian.forget(*pid);
        }
        if orphans.contains(&self.guardian.pid()) {
            self.console
                .say("the guardian process was killed: if this launcher is killed too, its workers die, but processes that they started survive");
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
        let Some(worker) = self.worker_group.get_mut(event.local_rank) else {
            return;
        };
        match event.news {
            News::Heartbeat {
                step,
                phase,
                quiet,
                progress,
                waits,
                activity,
            } => {
                let at = std::time::Instant::now();
                (worker.waits, worker.activity) = (waits, activity);
                worker.beat = Some(Beat {
                    at,
                    fresh: at.checked_sub(quiet).unwrap_or(at),
                    step,
                    phase,
                });
                tracing::trace!(rank = worker.rank.0, step, ?phase, "heartbeat");
                if let Some(progress) = progress
                    && self.plan.progress_bar
                    && worker.rank.0 == 0
                {
                    self.console.progress(step, progress);
                }
                if self.machine.is_running() {
                    for line in self.worker_group.tell_waits() {
                        self.console.say(&line);
                    }
                }
            }
            News::Sizes(sizes) => {
                let known = worker.sizes.replace(sizes);
                if known != Some(sizes) {
                    // Should this node be lost before its next heartbeat, the others have to know.
                    self.send_heartbeat();
                }
            }
            News::State { text } => worker.state = Some(text),
            News::PeerLost { rank } => {
                worker.lost_rank = Some(rank);
                // The daemon may know that this rank's node is gone, and is waiting for a second witness.
                self.send_heartbeat();
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

    fn send_heartbeat(&mut self) {
        self.link
            .beat(self.machine.generation(), self.worker_group.heartbeat());
    }

    fn signal_unasked(&mut self, signal: i32) {
        for local_rank in (0..self.worker_group.len() as u32).map(LocalRank) {
            if !self.control.listens(local_rank) {
                self.worker_group.signal(signal, Some(local_rank));
            }
        }
    }

    fn carry_out(&mut self, effect: Effect, events: &mut VecDeque<Event>) {
        let generation = self.machine.generation();
        match effect {
            Effect::Join => self.join(generation),
            Effect::Report(report) => {
                if matches!(report, Report::WorkerExit(_)) {
                    // Whether the generation made progress decides what its end costs.
                    self.send_heartbeat();
                }
                self.link.report(generation, report);
            }
            Effect::ReportEnds => self.report_ends(generation),
            Effect::Spawn(assignment) => self.prepare(generation, assignment),
            Effect::CancelSpawn => self.cancel_spawn(generation, events),
            Effect::Notify(cause) => self.control.generation_over(&cause),
            Effect::AskToStop(cause) => self.control.ask_to_stop(&cause),
            Effect::SignalAll(signal) => {
                self.worker_group.signal(signal, None);
                if let (libc::SIGKILL, Some(group)) = (signal, &self.group) {
                    group.kill();
                }
            }
            Effect::SignalUnasked(signal) => self.signal_unasked(signal),
            Effect::SignalLate(local_rank, signal) => self.worker_group.signal(signal, Some(local_rank)),
            Effect::KillStray(pid) => reap::kill_child(pid),
            Effect::DrainControl(local_rank) => {
                tasks::drain_control(
                    self.task_results.clone(),
                    (generation, local_rank),
                    self.control.silence_of(local_rank),
                );
            }
            Effect::Describe(local_rank) => {
                let (stderr, silence) = (
                    self.worker_group.stderr_of(local_rank),
                    self.control.silence_of(local_rank),
                );
                let files = self.worker_group.files_of(local_rank);
                let in_file = self.files.give(move || files?.error_message());
                let who = (generation, local_rank);
                tasks::describe(self.task_results.clone(), who, stderr, silence, in_file);
            }
            Effect::Sweep => {
                let leftovers = Leftovers {
                    guardian: self.guardian.pid(),
                    group: self.group.clone(),
                };
                let kill = self.processes.give(move || leftovers.kill());
                let (read, streams) = (self.read_files(), self.worker_group.streams());
                tasks::sweep(
                    self.task_results.clone(),
                    kill,
                    read,
                    streams,
                    self.console.clone(),
                );
            }
            Effect::Arm(after) => self.alarm = Some(Instant::now() + after),
            Effect::Disarm => self.alarm = None,
            Effect::Say(text) => self.console.say(&text),
            Effect::Leave(leave) => {
                let deadline = Instant::now() + LEAVE_WAIT;
                if self.client.is_none() || !self.link.leave(generation, leave, deadline) {
                    // The daemon does not know this agent, or cannot be reached any more.
                    events.push_back(Event::Left);
                }
            }
            Effect::Finish(exit_reason) => self.finished = Some(exit_reason),
        }
    }
}

/// What the decisions depend on.
fn rules_of(plan: &LaunchPlan, hostname: &str) -> Rules {
    Rules {
        hostname: hostname.to_owned(),
        native: plan.command.native,
        resume_words: plan.resume_words.clone(),
        join_timeout: plan.join_timeout,
        shutdown_timeout: plan.shutdown_timeout,
        workers: plan.workers,
        elastic: plan.nodes.min < plan.nodes.max,
    }
}

/// Where the daemon is, and who speaks to it.
fn link_of(plan: &LaunchPlan, guardian: &Guardian) -> LinkConfig {
    LinkConfig {
        endpoint: plan.endpoint.clone(),
        identity: AgentIdentity {
            job_id: plan.job_id.clone(),
            incarnation: NodeId(guardian.launcher_id().to_owned()),
        },
        connect_timeout: plan.connect_timeout,
        outage_timeout: plan.outage_timeout,
    }
}

/// What can be known to be wrong before the node joins. Returns the folders that it made for log files.
fn check(plan: &LaunchPlan, inherited: &[(OsString, OsString)]) -> Result<Vec<PathBuf>, LaunchError> {
    let inherited_path = inherited.iter().find(|(name, _)| name == "PATH");
    check_program(&plan.command, inherited_path.map(|(_, value)| value))?;
    let made = plan.log_dir.as_deref().map(create_log_dir).transpose()?;
    Ok(made.unwrap_or_default())
}
