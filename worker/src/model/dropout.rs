//! Dropout in a network, at the places of GPT-2: the embedding, the probabilities of attention, and what each layer adds to
//! the residual stream.

use super::{Activation, Context};
use crate::device::DeviceError;
use crate::ops::{self, DropoutMask};

/// The dropout of a block. Without a rate, or where no backward follows, nothing is enqueued.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dropout {
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

impl Dropout {
    /// What is dropped there; none: nothing.
    pub(super) fn mask(self, ctx: &Context<'_>, site: Site) -> Option<DropoutMask> {
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

    /// The gradient of what [`Dropout::apply`] was given.
    pub(super) fn gradient(
        self,
        ctx: &Context<'_>,
        site: Site,
        dout: &Activation,
    ) -> Result<Activation, DeviceError> {
        Ok(self.apply(ctx, site, dout, None)?.unwrap_or_else(|| dout.clone()))
    }
}
