//! A daemon of its own, and ports that no other program takes.

use nix::sys::signal::Signal;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, setsockopt, socket, sockopt,
};
use std::os::fd::{AsRawFd, OwnedFd};

use super::{Finished, Program, Running};

/// `ddp-rendezvous serve` on a free port of the loopback address.
pub(crate) struct Daemon {
    running: Running,
    pub(crate) endpoint: String,
}

impl Daemon {
    #[track_caller]
    pub(crate) fn start() -> Self {
        Self::start_at("127.0.0.1:0")
    }

    /// On the port of one that was killed, for instance.
    #[track_caller]
    pub(crate) fn start_at(address: &str) -> Self {
        Self::start_with(address, &[])
    }

    /// With more flags.
    #[track_caller]
    pub(crate) fn start_with(address: &str, flags: &[&str]) -> Self {
        let args = ["serve", "--listen", address]
            .into_iter()
            .chain(flags.iter().copied());
        let mut running = Program::new(env!("CARGO_BIN_EXE_ddp-rendezvous"))
            .args(args)
            .start();
        let endpoint = running.wait_for("127.0.0.1:");
        Self { running, endpoint }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.running.pid()
    }

    /// Waits for a line of its log.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, pattern: &str) {
        self.running.wait_for(pattern);
    }

    /// Ends it as a crash does.
    #[track_caller]
    pub(crate) fn kill(self) {
        self.running.signal(Signal::SIGKILL);
        self.running.finish().expect_killed_by(Signal::SIGKILL);
    }

    /// Stops it as an operator does.
    #[track_caller]
    pub(crate) fn stop(self) -> Finished {
        self.running.signal(Signal::SIGTERM);
        self.running.finish()
    }
}

/// A port that the kernel gives to no other program, and on which a program with `SO_REUSEADDR` can still listen:
/// bound, but not listening.
pub(crate) struct ReservedPort {
    _socket: OwnedFd,
    pub(crate) endpoint: String,
}

impl ReservedPort {
    pub(crate) fn new() -> Self {
        let socket = socket(
            AddressFamily::Inet,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .expect("a socket");
        setsockopt(&socket, sockopt::ReuseAddr, &true).expect("a socket option");
        bind(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).expect("a free port");
        let address: SockaddrIn = getsockname(socket.as_raw_fd()).expect("a bound socket");
        Self {
            endpoint: format!("127.0.0.1:{}", address.port()),
            _socket: socket,
        }
    }
}
