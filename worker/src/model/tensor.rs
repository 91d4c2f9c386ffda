//! What blocks ask of the ranks that compute a layer together with this one: tensor parallelism (Shoeybi et al. 2019) and
//! sequence parallelism (Korthikanti et al. 2022). The model knows no ranks; without a group everything is local.
//!
//! A layer whose outputs are cut takes all rows of its input; a layer whose inputs are cut makes a part of every sum. Between
//! them lies the residual stream: all of it on every rank, or under sequence parallelism each rank's own rows.
//!
//! | | forward | backward |
//! |---|---|---|
//! | into a layer whose outputs are cut | own rows are gathered (`Context::all_rows`) | sums of all ranks (`Context::summed_rows`) |
//! | out of a layer whose inputs are cut | sums of all ranks (`Context::summed_rows`) | own rows are gathered (`Context::all_rows`) |

use std::ops::Range;

use super::{Activation, Context};
use crate::device::{Buffer, DeviceError};
use crate::ops::{Cast, VocabularyPart};

/// The ranks of a tensor group. Each call is a collective one, in place, and orders itself into the compute stream.
pub trait TensorGroup: Send + Sync {
    /// This rank's place in the group, and the number of ranks.
    fn place(&self) -> (usize, usize);

    /// Each rank holds its own rows of the residual stream.
    fn is_sequence(&self) -> bool;

    /// Sums over the ranks, in rank order, on all of them.
    fn all_reduce(&self, x: &Buffer, what: &str) -> Result<(), DeviceError>;

    /// Sums over the ranks, in rank order: slice `r` of equal slices on rank `r`.
    fn reduce_scatter(&self, x: &Buffer, what: &str) -> Result<(), DeviceError>;

    /// Slice `r` of equal slices is that of rank `r`.
    fn all_gather(&self, x: &Buffer, what: &str) -> Result<(), DeviceError>;
}

impl Context<'_> {
    /// This rank's place in its tensor group, and the number of ranks.
    pub(super) fn tensor_place(&self) -> (usize, usize) {
        self.tensor.map_or((0, 1), TensorGroup::place)
    }

    /// The group, where rows of the residual stream are divided.
    fn sequence(&self) -> Option<&dyn TensorGroup> {
        self.tensor.filter(|group| group.is_sequence())
    }

    /// Rows of the micro-batch: samples · positions.
    pub(super) fn rows(&self) -> usize {
        self.shape.iter().product()
    }

    /// Which of them this rank's part of the residual stream holds.
    pub(super) fn own_rows(&self) -> Range<usize> {
        let rows = self.rows();
        match self.sequence().map(TensorGroup::place) {
            None => 0..rows,
            Some((index, ranks)) => index * rows / ranks..(index + 1) * rows / ranks,
        }
    }

    /// All rows, `[R, C]`, of which each rank makes its own ones: `fill` is given memory for them.
    pub(super) fn all_rows(
        &self,
        name: &str,
        channels: usize,
        fill: impl FnOnce(Buffer),
    ) -> Result<Activation, DeviceError> {
        let whole = self.lease(name, &[self.rows(), channels])?;
        let own = self.own_rows();
        fill(whole.buffer().slice(own.start * channels..own.end * channels));
        if let Some(group) = self.sequence() {
            group.all_gather(whole.buffer(), name)?;
        }
        Ok(whole)
    }

    /// All rows of something of which this rank has its own ones.
    pub(super) fn gathered_rows(&self, name: &str, own: &Activation) -> Result<Activation, DeviceError> {
        if self.sequence().is_none() {
            return Ok(own.clone());
        }
        let channels = own.buffer().len() / self.own_rows().len();
        self.all_rows(name, channels, |out| {
            let x = own.buffer().clone();
            self.enqueue(Cast { x, out });
        })
    }

    /// What the ranks' partial sums `[R, C]` add up to: all rows, or this rank's own ones.
    pub(super) fn summed_rows(&self, name: &str, partial: Activation) -> Result<Activation, DeviceError> {
        let Some(group) = self.tensor else {
            return Ok(partial);
        };
        if !group.is_sequence() {
            group.all_reduce(partial.buffer(), name)?;
            return Ok(partial);
        }
        group.reduce_scatter(partial.buffer(), name)?;
        let channels = partial.buffer().len() / self.rows();
        let own = self.own_rows();
        let elements = own.start * channels..own.end * channels;
        Ok(partial.part(elements, vec![own.len(), channels]))
    }

    /// This rank's part of a vocabulary, where each rank holds so many tokens; none where it has all of it.
    pub(super) fn vocabulary(&self, held: usize) -> Option<VocabularyPart> {
        let (index, ranks) = self.tensor_place();
        (ranks > 1).then_some(VocabularyPart {
            first: index * held,
            held,
            whole: ranks * held,
        })
    }
}
