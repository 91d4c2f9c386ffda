//! Estimates the least time of a step. The simulator runs the computation of the pipeline stages,
//! together with their exchanges within tensor groups. Communication of data-parallel ranks
//! overlaps with that as far as possible.
//!
//! | part | time |
//! |---|---|
//! | arithmetic | operations of a layer over the device's rate: a third in F, a third in I, a third in W |
//! | tensor, context and expert groups | half of a layer's exchanges in F, half in I, as if nothing overlapped with them |
//! | pipeline | (arithmetic + exchanges) / (1 − bubble) |
//! | data-parallel ranks | traffic of every micro-batch overlaps with the whole step; traffic of once per step (gradients at its end, parameters before the next) with the last backward and the first forward |
//!
//! In backward, a run starts the reduction of a column-parallel layer's input gradient and computes
//! the layer's weight gradient meanwhile (`NormedDense::backward`). The table does not count this
//! overlap, so a run with tensor groups can be faster by that much.

use std::ops::Range;

use crate::config::{Sync, TrainConfig};
use crate::costs::{Cluster, Sent, micro_batch_shape, residual_rows};
use crate::mesh::{Axis, GRADIENTS, MeshShape, Span};
use crate::model::Decoder;
use crate::parallel::Dtypes;
use crate::parallel::pipeline::{PipelinePlan, RankTimeline, Simulation, StageCosts};
use crate::plan::estimate::{StepTraffic, sent_along};
use crate::train::strategy::{head_work, layer_work, work};

/// Ticks of the simulator in the longest action or message: small enough that a step never
/// overflows the counter, large enough that no action has 0 ticks.
const LONGEST_TICKS: f64 = 1e9;
/// Operations per second if the rate is not known: bubbles do not depend on it.
const ANY_RATE: f64 = 1e12;

/// The machines of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machines {
    /// Nodes, ranks, wires.
    pub cluster: Cluster,
    /// Bytes of a device that training may use, if known.
    pub memory: Option<u64>,
    /// Floating-point operations a second of a device, if known.
    pub flops: Option<f64>,
    /// Devices with memory of their own: what is offloaded to the host is not in it.
    pub has_own_memory: bool,
}

/// What micro-batches need of a rank, whatever its mesh but for the groups that compute layers together.
pub(super) struct LayerNeeds {
    /// What a rank sends to these groups in one micro-batch of the whole model.
    pub(super) exchanged: Vec<Sent>,
    /// Bytes that a layer keeps of a micro-batch for backward: one without experts, and one with them.
    pub(super) kept: [u64; 2],
}

/// What a rank does in a step, on average, in seconds; none of it depends on its pipeline's schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BusyTimes {
    /// Arithmetic, if the rate is known.
    pub compute: Option<f64>,
    /// Exchanges within the groups that compute layers together, if the rates are known.
    pub exchanges: Option<f64>,
    /// Exchanges in one layer for one micro-batch, without those of its experts.
    exchange: f64,
    /// Those of the experts of one layer.
    expert_exchange: f64,
    /// As [`LayerNeeds::kept`].
    kept: [u64; 2],
}

impl BusyTimes {
    pub(super) fn of(config: &TrainConfig, machines: &Machines, needs: &LayerNeeds) -> Self {
        let stages = config.parallel.pipeline.stages as f64;
        let (layers, micro_batches) = (config.model.n_layer, config.train.grad_accumulation as f64);
        let (all, mut of_layers) = (&needs.exchanged, needs.exchanged.clone());
        of_layers.retain(|sent| !sent.to_each);
        let [exchange, of_layers] = [all, &of_layers].map(|sent| machines.cluster.least_seconds(sent));
        let of_experts = exchange
            .zip(of_layers)
            .map_or(0.0, |(all, of_layers)| all - of_layers);
        let expert_layers = Decoder::of(&config.model).expert_layers(0..layers);
        let work = work(config).total() as f64 * tokens(config) / config.parallel.tensor as f64;
        Self {
            compute: machines.flops.map(|rate| micro_batches * work / rate / stages),
            exchanges: exchange.map(|seconds| micro_batches * seconds / stages),
            exchange: of_layers.unwrap_or(0.0) / layers as f64,
            expert_exchange: of_experts / expert_layers.max(1) as f64,
            kept: needs.kept,
        }
    }

    /// Arithmetic and exchanges, one after the other.
    pub(super) fn sum(&self) -> Option<f64> {
        Some(self.compute? + self.exchanges?)
    }
}

/// Tokens of a micro-batch.
fn tokens(config: &TrainConfig) -> f64 {
    micro_batch_shape(config).iter().product::<usize>() as f64
}

/// Times of a step, in seconds; none depends on a rate that is not known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTimes {
    /// What a rank does.
    pub busy: BusyTimes,
    /// Share of all ranks' time in which they neither compute nor exchange.
    pub bubble: f64,
    /// From the first to the last action of the pipeline.
    pub(super) pipeline: Option<f64>,
    /// The part of it with which traffic of once per step can overlap.
    hides: f64,
}

impl StepTimes {
    /// Times of a configuration on a mesh of machines, and the simulation behind them. The plan may have fewer micro-batches than a step: no
    /// rank waits for those in the middle of a step.
    pub(super) fn of(
        config: &TrainConfig,
        machines: &Machines,
        mesh: &MeshShape,
        plan: &PipelinePlan,
        busy: BusyTimes,
    ) -> (Self, Simulation) {
        let tensor = mesh.size(&[Axis::Tensor]) as u64;
        let (decoder, head) = (Decoder::of(&config.model), head_work(config));
        let seconds_an_operation = tokens(config) / tensor as f64 / machines.flops.unwrap_or(ANY_RATE);
        let last = plan.layers().len() - 1;
        // F, I and W of a stage, and what it keeps.
        let of_stage = |(stage, layers): (usize, &Range<usize>)| {
            let (work, experts) = (
                layer_work(config, layers.clone()),
                decoder.expert_layers(layers.clone()),
            );
            let head = if stage == last { head } else { 0 };
            let [product, again] =
                [work.model + head, work.repeated].map(|operations| operations as f64 * seconds_an_operation);
            let exchange = busy.exchange * layers.len() as f64 + busy.expert_exchange * experts as f64;
            let (third, half) = (product / 3.0, exchange / 2.0);
            let kept = busy.kept[0] * (layers.len() - experts) as u64 + busy.kept[1] * experts as u64;
            ([third + half, third + again + half, third], kept)
        };
        let stages: Vec<([f64; 3], u64)> = plan.layers().iter().enumerate().map(of_stage).collect();
        let message = match mesh.size(&[Axis::Pipeline]) {
            1 => Some(0.0),
            _ => machines
                .cluster
                .message_seconds(message_bytes(config), mesh.stride(Axis::Pipeline) as u64),
        };
        let transit = message.filter(|_| machines.flops.is_some()).unwrap_or(0.0);
        let seconds = stages.iter().flat_map(|(seconds, _)| *seconds);
        let tick = seconds.fold(transit, f64::max) / LONGEST_TICKS;
        let costs = stages
            .iter()
            .map(|&(seconds, kept)| in_ticks(seconds, tick, kept));
        let costs: Vec<StageCosts> = costs.collect();
        let simulation = plan.simulated(&costs, (transit / tick) as u64);
        let simulation = simulation.expect("a plan's schedule was checked to run to its end");
        let simulated = simulation.end as f64 * tick;
        let waiting = simulation.bubble_fraction() * simulated;
        let all = plan.micro_batches() as f64 / config.train.grad_accumulation as f64;
        let computing = (simulated - waiting) / all;
        let times = Self {
            bubble: waiting / (computing + waiting),
            pipeline: busy.sum().zip(message).map(|(busy, _)| busy + waiting),
            hides: hidden(&simulation, &costs, plan) as f64 * tick,
            busy,
        };
        (times, simulation)
    }

    /// Least time for gradients and parameters that a rank sends, by [`Span`].
    pub(super) fn communication(
        cluster: &Cluster,
        mesh: &MeshShape,
        state: &[u64; Span::COUNT],
    ) -> Option<f64> {
        cluster.least_seconds(&sent_to_groups(mesh, &GRADIENTS, state))
    }

    /// Time of a step of `config` in which a rank sends `sent`.
    pub(super) fn step(
        &self,
        config: &TrainConfig,
        cluster: &Cluster,
        mesh: &MeshShape,
        sent: &StepTraffic,
    ) -> Option<f64> {
        let once = sent.once(config.train.grad_accumulation as u64);
        let pipeline = self.pipeline?;
        let [once, all] = [once, sent.state].map(|sent| Self::communication(cluster, mesh, &sent));
        let overlaps = config.parallel.overlap && config.parallel.sync != Sync::Naive;
        Some(if overlaps {
            let before = (pipeline - self.hides).max(0.0);
            pipeline.max(before + once?).max(all?)
        } else {
            pipeline + all?
        })
    }
}

/// What goes to the groups whose slowest axis is one of `axes`, of what is `sent` by [`Span`].
pub(super) fn sent_to_groups(mesh: &MeshShape, axes: &[Axis], sent: &[u64; Span::COUNT]) -> Vec<Sent> {
    let to_group = |(span, bytes): (Span, u64)| Sent {
        bytes,
        ranks: mesh.size(span.axes()) as u64,
        stride: mesh.stride(span.last) as u64,
        to_each: false,
    };
    let sent = sent_along(axes, sent).map(to_group);
    sent.filter(|sent| sent.bytes > 0).collect()
}

fn in_ticks(seconds: [f64; 3], tick: f64, kept_bytes: u64) -> StageCosts {
    let [forward, input_gradient, weight_gradient] = seconds.map(|seconds| (seconds / tick) as u64);
    StageCosts {
        forward,
        input_gradient,
        weight_gradient,
        backward: input_gradient + weight_gradient,
        kept_bytes,
    }
}

/// Bytes of what a rank hands to the next stage.
fn message_bytes(config: &TrainConfig) -> u64 {
    (residual_rows(config) * config.model.n_embd * Dtypes::of(config).params.bytes()) as u64
}

/// Ticks with which traffic of once per step can overlap, on the rank that has the fewest.
/// Gradients of a stage are complete once its last backward has begun, so counting starts at the
/// earliest such point of the rank's stages. Parameters gathered for the next step overlap with its
/// first forward, which is added.
fn hidden(simulation: &Simulation, costs: &[StageCosts], plan: &PipelinePlan) -> u64 {
    let of_rank = |(rank, timeline): (usize, &RankTimeline)| {
        let last_backward = |stage: usize| {
            let mut starts = timeline.intervals.iter().rev().filter(|interval| {
                interval.action.stage == stage && interval.action.kind.makes_weight_gradient()
            });
            starts.next().map_or(0, |interval| interval.start)
        };
        let stages = || plan.placement().stages_of(rank);
        let forward: u64 = stages().map(|stage| costs[stage].forward).sum();
        let complete = stages().map(last_backward).min().unwrap_or(0);
        simulation.end - complete + forward
    };
    let least = simulation.ranks.iter().enumerate().map(of_rank).min();
    least.unwrap_or(0)
}
