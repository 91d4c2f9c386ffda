//! The training loop of one rank.

use std::time::Instant;

use ddp_proto::control::{Phase, Progress};

use super::TrainError;
use super::evaluation::Evaluation;
use super::exchange::Exchange;
use super::recorder::{Recorder, StepRecord, StepTimes};
use super::replica::{Batch, Replica};
use super::saving::Checkpoints;
use super::world::World;
use crate::collective::WireBytes;
use crate::config::TrainConfig;
use crate::data::Loader;
use crate::model::{Activation, StepKey};
use crate::optim::{AdamW, Clip, UpdateStep, learning_rate};
use crate::parallel::{Portion, Reduced, Reducer, Replicas, SyncTimes};
use crate::session::Session;

/// Everything that a step needs. Built by [`super::setup`].
pub(super) struct Trainer<'a> {
    pub(super) config: &'a TrainConfig,
    pub(super) session: &'a Session,
    pub(super) world: World,
    pub(super) replica: Replica,
    pub(super) adamw: AdamW,
    /// Size of the gradients, padding included.
    pub(super) grad_bytes: usize,
    pub(super) clip: Clip,
    pub(super) exchange: Exchange,
    pub(super) replicas: Replicas,
    pub(super) loader: Loader,
    pub(super) evaluation: Evaluation,
    pub(super) checkpoints: Checkpoints,
    /// Steps that were finished when this life of the run began.
    pub(super) first_step: u64,
    /// Bytes sent before the step that is in progress.
    pub(super) accounted: WireBytes,
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
    /// Trains until the last step, or until any rank is asked to stop.
    pub(super) fn run(
        &mut self,
        reducer: &mut Reducer,
        recorder: &mut Recorder,
    ) -> Result<Outcome, TrainError> {
        let train = &self.config.train;
        let mut outcome = Outcome {
            steps: self.first_step,
            ..Outcome::default()
        };
        for step in self.first_step..train.steps {
            self.beat(step, Phase::Training);
            let mut record = self.step(reducer, step)?;
            let done = step + 1;
            let last = done == train.steps;
            if last || is_due(train.eval_every, done) {
                record.val_loss = Some(self.aside(|trainer| trainer.validate(done))?);
                outcome.val_loss = record.val_loss;
            }
            outcome.steps = done;
            outcome.loss = Some(record.loss);
            self.progress = recorder.record(&record, self)?;
            self.beat(done, Phase::Training);
            if is_due(train.verify_every, done) {
                self.aside(|trainer| trainer.verify(done))?;
            }
            let stopped = record.stop.then(|| self.stop_cause());
            if last || stopped.is_some() || is_due(train.checkpoint_every, done) {
                self.aside(|trainer| trainer.save(done))?;
            }
            if stopped.is_some() {
                outcome.stopped = stopped;
                break;
            }
        }
        if outcome.stopped.is_none() && outcome.val_loss.is_none() {
            // Resumed when all steps were done already.
            outcome.val_loss = Some(self.aside(|trainer| trainer.validate(outcome.steps))?);
        }
        self.beat(outcome.steps, Phase::Finishing);
        self.replica.weights.settle()?;
        // Nobody leaves before the last checkpoint is whole.
        self.exchange.gather("end of the run", [0.0; 2])?;
        Ok(outcome)
    }

    /// One optimizer step; `step` counts from 0.
    fn step(&mut self, reducer: &mut Reducer, step: u64) -> Result<StepRecord, TrainError> {
        self.world.check()?;
        let started = Instant::now();
        let mut times = StepTimes::default();
        let (averages, losses) = self.micro_batches(reducer, step, &mut times)?;
        let (loss, stop) = self.share_loss(step, &losses)?;
        let train = &self.config.train;
        let lr = learning_rate(step, train.steps, &train.optimizer, &train.schedule);
        let (averages, started_update) = (averages.portion(), Instant::now());
        let grad_norm = self.measure(&averages, step)?;
        // Nothing is in flight: all ranks have told each other their part of the norm. What the update sends
        // belongs to the step that waits for it.
        let sent = self.take_sent();
        self.update(&averages, step, lr)?;
        times.optimizer += started_update.elapsed();
        times.step = started.elapsed();
        Ok(StepRecord {
            step: step + 1,
            loss,
            val_loss: None,
            lr,
            grad_norm,
            times,
            sent,
            stop,
        })
    }

    /// Forward and backward of all micro-batches, gradients averaged over them and all ranks. Returns the losses of
    /// each micro-batch, still on the device.
    fn micro_batches<'r>(
        &mut self,
        reducer: &'r mut Reducer,
        step: u64,
        times: &mut StepTimes,
    ) -> Result<(Reduced<'r>, Vec<Activation>), TrainError> {
        let accumulation = self.config.train.grad_accumulation;
        let mut batch = Batch::new(self.replica.positions());
        let mut losses = Vec::with_capacity(accumulation);
        let mut grads = reducer.step(accumulation)?;
        for m in 0..accumulation as u64 {
            if m > 0 {
                grads.next_micro_batch()?;
            }
            let started = Instant::now();
            self.loader.fill(step, m, &mut batch.inputs, &mut batch.targets)?;
            times.data += started.elapsed();
            let key = StepKey {
                seed: self.config.run.seed,
                step,
                micro_batch: m * self.world.size() as u64 + self.world.rank() as u64,
            };
            let (loss, pass) = self.replica.learn(&batch, key, &mut grads)?;
            times.forward += pass.forward;
            times.backward += pass.backward;
            losses.push(loss);
        }
        let averages = grads.finish(self.world.deadline())?;
        for SyncTimes { comm, exposed } in [averages.times(), self.replica.weights.take_times()] {
            times.comm += comm;
            times.exposed += exposed;
        }
        Ok((averages, losses))
    }

    /// Mean loss over all ranks, and whether any of them was asked to stop.
    fn share_loss(&self, step: u64, losses: &[Activation]) -> Result<(f64, bool), TrainError> {
        let mut own = 0.0;
        for loss in losses {
            own += self.replica.sum(loss)?;
        }
        own /= (losses.len() * self.replica.positions()) as f64;
        let stop = f64::from(u8::from(self.session.stop_requested().is_some()));
        let rows = self.exchange.gather("loss", [own, stop])?;
        if let Some(rank) = rows.iter().position(|row| !row[0].is_finite()) {
            return Err(TrainError::NonFiniteLoss {
                rank,
                step: step + 1,
                loss: rows[rank][0],
            });
        }
        let mean = rows.iter().map(|row| row[0]).sum::<f64>() / rows.len() as f64;
        Ok((mean, rows.iter().any(|row| row[1] > 0.0)))
    }

    /// Norm of the averaged gradients before clipping.
    fn measure(&self, averages: &Portion, step: u64) -> Result<f32, TrainError> {
        self.clip.measure(self.world.stream, averages)?;
        let norm = self.clip.norm(self.world.stream)?;
        if norm.is_finite() {
            Ok(norm)
        } else {
            Err(TrainError::NonFiniteGradient { step: step + 1, norm })
        }
    }

    /// Clips and applies the averaged gradients.
    fn update(&self, averages: &Portion, step: u64, lr: f32) -> Result<(), TrainError> {
        let World { stream, device, .. } = &self.world;
        let weights = &self.replica.weights;
        let update = UpdateStep {
            scale: self.clip.scale(),
            lr,
            number: step + 1,
        };
        self.adamw.step(*stream, weights.own(), averages, &update);
        device.synchronize(*stream)?;
        weights.updated()?;
        Ok(())
    }

    /// Bytes sent since the last call, but for what was sent [`Trainer::aside`].
    fn take_sent(&mut self) -> WireBytes {
        let now = self.sent();
        let sent = difference(now, self.accounted);
        self.accounted = now;
        sent
    }

    /// Bytes sent so far.
    pub(super) fn sent(&self) -> WireBytes {
        sum(self.world.comm.wire_bytes(), self.replica.weights.wire_bytes())
    }

    /// Work between two steps, when nothing is in flight. What it sends is of no step.
    fn aside<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, TrainError>) -> Result<T, TrainError> {
        self.replica.weights.settle()?;
        let before = self.sent();
        let done = work(self)?;
        self.replica.weights.settle()?;
        self.accounted = sum(self.accounted, difference(self.sent(), before));
        Ok(done)
    }

    /// Compares replicas; where every parameter has one owner, there is nothing to compare.
    fn verify(&self, done: u64) -> Result<(), TrainError> {
        if let Portion::Whole(params) = self.replica.weights.own() {
            self.replicas.verify(self.world.stream, params, done)?;
        }
        Ok(())
    }

    /// Tokens that all ranks train on in one step.
    pub(super) fn tokens_per_step(&self) -> u64 {
        let per_rank = self.replica.positions() * self.config.train.grad_accumulation;
        (per_rank * self.world.size()) as u64
    }

    fn beat(&self, done: u64, phase: Phase) {
        self.session.heartbeat(done, phase, self.progress.clone());
    }

    fn validate(&self, done: u64) -> Result<f64, TrainError> {
        self.beat(done, Phase::Validating);
        self.evaluation
            .mean_loss(&self.world, &self.replica, &self.exchange)
    }

    fn save(&mut self, done: u64) -> Result<(), TrainError> {
        self.beat(done, Phase::Saving);
        let consumed = self.loader.consumed_before(done);
        self.checkpoints.save(
            &self.world,
            &self.replica,
            &self.adamw,
            &self.exchange,
            (done, consumed),
        )
    }

    fn stop_cause(&self) -> String {
        self.session
            .stop_requested()
            .unwrap_or_else(|| "another rank was asked to stop".into())
    }
}

fn is_due(every: u64, done: u64) -> bool {
    every > 0 && done.is_multiple_of(every)
}

fn sum(one: WireBytes, other: WireBytes) -> WireBytes {
    WireBytes {
        grads: one.grads + other.grads,
        params: one.params + other.params,
        other: one.other + other.other,
    }
}

fn difference(now: WireBytes, before: WireBytes) -> WireBytes {
    WireBytes {
        grads: now.grads - before.grads,
        params: now.params - before.params,
        other: now.other - before.other,
    }
}
