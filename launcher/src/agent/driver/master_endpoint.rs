//! The port for `MASTER_PORT`, and the store of the workers' PyTorch that node 0 hosts there.

use std::io;

use ddp_proto::exit;
use ddp_proto::rendezvous::Assignment;

use super::super::context::LaunchContext;
use super::super::machine::ExitReason;
use crate::spawn::master_port::{MasterPort, hint_for};
use crate::tcp_store::{TcpStoreServer, UNUSED_BOUND};

/// The port and the store of this node; new in each generation.
#[derive(Default)]
pub(super) struct MasterEndpoint {
    reserved: Option<MasterPort>,
    /// Why no port is reserved.
    refusal: Option<io::Error>,
    /// On node 0, if the workers' PyTorch uses one; it stays open until the next generation begins.
    store: Option<TcpStoreServer>,
}

impl MasterEndpoint {
    /// Reserves a port, since this node may become node 0. Without a free port, prints why.
    pub(super) fn renew(&mut self, launch: &LaunchContext<'_>) -> Option<u16> {
        // Workers of the last generation must not reach the next store.
        if let Some(last) = self.store.take() {
            last.close();
        }
        // Released before the next one is reserved.
        self.reserved = None;
        let plan = &launch.plan;
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
        match reserved {
            Ok(port) => (self.reserved, self.refusal) = (Some(port), None),
            Err(error) => {
                // If this node is to host the store, `host` says it.
                if !plan.command.agent_store {
                    let hint = hint_for(&error, plan.master_port);
                    launch.console.say(&format!("{what}: {error}{hint}"));
                }
                self.refusal = Some(error);
            }
        }
        self.reserved.as_ref().map(MasterPort::get).or(plan.master_port)
    }

    /// Hosts the store of the workers' PyTorch, if this is node 0. True if no worker of this node needs to do that. Alone,
    /// rank 0 can do it instead, unless the port that was asked for is taken; with several nodes, the others' workers
    /// would look for what they share elsewhere.
    pub(super) fn host(
        &mut self,
        launch: &LaunchContext<'_>,
        assignment: &Assignment,
    ) -> Result<bool, ExitReason> {
        let agent_store = launch.plan.command.agent_store;
        if !agent_store || assignment.node_rank != 0 {
            return Ok(agent_store);
        }
        // The workers of one node get 127.0.0.1, unless another address was asked for.
        let locally = launch.plan.nodes.max == 1 && launch.plan.master_addr.is_none();
        let listening = match &self.reserved {
            Some(port) => port.listen(locally),
            None => Err(self
                .refusal
                .take()
                .unwrap_or_else(|| io::Error::other("it could not be reserved"))),
        };
        let console = &launch.console;
        match listening.and_then(|listener| TcpStoreServer::start(listener, console.clone(), UNUSED_BOUND)) {
            Ok(store) => self.store = Some(store),
            Err(cause) => {
                let (given, port) = (launch.plan.master_port, assignment.master_port);
                let is_taken = cause.kind() == io::ErrorKind::AddrInUse;
                // The next generation would have the same port.
                let is_final = given.is_some() && is_taken;
                let hint = hint_for(&cause, given);
                let error = format!("cannot host PyTorch's store at MASTER_PORT {port}: {cause}{hint}");
                if is_final || assignment.node_count > 1 {
                    // The same code as for the port of the rendezvous.
                    let exit_code = if is_taken {
                        exit::DAEMON_UNREACHABLE
                    } else {
                        exit::INTERNAL
                    };
                    return Err(ExitReason::Broken { exit_code, error });
                }
                console.say(&format!("rank 0 hosts the store: {error}"));
            }
        }
        Ok(self.store.is_some())
    }
}
