//! What goes on at a node while the daemon is out of reach, in words.

use ddp_proto::ids::Generation;

use super::machine::{Machine, Phase, Then};

impl Machine {
    /// What goes on at this node while the daemon is out of reach.
    pub(super) fn meanwhile(&self) -> &'static str {
        words(&self.phase, self.generation())
    }

    /// The workers of this node have come to an end, and the daemon has to say what follows.
    pub(super) fn waits_for_daemon(&self) -> bool {
        matches!(
            self.phase,
            Phase::Succeeded
                | Phase::Undecided
                | Phase::Stopping {
                    then: Then::AskDaemon,
                    ..
                }
        )
    }
}

fn words(phase: &Phase, generation: Generation) -> &'static str {
    match phase {
        Phase::Joining if generation == Generation(0) => "no worker was started yet",
        Phase::Joining => "no worker runs, the next generation waits for the daemon",
        Phase::Running => "the workers keep running",
        Phase::Succeeded => "the workers of this node have succeeded, and the daemon decides what follows",
        Phase::Undecided
        | Phase::Stopping {
            then: Then::AskDaemon,
            ..
        } => "a worker of this node has failed, and the daemon decides what follows",
        Phase::Stopping { .. } => "the workers are being stopped",
        Phase::Listening(_) | Phase::Leaving(_) | Phase::Done => "the workers are gone",
    }
}

#[cfg(test)]
mod tests {
    use super::super::exit_reason::ExitReason;
    use super::super::machine::Stage;
    use super::*;

    #[test]
    fn each_state_is_told_as_it_is() {
        let stopping = |then| Phase::Stopping {
            stage: Stage::Terminated,
            then,
        };
        let told = [
            (Phase::Joining, 0, "no worker was started yet"),
            (Phase::Joining, 1, "no worker runs"),
            (Phase::Running, 1, "the workers keep running"),
            (Phase::Succeeded, 1, "the workers of this node have succeeded"),
            (Phase::Undecided, 1, "a worker of this node has failed"),
            (stopping(Then::AskDaemon), 1, "a worker of this node has failed"),
            (stopping(Then::Rejoin), 1, "the workers are being stopped"),
            (Phase::Leaving(ExitReason::Succeeded), 1, "the workers are gone"),
        ];
        for (phase, generation, expected) in told {
            let said = words(&phase, Generation(generation));
            assert!(said.starts_with(expected), "{phase:?}: {said}");
        }
    }
}
