//! A CPU that goes wrong in a chosen step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::hooked::{Hooks, hooked};
use ddp_worker::device::{Buffer, CpuDevice, Device, DeviceError, Event, Stream};
use ddp_worker::ops::Op;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The update of the step never happens, and the stream says so.
    Fails,
    /// A bit of the first parameter that is updated flips, and nobody says so.
    FlipsBit,
    /// Gradients of a weight are no numbers.
    NotANumber(Spoilt),
}

/// Which gradients are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spoilt {
    /// So many backward passes from the step on, repeated ones included.
    pub passes: u64,
    /// Of them, those of one micro-batch, of so many of a step.
    pub micro_batch: (u64, u64),
    /// The weight, in the order of backward, from 1. In a GPT-2 of two blocks 3 is `h.1.mlp.c_fc.weight`, 7 that of
    /// `h.0`.
    pub weight: u64,
}

impl Spoilt {
    /// `h.1.mlp.c_fc.weight` in so many passes.
    pub fn in_passes(passes: u64) -> Fault {
        Fault::NotANumber(Self {
            passes,
            micro_batch: (0, 1),
            weight: 3,
        })
    }

    fn is_hit(self, pass: u64, weight: u64) -> bool {
        let (micro_batch, accumulation) = self.micro_batch;
        let pass_hit = (1..=self.passes).contains(&pass) && (pass - 1) % accumulation == micro_batch;
        pass_hit && weight == self.weight
    }
}

/// See the module.
pub struct FaultyDevice {
    fault: Fault,
    /// From 1.
    step: u64,
    /// Steps that were updated.
    updated: AtomicU64,
    /// Backward passes since the step began.
    passes: AtomicU64,
    /// Gradients of weights in this pass.
    weights: AtomicU64,
}

impl FaultyDevice {
    pub fn going_wrong(fault: Fault, step: u64) -> Arc<dyn Device> {
        hooked(Self {
            fault,
            step,
            updated: AtomicU64::new(0),
            passes: AtomicU64::new(0),
            weights: AtomicU64::new(0),
        })
    }

    /// With the last operation of a forward pass that a backward follows.
    fn begin_backward(&self) {
        self.weights.store(0, Ordering::Relaxed);
        if self.updated.load(Ordering::Relaxed).saturating_add(1) >= self.step {
            self.passes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The gradient that the operation makes, if it is to be spoilt.
    fn spoilt(&self, op: &Op) -> Option<Buffer> {
        match op {
            Op::Update(update) => self.updated.store(update.step, Ordering::Relaxed),
            Op::CrossEntropy(loss) if loss.dlosses.is_some() => self.begin_backward(),
            Op::CrossEntropyCombine(loss) if loss.dlosses.is_some() => self.begin_backward(),
            Op::LinearDweight(product) => {
                let weight = self.weights.fetch_add(1, Ordering::Relaxed) + 1;
                let pass = self.passes.load(Ordering::Relaxed);
                let is_hit = match self.fault {
                    Fault::NotANumber(spoilt) => spoilt.is_hit(pass, weight),
                    _ => false,
                };
                return is_hit.then(|| product.dweight.clone());
            }
            _ => {}
        }
        None
    }
}

impl Hooks for FaultyDevice {
    fn enqueue(&self, cpu: &CpuDevice, stream: Stream, op: Op) {
        if let Some(gradient) = self.spoilt(&op) {
            cpu.enqueue(stream, op);
            gradient.host_mut::<f32>().unwrap()[7] = f32::NAN;
            return;
        }
        let hit = match &op {
            Op::Update(update) if update.step == self.step => Some(update.param.clone()),
            _ => None,
        };
        match (hit, self.fault) {
            (Some(_), Fault::Fails) => {
                let (event, signal) = Event::pair("the update");
                signal.set(Err(DeviceError::Upstream("the device broke".into())));
                cpu.wait_event(stream, &event, Instant::now());
            }
            (Some(param), Fault::FlipsBit) if param.range().start == 0 => {
                cpu.enqueue(stream, op);
                let mut elements = param.host_mut::<f32>().unwrap();
                elements[0] = f32::from_bits(elements[0].to_bits() ^ 1);
            }
            _ => cpu.enqueue(stream, op),
        }
    }
}
