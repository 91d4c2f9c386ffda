//! How much memory a rank holds: in the lines before the first step, in each line of the metrics, and in a plan.

use crate::metrics::Memory;
use crate::optim::Optimizer;
use crate::parallel::Reducer;
use crate::train::replica::Replica;

/// Bytes that a rank holds for as long as it trains, as the types that hold them say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Parameters.
    pub params: u64,
    /// Slots for parameters that are gathered at the moment.
    pub gathered: u64,
    /// Gradients, with those in flight, and the sums of later uses of tied parameters.
    pub grads: u64,
    /// Slots for gradients that are being reduced.
    pub in_flight: u64,
    /// State of the optimizer, and masters, on the device.
    pub optimizer: u64,
    /// The same in memory of the host, and in a file.
    pub offloaded: [u64; 2],
    /// Of parameters, gradients and optimizer: so that ranks have equal slices of whole chunks.
    pub padding: u64,
    /// Activations of all micro-batches in flight.
    pub activations: u64,
}

impl Footprint {
    pub(crate) fn of(replica: &Replica, reducer: &Reducer, optimizer: &Optimizer) -> Self {
        let params = replica.parameters.bytes();
        let padded = replica.parameters.sharding().whole_len();
        let padding = (padded - replica.model.held_count()) as f64 / padded as f64;
        let state = optimizer.bytes_by_place();
        let elements = params + reducer.sum_bytes() + optimizer.bytes();
        Self {
            params: params as u64,
            gathered: replica.parameters.gathered_bytes() as u64,
            grads: reducer.bytes() as u64,
            in_flight: reducer.in_flight_bytes() as u64,
            optimizer: state.device as u64,
            offloaded: [state.host as u64, state.file as u64],
            padding: (elements as f64 * padding) as u64,
            activations: replica.pool.allocated_bytes() as u64,
        }
    }

    /// As a line of the metrics tells it.
    pub(crate) fn memory(&self) -> Memory {
        Memory {
            params: self.params,
            grads: self.grads,
            optimizer: self.optimizer,
            optimizer_host: self.offloaded[0],
            optimizer_file: self.offloaded[1],
            activations: self.activations,
            gathered: self.gathered,
            ..Memory::default()
        }
    }

    /// All of it.
    pub const fn total(&self) -> u64 {
        self.params + self.gathered + self.grads + self.optimizer + self.activations
    }
}
