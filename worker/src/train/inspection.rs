//! After a step whose numbers are not finite: its passes once more on every rank, looking at what each block makes,
//! to say which rank saw it first, in which micro-batch and block. First is what comes first in the order in which a rank
//! executes a step, which is the same on all of them, not what a clock says.
//!
//! It costs the time of a step and, at a time, memory for the gradients of one block and of what it is tied to. Every
//! rank passes through all blocks, finite or not: under ZeRO-3 a pass is a collective one.

use std::cell::RefCell;
use std::collections::HashMap;

use super::TrainError;
use super::replica::{Batch, Replica, ReplicaHooks};
use super::trainer::Trainer;
use super::world::World;
use crate::device::{ArenaSpec, Buffer, DType, DeviceError, Event};
use crate::model::{Activation, Flight, GradSink, GradSlot, Hooks, Model, ParamId, Pass, SampleKey, Unused};

/// Where a number was not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the output of a block.
    Output(usize),
    /// In a block's gradient of a parameter.
    Gradient(usize, ParamId),
    /// In a block's gradient of its input.
    InputGradient(usize),
}

/// Numbers of the blocks and of the parameters of a model.
#[derive(Clone, Copy, Debug)]
struct Extent {
    blocks: usize,
    params: usize,
}

impl Place {
    /// The place as one number, in the order in which a micro-batch comes through: forward over the blocks, then
    /// backward from the last one; there a block's parameters from the last one, then its input.
    fn code(self, extent: Extent) -> f64 {
        let Extent { blocks, params } = extent;
        let (pass, within) = match self {
            Self::Output(block) => (block, 0),
            Self::Gradient(block, id) => (2 * blocks - 1 - block, params - 1 - id.0),
            Self::InputGradient(block) => (2 * blocks - 1 - block, params),
        };
        // Far below 2⁵³ for any model.
        (pass * (params + 1) + within) as f64
    }

    fn of_code(code: f64, extent: Extent) -> Self {
        let Extent { blocks, params } = extent;
        let (pass, within) = (code as usize / (params + 1), code as usize % (params + 1));
        match within {
            _ if pass < blocks => Self::Output(pass),
            _ if within == params => Self::InputGradient(2 * blocks - 1 - pass),
            _ => Self::Gradient(2 * blocks - 1 - pass, ParamId(params - 1 - within)),
        }
    }

    fn words(self, model: &Model) -> String {
        let block = |index: usize| model.blocks[index].name();
        match self {
            Self::Output(index) => format!("the output of block `{}`", block(index)),
            Self::Gradient(index, id) => {
                let param = &model.params[id.0].key;
                format!("the gradient of `{param}` in block `{}`", block(index))
            }
            Self::InputGradient(index) => format!("the gradient of the input of block `{}`", block(index)),
        }
    }
}

/// What one rank saw first: micro-batch, and [`Place::code`]; a micro-batch below 0 is none.
type Sighting = [f64; 2];

const NONE: Sighting = [-1.0, 0.0];

/// The rank whose sighting comes first, by micro-batch and place, and what it saw. Of ranks that saw the same the first.
fn first_of(sightings: &[Sighting]) -> Option<(usize, Sighting)> {
    let seen = sightings
        .iter()
        .copied()
        .enumerate()
        .filter(|(_, [m, _])| *m >= 0.0);
    seen.min_by(|(_, one), (_, other)| one[0].total_cmp(&other[0]).then(one[1].total_cmp(&other[1])))
}

impl Trainer<'_> {
    /// Which rank saw a number of `step` that is not finite first, and where, in words: the same ones on all ranks.
    /// Every rank must call it.
    pub(super) fn inspect(&mut self, step: u64) -> Result<String, TrainError> {
        let extent = Extent {
            blocks: self.replica.model.blocks.len(),
            params: self.replica.model.params.len(),
        };
        let mut batch = Batch::new(self.replica.positions());
        let mut found = None;
        for m in 0..self.begin_passes(step) {
            self.loader.fill(step, m, &mut batch.inputs, &mut batch.targets)?;
            let place = self.replica.inspect(&batch, self.key(step, m), found.is_none())?;
            found = found.or(place.map(|place| (m, place)));
        }
        let own = found.map_or(NONE, |(m, place)| [m as f64, place.code(extent)]);
        let sightings = self.exchange.gather("what is not finite", own)?;
        Ok(match first_of(&sightings) {
            Some((rank, [m, code])) => {
                let words = Place::of_code(code, extent).words(&self.replica.model);
                format!("rank {rank} saw it first: {words}, micro-batch {m}")
            }
            None => "no rank sees it when it repeats the step alone: the sum over the ranks is too large, or a machine fails".into(),
        })
    }
}

impl Replica {
    /// Both passes of a micro-batch; the first place with a number that is not finite, if `look` is set.
    fn inspect(&mut self, batch: &Batch, key: SampleKey, look: bool) -> Result<Option<Place>, TrainError> {
        let tokens = self.upload(batch);
        let ctx = self.context(key);
        let passes = self.passes(&ctx);
        let mut flight = Flight::over(self.model.whole());
        let seen = RefCell::new(Seen {
            world: &self.world,
            look,
            block: 0,
            first: None,
        });
        let mut hooks = LookingHooks {
            inner: self.hooks(),
            seen: &seen,
        };
        let mut sink = LookingSink {
            model: &self.model,
            memory: HashMap::new(),
            seen: &seen,
        };
        let both = passes
            .forward(&mut flight, &tokens, &mut hooks)
            .and_then(|losses| {
                drop(losses);
                passes.backward(&mut flight, None, &mut hooks, &mut sink)
            });
        both.map_err(|error| self.cause(error))?;
        let first = seen.borrow().first;
        Ok(first)
    }
}

/// Where a number that is not finite was seen first.
struct Seen<'a> {
    world: &'a World,
    look: bool,
    /// The one whose pass is under way.
    block: usize,
    first: Option<Place>,
}

impl Seen<'_> {
    fn look_at(&mut self, place: Place, buffer: &Buffer) -> Result<(), DeviceError> {
        if self.look && self.first.is_none() && !is_finite(self.world, buffer)? {
            self.first = Some(place);
        }
        Ok(())
    }
}

/// Looks at what each block makes.
struct LookingHooks<'a> {
    inner: ReplicaHooks<'a>,
    seen: &'a RefCell<Seen<'a>>,
}

impl Hooks for LookingHooks<'_> {
    fn before(&mut self, block: usize, pass: Pass) -> Result<(), DeviceError> {
        self.seen.borrow_mut().block = block;
        self.inner.before(block, pass)
    }

    fn after(&mut self, block: usize, pass: Pass, made: Option<&Activation>) -> Result<(), DeviceError> {
        self.inner.after(block, pass, made)?;
        let place = match pass {
            Pass::Forward => Place::Output(block),
            Pass::Backward => Place::InputGradient(block),
        };
        made.map_or(Ok(()), |made| {
            self.seen.borrow_mut().look_at(place, made.buffer())
        })
    }
}

/// Looks at gradients of parameters, each for as long as that takes.
struct LookingSink<'a> {
    model: &'a Model,
    memory: HashMap<ParamId, Buffer>,
    seen: &'a RefCell<Seen<'a>>,
}

impl GradSink for LookingSink<'_> {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        let param = &self.model.params[id.0];
        let name = format!("gradient of `{}` under inspection", param.key);
        let spec = ArenaSpec::private(name, DType::F32, param.len());
        let buffer = self.seen.borrow().world.device.alloc(&spec)?.whole();
        self.memory.insert(id, buffer.clone());
        Ok(GradSlot {
            buffer,
            accumulate: false,
        })
    }

    fn contributed(&mut self, id: ParamId, _at: Event) -> Result<(), DeviceError> {
        let Some(gradient) = self.memory.remove(&id) else {
            return Ok(());
        };
        let mut seen = self.seen.borrow_mut();
        let place = Place::Gradient(seen.block, id);
        seen.look_at(place, &gradient)
    }

    fn unused(&mut self, _unused: &Unused<'_>) -> Result<(), DeviceError> {
        Ok(())
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
    fn places_survive_their_codes_which_have_the_order_of_execution() {
        let extent = Extent { blocks: 3, params: 4 };
        let mut places: Vec<Place> = (0..3).map(Place::Output).collect();
        for block in (0..3).rev() {
            places.extend((0..4).rev().map(|id| Place::Gradient(block, ParamId(id))));
            places.push(Place::InputGradient(block));
        }
        let codes: Vec<f64> = places.iter().map(|place| place.code(extent)).collect();
        assert!(codes.is_sorted_by(|one, other| one < other), "{codes:?}");
        for (place, code) in places.iter().zip(codes) {
            assert_eq!(Place::of_code(code, extent), *place);
        }
    }

    #[test]
    fn the_earlier_sighting_counts_whichever_rank_had_it() {
        assert_eq!(first_of(&[NONE, NONE]), None);
        assert_eq!(first_of(&[NONE, [1.0, 4.0], NONE]), Some((1, [1.0, 4.0])));
        assert_eq!(
            first_of(&[[1.0, 3.0], [0.0, 9.0]]),
            Some((1, [0.0, 9.0])),
            "micro-batch"
        );
        assert_eq!(
            first_of(&[[0.0, 9.0], [0.0, 3.0]]),
            Some((1, [0.0, 3.0])),
            "place"
        );
        assert_eq!(first_of(&[[0.0, 3.0], [0.0, 3.0]]), Some((0, [0.0, 3.0])), "rank");
    }
}
