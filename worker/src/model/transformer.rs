//! The blocks of a transformer: the embedding, from tokens to channels; attention, then feed-forward, each around the
//! residual stream; the head, from channels to losses. They are made of layers that know their parameters' ids and enqueue
//! their operations. Dropout is at the places of GPT-2: the embedding, the probabilities of attention, and what each layer
//! adds to the residual stream.
//!
//! Backward works in the reverse of the order in which parameters are listed, since that is the order of gradient
//! memory: within a layer the bias, then the weight.

use super::context_parallel::{AttentionRows, KeyExchange};
use super::decoder::{ActivationKind, PositionKind};
use super::layers::{Dense, DropoutLayer, NormedDense, Site, swiglu, swiglu_backward, with_channels};
use super::{Activation, Backward, Block, Context, GradSlot, Keep, ParamId, Saved};
use crate::config::Recompute;
use crate::device::{Buffer, DeviceError, Result};
use crate::ops::{
    AttentionBackward, AttentionDecode, AttentionShape, CrossEntropy, CrossEntropyCombine,
    CrossEntropyPartial, DropoutMask, EncoderForward, GeluBackward, GeluForward, PositionBackward, Rotary,
    RotaryEmbedding, TokenBackward,
};

/// `[B, T, C]` to `[B, T, C]`.
pub(super) struct TransformerBlock {
    name: String,
    attention: Option<Attention>,
    second: Box<dyn SecondLayer>,
    params: Vec<ParamId>,
}

/// What a block does behind attention: a feed-forward layer, or experts.
pub(super) trait SecondLayer: Send + Sync {
    fn params(&self) -> Vec<ParamId>;

    /// `[…, C]` to `[…, C]`.
    fn forward(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<Activation>;

    /// What forward keeps, without its output.
    fn recompute(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<()>;

    /// From the gradient of the output to that of the input, in place unless gradients are put off.
    fn backward(&self, pass: &mut Backward<'_>, stream: &Activation) -> Result<Activation>;
}

impl TransformerBlock {
    /// Without attention, every position sees itself only.
    pub(super) fn new(name: String, attention: Option<Attention>, second: Box<dyn SecondLayer>) -> Self {
        let mut params = attention.map(|a| a.params()).unwrap_or_default();
        params.extend(second.params());
        Self {
            name,
            attention,
            second,
            params,
        }
    }

    /// Between the two layers.
    fn middle(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<Activation> {
        match &self.attention {
            Some(attention) => attention.forward(ctx, inp, saved),
            None => Ok(inp.clone()),
        }
    }
}

impl Block for TransformerBlock {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> &[ParamId] {
        &self.params
    }

    fn forward(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<Activation> {
        let mut dropped = Saved::default();
        let saved = if ctx.keep == Keep::ForBackward(Recompute::Full) {
            saved.put(INPUT, inp);
            &mut dropped
        } else {
            saved
        };
        let middle = self.middle(ctx, inp, saved)?;
        self.second.forward(ctx, &middle, saved)
    }

    fn backward(&self, pass: &mut Backward<'_>, dout: &Activation) -> Result<Option<Activation>> {
        if let Some(inp) = pass.saved.find(INPUT) {
            let middle = self.middle(pass.ctx, &inp, pass.saved)?;
            self.second.recompute(pass.ctx, &middle, pass.saved)?;
        }
        // The gradient of the residual stream: each layer adds its own to it.
        let dmiddle = self.second.backward(pass, dout)?;
        match &self.attention {
            Some(attention) => attention.backward(pass, &dmiddle).map(Some),
            None => Ok(Some(dmiddle)),
        }
    }
}

/// What a block keeps that computes all of itself again.
const INPUT: &str = "block input";

/// `[B, T]` tokens to `[B, T, C]`.
#[derive(Debug)]
pub(super) struct Embedding {
    wte: ParamId,
    wpe: Option<ParamId>,
    params: Vec<ParamId>,
    /// Tokens that this rank holds of the vocabulary.
    held: usize,
    channels: usize,
    dropout: DropoutLayer,
}

impl Embedding {
    /// An embedding of `held` tokens in `channels` channels. Without `wpe`, positions make no difference.
    pub(super) fn new(wte: ParamId, wpe: Option<ParamId>, held: usize, channels: usize, rate: f32) -> Self {
        let params = std::iter::once(wte).chain(wpe).collect();
        Self {
            wte,
            wpe,
            params,
            held,
            channels,
            dropout: DropoutLayer { rate, layer: 0 },
        }
    }
}

impl Block for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn params(&self) -> &[ParamId] {
        &self.params
    }

    /// None: the gradient is a sum of rows of `dout`.
    fn read_by_backward(&self) -> &[ParamId] {
        &[]
    }

    /// `[B, T]` tokens to `[B, T, C]`, or this rank's rows of it.
    fn forward(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<Activation> {
        let [batch, positions] = ctx.shape;
        let out = ctx.lease("embedding", &[batch, positions, self.channels])?;
        // The parts are summed: one rank adds the positions.
        let wpe = self.wpe.filter(|_| ctx.tensor_place().0 == 0);
        for stretch in ctx.stretches() {
            let from_first = |wpe: Buffer| wpe.slice(stretch.positions.start * self.channels..wpe.len());
            ctx.enqueue(EncoderForward {
                tokens: stretch.of(inp.buffer(), 1),
                part: ctx.vocabulary(self.held),
                wte: ctx.params.get(self.wte),
                wpe: wpe.map(|wpe| from_first(ctx.params.get(wpe))),
                out: stretch.of(out.buffer(), self.channels),
                positions: stretch.positions.len(),
            });
        }
        let out = ctx.summed_rows("embedding", out)?;
        ctx.save(saved, "tokens", inp);
        let dropped = self.dropout.apply(ctx, Site::Embedding, &out, None)?;
        Ok(dropped.unwrap_or(out))
    }

    fn backward(&self, pass: &mut Backward<'_>, dout: &Activation) -> Result<Option<Activation>> {
        let ctx = pass.ctx;
        let tokens = pass.saved.take("tokens")?;
        let dout = self.dropout.gradient(ctx, Site::Embedding, dout)?;
        let dout = ctx.gathered_rows("gradient of the embedding", &dout)?;
        if let Some(wpe) = self.wpe {
            let (rows, channels, stretches) = (dout.buffer().clone(), self.channels, ctx.stretches());
            let of = move |slot: GradSlot| PositionBackward {
                dout: rows,
                dwpe: slot.buffer,
                accumulate: slot.accumulate,
                first: stretches[0].positions.start,
                second: stretches.get(1).map(|late| late.positions.start),
                positions: stretches[0].positions.len(),
                channels,
            };
            pass.contribute(wpe, &[&dout], of)?;
        }
        let (token_rows, dout_rows) = (tokens.buffer().clone(), dout.buffer().clone());
        let part = ctx.vocabulary(self.held);
        let of = move |slot: GradSlot| TokenBackward {
            tokens: token_rows,
            dout: dout_rows,
            part,
            dwte: slot.buffer,
            accumulate: slot.accumulate,
        };
        pass.contribute(self.wte, &[&tokens, &dout], of)?;
        Ok(None)
    }
}

/// `[B, T, C]` to losses `[B·T]`: normalise, project on the vocabulary, cross-entropy with the context's targets. Backward
/// begins in forward: losses and gradients of the logits are one operation.
#[derive(Clone, Debug)]
pub(super) struct Head {
    /// Its weight is `[V, C]`; may be the embedding's.
    projection: NormedDense,
    params: Vec<ParamId>,
}

impl Head {
    pub(super) fn new(projection: NormedDense) -> Self {
        let params = projection.params();
        Self { projection, params }
    }

    /// Losses `[R]` of logits `[R, V]`, which become their gradients if a backward follows. Where the ranks of a tensor
    /// group have parts of the vocabulary, three numbers a row and rank are exchanged, and all ranks have all losses.
    fn losses(&self, ctx: &Context<'_>, logits: &Activation) -> Result<Activation> {
        let rows = ctx.rows();
        let losses = ctx.lease_stat("losses", &[rows])?;
        let (logits, losses_out) = (logits.buffer(), losses.buffer().clone());
        let no_targets = || DeviceError::Upstream("a loss wants targets".into());
        let targets = ctx.targets.ok_or_else(no_targets)?.clone();
        let dlosses = ctx.dloss.cloned();
        let (Some(group), Some(part)) = (ctx.tensor, ctx.vocabulary(self.projection.dense.outputs)) else {
            ctx.enqueue(CrossEntropy {
                logits: logits.clone(),
                targets,
                losses: losses_out,
                dlosses,
            });
            return Ok(losses);
        };
        let (index, ranks) = (group.index(), group.size());
        let table = ctx.lease_stat(
            "statistics of the logits",
            &[ranks, rows, CrossEntropyPartial::STATISTICS],
        )?;
        let own = table.buffer().len() / ranks;
        ctx.enqueue(CrossEntropyPartial {
            logits: logits.clone(),
            targets: targets.clone(),
            statistics: table.buffer().slice(index * own..(index + 1) * own),
            part,
        });
        group.gather_rows(&table, "statistics of the logits")?;
        ctx.enqueue(CrossEntropyCombine {
            logits: logits.clone(),
            statistics: table.buffer().clone(),
            targets,
            losses: losses_out,
            dlosses,
            part,
        });
        Ok(losses)
    }
}

impl Block for Head {
    fn name(&self) -> &'static str {
        "head"
    }

    fn params(&self) -> &[ParamId] {
        &self.params
    }

    /// Keeps the input and the logits' gradient, R·(C + V) elements, and R·C where the normalised rows are kept; nothing if
    /// no backward follows.
    fn forward(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<Activation> {
        let logits = self.projection.forward(ctx, inp, saved, "logits")?;
        if let Keep::KvCache { .. } = ctx.keep {
            return Ok(logits);
        }
        let losses = self.losses(ctx, &logits)?;
        ctx.save(saved, "head input", inp);
        ctx.save(saved, "dlogits", &logits);
        Ok(losses)
    }

    /// The factors, `dout`, are in the logits' gradient.
    ///
    /// # Panics
    /// If `dout` is not what forward made that gradient with, [`Context::dloss`].
    fn backward(&self, pass: &mut Backward<'_>, dout: &Activation) -> Result<Option<Activation>> {
        let known = pass.ctx.dloss.is_some_and(|dloss| dloss.same(dout.buffer()));
        assert!(
            known,
            "the gradient of the losses is not the one that forward was given"
        );
        let (inp, dlogits) = (pass.saved.take("head input")?, pass.saved.take("dlogits")?);
        let projection = &self.projection;
        (projection.backward(pass, [&inp, &dlogits], None)).map(Some)
    }
}

/// `x + dropout(projection(attention(qkv(norm(x)))))`
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub(super) qkv: NormedDense,
    pub(super) projection: Dense,
    /// This rank's.
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_size: usize,
    pub(super) positions: PositionKind,
    pub(super) dropout: DropoutLayer,
}

impl Attention {
    fn params(&self) -> Vec<ParamId> {
        [self.qkv.params(), self.projection.params()].concat()
    }

    fn shape(&self, ctx: &Context<'_>) -> AttentionShape {
        let [batch, positions] = ctx.shape;
        AttentionShape {
            batch,
            positions,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_size: self.head_size,
        }
    }

    /// The mask of the probabilities; that of a head is the same on whatever rank it is.
    fn mask(&self, ctx: &Context<'_>) -> Option<DropoutMask> {
        let first = ctx.tensor_place().0 * self.heads;
        let mask = self.dropout.mask(ctx, Site::Attention)?;
        Some(mask.of_part(first as u32))
    }

    /// `[B, T, C]` to `[B, T, C]`; keeps 5·B·T·C elements.
    fn forward(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<Activation> {
        let shape = self.shape(ctx);
        let qkv = self.qkv.forward(ctx, inp, saved, "projected")?;
        self.rotate(ctx, &qkv, false);
        let mixed = ctx.lease("attention", &[shape.rows(), shape.channels()])?;
        let lse = match ctx.keep {
            Keep::KvCache {
                first_position,
                capacity,
            } => {
                let cache = [shape.batch, capacity, shape.kv_channels()];
                ctx.enqueue(AttentionDecode {
                    qkv: qkv.buffer().clone(),
                    keys: saved.cache(ctx, "keys", &cache)?,
                    values: saved.cache(ctx, "values", &cache)?,
                    out: mixed.buffer().clone(),
                    shape,
                    first_position,
                });
                None
            }
            Keep::Nothing | Keep::ForBackward(_) => {
                let lse = ctx.lease_stat("attention lse", &[shape.batch, shape.heads, shape.positions])?;
                let rows = AttentionRows {
                    qkv: qkv.clone(),
                    out: mixed.clone(),
                    lse,
                };
                self.attend(ctx, &rows)?;
                Some(rows.lse)
            }
        };
        let (projection, site) = (&self.projection, Site::AttentionResidual);
        let out = projection.forward_onto(ctx, &mixed, inp, self.dropout, site)?;
        ctx.save(saved, "attention input", inp);
        ctx.save(saved, "qkv", &qkv);
        ctx.save(saved, "attention", &mixed);
        if let Some(lse) = &lse {
            ctx.save(saved, "attention lse", lse);
        }
        Ok(out)
    }

    /// Attention of this rank's rows: over its own keys, over those of all ranks, or as these come by.
    fn attend(&self, ctx: &Context<'_>, rows: &AttentionRows) -> Result<()> {
        let (shape, dropout) = (self.shape(ctx), self.mask(ctx));
        let keys = match KeyExchange::of(ctx, shape, dropout) {
            Some(others) if others.is_ring() => return others.ring_forward(rows),
            others => others.map(|others| others.gather(&rows.qkv)).transpose()?,
        };
        for stretch in ctx.stretches() {
            ctx.enqueue(rows.of(&stretch, shape, keys.as_ref(), dropout));
        }
        Ok(())
    }

    /// Its gradients.
    fn attend_backward(
        &self,
        ctx: &Context<'_>,
        rows: &AttentionRows,
        dout: &Activation,
        dqkv: &Activation,
    ) -> Result<()> {
        let (shape, dropout) = (self.shape(ctx), self.mask(ctx));
        let add = |keys: Option<&Activation>, dkeys: Option<&Activation>| {
            for stretch in ctx.stretches() {
                ctx.enqueue(AttentionBackward {
                    forward: rows.of(&stretch, shape, keys, dropout),
                    dout: stretch.of(dout.buffer(), shape.channels()),
                    dqkv: stretch.views(stretch.shape(shape), dqkv, dkeys),
                    accumulate: dkeys.is_some(),
                });
            }
        };
        let Some(others) = KeyExchange::of(ctx, shape, dropout) else {
            add(None, None);
            return Ok(());
        };
        if others.is_ring() {
            return others.ring_backward(rows, dout, dqkv);
        }
        let (keys, dkeys) = (others.gather(&rows.qkv)?, others.gradients(dqkv)?);
        add(Some(&keys), Some(&dkeys));
        drop(keys);
        others.scatter(&dkeys, dqkv)
    }

    /// Rotates queries and keys by their positions, or their gradients back, if the model does that.
    fn rotate(&self, ctx: &Context<'_>, qkv: &Activation, backward: bool) {
        if let PositionKind::Rotary { theta, scaling } = self.positions {
            for stretch in ctx.stretches() {
                let shape = stretch.shape(self.shape(ctx));
                ctx.enqueue(Rotary {
                    qkv: stretch.of(qkv.buffer(), shape.qkv_channels()),
                    shape,
                    embedding: RotaryEmbedding { base: theta, scaling },
                    first_position: stretch.positions.start,
                    backward,
                });
            }
        }
    }

    /// From the gradient of the output to that of the input, in place unless gradients are put off.
    fn backward(&self, pass: &mut Backward<'_>, stream: &Activation) -> Result<Activation> {
        let ctx = pass.ctx;
        let inp = pass.saved.take("attention input")?;
        let rows = AttentionRows {
            qkv: pass.saved.take("qkv")?,
            out: pass.saved.take("attention")?,
            lse: pass.saved.take("attention lse")?,
        };
        let own = self.dropout.gradient(ctx, Site::AttentionResidual, stream)?;
        let dprojected = ctx.gathered_rows("gradient of the projection", &own)?;
        self.projection.gradients(pass, [&rows.out, &dprojected, &own])?;
        drop(own);
        let dmixed = self.projection.dinp(ctx, &dprojected)?;
        drop(dprojected);
        let dqkv = ctx.lease("gradient of qkv", rows.qkv.shape())?;
        self.attend_backward(ctx, &rows, &dmixed, &dqkv)?;
        drop((rows, dmixed));
        self.rotate(ctx, &dqkv, true);
        self.qkv.backward(pass, [&inp, &dqkv], Some(stream))
    }
}

/// `x + dropout(projection(gelu(widen(norm(x)))))`
#[derive(Clone, Copy, Debug)]
pub(super) struct FeedForward {
    pub(super) widen: NormedDense,
    pub(super) projection: Dense,
    pub(super) activation: ActivationKind,
    pub(super) dropout: DropoutLayer,
}

impl FeedForward {
    fn keep(ctx: &Context<'_>, saved: &mut Saved, inp: &Activation, wide: &Activation) {
        ctx.save(saved, "feed-forward input", inp);
        if ctx.keep != Keep::ForBackward(Recompute::Selective) {
            ctx.save(saved, "wide", wide);
        }
    }
}

impl SecondLayer for FeedForward {
    fn params(&self) -> Vec<ParamId> {
        [self.widen.params(), self.projection.params()].concat()
    }

    fn recompute(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<()> {
        let wide = self.widen.forward(ctx, inp, saved, "projected")?;
        Self::keep(ctx, saved, inp, &wide);
        Ok(())
    }

    /// Keeps 5·R·C elements, or as [`Keep`] says.
    fn forward(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<Activation> {
        let normalised = self.widen.norm.forward(ctx, inp)?;
        let dense = &self.widen.dense;
        let wide = dense.forward(ctx, &normalised, None, "projected")?;
        let active = ctx.lease("activated", &with_channels(&wide, self.projection.inputs))?;
        match self.activation {
            ActivationKind::Gelu => ctx.enqueue(GeluForward {
                inp: wide.buffer().clone(),
                out: active.buffer().clone(),
            }),
            ActivationKind::SwiGlu => swiglu(ctx, [&wide, &active]),
        }
        self.widen.keep(ctx, saved, &normalised);
        drop(normalised);
        let (projection, site) = (&self.projection, Site::FeedForwardResidual);
        let out = projection.forward_onto(ctx, &active, inp, self.dropout, site)?;
        Self::keep(ctx, saved, inp, &wide);
        if ctx.keep == Keep::ForBackward(Recompute::Nothing) && self.activation == ActivationKind::Gelu {
            saved.put("activated", &active);
        }
        Ok(out)
    }

    fn backward(&self, pass: &mut Backward<'_>, stream: &Activation) -> Result<Activation> {
        let ctx = pass.ctx;
        let inp = pass.saved.take("feed-forward input")?;
        let (wide, kept) = (pass.saved.find("wide"), pass.saved.find("activated"));
        let widen = || (self.widen).forward(ctx, &inp, &mut Saved::default(), "projected");
        let wide = wide.map_or_else(widen, Ok)?;
        let own = self.dropout.gradient(ctx, Site::FeedForwardResidual, stream)?;
        let dprojected = ctx.gathered_rows("gradient of the projection", &own)?;
        let dactive = self.projection.dinp(ctx, &dprojected)?;
        let (active, dwide) = match self.activation {
            ActivationKind::Gelu => {
                ctx.enqueue(GeluBackward {
                    inp_out: wide.buffer().clone(),
                    dout_dinp: dactive.buffer().clone(),
                    makes_out: kept.is_none(),
                });
                // Without one that was kept, `wide` is the output of the GELU from here on.
                (kept.unwrap_or(wide), dactive)
            }
            ActivationKind::SwiGlu => {
                swiglu_backward(ctx, [&wide, &dactive]);
                // Both have changed places: the gradient's memory holds the output now.
                (dactive, wide)
            }
        };
        self.projection.gradients(pass, [&active, &dprojected, &own])?;
        drop((active, dprojected, own));
        self.widen.backward(pass, [&inp, &dwide], Some(stream))
    }
}
