//! The thread that looks after communicators: errors that nobody asked for, operations that do not end, and the
//! word that the generation is over.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::comm::Comm;
use super::verdict::Verdict;
use super::witness::Witness;
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
    stopped: Condvar,
}

#[derive(Default)]
struct Charges {
    comms: Vec<Charge>,
    stop: bool,
    /// The thread does nothing any more.
    over: bool,
}

struct Charge {
    comm: Weak<Comm>,
    /// Since when it waits to be aborted; none if it does not.
    condemned: Option<Instant>,
    /// All that can be done is done or said.
    settled: bool,
}

impl Watchdog {
    /// Starts the thread. `witness` finds out which ranks did not come.
    pub(super) fn start(witness: Witness) -> Result<Self, Failure> {
        let shared = Arc::new(Shared {
            charges: Mutex::default(),
            stopped: Condvar::new(),
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
        let mut charges = self.0.0.lock();
        charges.comms.retain(|charge| charge.comm.strong_count() > 0);
        charges.comms.push(Charge {
            comm: Arc::downgrade(comm),
            condemned: None,
            settled: false,
        });
    }

    /// Ends the thread and waits, no longer than `bound`, until it is through with what it does. False if it is not.
    pub(super) fn end(&self, bound: Duration) -> bool {
        let shared = &self.0.0;
        let mut charges = shared.lock();
        charges.stop = true;
        shared.stopped.notify_all();
        let waited = shared
            .stopped
            .wait_timeout_while(charges, bound, |charges| !charges.over);
        waited.unwrap_or_else(PoisonError::into_inner).0.over
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.lock().stop = true;
        self.0.stopped.notify_all();
    }
}

impl Shared {
    fn watch(&self, witness: &Witness) {
        let mut charges = self.lock();
        while !charges.stop {
            let mut comms = std::mem::take(&mut charges.comms);
            // Whoever adds one must not wait for this look.
            drop(charges);
            for charge in &mut comms {
                charge.look(witness);
            }
            charges = self.lock();
            comms.append(&mut charges.comms);
            charges.comms = comms;
            if !charges.stop {
                let waited = self.stopped.wait_timeout(charges, TICK);
                charges = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        charges.over = true;
        self.stopped.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Charges> {
        self.charges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Charge {
    fn look(&mut self, witness: &Witness) {
        let Some(comm) = self.comm.upgrade() else {
            return;
        };
        let now = Instant::now();
        if let Some(verdict) = comm.examine(now) {
            comm.give_up(named(verdict, &comm, witness));
        }
        if comm.alive(None).is_ok() || self.settled {
            return;
        }
        let condemned = *self.condemned.get_or_insert(now);
        if comm.try_abort() {
            self.settled = true;
        } else if condemned.elapsed() >= STUCK {
            // Aborting beside a call that is under way could free what it uses. The agent ends this process.
            tracing::error!(
                "rank {}: a call of NCCL on communicator `{}` has not returned for {} s, so that its operations cannot be aborted",
                comm.membership().global(),
                comm.membership().name,
                STUCK.as_secs(),
            );
            self.settled = true;
        }
    }
}

/// A time-out with the names of those who did not come.
fn named(verdict: Verdict, comm: &Comm, witness: &Witness) -> Verdict {
    match (verdict.failure, verdict.culprit) {
        (Failure::TimedOut { waited_ms, .. }, Some(sequence)) => {
            let waiting_for = witness.absent(comm.membership(), sequence);
            Verdict {
                failure: Failure::TimedOut {
                    waiting_for,
                    waited_ms,
                },
                culprit: Some(sequence),
            }
        }
        (failure, culprit) => Verdict { failure, culprit },
    }
}
