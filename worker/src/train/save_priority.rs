//! A save beside the training gives way to it.
#![allow(unsafe_code, reason = "the priority of a thread")]

/// The lowest: a save takes what the training leaves of a processor, and at least a hundredth or so.
const NICE: i32 = 19;

/// Lowers the priority of the calling thread, and of no other. Where the system refuses, the save is no worse for it.
pub(super) fn give_way() {
    // SAFETY: no memory is involved. On Linux, `0` is the calling thread, not its process.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_gives_way() {
        // SAFETY: no memory is involved.
        let own = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = own();
        let lowered = std::thread::spawn(move || {
            give_way();
            own()
        });
        assert_eq!(lowered.join().unwrap(), NICE);
        assert_eq!(own(), before);
    }
}
