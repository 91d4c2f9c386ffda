//! Connections as they come, without haste where the system can open no more.

use std::io;
use std::time::Duration;

use nix::errno::Errno;
use tokio_stream::{Stream, StreamExt as _};

/// After a connection for which there is no room: the next try would be refused at once, and so on without an end.
const PAUSE: Duration = Duration::from_millis(200);

/// The same connections and errors, the latter with a pause where they are the system's.
pub(super) fn unhurried<C: Send + 'static>(
    connections: impl Stream<Item = io::Result<C>>,
) -> impl Stream<Item = io::Result<C>> {
    let mut was_lacking = false;
    connections.then(move |connection| {
        let lack = connection.as_ref().err().filter(|error| is_lack(error));
        let is_lacking = lack.is_some();
        if let Some(error) = lack
            && !was_lacking
        {
            tracing::warn!(
                "a node that connects is kept waiting until there is room for it (`ulimit -n`): {error}"
            );
        }
        was_lacking = is_lacking;
        async move {
            if is_lacking {
                tokio::time::sleep(PAUSE).await;
            }
            connection
        }
    })
}

/// True if the system is short of something, so that the connection still waits to be accepted.
fn is_lack(error: &io::Error) -> bool {
    let lacks = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    error
        .raw_os_error()
        .is_some_and(|code| lacks.contains(&Errno::from_raw(code)))
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// The daemon once took a whole core for it.
    #[tokio::test]
    async fn a_lack_of_files_is_waited_out_and_other_errors_are_not() {
        let failing = |errno: Errno| move || Some(Err::<(), _>(io::Error::from(errno)));
        let looked_at = |errno| {
            let mut stream = pin!(unhurried(tokio_stream::iter(std::iter::from_fn(failing(errno)))));
            let mut next = pin!(stream.next());
            next.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        };
        assert!(looked_at(Errno::EMFILE).is_pending());
        assert!(matches!(
            looked_at(Errno::ECONNABORTED),
            Poll::Ready(Some(Err(_)))
        ));
        let mut stream = pin!(unhurried(tokio_stream::iter([
            Err(io::Error::from(Errno::EMFILE)),
            Ok(7)
        ])));
        assert!(stream.next().await.is_some_and(|first| first.is_err()));
        assert!(matches!(stream.next().await, Some(Ok(7))), "nothing is lost");
    }
}
