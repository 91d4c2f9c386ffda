//! Exit codes of `ddp-run`: the same on every node of a job, but for one that leaves an elastic job by a signal and one that
//! gives up on the rendezvous.
//!
//! A failing worker's own code is passed through, and a worker killed by signal `n` gives `128 + n`;
//! the codes below are the launcher's own.

/// All workers ended with 0.
pub const SUCCESS: u8 = 0;
/// Wrong command line or configuration.
pub const USAGE: u8 = 2;
/// The ledger of the rendezvous daemon is damaged: only a person can help.
pub const DAMAGED: u8 = 65;
/// The rendezvous daemon cannot be reached.
pub const DAEMON_UNREACHABLE: u8 = 69;
/// The launcher itself failed: a bug, or the machine refused something essential.
pub const INTERNAL: u8 = 70;
/// This node cannot run its part of a native job any more: a GPU is gone.
pub const NODE_UNFIT: u8 = 71;
/// The folder of a native run is in use by another job.
pub const FOLDER_IN_USE: u8 = 73;
/// What a native run has come to, or what it needs to begin, does not go to its disk.
pub const DISK: u8 = 74;
/// The other nodes did not come in time.
pub const RENDEZVOUS_TIMED_OUT: u8 = 75;
/// The nodes disagree on the job.
pub const NODES_DISAGREE: u8 = 76;
/// The daemon refused this node (authentication).
pub const REFUSED: u8 = 77;
/// An operator closed the job at the daemon.
pub const CLOSED: u8 = 78;
/// A worker that ends with this code says "do not start me again": the job is over, whatever is left of its restarts.
pub const DO_NOT_RESTART: u8 = 93;
/// With these codes the native worker says that restarting the job alone cannot help.
pub const PERMANENT_OF_NATIVE: [u8; 4] = [USAGE, FOLDER_IN_USE, DISK, DO_NOT_RESTART];
/// Stopped by SIGINT.
pub const INTERRUPTED: u8 = 130;
/// Stopped by SIGTERM.
pub const TERMINATED: u8 = 143;

/// Exit code of a process that was killed by `signal`, as shells count it.
pub const fn of_signal(signal: i32) -> u8 {
    (128 + (signal & 0x7f)) as u8
}

#[cfg(test)]
mod tests {
    #[test]
    fn signals_are_counted_as_shells_do() {
        assert_eq!(super::of_signal(9), 137);
        assert_eq!(super::of_signal(2), super::INTERRUPTED);
        assert_eq!(super::of_signal(15), super::TERMINATED);
    }
}
