//! What requests may take while they arrive. A call is decoded when all of it is there, and only then is it known who
//! asks: until its answer its bytes count for the whole daemon, it has so long to arrive, and there are few at a time on
//! a connection on which no node has joined.
//!
//! A refusal says `UNAVAILABLE`: a node that has lost its connection repeats the calls of its workers while it joins.
//!
//! What replies take until their callers have read them is bounded too, in [`super::replies`].

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::{Bytes, Frame, SizeHint};
use hyper::{Request, Response};
use tokio::time::{Sleep, sleep};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;

use super::admission::Caller;
use super::replies::{Leaving, Replies};

/// Bytes of all requests of one daemon.
const ROOM: usize = 64 << 20;
/// From there on, connections on which no node has joined get no more of it.
const ROOM_OF_UNPROVEN: usize = ROOM / 2;
/// Bytes of a request that are not counted: the rest of a stream takes as much, and reads wait for long.
const FREE: usize = 4 << 10;
/// Time for a request to arrive.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(30);
/// The method whose request is a stream. It lasts as long as its node, and [`super::admission`] bounds how many there
/// are and how long each may take to join.
const STREAM: &str = "/Agent";

/// What a daemon holds of requests and replies.
#[derive(Debug)]
pub(super) struct Room {
    /// Bytes.
    requests: AtomicUsize,
    replies: Replies,
}

impl Room {
    /// Of a daemon whose longest reply has so many bytes.
    pub(super) fn new(longest: usize) -> Arc<Self> {
        Arc::new(Self {
            requests: AtomicUsize::new(0),
            replies: Replies::new(longest),
        })
    }
}

/// A service with bounds for its requests.
#[derive(Clone)]
pub(super) struct Bounded<S> {
    inner: S,
    room: Arc<Room>,
}

impl<S> Bounded<S> {
    /// Takes of this room.
    pub(super) fn new(inner: S, room: &Arc<Room>) -> Self {
        let room = Arc::clone(room);
        Self { inner, room }
    }
}

impl<S: NamedService> NamedService for Bounded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Bounded<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let Some(caller) = request.extensions().get::<Arc<Caller>>().cloned() else {
            return refusal(Status::internal("a call without a connection"));
        };
        let is_stream = request.uri().path().ends_with(STREAM);
        let place = caller.begins_call();
        if place.is_none() && !is_stream {
            return refusal(Status::unavailable(
                "too many calls at a time on a connection without a node",
            ));
        }
        let (parts, body) = request.into_parts();
        let time = (!is_stream).then_some(ARRIVAL_TIMEOUT);
        let body = Arriving::new(body, Arc::clone(&caller), &self.room, time);
        let taken = Arc::clone(&body.taken);
        let request = Request::from_parts(parts, Body::new(body));
        let answer = self.inner.call(request);
        let replies = self.room.replies.clone();
        Box::pin(async move {
            let answer = answer.await;
            drop((place, taken));
            if is_stream {
                // Its messages wait in a queue of their own.
                return answer;
            }
            Ok(answer?.map(|body| Body::new(Leaving::new(body, caller, replies))))
        })
    }
}

fn refusal(status: Status) -> BoxFuture<Response<Body>, Infallible> {
    Box::pin(std::future::ready(Ok(status.into_http())))
}

/// What one request holds. It is given back when there is an answer, and with a stream at its end.
#[derive(Debug)]
struct Taken {
    room: Arc<Room>,
    caller: Arc<Caller>,
    bytes: AtomicUsize,
}

impl Taken {
    /// Takes so many bytes more; false if the daemon would hold more than `limit` then, or its network more than its share.
    fn take(&self, bytes: usize, limit: usize) -> bool {
        let network = self.caller.network();
        let held = self.room.requests.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let own = network.requests.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if bytes > 0 && (held > limit || own > network.share_of(limit)) {
            self.subtract(bytes);
            return false;
        }
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        true
    }

    fn give_back(&self) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        self.subtract(bytes);
    }

    fn subtract(&self, bytes: usize) {
        self.room.requests.fetch_sub(bytes, Ordering::Relaxed);
        self.caller.network().requests.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// A request as it comes.
struct Arriving {
    body: Body,
    caller: Arc<Caller>,
    taken: Arc<Taken>,
    /// How many bytes have come.
    seen: usize,
    /// None for the stream of an agent.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Arriving {
    /// Must arrive within `time`, if there is one.
    fn new(body: Body, caller: Arc<Caller>, room: &Arc<Room>, time: Option<Duration>) -> Self {
        let taken = Taken {
            room: Arc::clone(room),
            caller: Arc::clone(&caller),
            bytes: AtomicUsize::new(0),
        };
        Self {
            body,
            caller,
            taken: Arc::new(taken),
            seen: 0,
            deadline: time.map(|time| Box::pin(sleep(time))),
        }
    }

    /// Counts what has come. The stream of a node that has joined is a node's: its messages are read one by one.
    fn count(&mut self, bytes: usize) -> Result<(), Status> {
        let is_proven = self.caller.is_proven();
        if is_proven && self.deadline.is_none() {
            self.taken.give_back();
            return Ok(());
        }
        let before = self.seen.saturating_sub(FREE);
        self.seen += bytes;
        let more = self.seen.saturating_sub(FREE) - before;
        let limit = if is_proven { ROOM } else { ROOM_OF_UNPROVEN };
        if self.taken.take(more, limit) {
            return Ok(());
        }
        let words = "the rendezvous daemon has no room for more requests at the moment";
        Err(Status::unavailable(words))
    }
}

impl hyper::body::Body for Arriving {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if let Some(deadline) = &mut this.deadline
            && deadline.as_mut().poll(context).is_ready()
        {
            let words = format!("the request did not arrive within {ARRIVAL_TIMEOUT:?}");
            return Poll::Ready(Some(Err(Status::deadline_exceeded(words))));
        }
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
            && let Err(refused) = this.count(data.len())
        {
            return Poll::Ready(Some(Err(refused)));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::Ipv4Addr;

    use http_body_util::{BodyExt as _, Full, StreamBody};
    use tonic::Code;

    use super::super::admission::Admission;
    use super::super::metrics::Metrics;
    use super::*;
    use crate::rendezvous::config::{Callers, Config};
    use crate::rendezvous::event::Peer;
    use crate::rendezvous::shares::part_of;

    fn caller() -> Arc<Caller> {
        caller_of(&Config::default())
    }

    pub(in super::super) fn caller_of(config: &Config) -> Arc<Caller> {
        let here = Ipv4Addr::LOCALHOST.into();
        let peer = Peer {
            remote: here,
            local: here,
        };
        let admission = Admission::new(config, Arc::new(Metrics::new()), false);
        Caller::new(peer, admission.enter(here).unwrap())
    }

    /// A request of so many bytes, read to its end; what it holds then.
    async fn read(
        bytes: usize,
        caller: &Arc<Caller>,
        room: &Arc<Room>,
        time: Option<Duration>,
    ) -> Result<Arc<Taken>, Code> {
        let body = Body::new(Full::new(Bytes::from(vec![0; bytes])));
        let mut arriving = Arriving::new(body, Arc::clone(caller), room, time);
        while let Some(frame) = arriving.frame().await {
            frame.map_err(|refused| refused.code())?;
        }
        Ok(arriving.taken)
    }

    #[tokio::test]
    async fn all_requests_share_one_room_and_joined_nodes_have_half_of_it_to_themselves() {
        let (room, time) = (Room::new(1), Some(ARRIVAL_TIMEOUT));
        let (stranger, node) = (caller(), caller());
        node.prove();
        let held = read(ROOM_OF_UNPROVEN, &stranger, &room, time).await.unwrap();
        assert_eq!(room.requests.load(Ordering::Relaxed), ROOM_OF_UNPROVEN - FREE);
        let refused = read(3 * FREE, &stranger, &room, time).await;
        assert_eq!(refused.unwrap_err(), Code::Unavailable);
        read(FREE, &stranger, &room, time)
            .await
            .expect("small ones are free");
        let others = read(ROOM_OF_UNPROVEN, &node, &room, time).await.unwrap();
        let refused = read(4 * FREE, &node, &room, time).await;
        assert_eq!(refused.unwrap_err(), Code::Unavailable);
        drop(others);
        read(4 * FREE, &node, &room, time).await.unwrap();
        drop(held);
        assert_eq!(room.requests.load(Ordering::Relaxed), 0, "all is given back");
    }

    #[tokio::test]
    async fn the_stream_of_a_node_is_counted_until_it_has_joined() {
        let (room, node) = (Room::new(1), caller());
        let held = read(2 * FREE, &node, &room, None).await.unwrap();
        assert_eq!(room.requests.load(Ordering::Relaxed), FREE);
        drop(held);
        node.prove();
        let _held = read(2 * FREE, &node, &room, None).await.unwrap();
        assert_eq!(room.requests.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn a_request_that_never_ends_is_refused_in_time() {
        let silence = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
        let time = Some(Duration::from_millis(10));
        let mut arriving = Arriving::new(Body::new(silence), caller(), &Room::new(1), time);
        let frame = arriving.frame().await.expect("an error");
        assert_eq!(frame.unwrap_err().code(), Code::DeadlineExceeded);
    }

    /// One user of a daemon of several could hold all of it.
    #[tokio::test]
    async fn a_network_has_a_part_of_the_room_where_callers_are_of_several_users() {
        let (room, time) = (Room::new(1), Some(ARRIVAL_TIMEOUT));
        let config = Config {
            callers: Callers::OfJobs,
            ..Config::default()
        };
        let (one, other) = (caller_of(&config), caller_of(&config));
        one.prove();
        other.prove();
        let held = read(part_of(ROOM), &one, &room, time).await.unwrap();
        let refused = read(3 * FREE, &one, &room, time).await;
        assert_eq!(refused.unwrap_err(), Code::Unavailable);
        read(part_of(ROOM), &other, &room, time).await.unwrap();
        drop(held);
        read(3 * FREE, &one, &room, time).await.unwrap();
    }
}
