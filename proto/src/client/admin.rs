//! The calls of operators, and the token that goes with them.

use tonic::metadata::{Ascii, MetadataValue};

use super::{CALL_TIMEOUT, Client, ClientError};
use crate::rendezvous::{CloseRequest, DrainRequest, JobsReply, JobsRequest};

/// What an operator shows to a daemon. Debugging shows nothing of it.
#[derive(Clone, Debug)]
pub struct AdminToken(MetadataValue<Ascii>);

impl AdminToken {
    /// None if the text cannot go over the wire: it has other characters than visible ASCII.
    pub fn new(token: &str) -> Option<Self> {
        let is_visible = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        let mut value: MetadataValue<Ascii> =
            format!("Bearer {token}").parse().ok().filter(|_| is_visible)?;
        value.set_sensitive(true);
        Some(Self(value))
    }
}

impl Client {
    /// The same connection, for an operator with this token; without one, the daemon may let its own machine.
    #[must_use]
    pub fn with_admin_token(self, admin_token: Option<AdminToken>) -> Self {
        Self { admin_token, ..self }
    }

    /// All jobs of the daemon.
    pub async fn jobs(&self) -> Result<JobsReply, ClientError> {
        let mut inner = self.inner.clone();
        let call = inner.jobs(self.of_admin(JobsRequest {}));
        self.bounded("list the jobs", CALL_TIMEOUT, call).await
    }

    /// Ends a job on all of its nodes.
    pub async fn close(&self, job_id: &str, reason: &str) -> Result<(), ClientError> {
        let request = self.of_admin(CloseRequest {
            job_id: job_id.to_owned(),
            reason: reason.to_owned(),
        });
        let mut inner = self.inner.clone();
        let what = format!("close job `{job_id}`");
        self.bounded(&what, CALL_TIMEOUT, inner.close(request))
            .await
            .map(drop)
    }

    /// Lets the daemon take no new jobs, and end when those that it has are over: how many these are.
    pub async fn drain(&self) -> Result<u32, ClientError> {
        let mut inner = self.inner.clone();
        let call = inner.drain(self.of_admin(DrainRequest {}));
        let reply = self.bounded("begin a drain", CALL_TIMEOUT, call).await;
        Ok(reply.map_err(ClientError::of_operator)?.jobs)
    }

    pub(super) fn of_admin<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if let Some(AdminToken(token)) = &self.admin_token {
            request.metadata_mut().insert("authorization", token.clone());
        }
        request
    }
}
