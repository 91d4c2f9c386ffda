//! Tables with one row a rank, gathered on all of them: losses, requests to stop, shares of the validation.

use std::ops::Range;

use crate::collective::{Launch, Traffic, Work};
use crate::device::{Arena, ArenaSpec, Buffer, Compute, DType, Fetch};
use crate::model::Activation;
use crate::ops::LossSum;
use crate::train::TrainError;
use crate::train::world::World;

/// One row of `WIDTH` numbers a rank.
pub(crate) struct RankTable<const WIDTH: usize = 2> {
    world: World,
    rows: Arena,
}

impl<const WIDTH: usize> RankTable<WIDTH> {
    /// Every rank must call it. `name` is for errors.
    pub(crate) fn new(world: &World, name: &str) -> Result<Self, TrainError> {
        let spec = ArenaSpec::on_node(name, DType::F64, world.size() * WIDTH);
        Ok(Self {
            rows: world.comm.alloc_shared(&world.compute.device, &spec)?,
            world: world.clone(),
        })
    }

    /// Some columns of this rank's row, on the device.
    pub(crate) fn own(&self, columns: Range<usize>) -> Buffer {
        let start = self.world.rank() * WIDTH;
        self.rows.slice(start + columns.start..start + columns.end)
    }

    /// The rows of all ranks, in rank order, on the device.
    pub(crate) fn rows(&self) -> Buffer {
        self.rows.whole()
    }

    /// Writes some columns of this rank's row, from the first on or from a later one.
    pub(crate) fn write(&self, first: usize, numbers: &[f64]) {
        let columns = self.own(first..first + numbers.len());
        self.world.compute.upload(&columns, numbers);
    }

    /// Gathers the rows. Every rank must call it; `what` is for errors.
    pub(crate) fn share(&self, what: &str) -> Work {
        let launch = Launch::after(self.world.compute.record(), Traffic::Other, what);
        self.world.comm.all_gather(&self.rows(), launch)
    }

    /// The rows of all ranks, on the host: synchronises. Every rank must call it; `what` is for errors.
    pub(crate) fn gather(&self, what: &str, own: [f64; WIDTH]) -> Result<Vec<[f64; WIDTH]>, TrainError> {
        self.write(0, &own);
        self.share(what).wait(self.world.deadline())?;
        Ok(rows_of(&self.world.compute.download(&self.rows())?).collect())
    }
}

/// From the bytes of [`RankTable::rows`].
fn rows_of<const WIDTH: usize>(bytes: &[u8]) -> impl Iterator<Item = [f64; WIDTH]> {
    const BYTES: usize = size_of::<f64>();
    let number = |row: &[u8], i: usize| bytemuck::pod_read_unaligned(&row[i * BYTES..(i + 1) * BYTES]);
    let rows = bytes.chunks_exact(WIDTH * BYTES);
    rows.map(move |row| std::array::from_fn(|i| number(row, i)))
}

/// Numbers of one rank in a step.
const WIDTH: usize = 6;

/// The row of a rank in a step: the sum of its losses, their number (both 0 if another stage makes them), its request to
/// stop (above 0), its progress with the checkpoint that is being written, the number of the step, and the stamp of its
/// device. Ignored positions are not counted. The numbers go from the device to the other ranks before the update, and to the
/// host when it asks for them.
///
/// An aborted collective of NCCL leaves anything in its output, and lets the stream go on; to the other ranks it may have
/// sent anything. So each rank stamps its row when the stream has passed the sums and the norm, and once more when it has
/// passed the exchange of the rows. A stamp is finite only if no abort had begun until then. With one that is not, the update
/// is skipped: on this rank, and on those that get the row. A row of another step was left by an aborted exchange.
pub(crate) struct StepTable(RankTable<WIDTH>);

/// The rows of a [`StepTable`], on the host.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepRows(Vec<[f64; WIDTH]>);

impl StepTable {
    /// Every rank must call it.
    pub(crate) fn new(world: &World) -> Result<Self, TrainError> {
        Ok(Self(RankTable::new(world, "losses of each rank")?))
    }

    /// Adds the losses of a micro-batch, which may be the first one of its step.
    pub(crate) fn add(&self, losses: &Activation, is_first: bool) {
        self.0.world.compute.enqueue(LossSum {
            losses: losses.buffer().clone(),
            total: self.0.own(0..1),
            accumulate: !is_first,
        });
    }

    /// Gathers the rows. Every rank must call it; `positions` is the number of losses in what was added. Where nothing ever
    /// is, the sum stays 0.
    pub(crate) fn share(&self, step: u64, positions: usize, stop: bool, save: f64) -> Work {
        let stop = f64::from(u8::from(stop));
        self.0.write(1, &[positions as f64, stop, save, step as f64]);
        self.stamp();
        self.0.share("losses")
    }

    /// Stamps this rank's row: before it is sent, and when the stream has all rows.
    pub(crate) fn stamp(&self) {
        let Compute { device, stream } = &self.0.world.compute;
        device.stamp(*stream, &self.0.own(WIDTH - 1..WIDTH));
    }

    /// The rows of all ranks, on the device: none of the numbers may be infinite or NaN.
    pub(crate) fn rows(&self) -> Buffer {
        self.0.rows()
    }

    /// The rows of all ranks, for the host: [`StepRows::read`].
    pub(crate) fn fetch(&self) -> Fetch {
        let Compute { device, stream } = &self.0.world.compute;
        device.fetch(*stream, &self.0.rows())
    }
}

impl StepRows {
    /// From the bytes of [`StepTable::fetch`].
    pub(crate) fn read(bytes: &[u8]) -> Self {
        Self(rows_of(bytes).collect())
    }

    /// Mean loss of all positions of all ranks: each weighs the same, whoever had it.
    pub(crate) fn mean_loss(&self) -> f64 {
        let losses: f64 = self.0.iter().map(|[losses, ..]| losses).sum();
        let positions: f64 = self.0.iter().map(|[_, positions, ..]| positions).sum();
        losses / positions
    }

    /// True if any rank was asked to stop.
    pub(crate) fn stop(&self) -> bool {
        self.0.iter().any(|[_, _, stop, ..]| *stop > 0.0)
    }

    /// How far each rank is with the checkpoint that is being written.
    pub(crate) fn saves(&self) -> Vec<f64> {
        self.0.iter().map(|[_, _, _, save, ..]| *save).collect()
    }

    /// The first rank that has not taken part in this step to its end.
    pub(crate) fn left_in(&self, step: u64) -> Option<usize> {
        let takes_part = |[.., number, stamp]: &[f64; WIDTH]| *number == step as f64 && stamp.is_finite();
        self.0.iter().position(|row| !takes_part(row))
    }

    /// The first rank whose loss is not finite, and that loss.
    pub(crate) fn not_finite(&self) -> Option<(usize, f64)> {
        let losses = self.0.iter().map(|[losses, ..]| *losses).enumerate();
        losses.into_iter().find(|(_, loss)| !loss.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_weighs_the_same() {
        let numbers = [
            [12.0, 4.0, 0.0, 1.0, 7.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 7.0, 0.0],
            [3.0, 1.0, 1.0, 2.0, 7.0, 0.0],
        ];
        let rows = StepRows::read(bytemuck::cast_slice(&numbers));
        assert_eq!(rows.mean_loss(), 3.0);
        assert!(rows.stop());
        assert_eq!(rows.saves(), [1.0, 0.0, 2.0]);
        assert_eq!((rows.not_finite(), rows.left_in(7)), (None, None));
    }

    #[test]
    fn rows_of_another_step_and_those_behind_an_abort_do_not_count() {
        let mut numbers = [[1.0, 1.0, 0.0, 0.0, 7.0, 0.0]; 3];
        numbers[1][4] = 6.0;
        let rows = |numbers: &[[f64; WIDTH]]| StepRows::read(bytemuck::cast_slice(numbers));
        assert_eq!(rows(&numbers).left_in(7), Some(1));
        numbers[1][4..].copy_from_slice(&[7.0, f64::NAN]);
        assert_eq!(rows(&numbers).left_in(7), Some(1));
    }

    #[test]
    fn the_first_rank_without_a_finite_loss_is_named() {
        let numbers = [
            [12.0, 4.0, 0.0, 0.0, 1.0, 0.0],
            [f64::INFINITY, 4.0, 0.0, 0.0, 1.0, 0.0],
            [f64::NAN, 4.0, 0.0, 0.0, 1.0, 0.0],
        ];
        let rows = StepRows::read(bytemuck::cast_slice(&numbers));
        assert_eq!(rows.not_finite(), Some((1, f64::INFINITY)));
        assert!(!rows.stop() && rows.mean_loss().is_nan());
    }
}
