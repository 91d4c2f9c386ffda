//! A device that puts everything off: an operation runs when somebody waits for an event behind it, in the waiter's
//! thread, and not a moment earlier. Code that reads results without waiting, or lets a collective start before its
//! input is there, gets yesterday's numbers or a race with a name.
//!
//! [`DeferredDevice::beside_host`] counts its memory as its own: the optimizer's state must never come to it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ddp_worker::device::{
    Arena, ArenaSpec, Buffer, CpuDevice, Device, DeviceError, Event, EventState, Fetch, HostSide, HostWork,
    Stream,
};
use ddp_worker::ops::Op;

/// Longer than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_mins(10);

/// Arenas that lie on the host, if there is one beside the device.
const STATE: [&str; 3] = ["exp_avg", "exp_avg_sq", "master weights"];

/// See the module.
pub struct DeferredDevice {
    cpu: Arc<CpuDevice>,
    queues: Mutex<Vec<Arc<Queue>>>,
    /// Numbers that the host asked for and has not read.
    unread: Arc<AtomicUsize>,
    ran_ahead: AtomicUsize,
    /// Streams that do not compute run an upload at once.
    hurries: bool,
    /// Products that are left until one makes a gradient that is no number.
    sound_products: Option<AtomicUsize>,
    /// Where there is a host beside it: what was allocated there.
    beside: Option<Mutex<Vec<Arena>>>,
    /// Names of arenas that the device does not reach.
    on_host: Vec<&'static str>,
    /// Before an operation is put off.
    before: Option<Box<dyn Fn() + Send + Sync>>,
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
    Op(Box<Op>),
    Upload(Buffer, Vec<u8>),
    Fetch(Buffer, Arc<Mutex<Option<Vec<u8>>>>),
    Copy(Buffer, Buffer),
    Host(HostWork),
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
            hurries: false,
            sound_products: None,
            beside: None,
            on_host: Vec::new(),
            before: None,
        }
    }

    /// Uploads on another stream than the first do not wait for anybody to need them: they come as early as events let
    /// them.
    pub fn with_early_uploads() -> Self {
        Self {
            hurries: true,
            ..Self::new()
        }
    }

    /// One gradient of a weight is no number, after so many that are.
    pub fn spoiling(sound_products: usize) -> Self {
        Self {
            sound_products: Some(AtomicUsize::new(sound_products)),
            ..Self::new()
        }
    }

    /// `before` each operation that it is given.
    pub fn hooked(before: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            before: Some(Box::new(before)),
            ..Self::new()
        }
    }

    pub fn beside_host() -> Self {
        Self {
            beside: Some(Mutex::default()),
            on_host: STATE.to_vec(),
            ..Self::new()
        }
    }

    /// The same where other arenas lie on the host too.
    pub fn beside_host_with(arenas: &[&'static str]) -> Self {
        Self {
            on_host: [&STATE, arenas].concat(),
            ..Self::beside_host()
        }
    }

    /// How often the host began a pass before it had read the numbers of the step before. What ran meanwhile is no
    /// measure: a collective of another thread may wait for the update, and thereby run it.
    pub fn ran_ahead(&self) -> usize {
        self.ran_ahead.load(Ordering::Relaxed)
    }

    /// All streams.
    pub fn streams(&self) -> Vec<Stream> {
        (0..self.queues.lock().unwrap().len() as u32)
            .map(Stream)
            .collect()
    }

    fn queue(&self, stream: Stream) -> Arc<Queue> {
        self.queues.lock().unwrap()[stream.0 as usize].clone()
    }

    /// Panics if a real device with memory of its own could not reach the buffer.
    fn reach(&self, buffer: &Buffer) {
        let name = buffer.arena().name();
        assert!(!self.on_host.contains(&name), "`{name}` is on the host");
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
            Self::Copy(from, to) => {
                let from = from.host_bytes()?;
                to.host_bytes_mut()?.copy_from_slice(&from);
                Ok(())
            }
            Self::Host(mut work) => {
                work();
                Ok(())
            }
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
        if let Some(before) = &self.before {
            before();
        }
        match &op {
            Op::EncoderForward(_) if self.unread.load(Ordering::Relaxed) > 0 => {
                self.ran_ahead.fetch_add(1, Ordering::Relaxed);
            }
            Op::Update(update) => self.reach(&update.param),
            Op::Cast(cast) => {
                self.reach(&cast.x);
                self.reach(&cast.out);
            }
            Op::ColumnSum(sum) => self.reach(&sum.out),
            Op::SquaredNorm(norm) => self.reach(&norm.x),
            _ => {}
        }
        let spoilt = match (&op, &self.sound_products) {
            (Op::LinearDweight(product), Some(left)) if left.fetch_sub(1, Ordering::Relaxed) == 0 => {
                Some(product.dweight.slice(0..1))
            }
            _ => None,
        };
        self.push(stream, Command::Op(Box::new(op)));
        if let Some(gradient) = spoilt {
            self.push(stream, Command::Upload(gradient, f32::NAN.to_ne_bytes().to_vec()));
        }
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
        self.reach(dst);
        self.push(stream, Command::Upload(dst.clone(), bytes.to_vec()));
        if self.hurries && stream != Stream(0) {
            let empty = |state: &State| state.commands.is_empty() && !state.running;
            // What goes wrong is told to whoever waits.
            let queue = self.queue(stream);
            drop(queue.drive(&self.cpu, Instant::now() + PATIENCE, empty));
        }
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn host_side(&self) -> Option<&dyn HostSide> {
        self.beside.is_some().then_some(self)
    }

    fn fetch(&self, stream: Stream, src: &Buffer) -> Fetch {
        let bytes = Arc::new(Mutex::new(None));
        self.push(stream, Command::Fetch(src.clone(), bytes.clone()));
        let unread = self.unread.clone();
        unread.fetch_add(1, Ordering::Relaxed);
        Fetch::new(self.record(stream), move || {
            unread.fetch_sub(1, Ordering::Relaxed);
            let copied = bytes.lock().unwrap().take();
            copied.ok_or_else(|| DeviceError::Upstream("the copy was skipped".into()))
        })
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.reach(src);
        self.synchronize(stream)?;
        Ok(src.host_bytes()?.to_vec())
    }
}

impl HostSide for DeferredDevice {
    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        let arena = self.cpu.alloc(spec)?;
        self.beside.as_ref().unwrap().lock().unwrap().push(arena.clone());
        Ok(arena)
    }

    fn named_stream(&self, _name: &str) -> Stream {
        self.stream()
    }

    unsafe fn copy(&self, stream: Stream, from: &Buffer, to: &Buffer) {
        let arenas = self.beside.as_ref().unwrap().lock().unwrap();
        let [from_host, to_host] = [from, to].map(|buffer| {
            arenas
                .iter()
                .any(|arena| std::ptr::addr_eq(arena.memory(), buffer.arena().memory()))
        });
        assert!(from_host != to_host, "{from:?} to {to:?} does not cross");
        self.reach(from);
        self.reach(to);
        self.push(stream, Command::Copy(from.clone(), to.clone()));
    }

    fn run(&self, stream: Stream, work: HostWork) {
        self.push(stream, Command::Host(work));
    }
}
