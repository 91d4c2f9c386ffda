//! HTTP for operators and their tools: liveness, readiness, metrics, and the status page.
//!
//! Anyone who reaches the port can open connections, so that everything has a bound: connections in all and of one
//! address, the time to the end of the header, its size, the time of an answer. A connection carries one request.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::actor;
use super::admin::{Admin, Claim};
use super::metrics::{MAX_LABELLED_JOBS, Metrics};
use super::page;
use crate::rendezvous::event::Peer;
use crate::rendezvous::report::Census;
use crate::rendezvous::shares::network_of;

/// Connections of one address, or half of all: what is left is for others.
const MAX_CONNECTIONS_OF_ADDRESS: usize = 64;
/// Time from a connection to the end of its request's header.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of a header, and its fields.
const MAX_HEADER_BYTES: usize = 16 << 10;
const MAX_HEADER_FIELDS: usize = 64;
/// Time for a request and its answer, unless the answer is a stream.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Time for the actor.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// What was seen of the daemon is told for so long: however many ask, a look at all nodes is taken once.
const FRESH: Duration = Duration::from_secs(1);
/// After a connection that the system has no room for.
const PAUSE: Duration = Duration::from_millis(200);

/// What an answer consists of.
pub(super) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// What is served, and to whom.
#[derive(Debug)]
pub(super) struct Http {
    pub(super) requests: mpsc::Sender<actor::Request>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) admin: Admin,
    pub(super) viewers: page::Viewers,
    /// Held during a look: others wait for it.
    pub(super) seen: Mutex<Option<Seen>>,
}

/// What the daemon looked like.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    at: Instant,
    why_unready: Option<String>,
    /// For everyone, and for operators.
    metrics: [Bytes; 2],
}

/// Serves for ever, so many connections at a time.
pub(super) async fn serve(listener: TcpListener, http: Arc<Http>, most: usize) {
    let most_of_address = MAX_CONNECTIONS_OF_ADDRESS.min(most / 2);
    let mut connections = JoinSet::new();
    let mut of_address: HashMap<IpAddr, usize> = HashMap::new();
    loop {
        // Cancel safe: `accept` takes no connection that it does not return, `join_next` likewise.
        tokio::select! {
            Some(ended) = connections.join_next() => {
                let Ok(address) = ended else { continue };
                if let Some(count) = of_address.get_mut(&address) {
                    *count -= 1;
                    if *count == 0 {
                        of_address.remove(&address);
                    }
                }
            }
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    let address = network_of(peer.ip());
                    let of_peer = of_address.get(&address).copied().unwrap_or(0);
                    if connections.len() >= most || of_peer >= most_of_address {
                        http.metrics.refused("http");
                        continue;
                    }
                    of_address.insert(address, of_peer + 1);
                    connections.spawn(connection(stream, peer, http.clone()));
                }
                Err(error) => {
                    tracing::debug!("cannot accept a connection for operators: {error}");
                    sleep(PAUSE).await;
                }
            },
        }
    }
}

/// Serves one request; returns as whose it counts. None panics, so that every address is counted down again.
async fn connection(stream: TcpStream, peer: SocketAddr, http: Arc<Http>) -> IpAddr {
    let address = peer.ip().to_canonical();
    // Where it cannot be told, a caller is of no machine in particular.
    let local = stream
        .local_addr()
        .map_or(Ipv6Addr::UNSPECIFIED.into(), |local| local.ip());
    let peer = Peer {
        remote: address,
        local: local.to_canonical(),
    };
    let is_stream = Arc::new(AtomicBool::new(false));
    let streams = is_stream.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let (http, streams) = (http.clone(), streams.clone());
        async move {
            // What a body holds is nobody's business here.
            let (request, _) = request.into_parts();
            let response = http.answer(peer, &request, &streams).await;
            Ok::<_, Infallible>(response)
        }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEADER_BYTES)
        .max_headers(MAX_HEADER_FIELDS)
        .keep_alive(false)
        // A client that has sent all it had to say, and said so, still waits for its answer.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(serving);
    // What goes wrong here goes wrong at the other end.
    let is_late = timeout(ANSWER_TIMEOUT, &mut serving).await.is_err();
    if is_late && is_stream.load(Ordering::Relaxed) {
        let _ = timeout(page::LONGEST_STREAM, &mut serving).await;
    }
    network_of(address)
}

impl Http {
    async fn answer(&self, peer: Peer, request: &Parts, is_stream: &AtomicBool) -> Response<Body> {
        if !matches!(request.method, Method::GET | Method::HEAD) {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
        }
        match request.uri.path() {
            "/livez" => plain(StatusCode::OK, "ok\n"),
            "/readyz" => match self.look().await.map(|seen| seen.why_unready) {
                Some(None) => plain(StatusCode::OK, "ok\n"),
                Some(Some(why)) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
                None => busy(),
            },
            "/metrics" => self.measurements(peer, &request.headers).await,
            // The page itself has no secret, and asks for the token.
            "/" if self.admin.has_token() => page::page(true),
            "/" => match self.refuse_stranger(peer, &request.headers) {
                Some(refusal) => refusal,
                None => page::page(false),
            },
            "/events" => {
                if let Some(refusal) = self.refuse_stranger(peer, &request.headers) {
                    return refusal;
                }
                is_stream.store(true, Ordering::Relaxed);
                page::events(self, request.uri.query())
            }
            _ => plain(
                StatusCode::NOT_FOUND,
                "not found: /livez, /readyz, /metrics, /events and / are here\n",
            ),
        }
    }

    /// With the names of jobs for operators only. A wrong token is refused: they would be missed.
    async fn measurements(&self, peer: Peer, headers: &HeaderMap) -> Response<Body> {
        let is_operator = self.is_operator(peer, headers);
        if !is_operator && self.admin.has_token() && headers.contains_key(header::AUTHORIZATION) {
            return self.refusal();
        }
        let Some(seen) = self.look().await else {
            return busy();
        };
        let [for_all, for_operators] = seen.metrics;
        text(
            StatusCode::OK,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            if is_operator { for_operators } else { for_all },
        )
    }

    /// What the daemon looks like, a little ago at most; none if it has no time.
    async fn look(&self) -> Option<Seen> {
        let looking = async {
            let mut seen = self.seen.lock().await;
            if seen.as_ref().is_none_or(|seen| seen.at.elapsed() >= FRESH) {
                let ask = |answer| actor::Request::Census(MAX_LABELLED_JOBS, answer);
                let census = self.ask(ask).await?;
                *seen = Some(Seen {
                    at: Instant::now(),
                    why_unready: census.why_unready(),
                    metrics: self.metrics.text(&census).map(Bytes::from),
                });
            }
            seen.clone()
        };
        timeout(ASK_TIMEOUT, looking).await.ok().flatten()
    }

    /// What who is no operator gets; none for an operator.
    fn refuse_stranger(&self, peer: Peer, headers: &HeaderMap) -> Option<Response<Body>> {
        (!self.is_operator(peer, headers)).then(|| self.refusal())
    }

    fn is_operator(&self, peer: Peer, headers: &HeaderMap) -> bool {
        let authorization = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let claim = Claim {
            peer: Some(peer),
            authorization,
        };
        // Without a token, a page of somebody else's in a browser of this machine must not read it under its own name.
        let is_own = self.admin.has_token() || is_own_host(headers, peer.local);
        self.admin.is_admin(claim) && is_own
    }

    fn refusal(&self) -> Response<Body> {
        self.metrics.refused("admin");
        let status = if self.admin.has_token() {
            StatusCode::UNAUTHORIZED
        } else {
            StatusCode::FORBIDDEN
        };
        plain(status, format!("{}\n", self.admin.refusal()))
    }

    /// Asks the actor; none if it has no time, or is gone.
    pub(super) async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> actor::Request,
    ) -> Option<T> {
        ask(&self.requests, request).await
    }
}

/// Asks the actor; none if it has no time, or is gone.
pub(super) async fn ask<T>(
    requests: &mpsc::Sender<actor::Request>,
    request: impl FnOnce(oneshot::Sender<T>) -> actor::Request,
) -> Option<T> {
    let (answer, answered) = oneshot::channel();
    let asking = async {
        requests.send(request(answer)).await.ok()?;
        answered.await.ok()
    };
    timeout(ASK_TIMEOUT, asking).await.ok().flatten()
}

impl Census {
    /// Why nobody should be sent here now; none if they may.
    pub(in crate::rendezvous) fn why_unready(&self) -> Option<String> {
        if self.suspects_network {
            return Some("no node is heard: this machine's network may be down".to_owned());
        }
        let jobs = ddp_proto::words::counted(self.recovering as u32, "job");
        (self.recovering > 0).then(|| format!("waiting for the nodes of {jobs} of an earlier daemon"))
    }
}

/// A browser on this machine was told to come here by a name of this machine, or by the address that it came to.
fn is_own_host(headers: &HeaderMap, own: IpAddr) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let Some(host) = host else { return true };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost")
        || bare
            .parse::<IpAddr>()
            .is_ok_and(|ip| ip.is_loopback() || ip == own)
}

fn busy() -> Response<Body> {
    plain(
        StatusCode::SERVICE_UNAVAILABLE,
        "the daemon did not answer in time\n",
    )
}

pub(super) fn plain(status: StatusCode, words: impl Into<Bytes>) -> Response<Body> {
    text(status, "text/plain; charset=utf-8", words)
}

/// An answer that no browser keeps or reinterprets.
pub(super) fn text(status: StatusCode, content_type: &'static str, text: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Full::new(text.into()).boxed_unsync());
    *response.status_mut() = status;
    guard(response.headers_mut(), content_type);
    response
}

pub(super) fn guard(headers: &mut HeaderMap, content_type: &'static str) {
    for (name, value) in [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

/// Where operators look, and who they are.
#[derive(Debug, Default)]
pub struct Operators {
    /// Serves liveness, readiness, metrics and the status page.
    pub http: Option<TcpListener>,
    /// Who may close and drain.
    pub admin: Admin,
    /// Who may see the page, and names of jobs in metrics.
    pub viewers: Admin,
    /// Notes carry job, generation and node apart from their words.
    pub log_fields: bool,
    /// Where metrics and generations are sent.
    #[cfg(feature = "otlp")]
    pub collector: Option<super::otlp::Collector>,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use ddp_proto::trust::token::Token;

    use super::*;

    const TOKEN: &str = "a-token-of-32-characters-or-more";

    /// What operators see of a daemon with one job, and how often it was asked.
    fn watched() -> (Http, Arc<AtomicUsize>) {
        let (requests, mut asked) = mpsc::channel(8);
        let looks = Arc::new(AtomicUsize::new(0));
        let counted = looks.clone();
        tokio::spawn(async move {
            while let Some(actor::Request::Census(_, answer)) = asked.recv().await {
                counted.fetch_add(1, Ordering::Relaxed);
                let census = Census {
                    generations: vec![("guarded".into(), 7)],
                    ..Census::default()
                };
                answer.send(census).unwrap();
            }
        });
        let http = Http {
            requests,
            metrics: Arc::new(Metrics::new()),
            admin: Admin::with_token(&Token::parse(TOKEN).unwrap()),
            viewers: page::Viewers::default(),
            seen: Mutex::default(),
        };
        (http, looks)
    }

    /// What a caller with this `authorization` gets at `/metrics`.
    async fn scrape(http: &Http, authorization: Option<String>) -> (StatusCode, String) {
        let mut request = Request::get("/metrics");
        if let Some(shown) = authorization {
            request = request.header(header::AUTHORIZATION, shown);
        }
        let (request, ()) = request.body(()).unwrap().into_parts();
        let peer = Peer {
            remote: [192, 0, 2, 1].into(),
            local: [192, 0, 2, 2].into(),
        };
        let answer = http.answer(peer, &request, &AtomicBool::new(false)).await;
        let (head, body) = answer.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        (head.status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn names_of_jobs_are_measured_for_operators_only() {
        let (http, _) = watched();
        let (status, body) = scrape(&http, None).await;
        assert_eq!(status, StatusCode::OK);
        assert!(
            body.contains("ddp_ready 1") && !body.contains("guarded"),
            "{body}"
        );
        let (status, body) = scrape(&http, Some(format!("Bearer {TOKEN}"))).await;
        assert_eq!(status, StatusCode::OK);
        assert!(
            body.contains("ddp_job_generation{job_id=\"guarded\"} 7"),
            "{body}"
        );
        let (status, body) = scrape(&http, Some("Bearer nonsense".into())).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
        assert!(!body.contains("guarded"), "{body}");
    }

    #[tokio::test]
    async fn however_many_ask_the_daemon_is_looked_at_once_in_a_while() {
        let (http, looks) = watched();
        let all = tokio::join!(http.look(), scrape(&http, None), http.look(), scrape(&http, None));
        assert!(all.0.is_some() && all.2.is_some() && all.1 == all.3);
        assert_eq!(looks.load(Ordering::Relaxed), 1);
        http.seen.lock().await.as_mut().unwrap().at -= FRESH;
        assert!(http.look().await.is_some());
        assert_eq!(looks.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn only_names_of_this_machine_are_taken_from_a_browser() {
        for (host, expected) in [
            ("localhost:9400", true),
            ("LOCALHOST", true),
            ("127.0.0.1:9400", true),
            ("127.1.2.3", true),
            ("[::1]:9400", true),
            ("rebound.example:9400", false),
            ("10.0.0.5:9400", true),
            ("10.0.0.1:9400", false),
            ("localhost.example", false),
            ("", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().unwrap());
            assert_eq!(is_own_host(&headers, [10, 0, 0, 5].into()), expected, "`{host}`");
        }
    }

    #[test]
    fn a_daemon_is_unready_while_it_recovers_or_may_be_cut_off() {
        assert_eq!(Census::default().why_unready(), None);
        let recovering = Census {
            recovering: 2,
            ..Census::default()
        };
        assert_eq!(
            recovering.why_unready().unwrap(),
            "waiting for the nodes of 2 jobs of an earlier daemon"
        );
        let cut_off = Census {
            suspects_network: true,
            ..Census::default()
        };
        assert!(cut_off.why_unready().is_some());
    }
}
