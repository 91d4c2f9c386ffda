//! What replies take until their callers have read them. HTTP/2 asks for the next part of a reply before its caller has
//! room for it: without a bound, a caller that asks for thousands of values and reads none has a copy of each.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::{Bytes, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::BoxFuture;

use super::admission::{Caller, Unsent};

/// KiB of all replies of one daemon that have not left.
const ALL_KIB: usize = 256 << 10;
/// How long a reply waits for room.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// Room for the replies of one daemon.
#[derive(Clone, Debug)]
pub(super) struct Replies {
    /// KiB that are left.
    left: Arc<Semaphore>,
    /// KiB of the longest reply.
    longest: u32,
    /// How long a reply waits for room.
    patience: Duration,
}

/// Room for a reply: of its network, and of the daemon.
type Permits = [OwnedSemaphorePermit; 2];

impl Replies {
    /// The longest reply has so many bytes.
    pub(super) fn new(longest: usize) -> Self {
        Self {
            left: Arc::new(Semaphore::new(ALL_KIB)),
            longest: kib(longest),
            patience: REPLY_TIMEOUT,
        }
    }

    /// Waits for room for the longest reply, out of that of its network too.
    async fn enter(self, network: Arc<Semaphore>) -> Result<Permits, Status> {
        let entering = async {
            let own = network.acquire_many_owned(self.longest).await.ok()?;
            Some([own, self.left.acquire_many_owned(self.longest).await.ok()?])
        };
        let entered = tokio::time::timeout(self.patience, entering).await;
        let refusal = || Status::unavailable("replies to this address wait for too long to be read");
        entered.ok().flatten().ok_or_else(refusal)
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX).max(1)
}

/// The reply to a call, as its connection takes it: a part is made where there is room for it, and counts until it has
/// been sent.
pub(super) struct Leaving {
    body: Body,
    caller: Arc<Caller>,
    replies: Replies,
    entering: Option<BoxFuture<Permits, Status>>,
}

/// A part of a reply, with what it counts for.
struct Part {
    data: Bytes,
    _permits: Vec<OwnedSemaphorePermit>,
    _unsent: Unsent,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Leaving {
    pub(super) fn new(body: Body, caller: Arc<Caller>, replies: Replies) -> Self {
        Self {
            body,
            caller,
            replies,
            entering: None,
        }
    }

    fn part(&self, data: Bytes, permits: Permits) -> Bytes {
        let size = kib(data.len()).min(self.replies.longest) as usize;
        let keep = |mut permit: OwnedSemaphorePermit| permit.split(size);
        Bytes::from_owner(Part {
            data,
            _permits: permits.into_iter().filter_map(keep).collect(),
            _unsent: self.caller.sends(),
        })
    }
}

impl hyper::body::Body for Leaving {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let entering = this.entering.get_or_insert_with(|| {
            let network = Arc::clone(&this.caller.network().replies);
            Box::pin(this.replies.clone().enter(network))
        });
        let entered = ready!(entering.as_mut().poll(context));
        this.entering = None;
        let permits = match entered {
            Ok(permits) => permits,
            Err(refused) => return Poll::Ready(Some(Err(refused))),
        };
        // What is not there yet waits without room.
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        Poll::Ready(frame.map(|frame| Ok(frame?.map_data(|data| this.part(data, permits)))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, Full};
    use tonic::Code;

    use super::super::arrivals::tests::caller_of;
    use super::*;
    use crate::rendezvous::config::Config;

    /// A reply of one part.
    fn reply(bytes: usize, caller: &Arc<Caller>, replies: &Replies) -> Leaving {
        let body = Body::new(Full::new(Bytes::from(vec![0; bytes])));
        Leaving::new(body, Arc::clone(caller), replies.clone())
    }

    /// A caller that asked for thousands of values, and read none, had a copy of each.
    #[tokio::test]
    async fn replies_that_are_not_read_are_bounded_and_others_wait_for_room() {
        const LONGEST: usize = 768 << 10;
        let caller = caller_of(&Config::default());
        let replies = Replies {
            patience: Duration::from_millis(100),
            ..Replies::new(LONGEST)
        };
        let mut held = Vec::new();
        let refused = loop {
            match reply(LONGEST, &caller, &replies).frame().await.expect("a part") {
                Ok(frame) => held.push(frame.into_data().expect("data")),
                Err(refused) => break refused,
            }
        };
        assert_eq!(refused.code(), Code::Unavailable);
        assert_eq!(held.len(), (128 << 20) / LONGEST, "what one network may have");
        assert!(caller.unsent_since().is_some());
        let mut waiting = reply(5, &caller, &replies);
        let mut next = waiting.frame();
        tokio::select! {
            biased;
            _ = &mut next => panic!("there is no room"),
            () = std::future::ready(()) => {}
        }
        held.pop();
        let part = next
            .await
            .expect("a part")
            .expect("room")
            .into_data()
            .expect("data");
        assert_eq!(part.len(), 5);
        drop((held, part));
        assert_eq!(caller.unsent_since(), None);
        assert_eq!(replies.left.available_permits(), ALL_KIB, "all is given back");
    }
}
