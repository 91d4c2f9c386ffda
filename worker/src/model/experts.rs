//! A layer of experts in the place of a feed-forward layer (Shazeer et al. 2017; Jiang et al. 2024): a router sends each
//! position to the `k` experts with the highest scores, and their outputs are added up, weighted by the scores.
//!
//! norm → router → dispatch → experts → combine → residual. The router computes in f32. Rows go to experts in the order of
//! their positions; where ranks hold the experts together, a rank's experts take the rows of all these ranks, in rank order.
//! Without `capacity`, and in evaluation, what becomes of a row does not depend on the others, so that forward has the same
//! bits on any number of ranks. Rows that fill up a short last batch go to experts like others, and count in loads and losses.
//!
//! The router's own losses are those of each micro-batch: with `T` positions, of which `n_e` chose expert `e` with mean
//! probability `p_e`, `aux_loss · E · Σ n_e/T · p_e` (Fedus et al. 2022; as transformers computes it for one layer) and
//! `z_loss` times the mean of the squared logarithms of softmax denominators (Zoph et al. 2022). A step's is the mean over its
//! micro-batches, summed over layers. It does not depend on which rank has which micro-batch.
//!
//! With tensor parallelism each expert is cut as a feed-forward layer is. Gradients of the scores are then sums over tensor
//! ranks too. They are not exchanged: what follows from them is linear, and the sum comes with that of the input's gradient
//! and with that of the router's weight.

use super::layers::{Dense, DropoutLayer, Norm, Site, index_rows, swiglu, swiglu_backward};
use super::transformer::SecondLayer;
use super::{Activation, Backward, Context, GroupOps, Keep, ParamId, Saved};
use crate::config::{Experts, Recompute};
use crate::device::{DType, DeviceError, Result};
use crate::ops::WeightLayout::{InOut, OutIn};
use crate::ops::{
    AddBiasResidual, Cast, CombineBackward, IndexRows, LinearForward, MergedOrder, RouteBackward,
    RouteForward, Router, SortByExpert, inverse,
};

/// `x + dropout(Σ_k score_k · expert_k(norm(x)) + shared(norm(x)))`
#[derive(Clone, Debug)]
pub(super) struct ExpertLayer {
    pub(super) norm: Norm,
    /// Its weight is `[E, C]`.
    pub(super) router: Dense,
    /// Of each expert that this rank holds: to gate and up.
    pub(super) widen: Dense,
    pub(super) narrow: Dense,
    /// Every position goes through it too.
    pub(super) shared: Option<[Dense; 2]>,
    pub(super) config: Experts,
    /// Experts that this rank holds.
    pub(super) held: usize,
    pub(super) dropout: DropoutLayer,
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
    /// [`RouteForward::statistics`]
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
    /// How many go to each rank, and come from each.
    counts: [Vec<usize>; 2],
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

impl SecondLayer for ExpertLayer {
    fn params(&self) -> Vec<ParamId> {
        let shared = self.shared.iter().flatten().map(|dense| dense.weight);
        let own = [self.widen.weight, self.narrow.weight, self.router.weight];
        self.norm.params().into_iter().chain(shared).chain(own).collect()
    }

    /// Keeps of each position `C` numbers and its logits, and of each row of an expert `2·C + 2·F`.
    fn forward(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<Activation> {
        let normalised = self.norm.forward(ctx, inp)?;
        let routed = self.compute(ctx, &normalised)?;
        let mut mixed = ctx.lease("mixed", &[ctx.rows(), self.router.inputs])?;
        ctx.enqueue(IndexRows {
            weights: Some(routed.routes.weights.buffer().clone()),
            ..index_rows([&routed.outputs, &mixed], Some(&routed.routes.rows))
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

    fn recompute(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<()> {
        let normalised = self.norm.forward(ctx, inp)?;
        Self::keep(ctx, inp, self.compute(ctx, &normalised)?, saved);
        Ok(())
    }

    fn backward(&self, pass: &mut Backward<'_>, stream: &Activation) -> Result<Activation> {
        let ctx = pass.ctx;
        let inp = pass.saved.take("feed-forward input")?;
        let state = (pass.saved.state)
            .take()
            .and_then(|state| state.downcast::<Routed>().ok());
        let nothing =
            || DeviceError::Upstream("backward wants what forward did not save of the router".into());
        let Routed {
            routes,
            inputs,
            wide,
            outputs,
        } = *state.ok_or_else(nothing)?;
        let normalised = pass.saved.find(NORMALISED);
        let normalised = normalised.map_or_else(|| self.norm.forward(ctx, &inp), Ok)?;
        let own = self.dropout.gradient(ctx, Site::FeedForwardResidual, stream)?;
        let dmixed = ctx.gathered_rows("gradient of the experts", &own)?;
        drop(own);
        let dlogits = self.dlogits(ctx, &routes, [&outputs, &dmixed])?;
        self.router.gradients(pass, [&normalised, &dlogits, &dlogits])?;
        let dout = to_experts(ctx, outputs, &routes)?;
        let (ends, widen, narrow) = (&routes.ends, &self.widen, &self.narrow);
        let again = || widen.of_experts(ctx, [&inputs, ends], OutIn);
        let wide = wide.map_or_else(again, Ok)?;
        let dactive = narrow.of_experts(ctx, [&dout, ends], InOut)?;
        swiglu_backward(ctx, [&wide, &dactive]);
        narrow.gradients_of_experts(pass, [&dactive, &dout, ends])?;
        drop((dactive, dout));
        widen.gradients_of_experts(pass, [&inputs, &wide, ends])?;
        drop(inputs);
        let drows = widen.of_experts(ctx, [&wide, ends], InOut)?;
        drop(wide);
        let drows = to_positions(ctx, drows, &routes)?;
        let shared = self.shared_backward(pass, [&normalised, &dmixed])?;
        drop((normalised, dmixed));
        let dnormalised = self.router.dinp(ctx, &dlogits)?;
        ctx.enqueue(IndexRows {
            accumulate: true,
            ..index_rows([&drows, &dnormalised], Some(&routes.rows))
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
        self.norm.backward_onto(pass, [&inp, &dnormalised], Some(stream))
    }
}

impl ExpertLayer {
    fn keep(ctx: &Context<'_>, inp: &Activation, mut routed: Routed, saved: &mut Saved) {
        if let Keep::ForBackward(recompute) = ctx.keep {
            saved.put("feed-forward input", inp);
            routed.wide = routed.wide.filter(|_| recompute != Recompute::Selective);
            saved.state = Some(Box::new(routed));
        }
    }

    fn compute(&self, ctx: &Context<'_>, normalised: &Activation) -> Result<Routed> {
        let routes = self.route(ctx, normalised)?;
        let leaving = picked(ctx, [normalised, &routes.choices], self.config.top_k)?;
        let inputs = to_experts(ctx, leaving, &routes)?;
        let wide = self.widen.of_experts(ctx, [&inputs, &routes.ends], OutIn)?;
        let active = activated(ctx, &wide)?;
        let made = self.narrow.of_experts(ctx, [&active, &routes.ends], OutIn)?;
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
            experts: self.config.count,
            top_k: self.config.top_k,
            score: self.config.score,
            normalized: self.config.top_k > 1,
        }
    }

    /// Most rows that an expert takes of this rank's positions: all where that is not bounded, or no backward follows.
    fn capacity(&self, ctx: &Context<'_>) -> usize {
        let bounded = self.config.capacity;
        let bounded = bounded.filter(|_| matches!(ctx.keep, Keep::ForBackward(_)));
        let mean = (ctx.rows() * self.config.top_k) as f64 / self.config.count as f64;
        let rows = |times: f64| ((mean * times).ceil() as usize).clamp(1, ctx.rows());
        bounded.map_or(ctx.rows(), rows)
    }

    /// The most rows of this rank's positions that this number of experts can get.
    fn most_rows(&self, ctx: &Context<'_>, experts: usize) -> usize {
        (ctx.rows() * self.config.top_k.min(experts)).min(experts * self.capacity(ctx))
    }

    /// Scores all positions, chooses experts, and puts the choices in the order of the experts.
    fn route(&self, ctx: &Context<'_>, normalised: &Activation) -> Result<Routes> {
        let (positions, Experts { count, top_k, .. }) = (ctx.rows(), self.config);
        let i32s = |name, shape: &[usize]| ctx.pool.lease(name, DType::I32, shape);
        let logits = ctx.lease_stat("logits of the router", &[positions, count])?;
        ctx.enqueue(LinearForward {
            inp: normalised.buffer().clone(),
            weight: ctx.params.get(self.router.weight),
            bias: None,
            residual: None,
            out: logits.buffer().clone(),
            shape: self.router.shape(normalised),
            exact: true,
        });
        let chosen = i32s("choices", &[positions, top_k])?;
        let weights = ctx.lease_stat("weights", &[positions, top_k])?;
        let statistics = ctx.lease_stat("statistics of the router", &[3 * count + 1])?;
        ctx.enqueue(RouteForward {
            logits: logits.buffer().clone(),
            experts: chosen.buffer().clone(),
            weights: weights.buffer().clone(),
            statistics: statistics.buffer().clone(),
            capacity: self.capacity(ctx),
            router: self.router(),
        });
        self.report(ctx, &statistics)?;
        let leaving = self.most_rows(ctx, count);
        let choices = i32s("choices by expert", &[leaving])?;
        let rows = i32s("rows of choices", &[positions, top_k])?;
        let counts = i32s("rows for each expert", &[count])?;
        let mut ends = i32s("ends", &[count + 1])?;
        ctx.enqueue(SortByExpert {
            experts: chosen.buffer().clone(),
            capacity: self.capacity(ctx),
            counts: counts.buffer().clone(),
            offsets: ends.buffer().clone(),
            slots: choices.buffer().clone(),
            rows: rows.buffer().clone(),
        });
        let mut arrivals = None;
        if let Some(group) = ctx.experts {
            let (ranks, most) = (group.size(), self.most_rows(ctx, self.held));
            let received = i32s("rows from each rank", &[ranks, self.held])?;
            let counts = group.count([&counts, &received], [leaving, most])?;
            let order = MergedOrder::new(&counts[1], self.held);
            let padded = |mut indices: Vec<i32>| {
                indices.resize(ranks * most, -1);
                ctx.upload("order of arrivals", &indices)
            };
            ends = ctx.upload("ends", &order.offsets)?;
            let sums = |numbers: &Vec<i32>| {
                let ranks = numbers.chunks(numbers.len() / ranks);
                ranks.map(|rows| rows.iter().sum::<i32>() as usize).collect()
            };
            arrivals = Some(Arrivals {
                counts: counts.each_ref().map(sums),
                by_rank: padded(inverse(&order.received))?,
                by_expert: padded(order.received)?,
            });
        }
        Ok(Routes {
            logits,
            chosen,
            weights,
            statistics,
            choices,
            rows,
            ends,
            arrivals,
        })
    }

    /// Reports the statistics. Then they are those of all context ranks.
    fn report(&self, ctx: &Context<'_>, statistics: &Activation) -> Result<()> {
        // Tensor ranks count the same.
        if let (Some(all), 0) = (ctx.routers, ctx.tensor_place().0) {
            let (x, layer) = (statistics.buffer().clone(), self.dropout.layer as usize);
            let out = all.slice(layer * x.len()..(layer + 1) * x.len());
            ctx.enqueue(Cast { x, out });
        }
        let group = ctx.context_group;
        group.map_or(Ok(()), |group| group.all_reduce(statistics, "loads of experts"))
    }

    /// Gradients of the shared experts; that of their input, if there are any.
    fn shared_backward(
        &self,
        pass: &mut Backward<'_>,
        [inp, dout]: [&Activation; 2],
    ) -> Result<Option<Activation>> {
        let Some([widen, narrow]) = &self.shared else {
            return Ok(None);
        };
        let ctx = pass.ctx;
        let wide = pass.saved.find("shared wide");
        let wide = wide.map_or_else(|| widen.forward(ctx, inp, None, "shared wide"), Ok)?;
        let dactive = narrow.dinp(ctx, dout)?;
        swiglu_backward(ctx, [&wide, &dactive]);
        narrow.gradients(pass, [&dactive, dout, dout])?;
        widen.gradients(pass, [inp, &wide, &wide])?;
        widen.dinp(ctx, &wide).map(Some)
    }

    /// The gradient of the logits, `[R, E]`, that of the router's own losses included. The outputs of the experts become their
    /// gradients.
    fn dlogits(
        &self,
        ctx: &Context<'_>,
        routes: &Routes,
        [outputs, dmixed]: [&Activation; 2],
    ) -> Result<Activation> {
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
        let [aux_loss, z_loss] = [self.config.aux_loss, self.config.z_loss]
            .map(|factor| f64::from(factor) * ctx.position_weight * is_counted);
        let positions = ctx.rows() * ctx.context_group.map_or(1, GroupOps::size);
        let count = self.config.count;
        ctx.enqueue(RouteBackward {
            logits_dlogits: routes.logits.buffer().clone(),
            experts: routes.chosen.buffer().clone(),
            dweights: dweights.buffer().clone(),
            load: routes.statistics.buffer().slice(0..count),
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
fn to_experts(ctx: &Context<'_>, rows: Activation, routes: &Routes) -> Result<Activation> {
    let (
        Some(group),
        Some(Arrivals {
            counts, by_expert, ..
        }),
    ) = (ctx.experts, &routes.arrivals)
    else {
        return Ok(rows);
    };
    let arrived = ctx.lease("rows by rank", &[by_expert.buffer().len(), rows.shape()[1]])?;
    group.exchange([&rows, &arrived], [&counts[0], &counts[1]])?;
    drop(rows);
    picked(ctx, [&arrived, by_expert], 1)
}

/// The way back.
fn to_positions(ctx: &Context<'_>, rows: Activation, routes: &Routes) -> Result<Activation> {
    let (Some(group), Some(Arrivals { counts, by_rank, .. })) = (ctx.experts, &routes.arrivals) else {
        return Ok(rows);
    };
    let leaving = picked(ctx, [&rows, by_rank], 1)?;
    drop(rows);
    let back = ctx.lease(
        "rows of choices",
        &[routes.choices.buffer().len(), leaving.shape()[1]],
    )?;
    group.exchange([&leaving, &back], [&counts[1], &counts[0]])?;
    Ok(back)
}

/// Rows of `inp` by their indices, of which `per` are of the same row.
fn picked(ctx: &Context<'_>, [inp, index]: [&Activation; 2], per: usize) -> Result<Activation> {
    let out = ctx.lease("rows of experts", &[index.buffer().len(), inp.shape()[1]])?;
    let picked = index_rows([inp, &out], Some(index));
    ctx.enqueue(IndexRows { per, ..picked });
    Ok(out)
}

fn activated(ctx: &Context<'_>, wide: &Activation) -> Result<Activation> {
    let active = ctx.lease("activated", &[wide.row_count(), wide.shape()[1] / 2])?;
    swiglu(ctx, [wide, &active]);
    Ok(active)
}
