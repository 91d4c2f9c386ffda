//! How a process ended, in numbers for the protocol and in words for people.

use std::fmt;

use ddp_proto::rendezvous;
use nix::sys::signal::Signal;

/// The end of one process as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It called `exit` with this code.
    Code(i32),
    /// It was killed.
    Signal {
        /// Number of the signal.
        signal: i32,
        /// A core file was written.
        core_dumped: bool,
    },
}

impl Ending {
    /// True for exit code 0.
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }

    /// The end that a message of the protocol speaks of; a message without either is an unknown failure.
    pub fn of_message(exit: &rendezvous::WorkerExit) -> Self {
        match exit.signal {
            Some(signal) => Self::Signal {
                signal,
                core_dumped: exit.core_dumped,
            },
            None => Self::Code(exit.exit_code.unwrap_or(1)),
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal { signal, core_dumped } => {
                write!(f, "died of {}", signal_name(*signal))?;
                if *core_dumped {
                    f.write_str(" (core dumped)")?;
                }
                Ok(())
            }
        }
    }
}

/// `SIGKILL` for 9; real-time signals have no name.
pub fn signal_name(signal: i32) -> String {
    Signal::try_from(signal).map_or_else(
        |_| format!("signal {signal}"),
        |signal| signal.as_str().to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_by_name() {
        let killed = Ending::Signal {
            signal: 9,
            core_dumped: false,
        };
        assert_eq!(killed.to_string(), "died of SIGKILL");
        let crashed = Ending::Signal {
            signal: 11,
            core_dumped: true,
        };
        assert_eq!(crashed.to_string(), "died of SIGSEGV (core dumped)");
        assert_eq!(Ending::Code(42).to_string(), "exited with code 42");
        let real_time = Ending::Signal {
            signal: 40,
            core_dumped: false,
        };
        assert_eq!(real_time.to_string(), "died of signal 40");
    }
}
