//! The beginning of a generation: how this node joins it, and what its workers are started from.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use ddp_proto::ids::Generation;
use ddp_proto::rendezvous::{Assignment, Join};
use tokio::sync::mpsc;

use super::super::launch::Launch;
use super::super::workers::{PrepareError, Prepared, Site, WorkerGroup};
use super::inbox::Mail;
use crate::cgroup::{CgroupEntry, WorkerCgroup};
use crate::output::pump::Pump;
use crate::plan::LaunchPlan;
use crate::spawn::environment::{Common, threads_per_worker};
use crate::spawn::spawner::{Batch, SpawnEvent, Spawner};

/// Version of the protocol that this agent speaks.
const PROTOCOL: u32 = 1;

/// Starts the workers of one generation after the other.
pub(super) struct Starter {
    pump: Pump,
    spawner: Spawner,
    /// Address of the control socket.
    control: String,
    /// What the workers of the current generation need is being made.
    preparing: bool,
    /// Signals for the workers that came while these were being started.
    deferred: BTreeSet<i32>,
    /// Of the last assignment.
    run_token: String,
}

/// What the workers of a generation are started from.
pub(super) struct Ready {
    pub(super) prepared: Prepared,
    pub(super) entry: Option<CgroupEntry>,
    pub(super) node_addrs: Vec<String>,
}

impl Starter {
    /// Starts its threads; workers learn the address of the control socket.
    pub(super) fn start(
        launch: &Launch<'_>,
        events: mpsc::Sender<SpawnEvent>,
        control: &str,
    ) -> io::Result<Self> {
        Ok(Self {
            pump: Pump::start(launch.console.clone())?,
            spawner: Spawner::start(launch.guardian.registrar(), events)?,
            control: control.to_owned(),
            preparing: false,
            deferred: BTreeSet::new(),
            run_token: String::new(),
        })
    }

    /// How this node joins the next generation, with its port for `MASTER_PORT`.
    pub(super) fn join(&self, launch: &Launch<'_>, port: Option<u16>, free_attempt: u32) -> Join {
        let plan = &launch.plan;
        Join {
            protocol: PROTOCOL,
            hostname: launch.hostname.clone(),
            node_rank: plan.node_rank.map(|rank| rank.0),
            min_nodes: plan.nodes.min,
            max_nodes: plan.nodes.max,
            workers: plan.workers,
            max_restarts: plan.max_restarts,
            local_addr: plan.local_addr.clone().unwrap_or_default(),
            master_port: port.map_or(0, u32::from),
            job_signature: plan.job_signature.clone(),
            job_description: plan.job_description.clone(),
            join_timeout_ms: u32::try_from(plan.join_timeout.as_millis()).unwrap_or(u32::MAX),
            run_token: self.run_token.clone(),
            role: plan.role.clone(),
            last_call_ms: plan
                .last_call
                .map_or(0, |wait| u32::try_from(wait.as_millis()).unwrap_or(u32::MAX)),
            free_attempt,
            ..Join::default()
        }
    }

    /// Makes all that the workers of a generation need, where `agent_store` says whether one of them hosts PyTorch's store.
    pub(super) fn prepare(
        &mut self,
        launch: &Launch<'_>,
        generation: Generation,
        assignment: Assignment,
        agent_store: Result<bool, PrepareError>,
    ) -> impl Future<Output = Mail> + Send + use<> {
        self.run_token.clone_from(&assignment.run_token);
        self.preparing = true;
        let making = agent_store.map(|agent_store| {
            let entry = launch.group.as_deref().and_then(WorkerCgroup::entry);
            let making = Making {
                plan: launch.plan.clone(),
                inherited: launch.inherited.clone(),
                marker: launch.guardian.marker().to_owned(),
                hostname: launch.hostname.clone(),
                scratch_dir: launch.guardian.scratch_dir().to_owned(),
                control: self.control.clone(),
                entry: entry.map(|(entry, group)| (entry, group.to_owned())),
                pump: self.pump.clone(),
                generation,
                assignment,
                agent_store,
            };
            launch.files.give(move || making.make())
        });
        async move {
            let made = match making {
                Ok(making) => making.await.unwrap_or(Err(PrepareError::Panicked)),
                Err(error) => Err(error),
            };
            Mail::Prepared(generation, Box::new(made))
        }
    }

    /// Whether what was prepared is still wanted; true once, and false after it was cancelled.
    pub(super) fn is_wanted(&mut self) -> bool {
        std::mem::take(&mut self.preparing)
    }

    /// Has the workers started.
    pub(super) fn request(&self, batch: Batch) -> Result<(), PrepareError> {
        if !self.spawner.request(batch) {
            let busy = "workers of the last generation are still being started";
            return Err(PrepareError::Pipe(io::Error::other(busy)));
        }
        Ok(())
    }

    /// Keeps a signal for workers that are being started: one may run already, before its start is reported.
    pub(super) fn defer(&mut self, signal: i32) {
        self.deferred.insert(signal);
    }

    /// All are started: what was kept for them.
    pub(super) fn deferred(&mut self) -> BTreeSet<i32> {
        std::mem::take(&mut self.deferred)
    }
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
