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
//! | file | what it does |
//! |---|---|
//! | `event` | the words in which the machine and its driver speak |
//! | `exit_reason` | the ways in which a launch ends, with their exit codes |
//! | `members` | who of the workers runs, is parked, and has ended |
//! | `blame` | which of the failed workers is the cause |
//! | `stop` | the one stop routine |

mod blame;
mod event;
mod exit_reason;
mod members;
mod stop;

pub use event::{Effect, Event};
pub use exit_reason::ExitReason;

use std::time::Duration;

use ddp_proto::client::RESTART_BACKOFF_CAP;
use ddp_proto::exit;
use ddp_proto::ids::{Generation, LocalRank};
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use ddp_proto::rendezvous::{
    Assignment, DaemonMessage, GenerationOver, NodeLeaving, NodeSucceeded, WorkerExit,
};

use crate::spawn::program::SpawnError;
use crate::spawn::spawner::SpawnEvent;
use crate::supervise::ending::{Ending, signal_name};
use blame::{CULPRIT_WAIT, Judgement, Suspect, Suspects};
use members::Members;
use stop::{Stop, Stopped, Then};

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
    pub resume_hint: Option<String>,
    /// How long this node would wait for others.
    pub join_timeout: Duration,
    /// How long workers may take to end.
    pub shutdown_timeout: Duration,
    /// Workers that this node offers.
    pub workers: u32,
    /// Nodes may come and go.
    pub elastic: bool,
}

#[derive(Debug, PartialEq)]
enum Phase {
    Joining,
    /// Failed workers, until the cause is known.
    Running(Suspects),
    Stopping(Stop),
    Succeeded,
    Undecided,
    Leaving(ExitReason),
    Done,
}

/// The place that was assigned last.
#[derive(Debug, Default)]
struct Assigned {
    generation: Generation,
    /// Random id of the assignment.
    id: String,
    first_rank: u32,
    nodes: u32,
}

/// The state of the agent.
#[derive(Debug)]
pub struct Machine {
    rules: Rules,
    phase: Phase,
    assigned: Assigned,
    members: Members,
    /// Any worker listens on the control socket; set by the driver.
    listening: bool,
    /// All native workers have said that they are done with the last step; set by the driver.
    finishing: bool,
    /// Signals received so far.
    signals: u32,
}

impl Machine {
    /// The first state, and what is to be done in it.
    pub fn start(rules: Rules) -> (Self, Vec<Effect>) {
        let machine = Self {
            phase: Phase::Joining,
            assigned: Assigned::default(),
            members: Members::default(),
            listening: false,
            finishing: false,
            signals: 0,
            rules,
        };
        let effects = machine.join();
        (machine, effects)
    }

    /// Generation that was last assigned.
    pub fn generation(&self) -> Generation {
        self.assigned.generation
    }

    /// Which assignment of the generation it was.
    pub(super) fn assignment_id(&self) -> &str {
        &self.assigned.id
    }

    /// Whether this is the assignment that the node has.
    pub(super) fn is_own(&self, generation: Generation, assignment: &Assignment) -> bool {
        generation == self.generation() && assignment.assignment_id == self.assigned.id
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
        matches!(self.phase, Phase::Running(_))
    }

    /// True while workers may live.
    pub fn has_workers(&self) -> bool {
        matches!(self.phase, Phase::Running(_) | Phase::Stopping(_)) && !self.members.are_gone()
    }

    /// True while the daemon decides what follows a failure on this node.
    pub fn is_undecided(&self) -> bool {
        self.phase == Phase::Undecided
    }

    /// True if all workers have ended with 0, with all of their work done, as far as is known. Native ones say whether
    /// it is: they end with 0 too where ranks of another node were asked to stop.
    pub fn has_succeeded(&self) -> bool {
        let ended = match &self.phase {
            Phase::Stopping(stop) => *stop.then() == Then::Succeed,
            phase => *phase == Phase::Succeeded,
        };
        ended && (self.finishing || !self.rules.native)
    }

    /// Whether this worker has left its generation, and waits for the next one.
    pub fn is_parked(&self, local_rank: LocalRank) -> bool {
        self.members.is_parked(local_rank)
    }

    /// True while workers stop for a generation that another one is to follow.
    pub fn is_to_rejoin(&self) -> bool {
        matches!(&self.phase, Phase::Stopping(stop) if *stop.then() == Then::Rejoin)
    }

    /// True while the spawner has children of its own that must not be reaped by others.
    pub(super) fn is_spawning(&self) -> bool {
        self.members.is_spawning()
    }

    /// True if the workers of this node have come to an end, and the daemon has to say what follows.
    pub(super) fn waits_for_daemon(&self) -> bool {
        match &self.phase {
            Phase::Stopping(stop) => *stop.then() == Then::AskDaemon,
            phase => matches!(phase, Phase::Succeeded | Phase::Undecided),
        }
    }

    /// What goes on at this node while the daemon is out of reach, in words.
    pub(super) fn meanwhile(&self) -> &'static str {
        match &self.phase {
            Phase::Joining if self.generation() == Generation(0) => "no worker was started yet",
            Phase::Joining => "no worker is running; the restart waits for the daemon",
            Phase::Running(_) => "the workers keep running",
            Phase::Succeeded => "the workers of this node succeeded; waiting for the daemon's decision",
            Phase::Undecided | Phase::Stopping(_) if self.waits_for_daemon() => {
                "a worker of this node failed; waiting for the daemon's decision"
            }
            Phase::Undecided | Phase::Stopping(_) => "the workers are being stopped",
            Phase::Leaving(_) | Phase::Done => "the workers have exited",
        }
    }

    /// Takes an event, returns what is to be done, in this order.
    pub fn on(&mut self, event: Event) -> Vec<Effect> {
        if self.phase == Phase::Done {
            return Vec::new();
        }
        match event {
            Event::Daemon(message) => self.on_daemon(message),
            Event::DaemonGone { exit_code, error } => self.on_daemon_gone(exit_code, error),
            Event::Replaceable { end_in } => self.on_replaceable(end_in),
            Event::Spawn(event) => self.on_spawn(event),
            Event::CannotBegin(exit_reason) => {
                self.members.spawn_ended();
                self.end(exit_reason)
            }
            Event::Exited { local_rank, ending } => self.on_exited(local_rank, ending),
            Event::Parked(local_rank) => self.on_parked(local_rank),
            Event::ControlDrained {
                generation,
                local_rank,
                consequence,
            } => self.on_control_drained(generation, local_rank, consequence),
            Event::Described(exit) => self.on_described(exit),
            Event::Signal(signal) => self.on_signal(signal),
            Event::Alarm => self.on_alarm(),
            Event::Swept { stuck } => self.on_swept(&stuck),
            Event::Left => self.left(),
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
            // An empty body is a message of another build.
            Some(Word::Waiting(_) | Word::Heard(_) | Word::HangVerdict(_)) | None => Vec::new(),
        }
    }

    fn on_assignment(&mut self, generation: Generation, assignment: Assignment) -> Vec<Effect> {
        match self.phase {
            Phase::Joining => {}
            // "Keep your place", after a reconnect.
            Phase::Running(_) | Phase::Succeeded if self.is_own(generation, &assignment) => {
                return Vec::new();
            }
            Phase::Running(_) => {
                // A daemon that lost its state: it takes us for a node without workers.
                let cause = "the daemon lost its state and assigned this node anew".to_owned();
                return self.stop(&cause, Then::Rejoin);
            }
            _ => return Vec::new(),
        }
        let place = match generation {
            Generation(1..MAX_GENERATIONS) => first_rank(&assignment, self.rules.workers),
            Generation(number) => Err(format!("its generation is {number}")),
        };
        let first_rank = match place {
            Ok(rank) => rank,
            Err(nonsense) => {
                let error = format!("invalid assignment from the rendezvous daemon: {nonsense}");
                return self.end(ExitReason::internal(error));
            }
        };
        self.assigned = Assigned {
            generation,
            id: assignment.assignment_id.clone(),
            first_rank,
            nodes: assignment.node_count,
        };
        self.members.assign(self.rules.workers);
        self.phase = Phase::Running(Suspects::default());
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

    /// Stops the workers before other nodes take their places, and joins again.
    fn on_replaceable(&mut self, end_in: Duration) -> Vec<Effect> {
        let grace = self.rules.shutdown_timeout.min(end_in);
        match &mut self.phase {
            Phase::Running(_) => {
                let cause = "the rendezvous daemon is silent, and other nodes may go on without this one";
                let workers = Stopped {
                    grace,
                    ..self.workers()
                };
                let (stop, mut effects) = Stop::ask(cause, Then::Rejoin, workers);
                self.phase = Phase::Stopping(stop);
                let how = match grace.as_secs_f64() {
                    0.0 => "the workers were stopped".to_owned(),
                    grace => format!("stopping the workers within {grace:.1} s"),
                };
                effects.push(Effect::Say(format!(
                    "{cause}: {how}; they start again when the daemon answers"
                )));
                effects
            }
            Phase::Stopping(stop) if end_in.is_zero() => stop.kill_now(),
            _ => Vec::new(),
        }
    }

    fn on_generation_over(&mut self, generation: Generation, over: &GenerationOver) -> Vec<Effect> {
        if generation < self.generation() {
            return Vec::new();
        }
        let mut effects = match &mut self.phase {
            Phase::Running(_) if over.at_step_boundary => self.stop_at_boundary(&over.cause, Then::Rejoin),
            Phase::Running(_) => self.stop(&over.cause, Then::Rejoin),
            Phase::Stopping(stop) => {
                if !stop.on_generation_over() {
                    return Vec::new();
                }
                Vec::new()
            }
            Phase::Joining | Phase::Succeeded | Phase::Undecided => self.rejoin(),
            Phase::Leaving(_) | Phase::Done => return Vec::new(),
        };
        effects.push(Effect::Say(restart_notice(over)));
        effects
    }

    /// How the start of a generation's workers goes.
    ///
    /// A start can outlast its generation: a program on a file system that does not answer keeps the spawner waiting
    /// when the workers have long been given up. Reports of it that come then do not count for the next generation.
    fn on_spawn(&mut self, event: SpawnEvent) -> Vec<Effect> {
        match event {
            SpawnEvent::Spawned {
                generation,
                local_rank,
                pid,
            } => {
                if generation != self.generation() || !self.members.spawned(local_rank) {
                    return vec![Effect::KillStray(pid)];
                }
                match &self.phase {
                    Phase::Stopping(stop) => stop.on_late_start(local_rank),
                    _ => Vec::new(),
                }
            }
            SpawnEvent::Ended { generation, failure } if generation == self.generation() => {
                self.on_spawn_ended(failure)
            }
            SpawnEvent::Ended { .. } => Vec::new(),
        }
    }

    fn on_spawn_ended(&mut self, failure: Option<SpawnError>) -> Vec<Effect> {
        self.members.spawn_ended();
        let mut effects = match failure {
            Some(error) => self.end(ExitReason::CannotStart(error)),
            // No worker was ever started, so none has succeeded.
            None if self.is_running() && self.members.is_empty() => {
                let error = "no worker was started".to_owned();
                self.end(ExitReason::internal(error))
            }
            None => Vec::new(),
        };
        effects.extend(self.check_gone());
        effects
    }

    fn on_exited(&mut self, local_rank: LocalRank, ending: Ending) -> Vec<Effect> {
        self.members.ended(local_rank, ending);
        let mut effects = Vec::new();
        if let Phase::Running(suspects) = &mut self.phase
            && !ending.is_success()
        {
            let suspect = Suspect::new(local_rank, ending);
            if suspect.is_certain() {
                effects = self.blame(&suspect);
            } else {
                suspects.add(suspect);
                // The generation is over, whichever rank is the cause.
                effects = vec![Effect::CancelSpawn, Effect::DrainControl(local_rank)];
            }
        }
        effects.extend(self.check_gone());
        effects
    }

    fn on_parked(&mut self, local_rank: LocalRank) -> Vec<Effect> {
        match &self.phase {
            Phase::Stopping(stop) if stop.lets_park() => self.members.parked(local_rank),
            _ => return Vec::new(),
        }
        self.check_gone()
    }

    /// The last words of a suspect are there.
    fn on_control_drained(
        &mut self,
        generation: Generation,
        local_rank: LocalRank,
        consequence: bool,
    ) -> Vec<Effect> {
        let (is_current, are_gone) = (generation == self.generation(), self.members.are_gone());
        let Phase::Running(suspects) = &mut self.phase else {
            return Vec::new();
        };
        if !is_current {
            return Vec::new();
        }
        match suspects.on_words(local_rank, consequence, are_gone) {
            Judgement::Blame(suspect) => self.blame(&suspect),
            Judgement::Wait => vec![Effect::Arm(CULPRIT_WAIT)],
            Judgement::Open => Vec::new(),
        }
    }

    /// Stops the others, tells them why, and reports.
    fn blame(&mut self, suspect: &Suspect) -> Vec<Effect> {
        let cause = suspect.as_cause(self.assigned.first_rank, &self.rules.hostname);
        let mut effects = self.stop(&cause, Then::AskDaemon);
        effects.insert(1, Effect::Describe(suspect.local_rank));
        effects
    }

    /// Goes on when the last worker is gone.
    fn check_gone(&mut self) -> Vec<Effect> {
        if !self.members.are_gone() {
            return Vec::new();
        }
        let workers = self.workers();
        match &mut self.phase {
            // Any failure but that of a suspect would have left this phase.
            Phase::Running(suspects) if suspects.is_empty() => {
                let (stop, effects) = Stop::after_success(workers);
                self.phase = Phase::Stopping(stop);
                effects
            }
            // No other worker is left that could be the cause.
            Phase::Running(suspects) => match suspects.judge() {
                Some(suspect) => self.blame(&suspect),
                None => Vec::new(),
            },
            Phase::Stopping(stop) if stop.is_last() && self.members.unpark() => stop.kill(),
            Phase::Stopping(stop) => stop.on_gone(),
            _ => Vec::new(),
        }
    }

    fn on_described(&mut self, exit: WorkerExit) -> Vec<Effect> {
        if self.rules.native && exit.exit_code == Some(i32::from(exit::NODE_UNFIT)) {
            return self.end(ExitReason::Broken {
                exit_code: exit::NODE_UNFIT,
                error: format!("it leaves the job: {}", exit.message),
            });
        }
        match self.phase {
            Phase::Stopping(_) | Phase::Undecided => vec![Effect::Report(Report::WorkerExit(exit))],
            // The daemon has decided without it.
            _ => Vec::new(),
        }
    }

    fn on_signal(&mut self, signal: i32) -> Vec<Effect> {
        self.signals += 1;
        let again = self.signals > 1;
        let exit_reason = ExitReason::Stopped { signal };
        match &mut self.phase {
            Phase::Running(_) => {
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
            Phase::Stopping(stop) => stop.on_signal(signal, again),
            Phase::Leaving(_) if again => self.left(),
            Phase::Leaving(_) | Phase::Done => Vec::new(),
            Phase::Joining | Phase::Succeeded | Phase::Undecided => self.end(exit_reason),
        }
    }

    fn on_alarm(&mut self) -> Vec<Effect> {
        match &mut self.phase {
            Phase::Joining => self.end(ExitReason::Refused {
                exit_code: exit::RENDEZVOUS_TIMED_OUT,
                reason: "the rendezvous daemon neither started nor refused the job in time".into(),
            }),
            Phase::Undecided => self.end(ExitReason::DaemonGone {
                exit_code: exit::DAEMON_UNREACHABLE,
                error: "the rendezvous daemon sent no decision after the failure".into(),
            }),
            Phase::Stopping(stop) => stop.on_alarm(),
            Phase::Leaving(_) => self.left(),
            Phase::Running(suspects) => match suspects.first() {
                Some(suspect) => self.blame(&suspect),
                None => Vec::new(),
            },
            Phase::Succeeded | Phase::Done => Vec::new(),
        }
    }

    fn on_swept(&mut self, stuck: &[String]) -> Vec<Effect> {
        let Phase::Stopping(stop) = &mut self.phase else {
            return Vec::new();
        };
        if stop.is_last() && self.members.unpark() {
            return stop.kill();
        }
        let mut then = stop.then().clone();
        let mut effects = Vec::new();
        if let Then::Finish(ExitReason::DaemonGone { error, .. }) = &then
            && self.rules.native
            && self.finishing
            && self.members.all_succeeded()
        {
            // They had no step left when they were asked to stop.
            effects.push(succeeded_without_daemon(error));
            then = Then::Finish(ExitReason::Succeeded);
        }
        effects.extend(self.next_steps(&then));
        self.members.forget();
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

    /// What a user can do next, when the workers are gone that were asked to stop.
    fn next_steps(&self, then: &Then) -> Option<Effect> {
        let Then::Finish(exit_reason) = then else {
            return None;
        };
        let has_others = self.rules.elastic && self.assigned.nodes > 1;
        let taken_in = (has_others && matches!(exit_reason, ExitReason::Stopped { .. }))
            .then_some("if the other nodes continue, start this node again to rejoin the job");
        let words = [self.how_to_resume(exit_reason), taken_in.map(str::to_owned)];
        let words: Vec<String> = words.into_iter().flatten().collect();
        (!words.is_empty()).then(|| Effect::Say(words.join("\n  ")))
    }

    /// Whether native workers have saved, and how their run goes on.
    fn how_to_resume(&self, exit_reason: &ExitReason) -> Option<String> {
        if !exit_reason.leaves_time_to_save() || !self.rules.native || self.members.is_empty() {
            return None;
        }
        let resume = self
            .rules
            .resume_hint
            .as_deref()
            .unwrap_or("`--set run.resume=auto`");
        // A native worker ends with 0 only when the checkpoint is whole, whichever rank has written it.
        Some(if self.members.any_succeeded() {
            format!("resume with {resume}")
        } else {
            format!(
                "the workers were stopped before they had saved; resuming with {resume} continues from the last \
                 complete checkpoint, if one exists\n  \
                 hint: a longer `--shutdown-timeout` gives them more time to save"
            )
        })
    }

    /// The workers as the stop routine needs to know them.
    fn workers(&self) -> Stopped {
        Stopped {
            native: self.rules.native,
            grace: self.rules.shutdown_timeout,
            listening: self.listening || self.members.has_kept(),
            are_gone: self.members.are_gone(),
        }
    }

    /// Stops the workers because the generation is over.
    fn stop(&mut self, cause: &str, then: Then) -> Vec<Effect> {
        let (stop, effects) = Stop::notify(cause, then, self.workers());
        self.phase = Phase::Stopping(stop);
        effects
    }

    /// Stops workers that are all well.
    fn stop_at_boundary(&mut self, cause: &str, then: Then) -> Vec<Effect> {
        let (stop, effects) = Stop::ask(cause, then, self.workers());
        self.phase = Phase::Stopping(stop);
        effects
    }

    /// Ends the launch for `exit_reason`: at once, or when the workers are gone.
    fn end(&mut self, exit_reason: ExitReason) -> Vec<Effect> {
        match &mut self.phase {
            Phase::Running(_) => {
                // The others have nothing to wait for, unless they are all well.
                let are_well = match &exit_reason {
                    // A signal elsewhere. Native ranks of all nodes have stopped together; those that are still here
                    // have lost their peers.
                    ExitReason::JobOver { signal, .. } => signal.is_some() && !self.rules.native,
                    _ => exit_reason.leaves_time_to_save(),
                };
                let cause = match &exit_reason {
                    ExitReason::DaemonGone { .. } if are_well => {
                        "the rendezvous daemon is unreachable".into()
                    }
                    _ => exit_reason.to_string(),
                };
                let then = Then::Finish(exit_reason);
                if are_well {
                    self.stop_at_boundary(&cause, then)
                } else {
                    self.stop(&cause, then)
                }
            }
            Phase::Stopping(stop) => {
                stop.on_end(exit_reason);
                Vec::new()
            }
            Phase::Joining | Phase::Succeeded | Phase::Undecided if self.members.unpark() => {
                let (stop, effects) = Stop::unpark(exit_reason, self.workers());
                self.phase = Phase::Stopping(stop);
                effects
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

    /// The good-bye was said, or is not waited for.
    fn left(&mut self) -> Vec<Effect> {
        match &self.phase {
            Phase::Leaving(exit_reason) => self.finish(exit_reason.clone()),
            _ => Vec::new(),
        }
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

/// The first rank of a node that offers this number of `workers`, or what makes the assignment invalid.
fn first_rank(assignment: &Assignment, workers: u32) -> Result<u32, String> {
    let node = assignment
        .own
        .as_ref()
        .filter(|_| assignment.node_rank < assignment.node_count)
        .ok_or_else(|| format!("it has no node {}", assignment.node_rank))?;
    if node.workers != workers {
        return Err(format!(
            "it has {} workers for this node, which offers {workers}",
            node.workers
        ));
    }
    if u16::try_from(assignment.master_port).is_err() {
        return Err(format!("{} is not a port", assignment.master_port));
    }
    // `u32::MAX` ranks are refused.
    let ranks = u64::from(assignment.world_size);
    let end = u64::from(node.first_rank) + u64::from(workers);
    if end > ranks || ranks == u64::from(u32::MAX) {
        return Err(format!(
            "the first rank of this node is {}, but there are only {ranks} ranks",
            node.first_rank
        ));
    }
    Ok(node.first_rank)
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
    if let Some(failure) = &over.first_failure {
        let message = failure.message.lines().next();
        let reason = message.or(failure.stderr_tail.last().map(String::as_str));
        // Of a worker that was killed the last line says nothing.
        if let Some(reason) = reason.filter(|_| failure.signal != Some(libc::SIGKILL)) {
            notice.extend(["\n  ", &format!("{reason:.300}")]);
        }
        if !failure.log_file.is_empty() {
            notice.extend(["\n  log file: ", &failure.log_file]);
        }
    }
    notice
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
