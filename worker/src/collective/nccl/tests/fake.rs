//! The world behind the fake library: its ranks, what goes wrong with them, and what was done to communicators.
#![allow(
    unsafe_code,
    reason = "communicators and streams at addresses, as a library is given them"
)]

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use super::device::{FakeStream, current};
use super::kernels::{Arena, Launch, Part};
use crate::collective::nccl::sys::{NO_COLOR, RawComm, RawStream, Status};

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
    /// Scaled sums that were made and not freed.
    pub(super) sums: usize,
    /// Scaled sums that were made.
    pub(super) sums_made: usize,
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
    pub(super) sums: BTreeMap<c_int, f64>,
    pub(super) next_sum: c_int,
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
            inner: Mutex::new(Inner {
                next_sum: 5,
                ..Inner::default()
            }),
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
