//! AdamW over flat arenas: a rank has the moments of the parameters that it owns, and updates these. Of parameters
//! in bf16 it has f32 masters too: these are updated, and every update leaves the parameters as the masters rounded.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::Kind;
use crate::config::Optimizer;
use crate::device::{ArenaSpec, Buffer, DType, Device, DeviceError, Stream};
use crate::ops;
use crate::parallel::{Place, Portion, Sharding};

/// The two moments, the masters if parameters have any, and the ranges that decay.
pub struct AdamW {
    device: Arc<dyn Device>,
    config: Optimizer,
    m: Portion,
    v: Portion,
    /// In f32, of parameters that are used in bf16, or by a device that the state is not on.
    masters: Option<Portion>,
    stretches: Vec<Stretch>,
}

/// Neighbours in memory, which one operation updates.
#[derive(Clone, Debug, PartialEq)]
struct Stretch {
    place: Place,
    /// Which of its elements do not decay.
    spared: Arc<[Range<usize>]>,
}

/// Numbers of one update.
#[derive(Clone, Debug)]
pub struct UpdateStep {
    /// Factor of the gradients, `[1]`, f32, on the device.
    pub scale: Buffer,
    /// Learning rate.
    pub lr: f32,
    /// Number of the step, from 1.
    pub number: u64,
}

/// One of the moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Mean of the gradients.
    First,
    /// Mean of their squares.
    Second,
}

impl Moment {
    /// Both.
    pub const ALL: [Self; 2] = [Self::First, Self::Second];

    /// Prefix of its tensors in a checkpoint.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::First => Kind::FirstMoment.prefix(),
            Self::Second => Kind::SecondMoment.prefix(),
        }
    }
}

impl AdamW {
    /// Zero moments. `decays` says by parameter whether weight decay applies.
    pub fn new(
        device: &Arc<dyn Device>,
        sharding: &Sharding,
        decays: &[bool],
        config: &Optimizer,
    ) -> Result<Self, DeviceError> {
        let alloc = |name| shard(device, sharding, name);
        Ok(Self {
            device: device.clone(),
            config: config.clone(),
            m: alloc("first moments")?,
            v: alloc("second moments")?,
            masters: None,
            stretches: stretches(sharding, decays),
        })
    }

    /// The same for parameters that are used in bf16, or far from their state: with masters, which are zero until they
    /// are written.
    pub fn with_masters(self, sharding: &Sharding) -> Result<Self, DeviceError> {
        Ok(Self {
            masters: Some(shard(&self.device, sharding, "master weights")?),
            ..self
        })
    }

    /// The f32 numbers of what this rank owns: the masters, or `params` themselves where there are none.
    #[must_use]
    pub fn masters<'a>(&'a self, params: &'a Portion) -> &'a Portion {
        self.masters.as_ref().unwrap_or(params)
    }

    /// Puts the rounding of masters that were written from elsewhere into `params` on the stream.
    pub fn round(&self, stream: Stream, params: &Portion) {
        let Some(masters) = &self.masters else {
            return;
        };
        let casts = self.stretches.iter().map(|Stretch { place, .. }| {
            let cast = ops::Cast {
                x: masters.slice(place),
                out: params.slice(place),
            };
            cast.into()
        });
        self.device.enqueue_all(stream, casts.collect());
    }

    /// Puts the update of what this rank owns of `params` by `scale · grads` on the stream.
    pub fn step(&self, stream: Stream, params: &Portion, grads: &Portion, step: &UpdateStep) {
        let [beta1, beta2] = self.config.betas;
        let hyper = ops::AdamWStep {
            lr: step.lr,
            beta1,
            beta2,
            eps: self.config.eps,
            step: step.number,
        };
        let updates = self.stretches.iter().map(|Stretch { place, spared }| {
            let update = ops::AdamW {
                param: self.masters(params).slice(place),
                copy: self.masters.is_some().then(|| params.slice(place)),
                grad: grads.slice(place),
                m: self.m.slice(place),
                v: self.v.slice(place),
                scale: step.scale.clone(),
                weight_decay: self.config.weight_decay,
                spared: spared.clone(),
                hyper,
            };
            update.into()
        });
        self.device.enqueue_all(stream, updates.collect());
    }

    /// Reads and writes masters and moments, wherever they lie, and the parameters.
    #[must_use]
    pub const fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// A moment of what this rank owns.
    #[must_use]
    pub fn moment(&self, moment: Moment) -> &Portion {
        match moment {
            Moment::First => &self.m,
            Moment::Second => &self.v,
        }
    }

    /// Size of moments and masters in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let all = [&self.m, &self.v].into_iter().chain(&self.masters);
        all.map(|portion| portion.arena().bytes()).sum()
    }
}

/// Zeros of f32 for what this rank owns.
fn shard(device: &Arc<dyn Device>, sharding: &Sharding, name: &str) -> Result<Portion, DeviceError> {
    Ok(Portion::Shard(device.alloc(&ArenaSpec::private(
        name,
        DType::F32,
        sharding.shard_len(),
    ))?))
}

/// One a unit: neighbours in the shard are neighbours in the whole arena only within one. Padding between two parameters
/// belongs to the first of them: updating zeros by zeros leaves zeros.
fn stretches(sharding: &Sharding, decays: &[bool]) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    let pieces = sharding.own_pieces();
    for pieces in pieces.chunk_by(|one, next| sharding.home(one.param).0 == sharding.home(next.param).0) {
        let (first, last) = (&pieces[0].place, &pieces[pieces.len() - 1].place);
        let starts = pieces
            .iter()
            .map(|piece| piece.place.shard.start - first.shard.start);
        let len = last.shard.end - first.shard.start;
        let ends = starts.clone().skip(1).chain([len]);
        let mut spared: Vec<Range<usize>> = Vec::new();
        for (piece, (start, end)) in pieces.iter().zip(starts.zip(ends)) {
            match spared.last_mut() {
                _ if decays[piece.param.0] => {}
                Some(last) if last.end == start => last.end = end,
                _ => spared.push(start..end),
            }
        }
        stretches.push(Stretch {
            place: Place {
                whole: first.whole.start..last.whole.end,
                shard: first.shard.start..last.shard.end,
            },
            spared: spared.into(),
        });
    }
    stretches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CpuDevice;
    use crate::model::ParamId;
    use crate::parallel::{GradSpec, GradientLayout, LayoutConfig};

    fn layout() -> GradientLayout {
        let specs = vec![
            GradSpec::new("w", &[3]),
            GradSpec::new("u", &[5]),
            GradSpec::new("b", &[2]),
        ];
        let order: Vec<ParamId> = (0..3).rev().map(ParamId).collect();
        GradientLayout::new(specs, &order, &LayoutConfig::new(1)).unwrap()
    }

    #[test]
    fn a_unit_is_updated_at_once_whatever_decays() {
        let spared = |decays: [bool; 3]| {
            let stretches = stretches(&Sharding::replicated(&layout()), &decays);
            let [Stretch { place, spared }] = &stretches[..] else {
                panic!("{stretches:?}")
            };
            assert_eq!([&place.whole, &place.shard], [&(0..35), &(0..35)]);
            spared.to_vec()
        };
        // In memory: `b` from 0, `u` from 16, `w` from 32.
        assert_eq!(spared([false, true, false]), [0..16, 32..35]);
        assert_eq!(spared([true, false, true]).first(), Some(&(16..32)));
        // Neighbours are one range.
        assert_eq!(spared([true, false, false]).first(), Some(&(0..32)));
        assert_eq!(spared([false; 3]).first(), Some(&(0..35)));
        assert!(spared([true; 3]).is_empty());
    }

    #[test]
    fn the_first_step_moves_by_the_learning_rate_and_decays_only_what_decays() {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        let stream = device.stream();
        let layout = layout();
        let config = Optimizer {
            weight_decay: 0.5,
            ..Optimizer::default()
        };
        let adamw = AdamW::new(
            &device,
            &Sharding::replicated(&layout),
            &[true, true, false],
            &config,
        )
        .unwrap();
        let arena = |name: &str, value: f32| {
            let spec = ArenaSpec::private(name, DType::F32, layout.len());
            let arena = device.alloc(&spec).unwrap();
            for id in layout.order() {
                arena
                    .slice(layout.range(*id))
                    .host_mut::<f32>()
                    .unwrap()
                    .fill(value);
            }
            arena
        };
        let (params, grads) = (arena("params", 1.0), arena("grads", 0.25));
        let scale = device.alloc(&ArenaSpec::private("scale", DType::F32, 1)).unwrap();
        scale.whole().host_mut::<f32>().unwrap()[0] = 1.0;
        let update = UpdateStep {
            scale: scale.whole(),
            lr: 0.1,
            number: 1,
        };
        adamw.step(
            stream,
            &Portion::Whole(params.clone()),
            &Portion::Whole(grads),
            &update,
        );
        device.synchronize(stream).unwrap();
        let value = |id| params.slice(layout.range(ParamId(id))).host::<f32>().unwrap()[1];
        // Bias-corrected, the first update is lr · g/|g|; decay adds lr · λ · p.
        assert!((value(2) - 0.9).abs() < 1e-6, "{}", value(2));
        assert!((value(0) - 0.85).abs() < 1e-6, "{}", value(0));
        let padding = params.slice(2..16);
        assert_eq!(&padding.host::<f32>().unwrap()[..], &[0.0; 14]);
    }
}
