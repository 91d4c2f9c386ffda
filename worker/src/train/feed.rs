//! Tokens and targets on their way to the device: on a stream of their own, into one of two places, while the
//! micro-batch before is computed from the other.

use super::TrainError;
use super::replica::Batch;
use super::world::World;
use crate::device::{ArenaSpec, Buffer, DType, Event, Stream};
use crate::model::Activation;

/// See the module.
pub(super) struct Feed {
    world: World,
    /// Copies, ahead of the stream that computes.
    stream: Stream,
    places: [Place; 2],
    /// The place that was filled last.
    current: usize,
    /// `[B, T]`
    shape: Vec<usize>,
}

/// Memory of one micro-batch.
struct Place {
    /// Tokens and targets, `[B, T]`, i32.
    inputs: Buffer,
    targets: Buffer,
    /// All that reads it has run.
    read: Event,
}

impl Feed {
    /// For micro-batches of `shape`, samples by positions.
    pub(super) fn new(world: &World, shape: Vec<usize>) -> Result<Self, TrainError> {
        let alloc = |name: &str| {
            let arena = world
                .device
                .alloc(&ArenaSpec::private(name, DType::I32, shape.iter().product()));
            arena.map(|arena| arena.whole())
        };
        let place = || -> Result<Place, TrainError> {
            Ok(Place {
                inputs: alloc("tokens")?,
                targets: alloc("targets")?,
                read: Event::reached(),
            })
        };
        let device = world.device.as_ref();
        let named = device.host_side().map(|side| side.named_stream("data"));
        Ok(Self {
            stream: named.unwrap_or_else(|| device.stream()),
            places: [place()?, place()?],
            current: 0,
            world: world.clone(),
            shape,
        })
    }

    /// Later operations of the stream that computes read this batch. Whatever reads the one before is in that stream
    /// already.
    pub(super) fn bring(&mut self, batch: &Batch) {
        let World { device, stream, .. } = &self.world;
        let deadline = self.world.deadline();
        self.places[self.current].read = device.record(*stream);
        self.current = 1 - self.current;
        let place = &self.places[self.current];
        device.wait_event(self.stream, &place.read, deadline);
        device.upload(self.stream, &place.inputs, bytemuck::cast_slice(&batch.inputs));
        device.upload(self.stream, &place.targets, bytemuck::cast_slice(&batch.targets));
        device.wait_event(*stream, &device.record(self.stream), deadline);
    }

    /// Tokens, `[B, T]`, i32.
    pub(super) fn inputs(&self) -> Activation {
        Activation::borrowed(self.places[self.current].inputs.clone(), self.shape.clone())
    }

    /// Targets, `[B, T]`, i32.
    pub(super) fn targets(&self) -> &Buffer {
        &self.places[self.current].targets
    }
}
