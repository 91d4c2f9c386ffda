//! The transformer block: attention, then feed-forward, each around the residual stream.

use std::sync::Arc;

use super::sublayer::{Attention, FeedForward};
use super::{Activation, Block, Context, GradSink, ParamId, Params, Saved};
use crate::device::DeviceError;

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
