//! Who gets a connection: how many there may be, how long each may take to show what it is for, and who was refused.
//!
//! A caller that nobody knows costs a descriptor and a few kilobytes, for [`Config::join_wait`] at most. What a launcher
//! needs for its workers is never given to callers.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};

use crate::rendezvous::config::Config;
use crate::rendezvous::event::Peer;

/// Descriptors of a daemon that are not for connections: ledger, log, sockets.
const OWN_FILES: usize = 64;
/// Most connections of one address on which no node has joined yet.
const MOST_UNPROVEN: usize = 1024;
/// Fewest, however few descriptors there are.
const FEWEST: usize = 8;
/// Streams of agents on one connection: an agent has one, and for a moment the broken one before it.
const AGENT_STREAMS: usize = 64;
/// Shortest time between two lines about refusals.
const QUIET: Duration = Duration::from_secs(10);

/// How many connections there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limits {
    all: usize,
    of_address: usize,
    unproven_of_address: usize,
}

impl Limits {
    /// With `files` descriptors: half of them if they are a launcher's.
    fn of(config: &Config, files: usize) -> Self {
        let is_embedded = config.host.is_some();
        let own = if is_embedded {
            files / 2
        } else {
            files.saturating_sub(OWN_FILES).max(files / 2)
        };
        let all = own.min(config.max_connections).max(FEWEST);
        Self {
            all,
            // One machine must not keep all others out.
            of_address: (all / 4 * 3).max(FEWEST),
            unproven_of_address: (all / 2).clamp(FEWEST, MOST_UNPROVEN),
        }
    }
}

/// The connections of one daemon.
#[derive(Debug)]
pub(super) struct Admission {
    limits: Limits,
    places: Mutex<Places>,
    refusals: Mutex<Refusals>,
}

#[derive(Debug, Default)]
struct Places {
    all: usize,
    by_address: HashMap<IpAddr, Taken>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    all: usize,
    unproven: usize,
}

#[derive(Debug, Default)]
struct Refusals {
    all: u64,
    untold: u64,
    told: Option<Instant>,
}

impl Admission {
    pub(super) fn new(config: &Config) -> Arc<Self> {
        // A limit that cannot be read is none.
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
        Arc::new(Self {
            limits: Limits::of(config, usize::try_from(files).unwrap_or(usize::MAX)),
            places: Mutex::default(),
            refusals: Mutex::default(),
        })
    }

    /// A place for a connection, or why there is none.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Result<Place, &'static str> {
        let Limits {
            all,
            of_address,
            unproven_of_address,
        } = self.limits;
        let mut places = self.places();
        let taken = places.by_address.get(&address).copied().unwrap_or_default();
        if places.all >= all {
            return Err("too many connections");
        }
        if taken.all >= of_address || taken.unproven >= unproven_of_address {
            return Err("too many connections of one address");
        }
        places.all += 1;
        let taken = places.by_address.entry(address).or_default();
        taken.all += 1;
        taken.unproven += 1;
        drop(places);
        Ok(Place {
            admission: Arc::clone(self),
            address,
            is_proven: AtomicBool::new(false),
        })
    }

    /// Counts a caller that was sent away, and says so now and then.
    pub(super) fn refused(&self, who: impl std::fmt::Display, why: impl std::fmt::Display) {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.all += 1;
        refusals.untold += 1;
        if refusals.told.is_some_and(|told| told.elapsed() < QUIET) {
            return;
        }
        refusals.told = Some(Instant::now());
        let (all, new) = (refusals.all, std::mem::take(&mut refusals.untold));
        drop(refusals);
        tracing::warn!(
            "refused a connection from {who}: {why} ({new} since the last such line, {all} in all)"
        );
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts for a connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    admission: Arc<Admission>,
    address: IpAddr,
    is_proven: AtomicBool,
}

impl Place {
    /// The caller is one of those that the daemon is for.
    fn prove(&self) {
        if !self.is_proven.swap(true, Ordering::Relaxed)
            && let Some(taken) = self.admission.places().by_address.get_mut(&self.address)
        {
            taken.unproven -= 1;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.admission.places();
        places.all -= 1;
        let Some(taken) = places.by_address.get_mut(&self.address) else {
            return;
        };
        taken.all -= 1;
        if !*self.is_proven.get_mut() {
            taken.unproven -= 1;
        }
        if taken.all == 0 {
            places.by_address.remove(&self.address);
        }
    }
}

/// One connection, as the calls on it see it.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) peer: Peer,
    place: Place,
    /// Streams with a node, and calls that have no answer yet.
    busy: AtomicUsize,
    agents: AtomicUsize,
    /// When the last of those ended, or the connection was made.
    idle_since: Mutex<Instant>,
}

impl Caller {
    pub(super) fn new(peer: Peer, place: Place) -> Arc<Self> {
        Arc::new(Self {
            peer,
            place,
            busy: AtomicUsize::new(0),
            agents: AtomicUsize::new(0),
            idle_since: Mutex::new(Instant::now()),
        })
    }

    /// Since when nothing goes on; none while something does.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let since = *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner);
        (self.busy.load(Ordering::Relaxed) == 0).then_some(since)
    }

    pub(super) fn refused(&self, why: impl std::fmt::Display) {
        self.place.admission.refused(self.peer.remote, why);
    }

    /// A stream of an agent begins; none if there are too many.
    pub(super) fn opens_stream(self: &Arc<Self>) -> Option<AgentStreamPlace> {
        let place = AgentStreamPlace(Arc::clone(self));
        if self.agents.fetch_add(1, Ordering::Relaxed) < AGENT_STREAMS {
            return Some(place);
        }
        self.refused("too many streams on one connection");
        None
    }

    /// A node has joined, or a call has begun: the connection is in use until the result is dropped.
    pub(super) fn is_used(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }

    /// A node has joined.
    pub(super) fn prove(&self) {
        self.place.prove();
    }
}

/// Counts for a stream of an agent, until it is dropped.
#[derive(Debug)]
pub(super) struct AgentStreamPlace(Arc<Caller>);

impl Drop for AgentStreamPlace {
    fn drop(&mut self) {
        self.0.agents.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Keeps a connection from being idle, until it is dropped.
#[derive(Debug)]
pub(super) struct Busy(Arc<Caller>);

impl Drop for Busy {
    fn drop(&mut self) {
        *self.0.idle_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[test]
    fn an_embedded_daemon_takes_half_of_the_descriptors() {
        let mut config = Config::default();
        assert_eq!(Limits::of(&config, 1024).all, 960);
        config.host = Some("a".into());
        let expected = Limits {
            all: 128,
            of_address: 96,
            unproven_of_address: 64,
        };
        assert_eq!(Limits::of(&config, 256), expected);
    }

    #[test]
    fn places_come_back_and_who_has_joined_no_longer_counts_as_unknown() {
        let config = Config {
            host: Some("a".into()),
            max_connections: 32,
            ..Config::default()
        };
        let admission = Admission::new(&config);
        let mut callers = Vec::new();
        let peer = Peer {
            remote: HERE,
            local: HERE,
        };
        while let Ok(place) = admission.enter(HERE) {
            callers.push(Caller::new(peer, place));
        }
        assert_eq!(callers.len(), 16, "a half");
        callers[0].prove();
        callers[0].prove();
        callers.push(Caller::new(peer, admission.enter(HERE).unwrap()));
        admission.enter(HERE).unwrap_err();
        let other = admission.enter([192, 0, 2, 1].into()).unwrap();
        drop((callers, other));
        assert_eq!(admission.places().all, 0);
        assert!(admission.places().by_address.is_empty());
    }

    #[test]
    fn a_connection_is_idle_when_nothing_goes_on() {
        let admission = Admission::new(&Config::default());
        let peer = Peer {
            remote: HERE,
            local: HERE,
        };
        let caller = Caller::new(peer, admission.enter(HERE).unwrap());
        let made = caller.idle_since().unwrap();
        let busy = caller.is_used();
        assert_eq!(caller.idle_since(), None);
        drop(busy);
        assert!(caller.idle_since().unwrap() >= made);
        let streams: Vec<_> = std::iter::from_fn(|| caller.opens_stream()).collect();
        assert_eq!(streams.len(), AGENT_STREAMS);
        drop(streams);
        assert!(caller.opens_stream().is_some());
    }
}
