//! The layouts of given machines with the shortest steps: every mesh pp × dp × tp that divides, with every schedule and
//! strategy. The global batch stays that of the configuration: with fewer data-parallel ranks each has more micro-batches.
//!
//! What ranks compute and exchange within tensor groups, and the least that any schedule lets them wait, is a bound from below
//! that costs nothing. Meshes are looked at in its order, until none that is left can be among the best. Of the schedules 1F1B
//! holds least: where it does not fit, none does.

use std::collections::BTreeMap;

use super::candidate::{Candidate, Machines, PlannedMesh, exchanged};
use super::step_times::BusyTimes;
use crate::config::{PipelineSchedule, ShardGroup, Strategy, TrainConfig};
use crate::mesh::DATA;
use crate::train::TrainError;

/// Layouts that are laid out, at most.
const MAX_LAID_OUT: usize = 256;
/// A step that is shorter by less than this part is as long.
const SAME: f64 = 1e-3;
/// Chunks a rank of interleaved schedules: more of them send more messages.
const INTERLEAVED: [usize; 2] = [2, 4];
/// Of a rank alone as well.
const ONE_F_ONE_B: Schedule = (PipelineSchedule::OneFOneB, None);

/// The best layouts of given machines.
#[derive(Clone, Debug, PartialEq)]
pub struct LayoutSearch {
    /// Those that fit with the shortest steps, the shortest first: the best one of each mesh.
    pub best: Vec<FoundLayout>,
    /// Meshes that might have as short a step, but of which no layout fits.
    pub too_large: Vec<TooLarge>,
    /// Meshes of which every layout takes longer.
    pub slower: usize,
    /// There were so many layouts that some were not looked at.
    pub is_cut: bool,
}

/// A layout, and how to choose it.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundLayout {
    /// What it costs.
    pub candidate: Candidate,
    /// `KEY=VALUE` of what differs from the configuration.
    pub settings: Vec<String>,
}

/// A mesh that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// As `pp 4 × dp 2 × tp 8`.
    pub layout: String,
    /// What holds least.
    pub strategy: Strategy,
    /// Bytes that a device needs then, at least.
    pub held: u64,
}

impl LayoutSearch {
    /// The `wanted` best layouts of a configuration on machines. None if it gives a layout itself, if there is one rank only,
    /// or if the memory or a rate of the machines is not known.
    pub fn of(config: &TrainConfig, machines: &Machines, wanted: usize) -> Result<Option<Self>, TrainError> {
        let (parallel, cluster) = (&config.parallel, &machines.cluster);
        let is_given = parallel.tensor > 1 || parallel.pipeline.stages > 1;
        let is_known = machines.memory.is_some()
            && machines.flops.is_some()
            && (cluster.ranks_a_node == 1 || cluster.link.is_some())
            && (cluster.nodes == 1 || cluster.network.is_some());
        if is_given || !is_known || cluster.ranks() == 1 {
            return Ok(None);
        }
        let meshes = meshes(config, machines)?;
        let mut search = Search {
            config,
            machines,
            wanted: wanted.max(1),
            fit: BTreeMap::new(),
            too_large: BTreeMap::new(),
            laid_out: 0,
        };
        let mut looked_at = 0;
        for mesh in &meshes {
            if mesh.floor() >= search.limit() || search.laid_out >= MAX_LAID_OUT {
                break;
            }
            looked_at += 1;
            search.look_at(mesh)?;
        }
        Ok(Some(search.result(meshes.len() - looked_at)))
    }
}

impl FoundLayout {
    fn new(candidate: Candidate, now: &TrainConfig, then: &TrainConfig) -> Self {
        let settings = settings(then).into_iter().zip(settings(now));
        let differing = settings.filter(|((_, then), (_, now))| then != now);
        let written = differing.filter_map(|((key, value), _)| Some(format!("{key}={}", value?)));
        Self {
            settings: written.collect(),
            candidate,
        }
    }

    /// Faster, or as fast and less to send. Padding alone is no difference.
    fn is_better(&self, other: &Self) -> bool {
        let sent = |found: &Self| found.candidate.sent.along(&DATA);
        let is_as_fast = self.seconds() <= other.seconds() * (1.0 + SAME);
        self.seconds() < other.seconds() * (1.0 - SAME) || is_as_fast && sent(self) * 100 < sent(other) * 99
    }

    fn seconds(&self) -> f64 {
        self.candidate.seconds().unwrap_or(f64::INFINITY)
    }
}

/// Pipeline and tensor ranks.
type MeshKey = (usize, usize);

/// With its chunks.
type Schedule = (PipelineSchedule, Option<usize>);

/// A mesh, before its schedule is chosen.
struct UnscheduledMesh {
    config: TrainConfig,
    busy: BusyTimes,
    /// The least time of a step with each of its schedules, in that order.
    schedules: Vec<(f64, Schedule)>,
}

impl UnscheduledMesh {
    fn new(mut config: TrainConfig, machines: &Machines, exchanged: u64) -> Result<Self, TrainError> {
        config.parallel.strategy = Strategy::Ddp;
        let (stages, micro_batches) = (config.parallel.pipeline.stages, config.train.grad_accumulation);
        let busy = BusyTimes::of(&config, (&machines.cluster, machines.flops), exchanged)?;
        let forward = busy.compute.unwrap_or(f64::INFINITY) / (3 * micro_batches) as f64;
        let floor =
            |waiting: f64| busy.sum().unwrap_or(f64::INFINITY) + waiting * (stages - 1) as f64 * forward;
        let mut schedules: Vec<_> = (schedules(stages, micro_batches).into_iter())
            .map(|(waiting, schedule)| (floor(waiting), schedule))
            .collect();
        schedules.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        Ok(Self {
            config,
            busy,
            schedules,
        })
    }

    fn key(&self) -> MeshKey {
        (self.config.parallel.pipeline.stages, self.config.parallel.tensor)
    }

    /// No layout of it has a shorter step.
    fn floor(&self) -> f64 {
        self.schedules[0].0
    }

    /// With a schedule; none if that does not exist for its sizes.
    fn planned<'a>(
        &self,
        (schedule, chunks): Schedule,
        machines: &'a Machines,
    ) -> Result<Option<PlannedMesh<'a>>, TrainError> {
        let mut config = self.config.clone();
        config.parallel.pipeline.schedule = schedule;
        config.parallel.pipeline.chunks = chunks;
        possible(PlannedMesh::new(config, machines, machines.cluster, self.busy))
    }
}

/// None where the model, its optimizer or a schedule cannot be divided so.
fn possible<T>(result: Result<T, TrainError>) -> Result<Option<T>, TrainError> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(
            TrainError::Model(_)
            | TrainError::Refused(_)
            | TrainError::Mesh(_)
            | TrainError::Layout(_)
            | TrainError::Pipeline(_),
        ) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Every mesh that divides the ranks of the machines, the model and the global batch, in the order of their least times.
fn meshes(config: &TrainConfig, machines: &Machines) -> Result<Vec<UnscheduledMesh>, TrainError> {
    let cluster = &machines.cluster;
    let (ranks, here) = (cluster.ranks() as usize, cluster.ranks_a_node as usize);
    let samples = config.train.grad_accumulation * ranks;
    let divisors = |n: usize| (1..=n).filter(move |divisor| n.is_multiple_of(*divisor));
    let is_near = |tensor: usize| here.is_multiple_of(tensor) || config.parallel.tensor_across_nodes;
    let mut meshes = Vec::new();
    for tensor in divisors(ranks).filter(|tensor| is_near(*tensor)) {
        let mut config = config.clone();
        let rows = config.train.micro_batch * config.model.block_size;
        config.parallel.tensor = tensor;
        config.parallel.sequence = tensor > 1 && rows.is_multiple_of(tensor);
        let Some(exchanged) = possible(exchanged(&config))? else {
            continue;
        };
        for stages in divisors(ranks / tensor).filter(|stages| *stages <= config.model.n_layer) {
            let data = ranks / tensor / stages;
            if samples.is_multiple_of(data) {
                config.train.grad_accumulation = samples / data;
                config.parallel.pipeline.stages = stages;
                meshes.push(UnscheduledMesh::new(config.clone(), machines, exchanged)?);
            }
        }
    }
    meshes.sort_by(|a, b| a.floor().total_cmp(&b.floor()));
    Ok(meshes)
}

/// The schedules of a pipeline, and for how many forwards of a micro-batch a rank waits at least for each other rank, if F, I
/// and W last as long. GPipe takes as long as 1F1B and holds more, DualPipeV as long as ZBV.
fn schedules(stages: usize, micro_batches: usize) -> Vec<(f64, Schedule)> {
    let mut schedules = vec![(3.0, ONE_F_ONE_B)];
    if stages == 1 {
        return schedules;
    }
    schedules.extend([
        (1.0, (PipelineSchedule::ZbH1, None)),
        (0.5, (PipelineSchedule::Zbv, None)),
    ]);
    let interleaved = |chunks| (3.0 / chunks as f64, (PipelineSchedule::Interleaved, Some(chunks)));
    schedules.extend(INTERLEAVED.map(interleaved));
    if micro_batches < 2 * stages - 1 {
        schedules.push((0.5, (PipelineSchedule::Greedy, None)));
    }
    schedules
}

/// What was found so far.
struct Search<'a> {
    config: &'a TrainConfig,
    machines: &'a Machines,
    wanted: usize,
    /// The best layout of each mesh.
    fit: BTreeMap<MeshKey, FoundLayout>,
    too_large: BTreeMap<MeshKey, TooLarge>,
    laid_out: usize,
}

impl Search<'_> {
    /// A layout whose step is no shorter is not among the best.
    fn limit(&self) -> f64 {
        let mut steps: Vec<f64> = self.fit.values().map(FoundLayout::seconds).collect();
        steps.sort_by(f64::total_cmp);
        steps.get(self.wanted - 1).copied().unwrap_or(f64::INFINITY)
    }

    /// Lays out what of a mesh may be its best layout, if one fits.
    fn look_at(&mut self, mesh: &UnscheduledMesh) -> Result<(), TrainError> {
        if !self.has_room(mesh)? {
            return Ok(());
        }
        for &(floor, schedule) in &mesh.schedules {
            if self.is_better_known(mesh.key(), floor) {
                continue;
            }
            let Some(planned) = mesh.planned(schedule, self.machines)? else {
                continue;
            };
            if !self.is_better_known(mesh.key(), planned.times.pipeline.unwrap_or(f64::INFINITY)) {
                self.laid_out += 1;
                self.lay_out(mesh.key(), &planned)?;
            }
        }
        Ok(())
    }

    /// A layout of this mesh fits, and is as fast.
    fn is_better_known(&self, key: MeshKey, seconds: f64) -> bool {
        let known = self.fit.get(&key);
        known.is_some_and(|known| seconds >= known.seconds() * (1.0 - SAME))
    }

    /// The first stage fits with the schedule and the strategy that hold least.
    fn has_room(&mut self, mesh: &UnscheduledMesh) -> Result<bool, TrainError> {
        let Some(planned) = mesh.planned(ONE_F_ONE_B, self.machines)? else {
            return Ok(false);
        };
        let activations = planned.activations_of_first()?;
        for (strategy, group) in self.strategies(mesh.key()) {
            let Some(shared) = possible(planned.sharing(strategy, group))? else {
                continue;
            };
            let held = shared.held_by_first(activations)?;
            if self.machines.memory.is_none_or(|memory| held <= memory) {
                return Ok(true);
            }
            let layout = shared.layout();
            self.keep_too_large(
                mesh.key(),
                TooLarge {
                    layout,
                    strategy,
                    held,
                },
            );
        }
        Ok(false)
    }

    /// Lays it out with every strategy.
    fn lay_out(&mut self, key: MeshKey, planned: &PlannedMesh<'_>) -> Result<(), TrainError> {
        let activations = planned.activations()?;
        for (strategy, group) in self.strategies(key) {
            if let Some(shared) = possible(planned.sharing(strategy, group))? {
                let found = shared.candidate(&activations)?;
                self.keep(key, FoundLayout::new(found, self.config, &shared.config));
            }
        }
        Ok(())
    }

    fn strategies(&self, (stages, _): MeshKey) -> Vec<(Strategy, Option<ShardGroup>)> {
        let mut strategies = vec![(Strategy::Ddp, None)];
        let groups = match self.config.parallel.shard_group {
            Some(given) => vec![Some(given)],
            None => vec![None, Some(ShardGroup::Node)],
        };
        // Where both send as much, ZeRO-2 holds less.
        for strategy in [Strategy::Zero2, Strategy::Zero1, Strategy::Zero3] {
            // A stage of a pipeline holds whole gradients: ZeRO-2 is ZeRO-1 there.
            if strategy != Strategy::Zero2 || stages == 1 {
                strategies.extend(groups.iter().map(|group| (strategy, *group)));
            }
        }
        strategies
    }

    /// Keeps the fastest one of a mesh that fits, and of equally fast ones that which sends least.
    fn keep(&mut self, key: MeshKey, found: FoundLayout) {
        let candidate = &found.candidate;
        // On one data-parallel rank, or in groups of one, it is another one's twin.
        if candidate.estimate.strategy != candidate.strategy {
            return;
        }
        if candidate.fits == Some(false) {
            let (layout, strategy, held) = (candidate.layout(), candidate.strategy, candidate.held);
            self.keep_too_large(
                key,
                TooLarge {
                    layout,
                    strategy,
                    held,
                },
            );
        } else if self.fit.get(&key).is_none_or(|known| found.is_better(known)) {
            self.fit.insert(key, found);
        }
    }

    /// Keeps the smallest one of a mesh.
    fn keep_too_large(&mut self, key: MeshKey, found: TooLarge) {
        if self
            .too_large
            .get(&key)
            .is_none_or(|known| found.held < known.held)
        {
            self.too_large.insert(key, found);
        }
    }

    /// So many meshes were not looked at.
    fn result(mut self, rest: usize) -> LayoutSearch {
        self.too_large.retain(|key, _| !self.fit.contains_key(key));
        let mut best: Vec<FoundLayout> = self.fit.into_values().collect();
        best.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
        let slower = rest + best.len().saturating_sub(self.wanted);
        best.truncate(self.wanted);
        LayoutSearch {
            best,
            too_large: self.too_large.into_values().collect(),
            slower,
            is_cut: rest > 0 && self.laid_out >= MAX_LAID_OUT,
        }
    }
}

/// The keys that make a layout, and their values as people write them; none where the default is meant.
fn settings(config: &TrainConfig) -> [(&'static str, Option<String>); 8] {
    let (parallel, pipeline) = (&config.parallel, &config.parallel.pipeline);
    let word = |value: serde_json::Result<serde_json::Value>| match value {
        Ok(serde_json::Value::String(word)) => Some(word),
        Ok(serde_json::Value::Null) | Err(_) => None,
        Ok(other) => Some(other.to_string()),
    };
    let has_pipeline = pipeline.stages > 1;
    [
        ("parallel.tensor", Some(parallel.tensor.to_string())),
        ("parallel.sequence", Some(parallel.sequence.to_string())),
        ("parallel.pipeline.stages", Some(pipeline.stages.to_string())),
        (
            "parallel.pipeline.schedule",
            word(serde_json::to_value(pipeline.schedule)).filter(|_| has_pipeline),
        ),
        (
            "parallel.pipeline.chunks",
            pipeline
                .chunks
                .filter(|_| has_pipeline)
                .map(|chunks| chunks.to_string()),
        ),
        ("parallel.strategy", word(serde_json::to_value(parallel.strategy))),
        (
            "parallel.shard_group",
            word(serde_json::to_value(parallel.shard_group)).filter(|_| parallel.strategy != Strategy::Ddp),
        ),
        (
            "train.grad_accumulation",
            Some(config.train.grad_accumulation.to_string()),
        ),
    ]
}

#[cfg(test)]
#[path = "search_tests.rs"]
mod tests;
