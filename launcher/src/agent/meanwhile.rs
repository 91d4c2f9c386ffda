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
        Phase::Joining => "no worker is running; the restart waits for the daemon",
        Phase::Running => "the workers keep running",
        Phase::Succeeded => "the workers of this node succeeded; waiting for the daemon's decision",
        Phase::Undecided
        | Phase::Stopping {
            then: Then::AskDaemon,
            ..
        } => "a worker of this node failed; waiting for the daemon's decision",
        Phase::Stopping { .. } => "the workers are being stopped",
        Phase::Leaving(_) | Phase::Done => "the workers have exited",
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
            (Phase::Joining, 1, "no worker is running"),
            (Phase::Running, 1, "the workers keep running"),
            (Phase::Succeeded, 1, "the workers of this node succeeded"),
            (Phase::Undecided, 1, "a worker of this node failed"),
            (stopping(Then::AskDaemon), 1, "a worker of this node failed"),
            (stopping(Then::Rejoin), 1, "the workers are being stopped"),
            (
                Phase::Leaving(ExitReason::Succeeded),
                1,
                "the workers have exited",
            ),
        ];
        for (phase, generation, expected) in told {
            let said = words(&phase, Generation(generation));
            assert!(said.starts_with(expected), "{phase:?}: {said}");
        }
    }
}
