//! Joining: who may take part, who comes back, who is refused and why.

use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{GenerationOver, Join, Refused, Waiting, refused::Code};

use super::config::Config;
use super::difference::disagreement;
use super::event::{ConnId, Peer, Turn};
use super::job::{Job, Node, Phase, Readiness, Speech};
use super::unnamed::is_unnamed;
use super::words;

/// Version of the protocol that this daemon speaks.
pub(super) const PROTOCOL: u32 = 1;

/// Highest generation that an agent may claim, beyond those that this daemon has counted itself. Generations are below
/// 2^31, because workers parse 32 bits: as many again may follow.
pub(super) const MAX_GENERATION: u64 = (1 << 30) - 1;

/// A `Join` and where it comes from.
pub(super) struct Joining {
    pub(super) conn: ConnId,
    pub(super) peer: Peer,
    pub(super) incarnation: String,
    /// Generation that the agent was in last; 0: none.
    pub(super) generation: u64,
    /// Which assignment of that generation it was.
    pub(super) assignment_id: String,
    pub(super) join: Join,
}

impl Joining {
    /// The node was in a generation of the run of this name: a daemon that was restarted may not know of it.
    pub(super) fn is_of_run(&self, run_token: &str) -> bool {
        self.generation > 0 && !run_token.is_empty() && self.join.run_token == run_token
    }
}

impl Job {
    /// Takes a node in, takes it back after a reconnect, or refuses it by name.
    pub(super) fn join(&mut self, turn: &mut Turn<'_>, joining: Joining) {
        self.silent.remove(&joining.incarnation);
        self.lose_if_assigned_elsewhere(turn, &joining);
        let admitted = match self.phase {
            Phase::Over(_) => Ok(()),
            _ => self.admit(turn, &joining),
        };
        if let Err((code, reason)) = admitted {
            self.refuse(turn, &joining, code, reason);
        } else if let Phase::Over(_) = self.phase {
            self.join_when_over(turn, &joining);
        } else if self.nodes.contains_key(&joining.incarnation) {
            self.join_again(turn, joining);
        } else {
            self.join_first(turn, joining);
        }
        self.plan_wake();
    }

    /// A node that is known here comes back on a new stream from a generation of another daemon: it has given up its place
    /// here, and comes like any node that this daemon does not know.
    fn lose_if_assigned_elsewhere(&mut self, turn: &mut Turn<'_>, joining: &Joining) {
        let is_elsewhere = joining.generation > self.highest_generation()
            || self.is_of_another_assignment(joining.generation, &joining.assignment_id);
        let is_back = |node: &Node| node.conn != Some(joining.conn) && node.readiness == Readiness::Joined;
        if is_elsewhere && self.nodes.get(&joining.incarnation).is_some_and(is_back) {
            let name = self.node_name(&joining.incarnation);
            let cause = format!(
                "{name} was assigned to generation {} elsewhere",
                joining.generation
            );
            self.node_lost(turn, &joining.incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        }
    }

    fn join_when_over(&mut self, turn: &mut Turn<'_>, joining: &Joining) {
        let Phase::Over(over) = &self.phase else { return };
        let told = over.told.contains(&joining.incarnation)
            || joining.is_of_run(&self.run_token)
            || matches!(over.verdict, Reply::Refused(_));
        let reply = if told {
            over.verdict.clone()
        } else {
            let reason = format!(
                "job `{}` has ended: {}\n  hint: to run it again, start its nodes after all previous launchers have exited",
                self.id, over.reason
            );
            Reply::Refused(Refused {
                code: Code::JobOver.into(),
                reason,
                failures: None,
            })
        };
        turn.send(Some(joining.conn), self.generation, reply);
        match self.nodes.get_mut(&joining.incarnation) {
            Some(node) => {
                if node.conn != Some(joining.conn) {
                    turn.close(node.conn);
                    node.conn = Some(joining.conn);
                }
                node.heard(turn);
            }
            None => turn.close(Some(joining.conn)),
        }
    }

    /// Checks a join against the bounds, against the other nodes and against the job.
    fn admit(&mut self, turn: &mut Turn<'_>, joining: &Joining) -> Result<(), (Code, String)> {
        let max_generation = MAX_GENERATION.max(self.highest_generation());
        check_bounds(turn.config, joining, max_generation).map_err(|reason| (Code::Invalid, reason))?;
        if !self.nodes.contains_key(&joining.incarnation)
            && self.nodes.len() >= turn.config.max_nodes as usize
        {
            let reason = format!(
                "job `{}` already has {}, the maximum",
                self.id,
                words::nodes(turn.config.max_nodes)
            );
            return Err((Code::Invalid, reason));
        }
        self.send_rivals_away(turn, joining);
        let other = self
            .nodes
            .iter()
            .find(|(incarnation, _)| **incarnation != joining.incarnation);
        if let Some(reason) = other.and_then(|(_, node)| disagreement(&self.id, &node.join, &joining.join)) {
            return Err((Code::Disagree, reason));
        }
        if let Some(reason) = self.mistaken_for(joining) {
            return Err((Code::Disagree, reason));
        }
        let Some(asked) = joining.join.node_rank else {
            return Ok(());
        };
        let same_rank = self
            .nodes
            .iter()
            .find(|(id, node)| **id != joining.incarnation && node.join.node_rank == Some(asked))
            .map(|(id, node)| (id.clone(), node.conn.is_some(), node.join.hostname.clone()));
        match same_rank {
            Some((_, true, hostname)) => Err((
                Code::Invalid,
                words::same_rank(&self.id, asked, &joining.join.hostname, &hostname),
            )),
            Some((incarnation, false, hostname)) => {
                // Its connection is gone and its place is claimed: a new process took over.
                let cause = format!("node `{hostname}` was restarted");
                self.node_lost(turn, &incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// A node of the generation that is waited for comes back. Those that have no part in it and cannot be there together
    /// with it were only too early: they are refused, as they are once it is there.
    fn send_rivals_away(&mut self, turn: &mut Turn<'_>, joining: &Joining) {
        let Phase::Recovering(recovery) = &self.phase else {
            return;
        };
        if !recovery.is_of(&joining.incarnation)
            || self.is_of_another_assignment(joining.generation, &joining.assignment_id)
        {
            return;
        }
        let (own, mut refused) = (&joining.join, Vec::new());
        for (incarnation, node) in &self.nodes {
            if recovery.is_of(incarnation) {
                continue;
            }
            let rank = node.join.node_rank.filter(|rank| own.node_rank == Some(*rank));
            let same_rank = rank.map(|rank| {
                let words = words::same_rank(&self.id, rank, &node.join.hostname, &own.hostname);
                (Code::Invalid, words)
            });
            let disagrees = disagreement(&self.id, own, &node.join).map(|words| (Code::Disagree, words));
            if let Some((code, reason)) = disagrees.or(same_rank) {
                refused.push((incarnation.clone(), node.conn, code, reason));
            }
        }
        for (incarnation, conn, code, reason) in refused {
            turn.decided(format!("refused {}: {reason}", self.node_name(&incarnation)));
            let refusal = Refused {
                code: code.into(),
                reason,
                failures: None,
            };
            turn.send(conn, self.generation, Reply::Refused(refusal));
            turn.close(conn);
            self.nodes.remove(&incarnation);
        }
    }

    /// A newcomer to a full job of fixed size that has no name, or one node: more likely a node of another
    /// job than a spare, which would report success without having run.
    fn mistaken_for(&self, joining: &Joining) -> Option<String> {
        let join = &joining.join;
        let known = self.nodes.contains_key(&joining.incarnation) || joining.generation > 0;
        let fixed = join.min_nodes == join.max_nodes;
        let may_have_spares = join.max_nodes > 1 && !is_unnamed(&self.id);
        if may_have_spares || self.generation == 0 || known || !fixed {
            return None;
        }
        // A node whose connection is gone may be the one that comes back, as a new process.
        let there = self.nodes.values().filter(|node| node.conn.is_some()).count();
        (there >= join.max_nodes as usize).then(|| {
            format!(
                "job `{}` is already running with {} ({}): node `{}` belongs to a different job or is one too many\n  \
                 hint: give each job its own `--rdzv-id`; a job of several nodes then keeps extra nodes on standby",
                self.id,
                match join.max_nodes {
                    1 => "its only node".to_owned(),
                    several => format!("all of its {}", words::nodes(several)),
                },
                words::list(self.nodes.values().map(|node| node.join.hostname.as_str())),
                join.hostname
            )
        })
    }

    fn refuse(&mut self, turn: &mut Turn<'_>, joining: &Joining, code: Code, reason: String) {
        turn.decided(format!("refused node `{}`: {reason}", joining.join.hostname));
        let refused = Reply::Refused(Refused {
            code: code.into(),
            reason: reason.clone(),
            failures: None,
        });
        turn.send(Some(joining.conn), self.generation, refused.clone());
        // Before the first generation it is unknown which of them is right: all of them end, with the same code.
        let undecided = self.generation == 0 && matches!(self.phase, Phase::Gathering(_));
        if code == Code::Disagree && undecided {
            self.end(turn, refused, reason);
        }
        turn.close(Some(joining.conn));
    }

    fn join_first(&mut self, turn: &mut Turn<'_>, joining: Joining) {
        let Joining {
            conn,
            peer,
            incarnation,
            generation,
            assignment_id,
            join,
        } = joining;
        let from = Speech {
            incarnation: &incarnation,
            generation,
            assignment_id: &assignment_id,
        };
        let timeout = join_timeout(turn.config, &join);
        self.patience = self.patience.max(timeout);
        let (hostname, address) = (join.hostname.clone(), peer.remote);
        let mut node = Node {
            conn: Some(conn),
            peer,
            join,
            arrival: self.arrivals,
            lease_until: turn.at.now + turn.config.lease,
            last_word: turn.at.now,
            excuse: None,
            readiness: Readiness::Joined,
            step: None,
        };
        self.arrivals += 1;
        let done = self.has_succeeded(&incarnation);
        self.miss_assignment(turn, &from, &hostname);
        if generation == 0 {
            self.learn_of_generation(turn, &node.join);
        } else if let Err(cause) = self.place_of(turn, &from, &node.join) {
            // It may still run workers of a generation that went on without it, or that an earlier daemon
            // assigned: they have to be gone first, and no generation number may be used twice.
            node.readiness = Readiness::Stopping(generation);
            let over = self.generation_over_words(turn, &node, cause);
            turn.send(node.conn, generation, Reply::GenerationOver(over));
        }
        node.step = node.join.place.take().and_then(|place| place.heartbeat?.step);
        self.floor = self.floor.max(generation);
        if self.run_token.is_empty() && generation > 0 {
            // A daemon before this one has named the run.
            self.run_token.clone_from(&node.join.run_token);
        }
        if let Phase::Gathering(g) = &mut self.phase
            && self.generation == 0
            && self.nodes.is_empty()
        {
            g.until = turn.at.now + timeout;
        }
        let ready = node.readiness == Readiness::Joined;
        self.nodes.insert(incarnation.clone(), node);
        turn.decided(format!(
            "job `{}`: node `{hostname}` joined from {address}",
            self.id
        ));
        if done && ready {
            self.send_assignment(turn, &incarnation);
        } else if matches!(&self.phase, Phase::Recovering(recovery) if recovery.has(&incarnation)) {
            self.consider_recovered(turn, &incarnation);
        } else if ready {
            self.joined(turn, &incarnation);
        }
    }

    /// Whether a node that comes back may keep its place in its generation; if not, why.
    fn place_of(&mut self, turn: &mut Turn<'_>, from: &Speech<'_>, join: &Join) -> Result<(), String> {
        let Speech {
            incarnation,
            generation,
            assignment_id,
        } = *from;
        if self.is_of_another_assignment(generation, assignment_id) {
            self.learn_cost(turn, from, join);
            let words = self.another_assignment_words(generation, assignment_id);
            return Err(format!(
                "{words}: restarting the workers of node `{}`",
                join.hostname
            ));
        }
        if self.generation == 0 {
            return self.reclaim(turn, from, join);
        }
        if generation == self.generation && self.has_succeeded(incarnation) {
            return Ok(());
        }
        self.learn_cost(turn, from, join);
        Err(match &self.last_over {
            // It missed that its generation has ended.
            Some(over)
                if generation == self.generation && !self.lost.iter().any(|lost| lost == incarnation) =>
            {
                over.cause.clone()
            }
            _ if generation > self.generation => "the rendezvous daemon was restarted".to_owned(),
            _ => format!(
                "node `{}` was unreachable for longer than its lease",
                join.hostname
            ),
        })
    }

    /// A node learns that its generation went on without it: it has to stop its workers first.
    pub(super) fn went_on_without(&mut self, turn: &mut Turn<'_>, incarnation: &str, generation: u64) {
        let Some(node) = self.nodes.get_mut(incarnation) else {
            return;
        };
        node.readiness = Readiness::Stopping(generation);
        let cause = format!(
            "generation {generation} continued without node `{}`",
            node.join.hostname
        );
        let over = GenerationOver {
            cause,
            membership: true,
            ..GenerationOver::default()
        };
        turn.send(node.conn, generation, Reply::GenerationOver(over));
    }

    fn generation_over_words(&self, turn: &Turn<'_>, node: &Node, cause: String) -> GenerationOver {
        let backoff_ms = match &self.phase {
            Phase::Gathering(g) => g.not_before.saturating_sub(turn.at.now).as_millis() as u32,
            _ => 0,
        };
        GenerationOver {
            cause,
            restart_count: self.account.spent(),
            best_step: self.account.best(),
            max_restarts: node.join.max_restarts,
            backoff_ms,
            membership: true,
            ..GenerationOver::default()
        }
    }

    /// A node that is known: back after a broken connection, or ready after its workers were stopped.
    fn join_again(&mut self, turn: &mut Turn<'_>, joining: Joining) {
        let Joining {
            conn,
            peer,
            incarnation,
            generation,
            assignment_id: _,
            join,
        } = joining;
        let member = self.is_member(&incarnation);
        let Some(node) = self.nodes.get_mut(&incarnation) else {
            return;
        };
        let is_new_stream = node.conn != Some(conn);
        if is_new_stream {
            turn.close(node.conn);
            node.conn = Some(conn);
            node.peer = peer;
        }
        let silence = node.heard(turn);
        let asked = node.join.node_rank;
        node.join = join;
        node.join.node_rank = asked;
        node.join.place = None;
        if is_new_stream && matches!(node.readiness, Readiness::Stopping(stopping) if generation < stopping) {
            // It has missed the assignment with the stream that broke, and never had workers of that generation. On the
            // same stream its `Join` may have crossed the assignment.
            node.readiness = Readiness::Stopped;
        }
        self.tell_back(turn, &incarnation, silence);
        let Some(node) = self.nodes.get_mut(&incarnation) else {
            return;
        };
        match node.readiness {
            Readiness::Joined if member => {
                turn.detail(format!(
                    "job `{}`: node `{}` reconnected",
                    self.id, node.join.hostname
                ));
                self.send_assignment(turn, &incarnation);
                self.await_its_reports(turn);
            }
            Readiness::Stopping(stopping) => {
                // It has not confirmed the end of this generation, so it may not know of it.
                let over = match &self.last_over {
                    Some(over) if stopping == self.generation => over.clone(),
                    _ => {
                        let cause = format!(
                            "generation {stopping} continued without node `{}`",
                            node.join.hostname
                        );
                        GenerationOver {
                            cause,
                            membership: true,
                            ..GenerationOver::default()
                        }
                    }
                };
                turn.send(Some(conn), stopping, Reply::GenerationOver(over));
            }
            Readiness::Joined | Readiness::Stopped => {
                node.readiness = Readiness::Joined;
                self.joined(turn, &incarnation);
            }
        }
    }

    /// A node is ready: start, or tell it what it waits for.
    fn joined(&mut self, turn: &mut Turn<'_>, incarnation: &str) {
        let before = self.generation;
        self.consider_start(turn);
        if matches!(self.phase, Phase::Over(_)) || self.is_member(incarnation) || self.generation != before {
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

    /// Tells a node that has no part in anything yet why.
    pub(super) fn tell_waiting(&self, turn: &mut Turn<'_>, incarnation: &str, reason: String) {
        if let Some(node) = self.nodes.get(incarnation) {
            let waiting = Waiting {
                reason,
                lease_ms: turn.config.lease_ms(),
            };
            turn.send(node.conn, self.generation, Reply::Waiting(waiting));
        }
    }
}

/// How long an agent lets the daemon wait for other nodes, within the daemon's bound.
pub(super) fn join_timeout(config: &Config, join: &Join) -> Duration {
    Duration::from_millis(join.join_timeout_ms.into()).min(config.join_timeout_cap)
}

fn check_bounds(config: &Config, joining: &Joining, max_generation: u64) -> Result<(), String> {
    let join = &joining.join;
    let host = super::kv::clip(&join.hostname, 64);
    if join.protocol != PROTOCOL {
        return Err(format!(
            "node `{host}` uses version {} of the rendezvous protocol, this daemon {PROTOCOL}\n  \
             hint: install the same version of `ddp-run` on every node",
            join.protocol
        ));
    }
    if joining.generation > max_generation {
        return Err(format!(
            "node `{host}` reports generation {}, expected at most {max_generation}",
            joining.generation
        ));
    }
    let names = [
        &join.hostname,
        &join.local_addr,
        &join.job_signature,
        &join.run_token,
        &join.role,
        &joining.incarnation,
        &joining.assignment_id,
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
