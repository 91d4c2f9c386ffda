//! The ordered queue of one group of ranks.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::segment::SharedSegment;
use super::work::Completion;
use super::{
    CollectiveError, Failure, Operation, ReduceOp, Request, Traffic, Transport, Wait, WireBytes, Work,
    WorkTimes,
};
use crate::device::{Arena, ArenaSpec, Buffer, Device, DeviceError, Event};
use crate::session::Cancel;

/// Most operations in a queue; one more blocks the caller until there is room.
const QUEUE_BOUND: usize = 1024;

/// Longest wait for a buffer to be ready between two looks at the cancel token, which events do not know.
const INPUT_SLICE: Duration = Duration::from_millis(10);

/// Who drives the queue.
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
        Self {
            after: Event::reached(),
            traffic,
            tag: tag.into(),
        }
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
pub struct Communicator(Arc<Inner>);

struct Inner {
    name: String,
    rank: usize,
    members: Vec<usize>,
    timeout: Duration,
    cancel: Cancel,
    executor: Executor,
    core: Arc<Mutex<Core>>,
    queue: Mutex<Option<Queue>>,
}

struct Queue {
    sender: SyncSender<Job>,
    thread: std::thread::JoinHandle<()>,
}

struct Job {
    request: Request,
    after: Event,
    completion: Completion,
}

/// What the driver of the queue owns.
struct Core {
    name: String,
    global_rank: usize,
    timeout: Duration,
    cancel: Cancel,
    transport: Box<dyn Transport>,
    sequence: u64,
    poison: Option<String>,
}

impl Communicator {
    /// A communicator over a transport. `timeout` bounds each operation, from the moment its turn comes.
    #[must_use]
    pub fn new(
        name: &str,
        transport: Box<dyn Transport>,
        executor: Executor,
        timeout: Duration,
        cancel: &Cancel,
    ) -> Self {
        let rank = transport.rank();
        let members = transport.members().to_vec();
        let core = Core {
            name: name.to_owned(),
            global_rank: members[rank],
            timeout,
            cancel: cancel.clone(),
            transport,
            sequence: 0,
            poison: None,
        };
        let core = Arc::new(Mutex::new(core));
        let (executor, queue) = match executor {
            Executor::Inline => (executor, None),
            Executor::Thread => match Queue::start(name, &core) {
                Ok(queue) => (executor, Some(queue)),
                Err(error) => {
                    // Whoever issues an operation learns why it cannot run.
                    let why = format!("the system cannot start a thread for `{name}`: {error}");
                    core.lock().unwrap_or_else(PoisonError::into_inner).poison = Some(why);
                    (Executor::Inline, None)
                }
            },
        };
        Self(Arc::new(Inner {
            name: name.to_owned(),
            rank,
            members,
            timeout,
            cancel: cancel.clone(),
            executor,
            core,
            queue: Mutex::new(queue),
        }))
    }

    /// Name in errors and traces.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Rank of this process in the group.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Number of ranks in the group.
    #[must_use]
    pub fn size(&self) -> usize {
        self.0.members.len()
    }

    /// Global rank of each member, in order of rank.
    #[must_use]
    pub fn members(&self) -> &[usize] {
        &self.0.members
    }

    /// Bound of each operation.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.0.timeout
    }

    /// [`Operation::AllReduce`].
    pub fn all_reduce(&self, buffer: &Buffer, reduce: ReduceOp, launch: Launch) -> Work {
        self.submit(Operation::AllReduce, reduce, buffer, launch)
    }

    /// [`Operation::ReduceScatter`].
    pub fn reduce_scatter(&self, buffer: &Buffer, reduce: ReduceOp, launch: Launch) -> Work {
        self.submit(Operation::ReduceScatter, reduce, buffer, launch)
    }

    /// [`Operation::AllGather`].
    pub fn all_gather(&self, buffer: &Buffer, launch: Launch) -> Work {
        self.submit(Operation::AllGather, PLAIN, buffer, launch)
    }

    /// [`Operation::Broadcast`].
    pub fn broadcast(&self, buffer: &Buffer, root: usize, launch: Launch) -> Work {
        self.submit(Operation::Broadcast { root }, PLAIN, buffer, launch)
    }

    /// [`Operation::Barrier`]; `buffer` is an empty one of any arena.
    pub fn barrier(&self, buffer: &Buffer, launch: Launch) -> Work {
        self.submit(Operation::Barrier, PLAIN, &buffer.slice(0..0), launch)
    }

    /// [`Operation::Send`].
    pub fn send(&self, buffer: &Buffer, to: usize, launch: Launch) -> Work {
        self.submit(Operation::Send { to }, PLAIN, buffer, launch)
    }

    /// [`Operation::Recv`].
    pub fn recv(&self, buffer: &Buffer, from: usize, launch: Launch) -> Work {
        self.submit(Operation::Recv { from }, PLAIN, buffer, launch)
    }

    /// Allocates an arena on which operations of this group need no copies. Every rank must call it, with the
    /// same size, and with no operation in flight.
    pub fn alloc_shared(&self, device: &Arc<dyn Device>, spec: &ArenaSpec) -> Result<Arena, CollectiveError> {
        let wait = Wait::new(self.0.timeout, &self.0.cancel);
        let bytes = spec.len * spec.dtype.bytes();
        self.core()
            .set_up("shared allocation", bytes, &spec.name, |transport| {
                transport.alloc_shared(device, spec, &wait)
            })
    }

    /// The subgroup of this rank. Every rank of the group must call it, each with the subgroup that it belongs to
    /// (ranks of this group, ascending), and with no operation in flight.
    pub fn split(&self, name: &str, members: &[usize], executor: Executor) -> Result<Self, CollectiveError> {
        let wait = Wait::new(self.0.timeout, &self.0.cancel);
        let transport = self.core().set_up("split", 0, name, |transport| {
            transport.split(name, members, &wait)
        })?;
        Ok(Self::new(
            name,
            transport,
            executor,
            self.0.timeout,
            &self.0.cancel,
        ))
    }

    /// Bytes that this rank has put on the wire in this group, after the operations that are done.
    #[must_use]
    pub fn wire_bytes(&self) -> WireBytes {
        self.core().transport.wire_bytes()
    }

    /// Ends the executor after the operations that are queued. Without it, the last clone's drop closes the queue
    /// and the thread ends by itself.
    pub fn shutdown(&self) {
        let queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Queue { sender, thread }) = queue {
            drop(sender);
            let _ = thread.join();
        }
    }

    fn submit(&self, operation: Operation, reduce: ReduceOp, buffer: &Buffer, launch: Launch) -> Work {
        let Launch { after, traffic, tag } = launch;
        let (work, completion) = Work::pair(&format!("{operation} ({tag})"));
        let request = Request {
            operation,
            reduce,
            buffer: buffer.clone(),
            traffic,
            tag,
        };
        let job = Job {
            request,
            after,
            completion,
        };
        match self.0.executor {
            Executor::Inline => self.core().drive(job),
            Executor::Thread => {
                let queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(queue) = queue.as_ref() {
                    // A closed queue drops the job, which fails its event with a name.
                    let _ = queue.sender.send(job);
                }
            }
        }
        work
    }

    fn core(&self) -> std::sync::MutexGuard<'_, Core> {
        self.0.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const PLAIN: ReduceOp = ReduceOp::Sum { scale: 1.0 };

impl Queue {
    fn start(name: &str, core: &Arc<Mutex<Core>>) -> std::io::Result<Self> {
        let (sender, receiver): (_, Receiver<Job>) = sync_channel(QUEUE_BOUND);
        let core = core.clone();
        let thread = std::thread::Builder::new()
            .name(format!("ddp-comm-{name}"))
            .spawn(move || {
                for job in receiver {
                    core.lock().unwrap_or_else(PoisonError::into_inner).drive(job);
                }
            })?;
        Ok(Self { sender, thread })
    }
}

impl Core {
    fn drive(&mut self, job: Job) {
        let Job {
            request,
            after,
            completion,
        } = job;
        let sequence = self.sequence;
        self.sequence += 1;
        let outcome = self.run(sequence, &request, &after).map_err(|failure| {
            self.poison.get_or_insert_with(|| failure.to_string());
            let operation = request.operation.to_string();
            CollectiveError {
                sequence,
                ..self.error(&operation, request.buffer.bytes(), &request.tag, failure)
            }
        });
        completion.set(outcome);
    }

    fn run(&mut self, sequence: u64, request: &Request, after: &Event) -> Result<WorkTimes, Failure> {
        if let Some(earlier) = &self.poison {
            return Err(Failure::Poisoned(earlier.clone()));
        }
        self.await_input(after)?;
        let started = Instant::now();
        let mut held = request.buffer.hold()?;
        let wait = Wait::new(self.timeout, &self.cancel);
        if let Err(failure) = self.transport.execute(sequence, request, &mut held, &wait) {
            // Ranks that have not failed yet may still write here: no slice of it may exist any more.
            if SharedSegment::behind(&request.buffer).is_some() {
                held.abandon();
            }
            return Err(failure);
        }
        Ok(WorkTimes {
            started,
            ended: Instant::now(),
        })
    }

    /// Waits until the buffer is ready, the time is over or the generation is.
    fn await_input(&self, after: &Event) -> Result<(), Failure> {
        let deadline = Instant::now() + self.timeout;
        loop {
            let until = deadline.min(Instant::now() + INPUT_SLICE);
            match after.wait(until) {
                // Not the failure of what came before the event, which may be a time-out as well.
                Err(DeviceError::TimedOut { what, .. }) if after.poll().is_none() => {
                    if let Some(cause) = self.cancel.cause() {
                        return Err(Failure::GenerationOver(cause.to_owned()));
                    }
                    if until == deadline {
                        let waited_ms = self.timeout.as_millis() as u64;
                        return Err(DeviceError::TimedOut { what, waited_ms }.into());
                    }
                }
                outcome => return Ok(outcome?),
            }
        }
    }

    /// A collective call that is not an operation of the queue. A refusal, which all ranks hear, leaves the
    /// communicator usable; anything else may have left the ranks at different points.
    fn set_up<T>(
        &mut self,
        what: &str,
        bytes: usize,
        tag: &str,
        call: impl FnOnce(&mut dyn Transport) -> Result<T, Failure>,
    ) -> Result<T, CollectiveError> {
        let outcome = match &self.poison {
            Some(earlier) => Err(Failure::Poisoned(earlier.clone())),
            None => call(self.transport.as_mut()),
        };
        outcome.map_err(|failure| {
            if !matches!(failure, Failure::Refused { .. } | Failure::Device(_)) {
                self.poison.get_or_insert_with(|| failure.to_string());
            }
            self.error(what, bytes, tag, failure)
        })
    }

    fn error(&self, operation: &str, bytes: usize, tag: &str, failure: Failure) -> CollectiveError {
        CollectiveError {
            rank: self.global_rank,
            communicator: self.name.clone(),
            operation: operation.to_owned(),
            sequence: self.sequence,
            bytes,
            tag: tag.to_owned(),
            failure,
        }
    }
}
