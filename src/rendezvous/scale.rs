//! Growing: nodes that come to a job that runs.
//!
//! A job of `--nnodes MIN:MAX` that has room takes them in. It waits [`Config::scale_up_wait`](super::Config) for more
//! to come with the first, or until it is full; then all ranks are asked to stop at a step boundary, and the next
//! generation has them all. No restart is spent. Nodes beyond MAX are spares, and so are those with which the workers
//! could not go on ([`Heartbeat`](ddp_proto::rendezvous::Heartbeat)`.ranks_divide`).

use ddp_proto::rendezvous::GenerationOver;

use super::event::Turn;
use super::job::{Job, Phase};
use super::ranks::{self, Candidate};
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
        let over = GenerationOver {
            cause: format!("{hosts} joined; going on with {}", words::nodes(after as u32)),
            restart_count: self.account.spent(),
            best_step: self.account.best(),
            max_restarts: running.assignment.max_restarts,
            membership: true,
            at_step_boundary: true,
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
        if limits.ranks_divide.is_none() {
            spares.truncate(limits.max.saturating_sub(self.previous.len()));
            return spares;
        }
        let members = self.previous.iter().filter_map(|seat| {
            let node = self.nodes.get(&seat.incarnation)?;
            Some(node.candidate(&seat.incarnation))
        });
        let chosen = ranks::choose(members.chain(spares.clone()).collect(), limits, &self.previous);
        let is_chosen = |incarnation: &str| chosen.iter().any(|c| c.incarnation == incarnation);
        if !self.previous.iter().all(|seat| is_chosen(&seat.incarnation)) {
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
            "generation {} of job `{}` runs with {}",
            self.generation,
            self.id,
            words::nodes(count)
        );
        let is_done = matches!(&self.phase, Phase::Running(running) if !running.succeeded.is_empty());
        let has_room = count < self.limits().1 && !is_done;
        if self.growth().iter().any(|c| c.incarnation == incarnation) {
            return format!("{runs}; it takes this node in at its next step boundary");
        }
        match self.ranks_divide.filter(|_| has_room) {
            Some(multiple) => format!(
                "{runs}; its workers can go on only with a number of ranks that divides {multiple}, and with this node \
                 there is no larger one: it is a spare"
            ),
            None => format!("{runs}; this node is a spare until it is over"),
        }
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
    pub(super) fn limit_sizes(&mut self, turn: &mut Turn<'_>, ranks_divide: Option<u64>) {
        if self.ranks_divide == ranks_divide {
            return;
        }
        self.ranks_divide = ranks_divide;
        // Other nodes may fit now.
        self.newcomer(turn);
        self.tell_spares(turn);
        self.plan_wake();
    }
}
