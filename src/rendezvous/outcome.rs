//! How generations and jobs end: failures, restarts within the budget, lost nodes, success, signals.

use ddp_proto::exit;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{GenerationOver, JobOver, Leave, WorkerExit};

use super::config::Config;
use super::event::Turn;
use super::job::{Gathering, Job, Over, Phase, Readiness, Suspect};
use super::joining::join_timeout;
use super::kv::clip;
use super::words;

/// Lost nodes that a job remembers, to give them the verdict should they come back.
const MAX_LOST: usize = 4096;

/// What ended a generation.
#[derive(Debug)]
pub(super) struct Blow {
    cause: String,
    /// Exit code of the job if the restart budget is used up.
    exit_code: i32,
    /// The worker that failed, and its host; none if a node is gone.
    failure: Option<(WorkerExit, String)>,
    /// A restart cannot help.
    permanent: bool,
}

impl Job {
    /// The first failure to arrive ends the generation; later ones are its consequences. One that says that it is a
    /// consequence itself is held back for a moment, for the cause to arrive.
    pub(super) fn worker_exit(
        &mut self,
        turn: &mut Turn<'_>,
        incarnation: &str,
        generation: u64,
        exit: WorkerExit,
    ) {
        if generation != self.generation || !self.is_member(incarnation) {
            return self.ignore(turn, incarnation, generation, "a worker's exit");
        }
        let hostname = self
            .nodes
            .get(incarnation)
            .map_or_else(String::new, |node| node.join.hostname.clone());
        let exit = clamp(turn.config, exit);
        let cause = words::worker_exit(&exit, &hostname);
        let blow = Blow {
            cause,
            exit_code: words::exit_code(&exit),
            permanent: exit.permanent,
            failure: Some((exit, hostname)),
        };
        // The agent of a single node has looked for a better cause already.
        if self.previous.len() == 1 || !blow.is_consequence() {
            return self.strike(turn, blow);
        }
        if let Phase::Running(running) = &mut self.phase
            && running.suspect.is_none()
        {
            turn.decided(format!(
                "job `{}`: {}; waiting {} ms for the cause",
                self.id,
                blow.cause,
                turn.config.culprit_wait.as_millis()
            ));
            let until = turn.at.now + turn.config.culprit_wait;
            running.suspect = Some(Suspect { blow, until });
        }
    }

    /// Ends the generation with the suspect when its time is over.
    pub(super) fn judge_suspect(&mut self, turn: &mut Turn<'_>) {
        if let Phase::Running(running) = &mut self.phase
            && let Some(suspect) = running.suspect.take_if(|suspect| suspect.until <= turn.at.now)
        {
            self.strike(turn, suspect.blow);
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
        if running.succeeded.len() == self.previous.len() {
            let reason = match self.previous.as_slice() {
                [alone] => format!("node `{}` succeeded", alone.hostname),
                all => format!("all {} nodes succeeded", all.len()),
            };
            self.job_over(turn, i32::from(exit::SUCCESS), reason, None);
        }
    }

    /// An agent goes away for good. A signal to one of them stops the whole job.
    pub(super) fn leave(&mut self, turn: &mut Turn<'_>, incarnation: &str, leave: &Leave) {
        let spare = matches!(self.phase, Phase::Running(_)) && !self.is_member(incarnation);
        let over = matches!(self.phase, Phase::Over(_));
        let name = self.node_name(incarnation);
        match leave.signal {
            Some(signal) if !spare && !over => {
                let reason = format!("{name} was stopped by {}", words::signal_name(signal));
                self.job_over(turn, i32::from(exit::of_signal(signal)), reason, None);
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
                let began = self.highest_generation() > 0;
                if began && !spare && !self.has_succeeded(incarnation) && self.nodes.len() <= min as usize {
                    // It says itself that it will not come back, and the others are too few.
                    self.job_over(turn, i32::from(code), cause, None);
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
        let why = if node.conn.is_some() {
            format!("no heartbeat for {:.1} s", turn.config.lease.as_secs_f64())
        } else {
            format!(
                "its connection broke and it did not come back within {:.1} s",
                turn.config.reconnect_grace.as_secs_f64()
            )
        };
        let cause = format!("{} was lost: {why}", self.node_name(incarnation));
        self.node_lost(turn, incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
    }

    /// A node is gone. If it was needed, the generation is over; `exit_code` ends the job without a restart.
    pub(super) fn node_lost(&mut self, turn: &mut Turn<'_>, incarnation: &str, cause: &str, exit_code: u8) {
        if self.is_member(incarnation) && !self.has_succeeded(incarnation) {
            let cause = cause.to_owned();
            self.strike(
                turn,
                Blow {
                    cause,
                    exit_code: i32::from(exit_code),
                    failure: None,
                    permanent: false,
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

    /// Ends the running generation: the next one if the budget allows it, else the end of the job.
    fn strike(&mut self, turn: &mut Turn<'_>, blow: Blow) {
        let Phase::Running(running) = &self.phase else {
            return;
        };
        let max_restarts = running.assignment.max_restarts;
        if blow.permanent || self.restart_count >= max_restarts {
            let reason = match max_restarts {
                _ if blow.permanent => format!("{}; a restart cannot help", blow.cause),
                0 => blow.cause,
                n => format!("{}; all {n} restarts are used up", blow.cause),
            };
            return self.job_over(turn, blow.exit_code, reason, blow.failure);
        }
        self.restart_count += 1;
        let backoff = turn.config.backoff(self.restart_count, turn.at.dice);
        turn.decided(format!(
            "job `{}`: generation {} is over: {}; restart {} of {max_restarts} after {} ms",
            self.id,
            self.generation,
            blow.cause,
            self.restart_count,
            backoff.as_millis()
        ));
        let (first_failure, first_failure_host) = blow.failure.unzip();
        let over = GenerationOver {
            cause: blow.cause,
            first_failure,
            first_failure_host: first_failure_host.unwrap_or_default(),
            restart_count: self.restart_count,
            max_restarts,
            backoff_ms: backoff.as_millis() as u32,
        };
        let members = self.previous.iter().map(|seat| &seat.incarnation);
        let timeouts = self
            .nodes
            .values()
            .map(|node| join_timeout(turn.config, &node.join));
        let timeout = timeouts.max().unwrap_or_default();
        for incarnation in members {
            if let Some(node) = self.nodes.get_mut(incarnation) {
                node.readiness = Readiness::Stopping(self.generation);
                turn.send(node.conn, self.generation, Reply::GenerationOver(over.clone()));
            }
        }
        self.kv.end(&over.cause, &mut turn.effects);
        self.last_over = Some(over);
        let now = turn.at.now;
        let not_before = now + backoff;
        let until = not_before + timeout;
        self.phase = Phase::Gathering(Gathering {
            began: now,
            until,
            not_before,
            last_call: None,
        });
    }

    fn job_over(
        &mut self,
        turn: &mut Turn<'_>,
        exit_code: i32,
        reason: String,
        failure: Option<(WorkerExit, String)>,
    ) {
        let (first_failure, host) = failure.unzip();
        let verdict = Reply::JobOver(JobOver {
            exit_code,
            reason: reason.clone(),
            first_failure,
            first_failure_host: host.unwrap_or_default(),
        });
        self.end(turn, verdict, reason);
    }

    /// The last word to every node that is there; those that are away hear it when they come back.
    pub(super) fn end(&mut self, turn: &mut Turn<'_>, verdict: Reply, reason: String) {
        turn.decided(format!("job `{}` is over: {reason}", self.id));
        for node in self.nodes.values() {
            turn.send(node.conn, self.generation, verdict.clone());
        }
        self.kv
            .end(&format!("the job is over: {reason}"), &mut turn.effects);
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

impl Blow {
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
    exit
}
