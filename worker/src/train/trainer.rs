//! The training loop of one rank: steps, and what is due between them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ddp_proto::control::{Phase, Progress};

use super::TrainError;
use super::evaluation::Evaluation;
use super::exchange::Exchange;
use super::recorder::{Recorder, StepRecord, say};
use super::replica::Replica;
use super::saving::{Checkpoints, Here, Position};
use super::skips::{Fate, Skips};
use super::step::Enqueued;
use super::strategy::Scheme;
use super::tally::Tally;
use super::window::Window;
use super::world::World;
use crate::collective::WireBytes;
use crate::config::{Train, TrainConfig};
use crate::data::Loader;
use crate::optim::{Clip, Optimizer};
use crate::parallel::{Reducer, Replicas};
use crate::session::Session;

/// Everything that a step needs. Built by [`super::setup`].
pub(super) struct Trainer<'a> {
    pub(super) config: &'a TrainConfig,
    pub(super) scheme: Scheme,
    pub(super) session: &'a Session,
    pub(super) world: World,
    pub(super) replica: Replica,
    pub(super) optimizer: Optimizer,
    /// Size of the gradients, padding included.
    pub(super) grad_bytes: usize,
    pub(super) clip: Clip,
    pub(super) exchange: Exchange,
    pub(super) tally: Tally,
    pub(super) skips: Skips,
    /// None where every parameter has one owner.
    pub(super) replicas: Option<Replicas>,
    pub(super) loader: Loader,
    pub(super) evaluation: Evaluation,
    pub(super) checkpoints: Checkpoints,
    pub(super) window: Window,
    /// Steps that were finished when this life of the run began.
    pub(super) first_step: u64,
    /// When the numbers of the last step were read.
    pub(super) concluded: Instant,
    /// Bytes sent before the step that is in progress.
    pub(super) accounted: WireBytes,
    /// Time of collectives of the update before it that ended between the two.
    pub(super) carried: Duration,
    /// Numbers of the last step, sent with every heartbeat: a later one may replace one that was not sent yet.
    pub(super) progress: Option<Progress>,
}

/// How the loop ended.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    /// Steps finished since the run began.
    pub(super) steps: u64,
    /// Training loss of the last step of this life.
    pub(super) loss: Option<f64>,
    /// Validation loss at the end.
    pub(super) val_loss: Option<f64>,
    /// Why the run was asked to stop early.
    pub(super) stopped: Option<String>,
}

impl Trainer<'_> {
    /// Trains until the last step, or until any rank is asked to stop. `outcome` is what the run has come to, also when
    /// it ends with an error.
    pub(super) fn run(
        &mut self,
        reducer: &mut Reducer,
        recorder: &mut Recorder,
        outcome: &mut Outcome,
    ) -> Result<(), TrainError> {
        let train = &self.config.train;
        outcome.steps = self.first_step;
        if let (0, Some(words)) = (self.world.rank(), self.window.is_behind(self.first_step)) {
            say(&words);
        }
        // Steps that are left to the device while the next one is enqueued: the same on all ranks.
        let ahead = usize::from(self.world.device.is_asynchronous());
        let mut queue = VecDeque::with_capacity(ahead + 1);
        for step in self.first_step..train.steps {
            self.beat(step, Phase::Training);
            if self.window.opens_with(step + 1) {
                self.aside(|trainer| trainer.window.open(&trainer.world, &trainer.exchange, step + 1))?;
            }
            queue.push_back(self.enqueue(reducer, step)?);
            let due = Due::after(train, step + 1);
            let is_awaited = due.any() || self.window.has_end_behind(step + 1);
            let kept = if is_awaited { 0 } else { ahead };
            self.conclude(&mut queue, (kept, due), reducer, recorder, outcome)?;
            let is_over = self.window.closes_with(step + 1) || outcome.stopped.is_some();
            if is_over && self.window.is_open() {
                self.aside(|trainer| trainer.close_window(step + 1))?;
            }
            if due.verification {
                self.aside(|trainer| trainer.verify(step + 1))?;
            }
            if step + 1 == train.steps || outcome.stopped.is_some() {
                self.aside(|trainer| trainer.save(step + 1, Checkpoints::save_last))?;
            } else if due.checkpoint {
                self.aside(|trainer| trainer.save(step + 1, Checkpoints::save))?;
            }
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
            outcome.val_loss = Some(self.aside(|trainer| trainer.validate(outcome.steps))?);
        }
        // The launcher takes the work for done only in this phase.
        let is_done = outcome.steps >= train.steps;
        self.beat(
            outcome.steps,
            if is_done { Phase::Finishing } else { Phase::Saving },
        );
        self.replica.weights.drain()?;
        // Nobody leaves before the last checkpoint is whole.
        self.exchange.gather("end of the run", [0.0; 2])?;
        Ok(())
    }

    /// Waits for the numbers of the oldest steps until `kept` are left, and tells of them. None is left once a rank
    /// was asked to stop.
    fn conclude(
        &mut self,
        queue: &mut VecDeque<Enqueued>,
        (kept, due): (usize, Due),
        reducer: &Reducer,
        recorder: &mut Recorder,
        outcome: &mut Outcome,
    ) -> Result<(), TrainError> {
        while queue.len() > kept || (outcome.stopped.is_some() && !queue.is_empty()) {
            let Some(oldest) = queue.pop_front() else { break };
            let mut record = self.record_of(oldest, reducer)?;
            if due.validation && queue.is_empty() {
                record.val_loss = Some(self.aside(|trainer| trainer.validate(record.step))?);
                outcome.val_loss = record.val_loss;
            }
            outcome.steps = record.step;
            outcome.loss = Some(record.loss);
            self.progress = recorder.record(&record, self);
            self.beat(record.step, Phase::Training);
            if record.stop && outcome.stopped.is_none() {
                outcome.stopped = Some(self.stop_cause());
            }
        }
        Ok(())
    }

    /// What is told of a step, once the device has run it.
    fn record_of(&mut self, enqueued: Enqueued, reducer: &Reducer) -> Result<StepRecord, TrainError> {
        let (step, samples, lr, sent) = (enqueued.step, enqueued.samples, enqueued.lr, enqueued.sent);
        let (mut times, began) = (enqueued.times, enqueued.started.max(self.concluded));
        let device_times = enqueued.device_times.clone();
        let numbers = enqueued.numbers(&self.world);
        // The stream says only in words why it went wrong, if it does at all.
        let failure = self.replica.weights.failure().or_else(|| reducer.failure());
        let numbers = failure.map_or(numbers, |error| Err(error.into()))?;
        self.concluded = Instant::now();
        times.step = self.concluded - began;
        // All of the step has run, and who was asked for failures has looked at it.
        for device_times in device_times {
            times.account(device_times.times());
        }
        self.checkpoints_here(|checkpoints, here| checkpoints.heard(here, &numbers.shares.saves()));
        let complaint = numbers.complaint();
        match (self.skips.judge(complaint.is_none()), complaint) {
            (Fate::Stop { skipped }, Some(complaint)) => {
                let seen = self.aside(|trainer| trainer.inspect(step))?;
                return Err(TrainError::NonFinite {
                    complaint,
                    step: step + 1,
                    skipped,
                    seen,
                });
            }
            (Fate::Skip { is_first: true }, Some(complaint)) => {
                let seen = self.aside(|trainer| trainer.inspect(step))?;
                if self.world.rank() == 0 {
                    say(&format!("step {} is skipped: {complaint}; {seen}", step + 1));
                }
            }
            _ => {}
        }
        Ok(StepRecord {
            step: step + 1,
            samples,
            loss: numbers.shares.mean_loss(),
            val_loss: None,
            lr,
            grad_norm: numbers.norm,
            skipped: self.skips.total(),
            times,
            stood: self.checkpoints.take_stood(),
            sent,
            stop: numbers.shares.stop(),
        })
    }

    /// Bytes sent since the last call, but for what was sent [`Trainer::aside`].
    pub(super) fn take_sent(&mut self) -> WireBytes {
        let now = self.sent();
        let sent = now - self.accounted;
        self.accounted = now;
        sent
    }

    /// Bytes sent so far.
    pub(super) fn sent(&self) -> WireBytes {
        self.world.mesh.wire_bytes()
    }

    /// Work between two steps, when nothing is in flight. What it sends, and waits for, is of no step, and
    /// not in the timeline.
    fn aside<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, TrainError>) -> Result<T, TrainError> {
        self.replica.weights.drain()?;
        // As what it sent, the time of the update before belongs to the next step. All of it has ended.
        let weights = &self.replica.weights;
        self.carried += weights.take_times().comm + weights.take_device_times().times().comm;
        let before = self.sent();
        let timeline = self.world.comm.timeline().clone();
        timeline.pause();
        let done = work(self)?;
        self.replica.weights.drain()?;
        timeline.resume();
        self.accounted = self.accounted + (self.sent() - before);
        let weights = &self.replica.weights;
        let _ = (weights.take_times(), weights.take_device_times());
        Ok(done)
    }

    fn close_window(&mut self, done: u64) -> Result<(), TrainError> {
        (self.window).close(&self.world, &self.exchange, self.session, done)
    }

    /// Compares replicas; where every parameter has one owner, there is nothing to compare.
    fn verify(&self, done: u64) -> Result<(), TrainError> {
        if let Some(replicas) = &self.replicas {
            replicas.verify(self.world.stream, self.replica.weights.own(), done)?;
        }
        Ok(())
    }

    fn beat(&self, done: u64, phase: Phase) {
        self.session.heartbeat(done, phase, self.progress.clone());
    }

    fn validate(&mut self, done: u64) -> Result<f64, TrainError> {
        self.beat(done, Phase::Validating);
        self.evaluation
            .mean_loss(self.session, &self.world, &mut self.replica, &self.exchange)
    }

    fn save(
        &mut self,
        done: u64,
        how: impl FnOnce(&mut Checkpoints, Here<'_>, Position) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        self.beat(done, Phase::Saving);
        let at = Position {
            step: done,
            samples: self.loader.consumed_before(done),
            skipped: self.skips.total(),
        };
        self.checkpoints_here(|checkpoints, here| how(checkpoints, here, at))
    }

    /// Ends the save under way after an error that every rank has met: the checkpoint before it is to be whole.
    pub(super) fn settle_checkpoints(&mut self) -> Result<(), TrainError> {
        self.checkpoints_here(Checkpoints::settle)
    }

    pub(super) fn checkpoints_here<T>(&mut self, work: impl FnOnce(&mut Checkpoints, Here<'_>) -> T) -> T {
        let here = Here {
            world: &self.world,
            replica: &self.replica,
            optimizer: &self.optimizer,
            exchange: &self.exchange,
            session: self.session,
        };
        work(&mut self.checkpoints, here)
    }

    fn stop_cause(&self) -> String {
        self.session
            .stop_requested()
            .unwrap_or_else(|| "another rank was asked to stop".into())
    }
}

/// What is to be done after a step.
#[derive(Clone, Copy, Debug)]
struct Due {
    validation: bool,
    verification: bool,
    checkpoint: bool,
}

impl Due {
    /// After `done` steps.
    fn after(train: &Train, done: u64) -> Self {
        let last = done == train.steps;
        let every = |steps: u64| steps > 0 && done.is_multiple_of(steps);
        Self {
            validation: last || every(train.eval_every),
            verification: every(train.verify_every),
            checkpoint: last || every(train.checkpoint_every),
        }
    }

    fn any(self) -> bool {
        self.validation || self.verification || self.checkpoint
    }
}
