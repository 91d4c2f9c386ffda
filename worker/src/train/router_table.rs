//! What the routers of all layers count in a step, on all ranks: how evenly experts are used.

use crate::collective::{Launch, ReduceOp, Traffic, Work};
use crate::config::TrainConfig;
use crate::device::{Arena, ArenaSpec, Buffer, DType, Fetch};
use crate::metrics::ExpertMetrics;
use crate::model::Decoder;
use crate::ops::Fill;
use crate::train::TrainError;
use crate::train::world::World;

/// A row for each micro-batch and layer: [`crate::ops::RouteForward::statistics`] and the choices that were kept, where capacity is bounded.
pub(crate) struct RouterTable {
    world: World,
    rows: Arena,
    layers: usize,
    experts: usize,
    /// Experts have room for some choices only.
    is_bounded: bool,
}

impl RouterTable {
    /// Every rank must call it. None: the model has no experts.
    pub(crate) fn new(world: &World, config: &TrainConfig) -> Result<Option<Self>, TrainError> {
        let Some(experts) = Decoder::of(&config.model).experts else {
            return Ok(None);
        };
        let (layers, is_bounded, experts) = (config.model.n_layer, experts.capacity.is_some(), experts.count);
        let len = config.train.grad_accumulation * layers * (2 * experts + 2);
        let spec = ArenaSpec::on_node("what routers count", DType::F32, len);
        Ok(Some(Self {
            rows: world.comm.alloc_shared(&world.compute.device, &spec)?,
            world: world.clone(),
            layers,
            experts,
            is_bounded,
        }))
    }

    /// Before a step.
    pub(crate) fn clear(&self) {
        let out = self.rows.whole();
        self.world.compute.enqueue(Fill { out, value: 0.0 });
    }

    /// The rows of a micro-batch, one for each layer of the whole model.
    pub(crate) fn of_micro_batch(&self, number: usize) -> Buffer {
        let len = self.layers * (2 * self.experts + 2);
        self.rows.slice(number * len..(number + 1) * len)
    }

    /// Sums the rows of all ranks. Every rank must call it.
    pub(crate) fn share(&self) -> Work {
        let launch = Launch::after(self.world.compute.record(), Traffic::Other, "what routers count");
        (self.world.comm).all_reduce(&self.rows.whole(), ReduceOp::Sum, launch)
    }

    /// The rows, for the host: [`RouterTable::read`].
    pub(crate) fn fetch(&self) -> Fetch {
        let compute = &self.world.compute;
        compute.device.fetch(compute.stream, &self.rows.whole())
    }

    /// From the bytes of [`RouterTable::fetch`].
    pub(crate) fn read(&self, bytes: &[u8]) -> ExpertMetrics {
        let numbers = bytes
            .chunks_exact(size_of::<f32>())
            .map(bytemuck::pod_read_unaligned::<f32>);
        let (numbers, width): (Vec<f32>, _) = (numbers.collect(), 2 * self.experts + 2);
        let (mut all, mut counted) = (ExpertMetrics::default(), 0.0_f64);
        for layer in 0..self.layers {
            let mut sums = vec![0.0; width];
            for row in numbers.chunks_exact(width).skip(layer).step_by(self.layers) {
                sums.iter_mut()
                    .zip(row)
                    .for_each(|(sum, x)| *sum += f64::from(*x));
            }
            let (loads, rest) = sums.split_at(self.experts);
            let (probabilities, rest) = rest.split_at(self.experts);
            let [choices, tokens] = [loads, probabilities].map(|numbers| numbers.iter().sum::<f64>());
            if choices == 0.0 {
                continue;
            }
            let experts = self.experts as f64;
            let most = loads.iter().fold(0.0_f64, |most, load| most.max(*load));
            let products = loads
                .iter()
                .zip(probabilities)
                .map(|(load, probability)| load * probability);
            all.expert_load = all.expert_load.max(most * experts / choices);
            all.expert_dropped += if self.is_bounded {
                1.0 - rest[1] / choices
            } else {
                0.0
            };
            all.balance_loss += experts * products.sum::<f64>() / tokens.powi(2);
            all.router_z_loss += rest[0] / tokens;
            counted += 1.0;
        }
        let means = [
            &mut all.expert_dropped,
            &mut all.balance_loss,
            &mut all.router_z_loss,
        ];
        means.into_iter().for_each(|sum| *sum /= counted.max(1.0));
        all
    }
}
