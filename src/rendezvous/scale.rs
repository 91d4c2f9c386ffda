//! Growing and shrinking: nodes that come to a job that runs, and nodes that leave it.
//!
//! A job of `--nnodes MIN:MAX` that has room takes them in. It waits [`Config::scale_up_wait`](super::Config) for more
//! to come with the first, or until it is full; then all ranks are asked to stop at a step boundary, and the next
//! generation has them all. No restart is spent. Nodes beyond MAX are spares, and so are those with which the workers
//! could not go on ([`Heartbeat`](ddp_proto::rendezvous::Heartbeat)`.ranks_divide`, `.ranks_multiple_of`).
//!
//! A node that is stopped by a signal leaves in the same way: at a step boundary, for no restart, if MIN nodes are left
//! without it, with which the workers can go on. Else the job is over when its workers are gone. So it is when a node
//! is stopped while others are to come back to a daemon that was restarted: which nodes are left is not known then.
//!
//! Nodes that have succeeded run their workers again with the others, as when a node is lost.

use ddp_proto::rendezvous::GenerationOver;

use super::config::Config;
use super::event::Turn;
use super::job::{Job, Phase};
use super::ranks::{self, Candidate};
use super::size::RankLimits;
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

    /// Goes on with the newcomers when their time has come, or forgets them if they make no larger generation.
    pub(super) fn consider_scale_up(&mut self, turn: &mut Turn<'_>) {
        let taken = self.growth();
        let after = self.previous.len() + taken.len();
        let is_full = after >= self.size_limits().max;
        let hosts = words::list(taken.iter().map(|c| c.hostname.as_str()));
        let Phase::Running(running) = &mut self.phase else {
            return;
        };
        if taken.is_empty() {
            running.scale_up = None;
            return;
        }
        if !is_full && running.scale_up.is_none_or(|at| turn.at.now < at) {
            return;
        }
        let cause = format!("{hosts} joined; continuing with {}", words::nodes(after as u32));
        self.change_nodes(turn, cause);
    }

    /// A signal stops a node, whose workers stop at a step boundary: so do the others, if they can go on without it.
    pub(super) fn node_leaving(
        &mut self,
        turn: &mut Turn<'_>,
        incarnation: &str,
        generation: u64,
        signal: i32,
    ) {
        let is_current = generation == self.generation && self.is_member(incarnation);
        if !is_current || !self.can_go_on_without(turn.config, incarnation) {
            // Its `Leave` decides.
            return self.ignore(turn, incarnation, generation, "the notice to leave");
        }
        let cause = self.left_words(incarnation, signal);
        self.change_nodes(turn, cause);
    }

    /// A node that was stopped by a signal is gone, and the others go on without it.
    pub(super) fn node_left(&mut self, turn: &mut Turn<'_>, incarnation: &str, signal: i32) {
        let cause = self.left_words(incarnation, signal);
        if self.is_member(incarnation) && !self.has_succeeded(incarnation) {
            // It had no workers to stop, or its word that it would leave was lost.
            self.break_up(turn, cause);
        } else {
            turn.decided(format!("job `{}`: {cause}", self.id));
        }
        if let Some(rank) = self.rank_of(incarnation) {
            self.previous[rank as usize].has_left = true;
        }
    }

    /// True if enough nodes are there without this one, in a number that the workers can go on with. A node whose
    /// connection is broken is there until its lease runs out.
    pub(super) fn can_go_on_without(&self, config: &Config, incarnation: &str) -> bool {
        // As long as nodes are to come back to a daemon that was restarted, it is not known who is left. The job ends
        // then, rather than wait for nodes that may never come.
        let are_known = matches!(self.phase, Phase::Gathering(_) | Phase::Running(_));
        let is_host = config.host.as_deref() == Some(incarnation);
        let others = self.nodes.iter().filter(|(other, _)| *other != incarnation);
        let workers: Vec<u32> = others.map(|(_, node)| node.join.workers).collect();
        let limits = self.size_limits();
        let fit = limits.ranks.is_open() || limits.pick(&workers).is_some();
        are_known && !is_host && workers.len() >= limits.min && fit
    }

    fn left_words(&self, incarnation: &str, signal: i32) -> String {
        let (name, signal) = (self.node_name(incarnation), words::signal_name(signal));
        format!("{name} was stopped by {signal}; continuing without it")
    }

    /// Ends the generation at a step boundary, for the next one to have other nodes. No restart is spent.
    fn change_nodes(&mut self, turn: &mut Turn<'_>, cause: String) {
        let Phase::Running(running) = &self.phase else {
            return;
        };
        let over = GenerationOver {
            cause,
            restart_count: self.account.spent(),
            best_step: self.account.best(),
            max_restarts: running.assignment.max_restarts,
            membership: true,
            // A rank that has failed comes to no boundary.
            at_step_boundary: running.suspect.is_none(),
            ..GenerationOver::default()
        };
        self.regroup(turn, over);
    }

    /// The spares with which the running generation could be larger; none of its members has to go for them.
    fn growth(&self) -> Vec<Candidate> {
        let Phase::Running(running) = &self.phase else {
            return Vec::new();
        };
        // Who has done its part of the work should not have to do it again for a late guest.
        if !running.succeeded.is_empty() {
            return Vec::new();
        }
        let limits = self.size_limits();
        let mut spares: Vec<Candidate> = self
            .spares()
            .filter_map(|incarnation| Some(self.nodes.get(incarnation)?.candidate(incarnation)))
            .collect();
        if limits.ranks.is_open() {
            spares.truncate(limits.max.saturating_sub(self.previous.len()));
            return spares;
        }
        let members = self.previous.iter().filter_map(|member| {
            let node = self.nodes.get(&member.incarnation)?;
            Some(node.candidate(&member.incarnation))
        });
        let chosen = ranks::choose(members.chain(spares.clone()).collect(), limits, &self.previous);
        let is_chosen = |incarnation: &str| chosen.iter().any(|c| c.incarnation == incarnation);
        if !self.previous.iter().all(|member| is_chosen(&member.incarnation)) {
            return Vec::new();
        }
        spares.retain(|spare| is_chosen(&spare.incarnation));
        spares
    }

    /// Nodes that are ready while a generation runs without them.
    fn spares(&self) -> impl Iterator<Item = &str> {
        self.nodes
            .iter()
            .filter(|(incarnation, node)| node.is_ready() && !self.is_member(incarnation))
            .map(|(incarnation, _)| incarnation.as_str())
    }

    /// What a node waits for that is ready while a generation runs without it.
    pub(super) fn spare_words(&self, incarnation: &str) -> String {
        let count = self.previous.len() as u32;
        let runs = format!(
            "generation {} of job `{}` is running with {}",
            self.generation,
            self.id,
            words::nodes(count)
        );
        let is_done = matches!(&self.phase, Phase::Running(running) if !running.succeeded.is_empty());
        let has_room = count < self.limits().1 && !is_done;
        if self.growth().iter().any(|c| c.incarnation == incarnation) {
            return format!("{runs}; this node joins at the next step boundary");
        }
        let limits = self.rank_limits;
        if limits.is_open() || !has_room {
            return format!("{runs}; this node is on standby");
        }
        format!("{runs}; it can run only with {limits}: this node stays on standby")
    }

    /// Tells all spares of a generation that runs what they wait for.
    pub(super) fn tell_spares(&self, turn: &mut Turn<'_>) {
        if !matches!(self.phase, Phase::Running(_)) {
            return;
        }
        for spare in self.spares() {
            self.tell_waiting(turn, spare, self.spare_words(spare));
        }
    }

    /// The workers say which numbers of ranks they can go on with.
    pub(super) fn limit_sizes(&mut self, turn: &mut Turn<'_>, limits: RankLimits) {
        if self.rank_limits == limits {
            return;
        }
        self.rank_limits = limits;
        // Other nodes may fit now.
        self.newcomer(turn);
        self.tell_spares(turn);
        self.plan_wake();
    }
}
