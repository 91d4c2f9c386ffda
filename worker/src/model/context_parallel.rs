//! Context parallelism: ranks compute different positions of the same samples.
//!
//! Only attention looks at other positions. A late position sees more keys than an early one, so that the positions are
//! cut into twice as many chunks as there are ranks, and a rank has one from each end ([`zigzag`]; Llama 3, section 3.3.2).
//! These are its *stretches*. Its rows lie by stretch, then sample, then position: `[S, B, T/(S·c)]`. All that works row by
//! row sees `[B, T/c]`.
//!
//! Keys and values of all ranks are gathered, and put into the order of their positions. So a query's sums have the order
//! of one rank, and forward has its bits. Backward gathers them again, and reduce-scatters their gradients. With c ranks
//! and K bytes of keys and values, a rank sends 3(c − 1)/c·K. Or they go round the ranks: [`ring_attention`].

mod ring_attention;

use std::ops::Range;

use super::layers::index_rows;
use super::{Activation, Context, ExchangeKind, GroupOps};
use crate::device::{Buffer, Result};
use crate::ops::{AttentionForward, AttentionShape, DropoutMask, Fill, HeadsView, IndexRows, inverse};

/// The positions of a sample that the rank at `index` of `ranks` computes: one range for a single rank, else two of one
/// length.
pub fn zigzag(positions: usize, index: usize, ranks: usize) -> Vec<Range<usize>> {
    if ranks == 1 {
        return vec![0..positions];
    }
    let each = positions / (2 * ranks);
    let chunks = [index, 2 * ranks - 1 - index];
    chunks.map(|chunk| chunk * each..(chunk + 1) * each).to_vec()
}

/// Neighbouring positions of all samples of a micro-batch.
#[derive(Clone)]
pub(super) struct Stretch {
    /// Where they lie among this rank's rows.
    pub(super) rows: Range<usize>,
    /// Of each sample.
    pub(super) positions: Range<usize>,
}

impl Stretch {
    /// Its part of a buffer with `width` elements a row.
    pub(super) fn of(&self, all: &Buffer, width: usize) -> Buffer {
        all.slice(self.rows.start * width..self.rows.end * width)
    }

    /// Sizes of its attention, given those of all of a rank's rows.
    pub(super) fn shape(&self, shape: AttentionShape) -> AttentionShape {
        let positions = self.positions.len();
        AttentionShape { positions, ..shape }
    }

    /// Its queries, with the gathered keys and values of all positions ([`KeyExchange::gather`]), or with its own.
    pub(super) fn views(
        &self,
        shape: AttentionShape,
        qkv: &Activation,
        gathered: Option<&Activation>,
    ) -> [HeadsView; 3] {
        let own = shape.views(&self.of(qkv.buffer(), shape.qkv_channels()));
        let Some(gathered) = gathered else {
            return own;
        };
        let [mut q, ..] = own;
        q.first_position = self.positions.start;
        let (buffer, width) = (gathered.buffer(), shape.kv_channels());
        let [k, v] = [0, width].map(|offset| HeadsView {
            buffer: buffer.clone(),
            stride: 2 * width,
            offset,
            first_position: 0,
        });
        [q, k, v]
    }
}

/// Inputs and outputs of a rank's attention.
#[derive(Clone)]
pub(super) struct AttentionRows {
    pub(super) qkv: Activation,
    /// `[R, H·D]`
    pub(super) out: Activation,
    /// By stretch: `[B, H, positions]`
    pub(super) lse: Activation,
}

impl AttentionRows {
    /// Attention of a stretch, given the sizes of that of all rows.
    pub(super) fn of(
        &self,
        stretch: &Stretch,
        shape: AttentionShape,
        gathered: Option<&Activation>,
        dropout: Option<DropoutMask>,
    ) -> AttentionForward {
        let shape = stretch.shape(shape);
        AttentionForward {
            qkv: stretch.views(shape, &self.qkv, gathered),
            out: stretch.of(self.out.buffer(), shape.channels()),
            lse: stretch.of(self.lse.buffer(), shape.heads),
            shape,
            dropout,
        }
    }
}

impl Context<'_> {
    /// For sums that begin with nothing.
    pub(super) fn fill_zeros(&self, x: &Activation) {
        let (out, value) = (x.buffer().clone(), 0.0);
        self.enqueue(Fill { out, value });
    }

    /// Positions of a sample, over all ranks that compute some.
    pub(super) fn sample_positions(&self) -> usize {
        self.shape[1] * self.context_group.map_or(1, GroupOps::size)
    }

    /// What this rank computes.
    pub(super) fn stretches(&self) -> Vec<Stretch> {
        self.stretches_of(self.context_group.map_or(0, GroupOps::index))
    }

    /// What the rank at an index of the context group computes.
    pub(super) fn stretches_of(&self, index: usize) -> Vec<Stretch> {
        let [samples, positions] = self.shape;
        let ranges = match self.context_group {
            None => vec![self.first_position()..self.first_position() + positions],
            Some(group) => zigzag(self.sample_positions(), index, group.size()),
        };
        let stretch = |(i, positions): (usize, Range<usize>)| {
            let rows = samples * positions.len();
            Stretch {
                rows: i * rows..(i + 1) * rows,
                positions,
            }
        };
        ranges.into_iter().enumerate().map(stretch).collect()
    }
}

/// Keys and values of a micro-batch on their way between the ranks of a context group.
pub(super) struct KeyExchange<'a> {
    ctx: &'a Context<'a>,
    group: &'a dyn GroupOps,
    shape: AttentionShape,
    dropout: Option<DropoutMask>,
}

impl<'a> KeyExchange<'a> {
    /// Of attention over this rank's rows, whose sizes are `shape`. None: a rank has all positions.
    pub(super) fn of(
        ctx: &'a Context<'a>,
        shape: AttentionShape,
        dropout: Option<DropoutMask>,
    ) -> Option<Self> {
        let group = ctx.context_group?;
        Some(Self {
            ctx,
            group,
            shape,
            dropout,
        })
    }

    /// Keys and values of a row.
    fn width(&self) -> usize {
        2 * self.shape.kv_channels()
    }

    /// Rows of all ranks, by rank or by position.
    fn lease(&self, name: &str) -> Result<Activation> {
        self.ctx
            .lease(name, &[self.group.size() * self.shape.rows(), self.width()])
    }

    /// Keys and values of all positions in their order, `[B, T, 2·KV·D]`.
    pub(super) fn gather(&self, qkv: &Activation) -> Result<Activation> {
        let ordered = self.lease("keys and values")?;
        let by_rank = self.lease("keys and values by rank")?;
        self.copy(qkv, &self.group.own_rows(&by_rank)?, false);
        self.group.gather_rows(&by_rank, "keys and values")?;
        self.reorder([&by_rank, &ordered], &inverse(&self.by_position()))?;
        Ok(ordered)
    }

    /// Gradients of keys and values of all positions, to which, as to `dqkv`, those of both stretches of queries are added.
    pub(super) fn gradients(&self, dqkv: &Activation) -> Result<Activation> {
        let ordered = self.lease("gradient of keys")?;
        self.ctx.fill_zeros(&ordered);
        self.ctx.fill_zeros(dqkv);
        Ok(ordered)
    }

    /// Sums the gradients over the ranks, in their order: each gets those of its keys and values, in `dqkv`.
    pub(super) fn scatter(&self, ordered: &Activation, dqkv: &Activation) -> Result<()> {
        let by_rank = self.lease("gradient of keys by rank")?;
        self.reorder([ordered, &by_rank], &self.by_position())?;
        let (group, kind) = (self.group, ExchangeKind::ReduceScatterRows);
        let summed = group.finish(group.start(kind, &by_rank, "gradient of keys and values")?)?;
        self.copy(&group.own_rows(&summed)?, dqkv, false);
        Ok(())
    }

    /// Which stretch of a sample, in the order of samples and positions ([`zigzag`]), each one in the order of ranks is.
    fn by_position(&self) -> Vec<i32> {
        let (samples, ranks, len) = (self.shape.batch, self.group.size(), self.shape.positions / 2);
        let stretches = (0..ranks).flat_map(|rank| self.ctx.stretches_of(rank));
        let place = |stretch: &Stretch, sample| sample * 2 * ranks + stretch.positions.start / len;
        let of_samples =
            stretches.flat_map(|stretch| (0..samples).map(move |sample| place(&stretch, sample) as i32));
        of_samples.collect()
    }

    /// Keys and values of stretches of a sample, each as one row.
    fn reorder(&self, [from, to]: [&Activation; 2], order: &[i32]) -> Result<()> {
        let order = self.ctx.upload("order of stretches", order)?;
        self.ctx.enqueue(IndexRows {
            widths: [self.shape.positions / 2 * self.width(); 2],
            ..index_rows([from, to], Some(&order))
        });
        Ok(())
    }

    /// Copies keys and values, or adds them to what is there: the last columns of rows, whatever else is in them.
    fn copy(&self, from: &Activation, to: &Activation, accumulate: bool) {
        let rows = index_rows([from, to], None);
        self.ctx.enqueue(IndexRows { accumulate, ..rows });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_positions_and_their_work_evenly() {
        assert_eq!(zigzag(12, 0, 1), [0..12]);
        for (positions, ranks) in [(12, 2), (12, 3), (64, 8)] {
            let of = |index| zigzag(positions, index, ranks);
            let mut all: Vec<usize> = (0..ranks).flat_map(of).flatten().collect();
            all.sort_unstable();
            assert_eq!(all, (0..positions).collect::<Vec<_>>());
            // Keys that the queries of a rank see.
            let work = |index| {
                of(index)
                    .into_iter()
                    .flatten()
                    .map(|position| position + 1)
                    .sum::<usize>()
            };
            assert!((1..ranks).all(|index| work(index) == work(0)), "{ranks} ranks");
        }
    }
}
