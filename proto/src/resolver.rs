//! Host names to addresses, in a thread that exists from the start.
//!
//! The system's look-up blocks. Runtimes give it to a thread that they make when it is needed, and panic where the
//! machine has none left: a launcher must be able to say so instead, and to find a daemon that moved while its workers
//! have taken all threads that there are.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper_util::client::legacy::connect::dns::Name;
use tokio::sync::{mpsc, oneshot};
use tower_service::Service;

/// Questions that may wait while the thread looks up another: a caller with one more waits first.
const QUEUE: usize = 1;

/// The system has no thread for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot start a thread to look up the host name `{host}`: {cause}\n  hint: raise `ulimit -u`, and the pids limit of the control group if there is one; or use an address instead of the name"
)]
pub struct NoThread {
    /// The name that would have been looked up.
    pub host: String,
    /// The system's words.
    pub cause: String,
}

/// A name that leads nowhere, by which a client tells it from a daemon that does not answer.
#[derive(Debug, thiserror::Error)]
#[error("cannot look up the host name `{host}`: {cause}")]
pub struct LookUpError {
    host: String,
    cause: io::Error,
}

struct Question {
    host: String,
    port: u16,
    answer: oneshot::Sender<io::Result<Vec<SocketAddr>>>,
}

/// Looks up the addresses of one host, again at each call. Clones share the thread, which ends with the last of them.
#[derive(Clone, Debug)]
pub struct Resolver {
    host: Host,
}

/// Addresses of a host, with this port.
pub(crate) type LookUp = fn(&str, u16) -> io::Result<Vec<SocketAddr>>;

fn system_look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((host, port).to_socket_addrs()?.collect())
}

#[derive(Clone, Debug)]
enum Host {
    Address(IpAddr),
    Name(String, mpsc::Sender<Question>),
}

impl Resolver {
    /// For `host`, a name or an address, which may stand in brackets. Only a name takes a thread.
    pub fn start(host: &str) -> Result<Self, NoThread> {
        Self::with(host, system_look_up)
    }

    /// Looks names up with `look_up`, in the thread.
    pub(crate) fn with(host: &str, look_up: LookUp) -> Result<Self, NoThread> {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = bare.parse() {
            let host = Host::Address(address);
            return Ok(Self { host });
        }
        let (questions, mut queue) = mpsc::channel::<Question>(QUEUE);
        std::thread::Builder::new()
            .name("resolver".into())
            .spawn(move || {
                while let Some(question) = queue.blocking_recv() {
                    // After a long look-up the caller of this one may have stopped waiting.
                    if !question.answer.is_closed() {
                        let found = look_up(&question.host, question.port);
                        let _ = question.answer.send(found);
                    }
                }
            })
            .map_err(|error| NoThread {
                host: host.to_owned(),
                cause: error.to_string(),
            })?;
        let host = Host::Name(host.to_owned(), questions);
        Ok(Self { host })
    }

    /// The host's addresses now, with this port; at least one. A look-up may take as long as the system's resolver
    /// likes: give it a deadline. Cancel safe.
    pub async fn addresses(&self, port: u16) -> io::Result<Vec<SocketAddr>> {
        let (host, questions) = match &self.host {
            Host::Address(address) => return Ok(vec![SocketAddr::new(*address, port)]),
            Host::Name(host, questions) => (host, questions),
        };
        let (answer, found) = oneshot::channel();
        let question = Question {
            host: host.clone(),
            port,
            answer,
        };
        let ended = || io::Error::other("the thread that looks up names has ended");
        questions.send(question).await.map_err(|_| ended())?;
        let found = found.await.map_err(|_| ended())??;
        if found.is_empty() {
            return Err(io::Error::other(format!("`{host}` has no address")));
        }
        Ok(found)
    }
}

/// For a connector, which asks for the host that it was made for and sets the port itself.
impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = LookUpError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, LookUpError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), LookUpError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let resolver = self.clone();
        Box::pin(async move {
            let found = resolver.addresses(0).await;
            let found = found.map_err(|cause| LookUpError {
                host: name.to_string(),
                cause,
            })?;
            Ok(found.into_iter())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[tokio::test]
    async fn an_address_is_its_own_and_takes_no_thread() {
        for (text, address) in [
            ("127.0.0.2", IpAddr::from([127, 0, 0, 2])),
            ("::1", Ipv6Addr::LOCALHOST.into()),
            ("[::1]", Ipv6Addr::LOCALHOST.into()),
        ] {
            let resolver = Resolver::start(text).unwrap();
            assert!(matches!(resolver.host, Host::Address(_)), "{resolver:?}");
            assert_eq!(
                resolver.addresses(7).await.unwrap(),
                [SocketAddr::new(address, 7)]
            );
        }
    }

    #[tokio::test]
    async fn a_name_is_looked_up_and_an_unknown_one_refused() {
        let look_up: LookUp = |host, port| match host {
            "node0" => Ok(vec![SocketAddr::from(([10, 0, 0, 1], port))]),
            "nowhere" => Ok(Vec::new()),
            _ => Err(io::Error::other("Name or service not known")),
        };
        let found = async |host| {
            let resolver = Resolver::with(host, look_up).unwrap();
            let found = resolver.addresses(7).await;
            found.map_err(|error| error.to_string())
        };
        assert_eq!(
            found("node0").await,
            Ok(vec![SocketAddr::from(([10, 0, 0, 1], 7))])
        );
        assert_eq!(found("node1").await.unwrap_err(), "Name or service not known");
        assert_eq!(found("nowhere").await.unwrap_err(), "`nowhere` has no address");
    }

    #[test]
    fn the_system_is_asked_for_all_addresses_with_the_port() {
        // A literal address asks no name server.
        assert_eq!(
            system_look_up("127.0.0.2", 7).unwrap(),
            [SocketAddr::from(([127, 0, 0, 2], 7))]
        );
    }

    #[tokio::test]
    async fn a_question_that_nobody_waits_for_is_not_looked_up() {
        let (questions, mut queue) = mpsc::channel(QUEUE);
        let host = Host::Name("node0".into(), questions);
        let resolver = Resolver { host };
        let patience = std::time::Duration::from_millis(1);
        // The thread is busy: the deadline is kept all the same, and the next one asks in vain too.
        for _ in 0..3 {
            let asked = tokio::time::timeout(patience, resolver.addresses(7)).await;
            assert!(asked.is_err());
        }
        assert!(queue.try_recv().unwrap().answer.is_closed());
        assert!(queue.try_recv().is_err(), "no more than the queue takes");
        let answering = async {
            let question = queue.recv().await.unwrap();
            let here = SocketAddr::from((Ipv4Addr::LOCALHOST, question.port));
            question.answer.send(Ok(vec![here])).unwrap();
        };
        let (found, ()) = tokio::join!(resolver.addresses(7), answering);
        assert_eq!(found.unwrap(), [SocketAddr::from((Ipv4Addr::LOCALHOST, 7))]);
    }
}
