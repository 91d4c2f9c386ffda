//! The ordered queue of one group of ranks.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::core::{Core, Job};
use super::pending::Pending;
use super::stream_transport::Route;
use super::{
    CollectiveError, Operation, ReduceOp, Request, StreamTransport, Traffic, Transport, Wait, WireBytes, Work,
};
use crate::device::{Arena, ArenaSpec, Buffer, Device, Event};
use crate::session::{Cancel, Waiting};
use crate::timeline::Timeline;

/// Most operations in a queue; one more blocks the caller until there is room.
const QUEUE_BOUND: usize = 1024;

/// Beyond its own bound an operation is given this long to say so itself, with the better error.
const GRACE: Duration = Duration::from_secs(5);

/// Who drives the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executor {
    /// A thread of its own: operations overlap with what the caller does meanwhile.
    Thread,
    /// The calling thread: an operation is done when the call returns.
    Inline,
}

/// What becomes of an operation that is issued.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Driver {
    Thread,
    Caller,
    /// The device: the caller puts it into a stream.
    Stream,
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
    driver: Driver,
    timeline: Timeline,
    core: Arc<Mutex<Core>>,
    queue: Mutex<Option<Queue>>,
}

struct Queue {
    sender: SyncSender<Job>,
    thread: std::thread::JoinHandle<()>,
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
        let timeline = Timeline::default();
        Self::over(
            name,
            Route::Host(transport),
            executor,
            (timeout, cancel),
            timeline,
        )
    }

    /// A communicator whose operations the device carries out, on a stream of the transport. `timeout` bounds the
    /// call of each operation; what bounds the operation is the transport's.
    #[must_use]
    pub fn on_stream(
        name: &str,
        transport: Box<dyn StreamTransport>,
        timeout: Duration,
        cancel: &Cancel,
    ) -> Self {
        let (route, timeline) = (Route::Stream(transport), Timeline::default());
        Self::over(name, route, Executor::Inline, (timeout, cancel), timeline)
    }

    fn over(
        name: &str,
        route: Route,
        executor: Executor,
        (timeout, cancel): (Duration, &Cancel),
        timeline: Timeline,
    ) -> Self {
        let rank = route.rank();
        let members = route.members().to_vec();
        let is_host = matches!(route, Route::Host(_));
        let pending = Pending::of(name);
        let waiting: Arc<dyn Waiting> = pending.clone();
        cancel.listen_to(Arc::downgrade(&waiting));
        let core = Core {
            name: name.to_owned(),
            global_rank: members[rank],
            timeout,
            cancel: cancel.clone(),
            route,
            sequence: 0,
            poison: None,
            pending,
            timeline: timeline.clone(),
        };
        let core = Arc::new(Mutex::new(core));
        let (driver, queue) = match executor {
            _ if !is_host => (Driver::Stream, None),
            Executor::Inline => (Driver::Caller, None),
            Executor::Thread => match Queue::start(name, &core) {
                Ok(queue) => (Driver::Thread, Some(queue)),
                Err(error) => {
                    // Whoever issues an operation learns why it cannot run.
                    let why = format!("the system cannot start a thread for `{name}`: {error}");
                    core.lock().unwrap_or_else(PoisonError::into_inner).poison = Some(why);
                    (Driver::Caller, None)
                }
            },
        };
        Self(Arc::new(Inner {
            name: name.to_owned(),
            rank,
            members,
            timeout,
            cancel: cancel.clone(),
            driver,
            timeline,
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

    /// When to stop waiting for an operation whose turn comes now: its bound, and some time for it to say so itself.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.0.timeout + GRACE
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
        let bytes = spec.bytes();
        self.core()
            .set_up("shared allocation", bytes, &spec.name, |route| {
                route.alloc_shared(device, spec, &wait)
            })
    }

    /// The subgroup of this rank. Every rank of the group must call it, each with the subgroup that it belongs to
    /// (ranks of this group, ascending), and with no operation in flight. On a stream there is no use for
    /// `executor`: the subgroup gets a stream of its own.
    pub fn split(&self, name: &str, members: &[usize], executor: Executor) -> Result<Self, CollectiveError> {
        let wait = Wait::new(self.0.timeout, &self.0.cancel);
        let route = self
            .core()
            .set_up("split", 0, name, |route| route.split(name, members, &wait))?;
        let (timeout, cancel) = (self.0.timeout, &self.0.cancel);
        Ok(Self::over(
            name,
            route,
            executor,
            (timeout, cancel),
            self.0.timeline.clone(),
        ))
    }

    /// Of the operations of this group and of its subgroups; closed until somebody opens it.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.0.timeline
    }

    /// Bytes that this rank has put on the wire in this group, after the operations that are done.
    #[must_use]
    pub fn wire_bytes(&self) -> WireBytes {
        self.core().route.wire_bytes()
    }

    /// Ends the executor after the operations that are queued. Without it, the last clone's drop closes the queue
    /// and the thread ends by itself. On a stream: waits for what is in it and leaves the group.
    pub fn shutdown(&self) {
        let queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Queue { sender, thread }) = queue {
            drop(sender);
            let _ = thread.join();
        }
        if let Route::Stream(transport) = &mut self.core().route {
            transport.shutdown(&Wait::new(self.0.timeout, &self.0.cancel));
        }
    }

    /// Instead of [`Communicator::shutdown`] where something has failed and the process is about to end: on a stream,
    /// waits a bounded time for what is being aborted, so that no library works on while the process is taken down.
    pub fn abandon(&self) {
        if self.0.driver == Driver::Stream
            && let Route::Stream(transport) = &mut self.core().route
        {
            transport.abandon();
        }
    }

    fn submit(&self, operation: Operation, reduce: ReduceOp, buffer: &Buffer, launch: Launch) -> Work {
        let Launch { after, traffic, tag } = launch;
        let request = Request {
            operation,
            reduce,
            buffer: buffer.clone(),
            traffic,
            tag,
        };
        if self.0.driver == Driver::Stream {
            return self.core().enqueue(&request, &after);
        }
        let (work, completion) = Work::pair(&format!("{operation} ({})", request.tag));
        let job = Job {
            request,
            after,
            completion,
        };
        if self.0.driver == Driver::Caller {
            self.core().drive(job);
            return work;
        }
        let queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queue.as_ref() {
            // A closed queue drops the job, which fails its event with a name.
            let _ = queue.sender.send(job);
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
