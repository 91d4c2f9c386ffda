//! Waiting for communication, and measuring it: the one place that knows a step's exposed time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::collective::{Work, WorkError};
use crate::device::{Device, DeviceError, Event, Stream};
use crate::timeline::{Interval, Kind, Lane, Span, Timeline};

/// Time that communication took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommTimes {
    /// In collective operations, waiting for other ranks included.
    pub comm: Duration,
    /// The part that nothing else hid: for which the host was blocked, or, on a device that runs asynchronously, the
    /// stream that computes waited.
    pub exposed: Duration,
}

impl std::ops::AddAssign for CommTimes {
    fn add_assign(&mut self, other: Self) {
        self.comm += other.comm;
        self.exposed += other.exposed;
    }
}

/// Times that the device measures of one step's communication. Clones share them.
///
/// An operation is counted in the step that launched it, however late it ends. The times are complete when the device
/// has run all of the step and the reducer or the parameters were asked for failures after that. They stay zero on a
/// device that runs in step with its host.
#[derive(Clone, Debug, Default)]
pub struct DeviceTimes(Arc<Mutex<CommTimes>>);

impl DeviceTimes {
    /// The times so far.
    pub fn times(&self) -> CommTimes {
        *self.0.lock()
    }

    /// The times so far; resets them.
    pub(super) fn take(&self) -> CommTimes {
        std::mem::take(&mut *self.0.lock())
    }

    pub(super) fn add(&self, times: CommTimes) {
        *self.0.lock() += times;
    }
}

/// Name of a span in which the stream or the host waits.
const WAITS: &str = "waits for communication";

/// Name of a span in which the host launches an operation. A communicator without an executor thread runs it there.
const LAUNCHES: &str = "launches communication";

/// Shorter waits get no span: the result was there already.
const SHORTEST: Duration = Duration::from_micros(5);

/// Issues operations, waits for them, and keeps account of their times and failures.
pub struct CommTracker {
    device: Arc<dyn Device>,
    timeline: Timeline,
    account: Mutex<Account>,
}

#[derive(Default)]
struct Account {
    /// What the host saw.
    times: CommTimes,
    /// Times of the operations that are launched now.
    device_times: DeviceTimes,
    /// Operations whose end was not seen yet.
    unfinished: Vec<(Work, DeviceTimes)>,
    /// Waits of the compute stream whose end was not seen yet.
    stream_waits: Vec<(Event, Interval, DeviceTimes)>,
    failure: Option<WorkError>,
}

impl CommTracker {
    pub(super) fn new(device: &Arc<dyn Device>, timeline: &Timeline) -> Self {
        Self {
            device: device.clone(),
            timeline: timeline.clone(),
            account: Mutex::default(),
        }
    }

    /// Issues an operation and records it. A communicator without an executor thread runs it in this call.
    pub(super) fn launch(&self, issue: impl FnOnce() -> Work) -> Work {
        let began = Instant::now();
        let work = issue();
        self.blocked_since(began, LAUNCHES);
        let mut account = self.account.lock();
        let device_times = account.device_times.clone();
        account.unfinished.push((work.clone(), device_times));
        work
    }

    /// Later operations of `stream`, which computes, run after `event`.
    pub(super) fn wait_in_stream(&self, stream: Stream, event: &Event, deadline: Instant) {
        if !self.device.is_asynchronous() || matches!(event.poll(), Some(Ok(()))) {
            return self.wait_in_side_stream(stream, event, deadline);
        }
        let before = self.device.record_timed(stream);
        self.device.wait_event(stream, event, deadline);
        let behind = self.device.record_timed(stream);
        let interval = Interval::Stream([before, behind.clone()]);
        self.timeline
            .record(Span::of(Lane::Compute, Kind::Wait, WAITS), interval.clone());
        let mut account = self.account.lock();
        let device_times = account.device_times.clone();
        account.stream_waits.push((behind, interval, device_times));
    }

    /// The same for a stream beside that one: only a blocked host hides nothing.
    pub(super) fn wait_in_side_stream(&self, stream: Stream, event: &Event, deadline: Instant) {
        let began = Instant::now();
        self.device.wait_event(stream, event, deadline);
        self.blocked_since(began, WAITS);
    }

    /// Blocks the host until `work` is done.
    pub(super) fn wait_on_host(&self, work: &Work, deadline: Instant) -> Result<(), WorkError> {
        let began = Instant::now();
        let outcome = work.wait(deadline);
        self.host_waited_since(began, WAITS);
        outcome.map(drop).inspect_err(|error| {
            self.account.lock().failure.get_or_insert_with(|| error.clone());
        })
    }

    /// The first failure of an operation, if one is known.
    pub(super) fn check(&self) -> Result<(), WorkError> {
        let now = Instant::now();
        let mut guard = self.account.lock();
        let account = &mut *guard;
        // Of a stream in order, only the first operation that has not ended is asked.
        let mut behind = Vec::new();
        let has_ended = |(work, _): &mut (Work, DeviceTimes)| {
            if work.stream().is_some_and(|stream| behind.contains(&stream)) {
                return false;
            }
            let has_ended = work.is_done();
            behind.extend(work.stream().filter(|_| !has_ended));
            has_ended
        };
        for (work, device_times) in account.unfinished.extract_if(.., has_ended) {
            match work.wait(now) {
                Ok(interval) => {
                    let comm = interval.and_then(|ran| ran.length()).unwrap_or_default();
                    let exposed = Duration::ZERO;
                    let took = CommTimes { comm, exposed };
                    if self.device.is_asynchronous() {
                        device_times.add(took);
                    } else {
                        account.times += took;
                    }
                }
                Err(error) => {
                    account.failure.get_or_insert(error);
                }
            }
        }
        let passed = |(behind, ..): &mut (Event, Interval, DeviceTimes)| behind.poll().is_some();
        for (_, interval, device_times) in account.stream_waits.extract_if(.., passed) {
            let (comm, exposed) = (Duration::ZERO, interval.length().unwrap_or_default());
            device_times.add(CommTimes { comm, exposed });
        }
        account.failure.clone().map_or(Ok(()), Err)
    }

    /// [`CommTracker::check`] for an operation of the device that needs what was communicated.
    pub(super) fn check_input(&self) -> Result<(), DeviceError> {
        let checked = self.check();
        checked.map_err(|error| DeviceError::Upstream(error.to_string()))
    }

    /// Why an operation failed, if one is known to have.
    pub fn failure(&self) -> Option<WorkError> {
        self.check().err()
    }

    /// What the host saw since they were taken: on a device that runs asynchronously only its own waits, as all else
    /// is in `DeviceTimes`.
    pub(super) fn times(&self) -> CommTimes {
        // Whoever asks for the failure is told of it.
        let _ = self.check();
        self.account.lock().times
    }

    /// The time that the host saw communication take since the last call.
    pub fn take_times(&self) -> CommTimes {
        let times = self.times();
        self.account.lock().times = CommTimes::default();
        times
    }

    /// The times that the device measures of what was launched since the last call. They are added when operations end.
    pub fn take_device_times(&self) -> DeviceTimes {
        std::mem::take(&mut self.account.lock().device_times)
    }

    /// A device that runs asynchronously goes on meanwhile.
    fn blocked_since(&self, began: Instant, name: &'static str) {
        if !self.device.is_asynchronous() {
            self.host_waited_since(began, name);
        }
    }

    /// A wait of the host, which is what computes unless the device runs asynchronously.
    fn host_waited_since(&self, began: Instant, name: &'static str) {
        let lane = if self.device.is_asynchronous() {
            Lane::Host
        } else {
            Lane::Compute
        };
        let ended = Instant::now();
        let took = ended - began;
        if took >= SHORTEST {
            let interval = Interval::Host([began, ended]);
            self.timeline.record(Span::of(lane, Kind::Wait, name), interval);
        }
        self.account.lock().times.exposed += took;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;
    use crate::collective::{Communicator, Executor, Failure, Launch, SingleRank, StreamWork, Traffic};
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
        let tracker = CommTracker::new(&device, &Timeline::default());
        let deadline = Instant::now() + Duration::from_mins(1);
        for wait in [CommTracker::wait_in_stream, CommTracker::wait_in_side_stream] {
            wait(&tracker, stream, &Event::new(Slow), deadline);
            assert!(tracker.take_times().exposed >= HELD);
        }
        // An executor that is the caller waits in the call.
        let comm = solo(Executor::Inline);
        let buffer = buffer(device.as_ref());
        let launch = Launch::after(Event::new(Slow), Traffic::Grads, "test");
        let work = tracker.launch(|| comm.all_gather(&buffer, launch));
        assert!(work.is_done() && tracker.times().exposed >= HELD);
        tracker.wait_on_host(&work, deadline).unwrap();
        assert_eq!(tracker.failure(), None);
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
        let tracker = CommTracker::new(&device, &Timeline::default());
        let waited = || {
            tracker.check().unwrap();
            tracker.take_device_times().times()
        };
        for _ in 0..3 {
            tracker.wait_in_stream(stream, &Event::new(Slow), deadline);
        }
        tracker.wait_in_side_stream(stream, &Event::new(Slow), deadline);
        assert_eq!(waited().exposed, 3 * HELD);
        // What has happened already costs no stream anything.
        tracker.wait_in_stream(stream, &Event::reached(), deadline);
        assert_eq!(waited(), CommTimes::default());
        // The host was never blocked.
        assert_eq!(tracker.take_times(), CommTimes::default());
    }

    #[test]
    fn what_ends_during_a_later_step_is_of_the_step_that_launched_it() {
        let runs = Arc::new(AtomicBool::new(false));
        let device: Arc<dyn Device> = Arc::new(Later(CpuDevice::new(1).unwrap(), runs.clone()));
        let deadline = Instant::now() + Duration::from_mins(1);
        let tracker = CommTracker::new(&device, &Timeline::default());
        let comm = solo(Executor::Thread);
        let buffer = buffer(device.as_ref());
        let mut steps = Vec::new();
        for waits in 1..=3 {
            let (input, signal) = Event::pair("input");
            let launch = Launch::after(input, Traffic::Grads, "test");
            let work = tracker.launch(|| comm.all_gather(&buffer, launch));
            for _ in 0..waits {
                tracker.wait_in_stream(device.stream(), work.event(), deadline);
            }
            tracker.check().unwrap();
            steps.push((work, signal, tracker.take_device_times()));
        }
        runs.store(true, Ordering::Relaxed);
        for (waits, (work, signal, device_times)) in (1..).zip(steps) {
            assert_eq!(device_times.times().comm, Duration::ZERO);
            signal.set(Ok(()));
            let ran = work.wait(deadline).unwrap();
            tracker.check().unwrap();
            let expected = CommTimes {
                comm: ran.and_then(|ran| ran.length()).unwrap(),
                exposed: waits * HELD,
            };
            assert_eq!(device_times.times(), expected);
        }
        assert_eq!(tracker.take_times(), CommTimes::default());
        assert_eq!(tracker.take_device_times().times(), CommTimes::default());
    }

    /// An operation in a stream, which counts how often it is asked.
    struct Counted(Event, AtomicUsize);

    impl StreamWork for Counted {
        fn done(&self) -> &Event {
            &self.0
        }

        fn outcome(&self) -> Option<Result<(), Failure>> {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.poll().map(|_| Ok(()))
        }
    }

    #[test]
    fn of_a_stream_the_first_operation_alone_is_asked_until_it_ends() {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        let tracker = CommTracker::new(&device, &Timeline::default());
        let (signals, works): (Vec<_>, Vec<_>) = (0..6)
            .map(|_| Event::pair("operation"))
            .map(|(event, signal)| (signal, Arc::new(Counted(event, AtomicUsize::new(0)))))
            .unzip();
        for (index, work) in works.iter().enumerate() {
            tracker.launch(|| Work::enqueued(index % 2, work.clone(), 0, "test".into()));
        }
        let asked = || works.iter().map(|work| work.1.load(Ordering::Relaxed));
        tracker.check().unwrap();
        assert_eq!(asked().collect::<Vec<_>>(), [1, 1, 0, 0, 0, 0]);
        for signal in signals {
            signal.set(Ok(()));
        }
        tracker.check().unwrap();
        let before: usize = asked().sum();
        tracker.check().unwrap();
        assert_eq!(
            asked().sum::<usize>(),
            before,
            "all have ended, and are forgotten"
        );
        assert!(asked().all(|times| times > 0));
    }
}
