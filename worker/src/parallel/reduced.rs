//! The reading phase of a step.

use super::{GradientLayout, Portion, ReduceError, Reducer, SyncTimes};
use crate::device::{Element, HostRef};
use crate::model::ParamId;

/// The averaged gradients, for reading. The next step can begin when this is gone.
pub struct Reduced<'a> {
    reducer: &'a mut Reducer,
    times: SyncTimes,
}

impl<'a> Reduced<'a> {
    pub(super) fn new(reducer: &'a mut Reducer, times: SyncTimes) -> Self {
        Self { reducer, times }
    }

    /// The memory, padding included. Of a whole arena that is scattered, only what this rank owns has a meaning.
    #[must_use]
    pub fn portion(&self) -> Portion {
        self.reducer.memory.portion()
    }

    /// Where each gradient lies.
    #[must_use]
    pub fn layout(&self) -> &GradientLayout {
        &self.reducer.layout
    }

    /// The elements of one gradient on the host. A sharded reducer has them on their owner only, and says so.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn grad<T: Element>(&self, id: ParamId) -> Result<HostRef<'_, T>, ReduceError> {
        match self.reducer.memory.average(id) {
            Some(grad) => Ok(grad.host()?),
            None => Err(ReduceError::Sharded {
                param: self.reducer.layout.spec(id).name.clone(),
            }),
        }
    }

    /// Time that averaging took. After [`super::Step::finish_on`], of all operations that have ended since the step
    /// before.
    #[must_use]
    pub fn times(&self) -> SyncTimes {
        self.times
    }
}
