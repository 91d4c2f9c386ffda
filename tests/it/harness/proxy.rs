//! A wire that can be cut: a TCP proxy with a stable address in front of a server that may come and go.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Forwards connections on a free port of the loopback address. Dropped with its connections.
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
}

struct Shared {
    target: Mutex<SocketAddr>,
    /// Both ends of each connection, until the next cut.
    wires: Mutex<Vec<TcpStream>>,
    /// Nothing passes, and nothing is lost.
    held: Mutex<bool>,
    released: Condvar,
    closed: AtomicBool,
}

impl Shared {
    fn wires(&self) -> MutexGuard<'_, Vec<TcpStream>> {
        self.wires.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn target(&self) -> MutexGuard<'_, SocketAddr> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, hold: bool) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = hold;
        self.released.notify_all();
    }

    fn pass(&self) {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        // Poisoned by a test that failed: its proxy is dropped soon.
        drop(self.released.wait_while(held, |held| *held));
    }
}

impl Proxy {
    pub(crate) fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let shared = Arc::new(Shared {
            target: Mutex::new(parse(target)),
            wires: Mutex::default(),
            held: Mutex::new(false),
            released: Condvar::new(),
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

    /// What is on its way stays there until [`Proxy::release`].
    pub(crate) fn hold(&self) {
        self.shared.hold(true);
    }

    pub(crate) fn release(&self) {
        self.shared.hold(false);
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
        self.release();
        self.cut();
        // Wakes the thread that accepts, which then goes; it is gone already if this fails.
        let _ = TcpStream::connect(self.address);
    }
}

fn parse(endpoint: &str) -> SocketAddr {
    endpoint.parse().expect("an address and a port")
}

fn connect(shared: &Arc<Shared>, client: TcpStream) -> io::Result<()> {
    let server = TcpStream::connect(*shared.target())?;
    let ends = [client.try_clone()?, server.try_clone()?];
    shared.wires().extend(ends);
    carry(shared.clone(), client.try_clone()?, server.try_clone()?);
    carry(shared.clone(), server, client);
    Ok(())
}

/// Copies one direction until either end closes; the end of one is the end of the other.
fn carry(shared: Arc<Shared>, mut from: TcpStream, mut to: TcpStream) {
    std::thread::spawn(move || {
        let mut bytes = vec![0; 16 << 10];
        // However it ends, both ends learn it.
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            shared.pass();
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}
