//! How two ranks prove to each other that they are of one generation, before anything else crosses their connection.
//!
//! | message | from | content |
//! |---|---|---|
//! | [`Challenge`] | the rank that listens | a nonce |
//! | [`Hello`] | the rank that connects | who it is, a nonce, its proof |
//! | answer | the rank that listens | its proof |
//!
//! A proof is a BLAKE3 hash keyed with the generation's data key: of who proves, the group, the generation, both ranks and
//! both nonces. So a recorded introduction is of no use for another connection, and a proof that is sent back is none. Who
//! does not know the key learns a nonce, and nothing else.
//!
//! Anybody can connect. A caller without a proof is kept for [`UNPROVEN_BOUND`], and no more than [`MAX_STRANGERS`] at once: the
//! oldest gives way. A rank to whom that happened calls again. Who has proved itself is never sent away.

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
/// Most callers without a proof, besides as many as there are ranks to come.
const MAX_STRANGERS: usize = 256;
/// Most callers that are accepted before those that are there are heard again.
const ACCEPTED_AT_ONCE: usize = 64;
/// Pause before a rank calls again that was sent away.
const RECALL_PAUSE: Duration = Duration::from_millis(20);

/// The first bytes of either side; those of builds whose introductions differ have another one.
const MAGIC: u64 = 0x6464_7072_756e_0002;
/// Begins what is hashed, so that a proof is of nothing else that is ever hashed with this key.
const CONTEXT: &[u8] = b"ddp-run: introduction of two ranks, version 2";

type Nonce = [u8; 32];

/// What the rank that listens says first.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Challenge {
    magic: u64,
    nonce: Nonce,
}

/// What the rank that connects answers.
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

/// Who proves itself.
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
struct GroupProof {
    key: DataKey,
    group: String,
    generation: u64,
    rank: u64,
}

impl GroupProof {
    /// On one node there may be no key: the system says there that the other process is of this user.
    fn new(info: &RankInfo, group: &str) -> Self {
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

    /// The hello to the rank `listener`, and the answer that it has to give.
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

    /// The answer to a hello that proves that its sender is of this generation, and knows this nonce.
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
    fn is_lost(&self, cause: &str) -> Failure {
        let cause = cause.lines().next().unwrap_or_default();
        Failure::PeerLost {
            rank: self.rank,
            how: format!("it closed the connection, and takes no other: {cause}"),
        }
    }

    fn is_a_stranger(&self) -> Failure {
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

/// A connection whose introduction is under way.
struct Introduction<'a> {
    socket: OwnedFd,
    since: Instant,
    expected: Expected<'a>,
    /// What has come of the next message.
    bytes: [u8; MAX_MESSAGE_BYTES],
    filled: usize,
}

/// What became of an introduction.
enum Step<'a> {
    /// Another message follows, now or later.
    Next(Introduction<'a>),
    /// The rank has proved itself.
    Proven(usize, OwnedFd),
    /// The other end is gone before it did.
    SentAway(Called<'a>),
    /// It was a stranger.
    Closed,
}

impl<'a> Introduction<'a> {
    fn new(socket: OwnedFd, expected: Expected<'a>) -> Self {
        Self {
            socket,
            since: Instant::now(),
            expected,
            bytes: [0; MAX_MESSAGE_BYTES],
            filled: 0,
        }
    }

    /// Greets who has connected.
    fn with_caller(socket: OwnedFd) -> Option<Self> {
        let nonce = rand::random();
        let challenge = Challenge { magic: MAGIC, nonce };
        say(&socket, bytes_of(&challenge)).then(|| Self::new(socket, Expected::Hello(nonce)))
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

    /// Reads what has come of the next message. Ready with false: the other end is gone.
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

    /// Takes what has come. `awaited` are the ranks whose calls are.
    fn proceed(mut self, proof: &GroupProof, awaited: &[usize]) -> Result<Step<'a>, Failure> {
        let is_whole = match self.receive() {
            Poll::Pending => return Ok(Step::Next(self)),
            Poll::Ready(is_whole) => is_whole,
        };
        let message = &self.bytes[..self.filled];
        match self.expected {
            Expected::Challenge(called) | Expected::Answer(called, _) if !is_whole => {
                Ok(Step::SentAway(called))
            }
            Expected::Challenge(called) => {
                let challenge: Challenge = pod_read_unaligned(message);
                if challenge.magic != MAGIC {
                    return Err(called.is_a_stranger());
                }
                let (hello, answer) = proof.hello(called.rank as u64, &challenge);
                if !say(&self.socket, bytes_of(&hello)) {
                    return Ok(Step::SentAway(called));
                }
                Ok(Step::Next(Self {
                    since: self.since,
                    ..Self::new(self.socket, Expected::Answer(called, answer))
                }))
            }
            Expected::Answer(called, answer) => {
                let theirs: [u8; ANSWER_BYTES] = pod_read_unaligned(message);
                if answer != Hash::from_bytes(theirs) {
                    return Err(called.is_a_stranger());
                }
                Ok(Step::Proven(called.rank, self.socket))
            }
            Expected::Hello(_) if !is_whole => Ok(Step::Closed),
            Expected::Hello(nonce) => {
                let hello: Hello = pod_read_unaligned(message);
                let rank = usize::try_from(hello.rank)
                    .ok()
                    .filter(|rank| awaited.contains(rank));
                let answer = proof.answer(&hello, nonce);
                match rank.zip(answer) {
                    Some((rank, answer)) if say(&self.socket, answer.as_bytes()) => {
                        Ok(Step::Proven(rank, self.socket))
                    }
                    _ => Ok(Step::Closed),
                }
            }
        }
    }
}

/// Sends a message of an introduction; false if the other end is gone. It fits into the empty buffer of a new connection,
/// so this does not wait.
fn say(socket: &OwnedFd, message: &[u8]) -> bool {
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    send(socket.as_raw_fd(), message, flags) == Ok(message.len())
}

/// Connects this rank with all others of the group `name`, by rank: to the lower ones, and accepts the higher ones. All ranks
/// of the group do so, at each other's addresses.
pub(super) fn connect_group(
    listener: &Listener,
    info: &RankInfo,
    (name, topology): (&str, &Topology),
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
    let proof = GroupProof::new(info, name);
    let mut sockets = Introductions::new(listener, proof, &globals[me + 1..]).all(called, wait)?;
    let connections = globals.iter().enumerate().map(|(rank, &global)| {
        let socket = sockets.remove(&global);
        let connect = |socket| Connection::new(global, socket, is_here(rank));
        socket.map(connect).transpose()
    });
    connections.collect()
}

/// The introductions of one rank to all others of a group.
struct Introductions<'a> {
    listener: &'a Listener,
    proof: GroupProof,
    /// Global ranks that call this one.
    awaited: &'a [usize],
    pending: Vec<Introduction<'a>>,
    /// Those that were sent away, to be called again.
    recalled: Vec<Called<'a>>,
    proven: BTreeMap<usize, OwnedFd>,
}

impl<'a> Introductions<'a> {
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

    /// Calls these ranks, answers those that are awaited, and returns the connection to each, by global rank.
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
            // Also where something comes all the time.
            wait.check(|| missing.clone())?;
            self.sleep(wait)?;
            self.hear()?;
            self.accept()?;
            self.call_again(wait)?;
        }
    }

    fn call(&mut self, called: Called<'a>, wait: &Wait) -> Result<(), Failure> {
        let socket = called.address.connect(called.rank, called.is_local, wait)?;
        self.pending
            .push(Introduction::new(socket, Expected::Challenge(called)));
        Ok(())
    }

    fn call_again(&mut self, wait: &Wait) -> Result<(), Failure> {
        if !self.recalled.is_empty() {
            std::thread::sleep(RECALL_PAUSE);
        }
        let recalled = std::mem::take(&mut self.recalled);
        for called in recalled {
            // It was there before: it is not the one that failed.
            self.call(called, wait).map_err(|failure| match failure {
                Failure::System { cause, .. } => called.is_lost(&cause),
                other => other,
            })?;
        }
        Ok(())
    }

    /// Until something comes, or for a moment.
    fn sleep(&self, wait: &Wait) -> Result<(), Failure> {
        let pending = self.pending.iter().map(|introduction| &introduction.socket);
        let sockets = self.listener.sockets().map(|(socket, _)| socket).chain(pending);
        let mut fds: Vec<_> = sockets
            .map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN))
            .collect();
        poll_once(&mut fds, wait.interval())?;
        Ok(())
    }

    fn hear(&mut self) -> Result<(), Failure> {
        for introduction in std::mem::take(&mut self.pending) {
            match introduction.proceed(&self.proof, self.awaited)? {
                // Its time is over only if it has said nothing by now.
                Step::Next(next) if next.is_of_caller() && next.since.elapsed() > UNPROVEN_BOUND => {}
                Step::Next(next) => self.pending.push(next),
                Step::Proven(rank, socket) => {
                    self.proven.entry(rank).or_insert(socket);
                }
                Step::SentAway(called) => self.recalled.push(called),
                Step::Closed => {}
            }
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<(), Failure> {
        for (listener, is_local) in self.listener.sockets() {
            for _ in 0..ACCEPTED_AT_ONCE {
                match next_socket(listener, is_local)? {
                    Accepted::None => break,
                    Accepted::Stranger => {}
                    Accepted::One(socket) => {
                        let callers = self.pending.iter().filter(|p| p.is_of_caller()).count();
                        if callers >= MAX_STRANGERS + self.awaited.len() {
                            self.send_oldest_away();
                        }
                        self.pending.extend(Introduction::with_caller(socket));
                    }
                    Accepted::NoRoom if self.send_oldest_away() => {}
                    Accepted::NoRoom => return Err(no_room()),
                }
            }
        }
        Ok(())
    }

    /// Makes room for one more; false if there is no caller without a proof.
    fn send_oldest_away(&mut self) -> bool {
        let oldest = self.pending.iter().position(Introduction::is_of_caller);
        oldest.map(|oldest| self.pending.remove(oldest)).is_some()
    }
}

fn no_room() -> Failure {
    Failure::System {
        what: "accepting a peer".into(),
        cause: "too many open files\n  hint: raise the limit with `ulimit -n`".into(),
    }
}

/// Takes an introduction that came over a real socket; true if it proves something. For `tests/fuzz`.
pub(super) fn hear_foreign(bytes: &[u8]) -> bool {
    let Ok((ours, mut theirs)) = std::os::unix::net::UnixStream::pair() else {
        return false;
    };
    let proof = GroupProof::new(&RankInfo::on_one_node(0, 2), "world");
    let socket = OwnedFd::from(ours);
    // More than fits is not read either.
    let _ = theirs
        .set_nonblocking(true)
        .and_then(|()| theirs.write_all(bytes));
    drop(theirs);
    let introduction = Introduction::new(socket, Expected::Hello([0; 32]));
    matches!(introduction.proceed(&proof, &[1]), Ok(Step::Proven(..)))
}

#[cfg(test)]
#[path = "introduction_tests.rs"]
mod tests;
