//! Who is to blame when a worker ends: the one that failed first, not the first one that is found dead.
//!
//! A rank that loses its peer may be gone before the kernel has taken down the peer itself. A death by a signal is
//! believed at once. The agent waits for the last words of a plain exit first; where they say "another rank failed",
//! that one is waited for, for a moment.

use std::time::Duration;

use ddp_proto::ids::LocalRank;

use crate::supervise::ending::Ending;

/// How long a worker that names another rank as the cause is not blamed: the other one's end, or the daemon's word,
/// arrives within milliseconds if it comes at all. A process that is killed while it writes to a slow disk takes longer.
pub(super) const CULPRIT_WAIT: Duration = Duration::from_secs(1);

/// A worker that failed while its generation was running.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Suspect {
    pub(super) local_rank: LocalRank,
    ending: Ending,
    /// Its words say that it is a consequence; none until they arrive.
    consequence: Option<bool>,
}

/// Workers that exited with an error, while it is not known whether they are the cause or a consequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Suspects(Vec<Suspect>);

/// What follows from a suspect's last words.
pub(super) enum Judgement {
    Blame(Suspect),
    /// Wait for the cause, for [`CULPRIT_WAIT`].
    Wait,
    /// Nothing new.
    Open,
}

impl Suspect {
    pub(super) fn new(local_rank: LocalRank, ending: Ending) -> Self {
        Self {
            local_rank,
            ending,
            consequence: None,
        }
    }

    /// One that was killed is no consequence of another rank's failure.
    pub(super) fn is_certain(&self) -> bool {
        matches!(self.ending, Ending::Signal { .. })
    }

    /// Why the generation is over, if this worker is the cause.
    pub(super) fn as_cause(&self, first_rank: u32, hostname: &str) -> String {
        let rank = first_rank + self.local_rank.0;
        let said = match self.consequence {
            Some(true) => ", reporting that another rank had failed",
            _ => "",
        };
        format!("rank {rank} (node `{hostname}`) {}{said}", self.ending)
    }
}

impl Suspects {
    pub(super) fn add(&mut self, suspect: Suspect) {
        self.0.push(suspect);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The last words of a suspect are there; no other worker may still turn out to be the cause if they `are_gone`.
    pub(super) fn on_words(&mut self, local_rank: LocalRank, consequence: bool, are_gone: bool) -> Judgement {
        let Some(suspect) = self.0.iter_mut().find(|s| s.local_rank == local_rank) else {
            return Judgement::Open;
        };
        suspect.consequence = Some(consequence);
        if !consequence {
            return Judgement::Blame(suspect.clone());
        }
        if are_gone {
            return self.judge().map_or(Judgement::Open, Judgement::Blame);
        }
        let consequences = self.0.iter().filter(|s| s.consequence == Some(true));
        if consequences.count() == 1 {
            Judgement::Wait
        } else {
            Judgement::Open
        }
    }

    /// All workers of this node have ended, some with an error: when all last words are here, the first one is blamed.
    /// The daemon may blame a rank of another node.
    pub(super) fn judge(&self) -> Option<Suspect> {
        let all_have_spoken = self.0.iter().all(|s| s.consequence.is_some());
        all_have_spoken.then(|| self.first()).flatten()
    }

    /// The one to blame if no better suspect is found.
    pub(super) fn first(&self) -> Option<Suspect> {
        self.0.first().cloned()
    }
}
