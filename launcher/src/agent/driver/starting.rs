//! The beginning of a generation: joining, and starting the workers.

use std::sync::Arc;

use ddp_proto::ids::Generation;
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::{Assignment, Join};

use super::super::workers::{Crew, PrepareError, Site};
use super::{Driver, PROTOCOL};
use crate::cgroup::WorkerGroup;
use crate::control::{Place, Store};
use crate::environment::{Common, threads_per_worker};
use crate::event_log::Happening;
use crate::logs;
use crate::master_port::MasterPort;
use crate::spawn::Batch;

impl Driver<'_> {
    pub(super) fn join(&mut self, generation: Generation) {
        // Released before the next one is reserved.
        self.master_port = None;
        let asked = self.plan.master_port;
        self.master_port = asked
            .map_or_else(MasterPort::reserve, MasterPort::reserve_this)
            .inspect_err(|error| {
                self.console.say(&match asked {
                    Some(port) => format!(
                        "port {port} of `--master-port` cannot be reserved; if rank 0 runs here, it may not get it \
                         either: {error}"
                    ),
                    None => format!("no port can be reserved for MASTER_PORT: {error}"),
                });
            })
            .ok();
        let port = self.master_port.as_ref().map(MasterPort::get).or(asked);
        self.event_log.put(Happening::Joined {
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
            free_attempt: self.plan.log_dir.as_deref().map_or(0, logs::free_attempt),
            ..Join::default()
        };
        self.link.send(generation, Report::Join(join));
    }

    pub(super) fn spawn(
        &mut self,
        generation: Generation,
        assignment: &Assignment,
    ) -> Result<(), PrepareError> {
        let entrance = self.group.as_deref().and_then(WorkerGroup::entrance);
        let (door, group) = entrance.unzip();
        let site = Site {
            common: Common {
                inherited: &self.inherited,
                extra: &self.plan.command.env,
                marker: self.guardian.marker(),
                threads: threads_per_worker(self.plan.workers),
                progress_bar: self.plan.progress_bar,
                virtual_local_rank: self.plan.virtual_local_rank,
            },
            log_dir: self.plan.log_dir.as_deref(),
            scratch_dir: self.guardian.scratch_dir(),
            job_id: &self.plan.job_id,
            control: self.control.address(),
            output: &self.plan.output,
            master_addr: self.plan.master_addr.as_deref(),
            cores: &self.plan.cores,
            group,
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
            generation,
            command: self.plan.command.clone(),
            workers: prepared.specs,
            door,
            cancelled: self.crew.cancelled.clone(),
        };
        if !self.spawner.request(batch) {
            let busy = "workers of the last generation are still being started";
            return Err(PrepareError::Pipe(std::io::Error::other(busy)));
        }
        Ok(())
    }
}
