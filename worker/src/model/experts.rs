//! A layer of experts in the place of a feed-forward layer (Shazeer et al. 2017; Jiang et al. 2024): a router sends each
//! position to the `k` experts with the highest scores, and their outputs are added up, weighted by the scores.
//!
//! norm → router → dispatch → experts → combine → residual. The router computes in f32. Rows go to experts in the order of
//! their positions; where ranks hold the experts together, a rank's experts take the rows of all these ranks, in rank order.
//! Without `capacity`, what becomes of a row does not depend on the others, so that forward has the same bits on any number
//! of ranks.
//!
//! The router's own losses are those of each micro-batch: with `T` positions, of which `n_e` chose expert `e` with mean
//! probability `p_e`, `aux_loss · E · Σ n_e/T · p_e` (Fedus et al. 2022; as transformers computes it for one layer) and
//! `z_loss` times the mean of the squared logarithms of softmax denominators (Zoph et al. 2022). A step's is the mean over its
//! micro-batches, summed over layers. It does not depend on which rank has which micro-batch.
//!
//! With tensor parallelism each expert is cut as a feed-forward layer is. Gradients of the scores are then sums over tensor
//! ranks too. They are not exchanged: what follows from them is linear, and the sum comes with that of the input's gradient
//! and with that of the router's weight.

use super::layers::{Dense, DropoutLayer, Norm, Site};
use super::{Activation, Context, GradSink, GradSlot, Keep, ParamId, RowCounts, Saved, TensorOps};
use crate::config::{Experts, Recompute};
use crate::device::{DType, DeviceError};
use crate::ops::{
    AddBiasResidual, Cast, ColumnSum, CombineBackward, Fill, GatherRows, GroupedDweight, GroupedLinear,
    LinearForward, MergedOrder, RouteBackward, RouteForward, Router, SortByExpert, SwigluBackward,
    SwigluForward,
    WeightLayout::{self, InOut, OutIn},
};

/// `x + dropout(Σ_k score_k · expert_k(norm(x)) + shared(norm(x)))`
#[derive(Clone, Debug)]
pub(super) struct ExpertLayer {
    pub(super) norm: Norm,
    /// Its weight is `[E, C]`.
    pub(super) router: Dense,
    /// To gate and up.
    pub(super) widen: ExpertDense,
    pub(super) narrow: ExpertDense,
    /// Every position goes through it too.
    pub(super) shared: Option<[Dense; 2]>,
    pub(super) all: Experts,
    /// Experts that this rank holds.
    pub(super) held: usize,
    pub(super) dropout: DropoutLayer,
}

/// A linear layer of each expert that this rank holds, `[O, I]` each; the rows of an expert are neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertDense {
    pub(super) weight: ParamId,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

impl ExpertDense {
    /// `[M, I]` to `[M, O]` with `layout` `OutIn`; with `InOut` the gradient `[M, O]` to that of the input.
    fn product(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        ends: &Activation,
        layout: WeightLayout,
    ) -> Result<Activation, DeviceError> {
        let features = match layout {
            OutIn => [self.inputs, self.outputs],
            InOut => [self.outputs, self.inputs],
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

    fn gradient(
        &self,
        ctx: &Context<'_>,
        [inp, dout]: [&Activation; 2],
        ends: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let [lhs, rhs, offsets] = [dout, inp, ends].map(|x| x.buffer().clone());
        let features = [self.outputs, self.inputs];
        ctx.contribute(grads, self.weight, &[inp, dout, ends], move |slot: GradSlot| {
            GroupedDweight {
                lhs,
                rhs,
                offsets,
                out: slot.buffer,
                features,
                accumulate: slot.accumulate,
            }
        })
    }
}

/// Where rows go, and with which weights they come back.
#[derive(Debug)]
struct Routes {
    /// `[R, E]`, not narrower than f32.
    logits: Activation,
    /// Experts of each position, `[R, k]`, i32.
    chosen: Activation,
    /// `[R, k]`
    weights: Activation,
    /// [`RouteForward::statistics`], and how many choices were kept.
    statistics: Activation,
    /// The choice `position·k + which` of each row that leaves, `[M]`, i32, by expert and position.
    choices: Activation,
    /// The row of each choice, `[R, k]`, i32; below 0: dropped.
    rows: Activation,
    /// Where the rows of each expert of this rank begin and end, `[E/ranks + 1]`, i32.
    ends: Activation,
    /// None: all experts are here.
    arrivals: Option<Arrivals>,
}

/// Rows that ranks exchange: `[M']` at the experts. They arrive by rank, and are computed by expert and rank.
#[derive(Debug)]
struct Arrivals {
    counts: RowCounts,
    /// Which of them by rank each row by expert is, and the other way round.
    by_expert: Activation,
    by_rank: Activation,
}

/// What forward keeps for backward, beside the layer's input.
#[derive(Debug)]
struct Routed {
    routes: Routes,
    /// Rows of this rank's experts, `[M', C]`.
    inputs: Activation,
    /// `[M', 2F]`; none: backward makes them again.
    wide: Option<Activation>,
    /// Outputs for this rank's positions, `[M, C]`.
    outputs: Activation,
}

const NORMALISED: &str = "feed-forward normalised";

impl ExpertLayer {
    pub(super) fn params(&self) -> Vec<ParamId> {
        let shared = self.shared.iter().flatten().map(|dense| dense.weight);
        let own = [self.widen.weight, self.narrow.weight, self.router.weight];
        self.norm.params().into_iter().chain(shared).chain(own).collect()
    }

    /// `[R, C]` to `[R, C]`. Keeps of each position `C` numbers and its logits, and of each row of an expert `2·C + 2·F`.
    pub(super) fn forward(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        let normalised = self.norm.forward(ctx, inp)?;
        let routed = self.compute(ctx, &normalised)?;
        let mut mixed = ctx.lease("mixed", &[ctx.rows(), self.router.inputs])?;
        ctx.enqueue(GatherRows {
            weights: Some(routed.routes.weights.buffer().clone()),
            ..gather([&routed.outputs, &routed.routes.rows, &mixed], 1)
        });
        if let Some([widen, narrow]) = &self.shared {
            let wide = widen.forward(ctx, &normalised, None, "shared wide")?;
            let active = activated(ctx, &wide)?;
            mixed = narrow.forward(ctx, &active, Some(&mixed), "mixed")?;
            if ctx.keep != Keep::ForBackward(Recompute::Selective) {
                ctx.save(saved, "shared wide", &wide);
            }
        }
        if ctx.keep == Keep::ForBackward(Recompute::Nothing) {
            saved.put(NORMALISED, &normalised);
        }
        drop(normalised);
        Self::keep(ctx, inp, routed, saved);
        self.dropout
            .add_sums(ctx, Site::FeedForwardResidual, mixed, inp, None)
    }

    /// What forward keeps, without its output.
    pub(super) fn recompute(
        &self,
        ctx: &Context<'_>,
        inp: &Activation,
        saved: &mut Saved,
    ) -> Result<(), DeviceError> {
        let normalised = self.norm.forward(ctx, inp)?;
        Self::keep(ctx, inp, self.compute(ctx, &normalised)?, saved);
        Ok(())
    }

    fn keep(ctx: &Context<'_>, inp: &Activation, mut routed: Routed, saved: &mut Saved) {
        if let Keep::ForBackward(recompute) = ctx.keep {
            saved.put("feed-forward input", inp);
            routed.wide = routed.wide.filter(|_| recompute != Recompute::Selective);
            saved.state = Some(Box::new(routed));
        }
    }

    fn compute(&self, ctx: &Context<'_>, normalised: &Activation) -> Result<Routed, DeviceError> {
        let routes = self.route(ctx, normalised)?;
        let leaving = picked(ctx, [normalised, &routes.choices], self.all.top_k)?;
        let inputs = to_experts(ctx, leaving, &routes)?;
        let wide = self.widen.product(ctx, &inputs, &routes.ends, OutIn)?;
        let active = activated(ctx, &wide)?;
        let made = self.narrow.product(ctx, &active, &routes.ends, OutIn)?;
        drop(active);
        Ok(Routed {
            outputs: to_positions(ctx, made, &routes)?,
            routes,
            inputs,
            wide: Some(wide),
        })
    }

    fn router(&self) -> Router {
        Router {
            experts: self.all.count,
            top_k: self.all.top_k,
            score: self.all.score,
            normalized: self.all.top_k > 1,
        }
    }

    /// Most rows that an expert takes of this rank's positions, where that is bounded.
    fn capacity(&self, ctx: &Context<'_>) -> Option<usize> {
        let mean = (ctx.rows() * self.all.top_k) as f64 / self.all.count as f64;
        let rows = |times: f64| ((mean * times).ceil() as usize).clamp(1, ctx.rows());
        self.all.capacity.map(rows)
    }

    /// The most rows of this rank's positions that this number of experts can get.
    fn most_rows(&self, ctx: &Context<'_>, experts: usize) -> usize {
        let capacity = self.capacity(ctx).unwrap_or(ctx.rows());
        (ctx.rows() * self.all.top_k.min(experts)).min(experts * capacity)
    }

    /// Scores all positions, chooses experts, and puts the choices in the order of the experts.
    fn route(&self, ctx: &Context<'_>, normalised: &Activation) -> Result<Routes, DeviceError> {
        let (rows, Experts { count, top_k, .. }) = (ctx.rows(), self.all);
        let i32s = |name, shape: &[usize]| ctx.pool.lease(name, DType::I32, shape);
        let logits = self.logits(ctx, normalised)?;
        let chosen = i32s("choices", &[rows, top_k])?;
        let weights = ctx.lease_stat("weights", &[rows, top_k])?;
        let statistics = ctx.lease_stat("statistics of the router", &[2 * count + 2])?;
        ctx.enqueue(RouteForward {
            logits: logits.buffer().clone(),
            bias: None,
            experts: chosen.buffer().clone(),
            weights: weights.buffer().clone(),
            statistics: statistics.buffer().slice(0..2 * count + 1),
            router: self.router(),
        });
        let leaving = self.most_rows(ctx, count);
        let choices = i32s("choices by expert", &[leaving])?;
        let placed = i32s("rows of choices", &[rows, top_k])?;
        let counts = i32s("rows for each expert", &[count])?;
        let mut ends = i32s("ends", &[count + 1])?;
        ctx.enqueue(SortByExpert {
            experts: chosen.buffer().clone(),
            capacity: self.capacity(ctx),
            counts: counts.buffer().clone(),
            offsets: ends.buffer().clone(),
            slots: choices.buffer().clone(),
            rows: placed.buffer().clone(),
        });
        self.report(ctx, &statistics, [&placed, &choices])?;
        let mut arrivals = None;
        if let Some(group) = ctx.experts {
            let received = i32s("rows from each rank", &[group.size(), self.held])?;
            let counts = group.count(&counts, &received, [leaving, self.most_rows(ctx, self.held)])?;
            let order = MergedOrder::new(&counts.received, self.held);
            let uploaded = |name, mut numbers: Vec<i32>, len: usize| {
                numbers.resize(len, -1);
                let lease = i32s(name, &[len])?;
                ctx.compute.upload(lease.buffer(), &numbers);
                Ok::<_, DeviceError>(lease)
            };
            let arriving = group.size() * self.most_rows(ctx, self.held);
            ends = uploaded("ends", order.offsets, self.held + 1)?;
            arrivals = Some(Arrivals {
                counts,
                by_expert: uploaded("rows by expert", order.received, arriving)?,
                by_rank: uploaded("rows by rank", order.rows, arriving)?,
            });
        }
        Ok(Routes {
            logits,
            chosen,
            weights,
            statistics,
            choices,
            rows: placed,
            ends,
            arrivals,
        })
    }

    /// `[R, E]`, in f32 whatever the type of activations.
    fn logits(&self, ctx: &Context<'_>, normalised: &Activation) -> Result<Activation, DeviceError> {
        let logits = ctx.lease_stat("logits of the router", &[ctx.rows(), self.all.count])?;
        let weight = ctx.params.get(self.router.weight);
        let weight = Activation::borrowed(weight, vec![self.all.count, self.router.inputs]);
        let (inp, weight) = (in_f32(ctx, normalised)?, in_f32(ctx, &weight)?);
        ctx.enqueue(LinearForward {
            inp: inp.buffer().clone(),
            weight: weight.buffer().clone(),
            bias: None,
            residual: None,
            out: logits.buffer().clone(),
            shape: self.router.shape(normalised),
        });
        Ok(logits)
    }

    /// Reports the statistics, with the number of choices that were kept. Then those are of all context ranks.
    fn report(
        &self,
        ctx: &Context<'_>,
        statistics: &Activation,
        [rows, choices]: [&Activation; 2],
    ) -> Result<(), DeviceError> {
        let len = statistics.buffer().len();
        let out = statistics.buffer().slice(len - 1..len);
        if self.all.capacity.is_none() {
            let value = (ctx.rows() * self.all.top_k) as f64;
            ctx.enqueue(Fill { out, value });
        } else {
            // Each row counts as 1, and what was dropped has none.
            let ones = ctx.lease_stat("ones", &[choices.buffer().len(), 1])?;
            let kept = ctx.lease_stat("kept choices", &[ctx.rows(), 1])?;
            let (all, value) = (ones.buffer().clone(), 1.0);
            ctx.enqueue(Fill { out: all, value });
            ctx.enqueue(gather([&ones, rows, &kept], 1));
            let (x, accumulate) = (kept.buffer().clone(), false);
            ctx.enqueue(ColumnSum { x, out, accumulate });
        }
        // Tensor ranks count the same.
        if let (Some(all), 0) = (ctx.routers, ctx.tensor_place().0) {
            let (x, first) = (statistics.buffer().clone(), self.dropout.layer as usize * len);
            let out = all.slice(first..first + len);
            ctx.enqueue(Cast { x, out });
        }
        let group = ctx.context_group;
        group.map_or(Ok(()), |group| group.all_reduce(statistics, "loads of experts"))
    }

    /// From the gradient of the output to that of the input, in place unless gradients are put off.
    pub(super) fn backward(
        &self,
        ctx: &Context<'_>,
        saved: &mut Saved,
        stream: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<Activation, DeviceError> {
        let inp = saved.take("feed-forward input")?;
        let state = saved
            .state
            .take()
            .and_then(|state| state.downcast::<Routed>().ok());
        let nothing =
            || DeviceError::Upstream("backward wants what forward did not save of the router".into());
        let routed = *state.ok_or_else(nothing)?;
        let (routes, inputs, outputs) = (routed.routes, routed.inputs, routed.outputs);
        let normalised = saved.find(NORMALISED);
        let normalised = normalised.map_or_else(|| self.norm.forward(ctx, &inp), Ok)?;
        let own = self.dropout.gradient(ctx, Site::FeedForwardResidual, stream)?;
        let dmixed = ctx.gathered_rows("gradient of the experts", &own)?;
        drop(own);
        let dlogits = self.dlogits(ctx, &routes, [&outputs, &dmixed])?;
        self.router
            .gradients(ctx, [&normalised, &dlogits, &dlogits], grads)?;
        let dout = to_experts(ctx, outputs, &routes)?;
        let again = || self.widen.product(ctx, &inputs, &routes.ends, OutIn);
        let wide = routed.wide.map_or_else(again, Ok)?;
        let dactive = self.narrow.product(ctx, &dout, &routes.ends, InOut)?;
        swiglu_backward(ctx, [&wide, &dactive]);
        self.narrow
            .gradient(ctx, [&dactive, &dout], &routes.ends, grads)?;
        drop((dactive, dout));
        self.widen.gradient(ctx, [&inputs, &wide], &routes.ends, grads)?;
        drop(inputs);
        let drows = self.widen.product(ctx, &wide, &routes.ends, InOut)?;
        drop(wide);
        let drows = to_positions(ctx, drows, &routes)?;
        let shared = self.shared_backward(ctx, saved, [&normalised, &dmixed], grads)?;
        drop((normalised, dmixed));
        let dnormalised = self.router.dinp(ctx, &dlogits)?;
        ctx.enqueue(GatherRows {
            accumulate: true,
            ..gather([&drows, &routes.rows, &dnormalised], 1)
        });
        if let Some(shared) = shared {
            ctx.enqueue(AddBiasResidual {
                inp: dnormalised.buffer().clone(),
                bias: None,
                residual: Some(shared.buffer().clone()),
                out: dnormalised.buffer().clone(),
            });
        }
        let dnormalised = ctx.summed_rows("gradient", dnormalised)?;
        self.norm
            .backward_onto(ctx, [&inp, &dnormalised], Some(stream), grads)
    }

    /// Gradients of the shared experts; that of their input, if there are any.
    fn shared_backward(
        &self,
        ctx: &Context<'_>,
        saved: &mut Saved,
        [inp, dout]: [&Activation; 2],
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>, DeviceError> {
        let Some([widen, narrow]) = &self.shared else {
            return Ok(None);
        };
        let wide = saved.find("shared wide");
        let wide = wide.map_or_else(|| widen.forward(ctx, inp, None, "shared wide"), Ok)?;
        let dactive = narrow.dinp(ctx, dout)?;
        swiglu_backward(ctx, [&wide, &dactive]);
        narrow.gradients(ctx, [&dactive, dout, dout], grads)?;
        widen.gradients(ctx, [inp, &wide, &wide], grads)?;
        widen.dinp(ctx, &wide).map(Some)
    }

    /// The gradient of the logits, `[R, E]`, that of the router's own losses included. The outputs of the experts become their
    /// gradients.
    fn dlogits(
        &self,
        ctx: &Context<'_>,
        routes: &Routes,
        [outputs, dmixed]: [&Activation; 2],
    ) -> Result<Activation, DeviceError> {
        let dweights = ctx.lease_stat("gradient of the weights", routes.weights.shape())?;
        ctx.enqueue(CombineBackward {
            dout: dmixed.buffer().clone(),
            slots: routes.choices.buffer().clone(),
            weights: routes.weights.buffer().clone(),
            inp_dinp: outputs.buffer().clone(),
            dweights: dweights.buffer().clone(),
            channels: self.router.inputs,
        });
        // Tensor ranks add up what they make: the losses are one rank's.
        let is_counted = f64::from(u8::from(ctx.tensor_place().0 == 0));
        let [aux_loss, z_loss] = [self.all.aux_loss, self.all.z_loss]
            .map(|factor| f64::from(factor) * ctx.position_weight * is_counted);
        let positions = ctx.rows() * ctx.context_group.map_or(1, TensorOps::size);
        let count = self.all.count;
        ctx.enqueue(RouteBackward {
            logits_dlogits: routes.logits.buffer().clone(),
            experts: routes.chosen.buffer().clone(),
            dweights: dweights.buffer().clone(),
            load: Some(routes.statistics.buffer().slice(0..count)),
            balance: (aux_loss * count as f64 / positions as f64) as f32,
            z: z_loss as f32,
            router: self.router(),
        });
        let dlogits = ctx.lease("gradient of the logits", routes.logits.shape())?;
        let (x, out) = (routes.logits.buffer().clone(), dlogits.buffer().clone());
        ctx.enqueue(Cast { x, out });
        Ok(dlogits)
    }
}

/// Rows to the ranks of their experts, and there in the order of the experts.
fn to_experts(ctx: &Context<'_>, rows: Activation, routes: &Routes) -> Result<Activation, DeviceError> {
    let (Some(group), Some(arrivals)) = (ctx.experts, &routes.arrivals) else {
        return Ok(rows);
    };
    let shape = [arrivals.by_rank.buffer().len(), rows.shape()[1]];
    let arrived = ctx.lease("rows by rank", &shape)?;
    group.exchange([&rows, &arrived], &arrivals.counts, true)?;
    drop(rows);
    picked(ctx, [&arrived, &arrivals.by_expert], 1)
}

/// The way back.
fn to_positions(ctx: &Context<'_>, rows: Activation, routes: &Routes) -> Result<Activation, DeviceError> {
    let (Some(group), Some(arrivals)) = (ctx.experts, &routes.arrivals) else {
        return Ok(rows);
    };
    let leaving = picked(ctx, [&rows, &arrivals.by_rank], 1)?;
    drop(rows);
    let shape = [routes.choices.buffer().len(), leaving.shape()[1]];
    let back = ctx.lease("rows of choices", &shape)?;
    group.exchange([&leaving, &back], &arrivals.counts, false)?;
    Ok(back)
}

/// Rows of `inp` by their indices.
fn picked(ctx: &Context<'_>, [inp, index]: [&Activation; 2], per: usize) -> Result<Activation, DeviceError> {
    let out = ctx.lease("rows of experts", &[index.buffer().len(), inp.shape()[1]])?;
    ctx.enqueue(gather([inp, index, &out], per));
    Ok(out)
}

/// `out`, `[…, C]`, from rows of `inp` by their indices, of which `per` are of the same row.
fn gather([inp, index, out]: [&Activation; 3], per: usize) -> GatherRows {
    GatherRows {
        inp: inp.buffer().clone(),
        index: index.buffer().clone(),
        per,
        weights: None,
        out: out.buffer().clone(),
        channels: out.shape()[1],
        accumulate: false,
    }
}

/// The numbers in f32, or as they are where they are not narrower.
fn in_f32(ctx: &Context<'_>, narrow: &Activation) -> Result<Activation, DeviceError> {
    if ctx.dtype != DType::Bf16 {
        return Ok(narrow.clone());
    }
    let wide = ctx.lease_stat("in f32", narrow.shape())?;
    let (x, out) = (narrow.buffer().clone(), wide.buffer().clone());
    ctx.enqueue(Cast { x, out });
    Ok(wide)
}

fn activated(ctx: &Context<'_>, wide: &Activation) -> Result<Activation, DeviceError> {
    let channels = wide.shape()[1] / 2;
    let active = ctx.lease("activated", &[wide.row_count(), channels])?;
    let (inp, out) = (wide.buffer().clone(), active.buffer().clone());
    ctx.enqueue(SwigluForward { inp, out, channels });
    Ok(active)
}

/// `wide` becomes its gradient, and the gradient of the output becomes the output again.
fn swiglu_backward(ctx: &Context<'_>, [wide, dactive]: [&Activation; 2]) {
    ctx.enqueue(SwigluBackward {
        inp_dinp: wide.buffer().clone(),
        dout_out: dactive.buffer().clone(),
        channels: dactive.shape()[1],
    });
}
