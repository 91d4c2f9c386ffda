//! Everything that can go wrong before the agent takes over, with its exit code.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use ddp_proto::client::ClientError;
use ddp_proto::exit;
use ddp_proto::look_up::LookUpError;
use ddp_proto::trust::tls::TlsError;
use nix::errno::Errno;

use crate::rendezvous::LedgerError;

/// A launch that did not come about. The text is complete: what, which, and a `hint:` line where one helps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CliError {
    /// A file, a key or a variable has a value that is refused, and the text says which.
    #[error("{0}")]
    Config(String),
    /// Another job has the folder of the run.
    #[error("{0}")]
    FolderInUse(String),
    /// The disk of the run's folder takes nothing more.
    #[error("{0}")]
    Disk(String),
    /// A target, or the file of one, that cannot be read.
    #[error("cannot read target `{}`: {source}\n  hint: {hint}", path.display())]
    Target {
        /// Path as given.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
        /// What to write instead.
        hint: String,
    },
    /// Options that exclude or need each other.
    #[error("{problem}\n  hint: {hint}")]
    Conflict {
        /// What contradicts what.
        problem: String,
        /// What to write instead.
        hint: String,
    },
    /// `--nproc-per-node gpu` on a machine without one.
    #[error(
        "`--nproc-per-node`: no GPU is visible: {why}\n  hint: `ddp-train doctor` shows what was found; `--nproc-per-node cpu` uses CPU cores"
    )]
    NoGpu {
        /// What was looked at.
        why: String,
    },
    /// The port of the endpoint is taken by something that is not a daemon.
    #[error(
        "port {port} of rendezvous endpoint `{endpoint}` is in use by a program that is not a ddp-run rendezvous: {found}\n  hint: choose a different port with `--rdzv-endpoint {host}:PORT` on all nodes, or stop the program that uses it (`ss -ltnp 'sport = :{port}'`); if it is a rendezvous, give both the same token; or both `--insecure`, in a network that you trust entirely"
    )]
    PortTaken {
        /// The endpoint in full.
        endpoint: String,
        /// Its host.
        host: String,
        /// Its port.
        port: u16,
        /// What the health check met.
        found: String,
    },
    /// The port of the endpoint is taken by the daemon of another job.
    #[error(
        "cannot use the rendezvous at `{endpoint}`: {why}\n  hint: if this node belongs to that job, give all nodes of a job the same `--rdzv-id`; if it does not, choose a different port with `--rdzv-endpoint {host}:PORT` on all nodes, or start `ddp-rendezvous serve`, which serves any number of jobs"
    )]
    OtherJobsPort {
        /// The endpoint in full.
        endpoint: String,
        /// Its host.
        host: String,
        /// Whose it is.
        why: String,
    },
    /// This node must host the daemon and cannot.
    #[error("cannot host the rendezvous at `{endpoint}`: {source}\n  hint: {hint}")]
    Host {
        /// The endpoint in full.
        endpoint: String,
        /// Why.
        source: std::io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// `ddp-rendezvous serve` cannot take its address.
    #[error("cannot listen on `{address}`: {source}\n  hint: {hint}")]
    Listen {
        /// Address as given.
        address: String,
        /// Why.
        source: std::io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// The system's resolver does not come to an end.
    #[error(
        "looking up the host name `{host}` took longer than {} s\n  hint: `getent hosts {host}` shows whether this machine's name servers respond; or use an address instead of the name", .waited.as_secs_f64()
    )]
    SlowLookUp {
        /// The name.
        host: String,
        /// How long.
        waited: Duration,
    },
    /// There is no thread to look up a host name.
    #[error(transparent)]
    NoThread(LookUpError),
    /// Several nodes without a token.
    #[error(
        "there is no token{}\n  hint: nodes prove to each other with it that they belong together; set DDP_TOKEN or DDP_TOKEN_FILE on all nodes, or copy `~/.config/ddp-run/token` of the node that hosts the rendezvous; `--insecure` does without, in a network that you trust entirely",
        words_of_place(place, *waited)
    )]
    NoToken {
        /// Where it was looked for; empty: nowhere.
        place: String,
        /// How long.
        waited: Duration,
    },
    /// A token that cannot be used.
    #[error("cannot use the token of `{place}`: {problem}")]
    BadToken {
        /// A variable or a file.
        place: String,
        /// Why.
        problem: String,
    },
    /// The token's file cannot be made.
    #[error("cannot make the token file `{}`: {source}\n  hint: set DDP_TOKEN_FILE to a file in a directory that is there, the same on all nodes, or DDP_TOKEN", path.display())]
    MakeToken {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Certificates that cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A call on a daemon failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The default directory for log files cannot be made.
    #[error("cannot create a directory for log files in `{}`: {source}\n  hint: set `--log-dir`, or a different temporary directory with TMPDIR", path.display())]
    TemporaryLogs {
        /// The temporary directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The first thread's stack is too small.
    #[error(
        "the stack is limited to {found} KiB (`ulimit -s`), and ddp-run needs {needed}\n  hint: raise the limit: `ulimit -s 8192`"
    )]
    SmallStack {
        /// The limit, in KiB.
        found: u64,
        /// The smallest that is enough, in KiB.
        needed: u64,
    },
    /// The hard limit of open files is too low.
    #[error(
        "at most {hard} files may be open (`ulimit -Hn`), and a launch of {workers} on this node needs {needed}\n  hint: raise the limit (`ulimit -Hn {needed}` as root, `LimitNOFILE=` in a service, `--ulimit nofile=` for a container), or start fewer workers"
    )]
    TooFewFiles {
        /// The limit.
        hard: u64,
        /// The lowest that is enough.
        needed: u64,
        /// Number of workers, as text.
        workers: String,
    },
    /// The state of the daemon cannot be used.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The machine refused something essential.
    #[error("{what}: {source}{}", hint_of(source))]
    Machine {
        /// What failed.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

impl CliError {
    /// A variable has a value that its flag would refuse.
    pub(super) fn bad_variable(variable: &str, value: &str, message: &str) -> Self {
        Self::Config(format!(
            "environment variable `{variable}` is `{value}`: {message}"
        ))
    }

    /// Names what the machine refused, for `map_err`.
    pub fn machine<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Machine {
            what,
            source: source.into(),
        }
    }

    /// The documented exit code of this class.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Client(error) => error.exit_code(),
            Self::Config(_)
            | Self::Target { .. }
            | Self::Conflict { .. }
            | Self::NoGpu { .. }
            | Self::TemporaryLogs { .. }
            | Self::Tls(_) => exit::USAGE,
            Self::Ledger(LedgerError::Damaged { .. }) => exit::DAMAGED,
            Self::Listen { source, .. } if source.kind() != ErrorKind::AddrInUse => exit::USAGE,
            Self::NoToken { .. } | Self::BadToken { .. } | Self::MakeToken { .. } => exit::REFUSED,
            Self::FolderInUse(_) | Self::Ledger(LedgerError::InUse(_)) => exit::FOLDER_IN_USE,
            Self::Disk(_) => exit::DISK,
            Self::PortTaken { .. } | Self::OtherJobsPort { .. } | Self::Host { .. } | Self::Listen { .. } => {
                exit::DAEMON_UNREACHABLE
            }
            Self::SlowLookUp { .. }
            | Self::NoThread(_)
            | Self::Ledger(LedgerError::Io { .. })
            | Self::Machine { .. }
            | Self::SmallStack { .. }
            | Self::TooFewFiles { .. } => exit::INTERNAL,
        }
    }
}

/// Where a token was looked for.
fn words_of_place(place: &str, waited: Duration) -> String {
    match (place, waited.as_secs_f64()) {
        ("", _) => ": DDP_TOKEN, DDP_TOKEN_FILE and HOME are not set".to_owned(),
        (place, 0.0) => format!(" at `{place}`"),
        (place, waited) => format!(" at `{place}` after {waited:.1} s"),
    }
}

/// What may help where the machine refuses something.
fn hint_of(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(code) if code == Errno::EMFILE as i32 => "\n  hint: check `ulimit -n`",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_no_mistake_of_the_command_line() {
        let error = LedgerError::Io {
            what: "write",
            path: "state/ledger".into(),
            source: Errno::ENOSPC.into(),
        };
        assert_eq!(CliError::from(error).exit_code(), exit::INTERNAL);
        assert_eq!(
            CliError::from(LedgerError::InUse("state".into())).exit_code(),
            exit::FOLDER_IN_USE
        );
    }

    #[test]
    fn a_taken_port_is_no_mistake_of_the_command_line_and_a_foreign_address_is() {
        let code = |kind: ErrorKind| {
            let error = CliError::Listen {
                address: "10.0.0.5:29400".into(),
                source: kind.into(),
                hint: "",
            };
            error.exit_code()
        };
        assert_eq!(code(ErrorKind::AddrInUse), exit::DAEMON_UNREACHABLE);
        assert_eq!(code(ErrorKind::AddrNotAvailable), exit::USAGE);
        assert_eq!(code(ErrorKind::PermissionDenied), exit::USAGE);
    }
}
