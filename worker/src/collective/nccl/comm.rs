//! One communicator: made, used, and in the end left or aborted.
//!
//! A thread that calls NCCL holds the lock of the handle until the call is complete, so an abort never comes between the
//! parts of another thread's call. A communicator that fails is aborted in two steps: first its reason is stored, and
//! those of all others of the process; then the watchdog aborts them. An abort lets the stream go on, which must not be
//! taken for success.
#![allow(unsafe_code, reason = "NCCL is given addresses of device memory")]

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::flight_recorder::{FlightRecorder, Oldest, OperationEvents, OperationPhase};
use super::library::{CommAddress, Handle};
use crate::collective::error::Failure;
use crate::collective::operation::{Operation, Request, StreamWork, Traffic, slice};
use crate::collective::transport::CommPattern;
use crate::collective::wait::Wait;
use crate::device::{Arena, ArenaSpec, CudaDevice, DType, Device, DeviceError, Event, Stream};
use crate::session::{Cancel, Waiting, Wanted};
use crate::timeline::Interval;

/// How long a call is polled without a rest.
const SPIN: Duration = Duration::from_micros(200);
/// The rest between two polls after that.
const REST: Duration = Duration::from_micros(50);

/// Most operations in a stream; one more waits until the first has ended.
const IN_FLIGHT_BOUND: usize = 1024;

/// The members of a communicator, and how long it waits.
#[derive(Clone)]
pub struct Membership {
    /// In errors and logs; the same on all ranks.
    pub name: String,
    /// Rank of this process in the group.
    pub rank: usize,
    /// Global ranks, in order of rank.
    pub members: Vec<usize>,
    /// Bound of each phase of an operation: waiting for its input, and for the other ranks.
    pub timeout: Duration,
    /// Ends every wait, and aborts operations on the device.
    pub cancel: Cancel,
}

impl Membership {
    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// Global rank of this process.
    pub(super) fn global(&self) -> usize {
        self.members[self.rank]
    }

    /// Global ranks of the others.
    pub(super) fn others(&self) -> Vec<usize> {
        let others = self.members.iter().copied();
        others.filter(|&rank| rank != self.global()).collect()
    }

    /// Global ranks that an operation waits for: the rank of the group at the other end of a message, or all others.
    pub(super) fn awaited(&self, peer: Option<usize>) -> Vec<usize> {
        peer.map_or_else(|| self.others(), |peer| vec![self.members[peer]])
    }
}

/// The stream of a communicator.
#[derive(Clone)]
pub(super) struct CommStream {
    pub(super) device: Arc<dyn Device>,
    stream: Stream,
}

impl CommStream {
    /// A new stream for operations that other ranks wait for. None if the device is no GPU.
    pub(super) fn new(device: &Arc<dyn Device>, name: &str) -> Option<Self> {
        let stream = CudaDevice::of(device.as_ref())?.named_stream(name, true);
        let device = device.clone();
        Some(Self { device, stream })
    }

    /// Another stream of the same device.
    pub(super) fn sibling(&self, name: &str) -> Self {
        Self::new(&self.device, name).expect("a GPU, as for the first stream")
    }

    fn gpu(&self) -> &CudaDevice {
        CudaDevice::of(self.device.as_ref()).expect("checked when it was made")
    }

    /// Calls of this thread go to the device.
    fn bind(&self) -> Result<(), DeviceError> {
        self.gpu().context().bind()
    }

    fn record(&self) -> Event {
        self.device.record_timed(self.stream)
    }
}

/// Why a communicator is aborted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AbortReason {
    /// What happened.
    pub(super) failure: Failure,
    /// The operation in which it happened.
    pub(super) sequence: Option<u64>,
}

impl AbortReason {
    /// The failure of an operation of the communicator that had not ended, or of another call.
    fn failure_of(&self, sequence: Option<u64>, communicator: &str) -> Failure {
        match (self.sequence, sequence) {
            (Some(failed), Some(sequence)) if failed != sequence => self.consequence(communicator),
            _ => self.failure.clone(),
        }
    }

    /// The reason to abort the other communicators of the process, where this one is `communicator`.
    pub(super) fn for_others(&self, communicator: &str) -> Self {
        Self {
            failure: self.consequence(communicator),
            sequence: None,
        }
    }

    fn consequence(&self, communicator: &str) -> Failure {
        match &self.failure {
            // These name the cause themselves.
            Failure::GenerationOver(_) | Failure::GivenUp { .. } => self.failure.clone(),
            failure => Failure::GivenUp {
                because_of: match self.sequence {
                    Some(sequence) => format!("#{sequence} of `{communicator}`"),
                    None => format!("communicator `{communicator}`"),
                },
                failure: Box::new(failure.clone()),
            },
        }
    }
}

/// What the watchdog sees of a communicator.
#[derive(Clone, Debug)]
pub(super) struct Observation {
    /// Why the generation is over, if it is.
    pub(super) over: Option<String>,
    /// The error that the library reports.
    pub(super) reported: Option<Failure>,
    /// The error that the device reports of an operation.
    pub(super) device: Option<(u64, DeviceError)>,
    /// The first operation that has not ended.
    pub(super) oldest: Option<Oldest>,
    /// Bound of each phase of an operation.
    pub(super) timeout: Duration,
    /// Global ranks that it waits for.
    pub(super) awaited: Vec<usize>,
}

/// A communicator with its stream.
pub(super) struct Comm {
    membership: Membership,
    stream: CommStream,
    /// The element of a barrier.
    token: Arena,
    /// None once it was aborted or left.
    handle: Mutex<Option<Handle>>,
    recorder: Mutex<FlightRecorder>,
    failed: OnceLock<Failed>,
    /// In the order in which they were split.
    subgroups: Mutex<Vec<Weak<Self>>>,
}

/// A communicator that is aborted.
struct Failed {
    reason: AbortReason,
    /// The operations before this one had ended, so that they have not failed.
    first_open: u64,
}

impl Waiting for Comm {
    fn waiting(&self) -> Option<Wanted> {
        // As of the watchdog's last poll. Must not block; a thread that holds the recorder is about to change it.
        let oldest = self.recorder.try_lock()?.oldest()?;
        Some(Wanted {
            what: format!("{} of `{}`, {},", oldest.name, self.membership.name, oldest.phase),
            waited: oldest.since.elapsed(),
            // NCCL does not say which of them has not come.
            ranks: match oldest.phase {
                OperationPhase::Queued => Vec::new(),
                _ => self.membership.awaited(oldest.peer),
            },
        })
    }
}

impl Comm {
    /// Begins to make a communicator, with `begin`. [`Comm::await_ready`] follows, with a watchdog that aborts it if it
    /// does not get ready.
    pub(super) fn make(
        membership: Membership,
        stream: CommStream,
        begin: impl FnOnce() -> Result<Handle, Failure>,
    ) -> Result<Arc<Self>, Failure> {
        stream.bind()?;
        let token = stream
            .device
            .alloc(&ArenaSpec::private("barrier", DType::I32, 1))?;
        Ok(Arc::new(Self {
            token,
            handle: Mutex::new(Some(begin()?)),
            membership,
            stream,
            recorder: Mutex::default(),
            failed: OnceLock::new(),
            subgroups: Mutex::default(),
        }))
    }

    /// Waits until the communicator is made.
    pub(super) fn await_ready(self: &Arc<Self>, wait: &Wait) -> Result<(), Failure> {
        self.call(None, None, wait, |_| Ok(()))?;
        let waiting: Arc<dyn Waiting> = self.clone();
        self.membership.cancel.listen_to(Arc::downgrade(&waiting));
        Ok(())
    }

    /// Splits; ranks with the same color form a subgroup, which [`Comm::make`] and [`Comm::await_ready`] complete. Without a
    /// color this rank only takes part.
    pub(super) fn split(
        &self,
        color: Option<usize>,
        key: usize,
        pattern: CommPattern,
        wait: &Wait,
    ) -> Result<CommAddress, Failure> {
        self.stream.bind()?;
        self.call(None, None, wait, |handle| handle.split(color, key, pattern))
    }

    /// What [`Comm::split`] made, if this rank has a color.
    pub(super) fn part(&self, address: CommAddress) -> Result<Handle, Failure> {
        self.handle.lock().as_ref().ok_or_else(left)?.part(address)
    }

    /// Reduces one element over the ranks, and waits for it: NCCL connects ranks in the first call that needs it, which
    /// returns only when all have made that call. It connects by algorithm: one that it uses only for more bytes is connected
    /// later.
    pub(super) fn connect(&self, wait: &Wait) -> Result<(), Failure> {
        self.reduce_an_element(wait).inspect_err(|failure| {
            self.fail(AbortReason {
                failure: failure.clone(),
                sequence: None,
            });
        })
    }

    fn reduce_an_element(&self, wait: &Wait) -> Result<(), Failure> {
        self.stream.bind()?;
        let request = Request {
            operation: Operation::Barrier,
            buffer: self.token.whole(),
            all_to_all: None,
            traffic: Traffic::Other,
            tag: "connect".into(),
        };
        self.issue(None, &request, wait)?;
        let done = self.stream.record();
        loop {
            if let Some(outcome) = done.poll() {
                return Ok(outcome?);
            }
            self.check_alive(None)?;
            wait.check(|| self.membership.others())?;
            std::thread::sleep(REST);
        }
    }

    /// A subgroup, which is left before this communicator.
    pub(super) fn add_subgroup(&self, subgroup: &Arc<Self>) {
        self.subgroups.lock().push(Arc::downgrade(subgroup));
    }

    pub(super) fn membership(&self) -> &Membership {
        &self.membership
    }

    pub(super) fn stream(&self) -> &CommStream {
        &self.stream
    }

    /// Puts an operation into the stream.
    pub(super) fn enqueue(
        self: &Arc<Self>,
        sequence: u64,
        request: &Request,
        after: &Event,
        wait: &Wait,
    ) -> Result<Arc<dyn StreamWork>, Failure> {
        let Membership { rank, .. } = self.membership;
        request.check(rank, self.membership.size())?;
        self.await_room(wait)?;
        self.stream.bind()?;
        let CommStream { device, stream } = &self.stream;
        // Before the lock: an event that is not the device's blocks the host.
        device.wait_event(*stream, after, wait.deadline);
        let started = self.stream.record();
        let barrier;
        let request = if request.operation == Operation::Barrier {
            barrier = Request {
                buffer: self.token.whole(),
                ..request.clone()
            };
            &barrier
        } else {
            request
        };
        self.recorder.lock().called(sequence, request, Instant::now());
        self.issue(Some(sequence), request, wait)?;
        let events = OperationEvents {
            started,
            done: self.stream.record(),
        };
        self.recorder.lock().enqueued(events.clone(), Instant::now());
        Ok(Arc::new(NcclWork {
            comm: self.clone(),
            sequence,
            events,
            outcome: OnceLock::new(),
        }))
    }

    fn issue(&self, sequence: Option<u64>, request: &Request, wait: &Wait) -> Result<(), Failure> {
        let Membership { rank, members, .. } = &self.membership;
        let own = slice(request.buffer.len(), members.len(), *rank);
        let base = self.stream.gpu().address(&request.buffer)?.as_ptr();
        let parts = request.all_to_all.as_ref();
        let sent = parts.map_or(&request.buffer, |parts| &parts.sent);
        let sent = self.stream.gpu().address(sent)?.as_ptr();
        let stream = self.stream.gpu().raw_stream(self.stream.stream)?.cast();
        self.call(sequence, request.operation.peer(), wait, |handle| {
            // SAFETY: the addresses are those of buffers of the device. The recorder, or this communicator for its token,
            // keeps it until the stream has passed the operation; where that is never seen, `Drop` keeps it for ever unless the communicator was
            // aborted or left. If the call fails, the device keeps its memory from then on (`fail`). The stream is the
            // device's, which `self.stream` keeps.
            unsafe { handle.issue(request, &own, [sent, base], stream) }
        })
    }

    /// Calls NCCL and waits until the call is complete, for which other ranks are needed only where the caller says so.
    /// After a failure the watchdog aborts the communicator, since this thread may be needed elsewhere.
    fn call<T>(
        &self,
        sequence: Option<u64>,
        peer: Option<usize>,
        wait: &Wait,
        call: impl FnOnce(&mut Handle) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut handle = self.handle.lock();
        self.check_alive(sequence)?;
        let handle = handle.as_mut().ok_or_else(left)?;
        let result = call(handle).and_then(|value| {
            self.await_settled(handle, peer, wait)?;
            Ok(value)
        });
        result.inspect_err(|failure| {
            self.fail(AbortReason {
                failure: failure.clone(),
                sequence,
            });
        })
    }

    /// Waits until no call goes on in the background.
    fn await_settled(&self, handle: &mut Handle, peer: Option<usize>, wait: &Wait) -> Result<(), Failure> {
        let started = Instant::now();
        while !handle.is_settled()? {
            self.check_alive(None)?;
            wait.check(|| self.membership.awaited(peer))?;
            if started.elapsed() < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(REST);
            }
        }
        Ok(())
    }

    /// Waits until the stream may hold one more operation.
    fn await_room(&self, wait: &Wait) -> Result<(), Failure> {
        loop {
            {
                let mut recorder = self.recorder.lock();
                recorder.update(Instant::now());
                if recorder.in_flight.len() < IN_FLIGHT_BOUND {
                    return Ok(());
                }
            }
            self.check_alive(None)?;
            wait.check(|| self.membership.others())?;
            std::thread::sleep(REST);
        }
    }

    /// The failure of an operation, or of another call, once the communicator has failed.
    fn check_alive(&self, sequence: Option<u64>) -> Result<(), Failure> {
        match self.reason() {
            Some(reason) => Err(reason.failure_of(sequence, &self.membership.name)),
            None => Ok(()),
        }
    }

    /// Why it is aborted, if it is.
    pub(super) fn reason(&self) -> Option<&AbortReason> {
        self.failed.get().map(|failed| &failed.reason)
    }

    /// None if it has failed.
    pub(super) fn observe(&self, now: Instant) -> Option<Observation> {
        if self.failed.get().is_some() {
            return None;
        }
        let reported = self.reported_error();
        let mut recorder = self.recorder.lock();
        recorder.update(now);
        let oldest = recorder.oldest();
        Some(Observation {
            over: self.membership.cancel.cause().map(str::to_owned),
            reported,
            device: recorder.failed.clone(),
            awaited: (self.membership).awaited(oldest.as_ref().and_then(|oldest| oldest.peer)),
            oldest,
            timeout: self.membership.timeout,
        })
    }

    /// The error that NCCL reports. None also while another thread calls NCCL, which then gets the error.
    fn reported_error(&self) -> Option<Failure> {
        self.handle.try_lock()?.as_mut()?.is_settled().err()
    }

    /// Stores why it is aborted, and logs its last operations if some have not ended. The first reason stays.
    pub(super) fn fail(&self, reason: AbortReason) {
        let failure = reason.failure.clone();
        let mut recorder = self.recorder.lock();
        if self.failed.get().is_some() {
            return;
        }
        // Before the watchdog knows, so before the first abort: the stream must be able to tell what it passed. Memory is freed
        // on the way to the report of the error, which must not wait.
        self.stream.gpu().abandon();
        recorder.update(Instant::now());
        let first_open = recorder.first_open;
        // The lock is held.
        let _ = self.failed.set(Failed { reason, first_open });
        if recorder.in_flight.is_empty() {
            return;
        }
        tracing::error!(
            "rank {}: communicator `{}` is abandoned: {failure}\nits last operations:\n{}",
            self.membership.global(),
            self.membership.name,
            recorder.dump(Instant::now()).trim_end(),
        );
    }

    /// Aborts a communicator that has failed, once no other thread calls NCCL: such a thread sees the reason and returns,
    /// unless NCCL does not. Returns when the device has ended its operations.
    pub(super) fn abort(&self) {
        // A thread without a device counts as on the first GPU, which would then get a context of this process. If the
        // device has failed, its operations must end all the same.
        if let Err(error) = self.stream.bind() {
            let name = &self.membership.name;
            tracing::warn!("aborting communicator `{name}` anyway: {error}");
        }
        // Taken out of the lock, since an abort may take long.
        let handle = self.handle.lock().take();
        if let Some(handle) = handle
            && let Err(error) = handle.abort()
        {
            tracing::warn!("{error}");
        }
    }

    /// True once it was aborted, or is being, or was left.
    pub(super) fn is_gone(&self) -> bool {
        self.handle.try_lock().is_some_and(|handle| handle.is_none())
    }

    /// Waits for what is in the stream and for the other ranks, and frees the communicator: after its subgroups, the last
    /// one first, as on all ranks. Does nothing the second time.
    pub(super) fn leave(&self, wait: &Wait) -> Result<(), Failure> {
        let subgroups = std::mem::take(&mut *self.subgroups.lock());
        for subgroup in subgroups.iter().rev().filter_map(Weak::upgrade) {
            subgroup.leave(wait)?;
        }
        self.check_alive(None)?;
        if self.handle.lock().is_none() {
            return Ok(());
        }
        self.stream.bind()?;
        self.call(None, None, wait, Handle::finalize)?;
        self.recorder.lock().update(Instant::now());
        self.handle.lock().take().map_or(Ok(()), Handle::destroy)
    }
}

fn left() -> Failure {
    Failure::Invalid("the communicator was left".into())
}

impl Drop for Comm {
    /// Without [`Comm::leave`], operations may still be in the stream; their memory then stays for ever.
    fn drop(&mut self) {
        let handle = self.handle.get_mut();
        if handle.is_some() {
            let recorder = self.recorder.get_mut();
            recorder.update(Instant::now());
            std::mem::forget(std::mem::take(recorder));
        }
    }
}

/// One operation in the stream.
struct NcclWork {
    comm: Arc<Comm>,
    sequence: u64,
    events: OperationEvents,
    outcome: OnceLock<Result<(), Failure>>,
}

impl StreamWork for NcclWork {
    fn done(&self) -> &Event {
        &self.events.done
    }

    fn interval(&self) -> Option<Interval> {
        Some(self.events.interval())
    }

    fn outcome(&self) -> Option<Result<(), Failure>> {
        if let Some(outcome) = self.outcome.get() {
            return Some(outcome.clone());
        }
        let passed = self.events.poll();
        // Read after the stream: an abort lets the stream pass the operation, but its reason was stored before.
        let failed = self.comm.failed.get();
        let outcome = match (failed, passed) {
            (Some(failed), _) if self.sequence >= failed.first_open => {
                let name = &self.comm.membership.name;
                Err(failed.reason.failure_of(Some(self.sequence), name))
            }
            (_, passed) => passed?.map_err(Failure::Device),
        };
        Some(self.outcome.get_or_init(|| outcome).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_operations_and_communicators_name_the_one_that_failed() {
        let reason = AbortReason {
            failure: Failure::Invalid("broken".into()),
            sequence: Some(31),
        };
        let words = |sequence| reason.failure_of(sequence, "world").to_string();
        let elsewhere = "abandoned because of #31 of `world`: broken";
        assert_eq!([words(Some(29)), words(Some(32))], [elsewhere; 2]);
        assert_eq!([words(Some(31)), words(None)], ["broken"; 2]);
        let others = reason.for_others("world");
        assert_eq!(others.failure_of(Some(29), "parameters").to_string(), elsewhere);
        // Passed on, it stays as it is.
        assert_eq!(others.for_others("parameters"), others);
        let over = AbortReason {
            failure: Failure::GenerationOver("rank 2 died of SIGKILL".into()),
            sequence: Some(31),
        };
        assert_eq!(over.failure_of(Some(29), "world"), over.failure);
    }

    #[test]
    fn a_lack_of_memory_is_one_for_the_other_operations_too() {
        let reason = AbortReason {
            failure: Failure::Device(DeviceError::OutOfMemory {
                what: "scratch".into(),
                bytes: 1,
                cause: "full".into(),
                hint: "less".into(),
                never_fits: true,
            }),
            sequence: Some(1),
        };
        for sequence in 0..3 {
            let failure = reason.failure_of(Some(sequence), "world");
            let device = failure.device();
            assert!(
                matches!(device, Some(DeviceError::OutOfMemory { never_fits: true, .. })),
                "{failure}"
            );
        }
    }
}
