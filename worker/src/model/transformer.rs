//! The blocks of a transformer: the embedding, from tokens to channels; attention, then feed-forward, each around the
//! residual stream; the head, from channels to losses.

use std::sync::Arc;

use super::sublayer::{Attention, DropoutLayer, FeedForward, Norm, Site};
use super::{Activation, Block, Context, GradSink, ParamId, Params, Saved};
use crate::device::DeviceError;
use crate::ops::{
    CrossEntropy, EncoderForward, LinearDinp, LinearDweight, LinearForward, LinearShape, PositionBackward,
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
        params: &dyn Params,
        input: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        match &self.attention {
            Some(attention) => {
                let middle = attention.forward(ctx, params, input, saved)?;
                self.feed_forward.forward(ctx, params, &middle, saved)
            }
            None => self.feed_forward.forward(ctx, params, input, saved),
        }
    }

    /// Without the last product, which only makes the output.
    fn recompute(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        input: &Activation,
        saved: &mut Saved,
    ) -> Result<(), DeviceError> {
        match &self.attention {
            Some(attention) => {
                let middle = attention.forward(ctx, params, input, saved)?;
                self.feed_forward.recompute(ctx, params, &middle, saved)
            }
            None => self.feed_forward.recompute(ctx, params, input, saved),
        }
    }

    fn selective(&self) -> Option<Arc<dyn Block>> {
        let mut leaner = self.clone();
        leaner.feed_forward.keeps_wide = false;
        Some(Arc::new(leaner))
    }

    fn backward(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        saved: &mut Saved,
        dout: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>, DeviceError> {
        // The gradient of the residual stream: each layer adds its own to it.
        self.feed_forward.backward(ctx, params, saved, dout, grads)?;
        if let Some(attention) = &self.attention {
            attention.backward(ctx, params, saved, dout, grads)?;
        }
        Ok(Some(dout.clone()))
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
        params: &dyn Params,
        input: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        let [batch, positions] = batch_and_positions(input)?;
        let out = ctx.lease("embedding", &[batch, positions, self.channels])?;
        ctx.enqueue(EncoderForward {
            tokens: input.buffer().clone(),
            wte: params.get(self.wte),
            wpe: self.wpe.map(|wpe| params.get(wpe)),
            out: out.buffer().clone(),
            positions,
        });
        saved.put("tokens", input);
        let dropped = self.dropout.apply(ctx, Site::Embedding, &out, None)?;
        Ok(dropped.unwrap_or(out))
    }

    fn backward(
        &self,
        ctx: &Context<'_>,
        _params: &dyn Params,
        saved: &mut Saved,
        dout: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>, DeviceError> {
        let tokens = saved.take("tokens")?;
        let dout = &self.dropout.gradient(ctx, Site::Embedding, dout)?;
        let [_, positions] = batch_and_positions(&tokens)?;
        if let Some(wpe) = self.wpe {
            let slot = grads.grad(wpe)?;
            ctx.enqueue(PositionBackward {
                dout: dout.buffer().clone(),
                dwpe: slot.buffer,
                accumulate: slot.accumulate,
                positions,
                channels: self.channels,
            });
            grads.contributed(wpe, ctx.record())?;
        }
        let slot = grads.grad(self.wte)?;
        ctx.enqueue(TokenBackward {
            tokens: tokens.buffer().clone(),
            dout: dout.buffer().clone(),
            dwte: slot.buffer,
            accumulate: slot.accumulate,
        });
        grads.contributed(self.wte, ctx.record())?;
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
    norm: Norm,
    /// `[V, C]`; may be the embedding's.
    projection: ParamId,
    vocab: usize,
    params: [ParamId; 3],
}

impl Head {
    pub(super) fn new(norm: Norm, projection: ParamId, vocab: usize) -> Self {
        let [weight, bias] = norm.params();
        Self {
            norm,
            projection,
            vocab,
            params: [weight, bias, projection],
        }
    }

    fn shape(&self, inp: &Activation) -> LinearShape {
        let inputs = inp.shape().last().copied().unwrap_or(1).max(1);
        let rows = inp.buffer().len() / inputs;
        LinearShape {
            rows,
            inputs,
            outputs: self.vocab,
            layout: WeightLayout::OutIn,
        }
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
        params: &dyn Params,
        input: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        let shape = self.shape(input);
        let normalised = self.norm.forward(ctx, params, input)?;
        let logits = ctx.lease("logits", &[shape.rows, self.vocab])?;
        ctx.enqueue(LinearForward {
            inp: normalised.buffer().clone(),
            weight: params.get(self.projection),
            bias: None,
            residual: None,
            out: logits.buffer().clone(),
            shape,
        });
        let losses = ctx.lease_stat("losses", &[shape.rows])?;
        ctx.enqueue(CrossEntropy {
            logits: logits.buffer().clone(),
            targets: ctx.targets.clone(),
            losses: losses.buffer().clone(),
            dlosses: ctx.dloss.cloned(),
        });
        if ctx.dloss.is_some() {
            saved.put("head input", input);
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
        params: &dyn Params,
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
        let shape = self.shape(&inp);
        let normalised = self.norm.forward(ctx, params, &inp)?;
        let slot = grads.grad(self.projection)?;
        ctx.enqueue(LinearDweight {
            inp: normalised.buffer().clone(),
            dout: dlogits.buffer().clone(),
            dweight: slot.buffer,
            accumulate: slot.accumulate,
            shape,
        });
        grads.contributed(self.projection, ctx.record())?;
        drop(normalised);
        let dnormalised = ctx.lease("gradient", inp.shape())?;
        ctx.enqueue(LinearDinp {
            dout: dlogits.buffer().clone(),
            weight: params.get(self.projection),
            dinp: dnormalised.buffer().clone(),
            shape,
        });
        let dinp = ctx.lease("gradient of the stream", inp.shape())?;
        self.norm
            .backward(ctx, params, &inp, &dnormalised, (&dinp, false), grads)?;
        Ok(Some(dinp))
    }
}
