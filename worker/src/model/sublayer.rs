//! What blocks are made of: layers that know their parameters' ids and enqueue their operations; and dropout at the places
//! of GPT-2: the embedding, the probabilities of attention, and what each layer adds to the residual stream.
//!
//! Backward works in the reverse of the order in which parameters are listed, since that is the order of gradient
//! memory: within a layer the bias, then the weight.

use super::{Activation, Context, GradSink, ParamId, Params, Saved};
use crate::device::DeviceError;
use crate::ops::{
    self, AttentionBackward, AttentionForward, AttentionShape, ColumnSum, DropoutMask, LayerNormBackward,
    LayerNormForward, LinearDinp, LinearDweight, LinearForward, LinearGeluBackward, LinearGeluForward,
    LinearShape, WeightLayout,
};

/// A layer normalisation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub(super) weight: ParamId,
    pub(super) bias: ParamId,
}

impl Norm {
    pub(super) fn params(&self) -> [ParamId; 2] {
        [self.weight, self.bias]
    }

    /// `[…, C]` to `[…, C]`
    pub(super) fn forward(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        inp: &Activation,
    ) -> Result<Activation, DeviceError> {
        let out = ctx.lease("normalised", inp.shape())?;
        ctx.enqueue(LayerNormForward {
            inp: inp.buffer().clone(),
            weight: params.get(self.weight),
            bias: params.get(self.bias),
            out: out.buffer().clone(),
        });
        Ok(out)
    }

    /// Gradients of the parameters; the gradient of the input goes into, or on top of, `dinp`.
    pub(super) fn backward(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        inp: &Activation,
        dout: &Activation,
        dinp: (&Activation, bool),
        grads: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let (dbias, dweight) = (grads.grad(self.bias)?, grads.grad(self.weight)?);
        ctx.enqueue(LayerNormBackward {
            dout: dout.buffer().clone(),
            inp: inp.buffer().clone(),
            weight: params.get(self.weight),
            dinp: dinp.0.buffer().clone(),
            dweight: dweight.buffer,
            dbias: dbias.buffer,
            accumulate_dinp: dinp.1,
            accumulate_dweight: dweight.accumulate,
            accumulate_dbias: dbias.accumulate,
        });
        grads.contributed(self.bias, ctx.record())?;
        grads.contributed(self.weight, ctx.record())
    }
}

/// A linear layer with bias.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dense {
    pub(super) weight: ParamId,
    pub(super) bias: ParamId,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) layout: WeightLayout,
}

impl Dense {
    pub(super) fn params(&self) -> [ParamId; 2] {
        [self.weight, self.bias]
    }

    fn shape(&self, inp: &Activation) -> LinearShape {
        let rows = inp.buffer().len() / self.inputs;
        LinearShape {
            rows,
            inputs: self.inputs,
            outputs: self.outputs,
            layout: self.layout,
        }
    }

    /// `[…, I]` to `[…, O]`, plus `residual`.
    pub(super) fn forward(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        inp: &Activation,
        residual: Option<&Activation>,
    ) -> Result<Activation, DeviceError> {
        let out = ctx.lease("projected", &with_channels(inp, self.outputs))?;
        ctx.enqueue(LinearForward {
            inp: inp.buffer().clone(),
            weight: params.get(self.weight),
            bias: Some(params.get(self.bias)),
            residual: residual.map(|r| r.buffer().clone()),
            out: out.buffer().clone(),
            shape: self.shape(inp),
        });
        Ok(out)
    }

    /// `[B, T, I]` to `[B, T, O]`: `residual`, plus the output where it is not dropped.
    fn forward_onto(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        inp: &Activation,
        residual: &Activation,
        (dropout, site): (DropoutLayer, Site),
    ) -> Result<Activation, DeviceError> {
        if dropout.mask(ctx, site).is_none() {
            return self.forward(ctx, params, inp, Some(residual));
        }
        let projected = self.forward(ctx, params, inp, None)?;
        let out = dropout.apply(ctx, site, &projected, Some(residual))?;
        Ok(out.unwrap_or(projected))
    }

    /// `[…, I]` to `[…, O]` twice: before and after a GELU.
    fn forward_gelu(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        inp: &Activation,
    ) -> Result<[Activation; 2], DeviceError> {
        let wide = ctx.lease("projected", &with_channels(inp, self.outputs))?;
        let out = ctx.lease("gelu", wide.shape())?;
        ctx.enqueue(LinearGeluForward {
            inp: inp.buffer().clone(),
            weight: params.get(self.weight),
            bias: params.get(self.bias),
            wide: wide.buffer().clone(),
            out: out.buffer().clone(),
            shape: self.shape(inp),
        });
        Ok([wide, out])
    }

    /// Gradient of the input of the GELU before this layer; `wide`, which is that input, becomes this layer's.
    fn dwide(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        dout: &Activation,
        wide: &Activation,
    ) -> Result<Activation, DeviceError> {
        let dwide = ctx.lease("gradient", wide.shape())?;
        ctx.enqueue(LinearGeluBackward {
            dout: dout.buffer().clone(),
            weight: params.get(self.weight),
            wide_active: wide.buffer().clone(),
            dwide: dwide.buffer().clone(),
            shape: self.shape(wide),
        });
        Ok(dwide)
    }

    /// Gradient of the input.
    pub(super) fn dinp(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        dout: &Activation,
    ) -> Result<Activation, DeviceError> {
        let dinp = ctx.lease("gradient", &with_channels(dout, self.inputs))?;
        ctx.enqueue(LinearDinp {
            dout: dout.buffer().clone(),
            weight: params.get(self.weight),
            dinp: dinp.buffer().clone(),
            shape: self.shape(&dinp),
        });
        Ok(dinp)
    }

    /// Gradient of the bias.
    fn dbias(
        &self,
        ctx: &Context<'_>,
        dout: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let slot = grads.grad(self.bias)?;
        let x = dout.buffer().clone();
        ctx.enqueue(ColumnSum {
            x,
            out: slot.buffer,
            accumulate: slot.accumulate,
        });
        grads.contributed(self.bias, ctx.record())
    }

    /// Gradient of the weight.
    pub(super) fn dweight(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        dout: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let slot = grads.grad(self.weight)?;
        ctx.enqueue(LinearDweight {
            inp: inp.buffer().clone(),
            dout: dout.buffer().clone(),
            dweight: slot.buffer,
            accumulate: slot.accumulate,
            shape: self.shape(inp),
        });
        grads.contributed(self.weight, ctx.record())
    }
}

/// `x + dropout(projection(attention(norm(x))))`
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub(super) norm: Norm,
    pub(super) qkv: Dense,
    pub(super) projection: Dense,
    pub(super) heads: usize,
    pub(super) dropout: DropoutLayer,
}

impl Attention {
    pub(super) fn params(&self) -> Vec<ParamId> {
        [self.norm.params(), self.qkv.params(), self.projection.params()].concat()
    }

    fn shape(&self, inp: &Activation) -> Result<AttentionShape, DeviceError> {
        match *inp.shape() {
            [batch, positions, channels] => Ok(AttentionShape {
                batch,
                positions,
                heads: self.heads,
                channels,
            }),
            ref shape => Err(DeviceError::Shape {
                op: "attention",
                what: format!("its input has shape {shape:?}, expected [B, T, C]"),
            }),
        }
    }

    /// `[B, T, C]` to `[B, T, C]`; keeps 5·B·T·C elements.
    pub(super) fn forward(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        let shape = self.shape(inp)?;
        let normalised = self.norm.forward(ctx, params, inp)?;
        let qkv = self.qkv.forward(ctx, params, &normalised, None)?;
        drop(normalised);
        let mixed = ctx.lease("attention", inp.shape())?;
        let lse = ctx.lease_stat("attention lse", &[shape.batch, shape.heads, shape.positions])?;
        ctx.enqueue(AttentionForward {
            qkv: qkv.buffer().clone(),
            out: mixed.buffer().clone(),
            lse: lse.buffer().clone(),
            shape,
            dropout: self.dropout.mask(ctx, Site::Attention),
        });
        let out = self.projection.forward_onto(
            ctx,
            params,
            &mixed,
            inp,
            (self.dropout, Site::AttentionResidual),
        )?;
        saved.put("attention input", inp);
        saved.put("qkv", &qkv);
        saved.put("attention", &mixed);
        saved.put("attention lse", &lse);
        Ok(out)
    }

    /// Turns the gradient of the output into that of the input, in place.
    pub(super) fn backward(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        saved: &mut Saved,
        stream: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let inp = saved.take("attention input")?;
        let (qkv, mixed, lse) = (
            saved.take("qkv")?,
            saved.take("attention")?,
            saved.take("attention lse")?,
        );
        let dprojected = self.dropout.gradient(ctx, Site::AttentionResidual, stream)?;
        self.projection.dbias(ctx, &dprojected, grads)?;
        self.projection.dweight(ctx, &mixed, &dprojected, grads)?;
        let dmixed = self.projection.dinp(ctx, params, &dprojected)?;
        drop(dprojected);
        let dqkv = ctx.lease("gradient of qkv", qkv.shape())?;
        ctx.enqueue(AttentionBackward {
            qkv: qkv.buffer().clone(),
            out: mixed.buffer().clone(),
            lse: lse.buffer().clone(),
            dout: dmixed.buffer().clone(),
            dqkv: dqkv.buffer().clone(),
            shape: self.shape(&inp)?,
            dropout: self.dropout.mask(ctx, Site::Attention),
        });
        drop((qkv, mixed, lse, dmixed));
        self.qkv.dbias(ctx, &dqkv, grads)?;
        let normalised = self.norm.forward(ctx, params, &inp)?;
        self.qkv.dweight(ctx, &normalised, &dqkv, grads)?;
        drop(normalised);
        let dnormalised = self.qkv.dinp(ctx, params, &dqkv)?;
        self.norm
            .backward(ctx, params, &inp, &dnormalised, (stream, true), grads)
    }
}

/// `x + dropout(projection(gelu(widen(norm(x)))))`
#[derive(Clone, Copy, Debug)]
pub(super) struct FeedForward {
    pub(super) norm: Norm,
    pub(super) widen: Dense,
    pub(super) projection: Dense,
    /// Otherwise backward widens again.
    pub(super) keeps_wide: bool,
    pub(super) dropout: DropoutLayer,
}

impl FeedForward {
    pub(super) fn params(&self) -> Vec<ParamId> {
        [self.norm.params(), self.widen.params(), self.projection.params()].concat()
    }

    /// `[…, C]` to `[…, 4·C]`, before the GELU.
    fn wide(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        inp: &Activation,
    ) -> Result<Activation, DeviceError> {
        let normalised = self.norm.forward(ctx, params, inp)?;
        self.widen.forward(ctx, params, &normalised, None)
    }

    fn keep(&self, saved: &mut Saved, inp: &Activation, wide: &Activation) {
        saved.put("feed-forward input", inp);
        if self.keeps_wide {
            saved.put("wide", wide);
        }
    }

    /// What forward keeps, without its output.
    pub(super) fn recompute(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<(), DeviceError> {
        let wide = self.wide(ctx, params, inp)?;
        self.keep(saved, inp, &wide);
        Ok(())
    }

    /// `[…, C]` to `[…, C]`; keeps 5·R·C elements, or R·C without `keeps_wide`.
    pub(super) fn forward(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        let normalised = self.norm.forward(ctx, params, inp)?;
        let [wide, active] = self.widen.forward_gelu(ctx, params, &normalised)?;
        drop(normalised);
        let out = self.projection.forward_onto(
            ctx,
            params,
            &active,
            inp,
            (self.dropout, Site::FeedForwardResidual),
        )?;
        self.keep(saved, inp, &wide);
        Ok(out)
    }

    /// Turns the gradient of the output into that of the input, in place.
    pub(super) fn backward(
        &self,
        ctx: &Context<'_>,
        params: &dyn Params,
        saved: &mut Saved,
        stream: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let inp = saved.take("feed-forward input")?;
        let wide = if self.keeps_wide {
            saved.take("wide")?
        } else {
            self.wide(ctx, params, &inp)?
        };
        let dprojected = self.dropout.gradient(ctx, Site::FeedForwardResidual, stream)?;
        self.projection.dbias(ctx, &dprojected, grads)?;
        let dwide = self.projection.dwide(ctx, params, &dprojected, &wide)?;
        // From here on `wide` is the output of the GELU.
        self.projection.dweight(ctx, &wide, &dprojected, grads)?;
        drop((wide, dprojected));
        self.widen.dbias(ctx, &dwide, grads)?;
        let normalised = self.norm.forward(ctx, params, &inp)?;
        self.widen.dweight(ctx, &normalised, &dwide, grads)?;
        drop(normalised);
        let dnormalised = self.widen.dinp(ctx, params, &dwide)?;
        self.norm
            .backward(ctx, params, &inp, &dnormalised, (stream, true), grads)
    }
}

/// The shape of `like` with another number of channels.
fn with_channels(like: &Activation, channels: usize) -> Vec<usize> {
    let mut shape = like.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = channels;
    }
    shape
}

/// The dropout of a block. Without a rate, or where no backward follows, nothing is enqueued.
#[derive(Clone, Copy, Debug)]
pub(super) struct DropoutLayer {
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

impl DropoutLayer {
    /// What is dropped there; none: nothing.
    fn mask(self, ctx: &Context<'_>, site: Site) -> Option<DropoutMask> {
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

    /// The gradient of what [`DropoutLayer::apply`] was given.
    pub(super) fn gradient(
        self,
        ctx: &Context<'_>,
        site: Site,
        dout: &Activation,
    ) -> Result<Activation, DeviceError> {
        Ok(self.apply(ctx, site, dout, None)?.unwrap_or_else(|| dout.clone()))
    }
}
