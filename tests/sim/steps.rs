//! Steps, deaths and recovery: the rule by which ranks commit a step, and [`decide`], under kills before any action.
//!
//! A grid of ranks holds a model: `parts` that differ, in copies. The state of a part is a chain of hashes, which each
//! update extends by the sum of what all data-parallel ranks contributed, each from the parts of its own replica. So one
//! part of another step, one sample twice or one update too few changes all chains from there on. At the end they must be
//! those of a run that nothing disturbed. A rank that trained in the generation of the newest state must hold that state.

mod generation;
mod kills;
mod layout;

use std::collections::BTreeMap;

use ddp_worker::mesh::{Axis, GRADIENTS, SAMPLES};
use ddp_worker::train::{Decision, Held, Place, Version, decide};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::{Replay, number};

use generation::{Action, Among, Checkpoint, Life, Process, State, World};
use layout::{BATCH, Layout, PARTS, first_chain, is_finite, mix, sum};

const STEPS: u64 = 5;
const VALIDATE_EVERY: u64 = 2;
const SAVE_EVERY: u64 = 3;
/// More than any run needs.
const MAX_TICKS: usize = 20_000;

/// The rules of a step, to see what becomes of a run without one of them.
#[derive(Clone)]
#[expect(clippy::struct_excessive_bools, reason = "they are independent")]
struct Rules {
    /// No rank updates before all have their sums and the norm.
    barrier: bool,
    /// Nor before their buddies have them.
    copies_before_barrier: bool,
    /// Versions of later generations are newer.
    generations: bool,
    /// Of a checkpoint and an old state of the same step, the checkpoint counts.
    ties: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            barrier: true,
            copies_before_barrier: true,
            generations: true,
            ties: true,
        }
    }
}

/// What runs went through, so that the test cannot pass by avoiding trouble.
#[derive(Debug, Default)]
struct Tally {
    kills: BTreeMap<Action, u64>,
    events: BTreeMap<&'static str, u64>,
    generations: u64,
}

impl Tally {
    fn count(&mut self, event: &'static str) {
        *self.events.entry(event).or_default() += 1;
    }

    fn add(&mut self, other: Self) {
        for (action, kills) in other.kills {
            *self.kills.entry(action).or_default() += kills;
        }
        for (event, count) in other.events {
            *self.events.entry(event).or_default() += count;
        }
        self.generations += other.generations;
    }
}

/// One run, from a seed.
struct Run {
    seed: u64,
    rules: Rules,
    rng: StdRng,
    layout: Layout,
    /// Number of copies, at least and at most.
    copies: [usize; 2],
    has_collective_updates: bool,
    /// Ranks that give state away keep it while they do.
    keeps_while_loading: bool,
    /// Probability that a rank learns of the end of its generation before its next action.
    promptness: f64,
    /// Probability of a fault before an action.
    fault: f64,
    faults_left: u32,
    processes: Vec<Process>,
    worlds: Vec<World>,
    checkpoint: Option<Checkpoint>,
    /// The generation that may complete checkpoints.
    owner: u64,
    metrics: Vec<(u64, bool)>,
    tally: Tally,
}

impl Run {
    fn new(seed: u64, rules: Rules) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let layout = Layout::random(seed, &mut rng);
        let most = rng.random_range(1..=3);
        let least = if rng.random_bool(0.5) { most } else { 1 };
        let mut run = Self {
            seed,
            rules,
            layout,
            copies: [least, most],
            has_collective_updates: rng.random_bool(0.2),
            keeps_while_loading: rng.random_bool(0.5),
            promptness: [0.02, 0.2, 0.9][rng.random_range(0..3)],
            fault: [0.005, 0.02, 0.1][rng.random_range(0..3)],
            faults_left: rng.random_range(0..=8),
            rng,
            processes: Vec::new(),
            worlds: Vec::new(),
            checkpoint: None,
            owner: 0,
            metrics: Vec::new(),
            tally: Tally::default(),
        };
        run.begin_generation(most);
        run
    }

    fn run(mut self) -> Result<Tally, String> {
        for _ in 0..MAX_TICKS {
            if self.faults_left > 0 && self.rng.random_bool(self.fault) {
                self.faults_left -= 1;
                self.fault();
            }
            let first = self.rng.random_range(0..self.processes.len());
            let mut has_moved = false;
            for process in (first..self.processes.len()).chain(0..first) {
                has_moved = self.turn(process)?;
                if has_moved {
                    break;
                }
            }
            let world = self.worlds.last().expect("a run has a generation");
            let mut of_world = world.processes.iter().map(|&process| &self.processes[process]);
            if !world.is_over {
                if of_world.all(|process| process.life == Life::Ended) {
                    return self.end();
                }
                if !has_moved {
                    return Err("all ranks wait".to_owned());
                }
            } else if of_world.all(|process| process.life != Life::Runs || process.is_cut_off)
                && (!has_moved || self.rng.random_bool(0.3))
            {
                let copies = self.rng.random_range(self.copies[0]..=self.copies[1]);
                self.begin_generation(copies);
            }
        }
        Err("the run does not come to rest".to_owned())
    }

    /// A process dies, or all of a generation; one is cut off, or comes back; or the number of ranks is to change.
    fn fault(&mut self) {
        let current = self.worlds.len() - 1;
        let lives = |process: &usize| self.processes[*process].life != Life::Ended;
        let living: Vec<usize> = (0..self.processes.len()).filter(lives).collect();
        if living.is_empty() {
            return;
        }
        let it = &mut self.processes[living[self.rng.random_range(0..living.len())]];
        let is_elastic = self.copies[0] < self.copies[1];
        let is_alone = self.worlds[current].processes.len() == 1;
        match self.rng.random_range(0..8) {
            0 | 1 if it.is_cut_off => {
                it.is_cut_off = false;
                self.worlds[current].is_over |= is_elastic;
            }
            0 | 1 if it.life == Life::Runs && it.world == current && !is_alone => {
                it.is_cut_off = true;
                self.worlds[current].is_over = true;
                self.tally.count("cut off");
            }
            2 => self.worlds[current].is_over |= is_elastic,
            3 if it.life == Life::Runs => {
                for &process in &self.worlds[current].processes {
                    let it = &mut self.processes[process];
                    if !it.is_cut_off {
                        it.life = Life::Ended;
                    }
                }
                self.worlds[current].is_over = true;
                self.tally.count("all dead");
            }
            _ => {
                it.life = Life::Ended;
                *self.tally.kills.entry(it.next).or_default() += 1;
                let world = it.world;
                self.worlds[world].is_over = true;
            }
        }
    }

    /// Gives ranks to those that are parked and to new processes, when all others have left the generation.
    fn begin_generation(&mut self, copies: usize) {
        let mesh = self.layout.mesh(copies);
        let world = self.worlds.len();
        let is_parked = |process: &usize| self.processes[*process].life == Life::Parked;
        let parked: Vec<usize> = (0..self.processes.len()).filter(is_parked).collect();
        let is_shuffled = self.rng.random_bool(0.1);
        let mut members = vec![None; mesh.ranks()];
        let mut others = Vec::new();
        for process in parked {
            let it = &self.processes[process];
            let keeps_rank = it.world + 1 == world && !is_shuffled;
            match members
                .get_mut(it.rank)
                .filter(|member| keeps_rank && member.is_none())
            {
                Some(member) => *member = Some(process),
                None => others.push(process),
            }
        }
        for (rank, member) in members.iter_mut().enumerate() {
            let next = if others.is_empty() {
                0
            } else {
                self.rng.random_range(0..others.len())
            };
            let process = member.or_else(|| (!others.is_empty()).then(|| others.swap_remove(next)));
            let process = process.unwrap_or_else(|| {
                self.processes.push(Process::new());
                self.processes.len() - 1
            });
            *member = Some(process);
            let it = &mut self.processes[process];
            (it.life, it.world, it.rank, it.next) = (Life::Runs, world, rank, Action::Report);
        }
        for process in others {
            self.processes[process].life = Life::Ended;
        }
        self.tally.generations += 1;
        self.worlds.push(World {
            generation: world as u64 + 1,
            processes: members.into_iter().flatten().collect(),
            exchanged: BTreeMap::new(),
            reports: vec![None; mesh.ranks()],
            latest: None,
            decision: None,
            sent: vec![None; mesh.ranks()],
            is_over: false,
            mesh,
        });
    }

    /// Whether a process could do anything.
    fn turn(&mut self, process: usize) -> Result<bool, String> {
        let it = &self.processes[process];
        if it.life != Life::Runs {
            return Ok(false);
        }
        let learns = self.worlds[it.world].is_over && !it.is_cut_off;
        if !(learns && self.rng.random_bool(self.promptness)) && self.act(process)? {
            return Ok(true);
        }
        if learns {
            self.park(process);
        }
        Ok(learns)
    }

    /// A process leaves its generation, and keeps what is whole of the state.
    fn park(&mut self, process: usize) {
        let it = &mut self.processes[process];
        it.life = Life::Parked;
        it.saving = None;
        if it.next == Action::Updated || (it.next == Action::Load && !self.keeps_while_loading) {
            it.held = None;
        }
    }

    /// Does the next action of a process, unless it has to wait for others.
    fn act(&mut self, process: usize) -> Result<bool, String> {
        let Process { next, world, .. } = self.processes[process];
        if self.completes_save(process)? {
            return Ok(true);
        }
        let behind = match next {
            Action::Report => Some(self.report(process)),
            Action::Decide => self.decide(world)?,
            Action::Join => self.exchange(process, Among::All, 0).map(|_| Action::TakeApart),
            Action::TakeApart => Some(self.take_apart(process)),
            Action::Load => self.load(process),
            Action::Refresh => self.refresh(process),
            Action::Validate => self.validate(process),
            Action::Record => Some(self.record(process)),
            Action::Save => self.save(process),
            Action::End => {
                let is_saved = self.processes[process].saving.is_none();
                let all = is_saved.then(|| self.exchange(process, Among::All, 0)).flatten();
                if all.is_some() {
                    self.processes[process].life = Life::Ended;
                }
                return Ok(all.is_some());
            }
            _ => self.train(process),
        };
        if let Some(behind) = behind {
            self.processes[process].next = behind;
        }
        Ok(behind.is_some())
    }

    /// Hands a value in, once, and returns those of all when they are there.
    fn exchange(&mut self, process: usize, among: Among, value: u64) -> Option<Vec<u64>> {
        let it = &self.processes[process];
        let world = &mut self.worlds[it.world];
        let is_joining = it.next == Action::Join;
        let step = (it.held.as_ref().filter(|_| !is_joining)).map_or(0, |held| held.version.step);
        let values = world
            .exchanged
            .entry((step, it.next))
            .or_insert_with(|| vec![None; world.mesh.ranks()]);
        values[it.rank] = Some(value);
        let members = match among {
            Among::All => (0..world.mesh.ranks()).collect(),
            Among::Gradients => world.mesh.members(it.rank, &GRADIENTS),
            Among::Replica => world.mesh.members(it.rank, &PARTS),
        };
        members.into_iter().map(|rank| values[rank]).collect()
    }

    fn report(&mut self, process: usize) -> Action {
        let it = &self.processes[process];
        let world = &mut self.worlds[it.world];
        if it.rank == 0 {
            self.owner = self.owner.max(world.generation);
            world.latest = Some(
                self.checkpoint
                    .as_ref()
                    .map_or(0, |saved| saved.held.version.step),
            );
        }
        let mut report = it.held.clone();
        if let Some(held) = report.as_mut().filter(|_| !self.rules.generations) {
            held.version.generation = 0;
            held.unfinished
                .iter_mut()
                .for_each(|version| version.generation = 0);
        }
        world.reports[it.rank] = Some(report);
        Action::Decide
    }

    fn decide(&mut self, world: usize) -> Result<Option<Action>, String> {
        let world = &mut self.worlds[world];
        let reports: Option<Vec<Option<Held>>> = world.reports.iter().cloned().collect();
        let (Some(reports), Some(latest)) = (reports, world.latest) else {
            return Ok(None);
        };
        if world.decision.is_some() {
            return Ok(Some(Action::Join));
        }
        let generation = if self.rules.ties { world.generation } else { 0 };
        let decision = decide(
            &reports,
            &world.mesh,
            &[GRADIENTS.to_vec()],
            Some(latest),
            generation,
        );
        let newest = reports.iter().flatten().map(|held| held.version).max();
        for (rank, held) in reports.iter().enumerate() {
            let (Some(held), Some(newest)) = (held, newest) else {
                continue;
            };
            let it = &self.processes[world.processes[rank]];
            if it.trained_in == newest.generation && held.version != newest && held.unfinished != Some(newest)
            {
                return Err(format!(
                    "rank {rank} has {held:?} and cannot finish step {}",
                    newest.step
                ));
            }
            let saved = (self.checkpoint.as_ref())
                .filter(|saved| world.generation == self.owner && saved.held.version.step == newest.step);
            let is_kept = matches!(&decision, Decision::GoOn(go_on) if go_on.holders[rank]);
            let part = world.mesh.index(rank, &PARTS);
            if is_kept && held.version == newest && saved.is_some_and(|saved| saved.states[part] != it.state)
            {
                return Err(format!(
                    "the state of rank {rank} is not in the checkpoint of its step"
                ));
            }
        }
        self.tally.count(match &decision {
            Decision::GoOn(_) => "kept",
            Decision::Reload { reason: Some(_) } => "reloaded",
            Decision::Reload { reason: None } => "begun",
        });
        world.decision = Some(decision);
        Ok(Some(Action::Join))
    }

    /// Finishes the step that this rank was in, if another has; gives up what is of no use.
    fn take_apart(&mut self, process: usize) -> Action {
        let it = &mut self.processes[process];
        let world = &mut self.worlds[it.world];
        it.trained_in = world.generation;
        let go_on = match &world.decision {
            Some(Decision::GoOn(go_on)) if go_on.holders[it.rank] => go_on,
            _ => {
                it.held = None;
                return Action::Load;
            }
        };
        let held = it.held.as_mut().expect("a holder holds something");
        if held.version.step != go_on.state.version.step {
            let (step, counts) = (held.version.step, go_on.state.updates > held.updates);
            it.finish(step, counts);
            self.tally
                .count(if counts { "finished alone" } else { "skipped alone" });
        }
        let held = it.held.as_mut().expect("a holder holds something");
        *held = Held {
            place: held.place.clone(),
            copy_of: held.copy_of.clone(),
            unfinished: None,
            ..go_on.state.clone()
        };
        for rank in world.mesh.members(it.rank, &[Axis::Replicate]) {
            let copies = world.mesh.members(rank, &world.mesh.copied_along(&GRADIENTS));
            if !go_on.holders[rank] && go_on.source(&copies) == Some(it.rank) {
                world.sent[rank] = Some(it.state.clone());
            }
        }
        let owner = world.mesh.buddies(it.rank).owner;
        if self.layout.has_buddies() && !go_on.holders[owner] {
            assert_eq!(held.copy_of, Some(Place::of(&world.mesh, owner)));
            world.sent[owner] = Some(it.copy.clone());
            self.tally.count("received from a buddy");
        }
        Action::Load
    }

    fn load(&mut self, process: usize) -> Option<Action> {
        let it = &mut self.processes[process];
        let world = &mut self.worlds[it.world];
        let latest = world.latest.unwrap_or(0);
        let (mesh, part) = (&world.mesh, world.mesh.index(it.rank, &PARTS));
        let place = Place::of(mesh, it.rank);
        if let Some(Decision::GoOn(go_on)) = &world.decision {
            if !go_on.holders[it.rank] {
                it.state = world.sent[it.rank].take()?;
                it.held = Some(Held {
                    place,
                    copy_of: None,
                    unfinished: None,
                    ..go_on.state.clone()
                });
                self.tally.count("received");
            }
            let step = go_on.state.version.step;
            let is_validated = go_on
                .state
                .line
                .as_ref()
                .is_some_and(|line| line.val_loss.is_some());
            it.validates = is_due(step, VALIDATE_EVERY) && !is_validated;
            it.saves = is_due(step, SAVE_EVERY) && latest < step;
        } else {
            let version = Version {
                generation: world.generation,
                step: latest,
            };
            let saved = self
                .checkpoint
                .as_ref()
                .filter(|saved| saved.held.version.step == latest);
            it.state = saved.map_or_else(
                || State {
                    chain: first_chain(self.seed, part as u64),
                    history: Vec::new(),
                },
                |saved| saved.states[part].clone(),
            );
            it.held = Some(Held {
                version,
                unfinished: None,
                updates: saved.map_or(0, |saved| saved.held.updates),
                samples: saved.map_or(0, |saved| saved.held.samples),
                batch: None,
                place,
                copy_of: None,
                line: None,
            });
            (it.validates, it.saves) = (false, false);
        }
        Some(if self.layout.has_buddies() {
            Action::Refresh
        } else {
            Action::Validate
        })
    }

    fn refresh(&mut self, process: usize) -> Option<Action> {
        let parts = self.exchange(process, Among::Gradients, self.processes[process].state.chain)?;
        let it = &mut self.processes[process];
        let mesh = &self.worlds[it.world].mesh;
        let owner = mesh.buddies(it.rank).owner;
        it.copy = State {
            chain: parts[mesh.index(owner, &PARTS)],
            history: it.state.history.clone(),
        };
        it.held.as_mut()?.copy_of = Some(Place::of(mesh, owner));
        Some(Action::Validate)
    }

    /// What an action of a step gets of other ranks. None until it is there.
    fn exchange_in_step(&mut self, process: usize, next: Action, sample: u64) -> Option<Vec<u64>> {
        let it = &self.processes[process];
        let value = match next {
            Action::Gather => it.state.chain,
            Action::Leave => u64::from(is_finite(self.seed, sample)),
            Action::CopySums => it.sums,
            _ => it.contribution,
        };
        match next {
            Action::Gather | Action::Norm | Action::Updated => self.exchange(process, Among::Replica, value),
            Action::FirstBucket | Action::LastBucket | Action::CopySums => {
                self.exchange(process, Among::Gradients, value)
            }
            Action::Leave => match self.exchange(process, Among::All, value) {
                None if self.rules.barrier => None,
                rows => Some(rows.unwrap_or_default()),
            },
            _ => Some(Vec::new()),
        }
    }

    /// The actions of a step.
    fn train(&mut self, process: usize) -> Option<Action> {
        let Process {
            rank, next, world, ..
        } = self.processes[process];
        let mesh = self.worlds[world].mesh;
        let part = mesh.index(rank, &PARTS);
        let held = self.processes[process]
            .held
            .as_ref()
            .expect("a rank that trains holds its part");
        let (step, sample) = (
            held.version.step,
            held.samples + mesh.index(rank, &SAMPLES) as u64 * BATCH,
        );
        let exchanged = self.exchange_in_step(process, next, sample)?;
        let has_buddies = self.layout.has_buddies();
        let copies_first = self.rules.copies_before_barrier;
        let it = &mut self.processes[process];
        let version = Version {
            generation: self.worlds[world].generation,
            step: step + 1,
        };
        Some(match next {
            Action::Gather => {
                let whole = exchanged.iter().fold(0, |whole, &chain| mix(whole, chain));
                (it.contribution, it.sums) = (mix(whole, sample), 0);
                it.of_ranks = mesh.size(&SAMPLES) as u64;
                Action::FirstBucket
            }
            Action::FirstBucket | Action::LastBucket => {
                it.sums = it
                    .sums
                    .wrapping_add(sum(&exchanged, part, u64::from(next == Action::LastBucket)));
                if next == Action::FirstBucket {
                    Action::LastBucket
                } else {
                    Action::Norm
                }
            }
            Action::Norm if has_buddies && copies_first => Action::CopySums,
            Action::Norm => Action::Enter,
            Action::CopySums => {
                it.copy_sums = exchanged[mesh.index(mesh.buddies(rank).owner, &PARTS)];
                if copies_first {
                    Action::Enter
                } else {
                    Action::Update
                }
            }
            Action::Enter => {
                it.held.as_mut()?.unfinished = Some(version);
                Action::Leave
            }
            Action::Leave => {
                it.is_finite = !exchanged.contains(&0);
                if has_buddies && !copies_first {
                    Action::CopySums
                } else {
                    Action::Update
                }
            }
            Action::Update if self.has_collective_updates => Action::Updated,
            _ => {
                it.update(version);
                (it.validates, it.saves) = (is_due(step + 1, VALIDATE_EVERY), is_due(step + 1, SAVE_EVERY));
                Action::Validate
            }
        })
    }

    fn validate(&mut self, process: usize) -> Option<Action> {
        if self.processes[process].validates {
            self.exchange(process, Among::All, 0)?;
            let held = self.processes[process].held.as_mut()?;
            held.line.iter_mut().for_each(|line| line.val_loss = Some(1.0));
        }
        Some(Action::Record)
    }

    /// Rank 0 writes the numbers of the step behind those of the steps before.
    fn record(&mut self, process: usize) -> Action {
        let it = &self.processes[process];
        if let (0, Some(held)) = (it.rank, &it.held)
            && self.worlds[it.world].generation == self.owner
        {
            let line = held
                .line
                .as_ref()
                .map(|line| (line.step, line.val_loss.is_some()));
            self.metrics
                .retain(|(step, _)| *step < held.version.step + u64::from(line.is_none()));
            self.metrics.extend(line);
        }
        Action::Save
    }

    /// Each rank hands in a copy of its state; rank 0 completes the checkpoint when it has them.
    fn save(&mut self, process: usize) -> Option<Action> {
        let it = &self.processes[process];
        let step = it.held.as_ref()?.version.step;
        if it.saves {
            if it.saving.is_some() {
                return None;
            }
            self.exchange(process, Among::All, self.processes[process].state.chain);
            let it = &mut self.processes[process];
            it.saving = (it.rank == 0).then_some(step);
        }
        Some(if step == STEPS {
            Action::End
        } else {
            Action::Gather
        })
    }

    /// Rank 0 may complete a save at any time after all ranks have handed in their copies.
    fn completes_save(&mut self, process: usize) -> Result<bool, String> {
        let it = &self.processes[process];
        let Some(step) = it.saving else { return Ok(false) };
        let waits = matches!(it.next, Action::Save | Action::End);
        let (world, held) = (&self.worlds[it.world], it.held.as_ref());
        let copies: Option<Vec<u64>> = world.exchanged[&(step, Action::Save)].iter().copied().collect();
        let (Some(copies), Some(held), true) = (copies, held, waits || self.rng.random_bool(0.3)) else {
            return Ok(false);
        };
        let history = it.state.history[..step as usize].to_vec();
        let (chains, updates) = self.layout.undisturbed(self.seed, &history);
        let part = |rank| world.mesh.index(rank, &PARTS);
        if (0..copies.len()).any(|rank| copies[rank] != chains[part(rank)]) {
            return Err(format!(
                "the checkpoint of step {step} is mixed: {copies:x?}, not {chains:x?}"
            ));
        }
        if world.generation == self.owner {
            let version = Version { step, ..held.version };
            let states = chains.into_iter().map(|chain| State {
                chain,
                history: history.clone(),
            });
            self.checkpoint = Some(Checkpoint {
                states: states.collect(),
                held: Held {
                    version,
                    updates,
                    samples: history.iter().sum::<u64>() * BATCH,
                    ..held.clone()
                },
            });
        }
        self.processes[process].saving = None;
        Ok(true)
    }

    /// All steps are done: state, last checkpoint and metrics are those of a run that nothing disturbed.
    fn end(self) -> Result<Tally, String> {
        let world = self.worlds.last().expect("a run has a generation");
        let saved = self.checkpoint.filter(|saved| saved.held.version.step == STEPS);
        let saved = saved.ok_or("the last checkpoint is missing")?;
        for (rank, &process) in world.processes.iter().enumerate() {
            let State { chain, history } = &self.processes[process].state;
            let (chains, updates) = self.layout.undisturbed(self.seed, history);
            let held = self.processes[process]
                .held
                .as_ref()
                .ok_or("an ended rank holds nothing")?;
            let part = world.mesh.index(rank, &PARTS);
            let samples = history.iter().sum::<u64>() * BATCH;
            if *chain != chains[part] || (held.updates, held.samples) != (updates, samples) {
                return Err(format!(
                    "rank {rank} is mixed: {chain:x} of {history:?}, {held:?}"
                ));
            }
            if saved.states[part] != self.processes[process].state {
                return Err(format!("the state of rank {rank} is not in the last checkpoint"));
            }
        }
        let lines: Vec<_> = (1..=STEPS)
            .map(|step| (step, is_due(step, VALIDATE_EVERY)))
            .collect();
        if self.metrics != lines {
            return Err(format!("the metrics are {:?}", self.metrics));
        }
        Ok(self.tally)
    }
}

fn is_due(step: u64, every: u64) -> bool {
    step == STEPS || (step > 0 && step.is_multiple_of(every))
}
