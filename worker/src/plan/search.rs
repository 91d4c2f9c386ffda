//! The layouts of given machines with the shortest steps: every mesh pp × dp × tp that divides, with every schedule and
//! strategy, and with more recomputation than configured. The global batch stays that of the configuration: with fewer
//! data-parallel ranks each has more micro-batches.
//!
//! What ranks compute and exchange within tensor groups, and the least that any schedule lets them wait, is a bound from below
//! that costs nothing. Meshes are looked at in its order, until none that is left can be among the best. A mesh is too large if
//! it fits with no schedule. 1F1B does not always hold least: a tied embedding is on two of its ranks, and on one of a V; and
//! more chunks share layers out more evenly.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::candidate::{Candidate, PlannedMesh, exchanged, rehearsed_micro_batches, under};
use super::step_times::{BusyTimes, Machines};
use crate::config::{PipelineSchedule, Recompute, ShardGroup, Strategy, TrainConfig};
use crate::mesh::GRADIENTS;
use crate::train::TrainError;

/// Passes of a micro-batch through a layer that are rehearsed, at most.
const MAX_REHEARSED: usize = 1_000_000;
/// A step that is shorter by less than this part is as long.
const SAME: f64 = 1e-3;
/// Chunks a rank of interleaved schedules: more of them send more messages.
const INTERLEAVED: [usize; 2] = [2, 4];
/// Forwards for which a rank waits at least for each other rank of a pipeline, with the best schedule.
const LEAST_WAITING: f64 = 0.5;

/// The best layouts of given machines.
#[derive(Clone, Debug, PartialEq)]
pub struct LayoutSearch {
    /// Those that fit with the shortest steps, the shortest first: the best one of each mesh.
    pub best: Vec<FoundLayout>,
    /// The smallest layout of each mesh that might have as short a step, but of which none fits; of those that were laid out.
    pub too_large: Vec<FoundLayout>,
    /// Meshes of which every layout takes longer.
    pub slower: usize,
    /// Meshes that were not searched, because there are too many: one of them may be the best.
    pub not_looked_at: usize,
}

/// A layout, and how to choose it.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundLayout {
    /// What it costs.
    pub candidate: Candidate,
    /// `KEY=VALUE` of what differs from the configuration.
    pub settings: Vec<String>,
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
            rehearsed: 0,
        };
        let mut looked_at = 0;
        for mesh in &meshes {
            if mesh.floor(LEAST_WAITING) >= search.limit() || search.rehearsed >= MAX_REHEARSED {
                break;
            }
            looked_at += 1;
            search.look_at(mesh)?;
        }
        let limit = search.limit();
        let mut rest = BTreeMap::new();
        for mesh in meshes[looked_at..].iter().rev() {
            rest.insert(mesh.key(), mesh.floor(LEAST_WAITING));
        }
        rest.retain(|key, _| !search.fit.contains_key(key));
        // With more recomputation it may fit.
        search.too_large.retain(|key, _| !rest.contains_key(key));
        let slower = rest.values().filter(|floor| **floor >= limit).count();
        Ok(Some(search.result(slower, rest.len() - slower)))
    }
}

impl FoundLayout {
    /// Faster, or as fast and less to send. Padding alone is no difference.
    fn is_better(&self, other: &Self) -> bool {
        let sent = |found: &Self| found.candidate.sent.along(&GRADIENTS);
        let is_as_fast = self.seconds() <= other.seconds() * (1.0 + SAME);
        self.seconds() < other.seconds() * (1.0 - SAME) || is_as_fast && sent(self) * 100 < sent(other) * 99
    }

    fn seconds(&self) -> f64 {
        self.candidate.seconds().unwrap_or(f64::INFINITY)
    }
}

/// Pipeline and tensor ranks.
type MeshKey = (usize, usize);

/// A schedule and its chunks per rank.
type Schedule = (PipelineSchedule, Option<usize>);

/// A mesh, before its schedule is chosen.
struct UnscheduledMesh {
    config: TrainConfig,
    busy: BusyTimes,
}

impl UnscheduledMesh {
    fn key(&self) -> MeshKey {
        (self.config.parallel.pipeline.stages, self.config.parallel.tensor)
    }

    /// The least time of a step with a schedule that lets a rank wait for so many forwards of a micro-batch for each other
    /// rank.
    fn floor(&self, waiting: f64) -> f64 {
        let (stages, _) = self.key();
        let forwards = (3 * self.config.train.grad_accumulation) as f64;
        let forward = self.busy.compute.unwrap_or(f64::INFINITY) / forwards;
        self.busy.sum().unwrap_or(f64::INFINITY) + waiting * (stages - 1) as f64 * forward
    }

    /// The schedules of its pipeline, and for how many forwards of a micro-batch a rank waits at least for each other rank, if
    /// F, I and W last as long. GPipe takes as long as 1F1B and never holds less.
    fn schedules(&self) -> Vec<(f64, Schedule)> {
        let (stages, _) = self.key();
        let mut schedules = vec![(3.0, (PipelineSchedule::OneFOneB, None))];
        if stages > 1 {
            schedules.push((0.5, (PipelineSchedule::Zbv, None)));
            if self.config.train.grad_accumulation < 2 * stages - 1 {
                schedules.push((0.5, (PipelineSchedule::Greedy, None)));
            }
            schedules.push((1.0, (PipelineSchedule::ZbH1, None)));
            let interleaved = |chunks| (3.0 / chunks as f64, (PipelineSchedule::Interleaved, Some(chunks)));
            schedules.extend(INTERLEAVED.map(interleaved));
        }
        schedules
    }
}

/// None where the model, its optimizer or a schedule cannot be divided so.
fn possible<T>(result: Result<T, TrainError>) -> Result<Option<T>, TrainError> {
    match result {
        Ok(found) => Ok(Some(found)),
        // No layout has a parameter group's parameters.
        Err(TrainError::Config(problem)) if problem.key.starts_with("train.optimizer.groups") => {
            Err(TrainError::Config(problem))
        }
        Err(TrainError::Config(_) | TrainError::Refused(_) | TrainError::Layout(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Every mesh that divides the ranks of the machines, the model and the global batch, in the order of their least times: with
/// the recomputation of the configuration, and with each that keeps less.
fn meshes(config: &TrainConfig, machines: &Machines) -> Result<Vec<UnscheduledMesh>, TrainError> {
    let mut meshes = Vec::new();
    for recompute in [
        Recompute::Nothing,
        Recompute::Norms,
        Recompute::Selective,
        Recompute::Full,
    ] {
        if recompute >= config.train.recompute {
            let mut config = config.clone();
            config.train.recompute = recompute;
            meshes.extend(recomputing_meshes(&config, machines)?);
        }
    }
    meshes.sort_by(|a, b| a.floor(LEAST_WAITING).total_cmp(&b.floor(LEAST_WAITING)));
    Ok(meshes)
}

fn recomputing_meshes(config: &TrainConfig, machines: &Machines) -> Result<Vec<UnscheduledMesh>, TrainError> {
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
                let busy = BusyTimes::of(&config, machines, exchanged)?;
                meshes.push(UnscheduledMesh {
                    config: under(&config, Strategy::Ddp),
                    busy,
                });
            }
        }
    }
    Ok(meshes)
}

/// A search and its results until now.
struct Search<'a> {
    config: &'a TrainConfig,
    machines: &'a Machines,
    wanted: usize,
    /// The best layout of each mesh.
    fit: BTreeMap<MeshKey, FoundLayout>,
    /// The smallest one.
    too_large: BTreeMap<MeshKey, FoundLayout>,
    /// Passes of a micro-batch through a layer.
    rehearsed: usize,
}

impl Search<'_> {
    /// A layout whose step is no shorter is not among the best.
    fn limit(&self) -> f64 {
        let mut steps: Vec<f64> = self.fit.values().map(FoundLayout::seconds).collect();
        steps.sort_by(f64::total_cmp);
        steps.get(self.wanted - 1).copied().unwrap_or(f64::INFINITY)
    }

    /// Lays out what of a mesh may be its best layout, and as long as none fits every schedule.
    fn look_at(&mut self, mesh: &UnscheduledMesh) -> Result<(), TrainError> {
        let key = mesh.key();
        for (waiting, (schedule, chunks)) in mesh.schedules() {
            if self.is_better_known(key, mesh.floor(waiting)) {
                continue;
            }
            let mut config = mesh.config.clone();
            config.parallel.pipeline.schedule = schedule;
            config.parallel.pipeline.chunks = chunks;
            let planned = PlannedMesh::new(config, self.machines, mesh.busy);
            let Some(planned) = possible(planned)? else {
                continue;
            };
            if !self.is_better_known(key, planned.times.pipeline.unwrap_or(f64::INFINITY)) {
                self.lay_out(key, &planned)?;
            }
        }
        Ok(())
    }

    /// A layout of this mesh fits, and is as fast.
    fn is_better_known(&self, key: MeshKey, seconds: f64) -> bool {
        let known = self.fit.get(&key);
        known.is_some_and(|known| seconds >= known.seconds() * (1.0 - SAME))
    }

    /// Lays it out with every strategy, if one of them may fit, or be the smallest of the mesh.
    fn lay_out(&mut self, key: MeshKey, planned: &PlannedMesh<'_>) -> Result<(), TrainError> {
        let memory = self.machines.memory.unwrap_or(u64::MAX);
        let most = match (self.fit.get(&key), self.too_large.get(&key)) {
            (None, None) => u64::MAX,
            (None, Some(known)) => known.candidate.held,
            (Some(_), _) => memory,
        };
        let sharded = possible(planned.sharing(Strategy::Zero3, self.config.parallel.shard_group))?;
        let least = sharded.map_or(Ok(0), |sharded| sharded.least_state())?;
        let Some(activations) = planned.activations(most.saturating_sub(least))? else {
            return Ok(());
        };
        self.rehearsed += rehearsed_micro_batches(&planned.config) * self.config.model.n_layer;
        let mut fitting = Vec::new();
        for (strategy, group) in self.strategies(key) {
            // Where another strategy fits, ZeRO-3 only sends more.
            if strategy == Strategy::Zero3 && fitting.contains(&group) {
                continue;
            }
            let Some(shared) = possible(planned.sharing(strategy, group))? else {
                continue;
            };
            let candidate = shared.candidate(&activations, memory)?;
            if strategy != Strategy::Ddp && candidate.fits == Some(true) {
                fitting.push(group);
            }
            let settings = settings(self.config, &shared.config);
            self.keep(key, FoundLayout { candidate, settings });
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

    /// Keeps the fastest one of a mesh that fits, and of equally fast ones that which sends least; and the smallest that does
    /// not fit.
    fn keep(&mut self, key: MeshKey, found: FoundLayout) {
        let candidate = &found.candidate;
        // On one data-parallel rank, or in groups of one, it is another one's twin.
        if candidate.estimate.strategy != candidate.strategy {
            return;
        }
        let (kept, is_better): (_, fn(&FoundLayout, &FoundLayout) -> bool) = match candidate.fits {
            Some(false) => (&mut self.too_large, |found, known| {
                found.candidate.held < known.candidate.held
            }),
            _ => (&mut self.fit, FoundLayout::is_better),
        };
        if kept.get(&key).is_none_or(|known| is_better(&found, known)) {
            kept.insert(key, found);
        }
    }

    /// Of the meshes that were not searched, `slower` cannot be faster than what was found, and `not_looked_at` may be.
    fn result(mut self, slower: usize, not_looked_at: usize) -> LayoutSearch {
        self.too_large.retain(|key, _| !self.fit.contains_key(key));
        let mut best: Vec<FoundLayout> = self.fit.into_values().collect();
        best.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
        let slower = slower + best.len().saturating_sub(self.wanted);
        best.truncate(self.wanted);
        LayoutSearch {
            best,
            too_large: self.too_large.into_values().collect(),
            slower,
            not_looked_at,
        }
    }
}

/// `KEY=VALUE` of what differs between two configurations, as people write it.
pub(super) fn settings(now: &TrainConfig, then: &TrainConfig) -> Vec<String> {
    let sections = |config: &TrainConfig| json!({ "parallel": config.parallel, "train": config.train });
    let mut found = Vec::new();
    differences("", &sections(now), &sections(then), &mut found);
    found
}

fn differences(key: &str, now: &Value, then: &Value, found: &mut Vec<String>) {
    match (now, then) {
        (Value::Object(now), Value::Object(then)) => {
            let dot = if key.is_empty() { "" } else { "." };
            for (name, then) in then {
                differences(&format!("{key}{dot}{name}"), &now[name], then, found);
            }
        }
        (now, then) if now == then => {}
        (_, Value::String(word)) => found.push(format!("{key}={word}")),
        (_, then) => found.push(format!("{key}={then}")),
    }
}

#[cfg(test)]
#[path = "search_tests.rs"]
mod tests;
