//! Notices that this process was suspended: by a signal, or with its machine.
//!
//! The daemon gives up a node that is suspended for longer than a lease, and cannot tell it so meanwhile. When the node
//! runs again, the daemon may have ended with the job: then no message would ever arrive.

use std::io::{self, ErrorKind};
use std::time::Duration;

use ddp_proto::client::Client;
use nix::time::{ClockId, clock_gettime};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

/// How long a daemon has to refuse connections to count as gone: one that is started anew is back by then, or its
/// node is given up all the same.
pub(super) const REFUSED_FOR: Duration = Duration::from_secs(3);
/// Pause between two attempts.
const PROBE_PAUSE: Duration = Duration::from_millis(250);
/// How long one attempt may take.
const PROBE_BOUND: Duration = Duration::from_secs(1);

/// Tells how long ago the last heartbeat was sent.
#[derive(Debug)]
pub(super) struct HeartbeatClock {
    /// When that was: the daemon counts the lease from a little later.
    last: Duration,
    /// The daemon's; none while it is not known.
    pub(super) lease: Option<Duration>,
}

impl HeartbeatClock {
    /// From now on, a time of [`since_boot`].
    pub(super) fn start(now: Duration) -> Self {
        Self {
            last: now,
            lease: None,
        }
    }

    /// A heartbeat is sent.
    pub(super) fn beat(&mut self, now: Duration) {
        self.last = now;
    }

    /// How long no heartbeat was sent, if that is longer than a lease; said once.
    pub(super) fn gap(&mut self, now: Duration) -> Option<Duration> {
        let gap = now.saturating_sub(self.last);
        let is_late = self.lease.is_some_and(|lease| gap > lease);
        if is_late {
            self.last = now;
        }
        is_late.then_some(gap)
    }
}

/// A suspension that was noticed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspension {
    pub(super) gap: Duration,
    noticed: Instant,
}

impl Suspension {
    pub(super) fn of(gap: Duration) -> Self {
        Self {
            gap,
            noticed: Instant::now(),
        }
    }

    /// What breaks within a lease of it may well follow from it.
    pub(super) fn is_recent(&self, lease: Duration) -> bool {
        self.noticed.elapsed() < lease
    }
}

/// Time since the machine was started, its sleep included.
pub(super) fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// Whether every connection to the daemon's address was refused for so long.
pub(super) async fn is_refused(daemon: &Client, so_long: Duration) -> bool {
    let until = Instant::now() + so_long;
    loop {
        let attempt = timeout(PROBE_BOUND, connect(daemon)).await;
        let refused = matches!(&attempt, Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused);
        if !refused || Instant::now() >= until {
            return refused;
        }
        sleep(PROBE_PAUSE).await;
    }
}

async fn connect(daemon: &Client) -> io::Result<TcpStream> {
    TcpStream::connect(daemon.addresses().await?.as_slice()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_what_is_longer_than_a_lease_is_a_suspension() {
        let mut heartbeat_clock = HeartbeatClock::start(100 * SECOND);
        assert_eq!(heartbeat_clock.gap(200 * SECOND), None, "no lease is known yet");
        heartbeat_clock.beat(200 * SECOND);
        heartbeat_clock.lease = Some(9 * SECOND);
        assert_eq!(heartbeat_clock.gap(209 * SECOND), None);
        assert_eq!(heartbeat_clock.gap(220 * SECOND), Some(20 * SECOND));
        assert_eq!(heartbeat_clock.gap(220 * SECOND), None);
    }

    /// The daemon knows of heartbeats only: a launcher that was busy until it was stopped was silent for longer
    /// than the suspension took.
    #[test]
    fn what_came_after_the_last_heartbeat_does_not_shorten_a_suspension() {
        let mut heartbeat_clock = HeartbeatClock::start(100 * SECOND);
        heartbeat_clock.lease = Some(9 * SECOND);
        heartbeat_clock.beat(200 * SECOND);
        assert_eq!(heartbeat_clock.gap(203 * SECOND), None, "a message of a worker");
        assert_eq!(heartbeat_clock.gap(210 * SECOND), Some(10 * SECOND));
    }

    #[test]
    fn the_clock_goes_on() {
        let before = since_boot();
        assert!(!before.is_zero() && since_boot() >= before);
    }

    #[tokio::test]
    async fn a_port_with_a_listener_is_not_refused() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("localhost:{}", listener.local_addr().unwrap().port());
        // No program accepts it, but the kernel does.
        let client = Client::connect(&endpoint, Instant::now() + 10 * SECOND)
            .await
            .unwrap();
        assert!(!is_refused(&client, SECOND).await);
        drop(listener);
        assert!(is_refused(&client, PROBE_PAUSE / 2).await);
    }
}
