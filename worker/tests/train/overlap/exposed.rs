//! `comm_exposed_ms`: whatever a rank waits for is in it.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ddp_worker::collective::{Request, Traffic};
use ddp_worker::config::{Precision, Strategy};
use ddp_worker::ops::Op;

use super::{PATIENCE, RANKS, STEPS, job, watched};
use crate::train_support::watched::Watch;

/// Measures how long a rank was blocked by communication, from its first forward to its last update.
#[derive(Default)]
struct Blocked {
    state: Mutex<BlockedState>,
    changed: Condvar,
    /// The rank itself carries out its collectives.
    is_inline: bool,
}

#[derive(Default)]
struct BlockedState {
    counts: bool,
    waits: bool,
    total: Duration,
    times: usize,
    missed: bool,
}

/// For which a collective holds a rank up that waits for it.
const HELD: Duration = Duration::from_millis(2);

impl Blocked {
    fn blocked_since(&self, since: Instant) {
        let mut state = self.state.lock().unwrap();
        if state.counts {
            state.total += since.elapsed();
            state.times += 1;
        }
    }
}

impl Watch for Blocked {
    fn computes(&self, op: &Op) {
        let mut state = self.state.lock().unwrap();
        match op {
            Op::EncoderForward(_) if state.times == 0 => state.counts = true,
            Op::Update(update) if update.step == STEPS as u64 => state.counts = false,
            _ => {}
        }
    }

    fn waits(&self) {
        self.state.lock().unwrap().waits = true;
        self.changed.notify_all();
    }

    fn waited(&self, since: Instant) {
        if !self.is_inline {
            self.blocked_since(since);
        }
        self.state.lock().unwrap().waits = false;
        self.changed.notify_all();
    }

    /// Nothing is hidden: it goes on only when the rank has waited for a while.
    fn began(&self, request: &Request) {
        let state = self.state.lock().unwrap();
        if self.is_inline || !state.counts || state.missed || request.traffic == Traffic::Other {
            return;
        }
        let idle = |state: &mut BlockedState| !state.waits && state.counts;
        let (mut state, waited) = self.changed.wait_timeout_while(state, PATIENCE, idle).unwrap();
        state.missed |= waited.timed_out();
        let waits = |state: &mut BlockedState| state.waits;
        drop(self.changed.wait_timeout_while(state, HELD, waits).unwrap());
    }

    fn ended(&self, request: &Request, since: Instant) {
        if self.is_inline && request.traffic != Traffic::Other {
            self.blocked_since(since);
        }
    }
}

/// Every strategy waits in places of its own: behind backward, for a slot, for the narrow wire, for parameters.
#[test]
fn exposed_time_has_every_wait_for_communication() {
    for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3] {
        for (precision, accumulation, overlap) in [
            (Precision::F32, 1, true),
            (Precision::F32, 2, true),
            (Precision::Bf16, 2, true),
            (Precision::F32, 2, false),
            (Precision::Bf16, 2, false),
        ] {
            let what = format!("{strategy:?} {precision:?}, accumulation {accumulation}, overlap {overlap}");
            let job = job(strategy, |c| {
                c.train.precision = precision;
                c.train.grad_accumulation = accumulation;
                c.parallel.overlap = overlap;
            });
            let watch = || Blocked {
                is_inline: !overlap,
                ..Blocked::default()
            };
            let watches = [(); RANKS as usize].map(|()| Arc::new(watch()));
            let trained = watched(job, &watches);
            let state = watches[0].state.lock().unwrap();
            assert!(
                !state.missed && state.times >= STEPS,
                "{what}: {} waits",
                state.times
            );
            let sum = |part: fn(&ddp_worker::metrics::MetricsLine) -> f64| -> f64 {
                trained.metrics.iter().map(part).sum()
            };
            // What ranks tell each other of losses and norms has an account of its own.
            let told = sum(|line| line.comm_exposed_ms + line.share_ms);
            let blocked = state.total.as_secs_f64() * 1e3;
            assert!(told >= blocked, "{what}: {told:.3} ms of {blocked:.3}");
            for line in &trained.metrics {
                let compute = line.data_ms + line.forward_ms + line.backward_ms + line.optimizer_ms;
                let parts = compute + line.comm_exposed_ms + line.share_ms;
                assert!(
                    parts <= line.step_ms,
                    "step {}, {what}: {parts} of {}",
                    line.step,
                    line.step_ms
                );
            }
        }
    }
}
