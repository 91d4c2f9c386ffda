//! The workers of this node, as far as decisions depend on them: who runs, who is parked, who has ended, and whether more
//! are started.

use std::collections::BTreeMap;

use ddp_proto::ids::LocalRank;

use crate::supervise::ending::Ending;

#[derive(Clone, Debug, PartialEq)]
enum Member {
    Waiting,
    Running,
    /// It has left its generation, and waits for the next assignment.
    Parked,
    Ended(Ending),
}

/// All of a generation, by local rank.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Members {
    by_rank: BTreeMap<LocalRank, Member>,
    /// More may be started. It can outlast the generation.
    spawning: bool,
    /// Some were parked before this generation.
    has_kept: bool,
}

impl Members {
    /// Those of the next generation, `count`: none has started, but some may be parked.
    pub(super) fn assign(&mut self, count: u32) {
        self.forget();
        for local_rank in (0..count).map(LocalRank) {
            self.by_rank.entry(local_rank).or_insert(Member::Waiting);
        }
        (self.spawning, self.has_kept) = (true, false);
    }

    /// False if there is no such worker.
    pub(super) fn spawned(&mut self, local_rank: LocalRank) -> bool {
        self.has_kept |= self.is_parked(local_rank);
        let member = self.by_rank.get_mut(&local_rank);
        member.map(|member| *member = Member::Running).is_some()
    }

    /// No more will be started: those that were not are none of them.
    pub(super) fn spawn_ended(&mut self) {
        self.spawning = false;
        self.by_rank.retain(|_, member| *member != Member::Waiting);
    }

    pub(super) fn parked(&mut self, local_rank: LocalRank) {
        if let Some(member @ Member::Running) = self.by_rank.get_mut(&local_rank) {
            *member = Member::Parked;
        }
    }

    /// No generation follows for those that are parked. False if none is.
    pub(super) fn unpark(&mut self) -> bool {
        let mut any = false;
        for member in self.by_rank.values_mut().filter(|member| member.is_parked()) {
            (*member, any) = (Member::Running, true);
        }
        any
    }

    pub(super) fn is_parked(&self, local_rank: LocalRank) -> bool {
        self.by_rank.get(&local_rank).is_some_and(Member::is_parked)
    }

    pub(super) fn ended(&mut self, local_rank: LocalRank, ending: Ending) {
        if let Some(member) = self.by_rank.get_mut(&local_rank) {
            *member = Member::Ended(ending);
        }
    }

    /// Nothing more is known of them, but who is parked.
    pub(super) fn forget(&mut self) {
        self.by_rank.retain(|_, member| member.is_parked());
    }

    /// Some are processes of an earlier generation, which greet the agent again in moments.
    pub(super) fn has_kept(&self) -> bool {
        self.has_kept
    }

    pub(super) fn is_spawning(&self) -> bool {
        self.spawning
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_rank.is_empty()
    }

    /// All have ended or are parked, and no more will come.
    pub(super) fn are_gone(&self) -> bool {
        let is_gone = |member: &Member| matches!(member, Member::Ended(_) | Member::Parked);
        !self.spawning && self.by_rank.values().all(is_gone)
    }

    /// Those that ended with 0: all of them, if there were any.
    pub(super) fn all_succeeded(&self) -> bool {
        !self.is_empty() && self.by_rank.values().all(Member::has_succeeded)
    }

    pub(super) fn any_succeeded(&self) -> bool {
        self.by_rank.values().any(Member::has_succeeded)
    }
}

impl Member {
    fn is_parked(&self) -> bool {
        *self == Self::Parked
    }

    fn has_succeeded(&self) -> bool {
        matches!(self, Self::Ended(ending) if ending.is_success())
    }
}
