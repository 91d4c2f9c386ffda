//! A model whose blocks enter and leave their parameters.

use std::sync::Arc;

use super::{Pass, Weights};
use crate::device::DeviceError;
use crate::model::{Activation, Block, Context, GradSink, Model, ParamId, Params, Saved};

/// The same model, whose blocks tell `weights` when they need their parameters and when they no longer do.
#[must_use]
pub fn gated(model: Model, weights: &Arc<dyn Weights>) -> Model {
    let gate = |(index, inner)| -> Arc<dyn Block> {
        Arc::new(Gate {
            inner,
            index,
            weights: weights.clone(),
        })
    };
    Model {
        blocks: model.blocks.into_iter().enumerate().map(gate).collect(),
        ..model
    }
}

struct Gate {
    inner: Arc<dyn Block>,
    index: usize,
    weights: Arc<dyn Weights>,
}

impl Block for Gate {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn params(&self) -> &[ParamId] {
        self.inner.params()
    }

    fn read_by_backward(&self) -> &[ParamId] {
        self.inner.read_by_backward()
    }

    fn forward(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        input: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        self.weights.enter(self.index, Pass::Forward)?;
        let out = self.inner.forward(ctx, params, input, saved)?;
        self.weights.leave(self.index, Pass::Forward);
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
        self.weights.enter(self.index, Pass::Backward)?;
        let dinp = self.inner.backward(ctx, params, saved, dout, grads)?;
        self.weights.leave(self.index, Pass::Backward);
        Ok(dinp)
    }
}
