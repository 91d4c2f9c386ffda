//! What the workers of a generation are started from: the daemon's assignment, and where this node is.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{Generation, GlobalRank, LocalRank, NodeRank, WorldSize};
use ddp_proto::rendezvous::Assignment;
use nix::sched::CpuSet;

use crate::output::logs::{LogError, WorkerFiles, claim_attempt, open_filtered};
use crate::output::reader::Duplicate;
use crate::output::streams::Stream;
use crate::plan::{BoundPlan, CoreSet};
use crate::spawn::environment::{self, Common};

/// What is needed to prepare workers, beyond the assignment.
pub(in crate::agent) struct SpawnContext {
    pub(in crate::agent) plan: Arc<BoundPlan>,
    /// Environment of the launcher.
    pub(in crate::agent) inherited: Arc<[(OsString, OsString)]>,
    /// Of this node.
    pub(in crate::agent) hostname: String,
    /// By which processes are found that workers leave behind.
    pub(in crate::agent) marker: String,
    pub(in crate::agent) scratch_dir: PathBuf,
    /// Address of the control socket.
    pub(in crate::agent) control: String,
    /// The agent of node 0 holds MASTER_PORT, and hosts the store there.
    pub(in crate::agent) agent_store: bool,
    /// The files of workers that live on from the last generation.
    pub(in crate::agent) parked: BTreeMap<LocalRank, WorkerFiles>,
    /// The control group that these workers are born in, if there is one.
    pub(in crate::agent) group: Option<PathBuf>,
}

impl SpawnContext {
    /// The place of each of this node's workers, in an assignment that the machine has accepted.
    pub(super) fn contracts(&self, generation: Generation, assignment: &Assignment) -> Vec<WorkerEnv> {
        let node = assignment.own.clone().unwrap_or_default();
        let master_addr = self.plan.master_addr.as_ref().unwrap_or(&assignment.master_addr);
        let contract = |local_rank: u32| WorkerEnv {
            rank: GlobalRank(node.first_rank + local_rank),
            local_rank: LocalRank(local_rank),
            node_rank: NodeRank(assignment.node_rank),
            world_size: WorldSize(assignment.world_size),
            local_world_size: node.workers,
            node_count: assignment.node_count,
            role: node.role.clone(),
            role_rank: assignment.role_first_rank.saturating_add(local_rank),
            role_world_size: assignment.role_world_size,
            master_addr: master_addr.clone(),
            master_port: assignment.master_port as u16,
            restart_count: assignment.restart_count,
            max_restarts: assignment.max_restarts,
            run_id: self.plan.run_id.clone(),
            agent_store: self.agent_store,
            run_token: Some(assignment.run_token.clone()).filter(|token| !token.is_empty()),
            error_file: None,
            generation,
            control: Some(self.control.clone()),
            worker_ports: self.plan.worker_ports,
        };
        (0..node.workers).map(contract).collect()
    }

    /// The whole environment of one worker.
    pub(super) fn environment_of(
        &self,
        contract: &WorkerEnv,
        assignment: &Assignment,
    ) -> Vec<(OsString, OsString)> {
        let own = assignment.own.as_ref().filter(|_| assignment.node_count > 1);
        let common = Common {
            node_addr: own.map(|own| own.addr.as_str()),
            ..Common::new(&self.plan, &self.inherited, &self.marker)
        };
        environment::of_worker(&common, contract)
    }

    /// Where filtered lines of a stream go, if there are filters and a place for log files.
    pub(super) fn duplicate(&self, stream: Stream, attempt: u32) -> Result<Option<Duplicate>, LogError> {
        let output = &self.plan.output;
        let words = [&output.stdout_filters, &output.stderr_filters][stream as usize];
        let (Some(log_dir), false) = (&self.plan.log_dir, words.is_empty()) else {
            return Ok(None);
        };
        Ok(Some(Duplicate {
            words: words.clone(),
            file: Arc::new(open_filtered(log_dir, attempt, stream)?),
        }))
    }

    /// The number of the folder that takes the log files of a generation.
    pub(super) fn attempt(&self, generation: Generation, assignment: &Assignment) -> u32 {
        let attempt = assignment.attempt;
        let run = format!("{}-{}", assignment.run_token, generation.0);
        self.plan
            .log_dir
            .as_deref()
            .map_or(attempt, |log_dir| claim_attempt(log_dir, attempt, &run))
    }

    /// The cores of one worker as the system takes them.
    pub(super) fn cores_of(&self, local_rank: LocalRank) -> Option<CpuSet> {
        let CoreSet(numbers) = self.plan.cores.get(local_rank.0 as usize)?;
        let mut set = CpuSet::new();
        for number in numbers {
            // A number beyond the system's largest set is on no machine.
            let _ = set.set(*number);
        }
        Some(set)
    }
}
