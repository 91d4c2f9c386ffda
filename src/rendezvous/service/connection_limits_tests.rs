//! The bounds of connections and requests.

use std::net::Ipv4Addr;

use futures_util::FutureExt as _;
use http_body_util::Full;
use hyper::body::Frame;
use tonic::Code;

use super::*;
use crate::rendezvous::report::Census;

const SHORT: Duration = Duration::from_millis(100);
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn peer() -> Peer {
    Peer {
        remote: HERE,
        local: HERE,
    }
}

fn embedded() -> Arc<ConnectionLimits> {
    let config = Config {
        host: Some("a".into()),
        max_connections: 16,
        ..Config::default()
    };
    let [limits, _] = ConnectionLimits::of_ports(&config, &Arc::new(Metrics::new()), false);
    limits
}

/// An untrusted connection to a daemon of its own.
pub(in super::super) fn connection_of(config: &Config) -> Arc<Connection> {
    let [limits, _] = ConnectionLimits::of_ports(config, &Arc::new(Metrics::new()), false);
    Connection::new(peer(), limits.enter(HERE).unwrap(), config)
}

fn connection() -> Arc<Connection> {
    connection_of(&Config::default())
}

fn trusted() -> Arc<Connection> {
    let connection = connection();
    connection.trust_if_authenticated(Callers::Authenticated);
    connection
}

#[test]
fn an_embedded_daemon_takes_half_of_the_descriptors() {
    let mut config = Config::default();
    assert_eq!(Bounds::of(&config, 1024, false)[0].all, 960);
    config.host = Some("a".into());
    let expected = Bounds {
        all: 128,
        of_address: 96,
        untrusted_of_address: 64,
    };
    assert_eq!(Bounds::of(&config, 256, false)[0], expected);
}

/// The page took 256 descriptors more, and with them those of the workers.
#[test]
fn the_status_page_has_its_part_of_the_same_descriptors() {
    let mut config = Config::default();
    for host in [None, Some("a".to_owned())] {
        config.host = host;
        for files in [256, 1024, 4096, 65_536] {
            let [with, pages] = Bounds::of(&config, files, true);
            let [without, none] = Bounds::of(&config, files, false);
            assert_eq!(with.all + pages.all, without.all, "{files} descriptors");
            assert_eq!(
                (pages.all, none.all),
                ((files / 16).min(256), 0),
                "{files} descriptors"
            );
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
    let limits = embedded();
    let enter = |host: u16| {
        limits
            .enter([0x2001, 0xdb8, 0, 1, 0, 0, 0, host].into())
            .inspect(Slot::keep)
    };
    let slots: Vec<_> = (0..100).map_while(|host| enter(host).ok()).collect();
    assert_eq!(slots.len(), 8, "a half");
}

/// Silent connections kept out all others, and launches of this machine ended with 69.
#[tokio::test]
async fn a_new_connection_takes_the_place_of_the_oldest_silent_one() {
    let limits = embedded();
    let enter = || limits.enter(HERE).unwrap();
    let mut slots: Vec<_> = (0..8).map(|_| enter()).collect();
    slots[0].keep();
    let newest = enter();
    assert!(slots[0].displaced().now_or_never().is_none());
    assert!(slots[1].displaced().now_or_never().is_some());
    assert!(slots[2].displaced().now_or_never().is_none());
    assert!(
        newest.has_place().now_or_never().is_none(),
        "its descriptor is still open"
    );
    drop(slots.remove(1));
    assert!(newest.has_place().now_or_never().is_some());
    drop((slots, newest));
    assert_eq!(lock(&limits.counts).all, 0);
    assert!(lock(&limits.counts).silent.is_empty());
}

#[test]
fn slots_come_back_and_trusted_connections_leave_room_for_untrusted_ones() {
    let limits = embedded();
    let enter = || {
        Some(Connection::new(
            peer(),
            limits.enter(HERE).inspect(Slot::keep).ok()?,
            &Config::default(),
        ))
    };
    let mut connections: Vec<_> = std::iter::from_fn(enter).collect();
    assert_eq!(connections.len(), 8, "a half");
    for connection in &connections[..1] {
        connection.trust_if_authenticated(Callers::Anybody);
    }
    assert!(enter().is_none(), "nothing was proved");
    connections[0].trust_if_authenticated(Callers::Authenticated);
    drop(connections[0].begin_node());
    connections.push(enter().unwrap());
    assert!(enter().is_none());
    let other = limits.enter([192, 0, 2, 1].into()).unwrap();
    drop((connections, other));
    assert_eq!(lock(&limits.counts).all, 0);
    assert!(lock(&limits.counts).by_address.is_empty());
}

#[tokio::test]
async fn a_connection_is_idle_when_nothing_goes_on() {
    let connection = trusted();
    let made = connection.expires().unwrap();
    let joined = connection.begin_node();
    assert_eq!(connection.expires(), None);
    drop(joined);
    assert!(connection.expires().unwrap() > made);
    let streams: Vec<_> = std::iter::from_fn(|| connection.open_stream()).collect();
    assert_eq!(streams.len(), AGENT_STREAMS);
    let [text, _] = connection.slot.limits.metrics.text(&Census::default());
    assert!(
        text.contains("ddp_refusals_total{code=\"connection\"} 1\n"),
        "{text}"
    );
    drop(streams);
    assert!(connection.open_stream().is_some());
}

/// A call that was refused every 4 s kept a connection for ever.
#[test]
fn before_a_node_joins_no_call_keeps_an_untrusted_connection() {
    let connection = connection();
    let end = connection.expires().unwrap();
    let call = connection.begin_call().unwrap();
    assert_eq!(connection.expires(), Some(end));
    drop(call);
    assert_eq!(connection.expires(), Some(end));
}

#[test]
fn before_a_node_joins_there_are_few_calls_at_a_time() {
    let connection = connection();
    let mut calls: Vec<_> = std::iter::from_fn(|| connection.begin_call()).collect();
    assert_eq!(calls.len(), UNTRUSTED_CALLS);
    calls.pop();
    calls.push(connection.begin_call().unwrap());
    assert!(connection.begin_call().is_none());
    drop(connection.begin_node());
    calls.extend((0..100).filter_map(|_| connection.begin_call()));
    assert_eq!(calls.len(), UNTRUSTED_CALLS + 100);
}

/// What a request of so many bytes holds when it has arrived.
async fn arrived(bytes: usize, connection: &Arc<Connection>) -> Result<HeldRequest, Code> {
    let body = Body::new(Full::new(Bytes::from(vec![0; bytes])));
    let mut held = HeldRequest::new(connection);
    let received = receive(body, &mut held, usize::MAX).await;
    received.map(|_| held).map_err(|refused| refused.code())
}

#[tokio::test]
async fn untrusted_requests_share_one_room_and_trusted_ones_need_none() {
    const ROOM: usize = UNTRUSTED_REQUESTS_KIB << 10;
    let limits = embedded();
    let enter = || Connection::new(peer(), limits.enter(HERE).unwrap(), &Config::default());
    let (stranger, node) = (enter(), enter());
    drop(node.begin_node());
    let held = arrived(ROOM, &stranger).await.unwrap();
    let taken = || UNTRUSTED_REQUESTS_KIB - limits.untrusted_requests.available_permits();
    assert_eq!(taken(), (ROOM - FREE_BYTES) >> 10);
    let refused = arrived(3 * FREE_BYTES, &stranger).await;
    assert_eq!(refused.err(), Some(Code::Unavailable));
    arrived(FREE_BYTES, &stranger).await.expect("small ones are free");
    arrived(ROOM, &node).await.unwrap();
    drop(held);
    assert_eq!(taken(), 0, "all is given back");
}

#[test]
fn the_stream_of_a_node_is_counted_until_it_has_joined() {
    let connection = connection();
    let free = || connection.slot.limits.untrusted_requests.available_permits();
    let mut held = HeldRequest::new(&connection);
    held.count(2 * FREE_BYTES).unwrap();
    assert_eq!(free(), UNTRUSTED_REQUESTS_KIB - (FREE_BYTES >> 10));
    drop(connection.begin_node());
    held.count(2 * FREE_BYTES).unwrap();
    assert_eq!(free(), UNTRUSTED_REQUESTS_KIB);
}

/// Answers every request.
#[derive(Clone)]
struct Answers;
impl Service<Request<Body>> for Answers {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        Box::pin(async { Ok(Response::new(Body::new(Full::new(Bytes::from_static(b"value"))))) })
    }
}

#[tokio::test]
async fn a_request_that_never_ends_is_refused_in_time() {
    let silence = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
    let mut request = Request::new(Body::new(silence));
    request.extensions_mut().insert(connection());
    let mut service = Limited::new(Answers, 1);
    service.timeout = SHORT;
    let answer = service.call(request).await.unwrap();
    let status = Status::from_header_map(answer.headers()).unwrap();
    assert_eq!(status.code(), Code::DeadlineExceeded);
}

/// A caller may read the reply long after the call was answered.
#[tokio::test]
async fn a_call_lasts_until_its_reply_was_taken() {
    let connection = trusted();
    let mut request = Request::new(Body::default());
    request.extensions_mut().insert(Arc::clone(&connection));
    let answer = Limited::new(Answers, 1).call(request).await.unwrap();
    assert_eq!(connection.expires(), None, "it is in use");
    let reply = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(&reply[..], b"value");
    assert!(connection.expires().is_some());
}

#[tokio::test]
async fn a_request_that_is_too_long_is_refused() {
    let body = Body::new(Full::new(Bytes::from(vec![0; 2049])));
    let received = receive(body, &mut HeldRequest::new(&trusted()), 2048).await;
    assert_eq!(
        received.err().map(|refused| refused.code()),
        Some(Code::OutOfRange)
    );
}
