//! What the routers of all layers count in a step, on all ranks: how evenly experts are used.

use crate::collective::{Launch, ReduceOp, Traffic, Work};
use crate::config::TrainConfig;
use crate::device::{Arena, ArenaSpec, Buffer, DType, Fetch};
use crate::metrics::ExpertMetrics;
use crate::model::Decoder;
use crate::ops::Fill;
use crate::train::TrainError;
use crate::train::world::World;

/// A row for each micro-batch and layer: [`crate::ops::RouteForward::statistics`].
pub(crate) struct RouterTable {
    world: World,
    rows: Arena,
    layers: usize,
    experts: usize,
}

impl RouterTable {
    /// Every rank must call it. None: the model has no experts.
    pub(crate) fn new(world: &World, config: &TrainConfig) -> Result<Option<Self>, TrainError> {
        let Some(experts) = Decoder::of(&config.model).experts else {
            return Ok(None);
        };
        let (layers, experts) = (config.model.n_layer, experts.count);
        let len = config.train.grad_accumulation * layers * (3 * experts + 1);
        let spec = ArenaSpec::on_node("what routers count", DType::F32, len);
        Ok(Some(Self {
            rows: world.comm.alloc_shared(&world.compute.device, &spec)?,
            world: world.clone(),
            layers,
            experts,
        }))
    }

    /// Before a step.
    pub(crate) fn clear(&self) {
        let out = self.rows.whole();
        self.world.compute.enqueue(Fill { out, value: 0.0 });
    }

    /// The rows of a micro-batch, one for each layer of the whole model.
    pub(crate) fn of_micro_batch(&self, number: usize) -> Buffer {
        let len = self.layers * (3 * self.experts + 1);
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
        let width = 3 * self.experts + 1;
        let mut layers = vec![vec![0.0_f64; width]; self.layers];
        for (i, bytes) in bytes.chunks_exact(size_of::<f32>()).enumerate() {
            let number: f32 = bytemuck::pod_read_unaligned(bytes);
            layers[i / width % self.layers][i % width] += f64::from(number);
        }
        layers.retain(|sums| sums[..self.experts].iter().any(|load| *load > 0.0));
        let (mut all, experts) = (ExpertMetrics::default(), self.experts as f64);
        for sums in &layers {
            let (loads, rest) = sums.split_at(self.experts);
            let (probabilities, rest) = rest.split_at(self.experts);
            let (squares, kept) = rest.split_at(1);
            let [choices, tokens, kept] =
                [loads, probabilities, kept].map(|numbers| numbers.iter().sum::<f64>());
            let most = loads.iter().copied().fold(0.0, f64::max);
            let pairs = loads.iter().zip(probabilities);
            let balance = pairs.map(|(load, probability)| load * probability).sum::<f64>();
            all.expert_load = all.expert_load.max(most * experts / choices);
            all.expert_dropped += (1.0 - kept / choices) / layers.len() as f64;
            all.balance_loss += experts * balance / tokens.powi(2) / layers.len() as f64;
            all.router_z_loss += squares[0] / tokens / layers.len() as f64;
        }
        all
    }
}
