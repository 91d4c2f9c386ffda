//! Clocks of several processes.
//!
//! Processes of one machine have one clock. Between machines nothing is assumed but that all of them opened their
//! timelines when they left the same barrier: the first of each machine did so at time 0.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// One name for each start of a machine, in its containers too.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A moment, by a clock that all processes of a machine share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockReading {
    /// Name of the clock.
    pub clock: String,
    /// What it showed.
    pub ns: i64,
}

impl ClockReading {
    /// Now, by the machine's clock that only goes forward.
    #[must_use]
    pub fn now() -> Self {
        // The process's own name is one that no other process has: such a timeline begins at its own time 0.
        let clock =
            std::fs::read_to_string(BOOT_ID).unwrap_or_else(|_| format!("process {}", std::process::id()));
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC);
        Self {
            clock: clock.trim().to_owned(),
            ns: now.map_or(0, |now| now.tv_sec() * 1_000_000_000 + now.tv_nsec()),
        }
    }

    /// So much later.
    #[must_use]
    pub fn after(self, passed: Duration) -> Self {
        Self {
            ns: self.ns + passed.as_nanos() as i64,
            ..self
        }
    }

    /// How much later than time 0 of all of them each of these moments was, in microseconds.
    #[must_use]
    pub fn offsets_us(readings: &[&Self]) -> Vec<f64> {
        let mut first: BTreeMap<&str, i64> = BTreeMap::new();
        for reading in readings {
            let ns = first.entry(&reading.clock).or_insert(reading.ns);
            *ns = reading.ns.min(*ns);
        }
        let offset = |reading: &&Self| (reading.ns - first[reading.clock.as_str()]) as f64 * 1e-3;
        readings.iter().map(offset).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_each_machine_begins_at_zero() {
        let reading = |clock: &str, ns| ClockReading {
            clock: clock.into(),
            ns,
        };
        let all = [reading("a", 5_000), reading("b", 900), reading("a", 2_000)];
        assert_eq!(ClockReading::offsets_us(&all.each_ref()), [3.0, 0.0, 0.0]);
        let (one, other) = (ClockReading::now(), ClockReading::now());
        assert_eq!(one.clone().after(Duration::from_micros(3)).ns, one.ns + 3_000);
        assert!(one.clock == other.clock && one.ns > 0 && one.ns <= other.ns);
    }
}
