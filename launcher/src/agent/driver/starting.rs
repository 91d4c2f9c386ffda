//! The beginning of a generation: joining, and starting the workers.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use ddp_proto::client::KvScope;
use ddp_proto::exit;
use ddp_proto::ids::Generation;
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::{Assignment, Join};

use super::super::event::Event;
use super::super::tasks;
use super::super::workers::{PrepareError, Prepared, Site, WorkerGroup};
use super::{Driver, PROTOCOL};
use crate::cgroup::{CgroupEntry, WorkerCgroup};
use crate::control::{Place, Store};
use crate::output::pump::Pump;
use crate::plan::LaunchPlan;
use crate::report::event_log::LogEvent;
use crate::spawn::environment::{Common, threads_per_worker};
use crate::spawn::master_port::MasterPort;
use crate::spawn::spawner::Batch;
use crate::tcp_store::TcpStoreServer;

impl Driver<'_> {
    pub(super) fn join(&mut self, generation: Generation) {
        // What is left of the last generation does not meet the next one.
        if let Some(last) = self.tcp_store.take() {
            last.close();
        }
        // Released before the next one is reserved.
        self.master_port = None;
        self.master_port = self.reserve_master_port();
        let port = self.master_port.as_ref().map(MasterPort::get);
        let port = port.or(self.plan.master_port);
        self.event_log.put(LogEvent::Joined {
            generation: generation.0,
        });
        let join = Join {
            protocol: PROTOCOL,
            hostname: self.hostname.clone(),
            node_rank: self.plan.node_rank.map(|rank| rank.0),
            min_nodes: self.plan.nodes.min,
            max_nodes: self.plan.nodes.max,
            workers: self.plan.workers,
            max_restarts: self.plan.max_restarts,
            local_addr: self.plan.local_addr.clone().unwrap_or_default(),
            master_port: port.map_or(0, u32::from),
            job_signature: self.plan.job_signature.clone(),
            job_description: self.plan.job_description.clone(),
            join_timeout_ms: u32::try_from(self.plan.join_timeout.as_millis()).unwrap_or(u32::MAX),
            run_token: self.run_token.clone(),
            role: self.plan.role.clone(),
            last_call_ms: self
                .plan
                .last_call
                .map_or(0, |wait| u32::try_from(wait.as_millis()).unwrap_or(u32::MAX)),
            free_attempt: self.free_attempt,
            ..Join::default()
        };
        self.link.report(generation, Report::Join(join));
    }

    /// For what may become rank 0; none, which is said, if there is none.
    fn reserve_master_port(&self) -> Option<MasterPort> {
        let plan = &self.plan;
        // Native workers do not use it, and need the range for themselves.
        let range = plan.worker_ports.filter(|_| !plan.command.native);
        let (reserved, what) = match (plan.master_port, range) {
            (Some(port), _) => (
                MasterPort::reserve_this(port),
                format!(
                    "cannot reserve `--master-port {port}`; rank 0 may fail to bind it if it runs on this node"
                ),
            ),
            (None, Some(ports)) => (
                MasterPort::reserve_within(ports),
                format!("cannot reserve a port of `--worker-ports {ports}` for MASTER_PORT"),
            ),
            (None, None) => (
                MasterPort::reserve(),
                "cannot reserve a port for MASTER_PORT".to_owned(),
            ),
        };
        reserved
            .inspect_err(|error| self.console.say(&format!("{what}: {error}")))
            .ok()
    }

    /// Has all made that the workers of a generation need; [`Driver::spawn`] is what follows.
    pub(super) fn prepare(&mut self, generation: Generation, assignment: Assignment) {
        self.run_token.clone_from(&assignment.run_token);
        self.worker_group = WorkerGroup::none();
        self.preparing = true;
        let agent_store = match self.host_store(&assignment) {
            Ok(agent_store) => agent_store,
            Err(error) => {
                let making = async move { Some(Err(error)) };
                return tasks::prepare(self.task_results.clone(), generation, making);
            }
        };
        let entry = self.group.as_deref().and_then(WorkerCgroup::entry);
        let making = Making {
            plan: self.plan.clone(),
            inherited: self.inherited.clone(),
            marker: self.guardian.marker().to_owned(),
            hostname: self.hostname.clone(),
            scratch_dir: self.guardian.scratch_dir().to_owned(),
            control: self.control.address().to_owned(),
            entry: entry.map(|(entry, group)| (entry, group.to_owned())),
            pump: self.pump.clone(),
            generation,
            assignment,
            agent_store,
        };
        let making = self.files.give(move || making.make());
        tasks::prepare(self.task_results.clone(), generation, making);
    }

    /// Hosts the store of the workers' PyTorch, if this is node 0. True if no worker of this node needs to do that. Alone,
    /// rank 0 can do it instead; with several nodes, the others' workers would look for what they share elsewhere.
    fn host_store(&mut self, assignment: &Assignment) -> Result<bool, PrepareError> {
        if !self.plan.command.agent_store || assignment.node_rank != 0 {
            return Ok(self.plan.command.agent_store);
        }
        let listening = match &self.master_port {
            Some(port) => port.listen(),
            None => Err(io::Error::other("it could not be reserved")),
        };
        match listening.and_then(|listener| TcpStoreServer::start(listener, self.console.clone())) {
            Ok(store) => self.tcp_store = Some(store),
            Err(cause) => {
                let error = PrepareError::Store {
                    port: assignment.master_port,
                    cause,
                };
                if assignment.nodes.len() > 1 {
                    return Err(error);
                }
                self.console.say(&format!("rank 0 hosts the store: {error}"));
            }
        }
        Ok(self.tcp_store.is_some())
    }

    /// Starts no more workers. Those that are not even prepared are not waited for.
    pub(super) fn cancel_spawn(&mut self, generation: Generation, events: &mut VecDeque<Event>) {
        self.worker_group.trouble_begins();
        if std::mem::take(&mut self.preparing) {
            let failure = None;
            events.push_back(Event::SpawnEnded { generation, failure });
        }
    }

    /// Has the workers started, unless they were given up meanwhile.
    pub(super) fn spawn(
        &mut self,
        generation: Generation,
        ready: Result<Ready, PrepareError>,
        events: &mut VecDeque<Event>,
    ) {
        if generation != self.machine.generation() || !std::mem::take(&mut self.preparing) {
            return;
        }
        if let Err(error) = ready.and_then(|ready| self.request(generation, ready)) {
            let exit_code = match error {
                PrepareError::Log(_) => exit::USAGE,
                PrepareError::Pipe(_)
                | PrepareError::Store { .. }
                | PrepareError::Assignment(_)
                | PrepareError::Panicked => exit::INTERNAL,
            };
            let error = error.to_string();
            events.push_back(Event::CannotBegin { exit_code, error });
        }
    }

    fn request(&mut self, generation: Generation, ready: Ready) -> Result<(), PrepareError> {
        let Ready {
            prepared,
            entry,
            node_addrs,
        } = ready;
        let Some(client) = self.client.clone() else {
            return Err(PrepareError::Assignment("it arrived without a connection".into()));
        };
        self.worker_group = prepared.worker_group;
        self.local_failure = None;
        let scope = KvScope {
            job_id: self.plan.job_id.clone(),
            generation,
            assignment_id: self.machine.assignment_id().to_owned(),
        };
        self.control.begin(Place {
            generation,
            contracts: prepared
                .contracts
                .iter()
                .map(ddp_proto::env::WorkerEnv::to_vars)
                .collect(),
            node_addrs,
            store: Arc::new(Store::new(client, scope)),
            pids: vec![None; self.worker_group.len()],
            spawned: false,
            asked_to_stop: None,
            over: None,
        });
        let batch = Batch {
            generation,
            command: self.plan.command.clone(),
            workers: prepared.specs,
            ignored: self.ignored_by_workers(),
            entry,
            cancelled: self.worker_group.cancelled.clone(),
        };
        if !self.spawner.request(batch) {
            let busy = "workers of the last generation are still being started";
            return Err(PrepareError::Pipe(std::io::Error::other(busy)));
        }
        Ok(())
    }

    /// Native workers are asked to stop, and save first, also where every process of the job gets the signal.
    fn ignored_by_workers(&self) -> Vec<i32> {
        let stop = &self.plan.signals.stop;
        if self.plan.command.native {
            stop.clone()
        } else {
            Vec::new()
        }
    }
}

/// What the workers of a generation are started from.
pub(in crate::agent) struct Ready {
    prepared: Prepared,
    entry: Option<CgroupEntry>,
    node_addrs: Vec<String>,
}

/// Makes it, where a file system may be waited for.
struct Making {
    plan: Arc<LaunchPlan>,
    inherited: Arc<[(OsString, OsString)]>,
    marker: String,
    hostname: String,
    scratch_dir: PathBuf,
    control: String,
    /// The control group that the workers are to be born in, if there is one, behind the way into it.
    entry: Option<(CgroupEntry, PathBuf)>,
    pump: Pump,
    generation: Generation,
    assignment: Assignment,
    agent_store: bool,
}

impl Making {
    fn make(self) -> Result<Ready, PrepareError> {
        let plan = &*self.plan;
        let (entry, group) = self.entry.unzip();
        let site = Site {
            common: Common {
                inherited: &self.inherited,
                extra: &plan.command.env,
                marker: &self.marker,
                threads: threads_per_worker(plan.workers),
                progress_bar: plan.progress_bar,
                virtual_local_rank: plan.virtual_local_rank,
            },
            log_dir: plan.log_dir.as_deref(),
            scratch_dir: &self.scratch_dir,
            job_id: &plan.job_id,
            hostname: &self.hostname,
            control: &self.control,
            output: &plan.output,
            signal_scope: plan.signals.scope,
            native: plan.command.native,
            agent_store: self.agent_store,
            master_addr: plan.master_addr.as_deref(),
            worker_ports: plan.worker_ports,
            cores: &plan.cores,
            group: group.as_deref(),
        };
        let nodes = self.assignment.nodes.iter();
        Ok(Ready {
            prepared: WorkerGroup::prepare(self.generation, &self.assignment, &site, &self.pump)?,
            entry,
            node_addrs: nodes.map(|node| node.addr.clone()).collect(),
        })
    }
}
