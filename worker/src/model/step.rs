//! Forward and backward over the blocks of a model.
//!
//! These are loops over [`Model::blocks`] and nothing more; whoever needs another schedule (recomputation,
//! pipeline stages, gathering a group before its block) writes another loop over the same blocks.

use super::{Activation, Context, GradSink, GradSlot, Model, ParamId, Params, Saved, Unused};
use crate::device::{DeviceError, Event};
use crate::ops::Fill;
use crate::timeline::Kind;

/// One empty [`Saved`] a block: what one micro-batch in flight needs.
#[must_use]
pub fn saved_for(model: &Model) -> Vec<Saved> {
    model.blocks.iter().map(|_| Saved::default()).collect()
}

/// From tokens `[B, T]` to the loss of each position `[B·T]`; ignored positions have loss 0.
///
/// # Panics
/// If `saved` does not have one entry a block.
pub fn forward(
    model: &Model,
    ctx: &Context<'_>,
    params: &dyn Params,
    tokens: &Activation,
    saved: &mut [Saved],
) -> Result<Activation, DeviceError> {
    assert_eq!(saved.len(), model.blocks.len(), "one `Saved` a block");
    let mut activation = tokens.clone();
    for (block, saved) in model.blocks.iter().zip(saved) {
        let name = || format!("forward {}", block.name()).into();
        let forward = || block.forward(ctx, params, &activation, saved);
        activation = ctx.spanned(Kind::Forward, name, forward)?;
    }
    Ok(activation)
}

/// The same without a backward to come: what a block saves is released before the next block runs, and
/// [`Context::dloss`] and [`Context::timeline`] are not used.
pub fn evaluate(
    model: &Model,
    ctx: &Context<'_>,
    params: &dyn Params,
    tokens: &Activation,
) -> Result<Activation, DeviceError> {
    let ctx = Context {
        dloss: None,
        timeline: None,
        ..*ctx
    };
    let mut activation = tokens.clone();
    for block in &model.blocks {
        activation = block.forward(&ctx, params, &activation, &mut Saved::default())?;
    }
    Ok(activation)
}

/// Adds to the gradients of all parameters. Leaves `saved` empty. A parameter that its block does not use is reported as
/// soon as the block's backward has ended: nobody waits for its gradient.
///
/// # Panics
/// If `saved` does not have one entry a block.
pub fn backward(
    model: &Model,
    ctx: &Context<'_>,
    params: &dyn Params,
    saved: &mut [Saved],
    grads: &mut dyn GradSink,
) -> Result<(), DeviceError> {
    assert_eq!(saved.len(), model.blocks.len(), "one `Saved` a block");
    let mut gradient = Some(ctx.loss_gradient()?);
    for (block, saved) in model.blocks.iter().zip(saved).rev() {
        let dout = gradient.take().ok_or_else(|| {
            let name = block.name();
            DeviceError::Upstream(format!("the block after `{name}` gave no gradient of its input"))
        })?;
        let mut watch = Watch {
            grads,
            contributed: Vec::new(),
        };
        let name = || format!("backward {}", block.name()).into();
        let backward = || block.backward(ctx, params, saved, &dout, &mut watch);
        gradient = ctx.spanned(Kind::Backward, name, backward)?;
        let contributed = watch.contributed;
        let unused: Vec<ParamId> = (block.params().iter().rev().copied())
            .filter(|id| !contributed.contains(id))
            .collect();
        if !unused.is_empty() {
            contribute_zeros(model, ctx, block.name(), &unused, grads)?;
        }
    }
    Ok(())
}

/// Remembers what one block has contributed to.
struct Watch<'a> {
    grads: &'a mut dyn GradSink,
    contributed: Vec<ParamId>,
}

impl GradSink for Watch<'_> {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        self.grads.grad(id)
    }

    fn contributed(&mut self, id: ParamId, at: Event) -> Result<(), DeviceError> {
        self.contributed.push(id);
        self.grads.contributed(id, at)
    }

    fn unused(&mut self, unused: &Unused<'_>) -> Result<(), DeviceError> {
        self.grads.unused(unused)
    }
}

fn contribute_zeros(
    model: &Model,
    ctx: &Context<'_>,
    block: &str,
    ids: &[ParamId],
    grads: &mut dyn GradSink,
) -> Result<(), DeviceError> {
    grads.unused(&Unused {
        block,
        params: ids.iter().map(|id| model.params[id.0].name.as_str()).collect(),
    })?;
    for &id in ids {
        let slot = grads.grad(id)?;
        if !slot.accumulate {
            ctx.enqueue(Fill {
                out: slot.buffer,
                value: 0.0,
            });
        }
        grads.contributed(id, ctx.record())?;
    }
    Ok(())
}
