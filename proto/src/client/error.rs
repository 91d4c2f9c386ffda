//! What can go wrong between an agent and its daemon, in words and as exit codes.

use std::error::Error;
use std::time::Duration;

use tonic::{Code, Status};

use crate::exit;
use crate::look_up::LookUpError;
use crate::printable;
use crate::trust::tls::{HandshakeFailure, TlsError};

/// Why the daemon could not be reached, or what it answered instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The endpoint is not `host:port`.
    #[error(
        "rendezvous endpoint `{endpoint}` is not an address: {cause}\n  hint: write it as `host:port`, like `node0:29400`"
    )]
    BadEndpoint {
        /// As given.
        endpoint: String,
        /// What is wrong with it.
        cause: String,
    },
    /// Its host is a name, and there is no thread to look it up.
    #[error(transparent)]
    NoThread(LookUpError),
    /// TLS could not be set up.
    #[error("{0}")]
    Tls(String),
    /// The daemon cannot prove that it is the right one.
    #[error("refused the rendezvous at `{endpoint}`: {cause}\n  hint: {hint}")]
    Untrusted {
        /// Address that was tried.
        endpoint: String,
        /// What it showed.
        cause: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// No connection within the deadline.
    #[error("cannot reach the rendezvous at `{endpoint}` after {:.1} s and {attempts} attempts: {cause}\n  hint: {hint}", .waited.as_secs_f64())]
    Unreachable {
        /// Address that was tried.
        endpoint: String,
        /// How long.
        waited: Duration,
        /// How often.
        attempts: u32,
        /// Last error.
        cause: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// Another server answers at the endpoint.
    #[error(
        "the server at `{endpoint}` is not a rendezvous daemon: {cause}\n  hint: check that this is the address of `ddp-rendezvous serve` or of the node that hosts the rendezvous; a proxy must forward gRPC"
    )]
    Stranger {
        /// Address that was tried.
        endpoint: String,
        /// Its answer.
        cause: String,
    },
    /// The connection broke while it was in use; opening a new stream may help.
    #[error("connection to the rendezvous daemon at `{endpoint}` broke: {cause}")]
    Broken {
        /// Address of the daemon.
        endpoint: String,
        /// What happened.
        cause: String,
    },
    /// The generation that the call speaks of is over.
    #[error("{cause}")]
    Superseded {
        /// The daemon's words: "generation superseded: …".
        cause: String,
    },
    /// The daemon answered a call with an error, or not in time.
    #[error("cannot {what} at the rendezvous daemon `{endpoint}`: {cause}{}", .why.hint())]
    Call {
        /// The call: "store `key`".
        what: String,
        /// Address of the daemon.
        endpoint: String,
        /// The daemon's text, or that there was no answer.
        cause: String,
        /// What kind of error it is.
        why: CallError,
    },
}

/// Why a call failed, as callers tell errors apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The daemon did not answer within the deadline of the call.
    TimedOut,
    /// The daemon does not know the job or its generation: it may have been restarted, before the agent is back.
    Forgotten,
    /// An entry of the store has another value already.
    Conflict,
    /// The daemon has no such job, or does not show it to this caller.
    UnknownJob,
    /// The daemon belongs to one job, and does not serve what an operator asked for.
    NotServed,
    /// The caller may not do this.
    Unauthenticated,
    /// The daemon refused the call for another reason.
    Refused,
}

impl CallError {
    const fn hint(self) -> &'static str {
        match self {
            Self::UnknownJob => "\n  hint: `ddp-rendezvous jobs` lists them",
            _ => "",
        }
    }

    pub(super) const fn of(code: Code) -> Self {
        match code {
            Code::DeadlineExceeded => Self::TimedOut,
            Code::FailedPrecondition => Self::Forgotten,
            Code::AlreadyExists => Self::Conflict,
            Code::NotFound => Self::UnknownJob,
            Code::Unauthenticated | Code::PermissionDenied => Self::Unauthenticated,
            _ => Self::Refused,
        }
    }
}

impl From<TlsError> for ClientError {
    fn from(error: TlsError) -> Self {
        Self::Tls(error.to_string())
    }
}

impl ClientError {
    /// Exit code of a launcher that ends because of this error.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::BadEndpoint { .. } | Self::Tls(_) => exit::USAGE,
            Self::Unreachable { .. } | Self::Stranger { .. } | Self::Broken { .. } => {
                exit::DAEMON_UNREACHABLE
            }
            Self::Untrusted { .. } => exit::REFUSED,
            Self::NoThread(_) | Self::Superseded { .. } => exit::INTERNAL,
            Self::Call { why, .. } => match why {
                CallError::TimedOut => exit::DAEMON_UNREACHABLE,
                CallError::UnknownJob | CallError::NotServed => exit::USAGE,
                CallError::Unauthenticated => exit::REFUSED,
                CallError::Forgotten | CallError::Conflict | CallError::Refused => exit::INTERNAL,
            },
        }
    }

    /// The same error for a call of operators, which names no generation: the daemon has not
    /// [forgotten](CallError::Forgotten) what was asked for, it never serves that.
    pub(super) fn of_operator(mut self) -> Self {
        if let Self::Call { why, .. } = &mut self
            && *why == CallError::Forgotten
        {
            *why = CallError::NotServed;
        }
        self
    }

    /// True if a new stream may help ([`agent_stream`](super::Client::agent_stream) with a deadline).
    pub const fn is_broken(&self) -> bool {
        matches!(self, Self::Broken { .. })
    }
}

/// The answer to a read; `None` where it is that no rank has written the entry yet.
pub(super) fn unless_unwritten<T>(answer: Result<T, Status>) -> Result<Option<T>, Status> {
    match answer {
        Err(status) if status.code() == Code::DeadlineExceeded => Ok(None),
        answer => answer.map(Some),
    }
}

/// True if the status was made on this side because the connection failed, or the daemon is going away.
pub(super) fn is_transport(status: &Status) -> bool {
    status.code() == Code::Unavailable
        || (status.source().is_some() && status.code() != Code::DeadlineExceeded)
}

/// What a status means that ended a stream or came instead of one. A server that is none of ours, or a proxy, knows no
/// such service: its answer 404 means the same.
pub(super) fn broken(endpoint: &str, status: &Status) -> ClientError {
    let (endpoint, cause) = (endpoint.to_owned(), root_cause(status));
    match status.code() {
        Code::Unimplemented => ClientError::Stranger { endpoint, cause },
        _ => ClientError::Broken { endpoint, cause },
    }
}

/// What to do where no server answers at the endpoint.
const IS_IT_THERE: &str = "check that `ddp-rendezvous serve` (or the node that hosts the rendezvous) is running there, that its port is open, and that no other program uses the port";
/// What to do where the endpoint's name leads nowhere.
const IS_IT_KNOWN: &str = "check the name (`getent hosts NAME`), or use an IP address";

/// The library's words where the other side is gone without the end that TLS has. An address of documentation follows.
const TLS_EOF: &str = "without sending TLS close_notify";

/// Why one attempt to reach the daemon failed.
#[derive(Debug)]
pub(super) struct Setback {
    pub(super) cause: String,
    pub(super) hint: &'static str,
    /// The daemon has shown that it is not the right one.
    pub(super) is_distrust: bool,
}

impl Setback {
    /// The daemon did not say a word in time.
    pub(super) fn silence(words: &str) -> Self {
        Self {
            cause: words.to_owned(),
            hint: IS_IT_THERE,
            is_distrust: false,
        }
    }

    /// A stream was opened, and broke before the daemon said anything on it.
    pub(super) fn of_stream(error: &ClientError) -> Self {
        match error {
            ClientError::Broken { cause, .. } | ClientError::Stranger { cause, .. } => Self::silence(cause),
            other => Self::silence(&other.to_string()),
        }
    }

    pub(super) fn of(error: &(dyn Error + 'static)) -> Self {
        let distrust = source_of::<HandshakeFailure>(error).and_then(|failure| failure.hint);
        let hint = source_of::<LookUpError>(error).map_or(IS_IT_THERE, |_| IS_IT_KNOWN);
        Self {
            cause: root_cause(error),
            hint: distrust.unwrap_or(hint),
            is_distrust: distrust.is_some(),
        }
    }

    /// The error for a daemon that is not the right one.
    pub(super) fn untrusted(self, endpoint: &str) -> ClientError {
        ClientError::Untrusted {
            endpoint: endpoint.to_owned(),
            cause: self.cause,
            hint: self.hint,
        }
    }
}

/// The error of this type that is below another one.
pub(super) fn source_of<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    std::iter::successors(Some(error), |&error| error.source()).find_map(|error| error.downcast_ref())
}

/// The innermost words of an error: the layers around it only say "transport error".
pub(super) fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    let words = match error.downcast_ref::<Status>() {
        Some(status) => printable::text(status.message()).into_owned(),
        None => error.to_string(),
    };
    if words.contains(TLS_EOF) {
        return "the rendezvous ended without a goodbye".to_owned();
    }
    words
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_daemon_that_is_killed_has_plain_words() {
        let words = "peer closed connection without sending TLS close_notify: https://docs.rs/rustls";
        let cut = io::Error::new(io::ErrorKind::UnexpectedEof, words);
        let error = broken("node0:29400", &Status::from_error(Box::new(cut)));
        assert_eq!(
            error.to_string(),
            "connection to the rendezvous daemon at `node0:29400` broke: the rendezvous ended without a goodbye"
        );
        assert_eq!(root_cause(&io::Error::other("broken pipe")), "broken pipe");
    }
}
