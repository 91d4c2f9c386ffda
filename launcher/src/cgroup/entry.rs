//! Lets processes into a control group.
//!
//! A process is best born in its group: to move one there makes every `fork`, `exec` and `exit` of the machine wait
//! for a grace period of the kernel, some milliseconds. Linux before 5.7, and containers that forbid `clone3`, leave
//! only that.
#![expect(unsafe_code, reason = "clone3, and a descriptor used between fork and exec")]

use std::io;
use std::os::fd::RawFd;

use nix::errno::Errno;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid};

/// Flag of `clone3`.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// A way into a group, valid as long as the descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CgroupEntry {
    /// Processes are born in the group with this folder.
    Birth(RawFd),
    /// A new process moves itself, by a write to this file.
    Move(RawFd),
}

impl CgroupEntry {
    /// The best way that works into the group with this folder and this file of members. A child tries: the kernel's
    /// rules on who may be in which group are many.
    pub(super) fn find(folder: RawFd, members: RawFd) -> io::Result<Self> {
        if try_entry(Self::Birth(folder)).is_ok() {
            return Ok(Self::Birth(folder));
        }
        try_entry(Self::Move(members)).map(|()| Self::Move(members))
    }

    /// To be called in every process that came from [`fork`]. Async-signal-safe; true if the process is in.
    pub(crate) fn enter(self) -> bool {
        match self {
            Self::Birth(_) => true,
            // SAFETY: the buffer is valid for its length. A bad descriptor gives an error.
            Self::Move(members) => unsafe { libc::write(members, b"0".as_ptr().cast(), 1) == 1 },
        }
    }
}

/// `fork`, into the group that `entry` leads to.
///
/// # Safety
/// The child may make async-signal-safe calls only, and must never return. It may not even allocate: where it is born
/// in a group, the C library has not prepared its locks for the fork.
pub(crate) unsafe fn fork(entry: Option<CgroupEntry>) -> io::Result<ForkResult> {
    let pid = match entry {
        Some(CgroupEntry::Birth(folder)) => {
            // SAFETY: all zeroes ask for nothing.
            let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
            args.flags = CLONE_INTO_CGROUP;
            args.exit_signal = libc::SIGCHLD as u64;
            args.cgroup = folder as u64;
            // SAFETY: without CLONE_VM the child has its own copy of all memory, this stack included. The structure
            // is valid for its size.
            unsafe {
                libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) as libc::pid_t
            }
        }
        // SAFETY: as the caller promises.
        _ => unsafe { libc::fork() },
    };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(ForkResult::Child),
        pid => Ok(ForkResult::Parent {
            child: Pid::from_raw(pid),
        }),
    }
}

fn try_entry(entry: CgroupEntry) -> io::Result<()> {
    // SAFETY: the child makes two async-signal-safe calls and never returns.
    match unsafe { fork(Some(entry)) }? {
        ForkResult::Child => {
            let code = i32::from(!entry.enter());
            // SAFETY: plain system call.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => match wait_for(child)? {
            WaitStatus::Exited(_, 0) => Ok(()),
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        },
    }
}

/// Waits for a child that is about to end.
pub(crate) fn wait_for(child: Pid) -> Result<WaitStatus, Errno> {
    loop {
        match waitpid(child, None) {
            Err(Errno::EINTR) => {}
            outcome => return outcome,
        }
    }
}
