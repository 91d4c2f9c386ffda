//! One thing that ran, on the clock of its process.
//!
//! Processes of one machine have one clock. Between machines nothing is assumed but that all of them opened their
//! timelines when they left the same barrier: the first of each machine did so at time 0.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// What follows one after the other: a stream, a communicator, the thread that trains.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// Whole steps.
    Steps,
    /// The thread that trains, where it only tells the device what to do.
    Host,
    /// The stream that computes; on a CPU it is the thread that trains.
    Compute,
    /// Operations of a communicator.
    Communicator(String),
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps => f.write_str("steps"),
            Self::Host => f.write_str("host"),
            Self::Compute => f.write_str("compute"),
            Self::Communicator(name) => write!(f, "{COMMUNICATION}{name}"),
        }
    }
}

const COMMUNICATION: &str = "communication: ";

impl Lane {
    /// The lane that is displayed so.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "steps" => Some(Self::Steps),
            "host" => Some(Self::Host),
            "compute" => Some(Self::Compute),
            _ => Some(Self::Communicator(name.strip_prefix(COMMUNICATION)?.to_owned())),
        }
    }
}

/// What it was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A whole step.
    Step,
    /// Tokens for a micro-batch.
    Data,
    /// Forward of a micro-batch, and of each of its blocks.
    Forward,
    /// Backward, likewise.
    Backward,
    /// Norm, clipping and update.
    Optimizer,
    /// One operation of a block.
    Operation,
    /// Nothing: it stands still until gradients or parameters have come.
    Wait,
    /// Gradients between ranks.
    Gradients,
    /// Parameters between ranks.
    Parameters,
    /// Whatever else goes between ranks: losses, norms.
    Other,
    /// Nothing: another rank has not come yet. Known of merged traces only.
    Late,
}

/// One thing that ran. Times are in microseconds since the timeline was opened.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Where.
    pub lane: Lane,
    /// What for.
    pub kind: Kind,
    /// `backward h.3`, `all-reduce (bucket 2)`.
    pub name: Cow<'static, str>,
    /// When it began.
    pub start_us: f64,
    /// When it ended.
    pub end_us: f64,
    /// If it is an operation of a communicator.
    pub collective: Option<Collective>,
}

/// Which operation of which communicator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collective {
    /// Size of its buffer.
    pub bytes: u64,
    /// Global rank of the communicator's first rank.
    pub first_rank: u32,
    /// Number of its ranks.
    pub ranks: u32,
    /// Number of the operation in its communicator, from 0, if it moves nothing before all ranks have come.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sequence: Option<u64>,
}

impl Span {
    /// How long it took, in microseconds.
    #[must_use]
    pub fn length_us(&self) -> f64 {
        self.end_us - self.start_us
    }
}

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

/// What spans of one rank belong to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The run and how it trains, for people.
    pub run: String,
    /// Global rank.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// Name of its node.
    pub host: String,
    /// Generation of the job.
    pub generation: u64,
    /// First and last step, from 1.
    pub steps: [u64; 2],
    /// When time 0 of its spans was.
    pub clock: ClockReading,
    /// Spans that are not here: too many, or without times.
    pub missed: u64,
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
