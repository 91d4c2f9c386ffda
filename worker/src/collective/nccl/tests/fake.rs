//! The world behind the fake library: its ranks, what goes wrong with them, what was done to communicators, and what runs
//! on their streams: ranks meet, the last one to come computes for all. And a device whose streams are threads.
#![allow(
    unsafe_code,
    reason = "communicators, streams and elements at addresses, as a library is given them"
)]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use half::bf16;

use super::deadline;
use crate::collective::nccl::comm::NativeDevice;
use crate::collective::nccl::library::{DataType, NO_COLOR, RawComm, RawStream, RedOp, Status};
use crate::device::{self, ArenaSpec, Buffer, CpuDevice, Device, DeviceError, Event, Stream};
use crate::ops::Op;

/// An internal error, as a library might report it.
pub(super) const BROKEN: Status = Status(3);

/// What a call gets that must not be made.
pub(super) const INVALID_ARGUMENT: Status = Status(4);

/// What goes wrong, and for whom. Operations count from 0 on each communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The call of an operation fails.
    CallFails { rank: usize, operation: usize },
    /// The call of an operation goes on in the background for ever.
    CallNeverSettles { rank: usize, operation: usize },
    /// The call of an operation does not return until [`FakeWorld::release`].
    CallBlocks { rank: usize, operation: usize },
    /// An abort does not return until [`FakeWorld::release`].
    AbortBlocks { rank: usize },
    /// An abort frees memory, which waits for the device: it does not return until so many communicators of the rank
    /// are being aborted, whose operations are all that runs there.
    AbortsWait { rank: usize, count: usize },
    /// An error that comes by itself, once so many operations were issued.
    Reported {
        rank: usize,
        operation: usize,
        status: Status,
    },
}

/// What each rank has said: color and key of a split.
type RollCall = BTreeMap<usize, (c_int, c_int)>;

/// All ranks of one fake library.
#[derive(Default)]
pub(super) struct FakeWorld {
    faults: Mutex<Vec<Fault>>,
    /// By key: what each rank has said there.
    roll_calls: Mutex<HashMap<String, RollCall>>,
    pub(super) arena: Arc<Arena>,
    pub(super) log: Mutex<Log>,
    /// What rank 0 was asked for: function, number of the element type, count.
    asked: Mutex<Vec<(String, c_int, usize)>>,
    blocked: Mutex<(usize, bool)>,
    released: Condvar,
    /// Aborts that have begun, by rank.
    aborts: Mutex<HashMap<usize, usize>>,
    abort_begun: Condvar,
}

/// What was done to communicators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Log {
    pub(super) made: usize,
    pub(super) aborted: usize,
    pub(super) destroyed: usize,
    /// Calls that a caller must not make.
    pub(super) violations: Vec<String>,
}

/// One rank's communicator.
pub(super) struct FakeComm {
    pub(super) world: Arc<FakeWorld>,
    pub(super) group: String,
    pub(super) rank: usize,
    /// Rank in the world, for faults.
    pub(super) global: usize,
    size: usize,
    /// That of the thread which made it.
    device: usize,
    busy: AtomicBool,
    freed: AtomicBool,
    pub(super) aborted: Arc<AtomicBool>,
    pub(super) inner: Mutex<Inner>,
}

#[derive(Default)]
pub(super) struct Inner {
    pub(super) background: Option<Background>,
    issued: usize,
    pub(super) splits: usize,
    messages: HashMap<(usize, usize), usize>,
}

pub(super) enum Background {
    /// So many more questions are answered with "in progress".
    Countdown(usize),
    Never,
    /// Until all ranks of the group have said something at this roll call.
    RollCall(String),
    /// The same; then the part is made.
    Split(String, usize),
}

thread_local! {
    pub(super) static CURRENT: RefCell<Option<Arc<FakeWorld>>> = const { RefCell::new(None) };
}

/// Worlds by number, which is what a meeting point is here.
pub(super) static WORLDS: Mutex<Vec<Arc<FakeWorld>>> = Mutex::new(Vec::new());

impl FakeWorld {
    pub(super) fn new(faults: &[Fault]) -> Arc<Self> {
        let world = Arc::new(Self::default());
        *world.faults.lock().unwrap() = faults.to_vec();
        world
    }

    /// Meeting points that this thread opens are in this world.
    pub(super) fn enter(self: &Arc<Self>) {
        CURRENT.set(Some(self.clone()));
    }

    pub(super) fn log(&self) -> Log {
        self.log.lock().unwrap().clone()
    }

    /// Operations of rank 0, in order: function, number of the element type as NCCL's header has it, count.
    pub(super) fn asked(&self) -> Vec<(String, c_int, usize)> {
        self.asked.lock().unwrap().clone()
    }

    /// Waits until so many calls are blocked.
    pub(super) fn await_blocked(&self, count: usize) {
        let mut blocked = self.blocked.lock().unwrap();
        while blocked.0 < count {
            blocked = self.released.wait(blocked).unwrap();
        }
    }

    /// Lets blocked calls return.
    pub(super) fn release(&self) {
        self.blocked.lock().unwrap().1 = true;
        self.released.notify_all();
    }

    pub(super) fn block_an_abort(&self, rank: usize) {
        if self.has(Fault::AbortBlocks { rank }) {
            self.block();
        }
    }

    /// An abort has let the operations of its communicator end; returns when it has freed its memory.
    pub(super) fn free_memory(&self, rank: usize) {
        let faults = self.faults.lock().unwrap().clone();
        let count = faults.iter().find_map(|fault| match fault {
            Fault::AbortsWait { rank: theirs, count } if *theirs == rank => Some(*count),
            _ => None,
        });
        let mut aborts = self.aborts.lock().unwrap();
        *aborts.entry(rank).or_default() += 1;
        self.abort_begun.notify_all();
        while count.is_some_and(|count| aborts[&rank] < count) {
            aborts = self.abort_begun.wait(aborts).unwrap();
        }
    }

    fn block(&self) {
        let mut blocked = self.blocked.lock().unwrap();
        blocked.0 += 1;
        self.released.notify_all();
        while !blocked.1 {
            blocked = self.released.wait(blocked).unwrap();
        }
    }

    fn has(&self, fault: Fault) -> bool {
        self.faults.lock().unwrap().contains(&fault)
    }

    pub(super) fn violation(&self, what: String) {
        self.log.lock().unwrap().violations.push(what);
    }

    /// True once `size` ranks have spoken.
    fn is_complete(&self, key: &str, size: usize) -> bool {
        self.roll_calls
            .lock()
            .unwrap()
            .get(key)
            .is_some_and(|said| said.len() == size)
    }

    pub(super) fn say(&self, key: &str, rank: usize, what: (c_int, c_int)) {
        let mut roll_calls = self.roll_calls.lock().unwrap();
        roll_calls.entry(key.to_owned()).or_default().insert(rank, what);
    }
}

impl FakeComm {
    pub(super) fn into_raw(self) -> RawComm {
        self.world.log.lock().unwrap().made += 1;
        // Never freed, so that a call after the end is seen and not undefined.
        Arc::into_raw(Arc::new(self)).cast_mut().cast()
    }

    /// Runs a call, unless the caller must not make it.
    pub(super) fn call(&self, name: &str, act: impl FnOnce(&mut Inner) -> Status) -> Status {
        if self.freed.load(Ordering::Acquire) {
            self.world
                .violation(format!("{name} on a communicator that is gone"));
            return INVALID_ARGUMENT;
        }
        if self.busy.swap(true, Ordering::AcqRel) {
            self.world.violation(format!("{name} beside another call"));
            return INVALID_ARGUMENT;
        }
        let status = act(&mut self.inner.lock().unwrap());
        self.busy.store(false, Ordering::Release);
        status
    }

    /// A call that uses the device, which must be the calling thread's.
    pub(super) fn expect_device(&self, name: &str) {
        if self.device == 0 || self.device != current() {
            self.world.violation(format!(
                "{name} in a thread that is not on the communicator's device"
            ));
        }
    }

    /// A call that must not come while another goes on.
    pub(super) fn ask(&self, name: &str, act: impl FnOnce(&mut Inner) -> Status) -> Status {
        self.expect_device(name);
        self.call(name, |inner| {
            if inner.background.is_some() {
                self.world
                    .violation(format!("{name} before the last call was done"));
                return INVALID_ARGUMENT;
            }
            act(inner)
        })
    }

    pub(super) fn progress(&self, inner: &mut Inner) -> Status {
        let going_on = match &mut inner.background {
            None => false,
            Some(Background::Countdown(left)) => {
                *left = left.saturating_sub(1);
                *left > 0
            }
            Some(Background::Never) => true,
            Some(Background::RollCall(key)) => !self.world.is_complete(key, self.size),
            Some(Background::Split(key, slot)) => {
                let complete = self.world.is_complete(key, self.size);
                if complete {
                    self.make_part(key, *slot);
                }
                !complete
            }
        };
        if going_on {
            return Status::IN_PROGRESS;
        }
        inner.background = None;
        let faults = self.world.faults.lock().unwrap();
        let reported = faults.iter().find_map(|fault| match fault {
            Fault::Reported {
                rank,
                operation,
                status,
            } if *rank == self.global && inner.issued > *operation => Some(*status),
            _ => None,
        });
        reported.unwrap_or(Status::SUCCESS)
    }

    fn make_part(&self, key: &str, slot: usize) {
        let said = self.world.roll_calls.lock().unwrap()[key].clone();
        let (color, _) = said[&self.rank];
        if color == NO_COLOR {
            return;
        }
        let mut members: Vec<(c_int, usize)> = said
            .iter()
            .filter(|(_, (theirs, _))| *theirs == color)
            .map(|(rank, (_, key))| (*key, *rank))
            .collect();
        members.sort_unstable();
        let part = Self {
            device: self.device,
            ..Self::new(
                &self.world,
                format!("{key}/{color}"),
                members.iter().position(|(_, rank)| *rank == self.rank).unwrap(),
                members.len(),
                self.global,
            )
        };
        // SAFETY: the caller of the split gave a place that stays.
        unsafe { *(slot as *mut RawComm) = part.into_raw() };
    }

    pub(super) fn new(
        world: &Arc<FakeWorld>,
        group: String,
        rank: usize,
        size: usize,
        global: usize,
    ) -> Self {
        Self {
            world: world.clone(),
            group,
            rank,
            global,
            size,
            device: current(),
            busy: AtomicBool::new(false),
            freed: AtomicBool::new(false),
            aborted: Arc::default(),
            inner: Mutex::default(),
        }
    }

    /// Puts an operation into the stream, or fails as asked.
    fn issue(
        &self,
        name: &str,
        stream: RawStream,
        part: impl FnOnce(&mut Inner) -> (String, usize, usize, Part),
    ) -> Status {
        let (rank, world) = (self.global, &self.world);
        self.ask(name, |inner| {
            let operation = inner.issued;
            inner.issued += 1;
            if world.has(Fault::CallFails { rank, operation }) {
                return BROKEN;
            }
            if world.has(Fault::CallBlocks { rank, operation }) {
                world.block();
            }
            let (key, place, size, part) = part(inner);
            if rank == 0 {
                let asked = (name.to_owned(), part.dtype.0, part.count);
                world.asked.lock().unwrap().push(asked);
            }
            let launch = Launch {
                arena: world.arena.clone(),
                key,
                place,
                size,
                part,
                aborted: self.aborted.clone(),
            };
            // SAFETY: a stream of the fake device, which outlives its communicators.
            unsafe { &*stream.cast::<FakeStream>() }.push(move || launch.run());
            inner.background = Some(if world.has(Fault::CallNeverSettles { rank, operation }) {
                Background::Never
            } else {
                Background::Countdown(3)
            });
            Status::IN_PROGRESS
        })
    }

    pub(super) fn collective(
        &self,
        name: &str,
        stream: RawStream,
        part: impl FnOnce(&Inner) -> Part,
    ) -> Status {
        self.issue(name, stream, |inner| {
            let key = format!("{}#{}", self.group, inner.issued - 1);
            (key, self.rank, self.size, part(inner))
        })
    }

    pub(super) fn message(&self, stream: RawStream, from: usize, to: usize, part: Part) -> Status {
        self.issue("a message", stream, |inner| {
            let number = inner.messages.entry((from, to)).or_default();
            *number += 1;
            let key = format!("{}:{from}>{to}#{number}", self.group);
            (key, usize::from(self.rank == to), 2, part)
        })
    }

    pub(super) fn free(&self) {
        self.freed.store(true, Ordering::Release);
    }
}

/// One rank's part of an operation; addresses as numbers, since threads pass them on.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) kind: Kind,
    pub(super) source: usize,
    pub(super) target: usize,
    pub(super) count: usize,
    pub(super) dtype: DataType,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    AllReduce(RedOp),
    ReduceScatter(RedOp),
    AllGather,
    Broadcast(usize),
    Send,
    Recv,
}

/// Where parts of the same operation meet.
#[derive(Default)]
pub(super) struct Arena {
    meetings: Mutex<HashMap<String, Meeting>>,
    changed: Condvar,
}

#[derive(Default)]
struct Meeting {
    parts: HashMap<usize, (Part, Arc<AtomicBool>)>,
    complete: bool,
}

impl Arena {
    /// Brings a part to a meeting of `size` and waits until all have come. Without result if a rank is aborted: its
    /// memory may be gone.
    fn attend(&self, key: &str, place: usize, size: usize, part: Part, aborted: &Arc<AtomicBool>) {
        let mut meetings = self.meetings.lock().unwrap();
        let meeting = meetings.entry(key.to_owned()).or_default();
        meeting.parts.insert(place, (part, aborted.clone()));
        let present = meeting.parts.values();
        if present
            .filter(|(_, aborted)| !aborted.load(Ordering::Acquire))
            .count()
            == size
        {
            let parts: Vec<Part> = (0..size).map(|place| meeting.parts[&place].0.clone()).collect();
            compute(&parts);
            meeting.complete = true;
            self.changed.notify_all();
            return;
        }
        while !aborted.load(Ordering::Acquire) && !meetings[key].complete {
            meetings = self.changed.wait(meetings).unwrap();
        }
    }

    /// Aborts a rank: from now on nobody touches its memory.
    pub(super) fn abort(&self, aborted: &AtomicBool) {
        let _meetings = self.meetings.lock().unwrap();
        aborted.store(true, Ordering::Release);
        self.changed.notify_all();
    }
}

/// What runs on a stream for one rank.
pub(super) struct Launch {
    pub(super) arena: Arc<Arena>,
    pub(super) key: String,
    pub(super) place: usize,
    pub(super) size: usize,
    pub(super) part: Part,
    pub(super) aborted: Arc<AtomicBool>,
}

impl Launch {
    pub(super) fn run(self) {
        let Self {
            arena,
            key,
            place,
            size,
            part,
            aborted,
        } = self;
        arena.attend(&key, place, size, part, &aborted);
    }
}

fn compute(parts: &[Part]) {
    let kinds: Vec<Kind> = parts.iter().map(|part| part.kind).collect();
    match kinds[0] {
        Kind::AllReduce(op) => {
            let result = reduced(parts, op, parts[0].count);
            for part in parts {
                put(part, &result);
            }
        }
        Kind::ReduceScatter(op) => {
            let result = reduced(parts, op, parts[0].count * parts.len());
            for (part, slice) in parts.iter().zip(result.chunks(parts[0].count)) {
                put(part, slice);
            }
        }
        Kind::AllGather => {
            let all: Vec<u8> = parts.iter().flat_map(|part| bytes(part, part.count)).collect();
            for part in parts {
                put_bytes(part, &all);
            }
        }
        Kind::Broadcast(root) => {
            let all = bytes(&parts[root], parts[root].count);
            for part in parts {
                put_bytes(part, &all);
            }
        }
        // The sender is the first of two.
        Kind::Send => put_bytes(&parts[1], &bytes(&parts[0], parts[0].count)),
        Kind::Recv => unreachable!("a receiver is the second of two"),
    }
}

fn reduced(parts: &[Part], op: RedOp, len: usize) -> Vec<f64> {
    let mut inputs = parts.iter().map(|part| {
        let is_a_sum = matches!(part.kind, Kind::AllReduce(_) | Kind::ReduceScatter(_));
        assert!(is_a_sum, "ranks are in different operations: {parts:?}");
        let numbers: Vec<f64> = bytes(part, len)
            .chunks(width(part.dtype))
            .map(|raw| number(raw, part.dtype))
            .collect();
        numbers
    });
    let first = inputs.next().unwrap();
    inputs.fold(first, |mut sum, input| {
        for (sum, x) in sum.iter_mut().zip(input) {
            *sum = if op == RedOp::MAX { sum.max(x) } else { *sum + x };
        }
        sum
    })
}

fn width(dtype: DataType) -> usize {
    match dtype {
        DataType::UINT8 => 1,
        DataType::BFLOAT16 => 2,
        DataType::INT32 | DataType::FLOAT32 => 4,
        _ => 8,
    }
}

fn number(raw: &[u8], dtype: DataType) -> f64 {
    match dtype {
        DataType::UINT8 => f64::from(raw[0]),
        DataType::BFLOAT16 => bf16::from_ne_bytes(raw.try_into().unwrap()).to_f64(),
        DataType::INT32 => f64::from(i32::from_ne_bytes(raw.try_into().unwrap())),
        DataType::FLOAT32 => f64::from(f32::from_ne_bytes(raw.try_into().unwrap())),
        _ => f64::from_ne_bytes(raw.try_into().unwrap()),
    }
}

fn put(part: &Part, numbers: &[f64]) {
    let raw: Vec<u8> = numbers
        .iter()
        .flat_map(|x| match part.dtype {
            DataType::UINT8 => vec![*x as u8],
            DataType::BFLOAT16 => bf16::from_f64(*x).to_ne_bytes().to_vec(),
            DataType::INT32 => (*x as i32).to_ne_bytes().to_vec(),
            DataType::FLOAT32 => (*x as f32).to_ne_bytes().to_vec(),
            _ => x.to_ne_bytes().to_vec(),
        })
        .collect();
    put_bytes(part, &raw);
}

fn bytes(part: &Part, len: usize) -> Vec<u8> {
    let len = len * width(part.dtype);
    // SAFETY: the caller of the library vouched for so many elements, and waits for this.
    unsafe { std::slice::from_raw_parts(part.source as *const u8, len) }.to_vec()
}

fn put_bytes(part: &Part, raw: &[u8]) {
    // SAFETY: as above; nobody else accesses them meanwhile.
    unsafe { std::slice::from_raw_parts_mut(part.target as *mut u8, raw.len()) }.copy_from_slice(raw);
}

thread_local! {
    /// Address of the device that the thread's calls go to; 0 if it has chosen none.
    static CURRENT_DEVICE: Cell<usize> = const { Cell::new(0) };
}

/// Which device the calls of this thread go to; 0 if it has chosen none.
pub(super) fn current() -> usize {
    CURRENT_DEVICE.get()
}

type Job = Box<dyn FnOnce() + Send>;
type Slot = Arc<Mutex<Option<DeviceError>>>;

/// A device whose streams are threads: operations run later, in order, and beside each other.
pub(super) struct FakeDevice {
    cpu: Arc<CpuDevice>,
    streams: Mutex<Vec<Arc<FakeStream>>>,
    /// As with a GPU, memory is not gone while something that is in flight may use it.
    arenas: Mutex<Vec<device::Arena>>,
}

/// One stream; its address is what the fake library is given.
pub(super) struct FakeStream {
    jobs: Mutex<Sender<Job>>,
    error: Slot,
}

impl FakeDevice {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            cpu: Arc::new(CpuDevice::new(1).unwrap()),
            streams: Mutex::default(),
            arenas: Mutex::default(),
        })
    }

    fn with<T>(&self, stream: Stream, act: impl FnOnce(&FakeStream) -> T) -> T {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        act(&streams[stream.0 as usize])
    }

    /// Work that may fail: skipped once something before it in the stream has.
    fn attempt(&self, stream: Stream, work: impl FnOnce() -> Result<(), DeviceError> + Send + 'static) {
        self.with(stream, |stream| {
            let error = stream.error.clone();
            stream.push(move || {
                if error.lock().unwrap().is_none()
                    && let Err(failed) = work()
                {
                    *error.lock().unwrap() = Some(failed);
                }
            });
        });
    }
}

impl FakeStream {
    fn start() -> Arc<Self> {
        let (jobs, queue) = channel::<Job>();
        std::thread::spawn(move || queue.into_iter().for_each(|job| job()));
        Arc::new(Self {
            jobs: Mutex::new(jobs),
            error: Arc::default(),
        })
    }

    /// Puts work at the end of the stream.
    fn push(&self, work: impl FnOnce() + Send + 'static) {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.send(Box::new(work))
            .expect("the thread lives as long as the stream");
    }
}

impl Device for FakeDevice {
    fn name(&self) -> String {
        "fake".into()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<device::Arena, DeviceError> {
        let arena = self.cpu.alloc(spec)?;
        self.arenas.lock().unwrap().push(arena.clone());
        Ok(arena)
    }

    fn stream(&self) -> Stream {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.push(FakeStream::start());
        Stream(streams.len() as u32 - 1)
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        let cpu = self.cpu.clone();
        self.attempt(stream, move || op.run(cpu.cpu()));
    }

    fn record(&self, stream: Stream) -> Event {
        let (event, signal) = Event::pair("a stream");
        self.with(stream, |stream| {
            let error = stream.error.clone();
            stream.push(move || {
                let outcome = error.lock().unwrap().clone().map_or(Ok(()), Err);
                signal.set(outcome);
            });
        });
        event
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        let event = event.clone();
        self.attempt(stream, move || event.wait(deadline));
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.record(stream).wait(deadline())
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        let (dst, bytes) = (dst.clone(), bytes.to_vec());
        self.attempt(stream, move || {
            dst.host_bytes_mut()?.copy_from_slice(&bytes);
            Ok(())
        });
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.synchronize(stream)?;
        Ok(src.host_bytes()?.to_vec())
    }
}

/// The device as NCCL sees it.
pub(super) struct FakeNative(pub(super) Arc<FakeDevice>);

impl NativeDevice for FakeNative {
    fn bind(&self) -> Result<(), DeviceError> {
        CURRENT_DEVICE.set(Arc::as_ptr(&self.0) as usize);
        Ok(())
    }

    fn stream(&self, _name: &str) -> Stream {
        self.0.stream()
    }

    fn raw_stream(&self, stream: Stream) -> Result<RawStream, DeviceError> {
        // Never moved, and kept as long as the device.
        Ok(self.0.with(stream, |stream| {
            std::ptr::from_ref::<FakeStream>(stream).cast_mut().cast()
        }))
    }

    fn address(&self, buffer: &Buffer) -> Result<*mut c_void, DeviceError> {
        let host = buffer.arena().memory_as::<crate::device::HostMemory>();
        let base = host.expect("allocated by the fake device").ptr().as_ptr();
        Ok(base.wrapping_add(buffer.start()).cast())
    }

    /// An operation of which nobody has heard that it ended may still come: its memory stays for ever.
    fn abandon(&self) {
        std::mem::forget(std::mem::take(&mut *self.0.arenas.lock().unwrap()));
    }
}
