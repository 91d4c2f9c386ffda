//! Words in shared memory that one rank raises and others wait for.
#![allow(unsafe_code, reason = "the futex system call")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A counter in shared memory with the number of ranks that sleep on it. It wraps; waiters are never more than
/// half its range behind.
#[derive(Clone, Copy)]
pub(super) struct Gate<'a> {
    /// Where the counter stands.
    pub(super) value: &'a AtomicU32,
    /// How many sleep. A rank that dies in its sleep is counted for ever, which only costs a system call.
    pub(super) sleepers: &'a AtomicU32,
}

impl Gate<'_> {
    /// True once the counter has come to `target`. What was written before the raise is visible then.
    pub(super) fn reached(self, target: u32) -> bool {
        reached(self.value.load(Ordering::Acquire), target)
    }

    /// Sets the counter and wakes who sleeps.
    pub(super) fn raise(self, value: u32) {
        // Sequentially consistent with `sleep`: either the sleeper sees the value or we see the sleeper.
        self.value.store(value, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            wake_all(self.value);
        }
    }

    /// Sleeps until the counter may have come to `target`, at most for `bound`.
    pub(super) fn sleep(self, target: u32, bound: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = self.value.load(Ordering::SeqCst);
        if !reached(seen, target) {
            wait(self.value, seen, bound);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// True if a wrapping counter at `value` has come to `target`.
pub(super) fn reached(value: u32, target: u32) -> bool {
    value.wrapping_sub(target) as i32 >= 0
}

fn wait(word: &AtomicU32, seen: u32, bound: Duration) {
    let bound = libc::timespec {
        tv_sec: bound.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(bound.subsec_nanos()),
    };
    // SAFETY: the word and the bound outlive the call; the kernel only reads them. Every result, a time-out
    // included, means "look again".
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            seen,
            &raw const bound,
        );
    }
}

fn wake_all(word: &AtomicU32) {
    // SAFETY: the word outlives the call; the kernel uses its address only.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeper_is_woken_and_counters_wrap() {
        let (value, sleepers) = (AtomicU32::new(u32::MAX), AtomicU32::new(0));
        let gate = Gate {
            value: &value,
            sleepers: &sleepers,
        };
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| {
                while !gate.reached(1) {
                    gate.sleep(1, Duration::from_secs(10));
                }
            });
            gate.raise(0);
            gate.raise(1);
            sleeper.join().unwrap();
        });
        assert!(gate.reached(u32::MAX) && !gate.reached(2));
        assert_eq!(sleepers.load(Ordering::SeqCst), 0);
    }
}
