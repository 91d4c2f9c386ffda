//! Some steps that follow each other.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// `run.timeline`: `10-12`, or `10` for one step. Steps count from 1, as in `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRange {
    /// The first one.
    pub first: u64,
    /// The last one, not before the first.
    pub last: u64,
}

impl StepRange {
    /// As a range.
    #[must_use]
    pub fn steps(self) -> RangeInclusive<u64> {
        self.first..=self.last
    }

    /// How many.
    #[must_use]
    pub fn count(self) -> u64 {
        self.last - self.first + 1
    }
}

impl fmt::Display for StepRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last } = self;
        if first == last {
            write!(f, "{first}")
        } else {
            write!(f, "{first}-{last}")
        }
    }
}

impl FromStr for StepRange {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let step = |text: &str| text.trim().parse::<u64>().map_err(drop);
        let (first, last) = (step(first)?, step(last)?);
        if first == 0 || last < first {
            return Err(());
        }
        Ok(Self { first, last })
    }
}

impl Serialize for StepRange {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for StepRange {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Steps;
        impl serde::de::Visitor<'_> for Steps {
            type Value = StepRange;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("steps as `10-12`, or one step, from 1 on")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<StepRange, E> {
                let invalid = |()| E::invalid_value(serde::de::Unexpected::Str(text), &self);
                text.parse().map_err(invalid)
            }

            fn visit_u64<E: serde::de::Error>(self, step: u64) -> Result<StepRange, E> {
                match step {
                    0 => Err(E::invalid_value(serde::de::Unexpected::Unsigned(0), &self)),
                    one => Ok(StepRange {
                        first: one,
                        last: one,
                    }),
                }
            }
        }
        deserializer.deserialize_any(Steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reads_what_it_says() {
        for text in ["10-12", "7"] {
            let range: StepRange = text.parse().unwrap();
            assert_eq!(range.to_string(), text);
            let json = serde_json::to_string(&range).unwrap();
            assert_eq!(serde_json::from_str::<StepRange>(&json).unwrap(), range);
        }
        let number: StepRange = serde_json::from_str("7").unwrap();
        assert_eq!((number.steps(), number.count()), (7..=7, 1));
        for text in ["", "0", "0-3", "5-4", "a", "3-", "-3", "1-2-3", "1..3"] {
            assert_eq!(text.parse::<StepRange>(), Err(()), "{text}");
        }
    }
}
