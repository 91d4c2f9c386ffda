//! Which node hosts the rendezvous daemon.
//!
//! A single node hosts its own on an abstract Unix socket, which no other user can use. Of several nodes, the host is the
//! one that `is_host` names, else node rank 0, else the node to which the endpoint's address belongs. Node rank 0 is a
//! client too if it lacks the endpoint's address. Where the port is taken already, a health check tells a daemon, whose
//! client this node then becomes, from another program. A daemon inside another job's `ddp-run` ends with that job, and
//! counts as another program.
//!
//! On a TCP port, both sides prove that they have the token of the job. The host makes it if it is missing.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ddp_proto::client::{Access, ClientError, UNIX_PREFIX, open_channel};
use ddp_proto::look_up::{LookUpError, look_up};
use ddp_proto::printable;
use ddp_proto::rendezvous::StatusRequest;
use ddp_proto::rendezvous::rendezvous_client::RendezvousClient;
use tokio::net::{TcpListener, TcpStream};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::cli::error::CliError;
use crate::cli::token::TokenSource;
use crate::cli::values::Endpoint;
use crate::rendezvous::{self, Callers, Listener, Transport};

/// Longest wait for the health check: a daemon that is just starting answers within milliseconds.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest pause between two tries for a port without a server; how long is a matter of chance.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Longest wait for a host name.
pub(in crate::cli) const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Name of the service whose health tells our daemon from another gRPC server.
const SERVICE: &str = "ddp.rendezvous.v1.Rendezvous";

/// How the nodes of a job authenticate each other.
#[derive(Clone, Debug)]
pub enum Protection {
    /// Nothing: `--insecure`.
    Insecure,
    /// That they have the token.
    Token(TokenSource),
}

impl Protection {
    /// By the flag and the variables of this process.
    pub fn find(is_insecure: bool, get_env: impl Fn(&str) -> Option<String>) -> Self {
        if is_insecure {
            return Self::Insecure;
        }
        Self::Token(TokenSource::find(get_env))
    }

    /// What is proved to the daemon of another process. A token's file may still have to be made there.
    pub async fn access(&self, patience: Duration) -> Result<Access, CliError> {
        Ok(match self {
            Self::Insecure => Access::Open,
            Self::Token(source) => Access::Token(source.wait(patience).await?),
        })
    }
}

/// What is known of this node before anything is resolved or bound.
#[derive(Clone, Debug)]
pub struct HostFacts {
    /// `--rdzv-endpoint`; a job of one node needs none.
    pub endpoint: Option<Endpoint>,
    /// `--rdzv-conf is_host=…`.
    pub is_host: Option<bool>,
    /// `--node-rank`.
    pub node_rank: Option<u32>,
    /// `--rdzv-id`, or what stands for it.
    pub job_id: String,
    /// `--status-port`: where this node shows the job, if it hosts the daemon.
    pub status_port: Option<u16>,
    /// `--metrics-file`: written by the node that hosts the daemon.
    pub metrics_file: Option<PathBuf>,
    /// True for a job of one node, whose daemon no other node has to find.
    pub one_node: bool,
    /// What is proved at a TCP port.
    pub protection: Protection,
    /// How long another node's token file is waited for.
    pub patience: Duration,
}

/// What follows from the facts alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostRole {
    /// One node alone: a daemon of its own.
    Alone,
    /// This node hosts the daemon, unless one serves there already.
    Host,
    /// This node hosts the daemon if the endpoint's address is one of its own.
    HostIfLocal,
    /// Another node hosts it.
    Join,
}

/// Decides from the facts alone, in the order that the documentation promises.
pub fn host_role(facts: &HostFacts) -> HostRole {
    match (&facts.endpoint, facts.is_host, facts.node_rank) {
        (None, ..) => HostRole::Alone,
        (Some(_), Some(true), _) | (Some(_), None, Some(0)) => HostRole::Host,
        (Some(_), Some(false), _) | (Some(_), None, Some(_)) => HostRole::Join,
        (Some(_), None, None) => HostRole::HostIfLocal,
    }
}

/// Where the daemon is.
#[derive(Debug)]
pub struct Hosting {
    /// `host:port` or `unix:@NAME` that the agent connects to.
    pub endpoint: String,
    /// What it proves there.
    pub access: Access,
    /// Set where this process runs the daemon itself.
    pub daemon: Option<OwnDaemon>,
}

/// Where the daemon of this process listens.
#[derive(Debug)]
pub struct OwnDaemon {
    /// Bound.
    pub listener: Listener,
    /// What is known of those who connect.
    pub callers: Callers,
}

/// At another process.
async fn join(facts: &HostFacts, endpoint: &Endpoint) -> Result<Hosting, CliError> {
    Ok(Hosting {
        endpoint: endpoint.to_string(),
        access: facts.protection.access(facts.patience).await?,
        daemon: None,
    })
}

/// In this process.
fn host(facts: &HostFacts, endpoint: &Endpoint, listener: TcpListener) -> Result<Hosting, CliError> {
    let (access, transport, callers) = match &facts.protection {
        Protection::Insecure => {
            if let Some(words) = listener.local_addr().ok().and_then(|at| reach(at, "")) {
                tracing::warn!("{words}");
            }
            (Access::Open, Transport::Plain, Callers::Anybody)
        }
        Protection::Token(source) => {
            let token = source.read_or_make()?;
            let transport = Transport::of_token(&token)?;
            (Access::Token(token), transport, Callers::Authenticated)
        }
    };
    Ok(Hosting {
        endpoint: endpoint.to_string(),
        access,
        daemon: Some(OwnDaemon {
            listener: Listener::Tcp(listener, transport),
            callers,
        }),
    })
}

/// What other machines can do at this address without a token, if they can reach it; `limit` says what would limit that to
/// one of this machine's addresses.
pub(in crate::cli) fn reach(address: SocketAddr, limit: &str) -> Option<String> {
    let ip = address.ip().to_canonical();
    let limit = if ip.is_unspecified() { limit } else { "" };
    (!ip.is_loopback()).then(|| {
        format!(
            "every host that reaches {address} can join jobs, read their data and stop them: `--insecure` is on{limit}"
        )
    })
}

/// Carries the role out: resolves, binds, and looks who holds the port where binding fails.
pub async fn resolve_host(facts: &HostFacts) -> Result<Hosting, CliError> {
    let Some(endpoint) = &facts.endpoint else {
        return alone();
    };
    if host_role(facts) == HostRole::Join {
        return join(facts, endpoint).await;
    }
    let addresses = resolve(endpoint).await?;
    let bind_to = bind_addresses(facts, endpoint, &addresses);
    let is_private = facts.one_node && !addresses.is_empty() && addresses.iter().all(IpAddr::is_loopback);
    let mut last_error = None;
    for address in bind_to {
        match listen(address, asked_at(endpoint, &addresses)).await {
            Ok(listener) => {
                tracing::info!(%address, "hosting the rendezvous");
                return match host(facts, endpoint, listener) {
                    Err(CliError::NoToken { .. } | CliError::MakeToken { .. }) if is_private => alone(),
                    hosting => hosting,
                };
            }
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                return match who_serves(facts, endpoint, &addresses).await? {
                    Owner::Anybody => {
                        tracing::info!(%endpoint, "a rendezvous already runs there");
                        join(facts, endpoint).await
                    }
                    Owner::OtherJob(why) if facts.one_node => {
                        tracing::info!(%why, "using a private socket instead");
                        alone()
                    }
                    Owner::OtherJob(why) => Err(CliError::OtherJobsPort {
                        host: endpoint.host.clone(),
                        endpoint: endpoint.to_string(),
                        why,
                    }),
                };
            }
            Err(error) => last_error = Some(error),
        }
    }
    match last_error {
        Some(source) if source.kind() != ErrorKind::AddrNotAvailable || facts.is_host.is_some() => {
            Err(CliError::Host {
                endpoint: endpoint.to_string(),
                hint: match source.kind() {
                    ErrorKind::PermissionDenied => "ports below 1024 need privileges: choose a higher port",
                    _ => "give the address at which the other nodes reach this one",
                },
                source,
            })
        }
        // The address belongs to another machine: its daemon is there, or will be.
        _ => join(facts, endpoint).await,
    }
}

/// Listens. Launchers of one machine that do so in the same instant can refuse each other: for a moment the kernel
/// takes all of them for listeners. Then no node has the port, and each tries again after a random time.
async fn listen(address: SocketAddr, asked_at: SocketAddr) -> io::Result<TcpListener> {
    let deadline = Instant::now() + HEALTH_TIMEOUT;
    loop {
        let error = match rendezvous::listen(&[address]) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => error,
            done => return done,
        };
        if Instant::now() >= deadline || is_served(asked_at).await {
            return Err(error);
        }
        tokio::time::sleep(LONGEST_PAUSE.mul_f64(rand::random())).await;
    }
}

/// False if nothing listens there.
async fn is_served(address: SocketAddr) -> bool {
    let tried = tokio::time::timeout(HEALTH_TIMEOUT, TcpStream::connect(address)).await;
    !matches!(tried, Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused)
}

/// Address at which the server of the endpoint's port on this machine is asked.
fn asked_at(endpoint: &Endpoint, addresses: &[IpAddr]) -> SocketAddr {
    let host = addresses.first().copied().unwrap_or(Ipv4Addr::LOCALHOST.into());
    SocketAddr::new(host, endpoint.port)
}

fn alone() -> Result<Hosting, CliError> {
    let name = format!("ddp-run-{:032x}", rand::random::<u128>());
    let listener = rendezvous::listen_locally(&name)
        .map_err(CliError::machine("cannot listen on an abstract Unix socket"))?;
    Ok(Hosting {
        endpoint: format!("{UNIX_PREFIX}{name}"),
        access: Access::Open,
        daemon: Some(OwnDaemon {
            listener: Listener::Unix(listener),
            callers: Callers::Authenticated,
        }),
    })
}

/// The endpoint's addresses; empty where its name is unknown, which the client reports when it matters.
async fn resolve(endpoint: &Endpoint) -> Result<Vec<IpAddr>, CliError> {
    let found = tokio::time::timeout(RESOLVE_TIMEOUT, look_up(&endpoint.host, endpoint.port)).await;
    match found {
        Ok(Ok(addresses)) => Ok(addresses.iter().map(SocketAddr::ip).collect()),
        Ok(Err(error @ LookUpError::NoThread { .. })) => Err(CliError::NoThread(error)),
        Ok(Err(LookUpError::Unknown { .. })) | Err(_) => Ok(Vec::new()),
    }
}

/// Addresses to try, in order. A literal address is taken at its word, unless `is_host=1` says that this
/// node is reached under it all the same (address translation). A name may resolve to another address for
/// this node than for the others (`127.0.1.1` in many a hosts file), so all are served.
fn bind_addresses(facts: &HostFacts, endpoint: &Endpoint, addresses: &[IpAddr]) -> Vec<SocketAddr> {
    let at = |ip: IpAddr| SocketAddr::new(ip, endpoint.port);
    let everywhere = [at(Ipv6Addr::UNSPECIFIED.into()), at(Ipv4Addr::UNSPECIFIED.into())];
    let literal: Option<IpAddr> = endpoint.host.parse().ok();
    match (host_role(facts), literal) {
        (HostRole::Alone | HostRole::Join, _) => Vec::new(),
        (HostRole::Host, Some(ip)) if facts.is_host == Some(true) => [&[at(ip)], &everywhere[..]].concat(),
        (HostRole::Host | HostRole::HostIfLocal, Some(ip)) => vec![at(ip)],
        (HostRole::HostIfLocal, None) if !addresses.iter().copied().any(is_own_address) => Vec::new(),
        (HostRole::Host | HostRole::HostIfLocal, None) => everywhere.to_vec(),
    }
}

/// An address is ours if a datagram socket can be bound to it; nothing is sent.
pub(super) fn is_own_address(address: IpAddr) -> bool {
    std::net::UdpSocket::bind((address, 0)).is_ok()
}

/// Which jobs a daemon serves.
enum Owner {
    /// This job too.
    Anybody,
    /// Another job only, in the daemon's words.
    OtherJob(String),
}

/// Asks the daemon that serves at the endpoint; fails if it is none of ours.
async fn who_serves(facts: &HostFacts, endpoint: &Endpoint, addresses: &[IpAddr]) -> Result<Owner, CliError> {
    let taken = |found: String| CliError::PortTaken {
        endpoint: endpoint.to_string(),
        host: endpoint.host.clone(),
        port: endpoint.port,
        found,
    };
    let address = asked_at(endpoint, addresses);
    if !is_served(address).await {
        return Err(taken("it has bound the port but does not listen".to_owned()));
    }
    let access = match &facts.protection {
        Protection::Insecure => Access::Open,
        // A daemon of this user that has just begun to listen makes it at the same time.
        Protection::Token(source) => Access::Token(source.read_or_make()?),
    };
    // A connection is given up after as long, with fewer words.
    let patience = HEALTH_TIMEOUT.saturating_sub(Duration::from_millis(100));
    let asking = ask(address, &access, facts.job_id.clone(), &taken);
    tokio::time::timeout(patience, asking).await.unwrap_or_else(|_| {
        Err(taken(format!(
            "it did not answer within {} s",
            HEALTH_TIMEOUT.as_secs()
        )))
    })
}

/// `taken` makes the error for a server that is no daemon of ours, from what gave it away.
async fn ask(
    address: SocketAddr,
    access: &Access,
    job_id: String,
    taken: &impl Fn(String) -> CliError,
) -> Result<Owner, CliError> {
    let opened = open_channel(&address.to_string(), access).await;
    let channel = opened.map_err(|error| match error {
        ClientError::Untrusted { .. } => CliError::Client(error),
        _ if matches!(access, Access::Open) => taken("it does not speak gRPC".into()),
        _ => taken("it does not speak TLS as a rendezvous does".into()),
    })?;
    let request = HealthCheckRequest {
        service: SERVICE.to_owned(),
    };
    let health = match HealthClient::new(channel.clone()).check(request).await {
        Ok(reply) => reply.into_inner().status(),
        Err(status) if status.code() == tonic::Code::NotFound => {
            return Err(taken("it is a different gRPC server".into()));
        }
        Err(_) => return Err(taken("it does not answer gRPC health checks".into())),
    };
    if health != ServingStatus::Serving {
        return Err(taken(format!("its health is {health:?}")));
    }
    match RendezvousClient::new(channel)
        .status(StatusRequest { job_id })
        .await
    {
        Err(status) if status.code() == tonic::Code::FailedPrecondition => {
            Ok(Owner::OtherJob(printable::text(status.message()).into_owned()))
        }
        // A daemon that does not know the job yet serves it all the same.
        Ok(_) | Err(_) => Ok(Owner::Anybody),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(endpoint: Option<&str>, is_host: Option<bool>, node_rank: Option<u32>) -> HostFacts {
        let endpoint = endpoint.map(|text| crate::cli::values::endpoint(text).expect("valid"));
        HostFacts {
            endpoint,
            is_host,
            node_rank,
            job_id: "job".to_owned(),
            status_port: None,
            metrics_file: None,
            one_node: false,
            protection: Protection::Insecure,
            patience: Duration::ZERO,
        }
    }

    #[test]
    fn is_host_then_node_rank_then_address() {
        for (is_host, node_rank, expected) in [
            (Some(true), Some(5), HostRole::Host),
            (Some(false), Some(0), HostRole::Join),
            (None, Some(0), HostRole::Host),
            (None, Some(1), HostRole::Join),
            (None, None, HostRole::HostIfLocal),
        ] {
            assert_eq!(
                host_role(&facts(Some("node0"), is_host, node_rank)),
                expected,
                "{is_host:?} {node_rank:?}"
            );
        }
        assert_eq!(host_role(&facts(None, None, None)), HostRole::Alone);
    }

    #[test]
    fn literal_addresses_are_taken_at_their_word() {
        let bound = |facts: &HostFacts, addresses: &[IpAddr]| {
            bind_addresses(facts, facts.endpoint.as_ref().expect("given"), addresses)
        };
        let loopback: &[IpAddr] = &[Ipv4Addr::LOCALHOST.into()];
        let elsewhere: &[IpAddr] = &[Ipv4Addr::new(192, 0, 2, 1).into()];
        let literal = facts(Some("127.0.0.1:5"), None, None);
        assert_eq!(
            bound(&literal, loopback),
            [SocketAddr::from((Ipv4Addr::LOCALHOST, 5))]
        );
        let translated = facts(Some("192.0.2.1:5"), Some(true), None);
        assert_eq!(bound(&translated, elsewhere).len(), 3);
        let name = facts(Some("node0:5"), None, None);
        assert!(bound(&name, elsewhere).is_empty());
        assert!(
            bound(&name, loopback)
                .iter()
                .all(|address| address.ip().is_unspecified())
        );
        assert_eq!(bound(&facts(Some("node0:5"), None, Some(0)), elsewhere).len(), 2);
    }

    #[test]
    fn a_port_that_nobody_serves_is_tried_again() {
        use std::os::fd::AsRawFd as _;
        use std::task::{Context, Waker};

        use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, socket};

        block_on(async {
            let holder = socket(
                AddressFamily::Inet,
                SockType::Stream,
                SockFlag::SOCK_CLOEXEC,
                None,
            )
            .unwrap();
            bind(holder.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
            let bound: SockaddrIn = getsockname(holder.as_raw_fd()).unwrap();
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, bound.port()));
            let mut listening = std::pin::pin!(listen(address, address));
            let first_try = listening.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(first_try.is_pending());
            drop(holder);
            assert_eq!(listening.await.unwrap().local_addr().unwrap(), address);
        });
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(future)
    }

    /// A container without HOME: exit 77.
    #[test]
    fn one_node_at_a_loopback_rendezvous_needs_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let unmakable = TokenSource::File(dir.path().join("absent/token"));
        for token in [TokenSource::Nowhere, unmakable] {
            let hosting = |one_node| {
                let facts = HostFacts {
                    one_node,
                    protection: Protection::Token(token.clone()),
                    ..facts(Some("127.0.0.1:0"), None, None)
                };
                block_on(resolve_host(&facts))
            };
            let alone = hosting(true).expect("no token");
            assert!(alone.endpoint.starts_with(UNIX_PREFIX), "{}", alone.endpoint);
            let refused = hosting(false).expect_err("other nodes have to prove that they belong to the job");
            assert_eq!(refused.exit_code(), ddp_proto::exit::REFUSED);
        }
    }

    #[test]
    fn a_foreign_address_makes_a_client() {
        let hosting = block_on(resolve_host(&facts(Some("192.0.2.1:29400"), None, None))).expect("a client");
        assert!(hosting.daemon.is_none());
        assert_eq!(hosting.endpoint, "192.0.2.1:29400");
    }

    #[test]
    fn a_stranger_on_the_port_is_named() {
        block_on(async {
            let stranger = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
            let port = stranger.local_addr().expect("bound").port();
            let closes = tokio::spawn(async move {
                // Answers each connection by closing it, as a program with another protocol does.
                while let Ok((connection, _)) = stranger.accept().await {
                    drop(connection);
                }
            });
            let error = resolve_host(&facts(Some(&format!("127.0.0.1:{port}")), None, None))
                .await
                .expect_err("taken");
            assert_eq!(error.exit_code(), ddp_proto::exit::DAEMON_UNREACHABLE);
            let text = error.to_string().replace(&port.to_string(), "PORT");
            insta::assert_snapshot!(text, @r"
        port PORT of rendezvous endpoint `127.0.0.1:PORT` is in use by a program that is not a ddp-run rendezvous: it does not answer gRPC health checks
          hint: choose a different port with `--rdzv-endpoint 127.0.0.1:PORT` on all nodes, or stop the program that uses it (`ss -ltnp 'sport = :PORT'`); if it is a rendezvous, give both the same token; or both `--insecure`, in a network that you trust entirely
        ");
            closes.abort();
        });
    }
}
