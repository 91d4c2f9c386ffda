//! HTTP for people and their tools: liveness, readiness, metrics, and the status page.
//!
//! Anyone who reaches the port can open connections, so everything has a bound: connections in all and of one address,
//! the time to the end of the header, its size, the time of an answer. A connection carries one request.
//!
//! The page and the names of jobs in metrics need the read token, or, where the daemon has none, a connection from its
//! own machine. The daemon's own token is never taken here: HTTP would show it to the network.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{Extension, State};
use axum::http::header::{self, HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::codegen::Service as _;

use super::connection::{next_connection, peer_of};
use super::connection_limits::{ConnectionLimits, Slot};
use super::http_state::Http;
use super::page;
use crate::rendezvous::event::Peer;

/// Time from a connection to the end of its request's header.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of a header, and its fields.
const MAX_HEADER_BYTES: usize = 16 << 10;
const MAX_HEADER_FIELDS: usize = 64;
/// Time for a request and its answer, unless the answer is a stream.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// Serves for ever.
pub(super) async fn serve(listener: TcpListener, http: Http, limits: Arc<ConnectionLimits>) {
    let (metrics, router) = (Arc::clone(&http.metrics), router(http));
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = next_connection(|| listener.accept()).await;
        while connections.try_join_next().is_some() {}
        let Ok(peer) = peer_of(&stream) else { continue };
        let Ok(slot) = limits.enter(peer.remote) else {
            metrics.refused("http");
            continue;
        };
        slot.has_place().await;
        let (slot, metrics) = (Arc::new(slot), Arc::clone(&metrics));
        let serving = serve_request(stream, peer, Arc::clone(&slot), router.clone());
        connections.spawn(async move {
            // Cancel safe: either ends the connection.
            tokio::select! {
                () = serving => {}
                _ = slot.displaced() => metrics.refused("http"),
            }
        });
    }
}

async fn serve_request(stream: TcpStream, peer: Peer, slot: Arc<Slot>, router: Router) {
    let is_stream = Arc::new(AtomicBool::new(false));
    let begins_stream = Arc::clone(&is_stream);
    let service = service_fn(move |mut request: Request<Incoming>| {
        slot.keep();
        let (mut router, begins_stream) = (router.clone(), Arc::clone(&begins_stream));
        request.extensions_mut().insert(peer);
        async move {
            let asks_for_stream = request.uri().path() == page::STREAM_PATH;
            let mut response = router.call(request).await?;
            begins_stream.store(
                asks_for_stream && response.status() == StatusCode::OK,
                Ordering::Relaxed,
            );
            // No browser keeps or reinterprets an answer.
            for (name, value) in [
                (header::CACHE_CONTROL, "no-store"),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
                (header::REFERRER_POLICY, "no-referrer"),
            ] {
                response
                    .headers_mut()
                    .insert(name, HeaderValue::from_static(value));
            }
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
}

pub(super) fn router(http: Http) -> Router {
    Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/", get(page::page))
        .route(page::STREAM_PATH, get(page::events))
        .fallback(async || {
            let words = "not found: /livez, /readyz, /metrics, /events and / are here\n";
            (StatusCode::NOT_FOUND, words)
        })
        .with_state(Arc::new(http))
}

async fn readyz(State(http): State<Arc<Http>>) -> Response {
    match http.look().await.map(|seen| seen.why_unready) {
        Some(None) => "ok\n".into_response(),
        Some(Some(why)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
        None => busy(),
    }
}

/// Without the names of jobs for a caller that shows no token. A wrong token is refused: the names would be missed.
async fn metrics(
    State(http): State<Arc<Http>>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
) -> Response {
    let is_reader = http.is_reader(peer, &headers);
    if !is_reader && http.has_token() && headers.contains_key(header::AUTHORIZATION) {
        return http.refusal();
    }
    let Some(seen) = http.look().await else {
        return busy();
    };
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let [without_names, with_names] = seen.metrics;
    let text = if is_reader { with_names } else { without_names };
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

fn busy() -> Response {
    let words = "the daemon did not answer in time\n";
    (StatusCode::SERVICE_UNAVAILABLE, words).into_response()
}
