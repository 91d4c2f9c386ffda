//! Who may do what only operators may: list, close and drain, and see the status page.

use ddp_proto::trust::token::Token;

use crate::rendezvous::event::Peer;

/// Before the token in `authorization`.
const SCHEME: &str = "Bearer ";

/// Decides who is an operator: who has the token, if there is one, else who is on this machine.
#[derive(Clone, Debug, Default)]
pub struct Admin {
    /// Of the token: comparing hashes takes the same time wherever tokens differ.
    token: Option<blake3::Hash>,
}

/// Who asks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim<'a> {
    /// Its address and the one that it has connected to, if they are known.
    pub(super) peer: Option<Peer>,
    /// Its `authorization`.
    pub(super) authorization: Option<&'a [u8]>,
}

impl Admin {
    /// Operators have this token.
    pub fn with_token(token: &Token) -> Self {
        Self {
            token: Some(blake3::hash(token.reveal().as_bytes())),
        }
    }

    /// There is a token, so it does not matter where an operator is.
    pub(super) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// The one place where this is decided.
    pub(super) fn is_admin(&self, claim: Claim<'_>) -> bool {
        match self.token {
            Some(hash) => {
                let shown = claim
                    .authorization
                    .and_then(|shown| shown.strip_prefix(SCHEME.as_bytes()));
                shown.is_some_and(|token| blake3::hash(token) == hash)
            }
            None => claim.peer.is_some_and(Peer::is_here),
        }
    }

    /// What to do about a refusal.
    pub(super) fn refusal(&self) -> &'static str {
        if self.has_token() {
            "only operators may: the admin token is missing or wrong\n  \
             hint: name the daemon's own file in `DDP_ADMIN_TOKEN_FILE`; in HTTP, send `Authorization: Bearer TOKEN`"
        } else {
            "only operators with the job token on the daemon's own machine may, as the daemon has no admin token\n  \
             hint: start it with `DDP_ADMIN_TOKEN_FILE`, and name the same token in that variable here"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(address: &str, authorization: Option<&'static str>) -> Claim<'static> {
        let remote = address.parse().ok();
        Claim {
            peer: remote.map(|remote| Peer {
                remote,
                local: [10, 0, 0, 5].into(),
            }),
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
            ("10.0.0.5", true),
            ("10.0.0.1", false),
            ("unknown", false),
        ] {
            assert_eq!(
                admin.is_admin(claim(address, Some("Bearer x"))),
                expected,
                "{address}"
            );
        }
    }

    #[test]
    fn with_a_token_only_who_shows_it_is() {
        let text = "0123456789abcdef0123456789abcdef";
        let admin = Admin::with_token(&Token::parse(text).unwrap());
        for (shown, expected) in [
            (Some("Bearer 0123456789abcdef0123456789abcdef"), true),
            (Some("Bearer 0123456789abcdef0123456789abcdeF"), false),
            (Some("Bearer 0123456789abcdef0123456789abcdef "), false),
            (Some("bearer 0123456789abcdef0123456789abcdef"), false),
            (Some("0123456789abcdef0123456789abcdef"), false),
            (Some("Bearer "), false),
            (None, false),
        ] {
            assert_eq!(admin.is_admin(claim("127.0.0.1", shown)), expected, "{shown:?}");
        }
        assert!(!format!("{admin:?}").contains(text));
    }
}
