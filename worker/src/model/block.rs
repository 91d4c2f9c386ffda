//! Blocks: the unit of recomputation and of pipeline stages.

use std::any::Any;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::{Activation, ActivationPool, Exchange, ExchangeKind, ExpertOps, GroupOps, ParamId, ParamSpec};
use crate::config::Recompute;
use crate::device::{Buffer, Compute, DType, DeviceError, Event, Result};
use crate::ops::{Cast, Op, VocabularyPart};
use crate::timeline::{Kind, Timeline};

/// A part of a network with its own forward and backward.
///
/// A block holds sizes and parameter ids, never parameters, gradients or activations, so the same block serves
/// any strategy, any number of micro-batches in flight, and recomputation.
pub trait Block: Send + Sync {
    /// For errors and traces: `h.0`.
    fn name(&self) -> &str;

    /// Parameters it uses. A tied parameter is listed by each block that uses it.
    fn params(&self) -> &[ParamId];

    /// Those of them whose elements `backward` reads.
    fn read_by_backward(&self) -> &[ParamId] {
        self.params()
    }

    /// Computes the output and puts into `saved` what [`Context::keep`] says.
    fn forward(&self, ctx: &Context<'_>, inp: &Activation, saved: &mut Saved) -> Result<Activation>;

    /// Takes what forward kept, adds each parameter's gradient, and returns the gradient of the input; none for a block
    /// whose input has no gradient (tokens).
    ///
    /// For every parameter that it lists it calls [`GradSink::contributed`] exactly once, as early as it can.
    fn backward(&self, pass: &mut Backward<'_>, dout: &Activation) -> Result<Option<Activation>>;
}

/// What the backward of a block works with.
pub struct Backward<'a> {
    /// That of forward.
    pub ctx: &'a Context<'a>,
    /// What forward kept.
    pub saved: &'a mut Saved,
    /// Takes the gradients of parameters.
    pub grads: &'a mut dyn GradSink,
}

/// What forward keeps in [`Saved`]: memory of activations for arithmetic (Chen et al. 2016; Korthikanti et al. 2022).
///
/// A transformer block of C channels keeps 10·C numbers a position for its backward, and one a head. What is computed
/// element by element (normalisations, the output of the GELU) is kept with [`Recompute::Nothing`] only. That of SwiGLU
/// never is: it comes with its gradient, in memory that is there anyway.
///
/// | `train.recompute` | kept, numbers a position | computed again |
/// |---|---|---|
/// | `nothing` | 16·C + heads | nothing |
/// | `norms` | 10·C + heads | normalisations and GELU: no products |
/// | `selective` | 6·C + heads | the widened half of the feed-forward layer: a third of the block's products |
/// | `full` | C, the block's input | all of the block but its last product, whose output is not read |
///
/// `selective` gives up the largest thing that a block keeps, for one product that needs nothing but the layer's
/// input. Attention keeps what it has: per byte it is the more expensive part, since its core grows with the square of
/// the positions. The head is left alone by `full`: its backward comes next, so nothing would be freed.
///
/// The same operations run on the same numbers, and dropout makes its masks again from the samples' numbers, so losses
/// and gradients have the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Nothing: no backward follows.
    Nothing,
    /// What backward reads, but for what it computes again.
    ForBackward(Recompute),
    /// Keys and values of attention, for rows that follow in the text: generation. The head returns the logits, `[R, V]`.
    KvCache {
        /// Position of the first row.
        first_position: usize,
        /// Positions for which there is memory.
        capacity: usize,
    },
}

/// Where a parameter's elements are at the moment.
pub trait Params {
    /// All elements of the parameter, row-major.
    fn get(&self, id: ParamId) -> Buffer;
}

/// Memory for gradients, and reports of contributions to them.
pub trait GradSink {
    /// What follows until the next call are contributions of this block of the model.
    fn enter(&mut self, _block: usize) {}

    /// Memory for the gradient of `id`.
    fn grad(&mut self, id: ParamId) -> Result<GradSlot>;

    /// This block's contribution to the gradient of `id` is in the stream up to `at`.
    fn contributed(&mut self, id: ParamId, at: Event) -> Result<()>;

    /// Where contributions wait if backward is split and the gradients of weights come later: what they read must stay
    /// unchanged until then. With `None` they are computed at once.
    fn deferred(&mut self) -> Option<&mut Vec<WeightGradient>> {
        None
    }
}

/// A contribution to the gradient of a parameter that is computed later.
pub struct WeightGradient {
    /// The parameter.
    pub(super) id: ParamId,
    /// The block that contributes, once it has ended its half of backward.
    pub(super) block: usize,
    /// Kept until the contribution has been computed.
    pub(super) reads: Vec<Activation>,
    /// Computes the contribution in the memory for it.
    pub(super) op: Box<dyn FnOnce(GradSlot) -> Op + Send>,
}

impl std::fmt::Debug for WeightGradient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WeightGradient({:?}, of {:?})", self.id, self.reads)
    }
}

/// Memory for one contribution to a gradient.
#[derive(Clone, Debug)]
pub struct GradSlot {
    /// As many elements as the parameter.
    pub buffer: Buffer,
    /// True: add to what is there. False: this is the first contribution of the step, overwrite.
    pub accumulate: bool,
}

/// What the operations of one micro-batch share.
pub struct Context<'a> {
    /// Runs the operations.
    pub compute: &'a Compute,
    /// Memory for activations.
    pub pool: &'a ActivationPool,
    /// Where parameters are.
    pub params: &'a dyn Params,
    /// Targets of the loss, one for each row, i32; negative: ignored. None: no loss is made.
    pub targets: Option<&'a Buffer>,
    /// Factor of each position's gradient, `[R]`, in the type of statistics: 1/(B·T) everywhere for the gradient of the mean
    /// loss. The same in both passes. None: no backward follows.
    pub dloss: Option<&'a Buffer>,
    /// Samples of the micro-batch, and the positions of each that this rank computes.
    pub shape: [usize; 2],
    /// Type of activations and parameters: f32 or bf16 (f64 in gradient checks).
    pub dtype: DType,
    /// What forward keeps, and for what.
    pub keep: Keep,
    /// Names the samples, for dropout's masks. None: nothing is dropped.
    pub samples: Option<SampleKey>,
    /// The ranks that hold the model together. None: this rank has all of it.
    pub tensor: Option<&'a dyn GroupOps>,
    /// The ranks that compute other positions of the same samples. None: this rank computes all.
    pub context_group: Option<&'a dyn GroupOps>,
    /// The ranks that hold the experts of a layer together. None: this rank has all of them.
    pub experts: Option<&'a dyn ExpertOps>,
    /// How much a position counts in the means of the global batch, where experts add losses of their own.
    pub position_weight: f64,
    /// What the routers of the micro-batch count, `[layers, 3·E + 1]`: [`crate::ops::RouteForward::statistics`].
    pub routers: Option<&'a Buffer>,
    /// Takes down what runs, while it is open.
    pub timeline: Option<&'a Timeline>,
}

impl Backward<'_> {
    /// Puts what computes this block's contribution to the gradient of `id` from `reads` on the compute stream, and
    /// reports it; or defers it.
    pub fn contribute<O: Into<Op>>(
        &mut self,
        id: ParamId,
        reads: &[&Activation],
        op: impl FnOnce(GradSlot) -> O + Send + 'static,
    ) -> Result<()> {
        let later = WeightGradient {
            id,
            block: usize::MAX,
            reads: reads.iter().map(|&read| read.clone()).collect(),
            op: Box::new(move |slot| op(slot).into()),
        };
        match self.grads.deferred() {
            Some(queue) => {
                queue.push(later);
                Ok(())
            }
            None => self.ctx.contribute_now(self.grads, later),
        }
    }
}

/// Names the samples of one micro-batch. Randomness that depends on nothing else repeats under recomputation, and is the
/// same on any number of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleKey {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the first sample in the run, which no other step has. The others follow it.
    pub first: u64,
}

impl<'a> Context<'a> {
    /// For a forward of a micro-batch of `shape` on a rank that has all of the model; nothing is kept, and no loss made.
    pub fn new(
        compute: &'a Compute,
        pool: &'a ActivationPool,
        params: &'a dyn Params,
        shape: [usize; 2],
        dtype: DType,
    ) -> Self {
        Self {
            compute,
            pool,
            params,
            targets: None,
            dloss: None,
            shape,
            dtype,
            keep: Keep::Nothing,
            samples: None,
            tensor: None,
            context_group: None,
            experts: None,
            position_weight: 0.0,
            routers: None,
            timeline: None,
        }
    }

    /// Puts an operation on the compute stream.
    pub fn enqueue(&self, op: impl Into<Op>) {
        let op = op.into();
        let name = op.name();
        let enqueue = || self.compute.enqueue(op);
        self.spanned(Kind::Operation, || name.into(), enqueue);
    }

    /// What [`Backward::contribute`] has put off.
    pub(super) fn contribute_now(
        &self,
        grads: &mut dyn GradSink,
        WeightGradient { id, reads, op, .. }: WeightGradient,
    ) -> Result<()> {
        self.enqueue(op(grads.grad(id)?));
        drop(reads);
        grads.contributed(id, self.compute.record())
    }

    /// Does some work, which is a span of the timeline if one is open.
    pub fn spanned<T>(
        &self,
        kind: Kind,
        name: impl FnOnce() -> Cow<'static, str>,
        work: impl FnOnce() -> T,
    ) -> T {
        let open = self.timeline.filter(|timeline| timeline.is_open());
        let began = open.and_then(|timeline| timeline.mark(self.compute));
        let done = work();
        if let (Some(timeline), Some(began)) = (open, began) {
            timeline.end(began, self.compute, kind, name());
        }
        done
    }

    /// Keeps an activation for the backward, if one follows.
    pub(super) fn save(&self, saved: &mut Saved, name: &'static str, activation: &Activation) {
        if let Keep::ForBackward(_) = self.keep {
            saved.put(name, activation);
        }
    }

    /// Position of the first row of each sample.
    pub(super) fn first_position(&self) -> usize {
        match self.keep {
            Keep::KvCache { first_position, .. } => first_position,
            _ => 0,
        }
    }

    /// Leases an activation of the context's type.
    pub fn lease(&self, name: &str, shape: &[usize]) -> Result<Activation> {
        self.pool.lease(name, self.dtype, shape)
    }

    /// Leases memory for statistics (losses, logarithms of softmax denominators), which are never narrower than f32.
    pub fn lease_stat(&self, name: &str, shape: &[usize]) -> Result<Activation> {
        let dtype = match self.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        self.pool.lease(name, dtype, shape)
    }

    /// Numbers that the host has, `[n]`, for operations that follow.
    pub(super) fn upload(&self, name: &str, numbers: &[i32]) -> Result<Activation> {
        let lease = self.pool.lease(name, DType::I32, &[numbers.len()])?;
        self.compute.upload(lease.buffer(), numbers);
        Ok(lease)
    }

    /// What backward begins with: [`Context::dloss`].
    pub fn loss_gradient(&self) -> Result<Activation> {
        let dloss = self.dloss.ok_or_else(|| {
            DeviceError::Upstream("backward wants the factor of each position's gradient".into())
        })?;
        Ok(Activation::borrowed(dloss.clone(), vec![dloss.len()]))
    }
}

/// Rows of activations, which ranks of a tensor group may share.
impl Context<'_> {
    /// This rank's place in its tensor group, and the number of ranks.
    pub(super) fn tensor_place(&self) -> (usize, usize) {
        self.tensor.map_or((0, 1), |group| (group.index(), group.size()))
    }

    /// The group, where rows of the residual stream are divided.
    fn sequence(&self) -> Option<&dyn GroupOps> {
        self.tensor.filter(|group| group.is_sequence())
    }

    /// Rows that this rank computes: samples · positions.
    pub(super) fn rows(&self) -> usize {
        self.shape.iter().product()
    }

    /// Which of them this rank's part of the residual stream holds.
    pub(super) fn own_rows(&self) -> Range<usize> {
        let rows = self.rows();
        match self.sequence() {
            None => 0..rows,
            Some(group) => {
                let own = rows / group.size();
                group.index() * own..(group.index() + 1) * own
            }
        }
    }

    /// Those as runs of rows that are neighbours in the micro-batch: where a run lies among them, and its first row's number
    /// there, sample · positions + position.
    pub(super) fn row_runs(&self) -> Vec<(Range<usize>, usize)> {
        let (own, all) = (self.own_rows(), self.sample_positions());
        let mut runs: Vec<(Range<usize>, usize)> = Vec::new();
        for stretch in self.stretches() {
            for (sample, start) in stretch.rows.step_by(stretch.positions.len()).enumerate() {
                let rows = start.max(own.start)..(start + stretch.positions.len()).min(own.end);
                if rows.is_empty() {
                    continue;
                }
                let first = sample * all + stretch.positions.start + rows.start - start;
                match runs.last_mut() {
                    Some((run, run_first)) if *run_first + run.len() == first => run.end += rows.len(),
                    _ => runs.push((rows.start - own.start..rows.end - own.start, first)),
                }
            }
        }
        runs
    }

    /// All rows, `[R, C]`, of which each rank makes its own ones: `fill` is given memory for them.
    pub(super) fn all_rows(
        &self,
        name: &str,
        channels: usize,
        fill: impl FnOnce(Buffer),
    ) -> Result<Activation> {
        let whole = self.lease(name, &[self.rows(), channels])?;
        let own = self.own_rows();
        fill(whole.buffer().slice(own.start * channels..own.end * channels));
        if let Some(group) = self.sequence() {
            group.gather_rows(&whole, name)?;
        }
        Ok(whole)
    }

    /// All rows of something of which this rank has its own ones.
    pub(super) fn gathered_rows(&self, name: &str, own: &Activation) -> Result<Activation> {
        if self.sequence().is_none() {
            return Ok(own.clone());
        }
        let channels = own.buffer().len() / self.own_rows().len();
        self.all_rows(name, channels, |out| {
            let x = own.buffer().clone();
            self.enqueue(Cast { x, out });
        })
    }

    /// What the ranks' partial sums `[R, C]` add up to: all rows, or this rank's own ones.
    pub(super) fn summed_rows(&self, name: &str, partial: Activation) -> Result<Activation> {
        let sum = self.start_sum(name, &partial)?;
        drop(partial);
        self.finish_sum(sum)
    }

    /// The same, of which nothing may be used until [`Context::finish_sum`].
    pub(super) fn start_sum(&self, name: &str, partial: &Activation) -> Result<Exchange> {
        match self.tensor {
            None => Ok(Exchange::new(Event::reached(), partial)),
            Some(group) if group.is_sequence() => group.start(ExchangeKind::ReduceScatterRows, partial, name),
            Some(group) => group.start(ExchangeKind::AllReduce, partial, name),
        }
    }

    /// The sum.
    pub(super) fn finish_sum(&self, sum: Exchange) -> Result<Activation> {
        let Some(group) = self.tensor else {
            return Ok(sum.into_activation());
        };
        let sum = group.finish(sum)?;
        self.sequence()
            .map_or(Ok(sum.clone()), |group| group.own_rows(&sum))
    }

    /// This rank's part of a vocabulary, where each rank holds so many tokens; none where it has all of it.
    pub(super) fn vocabulary(&self, held: usize) -> Option<VocabularyPart> {
        let (index, ranks) = self.tensor_place();
        (ranks > 1).then_some(VocabularyPart {
            first: index * held,
            held,
            whole: ranks * held,
        })
    }
}

/// What one block's forward keeps, by name ([`Keep`]). Belongs to the caller.
#[derive(Debug, Default)]
pub struct Saved {
    slots: BTreeMap<&'static str, Activation>,
    /// What a layer keeps beside them.
    pub(super) state: Option<Box<dyn Any + Send>>,
}

impl Saved {
    /// Keeps an activation.
    pub fn put(&mut self, name: &'static str, activation: &Activation) {
        self.slots.insert(name, activation.clone());
    }

    /// Takes an activation out, if it was kept.
    pub(super) fn find(&mut self, name: &'static str) -> Option<Activation> {
        self.slots.remove(name)
    }

    /// Takes an activation out.
    pub fn take(&mut self, name: &'static str) -> Result<Activation> {
        self.find(name).ok_or_else(|| {
            DeviceError::Upstream(format!("backward wants `{name}`, which forward did not save"))
        })
    }

    /// Memory that stays from call to call, leased by the first one.
    pub(super) fn cache(&mut self, ctx: &Context<'_>, name: &'static str, shape: &[usize]) -> Result<Buffer> {
        if !self.slots.contains_key(name) {
            self.put(name, &ctx.lease(name, shape)?);
        }
        Ok(self.slots[name].buffer().clone())
    }
}

/// The part of a model that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelPart {
    /// Which part of every matrix that is cut, and in how many parts it is: this rank in its tensor group (Shoeybi et al.
    /// 2019).
    pub tensor: (usize, usize),
    /// Norms and the residual stream hold a part of the rows (Korthikanti et al. 2022).
    pub sequence: bool,
    /// This rank among those that hold the experts of a layer together, each as many.
    pub experts: (usize, usize),
    /// Blocks of the whole model by chunk, ascending, counted from the embedding. None: all of them, one chunk.
    pub chunks: Option<Vec<Range<usize>>>,
}

impl ModelPart {
    /// All of it.
    pub const WHOLE: Self = Self {
        tensor: (0, 1),
        sequence: false,
        experts: (0, 1),
        chunks: None,
    };

    /// Which of the `count` experts of a layer it holds.
    pub(super) fn own_experts(&self, count: usize) -> Range<usize> {
        let (index, ranks) = self.experts;
        let own = count / ranks;
        index * own..(index + 1) * own
    }

    /// True of the blocks of its chunks.
    pub(super) fn holds(&self, block: usize) -> bool {
        let holds = |chunks: &Vec<Range<usize>>| chunks.iter().any(|chunk| chunk.contains(&block));
        self.chunks.as_ref().is_none_or(holds)
    }
}

/// A network: parameters, groups and blocks.
///
/// The first block takes the tokens `[B, T]` (i32), the last one returns the loss of each position `[B·T]`
/// and takes [`Context::dloss`] as `dout`, which its forward may have made use of already.
#[derive(Clone)]
pub struct Model {
    /// For people: `gpt2 4 × 128`.
    pub name: String,
    /// Parameters that this rank holds, in forward order.
    pub params: Vec<ParamSpec>,
    /// Those of the whole model, uncut, in forward order.
    pub all_params: Arc<[ParamSpec]>,
    /// Blocks that this rank holds, in forward order.
    pub blocks: Vec<Arc<dyn Block>>,
    /// Which of these make up each chunk.
    pub chunks: Vec<Range<usize>>,
    /// This rank holds the first block of the whole model, which takes the tokens.
    pub holds_embedding: bool,
    /// This rank holds the last one, which makes the losses.
    pub holds_head: bool,
    /// What of the whole model this is.
    pub part: ModelPart,
    /// What backward computes again of what forward has made: [`Keep::ForBackward`].
    pub recompute: Recompute,
}

impl Model {
    /// Number of elements of all parameters of the whole model, tied ones once.
    pub fn param_count(&self) -> usize {
        self.all_params.iter().map(ParamSpec::len).sum()
    }

    /// Number of elements that this rank holds a part of, tied ones once.
    pub fn held_count(&self) -> usize {
        self.params.iter().map(ParamSpec::len).sum()
    }

    /// The chunk of all blocks.
    pub fn whole(&self) -> Range<usize> {
        0..self.blocks.len()
    }

    /// Number of a parameter in the whole model.
    pub fn whole_id(&self, id: ParamId) -> ParamId {
        let key = &self.params[id.0].key;
        let found = self.all_params.iter().position(|spec| spec.key == *key);
        ParamId(found.expect("the whole model has every parameter"))
    }

    /// Type of the parameters, which is that of the activations too.
    pub fn dtype(&self) -> DType {
        self.params.first().map_or(DType::F32, |param| param.dtype)
    }

    /// The same model with parameters of another type.
    #[must_use]
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        let params = self.params.iter_mut().chain(Arc::make_mut(&mut self.all_params));
        params.for_each(|param| param.dtype = dtype);
        self
    }

    /// Parameters in the order in which backward finishes them: the order of gradient memory.
    pub fn backward_order(&self) -> Vec<ParamId> {
        let mut order: Vec<ParamId> = Vec::with_capacity(self.params.len());
        for id in self.blocks.iter().flat_map(|b| b.params().iter()) {
            if !order.contains(id) {
                order.push(*id);
            }
        }
        order.reverse();
        order
    }
}
