//! The least time of a step.

/// What a step takes at least, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepBound {
    /// Arithmetic.
    pub compute: f64,
    /// Bytes between ranks.
    pub communication: f64,
    /// Both at the same time.
    pub overlaps: bool,
}

impl StepBound {
    /// The longer of both where they overlap, else their sum.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        if self.overlaps {
            self.compute.max(self.communication)
        } else {
            self.compute + self.communication
        }
    }

    /// Share of the step in which a device computes.
    #[must_use]
    pub fn efficiency(&self) -> f64 {
        self.compute / self.seconds()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_as_long_as_the_longer() {
        let mut bound = StepBound {
            compute: 0.3,
            communication: 0.1,
            overlaps: true,
        };
        assert_eq!((bound.seconds(), bound.efficiency()), (0.3, 1.0));
        bound.overlaps = false;
        assert_eq!(bound.seconds(), 0.4);
        bound = StepBound {
            communication: 0.6,
            overlaps: true,
            ..bound
        };
        assert_eq!((bound.seconds(), bound.efficiency()), (0.6, 0.5));
    }
}
