//! The pipeline of a run: from a configuration to a checked schedule, and the layers of each stage.
//! These are pure functions: any caller can compute what every rank will do.
//!
//! A generator makes the schedule of a step, [`with_transfers`] adds the messages between ranks, and the
//! [validator](super::validate) refuses a schedule that cannot run. The last step of an epoch may have fewer
//! micro-batches. It skips the actions of those that it lacks. The remaining actions keep their order, so the step waits
//! for nothing that a whole step does not wait for.

use std::fmt::Write as _;
use std::ops::Range;

use ddp_proto::words::{counted, numbered};

use super::action::{Action, Schedule};
use super::generators::{
    PipelineShape, ShapeError, gpipe, greedy, interleaved_1f1b, one_f_one_b, zb_h1, zbv,
};
use super::passes::{forward_only, with_transfers};
use super::simulator::{Deadlock, Simulation, StageCosts, simulate};
use super::stages::{LayerCosts, Placement, divide_layers};
use super::validator::{Purpose, Refusal, validate};
use crate::config::{Pipeline, PipelineSchedule};

const STAGES: &str = "parallel.pipeline.stages";
const SCHEDULE: &str = "parallel.pipeline.schedule";
const CHUNKS: &str = "parallel.pipeline.chunks";
const LAYERS: &str = "parallel.pipeline.layers";

pub use crate::config::Problem as PlanError;

/// Most forward passes of a schedule. Schedules are made, checked and simulated before anything
/// starts.
const MAX_FORWARDS: usize = 1 << 16;

fn refused(key: &'static str, what: String, hint: impl Into<String>) -> PlanError {
    PlanError::new(key, what).with_hint(hint)
}

/// What all ranks of a pipeline do and hold. Without a pipeline there is one rank, which runs one
/// micro-batch after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelinePlan {
    name: &'static str,
    /// By stage.
    layers: Vec<Range<usize>>,
    micro_batches: usize,
    /// The schedule of a step; without a pipeline, of one micro-batch.
    training: Schedule,
    evaluation: Schedule,
}

impl PipelinePlan {
    /// The plan for steps of up to `micro_batches`, of a model whose layers cost `costs`.
    pub fn new(config: &Pipeline, micro_batches: usize, costs: &LayerCosts) -> Result<Self, PlanError> {
        check_single(config)?;
        let scheduled = if config.stages == 1 { 1 } else { micro_batches };
        let made = generated(config, scheduled)?;
        let layers = layers(config, costs, made.placement().stages())?;
        let training = complete(&made, Purpose::Training)?;
        let evaluation = complete(&forward_only(&made), Purpose::Evaluation)?;
        Ok(Self {
            name: name(config.schedule),
            layers,
            micro_batches,
            training,
            evaluation,
        })
    }

    /// Refuses a schedule that would be too large, without making it.
    pub fn check_size(config: &Pipeline, micro_batches: usize) -> Result<(), PlanError> {
        match config.stages {
            1 => Ok(()),
            _ => sized(config, micro_batches).map(drop),
        }
    }

    /// The schedule of this name, for a model with enough layers. Without `chunks`, as few as the
    /// schedule supports.
    pub fn named(
        schedule: &str,
        ranks: usize,
        chunks: Option<usize>,
        micro_batches: usize,
    ) -> Result<Self, PlanError> {
        let Ok(schedule) = serde_json::from_value(schedule.into()) else {
            let hint = format!("use one of {}", PipelineSchedule::WORDS.join(", "));
            return Err(refused(SCHEDULE, format!("unknown schedule `{schedule}`"), hint));
        };
        let config = Pipeline {
            stages: ranks,
            schedule,
            chunks,
            layers: None,
        };
        let stages = ranks.saturating_mul(chunks.unwrap_or_else(|| usual_chunks(schedule)));
        // A larger number is refused later.
        let stages = stages.min(MAX_FORWARDS);
        Self::new(&config, micro_batches, &LayerCosts::equal(stages))
    }

    /// The largest number of micro-batches per step that the schedule of a configuration supports.
    pub fn most_micro_batches(config: &Pipeline) -> usize {
        if config.stages == 1 {
            return usize::MAX;
        }
        let PipelineShape { ranks, chunks, .. } = shape_of(config, 1);
        MAX_FORWARDS / ranks.saturating_mul(chunks).max(1)
    }

    /// Name of the schedule, for people.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What ranks compute, send and receive in a step.
    pub fn schedule(&self) -> &Schedule {
        &self.training
    }

    /// Which rank holds which stage.
    pub fn placement(&self) -> &Placement {
        self.training.placement()
    }

    /// Layers of each stage.
    pub fn layers(&self) -> &[Range<usize>] {
        &self.layers
    }

    /// Micro-batches of a step, at most.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// What a rank does in a step of `micro_batches`, at most [`PipelinePlan::micro_batches`].
    pub fn row(&self, rank: usize, micro_batches: usize) -> Vec<Action> {
        self.first(&self.training, rank, micro_batches)
    }

    /// What a rank does in an evaluation of `micro_batches`, as for [`PipelinePlan::row`].
    pub fn evaluation_row(&self, rank: usize, micro_batches: usize) -> Vec<Action> {
        self.first(&self.evaluation, rank, micro_batches)
    }

    /// The blocks of each chunk of a rank, counted from the embedding, which the first stage has. The last one has the head.
    pub fn chunks_of(&self, rank: usize) -> Vec<Range<usize>> {
        let last = self.layers.len() - 1;
        let blocks = |stage: usize| {
            let Range { start, end } = self.layers[stage];
            let first = if stage == 0 { 0 } else { start + 1 };
            first..end + 1 + usize::from(stage == last)
        };
        self.placement().stages_of(rank).map(blocks).collect()
    }

    /// The bubble: the part of all ranks' time in which they do not compute, if F, I and W of every stage take equally long
    /// and messages take no time.
    pub fn bubble(&self) -> f64 {
        let costs = vec![StageCosts::UNIT; self.layers.len()];
        let simulated = self.simulated(&costs, 0);
        simulated.map_or(0.0, |simulated| simulated.bubble_fraction())
    }

    /// A step whose stages take as long as `costs` say, and messages `transit` ticks.
    pub fn simulated(&self, costs: &[StageCosts], transit: u64) -> Result<Simulation, Deadlock> {
        simulate(&self.training, costs, transit)
    }

    /// An action for people: `stage 5 of 8, chunk 1, forward of micro-batch 3`.
    pub fn in_words(&self, action: Action) -> String {
        let mut words = format!("stage {} of {}", action.stage, self.layers.len());
        let mut chunks = self.placement().stages_of(action.rank);
        if let (Some(chunk), true) = (
            chunks.position(|stage| stage == action.stage),
            self.layers.len() > self.placement().ranks(),
        ) {
            let _ = write!(words, ", chunk {chunk}");
        }
        let _ = write!(
            words,
            ", {} of micro-batch {}",
            action.kind.noun(),
            action.micro_batch
        );
        words
    }

    /// What a rank does after the last action of its row, in words.
    pub fn behind_row_in_words(&self, rank: usize) -> String {
        let stages: Vec<u64> = (self.placement().stages_of(rank))
            .map(|stage| stage as u64)
            .collect();
        let (held, all) = (numbered("stage", &stages), self.layers.len());
        format!("{held} of {all}, reduction and update")
    }

    /// Hash of the whole plan. Ranks compare it.
    pub fn signature(&self) -> String {
        let text = format!(
            "layers {:?}, {} micro-batches\n{}\n{}",
            self.layers, self.micro_batches, self.training, self.evaluation
        );
        blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
    }

    /// A rank's actions, without those of micro-batch `micro_batches` and later ones.
    fn first(&self, schedule: &Schedule, rank: usize, micro_batches: usize) -> Vec<Action> {
        let row = &schedule.rows()[rank];
        if schedule.micro_batches() == self.micro_batches {
            let is_in_step = |action: &Action| action.micro_batch < micro_batches;
            return row.iter().copied().filter(is_in_step).collect();
        }
        // Without a pipeline: one micro-batch after the other.
        let numbered = |micro_batch| {
            row.iter().map(move |&action| Action {
                micro_batch,
                ..action
            })
        };
        (0..micro_batches).flat_map(numbered).collect()
    }
}

/// Refuses settings of a pipeline if there is no pipeline.
fn check_single(config: &Pipeline) -> Result<(), PlanError> {
    let set = [
        (config.chunks.is_some_and(|chunks| chunks > 1), CHUNKS),
        (config.layers.is_some(), LAYERS),
    ];
    match set.into_iter().find(|(is_set, _)| *is_set && config.stages == 1) {
        None => Ok(()),
        Some((_, key)) => Err(refused(
            key,
            format!("`{key}` is set, but `{STAGES}` is 1: there is no pipeline"),
            format!("set `{STAGES}`, or leave it out"),
        )),
    }
}

/// The sizes of the schedule.
fn shape_of(config: &Pipeline, micro_batches: usize) -> PipelineShape {
    let chunks = config.chunks.unwrap_or_else(|| usual_chunks(config.schedule));
    PipelineShape {
        ranks: config.stages,
        chunks: if config.stages == 1 { 1 } else { chunks },
        micro_batches,
    }
}

/// The kind and the sizes of the schedule. Refuses sizes that are too large.
fn sized(config: &Pipeline, micro_batches: usize) -> Result<(PipelineSchedule, PipelineShape), PlanError> {
    let kind = match config.stages {
        1 => PipelineSchedule::OneFOneB,
        _ => config.schedule,
    };
    let shape = shape_of(config, micro_batches);
    let cells = [shape.ranks, shape.chunks, micro_batches];
    if cells.into_iter().fold(1, usize::saturating_mul) > MAX_FORWARDS {
        return Err(refused(
            "train.grad_accumulation",
            format!(
                "a schedule of {} ranks × {} chunks × {micro_batches} micro-batches has more than {MAX_FORWARDS} forward passes",
                shape.ranks, shape.chunks
            ),
            "use fewer and larger micro-batches",
        ));
    }
    Ok((kind, shape))
}

/// F, B, I and W of a step.
fn generated(config: &Pipeline, micro_batches: usize) -> Result<Schedule, PlanError> {
    let (kind, shape) = sized(config, micro_batches)?;
    let made: Result<Schedule, ShapeError> = match kind {
        PipelineSchedule::GPipe => gpipe(shape),
        PipelineSchedule::OneFOneB => one_f_one_b(shape),
        PipelineSchedule::Interleaved => interleaved_1f1b(shape),
        PipelineSchedule::ZbH1 => zb_h1(shape),
        PipelineSchedule::Zbv => zbv(shape),
        PipelineSchedule::Greedy => greedy(shape),
    };
    made.map_err(|error| {
        // With the chunks that the schedule has anyway, others would not help.
        let chunks = if shape.chunks == usual_chunks(kind) {
            String::new()
        } else {
            format!("`{CHUNKS}` (chunks per rank), ")
        };
        let hint = format!("change {chunks}`train.grad_accumulation` (micro-batches) or `{SCHEDULE}`");
        refused(SCHEDULE, error.to_string(), hint)
    })
}

/// The schedule with its messages. Refuses one that cannot run.
fn complete(schedule: &Schedule, purpose: Purpose) -> Result<Schedule, PlanError> {
    let completed = with_transfers(schedule).map_err(Refusal::from);
    let checked = completed.and_then(|completed| validate(&completed, purpose).map(|()| completed));
    checked.map_err(|refusal| {
        let hint = "use a different `parallel.pipeline.schedule`";
        refused(SCHEDULE, format!("`{SCHEDULE}`: {refusal}"), hint)
    })
}

/// The layers of each stage: from the configuration, else divided by cost.
fn layers(config: &Pipeline, costs: &LayerCosts, stages: usize) -> Result<Vec<Range<usize>>, PlanError> {
    let Some(counts) = &config.layers else {
        return divide_layers(costs, stages)
            .map_err(|error| refused(STAGES, error.to_string(), "use fewer pipeline ranks or chunks"));
    };
    let (sum, all) = (counts.iter().sum::<usize>(), costs.layers.len());
    if counts.len() != stages || sum != all {
        return Err(refused(
            LAYERS,
            format!(
                "`{LAYERS}` has {} that add up to {sum} layers, but there are {} and `model.n_layer` is {all}",
                counted(counts.len() as u64, "number"),
                counted(stages as u64, "stage"),
            ),
            "give one number per stage (ranks × chunks), or leave it out to divide the layers by cost",
        ));
    }
    let mut next = 0;
    let ranges = counts.iter().map(|count| {
        let first = next;
        next += count;
        first..next
    });
    Ok(ranges.collect())
}

/// The fewest chunks per rank that a schedule supports.
fn usual_chunks(kind: PipelineSchedule) -> usize {
    match kind {
        PipelineSchedule::GPipe | PipelineSchedule::OneFOneB | PipelineSchedule::ZbH1 => 1,
        PipelineSchedule::Interleaved | PipelineSchedule::Zbv | PipelineSchedule::Greedy => 2,
    }
}

fn name(kind: PipelineSchedule) -> &'static str {
    match kind {
        PipelineSchedule::GPipe => "GPipe",
        PipelineSchedule::OneFOneB => "1F1B",
        PipelineSchedule::Interleaved => "interleaved 1F1B",
        PipelineSchedule::ZbH1 => "ZB-H1",
        PipelineSchedule::Zbv => "ZBV",
        PipelineSchedule::Greedy => "greedy",
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
