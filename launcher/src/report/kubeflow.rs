//! The job's progress in the status of its `TrainJob` of Kubeflow Trainer v2 (proposal KEP-2779), where `kubectl` shows it.
//!
//! The controller names a server for it in the environment of every pod. Of all launchers, the one with rank 0 posts what
//! heartbeats of that rank say. Training never waits for the server, and posts that fail cost one warning.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use ddp_proto::control::Progress;
use ddp_proto::look_up::look_up;
use ddp_proto::utc;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::output::console::Console;
use crate::threads::BlockingThread;

/// Shortest time between posts, but for the last one, as Kubeflow's own clients keep it. Also the time-out of a post.
const INTERVAL: Duration = Duration::from_secs(5);
/// What is read of an answer.
const ANSWER_BYTES: u64 = 400;
/// Kubeflow takes 64 characters for a value.
const LARGEST_LOSS: f64 = 1e12;

/// Reports the progress of this launcher's job.
pub(crate) struct Kubeflow {
    server: Arc<StatusServer>,
    /// By the last heartbeat.
    step: Option<u64>,
    /// The last ones; not every heartbeat has them.
    loss: Option<f64>,
    progress: Option<Progress>,
    last_post: Option<(Instant, JoinHandle<()>)>,
}

/// Where to post.
struct StatusServer {
    url: String,
    /// Paths. Both files are replaced from time to time.
    token: String,
    ca_cert: String,
    files: BlockingThread,
    console: Console,
    has_warned: AtomicBool,
}

impl Kubeflow {
    /// None outside of Kubeflow.
    pub(crate) fn of_environment(console: &Console, files: &BlockingThread) -> Option<Self> {
        let get = |name: &str| std::env::var(format!("KUBEFLOW_TRAINER_SERVER_{name}")).unwrap_or_default();
        let server = StatusServer {
            url: get("URL"),
            token: get("TOKEN"),
            ca_cert: get("CA_CERT"),
            files: files.clone(),
            console: console.clone(),
            has_warned: AtomicBool::new(false),
        };
        (!server.url.is_empty()).then(|| Self {
            server: Arc::new(server),
            step: None,
            loss: None,
            progress: None,
            last_post: None,
        })
    }

    /// Notes a heartbeat of rank 0. Posts it if the last post is over and at least [`INTERVAL`] old.
    pub(crate) fn note(&mut self, step: u64, loss: Option<f64>, progress: Option<&Progress>) {
        self.step = Some(step);
        self.progress = progress.cloned().or(self.progress.take());
        self.loss = loss.or(progress.map(|progress| progress.loss)).or(self.loss);
        let last = self.last_post.as_ref();
        if last.is_none_or(|(at, post)| at.elapsed() >= INTERVAL && post.is_finished()) {
            self.last_post = self.post(false);
        }
    }

    /// Posts that the job has succeeded, if it has reported steps.
    pub(crate) async fn finish(&mut self) {
        // Each has a time-out. An earlier post must not replace the last one.
        if let Some((_, earlier)) = self.last_post.take() {
            let _ = earlier.await;
        }
        if let Some((_, last)) = self.post(true) {
            let _ = last.await;
        }
    }

    fn post(&self, is_done: bool) -> Option<(Instant, JoinHandle<()>)> {
        let mut status = status_of(self.step?, self.loss, self.progress.as_ref());
        if is_done {
            status["progressPercentage"] = json!(100);
            status["estimatedRemainingSeconds"] = json!(0);
        }
        status["lastUpdatedTime"] = json!(utc::rfc_3339(utc::seconds_of(SystemTime::now())));
        let body = json!({ "trainerStatus": status }).to_string();
        let server = self.server.clone();
        let post = tokio::spawn(async move { server.report(&body).await });
        Some((Instant::now(), post))
    }
}

/// The numbers under Kubeflow's names. Only success is 100 %.
fn status_of(step: u64, loss: Option<f64>, progress: Option<&Progress>) -> Value {
    let mut metrics = vec![("current_step", step.to_string())];
    metrics.extend(progress.map(|progress| ("total_steps", progress.steps.to_string())));
    // Also false for NaN.
    let loss = loss.filter(|loss| loss.abs() < LARGEST_LOSS);
    metrics.extend(loss.map(|loss| ("loss", format!("{loss:.6}"))));
    let metrics = metrics
        .iter()
        .map(|(name, value)| json!({ "name": name, "value": value }));
    let mut status = json!({ "metrics": metrics.collect::<Value>() });
    if let Some(progress) = progress {
        let percentage = step.saturating_mul(100) / progress.steps.max(1);
        status["progressPercentage"] = json!(percentage.min(99));
        if progress.seconds_left.is_finite() {
            // The cast saturates; Kubeflow takes no negative number.
            status["estimatedRemainingSeconds"] = json!(progress.seconds_left.max(0.0) as i32);
        }
    }
    status
}

impl StatusServer {
    /// Posts a status. Warns of the first failure.
    async fn report(&self, body: &str) {
        let posted = timeout(INTERVAL, self.post(body)).await;
        if let Err(why) = posted.unwrap_or_else(|_| Err("no answer in 5 s".into()))
            && !self.has_warned.swap(true, Ordering::Relaxed)
        {
            self.console.say(&format!(
                "cannot report progress to Kubeflow at `{}`: {why}; the job continues\n  \
                 hint: check `KUBEFLOW_TRAINER_SERVER_URL`, `_TOKEN` and `_CA_CERT`, or unset the first",
                self.url
            ));
        }
    }

    async fn post(&self, body: &str) -> Result<(), Box<dyn Error + Send + Sync>> {
        let rest = self.url.strip_prefix("https://").ok_or("expected `https://`")?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (host, port) = authority.rsplit_once(':').unwrap_or((authority, "443"));
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())?;
        let paths = [self.token.clone(), self.ca_cert.clone()];
        let read =
            |path: String| std::fs::read_to_string(&path).map_err(|error| format!("`{path}`: {error}"));
        let files = self.files.give(move || paths.map(read)).await;
        let [token, ca_cert] = files.ok_or("the thread for files has ended")?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(ca_cert?.as_bytes()) {
            roots.add(certificate?)?;
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let addresses = look_up(host, port.parse()?).await?;
        let connection = TcpStream::connect(&*addresses).await?;
        let mut connection = TlsConnector::from(Arc::new(config))
            .connect(name, connection)
            .await?;
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {authority}\r\nAuthorization: Bearer {}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            token?.trim(),
            body.len()
        );
        connection.write_all(request.as_bytes()).await?;
        connection.flush().await?;
        let mut answer = Vec::new();
        // A server may close the connection without an alert.
        let _ = connection.take(ANSWER_BYTES).read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer);
        match answer.lines().next().unwrap_or_default() {
            status if status.starts_with("HTTP/1.1 2") => Ok(()),
            status => Err(format!("its answer was `{status}`").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_that_kubeflow_takes_are_posted() {
        let progress = |seconds_left| Progress {
            steps: 200,
            loss: f64::NAN,
            tokens_per_s: 1e3,
            seconds_left,
            val_loss: None,
            val_step: None,
            lr: None,
            model_flops_per_s: None,
            mfu: None,
        };
        let names = |status: &Value| {
            let metrics = status["metrics"].as_array().into_iter().flatten();
            metrics
                .map(|metric| format!("{}={}", metric["name"], metric["value"]).replace('"', ""))
                .collect::<Vec<_>>()
        };
        let running = status_of(150, Some(f64::NAN), Some(&progress(59.9)));
        assert_eq!(running["progressPercentage"], 75);
        assert_eq!(running["estimatedRemainingSeconds"], 59);
        assert_eq!(names(&running), ["current_step=150", "total_steps=200"]);
        let saving = status_of(200, Some(2.5), Some(&progress(f64::INFINITY)));
        assert_eq!(saving["progressPercentage"], 99, "the job may still fail");
        assert_eq!(saving["estimatedRemainingSeconds"], Value::Null);
        let of_a_script = status_of(7, Some(2.5), None);
        assert_eq!(of_a_script["progressPercentage"], Value::Null);
        assert_eq!(names(&of_a_script), ["current_step=7", "loss=2.500000"]);
    }
}
