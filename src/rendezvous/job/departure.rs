//! Nodes that leave, are stopped by a signal, or are lost.
//!
//! A node that is stopped by a signal leaves as others come: at a step boundary, for no restart, if MIN nodes are left
//! without it, with which the workers can go on. Else the job is over when its workers are gone. So it is when a node
//! is stopped while others are to come back to a daemon that was restarted: which nodes are left is not known then.
//!
//! A node that two witnesses saw die is lost at once: its own connection to the daemon broke, and so did the data
//! connection of another node's worker to one of its ranks. One witness alone may be wrong. A cut link to the daemon
//! leaves the data plane intact, and a data connection breaks too when a worker of a healthy node fails, which that node
//! reports itself.

use ddp_proto::exit;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{JobOver, Leave, LostRank};

use super::generation_end::GenerationEnd;
use super::running::Running;
use super::{Job, Phase};
use crate::rendezvous::config::{Callers, Config};
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::Origin;
use crate::rendezvous::messages;
use crate::rendezvous::messages::clip;
use crate::rendezvous::policy::EndReason;

impl Job {
    /// An agent goes away for good. A signal to one of them stops the whole job, unless the others can go on without
    /// it.
    pub(super) fn leave(&mut self, context: &mut ApplyContext<'_>, incarnation: &str, leave: &Leave) {
        let name = self.table.name_of(incarnation);
        let is_needed = !self.is_spare(incarnation);
        match leave.signal {
            _ if matches!(self.phase, Phase::Over(_)) => {}
            // A peer that has proved nothing does not end a job that has not begun.
            Some(_) if self.is_undecided() && context.config.callers == Callers::Anybody => {}
            Some(signal) if is_needed && self.can_go_on_without(context.config, incarnation) => {
                self.node_left(context, incarnation, signal);
            }
            Some(signal) if is_needed => {
                let over = JobOver {
                    exit_code: i32::from(exit::of_signal(signal)),
                    reason: format!("{name} was stopped by {}", messages::signal_name(signal)),
                    signal: Some(signal),
                    ..JobOver::default()
                };
                self.end(context, Reply::JobOver(over));
            }
            _ => {
                let words = clip(&leave.reason, context.config.max_name_bytes);
                let cause = if words.is_empty() {
                    format!("{name} left")
                } else {
                    format!("{name} left: {words}")
                };
                let code = leave.exit_code.and_then(|code| u8::try_from(code).ok());
                let code = code.unwrap_or(exit::INTERNAL);
                let (min, _) = self.table.limits();
                // As long as nodes are to come back, it is not known who is left.
                let recovering = matches!(self.phase, Phase::Recovering(_));
                let began = self.counter.highest() > 0 && !recovering;
                let are_too_few = self.table.nodes().len() <= min as usize;
                if began && is_needed && !self.has_succeeded(incarnation) && are_too_few {
                    // It says itself that it will not come back, and the others are too few.
                    self.note_node_gone(context, incarnation, &cause);
                    self.job_over(context, code, cause);
                } else {
                    self.node_lost(context, incarnation, &cause, code);
                }
            }
        }
        self.table.dismiss(context, incarnation);
        self.workers_ended(incarnation);
        self.consider_start(context);
    }

    /// The job does not need this node.
    fn is_spare(&self, incarnation: &str) -> bool {
        match &self.phase {
            Phase::Running(_) => !self.is_member(incarnation),
            Phase::Recovering(recovery) => !recovery.has(incarnation),
            // The nodes of the last generation make the next one too, as long as none of them is lost.
            Phase::Gathering(_) => {
                let are_enough = self.table.are_all_there();
                are_enough && self.table.rank_of(incarnation).is_none()
            }
            Phase::Over(_) => false,
        }
    }

    /// A signal stops a node, whose workers stop at a step boundary: so do the others, if they can go on without it.
    pub(super) fn node_leaving(&mut self, context: &mut ApplyContext<'_>, from: &Origin, signal: i32) {
        if !self.is_of_member(from) || !self.can_go_on_without(context.config, &from.incarnation) {
            // Its `Leave` decides.
            return self.ignore(context, from, "the notice to leave");
        }
        let cause = self.left_words(&from.incarnation, signal);
        self.change_nodes(context, cause);
    }

    /// A node that was stopped by a signal is gone, and the others go on without it.
    fn node_left(&mut self, context: &mut ApplyContext<'_>, incarnation: &str, signal: i32) {
        let cause = self.left_words(incarnation, signal);
        if self.is_at_work(incarnation) {
            // It had no workers to stop, or its word that it would leave was lost.
            self.break_up(context, cause);
        } else {
            context.decided(format!("job `{}`: {cause}", self.id));
        }
        self.table.mark_left(incarnation);
    }

    /// True if the other nodes are enough, in a number that the workers support.
    fn can_go_on_without(&self, config: &Config, incarnation: &str) -> bool {
        // As long as nodes are to come back to a daemon that was restarted, it is not known who is left. The job ends
        // then, rather than wait for nodes that may never come.
        let are_known = matches!(self.phase, Phase::Gathering(_) | Phase::Running(_));
        let is_host = config.host.as_deref() == Some(incarnation);
        are_known && !is_host && self.table.suffices_without(incarnation)
    }

    fn left_words(&self, incarnation: &str, signal: i32) -> String {
        let (name, signal) = (self.table.name_of(incarnation), messages::signal_name(signal));
        format!("{name} was stopped by {signal}; continuing without it")
    }

    /// The lease of a node ran out.
    pub(super) fn lease_lost(&mut self, context: &mut ApplyContext<'_>, incarnation: &str) {
        let Some(node) = self.table.get(incarnation) else {
            return;
        };
        let why = node.lease_words(context);
        let cause = format!("{} was lost: {why}", self.table.name_of(incarnation));
        self.node_lost(context, incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        if matches!(self.phase, Phase::Gathering(_)) && self.takeover.until(context.at.now).is_some() {
            for node in self.table.candidates() {
                self.tell_waiting(context, &node.incarnation, self.waiting_words(context.at.now));
            }
        }
    }

    /// A member of the running generation reports that a worker lost its connection to a rank of another node.
    pub(super) fn note_lost_peer(
        &mut self,
        context: &mut ApplyContext<'_>,
        from: &Origin,
        seen: Option<LostRank>,
    ) {
        if let Some(seen) = seen
            && self.is_of_member(from)
            && let (Some(running), Some(own)) =
                (self.phase.running_mut(), self.table.rank_of(&from.incarnation))
            && running.note_lost_peer(own, seen)
        {
            self.believe_witnesses(context);
            self.plan_wake();
        }
    }

    /// Loses a member whose own connection broke and that a peer reported lost.
    pub(super) fn believe_witnesses(&mut self, context: &mut ApplyContext<'_>) {
        let is_gone = |node_rank: u32| {
            let incarnation = &self.table.members().get(node_rank as usize)?.incarnation;
            let node = self.table.get(incarnation)?;
            (!node.is_connected() && !self.has_succeeded(incarnation)).then(|| incarnation.clone())
        };
        let lost_peers = self.phase.running().into_iter().flat_map(Running::lost_peers);
        let mut gone = lost_peers.filter_map(|(rank, report)| Some((is_gone(*rank)?, *report)));
        if let Some((incarnation, LostRank { rank, witness })) = gone.next() {
            let cause = format!(
                "{} was lost: its connection broke, and rank {witness} lost its connection to rank {rank} there",
                self.table.name_of(&incarnation)
            );
            self.node_lost(context, &incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
            self.takeover.ended(&incarnation);
        }
    }

    /// A node is lost. If it was needed, the generation ends; `exit_code` is the job's if no restart is left.
    pub(super) fn node_lost(
        &mut self,
        context: &mut ApplyContext<'_>,
        incarnation: &str,
        cause: &str,
        exit_code: u8,
    ) {
        self.note_node_gone(context, incarnation, cause);
        self.await_end_of(context, incarnation);
        if let Phase::Recovering(recovery) = &mut self.phase {
            recovery.lose(context, incarnation);
        }
        if self.is_at_work(incarnation) {
            let (min, _) = self.table.limits();
            let why = if self.table.nodes().len() > min as usize {
                EndReason::Membership
            } else {
                EndReason::NodeMissing
            };
            let end = GenerationEnd::without_a_node(cause.to_owned(), exit_code, why);
            self.end_generation(context, end);
        } else {
            context.decided(format!("job `{}`: {cause}", self.id));
        }
        // The others do not wait for it, if they are enough.
        self.table.mark_left(incarnation);
        self.table.lose(context, incarnation);
    }
}
