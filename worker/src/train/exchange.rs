//! Numbers that every rank tells all others: its losses, its wish to stop, its share of the validation.

use std::ops::Range;

use super::TrainError;
use super::world::World;
use crate::collective::{Launch, Traffic, Work};
use crate::device::{Arena, ArenaSpec, Buffer, DType};

/// One row of so many numbers a rank, gathered on all of them.
pub(super) struct Exchange<const WIDTH: usize = 2> {
    pub(super) world: World,
    rows: Arena,
}

impl<const WIDTH: usize> Exchange<WIDTH> {
    /// Every rank must call it. `name` is for errors.
    pub(super) fn new(world: &World, name: &str) -> Result<Self, TrainError> {
        let spec = ArenaSpec::on_node(name, DType::F64, world.size() * WIDTH);
        Ok(Self {
            rows: world.comm.alloc_shared(&world.device, &spec)?,
            world: world.clone(),
        })
    }

    /// Some columns of this rank's row, on the device.
    pub(super) fn own(&self, columns: Range<usize>) -> Buffer {
        let start = self.world.rank() * WIDTH;
        self.rows.slice(start + columns.start..start + columns.end)
    }

    /// The rows of all ranks, in rank order, on the device.
    pub(super) fn rows(&self) -> Buffer {
        self.rows.whole()
    }

    /// Writes some columns of this rank's row, from the first on or from a later one.
    pub(super) fn write(&self, first: usize, numbers: &[f64]) {
        let World { device, stream, .. } = &self.world;
        let columns = self.own(first..first + numbers.len());
        device.upload(*stream, &columns, bytemuck::cast_slice(numbers));
    }

    /// Tells all ranks this one's row. Every rank must call it; `what` is for errors.
    pub(super) fn share(&self, what: &str) -> Work {
        let World {
            device, stream, comm, ..
        } = &self.world;
        let launch = Launch::after(device.record(*stream), Traffic::Other, what);
        comm.all_gather(&self.rows(), launch)
    }

    /// The rows of all ranks, on the host: synchronises. Every rank must call it; `what` is for errors.
    pub(super) fn gather(&self, what: &str, own: [f64; WIDTH]) -> Result<Vec<[f64; WIDTH]>, TrainError> {
        self.write(0, &own);
        self.share(what).wait(self.world.deadline())?;
        let World { device, stream, .. } = &self.world;
        Ok(rows_of(&device.download(*stream, &self.rows())?).collect())
    }
}

/// From the bytes of [`Exchange::rows`].
pub(super) fn rows_of<const WIDTH: usize>(bytes: &[u8]) -> impl Iterator<Item = [f64; WIDTH]> {
    const BYTES: usize = size_of::<f64>();
    let number = |row: &[u8], i: usize| bytemuck::pod_read_unaligned(&row[i * BYTES..(i + 1) * BYTES]);
    let rows = bytes.chunks_exact(WIDTH * BYTES);
    rows.map(move |row| std::array::from_fn(|i| number(row, i)))
}
