//! What every rank tells all others of a step: the sum of its losses, their number, its wish to stop, and how far it
//! is with the checkpoint that is being written.
//!
//! The numbers go from the device to the other ranks while backward runs, and to the host when it asks for them.

use super::TrainError;
use super::world::World;
use crate::collective::{Launch, Traffic, Work};
use crate::device::{Arena, ArenaSpec, Buffer, DType, Fetch, Sharing};
use crate::model::Activation;
use crate::ops::LossSum;

/// Numbers of one rank.
const WIDTH: usize = 4;

/// One row of numbers a rank.
pub(super) struct Tally {
    world: World,
    rows: Arena,
}

/// The rows of all ranks, on the host.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shares(Vec<Share>);

/// The row of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Share {
    /// Sum of the losses of all positions, ignored ones not counted.
    losses: f64,
    /// Number of these positions.
    positions: f64,
    /// Above 0: the rank was asked to stop.
    stop: f64,
    /// How far it is with a save.
    save: f64,
}

impl Tally {
    /// Every rank must call it.
    pub(super) fn new(world: &World) -> Result<Self, TrainError> {
        let spec = ArenaSpec {
            name: "losses of each rank".into(),
            dtype: DType::F64,
            len: world.size() * WIDTH,
            sharing: Sharing::Node,
        };
        Ok(Self {
            rows: world.comm.alloc_shared(&world.device, &spec)?,
            world: world.clone(),
        })
    }

    /// Adds the losses of a micro-batch, which may be the first one of its step.
    pub(super) fn add(&self, losses: &Activation, is_first: bool) {
        let sum = LossSum {
            losses: losses.buffer().clone(),
            total: self.own(0..1),
            accumulate: !is_first,
        };
        self.world.device.enqueue(self.world.stream, sum.into());
    }

    /// Tells all ranks. Every rank must call it; `positions` is the number of losses that were not ignored.
    pub(super) fn share(&self, positions: usize, stop: bool, save: f64) -> Work {
        let World {
            device, stream, comm, ..
        } = &self.world;
        let known = [positions as f64, f64::from(u8::from(stop)), save];
        device.upload(*stream, &self.own(1..WIDTH), bytemuck::cast_slice(&known));
        let launch = Launch::after(device.record(*stream), Traffic::Other, "losses");
        comm.all_gather(&self.rows.whole(), launch)
    }

    /// The rows of all ranks, on the device: none of the numbers may be infinite or NaN.
    pub(super) fn rows(&self) -> Buffer {
        self.rows.whole()
    }

    /// The rows of all ranks, for the host: [`Shares::read`].
    pub(super) fn fetch(&self) -> Fetch {
        self.world.device.fetch(self.world.stream, &self.rows.whole())
    }

    fn own(&self, columns: std::ops::Range<usize>) -> Buffer {
        let start = self.world.rank() * WIDTH;
        self.rows.slice(start + columns.start..start + columns.end)
    }
}

impl Shares {
    /// From the bytes of [`Tally::fetch`].
    pub(super) fn read(bytes: &[u8]) -> Self {
        let rows = bytes.chunks_exact(size_of::<[f64; WIDTH]>()).map(|row| {
            let [losses, positions, stop, save] = bytemuck::pod_read_unaligned::<[f64; WIDTH]>(row);
            Share {
                losses,
                positions,
                stop,
                save,
            }
        });
        Self(rows.collect())
    }

    /// Mean loss of all positions of all ranks: each weighs the same, whoever had it.
    pub(super) fn mean_loss(&self) -> f64 {
        let losses: f64 = self.0.iter().map(|share| share.losses).sum();
        let positions: f64 = self.0.iter().map(|share| share.positions).sum();
        losses / positions
    }

    /// True if any rank was asked to stop.
    pub(super) fn stop(&self) -> bool {
        self.0.iter().any(|share| share.stop > 0.0)
    }

    /// How far each rank is with the checkpoint that is being written.
    pub(super) fn saves(&self) -> Vec<f64> {
        self.0.iter().map(|share| share.save).collect()
    }

    /// The first rank whose loss is not finite, and that loss.
    pub(super) fn not_finite(&self) -> Option<(usize, f64)> {
        let losses = self.0.iter().map(|share| share.losses).enumerate();
        losses.into_iter().find(|(_, loss)| !loss.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_weighs_the_same() {
        let rows = [[12.0, 4.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 1.0, 2.0]];
        let shares = Shares::read(bytemuck::cast_slice(&rows));
        assert_eq!(shares.mean_loss(), 3.0);
        assert!(shares.stop());
        assert_eq!(shares.saves(), [1.0, 0.0, 2.0]);
        assert_eq!(shares.not_finite(), None);
    }

    #[test]
    fn the_first_rank_without_a_finite_loss_is_named() {
        let rows = [
            [12.0, 4.0, 0.0, 0.0],
            [f64::INFINITY, 4.0, 0.0, 0.0],
            [f64::NAN, 4.0, 0.0, 0.0],
        ];
        let shares = Shares::read(bytemuck::cast_slice(&rows));
        assert_eq!(shares.not_finite(), Some((1, f64::INFINITY)));
        assert!(!shares.stop() && shares.mean_loss().is_nan());
    }
}
