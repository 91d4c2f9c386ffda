//! A session against an agent played by the test.

mod agent;

use std::io::{BufRead as _, Write as _};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ddp_proto::control::{MAX_LINE_BYTES, Phase, Progress, ToAgent, ToWorker};
use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{Generation, GlobalRank};

use self::agent::{FakeAgent, times};
use super::link::Times;
use super::waits::tests::waits_for_rank_3;
use super::{Cancel, Session, SessionError, StoreError};

/// Far longer than anything here takes, so that only a real hang meets it.
const PATIENCE: Duration = Duration::from_mins(1);

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
    session.store().put("k", b"v").unwrap();
    assert_eq!(session.store().get("k", Instant::now()).unwrap(), b"v");
    assert_eq!(session.cancel().cause(), None);
    session.heartbeat(1, Phase::Training, None);
    session.fail("nobody listens", None);
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
    assert_eq!(session.node_addrs(), ["10.0.0.1", "10.0.0.2"]);
}

#[test]
fn key_value_calls_are_matched_by_number() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    std::thread::scope(|scope| {
        let get = |key: &'static str| {
            let store = session.store();
            scope.spawn(move || store.get(key, Instant::now() + PATIENCE).unwrap())
        };
        let (a, b) = (get("a"), get("b"));
        let mut calls = vec![peer.hear_call(), peer.hear_call()];
        calls.reverse();
        for message in calls {
            let ToAgent::KvGet { call, key, .. } = message else {
                panic!("{message:?}")
            };
            let value = if key == "a" { "AAE=" } else { "Yg==" };
            peer.say(&ToWorker::KvReply {
                call,
                value: Some(value.into()),
                error: None,
            });
        }
        assert_eq!(a.join().unwrap(), [0, 1]);
        assert_eq!(b.join().unwrap(), b"b");

        let store = session.store();
        let put = scope.spawn(move || store.put("c", &[0, 1]));
        let message = peer.hear_call();
        let ToAgent::KvPut { call, key, value } = message else {
            panic!("{message:?}")
        };
        assert_eq!((key.as_str(), value.as_str()), ("c", "AAE="));
        peer.say(&ToWorker::KvReply {
            call,
            value: None,
            error: Some("written before".into()),
        });
        let error = put.join().unwrap().unwrap_err();
        assert_eq!(
            error.to_string(),
            "key-value store: put of key `c`: written before"
        );

        let store = session.store();
        let get = scope.spawn(move || store.get("d", Instant::now() + PATIENCE));
        let message = peer.hear_call();
        let ToAgent::KvGet { call, timeout_ms, .. } = message else {
            panic!("{message:?}")
        };
        assert!((1..=60_000).contains(&timeout_ms), "{timeout_ms}");
        let error = Some("generation superseded: rank 2 left".into());
        peer.say(&ToWorker::KvReply {
            call,
            value: None,
            error,
        });
        assert_eq!(
            get.join().unwrap(),
            Err(StoreError::Superseded("rank 2 left".into()))
        );
    });
}

#[test]
fn a_silent_agent_costs_a_get_only_its_deadline() {
    let agent = FakeAgent::listen();
    let (session, _peer) = agent.session();
    let error = session
        .store()
        .get("never", Instant::now() + Duration::from_millis(50))
        .unwrap_err();
    assert!(
        matches!(error, StoreError::TimedOut { ref key, waited_ms } if key == "never" && waited_ms >= 50),
        "{error}"
    );
}

#[test]
fn generation_over_ends_a_blocked_get_with_the_cause() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    std::thread::scope(|scope| {
        let store = session.store();
        let get = scope.spawn(move || store.get("never", Instant::now() + PATIENCE));
        assert!(matches!(peer.hear_call(), ToAgent::KvGet { .. }));
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
        session.store().put("k", b""),
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
        assert!(matches!(peer.hear_call(), ToAgent::KvGet { .. }));
        drop(peer);
        let error = get.join().unwrap().unwrap_err();
        assert!(matches!(error, StoreError::Superseded(_)), "{error}");
    });
    let cause = await_cancel(&session.cancel());
    assert!(cause.starts_with("the agent is gone"), "{cause}");
    session.fail("nobody listens", None);
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
    };
    session.heartbeat(7, Phase::Training, Some(progress.clone()));
    let expected = ToAgent::Heartbeat {
        step: 7,
        phase: Phase::Training,
        quiet_ms: 0,
        progress: Some(progress.clone()),
    };
    while peer.hear() != expected {}
    for _ in 0..3 {
        assert!(matches!(
            peer.hear(),
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
    session.heartbeat(8, Phase::Training, Some(unspeakable));
    let expected = ToAgent::Heartbeat {
        step: 8,
        phase: Phase::Training,
        quiet_ms: 0,
        progress: None,
    };
    while peer.hear() != expected {}
}

#[test]
fn the_sizes_that_a_job_can_have_are_said_once() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    session.limit_sizes(6);
    assert_eq!(peer.hear_call(), ToAgent::Sizes { ranks_divide: 6 });
}

#[test]
fn an_agent_that_asks_is_told_what_is_waited_for_and_where_the_threads_are() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    let waiting = waits_for_rank_3();
    session.cancel().listen_to(std::sync::Arc::downgrade(&waiting));
    peer.say(&ToWorker::Describe);
    let ToAgent::State { text, waiting_for } = peer.hear_call() else {
        panic!("an answer was expected");
    };
    assert_eq!(waiting_for, [3]);
    assert!(
        text.starts_with("barrier #2 of `world` has waited 5.0 s for rank 3\n")
            && text.contains("(ddp-control-in)"),
        "{text}"
    );
}

#[test]
fn an_agent_that_does_not_read_blocks_nobody() {
    let agent = FakeAgent::listen();
    let (session, peer) = agent.session();
    for step in 0..200_000 {
        session.heartbeat(step, Phase::Training, None);
    }
    // More than the socket's buffer and the queue hold together: later calls are refused at their deadline.
    let key = "k".repeat(100 << 10);
    let refused = (0..200).any(|_| {
        let error = session
            .store()
            .get(&key, Instant::now() + Duration::from_millis(1))
            .unwrap_err();
        matches!(error, StoreError::Unavailable(_))
    });
    assert!(refused, "the queue has no bound");
    session.shutdown();
    drop(peer);
}

#[test]
fn a_failure_is_delivered_before_the_socket_closes() {
    let agent = FakeAgent::listen();
    let (session, mut peer) = agent.session();
    session.fail("loss is NaN\nat step 3", Some("lower the learning rate"));
    session.shutdown();
    assert_eq!(
        peer.hear_call(),
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
    session.fail_as_consequence("all-reduce 17 failed", None);
    session.shutdown();
    assert!(matches!(
        peer.hear_call(),
        ToAgent::Failure {
            consequence: true,
            ..
        }
    ));
}

#[test]
fn a_program_without_an_agent_waits_for_no_verdict() {
    assert_eq!(Session::single().verdict(), None);
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
    env.control = Some("@ddp-nobody-listens-here".into());
    insta::assert_snapshot!(error_of(begin(&env, times())), @r"
    cannot connect to the agent at `@ddp-nobody-listens-here`: Connection refused
      hint: `DDP_CONTROL` is only valid below the `ddp-run` that set it
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
            "the generation was over before this worker had begun: rank 0 left"
        );
    });
}
