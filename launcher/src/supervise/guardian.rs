//! A process that outlives the launcher by moments, to kill the workers of a launcher that was killed.
//!
//! It is forked before any thread exists and holds one end of a socket pair. The launcher, and every worker
//! between `fork` and `exec`, announces a worker's session on the other end. End of file means that the
//! launcher is gone without a word: the guardian then kills the workers' control group where there is one, every
//! announced session, and every process that carries the launcher's marker, until none is left.
#![expect(unsafe_code, reason = "fork, and a descriptor used between fork and exec")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read, Write as _};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use ddp_proto::client::{Access, AgentIdentity, Client};
use ddp_proto::env::DDP_JOB_MARKER;
use ddp_proto::ids::{Generation, NodeId};
use ddp_proto::rendezvous::Leave;
use ddp_proto::trust::token::Token;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::waitpid;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{ForkResult, Pid, fork};

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::cgroup;
use crate::supervise::sweep::KillTargets;

/// How long the guardian hunts before it gives up on processes that cannot be killed.
const HUNT_BOUND: Duration = Duration::from_secs(20);
/// How long a launcher that ends waits for its guardian to go.
const FAREWELL_BOUND: Duration = Duration::from_secs(2);

/// A daemon that does not answer within this time learns of the end by itself.
const NOTICE_BOUND: Duration = Duration::from_secs(3);

const WATCH: u8 = b'+';
const FORGET: u8 = b'-';
const DEADLINE: u8 = b'd';
const NOTICE: u8 = b'n';
const QUIT: u8 = b'q';
const RECORD_BYTES: usize = 5;
/// In which a deadline is counted.
const DEADLINE_TICK: Duration = Duration::from_millis(10);
/// How often the guardian looks at the clock that counts the sleep of the machine.
const DEADLINE_POLL: Duration = Duration::from_millis(200);

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
    /// In ticks, as the guardian knows it.
    deadline: AtomicI32,
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
                deadline: AtomicI32::new(i32::MAX),
            }),
            ForkResult::Child => {
                drop(socket);
                let watch = Watch {
                    socket: guardians_end,
                    launcher_id,
                    scratch_dir,
                    group,
                    sessions: BTreeSet::new(),
                    deadline: None,
                    notice: None,
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

    /// The guardian kills the workers at this time since boot, which counts the sleep of the machine, though the launcher
    /// may be stopped; `None`: it does not.
    pub(crate) fn set_deadline(&self, at: Option<Duration>) {
        let ticks = at.and_then(|at| i32::try_from(at.as_millis() / DEADLINE_TICK.as_millis()).ok());
        let ticks = ticks.unwrap_or(i32::MAX);
        if self.deadline.swap(ticks, Ordering::Relaxed) != ticks {
            send_record(self.socket.as_raw_fd(), DEADLINE, ticks);
        }
    }

    /// The guardian sends this when the launcher has died and the workers are gone.
    pub(crate) fn set_notice(&self, notice: &DeathNotice) -> io::Result<()> {
        let notice = serde_json::to_vec(notice)?;
        let bytes = i32::try_from(notice.len()).map_err(io::Error::other)?;
        let mut message = vec![NOTICE];
        message.extend(bytes.to_le_bytes());
        message.extend(notice);
        // No worker announces itself before: in one write it stays whole all the same.
        (&self.socket).write_all(&message)
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
    /// Until when the workers may live, as time since boot.
    deadline: Option<Duration>,
    notice: Option<DeathNotice>,
}

impl Watch {
    fn run(mut self) {
        self.detach();
        let mut record = [0; RECORD_BYTES];
        while self.await_record() && self.socket.read_exact(&mut record).is_ok() {
            let session = i32::from_le_bytes([record[1], record[2], record[3], record[4]]);
            match record[0] {
                WATCH => drop(self.sessions.insert(session)),
                FORGET => drop(self.sessions.remove(&session)),
                DEADLINE => {
                    let ticks = u32::try_from(session).ok().filter(|_| session != i32::MAX);
                    self.deadline = ticks.map(|ticks| DEADLINE_TICK * ticks);
                }
                NOTICE => {
                    let mut notice = vec![0; usize::try_from(session).unwrap_or(0)];
                    if self.socket.read_exact(&mut notice).is_err() {
                        break;
                    }
                    self.notice = serde_json::from_slice(&notice).ok();
                }
                QUIT => return,
                _ => {}
            }
        }
        self.kill_workers(HUNT_BOUND);
        // No process is left to report to.
        if let Some(group) = &self.group {
            let _ = cgroup::remove(group);
        }
        let _ = fs::remove_dir_all(&self.scratch_dir);
        if let Some(notice) = self.notice.take() {
            notice.send();
        }
    }

    /// Waits for a record, or for the end of the launcher. False if that cannot be waited for.
    ///
    /// While the deadline is over, workers are killed: also those that a launcher starts which was stopped until then.
    fn await_record(&self) -> bool {
        loop {
            let is_over = self.deadline.is_some_and(|deadline| deadline <= since_boot());
            if is_over && !self.sessions.is_empty() {
                self.kill_workers(DEADLINE_POLL);
            }
            let timeout = match self.deadline {
                Some(_) => PollTimeout::try_from(DEADLINE_POLL).unwrap_or(PollTimeout::MAX),
                None => PollTimeout::NONE,
            };
            let mut sockets = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            match poll(&mut sockets, timeout) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return true,
                Err(_) => return false,
            }
        }
    }

    fn kill_workers(&self, bound: Duration) {
        if let Some(group) = &self.group {
            cgroup::kill_members(group);
        }
        let targets = KillTargets::Launcher {
            sessions: &self.sessions,
            launcher_id: &self.launcher_id,
        };
        targets.kill_all(bound);
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

/// What the guardian tells the daemon when the launcher died and the workers are gone, so that other nodes take their
/// places at once: where the daemon is, and which node it knows.
#[derive(Serialize, Deserialize)]
pub(crate) struct DeathNotice {
    pub(crate) endpoint: String,
    /// None on a Unix socket, or with `--insecure`.
    pub(crate) token: Option<String>,
    pub(crate) job_id: String,
    pub(crate) incarnation: String,
}

impl DeathNotice {
    /// Tells the daemon, from a process without threads.
    pub(crate) fn send(self) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        if let Ok(runtime) = runtime {
            // The daemon waits for the end of the workers where it is not told.
            let _ = runtime.block_on(async { tokio::time::timeout(NOTICE_BOUND, self.deliver()).await });
        }
    }

    async fn deliver(self) -> Option<()> {
        let access = match self.token {
            Some(token) => Access::Token(Token::parse(&token).ok()?),
            None => Access::Open,
        };
        let client = Client::connect(&self.endpoint, &access, Instant::now() + NOTICE_BOUND)
            .await
            .ok()?;
        let identity = AgentIdentity {
            job_id: self.job_id,
            incarnation: NodeId(self.incarnation),
        };
        let mut attempts = client.attempts(NOTICE_BOUND);
        let stream = client.agent_stream(identity, &mut attempts).await.ok()?;
        let leave = Leave {
            launcher_died: true,
            ..Leave::default()
        };
        stream
            .leave(Generation(0), leave, Instant::now() + NOTICE_BOUND)
            .await
            .then_some(())
    }
}

/// Time since the machine was started, its sleep included.
pub(crate) fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
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
