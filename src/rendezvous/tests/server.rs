//! The daemon over real loopback gRPC, spoken to through the typed client.

use ddp_proto::client::{Access, AgentIdentity, AgentStream, Client, ClientError, KvScope, open_channel};
use ddp_proto::ids::{Generation, NodeId};
use ddp_proto::rendezvous::CloseRequest;
use ddp_proto::rendezvous::rendezvous_client::RendezvousClient;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt as _;
use tonic::transport::Channel;

use super::super::service::{Actor, Request};
use super::super::{Callers, Ledger, Listener, Monitoring, ServeError, Transport, serve};
use super::*;

/// Far more than anything here takes, even on a loaded machine.
const PATIENCE: Duration = Duration::from_mins(10);

struct Daemon {
    endpoint: String,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
}

impl Daemon {
    async fn start(config: Config) -> Self {
        Self::with(config, None).await
    }

    async fn with(config: Config, ledger: Option<Ledger>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(serve(
            Listener::Tcp(listener, Transport::Plain),
            config,
            ledger,
            Monitoring::default(),
            async {
                let _ = stopped.await;
            },
        ));
        Self { endpoint, stop, task }
    }

    async fn client(&self) -> Client {
        Client::connect(&self.endpoint, &Access::Open, Instant::now() + PATIENCE)
            .await
            .unwrap()
    }

    async fn agent(&self, node: &str) -> Agent {
        let identity = AgentIdentity {
            job_id: JOB.into(),
            incarnation: NodeId(node.into()),
        };
        let client = self.client().await;
        let stream = client
            .agent_stream(identity, &mut client.attempts(PATIENCE))
            .await;
        Agent::new(stream.unwrap())
    }

    async fn end(self) {
        let _ = self.stop.send(());
        timeout(PATIENCE, self.task)
            .await
            .expect("the daemon ends")
            .unwrap()
            .unwrap();
    }
}

/// A node's stream, and its assignment.
struct Agent {
    stream: AgentStream,
    assigned: (u64, String),
}

impl Agent {
    fn new(stream: AgentStream) -> Self {
        let assigned = (0, String::new());
        Self { stream, assigned }
    }

    fn scope(&self) -> KvScope {
        KvScope {
            job_id: JOB.into(),
            generation: Generation(self.assigned.0),
            assignment_id: self.assigned.1.clone(),
            incarnation: NodeId("a".into()),
        }
    }
}

/// The next message that `wanted` takes; others are passed over.
async fn next<T>(agent: &mut Agent, wanted: impl Fn(Reply) -> Option<T>) -> (u64, T) {
    loop {
        let message = timeout(PATIENCE, agent.stream.next())
            .await
            .expect("a message comes")
            .unwrap();
        if let Some(found) = message.body.and_then(&wanted) {
            return (message.generation, found);
        }
    }
}

async fn next_assignment(agent: &mut Agent) -> (Generation, Assignment) {
    let (generation, assignment) = next(agent, |reply| match reply {
        Reply::Assignment(assignment) => Some(assignment),
        _ => None,
    })
    .await;
    agent.assigned = (generation, assignment.assignment_id.clone());
    (Generation(generation), assignment)
}

fn send(agent: &Agent, generation: u64, body: Body) {
    let (assigned, id) = &agent.assigned;
    let id = if generation == *assigned { id } else { "" };
    let sent = agent.stream.send(Generation(generation), id, body);
    sent.unwrap();
}

async fn leave(agent: Agent) {
    assert!(
        agent
            .stream
            .leave(Generation(0), Leave::default(), Instant::now() + PATIENCE)
            .await
    );
}

/// All keys with one prefix come in one answer.
async fn answers_all_at_once(client: &Client, scope: &KvScope) {
    client.kv_put(scope, "rank/0", b"a".to_vec()).await.unwrap();
    let gather = async || client.kv_gather(scope, "rank/", 2, PATIENCE).await;
    let put = async || client.kv_put(scope, "rank/1", b"b".to_vec()).await;
    let (gathered, written) = tokio::join!(gather(), put());
    written.unwrap();
    let gathered = gathered.unwrap().expect("both are there").entries;
    let gathered: Vec<_> = gathered.iter().map(|entry| entry.key.as_str()).collect();
    assert_eq!(gathered, ["rank/0", "rank/1"]);
    let few = client.kv_gather(scope, "rank/", 3, Duration::ZERO).await;
    assert_eq!(few.unwrap(), None);
}

#[tokio::test]
async fn two_agents_go_through_a_failure_to_success() {
    let daemon = Daemon::start(Config::default()).await;
    let (mut a, mut b) = (daemon.agent("a").await, daemon.agent("b").await);
    send(&a, 0, Body::Join(join("a", 2, 2)));
    send(&b, 0, Body::Join(join("b", 2, 2)));
    let (first, seen_by_a) = next_assignment(&mut a).await;
    let (_, seen_by_b) = next_assignment(&mut b).await;
    assert_eq!(first, Generation(1));
    assert_eq!((seen_by_a.node_rank, seen_by_b.node_rank), (0, 1));
    assert_eq!((seen_by_a.node_count, seen_by_b.node_count), (2, 2));
    let scope = a.scope();
    let (of_reader, of_blocked) = (scope.clone(), scope.clone());
    assert_eq!(seen_by_a.master_addr, "127.0.0.1", "both come from the loopback");

    let (at_a, at_b) = (daemon.client().await, daemon.client().await);
    let read = tokio::spawn(async move { at_b.kv_get(&of_reader, "id", PATIENCE).await });
    at_a.kv_put(&scope, "id", b"unique".to_vec()).await.unwrap();
    assert_eq!(read.await.unwrap().unwrap().as_deref(), Some(&b"unique"[..]));
    answers_all_at_once(&at_a, &scope).await;
    let blocked = at_a.clone();
    let blocked = tokio::spawn(async move { blocked.kv_get(&of_blocked, "never", PATIENCE).await });

    send(&b, 1, Body::WorkerExit(killed(2, 9)));
    for agent in [&mut a, &mut b] {
        let (_, over) = next(agent, |reply| match reply {
            Reply::GenerationOver(over) => Some(over),
            _ => None,
        })
        .await;
        assert_eq!(over.cause, "rank 2 (node `b`) died of SIGKILL");
        assert_eq!(over.first_failure.unwrap().stderr_tail, ["last words"]);
    }
    let words = "generation superseded: rank 2 (node `b`) died of SIGKILL".to_owned();
    let late = at_a.kv_get(&scope, "id", PATIENCE).await;
    assert_eq!(late, Err(ClientError::Superseded { cause: words.clone() }));
    match blocked.await.unwrap() {
        // The read may have come before or after the end; both return the cause.
        Err(ClientError::Superseded { cause }) => assert_eq!(cause, words),
        other => panic!("the blocked read ended with {other:?}"),
    }

    for (agent, name) in [(&a, "a"), (&b, "b")] {
        send(agent, 1, Body::NodeStopped(NodeStopped::default()));
        send(agent, 1, Body::Join(join(name, 2, 2)));
    }
    let (second, again) = next_assignment(&mut b).await;
    assert_eq!(
        (second, again.node_rank, again.restart_count),
        (Generation(2), 1, 1)
    );
    next_assignment(&mut a).await;
    send(&a, 2, Body::NodeSucceeded(NodeSucceeded {}));
    send(&b, 2, Body::NodeSucceeded(NodeSucceeded {}));
    for agent in [&mut a, &mut b] {
        let (_, over) = next(agent, |reply| match reply {
            Reply::JobOver(over) => Some(over),
            _ => None,
        })
        .await;
        assert_eq!(over.exit_code, 0);
    }
    leave(a).await;
    leave(b).await;
    daemon.end().await;
}

#[tokio::test]
async fn a_broken_stream_is_opened_again_and_keeps_its_place() {
    let daemon = Daemon::start(Config::default()).await;
    let mut a = daemon.agent("a").await;
    send(&a, 0, Body::Join(join("a", 1, 1)));
    let before = next_assignment(&mut a).await;
    drop(a);
    let mut a = daemon.agent("a").await;
    a.assigned = (1, before.1.assignment_id.clone());
    send(&a, 1, Body::Join(join("a", 1, 1)));
    assert_eq!(next_assignment(&mut a).await, before);
    leave(a).await;
    daemon.end().await;
}

#[tokio::test]
async fn the_daemon_waits_for_its_agents_within_a_bound() {
    let daemon = Daemon::start(Config {
        shutdown_wait: PATIENCE,
        ..Config::default()
    })
    .await;
    let mut a = daemon.agent("a").await;
    send(&a, 0, Body::Join(join("a", 1, 1)));
    next_assignment(&mut a).await;
    let _ = daemon.stop.send(());
    let mut task = daemon.task;
    send(&a, 1, Body::Join(join("a", 1, 1)));
    next_assignment(&mut a).await;
    assert!(!task.is_finished(), "an agent is left");
    leave(a).await;
    timeout(PATIENCE, &mut task)
        .await
        .expect("the daemon ends")
        .unwrap()
        .unwrap();

    let daemon = Daemon::start(Config {
        shutdown_wait: Duration::from_millis(10),
        ..Config::default()
    })
    .await;
    let mut a = daemon.agent("a").await;
    send(&a, 0, Body::Join(join("a", 1, 1)));
    next_assignment(&mut a).await;
    daemon.end().await;
    let gone = timeout(PATIENCE, a.stream.next())
        .await
        .expect("the stream ends")
        .unwrap_err();
    assert!(gone.is_broken(), "{gone:?}");
}

/// A slow `fsync` kept heartbeats waiting until leases ended.
#[tokio::test]
async fn a_slow_disk_delays_assignments_and_no_heartbeats() {
    let dir = tempfile::tempdir().unwrap();
    let (ledger, proceed) = Ledger::on_a_slow_disk(dir.path());
    let (actor, requests) = Actor::new(Config::default(), Some(ledger));
    let actor = tokio::spawn(actor.run());
    let (queue, mut messages) = tokio::sync::mpsc::channel(64);
    let message = |body| AgentMessage {
        job_id: JOB.into(),
        incarnation: "a".into(),
        body: Some(body),
        ..AgentMessage::default()
    };
    let event = |body| Event::Message {
        conn: ConnId(1),
        peer: Peer {
            remote: [127, 0, 0, 1].into(),
            local: [127, 0, 0, 1].into(),
        },
        message: Box::new(message(body)),
    };
    let joins = event(Body::Join(join("a", 1, 1)));
    requests.send(Request::Opened(ConnId(1), queue)).await.unwrap();
    let (answer, is_taken) = oneshot::channel();
    requests
        .send(Request::Join(ConnId(1), joins, answer))
        .await
        .unwrap();
    assert!(is_taken.await.unwrap());
    requests
        .send(Request::Event(event(Body::Heartbeat(Heartbeat::default()))))
        .await
        .unwrap();
    let (answer, status) = oneshot::channel();
    requests.send(Request::Status(JOB.into(), answer)).await.unwrap();
    let status = timeout(PATIENCE, status)
        .await
        .expect("the daemon is not stalled");
    assert_eq!(status.unwrap().unwrap().phase, "running");
    assert!(messages.try_recv().is_err(), "the record is not on disk");
    proceed.send(()).unwrap();
    let first = timeout(PATIENCE, messages.recv()).await.unwrap().unwrap();
    assert!(matches!(first.body, Some(Reply::Assignment(_))), "{first:?}");
    drop((requests, proceed));
    timeout(PATIENCE, actor).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn what_cannot_be_written_down_is_not_sent() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::with(Config::default(), Some(Ledger::on_a_full_disk(dir.path()))).await;
    let mut a = daemon.agent("a").await;
    send(&a, 0, Body::Join(join("a", 1, 1)));
    let gone = timeout(PATIENCE, a.stream.next())
        .await
        .expect("the stream ends")
        .unwrap_err();
    assert!(gone.is_broken(), "{gone:?}");
    let ended = timeout(PATIENCE, daemon.task)
        .await
        .expect("so does the daemon")
        .unwrap();
    assert!(matches!(ended, Err(ServeError::Ledger(_))), "{ended:?}");
}

#[tokio::test]
async fn a_ledger_that_fails_while_the_daemon_stops_is_an_error_too() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        shutdown_wait: PATIENCE,
        ..Config::default()
    };
    let daemon = Daemon::with(config, Some(Ledger::on_a_full_disk(dir.path()))).await;
    let (mut a, b) = (daemon.agent("a").await, daemon.agent("b").await);
    send(&a, 0, Body::Join(join("a", 2, 2)));
    next(&mut a, |reply| matches!(reply, Reply::Waiting(_)).then_some(())).await;
    let _ = daemon.stop.send(());
    send(&b, 0, Body::Join(join("b", 2, 2)));
    let ended = timeout(PATIENCE, daemon.task).await.expect("it ends").unwrap();
    assert!(matches!(ended, Err(ServeError::Ledger(_))), "{ended:?}");
}

#[tokio::test]
async fn a_stream_on_which_nobody_joins_is_ended() {
    let daemon = Daemon::start(Config {
        join_wait: Duration::from_millis(10),
        ..Config::default()
    })
    .await;
    let mut silent = daemon.agent("silent").await;
    let gone = timeout(PATIENCE, silent.stream.next())
        .await
        .expect("it ends")
        .unwrap_err();
    assert!(gone.is_broken(), "{gone:?}");
    daemon.end().await;
}

/// Ends with a connection on which these calls are made one after the other.
async fn ends_during(channel: Channel, mut call: impl AsyncFnMut()) {
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
    let everything = tonic_health::pb::HealthCheckRequest::default();
    // It lasts as long as the connection.
    let mut watched = health.watch(everything).await.unwrap().into_inner();
    let ended = async {
        loop {
            tokio::select! {
                biased;
                change = watched.message() => if !matches!(change, Ok(Some(_))) {
                    return;
                },
                () = call() => {}
            }
        }
    };
    timeout(Duration::from_secs(30), ended)
        .await
        .expect("the connection ends");
}

/// A call every 4 s kept a connection for ever.
#[tokio::test]
async fn calls_that_are_refused_keep_no_connection() {
    let daemon = Daemon::start(Config {
        callers: Callers::Anybody,
        join_wait: Duration::from_secs(2),
        ..Config::default()
    })
    .await;
    let channel = open_channel(&daemon.endpoint, &Access::Open).await.unwrap();
    let mut client = RendezvousClient::new(channel.clone());
    ends_during(channel, async || {
        client.status(StatusRequest::default()).await.unwrap_err();
    })
    .await;
    daemon.end().await;
}

/// The name of the message was enough.
#[tokio::test]
async fn joins_that_are_refused_keep_no_connection() {
    let daemon = Daemon::start(Config {
        callers: Callers::Anybody,
        join_wait: Duration::from_secs(2),
        ..Config::default()
    })
    .await;
    let channel = open_channel(&daemon.endpoint, &Access::Open).await.unwrap();
    let mut client = RendezvousClient::new(channel.clone());
    let invalid = AgentMessage {
        job_id: JOB.into(),
        incarnation: "a".into(),
        body: Some(Body::Join(Join {
            protocol: 99,
            ..join("a", 1, 1)
        })),
        ..AgentMessage::default()
    };
    ends_during(channel, async || {
        let messages = tokio_stream::once(invalid.clone()).chain(tokio_stream::pending());
        // An error means that the connection has ended.
        if let Ok(stream) = client.agent(messages).await
            && let Ok(Some(answer)) = stream.into_inner().message().await
        {
            assert!(matches!(answer.body, Some(Reply::Refused(_))), "{answer:?}");
        }
    })
    .await;
    daemon.end().await;
}

/// 4,160 requests of 768 KiB could be on their way on each connection of a stranger.
#[tokio::test]
async fn before_a_node_joins_calls_are_few_and_never_in_the_way_of_joining() {
    const CALLS: usize = 9;
    let daemon = Daemon::start(Config {
        callers: Callers::Anybody,
        join_wait: PATIENCE,
        ..Config::default()
    })
    .await;
    let mut a = daemon.agent("a").await;
    send(&a, 0, Body::Join(join("a", 1, 1)));
    next_assignment(&mut a).await;
    let assigned = a.assigned.clone();
    let scope = a.scope();
    let client = daemon.client().await;
    let mut reads = tokio::task::JoinSet::new();
    let read = |reads: &mut tokio::task::JoinSet<_>| {
        for _ in 0..CALLS {
            let (client, scope) = (client.clone(), scope.clone());
            reads.spawn(async move { client.kv_get(&scope, "late", PATIENCE).await });
        }
    };
    read(&mut reads);
    let refused = timeout(PATIENCE, reads.join_next()).await.unwrap();
    let refused = refused.unwrap().unwrap().unwrap_err();
    assert!(refused.is_broken(), "it is to be tried again: {refused:?}");
    // The others wait, and the node opens its stream on the same connection.
    drop(a);
    let identity = AgentIdentity {
        job_id: JOB.into(),
        incarnation: NodeId("a".into()),
    };
    let mut attempts = client.attempts(PATIENCE);
    let mut a = Agent::new(client.agent_stream(identity, &mut attempts).await.unwrap());
    a.assigned = assigned;
    send(&a, 1, Body::Join(join("a", 1, 1)));
    next_assignment(&mut a).await;
    read(&mut reads);
    client.kv_put(&scope, "late", b"written".to_vec()).await.unwrap();
    while let Some(read) = timeout(PATIENCE, reads.join_next()).await.unwrap() {
        assert_eq!(read.unwrap().unwrap().as_deref(), Some(&b"written"[..]));
    }
    leave(a).await;
    daemon.end().await;
}

#[tokio::test]
async fn status_and_health_answer() {
    let daemon = Daemon::start(Config::default()).await;
    let client = daemon.client().await;
    let error = client.status(JOB).await.unwrap_err().to_string();
    insta::assert_snapshot!(error.replace(&daemon.endpoint, "HOST:PORT"), @r"
    cannot get the status of job `job1` at the rendezvous daemon `HOST:PORT`: this daemon has no job `job1`
      hint: `ddp-rendezvous jobs` lists them
    ");
    let mut a = daemon.agent("a").await;
    send(&a, 0, Body::Join(join("a", 1, 1)));
    next_assignment(&mut a).await;
    let status = client.status(JOB).await.unwrap();
    assert_eq!(
        (status.phase.as_str(), status.generation, status.nodes.len()),
        ("running", 1, 1)
    );

    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", daemon.endpoint)).unwrap();
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.connect().await.unwrap());
    for service in ["", "ddp.rendezvous.v1.Rendezvous"] {
        let request = tonic_health::pb::HealthCheckRequest {
            service: service.into(),
        };
        let reply = health.check(request).await.unwrap().into_inner();
        assert_eq!(
            reply.status(),
            tonic_health::pb::health_check_response::ServingStatus::Serving
        );
    }
    leave(a).await;
    daemon.end().await;
}

#[tokio::test]
async fn a_daemon_that_does_not_know_its_callers_shows_lists_and_closes_no_job() {
    let daemon = Daemon::start(Config {
        callers: Callers::Anybody,
        ..Config::default()
    })
    .await;
    let client = daemon.client().await;
    let mut a = daemon.agent("a").await;
    send(&a, 0, Body::Join(join("a", 1, 1)));
    next_assignment(&mut a).await;
    for refused in [
        client.status(JOB).await.map(drop),
        client.status("no-job").await.map(drop),
        client.jobs().await.map(drop),
        client.close(CloseRequest::default()).await,
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.exit_code(), ddp_proto::exit::REFUSED, "{error}");
    }
    leave(a).await;
    daemon.end().await;
}

#[tokio::test]
async fn errors_of_the_store_keep_their_meaning() {
    let daemon = Daemon::start(Config::default()).await;
    let client = daemon.client().await;
    let mut a = daemon.agent("a").await;
    send(&a, 0, Body::Join(join("a", 1, 1)));
    let (_, assignment) = next_assignment(&mut a).await;
    let scope = a.scope();
    client.kv_put(&scope, "k", vec![1]).await.unwrap();
    for bound in [Duration::ZERO, Duration::from_millis(20)] {
        assert_eq!(client.kv_get(&scope, "never", bound).await, Ok(None));
    }
    let elsewhere = KvScope {
        job_id: "no-job".into(),
        ..scope.clone()
    };
    let another = KvScope {
        assignment_id: "another".into(),
        ..scope.clone()
    };
    let errors = [
        client.kv_put(&scope, "k", vec![2]).await.unwrap_err(),
        client.kv_put(&another, "k", vec![1]).await.unwrap_err(),
        client
            .kv_put(&scope, "big", vec![0; Config::default().kv.value_bytes + 1])
            .await
            .unwrap_err(),
        client.kv_get(&elsewhere, "k", PATIENCE).await.unwrap_err(),
    ];
    let words = errors
        .map(|e| e.to_string().replace(&daemon.endpoint, "HOST:PORT"))
        .map(|words| words.replace(&assignment.assignment_id[..8], "OWN"))
        .join("\n");
    insta::assert_snapshot!(words, @r"
    cannot store `k` at the rendezvous daemon `HOST:PORT`: key `k` is already written with a different value (1 bytes, now 1 bytes)
      hint: keys are write-once in a generation; use a different key for each value
    generation superseded: this rendezvous daemon has assigned generation 1 anew (assignment `OWN`, not `another`)
    cannot store `big` at the rendezvous daemon `HOST:PORT`: value of `big` has 524289 bytes, at most 524288 are allowed
    cannot read `k` at the rendezvous daemon `HOST:PORT`: this daemon has no job `no-job` with this node
    ");
    leave(a).await;
    daemon.end().await;
}

/// The whole answer was copied for each caller, read or not.
#[tokio::test]
async fn a_large_gather_comes_in_parts_and_arrives_whole() {
    let daemon = Daemon::start(Config::default()).await;
    let client = daemon.client().await;
    let mut a = daemon.agent("a").await;
    send(&a, 0, Body::Join(join("a", 1, 1)));
    let (generation, _) = next_assignment(&mut a).await;
    let scope = a.scope();
    let value = |n: u8| (0..100_003_u32).map(|at| at as u8 ^ n).collect::<Vec<u8>>();
    for n in 0..5 {
        let put = client.kv_put(&scope, &format!("big/{n}"), value(n)).await;
        put.unwrap();
    }
    let gathered = client.kv_gather(&scope, "big/", 5, PATIENCE).await.unwrap();
    let entries = gathered.expect("all are there").entries;
    assert_eq!(entries.len(), 5);
    for (n, entry) in (0..).zip(&entries) {
        assert_eq!(entry.key, format!("big/{n}"));
        assert!(entry.value == value(n), "entry {n}");
    }
    let none = client.kv_gather(&scope, "no/", 0, PATIENCE).await.unwrap();
    assert_eq!(none.expect("at once").entries, []);

    let channel = open_channel(&daemon.endpoint, &Access::Open).await.unwrap();
    let request = ddp_proto::rendezvous::KvGatherRequest {
        job_id: JOB.into(),
        generation: generation.0,
        prefix: "big/".into(),
        incarnation: "a".into(),
        assignment_id: scope.assignment_id.clone(),
        ..Default::default()
    };
    let parts = RendezvousClient::new(channel).kv_gather(request).await.unwrap();
    let (mut parts, mut sizes) = (parts.into_inner(), Vec::new());
    while let Some(part) = parts.message().await.unwrap() {
        sizes.push(part.entries.len());
    }
    let longest = sizes.iter().max().copied().unwrap_or(0);
    assert!(sizes.len() > 30 && longest <= 16 << 10, "{sizes:?}");
    leave(a).await;
    daemon.end().await;
}

#[tokio::test]
async fn an_agent_that_does_not_read_is_disconnected_and_harms_nobody() {
    let (actor, requests) = Actor::new(Config::default(), None);
    let actor = tokio::spawn(actor.run());
    let peer = Peer {
        remote: [127, 0, 0, 1].into(),
        local: [127, 0, 0, 1].into(),
    };
    let say = |conn, node: &str, body| {
        let message = AgentMessage {
            job_id: JOB.into(),
            incarnation: node.into(),
            generation: 0,
            assignment_id: String::new(),
            body: Some(body),
        };
        Request::Event(Event::Message {
            conn: ConnId(conn),
            peer,
            message: Box::new(message),
        })
    };
    let (slow, mut unread) = tokio::sync::mpsc::channel(1);
    let (fast, mut read) = tokio::sync::mpsc::channel(64);
    requests.send(Request::Opened(ConnId(1), slow)).await.unwrap();
    requests.send(Request::Opened(ConnId(2), fast)).await.unwrap();
    requests
        .send(say(1, "slow", Body::Join(join("slow", 3, 3))))
        .await
        .unwrap();
    requests
        .send(say(2, "fast", Body::Join(join("fast", 3, 3))))
        .await
        .unwrap();
    for _ in 0..10 {
        requests
            .send(say(1, "slow", Body::Join(join("slow", 3, 3))))
            .await
            .unwrap();
        requests
            .send(say(2, "fast", Body::Join(join("fast", 3, 3))))
            .await
            .unwrap();
    }
    for _ in 0..11 {
        timeout(PATIENCE, read.recv())
            .await
            .unwrap()
            .expect("the other agent is served");
    }
    assert!(timeout(PATIENCE, unread.recv()).await.unwrap().is_some());
    assert!(
        timeout(PATIENCE, unread.recv()).await.unwrap().is_none(),
        "its stream has ended"
    );
    drop(requests);
    timeout(PATIENCE, actor)
        .await
        .expect("the actor ends when all senders are gone")
        .unwrap()
        .unwrap();
}
