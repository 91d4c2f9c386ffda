//! The one stop routine: notify with the cause → a signal → grace → SIGKILL → bounded wait → sweep.
//!
//! The signal is the one that a launcher of the job was stopped with, so that Ctrl-C is a `KeyboardInterrupt` to a
//! Python program; else SIGTERM. Native workers ignore both, so they are not sent: one that is asked to stop at a step
//! boundary has all of the grace, and SIGKILL ends the others. Of other programs those that listen on the control
//! socket get it late in the grace ([`AFTER_SIGNAL`]), so that they can stop at a step boundary; the rest get it at once.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::event::Effect;
use super::exit_reason::ExitReason;
use super::machine::{Machine, Phase, Stage, Then, Worker};

/// How long workers that listen on the control socket may take to report their own error when a generation is over.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);
/// The same for native workers, which no signal comes to before SIGKILL: they end on their own, after what a device is
/// computing.
pub(super) const NATIVE_LAST_WORDS: Duration = Duration::from_secs(10);
/// How long before SIGKILL a program that listens gets the signal; half of the grace if that is less.
const AFTER_SIGNAL: Duration = Duration::from_secs(5);
/// How long processes may take to go after SIGKILL.
pub(super) const KILL_WAIT: Duration = Duration::from_secs(5);

impl Machine {
    /// Begins the stop routine because the generation is over.
    pub(super) fn stop(&mut self, cause: &str, then: Then) -> Vec<Effect> {
        let mut effects = vec![Effect::Notify(cause.to_owned()), Effect::CancelSpawn];
        let patience = if self.rules.native {
            NATIVE_LAST_WORDS
        } else {
            LAST_WORDS
        };
        effects.extend(self.await_end(then, Stage::Notified, patience));
        effects
    }

    /// Begins the stop routine with workers that are all well: because a user asked for it, or the nodes change.
    pub(super) fn stop_at_boundary(&mut self, cause: &str, then: Then) -> Vec<Effect> {
        let mut effects = vec![Effect::AskToStop(cause.to_owned()), Effect::CancelSpawn];
        let grace = self.rules.shutdown_timeout;
        if self.rules.native {
            effects.extend(self.await_end(then, Stage::Asked, grace));
            return effects;
        }
        effects.extend(self.await_end(then, Stage::Asked, grace.saturating_sub(self.after_signal())));
        if let Phase::Stopping {
            stage: Stage::Asked, ..
        } = self.phase
        {
            effects.push(Effect::SignalUnasked(self.stop_signal()));
        }
        effects
    }

    /// Leaves time to workers that can do something with a notice; the others get their signal at once.
    fn await_end(&mut self, then: Then, stage: Stage, patience: Duration) -> Vec<Effect> {
        let patience = patience.min(self.rules.shutdown_timeout);
        self.phase = Phase::Stopping { stage, then };
        if self.is_gone() {
            return self.sweep();
        }
        if self.listening && !patience.is_zero() {
            return vec![Effect::Arm(patience)];
        }
        self.terminate(self.rules.shutdown_timeout)
    }

    /// How much of the grace is left to those who listen when they get the signal.
    pub(super) fn after_signal(&self) -> Duration {
        AFTER_SIGNAL.min(self.rules.shutdown_timeout / 2)
    }

    pub(super) fn terminate(&mut self, grace: Duration) -> Vec<Effect> {
        if self.rules.native {
            // They ignore every other signal that stops a job.
            return self.kill();
        }
        self.set_stage(Stage::Terminated);
        vec![Effect::SignalAll(self.stop_signal()), Effect::Arm(grace)]
    }

    /// What workers are asked to end with.
    pub(super) fn stop_signal(&self) -> i32 {
        let Phase::Stopping {
            then: Then::Finish(exit_reason),
            ..
        } = &self.phase
        else {
            return libc::SIGTERM;
        };
        let cause = exit_reason.signal();
        // A number that cannot be sent would leave the workers without any word.
        cause
            .filter(|signal| Signal::try_from(*signal).is_ok())
            .unwrap_or(libc::SIGTERM)
    }

    pub(super) fn kill(&mut self) -> Vec<Effect> {
        self.set_stage(Stage::Killed);
        vec![Effect::SignalAll(libc::SIGKILL), Effect::Arm(KILL_WAIT)]
    }

    pub(super) fn sweep(&mut self) -> Vec<Effect> {
        self.set_stage(Stage::Sweeping);
        vec![Effect::Disarm, Effect::Sweep]
    }

    /// What a user can do next, when the workers are gone that were asked to stop.
    pub(super) fn next_steps(&self, then: &Then) -> Option<Effect> {
        let Then::Finish(exit_reason) = then else {
            return None;
        };
        let taken_in = (self.rules.elastic && matches!(exit_reason, ExitReason::Stopped { .. }))
            .then_some("if the other nodes continue, start this node again to rejoin the job");
        let words = [self.how_to_resume(exit_reason), taken_in.map(str::to_owned)];
        let words: Vec<String> = words.into_iter().flatten().collect();
        (!words.is_empty()).then(|| Effect::Say(words.join("\n  ")))
    }

    /// Whether native workers have saved, and how their run goes on.
    fn how_to_resume(&self, exit_reason: &ExitReason) -> Option<String> {
        if !exit_reason.leaves_time_to_save() || !self.rules.native || self.workers.is_empty() {
            return None;
        }
        // A native worker ends with 0 only when the checkpoint is whole, whichever rank has written it.
        let is_saved = |worker: &Worker| matches!(worker, Worker::Ended(ending) if ending.is_success());
        let resume = self
            .rules
            .resume_words
            .as_deref()
            .unwrap_or("`--set run.resume=auto`");
        Some(if self.workers.iter().any(is_saved) {
            format!("resume with {resume}")
        } else {
            format!(
                "the workers were stopped before they had saved; resuming with {resume} continues from the last \
                 complete checkpoint, if one exists\n  \
                 hint: a longer `--shutdown-timeout` gives them more time to save"
            )
        })
    }

    fn set_stage(&mut self, new: Stage) {
        if let Phase::Stopping { stage, .. } = &mut self.phase {
            *stage = new;
        }
    }

    fn is_gone(&self) -> bool {
        !self.spawning
            && self
                .workers
                .iter()
                .all(|worker| matches!(worker, Worker::Ended(_)))
    }

    /// Goes on when the last worker is gone.
    pub(super) fn check_gone(&mut self) -> Vec<Effect> {
        if !self.is_gone() {
            return Vec::new();
        }
        match &self.phase {
            // No other worker is left that could be the cause.
            Phase::Running if !self.suspects.is_empty() => self.judge_suspects(),
            // Any other failure would have left this phase.
            Phase::Running => {
                self.phase = Phase::Stopping {
                    stage: Stage::Killed,
                    then: Then::Succeed,
                };
                self.sweep()
            }
            Phase::Stopping { stage, .. } if *stage != Stage::Sweeping => self.sweep(),
            _ => Vec::new(),
        }
    }
}
