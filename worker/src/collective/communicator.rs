//! The ordered queue of one group of ranks.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::error::{CollectiveError, Failure, name};
use super::operation::{AllToAll, Completion, Operation, ReduceOp, Request, Traffic, Work};
use super::transport::{Subgroup, Transport, WireBytes};
use super::wait::{Pending, Wait};
use crate::device::{Arena, ArenaSpec, Buffer, Device, DeviceError, Event};
use crate::session::Cancel;
use crate::timeline::{Collective, Interval, Lane, Span, Timeline};

/// Most operations in a queue; one more blocks the caller until there is room.
const QUEUE_BOUND: usize = 1024;

/// An operation gets this long after its time-out to report the time-out itself, with the better error.
const GRACE: Duration = Duration::from_secs(5);

/// Longest wait for a buffer to be ready between two checks of the cancel token, which events do not know.
const INPUT_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Which thread carries out operations, where the host does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executor {
    /// A thread of its own: operations overlap with what the caller does meanwhile.
    Thread,
    /// The calling thread: an operation is done when the call returns.
    Inline,
}

/// When an operation may start, and what it is for.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The buffer is ready.
    pub after: Event,
    /// For the counters.
    pub traffic: Traffic,
    /// For errors and traces: `bucket 3`.
    pub tag: String,
}

impl Launch {
    /// An operation whose buffer is ready now.
    pub fn now(traffic: Traffic, tag: impl Into<String>) -> Self {
        Self::after(Event::reached(), traffic, tag)
    }

    /// An operation whose buffer is ready at `after`.
    pub fn after(after: Event, traffic: Traffic, tag: impl Into<String>) -> Self {
        Self {
            after,
            traffic,
            tag: tag.into(),
        }
    }
}

/// The operations of one group of ranks, in order. Clones are the same communicator.
#[derive(Clone)]
pub struct Communicator(Arc<CommunicatorInner>);

struct CommunicatorInner {
    info: Arc<CommunicatorInfo>,
    driver: Arc<Mutex<Driver>>,
    queue: Queue,
}

/// What becomes of an operation that is submitted.
enum Queue {
    /// A thread carries it out, until it is shut down.
    Thread(Mutex<Option<QueueThread>>),
    /// The caller does.
    Inline,
    /// The caller puts it into the transport's stream.
    Stream,
}

/// What can be read while an operation runs.
struct CommunicatorInfo {
    name: String,
    rank: usize,
    members: Vec<usize>,
    /// Of an operation.
    timeout: Duration,
    cancel: Cancel,
    timeline: Timeline,
    /// Not under the lock of the driver, which a running operation holds.
    wire: Mutex<WireBytes>,
    pending: Arc<Pending>,
}

impl Communicator {
    /// A communicator over a transport. `timeout` bounds each operation, from the moment the operations before it have
    /// ended; on a stream it bounds the call, and the operation has the time-out of the transport. `executor` has no
    /// meaning there.
    pub fn new(
        name: &str,
        transport: Box<dyn Transport>,
        executor: Executor,
        timeout: Duration,
        cancel: &Cancel,
    ) -> Self {
        let info = CommunicatorInfo::new(name, transport.as_ref(), timeout, cancel);
        Self::over(transport, executor, info)
    }

    fn over(transport: Box<dyn Transport>, executor: Executor, info: CommunicatorInfo) -> Self {
        let info = Arc::new(info);
        let is_on_stream = transport.is_on_stream();
        let driver = Arc::new(Mutex::new(Driver {
            info: info.clone(),
            transport,
            sequence: 0,
            poison: None,
        }));
        let queue = match executor {
            _ if is_on_stream => Queue::Stream,
            Executor::Inline => Queue::Inline,
            Executor::Thread => match QueueThread::start(&info.name, &driver) {
                Ok(thread) => Queue::Thread(Mutex::new(Some(thread))),
                Err(error) => {
                    // Every operation then fails with this reason.
                    let why = Failure::System {
                        what: format!("the system cannot start a thread for `{}`", info.name),
                        cause: error.to_string(),
                    };
                    driver.lock().poison = Some(why);
                    Queue::Inline
                }
            },
        };
        Self(Arc::new(CommunicatorInner { info, driver, queue }))
    }

    /// Rank of this process in the group.
    pub fn rank(&self) -> usize {
        self.0.info.rank
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.0.info.members.len()
    }

    /// Global rank of each member, in order of rank.
    pub fn members(&self) -> &[usize] {
        &self.0.info.members
    }

    /// When to stop waiting for an operation that starts now: its time-out, and some time for it to report that itself.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.0.info.timeout + GRACE
    }

    /// [`Operation::AllReduce`].
    pub fn all_reduce(&self, buffer: &Buffer, reduce: ReduceOp, launch: Launch) -> Work {
        self.submit(Operation::AllReduce(reduce), buffer, None, launch)
    }

    /// [`Operation::ReduceScatter`].
    pub fn reduce_scatter(&self, buffer: &Buffer, reduce: ReduceOp, launch: Launch) -> Work {
        self.submit(Operation::ReduceScatter(reduce), buffer, None, launch)
    }

    /// [`Operation::AllGather`].
    pub fn all_gather(&self, buffer: &Buffer, launch: Launch) -> Work {
        self.submit(Operation::AllGather, buffer, None, launch)
    }

    /// [`Operation::AllToAll`]; `received` gets what the ranks send.
    pub fn all_to_all(&self, received: &Buffer, parts: AllToAll, launch: Launch) -> Work {
        self.submit(Operation::AllToAll, received, Some(parts), launch)
    }

    /// [`Operation::Broadcast`].
    pub fn broadcast(&self, buffer: &Buffer, root: usize, launch: Launch) -> Work {
        self.submit(Operation::Broadcast { root }, buffer, None, launch)
    }

    /// [`Operation::Barrier`]; `buffer` is an empty one of any arena.
    pub fn barrier(&self, buffer: &Buffer, launch: Launch) -> Work {
        self.submit(Operation::Barrier, &buffer.slice(0..0), None, launch)
    }

    /// [`Operation::Send`].
    pub fn send(&self, buffer: &Buffer, to: usize, launch: Launch) -> Work {
        self.submit(Operation::Send { to }, buffer, None, launch)
    }

    /// [`Operation::Recv`].
    pub fn recv(&self, buffer: &Buffer, from: usize, launch: Launch) -> Work {
        self.submit(Operation::Recv { from }, buffer, None, launch)
    }

    /// Allocates an arena on which operations of this group need no copies. Every rank must call it, with the
    /// same size, and with no operation in flight.
    pub fn alloc_shared(&self, device: &Arc<dyn Device>, spec: &ArenaSpec) -> Result<Arena, CollectiveError> {
        let (bytes, name) = (spec.bytes(), &spec.name);
        let call = |transport: &mut dyn Transport, wait: &Wait| transport.alloc_shared(device, spec, wait);
        self.0
            .driver
            .lock()
            .set_up("shared allocation", bytes, name, call)
    }

    /// The subgroup of this rank. Every rank of the group must call it, each with the subgroup that it belongs to, and with
    /// no operation in flight.
    pub fn split(&self, subgroup: &Subgroup, executor: Executor) -> Result<Self, CollectiveError> {
        let call = |transport: &mut dyn Transport, wait: &Wait| transport.split(subgroup, wait);
        let transport = (self.0.driver.lock()).set_up("split", 0, &subgroup.name, call)?;
        let parent = &self.0.info;
        let info = CommunicatorInfo {
            timeline: parent.timeline.clone(),
            ..CommunicatorInfo::new(&subgroup.name, transport.as_ref(), parent.timeout, &parent.cancel)
        };
        Ok(Self::over(transport, executor, info))
    }

    /// Of the operations of this group and of its subgroups; closed until it is opened. The operations of a group of one
    /// rank are not on it: they move nothing.
    pub fn timeline(&self) -> &Timeline {
        &self.0.info.timeline
    }

    /// Bytes that this rank has put on the wire in this group, by the operations that are done. Does not wait for an
    /// operation that runs.
    pub fn wire_bytes(&self) -> WireBytes {
        *self.0.info.wire.lock()
    }

    /// Ends the executor after the operations that are queued. Without it, the last clone's drop closes the queue
    /// and the thread ends by itself. On a stream: waits for what is in it and leaves the group.
    pub fn shutdown(&self) {
        self.end_thread();
        let wait = self.0.info.wait();
        self.0.driver.lock().transport.shutdown(&wait);
    }

    /// Ends the executor's thread, if it has one, after the operations that are queued: soon once the generation is over.
    pub fn end_thread(&self) {
        if let Queue::Thread(thread) = &self.0.queue
            && let Some(QueueThread { sender, thread }) = thread.lock().take()
        {
            drop(sender);
            let _ = thread.join();
        }
    }

    /// Instead of [`Communicator::shutdown`] where something failed: on a stream, aborts what is in it, and waits for that a
    /// bounded time, so that no library runs while the process ends.
    pub fn abandon(&self) {
        // Elsewhere an operation may hold the driver.
        if matches!(self.0.queue, Queue::Stream) {
            self.0.driver.lock().transport.abandon();
        }
    }

    fn submit(&self, operation: Operation, buffer: &Buffer, parts: Option<AllToAll>, launch: Launch) -> Work {
        let Launch { after, traffic, tag } = launch;
        let request = Request {
            operation,
            buffer: buffer.clone(),
            all_to_all: parts,
            traffic,
            tag,
        };
        if matches!(self.0.queue, Queue::Stream) {
            return self.0.driver.lock().enqueue(&request, &after);
        }
        let (work, completion) = Work::pair(&format!("{operation} ({})", request.tag));
        let queued = QueuedOperation {
            request: Arc::new(request),
            after,
            completion,
        };
        match &self.0.queue {
            Queue::Thread(thread) => {
                let thread = thread.lock();
                if let Some(thread) = thread.as_ref() {
                    // A closed queue drops the operation, whose event then fails with a name.
                    let _ = thread.sender.send(queued);
                }
            }
            Queue::Inline | Queue::Stream => self.0.driver.lock().execute(queued),
        }
        work
    }
}

impl CommunicatorInfo {
    fn new(name: &str, transport: &dyn Transport, timeout: Duration, cancel: &Cancel) -> Self {
        Self {
            name: name.to_owned(),
            rank: transport.rank(),
            members: transport.members().to_vec(),
            timeout,
            cancel: cancel.clone(),
            timeline: Timeline::default(),
            wire: Mutex::default(),
            pending: Pending::register(name, cancel),
        }
    }

    /// The bound of one operation that starts now.
    fn wait(&self) -> Wait {
        Wait::new(self.timeout, &self.cancel)
    }

    fn error(&self, operation: String, failure: Failure) -> CollectiveError {
        let rank = self.members[self.rank];
        CollectiveError {
            rank,
            operation,
            failure,
        }
    }

    /// Puts an operation on the timeline, if other ranks take part.
    fn record(&self, sequence: u64, request: &Request, interval: impl FnOnce() -> Option<Interval>) {
        let members = &self.members;
        if members.len() == 1 || !self.timeline.is_open() {
            return;
        }
        let Some(interval) = interval() else { return };
        let collective = Collective {
            bytes: request.buffer.bytes() as u64,
            first_rank: members[0] as u32,
            ranks: members.len() as u32,
            sequence: request.operation.needs_all_ranks().then_some(sequence),
        };
        let lane = Lane::Communicator(self.name.clone());
        let name = format!("{} ({})", request.operation, request.tag);
        let span = Span {
            collective: Some(collective),
            ..Span::of(lane, request.traffic.kind(), name)
        };
        self.timeline.record(span, interval);
    }
}

/// An operation that waits for those before it.
struct QueuedOperation {
    request: Arc<Request>,
    after: Event,
    completion: Completion,
}

/// The thread of a communicator, and its queue.
struct QueueThread {
    sender: SyncSender<QueuedOperation>,
    thread: std::thread::JoinHandle<()>,
}

impl QueueThread {
    fn start(name: &str, driver: &Arc<Mutex<Driver>>) -> std::io::Result<Self> {
        let (sender, receiver): (_, Receiver<QueuedOperation>) = sync_channel(QUEUE_BOUND);
        let driver = driver.clone();
        let thread = std::thread::Builder::new()
            .name(format!("ddp-comm-{name}"))
            .spawn(move || {
                for queued in receiver {
                    driver.lock().execute(queued);
                }
            })?;
        Ok(Self { sender, thread })
    }
}

/// Carries out the operations of a communicator, or puts them into a stream: one at a time, numbered.
struct Driver {
    info: Arc<CommunicatorInfo>,
    transport: Box<dyn Transport>,
    sequence: u64,
    /// Why an earlier operation failed; all later ones fail too.
    poison: Option<Failure>,
}

impl Driver {
    fn execute(&mut self, queued: QueuedOperation) {
        let (sequence, request) = (self.next_sequence(), queued.request);
        self.info.pending.begin_operation(sequence, &request);
        let outcome = self.run(&request, &queued.after);
        self.info.pending.end();
        if let Ok(interval) = &outcome {
            self.info.record(sequence, &request, || interval.clone());
        }
        (queued.completion).set(outcome.map_err(|failure| self.fail(sequence, &request, failure)));
    }

    fn run(&mut self, request: &Request, after: &Event) -> Result<Option<Interval>, Failure> {
        self.check_poison()?;
        self.await_input(after)?;
        let started = Instant::now();
        let held = match request.operation {
            Operation::Send { .. } => request.buffer.hold_to_read()?,
            _ => request.buffer.hold()?,
        };
        let wait = self.info.wait().reporting_to(&self.info.pending);
        let bytes = self.transport.execute(request, held, &wait)?;
        self.info.wire.lock().count(request.traffic, bytes);
        Ok(Some(Interval::Host([started, Instant::now()])))
    }

    /// Puts an operation into the stream. If that fails, the work has ended already.
    fn enqueue(&mut self, request: &Request, after: &Event) -> Work {
        let sequence = self.next_sequence();
        let wait = self.info.wait();
        let enqueued = self
            .check_poison()
            .and_then(|()| self.transport.enqueue(sequence, request, after, &wait));
        match enqueued {
            Ok(work) => {
                let CommunicatorInfo { rank, members, .. } = &*self.info;
                let bytes = request.wire_bytes(*rank, members.len());
                self.info.wire.lock().count(request.traffic, bytes);
                self.info.record(sequence, request, || work.interval());
                let operation = request.name(sequence, &self.info.name);
                Work::enqueued(Arc::as_ptr(&self.info) as usize, work, members[*rank], operation)
            }
            Err(failure) => {
                let (work, completion) = Work::pair(&format!("{} ({})", request.operation, request.tag));
                completion.set(Err(self.fail(sequence, request, failure)));
                work
            }
        }
    }

    /// Waits until the buffer is ready, the time is over or the generation is.
    fn await_input(&self, after: &Event) -> Result<(), Failure> {
        let CommunicatorInfo { timeout, cancel, .. } = &*self.info;
        let deadline = Instant::now() + *timeout;
        loop {
            let until = deadline.min(Instant::now() + INPUT_POLL_INTERVAL);
            match after.wait(until) {
                // It may be the failure of what came before the event, and the event may come after the time-out.
                Err(DeviceError::TimedOut { what, .. }) => {
                    if let Some(outcome) = after.poll() {
                        return Ok(outcome?);
                    }
                    if let Some(cause) = cancel.cause() {
                        return Err(Failure::GenerationOver(cause.to_owned()));
                    }
                    if until == deadline {
                        let waited_ms = timeout.as_millis() as u64;
                        return Err(DeviceError::TimedOut { what, waited_ms }.into());
                    }
                }
                outcome => return Ok(outcome?),
            }
        }
    }

    /// A collective call that is not an operation of the queue. A refusal, which all ranks learn of, leaves the
    /// communicator usable; after any other failure the ranks may be at different points.
    fn set_up<T>(
        &mut self,
        what: &str,
        bytes: usize,
        tag: &str,
        call: impl FnOnce(&mut dyn Transport, &Wait) -> Result<T, Failure>,
    ) -> Result<T, CollectiveError> {
        self.info.pending.begin_set_up(format!("{what} ({tag})"));
        let wait = self.info.wait().reporting_to(&self.info.pending);
        let outcome = self
            .check_poison()
            .and_then(|()| call(self.transport.as_mut(), &wait));
        self.info.pending.end();
        outcome.map_err(|failure| {
            if !matches!(failure, Failure::Refused { .. } | Failure::Device(_)) {
                self.poison.get_or_insert_with(|| failure.clone());
            }
            let call = name(what, self.sequence, &self.info.name, tag, bytes);
            self.info.error(call, failure)
        })
    }

    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence - 1
    }

    fn check_poison(&self) -> Result<(), Failure> {
        match &self.poison {
            Some(earlier) => Err(Failure::Poisoned(Box::new(earlier.clone()))),
            None => Ok(()),
        }
    }

    fn fail(&mut self, sequence: u64, request: &Request, failure: Failure) -> CollectiveError {
        self.poison.get_or_insert_with(|| failure.clone());
        let operation = request.name(sequence, &self.info.name);
        self.info.error(operation, failure)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::super::transport::SingleRank;
    use super::*;
    use crate::device::{Compute, CpuDevice, DType, Held, IdleDevice};

    const PATIENCE: Duration = Duration::from_mins(10);

    /// Rank 0 of a group whose operations take until they are told to go on.
    struct HeldUp {
        members: Vec<usize>,
        started: SyncSender<()>,
        go_on: Receiver<()>,
    }

    impl Transport for HeldUp {
        fn rank(&self) -> usize {
            0
        }

        fn members(&self) -> &[usize] {
            &self.members
        }

        fn split(&mut self, _: &Subgroup, _: &Wait) -> Result<Box<dyn Transport>, Failure> {
            Err(Failure::Invalid("not in this test".into()))
        }

        fn execute(&mut self, request: &Request, _: Held, _: &Wait) -> Result<u64, Failure> {
            self.started.send(()).unwrap();
            self.go_on.recv().unwrap();
            Ok(request.buffer.bytes() as u64)
        }
    }

    fn buffer(device: &CpuDevice) -> Buffer {
        let spec = ArenaSpec::private("test", DType::F32, 16);
        let buffer = device.alloc(&spec).unwrap().whole();
        buffer.host_mut::<f32>().unwrap().fill(2.0);
        buffer
    }

    /// Spans of the collectives of a communicator: name and bytes.
    fn spans(comm: &Communicator) -> Vec<(String, u64)> {
        let recording = comm.timeline().close().unwrap();
        let spans = recording.spans.into_iter();
        let collectives = spans.filter_map(|span| Some((span.name.into_owned(), span.collective?.bytes)));
        collectives.collect()
    }

    #[test]
    fn counters_are_read_while_an_operation_is_in_flight() {
        let ((started, has_started), (go, go_on)) = (sync_channel(8), channel());
        let transport = HeldUp {
            members: vec![0, 1],
            started,
            go_on,
        };
        let cancel = Cancel::new();
        let comm = Communicator::new("world", Box::new(transport), Executor::Thread, PATIENCE, &cancel);
        let device = CpuDevice::new(1).unwrap();
        let compute = Compute::new(Arc::new(IdleDevice));
        comm.timeline().open(&compute, Instant::now()).unwrap();
        let bytes = |grads, params| WireBytes {
            grads,
            params,
            ..WireBytes::default()
        };
        let reduce = |traffic| {
            let launch = Launch::now(traffic, "bucket 0");
            comm.all_reduce(&buffer(&device), ReduceOp::Max, launch)
        };
        let first = reduce(Traffic::Grads);
        has_started.recv().unwrap();
        assert_eq!(comm.wire_bytes(), bytes(0, 0));
        go.send(()).unwrap();
        first.wait(comm.deadline()).unwrap();
        let second = reduce(Traffic::Params);
        has_started.recv().unwrap();
        assert_eq!(comm.wire_bytes(), bytes(64, 0));
        assert!(!second.is_done());
        go.send(()).unwrap();
        second.wait(comm.deadline()).unwrap();
        assert_eq!(comm.wire_bytes(), bytes(64, 64));
        let span = ("all-reduce (bucket 0)".to_owned(), 64);
        assert_eq!(spans(&comm), [span.clone(), span]);
    }

    #[test]
    fn a_single_rank_moves_nothing() {
        let device: Arc<CpuDevice> = Arc::new(CpuDevice::new(1).unwrap());
        for transport in [SingleRank::new(3), SingleRank::on_stream(3)] {
            let cancel = Cancel::new();
            let comm = Communicator::new("world", Box::new(transport), Executor::Thread, PATIENCE, &cancel);
            let compute = Compute::new(device.clone());
            comm.timeline().open(&compute, Instant::now()).unwrap();
            let buffer = buffer(&device);
            let launch = Launch::now(Traffic::Grads, "bucket 0");
            let work = comm.all_reduce(&buffer, ReduceOp::Sum, launch);
            work.wait(comm.deadline()).unwrap();
            assert!(buffer.host::<f32>().unwrap().iter().all(|x| *x == 2.0));
            assert_eq!(comm.wire_bytes(), WireBytes::default());
            assert_eq!(spans(&comm), []);
            let pair = comm.split(&Subgroup::new("pair", [0]), Executor::Thread).unwrap();
            assert_eq!((pair.rank(), pair.members()), (0, &[3][..]));
        }
    }
}
