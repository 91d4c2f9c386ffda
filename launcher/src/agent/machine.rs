//! The decisions of the agent: `(state, event) -> (state, effects)`. No I/O, no clock, no processes.
//!
//! ```text
//!            Assignment              a worker fails, GenerationOver, JobOver, a signal
//! Joining ──────────────▶ Running ───────────────────────────────────▶ Stopping
//!    ▲  ▲                    │ all ended with 0                            │ all gone
//!    │  │                    ▼                                             ▼
//!    │  └── GenerationOver ─ Succeeded           Joining | Undecided | Leaving
//!    └────── GenerationOver ── Undecided (own worker failed, the daemon has not decided yet)
//! ```
//!
//! There is one stop routine, whatever the reason: notify with the cause → SIGTERM, or the signal that is the reason →
//! grace → SIGKILL → bounded wait → sweep what is left. Native workers get no signal but SIGKILL.

use std::time::Duration;

use ddp_proto::client::RESTART_BACKOFF_CAP;
use ddp_proto::exit;
use ddp_proto::ids::{Generation, LocalRank};
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use ddp_proto::rendezvous::{
    Assignment, DaemonMessage, GenerationOver, NodeLeaving, NodeSucceeded, WorkerExit,
};

use super::blame::Suspect;
use super::contracts;
use super::event::{Effect, Event};
use super::exit_reason::ExitReason;
use crate::supervise::ending::{Ending, signal_name};

/// How long the daemon may take to decide what follows a failure of ours.
pub const VERDICT_WAIT: Duration = Duration::from_secs(30);
/// How long saying good-bye to the daemon may take.
pub const LEAVE_WAIT: Duration = Duration::from_secs(2);
/// Beyond the time that the daemon itself waits for the other nodes, which begins after its pause before a restart.
const JOIN_MARGIN: Duration = RESTART_BACKOFF_CAP.saturating_add(Duration::from_secs(15));

/// Generations are below this: workers parse 32 bits.
const MAX_GENERATIONS: u64 = 1 << 31;

/// What the decisions depend on and never changes.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Of this node.
    pub hostname: String,
    /// The workers are `ddp-train`'s: they obey no signal but SIGKILL.
    pub native: bool,
    /// As in the plan.
    pub resume_words: Option<String>,
    /// How long this node would wait for others.
    pub join_timeout: Duration,
    /// How long workers may take to end.
    pub shutdown_timeout: Duration,
    /// Workers that this node offers.
    pub workers: u32,
    /// Nodes may come and go.
    pub elastic: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Worker {
    Waiting,
    Running,
    Ended(Ending),
}

/// How far the stop routine has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// The workers were asked to stop at a step boundary. Native ones have the whole of the grace for it, others most.
    Asked,
    /// The workers know why, and may end on their own.
    Notified,
    /// SIGTERM was sent, or the signal that is the reason.
    Terminated,
    /// SIGKILL was sent.
    Killed,
    /// The workers are gone; their leftovers are looked for.
    Sweeping,
}

/// What follows when the workers are gone.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Then {
    /// They all ended with 0.
    Succeed,
    /// One failed; the daemon decides.
    AskDaemon,
    /// One failed, and then this signal came: nothing is started again, but a verdict of the daemon goes before it.
    StopUnlessOver(i32),
    /// The daemon wants the next generation.
    Rejoin,
    /// The end.
    Finish(ExitReason),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Phase {
    Joining,
    Running,
    Stopping {
        stage: Stage,
        then: Then,
    },
    Succeeded,
    Undecided,
    Leaving(ExitReason),
    Done,
}

/// The state of the agent.
#[derive(Debug)]
pub struct Machine {
    pub(super) rules: Rules,
    pub(super) phase: Phase,
    pub(super) generation: Generation,
    /// Random name of the assignment of this generation; empty from a daemon of an older build.
    assignment_id: String,
    pub(super) first_rank: u32,
    pub(super) workers: Vec<Worker>,
    pub(super) spawning: bool,
    /// Any worker listens on the control socket; set by the driver.
    pub(super) listening: bool,
    /// All native workers have said that they are done with the last step; set by the driver.
    finishing: bool,
    /// Workers that exited with an error, while it is not known whether they are the cause or a consequence.
    pub(super) suspects: Vec<Suspect>,
    /// Signals received so far.
    signals: u32,
}

impl Machine {
    /// The first state, and what is to be done in it.
    pub fn start(rules: Rules) -> (Self, Vec<Effect>) {
        let machine = Self {
            phase: Phase::Joining,
            generation: Generation(0),
            assignment_id: String::new(),
            first_rank: 0,
            workers: Vec::new(),
            spawning: false,
            listening: false,
            finishing: false,
            suspects: Vec::new(),
            signals: 0,
            rules,
        };
        let effects = machine.join();
        (machine, effects)
    }

    /// Generation that was last assigned.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Which assignment of the generation it was.
    pub(super) fn assignment_id(&self) -> &str {
        &self.assignment_id
    }

    /// Whether this is the assignment that the node has. Daemons of older builds do not name it.
    pub(super) fn is_own(&self, generation: Generation, assignment: &Assignment) -> bool {
        let (told, own) = (&assignment.assignment_id, &self.assignment_id);
        generation == self.generation && (told.is_empty() || own.is_empty() || told == own)
    }

    /// Whether any worker listens on the control socket, and so can do something with a notice.
    pub fn set_listening(&mut self, listening: bool) {
        self.listening = listening;
    }

    /// Whether all native workers have said that they are done with the last step.
    pub fn set_finishing(&mut self, finishing: bool) {
        self.finishing = finishing;
    }

    /// True while all is well.
    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// True while the daemon decides what follows a failure on this node.
    pub fn is_undecided(&self) -> bool {
        self.phase == Phase::Undecided
    }

    /// True if all workers have ended with 0, with all of their work done, as far as is known. Native ones say whether
    /// it is: they end with 0 too where ranks of another node were asked to stop.
    pub fn has_succeeded(&self) -> bool {
        let ended = match &self.phase {
            Phase::Stopping { then, .. } => *then == Then::Succeed,
            phase => *phase == Phase::Succeeded,
        };
        ended && (self.finishing || !self.rules.native)
    }

    /// True while the spawner has children of its own that must not be reaped by others.
    pub(super) fn is_spawning(&self) -> bool {
        self.spawning
    }

    /// Takes an event, returns what is to be done, in this order.
    pub fn on(&mut self, event: Event) -> Vec<Effect> {
        if self.phase == Phase::Done {
            return Vec::new();
        }
        match event {
            Event::Daemon(message) => self.on_daemon(message),
            Event::DaemonGone { exit_code, error } => self.on_daemon_gone(exit_code, error),
            Event::Spawned {
                generation,
                local_rank,
                pid,
            } => self.on_spawned(generation, local_rank, pid),
            Event::SpawnEnded { generation, failure } => self.on_spawn_ended(generation, failure),
            Event::CannotBegin { exit_code, error } => self.on_cannot_begin(exit_code, error),
            Event::Exited { local_rank, ending } => self.on_exited(local_rank, ending),
            Event::ControlDrained {
                generation,
                local_rank,
                consequence,
            } => self.on_control_drained(generation, local_rank, consequence),
            Event::Described(exit) => self.on_described(exit),
            Event::Signal(signal) => self.on_signal(signal),
            Event::Alarm => self.on_alarm(),
            Event::Swept { stuck } => self.on_swept(&stuck),
            Event::Left => match &self.phase {
                Phase::Leaving(exit_reason) => self.finish(exit_reason.clone()),
                _ => Vec::new(),
            },
        }
    }

    fn on_daemon(&mut self, message: DaemonMessage) -> Vec<Effect> {
        let generation = Generation(message.generation);
        match message.body {
            Some(Word::Assignment(assignment)) => self.on_assignment(generation, assignment),
            Some(Word::GenerationOver(over)) => self.on_generation_over(generation, &over),
            Some(Word::JobOver(over)) => self.end(ExitReason::of_job_over(over)),
            Some(Word::Refused(refused)) => self.end(ExitReason::of_refusal(refused)),
            // The daemon has taken the join: how long it waits for others is bounded there, and a spare waits for as
            // long as the job runs.
            Some(Word::Waiting(_)) if self.phase == Phase::Joining => vec![Effect::Disarm],
            // An empty body is a message of a newer build; a last word comes from an older one.
            Some(Word::Waiting(_) | Word::HeartbeatAck(_) | Word::LastWord(_)) | None => Vec::new(),
        }
    }

    fn on_assignment(&mut self, generation: Generation, assignment: Assignment) -> Vec<Effect> {
        match self.phase {
            Phase::Joining => {}
            // "Keep your place", after a reconnect.
            Phase::Running | Phase::Succeeded if self.is_own(generation, &assignment) => return Vec::new(),
            Phase::Running => {
                // A daemon that lost its state: it takes us for a node without workers.
                let cause = format!("the daemon assigned generation {generation} anew");
                return self.stop(&cause, Then::Rejoin);
            }
            _ => return Vec::new(),
        }
        let place = match generation {
            Generation(1..MAX_GENERATIONS) => contracts::first_rank(&assignment, self.rules.workers),
            Generation(number) => Err(format!("its generation is {number}")),
        };
        self.first_rank = match place {
            Ok(rank) => rank.0,
            Err(nonsense) => {
                let error = format!("invalid assignment from the rendezvous daemon: {nonsense}");
                return self.end(ExitReason::Broken {
                    exit_code: exit::INTERNAL,
                    error,
                });
            }
        };
        self.generation = generation;
        self.assignment_id.clone_from(&assignment.assignment_id);
        self.suspects.clear();
        self.workers = vec![Worker::Waiting; self.rules.workers as usize];
        self.spawning = true;
        self.phase = Phase::Running;
        vec![Effect::Disarm, Effect::Spawn(assignment)]
    }

    /// The daemon is given up. Work that has succeeded stays a success.
    fn on_daemon_gone(&mut self, exit_code: u8, error: String) -> Vec<Effect> {
        if exit_code != exit::DAEMON_UNREACHABLE || !self.has_succeeded() {
            return self.end(ExitReason::DaemonGone { exit_code, error });
        }
        let mut effects = vec![succeeded_without_daemon(&error)];
        effects.extend(self.end(ExitReason::Succeeded));
        effects
    }

    fn on_generation_over(&mut self, generation: Generation, over: &GenerationOver) -> Vec<Effect> {
        if generation < self.generation {
            return Vec::new();
        }
        let mut effects = match &mut self.phase {
            Phase::Running if over.at_step_boundary => self.stop_at_boundary(&over.cause, Then::Rejoin),
            Phase::Running => self.stop(&over.cause, Then::Rejoin),
            Phase::Stopping { then, .. } => match then {
                Then::AskDaemon | Then::Succeed => {
                    *then = Then::Rejoin;
                    Vec::new()
                }
                Then::StopUnlessOver(_) | Then::Rejoin | Then::Finish(_) => return Vec::new(),
            },
            Phase::Joining | Phase::Succeeded | Phase::Undecided => self.rejoin(),
            Phase::Leaving(_) | Phase::Done => return Vec::new(),
        };
        effects.push(Effect::Say(restart_notice(over)));
        effects
    }

    fn on_exited(&mut self, local_rank: LocalRank, ending: Ending) -> Vec<Effect> {
        if let Some(worker) = self.workers.get_mut(local_rank.0 as usize) {
            *worker = Worker::Ended(ending);
        }
        let mut effects = Vec::new();
        if self.phase == Phase::Running && !ending.is_success() {
            effects = self.on_failed(local_rank, ending);
        }
        effects.extend(self.check_gone());
        effects
    }

    fn on_described(&mut self, exit: WorkerExit) -> Vec<Effect> {
        match self.phase {
            Phase::Stopping { .. } | Phase::Undecided => vec![Effect::Report(Report::WorkerExit(exit))],
            // The daemon has decided without it.
            _ => Vec::new(),
        }
    }

    fn on_signal(&mut self, signal: i32) -> Vec<Effect> {
        self.signals += 1;
        let again = self.signals > 1;
        let exit_reason = ExitReason::Stopped { signal };
        match &mut self.phase {
            Phase::Running => {
                let name = signal_name(signal);
                let grace_s = self.rules.shutdown_timeout.as_secs_f64();
                let mut effects = vec![
                    Effect::Say(format!(
                        "{name}: stopping the workers; they have {grace_s} s, and a second signal kills them at once"
                    )),
                    // The other nodes may go on without this one.
                    Effect::Report(Report::NodeLeaving(NodeLeaving { signal })),
                ];
                effects.extend(self.stop_at_boundary(&name, Then::Finish(exit_reason)));
                effects
            }
            Phase::Stopping { stage, then } => {
                match then {
                    // The verdict has the same exit code on all nodes; of several signals the first decides.
                    Then::Finish(_) | Then::StopUnlessOver(_) => {}
                    Then::AskDaemon => *then = Then::StopUnlessOver(signal),
                    Then::Succeed | Then::Rejoin => *then = Then::Finish(exit_reason),
                }
                if *stage >= Stage::Killed {
                    return Vec::new();
                }
                if again {
                    let mut effects = vec![Effect::Say("killing the workers".into())];
                    effects.extend(self.kill());
                    return effects;
                }
                let name = signal_name(signal);
                vec![Effect::Say(format!(
                    "{name}: the workers are already being stopped; another signal kills them"
                ))]
            }
            Phase::Leaving(exit_reason) if again => {
                let exit_reason = exit_reason.clone();
                self.finish(exit_reason)
            }
            Phase::Leaving(_) | Phase::Done => Vec::new(),
            Phase::Joining | Phase::Succeeded | Phase::Undecided => self.end(exit_reason),
        }
    }

    fn on_alarm(&mut self) -> Vec<Effect> {
        match &self.phase {
            Phase::Joining => self.end(ExitReason::Refused {
                exit_code: exit::RENDEZVOUS_TIMED_OUT,
                reason: "the rendezvous daemon neither started nor refused the job in time".into(),
            }),
            Phase::Undecided => self.end(ExitReason::DaemonGone {
                exit_code: exit::DAEMON_UNREACHABLE,
                error: "the rendezvous daemon sent no decision after the failure".into(),
            }),
            Phase::Stopping { stage, .. } => match stage {
                Stage::Asked => self.terminate(self.after_signal()),
                Stage::Notified => self.terminate(self.rules.shutdown_timeout),
                Stage::Terminated => self.kill(),
                // Reported by the sweep, by process id.
                Stage::Killed => self.sweep(),
                Stage::Sweeping => Vec::new(),
            },
            Phase::Leaving(exit_reason) => self.finish(exit_reason.clone()),
            Phase::Running => self.blame_first_suspect(),
            Phase::Succeeded | Phase::Done => Vec::new(),
        }
    }

    fn on_swept(&mut self, stuck: &[String]) -> Vec<Effect> {
        let Phase::Stopping { then, .. } = &self.phase else {
            return Vec::new();
        };
        let mut then = then.clone();
        let mut effects = Vec::new();
        let is_success = |worker: &Worker| matches!(worker, Worker::Ended(ending) if ending.is_success());
        if let Then::Finish(ExitReason::DaemonGone { error, .. }) = &then
            && self.rules.native
            && self.finishing
            && !self.workers.is_empty()
            && self.workers.iter().all(is_success)
        {
            // They had no step left when they were asked to stop.
            effects.push(succeeded_without_daemon(error));
            then = Then::Finish(ExitReason::Succeeded);
        }
        effects.extend(self.next_steps(&then));
        self.workers.clear();
        if !stuck.is_empty() {
            effects.push(Effect::Say(format!(
                "cannot kill processes: {}\n  hint: state D is a wait inside the kernel, often for a file system \
                 or driver that does not respond; the processes end when it responds",
                stuck.join(", ")
            )));
        }
        effects.extend(match then {
            Then::Succeed => {
                self.phase = Phase::Succeeded;
                vec![
                    Effect::Disarm,
                    Effect::Report(Report::NodeSucceeded(NodeSucceeded {})),
                ]
            }
            Then::AskDaemon => {
                self.phase = Phase::Undecided;
                vec![Effect::Arm(VERDICT_WAIT)]
            }
            Then::StopUnlessOver(signal) => self.leave(ExitReason::Stopped { signal }),
            Then::Rejoin => self.rejoin(),
            Then::Finish(exit_reason) => self.leave(exit_reason),
        });
        effects
    }

    /// Ends the launch for `exit_reason`: at once, or when the workers are gone.
    pub(super) fn end(&mut self, exit_reason: ExitReason) -> Vec<Effect> {
        match &mut self.phase {
            Phase::Running => match &exit_reason {
                // The others have nothing to wait for.
                ExitReason::CannotStart(error) => {
                    let cause = error.to_string();
                    self.stop(&cause, Then::Finish(exit_reason))
                }
                ExitReason::JobOver { reason, .. } | ExitReason::Refused { reason, .. } => {
                    let cause = reason.clone();
                    self.stop(&cause, Then::Finish(exit_reason))
                }
                ExitReason::DaemonGone { .. } if exit_reason.leaves_time_to_save() => {
                    self.stop_at_boundary("the rendezvous daemon is unreachable", Then::Finish(exit_reason))
                }
                ExitReason::DaemonGone { error, .. } | ExitReason::Broken { error, .. } => {
                    let cause = error.clone();
                    self.stop(&cause, Then::Finish(exit_reason))
                }
                ExitReason::Succeeded => self.stop("the job has ended", Then::Finish(exit_reason)),
                ExitReason::Stopped { signal } => {
                    let name = signal_name(*signal);
                    self.stop_at_boundary(&name, Then::Finish(exit_reason))
                }
            },
            Phase::Stopping { then, .. } => {
                // Our own end stands: the daemon only confirms it.
                if !matches!(then, Then::Finish(_)) {
                    *then = Then::Finish(exit_reason);
                }
                Vec::new()
            }
            Phase::Joining | Phase::Succeeded | Phase::Undecided => self.leave(exit_reason),
            Phase::Leaving(_) | Phase::Done => Vec::new(),
        }
    }

    /// The workers are gone: says good-bye to a daemon that can be reached.
    fn leave(&mut self, exit_reason: ExitReason) -> Vec<Effect> {
        if let ExitReason::DaemonGone { .. } = exit_reason {
            return self.finish(exit_reason);
        }
        let leave = exit_reason.farewell();
        self.phase = Phase::Leaving(exit_reason);
        vec![Effect::Leave(leave), Effect::Arm(LEAVE_WAIT)]
    }

    fn finish(&mut self, exit_reason: ExitReason) -> Vec<Effect> {
        self.phase = Phase::Done;
        vec![Effect::Finish(exit_reason)]
    }

    fn join(&self) -> Vec<Effect> {
        vec![Effect::Join, Effect::Arm(self.rules.join_timeout + JOIN_MARGIN)]
    }

    fn rejoin(&mut self) -> Vec<Effect> {
        self.phase = Phase::Joining;
        let mut effects = vec![Effect::ReportEnds];
        effects.extend(self.join());
        effects
    }
}

fn succeeded_without_daemon(error: &str) -> Effect {
    Effect::Say(format!(
        "the workers of this node succeeded; assuming that the job succeeded too: {error}"
    ))
}

fn restart_notice(over: &GenerationOver) -> String {
    let when = match over.backoff_ms {
        0 => "now".to_owned(),
        pause => format!("in {:.1} s", f64::from(pause) / 1000.0),
    };
    let (count, max) = (over.restart_count, over.max_restarts);
    let mut notice = match (over.membership, &over.first_failure) {
        (true, None) => over.cause.clone(),
        (true, Some(_)) => format!("{}; restarting without using up a restart", over.cause),
        (false, _) => format!("{}; restarting {when} ({count}/{max})", over.cause),
    };
    if let Some(failure) = over
        .first_failure
        .as_ref()
        .filter(|failure| !failure.log_file.is_empty())
    {
        notice.push_str("\n  log file: ");
        notice.push_str(&failure.log_file);
    }
    notice
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
