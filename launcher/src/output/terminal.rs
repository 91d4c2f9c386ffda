//! The terminal that a worker is given: left as it was found.

use std::io;

use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{getpgrp, tcgetpgrp};

/// The settings of the terminal that standard input is.
pub(crate) struct TerminalSettings(Termios);

impl TerminalSettings {
    /// The present ones; none if standard input is no terminal.
    pub(crate) fn read() -> Option<Self> {
        tcgetattr(io::stdin()).ok().map(Self)
    }

    /// Puts them back: a worker that was killed while it edited a line leaves a terminal that does not echo. In the
    /// background the terminal belongs to another process.
    pub(crate) fn restore(&self) {
        let stdin = io::stdin();
        let is_changed = tcgetattr(&stdin).is_ok_and(|now| now != self.0);
        if is_changed && tcgetpgrp(&stdin) == Ok(getpgrp()) {
            // The terminal has gone, if this fails.
            let _ = tcsetattr(&stdin, SetArg::TCSANOW, &self.0);
        }
    }
}
