//! The layouts of given machines with the shortest steps: every mesh pp × dp × cp × tp that divides, and experts over ep of its
//! ranks, with every schedule and strategy, and with more recomputation than configured. The global batch stays that of the
//! configuration: with fewer data-parallel ranks each has more micro-batches.
//!
//! Two bounds from below cost little. The least time of a step is what ranks compute and exchange within layers, and the
//! least that a schedule lets them wait; or that of exchanging gradients and parameters once, if it is longer. The least
//! memory is the smallest state of any strategy, and what the micro-batches in flight keep of each layer. Layouts are looked
//! at in the order of their least times, and only those are rehearsed that fit by the least memory and may be among the
//! best. So the search may end at any time, with the most promising ones behind it.
//!
//! A mesh is too large if it fits with no schedule. 1F1B does not always hold least: a tied embedding is on two of its ranks,
//! and on one of a V; and more chunks share layers out more evenly.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::candidate::{Candidate, PlannedMesh, env, under};
use super::step_times::{BusyTimes, LayerNeeds, Machines};
use crate::config::Recompute::{Full, Norms, Nothing, Selective};
use crate::config::{PipelineSchedule, ShardGroup, Strategy, TrainConfig};
use crate::costs::{Sent, micro_batch_shape};
use crate::mesh::{Axis, GRADIENTS, MeshShape};
use crate::model::{AxisRole, Decoder, Model, ModelPart, ParamSpec};
use crate::parallel::Dtypes;
use crate::train::TrainError;
use crate::train::strategy::{mesh, network};

/// A step that is shorter by less than this part is as long.
const SAME: f64 = 1e-3;
/// Least positions of a chunk. Each context rank has two of them.
const LEAST_CHUNK: usize = 1024;
/// The forwards of a micro-batch for which a rank waits at least for each other rank, if F, I and W last as long; the schedule;
/// and its chunks a rank: more of them send more messages. GPipe takes as long as 1F1B and never holds less, and where the
/// greedy schedule is better, ZBV is that one.
const SCHEDULES: [(f64, PipelineSchedule, Option<usize>); 5] = [
    (3.0, PipelineSchedule::OneFOneB, None),
    (0.5, PipelineSchedule::Zbv, None),
    (1.0, PipelineSchedule::ZbH1, None),
    (1.5, PipelineSchedule::Interleaved, Some(2)),
    (0.75, PipelineSchedule::Interleaved, Some(4)),
];

/// The best layouts of given machines.
#[derive(Clone, Debug, PartialEq)]
pub struct LayoutSearch {
    /// Those that fit with the shortest steps, the shortest first: the best one of each mesh.
    pub best: Vec<FoundLayout>,
    /// Meshes that might have as short a step, but of which no layout fits, and the least that one of them needs.
    pub too_large: Vec<(MeshShape, u64)>,
    /// Number of meshes of which every layout takes longer, or does not fit.
    pub slower: usize,
    /// Meshes with layouts that were not looked at before the search had to end: one of them may be the best.
    pub not_searched: Vec<MeshShape>,
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
    /// A key with which the configuration gives a layout itself.
    pub fn given(config: &TrainConfig) -> Option<&'static str> {
        let parallel = &config.parallel;
        let keys = [
            ("parallel.tensor", parallel.tensor),
            ("parallel.context", parallel.context),
            ("parallel.expert", parallel.expert),
            ("parallel.pipeline.stages", parallel.pipeline.stages),
        ];
        keys.iter().find(|(_, ranks)| *ranks > 1).map(|(key, _)| *key)
    }

    /// The `wanted` best layouts of a configuration on machines, of those that are looked at as long as the search
    /// `may_go_on`. None if the configuration gives a layout itself, if there is one rank only, or if the memory or a rate of
    /// the machines is not known.
    pub fn of(
        config: &TrainConfig,
        machines: &Machines,
        wanted: usize,
        may_go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Self>, TrainError> {
        let cluster = &machines.cluster;
        let is_known = machines.flops.is_some()
            && (cluster.ranks_a_node == 1 || cluster.link.is_some())
            && (cluster.nodes == 1 || cluster.network.is_some());
        let may_search = is_known && Self::given(config).is_none() && cluster.ranks() > 1;
        let Some(memory) = machines.memory.filter(|_| may_search) else {
            return Ok(None);
        };
        let mut search = Search {
            config,
            machines,
            memory,
            wanted: wanted.max(1),
            fit: BTreeMap::new(),
            too_large: BTreeMap::new(),
            slower: BTreeSet::new(),
        };
        let mut not_searched = Vec::new();
        for layout in drafts(config, machines)? {
            if layout.floor >= search.limit(layout.mesh) {
                search.slower.insert(layout.mesh);
            } else if may_go_on() {
                search.look_at(&layout)?;
            } else if !not_searched.contains(&layout.mesh) {
                not_searched.push(layout.mesh);
            }
        }
        Ok(Some(search.result(not_searched)))
    }
}

impl FoundLayout {
    pub(super) fn new(candidate: Candidate, now: &TrainConfig, then: &TrainConfig) -> Self {
        Self {
            candidate,
            settings: settings(now, then),
        }
    }

    /// Faster, or as fast and less to send. Padding alone is no difference.
    fn is_better(&self, other: &Self) -> bool {
        let sent = |found: &Self| found.candidate.sent.state_along(&GRADIENTS);
        let is_as_fast = self.seconds() <= other.seconds() * (1.0 + SAME);
        self.seconds() < other.seconds() * (1.0 - SAME) || is_as_fast && sent(self) * 100 < sent(other) * 99
    }

    fn fits(&self) -> bool {
        self.candidate.fits == Some(true)
    }

    fn seconds(&self) -> f64 {
        self.candidate.seconds.unwrap_or(f64::INFINITY)
    }
}

/// A layout but for its strategy, before its schedule is made.
struct LayoutDraft {
    config: TrainConfig,
    mesh: MeshShape,
    busy: BusyTimes,
    /// The least time of a step.
    floor: f64,
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

/// Every layout that divides the ranks of the machines, the model and the global batch, in the order of their least times: with
/// the recomputation of the configuration, and with each that keeps less.
fn drafts(config: &TrainConfig, machines: &Machines) -> Result<Vec<LayoutDraft>, TrainError> {
    let cells = cells(config, machines);
    let mut drafts = Vec::new();
    for recompute in [Nothing, Norms, Selective, Full] {
        for cell in cells.iter().filter(|_| recompute >= config.train.recompute) {
            let mut config = cell.clone();
            config.train.recompute = recompute;
            drafts.extend(piped_drafts(&config, machines)?);
        }
    }
    drafts.sort_by(|a, b| a.floor.total_cmp(&b.floor));
    Ok(drafts)
}

/// The configuration with every size of the groups that compute layers together.
fn cells(config: &TrainConfig, machines: &Machines) -> Vec<TrainConfig> {
    let here = machines.cluster.ranks_a_node as usize;
    let ranks = machines.cluster.ranks() as usize;
    // Smaller micro-batches come before parts of samples.
    let positions = if config.train.micro_batch == 1 {
        config.model.block_size
    } else {
        0
    };
    let has_long_chunks = |context: usize| context == 1 || positions >= 2 * context * LEAST_CHUNK;
    let is_near = |tensor: usize| here.is_multiple_of(tensor) || config.parallel.tensor_across_nodes;
    let experts = Decoder::of(&config.model)
        .experts
        .map_or(1, |experts| experts.count);
    let mut cells = Vec::new();
    for tensor in divisors(ranks).filter(|tensor| is_near(*tensor)) {
        for context in divisors(ranks / tensor).filter(|context| has_long_chunks(*context)) {
            let divides =
                |expert: &usize| expert.is_multiple_of(context) && (ranks / tensor).is_multiple_of(*expert);
            for expert in divisors(experts).filter(|expert| *expert == 1 || divides(expert)) {
                let mut config = under(config, Strategy::Ddp);
                let parallel = &mut config.parallel;
                (parallel.tensor, parallel.context, parallel.expert) = (tensor, context, expert);
                let rows: usize = micro_batch_shape(&config).iter().product();
                config.parallel.sequence = tensor > 1 && rows.is_multiple_of(tensor);
                cells.push(config);
            }
        }
    }
    cells
}

fn divisors(number: usize) -> impl Iterator<Item = usize> {
    (1..=number).filter(move |divisor| number.is_multiple_of(*divisor))
}

/// The layouts with the groups of `config` that compute layers together.
fn piped_drafts(config: &TrainConfig, machines: &Machines) -> Result<Vec<LayoutDraft>, TrainError> {
    let Some(layer) = possible(LayerNeeds::of(config))? else {
        return Ok(Vec::new());
    };
    let (tensor, expert) = (config.parallel.tensor, config.parallel.expert);
    let part = ModelPart {
        tensor: (0, tensor),
        experts: (0, expert),
        ..ModelPart::WHOLE
    };
    let model = network(config, Dtypes::of(config), &part)?;
    let ranks = machines.cluster.ranks() as usize;
    let piped = ranks / (tensor * config.parallel.context);
    let samples = config.train.grad_accumulation * ranks;
    let mut drafts = Vec::new();
    for stages in divisors(piped).filter(|stages| *stages <= config.model.n_layer) {
        let mut config = config.clone();
        config.train.grad_accumulation = samples * stages / piped;
        config.parallel.pipeline.stages = stages;
        let mesh = possible(mesh(&config, &env(&machines.cluster)))?;
        let Some(mesh) = mesh.filter(|_| (samples * stages).is_multiple_of(piped)) else {
            continue;
        };
        let busy = BusyTimes::of(&config, machines, &layer);
        let state = least_exchange(&config, machines, &mesh, &model);
        let forwards = (3 * config.train.grad_accumulation) as f64;
        let forward = busy.compute.unwrap_or(f64::INFINITY) / forwards;
        let is_apt = |schedule| stages > 1 || schedule == PipelineSchedule::OneFOneB;
        let apt = SCHEDULES.into_iter().filter(|(_, schedule, _)| is_apt(*schedule));
        drafts.extend(apt.map(|(waiting, schedule, chunks)| {
            let mut config = config.clone();
            (config.parallel.pipeline.schedule, config.parallel.pipeline.chunks) = (schedule, chunks);
            let floor = busy.sum().unwrap_or(f64::INFINITY) + waiting * (stages - 1) as f64 * forward;
            LayoutDraft {
                config,
                mesh,
                busy,
                floor: floor.max(state),
            }
        }));
    }
    Ok(drafts)
}

/// The least time in which gradients are summed and parameters gathered once, with any strategy. `model` is what a rank holds
/// of it without stages; experts that are divided are summed over fewer ranks.
fn least_exchange(config: &TrainConfig, machines: &Machines, mesh: &MeshShape, model: &Model) -> f64 {
    let Dtypes { params, reduced, .. } = Dtypes::of(config);
    let is_cut = |spec: &&ParamSpec| spec.roles[Axis::Expert as usize] == AxisRole::Cut;
    let (experts, rest): (Vec<&ParamSpec>, Vec<_>) = model.params.iter().partition(is_cut);
    let sent = [(experts, &GRADIENTS[..2]), (rest, &GRADIENTS[..])].map(|(specs, axes)| {
        let (ranks, elements) = (
            mesh.size(axes),
            specs.iter().map(|spec| spec.len()).sum::<usize>(),
        );
        let bytes = elements * (params.bytes() + reduced.bytes()) / mesh.size(&[Axis::Pipeline]);
        Sent {
            bytes: (bytes / ranks * (ranks - 1)) as u64,
            ranks: ranks as u64,
            stride: mesh.stride(axes[axes.len() - 1]) as u64,
            to_each: false,
        }
    });
    machines.cluster.least_seconds(&sent).unwrap_or(0.0)
}

/// A search and its results until now.
struct Search<'a> {
    config: &'a TrainConfig,
    machines: &'a Machines,
    /// Bytes of a device.
    memory: u64,
    wanted: usize,
    /// The best layout of each mesh.
    fit: BTreeMap<MeshShape, FoundLayout>,
    /// The least that a layout of a mesh needs, of those that do not fit.
    too_large: BTreeMap<MeshShape, u64>,
    /// Meshes with a layout that is not among the best.
    slower: BTreeSet<MeshShape>,
}

impl Search<'_> {
    /// A layout of this mesh whose step is no shorter is not among the best, or one that fits is as fast.
    fn limit(&self, mesh: MeshShape) -> f64 {
        let own = self.fit.get(&mesh).map(|known| known.seconds() * (1.0 - SAME));
        self.last_of_best().min(own.unwrap_or(f64::INFINITY))
    }

    /// The time of the last of the wanted layouts.
    fn last_of_best(&self) -> f64 {
        let mut steps: Vec<f64> = self.fit.values().map(FoundLayout::seconds).collect();
        steps.sort_by(f64::total_cmp);
        steps.get(self.wanted - 1).copied().unwrap_or(f64::INFINITY)
    }

    /// True if it takes the place of the mesh's best one, and is among the best.
    fn is_wanted(&self, mesh: MeshShape, found: &FoundLayout) -> bool {
        let is_best = self.fit.get(&mesh).is_none_or(|known| found.is_better(known));
        is_best && found.seconds() < self.last_of_best()
    }

    /// Rehearses a layout, if it may be its mesh's best one.
    fn look_at(&mut self, layout: &LayoutDraft) -> Result<(), TrainError> {
        let mesh = layout.mesh;
        let planned = PlannedMesh::new(layout.config.clone(), self.machines, layout.busy);
        let Some(planned) = possible(planned)? else {
            return Ok(());
        };
        if planned.times.pipeline.unwrap_or(f64::INFINITY) >= self.limit(mesh) {
            self.slower.insert(mesh);
            return Ok(());
        }
        // It takes long to find out all activations, so only of what may be among the best.
        let (kept, mut activations) = (planned.kept(), Vec::new());
        let mut fitting = Vec::new();
        for (strategy, group) in self.strategies(mesh) {
            // Where another strategy fits, ZeRO-3 only sends more.
            if strategy == Strategy::Zero3 && fitting.contains(&group) {
                continue;
            }
            let Some(shared) = possible(planned.sharing(strategy, group))? else {
                continue;
            };
            let candidate = shared.candidate(&kept, self.memory)?;
            // On one data-parallel rank, or in groups of one, it is another one's twin.
            if candidate.estimate.strategy != strategy {
                continue;
            }
            let mut found = FoundLayout::new(candidate, self.config, &shared.config);
            if found.fits() && !self.is_wanted(mesh, &found) {
                self.slower.insert(mesh);
                continue;
            }
            if found.fits() {
                if activations.is_empty() {
                    activations = planned.activations()?;
                }
                found.candidate = shared.candidate(&activations, self.memory)?;
            }
            if !found.fits() {
                self.needs(mesh, found.candidate.held);
                continue;
            }
            if strategy != Strategy::Ddp {
                fitting.push(group);
            }
            self.fit.insert(mesh, found);
        }
        Ok(())
    }

    fn strategies(&self, mesh: MeshShape) -> Vec<(Strategy, Option<ShardGroup>)> {
        let mut strategies = vec![(Strategy::Ddp, None)];
        let groups = match self.config.parallel.shard_group {
            Some(given) => vec![Some(given)],
            None => vec![None, Some(ShardGroup::Node)],
        };
        // Where both send as much, ZeRO-2 holds less.
        for strategy in [Strategy::Zero2, Strategy::Zero1, Strategy::Zero3] {
            // A stage of a pipeline holds whole gradients: ZeRO-2 is ZeRO-1 there.
            if strategy != Strategy::Zero2 || mesh.size(&[Axis::Pipeline]) == 1 {
                strategies.extend(groups.iter().map(|group| (strategy, *group)));
            }
        }
        strategies
    }

    /// Notes that a layout of this mesh does not fit, because it needs `bytes`.
    fn needs(&mut self, mesh: MeshShape, bytes: u64) {
        let least = self.too_large.entry(mesh).or_insert(bytes);
        *least = bytes.min(*least);
    }

    fn result(mut self, not_searched: Vec<MeshShape>) -> LayoutSearch {
        let is_open = |mesh: &MeshShape| self.fit.contains_key(mesh) || not_searched.contains(mesh);
        self.slower.retain(|mesh| !is_open(mesh));
        // With more recomputation it may fit.
        let is_too_large = |mesh: &MeshShape| !is_open(mesh) && !self.slower.contains(mesh);
        self.too_large.retain(|mesh, _| is_too_large(mesh));
        let mut best: Vec<FoundLayout> = self.fit.into_values().collect();
        best.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
        let slower = self.slower.len() + best.len().saturating_sub(self.wanted);
        best.truncate(self.wanted);
        LayoutSearch {
            best,
            too_large: self.too_large.into_iter().collect(),
            slower,
            not_searched,
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
