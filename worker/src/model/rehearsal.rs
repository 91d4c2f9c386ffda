//! How much memory the activations of a model need: its passes once through, on a device that does nothing.
//!
//! A block's code alone decides what it leases and when it lets go, so nothing has to be described twice: what is
//! rehearsed is what will run. Neither numbers nor memory are touched; it takes microseconds a block.

use std::sync::Arc;

use super::{
    Activation, ActivationPool, Context, Exchange, ExchangeKind, Flight, GradSink, GradSlot, Model, NoHooks,
    ParamId, ParamSpec, Params, Passes, SampleKey, TensorOps,
};
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Event, IdleDevice, Stream};

/// Bytes of the arena in which all activations of one micro-batch `[samples, positions]` find a place: of forward and
/// backward, and of an evaluation.
pub fn rehearse(model: &Model, [samples, positions]: [usize; 2]) -> Result<usize, DeviceError> {
    let stage = Stage::new(model, [samples, positions])?;
    let pool = ActivationPool::planned(stage.device.clone(), isize::MAX as usize)?;
    let ctx = stage.context(&pool);
    stage.pass(&ctx)?;
    Ok(pool.extent())
}

/// What the passes are given.
struct Stage<'a> {
    model: &'a Model,
    device: Arc<dyn Device>,
    tokens: Activation,
    targets: Buffer,
    dloss: Buffer,
    /// As long as the longest parameter.
    param: Arena,
    shape: [usize; 2],
    group: Option<IdleGroup>,
}

/// A tensor group whose other ranks do nothing.
struct IdleGroup {
    place: (usize, usize),
    is_sequence: bool,
}

impl TensorOps for IdleGroup {
    fn index(&self) -> usize {
        self.place.0
    }

    fn size(&self) -> usize {
        self.place.1
    }

    fn is_sequence(&self) -> bool {
        self.is_sequence
    }

    fn start(&self, _kind: ExchangeKind, x: &Activation, _name: &str) -> Result<Exchange, DeviceError> {
        Ok(Exchange::new(Event::reached(), x))
    }

    fn finish(&self, _exchange: Exchange) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl<'a> Stage<'a> {
    fn new(model: &'a Model, shape: [usize; 2]) -> Result<Self, DeviceError> {
        let device: Arc<dyn Device> = Arc::new(IdleDevice);
        let len = shape.iter().product();
        let alloc = |name: &str, dtype, len| device.alloc(&ArenaSpec::private(name, dtype, len));
        let longest = model.params.iter().map(ParamSpec::len).max().unwrap_or(0);
        Ok(Self {
            tokens: Activation::borrowed(alloc("tokens", DType::I32, len)?.whole(), shape.to_vec()),
            targets: alloc("targets", DType::I32, len)?.whole(),
            dloss: alloc("loss factors", DType::F32, len)?.whole(),
            param: alloc("a parameter", model.dtype(), longest)?,
            shape,
            group: (model.part.tensor.1 > 1).then_some(IdleGroup {
                place: model.part.tensor,
                is_sequence: model.part.sequence,
            }),
            model,
            device,
        })
    }

    /// Both passes, and an evaluation.
    fn pass(&self, ctx: &Context<'_>) -> Result<(), DeviceError> {
        let passes = Passes {
            model: self.model,
            ctx,
        };
        let mut flight = Flight::over(self.model.whole());
        drop(passes.forward(&mut flight, &self.tokens, &mut NoHooks)?);
        passes.backward(&mut flight, None, &mut NoHooks, &mut Audience(self))?;
        passes
            .evaluate(self.model.whole(), &self.tokens, &mut NoHooks)
            .map(drop)
    }

    fn context<'b>(&'b self, pool: &'b ActivationPool) -> Context<'b> {
        Context {
            device: self.device.as_ref(),
            stream: Stream(0),
            pool,
            params: self,
            targets: &self.targets,
            dloss: Some(&self.dloss),
            shape: self.shape,
            tensor: self.group.as_ref().map(|group| group as &dyn TensorOps),
            dtype: self.model.dtype(),
            samples: Some(SampleKey::default()),
            timeline: None,
        }
    }
}

impl Params for Stage<'_> {
    fn get(&self, id: ParamId) -> Buffer {
        self.param.slice(0..self.model.params[id.0].len())
    }
}

/// Takes gradients as they come.
struct Audience<'a>(&'a Stage<'a>);

impl GradSink for Audience<'_> {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        Ok(GradSlot {
            buffer: self.0.get(id),
            accumulate: false,
        })
    }

    fn contributed(&mut self, _id: ParamId, _at: Event) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unused(&mut self, _what: &str) -> Result<(), DeviceError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{self, ModelKind, Recompute};
    use crate::model::{build, recomputing};

    const SAMPLES: usize = 8;

    /// `n_layer` blocks of `n_embd` channels, recomputed in every way there is, in f32 and bf16; and with dropout.
    fn models(n_layer: usize, n_embd: usize, positions: usize, vocab: usize) -> Vec<(String, Model)> {
        let mut models = Vec::new();
        for kind in [ModelKind::Gpt2, ModelKind::Mlp] {
            let shape = config::Model {
                kind,
                n_layer,
                n_head: 4,
                n_embd,
                block_size: positions,
                vocab_size: Some(vocab),
                dropout: 0.0,
                ..config::Model::default()
            };
            for dtype in [DType::F32, DType::Bf16] {
                for what in [Recompute::None, Recompute::Selective, Recompute::Full] {
                    let model = recomputing(build(&shape, 256).unwrap(), what).with_dtype(dtype);
                    models.push((format!("{} in {dtype}, {what:?}", model.name), model));
                }
            }
            let shape = config::Model {
                dropout: 0.1,
                ..shape
            };
            let model = build(&shape, 256).unwrap();
            models.push((format!("{} with dropout", model.name), model));
        }
        models
    }

    fn pass(stage: &Stage<'_>, pool: &ActivationPool) {
        stage.pass(&stage.context(pool)).unwrap();
    }

    #[test]
    fn what_was_rehearsed_is_enough_and_not_a_byte_too_much() {
        for (name, model) in models(3, 32, 64, 256) {
            let stage = Stage::new(&model, [SAMPLES, 64]).unwrap();
            let bytes = rehearse(&model, [SAMPLES, 64]).unwrap();
            let held = |bytes| {
                let pool = ActivationPool::planned(stage.device.clone(), bytes).unwrap();
                for _ in 0..3 {
                    pass(&stage, &pool);
                }
                pool.allocated_bytes()
            };
            assert_eq!(held(bytes), bytes, "{name}");
            assert!(held(bytes - Arena::ALIGNMENT) > bytes, "{name}");
        }
    }

    /// Nothing can do with less than what is leased at one time. Recycling by size alone takes more.
    #[test]
    fn little_is_lost_between_places() {
        for ([layers, channels, positions, vocab], lost) in [
            ([12, 768, 1024, 50_304], 0.05),
            ([6, 384, 256, 256], 0.2),
            ([4, 128, 128, 256], 0.2),
        ] {
            for (name, model) in models(layers, channels, positions, vocab) {
                let stage = Stage::new(&model, [SAMPLES, positions]).unwrap();
                let by_size = ActivationPool::new(stage.device.clone());
                pass(&stage, &by_size);
                let bytes = rehearse(&model, [SAMPLES, positions]).unwrap();
                let least = by_size.peak_bytes();
                assert!(
                    bytes as f64 <= (1.0 + lost) * least as f64,
                    "{name}: {bytes}, {least} are leased"
                );
                assert!(bytes <= by_size.allocated_bytes(), "{name}: {bytes}");
            }
        }
    }
}
