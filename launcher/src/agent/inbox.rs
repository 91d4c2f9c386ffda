//! Everything the agent listens to.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, sleep_until};

use super::link::LinkEvent;
use super::signals::{Call, Signals};
use super::tasks::TaskResult;
use crate::control::ControlEvent;
use crate::spawn::spawner::SpawnEvent;

/// The ends of all channels that lead to the agent.
pub(super) struct Inbox {
    pub(super) signals: Signals,
    pub(super) spawns: mpsc::Receiver<SpawnEvent>,
    pub(super) control: mpsc::Receiver<ControlEvent>,
    pub(super) link: mpsc::Receiver<LinkEvent>,
    pub(super) task_results: mpsc::Receiver<TaskResult>,
    pub(super) heartbeat: tokio::time::Interval,
    /// When to look for hung workers; none: never.
    pub(super) watch: Option<tokio::time::Interval>,
}

/// What came out of the inbox.
pub(super) enum Mail {
    Signal(Call),
    Spawn(SpawnEvent),
    Control(ControlEvent),
    Link(LinkEvent),
    TaskResult(TaskResult),
    Heartbeat,
    /// Look for hung workers.
    Watch,
    Alarm,
}

impl Inbox {
    /// The next of whatever comes. Cancel safe.
    pub(super) async fn next(&mut self, alarm: Option<Instant>) -> Mail {
        let ring = async {
            match alarm {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let watch = async {
            match &mut self.watch {
                Some(ticks) => ticks.tick().await,
                None => std::future::pending().await,
            }
        };
        // Cancel safe: every branch keeps what it has not returned. Not biased: a worker that floods the control
        // socket must not starve the rest.
        tokio::select! {
            call = self.signals.next() => Mail::Signal(call),
            Some(event) = self.control.recv() => Mail::Control(event),
            Some(event) = self.spawns.recv() => Mail::Spawn(event),
            Some(event) = self.task_results.recv() => Mail::TaskResult(event),
            Some(event) = self.link.recv() => Mail::Link(event),
            () = ring => Mail::Alarm,
            _ = self.heartbeat.tick() => Mail::Heartbeat,
            _ = watch => Mail::Watch,
        }
    }
}

/// Ticks from now on; a late tick is not made up for.
pub(super) fn heartbeat_every(interval: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
