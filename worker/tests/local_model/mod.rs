//! Parameters and gradients of a model that lives on one rank alone, for tests and examples.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::ops::Range;

use ddp_worker::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Event};
use ddp_worker::model::{GradSink, GradSlot, Model, ParamId, Params, fill_init};
use half::bf16;

/// All parameters in one arena, in forward order.
#[derive(Clone, Debug)]
pub(crate) struct LocalParams {
    arena: Arena,
    ranges: Vec<Range<usize>>,
}

impl LocalParams {
    /// Allocates them in `dtype` (f32, bf16, or f64 for gradient checks) and gives them their first values.
    pub(crate) fn new(
        device: &dyn Device,
        model: &Model,
        dtype: DType,
        seed: u64,
    ) -> Result<Self, DeviceError> {
        let (arena, ranges) = allocate(device, model, "params", dtype)?;
        let params = Self { arena, ranges };
        for (i, spec) in model.params.iter().enumerate() {
            let mut values = vec![0.0; spec.len()];
            fill_init(spec, seed, 0..spec.len(), &mut values);
            let target = params.get(ParamId(i));
            match dtype {
                DType::F64 => {
                    for (target, &value) in target.host_mut::<f64>()?.iter_mut().zip(&values) {
                        *target = f64::from(value);
                    }
                }
                DType::Bf16 => {
                    for (target, &value) in target.host_mut::<bf16>()?.iter_mut().zip(&values) {
                        *target = bf16::from_f32(value);
                    }
                }
                _ => target.host_mut::<f32>()?.copy_from_slice(&values),
            }
        }
        Ok(params)
    }

    /// All of them.
    pub(crate) fn whole(&self) -> Buffer {
        self.arena.whole()
    }
}

impl Params for LocalParams {
    fn get(&self, id: ParamId) -> Buffer {
        self.arena.slice(self.ranges[id.0].clone())
    }
}

/// All gradients in one arena, in the order of [`LocalParams`]; the first contribution of a step overwrites.
#[derive(Clone, Debug)]
pub(crate) struct LocalGrads {
    arena: Arena,
    ranges: Vec<Range<usize>>,
    /// Contributions since the last [`LocalGrads::start_step`], by parameter.
    contributions: Vec<usize>,
}

impl LocalGrads {
    /// Allocates them in `dtype`: that of the parameters, or f32 beside bf16.
    pub(crate) fn new(device: &dyn Device, model: &Model, dtype: DType) -> Result<Self, DeviceError> {
        let (arena, ranges) = allocate(device, model, "grads", dtype)?;
        let contributions = vec![0; ranges.len()];
        Ok(Self {
            arena,
            ranges,
            contributions,
        })
    }

    /// Forgets the gradients of the step before.
    pub(crate) fn start_step(&mut self) {
        self.contributions.fill(0);
    }

    /// Contributions since [`LocalGrads::start_step`], by parameter.
    pub(crate) fn contributions(&self) -> &[usize] {
        &self.contributions
    }

    /// All of them.
    pub(crate) fn whole(&self) -> Buffer {
        self.arena.whole()
    }
}

impl GradSink for LocalGrads {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        Ok(GradSlot {
            buffer: self.arena.slice(self.ranges[id.0].clone()),
            accumulate: self.contributions[id.0] > 0,
        })
    }

    fn contributed(&mut self, id: ParamId, _at: Event) -> Result<(), DeviceError> {
        self.contributions[id.0] += 1;
        Ok(())
    }
}

fn allocate(
    device: &dyn Device,
    model: &Model,
    name: &str,
    dtype: DType,
) -> Result<(Arena, Vec<Range<usize>>), DeviceError> {
    let mut end = 0;
    let ranges = model.params.iter().map(|spec| {
        let start = end;
        end += spec.len();
        start..end
    });
    let ranges: Vec<_> = ranges.collect();
    let spec = ArenaSpec::private(name, dtype, end);
    Ok((device.alloc(&spec)?, ranges))
}
