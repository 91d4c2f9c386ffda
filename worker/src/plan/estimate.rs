//! What a rank will hold and send, before anything is allocated: the run's own types, made for a rank of the planned mesh
//! on a device that does nothing, among ranks that do nothing. One step is rehearsed there, and what the types say of
//! their memory and count on the wire is the estimate.

use ddp_proto::env::WorkerEnv;

use crate::collective::WireBytes;
use crate::config::{Strategy, TrainConfig};
use crate::mesh::{Axis, Span};
use crate::parallel::Reducer;
use crate::train::BuddyCopy;
use crate::train::idle_world::idle_world;
use crate::train::rank_spec::RankSpec;
use crate::train::replica::Replica;
use crate::train::run_row::rehearse_step;
use crate::train::{Footprint, TrainError};

/// What a rank holds and sends, under one strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// [`Strategy::Ddp`] where nothing can be sharded.
    pub strategy: Strategy,
    /// Parameters of the model, Ψ: without padding, a tied one counted once.
    pub parameters: u64,
    /// Elements of parameters, or of gradients, with their padding.
    pub padded: u64,
    /// What it holds.
    pub held: Footprint,
    /// What it sends in a step.
    pub sent: StepTraffic,
}

/// Bytes that a rank sends in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTraffic {
    /// Gradients, in the type in which they are reduced.
    pub grads: u64,
    /// Parameters, in the type that operations read.
    pub params: u64,
    /// Activations and their gradients, within groups that compute layers together.
    pub activations: u64,
    /// The same between the stages of a pipeline.
    pub pipeline: u64,
    /// Gradients and parameters by [`Span`].
    pub state: [u64; Span::COUNT],
    /// The part of that which every micro-batch sends again.
    pub repeated: [u64; Span::COUNT],
    /// Activations by [`Span`], with those between stages.
    pub exchanged: [u64; Span::COUNT],
}

impl StepTraffic {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.grads + self.params + self.activations + self.pipeline
    }

    /// The larger of both, kind by kind and axis by axis.
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            grads: self.grads.max(other.grads),
            params: self.params.max(other.params),
            activations: self.activations.max(other.activations),
            pipeline: self.pipeline.max(other.pipeline),
            state: std::array::from_fn(|span| self.state[span].max(other.state[span])),
            repeated: std::array::from_fn(|span| self.repeated[span].max(other.repeated[span])),
            exchanged: std::array::from_fn(|span| self.exchanged[span].max(other.exchanged[span])),
        }
    }

    /// What goes to ranks along some axes. A group along several axes counts towards the slowest of them.
    pub fn along(&self, axes: &[Axis]) -> u64 {
        self.state_along(axes) + self.exchanged_along(axes)
    }

    /// The gradients and parameters of it.
    pub fn state_along(&self, axes: &[Axis]) -> u64 {
        sent_along(axes, &self.state).map(|(_, bytes)| bytes).sum()
    }

    /// The activations of it.
    pub fn exchanged_along(&self, axes: &[Axis]) -> u64 {
        sent_along(axes, &self.exchanged).map(|(_, bytes)| bytes).sum()
    }

    /// The part that is sent once per step, not once per micro-batch.
    pub(super) fn once(&self, micro_batches: u64) -> [u64; Span::COUNT] {
        std::array::from_fn(|span| self.state[span].saturating_sub(micro_batches * self.repeated[span]))
    }
}

impl Estimate {
    /// The rank that `env` describes: a pure function.
    pub fn of(config: &TrainConfig, env: &WorkerEnv) -> Result<Self, TrainError> {
        let spec = RankSpec::of(config, env)?;
        Self::new(&spec, spec.activations()?, true)
    }

    /// The rank of `spec`, with an arena of these bytes for activations. Most of the work is to find out what it `sends`.
    pub(super) fn new(spec: &RankSpec, activations: usize, sends: bool) -> Result<Self, TrainError> {
        let world = idle_world(spec.strategy.mesh, spec.rank);
        let (mut replica, mut reducer) = spec.idle(&world, activations)?;
        let home = spec.planned_home(&world);
        let optimizer = spec.optimizer(&replica.parameters, &home)?;
        let copy = BuddyCopy::new(spec, replica.parameters.replica_set(), &home)?;
        let sent = if sends {
            let micro_batches = spec.config.train.grad_accumulation;
            step_traffic(&mut replica, &mut reducer, copy.as_ref(), micro_batches)?
        } else {
            StepTraffic::default()
        };
        Ok(Self {
            sent,
            strategy: spec.strategy.strategy,
            parameters: spec.model.param_count() as u64,
            padded: replica.parameters.sharding().whole_len() as u64,
            held: Footprint::of(
                &replica,
                &reducer,
                &optimizer,
                copy.as_ref().map_or(0, BuddyCopy::bytes),
            ),
        })
    }
}

/// What a step of `micro_batches` sends. The second one is rehearsed, and later ones send as much. But if a stage of a
/// pipeline gathers parameters, what is still there from the pass before depends on the order: all micro-batches of the plan are
/// rehearsed then, of which a round has as many as the pipeline has ranks.
fn step_traffic(
    replica: &mut Replica,
    reducer: &mut Reducer,
    copy: Option<&BuddyCopy>,
    micro_batches: usize,
) -> Result<StepTraffic, TrainError> {
    let ranks = replica.world.mesh.size(&[Axis::Pipeline]);
    let planned = replica.plan.micro_batches().min(micro_batches);
    let (fewer, more) = match planned {
        1 => (0, 1),
        _ if ranks == 1 || replica.parameters.gathered_bytes() == 0 => (1, 2),
        _ => (planned.saturating_sub(ranks), planned),
    };
    let mut sent_by = |micro_batches| {
        let before = replica.world.mesh.wire_bytes_by_span();
        if micro_batches > 0 {
            let sums = rehearse_step(replica, reducer, micro_batches, &|_| {})?;
            let world = &replica.world;
            if let Some(copy) = copy {
                copy.exchange_sums(&world.compute, &replica.parameters, &sums);
            }
        }
        let after = replica.world.mesh.wire_bytes_by_span();
        Ok::<[WireBytes; Span::COUNT], TrainError>(std::array::from_fn(|span| after[span] - before[span]))
    };
    let sent = [sent_by(fewer)?, sent_by(more)?];
    let part = |kind: fn(&WireBytes) -> u64, span: usize| sent.each_ref().map(|sent| kind(&sent[span]));
    let all = |kind, span| {
        let [first, second] = part(kind, span);
        first + (second - first) * (micro_batches - fewer) as u64 / (more - fewer) as u64
    };
    let sum = |kind| (0..Span::COUNT).map(|span| all(kind, span)).sum();
    Ok(StepTraffic {
        grads: sum(|sent| sent.grads),
        params: sum(|sent| sent.params),
        activations: sum(|sent| sent.activations),
        pipeline: sum(|sent| sent.pipeline),
        state: std::array::from_fn(|span| all(of_state, span)),
        repeated: std::array::from_fn(|span| match (micro_batches, part(of_state, span)) {
            (1, _) => 0,
            (_, [first, second]) => (second - first) / (more - fewer) as u64,
        }),
        exchanged: std::array::from_fn(|span| all(|sent| sent.activations + sent.pipeline, span)),
    })
}

fn of_state(sent: &WireBytes) -> u64 {
    sent.grads + sent.params
}

/// What of `sent`, which is by [`Span`], goes along spans that begin with one of `axes`.
pub(super) fn sent_along(axes: &[Axis], sent: &[u64; Span::COUNT]) -> impl Iterator<Item = (Span, u64)> {
    let spans = Span::all().filter(|span| axes.contains(&span.first));
    spans.map(|span| (span, sent[span.index()]))
}

#[cfg(test)]
#[path = "estimate_tests.rs"]
mod tests;
