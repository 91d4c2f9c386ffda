//! What the guardian tells the daemon when the launcher died and the workers are gone: other nodes may take their places.

use std::time::Duration;

use ddp_proto::client::{Access, AgentIdentity, Client};
use ddp_proto::ids::{Generation, NodeId};
use ddp_proto::rendezvous::Leave;
use ddp_proto::trust::token::Token;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// A daemon that does not answer within this time learns of the end by itself.
const BOUND: Duration = Duration::from_secs(3);

/// Where the daemon is, and which node it knows.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct DeathNotice {
    pub(crate) endpoint: String,
    /// None on a Unix socket, or with `--insecure`.
    pub(crate) token: Option<String>,
    pub(crate) job_id: String,
    pub(crate) incarnation: String,
}

impl DeathNotice {
    /// Tells the daemon, from a process without threads.
    pub(crate) fn send(self) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        if let Ok(runtime) = runtime {
            // The daemon waits for the end of the workers where it is not told.
            let _ = runtime.block_on(tokio::time::timeout(BOUND, self.deliver()));
        }
    }

    async fn deliver(self) -> Option<()> {
        let access = match self.token {
            Some(token) => Access::Token(Token::parse(&token).ok()?),
            None => Access::Open,
        };
        let client = Client::connect(&self.endpoint, &access, Instant::now() + BOUND)
            .await
            .ok()?;
        let identity = AgentIdentity {
            job_id: self.job_id,
            incarnation: NodeId(self.incarnation),
        };
        let mut attempts = client.attempts(BOUND);
        let stream = client.agent_stream(identity, &mut attempts).await.ok()?;
        let leave = Leave {
            launcher_died: true,
            ..Leave::default()
        };
        stream
            .leave(Generation(0), leave, Instant::now() + BOUND)
            .await
            .then_some(())
    }
}
