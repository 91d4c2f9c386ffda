//! Who is to blame when a worker ends: the one that failed first, not the first one that is found dead.
//!
//! A rank that loses its peer may be gone before the kernel has taken down the peer itself. A death by a signal is
//! believed at once. The agent waits for the last words of a plain exit first; where they say "another rank failed",
//! that one is waited for, for a moment.

use std::time::Duration;

use ddp_proto::ids::{Generation, LocalRank};

use super::event::Effect;
use super::machine::{Machine, Phase, Then, Worker};
use crate::supervise::ending::Ending;

/// How long a worker that names another rank as the cause is not blamed: the other one's end, or the daemon's word,
/// arrives within milliseconds if it comes at all.
pub(super) const CULPRIT_WAIT: Duration = Duration::from_millis(300);

/// A worker that exited with an error.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Suspect {
    local_rank: LocalRank,
    ending: Ending,
    /// Its words say that it is a consequence; none until they arrive.
    consequence: Option<bool>,
}

impl Machine {
    /// A worker failed while the generation was running.
    pub(super) fn on_failed(&mut self, local_rank: LocalRank, ending: Ending) -> Vec<Effect> {
        let suspect = Suspect {
            local_rank,
            ending,
            consequence: None,
        };
        if let Ending::Signal { .. } = ending {
            return self.blame(&suspect);
        }
        self.suspects.push(suspect);
        // The generation is over, whichever rank is the cause.
        vec![Effect::CancelSpawn, Effect::DrainControl(local_rank)]
    }

    /// The last words of a suspect are there.
    pub(super) fn on_control_drained(
        &mut self,
        generation: Generation,
        local_rank: LocalRank,
        consequence: bool,
    ) -> Vec<Effect> {
        if generation != self.generation || self.phase != Phase::Running {
            return Vec::new();
        }
        let Some(suspect) = self.suspects.iter_mut().find(|s| s.local_rank == local_rank) else {
            return Vec::new();
        };
        suspect.consequence = Some(consequence);
        if !consequence {
            let suspect = suspect.clone();
            return self.blame(&suspect);
        }
        let alone = self
            .workers
            .iter()
            .all(|worker| matches!(worker, Worker::Ended(_)));
        if alone && !self.spawning {
            return self.judge_suspects();
        }
        let first = self
            .suspects
            .iter()
            .filter(|s| s.consequence == Some(true))
            .count()
            == 1;
        if first {
            vec![Effect::Arm(CULPRIT_WAIT)]
        } else {
            Vec::new()
        }
    }

    /// All workers of this node have ended, some with an error: when all last words are here, the first one is blamed.
    /// It is for the daemon to know better, if another node does.
    pub(super) fn judge_suspects(&mut self) -> Vec<Effect> {
        if self.suspects.iter().any(|s| s.consequence.is_none()) {
            return Vec::new();
        }
        self.blame_first_suspect()
    }

    /// No better suspect was found.
    pub(super) fn blame_first_suspect(&mut self) -> Vec<Effect> {
        match self.suspects.first().cloned() {
            Some(suspect) => self.blame(&suspect),
            None => Vec::new(),
        }
    }

    /// Stops the others, tells them why, and reports.
    fn blame(&mut self, suspect: &Suspect) -> Vec<Effect> {
        self.suspects.clear();
        let rank = self.first_rank + suspect.local_rank.0;
        let mut cause = format!("rank {rank} (node `{}`) {}", self.rules.hostname, suspect.ending);
        if suspect.consequence == Some(true) {
            cause.push_str(", reporting that another rank had failed");
        }
        let mut effects = self.stop(&cause, Then::AskDaemon);
        effects.insert(1, Effect::Describe(suspect.local_rank));
        effects
    }
}
