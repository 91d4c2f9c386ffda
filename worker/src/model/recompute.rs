//! Recomputation: memory of activations for arithmetic (Chen et al. 2016; Korthikanti et al. 2022).
//!
//! A transformer block of C channels keeps 10·C numbers a position for its backward, and one a head. What is computed
//! element by element (normalisations, the output of the GELU) is never kept.
//!
//! | `train.recompute` | kept, numbers a position | computed again |
//! |---|---|---|
//! | `none` | 10·C + heads | nothing |
//! | `selective` | 6·C + heads | the widened half of the feed-forward layer: a third of the block's products |
//! | `full` | C, the block's input | all of the block but its last product, whose output nobody reads |
//!
//! `selective` gives up the largest thing that a block keeps, for one product that needs nothing but the layer's
//! input. Attention keeps what it has: per byte it is the more expensive part, since its core grows with the square of
//! the positions. The last block is left alone by `full`: its backward comes next, so nothing would be freed.
//!
//! The same operations run on the same numbers, and randomness is keyed by step and micro-batch, so losses and
//! gradients have the same bits.

use std::sync::Arc;

use super::{Activation, Block, Context, GradSink, Model, ParamId, Params, Saved};
use crate::config::Recompute;
use crate::device::DeviceError;

/// The same model, whose blocks keep less for backward. To be applied before anything that watches the blocks' passes,
/// such as [`crate::parallel::gated`]: a recomputed block's backward includes its forward.
#[must_use]
pub fn recomputing(model: Model, what: Recompute) -> Model {
    let last = model.blocks.len().saturating_sub(1);
    let leaner = |(index, block): (usize, Arc<dyn Block>)| match what {
        Recompute::None => block,
        Recompute::Selective => block.selective().unwrap_or(block),
        Recompute::Full if index == last || block.keeps_only_input() => block,
        Recompute::Full => Arc::new(Recomputed { inner: block }),
    };
    Model {
        blocks: model.blocks.into_iter().enumerate().map(leaner).collect(),
        ..model
    }
}

/// Keeps its input only.
struct Recomputed {
    inner: Arc<dyn Block>,
}

impl Block for Recomputed {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn params(&self) -> &[ParamId] {
        self.inner.params()
    }

    /// All of them: forward is a part of it.
    fn read_by_backward(&self) -> &[ParamId] {
        self.inner.params()
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
        let out = self.inner.forward(ctx, params, input, &mut Saved::default())?;
        saved.put("block input", input);
        Ok(out)
    }

    fn backward(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        saved: &mut Saved,
        dout: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>, DeviceError> {
        let input = saved.take("block input")?;
        let mut again = Saved::default();
        self.inner.recompute(ctx, params, &input, &mut again)?;
        drop(input);
        self.inner.backward(ctx, params, &mut again, dout, grads)
    }
}
