//! The one stop routine: notify with the cause → a signal → grace → SIGKILL → bounded wait → sweep.
//!
//! The signal is the one that a launcher of the job was stopped with, so that Ctrl-C is a `KeyboardInterrupt` to a
//! Python program; else SIGTERM. Native workers ignore both, so they are not sent: one that is asked to stop at a step
//! boundary has all of the grace, and SIGKILL ends the others. Of other programs those that listen on the control
//! socket get it late in the grace ([`AFTER_SIGNAL`]), so that they can stop at a step boundary; the rest get it at once.
//!
//! A worker that parks before the signal has stopped too. It lives on, unless the launch ends.

use std::time::Duration;

use ddp_proto::ids::LocalRank;
use nix::sys::signal::Signal;

use super::event::Effect;
use super::exit_reason::ExitReason;
use crate::supervise::ending::signal_name;

/// How long workers that listen on the control socket may take to report their own error when a generation is over: they
/// end on their own, after what a device is computing. A native worker takes less than 14 s (a save, an abort, the device).
pub(super) const LAST_WORDS: Duration = Duration::from_secs(15);
/// How long before SIGKILL a program that listens gets the signal; half of the grace if that is less.
const AFTER_SIGNAL: Duration = Duration::from_secs(5);
/// How long processes may take to go after SIGKILL.
const KILL_WAIT: Duration = Duration::from_secs(5);

/// How far the stop routine has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
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

/// The workers that are to be stopped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stopped {
    /// They obey no signal but SIGKILL.
    pub(super) native: bool,
    /// How long they may take to end.
    pub(super) grace: Duration,
    /// Some of them listen on the control socket, or will in moments.
    pub(super) listening: bool,
    /// They have all ended already.
    pub(super) are_gone: bool,
}

/// A stop that is under way.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stop {
    stage: Stage,
    then: Then,
    /// As it was when the stop began.
    workers: Stopped,
}

impl Stop {
    /// Stops workers whose generation is over.
    pub(super) fn notify(cause: &str, then: Then, workers: Stopped) -> (Self, Vec<Effect>) {
        let stage = Stage::Notified;
        let mut stop = Self { stage, then, workers };
        let mut effects = vec![Effect::Notify(cause.to_owned()), Effect::CancelSpawn];
        effects.extend(stop.await_end(LAST_WORDS));
        (stop, effects)
    }

    /// Stops workers that are all well: because a user asked for it, or the nodes change.
    pub(super) fn ask(cause: &str, then: Then, workers: Stopped) -> (Self, Vec<Effect>) {
        let stage = Stage::Asked;
        let mut stop = Self { stage, then, workers };
        let patience = if workers.native {
            workers.grace
        } else {
            workers.grace.saturating_sub(stop.after_signal())
        };
        let mut effects = vec![Effect::AskToStop(cause.to_owned()), Effect::CancelSpawn];
        effects.extend(stop.await_end(patience));
        if stop.stage == Stage::Asked && !stop.workers.native {
            effects.push(Effect::SignalUnasked(stop.signal()));
        }
        (stop, effects)
    }

    /// Sweeps after workers that have all ended with 0.
    pub(super) fn after_success(workers: Stopped) -> (Self, Vec<Effect>) {
        let (stage, then) = (Stage::Killed, Then::Succeed);
        let mut stop = Self { stage, then, workers };
        let effects = stop.sweep();
        (stop, effects)
    }

    /// Kills workers that are parked: no generation follows.
    pub(super) fn unpark(exit_reason: ExitReason, workers: Stopped) -> (Self, Vec<Effect>) {
        let (stage, then) = (Stage::Killed, Then::Finish(exit_reason));
        let mut stop = Self { stage, then, workers };
        let effects = stop.kill();
        (stop, effects)
    }

    /// A worker that parks now lives on: it was sent no signal.
    pub(super) fn lets_park(&self) -> bool {
        self.stage < Stage::Terminated
    }

    /// No generation follows.
    pub(super) fn is_last(&self) -> bool {
        matches!(self.then, Then::StopUnlessOver(_) | Then::Finish(_))
    }

    /// What follows when the workers are gone.
    pub(super) fn then(&self) -> &Then {
        &self.then
    }

    /// Leaves time to workers that can do something with a notice; the others get their signal at once.
    fn await_end(&mut self, patience: Duration) -> Vec<Effect> {
        let patience = patience.min(self.workers.grace);
        if self.workers.are_gone {
            return self.sweep();
        }
        if self.workers.listening && !patience.is_zero() {
            return vec![Effect::Arm(patience)];
        }
        self.terminate(self.workers.grace)
    }

    /// How much of the grace is left to those who listen when they get the signal.
    fn after_signal(&self) -> Duration {
        AFTER_SIGNAL.min(self.workers.grace / 2)
    }

    fn terminate(&mut self, grace: Duration) -> Vec<Effect> {
        if self.workers.native {
            // They ignore every other signal that stops a job.
            return self.kill();
        }
        self.stage = Stage::Terminated;
        vec![Effect::SignalAll(self.signal()), Effect::Arm(grace)]
    }

    /// What workers are asked to end with.
    fn signal(&self) -> i32 {
        let cause = match &self.then {
            Then::Finish(exit_reason) => exit_reason.signal(),
            _ => None,
        };
        // A number that cannot be sent would leave the workers without any word.
        cause
            .filter(|signal| Signal::try_from(*signal).is_ok())
            .unwrap_or(libc::SIGTERM)
    }

    /// No time is left.
    pub(super) fn kill_now(&mut self) -> Vec<Effect> {
        if self.stage >= Stage::Killed {
            return Vec::new();
        }
        self.kill()
    }

    /// Leaves no more time to those that are left.
    pub(super) fn kill(&mut self) -> Vec<Effect> {
        self.stage = Stage::Killed;
        vec![Effect::SignalAll(libc::SIGKILL), Effect::Arm(KILL_WAIT)]
    }

    fn sweep(&mut self) -> Vec<Effect> {
        self.stage = Stage::Sweeping;
        vec![Effect::Disarm, Effect::Sweep]
    }

    /// The time of a stage is over.
    pub(super) fn on_alarm(&mut self) -> Vec<Effect> {
        match self.stage {
            Stage::Asked => self.terminate(self.after_signal()),
            Stage::Notified => self.terminate(self.workers.grace),
            Stage::Terminated => self.kill(),
            // Reported by the sweep, by process id.
            Stage::Killed => self.sweep(),
            Stage::Sweeping => Vec::new(),
        }
    }

    /// The last worker is gone.
    pub(super) fn on_gone(&mut self) -> Vec<Effect> {
        if self.stage == Stage::Sweeping {
            return Vec::new();
        }
        self.sweep()
    }

    /// A worker was started while the others were being stopped. It gets the signal that they got, not more: it may well
    /// be ready for a graceful end.
    pub(super) fn on_late_start(&self, local_rank: LocalRank) -> Vec<Effect> {
        match self.stage {
            // The others that do not listen got theirs when the stop began. No worker gets the same signal twice.
            Stage::Asked if !self.workers.native => vec![Effect::SignalUnasked(self.signal())],
            Stage::Asked | Stage::Notified => Vec::new(),
            Stage::Terminated => vec![Effect::SignalLate(local_rank, self.signal())],
            Stage::Killed | Stage::Sweeping => vec![Effect::SignalLate(local_rank, libc::SIGKILL)],
        }
    }

    /// The daemon wants the next generation. False if something else was to follow.
    pub(super) fn on_generation_over(&mut self) -> bool {
        let follows = matches!(self.then, Then::AskDaemon | Then::Succeed);
        if follows {
            self.then = Then::Rejoin;
        }
        follows
    }

    /// The launch is to end. An end of its own stands: the daemon only confirms it.
    pub(super) fn on_end(&mut self, exit_reason: ExitReason) {
        if !matches!(self.then, Then::Finish(_)) {
            self.then = Then::Finish(exit_reason);
        }
    }

    /// A signal for the launcher, and not the first one if it comes `again`.
    pub(super) fn on_signal(&mut self, signal: i32, again: bool) -> Vec<Effect> {
        match self.then {
            // The verdict has the same exit code on all nodes; of several signals the first decides.
            Then::Finish(_) | Then::StopUnlessOver(_) => {}
            Then::AskDaemon => self.then = Then::StopUnlessOver(signal),
            Then::Succeed | Then::Rejoin => self.then = Then::Finish(ExitReason::Stopped { signal }),
        }
        if self.stage >= Stage::Killed {
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
}
