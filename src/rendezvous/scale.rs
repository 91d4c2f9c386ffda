//! Growing: nodes that come to a job that runs.
//!
//! A job of `--nnodes MIN:MAX` that has room takes them in. It waits [`Config::scale_up_wait`](super::Config) for more
//! to come with the first, or until it is full; then all ranks are asked to stop at a step boundary, and the next
//! generation has them all. No restart is spent. Nodes beyond MAX are spares.

use ddp_proto::rendezvous::GenerationOver;

use super::event::Turn;
use super::job::{Job, Phase};
use super::words;

impl Job {
    /// A node is ready that is no member of the running generation.
    pub(super) fn newcomer(&mut self, turn: &mut Turn<'_>) {
        let wait = self.last_call(turn.config.scale_up_wait);
        if let Phase::Running(running) = &mut self.phase {
            running.scale_up.get_or_insert(turn.at.now + wait);
        }
        self.consider_scale_up(turn);
    }

    /// Goes on with the newcomers when their time has come, or forgets them if there is no room.
    pub(super) fn consider_scale_up(&mut self, turn: &mut Turn<'_>) {
        let (_, max) = self.limits();
        let hosts: Vec<String> = self
            .nodes
            .iter()
            .filter(|(incarnation, node)| node.is_ready() && !self.is_member(incarnation))
            .map(|(_, node)| node.join.hostname.clone())
            .collect();
        let members = self.previous.len() as u32;
        let room = max.saturating_sub(members);
        let Phase::Running(running) = &mut self.phase else {
            return;
        };
        // Who has done its part of the work should not have to do it again for a late guest.
        if hosts.is_empty() || room == 0 || !running.succeeded.is_empty() {
            running.scale_up = None;
            return;
        }
        let full = hosts.len() as u32 >= room;
        if !full && running.scale_up.is_none_or(|at| turn.at.now < at) {
            return;
        }
        let max_restarts = running.assignment.max_restarts;
        let taken = hosts.len().min(room as usize);
        let after = members + taken as u32;
        let cause = format!(
            "{} joined; going on with {}",
            words::list(hosts.iter().take(taken).map(String::as_str)),
            words::nodes(after)
        );
        let over = GenerationOver {
            cause,
            restart_count: self.account.spent(),
            max_restarts,
            membership: true,
            at_step_boundary: true,
            ..GenerationOver::default()
        };
        self.regroup(turn, over);
    }

    /// True if the job has room for another node.
    pub(super) fn has_room(&self) -> bool {
        let (_, max) = self.limits();
        (self.previous.len() as u32) < max
    }
}
