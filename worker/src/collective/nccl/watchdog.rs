//! The thread that looks after communicators: errors that nobody asked for, operations that do not end, and the
//! word that the generation is over.
//!
//! The communicators of a process are given up together. An abort frees memory of the device, which waits for all that
//! runs there: also for operations of the other communicators, which never end while nobody aborts those. So each is
//! aborted in a thread of its own, after all have their verdict.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::comm::Comm;
use super::verdict::Verdict;
use super::witness::{PATIENCE, Witness};
use crate::collective::Failure;

/// Time between two looks.
const TICK: Duration = Duration::from_millis(20);

/// How long a thread may be within a call of NCCL while its communicator waits to be aborted.
const STUCK: Duration = Duration::from_secs(3);

/// Looks after communicators until it is dropped. Clones are the same.
#[derive(Clone)]
pub(super) struct Watchdog(Arc<Guard>);

struct Guard(Arc<Shared>);

struct Shared {
    charges: Mutex<Charges>,
    changed: Condvar,
}

#[derive(Default)]
struct Charges {
    comms: Vec<Charge>,
    stop: bool,
    /// The thread does nothing any more.
    over: bool,
    /// Threads that abort.
    aborting: usize,
}

/// One to be looked after until it is gone: also one that nobody else knows any more, if it was given up.
struct Charge {
    comm: Arc<Comm>,
    /// Since when it is being aborted; none if it is not.
    condemned: Option<Instant>,
    /// It was said that it cannot be.
    is_reported: bool,
}

impl Watchdog {
    /// Starts the thread. `witness` finds out which ranks did not come.
    pub(super) fn start(witness: Witness) -> Result<Self, Failure> {
        let shared = Arc::new(Shared {
            charges: Mutex::default(),
            changed: Condvar::new(),
        });
        let watched = shared.clone();
        let thread = std::thread::Builder::new().name("ddp-watchdog".into());
        thread
            .spawn(move || watched.watch(&witness))
            .map_err(|error| Failure::System {
                what: "starting the watchdog of the collectives".into(),
                cause: error.to_string(),
            })?;
        Ok(Self(Arc::new(Guard(shared))))
    }

    /// Looks after one more.
    pub(super) fn add(&self, comm: &Arc<Comm>) {
        self.0.0.lock().comms.push(Charge {
            comm: comm.clone(),
            condemned: None,
            is_reported: false,
        });
    }

    /// Ends the thread and waits, no longer than `bound`, until all that was given up is aborted. False if it is not.
    pub(super) fn end(&self, bound: Duration) -> bool {
        let shared = &self.0.0;
        let mut charges = shared.lock();
        charges.stop = true;
        shared.changed.notify_all();
        let waited = shared
            .changed
            .wait_timeout_while(charges, bound, |charges| !charges.is_through());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_through()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut charges = self.0.lock();
        charges.stop = true;
        let (condemned, others) = std::mem::take(&mut charges.comms)
            .into_iter()
            .partition(|charge| charge.comm.verdict().is_some());
        charges.comms = condemned;
        drop(charges);
        self.0.changed.notify_all();
        // Here, and not in a thread that may outlive `main`: they hold on to the device. (Of a look that is under way that
        // thread lets go itself.)
        drop::<Vec<Charge>>(others);
    }
}

impl Charges {
    fn is_through(&self) -> bool {
        self.over && self.aborting == 0
    }
}

impl Shared {
    fn watch(self: &Arc<Self>, witness: &Witness) {
        let mut verdict = None;
        let mut charges = self.lock();
        loop {
            let is_last = charges.stop;
            let mut comms = std::mem::take(&mut charges.comms);
            // Whoever adds one must not wait for this look.
            drop(charges);
            comms.retain(|charge| !charge.is_over());
            let found = if is_last {
                vec![None; comms.len()]
            } else {
                examine(&comms, witness)
            };
            condemn(&comms, found, &mut verdict);
            for charge in &mut comms {
                self.abort(charge);
            }
            charges = self.lock();
            if is_last {
                break;
            }
            comms.append(&mut charges.comms);
            charges.comms = comms;
            if !charges.stop {
                let waited = self.changed.wait_timeout(charges, TICK);
                charges = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        charges.over = true;
        self.changed.notify_all();
    }

    /// Aborts what was given up, in a thread of its own.
    fn abort(self: &Arc<Self>, charge: &mut Charge) {
        if charge.comm.verdict().is_none() {
            return;
        }
        if charge.condemned.is_some() {
            charge.report();
            return;
        }
        charge.condemned = Some(Instant::now());
        self.lock().aborting += 1;
        let (shared, comm) = (self.clone(), charge.comm.clone());
        let abort = move || {
            comm.abort();
            drop(comm);
            shared.lock().aborting -= 1;
            shared.changed.notify_all();
        };
        let thread = std::thread::Builder::new().name("ddp-abort".into());
        if let Err(error) = thread.spawn(abort.clone()) {
            // One after the other is better than none.
            tracing::warn!("no thread can be started for an abort: {error}");
            abort();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Charges> {
        self.charges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Charge {
    /// Nothing is left to do.
    fn is_over(&self) -> bool {
        let is_forgotten = Arc::strong_count(&self.comm) == 1 && self.comm.verdict().is_none();
        is_forgotten || self.comm.is_gone()
    }

    /// Says, once, that it cannot be aborted. Beside a call that is under way that could free what the call uses. The
    /// agent ends this process.
    fn report(&mut self) {
        let is_stuck = self.condemned.is_some_and(|since| since.elapsed() >= STUCK);
        if is_stuck && !self.is_reported {
            self.is_reported = true;
            tracing::error!(
                "rank {}: a call of NCCL on communicator `{}` has not returned for {} s, so that its operations cannot be aborted",
                self.comm.membership().global(),
                self.comm.membership().name,
                STUCK.as_secs(),
            );
        }
    }
}

/// What is found of each: a verdict where it is to be given up for something of its own.
fn examine(comms: &[Charge], witness: &Witness) -> Vec<Option<Verdict>> {
    let now = Instant::now();
    let mut found: Vec<_> = comms.iter().map(|charge| charge.comm.examine(now)).collect();
    let is_late = |verdict: &Verdict| matches!(verdict.failure, Failure::TimedOut { .. });
    if found.iter().flatten().any(is_late) {
        // One for all that is said and heard: the verdicts wait for it.
        let deadline = Instant::now() + PATIENCE;
        // Of all, since all are given up: other ranks may be in time of one, and wait for this rank in another one.
        let waits = comms
            .iter()
            .filter_map(|Charge { comm, .. }| Some((comm.membership(), comm.oldest()?.sequence)));
        witness.say(waits, deadline);
        for (Charge { comm, .. }, verdict) in comms.iter().zip(&mut found) {
            if let Some(verdict) = verdict {
                name_the_late(verdict, comm, witness, deadline);
            }
        }
    }
    found
}

/// Names in a time-out those who did not come.
fn name_the_late(verdict: &mut Verdict, comm: &Comm, witness: &Witness, deadline: Instant) {
    if let (Failure::TimedOut { waiting_for, .. }, Some(sequence)) = (&mut verdict.failure, verdict.culprit) {
        *waiting_for = witness.absent(comm.membership(), sequence, deadline);
    }
}

/// Gives up all if one of them is, also by a thread that uses it: each for what was found of it, the others for the
/// first one's, which stays as `verdict` for those to come.
fn condemn(comms: &[Charge], found: Vec<Option<Verdict>>, verdict: &mut Option<Verdict>) {
    let first = || {
        comms.iter().zip(&found).find_map(|(Charge { comm, .. }, found)| {
            let verdict = comm.verdict().or(found.as_ref())?;
            Some(verdict.on_others(&comm.membership().name))
        })
    };
    let Some(on_others) = verdict.take().or_else(first) else {
        return;
    };
    for (Charge { comm, .. }, found) in comms.iter().zip(found) {
        if comm.verdict().is_none() {
            comm.give_up(found.unwrap_or_else(|| on_others.clone()));
        }
    }
    *verdict = Some(on_others);
}
