//! The beginning of a generation: how this node joins it, and what its workers are started from.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ddp_proto::ids::{Generation, LocalRank};
use ddp_proto::rendezvous::{Assignment, Join};
use tokio::sync::mpsc;

use super::super::context::{LaunchContext, announced, user_name};
use super::super::machine::ExitReason;
use super::super::workers::{SpawnContext, WorkerGroup, no_pipes};
use super::inbox::LoopEvent;
use crate::cgroup::{CgroupEntry, WorkerCgroup};
use crate::output::logs::WorkerFiles;
use crate::spawn::spawner::{self, Batch, SpawnEvent, WorkerSpec};

/// Version of the protocol that this agent speaks.
const PROTOCOL: u32 = 1;

/// Starts the workers of one generation after the other.
pub(super) struct Starter {
    spawner: mpsc::Sender<Batch>,
    /// Address of the control socket.
    control: String,
    /// Files and pipes of the current generation are being made.
    preparing: bool,
    /// The way into the control group that they are to be born in, if there is one.
    entry: Option<CgroupEntry>,
    /// Signals for the workers that came while these were being started.
    deferred: BTreeSet<i32>,
    /// Run token of the last assignment.
    run_token: String,
}

impl Starter {
    /// Starts its threads; workers learn the address of the control socket.
    pub(super) fn start(
        launch: &LaunchContext<'_>,
        events: mpsc::Sender<SpawnEvent>,
        control: &str,
    ) -> io::Result<Self> {
        Ok(Self {
            spawner: spawner::start(launch.guardian.registrar(), events)?,
            control: control.to_owned(),
            preparing: false,
            entry: None,
            deferred: BTreeSet::new(),
            run_token: String::new(),
        })
    }

    /// How this node joins the next generation, with its port for `MASTER_PORT`.
    pub(super) fn join(&self, launch: &LaunchContext<'_>, port: Option<u16>, free_attempt: u32) -> Join {
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
            agreed: plan
                .agreed
                .iter()
                .map(|(key, value)| (key.clone(), value.hash))
                .collect(),
            join_timeout_ms: u32::try_from(plan.join_timeout.as_millis()).unwrap_or(u32::MAX),
            run_token: self.run_token.clone(),
            role: plan.role.clone(),
            last_call_ms: plan
                .last_call
                .map_or(0, |wait| u32::try_from(wait.as_millis()).unwrap_or(u32::MAX)),
            free_attempt,
            takeover_ms: plan
                .takeover
                .map_or(0, |time| u32::try_from(time.as_millis()).unwrap_or(u32::MAX)),
            user: announced(&user_name()),
            target: announced(&plan.command.display_name),
            ..Join::default()
        }
    }

    /// Makes all that the workers of a generation need, but those that are parked. `agent_store` says whether one of them
    /// hosts PyTorch's store.
    pub(super) fn prepare(
        &mut self,
        launch: &LaunchContext<'_>,
        generation: Generation,
        assignment: Assignment,
        agent_store: Result<bool, ExitReason>,
        parked: BTreeMap<LocalRank, WorkerFiles>,
    ) -> impl Future<Output = LoopEvent> + Send + use<> {
        self.run_token.clone_from(&assignment.run_token);
        self.preparing = true;
        let entry = launch.group.as_deref().and_then(WorkerCgroup::entry);
        let (entry, group) = entry.map(|(entry, group)| (entry, group.to_owned())).unzip();
        self.entry = entry;
        let context = agent_store.map(|agent_store| SpawnContext {
            plan: launch.plan.clone(),
            inherited: launch.inherited.clone(),
            hostname: launch.hostname.clone(),
            marker: launch.guardian.marker().to_owned(),
            scratch_dir: launch.guardian.scratch_dir().to_owned(),
            control: self.control.clone(),
            agent_store,
            parked,
            group,
        });
        let (files, reader) = (launch.files.clone(), launch.reader.clone());
        async move {
            let prepared = match context {
                Ok(context) => files
                    .give(move || WorkerGroup::prepare(generation, &assignment, &context, &reader))
                    .await
                    .expect("the thread lives as long as its handles"),
                Err(error) => Err(error),
            };
            LoopEvent::Prepared(generation, Box::new(prepared))
        }
    }

    /// True, once, if the preparation was not cancelled.
    pub(super) fn is_wanted(&mut self) -> bool {
        std::mem::take(&mut self.preparing)
    }

    /// Asks the spawner to start the workers.
    pub(super) fn request(
        &mut self,
        launch: &LaunchContext<'_>,
        generation: Generation,
        workers: Vec<WorkerSpec>,
        cancelled: Arc<AtomicBool>,
    ) -> Result<(), ExitReason> {
        let LaunchContext { plan, .. } = launch;
        let batch = Batch {
            generation,
            command: plan.command.clone(),
            open_files: plan.open_files,
            workers,
            // Native workers are asked to stop, and save first, also where every process of the job gets the signal.
            ignored: if plan.command.native {
                plan.signals.stop.clone()
            } else {
                Vec::new()
            },
            entry: self.entry.take(),
            cancelled,
        };
        if self.spawner.try_send(batch).is_err() {
            let busy = "workers of the last start are still being started";
            return Err(no_pipes(busy));
        }
        Ok(())
    }

    /// Keeps a signal for workers that are being started: one may run already, before its start is reported.
    pub(super) fn defer(&mut self, signal: i32) {
        self.deferred.insert(signal);
    }

    /// The signals kept for the workers, which are all started now.
    pub(super) fn deferred(&mut self) -> BTreeSet<i32> {
        std::mem::take(&mut self.deferred)
    }
}
