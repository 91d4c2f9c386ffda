//! How much memory the activations of a rank need: its row of the schedule once through, on a device that does nothing.
//!
//! A block's code alone decides what it leases and when it lets go, and [`Flights`] what goes from stage to stage, so nothing
//! has to be described twice: what is rehearsed is what will run. Neither numbers nor memory are touched; it takes
//! microseconds a block.

use std::sync::Arc;

use super::flights::{Flights, RowPurpose};
use crate::config::TrainConfig;
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Event, IdleDevice, Stream};
use crate::mesh::Mesh;
use crate::model::{
    Activation, ActivationPool, Context, Exchange, ExchangeKind, GradSink, GradSlot, Model, ModelPart,
    NoHooks, ParamId, ParamSpec, Params, Passes, SampleKey, TensorOps,
};
use crate::parallel::EdgeQueues;
use crate::parallel::pipeline::{Action, PipelinePlan};
use crate::train::TrainError;

/// Bytes of the arena in which all activations of a rank find a place: in steps of every number of micro-batches that
/// `steps` names, and in evaluations. `mesh` has idle ranks, this one among them. A micro-batch has the shape
/// `[samples, positions]`, and `channels` are handed on of each position.
pub(crate) fn rehearse(
    model: &Model,
    plan: &Arc<PipelinePlan>,
    mesh: &Mesh,
    shape: MicroBatchShape,
    steps: impl Iterator<Item = usize>,
) -> Result<usize, TrainError> {
    let stage = Stage::new(model, shape)?;
    let pool = ActivationPool::planned(stage.device.clone(), isize::MAX as usize)?;
    let mut flights = stage.flights(plan, mesh)?;
    for micro_batches in steps {
        stage.pass(&mut flights, plan, micro_batches, &pool)?;
    }
    Ok(pool.extent())
}

/// Sizes of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MicroBatchShape {
    /// Samples.
    pub(crate) samples: usize,
    /// Tokens of a sample.
    pub(crate) positions: usize,
    /// Numbers of a token between two blocks.
    pub(crate) channels: usize,
}

impl MicroBatchShape {
    /// Of a configuration.
    pub(crate) fn of(config: &TrainConfig) -> Self {
        Self {
            samples: config.train.micro_batch,
            positions: config.model.block_size,
            channels: config.model.n_embd,
        }
    }

    /// Of tokens.
    pub(crate) fn tokens(self) -> [usize; 2] {
        [self.samples, self.positions]
    }

    /// Of what blocks hand on: under sequence parallelism a rank's own rows.
    pub(crate) fn activations(self, part: &ModelPart) -> Vec<usize> {
        let rows = self.samples * self.positions;
        if part.sequence {
            return vec![rows / part.tensor.1, self.channels];
        }
        vec![self.samples, self.positions, self.channels]
    }
}

/// What the passes are given.
struct Stage<'a> {
    model: &'a Model,
    shape: MicroBatchShape,
    device: Arc<dyn Device>,
    tokens: Activation,
    targets: Buffer,
    dloss: Buffer,
    /// As long as the longest parameter.
    param: Arena,
}

impl<'a> Stage<'a> {
    fn new(model: &'a Model, shape: MicroBatchShape) -> Result<Self, DeviceError> {
        let device: Arc<dyn Device> = Arc::new(IdleDevice);
        let len = shape.samples * shape.positions;
        let alloc = |name: &str, dtype, len| device.alloc(&ArenaSpec::private(name, dtype, len));
        let longest = model.params.iter().map(ParamSpec::len).max().unwrap_or(0);
        Ok(Self {
            tokens: Activation::borrowed(alloc("tokens", DType::I32, len)?.whole(), shape.tokens().to_vec()),
            targets: alloc("targets", DType::I32, len)?.whole(),
            dloss: alloc("loss factors", DType::F32, len)?.whole(),
            param: alloc("a parameter", model.dtype(), longest)?,
            shape,
            model,
            device,
        })
    }

    fn flights(&self, plan: &Arc<PipelinePlan>, mesh: &Mesh) -> Result<Flights, TrainError> {
        let edges = EdgeQueues::connect(
            mesh,
            (&self.device, STREAM),
            (plan.placement(), plan.capacity()),
            (&self.shape.activations(&self.model.part), self.model.dtype()),
        )?;
        Ok(Flights::new(plan.clone(), edges))
    }

    /// A step and an evaluation of so many micro-batches.
    fn pass(
        &self,
        flights: &mut Flights,
        plan: &PipelinePlan,
        micro_batches: usize,
        pool: &ActivationPool,
    ) -> Result<(), DeviceError> {
        let rank = flights.rank();
        let (step, evaluation) = (
            plan.row(rank, micro_batches),
            plan.evaluation_row(rank, micro_batches),
        );
        self.run(flights, &step, RowPurpose::Training, pool)?;
        self.run(flights, &evaluation, RowPurpose::Evaluation, pool)
    }

    fn run(
        &self,
        flights: &mut Flights,
        row: &[Action],
        purpose: RowPurpose,
        pool: &ActivationPool,
    ) -> Result<(), DeviceError> {
        let ctx = self.context(pool);
        let passes = Passes {
            model: self.model,
            ctx: &ctx,
        };
        flights.begin(row, purpose, pool)?;
        for action in row {
            let tokens = Flights::takes_tokens(*action).then(|| self.tokens.clone());
            flights.carry_out(*action, &passes, tokens, &mut NoHooks, &mut Audience(self))?;
        }
        flights.finish()
    }

    fn context<'b>(&'b self, pool: &'b ActivationPool) -> Context<'b> {
        Context {
            device: self.device.as_ref(),
            stream: STREAM,
            pool,
            params: self,
            targets: &self.targets,
            dloss: Some(&self.dloss),
            shape: self.shape.tokens(),
            tensor: (self.model.part.tensor.1 > 1).then_some(&self.model.part as &dyn TensorOps),
            dtype: self.model.dtype(),
            samples: Some(SampleKey::default()),
            timeline: None,
        }
    }
}

/// A tensor group whose other ranks do nothing.
impl TensorOps for ModelPart {
    fn index(&self) -> usize {
        self.tensor.0
    }

    fn size(&self) -> usize {
        self.tensor.1
    }

    fn is_sequence(&self) -> bool {
        self.sequence
    }

    fn start(&self, _kind: ExchangeKind, x: &Activation, _name: &str) -> Result<Exchange, DeviceError> {
        Ok(Exchange::new(Event::reached(), x))
    }

    fn finish(&self, _exchange: Exchange) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// The stream that computes.
const STREAM: Stream = Stream(0);

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
#[path = "rehearsal_tests.rs"]
mod tests;
