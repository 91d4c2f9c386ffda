//! The reading phase of a step.

use super::{GradientLayout, Ledger, Portion, ReduceError, Reducer, SyncTimes};
use crate::device::{Element, HostRef};
use crate::model::ParamId;

/// The summed gradients, for reading. The next step can begin when this is gone.
pub struct Reduced<'a> {
    reducer: &'a mut Reducer,
    times: SyncTimes,
    ledger: Ledger,
}

impl<'a> Reduced<'a> {
    pub(super) fn new(reducer: &'a mut Reducer, times: SyncTimes, ledger: Ledger) -> Self {
        Self {
            reducer,
            times,
            ledger,
        }
    }

    /// The same when nothing is in flight: the host knows what the device measured.
    pub(super) fn known(mut self) -> Self {
        self.times += self.ledger.take();
        self
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
        match self.reducer.memory.sum(id) {
            Some(grad) => Ok(grad.host()?),
            None => Err(ReduceError::Sharded {
                param: self.reducer.layout.spec(id).name.clone(),
            }),
        }
    }

    /// Time that reduction took. After [`super::Step::finish_on`] only what the host saw of it: on a device that runs
    /// asynchronously the rest is in the ledger.
    #[must_use]
    pub fn times(&self) -> SyncTimes {
        self.times
    }

    /// What the device measures of the step after [`super::Step::finish_on`]: complete when it has run all of it and
    /// [`Reducer::failure`] was asked after that.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        self.ledger.clone()
    }
}
