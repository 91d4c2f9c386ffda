//! The one stop routine: notify with the cause → a signal → grace → SIGKILL → bounded wait → sweep.
//!
//! The signal is the one that a launcher of the job was stopped with, so that Ctrl-C is a `KeyboardInterrupt` to a
//! Python program; else SIGTERM. A native worker that is asked to stop at a step boundary has all of the grace: a
//! signal would end it on the spot.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::conclusion::Conclusion;
use super::event::Effect;
use super::machine::{Machine, Phase, Stage, Then, Worker};

/// How long workers that listen on the control socket may take to report their own error when a generation is over.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long processes may take to go after SIGKILL.
pub(super) const KILL_WAIT: Duration = Duration::from_secs(5);

impl Machine {
    /// Begins the stop routine because the generation is over.
    pub(super) fn stop(&mut self, cause: &str, then: Then) -> Vec<Effect> {
        let mut effects = vec![Effect::Notify(cause.to_owned()), Effect::CancelSpawn];
        effects.extend(self.await_end(then, Stage::Notified, LAST_WORDS));
        effects
    }

    /// Begins the stop routine with workers that are all well: because a user asked for it, or the nodes change.
    pub(super) fn stop_at_boundary(&mut self, cause: &str, then: Then) -> Vec<Effect> {
        let mut effects = vec![Effect::AskToStop(cause.to_owned()), Effect::CancelSpawn];
        effects.extend(if self.rules.native {
            self.await_end(then, Stage::Asked, self.rules.shutdown_timeout)
        } else {
            self.await_end(then, Stage::Notified, Duration::ZERO)
        });
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
        self.terminate()
    }

    pub(super) fn terminate(&mut self) -> Vec<Effect> {
        self.set_stage(Stage::Terminated);
        vec![
            Effect::SignalAll(self.stop_signal()),
            Effect::Arm(self.rules.shutdown_timeout),
        ]
    }

    /// What workers are asked to end with.
    pub(super) fn stop_signal(&self) -> i32 {
        let Phase::Stopping {
            then: Then::Conclude(conclusion),
            ..
        } = &self.phase
        else {
            return libc::SIGTERM;
        };
        let cause = conclusion.signal().filter(|_| !self.rules.native);
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

    /// After a signal, when the workers are gone: whether they have saved. Only native workers were asked to.
    pub(super) fn word_on_checkpoint(&self, then: &Then) -> Option<Effect> {
        let Then::Conclude(Conclusion::Stopped { .. }) = then else {
            return None;
        };
        if !self.rules.native || self.workers.is_empty() {
            return None;
        }
        // A native worker ends with 0 only when the checkpoint is whole, whichever rank has written it.
        let is_saved = |worker: &Worker| matches!(worker, Worker::Ended(ending) if ending.is_success());
        let resume = self
            .rules
            .resume_words
            .as_deref()
            .unwrap_or("`--set run.resume=auto`");
        let words = if self.workers.iter().any(is_saved) {
            format!("resume with {resume}")
        } else {
            format!(
                "the workers were stopped before they had saved: a run that is resumed (with {resume}) goes on from the last \
                 checkpoint that is whole, if there is one\n  \
                 hint: a longer `--shutdown-timeout` leaves them more time"
            )
        };
        Some(Effect::Say(words))
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
            // Nobody else is left to be the cause.
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
