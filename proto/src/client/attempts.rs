//! The pace of attempts to reach the daemon, and how a connection to it is set up.

use std::num::NonZeroU16;
use std::time::Duration;

use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

use super::connector::{ATTEMPT_TIMEOUT, Access, Connector, UNIX_PREFIX};
use super::error::{ClientError, Setback, root_cause};

/// First pause between two attempts to reach the daemon; doubled each time.
const BACKOFF_BASE: Duration = Duration::from_millis(20);
/// Longest pause between two attempts.
const BACKOFF_CAP: Duration = Duration::from_secs(2);
/// Time before the deadline that the pauses leave to a last attempt; of a short time a quarter.
const LAST_ATTEMPT: Duration = Duration::from_millis(250);
/// Pings on an idle connection, so that a daemon that vanished without a word is noticed.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a ping may stay unanswered.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Counts attempts to reach a daemon, and paces them.
#[derive(Debug)]
pub struct Attempts {
    endpoint: String,
    begun: Instant,
    deadline: Instant,
    count: u32,
}

impl Attempts {
    pub(super) fn new(endpoint: &str, deadline: Instant) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            begun: Instant::now(),
            deadline,
            count: 0,
        }
    }

    /// When they end.
    pub const fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Pauses before the next stream, after one that broke before the daemon said anything on it, or gives up if there
    /// is no time for one.
    pub async fn broke(&mut self, error: &ClientError) -> Result<(), ClientError> {
        self.failed(Setback::of_stream(error)).await
    }

    /// Deadline of the attempt that begins now.
    pub(super) fn next_deadline(&self) -> Instant {
        self.deadline.min(Instant::now() + ATTEMPT_TIMEOUT)
    }

    /// Pauses before the next attempt, or gives up if there is no time for one.
    pub(super) async fn failed(&mut self, setback: Setback) -> Result<(), ClientError> {
        let now = Instant::now();
        let all = self.deadline.saturating_duration_since(self.begun);
        let left = self.deadline.saturating_duration_since(now);
        let pause = pause_within(
            left,
            LAST_ATTEMPT.min(all / 4),
            backoff(self.count, rand::random_range(0.5..1.0)),
        );
        self.count += 1;
        let Some(pause) = pause else {
            return Err(ClientError::Unreachable {
                endpoint: self.endpoint.clone(),
                waited: now - self.begun,
                attempts: self.count,
                cause: setback.cause,
                hint: setback.hint,
            });
        };
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// The pause, cut to what is `left` before the deadline and its `last` attempt; none if that has been made.
fn pause_within(left: Duration, last: Duration, pause: Duration) -> Option<Duration> {
    let longest = left.checked_sub(last)?;
    (!longest.is_zero()).then(|| pause.min(longest))
}

/// Pause after the attempt with number `attempt` (from 0); `jitter` in 0.5..1 spreads the nodes of a job.
fn backoff(attempt: u32, jitter: f64) -> Duration {
    let factor = 1u32.checked_shl(attempt).unwrap_or(u32::MAX);
    BACKOFF_BASE
        .saturating_mul(factor)
        .min(BACKOFF_CAP)
        .mul_f64(jitter)
}

/// The daemon behind `host:port`, or at an abstract socket.
pub(super) struct Target {
    endpoint: Endpoint,
    connector: Connector,
}

impl Target {
    pub(super) fn of(endpoint: &str, access: &Access) -> Result<Self, ClientError> {
        if let Some(name) = endpoint.strip_prefix(UNIX_PREFIX) {
            return Ok(Self {
                endpoint: with_patience(Endpoint::from_static("http://localhost")),
                connector: Connector::Unix(name.to_owned()),
            });
        }
        let bad = |cause: String| ClientError::BadEndpoint {
            endpoint: endpoint.to_owned(),
            cause,
        };
        let (host, port) = endpoint
            .rsplit_once(':')
            .ok_or_else(|| bad("the port is missing".into()))?;
        if host.is_empty() {
            return Err(bad("the host is missing".into()));
        }
        let port: NonZeroU16 = port.parse().map_err(|_| bad(format!("`{port}` is not a port")))?;
        let uri = format!("http://{endpoint}");
        let parsed = Endpoint::from_shared(uri).map_err(|error| bad(root_cause(&error)))?;
        Ok(Self {
            endpoint: with_patience(parsed),
            connector: Connector::tcp(host, port.get(), access)?,
        })
    }

    /// One attempt; the channel reconnects when it broke.
    pub(super) async fn connect(&self) -> Result<Channel, tonic::transport::Error> {
        self.endpoint.connect_with_connector(self.connector.clone()).await
    }
}

fn with_patience(endpoint: Endpoint) -> Endpoint {
    endpoint
        .connect_timeout(ATTEMPT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_unknown_name_has_a_message_and_a_hint_of_its_own() {
        let target = Target {
            connector: Connector::tcp("no such name", 29400, &Access::Open).unwrap(),
            ..Target::of("node0:29400", &Access::Open).unwrap()
        };
        let setback = Setback::of(&target.connect().await.unwrap_err());
        let mut attempts = Attempts::new("node0:29400", Instant::now());
        let words = attempts.failed(setback).await.unwrap_err().to_string();
        assert!(
            words.contains("cannot look up the host name `no such name`: ")
                && words.contains("\n  hint: check the name"),
            "{words}"
        );
    }

    #[test]
    fn the_last_pause_is_cut_and_not_dropped() {
        let (second, last) = (Duration::from_secs(1), LAST_ATTEMPT);
        assert_eq!(pause_within(3 * second, last, second), Some(second));
        assert_eq!(
            pause_within(second, last, 2 * second),
            Some(Duration::from_millis(750))
        );
        assert_eq!(pause_within(last, last, second), None);
        assert_eq!(pause_within(Duration::ZERO, Duration::ZERO, second), None);
    }

    #[test]
    fn the_backoff_grows_to_its_cap() {
        assert_eq!(backoff(0, 1.0), BACKOFF_BASE);
        assert_eq!(backoff(2, 0.5), BACKOFF_BASE * 2);
        assert_eq!(backoff(40, 1.0), BACKOFF_CAP);
    }
}
