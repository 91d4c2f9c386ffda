//! What the system says about this process's memory.

use std::fs;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The kernel walks all page tables for the proportional size, some 20 ms for a GiB: not in every step.
const REFRESH: Duration = Duration::from_secs(1);

/// Bytes of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ProcessMemory {
    /// Most physical memory so far.
    pub(super) peak_rss: u64,
    /// Physical memory now, shared pages divided by their users.
    pub(super) pss: u64,
}

impl ProcessMemory {
    /// What was last read, at most [`REFRESH`] ago.
    pub(super) fn recent() -> Self {
        static LAST: Mutex<Option<(Instant, ProcessMemory)>> = Mutex::new(None);
        let mut last = LAST.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match *last {
            Some((at, memory)) if at.elapsed() < REFRESH => memory,
            _ => last.insert((Instant::now(), Self::now())).1,
        }
    }

    /// Zero where the system does not say.
    fn now() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self {
            peak_rss: kib(&read("/proc/self/status"), "VmHWM:"),
            pss: kib(&read("/proc/self/smaps_rollup"), "Pss:"),
        }
    }
}

/// The value of a line `key   123 kB`, in bytes.
fn kib(text: &str, key: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(key));
    let number = value.and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_system_are_read() {
        let text = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 4 kB\n";
        assert_eq!(kib(text, "VmHWM:"), 2 << 20);
        assert_eq!(kib(text, "Pss:"), 0);
    }

    #[test]
    fn this_process_uses_memory() {
        assert!(ProcessMemory::now().peak_rss > 1 << 20);
    }
}
