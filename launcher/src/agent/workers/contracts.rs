//! What the daemon's assignment means for each worker of this node.

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{Generation, GlobalRank, LocalRank, NodeRank, WorldSize};
use ddp_proto::rendezvous::{Assignment, NodeAssignment};

use super::{PrepareError, Site};

/// Role of a node whose agent is too old to tell one.
const DEFAULT_ROLE: &str = "default";

/// The place of each of this node's workers.
pub(super) fn contracts_of(
    generation: Generation,
    assignment: &Assignment,
    site: &Site<'_>,
) -> Result<Vec<WorkerEnv>, PrepareError> {
    let nonsense = |what: String| PrepareError::Assignment(what);
    let node = assignment
        .nodes
        .get(assignment.node_rank as usize)
        .ok_or_else(|| nonsense(format!("it has no node {}", assignment.node_rank)))?;
    let world_size = assignment.nodes.iter().map(|node| node.workers).sum();
    let master_port = u16::try_from(assignment.master_port)
        .map_err(|_| nonsense(format!("{} is not a port", assignment.master_port)))?;
    let of_role = |nodes: &[NodeAssignment]| -> u32 {
        let same = nodes.iter().filter(|other| other.role == node.role);
        same.map(|node| node.workers).sum()
    };
    let (role_first, role_world_size) = (
        of_role(&assignment.nodes[..assignment.node_rank as usize]),
        of_role(&assignment.nodes),
    );
    let role = if node.role.is_empty() {
        DEFAULT_ROLE
    } else {
        &node.role
    };
    let contract = |local_rank: u32| WorkerEnv {
        rank: GlobalRank(node.first_rank + local_rank),
        local_rank: LocalRank(local_rank),
        node_rank: NodeRank(assignment.node_rank),
        world_size: WorldSize(world_size),
        local_world_size: node.workers,
        node_count: assignment.nodes.len() as u32,
        role: role.into(),
        role_rank: role_first + local_rank,
        role_world_size,
        master_addr: site.master_addr.unwrap_or(&assignment.master_addr).to_owned(),
        master_port,
        restart_count: assignment.restart_count,
        max_restarts: assignment.max_restarts,
        run_id: site.job_id.to_owned(),
        agent_store: site.agent_store,
        run_token: Some(assignment.run_token.clone()).filter(|token| !token.is_empty()),
        error_file: None,
        generation,
        control: Some(site.control.to_owned()),
        worker_ports: site.worker_ports,
    };
    Ok((0..node.workers).map(contract).collect())
}
