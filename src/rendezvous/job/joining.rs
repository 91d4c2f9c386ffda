//! Joining: admits new nodes, takes nodes back after a reconnect, refuses others with a reason.

use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{ARGUMENTS, GenerationOver, Join, Refused, refused::Code};
use ddp_proto::words::duration;
use ddp_proto::{exit, printable};

use super::node::{Node, Readiness};
use super::{Job, Phase};
use crate::rendezvous::config::{Callers, Config, DEFAULT_JOB_ID};
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::{ConnId, Origin, Peer, refusal, regrouping, shared};
use crate::rendezvous::messages;
use crate::rendezvous::messages::clip;

/// Version of the protocol that this daemon speaks.
const PROTOCOL: u32 = 1;

/// Highest generation that an agent may claim, beyond those that this daemon has counted itself. Generations are below
/// 2^31, because workers parse 32 bits: as many again may follow.
pub(super) const MAX_GENERATION: u64 = (1 << 30) - 1;

/// A `Join` and where it comes from.
pub(in crate::rendezvous) struct Joining {
    pub(in crate::rendezvous) conn: ConnId,
    pub(in crate::rendezvous) peer: Peer,
    /// The agent's last assignment.
    pub(in crate::rendezvous) from: Origin,
    pub(in crate::rendezvous) join: Join,
}

impl Joining {
    /// The node was in a generation of the run of this name: a daemon that was restarted may not know of it.
    pub(super) fn is_of_run(&self, run_token: &str) -> bool {
        self.from.generation > 0 && !run_token.is_empty() && self.join.run_token == run_token
    }
}

impl Job {
    /// Forgets all nodes if none of them is alive and the new node does not belong to their run. True if it did.
    pub(in crate::rendezvous) fn is_cleared_for(
        &mut self,
        context: &mut ApplyContext<'_>,
        joining: &Joining,
    ) -> bool {
        let is_known = self.table.nodes().contains_key(&joining.from.incarnation);
        let is_new = !is_known && joining.from.generation == 0 && joining.join.latest_generation == 0;
        let is_left = is_new && self.table.is_deserted(context);
        if is_left {
            context.decided(format!("job `{}`: no node of the last run is left", self.id));
            let nodes: Vec<String> = self.table.nodes().keys().cloned().collect();
            for node in &nodes {
                self.await_end_of(context, node);
            }
            self.table.dismiss_all(context);
        }
        is_left
    }

    /// Admits a node, takes it back after a reconnect, or refuses it.
    pub(in crate::rendezvous) fn join(&mut self, context: &mut ApplyContext<'_>, joining: Joining) {
        let is_awaited = matches!(&self.phase, Phase::Recovering(recovery) if recovery.is_recorded());
        if self.table.nodes().is_empty() && joining.from.generation == 0 && !is_awaited {
            // No node is left, and the newcomer was in no generation: a new run, with generation numbers of its own.
            // What still waits for a key of the old one gets its answer.
            self.kv.end(context, "a new run of the job has started");
            let takeover = std::mem::take(&mut self.takeover);
            *self = Self::new(&self.id, self.counter.highest(), context.at.now);
            self.takeover = takeover;
        }
        self.lose_if_assigned_elsewhere(context, &joining);
        let admitted = match self.phase {
            Phase::Over(_) => Ok(()),
            _ => self.admit(context, &joining),
        };
        if let Err(refused) = admitted {
            self.refuse(context, &joining, refused);
        } else if let Phase::Over(_) = self.phase {
            self.join_when_over(context, &joining);
        } else if self.table.nodes().contains_key(&joining.from.incarnation) {
            self.join_again(context, joining);
        } else {
            self.join_first(context, joining);
        }
        self.plan_wake();
    }

    /// A node that is known here comes back on a new stream from a generation of another daemon: it has given up its place
    /// here, and comes like any node that this daemon does not know.
    fn lose_if_assigned_elsewhere(&mut self, context: &mut ApplyContext<'_>, joining: &Joining) {
        let Joining { from, conn, .. } = joining;
        let is_elsewhere = from.generation > self.counter.highest()
            || self.is_of_another_assignment(from.generation, &from.assignment_id);
        let is_back = |node: &Node| !node.speaks_on(*conn) && !node.is_stopping();
        if is_elsewhere && self.table.get(&from.incarnation).is_some_and(is_back) {
            let name = self.table.name_of(&from.incarnation);
            let cause = format!("{name} was assigned to generation {} elsewhere", from.generation);
            self.node_lost(context, &from.incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        }
    }

    /// Checks a join against the bounds, against the other nodes and against the job.
    fn admit(&mut self, context: &mut ApplyContext<'_>, joining: &Joining) -> Result<(), Refused> {
        let invalid = |reason| Err(refusal(Code::Invalid, reason));
        let Joining { from, join, .. } = joining;
        let max_generation = MAX_GENERATION.max(self.counter.highest());
        check_bounds(context.config, joining, max_generation).or_else(invalid)?;
        let max_nodes = context.config.max_nodes;
        if !self.table.nodes().contains_key(&from.incarnation)
            && self.table.nodes().len() >= max_nodes as usize
        {
            let max = messages::nodes(max_nodes);
            return invalid(format!("job `{}` already has {max}, the maximum", self.id));
        }
        self.send_rivals_away(context, joining);
        let other = self.table.others(&from.incarnation).next();
        let refused = other.and_then(|(_, node)| disagreement(&self.id, node.join(), join));
        let refused = refused.or_else(|| self.met_by_chance(context.config, joining));
        let mistaken = || {
            let is_successor = self
                .table
                .holder_of_rank(join.node_rank, &from.incarnation)
                .is_some();
            let reason = self.mistaken_for(joining).filter(|_| !is_successor);
            reason.map(|reason| refusal(Code::Disagree, reason))
        };
        if let Some(refused) = refused.or_else(mistaken) {
            return Err(refused);
        }
        if join.node_rank.is_none() {
            self.replace_restarted(context, joining);
        }
        // A node whose connection is gone, and whose place is claimed: a new process took over.
        let holder = self.table.holder_of_rank(join.node_rank, &from.incarnation);
        if let Some((incarnation, node)) = holder.filter(|(_, node)| !node.is_connected()) {
            let cause = format!("node `{}` was restarted", node.hostname());
            let incarnation = incarnation.clone();
            self.node_lost(context, &incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        }
        Ok(())
    }

    /// A node lives: the one that waits to take its place is one too many.
    pub(super) fn refuse_successor(&mut self, context: &mut ApplyContext<'_>, incarnation: &str) {
        let successor = self.table.successor_of(incarnation).cloned();
        let nodes = successor.map(|name| (self.table.get(&name), self.table.get(incarnation), name));
        if let Some((Some(newcomer), Some(holder), name)) = nodes {
            let rank = newcomer.join().node_rank.unwrap_or_default();
            let words = messages::same_rank(&self.id, rank, newcomer.hostname(), holder.hostname());
            context.decided(format!("refused node `{}`: {words}", newcomer.hostname()));
            let refused = Reply::Refused(refusal(Code::Invalid, words));
            newcomer.send(context, self.counter.generation(), refused);
            self.table.dismiss(context, &name);
        }
    }

    /// A node of the recorded generation comes back. Refuses earlier newcomers that conflict with it.
    fn send_rivals_away(&mut self, context: &mut ApplyContext<'_>, joining: &Joining) {
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
            .table
            .nodes()
            .iter()
            .filter(|(other, _)| !recovery.is_of(other))
        {
            let rank = node.join().node_rank.filter(|rank| own.node_rank == Some(*rank));
            let same_rank = rank.map(|rank| {
                let words = messages::same_rank(&self.id, rank, node.hostname(), &own.hostname);
                refusal(Code::Invalid, words)
            });
            if let Some(refusal) = disagreement(&self.id, own, node.join()).or(same_rank) {
                let name = self.table.name_of(incarnation);
                context.decided(format!("refused {name}: {}", refusal.reason));
                node.send(context, self.counter.generation(), Reply::Refused(refusal));
                refused.push(incarnation.clone());
            }
        }
        for incarnation in refused {
            self.table.dismiss(context, &incarnation);
        }
    }

    /// A new launcher on the host of a member whose connection is gone takes its place, if there is no room for both.
    fn replace_restarted(&mut self, context: &mut ApplyContext<'_>, joining: &Joining) {
        let Joining { from, join, .. } = joining;
        let is_full = self.table.nodes().len() >= join.max_nodes as usize;
        if from.generation > 0 || !is_full || self.table.get(&from.incarnation).is_some() {
            return;
        }
        let is_gone = |(incarnation, node): &(&String, &Node)| {
            node.hostname() == join.hostname && !node.is_connected() && self.is_at_work(incarnation)
        };
        let gone = self.table.away().find(is_gone);
        if let Some(incarnation) = gone.map(|(incarnation, _)| incarnation.clone()) {
            let cause = format!("node `{}` was restarted", join.hostname);
            self.node_lost(context, &incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        }
    }

    /// Nodes without `--rdzv-id` at a daemon of any jobs that run the same program with other arguments: those of one
    /// job may differ in them, but these are more likely two jobs.
    fn met_by_chance(&self, config: &Config, joining: &Joining) -> Option<Refused> {
        if config.only_job.is_some() || self.id != DEFAULT_JOB_ID {
            return None;
        }
        let Joining { from, join, .. } = joining;
        // All of them run the same: each has been compared with one that was there.
        let (_, other) = self.table.others(&from.incarnation).next()?;
        disagree(other.join(), join, differing(other.join(), join), |what| {
            format!(
                "two jobs without `--rdzv-id` meet at one rendezvous: {what}\n  \
                 hint: give all nodes of a job the same `--rdzv-id`, and other jobs a different one"
            )
        })
    }

    /// A newcomer to a full job of fixed size that has no name, or one node: more likely a node of another
    /// job than a spare, which would report success without having run.
    fn mistaken_for(&self, joining: &Joining) -> Option<String> {
        let Joining { from, join, .. } = joining;
        let known = self.table.nodes().contains_key(&from.incarnation) || from.generation > 0;
        let fixed = join.min_nodes == join.max_nodes;
        let may_have_spares = join.max_nodes > 1 && self.id != DEFAULT_JOB_ID;
        if may_have_spares || !self.counter.has_begun() || known || !fixed {
            return None;
        }
        // A node whose connection is gone may be the one that comes back, as a new process.
        (self.table.connected() >= join.max_nodes as usize).then(|| {
            format!(
                "job `{}` is already running with {} ({}): node `{}` belongs to a different job or is one too many\n  \
                 hint: give each job its own `--rdzv-id`; a job of several nodes then keeps extra nodes on standby",
                self.id,
                match join.max_nodes {
                    1 => "its only node".to_owned(),
                    several => format!("all of its {}", messages::nodes(several)),
                },
                messages::list(self.table.hosts(|_| true), self.table.nodes().len()),
                join.hostname
            )
        })
    }

    /// True before the first generation is assigned.
    pub(super) fn is_undecided(&self) -> bool {
        self.counter.highest() == 0 && matches!(self.phase, Phase::Gathering(_))
    }

    fn refuse(&mut self, context: &mut ApplyContext<'_>, joining: &Joining, mut refused: Refused) {
        let disagrees = refused.code() == Code::Disagree;
        let may_know = disagrees && context.config.callers != Callers::Anybody;
        let owner = self.table.owner().filter(|owner| !owner.user.is_empty());
        if let Some(owner) = owner.filter(|_| may_know) {
            let since = duration(context.at.now.saturating_sub(self.since).as_secs_f64());
            let who = format!("`{}@{}` with `{}`", owner.user, owner.hostname, owner.target);
            let end_of_line = refused.reason.find('\n').unwrap_or(refused.reason.len());
            let words = format!("\n  the job was started {since} ago by {who}");
            refused.reason.insert_str(end_of_line, &words);
        }
        context.decided(format!(
            "refused node `{}`: {}",
            joining.join.hostname, refused.reason
        ));
        let refused = Reply::Refused(refused);
        context.send(Some(joining.conn), self.counter.generation(), refused.clone());
        // Before the first generation it is unknown which node is right: all of them end, with the same code. But a peer
        // that has proved nothing ends only itself.
        let undecided = self.is_undecided() && context.config.callers != Callers::Anybody;
        if disagrees && undecided {
            self.end(context, refused);
        }
        context.close(Some(joining.conn));
    }

    fn join_first(&mut self, context: &mut ApplyContext<'_>, joining: Joining) {
        let Joining { peer, from, join, .. } = &joining;
        let (hostname, address, from) = (join.hostname.clone(), peer.remote, from.clone());
        let (arrival, timeout) = self.table.expect(context.config, join);
        let done = self.has_succeeded(&from.incarnation);
        self.miss_assignment(context, &from, &hostname);
        let place = if from.generation == 0 {
            self.learn_of_generation(context, join);
            Ok(())
        } else {
            self.place_of(context, &from, join)
        };
        self.counter.learn_of(from.generation, &join.run_token);
        let (max_restarts, node_rank) = (join.max_restarts, join.node_rank);
        let mut node = Node::new(context, joining, arrival);
        if let Err(cause) = place {
            // It may still run workers of a generation that went on without it, or that an earlier daemon
            // assigned: they have to be gone first, and no generation number may be used twice.
            let over = self.over_for_newcomer(context.at.now, max_restarts, cause);
            let message = shared(from.generation, Reply::GenerationOver(over));
            node.stop_workers(context, from.generation, &message);
        }
        if let Phase::Gathering(gathering) = &mut self.phase
            && !self.counter.has_begun()
            && self.table.nodes().is_empty()
        {
            gathering.wait_until(context.at.now + timeout);
        }
        let is_free = !node.is_stopping();
        if is_free && from.generation == 0 {
            self.takeover.ended(&from.incarnation);
        }
        self.table.add(&from.incarnation, node);
        context.decided(format!(
            "job `{}`: node `{hostname}` joined from {address}",
            self.id
        ));
        let holder = self.table.holder_of_rank(node_rank, &from.incarnation);
        if let Some((holder, words)) = holder.map(|(holder, node)| (holder.clone(), node.succession_words()))
        {
            self.table.wait_for(&from.incarnation, holder);
            self.tell_waiting(context, &from.incarnation, words);
        } else if done && is_free {
            self.send_assignment(context, &from.incarnation);
        } else if matches!(&self.phase, Phase::Recovering(recovery) if recovery.has(&from.incarnation)) {
            self.consider_recovered(context, &from.incarnation);
        } else if is_free {
            self.joined(context, &from.incarnation);
        }
    }

    /// Whether a node that reconnects keeps its place in its generation; if not, why.
    fn place_of(&mut self, context: &mut ApplyContext<'_>, from: &Origin, join: &Join) -> Result<(), String> {
        let own = self.counter.generation();
        if self.is_of_another_assignment(from.generation, &from.assignment_id) {
            self.learn_cost(context, from, join);
            let words = self.another_assignment_words(from.generation, &from.assignment_id);
            return Err(format!(
                "{words}: restarting the workers of node `{}`",
                join.hostname
            ));
        }
        if own == 0 {
            return self.reclaim(context, from, join);
        }
        if from.generation == own && self.has_succeeded(&from.incarnation) {
            return Ok(());
        }
        self.learn_cost(context, from, join);
        Err(match &self.last_over {
            // It missed that its generation has ended.
            Some(over) if from.generation == own && !self.table.is_lost(&from.incarnation) => {
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

    /// A known node reconnects, or is ready after its workers were stopped.
    fn join_again(&mut self, context: &mut ApplyContext<'_>, joining: Joining) {
        let incarnation = joining.from.incarnation.clone();
        let member = self.is_member(&incarnation);
        let silence = self
            .table
            .change(&incarnation, |node| node.join_again(context, joining));
        self.tell_back(context, &incarnation, silence.flatten());
        let Some(node) = self.table.get(&incarnation) else {
            return;
        };
        match node.readiness() {
            Readiness::Joined if member => {
                context.detail(format!(
                    "job `{}`: node `{}` reconnected",
                    self.id,
                    node.hostname()
                ));
                self.send_assignment(context, &incarnation);
                if let Some(running) = self.phase.running_mut() {
                    running.await_reports(context);
                }
            }
            Readiness::Stopping(stopping) => {
                // It has not confirmed the end of this generation, so it may not know of it.
                let over = match &self.last_over {
                    Some(over) if stopping == self.counter.generation() => over.clone(),
                    _ => regrouping(messages::continued_without(stopping, node.hostname())),
                };
                node.send(context, stopping, Reply::GenerationOver(over));
            }
            Readiness::Joined | Readiness::Stopped => {
                self.table.change(&incarnation, Node::become_free);
                self.takeover.ended(&incarnation);
                self.joined(context, &incarnation);
            }
        }
    }

    /// A node is ready: starts the generation, or tells the node what it waits for.
    fn joined(&mut self, context: &mut ApplyContext<'_>, incarnation: &str) {
        let before = self.counter.generation();
        self.consider_start(context);
        let has_started = self.counter.generation() != before;
        if matches!(self.phase, Phase::Over(_)) || self.is_member(incarnation) || has_started {
            // A start has informed all nodes.
            return;
        }
        self.newcomer(context);
        let reason = match self.phase {
            Phase::Running(_) => self.spare_words(incarnation),
            _ => self.waiting_words(context.at.now),
        };
        self.tell_waiting(context, incarnation, reason);
    }
}

/// The keys whose values differ between two nodes, or which only one node has.
fn differing(first: &Join, second: &Join) -> Vec<String> {
    let only_second = second
        .agreed
        .keys()
        .filter(|key| !first.agreed.contains_key(*key));
    let keys = first.agreed.keys().chain(only_second);
    let differ = keys.filter(|key| first.agreed.get(*key) != second.agreed.get(*key));
    let mut keys: Vec<String> = differ.cloned().collect();
    let nodes = |join: &Join| (join.min_nodes, join.max_nodes);
    let flags = [
        ("--nnodes", nodes(first) != nodes(second)),
        ("--max-restarts", first.max_restarts != second.max_restarts),
    ];
    for (flag, _) in flags.into_iter().filter(|(_, differs)| *differs) {
        if !keys.iter().any(|key| key == flag) {
            keys.push(flag.to_owned());
        }
    }
    keys
}

/// What two nodes of one job disagree on; none if they agree. The arguments of a program may differ.
fn disagreement(job: &str, first: &Join, second: &Join) -> Option<Refused> {
    let mut keys = differing(first, second);
    keys.retain(|key| key != ARGUMENTS);
    disagree(first, second, keys, |what| {
        let two_jobs = if job == DEFAULT_JOB_ID {
            ", or give each job its own `--rdzv-id`"
        } else {
            ""
        };
        let earlier_start = if first.hostname == second.hostname {
            "; a launcher of an earlier start may still run on that node"
        } else {
            ""
        };
        format!(
            "nodes disagree on job `{job}`: {what}\n  \
             hint: start every node with the same target, configuration and flags{two_jobs}{earlier_start}"
        )
    })
}

/// Refuses a node whose values of these keys differ from those of another; none without keys. The launchers print the
/// values: the daemon has only hashes.
fn disagree(
    first: &Join,
    second: &Join,
    keys: Vec<String>,
    message: impl FnOnce(String) -> String,
) -> Option<Refused> {
    let verb = if keys.len() == 1 { "differs" } else { "differ" };
    let names = messages::list(keys.iter().map(String::as_str), keys.len());
    let between = if first.hostname == second.hostname {
        format!("two launchers on node `{}`", first.hostname)
    } else {
        format!("node `{}` and node `{}`", first.hostname, second.hostname)
    };
    let reason = message(format!("{names} {verb} between {between}"));
    (!keys.is_empty()).then(|| Refused {
        differing: keys,
        ..refusal(Code::Disagree, reason)
    })
}

/// How long the daemon may wait for other nodes, within its own bound.
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
        &join.run_token,
        &join.role,
        &joining.from.incarnation,
        &joining.from.assignment_id,
    ];
    let shown = [&join.user, &join.target];
    let mut names = names.into_iter().chain(join.agreed.keys()).chain(shown);
    if names.any(|name| name.len() > config.max_name_bytes || !printable::is_name(name)) {
        return Err(format!(
            "a name of node `{host}` has a control character or is longer than {} bytes",
            config.max_name_bytes
        ));
    }
    let agreed_bytes: usize = join.agreed.keys().map(|key| key.len() + size_of::<u64>()).sum();
    if agreed_bytes > config.max_description_bytes {
        return Err(format!(
            "the keys that node `{host}` compares are longer than {} bytes",
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
            messages::nodes(max),
            max - 1
        ));
    }
    Ok(())
}
