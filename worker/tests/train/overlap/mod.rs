//! What overlaps with what, shown by the order of events: an operation is held up until what must not wait for it has
//! happened. Were it waited for, nothing would go on, and the test would say what did not come.

mod exposed;
mod log;
mod next_forward;
mod next_group;

use std::sync::Arc;
use std::time::Duration;

use crate::train_support::watched::{Watch, WatchedDevice, watching};
use crate::train_support::{Job, Trained};
use ddp_worker::config::{Strategy, TrainConfig};

/// Longer than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_mins(10);

const BLOCKS: usize = 4;
const STEPS: usize = 3;
const RANKS: u32 = 2;

fn job(strategy: Strategy, change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.n_layer = BLOCKS;
        c.model.n_embd = 64;
        c.train.steps = STEPS as u64;
        c.train.micro_batch = 1;
        // Nothing between two steps.
        c.train.verify_every = 0;
        c.parallel.first_bucket_mb = 0.06;
        c.parallel.bucket_mb = 0.2;
        c.parallel.strategy = strategy;
        change(c);
    })
}

/// Trains with one watch a rank.
fn watched<W: Watch>(mut job: Job, watches: &[Arc<W>]) -> Trained {
    let of_rank = |watches: &[Arc<W>]| {
        let watches = watches.to_vec();
        move |rank: u32| watches[rank as usize].clone()
    };
    let (device, transport) = (of_rank(watches), of_rank(watches));
    job.device = Some(Box::new(move |session| {
        WatchedDevice::telling(device(session.env().rank.get()))
    }));
    job.transport = Some(Box::new(move |session| {
        watching(transport(session.env().rank.get()))
    }));
    job.train(RANKS)
}
