//! A process that outlives the launcher by moments, to kill the workers of a launcher that was killed.
//!
//! It is forked before any thread exists and holds one end of a socket pair. The launcher, and every worker
//! between `fork` and `exec`, announces a worker's session on the other end. End of file means that the
//! launcher is gone without a word: the guardian then kills the workers' control group where there is one, every
//! announced session, and every process that carries the launcher's marker, until none is left.
#![expect(unsafe_code, reason = "fork, and a descriptor used between fork and exec")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ddp_proto::env::DDP_JOB_MARKER;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};

use crate::cgroup;
use crate::supervise::sweep::KillTargets;

/// How long the guardian hunts before it gives up on processes that cannot be killed.
const HUNT_BOUND: Duration = Duration::from_secs(20);
/// How long a launcher that ends waits for its guardian to go.
const FAREWELL_BOUND: Duration = Duration::from_secs(2);

const WATCH: u8 = b'+';
const FORGET: u8 = b'-';
const QUIT: u8 = b'q';
const RECORD_BYTES: usize = 5;

/// The launcher's side of its guardian.
///
/// Dropping it without [`Guardian::shutdown`] is what a crash looks like: the guardian kills all workers.
#[derive(Debug)]
pub struct Guardian {
    pid: Pid,
    socket: UnixStream,
    launcher_id: String,
    marker: String,
    scratch_dir: PathBuf,
    group: Option<PathBuf>,
}

impl Guardian {
    /// Forks the guardian. Must be the first thing in `main`: no thread and no runtime may exist yet.
    pub fn fork() -> io::Result<Self> {
        // If our parent process ignored it, the kernel would reap all children before they can be waited for.
        // SAFETY: the default disposition runs no code.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        let launcher_id = format!("ddp-{}-{:016x}", std::process::id(), rand::random::<u64>());
        let marker = nested(std::env::var(DDP_JOB_MARKER).ok().as_deref(), &launcher_id);
        let group = cgroup::parent_of_workers().ok().map(|own| own.join(&launcher_id));
        let scratch_dir = scratch_dir(&std::env::temp_dir(), &marker)?;
        let (socket, guardians_end) = UnixStream::pair()?;
        // SAFETY: by contract no other thread exists, so the child may use the whole of std; it never returns.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(Self {
                pid: child,
                socket,
                launcher_id,
                marker,
                scratch_dir,
                group,
            }),
            ForkResult::Child => {
                drop(socket);
                let watch = Watch {
                    socket: guardians_end,
                    launcher_id,
                    scratch_dir,
                    group,
                    sessions: BTreeSet::new(),
                };
                let watch = AssertUnwindSafe(|| watch.run());
                let _ = std::panic::catch_unwind(watch);
                // SAFETY: plain system call; the destructors of the copied launcher must not run.
                unsafe { libc::_exit(0) }
            }
        }
    }

    /// Sends the guardian away and reaps it. To be called when no worker is left.
    pub fn shutdown(self) -> io::Result<()> {
        send_record(self.socket.as_raw_fd(), QUIT, 0);
        self.socket.set_read_timeout(Some(FAREWELL_BOUND))?;
        // It closes its end when it goes; a guardian that died earlier has closed it already.
        if (&self.socket).read(&mut [0]).is_err() {
            nix::sys::signal::kill(self.pid, nix::sys::signal::Signal::SIGKILL)?;
        }
        match waitpid(self.pid, None) {
            Ok(_) | Err(nix::errno::Errno::ECHILD) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Process id of the guardian.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw()
    }

    /// Unique name of this launcher: its incarnation at the daemon.
    pub fn launcher_id(&self) -> &str {
        &self.launcher_id
    }

    /// Value of `DDP_JOB_MARKER` for the workers.
    pub(crate) fn marker(&self) -> &str {
        &self.marker
    }

    /// Where the workers' control group is to be, if one can be made.
    pub(crate) fn group(&self) -> Option<&Path> {
        self.group.as_deref()
    }

    /// Directory for files of workers that have no log directory; removed with the launcher.
    pub(crate) fn scratch_dir(&self) -> &Path {
        &self.scratch_dir
    }

    /// The handle with which workers are announced, usable between `fork` and `exec`.
    pub(crate) fn registrar(&self) -> Registrar {
        Registrar {
            socket: self.socket.as_raw_fd(),
        }
    }

    /// A worker's session is gone, and its number may be used again by others.
    pub(crate) fn forget(&self, session: i32) {
        self.registrar().forget(session);
    }
}

/// Announces workers, and their ends, to the guardian. Valid as long as the [`Guardian`] it came from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registrar {
    socket: RawFd,
}

impl Registrar {
    /// The guardian shall kill this session when the launcher is gone. Async-signal-safe.
    pub(crate) fn watch(self, session: i32) {
        send_record(self.socket, WATCH, session);
    }

    /// The session is gone, and its number may be used again by others.
    pub(crate) fn forget(self, session: i32) {
        send_record(self.socket, FORGET, session);
    }

    /// Announces to the process at the other end.
    #[cfg(test)]
    pub(crate) fn to(socket: &UnixStream) -> Self {
        Self {
            socket: socket.as_raw_fd(),
        }
    }
}

/// Never blocks and never raises SIGPIPE: a guardian that is dead or stuck must not take the launcher along.
fn send_record(socket: RawFd, tag: u8, session: i32) {
    let mut record = [tag; RECORD_BYTES];
    record[1..].copy_from_slice(&session.to_le_bytes());
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the buffer is valid for its length. A bad descriptor gives an error, which is ignored by design.
    unsafe { libc::send(socket, record.as_ptr().cast(), record.len(), flags) };
}

/// The marker of a launcher that may itself be a worker of an outer one, so that the outer one's guardian finds
/// the workers of the inner one too. What does not look like a marker is not continued.
fn nested(outer: Option<&str>, launcher_id: &str) -> String {
    let is_id = |id: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        id.starts_with("ddp-") && id.bytes().all(plain)
    };
    match outer {
        Some(outer) if outer.split('/').all(is_id) => format!("{outer}/{launcher_id}"),
        _ => launcher_id.to_owned(),
    }
}

/// As a marker names the outer launchers too, the directory lies in theirs, and goes with it. The guardian and the
/// workers have directories of their own: the path has to be absolute.
fn scratch_dir(temp_dir: &Path, marker: &str) -> io::Result<PathBuf> {
    std::path::absolute(temp_dir.join(marker))
}

/// The guardian's own side.
struct Watch {
    socket: UnixStream,
    launcher_id: String,
    scratch_dir: PathBuf,
    group: Option<PathBuf>,
    sessions: BTreeSet<i32>,
}

impl Watch {
    fn run(mut self) {
        self.detach();
        let mut record = [0; RECORD_BYTES];
        while self.socket.read_exact(&mut record).is_ok() {
            let session = i32::from_le_bytes([record[1], record[2], record[3], record[4]]);
            match record[0] {
                WATCH => drop(self.sessions.insert(session)),
                FORGET => drop(self.sessions.remove(&session)),
                QUIT => return,
                _ => {}
            }
        }
        if let Some(group) = &self.group {
            cgroup::kill_members(group);
        }
        let targets = KillTargets::Launcher {
            sessions: &self.sessions,
            launcher_id: &self.launcher_id,
        };
        targets.kill_all(HUNT_BOUND);
        // No process is left to report to.
        if let Some(group) = &self.group {
            let _ = cgroup::remove(group);
        }
        let _ = fs::remove_dir_all(&self.scratch_dir);
    }

    /// Lets go of all that is the launcher's: terminal, signals, directory, descriptors.
    fn detach(&mut self) {
        // It cannot be a group leader right after the fork, so this cannot fail.
        let _ = nix::unistd::setsid();
        let ignored = [
            libc::SIGINT,
            libc::SIGTERM,
            libc::SIGHUP,
            libc::SIGQUIT,
            libc::SIGTSTP,
            libc::SIGTTIN,
            libc::SIGTTOU,
            libc::SIGPIPE,
            libc::SIGUSR1,
            libc::SIGUSR2,
        ];
        for signal in ignored {
            // SAFETY: SIG_IGN is a valid disposition for each of these.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        // Names it in `ps`; best effort.
        let _ = nix::sys::prctl::set_name(c"ddp-guardian");
        let _ = std::env::set_current_dir("/");
        close_all_but(self.socket.as_raw_fd());
        for _ in 0..3 {
            // SAFETY: plain system call with a constant path. Descriptors 0 to 2 stay taken, so that no file
            // opened later becomes a program's standard output.
            unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) };
        }
    }
}

/// Closes all descriptors but one.
fn close_all_but(kept: RawFd) {
    let open: Vec<RawFd> = fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|fd| *fd != kept)
        .collect();
    for fd in open {
        // SAFETY: this process uses no other descriptor any more. That of the directory just read is closed already,
        // which only gives EBADF.
        unsafe { libc::close(fd) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_temporary_directory_is_meant_from_here() {
        let here = std::env::current_dir().unwrap();
        for (temp_dir, expected) in [
            ("", here.clone()),
            ("tmp", here.join("tmp")),
            ("/tmp", "/tmp".into()),
        ] {
            let found = scratch_dir(Path::new(temp_dir), "ddp-1").unwrap();
            assert_eq!(found, expected.join("ddp-1"), "{temp_dir:?}");
        }
    }

    #[test]
    fn markers_name_the_outer_launchers_too() {
        assert_eq!(nested(None, "ddp-2"), "ddp-2");
        assert_eq!(nested(Some("ddp-0/ddp-1"), "ddp-2"), "ddp-0/ddp-1/ddp-2");
        for strange in ["", "/", "../x", "/etc", "ddp-1/../../x", "ddp-1/"] {
            assert_eq!(nested(Some(strange), "ddp-2"), "ddp-2", "{strange}");
        }
    }
}
