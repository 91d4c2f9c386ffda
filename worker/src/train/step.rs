//! One optimizer step: the host puts all of it into the stream, and reads its numbers later.
//!
//! data → forward → losses to all ranks → backward, reduced meanwhile → norm → clip and update, or neither
//!
//! Nothing in it waits for the device: whether a step counts is decided there, by the clipping factor. On a device
//! that runs asynchronously the numbers of a step are read when the next one has been enqueued.

use std::collections::BTreeMap;
use std::time::Instant;

use super::TrainError;
use super::recorder::StepTimes;
use super::replica::Batch;
use super::tally::Shares;
use super::trainer::Trainer;
use super::world::World;
use crate::collective::{WireBytes, Work};
use crate::device::Fetch;
use crate::mesh::DATA;
use crate::model::{Flight, SampleKey};
use crate::optim::{UpdateStep, batch_factor, learning_rate};
use crate::parallel::{Action, DeviceTimes, Portion, ReduceError, Reducer, Step, sequential};
use crate::plan::GlobalBatch;
use crate::timeline::Kind;

/// A step between the host, which is done with it, and the device, which may still have to run it.
pub(super) struct Enqueued {
    /// From 0.
    pub(super) step: u64,
    /// Samples of all ranks.
    pub(super) samples: u64,
    pub(super) lr: f32,
    /// What the host saw so far.
    pub(super) times: StepTimes,
    /// What the device measures of reduction and of parameters.
    pub(super) device_times: [DeviceTimes; 2],
    pub(super) started: Instant,
    /// Bytes that this rank sent.
    pub(super) sent: WireBytes,
    /// Exchanges that the stream waits for.
    exchanges: Vec<Work>,
    /// Losses and norm.
    fetches: [Fetch; 2],
}

/// What became of it.
pub(super) struct Numbers {
    pub(super) shares: Shares,
    /// Norm of the averaged gradients before clipping.
    pub(super) norm: f32,
}

/// The micro-batches of a step on their way through the blocks.
struct Run {
    step: u64,
    micro_batches: u64,
    /// Where tokens are read into.
    batch: Batch,
    /// By chunk and micro-batch: between forward and backward.
    flights: BTreeMap<(usize, u64), Flight>,
    forwards: u64,
    /// Of this rank's micro-batches so far.
    positions: usize,
}

impl Run {
    /// Name of a span.
    fn of_pass(&self, m: u64, what: &str) -> String {
        match self.micro_batches {
            1 => what.to_owned(),
            _ => format!("micro-batch {}: {what}", m + 1),
        }
    }
}

/// What the passes of a step leave behind.
struct Passes {
    grads: Portion,
    /// Of reduction.
    device_times: DeviceTimes,
    /// The losses, on their way to all ranks.
    sharing: Work,
}

impl Enqueued {
    /// Waits until the device has got there.
    pub(super) fn numbers(self, world: &World) -> Result<Numbers, TrainError> {
        let deadline = world.deadline();
        for work in self.exchanges {
            work.wait(deadline)?;
        }
        let [shares, norm] = self.fetches;
        Ok(Numbers {
            shares: Shares::read(&shares.wait(deadline)?),
            norm: bytemuck::pod_read_unaligned(&norm.wait(deadline)?),
        })
    }
}

impl Numbers {
    /// What is not finite, in words. The device has skipped the update then, and only then.
    pub(super) fn complaint(&self) -> Option<String> {
        match self.shares.not_finite() {
            Some((rank, loss)) => Some(format!("loss is {loss} on rank {rank}")),
            None if self.norm.is_finite() => None,
            None => Some(format!("norm of the averaged gradient is {}", self.norm)),
        }
    }
}

impl Trainer<'_> {
    /// Puts a step into the stream; `step` counts from 0.
    pub(super) fn enqueue(&mut self, reducer: &mut Reducer, step: u64) -> Result<Enqueued, TrainError> {
        self.world.check()?;
        let started = Instant::now();
        let whole = self.world.begin_span();
        let mut times = StepTimes {
            comm: std::mem::take(&mut self.carried),
            ..StepTimes::default()
        };
        let Passes {
            grads,
            device_times,
            sharing,
        } = self.passes(reducer, step, &mut times)?;
        let World { stream, device, .. } = self.world.clone();
        let (norm_began, shared_before) = (Instant::now(), times.share);
        let mut exchanges = vec![sharing];
        self.arrive(&exchanges[0], &mut times)?;
        let span = self.world.begin_span();
        if let Some(work) = self.clip.measure(stream, &grads) {
            self.arrive(&work, &mut times)?;
            exchanges.push(work);
        }
        self.clip.conclude(stream, Some(self.tally.rows()));
        self.world.end_span(span, Kind::Optimizer, || "norm".to_owned());
        // Nothing of this step is in flight that the stream does not wait for. What the update sends, and its time,
        // belongs to the step that waits for it.
        let sent = self.take_sent();
        let device_times = [device_times, self.replica.weights.take_device_times()];
        let train = &self.config.train;
        let lr = learning_rate(step, train.steps, &train.optimizer, &train.schedule);
        let lr = (f64::from(lr) * batch_factor(train, self.global_batch().samples())) as f32;
        let update = UpdateStep {
            scale: self.clip.scale(),
            lr,
            number: step + 1,
        };
        let weights = &self.replica.weights;
        let span = self.world.begin_span();
        exchanges.extend((self.optimizer).step(stream, weights.own(), &grads, &update));
        self.world.end_span(span, Kind::Optimizer, || "update".to_owned());
        let fetches = [self.tally.fetch(), device.fetch(stream, &self.clip.norm())];
        weights.updated()?;
        let waited = times.account(weights.take_times()) + times.share.saturating_sub(shared_before);
        times.optimizer = norm_began.elapsed().saturating_sub(waited);
        self.world
            .end_span(whole, Kind::Step, || format!("step {}", step + 1));
        Ok(Enqueued {
            step,
            samples: self.loader.samples(step).count,
            lr,
            times,
            device_times,
            started,
            sent,
            exchanges,
            fetches,
        })
    }

    /// Later operations of the stream run after `work`. An error that is known already is returned.
    fn arrive(&self, work: &Work, times: &mut StepTimes) -> Result<(), TrainError> {
        let World { stream, device, .. } = &self.world;
        let (began, span) = (Instant::now(), self.world.begin_span());
        let deadline = self.world.deadline();
        work.wait_on(device.as_ref(), *stream, deadline);
        if work.is_done() {
            work.wait(deadline)?;
        }
        (self.world).end_span(span, Kind::Other, || {
            "waits for numbers of other ranks".to_owned()
        });
        times.share += began.elapsed();
        Ok(())
    }

    /// Forward and backward of all micro-batches, in the order of the schedule; gradients are summed over them and all
    /// ranks.
    fn passes(
        &mut self,
        reducer: &mut Reducer,
        step: u64,
        times: &mut StepTimes,
    ) -> Result<Passes, TrainError> {
        let micro_batches = self.begin_passes(step);
        let mut grads = reducer.step(micro_batches as usize)?;
        let mut run = Run {
            step,
            micro_batches,
            batch: Batch::new(self.replica.positions()),
            flights: BTreeMap::new(),
            forwards: 0,
            positions: 0,
        };
        let mut sharing = None;
        for action in sequential(micro_batches) {
            match action {
                Action::Forward { chunk, micro_batch } => {
                    self.forward(&mut run, (chunk, micro_batch), times)?;
                    if run.forwards == micro_batches {
                        let began = Instant::now();
                        let stop = self.session.stop_requested().is_some();
                        let save = self.checkpoints.code(self.world.rank() == 0);
                        sharing = Some(self.tally.share(run.positions, stop, save));
                        times.share += began.elapsed();
                    }
                }
                Action::Backward { chunk, micro_batch } => {
                    self.backward(&mut run, (chunk, micro_batch), &mut grads, times)?;
                }
            }
        }
        let reduced = grads.finish_on(self.world.stream, self.world.deadline())?;
        times.account(reduced.times());
        Ok(Passes {
            grads: reduced.portion(),
            device_times: reduced.device_times(),
            sharing: sharing.expect("a step has a micro-batch"),
        })
    }

    fn forward(
        &mut self,
        run: &mut Run,
        (chunk, m): (usize, u64),
        times: &mut StepTimes,
    ) -> Result<(), TrainError> {
        let (began, span) = (Instant::now(), self.world.begin_span());
        let batch = &mut run.batch;
        let filled = self
            .loader
            .fill(run.step, m, &mut batch.inputs, &mut batch.targets)?;
        run.positions += filled * self.config.model.block_size;
        self.world.end_span(span, Kind::Data, || run.of_pass(m, "data"));
        times.data += began.elapsed();
        let (key, began, span) = (self.key(run.step, m), Instant::now(), self.world.begin_span());
        let mut flight = Flight::over(self.replica.model.whole());
        let losses = self.replica.forward(&mut flight, &run.batch, key)?;
        self.tally.add(&losses, run.forwards == 0);
        drop(losses);
        run.flights.insert((chunk, m), flight);
        run.forwards += 1;
        self.world
            .end_span(span, Kind::Forward, || run.of_pass(m, "forward"));
        let waited = times.account(self.replica.weights.take_times());
        times.forward += began.elapsed().saturating_sub(waited);
        Ok(())
    }

    fn backward(
        &mut self,
        run: &mut Run,
        (chunk, m): (usize, u64),
        grads: &mut Step<'_>,
        times: &mut StepTimes,
    ) -> Result<(), TrainError> {
        self.world.check()?;
        let (began, before, span) = (Instant::now(), grads.times().exposed, self.world.begin_span());
        let mut flight = run.flights.remove(&(chunk, m)).expect("it went forward before");
        let done = self.replica.backward(&mut flight, self.key(run.step, m), grads);
        done.map_err(|error| match grads.failure() {
            Some(failure @ ReduceError::Unused { .. }) => failure.clone().into(),
            _ => error,
        })?;
        self.world
            .end_span(span, Kind::Backward, || run.of_pass(m, "backward"));
        let for_grads = grads.times().exposed.saturating_sub(before);
        let waited = times.account(self.replica.weights.take_times()) + for_grads;
        times.backward += began.elapsed().saturating_sub(waited);
        Ok(())
    }

    /// Number of micro-batches of a step. Each of its positions, over all micro-batches and ranks, weighs the same: this is
    /// the only place that scales a gradient, and reductions are plain sums.
    pub(super) fn begin_passes(&mut self, step: u64) -> u64 {
        let passes = self.loader.passes(step);
        let positions = self.loader.samples(step).count * self.config.model.block_size as u64;
        self.replica.weigh(1.0 / positions as f64);
        passes
    }

    /// Of a step that is not short.
    pub(super) fn global_batch(&self) -> GlobalBatch {
        GlobalBatch {
            ranks: self.world.mesh.size(&DATA) as u64,
            accumulation: self.config.train.grad_accumulation as u64,
            micro_batch: self.config.train.micro_batch as u64,
            block_size: self.config.model.block_size as u64,
        }
    }

    /// The samples of a micro-batch of this rank.
    pub(super) fn key(&self, step: u64, m: u64) -> SampleKey {
        SampleKey {
            seed: self.config.run.seed,
            first: self.loader.first_sample(step, m),
        }
    }
}
