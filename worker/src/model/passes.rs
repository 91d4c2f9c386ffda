//! Forward and backward over a chunk of blocks: the only loop over blocks.
//!
//! Training, validation, the rehearsal of memory and the search for numbers that are not finite all run it. What
//! accompanies a pass is in [`Hooks`]: gathering parameters (ZeRO-3), looking at what a block makes, ending early.
//!
//! A chunk is a range of blocks: the whole model, or the blocks of a pipeline stage. What forward keeps for backward
//! belongs to a [`ChunkState`], and any number of micro-batches may be in flight.

use std::ops::Range;

use super::{Activation, Backward, Context, GradSink, GradSlot, Keep, Model, ParamId, Saved, WeightGradient};
use crate::device::{Compute, DeviceError, Event, Result};
use crate::timeline::Kind;

/// One of the two passes over the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// First block first.
    Forward,
    /// Last block first.
    Backward,
}

/// What accompanies the passes over the blocks.
pub trait Hooks {
    /// The pass of a block is about to be enqueued.
    fn before(&mut self, _block: usize, _pass: Pass) -> Result<()> {
        Ok(())
    }

    /// All of it is in the stream. `made` is the block's output or the gradient of its input, if that has one.
    fn after(&mut self, _block: usize, _pass: Pass, _made: Option<&Activation>) -> Result<()> {
        Ok(())
    }
}

/// Nothing accompanies the passes.
pub struct NoHooks;

impl Hooks for NoHooks {}

/// A micro-batch between forward and backward of a chunk, or a text that goes on: what each block has saved, and between the
/// halves of backward the deferred gradients of weights.
#[derive(Debug)]
pub struct ChunkState {
    chunk: Range<usize>,
    saved: Vec<Saved>,
    deferred: Option<Vec<WeightGradient>>,
}

impl ChunkState {
    /// Before forward over the blocks of `chunk`.
    pub fn new(chunk: Range<usize>) -> Self {
        Self {
            saved: chunk.clone().map(|_| Saved::default()).collect(),
            chunk,
            deferred: None,
        }
    }

    /// The gradients of weights wait for [`Passes::weight_gradients`], and the state keeps what they read: the halves of
    /// backward of Qi et al. (2023), Zero bubble pipeline parallelism.
    pub fn defer_weight_gradients(&mut self) {
        self.deferred = Some(Vec::new());
    }
}

/// A model with parameters, and the micro-batch that goes through it.
#[derive(Clone, Copy)]
pub struct Passes<'a> {
    /// Its blocks.
    pub model: &'a Model,
    /// Where operations run.
    pub ctx: &'a Context<'a>,
}

impl Passes<'_> {
    /// Forward over the chunk of `state`. The whole model goes from tokens `[B, T]` to the loss of each position
    /// `[B·T]`, 0 where the target is ignored; with [`Keep::KvCache`] to the logits of each row, `[B·T, V]`.
    pub fn forward(
        &self,
        state: &mut ChunkState,
        input: &Activation,
        hooks: &mut dyn Hooks,
    ) -> Result<Activation> {
        let mut activation = input.clone();
        for (index, saved) in state.chunk.clone().zip(&mut state.saved) {
            let block = &self.model.blocks[index];
            let name = || format!("forward {}", block.name()).into();
            let forward = || {
                hooks.before(index, Pass::Forward)?;
                block.forward(self.ctx, &activation, saved)
            };
            activation = self.ctx.spanned(Kind::Forward, name, forward)?;
            hooks.after(index, Pass::Forward, Some(&activation))?;
        }
        Ok(activation)
    }

    /// The same without a backward to come: nothing is kept and nothing dropped, and [`Context::dloss`] and
    /// [`Context::timeline`] are not used.
    pub fn evaluate(
        &self,
        chunk: Range<usize>,
        input: &Activation,
        hooks: &mut dyn Hooks,
    ) -> Result<Activation> {
        let ctx = Context {
            keep: Keep::Nothing,
            dloss: None,
            samples: None,
            routers: None,
            timeline: None,
            ..*self.ctx
        };
        let (model, ctx) = (self.model, &ctx);
        Passes { model, ctx }.forward(&mut ChunkState::new(chunk), input, hooks)
    }

    /// Backward over the chunk of `state`, from the gradient of its output to that of its input, if it has one. The chunk
    /// that ends with the loss is given none, and begins with [`Context::dloss`]. Adds to
    /// the gradients of the chunk's parameters.
    pub fn backward(
        &self,
        state: &mut ChunkState,
        dout: Option<Activation>,
        hooks: &mut dyn Hooks,
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>> {
        let ChunkState {
            chunk,
            saved,
            deferred,
        } = state;
        let mut gradient = Some(dout.map_or_else(|| self.ctx.loss_gradient(), Ok)?);
        for (index, saved) in chunk.clone().zip(saved).rev() {
            let block = &self.model.blocks[index];
            let dout = gradient.take().ok_or_else(|| {
                let name = block.name();
                DeviceError::Upstream(format!("the block after `{name}` gave no gradient of its input"))
            })?;
            grads.enter(index);
            let first = deferred.as_ref().map_or(0, Vec::len);
            let mut sink = DeferringSink {
                grads,
                deferred: deferred.as_mut(),
            };
            let name = || format!("backward {}", block.name()).into();
            let backward = || {
                hooks.before(index, Pass::Backward)?;
                let mut pass = Backward {
                    ctx: self.ctx,
                    saved,
                    grads: &mut sink,
                };
                block.backward(&mut pass, &dout)
            };
            gradient = self.ctx.spanned(Kind::Backward, name, backward)?;
            for later in deferred.iter_mut().flatten().skip(first) {
                later.block = index;
            }
            hooks.after(index, Pass::Backward, gradient.as_ref())?;
        }
        Ok(gradient)
    }

    /// Adds what was deferred to the gradients of the chunk's weights, in the order in which backward came to them.
    pub fn weight_gradients(&self, state: &mut ChunkState, grads: &mut dyn GradSink) -> Result<()> {
        for later in state.deferred.take().into_iter().flatten() {
            grads.enter(later.block);
            self.ctx.contribute_now(grads, later)?;
        }
        Ok(())
    }
}

/// Sum of the losses of a micro-batch's positions, without ignored ones. Synchronises.
pub(crate) fn sum_of_losses(compute: &Compute, losses: &Activation) -> Result<f64> {
    let bytes = compute.download(losses.buffer())?;
    let losses = bytes.chunks_exact(size_of::<f32>());
    Ok(losses
        .map(bytemuck::pod_read_unaligned::<f32>)
        .map(f64::from)
        .sum())
}

/// Passes contributions on, and offers a place to defer those of weights.
struct DeferringSink<'a> {
    grads: &'a mut dyn GradSink,
    deferred: Option<&'a mut Vec<WeightGradient>>,
}

impl GradSink for DeferringSink<'_> {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot> {
        self.grads.grad(id)
    }

    fn contributed(&mut self, id: ParamId, at: Event) -> Result<()> {
        self.grads.contributed(id, at)
    }

    fn deferred(&mut self) -> Option<&mut Vec<WeightGradient>> {
        self.deferred.as_deref_mut()
    }
}
