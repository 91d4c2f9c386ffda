//! The workers of this node, as far as decisions depend on them: who runs, who has ended, and whether more are started.

use ddp_proto::ids::LocalRank;

use crate::supervise::ending::Ending;

#[derive(Clone, Debug, PartialEq)]
enum Member {
    Waiting,
    Running,
    Ended(Ending),
}

/// All of a generation, by local rank.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Members {
    members: Vec<Member>,
    /// More may be started. It can outlast the generation.
    spawning: bool,
}

impl Members {
    /// `count` workers that have not started.
    pub(super) fn waiting(count: u32) -> Self {
        Self {
            members: vec![Member::Waiting; count as usize],
            spawning: true,
        }
    }

    /// False if there is no such worker.
    pub(super) fn spawned(&mut self, local_rank: LocalRank) -> bool {
        let member = self.members.get_mut(local_rank.0 as usize);
        member.map(|member| *member = Member::Running).is_some()
    }

    /// No more will be started: those that were not are none of them.
    pub(super) fn spawn_ended(&mut self) {
        self.spawning = false;
        self.members.retain(|member| *member != Member::Waiting);
    }

    pub(super) fn ended(&mut self, local_rank: LocalRank, ending: Ending) {
        if let Some(member) = self.members.get_mut(local_rank.0 as usize) {
            *member = Member::Ended(ending);
        }
    }

    /// Nothing more is known of them.
    pub(super) fn forget(&mut self) {
        self.members.clear();
    }

    pub(super) fn is_spawning(&self) -> bool {
        self.spawning
    }

    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// All have ended, and no more will come.
    pub(super) fn are_gone(&self) -> bool {
        let has_ended = |member: &Member| matches!(member, Member::Ended(_));
        !self.spawning && self.members.iter().all(has_ended)
    }

    /// Those that ended with 0: all of them, if there were any.
    pub(super) fn all_succeeded(&self) -> bool {
        !self.is_empty() && self.members.iter().all(Member::has_succeeded)
    }

    pub(super) fn any_succeeded(&self) -> bool {
        self.members.iter().any(Member::has_succeeded)
    }
}

impl Member {
    fn has_succeeded(&self) -> bool {
        matches!(self, Self::Ended(ending) if ending.is_success())
    }
}
