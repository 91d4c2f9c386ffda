//! The transport of a world of one whose buffers are on a device that runs asynchronously: nothing moves, but sums are
//! still scaled, on a stream of their own.

use std::sync::Arc;
use std::time::Instant;

use super::plan::Job;
use super::{Failure, Flight, Operation, ReduceOp, Request, StreamTransport, Wait, WireBytes, WorkTimes};
use crate::device::{Arena, ArenaSpec, Device, Event, Stream};
use crate::ops::Scale;

/// See the module.
#[derive(Clone)]
pub struct SoloStream {
    members: [usize; 1],
    device: Arc<dyn Device>,
    stream: Stream,
}

impl SoloStream {
    /// The group of this global rank alone.
    #[must_use]
    pub fn new(global_rank: usize, device: &Arc<dyn Device>) -> Self {
        Self {
            members: [global_rank],
            stream: device.stream(),
            device: device.clone(),
        }
    }

    fn scale(&self, request: &Request, factor: f32, after: &Event, deadline: Instant) -> Event {
        self.device.wait_event(self.stream, after, deadline);
        let x = request.buffer.clone();
        self.device.enqueue(self.stream, Scale { x, factor }.into());
        self.device.record(self.stream)
    }
}

impl StreamTransport for SoloStream {
    fn rank(&self) -> usize {
        0
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn enqueue(
        &mut self,
        _sequence: u64,
        request: &Request,
        after: &Event,
        wait: &Wait,
    ) -> Result<Arc<dyn Flight>, Failure> {
        Job::of(request).check(1)?;
        let done = match (request.operation, request.reduce) {
            (Operation::Send { .. } | Operation::Recv { .. }, _) => {
                return Err(Failure::Invalid("there is no other rank".into()));
            }
            (Operation::AllReduce | Operation::ReduceScatter, ReduceOp::Sum { scale }) if scale != 1.0 => {
                self.scale(request, scale, after, wait.deadline)
            }
            _ => after.clone(),
        };
        Ok(Arc::new(Passed { done }))
    }

    fn alloc_shared(
        &mut self,
        device: &Arc<dyn Device>,
        spec: &ArenaSpec,
        _wait: &Wait,
    ) -> Result<Arena, Failure> {
        Ok(device.alloc(spec)?)
    }

    fn split(
        &mut self,
        _name: &str,
        _members: &[usize],
        _wait: &Wait,
    ) -> Result<Box<dyn StreamTransport>, Failure> {
        Ok(Box::new(Self::new(self.members[0], &self.device)))
    }

    fn wire_bytes(&self) -> WireBytes {
        WireBytes::default()
    }

    fn shutdown(&mut self, _wait: &Wait) {}

    fn abandon(&mut self) {}
}

struct Passed {
    done: Event,
}

impl Flight for Passed {
    fn done(&self) -> &Event {
        &self.done
    }

    /// It takes no time: there is nobody to exchange anything with.
    fn outcome(&self) -> Option<Result<WorkTimes, Failure>> {
        let now = Instant::now();
        let times = WorkTimes {
            started: now,
            ended: now,
        };
        Some(self.done.poll()?.map(|()| times).map_err(Failure::Device))
    }
}
