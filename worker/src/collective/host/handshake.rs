//! The handshake of two ranks: before anything else crosses their connection, both prove that they belong to the same
//! generation.
//!
//! | message | from | content |
//! |---|---|---|
//! | [`Challenge`] | the rank that listens | a nonce |
//! | [`Hello`] | the rank that connects | its rank, a nonce, its proof |
//! | answer | the rank that listens | its proof |
//!
//! A proof is a BLAKE3 hash, keyed with the generation's data key, of the prover's side, the group, the generation, both
//! ranks and both nonces. So a recorded handshake does not work on another connection, and neither does a proof that is sent
//! back. A peer without the key learns only a nonce.
//!
//! Anyone can connect. A caller without a proof is kept for [`UNPROVEN_BOUND`]. At most [`MAX_UNPROVEN`] of them are kept: a
//! further one replaces the oldest. A rank that was replaced calls again. A caller with a proof is never replaced.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::task::Poll;
use std::time::{Duration, Instant};

use blake3::{Hash, Hasher};
use bytemuck::{Pod, Zeroable, bytes_of, pod_read_unaligned};
use ddp_proto::trust::data_key::DataKey;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{MsgFlags, recv, send};

use super::sockets::{Accepted, Address, Connection, Listener, next_socket};
use super::topology::{RankInfo, Topology};
use crate::collective::error::Failure;
use crate::collective::wait::{Wait, poll_once};

/// How long a caller may take to prove that it is a rank.
const UNPROVEN_BOUND: Duration = Duration::from_secs(5);
/// Most callers without a proof, in addition to one for each rank that is awaited.
const MAX_UNPROVEN: usize = 256;
/// Most callers to accept before reading from those already accepted.
const ACCEPTED_AT_ONCE: usize = 64;
/// Pause before a rank calls again after its connection was closed.
const RECALL_PAUSE: Duration = Duration::from_millis(20);

/// The first bytes of either side. Builds with another handshake have other ones.
const MAGIC: u64 = 0x6464_7072_756e_0002;
/// Begins what is hashed, so that nothing else that is hashed with this key is a proof.
const CONTEXT: &[u8] = b"ddp-run: handshake of two ranks, version 2";

type Nonce = [u8; 32];

/// The first message, from the rank that listens.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Challenge {
    magic: u64,
    nonce: Nonce,
}

/// The second message, from the rank that connects.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Hello {
    magic: u64,
    generation: u64,
    /// Global rank of the connecting rank.
    rank: u64,
    nonce: Nonce,
    proof: [u8; 32],
}

const MAX_MESSAGE_BYTES: usize = size_of::<Hello>();
const ANSWER_BYTES: usize = size_of::<Nonce>();

/// The side that makes a proof.
#[derive(Clone, Copy)]
enum Prover {
    Caller = 1,
    Listener = 2,
}

/// The two ends of a connection, by global rank, and their nonces.
#[derive(Clone, Copy)]
struct Ends {
    caller: u64,
    listener: u64,
    callers_nonce: Nonce,
    listeners_nonce: Nonce,
}

/// Makes the proofs of one rank in one group.
pub(super) struct GroupProof {
    key: DataKey,
    group: String,
    generation: u64,
    rank: u64,
}

impl GroupProof {
    /// On one node there may be no key. There the system says that the other process belongs to this user.
    pub(super) fn new(info: &RankInfo, group: &str) -> Self {
        Self {
            key: info.data_key.clone().unwrap_or(DataKey::new([0; 32])),
            group: group.to_owned(),
            generation: info.generation,
            rank: info.rank as u64,
        }
    }

    fn of(&self, prover: Prover, ends: &Ends) -> Hash {
        let mut hasher = Hasher::new_keyed(self.key.as_bytes());
        hasher.update(CONTEXT).update(&[prover as u8]);
        for number in [
            self.generation,
            ends.caller,
            ends.listener,
            self.group.len() as u64,
        ] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(self.group.as_bytes());
        hasher.update(&ends.callers_nonce).update(&ends.listeners_nonce);
        hasher.finalize()
    }

    /// The hello to the rank `listener`, and the answer that it must give.
    fn hello(&self, listener: u64, challenge: &Challenge) -> (Hello, Hash) {
        let ends = Ends {
            caller: self.rank,
            listener,
            callers_nonce: rand::random(),
            listeners_nonce: challenge.nonce,
        };
        let hello = Hello {
            magic: MAGIC,
            generation: self.generation,
            rank: self.rank,
            nonce: ends.callers_nonce,
            proof: *self.of(Prover::Caller, &ends).as_bytes(),
        };
        (hello, self.of(Prover::Listener, &ends))
    }

    /// The answer to a hello, if its proof shows that the sender belongs to this generation and knows this nonce.
    fn answer(&self, hello: &Hello, listeners_nonce: Nonce) -> Option<Hash> {
        let ends = Ends {
            caller: hello.rank,
            listener: self.rank,
            callers_nonce: hello.nonce,
            listeners_nonce,
        };
        let is_ours = (hello.magic, hello.generation) == (MAGIC, self.generation);
        // Hashes are compared in constant time.
        let is_proven = self.of(Prover::Caller, &ends) == Hash::from_bytes(hello.proof);
        (is_ours && is_proven).then(|| self.of(Prover::Listener, &ends))
    }
}

/// A rank of the group that this rank connects to.
#[derive(Clone, Copy)]
struct Called<'a> {
    /// Global rank.
    rank: usize,
    address: &'a Address,
    is_local: bool,
}

impl Called<'_> {
    fn lost(&self, cause: &str) -> Failure {
        let cause = cause.lines().next().unwrap_or_default();
        Failure::PeerLost {
            rank: self.rank,
            how: format!("it closed the connection, and takes no other: {cause}"),
        }
    }

    fn has_no_proof(&self) -> Failure {
        let (rank, address) = (self.rank, self.address.shown(self.is_local));
        Failure::System {
            what: format!("cannot reach rank {rank} at `{address}`"),
            cause: "what answers there does not prove that it is of this generation\n  hint: see which program listens \
                    there (`ss -ltnp`), and whether the address is another machine's too"
                .into(),
        }
    }
}

/// What comes next on a connection.
enum Expected<'a> {
    Challenge(Called<'a>),
    Answer(Called<'a>, Hash),
    Hello(Nonce),
}

/// A connection before its handshake is complete.
struct Handshake<'a> {
    socket: OwnedFd,
    since: Instant,
    expected: Expected<'a>,
    /// What has come of the next message.
    bytes: [u8; MAX_MESSAGE_BYTES],
    filled: usize,
}

/// The state of a handshake after reading from its connection.
enum Outcome<'a> {
    /// It waits for a message.
    Waiting(Handshake<'a>),
    /// The rank has proved itself.
    Proven(usize, OwnedFd),
    /// The called rank closed the connection before that.
    CallAgain(Called<'a>),
    /// The caller closed the connection, or has no valid proof.
    Closed,
}

impl<'a> Handshake<'a> {
    fn new(socket: OwnedFd, expected: Expected<'a>) -> Self {
        Self {
            socket,
            since: Instant::now(),
            expected,
            bytes: [0; MAX_MESSAGE_BYTES],
            filled: 0,
        }
    }

    /// Sends the challenge to a caller.
    fn challenge(socket: OwnedFd) -> Option<Self> {
        let nonce = rand::random();
        let challenge = Challenge { magic: MAGIC, nonce };
        send_message(&socket, bytes_of(&challenge)).then(|| Self::new(socket, Expected::Hello(nonce)))
    }

    fn is_of_caller(&self) -> bool {
        matches!(self.expected, Expected::Hello(_))
    }

    fn message_bytes(&self) -> usize {
        match self.expected {
            Expected::Challenge(_) => size_of::<Challenge>(),
            Expected::Answer(..) => ANSWER_BYTES,
            Expected::Hello(_) => size_of::<Hello>(),
        }
    }

    /// Reads the next message as far as it has arrived. `Ready(true)` once it is whole, `Ready(false)` if the other end is
    /// gone.
    fn receive(&mut self) -> Poll<bool> {
        let end = self.message_bytes();
        let rest = &mut self.bytes[self.filled..end];
        match recv(self.socket.as_raw_fd(), rest, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Poll::Ready(false),
            Ok(received) => {
                self.filled += received;
                if self.filled == end {
                    Poll::Ready(true)
                } else {
                    Poll::Pending
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Poll::Pending,
            Err(_) => Poll::Ready(false),
        }
    }

    /// Reads and answers what has arrived. `awaited` are the global ranks that may call.
    fn proceed(mut self, proof: &GroupProof, awaited: &[usize]) -> Result<Outcome<'a>, Failure> {
        let is_whole = match self.receive() {
            Poll::Pending => return Ok(Outcome::Waiting(self)),
            Poll::Ready(is_whole) => is_whole,
        };
        let message = &self.bytes[..self.filled];
        match self.expected {
            Expected::Challenge(called) | Expected::Answer(called, _) if !is_whole => {
                Ok(Outcome::CallAgain(called))
            }
            Expected::Challenge(called) => {
                let challenge: Challenge = pod_read_unaligned(message);
                if challenge.magic != MAGIC {
                    return Err(called.has_no_proof());
                }
                let (hello, answer) = proof.hello(called.rank as u64, &challenge);
                if !send_message(&self.socket, bytes_of(&hello)) {
                    return Ok(Outcome::CallAgain(called));
                }
                Ok(Outcome::Waiting(Self {
                    since: self.since,
                    ..Self::new(self.socket, Expected::Answer(called, answer))
                }))
            }
            Expected::Answer(called, answer) => {
                let theirs: [u8; ANSWER_BYTES] = pod_read_unaligned(message);
                if answer != Hash::from_bytes(theirs) {
                    return Err(called.has_no_proof());
                }
                Ok(Outcome::Proven(called.rank, self.socket))
            }
            Expected::Hello(_) if !is_whole => Ok(Outcome::Closed),
            Expected::Hello(nonce) => {
                let hello: Hello = pod_read_unaligned(message);
                let rank = usize::try_from(hello.rank)
                    .ok()
                    .filter(|rank| awaited.contains(rank));
                let answer = proof.answer(&hello, nonce);
                match rank.zip(answer) {
                    Some((rank, answer)) if send_message(&self.socket, answer.as_bytes()) => {
                        Ok(Outcome::Proven(rank, self.socket))
                    }
                    _ => Ok(Outcome::Closed),
                }
            }
        }
    }
}

/// Sends a message of a handshake; false if the other end is gone. It fits into the empty buffer of a new connection, so
/// this does not wait.
fn send_message(socket: &OwnedFd, message: &[u8]) -> bool {
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    send(socket.as_raw_fd(), message, flags) == Ok(message.len())
}

/// Connects this rank with all others of a group, by rank: to the lower ones, and accepts the higher ones. All ranks of the
/// group do so, at each other's addresses.
pub(super) fn connect_group(
    listener: &Listener,
    proof: GroupProof,
    topology: &Topology,
    addresses: &[&Address],
    wait: &Wait,
) -> Result<Vec<Option<Connection>>, Failure> {
    let (me, globals) = (topology.rank(), topology.globals());
    let is_here = |rank: usize| topology.local_index(rank).is_some();
    let called = addresses
        .iter()
        .enumerate()
        .take(me)
        .map(|(rank, address)| Called {
            rank: globals[rank],
            address,
            is_local: is_here(rank),
        });
    let mut sockets = Handshakes::new(listener, proof, &globals[me + 1..]).all(called, wait)?;
    let connections = globals.iter().enumerate().map(|(rank, &global)| {
        let socket = sockets.remove(&global);
        let connect = |socket| Connection::new(global, socket, is_here(rank));
        socket.map(connect).transpose()
    });
    connections.collect()
}

/// The handshakes of one rank with all others of a group.
struct Handshakes<'a> {
    listener: &'a Listener,
    proof: GroupProof,
    /// Global ranks that call this one.
    awaited: &'a [usize],
    pending: Vec<Handshake<'a>>,
    /// Ranks to call again.
    recalled: Vec<Called<'a>>,
    proven: BTreeMap<usize, OwnedFd>,
}

impl<'a> Handshakes<'a> {
    fn new(listener: &'a Listener, proof: GroupProof, awaited: &'a [usize]) -> Self {
        Self {
            listener,
            proof,
            awaited,
            pending: Vec::new(),
            recalled: Vec::new(),
            proven: BTreeMap::new(),
        }
    }

    /// Calls the ranks of `called`, answers those that are awaited, and returns the connections by global rank.
    fn all(
        mut self,
        called: impl Iterator<Item = Called<'a>>,
        wait: &Wait,
    ) -> Result<BTreeMap<usize, OwnedFd>, Failure> {
        let called: Vec<Called<'a>> = called.collect();
        for one in &called {
            self.call(*one, wait)?;
        }
        loop {
            let all = called
                .iter()
                .map(|called| called.rank)
                .chain(self.awaited.iter().copied());
            let missing: Vec<usize> = all.filter(|rank| !self.proven.contains_key(rank)).collect();
            if missing.is_empty() {
                return Ok(self.proven);
            }
            // Also if messages arrive all the time.
            wait.check(|| missing.clone())?;
            self.wait_for_message(wait)?;
            self.read_all()?;
            self.accept()?;
            self.call_again(wait)?;
        }
    }

    fn call(&mut self, called: Called<'a>, wait: &Wait) -> Result<(), Failure> {
        let socket = called.address.connect(called.rank, called.is_local, wait)?;
        self.pending
            .push(Handshake::new(socket, Expected::Challenge(called)));
        Ok(())
    }

    fn call_again(&mut self, wait: &Wait) -> Result<(), Failure> {
        if !self.recalled.is_empty() {
            std::thread::sleep(RECALL_PAUSE);
        }
        let recalled = std::mem::take(&mut self.recalled);
        for called in recalled {
            // The rank answered before, so this error means that it has ended.
            self.call(called, wait).map_err(|failure| match failure {
                Failure::System { cause, .. } => called.lost(&cause),
                other => other,
            })?;
        }
        Ok(())
    }

    /// Waits until something arrives, or for a moment.
    fn wait_for_message(&self, wait: &Wait) -> Result<(), Failure> {
        let pending = self.pending.iter().map(|handshake| &handshake.socket);
        let sockets = self.listener.sockets().map(|(socket, _)| socket).chain(pending);
        let mut fds: Vec<_> = sockets
            .map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN))
            .collect();
        poll_once(&mut fds, wait.interval())?;
        Ok(())
    }

    fn read_all(&mut self) -> Result<(), Failure> {
        for handshake in std::mem::take(&mut self.pending) {
            match handshake.proceed(&self.proof, self.awaited)? {
                // A message that arrived late but is here now still counts.
                Outcome::Waiting(next) if next.is_of_caller() && next.since.elapsed() > UNPROVEN_BOUND => {}
                Outcome::Waiting(next) => self.pending.push(next),
                Outcome::Proven(rank, socket) => {
                    self.proven.entry(rank).or_insert(socket);
                }
                Outcome::CallAgain(called) => self.recalled.push(called),
                Outcome::Closed => {}
            }
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<(), Failure> {
        for (listener, is_local) in self.listener.sockets() {
            for _ in 0..ACCEPTED_AT_ONCE {
                match next_socket(listener, is_local)? {
                    Accepted::None => break,
                    Accepted::Refused => {}
                    Accepted::One(socket) => {
                        let callers = self.pending.iter().filter(|p| p.is_of_caller()).count();
                        if callers >= MAX_UNPROVEN + self.awaited.len() {
                            self.close_oldest_caller();
                        }
                        self.pending.extend(Handshake::challenge(socket));
                    }
                    Accepted::NoRoom if self.close_oldest_caller() => {}
                    Accepted::NoRoom => return Err(no_room()),
                }
            }
        }
        Ok(())
    }

    /// Makes room for one more caller; false if there is no caller without a proof.
    fn close_oldest_caller(&mut self) -> bool {
        let oldest = self.pending.iter().position(Handshake::is_of_caller);
        oldest.map(|oldest| self.pending.remove(oldest)).is_some()
    }
}

fn no_room() -> Failure {
    Failure::System {
        what: "accepting a peer".into(),
        cause: "too many open files\n  hint: raise the limit with `ulimit -n`".into(),
    }
}

/// Reads the bytes of a handshake from a real socket; true if they are a valid proof. For `tests/fuzz`.
pub(super) fn read_foreign(bytes: &[u8]) -> bool {
    let Ok((ours, mut theirs)) = std::os::unix::net::UnixStream::pair() else {
        return false;
    };
    let proof = GroupProof::new(&RankInfo::on_one_node(0, 2), "world");
    let socket = OwnedFd::from(ours);
    // Bytes that do not fit are not read either.
    let _ = theirs
        .set_nonblocking(true)
        .and_then(|()| theirs.write_all(bytes));
    drop(theirs);
    let handshake = Handshake::new(socket, Expected::Hello([0; 32]));
    matches!(handshake.proceed(&proof, &[1]), Ok(Outcome::Proven(..)))
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
