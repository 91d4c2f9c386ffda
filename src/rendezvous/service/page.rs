//! The status page: one file, and a stream of snapshots for it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, RawQuery, State};
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_SECURITY_POLICY, HeaderValue};
use axum::response::sse::{Event, Sse};
use axum::response::{Html, IntoResponse, Response};
use ddp_proto::rendezvous::{JobsReply, StatusReply};
use hyper::StatusCode;
use percent_encoding::percent_decode_str;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use super::actor::Request;
use super::http_state::{Http, MAX_PAGES};
use crate::rendezvous::event::Peer;
use crate::rendezvous::report;

/// Where the page gets its snapshots.
pub(super) const STREAM_PATH: &str = "/events";
/// A page gets a snapshot so often.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(1);
/// A page that does not read its snapshots for so long is given up.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// A page connects again after this.
pub(super) const LONGEST_STREAM: Duration = Duration::from_hours(1);
/// What a snapshot holds at most.
const BOUNDS: report::Bounds = report::Bounds {
    jobs: 200,
    nodes: 128,
    ranks: 1024,
};
/// Longest name of a job in a query.
const MAX_JOB_BYTES: usize = 512;

/// The page. Its script and its style are the only ones that a browser takes.
const PAGE: &str = include_str!("page.html");
/// Stands in the page where an answer has random characters of its own.
const NONCE: &str = "{{nonce}}";
/// Stands in the page where an answer says whether it asks for a token.
const WITH_TOKEN: &str = "{{token}}";

/// The page. Where there is a read token, the page has no secret, and asks for the token itself.
pub(super) async fn page(
    State(http): State<Arc<Http>>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
) -> Response {
    if http.has_token() {
        return html(true);
    }
    http.refuse_stranger(peer, &headers)
        .unwrap_or_else(|| html(false))
}

fn html(with_token: bool) -> Response {
    let nonce = format!("{:032x}", rand::random::<u128>());
    let html = PAGE
        .replace(NONCE, &nonce)
        .replace(WITH_TOKEN, if with_token { "yes" } else { "no" });
    let mut response = Html(html).into_response();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        response.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
    }
    response
}

/// Snapshots of all jobs, and of the one that the query names.
pub(super) async fn events(
    State(http): State<Arc<Http>>,
    Extension(peer): Extension<Peer>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    if let Some(refusal) = http.refuse_stranger(peer, &headers) {
        return refusal;
    }
    let job = query.as_deref().and_then(job_of);
    let Ok(slot) = http.page_slots.clone().try_acquire_owned() else {
        let full = format!("{MAX_PAGES} status pages are open already, the maximum\n");
        return (StatusCode::SERVICE_UNAVAILABLE, full).into_response();
    };
    let (snapshots, receiver) = mpsc::channel(1);
    tokio::spawn(send(http, job, snapshots));
    let snapshots = ReceiverStream::new(receiver).map(move |snapshot| {
        let _ = &slot;
        snapshot
    });
    Sse::new(snapshots).into_response()
}

/// Sends snapshots until the page is gone, and the last one when the daemon ends.
async fn send(http: Arc<Http>, job: Option<String>, snapshots: mpsc::Sender<Result<Event, Infallible>>) {
    let until = Instant::now() + LONGEST_STREAM;
    let mut ticks = interval(SNAPSHOT_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut closing = http.closing.subscribe();
    let mut is_last = false;
    while !is_last && Instant::now() < until {
        // Cancel safe: a tick that is lost would come after the last snapshot.
        tokio::select! {
            _ = ticks.tick() => {}
            _ = closing.wait_for(|closing| *closing) => is_last = true,
        }
        let Some(jobs) = http.ask(Request::Jobs).await else {
            return;
        };
        let status = match chosen(job.as_deref(), &jobs) {
            Some(job) => status(&http, &job).await.map(|status| (job, status)),
            None => None,
        };
        let event = snapshot(&http.title, &jobs, status.as_ref());
        let sent = timeout(SEND_TIMEOUT, snapshots.send(Ok(event))).await;
        if !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
}

/// All that the daemon knows of the job, if there is one of this name.
async fn status(http: &Http, job: &str) -> Option<StatusReply> {
    http.ask(|answer| Request::Status(job.to_owned(), answer))
        .await
        .flatten()
}

/// The job that is shown: the one that was asked for, else the only one.
fn chosen(asked: Option<&str>, jobs: &JobsReply) -> Option<String> {
    match (asked, jobs.jobs.as_slice()) {
        (Some(job), _) => Some(job.to_owned()),
        (None, [only]) => Some(only.job_id.clone()),
        (None, _) => None,
    }
}

fn snapshot(title: &str, jobs: &JobsReply, status: Option<&(String, StatusReply)>) -> Event {
    let mut value = report::jobs(jobs, BOUNDS);
    value["title"] = title.into();
    value["job"] = status.map_or(serde_json::Value::Null, |(job, status)| {
        report::job(job, status, BOUNDS)
    });
    Event::default().data(value.to_string())
}

/// `job=NAME` of a query.
fn job_of(query: &str) -> Option<String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let (_, name) = pairs.into_iter().find(|(key, _)| *key == "job")?;
    let name = percent_decode_str(name).decode_utf8().ok()?;
    (!name.is_empty() && name.len() <= MAX_JOB_BYTES).then(|| name.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_jobs_are_read_from_urls() {
        assert_eq!(job_of("job=a%20b%C3%BC&x=1").as_deref(), Some("a bü"));
        assert_eq!(job_of("x=1&job=nightly").as_deref(), Some("nightly"));
        for bad in ["", "job=", "job", "job=%ff", "jobs=a"] {
            assert_eq!(job_of(bad), None, "`{bad}`");
        }
        assert_eq!(job_of(&format!("job={}", "x".repeat(600))), None);
    }

    #[test]
    fn every_answer_has_a_nonce_of_its_own_and_no_other_script_runs() {
        let policy = |response: &Response| {
            let policy = &response.headers()[CONTENT_SECURITY_POLICY];
            policy.to_str().unwrap().to_owned()
        };
        let (first, second) = (html(true), html(true));
        assert!(policy(&first).starts_with("default-src 'none'; script-src 'nonce-"));
        assert_ne!(policy(&first), policy(&second));
        for forbidden in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "http://",
            "https://",
        ] {
            let allowed = PAGE.replace("http://www.w3.org/2000/svg", "");
            assert!(!allowed.contains(forbidden), "the page has `{forbidden}`");
        }
    }
}
