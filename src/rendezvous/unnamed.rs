//! Jobs without a name (`--rdzv-id`).
//!
//! The name of such a job follows from what its nodes agree on and the arguments of its program: two of them at one
//! daemon are two jobs, unless they are alike in everything. Nodes that were meant to be one job but differ do not
//! meet, so each is told that the other exists. A daemon inside a job's own `ddp-run` has one job only, and takes all
//! of them for it.

use std::collections::BTreeMap;

use ddp_proto::rendezvous::Join;

use super::event::Turn;
use super::job::Job;
use super::words;

/// Name of a job whose nodes were given none, as with torchrun; more follows it.
pub const DEFAULT_JOB_ID: &str = "none";

/// Digits of the signature behind [`DEFAULT_JOB_ID`].
const DIGITS: usize = 8;

/// Name of a job of several nodes without one, from a hash of what it runs: the same on all nodes that were started
/// alike, without their having spoken.
pub fn unnamed_job_id(hash: &str) -> String {
    format!("{DEFAULT_JOB_ID}-{}", super::kv::clip(hash, DIGITS))
}

/// True for names that [`unnamed_job_id`] makes.
pub(super) fn is_unnamed(job_id: &str) -> bool {
    job_id
        .strip_prefix(DEFAULT_JOB_ID)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Another job without a name that waits too: the two may be meant as one.
#[derive(Debug)]
pub(super) struct Lookalike {
    id: String,
    words: String,
}

impl Lookalike {
    fn new(id: &str, here: &Join, there: &Join) -> Self {
        Self {
            id: id.to_owned(),
            words: words::lookalike(id, here, there),
        }
    }

    /// Both are the same job.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// What people read.
    pub(super) fn words(&self) -> &str {
        &self.words
    }
}

/// Tells the nodes of jobs without a name that wait for their first generation of each other, when a node has come to
/// `job_id`.
pub(super) fn point_out(turn: &mut Turn<'_>, jobs: &mut BTreeMap<String, Job>, job_id: &str, join: &Join) {
    if !is_unnamed(job_id) {
        return;
    }
    let mut seen = None;
    for (id, job) in jobs.iter_mut().filter(|(id, _)| *id != job_id) {
        if let Some(other) = job.seeks_its_nodes().cloned() {
            seen.get_or_insert_with(|| Lookalike::new(id, join, &other));
            job.meet(turn, Lookalike::new(job_id, &other, join));
        }
    }
    if let Some(lookalike) = seen
        && let Some(job) = jobs.get_mut(job_id).filter(|job| job.seeks_its_nodes().is_some())
    {
        job.meet(turn, lookalike);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_from_signatures() {
        assert_eq!(unnamed_job_id("0123456789abcdef"), "none-01234567");
        for (id, expected) in [
            ("none-01234567", true),
            ("none", true),
            ("nonesuch", false),
            ("job", false),
        ] {
            assert_eq!(is_unnamed(id), expected, "{id}");
        }
    }
}
