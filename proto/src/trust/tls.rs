//! Mutual TLS between agents and their daemon, by keys that follow from the token of both. Each side trusts only a peer
//! that has the token.

use std::io;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, ServerConfig};

use super::raw_key;
use crate::trust::token::Token;

/// The server name in a handshake with a daemon that has a token. It is never looked up.
pub const SERVER_NAME: &str = "rendezvous.ddp-run.internal";

/// What is spoken inside.
const ALPN: &[u8] = b"h2";

/// TLS could not be set up.
#[derive(Debug, thiserror::Error)]
#[error("cannot set up TLS: {0}")]
pub struct TlsError(#[from] rustls::Error);

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The side of an agent.
pub fn client_of_token(token: &Token) -> Result<ClientConfig, TlsError> {
    let mut config = raw_key::client(token, provider())?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// The side of a daemon.
pub fn server_of_token(token: &Token) -> Result<ServerConfig, TlsError> {
    let mut config = raw_key::server(token, provider())?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    // Connections are few and long: nothing is resumed, and so nothing of an earlier one can be sent again.
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Explains a failed handshake, for people on the side of the caller.
pub(crate) fn words_of(error: &io::Error) -> HandshakeFailure {
    let inner = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let (hint, cause) = match inner {
        Some(rustls::Error::InvalidCertificate(_)) => (
            Some(SAME_TOKEN),
            "it does not have the key of this token: it has a different token, or is no rendezvous"
                .to_owned(),
        ),
        Some(rustls::Error::PeerIncompatible(_)) => (
            Some(SAME_TOKEN),
            "it proves itself by a certificate, not by a token: it is no rendezvous".to_owned(),
        ),
        Some(rustls::Error::InvalidMessage(_)) => {
            (None, format!("the server there speaks no TLS{WITHOUT_TLS}"))
        }
        Some(rustls::Error::AlertReceived(alert)) => (
            None,
            format!("the server there refused the TLS connection: {alert:?}"),
        ),
        _ if HUNG_UP.contains(&error.kind()) => (
            None,
            format!("the server there closed the connection in the TLS handshake{WITHOUT_TLS}"),
        ),
        _ => (None, format!("the TLS handshake failed: {error}")),
    };
    HandshakeFailure { hint, cause }
}

/// Why a server may not want TLS.
const WITHOUT_TLS: &str = " (a rendezvous with `--insecure`, or a different program)";
/// How a server ends a connection that it does not understand. Bytes that it has not read make it a reset.
const HUNG_UP: [io::ErrorKind; 3] = [
    io::ErrorKind::UnexpectedEof,
    io::ErrorKind::ConnectionReset,
    io::ErrorKind::BrokenPipe,
];
/// What to do where the daemon has another token, or the server is no daemon.
const SAME_TOKEN: &str = "give all nodes of the job the same token: copy `~/.config/ddp-run/token` of the node that hosts the rendezvous, or set DDP_TOKEN_FILE or DDP_TOKEN, or check the host and port of the endpoint";
/// A TLS connection that did not come about.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{cause}")]
pub(crate) struct HandshakeFailure {
    /// What to do where the server has shown that this side cannot trust it: trying again does not help.
    pub(crate) hint: Option<&'static str>,
    pub(crate) cause: String,
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::ServerName;
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;

    async fn meet(client: ClientConfig, server: ServerConfig) -> (io::Result<()>, io::Result<()>) {
        let (near, far) = tokio::io::duplex(64 << 10);
        let name = ServerName::try_from(SERVER_NAME).unwrap();
        let connecting = TlsConnector::from(Arc::new(client)).connect(name, near);
        let accepting = TlsAcceptor::from(Arc::new(server)).accept(far);
        let (near, far) = tokio::join!(connecting, accepting);
        (near.map(drop), far.map(drop))
    }

    #[tokio::test]
    async fn only_a_peer_with_the_token_is_let_in() {
        let (own, other) = (Token::random(), Token::random());
        let server = || server_of_token(&own).unwrap();
        let (near, far) = meet(client_of_token(&own).unwrap(), server()).await;
        near.unwrap();
        far.unwrap();
        let (near, far) = meet(client_of_token(&other).unwrap(), server()).await;
        let failure = words_of(&near.unwrap_err());
        let words = failure.to_string();
        assert!(
            words.ends_with("it has a different token, or is no rendezvous"),
            "{words}"
        );
        let hint = failure.hint.unwrap_or_default();
        assert!(
            hint.starts_with("give all nodes of the job the same token"),
            "{hint}"
        );
        assert!(
            hint.ends_with(", or check the host and port of the endpoint"),
            "{hint}"
        );
        far.unwrap_err();
        // Without any key.
        let roots = rustls::RootCertStore::empty();
        let mut strange = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        strange.alpn_protocols = vec![ALPN.to_vec()];
        let (near, far) = meet(strange, server()).await;
        near.unwrap_err();
        far.unwrap_err();
    }
}
