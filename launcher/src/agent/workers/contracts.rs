//! What the daemon's assignment means for each worker of this node.

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{Generation, GlobalRank, LocalRank, NodeRank, WorldSize};
use ddp_proto::rendezvous::{Assignment, NodeAssignment};

use super::Site;

/// Role of a node whose agent is too old to tell one.
const DEFAULT_ROLE: &str = "default";

/// The place of each of this node's workers, in an assignment that the machine has accepted.
pub(super) fn contracts_of(generation: Generation, assignment: &Assignment, site: &Site) -> Vec<WorkerEnv> {
    let node = &assignment.nodes[assignment.node_rank as usize];
    let world_size = assignment.nodes.iter().map(|node| node.workers).sum();
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
        master_addr: site
            .plan
            .master_addr
            .as_ref()
            .unwrap_or(&assignment.master_addr)
            .clone(),
        master_port: assignment.master_port as u16,
        restart_count: assignment.restart_count,
        max_restarts: assignment.max_restarts,
        run_id: site.plan.job_id.clone(),
        agent_store: site.agent_store,
        run_token: Some(assignment.run_token.clone()).filter(|token| !token.is_empty()),
        error_file: None,
        generation,
        control: Some(site.control.clone()),
        worker_ports: site.plan.worker_ports,
    };
    (0..node.workers).map(contract).collect()
}
