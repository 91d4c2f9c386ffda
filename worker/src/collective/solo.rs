//! The transport of a world of one: nothing moves, but sums are still scaled.

use std::sync::Arc;

use super::{Failure, Operation, ReduceOp, Request, Transport, Wait, WireBytes};
use crate::device::{Arena, ArenaSpec, Device, Held};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Solo {
    members: [usize; 1],
}

impl Solo {
    /// The group of this global rank alone.
    #[must_use]
    pub const fn new(global_rank: usize) -> Self {
        Self {
            members: [global_rank],
        }
    }
}

impl Transport for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn execute(
        &mut self,
        _sequence: u64,
        request: &Request,
        held: &mut Held,
        _wait: &Wait,
    ) -> Result<(), Failure> {
        match (request.operation, request.reduce) {
            (Operation::AllReduce | Operation::ReduceScatter, ReduceOp::Sum { scale }) if scale != 1.0 => {
                for x in held.elements_mut::<f32>()? {
                    *x *= scale;
                }
                Ok(())
            }
            (Operation::Send { .. } | Operation::Recv { .. }, _) => {
                Err(Failure::Invalid("there is no other rank".into()))
            }
            _ => Ok(()),
        }
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
    ) -> Result<Box<dyn Transport>, Failure> {
        Ok(Box::new(*self))
    }

    fn wire_bytes(&self) -> WireBytes {
        WireBytes::default()
    }
}
