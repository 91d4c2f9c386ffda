//! Numbers that every rank tells all others: its loss, its wish to stop, its share of the validation.

use super::TrainError;
use super::world::World;
use crate::collective::{Launch, Traffic};
use crate::device::{Arena, ArenaSpec, DType, Sharing};

/// Numbers of one rank.
const WIDTH: usize = 2;

/// One row of numbers a rank, gathered on all of them.
pub(super) struct Exchange {
    world: World,
    rows: Arena,
}

impl Exchange {
    /// Every rank must call it.
    pub(super) fn new(world: &World) -> Result<Self, TrainError> {
        let spec = ArenaSpec {
            name: "numbers of each rank".into(),
            dtype: DType::F64,
            len: world.size() * WIDTH,
            sharing: Sharing::Node,
        };
        Ok(Self {
            rows: world.comm.alloc_shared(&world.device, &spec)?,
            world: world.clone(),
        })
    }

    /// The rows of all ranks, in rank order. `what` is for errors.
    pub(super) fn gather(&self, what: &str, own: [f64; WIDTH]) -> Result<Vec<[f64; WIDTH]>, TrainError> {
        let World {
            device, stream, comm, ..
        } = &self.world;
        let start = comm.rank() * WIDTH;
        device.upload(
            *stream,
            &self.rows.slice(start..start + WIDTH),
            bytemuck::cast_slice(&own),
        );
        let launch = Launch::after(device.record(*stream), Traffic::Other, what);
        comm.all_gather(&self.rows.whole(), launch)
            .wait(self.world.deadline())?;
        let bytes = device.download(*stream, &self.rows.whole())?;
        Ok(bytes
            .chunks_exact(size_of::<[f64; WIDTH]>())
            .map(bytemuck::pod_read_unaligned)
            .collect())
    }
}
