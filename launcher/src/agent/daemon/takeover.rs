//! Until when the workers of this node may train though the daemon says nothing.

use std::time::Duration;

use ddp_proto::rendezvous::DaemonMessage;
use ddp_proto::rendezvous::daemon_message::Body as Word;

/// Where other nodes can go on without this one, its assignment says how long it may train without the daemon
/// ([`Assignment::takeover_ms`](ddp_proto::rendezvous::Assignment)). All times are of one clock, which counts the sleep of
/// the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakeoverClock {
    /// When the last `Join` was made; the assignment that follows proves that it was received.
    joined: Duration,
    /// When the last message was made that the daemon has received for certain.
    heard: Duration,
    /// None: no node could take the place of this one.
    after: Option<Duration>,
}

impl TakeoverClock {
    /// The agent makes a `Join`.
    pub fn join(&mut self, now: Duration) {
        self.joined = now;
    }

    /// The daemon says this.
    pub fn receive(&mut self, message: &DaemonMessage) {
        match &message.body {
            Some(Word::Assignment(assignment)) => {
                let after = Duration::from_millis(assignment.takeover_ms.into());
                self.after = (!after.is_zero()).then_some(after);
                self.heard = self.heard.max(self.joined);
            }
            Some(Word::Heard(heard)) => self.heard = self.heard.max(Duration::from_millis(heard.sent_ms)),
            _ => {}
        }
    }

    /// How often the daemon has to hear of this node.
    pub fn heartbeat_interval(&self) -> Option<Duration> {
        Some(self.after? / 5)
    }

    /// When the workers are asked to stop: native ones have the rest of the time to save.
    pub fn stops_at(&self) -> Option<Duration> {
        Some(self.heard + self.after? * 2 / 3)
    }

    /// When no worker lives any more. The rest is a margin for clocks that differ, and for the kernel.
    pub fn ends_at(&self) -> Option<Duration> {
        Some(self.heard + self.after? * 9 / 10)
    }
}
