//! The training loop of one rank: steps, and what is due between them.
//!
//! A step is data → forward → backward, reduced meanwhile → norm → losses to all ranks → clip and update, or neither. A rank
//! sends its losses when it has all that the update needs, and needs those of all ranks to begin it: once one rank has
//! updated, every other can.
//! The host puts all of it into the stream. Nothing in it waits for the device: whether a step counts is decided there, by
//! the clipping factor. On a device that runs asynchronously the numbers of a step are read when the next one has been
//! enqueued.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ddp_proto::control::{Phase, Progress};

use super::enqueued_step::{EnqueuedStep, StepNumbers, StepResult, StepTimes};
use super::evaluation::mean_loss;
use super::nonfinite::{Decision, Inspection, Skips};
use super::training_row::{TrainingRow, sample_key};
use crate::collective::{WireBytes, Work};
use crate::config::{Train, TrainConfig};
use crate::costs::GlobalBatch;
use crate::data::{Loader, Tokens};
use crate::device::{Compute, DeviceError};
use crate::metrics::{Achieved, Memory, MetricsLine};
use crate::model::{ModelPart, NoHooks};
use crate::optim::{Clip, Optimizer, UpdateStep, batch_factor, learning_rate};
use crate::parallel::{ArenaShare, DeviceTimes, Dtypes, Reducer};
use crate::session::Session;
use crate::timeline::Kind;
use crate::train::TrainError;
use crate::train::checkpointing::{
    BuddyCopy, Checkpoints, Held, Kept, Place, Position, RankState, UnfinishedStep, Version,
};
use crate::train::rank_spec::RankSpec;
use crate::train::rank_table::{RankTable, StepTable};
use crate::train::replica::Replica;
use crate::train::reporting::{Footprint, ProfilingWindow, Recorder, StepRecord, say};
use crate::train::router_table::RouterTable;
use crate::train::row_state::RowPurpose;
use crate::train::run_row::run_row;
use crate::train::strategy::network;
use crate::train::world::World;

/// Longest wait for a device to come to rest when its collectives were aborted: it runs what else the host has enqueued. With
/// what comes before, it is less than the time that the launcher gives its workers.
const RECOVERY_PATIENCE: Duration = Duration::from_secs(10);

/// What a rank trains with, as the run was set up. Others read it; only the trainer changes it.
pub(crate) struct TrainerParts<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) spec: RankSpec,
    pub(crate) session: &'a Session,
    pub(crate) world: World,
    pub(crate) replica: Replica,
    pub(crate) optimizer: Optimizer,
    pub(crate) copy: Option<BuddyCopy>,
    pub(crate) clip: Clip,
    pub(crate) rank_table: RankTable,
    pub(crate) step_table: StepTable,
    pub(crate) loader: Loader,
    /// The held-out text.
    pub(crate) validation: Tokens,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) window: ProfilingWindow,
    /// Steps that were finished when this life of the run began.
    pub(crate) first_step: u64,
    /// The newest state of the generation before, if the run goes on there.
    pub(crate) resumed: Option<Held>,
}

impl TrainerParts<'_> {
    pub(crate) fn with_checkpoints<T>(
        &mut self,
        work: impl FnOnce(&mut Checkpoints, RankState<'_>) -> T,
    ) -> T {
        let here = RankState {
            world: &self.world,
            replica: &self.replica,
            optimizer: &self.optimizer,
            rank_table: &self.rank_table,
            session: self.session,
        };
        work(&mut self.checkpoints, here)
    }

    /// The global batch of a step that is not short.
    pub(crate) fn global_batch(&self) -> GlobalBatch {
        GlobalBatch::of(self.config, &self.spec.strategy.mesh)
    }

    /// Bytes of the copy of another rank's part.
    pub(crate) fn copy_bytes(&self) -> usize {
        self.copy.as_ref().map_or(0, BuddyCopy::bytes)
    }

    /// What this rank holds.
    fn memory(&self, reducer: &Reducer) -> Memory {
        let held = Footprint::of(&self.replica, reducer, &self.optimizer, self.copy_bytes());
        Memory {
            checkpoint: self.checkpoints.snapshot_bytes() as u64,
            device_peak: self.world.compute.device.peak_bytes().unwrap_or(0) as u64,
            ..held.memory()
        }
    }

    /// The state after `step` steps, the last of them in this generation.
    fn version(&self, step: u64) -> Version {
        let generation = self.session.env().generation.get();
        Version { generation, step }
    }

    /// True on a device that runs at once if all that is in the stream has run.
    fn has_run(&self) -> bool {
        let Compute { device, .. } = &self.world.compute;
        !device.is_asynchronous() && matches!(self.world.compute.record().poll(), Some(Ok(())))
    }

    /// Bytes sent so far.
    fn sent(&self) -> WireBytes {
        self.world.mesh.wire_bytes()
    }

    /// Forward and backward of all micro-batches, in the order of the schedule; gradients are summed over them and all
    /// ranks.
    fn passes(
        &mut self,
        reducer: &mut Reducer,
        step: u64,
        times: &mut StepTimes,
    ) -> Result<StepGradients, TrainError> {
        let micro_batches = self.begin_passes(step);
        let replica = &mut self.replica;
        let mut row = TrainingRow {
            config: self.config,
            session: self.session,
            step_table: &self.step_table,
            loader: &self.loader,
            step,
            micro_batches,
            stages: replica.plan.placement().stages(),
            losses: 0,
            positions: 0,
            exposed_before: Duration::ZERO,
            hooks: NoHooks,
            grads: reducer.step(micro_batches as usize)?,
            times,
        };
        run_row(replica, RowPurpose::Training, micro_batches as usize, &mut row)?;
        let TrainingRow {
            grads,
            positions,
            times,
            ..
        } = row;
        times.account(replica.take_times());
        let reduced = grads.finish_on(self.world.compute.stream, self.world.deadline())?;
        times.account(reduced.times());
        Ok(StepGradients {
            grads: reduced.sums(),
            device_times: reduced.device_times(),
            positions,
        })
    }

    /// Number of micro-batches of a step. Each of its positions, over all micro-batches and ranks, weighs the same: this is
    /// the only place that scales a gradient, and reductions are plain sums.
    fn begin_passes(&mut self, step: u64) -> u64 {
        let passes = self.loader.passes(step);
        let positions = self.loader.sample_count(step) * self.config.model.block_size as u64;
        self.replica.weigh(1.0 / positions as f64);
        passes
    }

    /// The update of a step.
    fn update(&self, step: u64) -> UpdateStep {
        let train = &self.config.train;
        let lr = learning_rate(step, train.steps, &train.optimizer, &train.schedule);
        UpdateStep {
            scale: self.clip.scale(),
            lr: (f64::from(lr) * batch_factor(train, self.global_batch().samples())) as f32,
            number: step + 1,
        }
    }

    /// Puts the update of what this rank holds on the stream. Returns the exchanges with other ranks that it waits for.
    fn put_update(&self, grads: &ArenaShare, update: &UpdateStep) -> Vec<Work> {
        let stream = self.world.compute.stream;
        if let Some(copy) = &self.copy {
            copy.step(stream, update);
        }
        (self.optimizer).step(stream, self.replica.parameters.own(), grads, update)
    }

    /// Sends the losses of this rank, which holds the sums of `step` and their norm: the barrier before the update.
    fn share(&self, step: u64, positions: usize) -> Work {
        let stop = self.session.stop_requested().is_some();
        (self.step_table).share(step + 1, positions, stop, self.checkpoints.code())
    }

    /// Later operations of the stream run after `work`. An error that is known already is returned.
    fn arrive(&self, work: &Work, times: &mut StepTimes) -> Result<(), TrainError> {
        let (began, span) = (Instant::now(), self.world.begin_span());
        let deadline = self.world.deadline();
        self.world.compute.wait_event(work.event(), deadline);
        if work.is_done() {
            work.wait(deadline)?;
        }
        (self.world).end_span(span, Kind::Other, || {
            "waits for numbers of other ranks".to_owned()
        });
        times.share += began.elapsed();
        Ok(())
    }

    /// Which rank saw a number of `step` that is not finite first, and where, in words.
    fn inspect(&mut self, step: u64) -> Result<String, TrainError> {
        let passes = self.begin_passes(step);
        let key = |m| sample_key(self.config, &self.loader, step, m);
        let keys = (0..passes).map(key).collect();
        let whole = network(self.config, Dtypes::of(self.config), &ModelPart::WHOLE)?;
        let inspection = Inspection {
            replica: &mut self.replica,
            whole: &whole,
            loader: &self.loader,
            rank_table: &self.rank_table,
            step,
            keys,
        };
        inspection.run()
    }

    /// Compares the parameters of ranks that must hold the same.
    fn verify(&self, done: u64) -> Result<(), TrainError> {
        match self.replica.parameters.difference(done)? {
            Some(difference) => Err(difference.into()),
            None => Ok(()),
        }
    }

    /// Loss of the held-out text.
    fn validate(&mut self) -> Result<f64, TrainError> {
        mean_loss(
            &self.validation,
            self.config.model.block_size,
            self.session,
            &mut self.replica,
            &self.rank_table,
        )
    }

    fn stop_cause(&self) -> String {
        self.session
            .stop_requested()
            .unwrap_or_else(|| "another rank was asked to stop".into())
    }
}

/// Trains, step by step.
pub(crate) struct Trainer<'a> {
    parts: TrainerParts<'a>,
    skips: Skips,
    /// When the numbers of the last step were read.
    finished: Instant,
    /// Bytes sent before the step that is in progress.
    accounted: WireBytes,
    /// Time of collectives of the update before it that ended between the two.
    carried: Duration,
    /// Numbers of the last step, sent with every heartbeat: a later one may replace one that was not sent yet.
    progress: Option<Progress>,
    /// Steps that the device may still have to run.
    queue: VecDeque<EnqueuedStep>,
    /// The state in memory, on a device that runs asynchronously as far as the host has read results. `None`: it is not
    /// whole, as within an update.
    version: Option<Version>,
    /// The step behind it, once the sums and the norm are there. Only where the device runs at once: else the gradients may be
    /// those of the step ahead.
    unfinished: Option<UnfinishedStep>,
    /// Numbers of the last step that were read.
    line: Option<MetricsLine>,
}

/// The result of a run, as one rank knows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunSummary {
    /// Steps finished since the run began.
    pub steps: u64,
    /// Training loss of the last step of this life, mean over all ranks. `None` if no step was left.
    pub loss: Option<f64>,
    /// Validation loss at the end. `None` if the run was stopped before.
    pub val_loss: Option<f64>,
    /// Why the run was asked to stop early.
    pub stopped: Option<String>,
    /// The run's directory.
    pub out_dir: PathBuf,
}

impl<'a> Trainer<'a> {
    /// Before [`Trainer::begin`]. The state of a rank that `holds` it is that of the generation before.
    pub(crate) fn new(parts: TrainerParts<'a>, holds: bool) -> Self {
        let train = &parts.config.train;
        let resumed = parts.resumed.as_ref();
        Self {
            skips: Skips::new(train.on_nonfinite, train.max_skips),
            finished: Instant::now(),
            accounted: WireBytes::default(),
            carried: Duration::ZERO,
            progress: None,
            queue: VecDeque::new(),
            version: resumed.filter(|_| holds).map(|held| held.version),
            unfinished: None,
            line: resumed.and_then(|held| held.line.clone()),
            parts,
        }
    }

    /// Has `load` make the parameters those of the first step that is to come. Every rank must call it.
    pub(crate) fn begin(
        &mut self,
        load: impl FnOnce(&mut TrainerParts<'a>) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        load(&mut self.parts)?;
        let (parts, parameters) = (&self.parts, &self.parts.replica.parameters);
        let resumed = parts.resumed.as_ref().map(|held| held.version);
        let version = resumed.unwrap_or_else(|| parts.version(parts.first_step));
        self.version = Some(version);
        self.accounted = parts.sent();
        parameters.updated()?;
        // The first step has not begun.
        let _ = parameters.tracker().take_times();
        self.finished = Instant::now();
        Ok(())
    }

    /// Abandons checkpoints and collectives in flight, because training has failed on some rank. After an error that every
    /// rank has met, the save under way ends in order. Returns what the next generation can go on from: `None` if the state
    /// is not whole, or a thread may still read it. An error if it must go on in another process.
    pub(crate) fn abandon(mut self, error: &TrainError) -> Result<Option<Kept>, DeviceError> {
        if error.is_unanimous() {
            // The error that counts is known already.
            let _ = self.parts.with_checkpoints(Checkpoints::drain);
        }
        let is_read = !self.parts.checkpoints.abandon();
        self.parts.world.comm.abandon();
        if self.parts.world.compute.device.is_asynchronous() && !self.parts.session.outlives() {
            // The process ends, without a wait for the device.
            return Ok(None);
        }
        let kept = self.keep()?;
        Ok(kept.filter(|_| !is_read))
    }

    /// What the next generation can go on from, when no thread of this one uses it any more. `None` if it is not whole. An
    /// error if it must go on in another process.
    pub(crate) fn keep(mut self) -> Result<Option<Kept>, DeviceError> {
        let Compute { device, stream } = self.parts.world.compute.clone();
        device.recover(stream, RECOVERY_PATIENCE)?;
        if device.is_asynchronous() {
            self.unfinished = None;
            self.read_rest();
        }
        let updates = self.parts.clip.updates()?;
        let Some(version) = self.version else {
            return Ok(None);
        };
        let state = self.parts.checkpoints.state(self.position(version.step));
        if state.updates() != updates {
            // It has updated, but the result of the step is lost.
            return Ok(None);
        }
        let TrainerParts {
            world,
            replica,
            optimizer,
            copy,
            clip,
            ..
        } = self.parts;
        let (mesh, copy) = (world.mesh.shape(), copy.and_then(BuddyCopy::whole));
        let held = Held {
            version,
            unfinished: self.unfinished.as_ref().map(|step| step.version),
            updates,
            samples: state.consumed_samples,
            batch: state.batch,
            place: Place::of(mesh, world.rank()),
            copy_of: copy.as_ref().map(|copy| Place::of(mesh, copy.buddies.owner)),
            line: self.line.filter(|line| line.step == version.step),
        };
        Ok(Some(Kept {
            compute: world.compute,
            own: replica.parameters.own().clone(),
            sharding: replica.parameters.sharding().clone(),
            optimizer,
            copy,
            clip: clip.alone(),
            unfinished: self.unfinished,
            held,
        }))
    }

    /// Reads the results of the steps that the device has run to their end, when nothing is in flight on it any more.
    fn read_rest(&mut self) {
        let is_skipping = self.skips.is_skipping();
        for enqueued in std::mem::take(&mut self.queue) {
            match enqueued.read(self.parts.world.deadline()) {
                Ok(result) if !is_skipping && result.complaint().is_none() => drop(self.note(result)),
                // Without an update, as those behind a step that is skipped, it is done once more.
                _ => return,
            }
        }
    }

    /// What it was made of.
    pub(crate) fn parts(&self) -> &TrainerParts<'a> {
        &self.parts
    }

    /// Trains until the last step, or until any rank is asked to stop. `outcome` is what the run has come to, also when
    /// it ends with an error.
    pub(crate) fn run(
        &mut self,
        reducer: &mut Reducer,
        recorder: &mut Recorder,
        outcome: &mut RunSummary,
    ) -> Result<(), TrainError> {
        let (train, first_step) = (&self.parts.config.train, self.parts.first_step);
        outcome.steps = first_step;
        if let (0, Some(words)) = (self.parts.world.rank(), self.parts.window.is_behind(first_step)) {
            say(&words);
        }
        self.catch_up(recorder, outcome)?;
        // Steps that are left to the device while the next one is enqueued: the same on all ranks.
        let ahead = usize::from(self.parts.world.compute.device.is_asynchronous());
        for step in first_step..train.steps {
            self.beat(step, Phase::Training);
            if self.parts.window.opens_with(step + 1) {
                self.between_steps(|parts| parts.window.open(&parts.world, &parts.rank_table, step + 1))?;
            }
            let enqueued = self.enqueue(reducer, step)?;
            self.queue.push_back(enqueued);
            let is_awaited = self.parts.window.has_end_behind(step + 1);
            let due = Due::after(train, step + 1, if is_awaited { 0 } else { ahead });
            self.finish_steps(due, reducer, recorder, outcome)?;
            let is_over = self.parts.window.closes_with(step + 1) || outcome.stopped.is_some();
            if is_over && self.parts.window.is_open() {
                self.between_steps(|parts| {
                    (parts.window).close(&parts.world, &parts.rank_table, parts.session, step + 1)
                })?;
            }
            self.after_step(step + 1, due, outcome.stopped.is_some())?;
            if outcome.stopped.is_some() {
                break;
            }
        }
        if outcome.steps == train.steps {
            // Asked to stop in the last step, or in the one before while the device had the last one already.
            outcome.stopped = None;
        }
        if outcome.stopped.is_none() && outcome.val_loss.is_none() {
            // Resumed when all steps were done already.
            outcome.val_loss = Some(self.validate(outcome.steps)?);
        }
        // The launcher accepts the end of the process as success only in this phase.
        let is_done = outcome.steps >= train.steps;
        self.beat(
            outcome.steps,
            if is_done { Phase::Finishing } else { Phase::Saving },
        );
        self.parts.replica.parameters.drain()?;
        // No rank leaves before the last checkpoint is complete.
        self.parts.rank_table.gather("end of the run", [0.0; 2])?;
        Ok(())
    }

    /// Verification and save.
    fn after_step(&mut self, done: u64, due: Due, is_stopped: bool) -> Result<(), TrainError> {
        if due.verification {
            self.between_steps(|parts| parts.verify(done))?;
        }
        if done == self.parts.config.train.steps || is_stopped {
            self.save(done, Checkpoints::save_last)
        } else if due.checkpoint {
            self.save(done, Checkpoints::save)
        } else {
            Ok(())
        }
    }

    /// What was due after the step at which the run goes on in memory, unless the generation before has done it.
    fn catch_up(&mut self, recorder: &mut Recorder, outcome: &mut RunSummary) -> Result<(), TrainError> {
        let done = self.parts.first_step;
        if self.parts.resumed.is_none() || done == 0 {
            return Ok(());
        }
        let due = Due::after(&self.parts.config.train, done, 0);
        let known = self.line.as_ref().and_then(|line| line.val_loss);
        outcome.val_loss = match known {
            None if due.validation => Some(self.validate(done)?),
            known => known,
        };
        if let Some(line) = &mut self.line {
            line.val_loss = outcome.val_loss;
            outcome.loss = Some(line.loss);
            recorder.complete(line);
        }
        if self.parts.checkpoints.has(done) {
            return Ok(());
        }
        self.after_step(done, due, false)
    }

    /// Waits for the numbers of the oldest steps until [`Due::kept`] are left, and reports them. Once a rank was asked to
    /// stop, no step is left.
    fn finish_steps(
        &mut self,
        due: Due,
        reducer: &mut Reducer,
        recorder: &mut Recorder,
        outcome: &mut RunSummary,
    ) -> Result<(), TrainError> {
        while self.queue.len() > due.kept || (outcome.stopped.is_some() && !self.queue.is_empty()) {
            let Some(oldest) = self.queue.pop_front() else {
                break;
            };
            let mut record = self.record_of(oldest, reducer)?;
            if due.validation && self.queue.is_empty() {
                record.line.val_loss = Some(self.validate(record.line.step)?);
                outcome.val_loss = record.line.val_loss;
                self.line = Some(record.line.clone());
            }
            outcome.steps = record.line.step;
            outcome.loss = Some(record.line.loss);
            record.line.memory = self.parts.memory(reducer);
            self.progress = recorder.record(&record);
            // The stages of a pipeline wait for each other by its schedule.
            if self.parts.replica.plan.placement().stages() == 1 {
                let waited_ms = record.line.comm_exposed_ms + record.line.share_ms;
                let waited = Duration::from_secs_f64(waited_ms / 1e3);
                self.parts.session.add_wait(waited);
            }
            self.beat(record.line.step, Phase::Training);
            if record.stop && outcome.stopped.is_none() {
                outcome.stopped = Some(self.parts.stop_cause());
            }
            if self.skips.is_skipping() {
                self.release(reducer)?;
            }
        }
        Ok(())
    }

    /// After a skipped step: the device has skipped those behind it as well, so that the parameters were still those of
    /// the skipped step when it was inspected. They run once more, and count; what both runs sent and took is theirs.
    fn release(&mut self, reducer: &mut Reducer) -> Result<(), TrainError> {
        let (began, mut queued) = (Instant::now(), Vec::new());
        for enqueued in std::mem::take(&mut self.queue) {
            queued.push((enqueued.numbers.step, enqueued.numbers.sent));
            self.result_of(enqueued, reducer)?;
        }
        self.parts.clip.release();
        for (step, sent) in queued {
            let mut again = self.enqueue(reducer, step)?;
            let numbers = &mut again.numbers;
            (numbers.started, numbers.sent) = (began, numbers.sent + sent);
            self.queue.push_back(again);
        }
        Ok(())
    }

    /// Waits until the device has run a step. Of several errors the one that says what went wrong is returned.
    fn result_of(&self, enqueued: EnqueuedStep, reducer: &Reducer) -> Result<StepResult, TrainError> {
        let result = enqueued.result(&self.parts.world);
        // What failed behind a step that has run is the next one's.
        let failure = self.failure(reducer).filter(|_| result.is_err());
        failure.map_or(result, Err)
    }

    /// Why a stream went wrong, which itself says so only in words, if it does at all.
    fn failure(&self, reducer: &Reducer) -> Option<TrainError> {
        let failure = self.parts.replica.failure().or_else(|| reducer.failure());
        failure.map(TrainError::from)
    }

    /// The record of a step, once the device has run it.
    fn record_of(&mut self, enqueued: EnqueuedStep, reducer: &Reducer) -> Result<StepRecord, TrainError> {
        let result = self.result_of(enqueued, reducer)?;
        self.parts
            .with_checkpoints(|checkpoints, here| checkpoints.receive(here, &result.rows.saves()));
        let complaint = result.complaint();
        let decision = self.skips.judge(complaint.is_none());
        let step = result.numbers.step;
        let record = self.note(result);
        match (decision, complaint) {
            (Decision::Stop { skipped }, Some(complaint)) => {
                let seen = self.between_steps(|parts| parts.inspect(step))?;
                return Err(TrainError::NonFinite {
                    complaint,
                    step: step + 1,
                    skipped,
                    seen,
                });
            }
            (Decision::Skip { is_first: true }, Some(complaint)) => {
                let seen = self.between_steps(|parts| parts.inspect(step))?;
                if self.parts.world.rank() == 0 {
                    say(&format!("step {} is skipped: {complaint}; {seen}", step + 1));
                }
            }
            _ => {}
        }
        Ok(record)
    }

    /// Keeps the numbers of a step that the device has run, and returns its record.
    fn note(&mut self, result: StepResult) -> StepRecord {
        let StepNumbers {
            step,
            samples,
            mut times,
            ..
        } = result.numbers;
        let began = result.numbers.started.max(self.finished);
        self.finished = Instant::now();
        times.step = self.finished - began;
        // All of the step has run, and the failures were read after that.
        for device_times in result.numbers.device_times {
            times.account(device_times.times());
        }
        let routers = self.parts.replica.routers.as_ref().zip(result.routers.as_deref());
        let experts = routers.map(|(table, bytes)| table.read(bytes));
        let stalled = self.parts.checkpoints.take_stalled();
        let (loader, env) = (&self.parts.loader, self.parts.session.env());
        let block_size = self.parts.config.model.block_size as u64;
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let line = MetricsLine {
            step: step + 1,
            epoch: loader.epoch_before(step + 1),
            loss: result.rows.mean_loss(),
            val_loss: None,
            experts,
            lr: f64::from(result.numbers.lr),
            grad_norm: f64::from(result.norm),
            skipped: self.skips.total(),
            tokens: loader.consumed_before(step + 1) * block_size,
            tokens_per_s: (samples * block_size) as f64 / times.step.as_secs_f64().max(1e-9),
            achieved: Achieved::default(),
            step_ms: ms(times.step),
            data_ms: ms(times.data),
            forward_ms: ms(times.forward),
            backward_ms: ms(times.backward),
            comm_ms: ms(times.comm),
            comm_exposed_ms: ms(times.exposed),
            share_ms: ms(times.share),
            optimizer_ms: ms(times.optimizer),
            checkpoint_ms: ms(stalled),
            wire_bytes: result.numbers.sent,
            world_size: env.world_size.get(),
            generation: env.generation.get(),
            memory: Memory::default(),
        };
        if self.parts.world.compute.device.is_asynchronous() {
            self.version = Some(self.parts.version(line.step));
        }
        // The others may need it if a rank dies.
        self.line = Some(line.clone());
        StepRecord {
            line,
            tokens: samples * block_size,
            time: times.step,
            stop: result.rows.stop(),
        }
    }

    /// Work between two steps, when nothing is in flight. Its traffic and waits count for no step, and
    /// not in the timeline.
    fn between_steps<T>(
        &mut self,
        work: impl FnOnce(&mut TrainerParts<'a>) -> Result<T, TrainError>,
    ) -> Result<T, TrainError> {
        self.parts.replica.parameters.drain()?;
        // As what it sent, the time of the update before belongs to the next step. All of it has ended.
        let parameters = &self.parts.replica.parameters;
        self.carried +=
            parameters.tracker().take_times().comm + parameters.tracker().take_device_times().times().comm;
        let before = self.parts.sent();
        let timeline = self.parts.world.comm.timeline().clone();
        timeline.pause();
        let done = work(&mut self.parts)?;
        self.parts.replica.parameters.drain()?;
        timeline.resume();
        self.accounted = self.accounted + (self.parts.sent() - before);
        let replica = &self.parts.replica;
        let _ = (replica.take_times(), replica.take_device_times());
        Ok(done)
    }

    fn beat(&self, done: u64, phase: Phase) {
        self.parts.session.heartbeat(done, phase, self.progress.clone());
    }

    fn validate(&mut self, done: u64) -> Result<f64, TrainError> {
        self.beat(done, Phase::Validating);
        self.between_steps(TrainerParts::validate)
    }

    fn save(
        &mut self,
        done: u64,
        how: impl FnOnce(&mut Checkpoints, RankState<'_>, Position) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        self.beat(done, Phase::Saving);
        let at = self.position(done);
        self.between_steps(|parts| parts.with_checkpoints(|checkpoints, here| how(checkpoints, here, at)))
    }

    fn position(&self, done: u64) -> Position {
        Position {
            step: done,
            samples: self.parts.loader.consumed_before(done),
            skipped: self.skips.total(),
        }
    }

    /// Puts a step into the stream; `step` counts from 0.
    fn enqueue(&mut self, reducer: &mut Reducer, step: u64) -> Result<EnqueuedStep, TrainError> {
        let enqueued = self.put_in_stream(reducer, step);
        enqueued.map_err(|error| self.failure(reducer).unwrap_or(error))
    }

    fn put_in_stream(&mut self, reducer: &mut Reducer, step: u64) -> Result<EnqueuedStep, TrainError> {
        let parts = &mut self.parts;
        parts.world.check()?;
        let started = Instant::now();
        let whole = parts.world.begin_span();
        let mut times = StepTimes {
            comm: std::mem::take(&mut self.carried),
            ..StepTimes::default()
        };
        let StepGradients {
            grads,
            device_times,
            positions,
        } = parts.passes(reducer, step, &mut times)?;
        let (world, parameters) = (&parts.world, &parts.replica.parameters);
        let Compute { device, stream } = world.compute.clone();
        let (norm_began, shared_before) = (Instant::now(), times.share);
        let span = world.begin_span();
        let routers = parts.replica.routers.as_ref().map(RouterTable::share);
        let norms = parts.clip.measure(parts.optimizer.home(), &grads);
        let copied = parts.copy.iter();
        let copied = copied.flat_map(|copy| copy.exchange_sums(&world.compute, parameters, &grads));
        let mut collectives: Vec<Work> = routers.into_iter().chain(norms).chain(copied).collect();
        for work in &collectives {
            parts.arrive(work, &mut times)?;
        }
        let (update, version) = (parts.update(step), parts.version(step + 1));
        self.unfinished = Some(UnfinishedStep {
            version,
            grads: grads.clone(),
            update: update.clone(),
        });
        let barrier = parts.share(step, positions);
        parts.arrive(&barrier, &mut times)?;
        collectives.push(barrier);
        parts.step_table.stamp();
        parts.clip.finish(Some(parts.step_table.rows()));
        world.end_span(span, Kind::Optimizer, || "norm".to_owned());
        // Nothing of this step is in flight that the stream does not wait for. What the update sends, and its time,
        // belongs to the step that waits for it.
        let now = parts.sent();
        let sent = now - std::mem::replace(&mut self.accounted, now);
        let device_times = [vec![device_times], parts.replica.take_device_times()].concat();
        let span = world.begin_span();
        if parts.has_run() {
            // The barrier too: from here on no other rank is needed.
            (self.version, self.unfinished) = (None, None);
        }
        let exchanges = parts.put_update(&grads, &update);
        world.end_span(span, Kind::Optimizer, || "update".to_owned());
        let is_whole = exchanges.is_empty() && parts.has_run();
        self.version = is_whole.then_some(version).or(self.version);
        collectives.extend(exchanges);
        let fetches = [parts.step_table.fetch(), device.fetch(stream, &parts.clip.norm())];
        let routers = parts.replica.routers.as_ref().map(RouterTable::fetch);
        parameters.updated()?;
        let waited =
            times.account(parameters.tracker().take_times()) + times.share.saturating_sub(shared_before);
        times.optimizer = norm_began.elapsed().saturating_sub(waited);
        world.end_span(whole, Kind::Step, || format!("step {}", step + 1));
        Ok(EnqueuedStep {
            numbers: StepNumbers {
                step,
                samples: parts.loader.sample_count(step),
                lr: update.lr,
                times,
                device_times,
                started,
                sent,
            },
            collectives,
            fetches,
            routers,
        })
    }
}

/// The result of the passes of a step.
struct StepGradients {
    grads: ArenaShare,
    /// Times of reduction.
    device_times: DeviceTimes,
    /// Number of this rank's losses.
    positions: usize,
}

/// What is to be done after a step.
#[derive(Clone, Copy, Debug)]
struct Due {
    validation: bool,
    verification: bool,
    checkpoint: bool,
    /// Steps whose numbers are not waited for yet.
    kept: usize,
}

impl Due {
    /// After `done` steps, of which the device may have the last `ahead`.
    fn after(train: &Train, done: u64, ahead: usize) -> Self {
        let last = done == train.steps;
        let every = |steps: u64| steps > 0 && done.is_multiple_of(steps);
        let (validation, verification) = (last || every(train.eval_every), every(train.verify_every));
        let checkpoint = last || every(train.checkpoint_every);
        Self {
            validation,
            verification,
            checkpoint,
            kept: if validation || verification || checkpoint {
                0
            } else {
                ahead
            },
        }
    }
}
