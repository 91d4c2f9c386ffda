//! A port that rank 0 will be able to bind, or the agent's store for it.
//!
//! The port is bound first without `SO_REUSEADDR`, which fails if anybody else holds it in any way; the option
//! is set afterwards, and nothing listens: from then on a program that sets `SO_REUSEADDR`, as every server does,
//! can bind the port and listen on it, while another launcher looking for a port cannot. So the port stays
//! reserved for as long as [`MasterPort`] lives, which is the whole generation.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::os::fd::AsRawFd;

use ddp_proto::ports::PortRange;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket, sockopt,
};

/// Ports below are for well-known services.
const LOWEST: u16 = 10_000;
/// Ports tried before the system is asked to choose one of its own range.
const ATTEMPTS: u32 = 64;
/// What Linux gives to outgoing connections by default.
const DEFAULT_LOCAL_RANGE: RangeInclusive<u16> = 32_768..=60_999;

/// A reserved port of this machine, for all its addresses.
#[derive(Debug)]
pub(crate) struct MasterPort {
    port: u16,
    /// Bound; it does not listen.
    socket: TcpListener,
}

impl MasterPort {
    /// Reserves a port that outgoing connections do not get.
    pub(crate) fn reserve() -> io::Result<Self> {
        let local = local_range();
        for _ in 0..ATTEMPTS {
            let port = rand::random_range(LOWEST..=u16::MAX);
            if local.contains(&port) {
                continue;
            }
            match Self::bind(port) {
                Err(error) if error.raw_os_error() == Some(Errno::EADDRINUSE as i32) => {}
                reserved => return reserved,
            }
        }
        Self::bind(0)
    }

    /// Reserves the port that was asked for. Connections of the last generation, and agents of the same job on this
    /// machine that reserve the same port, are not in the way; who listens on it is.
    pub(crate) fn reserve_this(port: u16) -> io::Result<Self> {
        Self::bind_as(port, Sharing::WithoutListeners)
    }

    /// Reserves a port of a range. One that connections of the last generation still have serves if no other is free.
    pub(crate) fn reserve_within(ports: PortRange) -> io::Result<Self> {
        let start = rand::random_range(0..ports.count()) as usize;
        for sharing in [Sharing::Exclusive, Sharing::WithoutListeners] {
            for port in ports.starting_at(start) {
                match Self::bind_as(port, sharing) {
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                    reserved => return reserved,
                }
            }
        }
        Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "none is free\n  hint: choose a larger range, or see who has the ports (`ss -ltnp`)",
        ))
    }

    /// Listens on the port: from now on rank 0 cannot. `locally`: only for this machine, at 127.0.0.1.
    pub(crate) fn listen(&self, locally: bool) -> io::Result<TcpListener> {
        let socket = if locally {
            TcpListener::bind((Ipv4Addr::LOCALHOST, self.port))?
        } else {
            self.socket.try_clone()?
        };
        listen(&socket, Backlog::MAXALLOWABLE)?;
        Ok(socket)
    }

    /// The port's number.
    pub(crate) fn get(&self) -> u16 {
        self.port
    }

    fn bind(port: u16) -> io::Result<Self> {
        Self::bind_as(port, Sharing::Exclusive)
    }

    fn bind_as(port: u16, sharing: Sharing) -> io::Result<Self> {
        let open = |family| socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None);
        let dual_stack = open(AddressFamily::Inet6).and_then(|socket| {
            setsockopt(&socket, sockopt::Ipv6V6Only, &false)?;
            Ok(socket)
        });
        let (socket, any): (_, IpAddr) = match dual_stack {
            Ok(socket) => (socket, Ipv6Addr::UNSPECIFIED.into()),
            // The machine has no IPv6.
            Err(_) => (open(AddressFamily::Inet)?, Ipv4Addr::UNSPECIFIED.into()),
        };
        setsockopt(
            &socket,
            sockopt::ReuseAddr,
            &(sharing == Sharing::WithoutListeners),
        )?;
        let address = SockaddrStorage::from(SocketAddr::new(any, port));
        bind(socket.as_raw_fd(), &address)?;
        setsockopt(&socket, sockopt::ReuseAddr, &true)?;
        let socket = TcpListener::from(socket);
        let port = socket.local_addr()?.port();
        Ok(Self { port, socket })
    }
}

/// Whether another socket may already have bound the port when it is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    Exclusive,
    /// Sockets that do not listen: `SO_REUSEADDR`.
    WithoutListeners,
}

fn local_range() -> RangeInclusive<u16> {
    fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|text| parse_range(&text))
        .unwrap_or(DEFAULT_LOCAL_RANGE)
}

fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let mut ends = text.split_ascii_whitespace();
    Some(ends.next()?.parse().ok()?..=ends.next()?.parse().ok()?)
}

/// What may help where no port, or not the `given` one, can be had; begins with a line break.
pub(crate) fn hint_for(cause: &io::Error, given: Option<u16>) -> String {
    match (cause.raw_os_error().map(Errno::from_raw), given) {
        (Some(Errno::EMFILE | Errno::ENFILE), _) => "\n  hint: check `ulimit -n`".to_owned(),
        (Some(Errno::EADDRINUSE), Some(port)) => format!(
            "\n  hint: choose a different `--master-port`, or leave it out \
             (`ss -ltnp 'sport = :{port}'` shows who has it)"
        ),
        (Some(_), _) => "\n  hint: choose a free port with `--master-port`".to_owned(),
        // It has a hint of its own, or was said before.
        (None, _) => String::new(),
    }
}

/// True if a program's words say that an address is in use, in the system's words or by the error's name.
pub(crate) fn is_taken(words: &str) -> bool {
    let words = words.to_ascii_lowercase();
    words.contains("eaddrinuse") || words.contains("address already in use")
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn rank_0_listens_on_the_port_while_it_is_reserved() {
        let reserved = MasterPort::reserve().unwrap();
        for address in ["127.0.0.1", "0.0.0.0", "[::1]", "[::]"] {
            let listener = match TcpListener::bind(format!("{address}:{}", reserved.get())) {
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => continue,
                listener => listener.unwrap(),
            };
            TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            listener.accept().unwrap();
        }
    }

    #[test]
    fn a_reserved_port_is_not_reserved_twice() {
        let reserved = MasterPort::reserve().unwrap();
        let error = MasterPort::bind(reserved.get()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    /// The store of a job of one node listened at all addresses of the machine.
    #[test]
    fn a_store_for_this_machine_listens_at_the_loopback_address_alone() {
        let reserved = MasterPort::reserve().unwrap();
        let listener = reserved.listen(true).unwrap();
        assert_eq!(
            listener.local_addr().unwrap(),
            (Ipv4Addr::LOCALHOST, reserved.get()).into()
        );
        TcpStream::connect(("127.0.0.1", reserved.get())).unwrap();
        listener.accept().unwrap();
        TcpStream::connect(("127.0.0.2", reserved.get())).expect_err("another address of this machine");
        MasterPort::bind(reserved.get()).expect_err("the port is still reserved");
    }

    #[test]
    fn a_port_that_is_served_is_not_reserved() {
        let served = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = MasterPort::bind(served.local_addr().unwrap().port()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn who_listens_on_the_port_that_was_asked_for_is_found() {
        let first = MasterPort::reserve().unwrap();
        let second = MasterPort::reserve_this(first.get()).unwrap();
        let listener = first.listen(false).unwrap();
        TcpStream::connect(("127.0.0.1", first.get())).unwrap();
        listener.accept().unwrap();
        assert!(second.listen(false).is_err(), "only one can listen");
        let error = MasterPort::reserve_this(first.get()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn ports_of_a_range_that_are_taken_are_skipped() {
        // Both addresses, so that it is in the way of every program.
        let first = MasterPort::reserve().unwrap();
        let served = first.listen(false).unwrap();
        let port = served.local_addr().unwrap().port();
        let only: PortRange = format!("{port}-{port}").parse().unwrap();
        let error = MasterPort::reserve_within(only).unwrap_err().to_string();
        assert_eq!(
            error,
            "none is free\n  hint: choose a larger range, or see who has the ports (`ss -ltnp`)"
        );
        let range: PortRange = format!("{}-{port}", port - 20).parse().unwrap();
        for _ in 0..20 {
            let reserved = MasterPort::reserve_within(range).unwrap();
            assert!(range.contains(reserved.get()) && reserved.get() != port);
        }
    }

    #[test]
    fn the_hint_fits_the_cause() {
        let hint = |errno: Errno, given| hint_for(&errno.into(), given);
        let taken = "\n  hint: choose a different `--master-port`, or leave it out \
                     (`ss -ltnp 'sport = :29500'` shows who has it)";
        assert_eq!(hint(Errno::EADDRINUSE, Some(29500)), taken);
        assert_eq!(hint(Errno::EMFILE, Some(29500)), "\n  hint: check `ulimit -n`");
        assert_eq!(
            hint(Errno::EADDRINUSE, None),
            "\n  hint: choose a free port with `--master-port`"
        );
        assert_eq!(hint_for(&io::Error::other("none is free"), None), "");
    }

    #[test]
    fn connections_of_the_last_generation_do_not_keep_the_only_port() {
        let last = MasterPort::reserve().unwrap();
        let only: PortRange = format!("{0}-{0}", last.get()).parse().unwrap();
        let listener = last.listen(false).unwrap();
        let peer = TcpStream::connect(("127.0.0.1", last.get())).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        // This end closes first, so its port is in TIME_WAIT.
        drop((accepted, listener));
        drop((peer, last));
        MasterPort::reserve_within(only).unwrap().listen(false).unwrap();
    }

    #[test]
    fn the_range_of_outgoing_connections_is_read() {
        assert_eq!(parse_range("32768\t60999\n"), Some(32_768..=60_999));
        assert_eq!(parse_range("x"), None);
    }
}
