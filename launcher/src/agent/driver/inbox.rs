//! Everything the agent listens to.

use std::time::Duration;

use ddp_proto::ids::{Generation, LocalRank};
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, sleep_until};

use super::super::daemon::LinkEvent;
use super::super::machine::ExitReason;
use super::super::signals::{SignalAction, Signals};
use super::super::workers::{Prepared, Threads};
use crate::control::ControlEvent;
use crate::spawn::spawner::SpawnEvent;

/// Events of one kind that may wait for the loop.
const QUEUE: usize = 1024;
/// Interval of heartbeats until the daemon sends its lease.
const FIRST_HEARTBEAT: Duration = Duration::from_secs(1);

/// All event sources of the agent.
pub(super) struct Inbox<'a> {
    signals: &'a mut Signals,
    spawns: mpsc::Receiver<SpawnEvent>,
    control: mpsc::Receiver<ControlEvent>,
    link: mpsc::Receiver<LinkEvent>,
    /// Results of tasks beside the loop.
    results: mpsc::Receiver<LoopEvent>,
    results_sender: mpsc::Sender<LoopEvent>,
    heartbeat: Interval,
    /// When to look for hung workers, if `--hang-timeout` is set.
    watch: Option<Interval>,
    alarm: Option<Instant>,
    /// When the workers have to stop if the daemon stays silent.
    takeover: Option<Instant>,
}

/// One event of the loop.
pub(super) enum LoopEvent {
    Signal(SignalAction),
    Spawn(SpawnEvent),
    Control(ControlEvent),
    Link(LinkEvent),
    /// A heartbeat is due.
    Heartbeat,
    /// Look for hung workers.
    Watch,
    Alarm,
    /// The time that [`Inbox::watch_takeover`] has set is over.
    Replaceable,
    /// The files and pipes of a generation's workers, or the error of making them.
    Prepared(Generation, Box<Result<Prepared, ExitReason>>),
    /// No more control messages of a worker will come.
    ControlDrained(Generation, LocalRank),
    /// The last output of a failed worker was read, with the message of its error file.
    Described(Generation, LocalRank, Option<String>),
    /// The time for the workers to report their state is over; the kernel's list of their threads.
    Answered(Threads),
    /// The sweep is over: processes that cannot be killed, and what the workers left in files.
    Swept(Vec<String>, LeftInFiles),
}

/// What the workers left in files; empty where the file system does not answer.
#[derive(Debug, Default)]
pub(super) struct LeftInFiles {
    /// Messages of the error files.
    pub(super) messages: Vec<(LocalRank, String)>,
    /// The first attempt without log files, where there is a log directory.
    pub(super) free_attempt: Option<u32>,
}

impl<'a> Inbox<'a> {
    /// Opens it, and gives what the spawner and the control socket write to; hung workers are looked for at the interval of
    /// `watch`.
    pub(super) fn open(
        signals: &'a mut Signals,
        link: mpsc::Receiver<LinkEvent>,
        watch: Option<Duration>,
    ) -> (Self, mpsc::Sender<SpawnEvent>, mpsc::Sender<ControlEvent>) {
        let (spawn_sender, spawns) = mpsc::channel(QUEUE);
        let (control_sender, control) = mpsc::channel(QUEUE);
        let (results_sender, results) = mpsc::channel(QUEUE);
        let inbox = Self {
            signals,
            spawns,
            control,
            link,
            results,
            results_sender,
            heartbeat: every(FIRST_HEARTBEAT),
            watch: watch.map(every),
            alarm: None,
            takeover: None,
        };
        (inbox, spawn_sender, control_sender)
    }

    /// Waits for the next event. Cancel safe.
    pub(super) async fn next(&mut self) -> LoopEvent {
        let alarm = self.alarm;
        let ring = sleep_until(alarm.unwrap_or_else(Instant::now));
        let takeover = self.takeover;
        let replaceable = sleep_until(takeover.unwrap_or_else(Instant::now));
        let watch = async {
            match &mut self.watch {
                Some(ticks) => ticks.tick().await,
                None => std::future::pending().await,
            }
        };
        // Cancel safe: every branch keeps what it has not returned. Not biased: a worker that floods the control
        // socket must not starve the rest.
        tokio::select! {
            action = self.signals.next() => LoopEvent::Signal(action),
            Some(event) = self.control.recv() => LoopEvent::Control(event),
            Some(event) = self.spawns.recv() => LoopEvent::Spawn(event),
            Some(result) = self.results.recv() => result,
            Some(event) = self.link.recv() => LoopEvent::Link(event),
            () = ring, if alarm.is_some() => {
                self.alarm = None;
                LoopEvent::Alarm
            }
            () = replaceable, if takeover.is_some() => LoopEvent::Replaceable,
            _ = self.heartbeat.tick() => LoopEvent::Heartbeat,
            _ = watch => LoopEvent::Watch,
        }
    }

    /// Control events that already wait in the queue.
    pub(super) fn waiting_control_events(&mut self) -> Vec<ControlEvent> {
        std::iter::from_fn(|| self.control.try_recv().ok())
            .take(QUEUE)
            .collect()
    }

    /// Runs slow work in a task; its result comes back as an event.
    pub(super) fn expect(&self, work: impl Future<Output = LoopEvent> + Send + 'static) {
        let results = self.results_sender.clone();
        tokio::spawn(async move {
            let result = work.await;
            // The launch may be over.
            let _ = results.send(result).await;
        });
    }

    /// Gives [`LoopEvent::Alarm`] after this time, instead of any set before.
    pub(super) fn arm(&mut self, after: Duration) {
        self.alarm = Some(Instant::now() + after);
    }

    pub(super) fn disarm(&mut self) {
        self.alarm = None;
    }

    /// Gives [`LoopEvent::Replaceable`] after this time, instead of any set before.
    pub(super) fn watch_takeover(&mut self, after: Option<Duration>) {
        self.takeover = after.map(|after| Instant::now() + after);
    }

    /// Changes the interval of heartbeats.
    pub(super) fn beat_every(&mut self, interval: Duration) {
        if !interval.is_zero() && interval != self.heartbeat.period() {
            self.heartbeat = every(interval);
        }
    }
}

/// Ticks from now on; a late tick is not made up for.
fn every(interval: Duration) -> Interval {
    let mut ticks = interval_at(Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
