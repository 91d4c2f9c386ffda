//! What people see of a daemon, and do to it: health, metrics, the status page's stream, `status`, `jobs`, `close`, and
//! JSON logs.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ddp_proto::control::{Phase, Progress};
use ddp_worker::session::Session;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{
    Finished, Launch, PATIENCE, Program, ReservedPort, Running, TinyJob, ddp_rendezvous, eventually, launch,
    temp_dir,
};

/// When this file exists, the workers end.
const DONE: &str = "DDP_TEST_DONE";
/// A step of most ranks, and of the one that is slow.
const STEP: Duration = Duration::from_millis(20);
const SLOW_STEP: Duration = Duration::from_millis(120);

/// A daemon that operators look at. HTTP is on another loopback address, to tell the two apart in its output.
struct Watched {
    running: Running,
    endpoint: String,
    http: String,
}

impl Watched {
    #[track_caller]
    fn start(flags: &[&str]) -> Self {
        Self::start_with(flags, |program| program)
    }

    #[track_caller]
    fn start_with(flags: &[&str], change: impl FnOnce(Program) -> Program) -> Self {
        Self::start_at(["127.0.0.1:0", "127.0.0.2:0"], flags, change)
    }

    #[track_caller]
    fn start_at([listen, http]: [&str; 2], flags: &[&str], change: impl FnOnce(Program) -> Program) -> Self {
        let args = ["serve", "--listen", listen, "--metrics-addr", http];
        let args = args.iter().chain(flags);
        let mut running = change(ddp_rendezvous().args(args)).start();
        let before_port = |address: &str| address.rsplit_once(':').expect("an address").0.to_owned();
        // The page's line first: it may name the address of `listen` too.
        let line = running.wait_for(&format!("http://{}:", before_port(http)));
        let endpoint = running.wait_for(&format!("{}:", before_port(listen)));
        let (_, http) = line.split_once("http://").expect("an address");
        let http = http.chars().take_while(|c| *c != '/').collect();
        Self {
            running,
            endpoint,
            http,
        }
    }

    #[track_caller]
    fn get(&self, path: &str) -> Answer {
        get(&self.http, path, "")
    }

    /// The sample with this name and labels.
    #[track_caller]
    fn sample(&self, name: &str) -> Option<f64> {
        let answer = self.get("/metrics");
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.sample(name)
    }

    #[track_caller]
    fn expect_sample(&self, name: &str, expected: f64) {
        let what = format!("`{name}` is {expected}");
        eventually(&what, || (self.sample(name) == Some(expected)).then_some(()));
    }

    /// Waits until a counter has grown to this.
    #[track_caller]
    fn expect_at_least(&self, name: &str, least: f64) {
        eventually(name, || self.sample(name).filter(|count| *count >= least));
    }

    /// `ddp-rendezvous COMMAND … --endpoint …`.
    fn operator(&self, words: &[&str]) -> Program {
        let address = ["--endpoint", self.endpoint.as_str()];
        let args = words.iter().chain(&address);
        ddp_rendezvous().args(args)
    }

    /// The same, as JSON.
    #[track_caller]
    fn ask(&self, words: &[&str]) -> Value {
        let finished = self.operator(&[words, &["--json"]].concat()).run();
        finished.expect_exit(0);
        serde_json::from_str(&finished.stdout().join("\n")).expect("JSON")
    }

    #[track_caller]
    fn stop(self) -> Finished {
        self.running.signal(Signal::SIGTERM);
        self.running.finish()
    }
}

#[derive(Debug)]
pub(crate) struct Answer {
    status: u16,
    head: String,
    pub(crate) body: String,
}

impl Answer {
    fn sample(&self, name: &str) -> Option<f64> {
        let line = self
            .body
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok())
    }
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).expect("a listener");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    stream
}

/// One request, and its answer to the end.
#[track_caller]
pub(crate) fn get(address: &str, path: &str, header: &str) -> Answer {
    let mut stream = connect(address);
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n{header}\r\n").expect("a server that reads");
    answer(stream)
}

/// All that comes before the connection ends.
fn answer(mut stream: TcpStream) -> Answer {
    let mut text = String::new();
    // A connection that is reset has ended too.
    let _ = stream.read_to_string(&mut text);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Answer {
        status: status.unwrap_or(0),
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

/// The first snapshot of the page's stream.
#[track_caller]
fn snapshot(address: &str, query: &str, header: &str) -> Value {
    snapshot_that(address, query, header, |_| true)
}

/// The first snapshot of one stream that is as `wanted`.
fn snapshot_that(address: &str, query: &str, header: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let mut stream = connect(address);
    write!(
        stream,
        "GET /events{query} HTTP/1.1\r\nHost: {address}\r\n{header}\r\n"
    )
    .expect("a server that reads");
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let read = stream.read(&mut chunk).expect("a snapshot in time");
        assert!(read > 0, "no snapshot: {}", String::from_utf8_lossy(&bytes));
        bytes.extend_from_slice(&chunk[..read]);
        let text = String::from_utf8_lossy(&bytes);
        // In the body's chunks, a line of its own.
        let last = text
            .rfind("\n\n")
            .and_then(|end| text[..end].rsplit_once("data: "));
        if let Some(view) = last.map(|(_, data)| serde_json::from_str(data).expect("a snapshot"))
            && wanted(&view)
        {
            return view;
        }
    }
}

/// A worker whose steps take as long as its rank says.
pub(crate) fn advances() {
    let done = PathBuf::from(std::env::var_os(DONE).expect("a path"));
    let session = Session::from_env().expect("started by a launcher");
    let rank = session.env().rank.0;
    let mut step = 0;
    while !done.exists() {
        let pause = if rank == 3 { SLOW_STEP } else { STEP };
        // Nobody writes this one.
        let _ = session.store().get("never", Instant::now() + pause);
        step += 1;
        let progress = (rank == 0).then(|| Progress {
            steps: 1000,
            loss: 4.0 / step as f64,
            tokens_per_s: 1.0,
            seconds_left: 1.0,
            val_loss: None,
            val_step: None,
            lr: None,
            model_flops_per_s: None,
            mfu: None,
        });
        session.heartbeat(step, Phase::Training, progress);
    }
    session.shutdown();
}

/// Two nodes of two workers that say how far they are.
fn advancing(daemon: &Watched, done: &Path, logs: &Path) -> [Running; 2] {
    let node = |name: &str| {
        launch()
            .role("advances")
            .node_of(2, &daemon.endpoint, "steps")
            .flag("--rdzv-conf", "is_host=false")
            .flag("--log-dir", logs.join(name))
            .nproc(2)
            .env(DONE, done)
            .start()
    };
    [node("a"), node("b")]
}

/// Two nodes of one worker each that run this script.
fn pair(daemon: &Watched, job: &str, change: impl Fn(Launch) -> Launch, script: &str) -> [Running; 2] {
    let node = || {
        let node = launch()
            .node_of(2, &daemon.endpoint, job)
            .flag("--rdzv-conf", "is_host=false,join_timeout=60");
        change(node).shell(script).start()
    };
    [node(), node()]
}

const UNTIL_DONE: &str = r#"until [ -e "$DONE" ]; do sleep 0.02; done"#;

#[test]
fn metrics_follow_a_job_whose_rank_is_killed() {
    let dir = temp_dir();
    let done = dir.path().join("done");
    let daemon = Watched::start(&["--lease", "1"]);
    for path in ["/livez", "/readyz"] {
        assert_eq!(daemon.get(path).status, 200, "{path}");
    }
    assert_eq!(daemon.sample("ddp_jobs{state=\"running\"}"), Some(0.0));
    let with = |node: Launch| node.flag("--max-restarts", "3").env("DONE", &done);
    let script = format!("[ $RANK.$TORCHELASTIC_RESTART_COUNT = 1.0 ] && kill -KILL $$; {UNTIL_DONE}");
    let nodes = pair(&daemon, "killed", with, &script);
    daemon.expect_sample("ddp_job_generation{job_id=\"killed\"}", 2.0);
    let answer = daemon.get("/metrics");
    for (name, expected) in [
        ("ddp_restarts_total{reason=\"worker_failed\"}", 1.0),
        ("ddp_restarts_total{reason=\"node_lost\"}", 0.0),
        ("ddp_jobs{state=\"running\"}", 1.0),
        ("ddp_nodes{state=\"connected\"}", 2.0),
        ("ddp_nodes{state=\"away\"}", 0.0),
        ("ddp_ranks", 2.0),
        ("ddp_streams", 2.0),
        ("ddp_ready", 1.0),
        ("ddp_rendezvous_round_seconds_count", 2.0),
        ("ddp_refusals_total{code=\"disagree\"}", 0.0),
    ] {
        assert_eq!(answer.sample(name), Some(expected), "{name} in\n{}", answer.body);
    }
    assert!(
        answer
            .head
            .contains("application/openmetrics-text; version=1.0.0"),
        "{}",
        answer.head
    );
    assert!(answer.body.ends_with("# EOF\n"), "{}", answer.body);
    let open = answer.sample("ddp_open_descriptors").expect("a number");
    assert!((8.0..200.0).contains(&open), "{open} descriptors");
    // Three in a second of lease.
    let beats = |answer: &Answer| {
        answer
            .sample("ddp_heartbeat_age_seconds_count")
            .expect("a number")
    };
    eventually("heartbeats are counted", || {
        (beats(&daemon.get("/metrics")) >= 4.0).then_some(())
    });
    // A stranger with another number of nodes is refused, and counted by the reason.
    let stranger = launch()
        .node_of(3, &daemon.endpoint, "killed")
        .flag("--rdzv-conf", "is_host=false")
        .shell("true")
        .run();
    stranger.expect_exit(76);
    daemon.expect_sample("ddp_refusals_total{code=\"disagree\"}", 1.0);
    std::fs::write(&done, "").expect("writable");
    for node in nodes {
        node.finish().expect_exit(0);
    }
    daemon.expect_sample("ddp_jobs_ended_total{result=\"success\"}", 1.0);
    assert_eq!(daemon.sample("ddp_nodes{state=\"connected\"}"), Some(0.0));
    daemon.stop().expect_exit(0);
}

#[test]
fn a_daemon_that_recovers_is_alive_but_not_ready() {
    let dir = temp_dir();
    let (state, done) = (dir.path().join("state"), dir.path().join("done"));
    let flags = ["--state-dir", state.to_str().expect("unicode")];
    let mut daemon = Watched::start(&flags);
    let with = |node: Launch| node.env("DONE", &done);
    let mut nodes = pair(&daemon, "recovers", with, &format!("echo at work; {UNTIL_DONE}"));
    for node in &mut nodes {
        node.wait_for("at work");
    }
    // One node cannot come back for a while.
    nodes[1].signal(Signal::SIGSTOP);
    daemon.running.signal(Signal::SIGKILL);
    let endpoint = daemon.endpoint.clone();
    daemon.running.finish().expect_killed_by(Signal::SIGKILL);
    daemon = Watched::start_at([&endpoint, "127.0.0.2:0"], &flags, |program| program);
    assert_eq!(daemon.get("/livez").status, 200);
    let answer = daemon.get("/readyz");
    assert_eq!(answer.status, 503, "{answer:?}");
    assert!(
        answer.body.contains("waiting for the nodes of 1 job"),
        "{answer:?}"
    );
    let metrics = daemon.get("/metrics");
    assert_eq!(metrics.sample("ddp_ready"), Some(0.0));
    assert_eq!(metrics.sample("ddp_jobs{state=\"recovering\"}"), Some(1.0));
    nodes[1].signal(Signal::SIGCONT);
    eventually("it is ready", || {
        (daemon.get("/readyz").status == 200).then_some(())
    });
    assert_eq!(daemon.sample("ddp_jobs{state=\"running\"}"), Some(1.0));
    std::fs::write(&done, "").expect("writable");
    for node in nodes {
        node.finish().expect_exit(0);
    }
    daemon.stop().expect_exit(0);
}

#[test]
fn strangers_cannot_keep_operators_out() {
    let daemon = Watched::start(&[]);
    // A header that never ends, one byte now and then.
    let began = Instant::now();
    let mut slow = connect(&daemon.http);
    slow.write_all(b"GET /livez HTTP/1.1\r\nX: ")
        .expect("a server that reads");
    slow.set_read_timeout(Some(Duration::from_millis(100)))
        .expect("a socket");
    let is_open = |mut stream: &TcpStream| match stream.read(&mut [0; 64]) {
        Ok(bytes) => bytes > 0,
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    };
    while slow.write_all(b"x").is_ok() && is_open(&slow) {
        assert!(began.elapsed() < PATIENCE, "a slow header is read for ever");
    }
    assert!(
        began.elapsed() > Duration::from_secs(4),
        "an honest client has some time"
    );
    // A header that is too long.
    let mut long = connect(&daemon.http);
    let _ = write!(long, "GET /livez HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    let answer = answer(long);
    assert!(matches!(answer.status, 0 | 431), "{answer:?}");
    let many = "X: y\r\n".repeat(500);
    assert_ne!(get(&daemon.http, "/livez", &many).status, 200);
    for (request, status) in [
        (
            "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n",
            405,
        ),
        ("GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        ("\x16\x03\x01\x02\x00\x01\x00", 400),
    ] {
        // The end of what is sent may be noticed before, with or after the request.
        for _ in 0..20 {
            let mut stream = connect(&daemon.http);
            stream.write_all(request.as_bytes()).expect("a server that reads");
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let answer = self::answer(stream);
            assert_eq!(answer.status, status, "{request:?} was answered by {answer:?}");
        }
    }
    daemon.stop().expect_exit(0);
}

/// Connections of one address are bounded, and leave the descriptors to nodes; silent ones end by themselves.
#[test]
fn a_thousand_silent_connections_keep_out_neither_nodes_nor_operators() {
    let daemon = Watched::start(&[]);
    let before = daemon.sample("ddp_open_descriptors").expect("a number");
    let idle: Vec<TcpStream> = (0..1000).map(|_| connect(&daemon.http)).collect();
    let descriptors = || {
        std::fs::read_dir(format!("/proc/{}/fd", daemon.running.pid()))
            .expect("it runs")
            .count()
    };
    let most = descriptors();
    assert!(
        (most as f64) < before + 100.0,
        "{most} descriptors, {before} before"
    );
    // A liveness probe that fails would restart the daemon.
    assert_eq!(daemon.get("/livez").status, 200, "while they are open");
    let mut node = launch()
        .node_of(1, &daemon.endpoint, "meanwhile")
        .flag("--rdzv-conf", "is_host=false")
        .shell("echo at work")
        .start();
    node.wait_for("at work");
    node.finish().expect_exit(0);
    drop(idle);
    daemon.expect_at_least("ddp_refusals_total{code=\"http\"}", 900.0);
    daemon.stop().expect_exit(0);
}

#[test]
fn status_shows_steps_and_losses() {
    let dir = temp_dir();
    let (done, logs) = (dir.path().join("done"), dir.path().join("logs"));
    let daemon = Watched::start(&["--lease", "1.5"]);
    let nodes = advancing(&daemon, &done, &logs);
    let status = eventually("all ranks are timed", || {
        let finished = daemon.operator(&["status", "steps", "--json"]).run();
        let status: Value = serde_json::from_str(finished.stdout().first()?).ok()?;
        let is_timed =
            |node: usize, rank: usize| status["nodes"][node]["ranks"][rank]["step_time_s"].is_f64();
        let are_timed = is_timed(0, 0) && is_timed(1, 1);
        (are_timed && status["losses"].as_array()?.len() >= 2).then_some(status)
    });
    assert_eq!(
        (status["state"].as_str(), status["generation"].as_u64()),
        (Some("running"), Some(1))
    );
    let told = status["nodes"].as_array().expect("nodes");
    assert_eq!(told.len(), 2);
    for (node, first_rank) in told.iter().zip([0, 2]) {
        assert_eq!(node["first_rank"], first_rank, "{status}");
        assert_eq!(node["ranks"].as_array().map(Vec::len), Some(2), "{status}");
        let logs = node["log_dir"].as_str().expect("a path");
        assert!(Path::new(logs).is_dir(), "`{logs}` is where the logs are");
    }
    let time = |rank: usize| {
        told[rank / 2]["ranks"][rank % 2]["step_time_s"]
            .as_f64()
            .expect("a time")
    };
    assert!(time(0) > 0.0 && time(3) > time(0), "{status}");
    for point in status["losses"].as_array().expect("losses") {
        let (step, loss) = (
            point[0].as_f64().expect("a step"),
            point[1].as_f64().expect("a loss"),
        );
        assert!((loss - 4.0 / step).abs() < 1e-9, "{status}");
    }
    let text = daemon.operator(&["status"]).run();
    text.expect_exit(0)
        .expect_stdout("job `steps`: running, generation 1");
    text.expect_stdout("generation 1 (2 nodes, 4 ranks) began");
    // The page has the same.
    let page = snapshot(&daemon.http, "?job=steps", "");
    assert_eq!(page["job"]["nodes"][1]["ranks"][1]["rank"], 3);
    assert_eq!(page["jobs"][0]["job"], "steps");
    std::fs::write(&done, "").expect("writable");
    for node in nodes {
        node.finish().expect_exit(0);
    }
    daemon.stop().expect_exit(0);
}

#[test]
fn a_job_is_closed_on_all_of_its_nodes() {
    let (daemon, dir) = (Watched::start(&[]), temp_dir());
    let done = dir.path().join("done");
    let of_a_user = |node: Launch| node.env("USER", "an\u{1b}[31mna");
    let nodes = pair(&daemon, "closed", of_a_user, "echo at work; sleep 600");
    let until_done = |node: Launch| node.env("DONE", &done);
    let script = format!("echo at work; {UNTIL_DONE}");
    let mut others = pair(&daemon, "other", until_done, &script);
    for node in &mut others {
        node.wait_for("at work");
    }
    daemon.expect_sample("ddp_jobs{state=\"running\"}", 2.0);
    let jobs = daemon.ask(&["jobs"]);
    let name = |number: usize| jobs["jobs"][number]["job"].as_str();
    assert_eq!([name(0), name(1), name(2)], [Some("closed"), Some("other"), None]);
    let said = |key: &str| jobs["jobs"][0][key].as_str();
    assert_eq!(
        (said("user"), said("target")),
        (Some("anna"), Some("sh")),
        "{jobs}"
    );
    daemon
        .operator(&["status"])
        .run()
        .expect_exit(2)
        .expect_stderr("has 2 jobs: which one is meant?");
    let closed = daemon
        .operator(&["close", "closed", "--reason", "the machine is needed"])
        .env("USER", "op\nerator")
        .run();
    closed.expect_exit(0).expect_stdout("closed job `closed`");
    for node in nodes {
        let finished = node.finish();
        finished.expect_exit(78);
        finished.expect_stderr("operator `op\u{fffd}erator@");
        finished.expect_stderr("` (127.0.0.1) closed the job: the machine is needed");
    }
    daemon.expect_sample("ddp_jobs_ended_total{result=\"closed\"}", 1.0);
    std::fs::write(&done, "").expect("writable");
    for node in others {
        node.finish().expect_exit(0);
    }
    let again = daemon.operator(&["close", "closed"]).run();
    again
        .expect_exit(2)
        .expect_stderr("job `closed` is not at this daemon, or is over already")
        .expect_stderr("hint: `ddp-rendezvous jobs` lists them");
    // What has ended is shown for an hour.
    let left = daemon.operator(&["jobs"]).run();
    left.expect_exit(0).expect_stdout("(127.0.0.1) closed the job");
    left.expect_stdout("all 2 nodes succeeded");
    let stopped = daemon.stop();
    stopped.expect_exit(0);
    stopped.expect_stderr("job `closed` ended: operator `op\u{fffd}erator@");
}

/// It ended with 70, as if the daemon had failed.
#[test]
fn a_job_that_a_launchers_own_daemon_does_not_serve_is_a_mistake_of_the_command_line() {
    let (port, dir) = (ReservedPort::new(), temp_dir());
    let done = dir.path().join("done");
    let mut node = launch()
        .node_of(1, &port.endpoint, "own")
        .env("DONE", &done)
        .shell(&format!("echo at work; {UNTIL_DONE}"))
        .start();
    node.wait_for("at work");
    let operator = |words: &[&str]| {
        let address = ["--endpoint", port.endpoint.as_str()];
        let args = words.iter().chain(&address);
        ddp_rendezvous().args(args).run()
    };
    operator(&["status", "own"]).expect_exit(0);
    let daemon = format!(
        "at the rendezvous daemon `{}`: it belongs to job `own`",
        port.endpoint
    );
    operator(&["status", "other"])
        .expect_exit(2)
        .expect_stderr(&format!("cannot get the status of job `other` {daemon}"));
    // The owner of a job lists and closes it at its own launcher, too.
    operator(&["jobs"]).expect_exit(0).expect_stdout("own");
    operator(&["close", "own"]).expect_exit(0);
    node.finish().expect_exit(78);
}

/// A file that only its owner can read.
fn token_file(dir: &Path, name: &str, token: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, format!("{token}\n")).expect("writable");
    let owner_only = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, owner_only).expect("an own file");
    path.to_str().expect("unicode").to_owned()
}

/// From which this machine would send to others, if it could: nothing is sent.
fn own_address() -> Option<SocketAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    socket.local_addr().ok()
}

/// A daemon on a private address, as the documents say, had no page.
#[test]
fn the_daemons_own_machine_sees_its_page_under_whatever_address() {
    let Some(address) = own_address() else {
        return eprintln!("SKIPPED: this machine has no address besides the loopback");
    };
    let any_port = format!("{}:0", address.ip());
    let daemon = Watched::start_at([&any_port, &any_port], &[], |program| program);
    daemon.operator(&["jobs"]).run().expect_exit(0);
    assert_eq!(get(&daemon.http, "/", "").status, 200);
}

#[test]
fn the_read_token_shows_the_page_and_neither_lists_nor_closes() {
    const TOKEN: &str = "a-token-of-32-characters-or-more";
    let dir = temp_dir();
    let read = token_file(dir.path(), "read", TOKEN);
    let serve = ["serve", "--listen", "127.0.0.1:0", "--read-token-file", &read];
    let same = Program::new(env!("CARGO_BIN_EXE_ddp-rendezvous")).args(serve);
    let same = same.env("DDP_TOKEN_FILE", &read).run();
    same.expect_exit(77).expect_stderr("it is the token of the nodes");
    let daemon = Watched::start(&["--read-token-file", &read]);
    let mut nodes = pair(&daemon, "guarded", |node| node, "echo at work; sleep 600");
    for node in &mut nodes {
        node.wait_for("at work");
    }
    // The handshake shows another token than that of the nodes.
    for words in [&["jobs"][..], &["close", "guarded"], &["status"]] {
        let stranger = daemon.operator(words).env("DDP_TOKEN_FILE", &read);
        stranger
            .run()
            .expect_exit(77)
            .expect_stderr("it has a different token");
    }
    daemon.expect_at_least("ddp_refusals_total{code=\"connection\"}", 3.0);
    let page = daemon.get("/");
    assert_eq!(page.status, 200);
    assert!(
        page.body.contains("data-token=\"yes\"") && !page.body.contains("guarded"),
        "{}",
        page.head
    );
    for header in [
        "",
        "Authorization: Bearer nonsense\r\n",
        "Authorization: Bearer \r\n",
    ] {
        let answer = get(&daemon.http, "/events", header);
        assert_eq!(answer.status, 401, "{answer:?}");
        assert!(!answer.body.contains("guarded"));
    }
    let in_url = daemon.get(&format!("/events?token={TOKEN}"));
    assert_eq!(in_url.status, 401, "not in a URL");
    daemon.expect_at_least("ddp_refusals_total{code=\"forbidden\"}", 4.0);
    let metrics = daemon.get("/metrics");
    assert_eq!(metrics.sample("ddp_ranks"), Some(2.0));
    assert!(!metrics.body.contains("guarded"), "{}", metrics.body);
    let header = format!("Authorization: Bearer {TOKEN}\r\n");
    let generation = get(&daemon.http, "/metrics", &header).sample("ddp_job_generation{job_id=\"guarded\"}");
    assert_eq!(generation, Some(1.0));
    let shown = snapshot(&daemon.http, "", &header);
    assert_eq!(shown["job"]["job"], "guarded");
    // The nodes' token shows and closes the job.
    daemon
        .operator(&["status"])
        .run()
        .expect_exit(0)
        .expect_stdout("guarded");
    daemon.operator(&["close", "guarded"]).run().expect_exit(0);
    for node in nodes {
        node.finish().expect_exit(78);
    }
    daemon.stop().expect_exit(0);
}

#[test]
fn a_file_without_a_token_is_no_protection_and_refused() {
    let dir = temp_dir();
    let path = dir.path().join("token");
    std::fs::write(&path, "short").expect("writable");
    for (mode, words) in [(0o644, "other users can read"), (0o600, "it has 5 characters")] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("an own file");
        let refused = ddp_rendezvous()
            .args(["serve", "--listen", "127.0.0.1:0"])
            .env("DDP_READ_TOKEN_FILE", &path)
            .run();
        refused.expect_exit(77).expect_stderr(words);
    }
}

#[test]
fn a_browser_that_was_lured_here_under_another_name_gets_no_page() {
    let daemon = Watched::start(&[]);
    for path in ["/", "/events"] {
        let mut stream = connect(&daemon.http);
        write!(stream, "GET {path} HTTP/1.1\r\nHost: rebound.example\r\n\r\n").expect("a server that reads");
        assert_eq!(answer(stream).status, 403, "{path}");
    }
    let page = daemon.get("/");
    assert_eq!(page.status, 200);
    for header in [
        "content-security-policy: default-src 'none'; script-src 'nonce-",
        "x-content-type-options: nosniff",
        "cache-control: no-store",
    ] {
        assert!(
            page.head.to_lowercase().contains(header),
            "`{header}` is missing in\n{}",
            page.head
        );
    }
    daemon.stop().expect_exit(0);
}

#[test]
fn a_launcher_serves_the_page_of_its_own_job() {
    let reserved = ReservedPort::new();
    let (_, port) = reserved.endpoint.split_once(':').expect("an address");
    let job = TinyJob::new();
    let endless = job.launch().nproc(2).set("train.steps=1000000");
    let mut node = endless
        .flag("--status-port", port)
        .flag("--rdzv-id", "own")
        .start();
    let printed = node.wait_for(&format!(
        "the job is shown at http://{}/#token=",
        reserved.endpoint
    ));
    let (_, token) = printed.split_once("#token=").expect("a token");
    let header = format!("Authorization: Bearer {}\r\n", token.trim());
    // Other users of this machine can connect too.
    assert_eq!(get(&reserved.endpoint, "/events", "").status, 401);
    let shown = snapshot_that(&reserved.endpoint, "", &header, |view| {
        view["job"]["losses"]
            .as_array()
            .is_some_and(|losses| losses.len() > 2)
    });
    assert_eq!(
        (
            shown["title"].as_str(),
            shown["job"]["job"].as_str(),
            shown["jobs"].as_array().map(Vec::len)
        ),
        (Some("tiny"), Some("own"), Some(1))
    );
    let rank_0 = &shown["job"]["nodes"][0]["ranks"][0];
    assert_eq!(rank_0["steps"], 1_000_000, "{rank_0}");
    assert!(rank_0["tokens_per_s"].as_f64() > Some(0.0), "{rank_0}");
    assert!(rank_0["model_flops_per_s"].as_f64() > Some(0.0), "{rank_0}");
    assert_eq!(
        shown["job"]["generations"][0]["step"],
        shown["job"]["losses"][0][0]
    );
    assert!(
        get(&reserved.endpoint, "/", "")
            .body
            .contains("data-token=\"yes\"")
    );
    // A second one cannot have the port.
    let second = launch().flag("--status-port", port).shell("true").run();
    second
        .expect_exit(69)
        .expect_stderr("choose a different `--status-port`");
    // A page that is open sees the end.
    let mut page = connect(&reserved.endpoint);
    write!(
        page,
        "GET /events HTTP/1.1\r\nHost: {}\r\n{header}\r\n",
        reserved.endpoint
    )
    .expect("a server that reads");
    node.signal(Signal::SIGTERM);
    let mut seen = String::new();
    page.read_to_string(&mut seen).expect("a stream that ends");
    let last = seen.rsplit("data: ").next().unwrap_or_default();
    assert!(
        seen.ends_with("\r\n0\r\n\r\n") && !last.contains("\"running\""),
        "{last}"
    );
    node.finish().expect_exit(143);
}

#[test]
fn a_launcher_keeps_its_metrics_in_a_file_until_its_end() {
    let dir = temp_dir();
    let (done, file) = (dir.path().join("done"), dir.path().join("ddp-team-7.prom"));
    let node = launch()
        .flag("--rdzv-id", "team-7")
        .nproc(2)
        .env(DONE, &done)
        .env("DDP_METRICS_FILE", dir.path().join("ddp-%j.prom"))
        .role("advances")
        .start();
    let text = eventually("the job's numbers", || {
        let text = std::fs::read_to_string(&file).ok()?;
        text.contains("ddp_job_nodes").then_some(text)
    });
    for part in ["ddp_job_nodes{job_id=\"team-7\",user=\"", ",target=\"", "\"} 1\n"] {
        assert!(text.contains(part), "{text}");
    }
    let mode = std::fs::metadata(&file).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o644, "node_exporter is another user");
    std::fs::write(&done, "").expect("writable");
    node.finish().expect_exit(0);
    let left: Vec<_> = std::fs::read_dir(dir.path()).expect("a folder").collect();
    assert_eq!(left.len(), 1, "only `done`: {left:?}");
}
