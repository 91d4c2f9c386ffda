//! TLS by raw public keys (RFC 7250): who has the token knows the keys of both sides. Each side proves that it has its
//! own, and takes no other for that of its peer.
//!
//! Nothing has to be issued, parsed or checked against a clock, as certificates have.

use std::sync::Arc;

use rustls::client::AlwaysResolvesClientRawPublicKeys;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, InconsistentKeys,
    PeerIncompatible, ServerConfig, SignatureScheme,
};

use super::token::{Side, Token};

/// An Ed25519 private key of RFC 8410 is its seed of 32 bytes behind these.
const PKCS8_PREFIX: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// An agent, which expects a daemon.
pub(super) fn client(token: &Token, provider: Arc<CryptoProvider>) -> Result<ClientConfig, Error> {
    let own = key_of(token, Side::Agent, &provider)?;
    let expected = ExpectedKey::of(token, Side::Daemon, &provider)?;
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        // The only key that it takes is the one that follows from the token.
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(expected))
        .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(own)));
    Ok(config)
}

/// A daemon, which expects agents.
pub(super) fn server(token: &Token, provider: Arc<CryptoProvider>) -> Result<ServerConfig, Error> {
    let own = key_of(token, Side::Daemon, &provider)?;
    let expected = ExpectedKey::of(token, Side::Agent, &provider)?;
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(expected))
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own)));
    Ok(config)
}

/// The key of one side, with its public half where a certificate would be.
fn key_of(token: &Token, side: Side, provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, Error> {
    let der = [&PKCS8_PREFIX[..], &token.tls_seed(side)].concat();
    let key = provider
        .key_provider
        .load_private_key(PrivatePkcs8KeyDer::from(der).into())?;
    let public = key.public_key().ok_or(InconsistentKeys::Unknown)?;
    let public = CertificateDer::from(public.to_vec());
    Ok(Arc::new(CertifiedKey::new(vec![public], key)))
}

/// The one key that the other side may have.
#[derive(Debug)]
struct ExpectedKey {
    key: CertificateDer<'static>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ExpectedKey {
    fn of(token: &Token, side: Side, provider: &CryptoProvider) -> Result<Self, Error> {
        let pair = key_of(token, side, provider)?;
        let key = pair.end_entity_cert()?.clone().into_owned();
        let algorithms = provider.signature_verification_algorithms;
        Ok(Self { key, algorithms })
    }

    /// A public key is no secret: it may be compared in any way.
    fn check(&self, shown: &CertificateDer<'_>) -> Result<(), Error> {
        if *shown == self.key {
            return Ok(());
        }
        Err(CertificateError::UnknownIssuer.into())
    }

    /// Whether the other side has the private half of the key that it has shown.
    fn check_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(shown.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

/// No earlier version than 1.3 is spoken.
const NO_TLS12: Error = Error::PeerIncompatible(PeerIncompatible::Tls12NotOffered);

/// What both traits of verifiers ask for.
macro_rules! signature_checks {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(NO_TLS12)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            shown: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.check_signature(message, shown, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for ExpectedKey {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(shown).map(|()| ServerCertVerified::assertion())
    }

    signature_checks!();
}

impl ClientCertVerifier for ExpectedKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(shown).map(|()| ClientCertVerified::assertion())
    }

    signature_checks!();
}
