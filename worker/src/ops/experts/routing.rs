//! The router of a layer of experts: scores of the experts for each token, the best of them with their weights, and what the
//! auxiliary losses need.
//!
//! Scores are a softmax of the logits (Shazeer et al. 2017; Fedus et al. 2022), or a sigmoid of each (DeepSeek-AI 2024,
//! DeepSeek-V3), in f32. Both auxiliary losses only add to the gradient of the logits:
//! - load balancing, `α·E·Σ_e f_e·P_e` (Fedus et al. 2022, equations 4 to 6; as `transformers` for Mixtral `f_e` is summed
//!   over the `K` choices): `f_e` is the share of tokens that chose expert `e`, `P_e` the mean of its probability;
//! - router z-loss, `β/R·Σ_r (ln Σ_e e^logits[r, e])²` (Zoph et al. 2022, equation 5).
//!
//! All of it is little beside the experts' products: one thread computes it on a CPU.

use super::super::cpu::kernel::{Real, kernel, ln, max_of, runs_in, sum_map, update, update2};
use super::super::cpu::stored::Stored;
use super::super::cuda::plan::{Call, Plan, Scratch, act_defines, count, element, expect_dtype, kernels};
use super::super::swiglu::sigmoid;
use super::super::{Cpu, Isa, Operation, expect_indices, expect_lens};
pub use crate::config::RouterScore;
use crate::cuda::{Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};

/// How experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Router {
    /// Experts `E`.
    pub experts: usize,
    /// Experts of a token, `K`: those with the highest scores, of equal ones that with the lowest number.
    pub top_k: usize,
    /// Scores of logits.
    pub score: RouterScore,
    /// The weights of a token are its scores divided by their sum. Else they are the scores.
    pub normalized: bool,
}

/// Chooses the experts of each token, and weighs them by their scores.
#[derive(Clone, Debug)]
pub struct RouteForward {
    /// `[R, E]`
    pub logits: Buffer,
    /// `[R, K]`, i32: the best first
    pub experts: Buffer,
    /// `[R, K]`, f32 (f64 if the logits are)
    pub weights: Buffer,
    /// `[3E + 1]`, as `weights`: slots of each expert; `Σ_r` of each expert's probability, which is its score divided by the
    /// token's sum of scores; `Σ_r (ln Σ_e e^logits[r, e])²`; slots of each expert that are not dropped
    pub statistics: Buffer,
    /// Most slots of an expert, of which the others are dropped: [`super::SortByExpert`].
    pub capacity: usize,
    /// How.
    pub router: Router,
}

impl Operation for RouteForward {
    const NAME: &'static str = "route_forward";

    runs_in!(logits);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.check()?;
        expect_dtype(DType::F32, &[&self.weights, &self.statistics])?;
        let mut scratch = Scratch::default();
        let row_sums = scratch.take(rows * 2 * size_of::<f32>());
        let call = |kernel, arrays| self.router.call(kernel, &self.logits, arrays);
        let route = call(Self::NAME, 1)?
            .read([&self.logits])
            .write([&self.experts, &self.weights])
            .scratch([row_sums]);
        let statistics = call("route_statistics", 0)?.read([&self.logits, &self.experts]);
        let statistics = Call {
            grid: Grid::linear(self.router.experts as u32 + 1, THREADS),
            ..statistics
                .scratch([row_sums])
                .write([&self.statistics])
                .u32([self.capacity.min(rows) as u32])
        };
        Ok(scratch.plan(vec![route, statistics]))
    }
}

impl RouteForward {
    /// Refuses sizes that do not fit each other; the number of rows.
    fn check(&self) -> Result<usize, DeviceError> {
        let Router { experts, top_k, .. } = self.router;
        let rows = self.router.rows(Self::NAME, [&self.logits, &self.experts])?;
        let sizes = [
            ("weights", &self.weights, rows * top_k),
            ("statistics", &self.statistics, 3 * experts + 1),
        ];
        expect_lens(Self::NAME, &sizes).map(|()| rows)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let isa = cpu.isa();
        let Router { experts, top_k, .. } = self.router;
        let logits = self.logits.host::<S>()?;
        let mut chosen = self.experts.host_mut::<i32>()?;
        let mut weights = self.weights.host_mut::<S::Real>()?;
        let mut statistics = self.statistics.host_mut::<S::Real>()?;
        statistics.fill(S::Real::ZERO);
        let weights = weights.chunks_exact_mut(top_k);
        let slots = chosen.chunks_exact_mut(top_k).zip(weights);
        let mut row = RowScores::of(self.router);
        for (logits, (chosen, weights)) in logits.chunks_exact(experts).zip(slots) {
            S::read(isa, logits, |logits| row.score(isa, logits));
            row.choose(chosen);
            row.weigh(chosen, weights);
            for &expert in &*chosen {
                statistics[expert as usize] += S::Real::ONE;
            }
            let probabilities = &mut statistics[experts..2 * experts];
            update(probabilities, &row.scores, |sum, score| *sum += score / row.sum);
            statistics[2 * experts] += row.lse * row.lse;
        }
        let (slots, rest) = statistics.split_at_mut(experts);
        let capacity = S::Real::of(self.capacity as f64);
        update(&mut rest[experts + 1..], slots, |kept, slots| {
            *kept = if slots < capacity { slots } else { capacity };
        });
        Ok(())
    }
}

/// Gradient of the logits of [`RouteForward`], with that of the auxiliary losses, in place.
#[derive(Clone, Debug)]
pub struct RouteBackward {
    /// `[R, E]`: `logits`, becomes `dlogits`
    pub logits_dlogits: Buffer,
    /// `[R, K]`, i32
    pub experts: Buffer,
    /// `[R, K]`, f32 (f64 if the logits are)
    pub dweights: Buffer,
    /// `[E]`, as `dweights`: slots of each expert, of these rows or of more, for the load-balancing loss. It has no gradient.
    pub load: Buffer,
    /// The gradient of an expert's probability is this times its load: `α·E/R²` for a loss over `R` rows.
    pub balance: f32,
    /// Factor of the router z-loss: `β/R`.
    pub z: f32,
    /// As in the forward.
    pub router: Router,
}

impl Operation for RouteBackward {
    const NAME: &'static str = "route_backward";

    runs_in!(logits_dlogits);

    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        expect_dtype(DType::F32, &[&self.dweights, &self.load])?;
        let call = self.router.call(Self::NAME, &self.logits_dlogits, 2)?;
        let call = call
            .write([&self.logits_dlogits])
            .read([&self.experts, &self.dweights, &self.load]);
        Ok(call.f32([self.balance, self.z]).into())
    }
}

impl RouteBackward {
    /// Refuses sizes that do not fit each other.
    fn check(&self) -> Result<(), DeviceError> {
        let rows = self
            .router
            .rows(Self::NAME, [&self.logits_dlogits, &self.experts])?;
        let sizes = [
            ("dweights", &self.dweights, rows * self.router.top_k),
            ("load", &self.load, self.router.experts),
        ];
        expect_lens(Self::NAME, &sizes)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let isa = cpu.isa();
        let Router { experts, top_k, .. } = self.router;
        let (chosen, dweights) = (self.experts.host::<i32>()?, self.dweights.host::<S::Real>()?);
        expect_indices(Self::NAME, "experts", &chosen, 0, experts)?;
        let load = self.load.host::<S::Real>()?;
        let mut logits = self.logits_dlogits.host_mut::<S>()?;
        let slots = chosen.chunks_exact(top_k).zip(dweights.chunks_exact(top_k));
        let (mut row, mut dscores) = (RowScores::of(self.router), vec![S::Real::ZERO; experts]);
        for (logits, (chosen, dweights)) in logits.chunks_exact_mut(experts).zip(slots) {
            S::write(isa, logits, true, |logits| {
                row.score(isa, logits);
                self.balance(&row, &load, &mut dscores);
                row.add_dscores(chosen, dweights, &mut dscores);
                self.dlogits(&row, &dscores, logits);
            });
        }
        Ok(())
    }

    /// Gradients of a token's scores of the load-balancing loss.
    fn balance<T: Real>(&self, row: &RowScores<T>, load: &[T], dscores: &mut [T]) {
        let balance = T::of(self.balance.into());
        let terms = load.iter().zip(&row.scores);
        let mean = terms.fold(T::ZERO, |sum, (&load, &score)| sum + balance * load * score) / row.sum;
        update(dscores, load, |dscore, load| {
            *dscore = (balance * load - mean) / row.sum;
        });
    }

    /// A token's logits become their gradients, from those of its scores and of the z-loss.
    fn dlogits<T: Real>(&self, row: &RowScores<T>, dscores: &[T], logits: &mut [T]) {
        let z = T::of(2.0 * f64::from(self.z)) * row.lse;
        let products = row.scores.iter().zip(dscores);
        let inner = products.fold(T::ZERO, |inner, (&score, &dscore)| inner + score * dscore);
        update2(logits, [&row.scores, dscores], |logit, score, dscore| {
            let of_score = match self.router.score {
                RouterScore::Softmax => score * (dscore - inner),
                RouterScore::Sigmoid => score * (T::ONE - score) * dscore,
            };
            *logit = of_score + z * (*logit - row.lse).exp();
        });
    }
}

/// What follows from the logits of a token.
struct RowScores<T> {
    router: Router,
    scores: Vec<T>,
    /// Of the scores.
    sum: T,
    /// `ln Σ e^logits`
    lse: T,
}

impl<T: Real> RowScores<T> {
    fn of(router: Router) -> Self {
        Self {
            router,
            scores: vec![T::ZERO; router.experts],
            sum: T::ZERO,
            lse: T::ZERO,
        }
    }

    /// Of the next token.
    fn score(&mut self, isa: Isa, logits: &[T]) {
        let is_softmax = self.router.score == RouterScore::Softmax;
        let [max, exponentials, sum] = score_row(isa, logits, &mut self.scores, is_softmax);
        (self.sum, self.lse) = (sum, max + T::of(ln(exponentials.to_f64())));
    }

    /// The experts with the highest scores.
    fn choose(&self, chosen: &mut [i32]) {
        let key = |expert: usize| self.scores[expert];
        for choice in 0..chosen.len() {
            let free = (0..self.scores.len()).filter(|&expert| !chosen[..choice].contains(&(expert as i32)));
            // Where scores are no numbers, still different experts.
            let best = free.reduce(|best, expert| if key(expert) > key(best) { expert } else { best });
            chosen[choice] = best.expect("there are as many experts as choices") as i32;
        }
    }

    /// The weights of the token's experts.
    fn weigh(&self, chosen: &[i32], weights: &mut [T]) {
        update(weights, chosen, |weight, expert| {
            *weight = self.scores[expert as usize];
        });
        if self.router.normalized {
            let sum = weights.iter().fold(T::ZERO, |sum, &weight| sum + weight);
            for weight in weights {
                *weight = *weight / sum;
            }
        }
    }

    /// Adds the gradients of the scores that come from those of the weights.
    fn add_dscores(&self, chosen: &[i32], dweights: &[T], dscores: &mut [T]) {
        let slots = || chosen.iter().map(|&expert| expert as usize).zip(dweights);
        let sum = slots().fold(T::ZERO, |sum, (expert, _)| sum + self.scores[expert]);
        let mean = slots().fold(T::ZERO, |dot, (expert, &d)| dot + d * self.scores[expert]) / sum;
        for (expert, &d) in slots() {
            dscores[expert] += if self.router.normalized {
                (d - mean) / sum
            } else {
                d
            };
        }
    }
}

kernel! {
    /// The scores of a row; its greatest logit, `Σ e^(logit − greatest)`, and the sum of the scores.
    fn score_row<'a, T>(logits: &'a [T], scores: &'a mut [T], is_softmax: bool) -> [T; 3] {
        let max = max_of(logits);
        update(scores, logits, |score, x| *score = (x - max).exp());
        let exponentials = sum_map(scores, |x| x);
        if is_softmax {
            for score in scores {
                *score = *score / exponentials;
            }
            return [max, exponentials, T::ONE];
        }
        update(scores, logits, |score, x| *score = sigmoid(x));
        [max, exponentials, sum_map(scores, |x| x)]
    }
}

/// Threads of a block: a warp a row.
const THREADS: u32 = 128;
/// Most experts whose scores fit into shared memory.
const MOST_EXPERTS: usize = 1024;

impl Router {
    /// Refuses logits and chosen experts that do not fit each other; the number of rows.
    fn rows(&self, op: &'static str, [logits, chosen]: [&Buffer; 2]) -> Result<usize, DeviceError> {
        let Self { experts, top_k, .. } = *self;
        if top_k == 0 || top_k > experts {
            let what = format!("a token cannot go to {top_k} of {experts} experts");
            return Err(DeviceError::Shape { op, what });
        }
        let rows = logits.len() / experts;
        expect_lens(
            op,
            &[
                ("logits", logits, rows * experts),
                ("experts", chosen, rows * top_k),
            ],
        )?;
        chosen.expect_dtype(DType::I32).map(|()| rows)
    }

    /// A kernel with one warp per row, which has shared memory for `arrays` numbers per expert. Its first arguments are the
    /// sizes.
    fn call(&self, op: &'static str, logits: &Buffer, arrays: usize) -> Result<Call, DeviceError> {
        let experts = self.experts;
        if experts > MOST_EXPERTS {
            let what = format!("a GPU chooses among {MOST_EXPERTS} experts at most, not {experts}");
            return Err(DeviceError::Shape { op, what });
        }
        let rows = count(op, "rows", logits.len() / experts)?;
        let grid = Grid::covering(rows as usize * 32, THREADS);
        let grid = grid.with_shared(THREADS as usize / 32 * arrays * experts * size_of::<f32>());
        let call = Call::new(&SOURCE, op, act_defines(element(op, logits)?, 1), grid);
        let call = call.u32([rows, experts as u32, self.top_k as u32]);
        Ok(call
            .flag(self.score == RouterScore::Softmax)
            .flag(self.normalized))
    }
}

static SOURCE: KernelSource = kernels("routing.cu", include_str!("../cuda/routing.cu"));
