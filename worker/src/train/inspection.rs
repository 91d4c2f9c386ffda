//! After a step whose numbers are not finite: its passes once more on every rank, looking at what each block makes,
//! to say which rank, micro-batch and block saw it first.
//!
//! It costs the time of a step and, at a time, memory for the gradients of one block and of what it is tied to. Every
//! rank passes through all blocks, finite or not: under ZeRO-3 a pass is a collective one.

use std::collections::HashMap;

use super::TrainError;
use super::replica::{Batch, Replica};
use super::trainer::Trainer;
use super::world::World;
use crate::device::{ArenaSpec, Buffer, DType, DeviceError, Event, Sharing};
use crate::model::{GradSink, GradSlot, Model, ParamId, StepKey};

/// Where a number was first not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the output of a block.
    Output(usize),
    /// In a block's gradient of a parameter.
    Gradient(usize, ParamId),
    /// In a block's gradient of its input.
    InputGradient(usize),
}

impl Place {
    /// Kind, block and parameter as one number, smaller for forward than for backward.
    fn code(self, params: usize) -> f64 {
        let (kind, block, param) = match self {
            Self::Output(block) => (0, block, 0),
            Self::Gradient(block, id) => (1, block, id.0),
            Self::InputGradient(block) => (2, block, 0),
        };
        // Far below 2⁵³ for any model.
        ((block * params.max(1) + param) * 3 + kind) as f64
    }

    fn of_code(code: f64, params: usize) -> Self {
        let code = code as usize;
        let (kind, rest) = (code % 3, code / 3);
        let (block, param) = (rest / params.max(1), rest % params.max(1));
        match kind {
            0 => Self::Output(block),
            1 => Self::Gradient(block, ParamId(param)),
            _ => Self::InputGradient(block),
        }
    }

    fn words(self, model: &Model) -> String {
        let block = |index: usize| model.blocks[index].name();
        match self {
            Self::Output(index) => format!("the output of block `{}`", block(index)),
            Self::Gradient(index, id) => {
                let param = &model.params[id.0].name;
                format!("the gradient of `{param}` in block `{}`", block(index))
            }
            Self::InputGradient(index) => format!("the gradient of the input of block `{}`", block(index)),
        }
    }
}

impl Trainer<'_> {
    /// Which rank saw a number of `step` that is not finite first, and where, in words: the same ones on all ranks.
    /// Every rank must call it.
    pub(super) fn inspect(&mut self, step: u64) -> Result<String, TrainError> {
        let params = self.replica.model.params.len();
        let mut batch = Batch::new(self.replica.positions());
        let mut found = None;
        for m in 0..self.begin_passes(step) {
            self.loader.fill(step, m, &mut batch.inputs, &mut batch.targets)?;
            let place = self.replica.inspect(&batch, self.key(step, m), found.is_none())?;
            found = found.or(place.map(|place| (m, place)));
        }
        let own = found.map_or([-1.0, 0.0], |(m, place)| [m as f64, place.code(params)]);
        let rows = self.exchange.gather("what is not finite", own)?;
        let sightings = rows.iter().enumerate().filter(|(_, row)| row[0] >= 0.0);
        let sighting =
            |(rank, row): (usize, &[f64; 2])| (row[0] as u64, Place::of_code(row[1], params), rank);
        let first = sightings
            .map(sighting)
            .min_by_key(|&(m, place, rank)| (m, !matches!(place, Place::Output(_)), rank));
        Ok(match first {
            Some((m, place, rank)) => {
                let words = place.words(&self.replica.model);
                format!("rank {rank} saw it first: {words}, micro-batch {m}")
            }
            None => "no rank sees it when it repeats the step alone: the sum over the ranks is too large, or a machine fails".into(),
        })
    }
}

impl Replica {
    /// Both passes of a micro-batch; the first place with a number that is not finite, if `look` is set.
    fn inspect(&mut self, batch: &Batch, key: StepKey, look: bool) -> Result<Option<Place>, TrainError> {
        let mut found = None;
        let world = self.world.clone();
        let mut seen = |place: Place, buffer: &Buffer| -> Result<(), DeviceError> {
            if look && found.is_none() && !is_finite(&world, buffer)? {
                found = Some(place);
            }
            Ok(())
        };
        self.passes(batch, key, &mut seen)
            .map_err(|error| self.cause(error))?;
        Ok(found)
    }

    fn passes(&mut self, batch: &Batch, key: StepKey, seen: Seen<'_>) -> Result<(), DeviceError> {
        let mut saved = std::mem::take(&mut self.saved);
        let mut activation = self.upload(batch);
        let (ctx, weights) = (self.context(key), self.weights.as_ref());
        let blocks: Vec<_> = self.model.blocks.iter().enumerate().collect();
        for ((index, block), saved) in blocks.iter().zip(&mut saved) {
            activation = block.forward(&ctx, weights, &activation, saved)?;
            seen(Place::Output(*index), activation.buffer())?;
        }
        let mut gradient = self.loss_gradient();
        for ((index, block), saved) in blocks.iter().zip(&mut saved).rev() {
            let mut sink = Watch {
                world: &self.world,
                model: &self.model,
                block: *index,
                memory: HashMap::new(),
                seen: &mut *seen,
            };
            let dinp = block.backward(&ctx, weights, saved, &gradient, &mut sink)?;
            let Some(dinp) = dinp else { break };
            seen(Place::InputGradient(*index), dinp.buffer())?;
            gradient = dinp;
        }
        self.saved = saved;
        Ok(())
    }
}

/// Is told of everything that a block makes.
type Seen<'a> = &'a mut dyn FnMut(Place, &Buffer) -> Result<(), DeviceError>;

/// Gradients of one block, for as long as it takes to look at them.
struct Watch<'a> {
    world: &'a World,
    model: &'a Model,
    block: usize,
    memory: HashMap<ParamId, Buffer>,
    seen: Seen<'a>,
}

impl GradSink for Watch<'_> {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        let spec = ArenaSpec {
            name: format!("gradient of `{}` under inspection", self.model.params[id.0].name),
            dtype: DType::F32,
            len: self.model.params[id.0].len(),
            sharing: Sharing::Private,
        };
        let buffer = self.world.device.alloc(&spec)?.whole();
        self.memory.insert(id, buffer.clone());
        Ok(GradSlot {
            buffer,
            accumulate: false,
        })
    }

    fn contributed(&mut self, id: ParamId, _at: Event) -> Result<(), DeviceError> {
        match self.memory.remove(&id) {
            Some(gradient) => (self.seen)(Place::Gradient(self.block, id), &gradient),
            None => Ok(()),
        }
    }
}

fn is_finite(world: &World, buffer: &Buffer) -> Result<bool, DeviceError> {
    let bytes = world.device.download(world.stream, buffer)?;
    let all = |width: usize, test: fn(&[u8]) -> bool| bytes.chunks_exact(width).all(test);
    Ok(match buffer.dtype() {
        DType::F64 => all(8, |x| bytemuck::pod_read_unaligned::<f64>(x).is_finite()),
        DType::F32 => all(4, |x| bytemuck::pod_read_unaligned::<f32>(x).is_finite()),
        DType::Bf16 => all(2, |x| bytemuck::pod_read_unaligned::<half::bf16>(x).is_finite()),
        DType::I32 | DType::U8 => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_survive_their_codes() {
        for params in [1, 7] {
            for place in [
                Place::Output(3),
                Place::Gradient(2, ParamId(params - 1)),
                Place::InputGradient(0),
            ] {
                assert_eq!(Place::of_code(place.code(params), params), place);
            }
        }
    }
}
