//! A range of TCP ports, for firewalls that let only some through.

use std::fmt;
use std::str::FromStr;

/// `FIRST-LAST`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    first: u16,
    last: u16,
}

/// It is not `FIRST-LAST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected `FIRST-LAST` with 1 <= FIRST <= LAST <= 65535, for example `29500-29600`")]
pub struct BadPortRange;

impl PortRange {
    /// Number of ports.
    pub fn count(self) -> u32 {
        u32::from(self.last - self.first) + 1
    }

    /// True for a port of the range.
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// All ports, beginning at one of them: that with the index `start`, modulo their number. Programs that start at
    /// different ones do not compete for the same ports.
    pub fn starting_at(self, start: usize) -> impl Iterator<Item = u16> {
        let count = self.count();
        let start = (start % count as usize) as u32;
        (0..count).map(move |index| self.first + ((start + index) % count) as u16)
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl FromStr for PortRange {
    type Err = BadPortRange;

    fn from_str(text: &str) -> Result<Self, BadPortRange> {
        let (first, last) = text.split_once('-').ok_or(BadPortRange)?;
        let port = |text: &str| text.trim().parse().map_err(|_| BadPortRange);
        let (first, last) = (port(first)?, port(last)?);
        if first == 0 || first > last {
            return Err(BadPortRange);
        }
        Ok(Self { first, last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_written_as_it_is_read() {
        let range: PortRange = "29500-29600".parse().unwrap();
        assert_eq!((range.count(), range.to_string().as_str()), (101, "29500-29600"));
        assert!(range.contains(29_600) && !range.contains(29_601));
        let all: PortRange = "1-65535".parse().unwrap();
        assert_eq!(all.starting_at(65_536).count(), 65_535);
        for wrong in ["", "29500", "5-4", "0-4", "1-65536", "a-b", "1-2-3"] {
            assert_eq!(wrong.parse::<PortRange>(), Err(BadPortRange), "{wrong}");
        }
    }

    #[test]
    fn all_ports_come_from_every_start() {
        let range: PortRange = "7-9".parse().unwrap();
        let from = |start| range.starting_at(start).collect::<Vec<_>>();
        assert_eq!(
            (from(0), from(2), from(4)),
            (vec![7, 8, 9], vec![9, 7, 8], vec![8, 9, 7])
        );
    }
}
