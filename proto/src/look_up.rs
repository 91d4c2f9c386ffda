//! Host names to addresses.
//!
//! The system's look-up blocks. tokio's own `lookup_host` panics where the system has no thread left for it; this one
//! returns an error that says so.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};

use tokio::sync::oneshot;

/// Why a name has no addresses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LookUpError {
    /// The system has no thread for the look-up.
    #[error(
        "cannot start a thread to look up the host name `{host}`: {cause}\n  hint: raise `ulimit -u`, and the pids limit of the control group if there is one; or use an address instead of the name"
    )]
    NoThread {
        /// The name.
        host: String,
        /// The system's text.
        cause: String,
    },
    /// No name server knows the name, or none answers.
    #[error("cannot look up the host name `{host}`: {cause}")]
    Unknown {
        /// The name.
        host: String,
        /// The system's text.
        cause: String,
    },
}

/// The addresses of a name or of an address in text, which may stand in brackets, with this port; at least one. A look-up
/// takes as long as the system's resolver takes: give it a deadline. Cancel safe.
pub async fn look_up(host: &str, port: u16) -> Result<Vec<SocketAddr>, LookUpError> {
    if let Ok(address) = host.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let host = host.to_owned();
    let (answer, found) = oneshot::channel();
    let name = host.clone();
    let system =
        move || -> io::Result<Vec<SocketAddr>> { Ok((name.as_str(), port).to_socket_addrs()?.collect()) };
    let thread = std::thread::Builder::new().name("resolver".into());
    if let Err(error) = thread.spawn(move || answer.send(system())) {
        let cause = error.to_string();
        return Err(LookUpError::NoThread { host, cause });
    }
    let cause = match found.await {
        Ok(Ok(addresses)) if !addresses.is_empty() => return Ok(addresses),
        Ok(Err(error)) => error.to_string(),
        Ok(Ok(_)) | Err(_) => "it has no address".to_owned(),
    };
    Err(LookUpError::Unknown { host, cause })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    #[tokio::test]
    async fn an_address_needs_no_name_server_and_a_bad_name_is_named() {
        let here = look_up("[::1]", 7).await;
        assert_eq!(here, Ok(vec![SocketAddr::from((Ipv6Addr::LOCALHOST, 7))]));
        let error = look_up("no such name", 7).await.unwrap_err().to_string();
        assert!(
            error.starts_with("cannot look up the host name `no such name`: "),
            "{error}"
        );
    }
}
