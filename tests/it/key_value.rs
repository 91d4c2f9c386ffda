//! The key-value store as workers use it: behind the control socket of a real launcher, and within one process. Both
//! keep the same contract.

use std::time::{Duration, Instant};

use ddp_worker::collective::{Failure, RankInfo, connect};
use ddp_worker::session::{KeyValue, MemoryStore, Session, StoreError};

use crate::harness::{Daemon, PATIENCE, Proxy, launch};

fn session() -> Session {
    Session::from_env().expect("started by a launcher")
}

fn rank_of(session: &Session) -> usize {
    session.env().rank.0 as usize
}

fn connect_all(session: &Session, timeout: Duration) -> Result<(), Failure> {
    let place = RankInfo::on_one_node(rank_of(session), session.env().world_size.get() as usize);
    connect(&place, session.store().as_ref(), &session.cancel(), timeout).map(drop)
}

/// What every store keeps to.
fn keeps_its_contract(store: &dyn KeyValue) {
    let soon = || Instant::now() + PATIENCE;
    // Not there: said when the deadline has come, not before. The odd microseconds are no whole milliseconds.
    for slice in 0..100 {
        let deadline = Instant::now() + Duration::from_micros(2_990 + slice * 7);
        assert_eq!(store.get("never", deadline), Ok(None));
        assert!(Instant::now() >= deadline, "told before the deadline");
    }
    let error = store.wait_for("never", Instant::now()).unwrap_err();
    assert!(
        matches!(&error, StoreError::NotWritten { key, .. } if key == "never"),
        "{error}"
    );
    // There: found also where the deadline has passed.
    let past = Instant::now();
    store.put("there", b"value", past).unwrap();
    store.put("empty", b"", soon()).unwrap();
    assert_eq!(store.get("there", past), Ok(Some(b"value".to_vec())));
    assert_eq!(store.get("empty", past), Ok(Some(Vec::new())));
    assert_eq!(store.wait_for("there", soon()), Ok(b"value".to_vec()));
    // Write-once.
    assert_eq!(store.put("there", b"value", soon()), Ok(()));
    assert_eq!(
        store.put("there", b"another", soon()),
        Err(StoreError::Conflict("there".into()))
    );
    // A look while another rank waits for the same key.
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || store.wait_for("awaited", soon()));
        for _ in 0..20 {
            assert_eq!(store.get("awaited", Instant::now()), Ok(None));
        }
        store.put("awaited", b"1", soon()).unwrap();
        assert_eq!(store.get("awaited", past), Ok(Some(b"1".to_vec())));
        assert_eq!(reader.join().unwrap(), Ok(b"1".to_vec()));
    });
    // More callers at once than a connection has calls, the readers first.
    std::thread::scope(|scope| {
        let key = |n: usize| format!("many/{n}");
        let readers: Vec<_> = (0..100)
            .map(|n| scope.spawn(move || store.wait_for(&key(n % 25), Instant::now() + PATIENCE / 2)))
            .collect();
        // The readers of all places would wait for ever if these were refused, or had to wait for them.
        for n in 0..25 {
            store.put(&key(n), &[n as u8], soon()).unwrap();
        }
        for (n, reader) in readers.into_iter().enumerate() {
            assert_eq!(reader.join().unwrap(), Ok(vec![n as u8 % 25]));
        }
    });
}

#[test]
fn a_store_in_memory_keeps_the_contract() {
    keeps_its_contract(&MemoryStore::default());
}

pub(crate) fn keeps_the_contract() {
    let session = session();
    keeps_its_contract(session.store().as_ref());
    println!("all is kept");
    session.shutdown();
}

#[test]
fn the_store_behind_the_control_socket_keeps_the_contract() {
    launch()
        .role("keeps_the_contract")
        .nproc(1)
        .run()
        .expect_exit(0)
        .expect_stdout("all is kept");
}

/// Connects while the daemon is out of reach.
pub(crate) fn meets_an_outage() {
    let session = session();
    println!("rank {} is at work", rank_of(&session));
    let away = loop {
        match session.store().get("never", Instant::now()) {
            Ok(value) => assert_eq!(value, None),
            Err(error) => break error,
        }
    };
    // Not known is another thing than not written.
    assert!(matches!(away, StoreError::Unavailable(_)), "{away}");
    println!("rank {} has noticed: {away}", rank_of(&session));
    connect_all(&session, PATIENCE).expect("the daemon comes back");
    session.shutdown();
}

#[test]
fn ranks_find_each_other_when_the_daemon_is_back() {
    let daemon = Daemon::start();
    let wire = Proxy::to(&daemon.endpoint);
    let mut node = launch()
        .role("meets_an_outage")
        .node_of(1, &wire.endpoint(), "outage")
        .flag("--rdzv-conf", "is_host=false")
        .nproc(2)
        .start();
    for rank in 0..2 {
        node.wait_for(&format!("rank {rank} is at work"));
    }
    wire.hold();
    for rank in 0..2 {
        node.wait_for(&format!("rank {rank} has noticed: "));
    }
    wire.release();
    node.finish().expect_exit(0);
    daemon.stop().expect_exit(0);
}
