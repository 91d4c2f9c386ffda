//! What is due after which step.

use crate::config::Train;

/// What is to be done after a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Due {
    pub(super) validation: bool,
    pub(super) verification: bool,
    pub(super) checkpoint: bool,
    /// Steps whose numbers are not waited for yet.
    pub(super) kept: usize,
}

impl Due {
    /// After `done` steps, of which the device may have the last `ahead`.
    pub(super) fn after(train: &Train, done: u64, ahead: usize) -> Self {
        let last = done == train.steps;
        let every = |steps: u64| steps > 0 && done.is_multiple_of(steps);
        let (validation, verification) = (last || every(train.eval_every), every(train.verify_every));
        let checkpoint = last || every(train.checkpoint_every);
        Self {
            validation,
            verification,
            checkpoint,
            kept: if validation || verification || checkpoint {
                0
            } else {
                ahead
            },
        }
    }
}
