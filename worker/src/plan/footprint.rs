//! Memory of a rank.

use crate::device::DType;

/// Moments of AdamW for each parameter.
const MOMENTS: u64 = 2;

/// Bytes that a rank holds for as long as it trains. Activations come on top.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Parameters.
    pub params: u64,
    /// Gradients.
    pub grads: u64,
    /// Moments of the optimizer.
    pub optimizer: u64,
}

impl Footprint {
    /// Plain data parallelism in f32 with AdamW: every rank holds everything, however many there are. `elements` are
    /// those of the arenas: the parameters and their padding.
    #[must_use]
    pub const fn replicated(elements: u64) -> Self {
        let each = elements * DType::F32.bytes() as u64;
        Self {
            params: each,
            grads: each,
            optimizer: MOMENTS * each,
        }
    }

    /// All of it.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.params + self.grads + self.optimizer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    #[test]
    fn seven_billion_parameters_in_f32_take_112_gb() {
        let footprint = Footprint::replicated(7 * GB);
        let expected = Footprint {
            params: 28 * GB,
            grads: 28 * GB,
            optimizer: 56 * GB,
        };
        assert_eq!((footprint, footprint.total()), (expected, 112 * GB));
    }

    #[test]
    fn a_replica_takes_16_bytes_a_parameter() {
        assert_eq!(Footprint::replicated(10 * GB).total(), 160 * GB);
        assert_eq!(Footprint::replicated(12 * GB).total(), 192 * GB);
    }
}
