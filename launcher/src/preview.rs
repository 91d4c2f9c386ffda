//! What a plan comes to, without carrying it out.

use std::ffi::OsString;

use ddp_proto::env::{DDP_JOB_MARKER, WorkerEnv};
use ddp_proto::ids::WorldSize;

use crate::plan::LaunchPlan;
use crate::spawn::environment::{Common, is_scrubbed, of_worker};
use crate::spawn::program::{SpawnError, check_program};

/// Why the workers could not be started; none if their program is there.
pub fn missing_program(plan: &LaunchPlan) -> Option<SpawnError> {
    check_program(&plan.command.program, std::env::var_os("PATH").as_ref()).err()
}

/// A variable of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its value, as well as that can be shown.
    pub value: String,
    /// The launcher has the same one, and passes it on.
    pub inherited: bool,
}

/// The variables of rank 0 that the launcher has a say in, if this node were the only one. `get_env` tells what the
/// launcher's own environment has.
pub fn environment_of(plan: &LaunchPlan, get_env: impl Fn(&str) -> Option<String>) -> Vec<Variable> {
    let mut contract = WorkerEnv::single();
    contract.local_world_size = plan.workers;
    contract.world_size = WorldSize(plan.workers);
    contract.role_world_size = plan.workers;
    contract.role.clone_from(&plan.role);
    contract.max_restarts = plan.max_restarts;
    contract.agent_store = plan.command.agent_store;
    contract.run_id.clone_from(&plan.run_id);
    contract.master_port = plan.master_port.unwrap_or(0);
    contract.worker_ports = plan.worker_ports;
    if let Some(address) = &plan.master_addr {
        contract.master_addr.clone_from(address);
    }
    // Decided for each worker, and shown so that they are not missed.
    contract.error_file = Some(String::new());
    contract.control = Some(String::new());
    contract.run_token = Some(String::new());
    let defaults = of_worker(&Common::new(plan, &[], ""), &contract);
    let inherited: Vec<(OsString, OsString)> = defaults
        .into_iter()
        .filter_map(|(name, _)| Some((name.clone(), get_env(name.to_str()?)?.into())))
        .collect();
    let text = |word: OsString| word.to_string_lossy().into_owned();
    of_worker(&Common::new(plan, &inherited, ""), &contract)
        .into_iter()
        .filter(|(name, _)| name != DDP_JOB_MARKER)
        .map(|(name, value)| Variable {
            inherited: !is_scrubbed(&name) && inherited.iter().any(|own| (&own.0, &own.1) == (&name, &value)),
            name: text(name),
            value: text(value),
        })
        .collect()
}
