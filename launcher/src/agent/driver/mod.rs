//! One loop that turns all that happens into events for the machine, and carries out its effects.
//!
//! | file | what it does |
//! |---|---|
//! | `inbox` | the one `select!` over everything that may happen |
//! | `tasks` | what takes time, done beside the loop |
//! | `starting` | joining a generation, and what its workers are started from |
//! | `master_endpoint` | `MASTER_PORT` and PyTorch's store |
//! | `records` | the event log, the failures, the report |

mod inbox;
mod master_endpoint;
mod records;
mod starting;
mod tasks;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use ddp_proto::client::KvScope;
use ddp_proto::control::ToAgent;
use ddp_proto::env::WorkerEnv;
use ddp_proto::exit;
use ddp_proto::ids::{Generation, LocalRank, NodeId};
use ddp_proto::rendezvous::Assignment;
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use nix::unistd::Pid;

use super::context::LaunchContext;
use super::daemon::{DaemonConnection, LinkEvent, WorkersEnd};
use super::machine::{Effect, Event, ExitReason, Machine, Rules, VERDICT_WAIT};
use super::signals::{SignalAction, Signals};
use super::workers::{HangWatch, Prepared, WorkerGroup};
use crate::control::{ControlEvent, ControlNews, ControlServer, Store, WorkerContext};
use crate::report::event_log::LogEvent;
use crate::report::kubeflow::Kubeflow;
use crate::spawn::program::check_program;
use crate::spawn::spawner::SpawnEvent;
use crate::supervise::guardian::DeathNotice;
use crate::supervise::oom::OomHistory;
use crate::supervise::{proc_table, reap};
use inbox::{Inbox, LoopEvent};
use master_endpoint::MasterEndpoint;
use records::Records;
use starting::Starter;

/// Why a native job is not started a third time.
const OUT_OF_MEMORY: &str = "out of memory, as the last time, and no step further: this node's workers need more than the memory limit of their control group\n\
     hint: raise that limit (`--mem`, `resources.limits.memory`, `memory.max`), start fewer workers per node, or lower `train.micro_batch`";

/// The agent with all its parts.
pub(super) struct Driver<'a> {
    launch: LaunchContext<'a>,
    machine: Machine,
    /// What the machine is to decide on next.
    events: VecDeque<Event>,
    inbox: Inbox<'a>,
    daemon: DaemonConnection,
    control: ControlServer,
    master_endpoint: MasterEndpoint,
    starter: Starter,
    worker_group: WorkerGroup,
    hang_watch: HangWatch,
    oom_history: OomHistory,
    records: Records,
    kubeflow: Option<Kubeflow>,
    finished: Option<ExitReason>,
}

impl<'a> Driver<'a> {
    /// Checks the plan, starts all threads and tasks, and joins the job.
    pub(super) fn start(launch: LaunchContext<'a>, signals: &'a mut Signals) -> Result<Self, ExitReason> {
        let plan = &launch.plan;
        let path = launch.inherited.iter().find(|(name, _)| name == "PATH");
        check_program(&plan.command.program, path.map(|(_, value)| value))?;
        // A daemon on a Unix socket is that of this launcher, and ends with it.
        if plan.nodes.max > 1 || !plan.endpoint.starts_with("unix:") {
            launch.guardian.set_notice(&DeathNotice {
                endpoint: plan.endpoint.clone(),
                token: plan.access.token().map(|token| token.reveal().to_owned()),
                job_id: plan.job_id.clone(),
                incarnation: plan.incarnation.clone(),
            })?;
        }
        let records = Records::open(&launch)?;
        if launch.group.is_none() && proc_table::process(Pid::this().as_raw()).is_none() {
            launch.console.say(
                "`/proc` does not show the processes of this PID namespace: what workers start outside of their process \
                 groups survives the job\n  hint: mount a `/proc` of its own, as `unshare --mount-proc` does",
            );
        }
        nix::sys::prctl::set_child_subreaper(true).map_err(std::io::Error::from)?;
        let hang_watch = HangWatch::new(plan, launch.console.clone(), launch.files.clone());
        let (daemon, link) = DaemonConnection::start(plan.clone(), launch.console.clone());
        let (inbox, spawn_events, control_events) = Inbox::open(signals, link, hang_watch.interval());
        let control = ControlServer::start(control_events)?;
        let starter = Starter::start(&launch, spawn_events, control.address())?;
        let kubeflow = Kubeflow::of_environment(&launch.console, &launch.files);
        let (machine, opening) = Machine::start(rules_of(&launch));
        let mut driver = Self {
            launch,
            machine,
            events: VecDeque::new(),
            inbox,
            daemon,
            control,
            master_endpoint: MasterEndpoint::default(),
            starter,
            worker_group: WorkerGroup::none(),
            hang_watch,
            oom_history: OomHistory::default(),
            records,
            kubeflow,
            finished: None,
        };
        for effect in opening {
            driver.carry_out(effect);
        }
        Ok(driver)
    }

    /// Runs until the launch is over; returns the failure report too.
    pub(super) async fn run(mut self) -> (ExitReason, Option<String>) {
        loop {
            while let Some(event) = self.events.pop_front() {
                self.decide(event);
            }
            self.daemon.reconsider(&self.machine);
            self.watch_takeover();
            if let Some(exit_reason) = self.finished.take() {
                if exit_reason == ExitReason::Succeeded
                    && self.worker_group.is_rank_0(LocalRank(0))
                    && let Some(kubeflow) = &mut self.kubeflow
                {
                    kubeflow.finish().await;
                }
                let generation = self.machine.generation();
                let closing = self
                    .records
                    .close(&self.launch, &exit_reason, generation, &self.worker_group);
                let report = closing.await;
                return (exit_reason, report);
            }
            let event = self.inbox.next().await;
            self.daemon.check_stall();
            // Before anything else: this process may have been stopped until now.
            self.check_takeover();
            self.handle(event);
        }
    }

    fn handle(&mut self, event: LoopEvent) {
        match event {
            LoopEvent::Signal(SignalAction::Stop(signal)) => self.events.push_back(Event::Signal(signal)),
            LoopEvent::Signal(SignalAction::Forward(signal)) if self.machine.is_spawning() => {
                self.starter.defer(signal);
            }
            LoopEvent::Signal(SignalAction::Forward(signal)) => self.worker_group.pass_on(signal),
            LoopEvent::Signal(SignalAction::Child) => self.reap(),
            LoopEvent::Spawn(event) => self.on_spawn(event),
            LoopEvent::Control(event) => self.on_control(event),
            LoopEvent::Link(event) => self.on_link(event),
            LoopEvent::Heartbeat => {
                let heartbeat = self.worker_group.heartbeat();
                self.daemon.beat_in_time(self.machine.generation(), heartbeat);
            }
            LoopEvent::Watch => self.look_for_hung_workers(),
            // An unreachable daemon decides nothing; the outage has a time-out of its own.
            LoopEvent::Alarm if self.daemon.is_broken() && self.machine.is_undecided() => {
                self.inbox.arm(VERDICT_WAIT);
            }
            LoopEvent::Alarm => self.events.push_back(Event::Alarm),
            // It was checked before.
            LoopEvent::Replaceable => {}
            LoopEvent::Prepared(generation, prepared) => self.on_prepared(generation, *prepared),
            LoopEvent::ControlDrained(generation, local_rank) => {
                self.read_control();
                self.events.push_back(Event::ControlDrained {
                    generation,
                    local_rank,
                    consequence: self.worker_group.is_consequence(local_rank),
                });
            }
            LoopEvent::Described(generation, local_rank, in_file) => {
                if generation == self.machine.generation() {
                    self.on_described(local_rank, in_file);
                }
            }
            LoopEvent::Answered(threads) => {
                self.read_control();
                let running = self.machine.is_running().then(|| self.machine.generation());
                let hung = self.hang_watch.report(running, &mut self.worker_group, threads);
                // An unreachable daemon decides nothing. The report is repeated.
                if let Some(hung) = hung.filter(|_| !self.daemon.is_broken()) {
                    self.daemon
                        .report(self.machine.generation(), Report::HungWorkers(hung));
                }
            }
            LoopEvent::Swept(stuck, left) => {
                self.read_control();
                for (local_rank, message) in left.messages {
                    self.worker_group.note_error_file(local_rank, message);
                }
                if let Some(attempt) = left.free_attempt {
                    self.records.set_free_attempt(attempt);
                }
                self.events.push_back(Event::Swept { stuck });
            }
        }
    }

    /// Sets when the workers stop if the daemon stays silent, for this loop and for the guardian.
    fn watch_takeover(&mut self) {
        let end = self.daemon.takeover().filter(|_| self.machine.has_workers());
        self.launch.guardian.set_deadline(end.map(|end| end.ends_at));
        let is_running = self.machine.is_running();
        let after = end.map(|end| if is_running { end.stop_in } else { end.end_in });
        self.inbox.watch_takeover(after);
    }

    /// Stops the workers if other nodes may take their places soon.
    fn check_takeover(&mut self) {
        let end = self.daemon.takeover().filter(|_| self.machine.has_workers());
        let Some(WorkersEnd { stop_in, end_in, .. }) = end else {
            return;
        };
        if end_in.is_zero() || stop_in.is_zero() && self.machine.is_running() {
            self.decide(Event::Replaceable { end_in });
        }
    }

    fn decide(&mut self, event: Event) {
        let was_spawning = self.machine.is_spawning();
        self.machine.set_listening(self.control.has_listeners());
        self.machine.set_finishing(self.worker_group.is_finishing());
        for effect in self.machine.on(event) {
            self.carry_out(effect);
        }
        if was_spawning && !self.machine.is_spawning() {
            // Orphans that ended meanwhile were left alone, and send no other signal.
            self.reap();
        }
    }

    fn on_link(&mut self, event: LinkEvent) {
        match &event {
            LinkEvent::Message(message) => {
                self.records.note_message(message);
                let generation = Generation(message.generation);
                if let Some(Word::HangVerdict(verdict)) = &message.body
                    && self.machine.is_running()
                    && generation == self.machine.generation()
                {
                    self.hang_watch.carry_out(verdict, &mut self.worker_group);
                }
            }
            LinkEvent::Restored => {
                if self.machine.is_undecided() {
                    // It may have to wait for other nodes first.
                    self.inbox.arm(VERDICT_WAIT);
                }
                if let Some(store) = self.control.store() {
                    tokio::spawn(async move { store.write_again().await });
                }
            }
            _ => {}
        }
        self.events.extend(self.daemon.on_event(event, &self.machine));
        if let Some(interval) = self.daemon.heartbeat_interval() {
            self.inbox.beat_every(interval);
        }
    }

    fn on_spawn(&mut self, event: SpawnEvent) {
        let current = self.machine.generation();
        match &event {
            SpawnEvent::Spawned {
                generation,
                local_rank,
                pid,
            } if *generation == current => {
                if let Some(rank) = self.worker_group.spawned(*local_rank, *pid) {
                    self.records.put(LogEvent::WorkerStarted {
                        generation: current.0,
                        rank: rank.0,
                        local_rank: local_rank.0,
                        pid: *pid,
                        kept: self.machine.is_parked(*local_rank),
                    });
                    self.control.set_pid(*local_rank, Some(*pid));
                }
            }
            SpawnEvent::Ended { generation, failure } if *generation == current => {
                self.control.spawned();
                if failure.is_none() && self.launch.plan.output.is_seen() {
                    let program = &self.launch.plan.command.display_name;
                    self.launch.console.say(&self.worker_group.introduction(program));
                }
                for signal in self.starter.deferred() {
                    self.worker_group.pass_on(signal);
                }
            }
            _ => {}
        }
        self.events.push_back(Event::Spawn(event));
        // A worker may have ended before it was known.
        self.reap();
    }

    fn reap(&mut self) {
        let guardian = self.launch.guardian;
        let forget = |pid| guardian.registrar().forget(pid);
        let dead = reap::collect_workers(self.worker_group.live_pids(), self.worker_group.group(), forget);
        for (local_rank, ending) in self.worker_group.ended(dead) {
            self.control.set_pid(local_rank, None);
            self.records.put(LogEvent::WorkerEnded {
                generation: self.machine.generation().0,
                local_rank: local_rank.0,
                ending: ending.to_string(),
            });
            self.events.push_back(Event::Exited { local_rank, ending });
        }
        if self.machine.is_spawning() {
            return;
        }
        let live: BTreeSet<i32> = self.worker_group.live_pids().collect();
        let orphans = reap::collect_orphans(|pid| live.contains(&pid), forget);
        if orphans.contains(&guardian.pid()) {
            self.launch.console
                .say("the guardian process was killed: if this launcher is killed too, its workers die, but processes that they started survive");
        }
    }

    /// Takes what workers said and was passed on, but still lies there.
    fn read_control(&mut self) {
        for event in self.inbox.waiting_control_events() {
            self.on_control(event);
        }
    }

    fn on_control(&mut self, event: ControlEvent) {
        if event.generation != self.machine.generation() {
            return;
        }
        let local_rank = event.local_rank;
        let message = match event.news {
            ControlNews::Message(message) => message,
            ControlNews::Parked => return self.events.push_back(Event::Parked(local_rank)),
            ControlNews::Disconnected => return self.worker_group.disconnected(local_rank),
            ControlNews::Refused(why) => return self.tell_refused(local_rank, &why),
        };
        if let ToAgent::Heartbeat {
            step, loss, progress, ..
        } = &message
            && self.worker_group.is_rank_0(local_rank)
        {
            if let Some(progress) = progress
                && self.launch.plan.progress_bar
            {
                self.launch.console.progress(*step, progress.clone());
            }
            if let Some(kubeflow) = &mut self.kubeflow {
                kubeflow.note(*step, *loss, progress.as_ref());
            }
        }
        if self.worker_group.note(local_rank, message) {
            self.send_heartbeat();
        }
        if self.machine.is_running() {
            for line in self.worker_group.wait_messages() {
                self.launch.console.say(&line);
            }
        }
    }

    /// Once for each worker: a program may try again for ever.
    fn tell_refused(&mut self, local_rank: LocalRank, why: &str) {
        if let Some(rank) = self.worker_group.first_refused(local_rank) {
            self.launch.console.say(&format!(
                "rank {rank}: its control connection was closed: {why}\n  \
                 hint: `local_rank` is DDP_LOCAL_RANK, `generation` is DDP_GENERATION, `pid` is the process id as the launcher sees it"
            ));
        }
    }

    /// Asks all workers what they do when one has said nothing new for too long.
    fn look_for_hung_workers(&mut self) {
        let generation = self.machine.generation();
        if self.machine.is_running() && self.hang_watch.has_to_ask(generation, &mut self.worker_group) {
            self.control.describe();
            let answers = self.hang_watch.answers(&self.worker_group);
            self.inbox
                .expect(async move { LoopEvent::Answered(answers.await) });
        }
    }

    fn send_heartbeat(&mut self) {
        self.daemon
            .beat(self.machine.generation(), self.worker_group.heartbeat());
    }

    /// All that is known of a worker's failure has been collected.
    fn on_described(&mut self, local_rank: LocalRank, in_file: Option<String>) {
        self.read_control();
        if let Some(words) = in_file {
            self.worker_group.note_error_file(local_rank, words);
        }
        let Some(mut exit) = self.worker_group.describe(local_rank) else {
            return;
        };
        let is = |code| exit.exit_code == Some(i32::from(code));
        exit.permanent = is(exit::DO_NOT_RESTART)
            || self.launch.plan.command.native && exit::PERMANENT_OF_NATIVE.into_iter().any(is);
        let is_native = self.launch.plan.command.native;
        let step = self.worker_group.step().unwrap_or(0);
        if is_native && exit.out_of_memory && self.oom_history.repeats(step) {
            exit.permanent = true;
            OUT_OF_MEMORY.clone_into(&mut exit.message);
        }
        self.records.note_failure(&exit);
        self.events.push_back(Event::Described(exit));
    }

    fn carry_out(&mut self, effect: Effect) {
        let generation = self.machine.generation();
        match effect {
            Effect::Join => self.join(generation),
            Effect::Report(report) => {
                if matches!(report, Report::WorkerExit(_)) {
                    // Whether the generation made progress decides what its end costs.
                    self.send_heartbeat();
                }
                self.daemon.report(generation, report);
            }
            Effect::ReportEnds => {
                self.read_control();
                let ends = self.worker_group.ends();
                self.daemon.report(generation, Report::NodeStopped(ends));
            }
            Effect::Spawn(assignment) => self.prepare(generation, assignment),
            Effect::CancelSpawn => self.cancel_spawn(generation),
            Effect::Notify(cause) => self.control.generation_over(&cause),
            Effect::AskToStop(cause) => self.control.ask_to_stop(&cause, self.machine.is_to_rejoin()),
            Effect::SignalAll(signal) => {
                let is_meant = |local_rank| !self.machine.is_parked(local_rank);
                self.worker_group.signal(signal, is_meant);
                if let (libc::SIGKILL, Some(group)) = (signal, &self.launch.group)
                    && self.parked().is_empty()
                {
                    group.kill();
                }
            }
            Effect::SignalUnasked(signal) => {
                let (machine, control) = (&self.machine, &self.control);
                let is_unasked = |rank| !machine.is_parked(rank) && !control.listens(rank);
                self.worker_group.signal(signal, is_unasked);
            }
            Effect::SignalLate(late, signal) => {
                self.worker_group.signal(signal, |local_rank| local_rank == late);
            }
            Effect::KillStray(pid) => reap::kill_child(pid),
            Effect::DrainControl(local_rank) => {
                let disconnected = self.control.disconnected(local_rank);
                self.inbox
                    .expect(tasks::drain_control(generation, local_rank, disconnected));
            }
            Effect::Describe(local_rank) => self.describe(generation, local_rank),
            Effect::Sweep => self.sweep(),
            Effect::Arm(after) => self.inbox.arm(after),
            Effect::Disarm => self.inbox.disarm(),
            Effect::Say(text) => self.launch.console.say(&text),
            Effect::Leave(leave) => {
                if !self.daemon.leave(generation, leave) {
                    self.events.push_back(Event::Left);
                }
            }
            Effect::Finish(exit_reason) => self.finished = Some(exit_reason),
        }
    }

    fn join(&mut self, generation: Generation) {
        let port = self.master_endpoint.renew(&self.launch);
        self.records.put(LogEvent::Joined {
            generation: generation.0,
        });
        let join = self.starter.join(&self.launch, port, self.records.free_attempt());
        self.daemon.report(generation, Report::Join(join));
    }

    /// Has all made that the workers of a generation need; [`LoopEvent::Prepared`] is what follows.
    fn prepare(&mut self, generation: Generation, assignment: Assignment) {
        let machine = &self.machine;
        let parked = self
            .worker_group
            .parked(|local_rank| machine.is_parked(local_rank));
        self.worker_group = parked;
        let parked = self.parked().into_iter();
        let parked = parked
            .filter_map(|(local_rank, _)| Some((local_rank, self.worker_group.files_of(local_rank)?)))
            .collect();
        let agent_store = self.master_endpoint.host(&self.launch, &assignment);
        let prepared = self
            .starter
            .prepare(&self.launch, generation, assignment, agent_store, parked);
        self.inbox.expect(prepared);
    }

    /// Starts no more workers. Those that are not even prepared are not waited for.
    fn cancel_spawn(&mut self, generation: Generation) {
        self.worker_group.trouble_begins();
        if self.starter.is_wanted() {
            let failure = None;
            let ended = SpawnEvent::Ended { generation, failure };
            self.events.push_back(Event::Spawn(ended));
        }
    }

    /// Has the workers started, unless they were given up meanwhile.
    fn on_prepared(&mut self, generation: Generation, prepared: Result<Prepared, ExitReason>) {
        if generation != self.machine.generation() || !self.starter.is_wanted() {
            return;
        }
        if let Err(error) = prepared.and_then(|prepared| self.spawn(generation, prepared)) {
            self.events.push_back(Event::CannotBegin(error));
        }
    }

    fn spawn(&mut self, generation: Generation, mut prepared: Prepared) -> Result<(), ExitReason> {
        let Some(client) = self.daemon.client().cloned() else {
            let error = "invalid assignment from the rendezvous daemon: it arrived without a connection";
            return Err(ExitReason::internal(error.into()));
        };
        let parked = self.parked();
        prepared.adopt(std::mem::replace(&mut self.worker_group, WorkerGroup::none()));
        self.worker_group = prepared.worker_group;
        self.records.generation_begins();
        let scope = KvScope {
            job_id: self.launch.plan.job_id.clone(),
            generation,
            assignment_id: self.machine.assignment_id().to_owned(),
            incarnation: NodeId(self.launch.plan.incarnation.clone()),
        };
        self.control.begin(WorkerContext {
            generation,
            contracts: prepared.contracts.iter().map(WorkerEnv::to_vars).collect(),
            node_addr: prepared.node_addr,
            data_key: prepared.data_key,
            store: Arc::new(Store::new(client, scope)),
            pids: vec![None; prepared.contracts.len()],
            spawned: false,
            asked_to_stop: None,
            over: None,
        });
        for (local_rank, pid) in parked {
            self.on_spawn(SpawnEvent::Spawned {
                generation,
                local_rank,
                pid,
            });
        }
        let cancelled = self.worker_group.cancelled.clone();
        self.starter
            .request(&self.launch, generation, prepared.specs, cancelled)
    }

    /// Collects what is known of a failed worker.
    fn describe(&mut self, generation: Generation, local_rank: LocalRank) {
        let stderr = self.worker_group.stderr_of(local_rank);
        let disconnected = self.control.disconnected(local_rank);
        let files = self.worker_group.files_of(local_rank);
        let in_file = self.launch.files.give(move || files?.error_message());
        self.inbox.expect(tasks::describe(
            generation,
            local_rank,
            stderr,
            disconnected,
            in_file,
        ));
    }

    /// Workers that wait for the next generation.
    fn parked(&self) -> Vec<(LocalRank, i32)> {
        self.worker_group
            .pids_of(|local_rank| self.machine.is_parked(local_rank))
    }

    /// Kills all that is left of the workers, but those that are parked.
    fn sweep(&mut self) {
        let mut spared: Vec<i32> = self.parked().into_iter().map(|(_, pid)| pid).collect();
        let streams = self.worker_group.streams(&spared);
        let group = self.launch.group.clone().filter(|_| spared.is_empty());
        spared.push(self.launch.guardian.pid());
        let kill = move || tasks::kill_leftovers(&spared, group.as_deref());
        let kill = self.launch.processes.give(kill);
        let failed = self.worker_group.files_of_failures_without_message();
        let log_dir = self.launch.plan.log_dir.clone();
        let read = self
            .launch
            .files
            .give(move || tasks::read_left_files(failed, log_dir.as_deref()));
        self.inbox.expect(tasks::sweep(kill, read, streams));
    }
}

/// What the decisions depend on.
fn rules_of(launch: &LaunchContext<'_>) -> Rules {
    let plan = &launch.plan;
    Rules {
        hostname: launch.hostname.clone(),
        native: plan.command.native,
        resume_hint: plan.resume_hint.clone(),
        // The daemon has to be reached first, and an error of that tells more.
        join_timeout: plan.connect_timeout + plan.join_timeout,
        shutdown_timeout: plan.shutdown_timeout,
        workers: plan.workers,
        elastic: plan.nodes.min < plan.nodes.max,
    }
}
