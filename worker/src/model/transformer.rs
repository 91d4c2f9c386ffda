//! The blocks of a transformer: the embedding, from tokens to channels; attention, then feed-forward, each around the
//! residual stream; the head, from channels to losses. They are made of layers that know their parameters' ids and enqueue
//! their operations. Dropout is at the places of GPT-2: the embedding, the probabilities of attention, and what each layer
//! adds to the residual stream.
//!
//! Backward works in the reverse of the order in which parameters are listed, since that is the order of gradient
//! memory: within a layer the bias, then the weight.

use std::sync::Arc;

use super::{Activation, Block, Context, GradSink, GradSlot, ParamId, Saved};
use crate::device::DeviceError;
use crate::ops::{
    self, AttentionBackward, AttentionForward, AttentionShape, Cast, ColumnSum, CrossEntropy, DropoutMask,
    EncoderForward, GeluBackward, GeluForward, LayerNormBackward, LayerNormForward, LinearDinp,
    LinearDweight, LinearForward, LinearGeluBackward, LinearGeluForward, LinearShape, PositionBackward,
    TokenBackward, WeightLayout,
};

/// `[B, T, C]` to `[B, T, C]`.
#[derive(Clone, Debug)]
pub(super) struct TransformerBlock {
    name: String,
    attention: Option<Attention>,
    feed_forward: FeedForward,
    params: Vec<ParamId>,
}

impl TransformerBlock {
    /// Without attention, every position sees itself only.
    pub(super) fn new(name: String, attention: Option<Attention>, feed_forward: FeedForward) -> Self {
        let mut params = attention.map(|a| a.params()).unwrap_or_default();
        params.extend(feed_forward.params());
        Self {
            name,
            attention,
            feed_forward,
            params,
        }
    }

    /// Between the two layers.
    fn middle(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
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

    fn forward(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        let middle = self.middle(ctx, inp, saved)?;
        self.feed_forward.forward(ctx, &middle, saved)
    }

    /// Without the last product, which only makes the output.
    fn recompute(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<(), DeviceError> {
        let middle = self.middle(ctx, inp, saved)?;
        self.feed_forward.recompute(ctx, &middle, saved)
    }

    fn selective(&self) -> Option<Arc<dyn Block>> {
        let mut leaner = self.clone();
        leaner.feed_forward.keeps_wide = false;
        Some(Arc::new(leaner))
    }

    fn backward(
        &self,
        ctx: &Context<'_>,
        saved: &mut Saved,
        dout: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>, DeviceError> {
        // The gradient of the residual stream: each layer adds its own to it.
        let dmiddle = self.feed_forward.backward(ctx, saved, dout, grads)?;
        match &self.attention {
            Some(attention) => attention.backward(ctx, saved, &dmiddle, grads).map(Some),
            None => Ok(Some(dmiddle)),
        }
    }
}

/// `[B, T]` tokens to `[B, T, C]`.
#[derive(Debug)]
pub(super) struct Embedding {
    wte: ParamId,
    wpe: Option<ParamId>,
    params: Vec<ParamId>,
    channels: usize,
    dropout: DropoutLayer,
}

impl Embedding {
    /// Without `wpe`, positions make no difference.
    pub(super) fn new(wte: ParamId, wpe: Option<ParamId>, channels: usize, rate: f32) -> Self {
        let params = std::iter::once(wte).chain(wpe).collect();
        Self {
            wte,
            wpe,
            params,
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

    fn keeps_only_input(&self) -> bool {
        true
    }

    fn forward(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        let [batch, positions] = batch_and_positions(inp)?;
        let out = ctx.lease("embedding", &[batch, positions, self.channels])?;
        ctx.enqueue(EncoderForward {
            tokens: inp.buffer().clone(),
            wte: ctx.params.get(self.wte),
            wpe: self.wpe.map(|wpe| ctx.params.get(wpe)),
            out: out.buffer().clone(),
            positions,
        });
        saved.put("tokens", inp);
        let dropped = self.dropout.apply(ctx, Site::Embedding, &out, None)?;
        Ok(dropped.unwrap_or(out))
    }

    fn backward(
        &self,
        ctx: &Context<'_>,
        saved: &mut Saved,
        dout: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>, DeviceError> {
        let tokens = saved.take("tokens")?;
        let dout = &self.dropout.gradient(ctx, Site::Embedding, dout)?;
        let [_, positions] = batch_and_positions(&tokens)?;
        if let Some(wpe) = self.wpe {
            let (dout_rows, channels) = (dout.buffer().clone(), self.channels);
            let of = move |slot: GradSlot| PositionBackward {
                dout: dout_rows,
                dwpe: slot.buffer,
                accumulate: slot.accumulate,
                positions,
                channels,
            };
            ctx.contribute(grads, (wpe, &[dout]), of)?;
        }
        let (token_rows, dout_rows) = (tokens.buffer().clone(), dout.buffer().clone());
        let of = move |slot: GradSlot| TokenBackward {
            tokens: token_rows,
            dout: dout_rows,
            dwte: slot.buffer,
            accumulate: slot.accumulate,
        };
        ctx.contribute(grads, (self.wte, &[&tokens, dout]), of)?;
        Ok(None)
    }
}

fn batch_and_positions(tokens: &Activation) -> Result<[usize; 2], DeviceError> {
    <[usize; 2]>::try_from(tokens.shape()).map_err(|_| DeviceError::Shape {
        op: "embedding",
        what: format!("tokens have shape {:?}, expected [B, T]", tokens.shape()),
    })
}

/// `[B, T, C]` to losses `[B·T]`: normalise, project on the vocabulary, cross-entropy with the context's targets. Backward
/// begins in forward: losses and gradients of the logits are one operation.
#[derive(Debug)]
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
}

impl Block for Head {
    fn name(&self) -> &'static str {
        "head"
    }

    fn params(&self) -> &[ParamId] {
        &self.params
    }

    /// Keeps the input and the logits' gradient, R·(C + V) elements; nothing if no backward follows.
    fn forward(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        let Dense { inputs, .. } = self.projection.dense;
        let logits = self.projection.forward(ctx, inp, "logits")?;
        let losses = ctx.lease_stat("losses", &[inp.buffer().len() / inputs])?;
        ctx.enqueue(CrossEntropy {
            logits: logits.buffer().clone(),
            targets: ctx.targets.clone(),
            losses: losses.buffer().clone(),
            dlosses: ctx.dloss.cloned(),
        });
        if ctx.dloss.is_some() {
            saved.put("head input", inp);
            saved.put("dlogits", &logits);
        }
        Ok(losses)
    }

    /// The factors, `dout`, are in the logits' gradient.
    ///
    /// # Panics
    /// If `dout` is not what forward made that gradient with, [`Context::dloss`].
    fn backward(
        &self,
        ctx: &Context<'_>,
        saved: &mut Saved,
        dout: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>, DeviceError> {
        let known = ctx.dloss.is_some_and(|dloss| dloss.same(dout.buffer()));
        assert!(
            known,
            "the gradient of the losses is not the one that forward was given"
        );
        let (inp, dlogits) = (saved.take("head input")?, saved.take("dlogits")?);
        let dinp = self.projection.backward(ctx, [&inp, &dlogits], None, grads)?;
        Ok(Some(dinp))
    }
}

/// A layer normalisation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub(super) weight: ParamId,
    pub(super) bias: ParamId,
}

impl Norm {
    /// `[…, C]` to `[…, C]`
    fn forward(&self, ctx: &Context<'_>, inp: &Activation) -> Result<Activation, DeviceError> {
        let out = ctx.lease("normalised", inp.shape())?;
        ctx.enqueue(LayerNormForward {
            inp: inp.buffer().clone(),
            weight: ctx.params.get(self.weight),
            bias: ctx.params.get(self.bias),
            out: out.buffer().clone(),
        });
        Ok(out)
    }

    /// Gradients of the parameters; the gradient of the input goes into, or on top of, `dinp`.
    fn backward(
        &self,
        ctx: &Context<'_>,
        [inp, dout]: [&Activation; 2],
        (dinp, accumulate_dinp): (&Activation, bool),
        grads: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let (dbias, dweight) = (grads.grad(self.bias)?, grads.grad(self.weight)?);
        ctx.enqueue(LayerNormBackward {
            dout: dout.buffer().clone(),
            inp: inp.buffer().clone(),
            weight: ctx.params.get(self.weight),
            dinp: dinp.buffer().clone(),
            dweight: dweight.buffer,
            dbias: dbias.buffer,
            accumulate_dinp,
            accumulate_dweight: dweight.accumulate,
            accumulate_dbias: dbias.accumulate,
        });
        grads.contributed(self.bias, ctx.record())?;
        grads.contributed(self.weight, ctx.record())
    }
}

/// A linear layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dense {
    pub(super) weight: ParamId,
    pub(super) bias: Option<ParamId>,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) layout: WeightLayout,
}

impl Dense {
    fn params(&self) -> Vec<ParamId> {
        std::iter::once(self.weight).chain(self.bias).collect()
    }

    fn shape(&self, inp: &Activation) -> LinearShape {
        let rows = inp.buffer().len() / self.inputs;
        LinearShape {
            rows,
            inputs: self.inputs,
            outputs: self.outputs,
            layout: self.layout,
        }
    }

    /// `[…, I]` to `[…, O]`, plus `residual`, and what computes it.
    fn product(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        residual: Option<&Activation>,
        name: &str,
    ) -> Result<(Activation, LinearForward), DeviceError> {
        let out = ctx.lease(name, &with_channels(inp, self.outputs))?;
        let linear = LinearForward {
            inp: inp.buffer().clone(),
            weight: ctx.params.get(self.weight),
            bias: self.bias.map(|bias| ctx.params.get(bias)),
            residual: residual.map(|residual| residual.buffer().clone()),
            out: out.buffer().clone(),
            shape: self.shape(inp),
        };
        Ok((out, linear))
    }

    /// `[B, T, I]` to `[B, T, O]`: `residual`, plus the output where it is not dropped.
    fn forward_onto(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        residual: &Activation,
        (dropout, site): (DropoutLayer, Site),
    ) -> Result<Activation, DeviceError> {
        let drops = dropout.mask(ctx, site).is_some();
        let residual_here = (!drops).then_some(residual);
        let (projected, linear) = self.product(ctx, inp, residual_here, "projected")?;
        ctx.enqueue(linear);
        let out = dropout.apply(ctx, site, &projected, Some(residual))?;
        Ok(out.unwrap_or(projected))
    }

    /// Gradient of the input, and what computes it.
    fn dinp(&self, ctx: &Context<'_>, dout: &Activation) -> Result<(Activation, LinearDinp), DeviceError> {
        let dinp = ctx.lease("gradient", &with_channels(dout, self.inputs))?;
        let linear = LinearDinp {
            dout: dout.buffer().clone(),
            weight: ctx.params.get(self.weight),
            dinp: dinp.buffer().clone(),
            shape: self.shape(&dinp),
        };
        Ok((dinp, linear))
    }

    /// Gradient of the bias.
    fn dbias(
        &self,
        ctx: &Context<'_>,
        dout: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let Some(bias) = self.bias else {
            return Ok(());
        };
        let x = dout.buffer().clone();
        let sum = move |slot: GradSlot| ColumnSum {
            x,
            out: slot.buffer,
            accumulate: slot.accumulate,
        };
        ctx.contribute(grads, (bias, &[dout]), sum)
    }

    /// Gradient of the weight.
    fn dweight(
        &self,
        ctx: &Context<'_>,
        [inp, dout]: [&Activation; 2],
        grads: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let (inp_rows, dout_rows, shape) = (inp.buffer().clone(), dout.buffer().clone(), self.shape(inp));
        let of = move |slot: GradSlot| LinearDweight {
            inp: inp_rows,
            dout: dout_rows,
            dweight: slot.buffer,
            accumulate: slot.accumulate,
            shape,
        };
        ctx.contribute(grads, (self.weight, &[inp, dout]), of)
    }
}

/// A normalisation of the residual stream, and the linear layer that reads it. What lies between is not kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormedDense {
    pub(super) norm: Norm,
    pub(super) dense: Dense,
}

impl NormedDense {
    fn params(&self) -> Vec<ParamId> {
        [vec![self.norm.weight, self.norm.bias], self.dense.params()].concat()
    }

    /// `[…, I]` to `[…, O]`
    fn forward(&self, ctx: &Context<'_>, inp: &Activation, name: &str) -> Result<Activation, DeviceError> {
        let normalised = self.norm.forward(ctx, inp)?;
        let (out, linear) = self.dense.product(ctx, &normalised, None, name)?;
        ctx.enqueue(linear);
        Ok(out)
    }

    /// Gradients of the parameters. The gradient of the input is added to that of the stream, in place unless a gradient
    /// that is put off reads that; it is new where there is none.
    fn backward(
        &self,
        ctx: &Context<'_>,
        [inp, dout]: [&Activation; 2],
        stream: Option<&Activation>,
        grads: &mut dyn GradSink,
    ) -> Result<Activation, DeviceError> {
        self.dense.dbias(ctx, dout, grads)?;
        let normalised = self.norm.forward(ctx, inp)?;
        self.dense.dweight(ctx, [&normalised, dout], grads)?;
        drop(normalised);
        let (dnormalised, linear) = self.dense.dinp(ctx, dout)?;
        ctx.enqueue(linear);
        let dinp = match stream {
            Some(stream) if grads.put_off().is_none() => stream.clone(),
            _ => ctx.lease("gradient of the stream", inp.shape())?,
        };
        if let Some(stream) = stream.filter(|stream| !stream.buffer().same(dinp.buffer())) {
            ctx.enqueue(Cast {
                x: stream.buffer().clone(),
                out: dinp.buffer().clone(),
            });
        }
        let accumulate = stream.is_some();
        self.norm
            .backward(ctx, [inp, &dnormalised], (&dinp, accumulate), grads)?;
        Ok(dinp)
    }
}

/// `x + dropout(projection(attention(qkv(norm(x)))))`
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub(super) qkv: NormedDense,
    pub(super) projection: Dense,
    pub(super) heads: usize,
    pub(super) dropout: DropoutLayer,
}

impl Attention {
    pub(super) fn params(&self) -> Vec<ParamId> {
        [self.qkv.params(), self.projection.params()].concat()
    }

    fn shape(&self, inp: &Activation) -> Result<AttentionShape, DeviceError> {
        match *inp.shape() {
            [batch, positions, channels] => Ok(AttentionShape {
                batch,
                positions,
                heads: self.heads,
                channels,
            }),
            ref shape => Err(DeviceError::Shape {
                op: "attention",
                what: format!("its input has shape {shape:?}, expected [B, T, C]"),
            }),
        }
    }

    /// `[B, T, C]` to `[B, T, C]`; keeps 5·B·T·C elements.
    pub(super) fn forward(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        let shape = self.shape(inp)?;
        let qkv = self.qkv.forward(ctx, inp, "projected")?;
        let mixed = ctx.lease("attention", inp.shape())?;
        let lse = ctx.lease_stat("attention lse", &[shape.batch, shape.heads, shape.positions])?;
        ctx.enqueue(AttentionForward {
            qkv: qkv.buffer().clone(),
            out: mixed.buffer().clone(),
            lse: lse.buffer().clone(),
            shape,
            dropout: self.dropout.mask(ctx, Site::Attention),
        });
        let dropout = (self.dropout, Site::AttentionResidual);
        let out = self.projection.forward_onto(ctx, &mixed, inp, dropout)?;
        saved.put("attention input", inp);
        saved.put("qkv", &qkv);
        saved.put("attention", &mixed);
        saved.put("attention lse", &lse);
        Ok(out)
    }

    /// From the gradient of the output to that of the input, in place unless gradients are put off.
    pub(super) fn backward(
        &self,
        ctx: &Context<'_>,
        saved: &mut Saved,
        stream: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<Activation, DeviceError> {
        let inp = saved.take("attention input")?;
        let (qkv, mixed, lse) = (
            saved.take("qkv")?,
            saved.take("attention")?,
            saved.take("attention lse")?,
        );
        let dprojected = self.dropout.gradient(ctx, Site::AttentionResidual, stream)?;
        self.projection.dbias(ctx, &dprojected, grads)?;
        self.projection.dweight(ctx, [&mixed, &dprojected], grads)?;
        let (dmixed, linear) = self.projection.dinp(ctx, &dprojected)?;
        ctx.enqueue(linear);
        drop(dprojected);
        let dqkv = ctx.lease("gradient of qkv", qkv.shape())?;
        ctx.enqueue(AttentionBackward {
            qkv: qkv.buffer().clone(),
            out: mixed.buffer().clone(),
            lse: lse.buffer().clone(),
            dout: dmixed.buffer().clone(),
            dqkv: dqkv.buffer().clone(),
            shape: self.shape(&inp)?,
            dropout: self.dropout.mask(ctx, Site::Attention),
        });
        drop((qkv, mixed, lse, dmixed));
        self.qkv.backward(ctx, [&inp, &dqkv], Some(stream), grads)
    }
}

/// `x + dropout(projection(gelu(widen(norm(x)))))`
#[derive(Clone, Copy, Debug)]
pub(super) struct FeedForward {
    pub(super) widen: NormedDense,
    pub(super) projection: Dense,
    /// Otherwise backward widens again.
    pub(super) keeps_wide: bool,
    pub(super) dropout: DropoutLayer,
}

impl FeedForward {
    pub(super) fn params(&self) -> Vec<ParamId> {
        [self.widen.params(), self.projection.params()].concat()
    }

    fn keep(&self, saved: &mut Saved, inp: &Activation, wide: &Activation) {
        saved.put("feed-forward input", inp);
        if self.keeps_wide {
            saved.put("wide", wide);
        }
    }

    /// What forward keeps, without its output.
    pub(super) fn recompute(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<(), DeviceError> {
        let wide = self.widen.forward(ctx, inp, "projected")?;
        self.keep(saved, inp, &wide);
        Ok(())
    }

    /// `[…, C]` to `[…, C]`; keeps 5·R·C elements, or R·C without `keeps_wide`.
    pub(super) fn forward(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        let normalised = self.widen.norm.forward(ctx, inp)?;
        let dense = &self.widen.dense;
        let (wide, linear) = dense.product(ctx, &normalised, None, "projected")?;
        let active = ctx.lease("gelu", wide.shape())?;
        let gelu = GeluForward {
            inp: wide.buffer().clone(),
            out: active.buffer().clone(),
        };
        ctx.enqueue(LinearGeluForward { linear, gelu });
        drop(normalised);
        let dropout = (self.dropout, Site::FeedForwardResidual);
        let out = self.projection.forward_onto(ctx, &active, inp, dropout)?;
        self.keep(saved, inp, &wide);
        Ok(out)
    }

    /// From the gradient of the output to that of the input, in place unless gradients are put off.
    pub(super) fn backward(
        &self,
        ctx: &Context<'_>,
        saved: &mut Saved,
        stream: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<Activation, DeviceError> {
        let inp = saved.take("feed-forward input")?;
        let wide = if self.keeps_wide {
            saved.take("wide")?
        } else {
            self.widen.forward(ctx, &inp, "projected")?
        };
        let dprojected = self.dropout.gradient(ctx, Site::FeedForwardResidual, stream)?;
        self.projection.dbias(ctx, &dprojected, grads)?;
        let (dwide, linear) = self.projection.dinp(ctx, &dprojected)?;
        let gelu = GeluBackward {
            inp_out: wide.buffer().clone(),
            dout_dinp: dwide.buffer().clone(),
        };
        ctx.enqueue(LinearGeluBackward { linear, gelu });
        // From here on `wide` is the output of the GELU.
        self.projection.dweight(ctx, [&wide, &dprojected], grads)?;
        drop((wide, dprojected));
        self.widen.backward(ctx, [&inp, &dwide], Some(stream), grads)
    }
}

/// The shape of `like` with another number of channels.
fn with_channels(like: &Activation, channels: usize) -> Vec<usize> {
    let outer = like.shape().split_last().map_or(&[][..], |(_, outer)| outer);
    [outer, &[channels]].concat()
}

/// The dropout of a block. Without a rate, or where no backward follows, nothing is enqueued.
#[derive(Clone, Copy, Debug)]
pub(super) struct DropoutLayer {
    /// Share of the numbers that are dropped, from 0 to below 1.
    pub(super) rate: f32,
    /// Number of the block; of the embedding 0.
    pub(super) layer: u32,
}

/// Where in a layer. The numbers are part of the masks: a checkpoint's run goes on with the same ones.
#[derive(Clone, Copy, Debug)]
pub(super) enum Site {
    Embedding = 0,
    Attention = 1,
    AttentionResidual = 2,
    FeedForwardResidual = 3,
}

impl DropoutLayer {
    /// What is dropped there; none: nothing.
    fn mask(self, ctx: &Context<'_>, site: Site) -> Option<DropoutMask> {
        let samples = ctx.samples.filter(|_| self.rate > 0.0)?;
        let place = [self.layer, site as u32];
        Some(DropoutMask::new(samples.seed, place, samples.first, self.rate))
    }

    /// `residual + mask · inp`, for `[B, T, C]`: an activation of its own; none if nothing is dropped.
    pub(super) fn apply(
        self,
        ctx: &Context<'_>,
        site: Site,
        inp: &Activation,
        residual: Option<&Activation>,
    ) -> Result<Option<Activation>, DeviceError> {
        let Some(mask) = self.mask(ctx, site) else {
            return Ok(None);
        };
        let &[_, positions, channels] = inp.shape() else {
            return Err(DeviceError::Shape {
                op: "dropout",
                what: format!("its input has shape {:?}, expected [B, T, C]", inp.shape()),
            });
        };
        let out = ctx.lease("dropped", inp.shape())?;
        ctx.enqueue(ops::Dropout {
            inp: inp.buffer().clone(),
            residual: residual.map(|residual| residual.buffer().clone()),
            out: out.buffer().clone(),
            mask,
            positions,
            channels,
        });
        Ok(Some(out))
    }

    /// The gradient of what [`DropoutLayer::apply`] was given.
    pub(super) fn gradient(
        self,
        ctx: &Context<'_>,
        site: Site,
        dout: &Activation,
    ) -> Result<Activation, DeviceError> {
        Ok(self.apply(ctx, site, dout, None)?.unwrap_or_else(|| dout.clone()))
    }
}
