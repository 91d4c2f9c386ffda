//! The first block: tokens to channels.

use super::dropout::{Dropout, Site};
use super::{Activation, Block, Context, GradSink, ParamId, Params, Saved};
use crate::device::DeviceError;
use crate::ops::{EncoderForward, PositionBackward, TokenBackward};

/// `[B, T]` tokens to `[B, T, C]`.
#[derive(Debug)]
pub(super) struct Embedding {
    wte: ParamId,
    wpe: Option<ParamId>,
    params: Vec<ParamId>,
    channels: usize,
    dropout: Dropout,
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
            dropout: Dropout { rate, layer: 0 },
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
