//! How generations and jobs end: failures, restarts within the budget, lost nodes, success, signals.

use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{GenerationOver, JobOver, Leave, WorkerExit};

use super::config::Config;
use super::event::Turn;
use super::failures::tell;
use super::job::{Gathering, Job, Node, Over, Phase, Readiness, Suspect};
use super::joining::join_timeout;
use super::kv::clip;
use super::policy::{Ended, Verdict, Why};
use super::ranks::Member;
use super::record::Stage;
use super::words;

/// Lost nodes that a job remembers, to give them the verdict should they come back.
const MAX_LOST: usize = 4096;

/// What ended a generation.
#[derive(Debug)]
pub(super) struct GenerationEnd {
    cause: String,
    /// Exit code of the job if the restart budget is used up.
    exit_code: i32,
    /// The worker that failed, and its host; none if a node is gone.
    failure: Option<(WorkerExit, String)>,
    why: Why,
}

impl Job {
    /// The first failure to arrive ends the generation; later ones are its consequences. One that says that it is a
    /// consequence itself is held back for a moment, for the cause to arrive; if a node's connection is broken, any
    /// failure is, until that node is lost or has come back: a script whose peer is gone fails like any other.
    pub(super) fn worker_exit(
        &mut self,
        turn: &mut Turn<'_>,
        incarnation: &str,
        generation: u64,
        exit: WorkerExit,
    ) {
        self.note_exits(turn, incarnation, generation, std::slice::from_ref(&exit));
        if generation != self.generation || !self.is_member(incarnation) {
            return self.ignore(turn, incarnation, generation, "a worker's exit");
        }
        let hostname = self
            .nodes
            .get(incarnation)
            .map_or_else(String::new, |node| node.join.hostname.clone());
        self.note_sighting(exit.rank, exit.lost_rank);
        let exit = clamp(turn.config, exit);
        let cause = words::worker_exit(&exit, &hostname);
        let end = GenerationEnd {
            cause,
            exit_code: words::exit_code(&exit),
            why: match &exit {
                exit if exit.permanent => Why::Permanent,
                exit if exit.port_taken => Why::PortTaken,
                _ => Why::Failure,
            },
            failure: Some((exit, hostname)),
        };
        let away = self.away().next().map(|(node, _)| node.join.hostname.clone());
        let may_follow = end.is_consequence() || (away.is_some() && end.may_be_a_lost_peer());
        // The agent of a single node has looked for a better cause already.
        if self.previous.len() == 1 || !may_follow {
            return self.end_generation(turn, end);
        }
        if let Phase::Running(running) = &mut self.phase
            && running
                .suspect
                .as_ref()
                .is_none_or(|suspect| suspect.end.is_consequence() && !end.is_consequence())
        {
            let wait = turn.config.culprit_wait;
            let awaited = away.map_or_else(
                || format!("waiting {} ms for the cause", wait.as_millis()),
                |node| format!("node `{node}` is away and may be the cause: waiting for it"),
            );
            turn.decided(format!("job `{}`: {}; {awaited}", self.id, end.cause));
            // A connection that breaks again and again does not hold it back for ever.
            let latest = turn.at.now + turn.config.lease + wait;
            let times = (running.suspect.take()).map(|suspect| (suspect.until, suspect.latest));
            let (until, latest) = times.unwrap_or((turn.at.now + wait, latest));
            running.suspect = Some(Suspect { end, until, latest });
            self.end_excuses(turn.at.now);
        }
        self.believe_witnesses(turn);
    }

    /// Ends the generation with the suspect when its time is over and no node is away that may be the cause.
    pub(super) fn judge_suspect(&mut self, turn: &mut Turn<'_>) {
        if self.suspect_until().is_some_and(|until| until <= turn.at.now)
            && let Phase::Running(running) = &mut self.phase
            && let Some(suspect) = running.suspect.take()
        {
            self.end_generation(turn, suspect.end);
        }
    }

    /// When the suspect is judged, if there is one, and unless a node comes back before.
    pub(super) fn suspect_until(&self) -> Option<Duration> {
        let Phase::Running(running) = &self.phase else {
            return None;
        };
        let suspect = running.suspect.as_ref()?;
        let until = self.away().map(|(_, until)| until).chain([suspect.until]).max();
        until.map(|until| until.min(suspect.latest))
    }

    /// Ends the generation with a failure that was held back, if there is one and it is no consequence.
    pub(super) fn end_with_held_failure(&mut self, turn: &mut Turn<'_>) {
        if let Phase::Running(running) = &mut self.phase
            && let Some(suspect) = running.suspect.take_if(|suspect| !suspect.end.is_consequence())
        {
            self.end_generation(turn, suspect.end);
        }
    }

    /// Members that are out of reach before they are done, and when each is lost.
    fn away(&self) -> impl Iterator<Item = (&Node, Duration)> {
        let members = self
            .previous
            .iter()
            .filter(|member| !self.has_succeeded(&member.incarnation));
        let nodes = members.filter_map(|member| self.nodes.get(&member.incarnation));
        nodes
            .filter(|node| node.conn.is_none() || node.excuse.is_some())
            .map(|node| (node, node.lease_until))
    }

    /// A member has come back: what it has to report follows, and may be the cause.
    pub(super) fn await_its_reports(&mut self, turn: &Turn<'_>) {
        if let Phase::Running(running) = &mut self.phase
            && let Some(suspect) = &mut running.suspect
        {
            suspect.until = suspect.until.max(turn.at.now + turn.config.culprit_wait);
        }
    }

    /// All workers of a node ended with 0; when that is true of every node, the job has succeeded.
    pub(super) fn node_succeeded(&mut self, turn: &mut Turn<'_>, incarnation: &str, generation: u64) {
        if generation != self.generation || !self.is_member(incarnation) {
            return self.ignore(turn, incarnation, generation, "success");
        }
        let Phase::Running(running) = &mut self.phase else {
            return;
        };
        running.succeeded.insert(incarnation.to_owned());
        running.progress.success = Some(turn.at.now);
        if running.succeeded.len() == self.previous.len() {
            let reason = match self.previous.as_slice() {
                [alone] => format!("node `{}` succeeded", alone.hostname),
                all => format!("all {} nodes succeeded", all.len()),
            };
            self.job_over(turn, i32::from(exit::SUCCESS), reason);
        }
    }

    /// The job does as well without this node.
    fn is_spare(&self, incarnation: &str) -> bool {
        match &self.phase {
            Phase::Running(_) => !self.is_member(incarnation),
            Phase::Recovering(recovery) => !recovery.has(incarnation),
            // The nodes of the last generation make the next one too, as long as none of them is lost.
            Phase::Gathering(_) => {
                let is_there = |member: &Member| self.nodes.contains_key(&member.incarnation);
                let are_enough = !self.previous.is_empty() && self.expected().all(is_there);
                are_enough && self.rank_of(incarnation).is_none()
            }
            Phase::Over(_) => false,
        }
    }

    /// An agent goes away for good. A signal to one of them stops the whole job, unless the others can go on without
    /// it.
    pub(super) fn leave(&mut self, turn: &mut Turn<'_>, incarnation: &str, leave: &Leave) {
        let spare = self.is_spare(incarnation);
        let over = matches!(self.phase, Phase::Over(_));
        let name = self.node_name(incarnation);
        match leave.signal {
            Some(signal) if !spare && !over && self.can_go_on_without(turn.config, incarnation) => {
                self.node_left(turn, incarnation, signal);
            }
            Some(signal) if !spare && !over => {
                let reason = format!("{name} was stopped by {}", words::signal_name(signal));
                let over = JobOver {
                    exit_code: i32::from(exit::of_signal(signal)),
                    reason: reason.clone(),
                    signal: Some(signal),
                    ..JobOver::default()
                };
                self.end(turn, Reply::JobOver(over), reason);
            }
            _ if !over => {
                let words = clip(&leave.reason, turn.config.max_name_bytes);
                let cause = if words.is_empty() {
                    format!("{name} left")
                } else {
                    format!("{name} left: {words}")
                };
                let code = leave
                    .exit_code
                    .and_then(|code| u8::try_from(code).ok())
                    .unwrap_or(exit::INTERNAL);
                let (min, _) = self.limits();
                // As long as nodes are to come back, it is not known who is left.
                let recovering = matches!(self.phase, Phase::Recovering(_));
                let began = self.highest_generation() > 0 && !recovering;
                if began && !spare && !self.has_succeeded(incarnation) && self.nodes.len() <= min as usize {
                    // It says itself that it will not come back, and the others are too few.
                    self.note_node_gone(turn, incarnation, &cause);
                    self.job_over(turn, i32::from(code), cause);
                } else {
                    self.node_lost(turn, incarnation, &cause, code);
                }
            }
            _ => {}
        }
        if let Some(node) = self.nodes.remove(incarnation) {
            turn.close(node.conn);
        }
        self.consider_start(turn);
    }

    /// The lease of a node ran out.
    pub(super) fn lease_lost(&mut self, turn: &mut Turn<'_>, incarnation: &str) {
        let Some(node) = self.nodes.get(incarnation) else {
            return;
        };
        let is_open = node.conn.is_some() || node.excuse.is_some();
        let why = if node.excuse.is_some() {
            let silence = turn.at.now.saturating_sub(node.last_word).as_secs_f64();
            format!("no word of it for {silence:.1} s")
        } else if is_open {
            format!("no heartbeat for {:.1} s", turn.config.lease.as_secs_f64())
        } else {
            format!(
                "its connection broke and it did not reconnect within {:.1} s",
                turn.config.reconnect_grace.as_secs_f64()
            )
        };
        let cause = format!("{} was lost: {why}", self.node_name(incarnation));
        let fell_silent = is_open && !matches!(self.phase, Phase::Over(_));
        self.node_lost(turn, incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        if fell_silent && self.silent.len() < MAX_LOST {
            let until = turn.at.now + turn.config.lease;
            self.silent.insert(incarnation.to_owned(), until);
        }
    }

    /// A node is gone. If it was needed, the generation is over; `exit_code` ends the job without a restart.
    pub(super) fn node_lost(&mut self, turn: &mut Turn<'_>, incarnation: &str, cause: &str, exit_code: u8) {
        self.note_node_gone(turn, incarnation, cause);
        if let Phase::Recovering(recovery) = &mut self.phase
            && recovery.has(incarnation)
        {
            recovery.hurry(turn.at.now + turn.config.lease);
        }
        if self.is_member(incarnation) && !self.has_succeeded(incarnation) {
            let cause = cause.to_owned();
            let (min, _) = self.limits();
            let enough = self.nodes.len() > min as usize;
            self.end_generation(
                turn,
                GenerationEnd {
                    cause,
                    exit_code: i32::from(exit_code),
                    failure: None,
                    why: if enough { Why::Membership } else { Why::NodeMissing },
                },
            );
        } else {
            turn.decided(format!("job `{}`: {cause}", self.id));
        }
        if let Some(node) = self.nodes.remove(incarnation) {
            turn.close(node.conn);
            if self.lost.len() >= MAX_LOST {
                self.lost.pop_front();
            }
            self.lost.push_back(incarnation.to_owned());
        }
    }

    /// The node has done its part of the running generation.
    pub(super) fn has_succeeded(&self, incarnation: &str) -> bool {
        matches!(&self.phase, Phase::Running(running) if running.succeeded.contains(incarnation))
    }

    /// The generation cannot go on as it is, and no worker is to blame: the next one follows.
    pub(super) fn break_up(&mut self, turn: &mut Turn<'_>, cause: String) {
        self.end_generation(
            turn,
            GenerationEnd {
                cause,
                exit_code: i32::from(exit::RENDEZVOUS_TIMED_OUT),
                failure: None,
                why: Why::Membership,
            },
        );
    }

    /// Ends the running generation: the next one if the policy allows it, else the end of the job.
    fn end_generation(&mut self, turn: &mut Turn<'_>, end: GenerationEnd) {
        let Phase::Running(running) = &self.phase else {
            return;
        };
        let max_restarts = running.assignment.max_restarts;
        let ended = Ended {
            ran: turn.at.now.saturating_sub(running.since) + running.ran_before,
            step: self.nodes.values().filter_map(|node| node.step).max(),
            why: end.why,
        };
        let verdict = self.account.close(turn.config, max_restarts, ended);
        let no_restart = match verdict {
            Verdict::Restart { .. } | Verdict::Regroup => None,
            Verdict::Permanent => Some("a restart cannot help".to_owned()),
            Verdict::UsedUp if max_restarts == 0 => Some(String::new()),
            Verdict::UsedUp => Some(format!("no restarts left ({max_restarts}/{max_restarts} used)")),
            Verdict::Hopeless { times } => Some(format!(
                "the last {times} starts failed within {} s each, without progress",
                turn.config.quick_failure.as_secs_f64()
            )),
        };
        if let Some(no_restart) = no_restart {
            return self.failed_for_good(turn, end, no_restart, max_restarts);
        }
        let membership = verdict == Verdict::Regroup;
        let spent = self.account.spent();
        let backoff = if membership {
            Duration::ZERO
        } else {
            turn.config.backoff(spent, turn.at.dice)
        };
        let (first_failure, first_failure_host) = end.failure.unzip();
        let over = GenerationOver {
            cause: end.cause,
            first_failure,
            first_failure_host: first_failure_host.unwrap_or_default(),
            restart_count: spent,
            max_restarts,
            backoff_ms: backoff.as_millis() as u32,
            membership,
            at_step_boundary: false,
            best_step: self.account.best(),
        };
        self.regroup(turn, over);
    }

    /// Tells all members that the generation is over, and gathers them for the next one.
    pub(super) fn regroup(&mut self, turn: &mut Turn<'_>, over: GenerationOver) {
        let next = if over.membership {
            "this does not count as a restart".to_owned()
        } else {
            let GenerationOver {
                restart_count,
                max_restarts,
                backoff_ms,
                ..
            } = &over;
            let when = match backoff_ms {
                0 => "now".to_owned(),
                pause => format!("in {pause} ms"),
            };
            format!("restarting {when} ({restart_count}/{max_restarts})")
        };
        turn.decided(format!(
            "job `{}`: generation {} ended: {}; {next}",
            self.id, self.generation, over.cause
        ));
        self.attempts += 1;
        self.end_excuses(turn.at.now);
        let members = self.previous.iter().map(|member| &member.incarnation);
        let timeouts = self
            .nodes
            .values()
            .map(|node| join_timeout(turn.config, &node.join));
        let timeout = timeouts.max().unwrap_or(self.patience);
        for incarnation in members {
            if let Some(node) = self.nodes.get_mut(incarnation) {
                node.readiness = Readiness::Stopping(self.generation);
                turn.send(node.conn, self.generation, Reply::GenerationOver(over.clone()));
            }
        }
        self.kv.end(&over.cause, &mut turn.effects);
        let not_before = turn.at.now + Duration::from_millis(over.backoff_ms.into());
        self.last_over = Some(over);
        self.record(turn, Stage::Ended);
        self.phase = Phase::Gathering(Gathering {
            began: turn.at.now,
            until: not_before + timeout,
            not_before,
            last_call: None,
        });
    }

    /// The job ends with what ended its generation.
    fn failed_for_good(
        &mut self,
        turn: &mut Turn<'_>,
        end: GenerationEnd,
        no_restart: String,
        max_restarts: u32,
    ) {
        let reason = if no_restart.is_empty() {
            end.cause
        } else {
            format!("{}; {no_restart}", end.cause)
        };
        let (first_failure, host) = end.failure.unzip();
        let over = JobOver {
            exit_code: end.exit_code,
            reason: reason.clone(),
            first_failure,
            first_failure_host: host.unwrap_or_default(),
            no_restart: if max_restarts == 0 {
                String::new()
            } else {
                no_restart
            },
            ..JobOver::default()
        };
        self.end(turn, Reply::JobOver(over), reason);
    }

    fn job_over(&mut self, turn: &mut Turn<'_>, exit_code: i32, reason: String) {
        let over = JobOver {
            exit_code,
            reason: reason.clone(),
            ..JobOver::default()
        };
        self.end(turn, Reply::JobOver(over), reason);
    }

    /// The verdict for every node that is there; those that are away get it when they come back.
    pub(super) fn end(&mut self, turn: &mut Turn<'_>, mut verdict: Reply, reason: String) {
        turn.decided(format!("job `{}` ended: {reason}", self.id));
        self.end_excuses(turn.at.now);
        tell(&mut verdict, self.failures.told());
        for node in self.nodes.values() {
            turn.send(node.conn, self.generation, verdict.clone());
        }
        self.kv
            .end(&format!("the job has ended: {reason}"), &mut turn.effects);
        if let Some(stage) = Stage::of_verdict(&verdict) {
            self.record(turn, stage);
        }
        let told = self.nodes.keys().chain(&self.lost).cloned().collect();
        let until = turn.at.now + turn.config.linger;
        self.phase = Phase::Over(Over {
            verdict,
            reason,
            told,
            until,
        });
    }
}

impl GenerationEnd {
    /// A script whose peer is gone exits with some code, or aborts as NCCL's watchdog does. Other signals have causes of
    /// their own.
    fn may_be_a_lost_peer(&self) -> bool {
        let aborts = |signal| signal == nix::libc::SIGABRT;
        let worker = self.failure.as_ref().map(|(exit, _)| exit);
        matches!(self.why, Why::Failure) && worker.is_some_and(|exit| exit.signal.is_none_or(aborts))
    }

    fn is_consequence(&self) -> bool {
        self.failure.as_ref().is_some_and(|(exit, _)| exit.consequence)
    }
}

/// A worker's exit within the daemon's bounds: it is sent to every node. The last lines of stderr are kept.
fn clamp(config: &Config, mut exit: WorkerExit) -> WorkerExit {
    let mut left = config.max_tail_bytes;
    let mut kept = 0;
    for line in exit.stderr_tail.iter().rev() {
        let bytes = line.len() + 1;
        if bytes > left {
            break;
        }
        left -= bytes;
        kept += 1;
    }
    exit.stderr_tail.drain(..exit.stderr_tail.len() - kept);
    let cut = |text: &mut String, bytes: usize| text.truncate(clip(text, bytes).len());
    cut(&mut exit.message, config.max_tail_bytes);
    cut(&mut exit.log_file, config.max_name_bytes.max(4096));
    cut(&mut exit.activity, config.max_name_bytes);
    exit
}
