//! `TORCHELASTIC_HEALTH_CHECK_PORT`: answers a cluster's probe for as long as the launcher's event loop runs.
//!
//! PyTorch's own torchrun reads the variable, and leaves the answer to builds that replace its server.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::cli::answer::print_own;
use crate::rendezvous;

const PORT_VARIABLE: &str = "TORCHELASTIC_HEALTH_CHECK_PORT";
/// Probes that are answered at the same time. More of them wait to be accepted.
const MAX_PROBES: usize = 16;
/// Longest time for one probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
const ANSWER: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n";

/// Listens at the port, if the variable names one. A launcher that cannot listen says so and continues.
pub(super) fn answer_probes(get_env: impl Fn(&str) -> Option<String>) {
    let Some(value) = get_env(PORT_VARIABLE).filter(|value| !value.is_empty()) else {
        return;
    };
    let listener = value
        .parse()
        .map_err(|_| "expected a port".to_owned())
        .and_then(|port| {
            let everywhere = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
            rendezvous::listen(&everywhere.map(|ip| SocketAddr::new(ip, port)))
                .map_err(|error| error.to_string())
        });
    match listener {
        Ok(listener) => drop(tokio::spawn(accept(listener))),
        Err(why) => print_own(&format!("no health check at `{PORT_VARIABLE}={value}`: {why}")),
    }
}

async fn accept(listener: TcpListener) {
    let places = Arc::new(Semaphore::new(MAX_PROBES));
    // The semaphore is never closed.
    while let Ok(place) = places.clone().acquire_owned().await {
        match listener.accept().await {
            Ok((probe, _)) => drop(tokio::spawn(async move {
                // A probe that does not end in time is closed.
                let _ = tokio::time::timeout(PROBE_TIMEOUT, answer(probe)).await;
                drop(place);
            })),
            // No file is left: the next probe may find one.
            Err(_) => tokio::time::sleep(PROBE_TIMEOUT).await,
        }
    }
}

/// Reads first: closing with unread bytes would discard the answer.
async fn answer(mut probe: TcpStream) -> std::io::Result<()> {
    let _request = probe.read(&mut [0; 4096]).await?;
    probe.write_all(ANSWER).await?;
    probe.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_probe_is_answered_beside_connections_that_say_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        tokio::spawn(accept(listener));
        let _silent = TcpStream::connect(address).await.expect("accepted");
        let mut probe = TcpStream::connect(address).await.expect("accepted");
        probe.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("sent");
        let mut text = String::new();
        probe.read_to_string(&mut text).await.expect("answered");
        assert!(
            text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("ok\n"),
            "{text}"
        );
    }
}
