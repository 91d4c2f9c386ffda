//! How the start of a generation's workers goes.
//!
//! A start can outlast its generation: a program on a file system that does not answer keeps the spawner waiting when
//! the workers have long been given up. Reports of it that come then must not count for the next generation.

use ddp_proto::exit;
use ddp_proto::ids::{Generation, LocalRank};

use super::event::Effect;
use super::exit_reason::ExitReason;
use super::machine::{Machine, Phase, Stage, Worker};
use crate::spawn::spawner::SpawnError;

impl Machine {
    pub(super) fn on_spawned(
        &mut self,
        generation: Generation,
        local_rank: LocalRank,
        pid: i32,
    ) -> Vec<Effect> {
        let expected = (generation == self.generation).then_some(&mut self.workers);
        let Some(worker) = expected.and_then(|workers| workers.get_mut(local_rank.0 as usize)) else {
            return vec![Effect::KillStray(pid)];
        };
        *worker = Worker::Running;
        let Phase::Stopping { stage, .. } = self.phase else {
            return Vec::new();
        };
        // It gets the signal that the others got, not more: it may well be ready for a graceful end.
        match stage {
            // The others that do not listen got theirs when the stop began. No worker gets the same signal twice.
            Stage::Asked if !self.rules.native => vec![Effect::SignalUnasked(self.stop_signal())],
            Stage::Asked | Stage::Notified => Vec::new(),
            Stage::Terminated => vec![Effect::SignalLate(local_rank, self.stop_signal())],
            Stage::Killed | Stage::Sweeping => vec![Effect::SignalLate(local_rank, libc::SIGKILL)],
        }
    }

    pub(super) fn on_spawn_ended(
        &mut self,
        generation: Generation,
        failure: Option<SpawnError>,
    ) -> Vec<Effect> {
        if generation != self.generation {
            return Vec::new();
        }
        self.spawning = false;
        self.workers.retain(|worker| *worker != Worker::Waiting);
        let mut effects = match failure {
            Some(error) => self.end(ExitReason::CannotStart(error)),
            // No worker was ever started: all of none have ended, but nothing has succeeded.
            None if self.is_running() && self.workers.is_empty() => self.end(ExitReason::Broken {
                exit_code: exit::INTERNAL,
                error: format!("no worker of generation {generation} was started"),
            }),
            None => Vec::new(),
        };
        effects.extend(self.check_gone());
        effects
    }

    pub(super) fn on_cannot_begin(&mut self, exit_code: u8, error: String) -> Vec<Effect> {
        self.spawning = false;
        self.workers.clear();
        self.end(ExitReason::Broken { exit_code, error })
    }
}
