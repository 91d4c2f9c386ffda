//! Progress for Kubeflow Trainer, posted to a server that the test plays.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::harness::{Finished, Launch, TinyJob, launch, temp_dir, wait_for_step};

/// An authority of this test alone, valid until 2099.
const CA: &str = "\
-----BEGIN CERTIFICATE-----
MIIBRjCB7aADAgECAgEBMAoGCCqGSM49BAMCMBIxEDAOBgNVBAMMB3Rlc3QgQ0Ew
IBcNMDAwMTAxMDAwMDAwWhgPMjA5OTAxMDEwMDAwMDBaMBIxEDAOBgNVBAMMB3Rl
c3QgQ0EwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAQurLeI9laUFf2nMbffM/hT
3ItGGRNSJPcQJAo352gFBwyrpAtFZRGp+Luxr/u23APOdxfnduYud3GLIcSy5f+p
ozIwMDAPBgNVHRMBAf8EBTADAQH/MB0GA1UdDgQWBBRzw8MhCAvNHDcgOPYb0/tg
ukamxjAKBggqhkjOPQQDAgNIADBFAiEA4q9a0g+GU5FXofye70iJWUysr0peN9lu
jQSW6Yheh/gCIBrxOSu5Dler7nAud4qoa3/LDKfWASwtjfIjFzxQL0gp
-----END CERTIFICATE-----
";
/// Issued by it for `localhost`.
const CERTIFICATE: &str = "\
-----BEGIN CERTIFICATE-----
MIIBgDCCASagAwIBAgIBAjAKBggqhkjOPQQDAjASMRAwDgYDVQQDDAd0ZXN0IENB
MCAXDTAwMDEwMTAwMDAwMFoYDzIwOTkwMTAxMDAwMDAwWjAUMRIwEAYDVQQDDAls
b2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAARZFCSOp4JdOOQLbcQl
v30d7uCvUGUdFcskZdh9683nPNcopVJBWz+OukiiNdFj620bMKj6qpmGYnW8nSZo
o3NRo2kwZzAJBgNVHRMEAjAAMBoGA1UdEQQTMBGCCWxvY2FsaG9zdIcEfwAAATAd
BgNVHQ4EFgQU4EZALAASMlTkeILRLriCwr8Yw54wHwYDVR0jBBgwFoAUc8PDIQgL
zRw3IDj2G9P7YLpGpsYwCgYIKoZIzj0EAwIDSAAwRQIgMB7TLQiVt7g6ZRJMSlwB
cKlcIGyv2//nJyh0hCcc4j8CIQDyI0xaDY/aibYvyK0v7sdpERUPB3aRySRZ6yFD
uJ4Szw==
-----END CERTIFICATE-----
";
const KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgaoBQ4pfP0QOqhNcw
HxIJf/Q7GIFE5IjHbvMQtRSckiqhRANCAARZFCSOp4JdOOQLbcQlv30d7uCvUGUd
FcskZdh9683nPNcopVJBWz+OukiiNdFj620bMKj6qpmGYnW8nSZoo3NR
-----END PRIVATE KEY-----
";
const PATH: &str = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/gpt/status";

/// The status server, which gives each post the same answer.
struct StatusServer {
    url: String,
    posts: Receiver<(String, Value)>,
}

impl StatusServer {
    fn start(answer: &'static str) -> Self {
        let (sender, posts) = channel();
        let (ready, port) = channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime
                .expect("a runtime")
                .block_on(serve(&ready, &sender, answer));
        });
        let port: u16 = port.recv().expect("a port");
        let url = format!("https://localhost:{port}{PATH}");
        Self { url, posts }
    }

    /// The heads and bodies of all posts so far.
    fn posts(&self) -> Vec<(String, Value)> {
        self.posts.try_iter().collect()
    }
}

async fn serve(ready: &Sender<u16>, posts: &Sender<(String, Value)>, answer: &str) {
    let certificate = CertificateDer::from_pem_slice(CERTIFICATE.as_bytes()).expect("a certificate");
    let key = PrivateKeyDer::from_pem_slice(KEY.as_bytes()).expect("a key");
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("known to the provider")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .expect("key and certificate fit");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("localhost:0").await.expect("loopback");
    let port = listener.local_addr().expect("bound").port();
    ready.send(port).expect("waited for");
    loop {
        let (connection, _) = listener.accept().await.expect("a connection");
        // A client may not trust it.
        let Ok(connection) = acceptor.accept(connection).await else {
            continue;
        };
        let mut connection = BufReader::new(connection);
        let (mut head, mut length) = (String::new(), 0);
        while connection.read_line(&mut head).await.expect("a line") > 2 {
            let last = head.lines().last().unwrap_or_default();
            if let Some(bytes) = last.strip_prefix("Content-Length: ") {
                length = bytes.parse().expect("a number");
            }
        }
        let mut body = vec![0; length];
        connection.read_exact(&mut body).await.expect("the body");
        let body = serde_json::from_slice(&body).expect("JSON");
        let _ = posts.send((head, body));
        let written = connection.write_all(answer.as_bytes()).await;
        written.expect("read by the launcher");
        let _ = connection.shutdown().await;
    }
}

/// Runs a launch as in a pod of Kubeflow's.
fn run_in_a_pod(launch: Launch, server: &StatusServer, ca: &str) -> Finished {
    let secrets = temp_dir();
    in_a_pod(launch, server, ca, secrets.path()).run()
}

fn in_a_pod(launch: Launch, server: &StatusServer, ca: &str, secrets: &Path) -> Launch {
    let [token, ca_cert] = ["token", "ca.crt"].map(|name| secrets.join(name));
    std::fs::write(&token, "a.b.c\n").expect("writable");
    std::fs::write(&ca_cert, ca).expect("writable");
    launch
        .env("KUBEFLOW_TRAINER_SERVER_URL", &server.url)
        .env("KUBEFLOW_TRAINER_SERVER_TOKEN", token)
        .env("KUBEFLOW_TRAINER_SERVER_CA_CERT", ca_cert)
}

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
const FORBIDDEN: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n";

#[test]
fn a_native_job_posts_progress_and_its_end() {
    let server = StatusServer::start(OK);
    let finished = run_in_a_pod(TinyJob::new().launch().nproc(2), &server, CA);
    finished.expect_exit(0).expect_no_stderr("Kubeflow");
    let posts = server.posts();
    for (head, body) in &posts {
        assert!(head.starts_with(&format!("POST {PATH} HTTP/1.1\r\n")), "{head}");
        assert!(head.contains("\r\nAuthorization: Bearer a.b.c\r\n"), "{head}");
        let time = body["trainerStatus"]["lastUpdatedTime"].as_str().expect("a time");
        assert!(time.len() == 20 && time.ends_with('Z'), "{time}");
    }
    let status_of = |(_, body): &(String, Value)| body["trainerStatus"].clone();
    let (last, earlier) = posts.split_last().expect("posts");
    assert!(!earlier.is_empty(), "the first heartbeat is posted at once");
    for post in earlier {
        let percent = status_of(post)["progressPercentage"].as_u64();
        assert!(percent.is_none_or(|percent| percent < 100), "{post:?}");
    }
    let last = status_of(last);
    assert_eq!(last["progressPercentage"], 100);
    assert_eq!(last["estimatedRemainingSeconds"], 0);
    let metric = |name: &str| {
        let metrics = last["metrics"].as_array().expect("a list");
        let found = metrics.iter().find(|metric| metric["name"] == name);
        found.map(|metric| metric["value"].as_str().expect("a string").to_owned())
    };
    assert_eq!(metric("current_step").as_deref(), Some("40"));
    assert_eq!(metric("total_steps").as_deref(), Some("40"));
    assert!(
        metric("loss").is_some_and(|loss| loss.parse::<f64>().is_ok()),
        "{last}"
    );
}

#[test]
fn a_job_that_was_stopped_posts_no_end() {
    let (server, job, secrets) = (StatusServer::start(OK), TinyJob::new(), temp_dir());
    let launch = job.launch().set("train.steps=100000");
    let running = in_a_pod(launch, &server, CA, secrets.path()).start();
    wait_for_step(&job.out(), 3);
    running.signal(Signal::SIGTERM);
    running.finish().expect_exit(143);
    let posts = server.posts();
    assert!(!posts.is_empty());
    for (_, body) in posts {
        let percent = body["trainerStatus"]["progressPercentage"].as_u64();
        assert!(percent.is_none_or(|percent| percent < 100), "{body}");
    }
}

#[test]
fn a_server_that_takes_no_posts_costs_one_warning() {
    let other_ca = CERTIFICATE;
    for (answer, ca, why) in [
        (FORBIDDEN, CA, "its answer was `HTTP/1.1 403 Forbidden"),
        (OK, other_ca, "invalid peer certificate"),
        (OK, "", "invalid peer certificate"),
    ] {
        let server = StatusServer::start(answer);
        let finished = run_in_a_pod(TinyJob::new().launch(), &server, ca);
        finished.expect_exit(0);
        let stderr = finished.stderr();
        let is_warning = |line: &&str| line.contains("cannot report progress to Kubeflow");
        let warnings: Vec<&str> = stderr.lines().filter(is_warning).collect();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains(why), "{warnings:?}");
    }
}

#[test]
fn a_job_that_reports_no_steps_posts_nothing() {
    let server = StatusServer::start(OK);
    run_in_a_pod(launch().shell("exit 0"), &server, CA).expect_exit(0);
    assert_eq!(server.posts(), []);
}
