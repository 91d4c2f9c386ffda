//! What the handlers of HTTP requests share: who may read, and what the daemon looked like a moment ago.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::http::header::{self, HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use ddp_proto::trust::token::Token;
use hyper::body::Bytes;
use tokio::sync::{Mutex, Semaphore, mpsc, oneshot, watch};
use tokio::time::timeout;

use super::actor;
use super::metrics::{MAX_LABELLED_JOBS, Metrics};
use crate::rendezvous::event::Peer;

/// Status pages that can be open at a time.
pub(super) const MAX_PAGES: usize = 16;
/// Time for the actor.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// Answers repeat what was seen of the daemon for this long: however many ask, one look at all nodes is taken.
const FRESH: Duration = Duration::from_secs(1);
/// Before the token in `authorization`.
const SCHEME: &[u8] = b"Bearer ";

/// Shared by the handlers of all requests.
#[derive(Debug)]
pub(super) struct Http {
    requests: mpsc::Sender<actor::Request>,
    pub(super) metrics: Arc<Metrics>,
    /// Hash of the read token: comparing hashes takes the same time wherever tokens differ.
    read_token: Option<blake3::Hash>,
    /// One is held until the last byte of a page's stream is on its way.
    pub(super) page_slots: Arc<Semaphore>,
    /// True when the daemon ends.
    pub(super) closing: watch::Sender<bool>,
    /// What a job's page is called; empty: like the job.
    pub(super) title: String,
    /// Held during a look: others wait for it.
    seen: Mutex<Option<Seen>>,
}

/// What the daemon looked like.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    at: Instant,
    pub(super) why_unready: Option<String>,
    /// Without and with the names of jobs.
    pub(super) metrics: [Bytes; 2],
}

impl Http {
    pub(super) fn new(
        requests: mpsc::Sender<actor::Request>,
        metrics: Arc<Metrics>,
        read_token: Option<&Token>,
        title: String,
    ) -> Self {
        Self {
            requests,
            metrics,
            read_token: read_token.map(|token| blake3::hash(token.reveal().as_bytes())),
            page_slots: Arc::new(Semaphore::new(MAX_PAGES)),
            closing: watch::Sender::new(false),
            title,
            seen: Mutex::default(),
        }
    }

    pub(super) fn has_token(&self) -> bool {
        self.read_token.is_some()
    }

    /// The one place where this is decided.
    pub(super) fn is_reader(&self, peer: Peer, headers: &HeaderMap) -> bool {
        match self.read_token {
            Some(hash) => {
                let shown = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
                let token = shown.and_then(|shown| shown.strip_prefix(SCHEME));
                token.is_some_and(|token| blake3::hash(token) == hash)
            }
            // Another site's page, in a browser of this machine, must not read this one under that site's name.
            None => peer.is_here() && is_own_host(headers, peer.local),
        }
    }

    /// The answer to a caller that may not see the page; none for one that may.
    pub(super) fn refuse_stranger(&self, peer: Peer, headers: &HeaderMap) -> Option<Response> {
        (!self.is_reader(peer, headers)).then(|| self.refusal())
    }

    pub(super) fn refusal(&self) -> Response {
        self.metrics.refused("forbidden");
        let refused = if self.has_token() {
            let words = "the read token is missing or wrong\n  \
                         hint: send `Authorization: Bearer TOKEN`, with the token in the daemon's `--read-token-file`\n";
            (StatusCode::UNAUTHORIZED, words)
        } else {
            let words = "the status page is for the daemon's own machine only, as the daemon has no read token\n  \
                         hint: start it with `--read-token-file`\n";
            (StatusCode::FORBIDDEN, words)
        };
        refused.into_response()
    }

    /// What the daemon looks like, a little ago at most; none if it has no time.
    pub(super) async fn look(&self) -> Option<Seen> {
        let looking = async {
            let mut seen = self.seen.lock().await;
            if seen.as_ref().is_none_or(|seen| seen.at.elapsed() >= FRESH) {
                let census = self
                    .ask(|answer| actor::Request::Census(MAX_LABELLED_JOBS, answer))
                    .await?;
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

    /// Asks the actor; none if it has no time, or is gone.
    pub(super) async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> actor::Request,
    ) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        let asking = async {
            self.requests.send(request(answer)).await.ok()?;
            answered.await.ok()
        };
        timeout(ASK_TIMEOUT, asking).await.ok().flatten()
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use http_body_util::{BodyExt as _, Empty};
    use hyper::Request;
    use tonic::codegen::Service as _;

    use super::super::http::router;
    use super::*;
    use crate::rendezvous::report::Census;

    const TOKEN: &str = "a-token-of-32-characters-or-more";

    /// What readers see of a daemon with one job, and how often it was asked.
    fn watched(token: Option<&str>) -> (Http, Arc<AtomicUsize>) {
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
        let token = token.map(|token| Token::parse(token).unwrap());
        let http = Http::new(requests, Arc::new(Metrics::new()), token.as_ref(), String::new());
        (http, looks)
    }

    fn peer(remote: &str) -> Peer {
        Peer {
            remote: remote.parse().unwrap(),
            local: [10, 0, 0, 5].into(),
        }
    }

    fn headers(authorization: Option<&'static str>) -> HeaderMap {
        let shown = authorization.map(|shown| (header::AUTHORIZATION, HeaderValue::from_static(shown)));
        shown.into_iter().collect()
    }

    #[tokio::test]
    async fn however_many_ask_the_daemon_is_looked_at_once_in_a_while() {
        let (http, looks) = watched(None);
        let all = tokio::join!(http.look(), http.look(), http.look());
        assert!(all.0.is_some() && all.1.is_some() && all.2.is_some());
        assert_eq!(looks.load(Ordering::Relaxed), 1);
        http.seen.lock().await.as_mut().unwrap().at -= FRESH;
        assert!(http.look().await.is_some());
        assert_eq!(looks.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn without_a_token_only_callers_on_this_machine_may_read() {
        let (http, _) = watched(None);
        for (address, expected) in [
            ("127.0.0.1", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("10.0.0.5", true),
            ("10.0.0.1", false),
        ] {
            let is_reader = http.is_reader(peer(address), &headers(Some("Bearer x")));
            assert_eq!(is_reader, expected, "{address}");
        }
    }

    #[tokio::test]
    async fn with_a_token_only_callers_that_show_it_may_read() {
        let (http, _) = watched(Some("0123456789abcdef0123456789abcdef"));
        for (shown, expected) in [
            (Some("Bearer 0123456789abcdef0123456789abcdef"), true),
            (Some("Bearer 0123456789abcdef0123456789abcdeF"), false),
            (Some("Bearer 0123456789abcdef0123456789abcdef "), false),
            (Some("bearer 0123456789abcdef0123456789abcdef"), false),
            (Some("0123456789abcdef0123456789abcdef"), false),
            (Some("Bearer "), false),
            (None, false),
        ] {
            let is_reader = http.is_reader(peer("127.0.0.1"), &headers(shown));
            assert_eq!(is_reader, expected, "{shown:?}");
        }
        assert!(!format!("{http:?}").contains("0123456789abcdef0123456789abcdef"));
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

    /// What a caller with this `authorization` gets at `/metrics`.
    async fn scrape(router: &Router, authorization: Option<&'static str>) -> (StatusCode, String) {
        let mut request = Request::get("/metrics").body(Empty::<Bytes>::new()).unwrap();
        *request.headers_mut() = headers(authorization);
        request.extensions_mut().insert(peer("192.0.2.1"));
        let (head, body) = router.clone().call(request).await.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        (head.status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn names_of_jobs_need_the_read_token() {
        let router = router(watched(Some(TOKEN)).0);
        let (status, body) = scrape(&router, None).await;
        assert_eq!(status, StatusCode::OK);
        assert!(
            body.contains("ddp_ready 1") && !body.contains("guarded"),
            "{body}"
        );
        let (status, body) = scrape(&router, Some("Bearer a-token-of-32-characters-or-more")).await;
        assert_eq!(status, StatusCode::OK);
        assert!(
            body.contains("ddp_job_generation{job_id=\"guarded\"} 7"),
            "{body}"
        );
        let (status, body) = scrape(&router, Some("Bearer nonsense")).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
        assert!(!body.contains("guarded"), "{body}");
    }
}
