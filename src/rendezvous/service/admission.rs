//! Who gets a connection: how many there may be, how long each may take to show what it is for, and who was refused.
//!
//! A connection on which no node has joined costs a descriptor, and few calls at a time, whose bytes [`super::arrivals`]
//! bounds. It ends [`Config::join_wait`] after it was made, or after its last call that was accepted. What a launcher
//! needs for its workers is never given to callers.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::metrics::Metrics;
use crate::rendezvous::config::{Callers, Config};
use crate::rendezvous::event::Peer;
use crate::rendezvous::shares::{network_of, part_of};

/// Descriptors of a daemon that are not for connections: ledger, log, sockets.
const OWN_FILES: usize = 64;
/// Most connections of one address on which no node has joined yet.
const MOST_UNPROVEN: usize = 1024;
/// Fewest, however few descriptors there are.
const FEWEST: usize = 8;
/// Most connections to the status page.
const MOST_PAGES: usize = 256;
/// Calls at a time on a connection on which no node has joined yet.
const UNPROVEN_CALLS: usize = 8;
/// Streams of agents on one connection: an agent has one, and for a moment the broken one before it.
const AGENT_STREAMS: usize = 64;
/// KiB of replies to the connections of a network that they have not taken yet; a part of it where callers are of several
/// users.
const REPLIES_KIB: usize = 128 << 10;
/// Shortest time between two lines about refusals.
const QUIET: Duration = Duration::from_secs(10);

/// How many connections there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limits {
    all: usize,
    of_address: usize,
    unproven_of_address: usize,
    /// To the status page.
    pages: usize,
}

impl Limits {
    /// With `files` descriptors: half of them if they are a launcher's. The status page has its part of them.
    fn of(config: &Config, files: usize, has_page: bool) -> Self {
        let is_embedded = config.host.is_some();
        let own = if is_embedded {
            files / 2
        } else {
            files.saturating_sub(OWN_FILES).max(files / 2)
        };
        let pages = if has_page {
            (files / 16).clamp(FEWEST, MOST_PAGES)
        } else {
            0
        };
        let all = own.saturating_sub(pages).min(config.max_connections).max(FEWEST);
        Self {
            all,
            // One machine must not keep all others out.
            of_address: (all / 4 * 3).max(FEWEST),
            unproven_of_address: (all / 2).clamp(FEWEST, MOST_UNPROVEN),
            pages,
        }
    }
}

/// The connections of one daemon.
#[derive(Debug)]
pub(super) struct Admission {
    limits: Limits,
    callers: Callers,
    places: Mutex<Places>,
    refusals: Mutex<Refusals>,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct Places {
    all: usize,
    /// By [`network_of`] their addresses.
    by_address: HashMap<IpAddr, Taken>,
}

#[derive(Debug)]
struct Taken {
    all: usize,
    unproven: usize,
    network: Arc<Network>,
}

/// What the connections of one network share.
#[derive(Debug)]
pub(super) struct Network {
    callers: Callers,
    /// Bytes of requests.
    pub(super) requests: AtomicUsize,
    /// KiB of room for replies.
    pub(super) replies: Arc<Semaphore>,
}

impl Network {
    fn new(callers: Callers) -> Self {
        Self {
            callers,
            requests: AtomicUsize::new(0),
            replies: Arc::new(Semaphore::new(share(callers, REPLIES_KIB))),
        }
    }

    /// How much it may have of what there is for all.
    pub(super) fn share_of(&self, all: usize) -> usize {
        share(self.callers, all)
    }
}

fn share(callers: Callers, all: usize) -> usize {
    match callers {
        Callers::OfJobs => part_of(all),
        Callers::Proven | Callers::Anybody => all,
    }
}

#[derive(Debug, Default)]
struct Refusals {
    all: u64,
    untold: u64,
    told: Option<Instant>,
    /// The last one: who, and why.
    last: String,
}

impl Admission {
    /// Refusals are counted there too. The status page has its part if there is one.
    pub(super) fn new(config: &Config, metrics: Arc<Metrics>, has_page: bool) -> Arc<Self> {
        // A limit that cannot be read is none.
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
        Arc::new(Self {
            callers: config.callers,
            limits: Limits::of(config, usize::try_from(files).unwrap_or(usize::MAX), has_page),
            places: Mutex::default(),
            refusals: Mutex::default(),
            metrics,
        })
    }

    /// How many connections the status page may have.
    pub(super) fn pages(&self) -> usize {
        self.limits.pages
    }

    /// A place for a connection, or why there is none.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Result<Place, &'static str> {
        let address = network_of(address);
        let Limits {
            all,
            of_address,
            unproven_of_address,
            ..
        } = self.limits;
        let mut places = self.places();
        let taken = places.by_address.get(&address);
        let (of_this, unproven) = taken.map_or((0, 0), |taken| (taken.all, taken.unproven));
        if places.all >= all {
            return Err("too many connections");
        }
        if of_this >= of_address || unproven >= unproven_of_address {
            return Err("too many connections of one address");
        }
        places.all += 1;
        let taken = places.by_address.entry(address).or_insert_with(|| Taken {
            all: 0,
            unproven: 0,
            network: Arc::new(Network::new(self.callers)),
        });
        taken.all += 1;
        taken.unproven += 1;
        let network = Arc::clone(&taken.network);
        drop(places);
        Ok(Place {
            admission: Arc::clone(self),
            address,
            network,
            is_proven: AtomicBool::new(false),
        })
    }

    /// Counts a caller that was sent away, and says so: at once, or with all others [`QUIET`] after the last line.
    pub(super) fn refused(self: &Arc<Self>, who: impl std::fmt::Display, why: impl std::fmt::Display) {
        self.metrics.refused("connection");
        let mut refusals = self.refusals();
        refusals.all += 1;
        refusals.untold += 1;
        refusals.last = format!("{who}: {why}");
        let is_first = refusals.untold == 1;
        let quiet = refusals
            .told
            .map_or(Duration::ZERO, |told| QUIET.saturating_sub(told.elapsed()));
        drop(refusals);
        if quiet.is_zero() {
            self.tell_refusals();
        } else if let Ok(runtime) = Handle::try_current()
            && is_first
        {
            let admission = Arc::clone(self);
            runtime.spawn(async move {
                tokio::time::sleep(quiet).await;
                admission.tell_refusals();
            });
        }
    }

    /// Says how many were sent away since the last line, and why the last one was.
    fn tell_refusals(&self) {
        let mut refusals = self.refusals();
        let (all, new) = (refusals.all, std::mem::take(&mut refusals.untold));
        if new == 0 {
            return;
        }
        refusals.told = Some(Instant::now());
        let last = std::mem::take(&mut refusals.last);
        drop(refusals);
        tracing::warn!("refused a connection from {last} ({new} since the last such line, {all} in all)");
    }

    fn refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
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
    network: Arc<Network>,
    is_proven: AtomicBool,
}

impl Place {
    fn is_proven(&self) -> bool {
        self.is_proven.load(Ordering::Relaxed)
    }

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
    /// Requests that have no answer yet, those that are still arriving too.
    calls: AtomicUsize,
    agents: AtomicUsize,
    /// Parts of replies that the connection has not taken yet, and since when it took none.
    unsent: Mutex<(usize, Instant)>,
    /// When the connection was made, or was last of use.
    idle_since: Mutex<Instant>,
}

impl Caller {
    pub(super) fn new(peer: Peer, place: Place) -> Arc<Self> {
        Arc::new(Self {
            peer,
            place,
            busy: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            agents: AtomicUsize::new(0),
            unsent: Mutex::new((0, Instant::now())),
            idle_since: Mutex::new(Instant::now()),
        })
    }

    /// Since when nothing goes on; none while something does. Before a node has joined, a call keeps no connection: it
    /// may be one that is refused.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let since = *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner);
        let is_busy = self.is_proven() && self.busy.load(Ordering::Relaxed) > 0;
        (!is_busy).then_some(since)
    }

    /// What it has in common with other callers of its network.
    pub(super) fn network(&self) -> &Network {
        &self.place.network
    }

    /// A part of a reply is made, and counts until the result is dropped.
    pub(super) fn sends(self: &Arc<Self>) -> Unsent {
        let mut unsent = self.unsent.lock().unwrap_or_else(PoisonError::into_inner);
        if unsent.0 == 0 {
            unsent.1 = Instant::now();
        }
        unsent.0 += 1;
        drop(unsent);
        Unsent(Arc::clone(self))
    }

    /// Since when it has taken nothing of what there is for it; none if there is nothing.
    pub(super) fn unsent_since(&self) -> Option<Instant> {
        let unsent = self.unsent.lock().unwrap_or_else(PoisonError::into_inner);
        (unsent.0 > 0).then_some(unsent.1)
    }

    fn renew(&self) {
        *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
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

    /// A request begins to arrive; none if there are too many for a connection on which no node has joined.
    pub(super) fn begins_call(self: &Arc<Self>) -> Option<CallPlace> {
        let place = CallPlace(Arc::clone(self));
        let before = self.calls.fetch_add(1, Ordering::Relaxed);
        (self.is_proven() || before < UNPROVEN_CALLS).then_some(place)
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

    /// True once a node has joined.
    pub(super) fn is_proven(&self) -> bool {
        self.place.is_proven()
    }
}

/// Counts for a part of a reply, until it is dropped.
#[derive(Debug)]
pub(super) struct Unsent(Arc<Caller>);

impl Drop for Unsent {
    fn drop(&mut self) {
        let mut unsent = self.0.unsent.lock().unwrap_or_else(PoisonError::into_inner);
        unsent.0 -= 1;
        unsent.1 = Instant::now();
    }
}

/// Counts for a request, until it is dropped.
#[derive(Debug)]
pub(super) struct CallPlace(Arc<Caller>);

impl Drop for CallPlace {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
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

/// Keeps a connection with a node from being idle, until it is dropped.
#[derive(Debug)]
pub(super) struct Busy(Arc<Caller>);

impl Busy {
    /// The call was not refused: the connection is of use.
    pub(super) fn accepted(self) {
        self.0.renew();
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if self.0.is_proven() {
            self.0.renew();
        }
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::report::Census;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    /// With room for 16 connections, of which 8 are on trial.
    fn embedded() -> Config {
        Config {
            host: Some("a".into()),
            max_connections: 16,
            ..Config::default()
        }
    }

    fn caller(metrics: Arc<Metrics>) -> Arc<Caller> {
        let peer = Peer {
            remote: HERE,
            local: HERE,
        };
        let admission = Admission::new(&Config::default(), metrics, false);
        Caller::new(peer, admission.enter(HERE).unwrap())
    }

    #[test]
    fn an_embedded_daemon_takes_half_of_the_descriptors() {
        let mut config = Config::default();
        assert_eq!(Limits::of(&config, 1024, false).all, 960);
        config.host = Some("a".into());
        let expected = Limits {
            all: 128,
            of_address: 96,
            unproven_of_address: 64,
            pages: 0,
        };
        assert_eq!(Limits::of(&config, 256, false), expected);
    }

    /// The page took 256 descriptors more, and with them those of the workers.
    #[test]
    fn the_status_page_has_its_part_of_the_same_descriptors() {
        let mut config = Config::default();
        for host in [None, Some("a".to_owned())] {
            config.host = host;
            for files in [256, 1024, 4096, 65_536] {
                let (with, without) = (
                    Limits::of(&config, files, true),
                    Limits::of(&config, files, false),
                );
                assert_eq!(with.all + with.pages, without.all, "{files} descriptors");
                assert_eq!(with.pages, (files / 16).min(256), "{files} descriptors");
            }
        }
    }

    /// A host could take all places by one address after the other.
    #[test]
    fn the_addresses_of_one_host_count_as_one() {
        let network = |address: &str| network_of(address.parse().unwrap());
        assert_eq!(network("2001:db8:0:1::1"), network("2001:db8:0:1:ffff::2"));
        assert_ne!(network("2001:db8:0:1::1"), network("2001:db8:0:2::1"));
        assert_eq!(network("::ffff:192.0.2.1"), network("192.0.2.1"));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
        let admission = Admission::new(&embedded(), Arc::new(Metrics::new()), false);
        let enter = |host: u16| admission.enter([0x2001, 0xdb8, 0, 1, 0, 0, 0, host].into());
        let places: Vec<_> = (0..100).map_while(|host| enter(host).ok()).collect();
        assert_eq!(places.len(), 8, "a half");
    }

    #[test]
    fn places_come_back_and_who_has_joined_no_longer_counts_as_unknown() {
        let admission = Admission::new(&embedded(), Arc::new(Metrics::new()), false);
        let mut callers = Vec::new();
        let peer = Peer {
            remote: HERE,
            local: HERE,
        };
        while let Ok(place) = admission.enter(HERE) {
            callers.push(Caller::new(peer, place));
        }
        assert_eq!(callers.len(), 8, "a half");
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
        let metrics = Arc::new(Metrics::new());
        let caller = caller(metrics.clone());
        caller.prove();
        let made = caller.idle_since().unwrap();
        let busy = caller.is_used();
        assert_eq!(caller.idle_since(), None);
        drop(busy);
        assert!(caller.idle_since().unwrap() > made);
        let streams: Vec<_> = std::iter::from_fn(|| caller.opens_stream()).collect();
        assert_eq!(streams.len(), AGENT_STREAMS);
        let [told, _] = metrics.text(&Census::default());
        assert!(
            told.contains("ddp_refusals_total{code=\"connection\"} 1\n"),
            "{told}"
        );
        drop(streams);
        assert!(caller.opens_stream().is_some());
    }

    /// A call that was refused every 4 s kept a connection for ever.
    #[test]
    fn before_a_node_joins_only_calls_that_are_accepted_keep_a_connection() {
        let caller = caller(Arc::new(Metrics::new()));
        let made = caller.idle_since().unwrap();
        let refused = caller.is_used();
        assert_eq!(caller.idle_since(), Some(made), "it is not known yet");
        drop(refused);
        assert_eq!(caller.idle_since(), Some(made));
        caller.is_used().accepted();
        assert!(caller.idle_since().unwrap() > made);
    }

    #[test]
    fn before_a_node_joins_there_are_few_calls_at_a_time() {
        let caller = caller(Arc::new(Metrics::new()));
        let mut calls: Vec<_> = std::iter::from_fn(|| caller.begins_call()).collect();
        assert_eq!(calls.len(), UNPROVEN_CALLS);
        calls.pop();
        calls.push(caller.begins_call().unwrap());
        assert!(caller.begins_call().is_none());
        caller.prove();
        calls.extend((0..100).filter_map(|_| caller.begins_call()));
        assert_eq!(calls.len(), UNPROVEN_CALLS + 100);
    }
}
