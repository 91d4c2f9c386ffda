//! The transport of a world of one: nothing moves, but sums are still scaled.
#![allow(unsafe_code, reason = "the kernel of reductions takes addresses")]

use std::sync::Arc;

use super::kernel::{NodeGives, Reduction};
use super::{Failure, Operation, Request, Transport, Wait, WireBytes};
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
        match request.operation {
            Operation::AllReduce | Operation::ReduceScatter => {
                let reduction = Reduction::new(request.buffer.dtype(), request.reduce)?;
                let base = held.host_ptr()?;
                let own = [NodeGives::Ranks(vec![base.cast_const()])];
                // SAFETY: the buffer is held, so this call alone accesses it; source and target may be the same.
                unsafe { reduction.run(&own, &[base], request.buffer.len()) };
                Ok(())
            }
            Operation::Send { .. } | Operation::Recv { .. } => {
                Err(Failure::Invalid("there is no other rank".into()))
            }
            Operation::Broadcast { root } if root > 0 => Err(Failure::Invalid(format!(
                "there is no rank {root} in a group of 1"
            ))),
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
