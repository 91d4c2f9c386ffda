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
//! are gathered; but it holds the keys of two ranks, not of all, and the sums of a query have another order. All sums are in
//! f32, rounded once: in bf16 the gradients that travel have twice the bytes, and a rank sends 4(c − 1)/c·K.

use super::{AttentionRows, KeyExchange, Stretch};
use crate::device::{DType, Result};
use crate::model::{Activation, Exchange};
use crate::ops::{AttentionBackward, AttentionForward, AttentionMerge, Cast, HeadsView};

/// What goes round, in errors and traces.
const KEYS: &str = "keys and values";
const DKEYS: &str = "gradient of keys and values";

/// Attention over the rows of all ranks of a ring.
impl KeyExchange<'_> {
    /// Keys go round. Else they are gathered.
    pub(in crate::model) fn is_ring(&self) -> bool {
        self.group.is_ring()
    }

    /// Writes `out` and `lse`.
    pub(in crate::model) fn ring_forward(&self, rows: &AttentionRows) -> Result<()> {
        let (ctx, shape) = (self.ctx, self.shape);
        let sums = AttentionRows {
            out: self.sums_of(&rows.out)?,
            ..rows.clone()
        };
        let part = ctx.lease_stat("attention of a stretch", &[shape.rows() / 2, shape.channels()])?;
        let part_lse = ctx.lease_stat("lse of a stretch", &[shape.rows() / 2, shape.heads])?;
        self.go_round(&rows.qkv, |step, keys| {
            for pair in &self.pairs(step) {
                let joined = self.attention(pair, &sums, keys);
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
            Ok(())
        })?;
        self.round(&sums.out, &rows.out);
        Ok(())
    }

    /// Writes the gradients of queries, keys and values, from that of the output.
    pub(in crate::model) fn ring_backward(
        &self,
        rows: &AttentionRows,
        dout: &Activation,
        dqkv: &Activation,
    ) -> Result<()> {
        let ctx = self.ctx;
        let own = self.sums_of(dqkv)?;
        ctx.fill_zeros(&own);
        // This rank's share of the gradients of its own keys; behind it, the sum for those that are here.
        let mut sums: Vec<Activation> = Vec::new();
        self.go_round(&rows.qkv, |step, keys| {
            let before = sums.get(1).map(|sum| self.pass_on(sum, DKEYS)).transpose()?;
            let share = ctx.lease_stat(DKEYS, keys.shape())?;
            ctx.fill_zeros(&share);
            for pair in self.pairs(step) {
                ctx.enqueue(AttentionBackward {
                    forward: self.attention(&pair, rows, keys),
                    dout: pair[0].of(dout.buffer(), self.shape.channels()),
                    dqkv: self.views(&pair, &own, &share),
                    accumulate: true,
                });
            }
            if let Some(before) = before {
                self.copy(&self.arrived(before)?, &share, true);
            }
            sums.truncate(1);
            sums.push(share);
            Ok(())
        })?;
        let home = self.pass_on(&sums[sums.len() - 1], DKEYS)?;
        self.copy(&sums[0], &own, false);
        self.copy(&self.arrived(home)?, &own, true);
        self.round(&own, dqkv);
        Ok(())
    }

    /// Calls `work` with the number of a step and its keys, which go on to the next rank meanwhile.
    fn go_round(
        &self,
        qkv: &Activation,
        mut work: impl FnMut(usize, &Activation) -> Result<()>,
    ) -> Result<()> {
        let (steps, shape) = (self.group.size(), self.shape);
        let mut keys = self.ctx.lease(KEYS, &[shape.rows(), self.width()])?;
        self.copy(qkv, &keys, false);
        for step in 1..steps {
            let passing = self.pass_on(&keys, KEYS)?;
            work(step - 1, &keys)?;
            keys = self.arrived(passing)?;
        }
        work(steps - 1, &keys)
    }

    /// Memory for the sums of a result, which [`KeyExchange::round`] rounds once.
    fn sums_of(&self, result: &Activation) -> Result<Activation> {
        match self.ctx.dtype {
            DType::Bf16 => self.ctx.lease_stat("sums over keys", result.shape()),
            _ => Ok(result.clone()),
        }
    }

    fn round(&self, sums: &Activation, result: &Activation) {
        if !sums.buffer().same(result.buffer()) {
            let (x, out) = (sums.buffer().clone(), result.buffer().clone());
            self.ctx.enqueue(Cast { x, out });
        }
    }

    /// The stretches of this rank's queries and of the keys of a step, where some queries see some keys.
    fn pairs(&self, step: usize) -> Vec<[Stretch; 2]> {
        let (ctx, ranks) = (self.ctx, self.group.size());
        let from = (self.group.index() + ranks - step) % ranks;
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
            ..rows.of(&pair[0], self.shape, None, self.dropout)
        }
    }

    /// The queries of a pair in this rank's rows, and the keys and values in those that are here.
    fn views(&self, [own, theirs]: &[Stretch; 2], qkv: &Activation, keys: &Activation) -> [HeadsView; 3] {
        let keys = keys.rows(theirs.rows.clone());
        let [q, k, v] = own.views(own.shape(self.shape), qkv, Some(&keys));
        let placed = |view| HeadsView {
            first_position: theirs.positions.start,
            ..view
        };
        [q, placed(k), placed(v)]
    }

    /// Starts to send rows to the next rank, and to receive those of the rank before.
    fn pass_on(&self, sent: &Activation, name: &str) -> Result<[Exchange; 2]> {
        let pool = self.ctx.pool;
        let received = pool.lease(name, sent.buffer().dtype(), sent.shape())?;
        self.group.pass_on([sent, &received], name)
    }

    /// The received rows.
    fn arrived(&self, [sent, received]: [Exchange; 2]) -> Result<Activation> {
        self.group.finish(sent)?;
        self.group.finish(received)
    }
}

#[cfg(test)]
#[path = "ring_attention_tests.rs"]
mod tests;
