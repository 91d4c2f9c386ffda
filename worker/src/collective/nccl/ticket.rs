//! The handle of one operation in the stream.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::comm::Comm;
use super::recorder::Points;
use crate::collective::{Failure, Flight, WorkTimes};
use crate::device::Event;

/// See the module.
pub(super) struct Ticket {
    comm: Arc<Comm>,
    sequence: u64,
    points: Arc<Points>,
    ended: OnceLock<Result<WorkTimes, Failure>>,
}

impl Ticket {
    pub(super) fn new(comm: Arc<Comm>, sequence: u64, points: Arc<Points>) -> Self {
        Self {
            comm,
            sequence,
            points,
            ended: OnceLock::new(),
        }
    }
}

impl Flight for Ticket {
    fn done(&self) -> &Event {
        &self.points.done
    }

    fn started(&self) -> Option<&Event> {
        Some(&self.points.started)
    }

    fn outcome(&self) -> Option<Result<WorkTimes, Failure>> {
        if let Some(ended) = self.ended.get() {
            return Some(ended.clone());
        }
        let now = Instant::now();
        let passed = self.points.look(now);
        // Asked after the stream: an operation that was aborted lets it pass, but was given up before.
        let outcome = match (self.comm.doom(self.sequence), passed) {
            (Some(failure), _) => Err(failure),
            (None, Some(Ok(()))) => Ok(self.points.times()?),
            (None, Some(Err(error))) => Err(Failure::Device(error)),
            (None, None) => return None,
        };
        Some(self.ended.get_or_init(|| outcome).clone())
    }
}
