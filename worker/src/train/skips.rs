//! What to do about a step whose numbers are not finite: a decision that is the same on all ranks, since all see the
//! same numbers.

use crate::config::OnNonFinite;

/// Steps that were skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Skips {
    policy: OnNonFinite,
    /// Most in a row.
    limit: u64,
    in_a_row: u64,
    total: u64,
}

/// What becomes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The step counts.
    Keep,
    /// The step was without effect. `is_first`: the one before was not.
    Skip {
        /// See above.
        is_first: bool,
    },
    /// Training ends, after so many skipped steps in a row.
    Stop {
        /// See above.
        skipped: u64,
    },
}

impl Skips {
    pub(super) fn new(policy: OnNonFinite, limit: u64) -> Self {
        Self {
            policy,
            limit,
            in_a_row: 0,
            total: 0,
        }
    }

    /// What becomes of the next step.
    pub(super) fn judge(&mut self, is_finite: bool) -> Fate {
        if is_finite {
            self.in_a_row = 0;
            return Fate::Keep;
        }
        if self.policy == OnNonFinite::Stop || self.in_a_row == self.limit {
            return Fate::Stop {
                skipped: self.in_a_row,
            };
        }
        self.in_a_row += 1;
        self.total += 1;
        Fate::Skip {
            is_first: self.in_a_row == 1,
        }
    }

    /// Whether the last step was skipped.
    pub(super) fn is_skipping(&self) -> bool {
        self.in_a_row > 0
    }

    /// Since this life of the run began.
    pub(super) fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_stops_at_once_or_after_too_many_in_a_row() {
        let mut skips = Skips::new(OnNonFinite::Stop, 2);
        assert_eq!(skips.judge(true), Fate::Keep);
        assert_eq!(skips.judge(false), Fate::Stop { skipped: 0 });

        let mut skips = Skips::new(OnNonFinite::Skip, 2);
        assert_eq!(skips.judge(false), Fate::Skip { is_first: true });
        assert_eq!(skips.judge(false), Fate::Skip { is_first: false });
        assert_eq!(skips.judge(true), Fate::Keep);
        assert_eq!(skips.judge(false), Fate::Skip { is_first: true });
        assert_eq!(skips.judge(false), Fate::Skip { is_first: false });
        assert_eq!(skips.judge(false), Fate::Stop { skipped: 2 });
        assert_eq!(skips.total(), 4);
    }
}
