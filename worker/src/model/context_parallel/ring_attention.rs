//! Ring attention (Liu et al. 2023): the keys and values of all ranks of a context group come by, one rank's after the
//! other's, and attention goes over those that are here.
//!
//! In step s, a rank has the keys of the rank s places before it. It sends them on to the next rank, and meanwhile computes
//! with them: each pair of a stretch of queries and one of keys is an attention of its own, and [`AttentionMerge`] joins
//! them. A pair whose keys all come after its queries is left out. By [`zigzag`](super::zigzag), every rank
//! has two pairs in each step after its own.
//!
//! In backward the keys go round again, and their gradients one step behind them: each rank adds its share, and the last one
//! sends them home. With c ranks and K bytes of keys and values of all positions, a rank sends 3(c − 1)/c·K, as where they
//! are gathered; but it holds the keys of two ranks, not of all, and the sums of a query have another order.

use super::{AttentionRows, KeyExchange, Stretch};
use crate::device::DeviceError;
use crate::model::{Activation, Context, Exchange};
use crate::ops::{
    AttentionBackward, AttentionForward, AttentionMerge, AttentionShape, DropoutMask, HeadsView,
};

/// What goes round, in errors and traces.
const KEYS: &str = "keys and values";
const DKEYS: &str = "gradient of keys and values";

/// Attention over the rows of all ranks of a ring.
pub(in crate::model) struct RingAttention<'a> {
    keys: KeyExchange<'a>,
    dropout: Option<DropoutMask>,
}

/// Rows on their way from the rank before, while others go to the next one.
struct Passing {
    received: Activation,
    exchanges: [Exchange; 2],
}

impl<'a> RingAttention<'a> {
    /// Over this rank's rows, whose sizes are `shape`. None: keys are gathered, or all here.
    pub(in crate::model) fn of(
        ctx: &'a Context<'a>,
        shape: AttentionShape,
        dropout: Option<DropoutMask>,
    ) -> Option<Self> {
        let keys = KeyExchange::of(ctx, shape)?;
        keys.group.is_ring().then_some(Self { keys, dropout })
    }

    /// Writes `out` and `lse`.
    pub(in crate::model) fn forward(&self, rows: &AttentionRows) -> Result<(), DeviceError> {
        let (ctx, shape) = (self.keys.ctx, self.keys.shape);
        let of_stretch = [shape.rows() / 2, shape.channels()];
        let part = ctx.lease("attention of a stretch", &of_stretch)?;
        let part_lse = ctx.lease_stat("lse of a stretch", &[shape.rows() / 2, shape.heads])?;
        let mut keys = self.own_keys(&rows.qkv)?;
        for step in 0..self.keys.group.size() {
            let passing = self.pass_keys(step, &keys)?;
            for pair in &self.pairs(step) {
                let joined = self.attention(pair, rows, &keys);
                // Every own stretch begins with the early one's keys, which come first.
                if step == 0 && pair[1].rows.start == 0 {
                    ctx.enqueue(joined);
                    continue;
                }
                let of_pair = AttentionForward {
                    out: part.buffer().clone(),
                    lse: part_lse.buffer().clone(),
                    ..joined.clone()
                };
                ctx.enqueue(of_pair.clone());
                ctx.enqueue(AttentionMerge {
                    part: of_pair.out,
                    part_lse: of_pair.lse,
                    out: joined.out,
                    lse: joined.lse,
                    shape: joined.shape,
                });
            }
            if let Some(passing) = passing {
                keys = self.arrived(passing)?;
            }
        }
        Ok(())
    }

    /// Writes the gradients of queries, keys and values, from that of the output.
    pub(in crate::model) fn backward(
        &self,
        rows: &AttentionRows,
        dout: &Activation,
        dqkv: &Activation,
    ) -> Result<(), DeviceError> {
        let ctx = self.keys.ctx;
        ctx.fill_zeros(dqkv);
        let mut keys = self.own_keys(&rows.qkv)?;
        // This rank's share of the gradients of its own keys; behind it, the sum for those that are here.
        let mut sums: Vec<Activation> = Vec::new();
        for step in 0..self.keys.group.size() {
            let passing = self.pass_keys(step, &keys)?;
            let before = sums.get(1).map(|sum| self.pass_on(sum, DKEYS)).transpose()?;
            let share = self.lease_keys(DKEYS)?;
            ctx.fill_zeros(&share);
            for pair in self.pairs(step) {
                ctx.enqueue(AttentionBackward {
                    forward: self.attention(&pair, rows, &keys),
                    dout: pair[0].of(dout.buffer(), self.keys.shape.channels()),
                    dqkv: self.views(&pair, dqkv, &share),
                    accumulate: true,
                });
            }
            if let Some(before) = before {
                self.add(&self.arrived(before)?, &share, true);
            }
            sums.truncate(1);
            sums.push(share);
            if let Some(passing) = passing {
                keys = self.arrived(passing)?;
            }
        }
        let home = self.pass_on(&sums[sums.len() - 1], DKEYS)?;
        self.add(&sums[0], dqkv, false);
        self.add(&self.arrived(home)?, dqkv, true);
        Ok(())
    }

    /// The stretches of this rank's queries and of the keys of a step, where some queries see some keys.
    fn pairs(&self, step: usize) -> Vec<[Stretch; 2]> {
        let (ctx, ranks) = (self.keys.ctx, self.keys.group.size());
        let from = (self.keys.group.index() + ranks - step) % ranks;
        let (own, theirs) = (ctx.stretches(), ctx.stretches_of(from));
        let pairs = own
            .iter()
            .flat_map(|own| theirs.iter().map(move |keys| [own.clone(), keys.clone()]));
        let is_seen = |[own, keys]: &[Stretch; 2]| keys.positions.start <= own.positions.start;
        pairs.filter(is_seen).collect()
    }

    /// That of a pair, with the outputs of its queries.
    fn attention(&self, pair: &[Stretch; 2], rows: &AttentionRows, keys: &Activation) -> AttentionForward {
        AttentionForward {
            qkv: self.views(pair, &rows.qkv, keys),
            ..rows.of(&pair[0], self.keys.shape, None, self.dropout)
        }
    }

    /// The queries of a pair in this rank's rows, and the keys and values in those that are here.
    fn views(&self, [own, theirs]: &[Stretch; 2], qkv: &Activation, keys: &Activation) -> [HeadsView; 3] {
        let keys = keys.rows(theirs.rows.clone());
        let [q, k, v] = own.views(own.shape(self.keys.shape), qkv, Some(&keys));
        let placed = |view| HeadsView {
            first_position: theirs.positions.start,
            ..view
        };
        [q, placed(k), placed(v)]
    }

    /// Keys and values of this rank's rows.
    fn own_keys(&self, qkv: &Activation) -> Result<Activation, DeviceError> {
        let keys = self.lease_keys(KEYS)?;
        self.add(qkv, &keys, false);
        Ok(keys)
    }

    /// `[R, 2·KV·D]`
    fn lease_keys(&self, name: &str) -> Result<Activation, DeviceError> {
        let shape = [self.keys.shape.rows(), self.keys.width()];
        self.keys.ctx.lease(name, &shape)
    }

    /// Writes keys and values, or their gradients, or adds them to those of the same rows.
    fn add(&self, from: &Activation, to: &Activation, accumulate: bool) {
        self.keys.copy(self.keys.own(from), self.keys.own(to), accumulate);
    }

    /// Sends the keys of a step on, if another step follows.
    fn pass_keys(&self, step: usize, keys: &Activation) -> Result<Option<Passing>, DeviceError> {
        let follows = step + 1 < self.keys.group.size();
        follows.then(|| self.pass_on(keys, KEYS)).transpose()
    }

    fn pass_on(&self, sent: &Activation, name: &str) -> Result<Passing, DeviceError> {
        let received = self.lease_keys(name)?;
        let exchanges = self.keys.group.pass_on([sent, &received], name)?;
        Ok(Passing { received, exchanges })
    }

    fn arrived(&self, Passing { received, exchanges }: Passing) -> Result<Activation, DeviceError> {
        let mut exchanges = exchanges.into_iter();
        exchanges.try_for_each(|exchange| self.keys.group.finish(exchange))?;
        Ok(received)
    }
}
