//! A wire that can be cut: a TCP proxy with a stable address in front of a server that may come and go.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Forwards connections on a free port of the loopback address. Dropped with its connections.
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
}

struct Shared {
    target: Mutex<SocketAddr>,
    /// Both ends of each connection, until the next cut.
    wires: Mutex<Vec<TcpStream>>,
    closed: AtomicBool,
}

impl Shared {
    fn wires(&self) -> MutexGuard<'_, Vec<TcpStream>> {
        self.wires.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn target(&self) -> MutexGuard<'_, SocketAddr> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Proxy {
    pub(crate) fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let shared = Arc::new(Shared {
            target: Mutex::new(parse(target)),
            wires: Mutex::default(),
            closed: AtomicBool::new(false),
        });
        let accepting = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if accepting.closed.load(Ordering::Acquire) {
                    return;
                }
                // A client of a server that is gone is refused by a connection that ends at once.
                let _ = client.and_then(|client| connect(&accepting, client));
            }
        });
        Self { shared, address }
    }

    pub(crate) fn endpoint(&self) -> String {
        self.address.to_string()
    }

    /// Connections made from now on reach another server.
    pub(crate) fn aim(&self, target: &str) {
        *self.shared.target() = parse(target);
    }

    /// Breaks every connection there is; returns how many there were.
    pub(crate) fn cut(&self) -> usize {
        let wires = std::mem::take(&mut *self.shared.wires());
        for wire in &wires {
            // Closed already by one of its ends, if this fails.
            let _ = wire.shutdown(Shutdown::Both);
        }
        wires.len() / 2
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        self.cut();
        // Wakes the thread that accepts, which then goes; it is gone already if this fails.
        let _ = TcpStream::connect(self.address);
    }
}

fn parse(endpoint: &str) -> SocketAddr {
    endpoint.parse().expect("an address and a port")
}

fn connect(shared: &Shared, client: TcpStream) -> io::Result<()> {
    let server = TcpStream::connect(*shared.target())?;
    let ends = [client.try_clone()?, server.try_clone()?];
    shared.wires().extend(ends);
    carry(client.try_clone()?, server.try_clone()?);
    carry(server, client);
    Ok(())
}

/// Copies one direction until either end closes; the end of one is the end of the other.
fn carry(mut from: TcpStream, mut to: TcpStream) {
    std::thread::spawn(move || {
        // However it ends, both ends learn it.
        let _ = io::copy(&mut from, &mut to);
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}
