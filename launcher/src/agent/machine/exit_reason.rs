//! The ways in which a launch ends.

use std::{fmt, io};

use ddp_proto::exit;
use ddp_proto::rendezvous::refused::Code;
use ddp_proto::rendezvous::{JobOver, Leave, Refused, WorkerExit};

use crate::output::logs::LogError;
use crate::spawn::program::SpawnError;
use crate::supervise::ending::signal_name;

/// Why the launcher exits.
#[derive(Clone, Debug, PartialEq)]
pub enum ExitReason {
    /// All workers of the job ended with 0.
    Succeeded,
    /// The daemon ended the job: a worker failed for good, or another node was stopped.
    JobOver {
        /// The same on every node.
        exit_code: u8,
        /// In words.
        reason: String,
        /// Why no restart followed, to go on after "it failed, and"; empty where there is nothing to tell.
        no_restart: String,
        /// The first failure of the job, with the host it happened on; boxed, because it is large.
        first_failure: Option<Box<(WorkerExit, String)>>,
        /// The signal that stopped the launcher of another node, if that is why.
        signal: Option<i32>,
    },
    /// A signal stopped this launcher.
    Stopped {
        /// Its number.
        signal: i32,
    },
    /// The daemon refused this node.
    Refused {
        /// Exit code that belongs to the reason.
        exit_code: u8,
        /// In words.
        reason: String,
    },
    /// The daemon cannot be reached, or gives no answer.
    DaemonGone {
        /// Exit code that belongs to the error.
        exit_code: u8,
        /// In words, with the address.
        error: String,
    },
    /// The program cannot be started.
    CannotStart(SpawnError),
    /// The launcher cannot do its work: a directory cannot be written, for instance.
    Broken {
        /// Exit code.
        exit_code: u8,
        /// In words.
        error: String,
    },
}

impl From<SpawnError> for ExitReason {
    fn from(error: SpawnError) -> Self {
        Self::CannotStart(error)
    }
}

impl From<LogError> for ExitReason {
    fn from(error: LogError) -> Self {
        Self::Broken {
            exit_code: exit::USAGE,
            error: error.to_string(),
        }
    }
}

/// The system refused something while the launcher was set up.
impl From<io::Error> for ExitReason {
    fn from(error: io::Error) -> Self {
        // Of all that is set up, only a thread is refused for now.
        Self::internal(match error.raw_os_error() {
            Some(libc::EAGAIN) => format!(
                "cannot start a thread: {error}\n  hint: raise `ulimit -u`, and the pids limit of the control group if \
                 there is one"
            ),
            Some(libc::EMFILE) => format!("cannot set up the launcher: {error}\n  hint: check `ulimit -n`"),
            _ => format!("cannot set up the launcher: {error}"),
        })
    }
}

/// The cause in words, for the workers and the daemon.
impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Succeeded => f.write_str("the job has ended"),
            Self::Stopped { signal } => f.write_str(&signal_name(*signal)),
            Self::CannotStart(error) => error.fmt(f),
            Self::JobOver { reason: words, .. }
            | Self::Refused { reason: words, .. }
            | Self::DaemonGone { error: words, .. }
            | Self::Broken { error: words, .. } => f.write_str(words),
        }
    }
}

impl ExitReason {
    /// The launcher itself failed.
    pub(in crate::agent) fn internal(error: String) -> Self {
        let exit_code = exit::INTERNAL;
        Self::Broken { exit_code, error }
    }

    /// The good-bye to the daemon when this ends the agent: a signal or a failed start ends the whole job. A daemon that
    /// took the place of the one that has ended the job learns how.
    pub(super) fn farewell(&self) -> Leave {
        match self {
            Self::CannotStart(_) | Self::JobOver { .. } | Self::Broken { .. } => Leave {
                reason: self.to_string(),
                exit_code: Some(i32::from(self.exit_code())),
                ..Leave::default()
            },
            Self::Stopped { signal } => Leave {
                signal: Some(*signal),
                ..Leave::default()
            },
            _ => Leave::default(),
        }
    }

    /// All workers are well until they are asked to stop, and native ones save: not those of a node that the job went
    /// on without.
    pub(super) const fn leaves_time_to_save(&self) -> bool {
        matches!(
            self,
            Self::Stopped { .. }
                | Self::DaemonGone {
                    exit_code: exit::DAEMON_UNREACHABLE,
                    ..
                }
        )
    }

    /// The daemon's last word on the job.
    pub(super) fn of_job_over(over: JobOver) -> Self {
        if over.exit_code == i32::from(exit::SUCCESS) {
            return Self::Succeeded;
        }
        Self::JobOver {
            // A code beyond a byte cannot be passed on; it must not become success.
            exit_code: u8::try_from(over.exit_code).unwrap_or(exit::INTERNAL),
            reason: over.reason,
            no_restart: over.no_restart,
            first_failure: over
                .first_failure
                .map(|failure| Box::new((failure, over.first_failure_host))),
            signal: over.signal,
        }
    }

    /// The daemon does not take this node.
    pub(super) fn of_refusal(refused: Refused) -> Self {
        let exit_code = match refused.code() {
            Code::Disagree => exit::NODES_DISAGREE,
            Code::TimedOut | Code::JobOver => exit::RENDEZVOUS_TIMED_OUT,
            Code::Invalid => exit::USAGE,
            Code::Unspecified => exit::INTERNAL,
        };
        Self::Refused {
            exit_code,
            reason: refused.reason,
        }
    }

    /// The first failure of the job, and the host it happened on.
    pub(crate) fn first_failure(&self) -> Option<(&WorkerExit, &str)> {
        match self {
            Self::JobOver { first_failure, .. } => {
                let (failure, host) = first_failure.as_deref()?;
                Some((failure, host))
            }
            _ => None,
        }
    }

    /// The signal that stopped this launcher, or another one of the job.
    pub(crate) const fn signal(&self) -> Option<i32> {
        match self {
            Self::Stopped { signal } => Some(*signal),
            Self::JobOver { signal, .. } => *signal,
            _ => None,
        }
    }

    /// Exit code of the launcher.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Succeeded => exit::SUCCESS,
            Self::Stopped { signal } => exit::of_signal(*signal),
            Self::CannotStart(error) => error.exit_code(),
            Self::JobOver { exit_code, .. }
            | Self::Refused { exit_code, .. }
            | Self::DaemonGone { exit_code, .. }
            | Self::Broken { exit_code, .. } => *exit_code,
        }
    }
}
