//! Who may do what only operators may: list, close and drain, and see the status page.

use std::fs;
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Shortest token: 128 bits in base64 without padding are 22 characters, in hexadecimal 32.
const MIN_TOKEN_BYTES: usize = 16;
/// Longest file that is read for one.
const MAX_FILE_BYTES: u64 = 4096;
/// Before the token in `authorization`.
const SCHEME: &str = "Bearer ";

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum AdminTokenError {
    /// The file cannot be read.
    #[error("cannot read the admin token in `{path}`: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It holds no token.
    #[error(
        "`{0}` holds no admin token: expected one line of {MIN_TOKEN_BYTES} to {MAX_FILE_BYTES} visible ASCII characters\n  \
         hint: `head -c 24 /dev/urandom | base64 > FILE` makes one"
    )]
    Invalid(PathBuf),
}

/// Decides who is an operator: who has the token, if there is one, else who is on this machine.
#[derive(Clone, Debug, Default)]
pub struct Admin {
    /// Of the token: comparing hashes takes the same time wherever tokens differ.
    token: Option<blake3::Hash>,
}

/// Who asks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller<'a> {
    /// Its address, if it is known.
    pub(super) address: Option<IpAddr>,
    /// Its `authorization`.
    pub(super) authorization: Option<&'a [u8]>,
}

impl Admin {
    /// Operators have the token in this file.
    pub fn with_token_file(path: &Path) -> Result<Self, AdminTokenError> {
        let token = read_token(path)?;
        Ok(Self {
            token: Some(blake3::hash(token.as_bytes())),
        })
    }

    /// There is a token, so it does not matter where an operator is.
    pub(super) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// The one place where this is decided.
    pub(super) fn is_admin(&self, caller: Caller<'_>) -> bool {
        match self.token {
            Some(hash) => {
                let shown = caller
                    .authorization
                    .and_then(|shown| shown.strip_prefix(SCHEME.as_bytes()));
                shown.is_some_and(|token| blake3::hash(token) == hash)
            }
            None => caller
                .address
                .is_some_and(|address| address.to_canonical().is_loopback()),
        }
    }

    /// What to do about a refusal.
    pub(super) fn refusal(&self) -> &'static str {
        if self.has_token() {
            "only operators may: the admin token is missing or wrong\n  \
             hint: name its file in `DDP_ADMIN_TOKEN_FILE`"
        } else {
            "only operators on the daemon's own machine may, as the daemon has no admin token\n  \
             hint: start it with `DDP_ADMIN_TOKEN_FILE`, and name the same token in that variable here"
        }
    }
}

/// The token in a file, for a daemon or for its operator.
pub fn read_token(path: &Path) -> Result<String, AdminTokenError> {
    let failed = |source| AdminTokenError::Io {
        path: path.to_owned(),
        source,
    };
    let mut text = String::new();
    let file = fs::File::open(path).map_err(failed)?;
    let read = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text);
    let invalid = || AdminTokenError::Invalid(path.to_owned());
    match read {
        Ok(bytes) if bytes as u64 > MAX_FILE_BYTES => return Err(invalid()),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(invalid()),
        Err(error) => return Err(failed(error)),
    }
    let token = text.trim_ascii();
    let is_token = token.len() >= MIN_TOKEN_BYTES && token.bytes().all(|byte| byte.is_ascii_graphic());
    if is_token {
        Ok(token.to_owned())
    } else {
        Err(invalid())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(address: &str, authorization: Option<&'static str>) -> Caller<'static> {
        Caller {
            address: address.parse().ok(),
            authorization: authorization.map(str::as_bytes),
        }
    }

    #[test]
    fn without_a_token_who_is_on_this_machine_is_an_operator() {
        let admin = Admin::default();
        for (address, expected) in [
            ("127.0.0.1", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("10.0.0.1", false),
            ("unknown", false),
        ] {
            assert_eq!(
                admin.is_admin(caller(address, Some("Bearer x"))),
                expected,
                "{address}"
            );
        }
    }

    #[test]
    fn with_a_token_only_who_shows_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        let admin = Admin::with_token_file(&path).unwrap();
        for (shown, expected) in [
            (Some("Bearer 0123456789abcdef"), true),
            (Some("Bearer 0123456789abcdeF"), false),
            (Some("Bearer 0123456789abcdef "), false),
            (Some("bearer 0123456789abcdef"), false),
            (Some("0123456789abcdef"), false),
            (Some("Bearer "), false),
            (None, false),
        ] {
            assert_eq!(admin.is_admin(caller("127.0.0.1", shown)), expected, "{shown:?}");
        }
        assert!(!format!("{admin:?}").contains("0123456789abcdef"));
    }

    #[test]
    fn a_file_without_a_token_is_an_error_that_does_not_show_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let long = "x".repeat(5000);
        for text in [
            "",
            "short",
            "two words of some length",
            "ümlaute-sind-nicht-erlaubt",
            &long,
        ] {
            fs::write(&path, text).unwrap();
            let error = read_token(&path).unwrap_err();
            assert!(matches!(error, AdminTokenError::Invalid(_)), "`{text}`: {error}");
            assert!(text.is_empty() || !error.to_string().contains(text));
        }
        fs::write(&path, [0xff; 20]).unwrap();
        assert!(matches!(read_token(&path), Err(AdminTokenError::Invalid(_))));
        fs::remove_file(&path).unwrap();
        assert!(matches!(read_token(&path), Err(AdminTokenError::Io { .. })));
    }
}
