//! The calls of operators.

use super::{CALL_TIMEOUT, Client, ClientError};
use crate::rendezvous::{CloseRequest, JobsReply, JobsRequest};

impl Client {
    /// All jobs of the daemon.
    pub async fn jobs(&self) -> Result<JobsReply, ClientError> {
        let mut inner = self.inner.clone();
        let call = inner.jobs(JobsRequest {});
        self.bounded("list the jobs", CALL_TIMEOUT, call).await
    }

    /// Ends a job on all of its nodes.
    pub async fn close(&self, job_id: &str, reason: &str) -> Result<(), ClientError> {
        let request = CloseRequest {
            job_id: job_id.to_owned(),
            reason: reason.to_owned(),
        };
        let mut inner = self.inner.clone();
        let what = format!("close job `{job_id}`");
        self.bounded(&what, CALL_TIMEOUT, inner.close(request))
            .await
            .map(drop)
    }
}
