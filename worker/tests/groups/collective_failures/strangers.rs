//! What a program that is no rank can do to ranks that look for each other over TCP: nothing.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use ddp_proto::trust::data_key::DataKey;
use ddp_worker::collective::{Communicator, Executor, Failure, RankInfo, ReduceOp, Transport, connect};
use ddp_worker::session::{Entries, KeyValue, MemoryStore, StoreError};

use crate::collective_world::{PATIENCE, Rank, World, done, launch, numbers, read};

/// Length of what the rank that listens says first, and of what the other answers.
const CHALLENGE_BYTES: usize = 40;
const HELLO_BYTES: usize = 88;
const ANSWER_BYTES: usize = 32;

/// The store, as a rank sees it that was told another address of rank 0.
struct Elsewhere<'a> {
    store: &'a MemoryStore,
    address: SocketAddr,
}

impl KeyValue for Elsewhere<'_> {
    fn put(&self, key: &str, value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        self.store.put(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.get(key, deadline)
    }

    fn gather(&self, prefix: &str, count: usize, deadline: Instant) -> Result<Option<Entries>, StoreError> {
        let mut found = self.store.gather(prefix, count, deadline)?;
        if let Some(bytes) = found
            .as_mut()
            .and_then(|found| found.get_mut("collective/rank/0"))
        {
            let mut card: serde_json::Value = serde_json::from_slice(bytes).unwrap();
            card["tcp"] = self.address.to_string().into();
            *bytes = serde_json::to_vec(&card).unwrap();
        }
        Ok(found)
    }
}

/// Where rank 0 listens for other nodes.
fn address(world: &World) -> SocketAddr {
    let deadline = Instant::now() + PATIENCE;
    let card = world.store.wait_for("collective/rank/0", deadline).unwrap();
    let card: serde_json::Value = serde_json::from_slice(&card).unwrap();
    let mut keys: Vec<&String> = card.as_object().unwrap().keys().collect();
    keys.sort();
    assert_eq!(
        keys,
        ["local", "node", "tcp", "unix"],
        "the store has addresses only"
    );
    card["tcp"].as_str().unwrap().parse().unwrap()
}

fn call(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Nothing more came before the connection was closed.
fn assert_closed(mut stream: TcpStream, who: &str) {
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert_eq!(rest.len(), 0, "{who} is told something");
}

/// The two ranks work together as if nothing had happened.
fn assert_works(world: &World, transports: [Box<dyn Transport>; 2]) {
    std::thread::scope(|scope| {
        for transport in transports {
            scope.spawn(move || {
                let comm = Communicator::new("world", transport, Executor::Inline, PATIENCE, &world.cancel);
                let rank = Rank::new(comm);
                let arena = rank.arena(false, &numbers(rank.rank(), 1000));
                done(&rank.comm.all_reduce(&arena.whole(), ReduceOp::Sum, launch()));
                let sums = numbers(0, 1000)
                    .into_iter()
                    .zip(numbers(1, 1000))
                    .map(|(a, b)| a + b);
                let bits = |sum: &f32| sum.to_bits();
                let found: Vec<u32> = read::<f32>(&arena.whole()).iter().map(bits).collect();
                assert_eq!(found, sums.map(f32::to_bits).collect::<Vec<_>>());
            });
        }
    });
}

/// The store, as rank 1 sees it: it says where it listens, and learns of rank 0 only when it may.
struct Late<'a> {
    store: &'a MemoryStore,
    is_let_in: Mutex<bool>,
    changed: Condvar,
}

impl Late<'_> {
    fn let_in(&self) {
        *self.is_let_in.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl KeyValue for Late<'_> {
    fn put(&self, key: &str, value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        self.store.put(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.get(key, deadline)
    }

    fn gather(&self, prefix: &str, count: usize, deadline: Instant) -> Result<Option<Entries>, StoreError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let is_let_in = self.is_let_in.lock().unwrap();
        let (is_let_in, _) = self
            .changed
            .wait_timeout_while(is_let_in, left, |is| !*is)
            .unwrap();
        if !*is_let_in {
            return Ok(None);
        }
        drop(is_let_in);
        self.store.gather(prefix, count, deadline)
    }
}

/// Rank 0 listens and waits for rank 1, while `strange` is done to its address; then rank 1 comes.
fn while_rank_0_waits(strange: impl FnOnce(&World, SocketAddr)) {
    let world = World::of(&[1, 1]);
    let places = world.places();
    let late = Late {
        store: &world.store,
        is_let_in: Mutex::new(false),
        changed: Condvar::new(),
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| world.connect(&places[0]).unwrap());
        let second = scope.spawn(|| connect(&places[1], &late, &world.cancel, PATIENCE).unwrap());
        strange(&world, address(&world));
        late.let_in();
        assert_works(&world, [first.join().unwrap(), second.join().unwrap()]);
    });
}

/// A recorded introduction of rank 1.
fn recorded_hello() -> [u8; HELLO_BYTES] {
    let world = World::of(&[1, 1]);
    let places = world.places();
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let elsewhere = Elsewhere {
        store: &world.store,
        address: proxy.local_addr().unwrap(),
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| world.connect(&places[0]));
        let second = scope.spawn(|| connect(&places[1], &elsewhere, &world.cancel, PATIENCE));
        let (mut caller, _) = proxy.accept().unwrap();
        let mut listener = call(address(&world));
        let mut challenge = [0; CHALLENGE_BYTES];
        listener.read_exact(&mut challenge).unwrap();
        caller.write_all(&challenge).unwrap();
        let mut hello = [0; HELLO_BYTES];
        caller.read_exact(&mut hello).unwrap();
        listener.write_all(&hello).unwrap();
        let mut answer = [0; ANSWER_BYTES];
        listener.read_exact(&mut answer).unwrap();
        world.cancel.cancel("recorded");
        drop((first.join().unwrap().err(), second.join().unwrap().err()));
        hello
    })
}

#[test]
fn a_recorded_introduction_opens_nothing() {
    let hello = recorded_hello();
    while_rank_0_waits(|_, address| {
        let mut stranger = call(address);
        let mut challenge = [0; CHALLENGE_BYTES];
        stranger.read_exact(&mut challenge).unwrap();
        stranger.write_all(&hello).unwrap();
        assert_closed(stranger, "who replays");
        // In pieces, and not all of it.
        let mut stranger = call(address);
        stranger.read_exact(&mut challenge).unwrap();
        stranger.write_all(&hello[..40]).unwrap();
        stranger.write_all(&hello[40..80]).unwrap();
        stranger.shutdown(std::net::Shutdown::Write).unwrap();
        assert_closed(stranger, "who stops in between");
    });
}

#[test]
fn a_rank_with_another_key_is_no_rank() {
    while_rank_0_waits(|world, _| {
        let stranger = RankInfo {
            data_key: Some(DataKey::new([8; 32])),
            ..world.places()[1].clone()
        };
        // It does not say who it is to the store: that it could not, as it is no member.
        let store = MemoryStore::default();
        let now = Instant::now();
        let card = world.store.wait_for("collective/rank/0", now + PATIENCE).unwrap();
        store.put("collective/rank/0", &card, now).unwrap();
        let error = connect(&stranger, &store, &world.cancel, Duration::from_millis(500)).err();
        let Some(Failure::TimedOut { waiting_for, .. }) = error else {
            panic!("{error:?}");
        };
        assert_eq!(waiting_for, [0]);
    });
}

#[test]
fn a_proof_that_is_sent_back_is_none() {
    let world = World::of(&[1, 1]);
    let fake = TcpListener::bind("127.0.0.1:0").unwrap();
    let elsewhere = Elsewhere {
        store: &world.store,
        address: fake.local_addr().unwrap(),
    };
    let card = serde_json::json!({"node": 0, "local": 0, "unix": "", "tcp": "127.0.0.1:1"});
    let card = serde_json::to_vec(&card).unwrap();
    world
        .store
        .put("collective/rank/0", &card, Instant::now())
        .unwrap();
    let error = std::thread::scope(|scope| {
        let caller = scope.spawn(|| connect(&world.places()[1], &elsewhere, &world.cancel, PATIENCE).err());
        let (mut stream, _) = fake.accept().unwrap();
        let mut challenge = 0x6464_7072_756e_0002_u64.to_le_bytes().to_vec();
        challenge.extend([3; 32]);
        stream.write_all(&challenge).unwrap();
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&hello[HELLO_BYTES - ANSWER_BYTES..]).unwrap();
        caller.join().unwrap().unwrap().to_string()
    });
    let address = elsewhere.address;
    assert!(
        error.starts_with(&format!("cannot reach rank 0 at `{address}`: what answers there")),
        "{error}"
    );
}

#[test]
fn three_hundred_silent_callers_keep_nobody_out() {
    let silent: Mutex<Vec<TcpStream>> = Mutex::default();
    while_rank_0_waits(|_, address| {
        let mut silent = silent.lock().unwrap();
        silent.extend((0..300).map(|_| call(address)));
    });
}

/// One that is let in late: the listener does not wait for it for ever.
#[test]
fn a_silent_caller_is_sent_away() {
    while_rank_0_waits(|_, address| {
        let mut silent = call(address);
        let mut challenge = [0; CHALLENGE_BYTES];
        silent.read_exact(&mut challenge).unwrap();
        assert_closed(silent, "who is silent");
    });
}

#[test]
fn a_flood_of_callers_does_not_outlast_the_deadline() {
    let world = World::of(&[1, 1]);
    // Rank 1 is known, and does not come.
    let card = serde_json::json!({"node": 1, "local": 0, "unix": "", "tcp": "127.0.0.2:1"});
    let card = serde_json::to_vec(&card).unwrap();
    world
        .store
        .put("collective/rank/1", &card, Instant::now())
        .unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let place = &world.places()[0];
            let failure = connect(place, &world.store, &world.cancel, Duration::from_secs(1)).err();
            is_over.store(true, Ordering::Relaxed);
            failure
        });
        let address = address(&world);
        let deadline = Instant::now() + PATIENCE;
        while !is_over.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "rank 0 waits beyond its deadline");
            // What comes all the time: rank 0 always has something to read.
            let _ = TcpStream::connect(address).and_then(|mut stream| stream.write_all(b"x"));
        }
        let failure = first.join().unwrap();
        let Some(Failure::TimedOut { waiting_for, .. }) = failure else {
            panic!("{failure:?}");
        };
        assert_eq!(waiting_for, [1]);
    });
}

#[test]
fn without_a_key_no_rank_of_another_node_is_let_in() {
    let world = World::of(&[1, 1]);
    let place = RankInfo {
        data_key: None,
        ..world.places()[0].clone()
    };
    let error = world.connect(&place).err().unwrap().to_string();
    assert!(
        error.starts_with("the assignment has no key for the connections between nodes\n  hint: "),
        "{error}"
    );
    let published = world.store.get("collective/rank/0", Instant::now()).unwrap();
    assert!(published.is_none(), "it does not listen");
}
