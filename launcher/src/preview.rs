//! What a plan comes to, without carrying it out.

use std::ffi::OsString;

use ddp_proto::env::{DDP_JOB_MARKER, WorkerEnv};
use ddp_proto::ids::WorldSize;

use crate::environment::{Common, of_worker, threads_per_worker};
use crate::plan::LaunchPlan;
use crate::spawn::{SpawnError, check_program};

/// Why the workers could not be started; none if their program is there.
#[must_use]
pub fn missing_program(plan: &LaunchPlan) -> Option<SpawnError> {
    check_program(&plan.command, std::env::var_os("PATH").as_ref()).err()
}

/// The variables that rank 0 gets beyond those that it inherits, if this node were the only one.
#[must_use]
pub fn environment_of(plan: &LaunchPlan) -> Vec<(String, String)> {
    let mut contract = WorkerEnv::single();
    contract.local_world_size = plan.workers;
    contract.world_size = WorldSize(plan.workers);
    contract.role_world_size = plan.workers;
    contract.role.clone_from(&plan.role);
    contract.max_restarts = plan.max_restarts;
    contract.run_id.clone_from(&plan.job_id);
    contract.master_port = plan.master_port.unwrap_or(0);
    if let Some(address) = &plan.master_addr {
        contract.master_addr.clone_from(address);
    }
    // Decided for each worker: shown, so that nobody misses them.
    contract.error_file = Some(String::new());
    contract.control = Some(String::new());
    contract.run_token = Some(String::new());
    let defaults = of_worker(&common(plan, &[]), &contract);
    let inherited: Vec<(OsString, OsString)> = std::env::vars_os()
        .filter(|(name, _)| defaults.iter().any(|(set, _)| set == name))
        .collect();
    let text = |word: OsString| word.to_string_lossy().into_owned();
    of_worker(&common(plan, &inherited), &contract)
        .into_iter()
        .map(|(name, value)| (text(name), text(value)))
        .filter(|(name, _)| name != DDP_JOB_MARKER)
        .collect()
}

fn common<'a>(plan: &'a LaunchPlan, inherited: &'a [(OsString, OsString)]) -> Common<'a> {
    Common {
        inherited,
        extra: &plan.command.env,
        marker: "",
        threads: threads_per_worker(plan.workers),
        progress_bar: plan.progress_bar,
        virtual_local_rank: plan.virtual_local_rank,
    }
}
