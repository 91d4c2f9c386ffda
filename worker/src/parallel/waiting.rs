//! Waiting for communication, and the account of it: the one place where a step's exposed time is measured.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Ledger;
use crate::collective::{Work, WorkError};
use crate::device::{Device, Event, Stream};
use crate::timeline::{Kind, Lane, Timeline};

/// Time that communication took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SyncTimes {
    /// In collective operations, waiting for other ranks included.
    pub comm: Duration,
    /// The part that nothing else hid: for which the host was blocked, or, on a device that runs asynchronously, the
    /// stream that computes stood still.
    pub exposed: Duration,
}

impl std::ops::AddAssign for SyncTimes {
    fn add_assign(&mut self, other: Self) {
        self.comm += other.comm;
        self.exposed += other.exposed;
    }
}

/// Name of a span in which nothing happens.
const STANDS: &str = "waits for communication";

/// Shorter is not worth a span: what was waited for had come already.
const SHORTEST: Duration = Duration::from_micros(5);

/// See the module.
pub(super) struct Waiting {
    device: Arc<dyn Device>,
    timeline: Timeline,
    account: Mutex<Account>,
}

#[derive(Default)]
struct Account {
    /// What the host saw.
    times: SyncTimes,
    /// Of what is launched now.
    ledger: Ledger,
    /// Nobody has asked how they ended.
    unsettled: Vec<(Work, Ledger)>,
    /// Points of a stream before and behind a wait of it.
    stood: Vec<([Event; 2], Ledger)>,
    failure: Option<WorkError>,
}

impl Waiting {
    /// Of the streams of a device, and of its host.
    pub(super) fn new(device: &Arc<dyn Device>, timeline: &Timeline) -> Self {
        Self {
            device: device.clone(),
            timeline: timeline.clone(),
            account: Mutex::default(),
        }
    }

    /// Issues an operation, whose time and failure are known here from now on. Without an executor of its own it is
    /// carried out in the call.
    pub(super) fn launch(&self, issue: impl FnOnce() -> Work) -> Work {
        let began = Instant::now();
        let work = issue();
        self.blocked_since(began);
        let mut account = self.account();
        let ledger = account.ledger.clone();
        account.unsettled.push((work.clone(), ledger));
        drop(account);
        work
    }

    /// Later operations of `stream`, which computes, run after `event`.
    pub(super) fn in_stream(&self, stream: Stream, event: &Event, deadline: Instant) {
        if !self.device.is_asynchronous() || matches!(event.poll(), Some(Ok(()))) {
            return self.beside(stream, event, deadline);
        }
        let before = self.device.record_timed(stream);
        self.device.wait_event(stream, event, deadline);
        let behind = self.device.record_timed(stream);
        let points = [before.clone(), behind.clone()];
        self.timeline.passed(Lane::Compute, Kind::Wait, STANDS, points);
        let mut account = self.account();
        let ledger = account.ledger.clone();
        account.stood.push(([before, behind], ledger));
    }

    /// The same for a stream beside that one: only a blocked host hides nothing.
    pub(super) fn beside(&self, stream: Stream, event: &Event, deadline: Instant) {
        let began = Instant::now();
        self.device.wait_event(stream, event, deadline);
        self.blocked_since(began);
    }

    /// Blocks the host until `work` is done.
    pub(super) fn on_host(&self, work: &Work, deadline: Instant) -> Result<(), WorkError> {
        let began = Instant::now();
        let outcome = work.wait(deadline);
        self.stood_since(began);
        let mut account = self.account();
        account.times.exposed += began.elapsed();
        if let Err(error) = &outcome {
            account.failure.get_or_insert_with(|| error.clone());
        }
        outcome.map(drop)
    }

    /// Why an operation failed, if one is known to have.
    pub(super) fn settle(&self) -> Result<(), WorkError> {
        let now = Instant::now();
        let mut guard = self.account();
        let account = &mut *guard;
        for (work, ledger) in account.unsettled.extract_if(.., |(work, _)| work.is_done()) {
            match work.wait(now) {
                Ok(times) => {
                    let took = SyncTimes {
                        comm: times.ended.saturating_duration_since(times.started),
                        ..SyncTimes::default()
                    };
                    if self.device.is_asynchronous() {
                        ledger.add(took);
                    } else {
                        account.times += took;
                    }
                }
                Err(error) => {
                    account.failure.get_or_insert(error);
                }
            }
        }
        for ([before, behind], ledger) in account
            .stood
            .extract_if(.., |([_, behind], _)| behind.poll().is_some())
        {
            ledger.add(SyncTimes {
                exposed: behind.state().since(&before).unwrap_or_default(),
                ..SyncTimes::default()
            });
        }
        account.failure.clone().map_or(Ok(()), Err)
    }

    /// As [`Waiting::settle`].
    pub(super) fn failure(&self) -> Option<WorkError> {
        self.settle().err()
    }

    /// What the host saw since they were taken: on a device that runs asynchronously only its own waits, as all else
    /// is in the ledger.
    pub(super) fn times(&self) -> SyncTimes {
        // Whoever asks for the failure is told of it.
        let _ = self.settle();
        self.account().times
    }

    /// The same, and begins a new account.
    pub(super) fn take_times(&self) -> SyncTimes {
        let times = self.times();
        self.account().times = SyncTimes::default();
        times
    }

    /// The account of what was launched since the last call, into which [`Waiting::settle`] writes whatever of it has
    /// ended.
    pub(super) fn take_ledger(&self) -> Ledger {
        std::mem::take(&mut self.account().ledger)
    }

    /// A device that runs asynchronously goes on meanwhile.
    fn blocked_since(&self, began: Instant) {
        if !self.device.is_asynchronous() {
            self.stood_since(began);
            self.account().times.exposed += began.elapsed();
        }
    }

    /// The host, which is what computes unless the device runs asynchronously.
    fn stood_since(&self, began: Instant) {
        let lane = if self.device.is_asynchronous() {
            Lane::Host
        } else {
            Lane::Compute
        };
        let now = Instant::now();
        if now - began >= SHORTEST {
            self.timeline.took(lane, Kind::Wait, STANDS, [began, now]);
        }
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::collective::{Communicator, Executor, Launch, SingleRank, Traffic};
    use crate::device::{Arena, ArenaSpec, Buffer, CpuDevice, DType, DeviceError, EventState};
    use crate::ops::Op;
    use crate::session::Cancel;

    const HELD: Duration = Duration::from_millis(2);

    /// Takes its time to whoever waits for it.
    struct Slow;

    impl EventState for Slow {
        fn poll(&self) -> Option<Result<(), DeviceError>> {
            None
        }

        fn wait(&self, _deadline: Instant) -> Result<(), DeviceError> {
            let end = Instant::now() + HELD;
            while Instant::now() < end {
                std::hint::spin_loop();
            }
            Ok(())
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn solo(executor: Executor) -> Communicator {
        let (transport, timeout) = (Box::new(SingleRank::new(0)), Duration::from_mins(1));
        Communicator::new("solo", transport, executor, timeout, &Cancel::new())
    }

    fn buffer(device: &dyn Device) -> Buffer {
        let spec = ArenaSpec::private("test", DType::F32, 1);
        device.alloc(&spec).unwrap().whole()
    }

    #[test]
    fn whatever_blocks_the_host_is_exposed() {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        let stream = device.stream();
        let waiting = Waiting::new(&device, &Timeline::default());
        let deadline = Instant::now() + Duration::from_mins(1);
        for wait in [Waiting::in_stream, Waiting::beside] {
            wait(&waiting, stream, &Event::new(Slow), deadline);
            assert!(waiting.take_times().exposed >= HELD);
        }
        // An executor that is the caller waits in the call.
        let comm = solo(Executor::Inline);
        let buffer = buffer(device.as_ref());
        let launch = Launch::after(Event::new(Slow), Traffic::Grads, "test");
        let work = waiting.launch(|| comm.all_gather(&buffer, launch));
        assert!(work.is_done() && waiting.times().exposed >= HELD);
        waiting.on_host(&work, deadline).unwrap();
        assert_eq!(waiting.failure(), None);
    }

    /// A point that the device passes [`HELD`] after the one before it, once it runs.
    struct Point(Arc<AtomicBool>);

    impl EventState for Point {
        fn poll(&self) -> Option<Result<(), DeviceError>> {
            self.0.load(Ordering::Relaxed).then_some(Ok(()))
        }

        fn wait(&self, _deadline: Instant) -> Result<(), DeviceError> {
            Ok(())
        }

        fn as_any(&self) -> &dyn Any {
            self
        }

        fn since(&self, _earlier: &Event) -> Option<Duration> {
            Some(HELD)
        }
    }

    /// Takes what its host tells it, and runs it later.
    struct Later(CpuDevice, Arc<AtomicBool>);

    impl Device for Later {
        fn name(&self) -> String {
            "later".into()
        }

        fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
            self.0.alloc(spec)
        }

        fn stream(&self) -> Stream {
            self.0.stream()
        }

        fn enqueue(&self, stream: Stream, op: Op) {
            self.0.enqueue(stream, op);
        }

        fn record(&self, stream: Stream) -> Event {
            self.0.record(stream)
        }

        fn record_timed(&self, _stream: Stream) -> Event {
            Event::new(Point(self.1.clone()))
        }

        fn wait_event(&self, _stream: Stream, _event: &Event, _deadline: Instant) {}

        fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
            self.0.synchronize(stream)
        }

        fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
            self.0.upload(stream, dst, bytes);
        }

        fn is_asynchronous(&self) -> bool {
            true
        }

        fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
            self.0.download(stream, src)
        }
    }

    #[test]
    fn a_stream_that_stands_still_is_exposed_and_one_beside_it_is_not() {
        let runs = Arc::new(AtomicBool::new(true));
        let device: Arc<dyn Device> = Arc::new(Later(CpuDevice::new(1).unwrap(), runs));
        let (stream, deadline) = (device.stream(), Instant::now());
        let waiting = Waiting::new(&device, &Timeline::default());
        let stood = || {
            waiting.settle().unwrap();
            waiting.take_ledger().times()
        };
        for _ in 0..3 {
            waiting.in_stream(stream, &Event::new(Slow), deadline);
        }
        waiting.beside(stream, &Event::new(Slow), deadline);
        assert_eq!(stood().exposed, 3 * HELD);
        // What has happened already costs no stream anything.
        waiting.in_stream(stream, &Event::reached(), deadline);
        assert_eq!(stood(), SyncTimes::default());
        // The host was never blocked.
        assert_eq!(waiting.take_times(), SyncTimes::default());
    }

    #[test]
    fn what_ends_during_a_later_step_is_of_the_step_that_launched_it() {
        let runs = Arc::new(AtomicBool::new(false));
        let device: Arc<dyn Device> = Arc::new(Later(CpuDevice::new(1).unwrap(), runs.clone()));
        let deadline = Instant::now() + Duration::from_mins(1);
        let waiting = Waiting::new(&device, &Timeline::default());
        let comm = solo(Executor::Thread);
        let buffer = buffer(device.as_ref());
        let mut steps = Vec::new();
        for waits in 1..=3 {
            let (input, signal) = Event::pair("input");
            let launch = Launch::after(input, Traffic::Grads, "test");
            let work = waiting.launch(|| comm.all_gather(&buffer, launch));
            for _ in 0..waits {
                waiting.in_stream(device.stream(), work.event(), deadline);
            }
            waiting.settle().unwrap();
            steps.push((work, signal, waiting.take_ledger()));
        }
        runs.store(true, Ordering::Relaxed);
        for (waits, (work, signal, ledger)) in (1..).zip(steps) {
            assert_eq!(ledger.times().comm, Duration::ZERO);
            signal.set(Ok(()));
            let ran = work.wait(deadline).unwrap();
            waiting.settle().unwrap();
            let expected = SyncTimes {
                comm: ran.ended - ran.started,
                exposed: waits * HELD,
            };
            assert_eq!(ledger.times(), expected);
        }
        assert_eq!(waiting.take_times(), SyncTimes::default());
        assert_eq!(waiting.take_ledger().times(), SyncTimes::default());
    }
}
