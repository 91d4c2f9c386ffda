//! What every rank tells all others of a step: the sum of its losses, their number, its wish to stop, and how far it
//! is with the checkpoint that is being written.
//!
//! The numbers go from the device to the other ranks while backward runs, and to the host when it asks for them.

use super::TrainError;
use super::exchange::{Exchange, rows_of};
use super::world::World;
use crate::collective::Work;
use crate::device::{Buffer, Fetch};
use crate::model::Activation;
use crate::ops::LossSum;

/// Numbers of one rank.
const WIDTH: usize = 4;

/// See the module.
pub(super) struct Tally(Exchange<WIDTH>);

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
        Ok(Self(Exchange::new(world, "losses of each rank")?))
    }

    /// Adds the losses of a micro-batch, which may be the first one of its step.
    pub(super) fn add(&self, losses: &Activation, is_first: bool) {
        let sum = LossSum {
            losses: losses.buffer().clone(),
            total: self.0.own(0..1),
            accumulate: !is_first,
        };
        let World { device, stream, .. } = &self.0.world;
        device.enqueue(*stream, sum.into());
    }

    /// Tells all ranks. Every rank must call it; `positions` is the number of losses that were not ignored.
    pub(super) fn share(&self, positions: usize, stop: bool, save: f64) -> Work {
        let known = [positions as f64, f64::from(u8::from(stop)), save];
        self.0.write(1, &known);
        self.0.share("losses")
    }

    /// The rows of all ranks, on the device: none of the numbers may be infinite or NaN.
    pub(super) fn rows(&self) -> Buffer {
        self.0.rows()
    }

    /// The rows of all ranks, for the host: [`Shares::read`].
    pub(super) fn fetch(&self) -> Fetch {
        let World { device, stream, .. } = &self.0.world;
        device.fetch(*stream, &self.0.rows())
    }
}

impl Shares {
    /// From the bytes of [`Tally::fetch`].
    pub(super) fn read(bytes: &[u8]) -> Self {
        let rows = rows_of(bytes).map(|[losses, positions, stop, save]| Share {
            losses,
            positions,
            stop,
            save,
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
