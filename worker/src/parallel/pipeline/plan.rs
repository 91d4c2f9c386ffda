//! The pipeline of a run: from a configuration to a checked schedule, and the layers of each stage.
//! These are pure functions: any caller can compute what every rank will do.
//!
//! A generator or a file makes the schedule of a step, [passes](super::with_transfers) complete it,
//! and the [validator](super::validate) refuses a schedule that cannot run. The last step of an
//! epoch may have fewer micro-batches. It skips the actions of those that it lacks. The remaining
//! actions keep their order, so the step waits for nothing that a whole step does not wait for.

use std::fmt::Write as _;
use std::ops::Range;

use ddp_proto::words::{counted, numbered};

use super::action::{Action, ActionKind, Schedule};
use super::csv::{self, CsvFormat};
use super::generators::{
    PipelineShape, ShapeError, dual_pipe_v, gpipe, greedy, interleaved_1f1b, one_f_one_b, zb_h1, zbv,
};
use super::passes::{forward_only, with_reduction, with_transfers, without_overlap};
use super::simulator::{Deadlock, Links, Simulation, StageCosts, simulate};
use super::stages::{LayerCosts, Placement, divide_layers};
use super::validator::{Purpose, Rules, least_capacity, validate};
use crate::config::{Pipeline, PipelineSchedule};

const STAGES: &str = "parallel.pipeline.stages";
const SCHEDULE: &str = "parallel.pipeline.schedule";
const CHUNKS: &str = "parallel.pipeline.chunks";
const LAYERS: &str = "parallel.pipeline.layers";
const FILE: &str = "parallel.pipeline.file";

pub use crate::config::Problem as PlanError;

/// Most forward passes of a schedule. Schedules are made, checked and simulated before anything
/// starts.
const MAX_CELLS: usize = 1 << 16;

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
    capacity: usize,
}

impl PipelinePlan {
    /// For steps of up to so many micro-batches. `csv` is the text of [`Pipeline::file`], if there is one.
    pub fn new(
        config: &Pipeline,
        micro_batches: usize,
        csv: Option<&str>,
        costs: &LayerCosts,
    ) -> Result<Self, PlanError> {
        check_single(config)?;
        let scheduled = if config.stages == 1 { 1 } else { micro_batches };
        let made = match csv {
            None => generated(config, scheduled)?,
            Some(text) => read(config, micro_batches, text)?,
        };
        let key = if csv.is_some() { FILE } else { SCHEDULE };
        let layers = layers(config, costs, made.placement().stages())?;
        // The schedule must already be valid before messages are added.
        let apart = without_overlap(&made);
        check(key, &apart, Purpose::Training)?;
        let (training, evaluation) = (completed(&apart), with_transfers(&forward_only(&apart)));
        check(key, &training, Purpose::Training)?;
        check(key, &evaluation, Purpose::Evaluation)?;
        let least = [&training, &evaluation].map(|schedule| least_capacity(schedule).unwrap_or(1));
        let capacity = least.into_iter().fold(1, usize::max);
        Ok(Self {
            name: csv.map_or(name(config.schedule), |_| "from a file"),
            layers,
            micro_batches,
            training,
            evaluation,
            capacity,
        })
    }

    /// Refuses a generated schedule for steps of so many micro-batches that would be too large, without making it.
    pub fn check_size(config: &Pipeline, micro_batches: usize) -> Result<(), PlanError> {
        match (&config.file, config.stages) {
            (Some(_), _) | (_, 1) => Ok(()),
            (None, _) => sized(config, micro_batches).map(drop),
        }
    }

    /// The schedule of this name, for a model with enough layers. Without `chunks`, as few as the
    /// schedule supports.
    pub fn named(
        schedule: &str,
        (ranks, chunks): (usize, Option<usize>),
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
            file: None,
        };
        let stages = ranks.saturating_mul(chunks.unwrap_or_else(|| usual_chunks(schedule)));
        // A larger number is refused later.
        let stages = stages.min(MAX_CELLS);
        Self::new(&config, micro_batches, None, &LayerCosts::equal(stages))
    }

    /// The schedule of a CSV table, for a model with enough layers.
    pub fn of_csv(text: &str) -> Result<Self, PlanError> {
        let schedule = parsed(text)?;
        let (placement, micro_batches) = (schedule.placement(), schedule.micro_batches());
        let config = Pipeline {
            stages: placement.ranks(),
            schedule: PipelineSchedule::OneFOneB,
            chunks: None,
            layers: None,
            file: None,
        };
        Self::new(
            &config,
            micro_batches,
            Some(text),
            &LayerCosts::equal(placement.stages()),
        )
    }

    /// The smallest and the largest number of micro-batches that the schedule of a configuration
    /// supports. It must support `given`.
    pub fn micro_batches_for(config: &Pipeline, given: usize) -> (usize, usize) {
        let PipelineShape { ranks, chunks, .. } = shape_of(config, given);
        let most = MAX_CELLS / ranks.saturating_mul(chunks).max(1);
        match config.schedule {
            _ if config.stages == 1 => (1, usize::MAX),
            _ if config.file.is_some() => (given, given),
            PipelineSchedule::DualPipeV => (2 * config.stages, most),
            _ => (1, most),
        }
    }

    /// Name of the schedule, for people.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What ranks do in a step: computing, messages and reductions.
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

    /// Most actions of a rank in a step.
    pub fn actions(&self) -> usize {
        let ranks = 0..self.placement().ranks();
        ranks
            .map(|rank| self.training.actions(rank).count())
            .max()
            .unwrap_or(0)
    }

    /// Messages that the queue of an edge must hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// What a rank does in a step of so many micro-batches, which are no more than [`PipelinePlan::micro_batches`].
    pub fn row(&self, rank: usize, micro_batches: usize) -> Vec<Action> {
        self.first(&self.training, rank, micro_batches)
    }

    /// What a rank does to compute the losses of so many micro-batches, as for [`PipelinePlan::row`].
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

    /// The part of all ranks' time in which they do not compute, if F, I and W of every stage take equally long and messages
    /// no time.
    pub fn bubble(&self) -> f64 {
        let costs = vec![StageCosts::UNIT; self.layers.len()];
        let simulated = self.simulated(&costs, Links::IDEAL);
        simulated.map_or(0.0, |simulated| simulated.bubble_fraction())
    }

    /// A step whose stages take as long as `costs` say.
    pub fn simulated(&self, costs: &[StageCosts], links: Links) -> Result<Simulation, Deadlock> {
        simulate(&self.training, costs, links)
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
        let _ = write!(words, ", {}", action.kind.noun());
        if let Some(number) = action.micro_batch {
            let _ = write!(words, " of micro-batch {number}");
        }
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
        let schedule = csv::write(&self.training, CsvFormat::ComputeComms);
        let text = format!(
            "layers {:?}, {} micro-batches\n{schedule}",
            self.layers, self.micro_batches
        );
        blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
    }

    /// A rank's actions, without those of micro-batch `micro_batches` and later ones.
    fn first(&self, schedule: &Schedule, rank: usize, micro_batches: usize) -> Vec<Action> {
        if schedule.micro_batches() == self.micro_batches {
            let is_of_them = |action: &Action| action.micro_batch.is_none_or(|number| number < micro_batches);
            return schedule.actions(rank).filter(is_of_them).collect();
        }
        // Without a pipeline: one after the other, then what is done once.
        let numbered = (0..micro_batches).flat_map(|number| {
            let actions = schedule
                .actions(rank)
                .filter(|action| action.micro_batch.is_some());
            actions.map(move |action| Action {
                micro_batch: Some(number),
                ..action
            })
        });
        let once = schedule
            .actions(rank)
            .filter(|action| action.micro_batch.is_none());
        numbered.chain(once).collect()
    }
}

/// Refuses settings of a pipeline if there is no pipeline.
fn check_single(config: &Pipeline) -> Result<(), PlanError> {
    let set = [
        (config.chunks.is_some_and(|chunks| chunks > 1), CHUNKS),
        (config.layers.is_some(), LAYERS),
        (config.file.is_some(), FILE),
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
    if cells.into_iter().fold(1, usize::saturating_mul) > MAX_CELLS {
        return Err(refused(
            "train.grad_accumulation",
            format!(
                "a schedule of {} ranks × {} chunks × {micro_batches} micro-batches has more than {MAX_CELLS} forward passes",
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
        PipelineSchedule::DualPipeV => dual_pipe_v(shape),
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

fn parsed(text: &str) -> Result<Schedule, PlanError> {
    csv::read(text).map_err(|error| {
        let hint =
            "each row is a rank, each cell an action such as `0F1`, as PyTorch's pipelining writes them";
        refused(FILE, format!("`{FILE}` is not a valid schedule: {error}"), hint)
    })
}

/// The schedule of a file, in either of PyTorch's forms.
fn read(config: &Pipeline, micro_batches: usize, text: &str) -> Result<Schedule, PlanError> {
    let schedule = parsed(text)?;
    let (ranks, stages) = (schedule.placement().ranks(), schedule.placement().stages());
    if ranks != config.stages {
        return Err(refused(
            STAGES,
            format!(
                "`{FILE}` has {}, but `{STAGES}` is {}",
                counted(ranks as u64, "row"),
                config.stages
            ),
            format!("set `{STAGES}: {ranks}`, or use a different file"),
        ));
    }
    // Tied weights are on the first and the last rank, or on the first alone.
    let ends = [0, stages - 1].map(|stage| schedule.placement().rank_of(stage));
    if ends[0] != 0 || (ends[1] != 0 && ends[1] != ranks - 1) {
        return Err(refused(
            FILE,
            format!(
                "`{FILE}` has the first stage on rank {}, and the last on rank {}",
                ends[0], ends[1]
            ),
            "put the first stage in the first row, and the last stage in the last row or in the first",
        ));
    }
    if let Some(chunks) = config.chunks.filter(|chunks| chunks * ranks != stages) {
        return Err(refused(
            CHUNKS,
            format!(
                "`{CHUNKS}` is {chunks}, but `{FILE}` has {} on {ranks} ranks",
                counted(stages as u64, "stage")
            ),
            "leave it out: the file determines it",
        ));
    }
    if schedule.micro_batches() != micro_batches {
        let of_file = schedule.micro_batches();
        return Err(refused(
            "train.grad_accumulation",
            format!(
                "`{FILE}` is for {}, but `train.grad_accumulation` is {micro_batches}",
                counted(of_file as u64, "micro-batch")
            ),
            format!("set `train.grad_accumulation: {of_file}`, or use a different file"),
        ));
    }
    Ok(schedule)
}

/// Refuses a schedule that cannot run.
fn check(key: &'static str, schedule: &Schedule, purpose: Purpose) -> Result<(), PlanError> {
    let rules = Rules {
        purpose,
        capacity: None,
    };
    validate(schedule, rules).map_err(|refusal| {
        let hint = match key {
            FILE => "correct the table: each row lists the actions of one rank, in the order in which it runs them",
            _ => "use a different `parallel.pipeline.schedule`",
        };
        refused(key, format!("`{key}`: {refusal}"), hint)
    })
}

/// Adds the reductions of gradients, and the messages between ranks.
fn completed(made: &Schedule) -> Schedule {
    let is_reduction = |action: Action| action.kind == ActionKind::ReduceGradient;
    let mut ranks = 0..made.rows().len();
    let reduced = if ranks.any(|rank| made.actions(rank).any(is_reduction)) {
        made.clone()
    } else {
        with_reduction(made)
    };
    if reduced.has_transfers() {
        reduced
    } else {
        with_transfers(&reduced)
    }
}

/// The layers of each stage: from the configuration, else divided by cost.
fn layers(config: &Pipeline, costs: &LayerCosts, stages: usize) -> Result<Vec<Range<usize>>, PlanError> {
    let Some(counts) = &config.layers else {
        return divide_layers(costs, stages).map_err(|error| {
            let text = error.to_string();
            let (what, hint) = text.split_once("\n  hint: ").unwrap_or((&text, ""));
            refused(STAGES, what.to_owned(), hint)
        });
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
        PipelineSchedule::Interleaved
        | PipelineSchedule::Zbv
        | PipelineSchedule::DualPipeV
        | PipelineSchedule::Greedy => 2,
    }
}

fn name(kind: PipelineSchedule) -> &'static str {
    match kind {
        PipelineSchedule::GPipe => "GPipe",
        PipelineSchedule::OneFOneB => "1F1B",
        PipelineSchedule::Interleaved => "interleaved 1F1B",
        PipelineSchedule::ZbH1 => "ZB-H1",
        PipelineSchedule::Zbv => "ZBV",
        PipelineSchedule::DualPipeV => "DualPipeV",
        PipelineSchedule::Greedy => "greedy",
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
