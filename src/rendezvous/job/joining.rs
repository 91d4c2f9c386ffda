//! Joining: who may take part, who comes back, who is refused and why.

use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{GenerationOver, Join, refused::Code};

use super::node::{Node, Readiness};
use super::{Job, Phase};
use crate::rendezvous::config::{Callers, Config, DEFAULT_JOB_ID};
use crate::rendezvous::difference::{between_jobs, disagreement};
use crate::rendezvous::event::{ConnId, Peer, Speech, Turn, refusal, regrouping, shared};
use crate::rendezvous::kv::clip;
use crate::rendezvous::words;

/// Version of the protocol that this daemon speaks.
const PROTOCOL: u32 = 1;

/// Highest generation that an agent may claim, beyond those that this daemon has counted itself. Generations are below
/// 2^31, because workers parse 32 bits: as many again may follow.
pub(super) const MAX_GENERATION: u64 = (1 << 30) - 1;

/// A `Join` and where it comes from.
pub(in crate::rendezvous) struct Joining {
    pub(in crate::rendezvous) conn: ConnId,
    pub(in crate::rendezvous) peer: Peer,
    /// Of the generation that the agent was in last.
    pub(in crate::rendezvous) from: Speech,
    pub(in crate::rendezvous) join: Join,
}

impl Joining {
    /// The node was in a generation of the run of this name: a daemon that was restarted may not know of it.
    pub(super) fn is_of_run(&self, run_token: &str) -> bool {
        self.from.generation > 0 && !run_token.is_empty() && self.join.run_token == run_token
    }
}

impl Job {
    /// Lets all nodes go if they have died without a word: the one that comes is no part of their run. True if so.
    pub(in crate::rendezvous) fn is_cleared_for(&mut self, turn: &mut Turn<'_>, joining: &Joining) -> bool {
        let is_known = self.roster.nodes().contains_key(&joining.from.incarnation);
        let is_new = !is_known && joining.from.generation == 0 && joining.join.latest_generation == 0;
        let is_left = is_new && self.roster.is_deserted(turn);
        if is_left {
            turn.decided(format!("job `{}`: no node of the last run is left", self.id));
            self.roster.dismiss_all(turn);
        }
        is_left
    }

    /// Takes a node in, takes it back after a reconnect, or refuses it by name.
    pub(in crate::rendezvous) fn join(&mut self, turn: &mut Turn<'_>, joining: Joining) {
        let is_awaited = matches!(&self.phase, Phase::Recovering(recovery) if recovery.is_recorded());
        if self.roster.nodes().is_empty() && joining.from.generation == 0 && !is_awaited {
            // No node is left, and the newcomer was in no generation: a new run, with generation numbers of its own.
            // What still waits for a key of the old one gets its answer.
            self.kv.end(turn, "a new run of the job has started");
            *self = Self::new(&self.id, self.numbering.highest(), turn.at.now);
        }
        self.roster.came_back(&joining.from.incarnation);
        self.lose_if_assigned_elsewhere(turn, &joining);
        let admitted = match self.phase {
            Phase::Over(_) => Ok(()),
            _ => self.admit(turn, &joining),
        };
        if let Err((code, reason)) = admitted {
            self.refuse(turn, &joining, code, reason);
        } else if let Phase::Over(_) = self.phase {
            self.join_when_over(turn, &joining);
        } else if self.roster.nodes().contains_key(&joining.from.incarnation) {
            self.join_again(turn, joining);
        } else {
            self.join_first(turn, joining);
        }
        self.plan_wake();
    }

    /// A node that is known here comes back on a new stream from a generation of another daemon: it has given up its place
    /// here, and comes like any node that this daemon does not know.
    fn lose_if_assigned_elsewhere(&mut self, turn: &mut Turn<'_>, joining: &Joining) {
        let Joining { from, conn, .. } = joining;
        let is_elsewhere = from.generation > self.numbering.highest()
            || self.is_of_another_assignment(from.generation, &from.assignment_id);
        let is_back = |node: &Node| !node.speaks_on(*conn) && !node.is_stopping();
        if is_elsewhere && self.roster.get(&from.incarnation).is_some_and(is_back) {
            let name = self.roster.name_of(&from.incarnation);
            let cause = format!("{name} was assigned to generation {} elsewhere", from.generation);
            self.node_lost(turn, &from.incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        }
    }

    /// Checks a join against the bounds, against the other nodes and against the job.
    fn admit(&mut self, turn: &mut Turn<'_>, joining: &Joining) -> Result<(), (Code, String)> {
        let Joining { from, join, .. } = joining;
        let max_generation = MAX_GENERATION.max(self.numbering.highest());
        check_bounds(turn.config, joining, max_generation).map_err(|reason| (Code::Invalid, reason))?;
        let max_nodes = turn.config.max_nodes;
        if !self.roster.nodes().contains_key(&from.incarnation)
            && self.roster.nodes().len() >= max_nodes as usize
        {
            let max = words::nodes(max_nodes);
            let reason = format!("job `{}` already has {max}, the maximum", self.id);
            return Err((Code::Invalid, reason));
        }
        self.send_rivals_away(turn, joining);
        let other = self.roster.others(&from.incarnation).next();
        if let Some(reason) = other.and_then(|(_, node)| disagreement(&self.id, node.join(), join)) {
            return Err((Code::Disagree, reason));
        }
        let mistaken = self.met_by_chance(turn.config, joining);
        if let Some(reason) = mistaken.or_else(|| self.mistaken_for(joining)) {
            return Err((Code::Disagree, reason));
        }
        let Some(asked) = join.node_rank else {
            self.replace_restarted(turn, joining);
            return Ok(());
        };
        let Some((incarnation, node)) = self.roster.other_with_rank(asked, &from.incarnation) else {
            return Ok(());
        };
        if node.is_connected() {
            let words = words::same_rank(&self.id, asked, &join.hostname, node.hostname());
            return Err((Code::Invalid, words));
        }
        // Its connection is gone and its place is claimed: a new process took over.
        let cause = format!("node `{}` was restarted", node.hostname());
        let incarnation = incarnation.clone();
        self.node_lost(turn, &incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        Ok(())
    }

    /// A node of the generation that is waited for comes back. Those that have no part in it and cannot be there together
    /// with it were only too early: they are refused, as they are once it is there.
    fn send_rivals_away(&mut self, turn: &mut Turn<'_>, joining: &Joining) {
        let Phase::Recovering(recovery) = &self.phase else {
            return;
        };
        let Joining { from, join: own, .. } = joining;
        if !recovery.is_of(&from.incarnation)
            || self.is_of_another_assignment(from.generation, &from.assignment_id)
        {
            return;
        }
        let mut refused = Vec::new();
        for (incarnation, node) in self
            .roster
            .nodes()
            .iter()
            .filter(|(other, _)| !recovery.is_of(other))
        {
            let rank = node.join().node_rank.filter(|rank| own.node_rank == Some(*rank));
            let same_rank = rank.map(|rank| {
                let words = words::same_rank(&self.id, rank, node.hostname(), &own.hostname);
                (Code::Invalid, words)
            });
            let disagrees = disagreement(&self.id, own, node.join()).map(|words| (Code::Disagree, words));
            if let Some((code, reason)) = disagrees.or(same_rank) {
                turn.decided(format!("refused {}: {reason}", self.roster.name_of(incarnation)));
                node.send(turn, self.numbering.generation(), refusal(code, reason));
                refused.push(incarnation.clone());
            }
        }
        for incarnation in refused {
            self.roster.dismiss(turn, &incarnation);
        }
    }

    /// A new launcher comes from the host of a member whose connection is gone, and there is no room for both: it takes
    /// the other's place.
    fn replace_restarted(&mut self, turn: &mut Turn<'_>, joining: &Joining) {
        let Joining { from, join, .. } = joining;
        let is_full = self.roster.nodes().len() >= join.max_nodes as usize;
        if from.generation > 0 || !is_full || self.roster.get(&from.incarnation).is_some() {
            return;
        }
        let is_gone = |(incarnation, node): &(&String, &Node)| {
            node.hostname() == join.hostname && !node.is_connected() && self.is_at_work(incarnation)
        };
        let gone = self.roster.away().find(is_gone);
        if let Some(incarnation) = gone.map(|(incarnation, _)| incarnation.clone()) {
            let cause = format!("node `{}` was restarted", join.hostname);
            self.node_lost(turn, &incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        }
    }

    /// Nodes without `--rdzv-id` at a daemon of any jobs that run the same program with other arguments: those of one
    /// job may differ in them, but these are more likely two jobs.
    fn met_by_chance(&self, config: &Config, joining: &Joining) -> Option<String> {
        if config.only_job.is_some() || self.id != DEFAULT_JOB_ID {
            return None;
        }
        let Joining { from, join, .. } = joining;
        // All of them run the same: each has been compared with one that was there.
        let (_, other) = self.roster.others(&from.incarnation).next()?;
        if other.join().job_description == join.job_description {
            return None;
        }
        Some(format!(
            "two jobs without `--rdzv-id` meet at one rendezvous: {}\n  hint: give all nodes of a job the same `--rdzv-id`, and other jobs a different one",
            between_jobs(other.join(), join)
        ))
    }

    /// A newcomer to a full job of fixed size that has no name, or one node: more likely a node of another
    /// job than a spare, which would report success without having run.
    fn mistaken_for(&self, joining: &Joining) -> Option<String> {
        let Joining { from, join, .. } = joining;
        let known = self.roster.nodes().contains_key(&from.incarnation) || from.generation > 0;
        let fixed = join.min_nodes == join.max_nodes;
        let may_have_spares = join.max_nodes > 1 && self.id != DEFAULT_JOB_ID;
        if may_have_spares || !self.numbering.has_begun() || known || !fixed {
            return None;
        }
        // A node whose connection is gone may be the one that comes back, as a new process.
        (self.roster.connected() >= join.max_nodes as usize).then(|| {
            format!(
                "job `{}` is already running with {} ({}): node `{}` belongs to a different job or is one too many\n  \
                 hint: give each job its own `--rdzv-id`; a job of several nodes then keeps extra nodes on standby",
                self.id,
                match join.max_nodes {
                    1 => "its only node".to_owned(),
                    several => format!("all of its {}", words::nodes(several)),
                },
                words::list(self.roster.hosts(|_| true)),
                join.hostname
            )
        })
    }

    /// No generation was assigned yet.
    pub(super) fn is_undecided(&self) -> bool {
        self.numbering.highest() == 0 && matches!(self.phase, Phase::Gathering(_))
    }

    fn refuse(&mut self, turn: &mut Turn<'_>, joining: &Joining, code: Code, reason: String) {
        turn.decided(format!("refused node `{}`: {reason}", joining.join.hostname));
        let refused = refusal(code, reason);
        turn.send(Some(joining.conn), self.numbering.generation(), refused.clone());
        // Before the first generation it is unknown which of them is right: all of them end, with the same code. But who
        // has shown nothing ends only itself.
        let undecided = self.is_undecided() && turn.config.callers != Callers::Anybody;
        if code == Code::Disagree && undecided {
            self.end(turn, refused);
        }
        turn.close(Some(joining.conn));
    }

    fn join_first(&mut self, turn: &mut Turn<'_>, joining: Joining) {
        let Joining { peer, from, join, .. } = &joining;
        let (hostname, address, from) = (join.hostname.clone(), peer.remote, from.clone());
        let (arrival, timeout) = self.roster.expect(turn.config, join);
        let done = self.has_succeeded(&from.incarnation);
        self.miss_assignment(turn, &from, &hostname);
        let place = if from.generation == 0 {
            self.learn_of_generation(turn, join);
            Ok(())
        } else {
            self.place_of(turn, &from, join)
        };
        self.numbering.learn_of(from.generation, &join.run_token);
        let max_restarts = join.max_restarts;
        let mut node = Node::new(turn, joining, arrival);
        if let Err(cause) = place {
            // It may still run workers of a generation that went on without it, or that an earlier daemon
            // assigned: they have to be gone first, and no generation number may be used twice.
            let over = self.over_for_newcomer(turn.at.now, max_restarts, cause);
            let message = shared(from.generation, Reply::GenerationOver(over));
            node.stop_workers(turn, from.generation, &message);
        }
        if let Phase::Gathering(gathering) = &mut self.phase
            && !self.numbering.has_begun()
            && self.roster.nodes().is_empty()
        {
            gathering.wait_until(turn.at.now + timeout);
        }
        let is_free = !node.is_stopping();
        self.roster.add(&from.incarnation, node);
        turn.decided(format!(
            "job `{}`: node `{hostname}` joined from {address}",
            self.id
        ));
        if done && is_free {
            self.send_assignment(turn, &from.incarnation);
        } else if matches!(&self.phase, Phase::Recovering(recovery) if recovery.has(&from.incarnation)) {
            self.consider_recovered(turn, &from.incarnation);
        } else if is_free {
            self.joined(turn, &from.incarnation);
        }
    }

    /// Whether a node that comes back may keep its place in its generation; if not, why.
    fn place_of(&mut self, turn: &mut Turn<'_>, from: &Speech, join: &Join) -> Result<(), String> {
        let own = self.numbering.generation();
        if self.is_of_another_assignment(from.generation, &from.assignment_id) {
            self.learn_cost(turn, from, join);
            let words = self.another_assignment_words(from.generation, &from.assignment_id);
            return Err(format!(
                "{words}: restarting the workers of node `{}`",
                join.hostname
            ));
        }
        if own == 0 {
            return self.reclaim(turn, from, join);
        }
        if from.generation == own && self.has_succeeded(&from.incarnation) {
            return Ok(());
        }
        self.learn_cost(turn, from, join);
        Err(match &self.last_over {
            // It missed that its generation has ended.
            Some(over) if from.generation == own && !self.roster.is_lost(&from.incarnation) => {
                over.cause.clone()
            }
            _ if from.generation > own => "the rendezvous daemon was restarted".to_owned(),
            _ => format!(
                "node `{}` was unreachable for longer than its lease",
                join.hostname
            ),
        })
    }

    fn over_for_newcomer(&self, now: Duration, max_restarts: u32, cause: String) -> GenerationOver {
        let backoff = match &self.phase {
            Phase::Gathering(gathering) => gathering.backoff_left(now),
            _ => Duration::ZERO,
        };
        GenerationOver {
            restart_count: self.account.spent(),
            best_step: self.account.best(),
            max_restarts,
            backoff_ms: backoff.as_millis() as u32,
            ..regrouping(cause)
        }
    }

    /// A node that is known: back after a broken connection, or ready after its workers were stopped.
    fn join_again(&mut self, turn: &mut Turn<'_>, joining: Joining) {
        let incarnation = joining.from.incarnation.clone();
        let member = self.is_member(&incarnation);
        let silence = self
            .roster
            .change(&incarnation, |node| node.join_again(turn, joining));
        self.tell_back(turn, &incarnation, silence.flatten());
        let Some(node) = self.roster.get(&incarnation) else {
            return;
        };
        match node.readiness() {
            Readiness::Joined if member => {
                turn.detail(format!(
                    "job `{}`: node `{}` reconnected",
                    self.id,
                    node.hostname()
                ));
                self.send_assignment(turn, &incarnation);
                if let Some(running) = self.phase.running_mut() {
                    running.await_reports(turn);
                }
            }
            Readiness::Stopping(stopping) => {
                // It has not confirmed the end of this generation, so it may not know of it.
                let over = match &self.last_over {
                    Some(over) if stopping == self.numbering.generation() => over.clone(),
                    _ => regrouping(words::continued_without(stopping, node.hostname())),
                };
                node.send(turn, stopping, Reply::GenerationOver(over));
            }
            Readiness::Joined | Readiness::Stopped => {
                self.roster.change(&incarnation, Node::become_free);
                self.joined(turn, &incarnation);
            }
        }
    }

    /// A node is ready: start, or tell it what it waits for.
    fn joined(&mut self, turn: &mut Turn<'_>, incarnation: &str) {
        let before = self.numbering.generation();
        self.consider_start(turn);
        let has_started = self.numbering.generation() != before;
        if matches!(self.phase, Phase::Over(_)) || self.is_member(incarnation) || has_started {
            // A start has informed all nodes.
            return;
        }
        self.newcomer(turn);
        let reason = match self.phase {
            Phase::Running(_) => self.spare_words(incarnation),
            _ => self.waiting_words(turn.at.now),
        };
        self.tell_waiting(turn, incarnation, reason);
    }
}

/// How long an agent lets the daemon wait for other nodes, within the daemon's bound.
pub(super) fn join_timeout(config: &Config, join: &Join) -> Duration {
    Duration::from_millis(join.join_timeout_ms.into()).min(config.join_timeout_cap)
}

fn check_bounds(config: &Config, joining: &Joining, max_generation: u64) -> Result<(), String> {
    let join = &joining.join;
    let host = clip(&join.hostname, 64);
    if join.protocol != PROTOCOL {
        return Err(format!(
            "node `{host}` uses version {} of the rendezvous protocol, this daemon {PROTOCOL}\n  \
             hint: install the same version of `ddp-run` on every node",
            join.protocol
        ));
    }
    if joining.from.generation > max_generation {
        return Err(format!(
            "node `{host}` reports generation {}, expected at most {max_generation}",
            joining.from.generation
        ));
    }
    let names = [
        &join.hostname,
        &join.local_addr,
        &join.job_signature,
        &join.run_token,
        &join.role,
        &joining.from.incarnation,
        &joining.from.assignment_id,
    ];
    if names.iter().any(|name| name.len() > config.max_name_bytes) {
        return Err(format!(
            "a name of node `{host}` is longer than {} bytes",
            config.max_name_bytes
        ));
    }
    if join.job_description.len() > config.max_description_bytes {
        return Err(format!(
            "description of the job on node `{host}` is longer than {} bytes",
            config.max_description_bytes
        ));
    }
    let (min, max) = (join.min_nodes, join.max_nodes);
    if min == 0 || min > max || max > config.max_nodes {
        return Err(format!(
            "`--nnodes` of node `{host}` is {min}:{max}, expected 1 <= MIN <= MAX <= {}",
            config.max_nodes
        ));
    }
    if join.workers == 0 || join.workers > config.max_workers {
        return Err(format!(
            "node `{host}` offers {} workers, expected 1 to {}",
            join.workers, config.max_workers
        ));
    }
    if join.master_port == 0 {
        return Err(format!(
            "node `{host}` has no free port for MASTER_PORT\n  hint: see the output of its launcher; `--master-port` sets the port"
        ));
    }
    if join.master_port > u32::from(u16::MAX) {
        return Err(format!(
            "node `{host}` offers port {} as MASTER_PORT",
            join.master_port
        ));
    }
    if let Some(rank) = join.node_rank.filter(|rank| *rank >= max) {
        return Err(format!(
            "`--node-rank` of node `{host}` is {rank}, but there are at most {}\n  hint: node ranks run from 0 to {}",
            words::nodes(max),
            max - 1
        ));
    }
    Ok(())
}
