//! Layers that blocks are made of: norms, linear layers, dropout. They know their parameters' ids and enqueue their
//! operations.
//!
//! Within a layer backward works in the reverse of the order in which parameters are listed, since that is the order of
//! gradient memory: the bias, then the weight.

use super::{Activation, Backward, Context, GradSlot, Keep, ParamId, Saved};
use crate::config::Recompute;
use crate::device::Result;
use crate::ops::{
    self, AddBiasResidual, Cast, ColumnSum, DropoutMask, GroupedDweight, GroupedLinear, IndexRows,
    LinearDinp, LinearDweight, LinearForward, LinearShape, NormBackward, NormForward, SwigluBackward,
    SwigluForward, WeightLayout,
};

/// A normalisation of the rows of the residual stream: with a bias layer normalisation, without one that by the root mean
/// square.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub(super) weight: ParamId,
    pub(super) bias: Option<ParamId>,
    pub(super) epsilon: f64,
}

impl Norm {
    pub(super) fn params(&self) -> Vec<ParamId> {
        std::iter::once(self.weight).chain(self.bias).collect()
    }

    /// All rows of the micro-batch, normalised, `[R, C]`; `inp` has this rank's rows of the residual stream.
    pub(super) fn forward(&self, ctx: &Context<'_>, inp: &Activation) -> Result<Activation> {
        let channels = inp.buffer().len() / ctx.own_rows().len();
        ctx.all_rows("normalised", channels, |out| {
            ctx.enqueue(NormForward {
                inp: inp.buffer().clone(),
                weight: ctx.params.get(self.weight),
                bias: self.bias.map(|bias| ctx.params.get(bias)),
                out,
                epsilon: self.epsilon,
            });
        })
    }

    /// Gradients of the parameters. The gradient of the input is added to that of the stream, in place unless a gradient that is
    /// put off reads that; it is new where there is none. All are this rank's rows.
    pub(super) fn backward_onto(
        &self,
        pass: &mut Backward<'_>,
        [inp, dout]: [&Activation; 2],
        stream: Option<&Activation>,
    ) -> Result<Activation> {
        let Backward { ctx, grads, .. } = pass;
        let dinp = match stream {
            Some(stream) if grads.deferred().is_none() => stream.clone(),
            _ => ctx.lease("gradient of the stream", inp.shape())?,
        };
        if let Some(stream) = stream.filter(|stream| !stream.buffer().same(dinp.buffer())) {
            ctx.enqueue(Cast {
                x: stream.buffer().clone(),
                out: dinp.buffer().clone(),
            });
        }
        let dbias = self.bias.map(|bias| grads.grad(bias)).transpose()?;
        let dweight = grads.grad(self.weight)?;
        ctx.enqueue(NormBackward {
            dout: dout.buffer().clone(),
            inp: inp.buffer().clone(),
            weight: ctx.params.get(self.weight),
            dinp: dinp.buffer().clone(),
            dweight: dweight.buffer,
            epsilon: self.epsilon,
            accumulate_dinp: stream.is_some(),
            accumulate_dweight: dweight.accumulate,
            accumulate_dbias: dbias.as_ref().is_some_and(|slot| slot.accumulate),
            dbias: dbias.map(|slot| slot.buffer),
        });
        for id in self.bias.into_iter().chain([self.weight]) {
            grads.contributed(id, ctx.compute.record())?;
        }
        Ok(dinp)
    }
}

/// A linear layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dense {
    pub(super) weight: ParamId,
    pub(super) bias: Option<ParamId>,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) layout: WeightLayout,
}

impl Dense {
    pub(super) fn params(&self) -> Vec<ParamId> {
        std::iter::once(self.weight).chain(self.bias).collect()
    }

    pub(super) fn shape(&self, inp: &Activation) -> LinearShape {
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
        inp: &Activation,
        residual: Option<&Activation>,
        name: &str,
    ) -> Result<Activation> {
        let out = ctx.lease(name, &with_channels(inp, self.outputs))?;
        ctx.enqueue(LinearForward {
            inp: inp.buffer().clone(),
            weight: ctx.params.get(self.weight),
            bias: self.bias.map(|bias| ctx.params.get(bias)),
            residual: residual.map(|residual| residual.buffer().clone()),
            out: out.buffer().clone(),
            shape: self.shape(inp),
            exact: false,
        });
        Ok(out)
    }

    /// `[R, I]` to `[R, O]`: `residual`, plus the output where it is not dropped. Where the inputs are cut, the products of
    /// all ranks are added up first; `residual` and the result are this rank's rows.
    pub(super) fn forward_onto(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        residual: &Activation,
        dropout: DropoutLayer,
        site: Site,
    ) -> Result<Activation> {
        if ctx.tensor.is_some() {
            let partial = Self { bias: None, ..*self };
            let partial = partial.forward(ctx, inp, None, "partial sums")?;
            return dropout.add_sums(ctx, site, partial, residual, self.bias);
        }
        let residual_here = dropout.mask(ctx, site).is_none().then_some(residual);
        let projected = self.forward(ctx, inp, residual_here, "projected")?;
        let out = dropout.apply(ctx, site, &projected, Some(residual))?;
        Ok(out.unwrap_or(projected))
    }

    /// Gradient of the input.
    pub(super) fn dinp(&self, ctx: &Context<'_>, dout: &Activation) -> Result<Activation> {
        let dinp = ctx.lease("gradient", &with_channels(dout, self.inputs))?;
        ctx.enqueue(LinearDinp {
            dout: dout.buffer().clone(),
            weight: ctx.params.get(self.weight),
            dinp: dinp.buffer().clone(),
            shape: self.shape(&dinp),
        });
        Ok(dinp)
    }

    /// Gradients of the bias and the weight. That of the bias sums up this rank's rows of the output's gradient, `own`, and
    /// that of the weight needs all rows, `dout`.
    pub(super) fn gradients(
        &self,
        pass: &mut Backward<'_>,
        [inp, dout, own]: [&Activation; 3],
    ) -> Result<()> {
        let (inp_rows, dout_rows, shape) = (inp.buffer().clone(), dout.buffer().clone(), self.shape(inp));
        let weight = move |slot: GradSlot| LinearDweight {
            inp: inp_rows,
            dout: dout_rows,
            dweight: slot.buffer,
            accumulate: slot.accumulate,
            shape,
        };
        if let Some(bias) = self.bias {
            let x = own.buffer().clone();
            pass.contribute(bias, &[own], move |slot| ColumnSum {
                x,
                out: slot.buffer,
                accumulate: slot.accumulate,
            })?;
        }
        pass.contribute(self.weight, &[inp, dout], weight)
    }

    /// Of the experts that a rank holds, whose weights are `[O, I]` each: `[M, I]` to `[M, O]` with the layout `OutIn`; with
    /// `InOut` the gradient `[M, O]` to that of the input. The rows of an expert are neighbours, and end where `ends` says.
    pub(super) fn of_experts(
        &self,
        ctx: &Context<'_>,
        [inp, ends]: [&Activation; 2],
        layout: WeightLayout,
    ) -> Result<Activation> {
        let features = match layout {
            WeightLayout::OutIn => [self.inputs, self.outputs],
            WeightLayout::InOut => [self.outputs, self.inputs],
        };
        let out = ctx.lease("products of experts", &[inp.row_count(), features[1]])?;
        ctx.enqueue(GroupedLinear {
            inp: inp.buffer().clone(),
            weight: ctx.params.get(self.weight),
            offsets: ends.buffer().clone(),
            out: out.buffer().clone(),
            features,
            layout,
        });
        Ok(out)
    }

    /// Gradients of these weights.
    pub(super) fn gradients_of_experts(
        &self,
        pass: &mut Backward<'_>,
        [inp, dout, ends]: [&Activation; 3],
    ) -> Result<()> {
        let [lhs, rhs, offsets] = [dout, inp, ends].map(|x| x.buffer().clone());
        let features = [self.outputs, self.inputs];
        let of = move |slot: GradSlot| GroupedDweight {
            lhs,
            rhs,
            offsets,
            out: slot.buffer,
            features,
            accumulate: slot.accumulate,
        };
        pass.contribute(self.weight, &[inp, dout, ends], of)
    }
}

/// A normalisation of the residual stream, and the linear layer that reads it.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormedDense {
    pub(super) norm: Norm,
    pub(super) dense: Dense,
    /// Name under which what lies between is kept for backward, unless that computes it again.
    pub(super) normalised: &'static str,
}

impl NormedDense {
    /// Keeps what lies between, if backward does not compute it again.
    pub(super) fn keep(&self, ctx: &Context<'_>, saved: &mut Saved, normalised: &Activation) {
        if ctx.keep == Keep::ForBackward(Recompute::Nothing) {
            saved.put(self.normalised, normalised);
        }
    }

    pub(super) fn params(&self) -> Vec<ParamId> {
        [self.norm.params(), self.dense.params()].concat()
    }

    /// `[…, I]` to `[…, O]`
    pub(super) fn forward(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        saved: &mut Saved,
        name: &str,
    ) -> Result<Activation> {
        let normalised = self.norm.forward(ctx, inp)?;
        let out = self.dense.forward(ctx, &normalised, None, name)?;
        self.keep(ctx, saved, &normalised);
        Ok(out)
    }

    /// As [`Norm::backward_onto`].
    pub(super) fn backward(
        &self,
        pass: &mut Backward<'_>,
        [inp, dout]: [&Activation; 2],
        stream: Option<&Activation>,
    ) -> Result<Activation> {
        let ctx = pass.ctx;
        let normalised = match pass.saved.find(self.normalised) {
            Some(normalised) => normalised,
            None => self.norm.forward(ctx, inp)?,
        };
        let gradient = || ctx.start_sum("gradient", &self.dense.dinp(ctx, dout)?);
        // The ranks add it up while each computes its gradient of the weight. Alone, a rank holds less the other way round.
        let early = ctx.tensor.map(|_| gradient()).transpose()?;
        self.dense.gradients(pass, [&normalised, dout, dout])?;
        drop(normalised);
        let dnormalised = ctx.finish_sum(early.map_or_else(gradient, Ok)?)?;
        self.norm.backward_onto(pass, [inp, &dnormalised], stream)
    }
}

/// `wide` `[…, 2F]` to `active` `[…, F]`
pub(super) fn swiglu(ctx: &Context<'_>, [wide, active]: [&Activation; 2]) {
    ctx.enqueue(SwigluForward {
        inp: wide.buffer().clone(),
        out: active.buffer().clone(),
        channels: width(active),
    });
}

/// `wide` becomes its gradient, and the gradient of the output becomes the output again.
pub(super) fn swiglu_backward(ctx: &Context<'_>, [wide, dactive]: [&Activation; 2]) {
    ctx.enqueue(SwigluBackward {
        inp_dinp: wide.buffer().clone(),
        dout_out: dactive.buffer().clone(),
        channels: width(dactive),
    });
}

/// Rows of `inp` by their indices, or as they are, to `out`; of longer rows the last channels.
pub(super) fn index_rows([inp, out]: [&Activation; 2], index: Option<&Activation>) -> IndexRows {
    IndexRows {
        inp: inp.buffer().clone(),
        index: index.map(|index| index.buffer().clone()),
        per: 1,
        weights: None,
        out: out.buffer().clone(),
        widths: [width(inp), width(out)],
        accumulate: false,
    }
}

/// Channels of a row.
fn width(x: &Activation) -> usize {
    x.shape().last().copied().unwrap_or(1)
}

/// The shape of `like` with another number of channels.
pub(super) fn with_channels(like: &Activation, channels: usize) -> Vec<usize> {
    let outer = like.shape().split_last().map_or(&[][..], |(_, outer)| outer);
    [outer, &[channels]].concat()
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
    pub(super) fn mask(self, ctx: &Context<'_>, site: Site) -> Option<DropoutMask> {
        let samples = ctx.samples.filter(|_| self.rate > 0.0)?;
        let (seed, first) = (samples.seed, samples.first);
        Some(DropoutMask::new(seed, self.layer, site as u32, first, self.rate))
    }

    /// `residual + mask · inp`, for `[B, T, C]`: an activation of its own; none if nothing is dropped.
    pub(super) fn apply(
        self,
        ctx: &Context<'_>,
        site: Site,
        inp: &Activation,
        residual: Option<&Activation>,
    ) -> Result<Option<Activation>> {
        let Some(mask) = self.mask(ctx, site) else {
            return Ok(None);
        };
        let channels = inp.buffer().len() / ctx.own_rows().len();
        let out = ctx.lease("dropped", inp.shape())?;
        for (rows, first) in ctx.row_runs() {
            let run = |all: &Activation| all.buffer().slice(rows.start * channels..rows.end * channels);
            ctx.enqueue(ops::Dropout {
                inp: run(inp),
                residual: residual.map(run),
                out: run(&out),
                mask: mask.of_part(first as u32),
                positions: ctx.sample_positions(),
                channels,
            });
        }
        Ok(Some(out))
    }

    /// `residual`, plus the sum of what each rank has in `partial`, and a bias, where they are not dropped.
    pub(super) fn add_sums(
        self,
        ctx: &Context<'_>,
        site: Site,
        partial: Activation,
        residual: &Activation,
        bias: Option<ParamId>,
    ) -> Result<Activation> {
        let sum = ctx.summed_rows("partial sums", partial)?;
        let residual_here = self.mask(ctx, site).is_none().then_some(residual);
        let projected = ctx.lease("projected", sum.shape())?;
        ctx.enqueue(AddBiasResidual {
            inp: sum.buffer().clone(),
            bias: bias.map(|bias| ctx.params.get(bias)),
            residual: residual_here.map(|residual| residual.buffer().clone()),
            out: projected.buffer().clone(),
        });
        let out = self.apply(ctx, site, &projected, Some(residual))?;
        Ok(out.unwrap_or(projected))
    }

    /// The gradient of what [`DropoutLayer::apply`] was given.
    pub(super) fn gradient(self, ctx: &Context<'_>, site: Site, dout: &Activation) -> Result<Activation> {
        Ok(self.apply(ctx, site, dout, None)?.unwrap_or_else(|| dout.clone()))
    }
}
