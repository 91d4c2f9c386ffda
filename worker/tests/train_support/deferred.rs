//! A device that puts everything off: an operation runs when somebody waits for an event behind it, in the waiter's
//! thread, and not a moment earlier. Code that reads results without waiting, or lets a collective start before its
//! input is there, gets yesterday's numbers or a race with a name.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ddp_worker::device::{
    Arena, ArenaSpec, Buffer, CpuDevice, Device, DeviceError, Event, EventState, Fetch, Stream,
};
use ddp_worker::ops::Op;

/// Longer than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_mins(2);

/// See the module.
pub struct DeferredDevice {
    cpu: Arc<CpuDevice>,
    queues: Mutex<Vec<Arc<Queue>>>,
    /// Numbers that the host asked for and has not read.
    unread: Arc<AtomicUsize>,
    ran_ahead: AtomicUsize,
}

/// A stream. Whoever waits for a point in it runs what comes before, unless somebody else is at it.
#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    moved: Condvar,
}

#[derive(Default)]
struct State {
    commands: VecDeque<Command>,
    recorded: u64,
    reached: u64,
    /// A command is being run, by somebody who does not hold the lock: it may itself be a wait.
    running: bool,
    /// First error since the last synchronisation.
    error: Option<DeviceError>,
}

enum Command {
    Op(Op),
    Upload(Buffer, Vec<u8>),
    Fetch(Buffer, Arc<Mutex<Option<Vec<u8>>>>),
    Wait(Event, Instant),
    Marker,
}

impl DeferredDevice {
    pub fn new() -> Self {
        Self {
            cpu: Arc::new(CpuDevice::new(1).unwrap()),
            queues: Mutex::default(),
            unread: Arc::default(),
            ran_ahead: AtomicUsize::new(0),
        }
    }

    /// How often the host began a pass before it had read the numbers of the step before. What ran meanwhile is no
    /// measure: a collective of another thread may wait for the update, and thereby run it.
    pub fn ran_ahead(&self) -> usize {
        self.ran_ahead.load(Ordering::Relaxed)
    }

    fn queue(&self, stream: Stream) -> Arc<Queue> {
        self.queues.lock().unwrap()[stream.0 as usize].clone()
    }

    fn push(&self, stream: Stream, command: Command) {
        let queue = self.queue(stream);
        queue.state.lock().unwrap().commands.push_back(command);
    }
}

impl Queue {
    /// Runs commands, or lets others run them, until `enough` or `deadline`.
    fn drive(
        &self,
        cpu: &CpuDevice,
        deadline: Instant,
        enough: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, DeviceError> {
        let mut state = self.state.lock().unwrap();
        while !enough(&state) {
            if state.running {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    let what = "a point in a deferred stream".to_owned();
                    return Err(DeviceError::TimedOut { what, waited_ms: 0 });
                }
                state = self.moved.wait_timeout(state, left).unwrap().0;
                continue;
            }
            let command = state
                .commands
                .pop_front()
                .expect("what is waited for is in the queue");
            state.running = true;
            let failed = state.error.is_some();
            drop(state);
            let is_marker = matches!(command, Command::Marker);
            let done = if failed { Ok(()) } else { command.run(cpu) };
            state = self.state.lock().unwrap();
            state.running = false;
            state.reached += u64::from(is_marker);
            if let Err(error) = done {
                state.error = Some(error);
            }
            self.moved.notify_all();
        }
        Ok(state)
    }
}

impl Command {
    fn run(self, cpu: &CpuDevice) -> Result<(), DeviceError> {
        match self {
            Self::Marker => Ok(()),
            Self::Op(op) => op.run(cpu.cpu()),
            Self::Upload(dst, bytes) => dst
                .host_bytes_mut()
                .map(|mut target| target.copy_from_slice(&bytes)),
            Self::Fetch(src, bytes) => src
                .host_bytes()
                .map(|source| *bytes.lock().unwrap() = Some(source.to_vec())),
            Self::Wait(event, deadline) => event.wait(deadline),
        }
    }
}

struct Point {
    cpu: Arc<CpuDevice>,
    queue: Arc<Queue>,
    marker: u64,
}

impl EventState for Point {
    fn poll(&self) -> Option<Result<(), DeviceError>> {
        let state = self.queue.state.lock().unwrap();
        (state.reached >= self.marker).then(|| state.error.clone().map_or(Ok(()), Err))
    }

    fn wait(&self, deadline: Instant) -> Result<(), DeviceError> {
        let reached = |state: &State| state.reached >= self.marker;
        let state = self.queue.drive(&self.cpu, deadline, reached)?;
        state.error.clone().map_or(Ok(()), Err)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Device for DeferredDevice {
    fn name(&self) -> String {
        "deferred".into()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        self.cpu.alloc(spec)
    }

    fn stream(&self) -> Stream {
        let mut queues = self.queues.lock().unwrap();
        queues.push(Arc::default());
        Stream(queues.len() as u32 - 1)
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        if matches!(op, Op::EncoderForward(_)) && self.unread.load(Ordering::Relaxed) > 0 {
            self.ran_ahead.fetch_add(1, Ordering::Relaxed);
        }
        self.push(stream, Command::Op(op));
    }

    fn record(&self, stream: Stream) -> Event {
        let queue = self.queue(stream);
        let marker = {
            let mut state = queue.state.lock().unwrap();
            state.commands.push_back(Command::Marker);
            state.recorded += 1;
            state.recorded
        };
        Event::new(Point {
            cpu: self.cpu.clone(),
            queue,
            marker,
        })
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        self.push(stream, Command::Wait(event.clone(), deadline));
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        let queue = self.queue(stream);
        let empty = |state: &State| state.commands.is_empty() && !state.running;
        let mut state = queue.drive(&self.cpu, Instant::now() + PATIENCE, empty)?;
        state.error.take().map_or(Ok(()), Err)
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        self.push(stream, Command::Upload(dst.clone(), bytes.to_vec()));
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn fetch(&self, stream: Stream, src: &Buffer) -> Fetch {
        let bytes = Arc::new(Mutex::new(None));
        self.push(stream, Command::Fetch(src.clone(), bytes.clone()));
        let unread = self.unread.clone();
        unread.fetch_add(1, Ordering::Relaxed);
        Fetch::new(self.record(stream), move || {
            unread.fetch_sub(1, Ordering::Relaxed);
            Ok(bytes.lock().unwrap().take().expect("the copy has run"))
        })
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.synchronize(stream)?;
        Ok(src.host_bytes()?.to_vec())
    }
}
