//! Mutual TLS between agents and their daemon: by keys that follow from the token of both, or by an operator's
//! files. Who has the token is trusted, and nobody else.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{AlertDescription, ClientConfig, PeerIncompatible, RootCertStore, ServerConfig};

use super::raw_key;
use crate::trust::token::Token;

/// The server name in a handshake with a daemon that has a token. It is never looked up.
pub const SERVER_NAME: &str = "rendezvous.ddp-run.internal";

/// What is spoken inside.
const ALPN: &[u8] = b"h2";

/// Files of an operator, in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The own certificate, with those between it and the authority.
    pub cert: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
    /// The authority that the other side's certificate is to come from.
    pub ca: Option<PathBuf>,
}

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be used.
    #[error("cannot use `{}`: {cause}\n  hint: a PEM file with {holds} is expected", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What it should have.
        holds: &'static str,
        /// Why.
        cause: String,
    },
    /// One of two files that belong together is missing.
    #[error("a certificate (`--tls-cert`) needs its key (`--tls-key`), and the other way round")]
    Half,
    /// The parts do not fit together.
    #[error("cannot set up TLS: {0}")]
    Unfit(String),
}

type OwnCert = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn unfit(error: impl std::fmt::Display) -> TlsError {
    TlsError::Unfit(error.to_string())
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The side of an agent that has the token.
pub fn client_of_token(token: &Token) -> Result<ClientConfig, TlsError> {
    raw_key::client(token, provider()).map(for_agents).map_err(unfit)
}

/// The side of a daemon that has the token: callers must have it too.
pub fn server_of_token(token: &Token) -> Result<ServerConfig, TlsError> {
    raw_key::server(token, provider()).map(for_daemons).map_err(unfit)
}

/// The side of an agent whose daemon has an operator's certificate.
pub fn client_of_files(files: &TlsFiles) -> Result<ClientConfig, TlsError> {
    let ca = files
        .ca
        .as_deref()
        .ok_or_else(|| unfit("no authority (`DDP_TLS_CA`) is given"))?;
    client(read_roots(ca)?, own_of(files)?)
}

/// The side of a daemon with an operator's certificate. With an authority, callers need a certificate from it.
pub fn server_of_files(files: &TlsFiles) -> Result<ServerConfig, TlsError> {
    let own = own_of(files)?.ok_or(TlsError::Half)?;
    server(files.ca.as_deref().map(read_roots).transpose()?, own)
}

fn client(roots: RootCertStore, own: Option<OwnCert>) -> Result<ClientConfig, TlsError> {
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(unfit)?
        .with_root_certificates(roots);
    let config = match own {
        Some((certs, key)) => config.with_client_auth_cert(certs, key).map_err(unfit)?,
        None => config.with_no_client_auth(),
    };
    Ok(for_agents(config))
}

fn server(callers: Option<RootCertStore>, (certs, key): OwnCert) -> Result<ServerConfig, TlsError> {
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(unfit)?;
    let config = match callers {
        Some(roots) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
            config.with_client_cert_verifier(verifier.build().map_err(unfit)?)
        }
        None => config.with_no_client_auth(),
    };
    let config = config.with_single_cert(certs, key).map_err(unfit)?;
    Ok(for_daemons(config))
}

fn for_agents(mut config: ClientConfig) -> ClientConfig {
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config
}

fn for_daemons(mut config: ServerConfig) -> ServerConfig {
    config.alpn_protocols = vec![ALPN.to_vec()];
    // Connections are few and long: nothing is resumed, and so nothing of an earlier one can be sent again.
    config.send_tls13_tickets = 0;
    config
}

fn own_of(files: &TlsFiles) -> Result<Option<OwnCert>, TlsError> {
    let (cert, key) = match (&files.cert, &files.key) {
        (Some(cert), Some(key)) => (cert, key),
        (None, None) => return Ok(None),
        _ => return Err(TlsError::Half),
    };
    let parsed = PrivateKeyDer::from_pem_file(key).map_err(|error| unusable(key, "a private key", &error))?;
    Ok(Some((read_certs(cert)?, parsed)))
}

fn read_certs(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |error| unusable(path, "certificates", &error);
    let certs: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(failed)?;
    if certs.is_empty() {
        return Err(unusable(path, "certificates", &"it has none"));
    }
    Ok(certs)
}

fn read_roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for cert in read_certs(path)? {
        roots
            .add(cert)
            .map_err(|error| unusable(path, "certificates", &error))?;
    }
    Ok(roots)
}

fn unusable(path: &Path, holds: &'static str, cause: &impl ToString) -> TlsError {
    let (path, cause) = (path.to_owned(), cause.to_string());
    TlsError::File { path, holds, cause }
}

/// What a failed handshake means, for people on the side of the caller.
pub(crate) fn words_of(error: &io::Error, by_token: bool) -> HandshakeFailure {
    let inner = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let other_kind = if by_token { HAS_CERTIFICATE } else { HAS_TOKEN };
    let (hint, is_final, cause) = match inner {
        Some(rustls::Error::InvalidCertificate(_)) if by_token => {
            let cause =
                "it does not have the key of this token: it has a different token, or is no rendezvous";
            (Some(SAME_TOKEN), true, cause.to_owned())
        }
        Some(rustls::Error::InvalidCertificate(why)) => {
            let cause = format!("the daemon's certificate is not accepted: {why:?}");
            (Some(RIGHT_AUTHORITY), true, cause)
        }
        Some(rustls::Error::PeerIncompatible(PeerIncompatible::IncorrectCertificateTypeExtension)) => {
            (Some(other_kind.0), true, other_kind.1.to_owned())
        }
        // A proxy says so too while the server behind it is away.
        Some(rustls::Error::AlertReceived(AlertDescription::HandshakeFailure)) => {
            (Some(other_kind.0), false, other_kind.1.to_owned())
        }
        Some(rustls::Error::InvalidMessage(_)) => {
            let cause = format!("the server there speaks no TLS{WITHOUT_TLS}");
            (None, false, cause)
        }
        Some(rustls::Error::AlertReceived(alert)) => {
            let cause = format!("the server there refused the TLS connection: {alert:?}");
            (None, false, cause)
        }
        _ if HUNG_UP.contains(&error.kind()) => {
            let cause = format!("the server there closed the connection in the TLS handshake{WITHOUT_TLS}");
            (None, false, cause)
        }
        _ => (None, false, format!("the TLS handshake failed: {error}")),
    };
    HandshakeFailure {
        hint,
        is_final,
        cause,
    }
}

/// An error of an established connection. With TLS 1.3 a client learns only then that its certificate is not accepted.
pub(crate) fn plainly(error: io::Error) -> io::Error {
    use AlertDescription as Alert;
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(rustls::Error::AlertReceived(
            alert @ (Alert::CertificateRequired
            | Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateExpired
            | Alert::CertificateRevoked
            | Alert::CertificateUnknown
            | Alert::DecryptError
            | Alert::AccessDenied),
        )) => io::Error::other(format!("{NOT_LET_IN} ({alert:?})")),
        _ => error,
    }
}

/// What the error of a client begins with whose certificate a daemon does not accept.
pub(crate) const NOT_LET_IN: &str = "it lets in only nodes with a certificate of its authority";

/// Why a server may not want TLS.
const WITHOUT_TLS: &str = " (a rendezvous with `--insecure`, or a different program)";
/// How a server ends a connection that it does not understand. Bytes that it has not read make it a reset.
const HUNG_UP: [io::ErrorKind; 3] = [
    io::ErrorKind::UnexpectedEof,
    io::ErrorKind::ConnectionReset,
    io::ErrorKind::BrokenPipe,
];
/// What to do where the daemon has another token, or the server is none.
const SAME_TOKEN: &str = "give all nodes of the job the same token: copy `~/.config/ddp-run/token` of the node that hosts the rendezvous, or set DDP_TOKEN_FILE or DDP_TOKEN, or check the host and port of the endpoint";
/// What to do where the daemon has a certificate and this side a token, and what that is called.
const HAS_CERTIFICATE: (&str, &str) = (
    "set DDP_TLS_CA to the authority of the rendezvous's certificate, or check the host and port of the endpoint",
    "it proves itself by a certificate, not by a token: it is a rendezvous for several users, one of an earlier version, or a different server",
);
/// The other way round.
const HAS_TOKEN: (&str, &str) = (
    "unset DDP_TLS_CA where the rendezvous has a token, or check the host and port of the endpoint",
    "it does not prove itself by a certificate: it is a rendezvous with a token, or a different server",
);
/// What to do where its certificate is another authority's, or for another name.
const RIGHT_AUTHORITY: &str = "check that DDP_TLS_CA is the authority of the rendezvous's certificate, that the certificate names the host of the endpoint, and that it is valid today";

/// A TLS connection that did not come about.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{cause}")]
pub(crate) struct HandshakeFailure {
    /// What to do.
    pub(crate) hint: Option<&'static str>,
    /// The server has shown that this side cannot trust it: trying again does not help.
    pub(crate) is_final: bool,
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
    async fn who_has_the_token_is_let_in_and_nobody_else() {
        let (own, other) = (Token::random(), Token::random());
        let server = || server_of_token(&own).unwrap();
        let (near, far) = meet(client_of_token(&own).unwrap(), server()).await;
        near.unwrap();
        far.unwrap();
        let (near, far) = meet(client_of_token(&other).unwrap(), server()).await;
        let failure = words_of(&near.unwrap_err(), true);
        let words = failure.to_string();
        assert!(
            words.ends_with("it has a different token, or is no rendezvous"),
            "{words}"
        );
        assert!(failure.is_final);
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
        let roots = Arc::new(RootCertStore::empty());
        let strange = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let (near, far) = meet(for_agents(strange), server()).await;
        far.unwrap_err();
        let failure = words_of(&near.unwrap_err(), false);
        assert_eq!((failure.hint, &*failure.cause), (Some(HAS_TOKEN.0), HAS_TOKEN.1));
    }

    #[test]
    fn a_file_that_is_missing_or_empty_is_named() {
        let files = TlsFiles {
            ca: Some("/nonexistent/ca.pem".into()),
            ..TlsFiles::default()
        };
        let words = client_of_files(&files).unwrap_err().to_string();
        assert!(words.starts_with("cannot use `/nonexistent/ca.pem`: "), "{words}");
        let half = TlsFiles {
            cert: Some("/dev/null".into()),
            ..TlsFiles::default()
        };
        assert!(matches!(server_of_files(&half), Err(TlsError::Half)));
    }
}
