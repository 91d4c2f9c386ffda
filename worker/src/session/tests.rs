//! A session against an agent played by the test.

mod agent;

use std::io::{BufRead as _, Write as _};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use ddp_proto::control::{KvRefusal, MAX_LINE_BYTES, Phase, Progress, Sizes, ToAgent, ToWorker};
use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{Generation, GlobalRank};

use self::agent::{FakeAgent, assignment, times};
use super::link::Times;
use super::{Cancel, MemoryStore, Session, SessionError, StoreError, Waiting, Wanted};

/// Far longer than anything here takes, so that only a real hang meets it.
const PATIENCE: Duration = Duration::from_mins(10);

fn over(generation: u64, cause: &str) -> ToWorker {
    ToWorker::GenerationOver {
        generation: Generation(generation),
        cause: cause.into(),
    }
}

fn await_cancel(cancel: &Cancel) -> String {
    let (sender, receiver) = mpsc::channel();
    cancel.on_cancel(move || {
        let _ = sender.send(());
    });
    receiver.recv_timeout(PATIENCE).expect("cancelled");
    cancel.cause().unwrap().to_owned()
}

/// Waits for rank 3 for ever.
struct WaitsForRank3;

impl Waiting for WaitsForRank3 {
    fn waiting(&self) -> Option<Wanted> {
        Some(Wanted {
            what: "barrier #2 of `world`".into(),
            waited: Duration::from_secs(5),
            ranks: vec![3],
        })
    }
}

fn waits_for_rank_3() -> Arc<dyn Waiting> {
    Arc::new(WaitsForRank3)
}

fn begin(env: &WorkerEnv, times: Times) -> Result<Session, SessionError> {
    let vars = env.to_vars();
    Session::from_vars_within(|n| vars.get(n).cloned(), times)
}

fn error_of(result: Result<Session, SessionError>) -> String {
    result.err().expect("the session must not begin").to_string()
}

#[test]
fn without_a_launcher_the_worker_is_alone() {
    let session = Session::from_vars(|_| None).unwrap();
    let alone = WorkerEnv {
        run_id: session.env().run_id.clone(),
        ..WorkerEnv::single()
    };
    assert_eq!(session.env(), &alone);
    let another = Session::from_vars(|_| None).unwrap();
    assert_ne!(another.env().run_id, alone.run_id, "another run");
    session.store().put("k", b"v", Instant::now()).unwrap();
    let value = session.store().get("k", Instant::now()).unwrap();
    assert_eq!(value.as_deref(), Some(&b"v"[..]));
    assert_eq!(session.cancel().cause(), None);
    session.heartbeat(1, Phase::Training, None);
    session.fail("no agent listens", None, false);
    session.shutdown();
}

#[test]
fn the_assignment_is_the_truth() {
    let agent = FakeAgent::listen();
    let mut assigned = agent.env();
    assigned.rank = GlobalRank(2);
    assigned.generation = Generation(9);
    let (session, _peer) = agent.session_assigned(&assigned);
    assert_eq!(session.env(), &assigned);
    assert_eq!(session.node_addr(), "10.0.0.1");
}

#[test]
fn key_value_calls_are_matched_by_number() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    std::thread::scope(|scope| {
        let get = |key: &'static str| {
            let store = session.store();
            scope.spawn(move || store.wait_for(key, Instant::now() + PATIENCE).unwrap())
        };
        let (a, b) = (get("a"), get("b"));
        let mut calls = vec![peer.receive_call(), peer.receive_call()];
        calls.reverse();
        for message in calls {
            let ToAgent::KvGet { call, key, .. } = message else {
                panic!("{message:?}")
            };
            let value = if key == "a" { "AAE=" } else { "Yg==" };
            peer.answer(call, Ok(Some(value)));
        }
        assert_eq!(a.join().unwrap(), [0, 1]);
        assert_eq!(b.join().unwrap(), b"b");
    });
}

#[test]
fn a_refusal_is_an_error_of_its_kind() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    let mut answered = |refusal, words| {
        std::thread::scope(|scope| {
            let store = session.store();
            let put = scope.spawn(move || store.put("c", &[0, 1], Instant::now() + PATIENCE));
            let message = peer.receive_call();
            let ToAgent::KvPut { call, key, value } = message else {
                panic!("{message:?}")
            };
            assert_eq!((key.as_str(), value.as_str()), ("c", "AAE="));
            peer.answer(call, Err((refusal, words)));
            put.join().unwrap().unwrap_err()
        })
    };
    assert_eq!(
        answered(KvRefusal::Other, "the store is full").to_string(),
        "key-value store: put of key `c`: the store is full"
    );
    assert_eq!(
        answered(KvRefusal::Conflict, "another value"),
        StoreError::Conflict("c".into())
    );
    assert_eq!(
        answered(KvRefusal::Unavailable, "no daemon"),
        StoreError::Unavailable("put of key `c`: no daemon".into())
    );
    assert_eq!(
        answered(KvRefusal::Superseded, "generation superseded: rank 2 left"),
        StoreError::Superseded("rank 2 left".into())
    );
}

#[test]
fn what_is_not_written_is_asked_for_until_the_deadline_and_looked_for_after_it() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    let mut ask = |deadline: Instant, refuse: usize| {
        std::thread::scope(|scope| {
            let store = session.store();
            let get = scope.spawn(move || store.get("d", deadline));
            let asked_ms: Vec<_> = (0..=refuse)
                .map(|refused| {
                    let message = peer.receive_call();
                    let ToAgent::KvGet { call, timeout_ms, .. } = message else {
                        panic!("{message:?}")
                    };
                    let not_yet = (refused < refuse).then_some((KvRefusal::NotWritten, "not yet"));
                    peer.answer(call, not_yet.map_or(Ok(Some("AAE=")), Err));
                    timeout_ms
                })
                .collect();
            (get.join().unwrap().unwrap(), asked_ms)
        })
    };
    // An agent whose own longest wait is over is asked again.
    let (value, asked_ms) = ask(Instant::now() + PATIENCE, 1);
    assert_eq!((value, asked_ms.len()), (Some(vec![0, 1]), 2));
    assert!(
        asked_ms
            .iter()
            .all(|ms| (1..=PATIENCE.as_millis() as u64).contains(ms)),
        "{asked_ms:?}"
    );
    // A deadline that has passed: the agent is asked all the same, once.
    assert_eq!(ask(Instant::now(), 0), (Some(vec![0, 1]), vec![0]));
}

#[test]
fn a_silent_agent_costs_a_call_its_deadline_and_a_moment_and_is_named() {
    let agent = FakeAgent::listen();
    let (session, _peer) = agent.session_within(Times {
        grace: Duration::from_millis(20),
        ..times()
    });
    let started = Instant::now();
    let error = session
        .store()
        .get("never", started + Duration::from_millis(30))
        .unwrap_err();
    assert!(started.elapsed() >= Duration::from_millis(50));
    let StoreError::Unavailable(words) = &error else {
        panic!("{error}");
    };
    assert!(
        words.starts_with("get of key `never`: the agent did not answer within 0."),
        "{words}"
    );
}

#[test]
fn generation_over_ends_a_blocked_get_with_the_cause() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    std::thread::scope(|scope| {
        let store = session.store();
        let get = scope.spawn(move || store.get("never", Instant::now() + PATIENCE));
        assert!(matches!(peer.receive_call(), ToAgent::KvGet { .. }));
        peer.say(&over(2, "an earlier life"));
        peer.say(&over(3, "rank 5 (node `b`) died of SIGKILL"));
        let error = get.join().unwrap().unwrap_err();
        assert_eq!(
            error,
            StoreError::Superseded("rank 5 (node `b`) died of SIGKILL".into())
        );
    });
    assert_eq!(
        session.cancel().cause(),
        Some("rank 5 (node `b`) died of SIGKILL")
    );
    assert!(matches!(
        session.store().put("k", b"", Instant::now()),
        Err(StoreError::Superseded(_))
    ));
}

#[test]
fn a_dead_agent_ends_every_wait() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    std::thread::scope(|scope| {
        let store = session.store();
        let get = scope.spawn(move || store.get("never", Instant::now() + PATIENCE));
        assert!(matches!(peer.receive_call(), ToAgent::KvGet { .. }));
        drop(peer);
        let error = get.join().unwrap().unwrap_err();
        assert!(matches!(error, StoreError::Superseded(_)), "{error}");
    });
    let cause = await_cancel(&session.cancel());
    assert!(cause.starts_with("the agent is gone"), "{cause}");
    session.fail("no agent listens", None, false);
    session.shutdown();
}

#[test]
fn an_endless_line_ends_the_connection() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    // The worker hangs up in the middle of it, so that the write may fail.
    let _ = peer.stream.write_all(&vec![b'x'; MAX_LINE_BYTES + 1]);
    let cause = await_cancel(&session.cancel());
    assert!(cause.contains("longer than 1048576 bytes"), "{cause}");
}

#[test]
fn messages_of_newer_agents_are_skipped() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    peer.say_raw(r#"{"type":"sing","song":"la"}"#);
    peer.say_raw(r#"{"type":"stop_at_step_boundary","cause":"SIGTERM","colour":"red"}"#);
    peer.say(&over(3, "the end"));
    assert_eq!(await_cancel(&session.cancel()), "the end");
    assert_eq!(session.stop_requested().as_deref(), Some("SIGTERM"));
}

#[test]
fn the_last_heartbeat_is_repeated() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    let progress = Progress {
        steps: 10,
        loss: 2.5,
        tokens_per_s: 1e5,
        seconds_left: 3.0,
        val_loss: None,
        val_step: None,
        lr: None,
        model_flops_per_s: None,
        mfu: None,
    };
    session.heartbeat(7, Phase::Training, Some(progress.clone()));
    let expected = ToAgent::Heartbeat {
        step: 7,
        phase: Phase::Training,
        quiet_ms: 0,
        progress: Some(progress.clone()),
        waits: Vec::new(),
        activity: String::new(),
        loss: None,
        waited_s: None,
    };
    while peer.receive() != expected {}
    for _ in 0..3 {
        assert!(matches!(
            peer.receive(),
            ToAgent::Heartbeat {
                step: 7,
                quiet_ms: 1..,
                ..
            }
        ));
    }
    // What JSON cannot say is left out, rather than the whole heartbeat.
    let unspeakable = Progress {
        loss: f64::NAN,
        ..progress
    };
    session.add_wait(Duration::from_millis(500));
    session.add_wait(Duration::from_millis(250));
    session.heartbeat(8, Phase::Training, Some(unspeakable));
    let expected = ToAgent::Heartbeat {
        step: 8,
        phase: Phase::Training,
        quiet_ms: 0,
        progress: None,
        waits: Vec::new(),
        activity: String::new(),
        loss: None,
        waited_s: Some(0.75),
    };
    while peer.receive() != expected {}
}

#[test]
fn a_heartbeat_says_what_is_waited_for() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    let waiting = waits_for_rank_3();
    session.cancel().listen_to(Arc::downgrade(&waiting));
    session.heartbeat(7, Phase::Training, None);
    let told = loop {
        if let ToAgent::Heartbeat { step: 7, waits, .. } = peer.receive()
            && !waits.is_empty()
        {
            break waits;
        }
    };
    assert_eq!(told.len(), 1, "{told:?}");
    insta::assert_snapshot!(told[0], @"barrier #2 of `world` has waited 5.0 s for rank 3");
}

#[test]
fn the_sizes_that_a_job_can_have_are_said_once() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    let sizes = Sizes {
        ranks_divide: Some(6),
        ranks_multiple_of: Some(2),
    };
    session.limit_sizes(sizes);
    assert_eq!(peer.receive_call(), ToAgent::Sizes(sizes));
}

#[test]
fn an_agent_that_asks_is_told_what_is_waited_for_and_where_the_threads_are() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    let waiting = waits_for_rank_3();
    session.cancel().listen_to(Arc::downgrade(&waiting));
    peer.say(&ToWorker::Describe);
    let ToAgent::State { text, .. } = peer.receive_call() else {
        panic!("an answer was expected");
    };
    assert!(
        text.starts_with("barrier #2 of `world` has waited 5.0 s for rank 3\n")
            && text.contains("(ddp-control-in)"),
        "{text}"
    );
}

#[test]
fn an_agent_that_does_not_read_blocks_nobody() {
    let agent = FakeAgent::listen();
    let (session, peer) = agent.session_within(Times {
        grace: Duration::from_millis(1),
        ..times()
    });
    for step in 0..200_000 {
        session.heartbeat(step, Phase::Training, None);
    }
    // More than the socket's buffer holds, and than may be under way: later calls are refused at their deadline.
    let key = "k".repeat(100 << 10);
    let refused = (0..200).any(|_| {
        let error = session
            .store()
            .get(&key, Instant::now() + Duration::from_millis(1))
            .unwrap_err();
        error.to_string().contains("did not answer earlier calls")
    });
    assert!(refused, "the queue has no bound");
    session.shutdown();
    drop(peer);
}

#[test]
fn a_failure_is_delivered_before_the_socket_closes() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    session.fail("loss is NaN\nat step 3", Some("lower the learning rate"), false);
    session.shutdown();
    assert_eq!(
        peer.receive_call(),
        ToAgent::Failure {
            message: "loss is NaN at step 3".into(),
            hint: Some("lower the learning rate".into()),
            consequence: false,
        }
    );
    let mut rest = String::new();
    while peer.lines.read_line(&mut rest).unwrap() != 0 {}
}

#[test]
fn a_rank_that_lost_another_reports_what_the_agent_knows_of_it() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    let verdict = std::thread::scope(|scope| {
        let verdict = scope.spawn(|| session.verdict());
        peer.say(&ToWorker::GenerationOver {
            generation: Generation(3),
            cause: "rank 0 died of SIGKILL".into(),
        });
        verdict.join().unwrap()
    });
    assert_eq!(verdict.as_deref(), Some("rank 0 died of SIGKILL"));
    session.report_peer_lost(3);
    session.fail("all-reduce 17 failed", None, true);
    session.shutdown();
    assert_eq!(peer.receive_call(), ToAgent::PeerLost { rank: 3 });
    assert!(matches!(
        peer.receive_call(),
        ToAgent::Failure {
            consequence: true,
            ..
        }
    ));
}

#[test]
fn a_program_without_an_agent_waits_for_no_verdict() {
    let single = Session::in_process(WorkerEnv::single(), Arc::new(MemoryStore::default()));
    assert_eq!(single.verdict(), None);
}

#[test]
fn a_worker_that_outlives_its_generation_gets_a_place_in_the_next_one() {
    let agent = FakeAgent::listen();
    let (session, _peer) = agent.session();
    assert!(!session.outlives());
    session.set_outlives(true);
    std::thread::scope(|scope| {
        let next = scope.spawn(|| session.park());
        let mut peer = agent.accept();
        let hello = peer.receive();
        assert!(
            matches!(
                hello,
                ToAgent::Hello {
                    generation: Generation(3),
                    outlives: true,
                    ..
                }
            ),
            "{hello:?}"
        );
        let mut env = agent.env();
        env.generation = Generation(4);
        peer.say(&assignment(&env));
        let next = next.join().unwrap().unwrap();
        assert_eq!(next.env().generation, Generation(4));
        assert!(next.outlives());
    });
}

#[test]
fn leaving_is_not_a_lost_agent() {
    let agent = FakeAgent::listen();
    let (session, _peer) = agent.session();
    let cancel = session.cancel();
    session.shutdown();
    assert_eq!(cancel.cause(), None);
}

#[test]
fn messages_say_what_is_missing() {
    let agent = FakeAgent::listen();
    let mut env = agent.env();
    env.control = None;
    insta::assert_snapshot!(error_of(begin(&env, times())), @r"
    `WORLD_SIZE` is 4, but `DDP_CONTROL` is not set: the ranks cannot find each other
      hint: start the program with `ddp-run --nproc-per-node 4`; other launchers have no control socket
    ");
    env.control = Some("@ddp-no-agent-listens-here".into());
    insta::assert_snapshot!(error_of(begin(&env, times())), @r"
    cannot connect to the agent at `@ddp-no-agent-listens-here`: Connection refused
      hint: `DDP_CONTROL` is valid only for workers of the `ddp-run` that set it
    ");
    let only_rank = Session::from_vars(|n| (n == "RANK").then(|| "0".into()));
    assert!(error_of(only_rank).contains("is not set"));
}

#[test]
fn an_agent_that_does_not_answer_is_an_error_at_the_deadline() {
    let agent = FakeAgent::listen();
    let short = Times {
        handshake: Duration::from_millis(50),
        ..times()
    };
    let error = error_of(begin(&agent.env(), short));
    assert!(
        error.ends_with("sent no assignment: it did not answer in time"),
        "{error}"
    );
}

#[test]
fn a_generation_that_ended_before_the_assignment_is_named() {
    let agent = FakeAgent::listen();
    let vars = agent.env().to_vars();
    std::thread::scope(|scope| {
        let session = scope.spawn(move || Session::from_vars_within(|n| vars.get(n).cloned(), times()));
        let mut peer = agent.accept();
        peer.say(&over(3, "rank 0 left"));
        let error = error_of(session.join().unwrap());
        assert_eq!(
            error,
            "the launcher stopped the workers before this one had started: rank 0 left"
        );
    });
}
