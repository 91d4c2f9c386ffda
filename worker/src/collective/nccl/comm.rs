//! One communicator through its life: made, used, given up or left.
//!
//! Whoever asks something of NCCL holds the lock of the handle until the answer is complete, so an abort never comes
//! between the parts of another thread's operation. Of a communicator that is given up the verdict is written down
//! first, and those of all others of the process; then the watchdog aborts them: an abort lets the stream go on, and
//! nobody may take that for success.
#![allow(unsafe_code, reason = "NCCL is given addresses of device memory")]

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use super::handle::{Call, Handle};
use super::lane::Lane;
use super::library::CallError;
use super::recorder::{Entry, IN_FLIGHT_BOUND, Oldest, Points, Recorder};
use super::reduction::{Reduction, ScaledSums, data_type};
use super::sys::RedOp;
use super::ticket::Ticket;
use super::translate::{Share, offset};
use super::verdict::{Observation, Verdict, judge};
use super::watchdog::Watchdog;
use crate::collective::{Failure, Flight, Request, Wait};
use crate::device::{Arena, Event};
use crate::session::{Cancel, Waiting, Wanted};

/// How long NCCL is asked without a rest whether it is done with a call.
const SPIN: Duration = Duration::from_micros(200);
/// The rest between two questions after that.
const REST: Duration = Duration::from_micros(50);

/// Who belongs to a communicator, and how long it waits.
#[derive(Clone)]
pub(super) struct Membership {
    /// For errors and logs.
    pub(super) name: String,
    /// Of this process in the group.
    pub(super) rank: usize,
    /// Global ranks, in order of rank.
    pub(super) members: Vec<usize>,
    /// Bound of each phase of an operation.
    pub(super) timeout: Duration,
    /// Set when the generation is over.
    pub(super) cancel: Cancel,
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
}

/// See the module.
pub(super) struct Comm {
    membership: Membership,
    lane: Lane,
    /// What a barrier carries.
    token: Arena,
    state: Mutex<State>,
    recorder: Mutex<Recorder>,
    fate: OnceLock<Fate>,
    /// What was split from it, in order.
    parts: Mutex<Vec<Weak<Self>>>,
}

/// The end of a communicator that was given up.
struct Fate {
    /// Why.
    verdict: Verdict,
    /// The operations before this one had ended when the verdict was written, so that they are not touched by it.
    first_open: u64,
}

struct State {
    /// Gone once it was aborted or left.
    handle: Option<Handle>,
    sums: ScaledSums,
}

impl Waiting for Comm {
    fn waiting(&self) -> Option<Wanted> {
        // As of the watchdog's last look. Whoever holds the recorder is about to change what it says.
        let oldest = self.recorder.try_lock().ok()?.oldest()?;
        Some(Wanted {
            what: format!("{} of `{}`, {},", oldest.name, self.membership.name, oldest.phase),
            waited: oldest.since.elapsed(),
            ranks: Vec::new(),
        })
    }
}

impl Comm {
    /// Makes a communicator: `begin` starts it, and this waits until it is there. The watchdog has it from the
    /// beginning, so that one that does not get ready is aborted too.
    pub(super) fn make(
        membership: Membership,
        lane: Lane,
        watchdog: &Watchdog,
        wait: &Wait,
        begin: impl FnOnce() -> Result<Handle, Failure>,
    ) -> Result<Arc<Self>, Failure> {
        lane.bind()?;
        let token = lane.token()?;
        let handle = Some(begin()?);
        let comm = Arc::new(Self {
            membership,
            lane,
            token,
            state: Mutex::new(State {
                handle,
                sums: ScaledSums::default(),
            }),
            recorder: Mutex::default(),
            fate: OnceLock::new(),
            parts: Mutex::default(),
        });
        watchdog.add(&comm);
        comm.ask(None, wait, |_, _| Ok(()))?;
        let waiting: Arc<dyn Waiting> = comm.clone();
        comm.membership.cancel.listen_to(Arc::downgrade(&waiting));
        Ok(comm)
    }

    /// Makes a part of this group; the ranks that name the same color come together. None: this rank only helps.
    pub(super) fn split(
        &self,
        part: Option<(usize, Membership)>,
        watchdog: &Watchdog,
        wait: &Wait,
    ) -> Result<Option<Arc<Self>>, Failure> {
        self.lane.bind()?;
        let (color, key) = match &part {
            Some((color, membership)) => (Some(*color), membership.rank),
            None => (None, 0),
        };
        let slot = self.ask(None, wait, |handle, _| handle.split(color, key))?;
        let Some((_, membership)) = part else {
            return Ok(None);
        };
        let begin = || {
            let state = self.lock();
            let part = state.handle.as_ref().and_then(|handle| handle.part(slot));
            part.ok_or_else(|| Failure::Library {
                call: "ncclCommSplit".into(),
                words: "it gave no communicator".into(),
                of_peer: false,
            })
        };
        let lane = self.lane.beside(&membership.name);
        let part = Self::make(membership, lane, watchdog, wait, begin)?;
        self.parts().push(Arc::downgrade(&part));
        Ok(Some(part))
    }

    pub(super) fn membership(&self) -> &Membership {
        &self.membership
    }

    pub(super) fn lane(&self) -> &Lane {
        &self.lane
    }

    /// Puts an operation into the stream.
    pub(super) fn issue(
        self: &Arc<Self>,
        sequence: u64,
        request: &Request,
        after: &Event,
        wait: &Wait,
    ) -> Result<Arc<dyn Flight>, Failure> {
        let share = self.share(request);
        share.check()?;
        self.make_room(wait)?;
        self.lane.bind()?;
        // Before the lock: an event that is not the device's holds up the host.
        self.lane.wait(after, wait.deadline);
        let started = self.lane.record();
        self.put(sequence, &share, wait)?;
        let points = Points::new(started, self.lane.record());
        let entry = Entry {
            sequence,
            operation: request.operation.to_string(),
            tag: request.tag.clone(),
            bytes: request.buffer.bytes(),
            points: points.clone(),
            _memory: request.buffer.clone(),
        };
        self.recorder().launched(entry, Instant::now());
        Ok(Arc::new(Ticket::new(self.clone(), sequence, points)))
    }

    fn put(&self, sequence: u64, share: &Share<'_>, wait: &Wait) -> Result<(), Failure> {
        let token = self.token.whole();
        let (buffer, dtype) = (share.buffer(&token), share.dtype());
        let base = self.lane.address(buffer)?;
        let stream = self.lane.raw_stream()?;
        let (given, taken) = (share.given(), share.taken());
        let reduction = Reduction::of(share.request.reduce, dtype, share.size);
        self.ask(Some(sequence), wait, |handle, sums| {
            let call = Call {
                what: share.what(|| match reduction {
                    Reduction::Plain(op) => Ok(op),
                    Reduction::PreMultiplied(factor) => sums.get(handle, factor, dtype),
                    Reduction::Rescaled(_) => Ok(RedOp::SUM),
                })?,
                source: offset(base, given.start, dtype),
                target: offset(base, taken.start, dtype),
                count: share.count(),
                dtype: data_type(dtype),
                stream,
            };
            // SAFETY: the addresses are within a buffer of the device. The recorder keeps it until the stream has
            // passed the operation; where that is never seen, `Drop` keeps it for ever unless the communicator was
            // aborted or left. The stream is the device's, which the lane keeps.
            unsafe { handle.issue(&call) }
        })?;
        if let (true, Reduction::Rescaled(factor)) = (share.reduces(), reduction) {
            self.lane.scale(buffer.slice(taken), factor);
        }
        Ok(())
    }

    /// The operation as one of this rank's.
    pub(super) fn share<'a>(&self, request: &'a Request) -> Share<'a> {
        Share {
            request,
            rank: self.membership.rank,
            size: self.membership.size(),
        }
    }

    /// Asks something of NCCL and waits until it is done with it, which needs other ranks only where it says so.
    /// On failure the communicator is given up: the watchdog aborts it, since this thread may be needed elsewhere.
    fn ask<T>(
        &self,
        sequence: Option<u64>,
        wait: &Wait,
        question: impl FnOnce(&mut Handle, &mut ScaledSums) -> Result<T, CallError>,
    ) -> Result<T, Failure> {
        let mut state = self.lock();
        self.alive(sequence)?;
        let State { handle, sums } = &mut *state;
        let Some(handle) = handle.as_mut() else {
            return Err(Failure::Invalid("the communicator was left".into()));
        };
        let answer = match question(handle, sums) {
            Ok(answer) => self.settle(handle, wait).map(|()| answer),
            Err(error) => Err(error.into()),
        };
        answer.inspect_err(|failure| {
            self.give_up(Verdict {
                failure: failure.clone(),
                culprit: sequence,
            });
        })
    }

    /// Waits until nothing goes on in the background.
    fn settle(&self, handle: &mut Handle, wait: &Wait) -> Result<(), Failure> {
        let started = Instant::now();
        while !handle.is_settled()? {
            self.alive(None)?;
            wait.check(|| self.membership.others())?;
            if started.elapsed() < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(REST);
            }
        }
        Ok(())
    }

    /// Waits until one more operation may be put into the stream.
    fn make_room(&self, wait: &Wait) -> Result<(), Failure> {
        loop {
            {
                let mut recorder = self.recorder();
                recorder.look(Instant::now());
                if recorder.in_flight() < IN_FLIGHT_BOUND {
                    return Ok(());
                }
            }
            self.alive(None)?;
            wait.check(|| self.membership.others())?;
            std::thread::sleep(REST);
        }
    }

    /// An error once it was given up, in the words that are due to this operation.
    pub(super) fn alive(&self, sequence: Option<u64>) -> Result<(), Failure> {
        self.fate
            .get()
            .map_or(Ok(()), |fate| Err(fate.verdict.of(sequence)))
    }

    /// The failure of an operation in the stream, if it was given up before the stream had passed it.
    pub(super) fn doom(&self, sequence: u64) -> Option<Failure> {
        let fate = self.fate.get()?;
        (sequence >= fate.first_open).then(|| fate.verdict.of(Some(sequence)))
    }

    /// Why it was given up, if it was.
    pub(super) fn verdict(&self) -> Option<&Verdict> {
        self.fate.get().map(|fate| &fate.verdict)
    }

    /// The operation whose turn it is.
    pub(super) fn oldest(&self) -> Option<Oldest> {
        self.recorder().oldest()
    }

    /// What the watchdog must know, and its decision.
    pub(super) fn examine(&self, now: Instant) -> Option<Verdict> {
        if self.fate.get().is_some() {
            return None;
        }
        let reported = self.reported();
        let (device, oldest) = {
            let mut recorder = self.recorder();
            recorder.look(now);
            (recorder.failed().cloned(), recorder.oldest())
        };
        let observation = Observation {
            over: self.membership.cancel.cause(),
            reported,
            device,
            oldest,
            timeout: self.membership.timeout,
            others: &self.membership.others(),
        };
        judge(now, observation)
    }

    /// The error that NCCL reports. None also while another thread asks something: it is told itself.
    fn reported(&self) -> Option<Failure> {
        let mut state = self.try_lock()?;
        let answer = state.handle.as_mut()?.is_settled();
        answer.err().map(Failure::from)
    }

    /// Writes down why, once, and what was going on.
    pub(super) fn give_up(&self, verdict: Verdict) {
        let failure = verdict.failure.clone();
        let mut recorder = self.recorder();
        recorder.look(Instant::now());
        let first_open = recorder.first_open();
        if self.fate.set(Fate { verdict, first_open }).is_err() {
            return;
        }
        // The error is to be told before anything else, and memory is freed on the way there.
        self.lane.abandon();
        tracing::error!(
            "rank {}: communicator `{}` is given up: {failure}\nits last operations:\n{}",
            self.membership.global(),
            self.membership.name,
            recorder.dump(Instant::now()).trim_end(),
        );
    }

    /// Aborts what was given up, once no other thread asks anything: who does sees the verdict and comes to an end, unless
    /// NCCL does not answer. Returns when the device is through with it.
    pub(super) fn abort(&self) {
        // NCCL puts the thread's device back when it is done. One that has none counts as the first GPU's, which would then
        // get a context of this process, whoever's it is. Of a device that has failed the operations must end all the same.
        if let Err(error) = self.lane.bind() {
            tracing::warn!(
                "communicator `{}` is aborted all the same: {error}",
                self.membership.name
            );
        }
        // Nobody else knows the handle then, and an abort may take its time.
        let handle = self.lock().handle.take();
        if let Some(handle) = handle
            && let Err(error) = handle.abort()
        {
            tracing::warn!("{}: {}", error.call, error.words);
        }
    }

    /// True once it was aborted, or is being, or was left.
    pub(super) fn is_gone(&self) -> bool {
        self.try_lock().is_some_and(|state| state.handle.is_none())
    }

    /// Waits for what is in the stream and for the other ranks, and frees the communicator: after its parts, the last
    /// one first, as on all ranks. Of one that was left nothing is left to do.
    pub(super) fn leave(&self, wait: &Wait) -> Result<(), Failure> {
        let parts = std::mem::take(&mut *self.parts());
        for part in parts.iter().rev().filter_map(Weak::upgrade) {
            part.leave(wait)?;
        }
        self.alive(None)?;
        if self.lock().handle.is_none() {
            return Ok(());
        }
        self.lane.bind()?;
        self.ask(None, wait, |handle, sums| {
            sums.clear(handle)?;
            handle.finalize()
        })?;
        self.recorder().look(Instant::now());
        match self.lock().handle.take() {
            Some(handle) => Ok(handle.destroy()?),
            None => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn parts(&self) -> MutexGuard<'_, Vec<Weak<Self>>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Comm {
    /// Without [`Comm::leave`], operations may still be in the stream; their memory then stays for ever.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if state.handle.is_some() {
            let recorder = self.recorder.get_mut().unwrap_or_else(PoisonError::into_inner);
            recorder.look(Instant::now());
            std::mem::forget(std::mem::take(recorder));
        }
    }
}
