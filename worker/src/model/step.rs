//! Forward and backward over the blocks of a model.
//!
//! These are loops over [`Model::blocks`] and nothing more; whoever needs another schedule (recomputation,
//! pipeline stages, gathering a group before its block) writes another loop over the same blocks.

use super::{Activation, Context, GradSink, Model, Params, Saved};
use crate::device::DeviceError;

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
        activation = block.forward(ctx, params, &activation, saved)?;
    }
    Ok(activation)
}

/// The same without a backward to come: what a block saves is released before the next block runs.
pub fn evaluate(
    model: &Model,
    ctx: &Context<'_>,
    params: &dyn Params,
    tokens: &Activation,
) -> Result<Activation, DeviceError> {
    let mut activation = tokens.clone();
    for block in &model.blocks {
        activation = block.forward(ctx, params, &activation, &mut Saved::default())?;
    }
    Ok(activation)
}

/// Adds to the gradients of all parameters. `dloss` is the factor of each position's gradient `[B·T]`:
/// `1/(B·T)` everywhere for the gradient of the mean loss. Leaves `saved` empty.
///
/// # Panics
/// If `saved` does not have one entry a block.
pub fn backward(
    model: &Model,
    ctx: &Context<'_>,
    params: &dyn Params,
    saved: &mut [Saved],
    dloss: &Activation,
    grads: &mut dyn GradSink,
) -> Result<(), DeviceError> {
    assert_eq!(saved.len(), model.blocks.len(), "one `Saved` a block");
    let mut gradient = Some(dloss.clone());
    for (block, saved) in model.blocks.iter().zip(saved).rev() {
        let dout = gradient.take().ok_or_else(|| {
            let name = block.name();
            DeviceError::Upstream(format!("the block after `{name}` gave no gradient of its input"))
        })?;
        gradient = block.backward(ctx, params, saved, &dout, grads)?;
    }
    Ok(())
}
