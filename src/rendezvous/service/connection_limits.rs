//! What callers can make a daemon hold, and for how long.
//!
//! A connection is *trusted* once its caller has shown the daemon's token or is a process of the daemon's user; at a
//! daemon without a token, once a node has joined on it. An untrusted connection ends [`Config::join_wait`] after it
//! was made, a trusted one when nothing has gone on there for as long.
//!
//! | what | bound |
//! |---|---|
//! | connections | [`Bounds`]: in all, of one address, and of one address while they are untrusted; where a bound is reached, a new one takes the place of the oldest that has said nothing |
//! | calls at a time | 8 on an untrusted connection, [`Config::max_streams`] on another |
//! | streams of agents on one connection | 8, each with one message that is being read |
//! | requests that arrive or wait for their answer | of untrusted connections 32 MiB in all, without the first 4 KiB of each; 30 s to arrive |

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::fmt::Display;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, BodyStream, Full, StreamBody};
use hyper::body::Bytes;
use hyper::{Request, Response};
use nix::sys::resource::{Resource, getrlimit};
use prost::bytes::BytesMut;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep_until, timeout};
use tokio_stream::StreamExt as _;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;

use super::metrics::Metrics;
use crate::rendezvous::config::{Callers, Config};
use crate::rendezvous::event::Peer;

/// Descriptors that a daemon needs for its ledger, its log and its sockets.
const OWN_FILES: usize = 64;
/// Most untrusted connections of one address.
const MAX_UNTRUSTED: usize = 1024;
/// Least bound of connections, however few descriptors there are.
const MIN_CONNECTIONS: usize = 8;
/// Most connections to the status page: in all, and of one address.
const MAX_PAGE_CONNECTIONS: usize = 256;
const MAX_PAGE_CONNECTIONS_OF_ADDRESS: usize = 64;
/// Calls at a time on an untrusted connection.
const UNTRUSTED_CALLS: usize = 8;
/// Streams of agents on one connection: an agent has one, and for a moment the broken one before it.
const AGENT_STREAMS: usize = 8;
/// KiB of the requests of all untrusted connections.
const UNTRUSTED_REQUESTS_KIB: usize = 32 << 10;
/// Bytes of a request that are not counted: the rest of a call takes as much.
const FREE_BYTES: usize = 4 << 10;
/// How long a request may take to arrive.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Shortest time between two lines of the log about refusals.
const REFUSAL_INTERVAL: Duration = Duration::from_secs(10);
/// How long a connection that has lost its place may take to end.
const LEAVING_BOUND: Duration = Duration::from_millis(100);
/// The method whose request is a stream, which lasts as long as its node.
const AGENT_METHOD: &str = "/Agent";

/// How many connections there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bounds {
    all: usize,
    of_address: usize,
    untrusted_of_address: usize,
}

impl Bounds {
    /// For the gRPC port and for the status page, out of `files` descriptors: of a launcher's, all connections together
    /// get a half.
    fn of(config: &Config, files: usize, has_page: bool) -> [Self; 2] {
        let own_files = config.host.as_ref().map_or(OWN_FILES, |_| files);
        let own = files.saturating_sub(own_files).max(files / 2);
        let most_pages = (files / 16).clamp(MIN_CONNECTIONS, MAX_PAGE_CONNECTIONS);
        let pages = usize::from(has_page) * most_pages;
        let all = config
            .max_connections
            .min(own.saturating_sub(pages))
            .max(MIN_CONNECTIONS);
        let of_address = MAX_PAGE_CONNECTIONS_OF_ADDRESS.min(pages / 2);
        [
            Self {
                all,
                // One machine must not keep all others out.
                of_address: (all / 4 * 3).max(MIN_CONNECTIONS),
                untrusted_of_address: (all / 2).clamp(MIN_CONNECTIONS, MAX_UNTRUSTED),
            },
            Self {
                all: pages,
                of_address,
                untrusted_of_address: of_address,
            },
        ]
    }
}

/// The limits of one port.
#[derive(Debug)]
pub(super) struct ConnectionLimits {
    bounds: Bounds,
    counts: Mutex<Counts>,
    refusals: Mutex<Refusals>,
    metrics: Arc<Metrics>,
    /// KiB that are free.
    untrusted_requests: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    /// By [`network_of`] their addresses: how many there are, and how many of these are untrusted.
    by_address: HashMap<IpAddr, (usize, usize)>,
    /// Connections that have not said all that they begin with, the oldest first, with their addresses.
    silent: BTreeMap<u64, (IpAddr, Arc<Place>)>,
    last: u64,
}

/// The place of a connection, which a newer one may take.
#[derive(Debug, Default)]
struct Place {
    is_taken: Notify,
    is_free: Notify,
}

#[derive(Debug, Default)]
struct Refusals {
    all: u64,
    unreported: u64,
    next_report: Option<Instant>,
    /// Who was refused last, and why.
    last: String,
}

/// What counts as one address: a host with IPv6 has a whole /64 of them.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
        address @ IpAddr::V4(_) => address,
    }
}

impl ConnectionLimits {
    /// For the gRPC port, and for the status page if there is one.
    pub(super) fn of_ports(config: &Config, metrics: &Arc<Metrics>, has_page: bool) -> [Arc<Self>; 2] {
        // Where it cannot be read, there is no limit.
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
        let files = usize::try_from(files).unwrap_or(usize::MAX);
        Bounds::of(config, files, has_page).map(|bounds| {
            Arc::new(Self {
                bounds,
                counts: Mutex::default(),
                refusals: Mutex::default(),
                metrics: Arc::clone(metrics),
                untrusted_requests: Arc::new(Semaphore::new(UNTRUSTED_REQUESTS_KIB)),
            })
        })
    }

    /// Counts a new, untrusted connection, for which the oldest silent one has to go where a bound is reached; or says why
    /// there may not be another one.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Result<Slot, &'static str> {
        let address = network_of(address);
        let mut counts = lock(&self.counts);
        let (of_this, untrusted) = counts.by_address.get(&address).copied().unwrap_or_default();
        let is_address_full =
            of_this >= self.bounds.of_address || untrusted >= self.bounds.untrusted_of_address;
        let mut before = None;
        if is_address_full || counts.all >= self.bounds.all {
            let goes = |(_, (owner, _)): &(&u64, &(IpAddr, _))| !is_address_full || *owner == address;
            let oldest = counts.silent.iter().find(goes).map(|(number, _)| *number);
            match oldest.and_then(|oldest| counts.silent.remove(&oldest)) {
                Some((_, place)) => {
                    place.is_taken.notify_one();
                    before = Some(place);
                }
                None if is_address_full => return Err("too many connections of one address"),
                None => return Err("too many connections"),
            }
        }
        counts.all += 1;
        counts.by_address.insert(address, (of_this + 1, untrusted + 1));
        counts.last += 1;
        let (number, place) = (counts.last, Arc::<Place>::default());
        counts.silent.insert(number, (address, Arc::clone(&place)));
        drop(counts);
        Ok(Slot {
            limits: Arc::clone(self),
            address,
            is_trusted: AtomicBool::new(false),
            number,
            place,
            before,
        })
    }

    /// Counts a refusal, and reports it: at once, or with all others [`REFUSAL_INTERVAL`] after the last report.
    pub(super) fn refused(self: &Arc<Self>, who: impl Display, why: impl Display) {
        self.metrics.refused("connection");
        let mut refusals = lock(&self.refusals);
        refusals.all += 1;
        refusals.unreported += 1;
        refusals.last = format!("{who}: {why}");
        if refusals.unreported == 1 {
            let (limits, next) = (Arc::clone(self), refusals.next_report);
            tokio::spawn(async move {
                sleep_until(next.unwrap_or_else(Instant::now).into()).await;
                let mut refusals = lock(&limits.refusals);
                let (all, new) = (refusals.all, std::mem::take(&mut refusals.unreported));
                refusals.next_report = Some(Instant::now() + REFUSAL_INTERVAL);
                let last = std::mem::take(&mut refusals.last);
                drop(refusals);
                tracing::warn!(
                    "refused a connection from {last} ({new} since the last such line, {all} in all)"
                );
            });
        }
    }
}

/// No holder of these locks panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts as a connection until it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    limits: Arc<ConnectionLimits>,
    address: IpAddr,
    is_trusted: AtomicBool,
    number: u64,
    place: Arc<Place>,
    /// The place that it takes.
    before: Option<Arc<Place>>,
}

impl Slot {
    /// Waits until a new connection takes the place of this one. Cancel safe.
    pub(super) async fn displaced(&self) -> &'static str {
        self.place.is_taken.notified().await;
        "a newer connection took its place"
    }

    /// Waits until the connection whose place it takes has gone, unless that one has just said what it begins with.
    pub(super) async fn has_place(&self) {
        if let Some(before) = &self.before {
            let _ = timeout(LEAVING_BOUND, before.is_free.notified()).await;
        }
    }

    /// It has said what it begins with, and keeps its place.
    pub(super) fn keep(&self) {
        lock(&self.limits.counts).silent.remove(&self.number);
    }

    fn trust(&self) {
        if !self.is_trusted.swap(true, Ordering::Relaxed)
            && let Some((_, untrusted)) = lock(&self.limits.counts).by_address.get_mut(&self.address)
        {
            *untrusted -= 1;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.trust();
        let mut counts = lock(&self.limits.counts);
        counts.silent.remove(&self.number);
        counts.all -= 1;
        if let Some((all, _)) = counts.by_address.get_mut(&self.address) {
            *all -= 1;
            if *all == 0 {
                counts.by_address.remove(&self.address);
            }
        }
        self.place.is_free.notify_one();
    }
}

/// One connection, as the calls on it see it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: Peer,
    pub(super) slot: Slot,
    made: Instant,
    idle_limit: Duration,
    /// Calls without an answer and streams with a node, and when the last one ended.
    work: Mutex<(usize, Instant)>,
    untrusted_calls: Arc<Semaphore>,
    agent_streams: Arc<Semaphore>,
}

impl Connection {
    pub(super) fn new(peer: Peer, slot: Slot, config: &Config) -> Arc<Self> {
        let made = Instant::now();
        Arc::new(Self {
            peer,
            slot,
            made,
            idle_limit: config.join_wait,
            work: Mutex::new((0, made)),
            untrusted_calls: Arc::new(Semaphore::new(UNTRUSTED_CALLS)),
            agent_streams: Arc::new(Semaphore::new(AGENT_STREAMS)),
        })
    }

    /// Called after the handshake.
    pub(super) fn trust_if_authenticated(&self, callers: Callers) {
        if callers == Callers::Authenticated {
            self.slot.trust();
        }
    }

    /// Trusts the connection, as a node has joined on it: it is in use until the result is dropped.
    pub(super) fn begin_node(self: &Arc<Self>) -> Active {
        self.slot.trust();
        Active::begin(self)
    }

    fn is_trusted(&self) -> bool {
        self.slot.is_trusted.load(Ordering::Relaxed)
    }

    /// When it ends, unless something happens before; none while it is in use.
    pub(super) fn expires(&self) -> Option<Instant> {
        let since = match *lock(&self.work) {
            _ if !self.is_trusted() => self.made,
            (0, since) => since,
            _ => return None,
        };
        Some(since + self.idle_limit)
    }

    pub(super) fn refused(&self, why: impl Display) {
        self.slot.limits.refused(self.peer.remote, why);
    }

    /// Counts a stream of an agent until the result is dropped; none if there are too many.
    pub(super) fn open_stream(&self) -> Option<OwnedSemaphorePermit> {
        let permit = Arc::clone(&self.agent_streams).try_acquire_owned().ok();
        if permit.is_none() {
            self.refused("too many streams on one connection");
        }
        permit
    }

    /// Counts a call until the result is dropped; none if there are too many.
    fn begin_call(self: &Arc<Self>) -> Option<(Option<OwnedSemaphorePermit>, Active)> {
        let permit = Arc::clone(&self.untrusted_calls).try_acquire_owned().ok();
        (permit.is_some() || self.is_trusted()).then(|| (permit, Active::begin(self)))
    }
}

/// Work on a connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Active(Arc<Connection>);

impl Active {
    fn begin(connection: &Arc<Connection>) -> Self {
        lock(&connection.work).0 += 1;
        Self(Arc::clone(connection))
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        let mut work = lock(&self.0.work);
        *work = (work.0 - 1, Instant::now());
    }
}

/// A service whose requests are bounded. Its refusals say `UNAVAILABLE`: a node that has lost its connection
/// repeats the calls of its workers while it joins.
#[derive(Clone)]
pub(super) struct Limited<S> {
    inner: S,
    /// Bytes of the longest request.
    longest: usize,
    /// How long a request may take to arrive.
    timeout: Duration,
}

impl<S> Limited<S> {
    /// The longest message has `longest` bytes.
    pub(super) fn new(inner: S, longest: usize) -> Self {
        Self {
            inner,
            longest,
            timeout: MESSAGE_TIMEOUT,
        }
    }
}

impl<S: NamedService> NamedService for Limited<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Limited<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let Some(connection) = request.extensions().get::<Arc<Connection>>().cloned() else {
            return refusal(Status::internal("a call without a connection"));
        };
        let (parts, body) = request.into_parts();
        let mut held = HeldRequest::new(&connection);
        if parts.uri.path().ends_with(AGENT_METHOD) {
            let frames = BodyStream::new(body).map(move |frame| {
                let frame = frame?;
                held.count(frame.data_ref().map_or(0, Bytes::len))?;
                Ok::<_, Status>(frame)
            });
            let body = Body::new(StreamBody::new(frames));
            return Box::pin(self.inner.call(Request::from_parts(parts, body)));
        }
        let Some(call) = connection.begin_call() else {
            let words = "too many calls at a time on a connection without a node";
            return refusal(Status::unavailable(words));
        };
        let (mut inner, longest, limit) = (self.inner.clone(), self.longest, self.timeout);
        Box::pin(async move {
            let late = |_| {
                let words = format!("the request did not arrive within {limit:?}");
                Err(Status::deadline_exceeded(words))
            };
            let arrived = timeout(limit, receive(body, &mut held, longest)).await;
            let received = match arrived.unwrap_or_else(late) {
                Ok(body) => body,
                Err(status) => return Ok(status.into_http()),
            };
            let answer = inner.call(Request::from_parts(parts, received)).await?;
            drop(held);
            // The call lasts as long as its reply.
            Ok(answer.map(|body| {
                Body::new(body.map_frame(move |frame| {
                    let _ = &call;
                    frame
                }))
            }))
        })
    }
}

fn refusal(status: Status) -> BoxFuture<Response<Body>, Infallible> {
    Box::pin(std::future::ready(Ok(status.into_http())))
}

/// What one request holds of the daemon's room, until it is dropped.
struct HeldRequest {
    connection: Arc<Connection>,
    arrived: usize,
    permit: Option<OwnedSemaphorePermit>,
}

impl HeldRequest {
    fn new(connection: &Arc<Connection>) -> Self {
        Self {
            connection: Arc::clone(connection),
            arrived: 0,
            permit: None,
        }
    }

    /// Counts bytes that have arrived, or refuses the request.
    fn count(&mut self, bytes: usize) -> Result<(), Status> {
        if self.connection.is_trusted() {
            self.permit = None;
            return Ok(());
        }
        let before = self.arrived.saturating_sub(FREE_BYTES);
        self.arrived += bytes;
        let more = kib(self.arrived.saturating_sub(FREE_BYTES)) - kib(before);
        if more == 0 {
            return Ok(());
        }
        let room = Arc::clone(&self.connection.slot.limits.untrusted_requests);
        let words = "the rendezvous daemon has no room for more requests at the moment";
        let permit = room
            .try_acquire_many_owned(more)
            .map_err(|_| Status::unavailable(words))?;
        match &mut self.permit {
            Some(held) => held.merge(permit),
            none => *none = Some(permit),
        }
        Ok(())
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX)
}

/// The whole of a request, in one buffer: a frame of one byte takes no more than that.
async fn receive(mut body: Body, held: &mut HeldRequest, longest: usize) -> Result<Body, Status> {
    let mut received = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame?;
        let Some(data) = frame.data_ref() else { continue };
        held.count(data.len())?;
        if received.len() + data.len() > longest {
            return Err(Status::out_of_range("the request is too long"));
        }
        received.extend_from_slice(data);
    }
    Ok(Body::new(Full::new(received.freeze())))
}

#[cfg(test)]
#[path = "connection_limits_tests.rs"]
pub(super) mod tests;
