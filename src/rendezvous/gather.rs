//! Gathering: when a generation starts, and what the nodes that are there wait for.

use std::fmt::Write as _;
use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Refused, refused::Code};

use super::event::Turn;
use super::job::{Job, Node, Phase, Readiness};
use super::ranks::{self, Candidate, Member};
use super::size::Limits;
use super::words;

impl Job {
    /// What the nodes that are there wait for, as of `now`.
    pub(super) fn waiting_words(&self, now: Duration) -> String {
        let g = match &self.phase {
            Phase::Gathering(g) => g,
            Phase::Recovering(recovery) => return recovery.waiting_words(now),
            Phase::Running(running) => return running.assignment.reason.clone(),
            Phase::Over(over) => return over.reason.clone(),
        };
        let ready = self.nodes.values().filter(|node| node.is_ready()).count() as u32;
        let (min, max) = self.limits();
        let names = words::list(
            self.nodes
                .values()
                .filter(|n| n.is_ready())
                .map(|n| n.join.hostname.as_str()),
        );
        let mut words = format!("{ready} of {} joined: {names}", words::nodes_within(min, max));
        if ready < min {
            let _ = write!(words, "; waiting for {} more", min - ready);
            words.push_str(&words::time_left(g.until, now));
        } else if self
            .nodes
            .values()
            .any(|node| node.readiness != Readiness::Joined)
        {
            words.push_str("; waiting for the workers of generation ");
            words.push_str(&self.generation.to_string());
            words.push_str(" to exit");
        } else if let Some(last_call) = g.last_call {
            // To a tenth of a second.
            let left = (last_call.saturating_sub(now).as_secs_f64() * 10.0).round() / 10.0;
            let joined = words::nodes(ready);
            words = format!("{joined} joined ({names}), enough to start; waiting up to {left} s for more");
        } else {
            words.push_str("; pausing before the restart");
        }
        words
    }

    /// How long more nodes are waited for; `default` if the job does not say.
    pub(super) fn last_call(&self, default: Duration) -> Duration {
        let asked = self.nodes.values().map(|node| node.join.last_call_ms).max();
        match asked {
            None | Some(0) => default,
            Some(ms) => Duration::from_millis(ms.into()),
        }
    }

    /// How many nodes the job needs and takes.
    pub(super) fn limits(&self) -> (u32, u32) {
        self.nodes
            .values()
            .next()
            .map_or((0, 0), |node| (node.join.min_nodes, node.join.max_nodes))
    }

    /// As [`Job::limits`], with the numbers of ranks that the workers can go on with.
    pub(super) fn size_limits(&self) -> Limits {
        let (min, max) = self.limits();
        Limits {
            min: min as usize,
            max: max as usize,
            ranks: self.rank_limits,
        }
    }

    /// Starts the next generation if the nodes are there, ends the job if they did not come in time.
    pub(super) fn consider_start(&mut self, turn: &mut Turn<'_>) {
        let (min, max) = self.limits();
        let candidates = self.candidates();
        let ready = candidates.len() as u32;
        let stopping = self
            .nodes
            .values()
            .any(|node| node.readiness != Readiness::Joined);
        let last_call_wait = self.last_call(turn.config.last_call);
        let all_back = !stopping
            && !self.previous.is_empty()
            && self
                .expected()
                .all(|member| candidates.iter().any(|c| c.incarnation == member.incarnation));
        let Phase::Gathering(g) = &mut self.phase else {
            return;
        };
        let now = turn.at.now;
        let timed_out = now >= g.until;
        if now < g.not_before {
            return;
        }
        // From here on the back-off is no deadline of its own.
        g.began = g.began.max(g.not_before);
        let enough = ready >= min && min > 0;
        let reason = if enough && ready >= max {
            format!("{} joined", words::all(max))
        } else if enough && all_back {
            format!(
                "{} rejoined after generation {}",
                words::all(ready),
                self.generation
            )
        } else if enough && timed_out {
            format!("{ready} of {} joined in time", words::nodes_within(min, max))
        } else if enough && !stopping {
            let last_call = *g.last_call.get_or_insert(now + last_call_wait);
            if now < last_call {
                return;
            }
            format!(
                "{ready} of {} joined within `last_call_timeout`",
                words::nodes_within(min, max)
            )
        } else {
            g.last_call = None;
            if timed_out {
                self.gathering_timed_out(turn);
            }
            return;
        };
        self.start(turn, candidates, &reason);
    }

    /// The nodes of the last generation that make the next one too, unless they are lost.
    pub(super) fn expected(&self) -> impl Iterator<Item = &Member> {
        self.previous.iter().filter(|member| !member.has_left)
    }

    fn candidates(&self) -> Vec<Candidate> {
        self.nodes
            .iter()
            .filter(|(_, node)| node.is_ready())
            .map(|(incarnation, node)| node.candidate(incarnation))
            .collect()
    }

    fn gathering_timed_out(&mut self, turn: &mut Turn<'_>) {
        let Phase::Gathering(g) = &self.phase else { return };
        if self.is_forgotten(turn.at.now) {
            // None of the nodes that an earlier daemon knew has come back.
            return;
        }
        let (min, max) = self.limits();
        let candidates = self.candidates();
        let hosts = |wanted: &dyn Fn(&Node) -> bool| -> Vec<&str> {
            self.nodes
                .values()
                .filter(|node| wanted(node))
                .map(|node| node.join.hostname.as_str())
                .collect()
        };
        let reason = words::TimedOut {
            job: &self.id,
            waited: turn.at.now.saturating_sub(g.began),
            came: hosts(&Node::is_ready),
            stopping: hosts(&|node| node.readiness != Readiness::Joined),
            gone: self
                .previous
                .iter()
                // A daemon that was restarted may never have learned the name of one.
                .filter(|member| !member.hostname.is_empty() && !self.nodes.contains_key(&member.incarnation))
                .map(|member| member.hostname.as_str())
                .collect(),
            missing_ranks: ranks::missing_ranks(&candidates, min),
            min,
            max,
        }
        .words();
        let refused = Refused {
            code: Code::TimedOut.into(),
            reason: reason.clone(),
            failures: None,
        };
        self.end(turn, Reply::Refused(refused), reason);
    }
}
