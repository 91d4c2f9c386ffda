//! A save beside the training gives way to it.
#![allow(unsafe_code, reason = "the priority of a thread")]

/// A third of a thread of the training: low enough to give way, high enough that a machine which is busy with
/// something else does not hold up a save that the end of a run waits for.
const NICE: i32 = 5;

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
