//! The last block: channels to the loss of each position.

use super::sublayer::Norm;
use super::{Activation, Block, Context, GradSink, ParamId, Params, Saved};
use crate::device::DeviceError;
use crate::ops::{CrossEntropy, LinearDinp, LinearDweight, LinearForward, LinearShape, WeightLayout};

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
