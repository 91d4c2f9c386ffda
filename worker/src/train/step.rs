//! One optimizer step: the host puts all of it into the stream, and reads its numbers later.
//!
//! data → forward → losses to all ranks → backward, reduced meanwhile → norm → clip and update, or neither
//!
//! Nothing in it waits for the device: whether a step counts is decided there, by the clipping factor. On a device
//! that runs asynchronously the numbers of a step are read when the next one has been enqueued.

use std::time::Instant;

use super::TrainError;
use super::recorder::StepTimes;
use super::replica::Batch;
use super::tally::Shares;
use super::trainer::Trainer;
use super::world::World;
use crate::collective::{WireBytes, Work};
use crate::device::Fetch;
use crate::model::StepKey;
use crate::optim::{UpdateStep, batch_factor, learning_rate};
use crate::parallel::{Ledger, Portion, ReduceError, Reducer};
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
    /// What the device measures of averaging and of parameters.
    pub(super) ledgers: [Ledger; 2],
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

/// What the passes of a step leave behind.
struct Passes {
    averages: Portion,
    /// Of averaging.
    ledger: Ledger,
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
            averages,
            ledger,
            sharing,
        } = self.passes(reducer, step, &mut times)?;
        let World { stream, device, .. } = self.world.clone();
        let (norm_began, shared_before) = (Instant::now(), times.share);
        let mut exchanges = vec![sharing];
        self.arrive(&exchanges[0], &mut times)?;
        let span = self.world.begin_span();
        if let Some(work) = self.clip.measure(stream, &averages) {
            self.arrive(&work, &mut times)?;
            exchanges.push(work);
        }
        self.clip.conclude(stream, Some(self.tally.rows()));
        self.world.end_span(span, Kind::Optimizer, || "norm".to_owned());
        // Nothing of this step is in flight that the stream does not wait for. What the update sends, and its time,
        // belongs to the step that waits for it.
        let sent = self.take_sent();
        let ledgers = [ledger, self.replica.weights.take_ledger()];
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
        self.adamw.step(stream, weights.own(), &averages, &update);
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
            ledgers,
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

    /// Forward and backward of all micro-batches; gradients are averaged over them and all ranks.
    fn passes(
        &mut self,
        reducer: &mut Reducer,
        step: u64,
        times: &mut StepTimes,
    ) -> Result<Passes, TrainError> {
        let passes = self.begin_passes(step);
        let mut batch = Batch::new(self.replica.positions());
        let mut positions = 0;
        let mut sharing = None;
        let mut grads = reducer.step(passes as usize)?;
        for m in 0..passes {
            let of_pass = |what: &str| match passes {
                1 => what.to_owned(),
                _ => format!("micro-batch {}: {what}", m + 1),
            };
            if m > 0 {
                grads.next_micro_batch()?;
            }
            let (began, span) = (Instant::now(), self.world.begin_span());
            let filled = self.loader.fill(step, m, &mut batch.inputs, &mut batch.targets)?;
            positions += filled * self.config.model.block_size;
            self.world.end_span(span, Kind::Data, || of_pass("data"));
            times.data += began.elapsed();
            let (key, began, span) = (self.key(step, m), Instant::now(), self.world.begin_span());
            let losses = self.replica.forward(&batch, key)?;
            self.tally.add(&losses, m == 0);
            drop(losses);
            self.world.end_span(span, Kind::Forward, || of_pass("forward"));
            let waited = times.account(self.replica.weights.take_times());
            times.forward += began.elapsed().saturating_sub(waited);
            if m + 1 == passes {
                let began = Instant::now();
                let stop = self.session.stop_requested().is_some();
                let save = self.checkpoints.code(self.world.rank() == 0);
                sharing = Some(self.tally.share(positions, stop, save));
                times.share += began.elapsed();
            }
            let (began, before, span) = (Instant::now(), grads.times().exposed, self.world.begin_span());
            let done = self.replica.backward(key, &mut grads);
            done.map_err(|error| match grads.failure() {
                Some(failure @ ReduceError::Unused { .. }) => failure.clone().into(),
                _ => error,
            })?;
            self.world.end_span(span, Kind::Backward, || of_pass("backward"));
            let for_grads = grads.times().exposed.saturating_sub(before);
            let waited = times.account(self.replica.weights.take_times()) + for_grads;
            times.backward += began.elapsed().saturating_sub(waited);
        }
        let averages = grads.finish_on(self.world.stream, self.world.deadline())?;
        times.account(averages.times());
        Ok(Passes {
            averages: averages.portion(),
            ledger: averages.ledger(),
            sharing: sharing.expect("a step has a micro-batch"),
        })
    }

    /// Number of micro-batches of a step, whose positions weigh the same from here on, however many the step has.
    pub(super) fn begin_passes(&mut self, step: u64) -> u64 {
        let passes = self.loader.passes(step);
        let positions = self.loader.samples(step).count * self.config.model.block_size as u64;
        // The reducer divides by the number of passes of all ranks.
        let factor = (passes * self.world.size() as u64) as f64 / positions as f64;
        self.replica.weigh(factor);
        passes
    }

    /// Of a step that is not short.
    pub(super) fn global_batch(&self) -> GlobalBatch {
        GlobalBatch {
            ranks: self.world.size() as u64,
            accumulation: self.config.train.grad_accumulation as u64,
            micro_batch: self.config.train.micro_batch as u64,
            block_size: self.config.model.block_size as u64,
        }
    }

    /// Key of the randomness of a micro-batch of this rank.
    pub(super) fn key(&self, step: u64, m: u64) -> StepKey {
        StepKey {
            seed: self.config.run.seed,
            step,
            micro_batch: m * self.world.size() as u64 + self.world.rank() as u64,
        }
    }
}
