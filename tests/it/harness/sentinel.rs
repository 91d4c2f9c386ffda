//! Tells when the last of a family of processes has gone, however its members hide.
//!
//! A worker opens the sentinel's pipe; every descendant inherits it. The kernel says end of file when the
//! last of them is gone: an event, where a look at the process table would race.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;

use super::PATIENCE;

/// A named pipe, its reading end held by the test.
pub(crate) struct Sentinel {
    pipe: File,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Sentinel {
    pub(crate) fn new() -> Self {
        let dir = super::temp_dir();
        let path = dir.path().join("sentinel");
        nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).expect("a named pipe");
        // Without waiting for a writer, and without becoming one.
        let pipe = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(&path);
        Self {
            pipe: pipe.expect("our own pipe"),
            path,
            _dir: dir,
        }
    }

    /// Shell code that makes a worker and all its later children members of the family.
    pub(crate) fn join_script(&self) -> String {
        format!("exec 9>'{}'", self.path.display())
    }

    /// Waits until every member has gone. At least one must have joined before: see to it by an event.
    #[track_caller]
    pub(crate) fn expect_all_gone(mut self) {
        let mut fds = [PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(PATIENCE).expect("a short time");
        let events = poll(&mut fds, limit).expect("a pollable pipe");
        assert!(
            events > 0,
            "processes that should be gone still live after {} s",
            PATIENCE.as_secs()
        );
        let mut nothing = [0; 1];
        assert_eq!(
            self.pipe.read(&mut nothing).expect("a readable pipe"),
            0,
            "members write nothing"
        );
    }
}
