//! AdamW over flat arenas: moments lie where the parameters lie.

use std::ops::Range;
use std::sync::Arc;

use crate::config::Optimizer;
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Sharing, Stream};
use crate::model::ParamId;
use crate::ops;
use crate::parallel::GradientLayout;

/// The two moments and the ranges that decay.
pub struct AdamW {
    device: Arc<dyn Device>,
    config: Optimizer,
    m: Arena,
    v: Arena,
    runs: Vec<Run>,
}

/// Neighbours in memory with the same decay.
#[derive(Clone, Debug, PartialEq)]
struct Run {
    range: Range<usize>,
    decay: bool,
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
            Self::First => "optimizer.m.",
            Self::Second => "optimizer.v.",
        }
    }
}

impl AdamW {
    /// Zero moments. `decays` says by parameter whether weight decay applies.
    pub fn new(
        device: &Arc<dyn Device>,
        layout: &GradientLayout,
        decays: &[bool],
        config: &Optimizer,
    ) -> Result<Self, DeviceError> {
        let alloc = |name: &str| {
            device.alloc(&ArenaSpec {
                name: name.into(),
                dtype: DType::F32,
                len: layout.len(),
                sharing: Sharing::Private,
            })
        };
        Ok(Self {
            device: device.clone(),
            config: config.clone(),
            m: alloc("first moments")?,
            v: alloc("second moments")?,
            runs: runs(layout, decays),
        })
    }

    /// Puts the update of `params` by `scale · grads` on the stream. `step` counts from 1.
    pub fn step(&self, stream: Stream, params: &Arena, grads: &Arena, scale: &Buffer, lr: f32, step: u64) {
        let [beta1, beta2] = self.config.betas;
        let hyper = ops::AdamWStep {
            lr,
            beta1,
            beta2,
            eps: self.config.eps,
            step,
        };
        for Run { range, decay } in &self.runs {
            let update = ops::AdamW {
                param: params.slice(range.clone()),
                grad: grads.slice(range.clone()),
                m: self.m.slice(range.clone()),
                v: self.v.slice(range.clone()),
                scale: scale.clone(),
                weight_decay: if *decay { self.config.weight_decay } else { 0.0 },
                hyper,
            };
            self.device.enqueue(stream, update.into());
        }
    }

    /// A moment of all parameters, in the layout of the gradients.
    #[must_use]
    pub fn moment(&self, moment: Moment) -> &Arena {
        match moment {
            Moment::First => &self.m,
            Moment::Second => &self.v,
        }
    }

    /// Size of both moments in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.m.bytes() + self.v.bytes()
    }
}

/// Padding between two parameters belongs to the run before it: updating zeros by zeros leaves zeros.
fn runs(layout: &GradientLayout, decays: &[bool]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &ParamId(id) in layout.order() {
        let range = layout.range(ParamId(id));
        match runs.last_mut() {
            Some(run) if run.decay == decays[id] => run.range.end = range.end,
            _ => runs.push(Run {
                range,
                decay: decays[id],
            }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CpuDevice;
    use crate::parallel::{GradSpec, LayoutConfig};

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
    fn neighbours_with_the_same_decay_are_one_run() {
        let runs = runs(&layout(), &[true, true, false]);
        assert_eq!(
            runs,
            [
                Run {
                    range: 0..2,
                    decay: false
                },
                Run {
                    range: 16..35,
                    decay: true
                }
            ]
        );
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
        let adamw = AdamW::new(&device, &layout, &[true, true, false], &config).unwrap();
        let arena = |name: &str, value: f32| {
            let spec = ArenaSpec {
                name: name.into(),
                dtype: DType::F32,
                len: layout.len(),
                sharing: Sharing::Private,
            };
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
        let scale = device
            .alloc(&ArenaSpec {
                name: "scale".into(),
                dtype: DType::F32,
                len: 1,
                sharing: Sharing::Private,
            })
            .unwrap();
        scale.whole().host_mut::<f32>().unwrap()[0] = 1.0;
        adamw.step(stream, &params, &grads, &scale.whole(), 0.1, 1);
        device.synchronize(stream).unwrap();
        let value = |id| params.slice(layout.range(ParamId(id))).host::<f32>().unwrap()[1];
        // Bias-corrected, the first update is lr · g/|g|; decay adds lr · λ · p.
        assert!((value(2) - 0.9).abs() < 1e-6, "{}", value(2));
        assert!((value(0) - 0.85).abs() < 1e-6, "{}", value(0));
        let padding = params.slice(2..16);
        assert_eq!(&padding.host::<f32>().unwrap()[..], &[0.0; 14]);
    }
}
