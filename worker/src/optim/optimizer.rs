//! The optimizer of a rank: state of the parameters that it owns, and their update. Of parameters in bf16 it has f32
//! masters too: these are updated, and every update leaves the parameters as the masters rounded.

use std::sync::Arc;

use super::muon::{Muon, is_hidden_matrix};
use super::rates::{GroupRates, ParamGroups};
use super::rules::{StepMemory, rule};
use crate::collective::Work;
use crate::config::{OptimizerConfig, OptimizerKind};
use crate::device::{ArenaSpec, Buffer, DType, DeviceError, StateBytes, StateMemory, Stream};
use crate::model::{ParamId, ParamSpec};
use crate::ops::{Cast, Rates, Runs, UpdateRule};
use crate::parallel::{ArenaRanges, ArenaShare, OwnPiece, ReduceError, ReplicaSet, Sharding};

/// State slots of a rule, the masters if parameters have any, and what is updated how.
pub struct Optimizer {
    home: Arc<StateMemory>,
    rule: Arc<UpdateRule>,
    /// In the order of [`UpdateRule::slots`].
    slots: Vec<ArenaShare>,
    /// In f32, of parameters that are used in bf16, or by a device that the state is not on.
    masters: Option<ArenaShare>,
    rates: Vec<GroupRates>,
    /// All that this rank owns, by unit.
    owned: Vec<ArenaRanges>,
    stretches: Vec<Stretch>,
    /// Updates what no stretch has.
    muon: Option<Muon>,
}

/// Neighbours in memory, which one operation updates.
#[derive(Clone, Debug, PartialEq)]
struct Stretch {
    place: ArenaRanges,
    /// As [`Runs::ends`].
    ends: Arc<[(usize, usize)]>,
}

/// Numbers of one update.
#[derive(Clone, Debug)]
pub struct UpdateStep {
    /// On the device, f32: factor of the gradients, `[1]`, or that and the bias corrections, `[3]`.
    pub scale: Buffer,
    /// Learning rate.
    pub lr: f32,
    /// Number of the step, from 1: of the update too, where `scale` brings no bias corrections.
    pub number: u64,
}

impl Optimizer {
    /// An optimizer of these parameters of a model, with state of zeros. Every rank of `set` must call it.
    pub fn new(
        home: impl Into<Arc<StateMemory>>,
        set: &ReplicaSet,
        sharding: &Sharding,
        params: &[ParamSpec],
        config: &OptimizerConfig,
    ) -> Result<Self, ReduceError> {
        let home = home.into();
        let (rule, groups) = (rule(config), ParamGroups::of(config, params));
        let slots = rule.slots.iter().map(|name| shard(&home, sharding, name));
        let muon = match config.kind {
            OptimizerKind::Muon => Some(Muon::new(home.device(), set, sharding, params, config)?),
            _ => None,
        };
        let is_in_stretch = |id: ParamId| muon.is_none() || !is_hidden_matrix(&params[id.0]);
        Ok(Self {
            slots: slots.collect::<Result<_, _>>()?,
            rates: groups.rates().to_vec(),
            owned: (stretches(sharding, &groups, |_| true).into_iter())
                .map(|stretch| stretch.place)
                .collect(),
            stretches: stretches(sharding, &groups, is_in_stretch),
            masters: None,
            home,
            rule,
            muon,
        })
    }

    /// The same for parameters that are used in bf16, or far from their state: with masters, which are zero until they
    /// are written.
    pub fn with_masters(self, sharding: &Sharding) -> Result<Self, DeviceError> {
        Ok(Self {
            masters: Some(shard(&self.home, sharding, "master weights")?),
            ..self
        })
    }

    /// The f32 numbers of what this rank owns: the masters, or `params` themselves where there are none.
    pub fn masters<'a>(&'a self, params: &'a ArenaShare) -> &'a ArenaShare {
        self.masters.as_ref().unwrap_or(params)
    }

    /// Puts the rounding of masters that were written from elsewhere into `params` on the stream.
    pub fn round(&self, stream: Stream, params: &ArenaShare) {
        let Some(masters) = &self.masters else {
            return;
        };
        let casts = self.owned.iter().map(|place| {
            let cast = Cast {
                x: masters.slice(place),
                out: params.slice(place),
            };
            cast.into()
        });
        self.home.enqueue_all(stream, casts.collect());
    }

    /// Puts the update of what this rank owns of `params` by `scale · grads` on the stream. Returns the exchanges with other
    /// ranks that it waits for. Every rank must call it.
    pub fn step(
        &self,
        stream: Stream,
        params: &ArenaShare,
        grads: &ArenaShare,
        step: &UpdateStep,
    ) -> Vec<Work> {
        let rates = self.rates.iter().map(|group| Rates {
            lr: step.lr * group.lr_scale,
            weight_decay: group.weight_decay,
        });
        let memory = StepMemory {
            params: self.masters(params),
            copies: self.masters.is_some().then_some(params),
            grads,
            slots: &self.slots,
            scale: &step.scale,
            rates: rates.collect(),
            number: step.number,
        };
        let updates = self.stretches.iter().map(|Stretch { place, ends }| {
            let (ends, rates) = (ends.clone(), memory.rates.clone());
            memory.update(&self.rule, place, Runs { ends, rates }).into()
        });
        self.home.enqueue_all(stream, updates.collect());
        let muon = self.muon.iter();
        muon.flat_map(|muon| muon.step(stream, &memory)).collect()
    }

    /// Reads and writes masters, state and parameters.
    pub const fn home(&self) -> &Arc<StateMemory> {
        &self.home
    }

    /// State of what this rank owns: name and numbers of each slot.
    pub fn slots(&self) -> impl Iterator<Item = (&'static str, &ArenaShare)> {
        self.rule.slots.iter().copied().zip(&self.slots)
    }

    /// Size of state and masters in bytes.
    pub fn bytes(&self) -> usize {
        let all = self.slots.iter().chain(&self.masters);
        all.map(|share| share.arena().bytes()).sum()
    }

    /// The same by where they are, and what the way there takes.
    pub fn bytes_by_place(&self) -> StateBytes {
        // The masters and two slots, the most that there are.
        let bytes = self.home.bytes(self.bytes(), 3);
        StateBytes {
            host: bytes.host + self.home.staging_bytes(),
            ..bytes
        }
    }
}

/// Zeros of f32 for what this rank owns.
fn shard(home: &StateMemory, sharding: &Sharding, name: &str) -> Result<ArenaShare, DeviceError> {
    Ok(ArenaShare::Shard(home.alloc(&ArenaSpec::private(
        name,
        DType::F32,
        sharding.shard_len(),
    ))?))
}

/// One a unit, or more where some of its parameters are not `included`: neighbours in the shard are neighbours in the
/// whole arena only within a unit. Padding between two parameters belongs to the first of them: updating zeros by zeros
/// leaves zeros.
fn stretches(sharding: &Sharding, groups: &ParamGroups, included: impl Fn(ParamId) -> bool) -> Vec<Stretch> {
    let pieces = sharding.own_pieces();
    let kind = |piece: &OwnPiece| (sharding.unit_range(piece.param).0, included(piece.param));
    let stretches = pieces.chunk_by(|one, next| kind(one) == kind(next));
    let stretch = |pieces: &[OwnPiece]| {
        let (first, last) = (&pieces[0].place, &pieces[pieces.len() - 1].place);
        let len = last.shard.end - first.shard.start;
        let later = pieces.iter().skip(1);
        let starts = later.map(|piece| piece.place.shard.start - first.shard.start);
        let mut ends: Vec<(usize, usize)> = Vec::new();
        for (piece, end) in pieces.iter().zip(starts.chain([len])) {
            let group = groups.index(piece.param.0);
            match ends.last_mut() {
                Some(last) if last.1 == group => last.0 = end,
                _ => ends.push((end, group)),
            }
        }
        Stretch {
            place: ArenaRanges {
                whole: first.whole.start..last.whole.end,
                shard: first.shard.start..last.shard.end,
            },
            ends: ends.into(),
        }
    };
    stretches
        .filter(|pieces| included(pieces[0].param))
        .map(stretch)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Communicator, Executor, SingleRank};
    use crate::device::{CpuDevice, Device};
    use crate::model::{AxisRole, GroupId, Init};
    use crate::parallel::{GradSpec, GradientLayout, LayoutConfig};
    use crate::session::Cancel;

    const SIZES: [(&str, usize); 3] = [("w", 3), ("u", 5), ("b", 2)];

    fn layout() -> GradientLayout {
        let specs = SIZES.iter().map(|(name, len)| GradSpec::new(*name, &[*len]));
        let order: Vec<ParamId> = (0..3).rev().map(ParamId).collect();
        GradientLayout::new(specs.collect(), &order, &LayoutConfig::new(1)).unwrap()
    }

    fn params(decays: [bool; 3]) -> Vec<ParamSpec> {
        let spec = |((name, len), decay): (&(&str, usize), bool)| ParamSpec {
            key: (*name).to_owned(),
            global_shape: vec![*len],
            cut: None,
            roles: AxisRole::replicated(),
            dtype: DType::F32,
            init: Init::Constant(0.0),
            decay,
            group: GroupId(0),
            projections: Vec::new(),
        };
        SIZES.iter().zip(decays).map(spec).collect()
    }

    #[test]
    fn a_unit_is_updated_at_once_whatever_decays() {
        let runs = |decays: [bool; 3]| {
            let groups = ParamGroups::of(&OptimizerConfig::default(), &params(decays));
            let stretches = stretches(&Sharding::replicated(&layout()), &groups, |_| true);
            let [Stretch { place, ends }] = &stretches[..] else {
                panic!("{stretches:?}")
            };
            assert_eq!([&place.whole, &place.shard], [&(0..35), &(0..35)]);
            let decays = |group: usize| groups.rates()[group].weight_decay > 0.0;
            ends.iter()
                .map(|(end, group)| (*end, decays(*group)))
                .collect::<Vec<_>>()
        };
        // In memory: `b` from 0, `u` from 16, `w` from 32.
        assert_eq!(runs([false, true, false]), [(16, false), (32, true), (35, false)]);
        assert_eq!(runs([true, false, true]), [(16, true), (32, false), (35, true)]);
        // Neighbours are one run.
        assert_eq!(runs([true, false, false]), [(32, false), (35, true)]);
        assert_eq!(runs([false; 3]), [(35, false)]);
        assert_eq!(runs([true; 3]), [(35, true)]);
    }

    #[test]
    fn the_first_step_moves_by_the_learning_rate_and_decays_only_what_decays() {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        let stream = device.stream();
        let layout = layout();
        let config = OptimizerConfig {
            weight_decay: 0.5,
            ..OptimizerConfig::default()
        };
        let params = params([true, true, false]);
        let sharding = Sharding::replicated(&layout);
        let comm = Communicator::new(
            "solo",
            Box::new(SingleRank::new(0)),
            Executor::Inline,
            std::time::Duration::from_secs(10),
            &Cancel::default(),
        );
        let home = StateMemory::on_device(device.clone());
        let set = ReplicaSet::of_all(comm);
        let optimizer = Optimizer::new(home, &set, &sharding, &params, &config).unwrap();
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
        let exchanges = optimizer.step(
            stream,
            &ArenaShare::Whole(params.clone()),
            &ArenaShare::Whole(grads),
            &update,
        );
        assert!(exchanges.is_empty());
        device.synchronize(stream).unwrap();
        let value = |id| params.slice(layout.range(ParamId(id))).host::<f32>().unwrap()[1];
        // Bias-corrected, the first update is lr · g/|g|; decay adds lr · λ · p.
        assert!((value(2) - 0.9).abs() < 1e-6, "{}", value(2));
        assert!((value(0) - 0.85).abs() < 1e-6, "{}", value(0));
        let padding = params.slice(2..16);
        assert_eq!(&padding.host::<f32>().unwrap()[..], &[0.0; 14]);
    }
}
