//! What the daemon's ledger keeps of a job. The last [`Record`] of a job counts. Each assignment makes one, and so does its
//! end; the ledger writes it before the daemon sends anything of the same event.

use serde::{Deserialize, Serialize};

use super::policy::Account;
use super::ranks::Member;

/// A job, as it is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub(super) job: String,
    /// The highest one that was assigned; 0: none was.
    pub(super) generation: u64,
    pub(super) assignment_id: String,
    /// Nodes of that generation, in order of their ranks.
    pub(super) members: Vec<Member>,
    pub(super) run_token: String,
    pub(super) attempt: u32,
    /// What is left of the restarts.
    pub(super) account: Account,
    /// Shows who has the job's token; empty where jobs have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) token_proof: Vec<u8>,
    pub(super) stage: Stage,
}

/// How far the generation has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stage {
    /// Its nodes run.
    Running,
    /// It is over, and another one follows.
    Ended,
    /// So is the generation, and no node has come for another one.
    Abandoned,
    /// So is the job.
    JobOver { exit_code: i32, reason: String },
    /// The daemon has refused to go on with the job.
    Refused { code: i32, reason: String },
}

impl Record {
    /// Which job it is.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// The job has ended.
    pub(super) fn is_final(&self) -> bool {
        !matches!(self.stage, Stage::Running | Stage::Ended)
    }
}
