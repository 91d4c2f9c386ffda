//! What callers can do that the daemon does not let in: another user of the machine, hosts without the token or with
//! another one, and connections that say nothing, too little or too much. They learn nothing and change nothing, they
//! are counted, and the job goes on.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ddp_proto::client::{Access, Client, ClientError, open_channel};
use ddp_proto::exit;
use ddp_proto::rendezvous::rendezvous_client::RendezvousClient;
use ddp_proto::rendezvous::{AgentMessage, StatusRequest};
use ddp_proto::trust::token::Token;
use nix::unistd::Uid;

use crate::harness::{Daemon, PATIENCE, Program, ReservedPort, Running, launch, temp_dir};

/// What a client of HTTP/2 says first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// User `nobody`.
const NOBODY: u32 = 65_534;
/// The daemon waits 5 s for a handshake; the rest is for a loaded machine.
const EXPIRY: Duration = Duration::from_mins(2);

/// Reads until the other side closes; what came before.
#[track_caller]
fn read_to_end(stream: &mut (impl Read + ?Sized)) -> Vec<u8> {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {}
        Err(error) => panic!("the connection stays open: {error}"),
    }
    answer
}

#[track_caller]
fn connect(endpoint: &str) -> TcpStream {
    let stream = TcpStream::connect(endpoint).expect("it listens");
    stream.set_read_timeout(Some(EXPIRY)).expect("a timeout");
    stream
}

/// Inodes of the sockets of a process.
fn sockets_of(pid: i32) -> BTreeSet<String> {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process of ours");
    let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let inode = |target: std::path::PathBuf| {
        let text = target.to_string_lossy().into_owned();
        Some(text.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
    };
    targets.filter_map(inode).collect()
}

/// Name of the abstract socket at which the daemon of a launcher listens.
fn daemon_socket(pid: i32) -> Option<String> {
    let own = sockets_of(pid);
    let table = std::fs::read_to_string("/proc/net/unix").expect("the kernel's table");
    table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let name = fields.get(7)?.strip_prefix("@")?;
        (own.contains(fields[6]) && name.starts_with("ddp-run-")).then(|| name.to_owned())
    })
}

/// Runs `what` as another user: in a thread, because the kernel keeps users by thread.
#[expect(unsafe_code, reason = "the user of one thread")]
fn as_nobody<T: Send>(what: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: it changes the user of this thread, which ends below.
            let changed = unsafe { nix::libc::syscall(nix::libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
            assert_eq!(changed, 0, "root may become any user");
            what()
        });
        thread.join().expect("no panic")
    })
}

#[test]
fn a_job_of_one_node_has_no_port_and_no_other_user_is_served() {
    let dir = temp_dir();
    let go = dir.path().join("go");
    let script = format!("echo up; while [ ! -e {} ]; do sleep 0.1; done", go.display());
    let mut job = launch().nproc(2).shell(&script).start();
    job.wait_for("up");
    let own = sockets_of(job.pid());
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let table = std::fs::read_to_string(table).unwrap_or_default();
        let is_listening = |line: &&str| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            fields.get(3) == Some(&"0A") && fields.get(9).is_some_and(|inode| own.contains(*inode))
        };
        assert_eq!(
            table.lines().find(is_listening),
            None,
            "the launcher has no TCP port"
        );
    }
    let name = daemon_socket(job.pid()).expect("the daemon's socket");
    if Uid::effective().is_root() {
        let answer = as_nobody(|| {
            let address = SocketAddr::from_abstract_name(&name).expect("a name");
            let mut stream = UnixStream::connect_addr(&address).expect("abstract sockets are open to all");
            stream.set_read_timeout(Some(EXPIRY)).expect("a timeout");
            // It may be closed by then.
            let _ = stream.write_all(PREFACE);
            read_to_end(&mut stream)
        });
        assert_eq!(answer, b"", "nothing was said");
        job.wait_for("user 65534 is not the user of this launcher");
    } else {
        eprintln!("SKIPPED: only root can be another user");
    }
    std::fs::write(&go, "").expect("writable");
    job.finish().expect_exit(0);
}

/// Another user may have taken the name of the daemon's socket, and would be told all that a launcher tells its daemon.
#[test]
fn a_launcher_speaks_to_no_socket_of_another_user() {
    if !Uid::effective().is_root() {
        eprintln!("SKIPPED: only root can be another user");
        return;
    }
    let name = format!("ddp-run-impostor-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a name");
    let _listener = as_nobody(|| UnixListener::bind_addr(&address).expect("a free name"));
    let endpoint = format!("unix:@{name}");
    let connected = runtime().block_on(async {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(1);
        Client::connect(&endpoint, &Access::Open, deadline).await
    });
    let words = connected.expect_err("it is not the daemon").to_string();
    assert!(words.contains("user 65534 listens there"), "{words}");
}

/// A job of two nodes, of which one is there.
fn half_a_job(daemon: &mut Daemon, id: &str) -> Running {
    let first = launch()
        .node_of(2, &daemon.endpoint, id)
        .shell("echo ran")
        .start();
    daemon.wait_for("` joined from ");
    first
}

/// The other half comes, and all is well.
#[track_caller]
fn expect_unharmed(first: Running, endpoint: &str, id: &str) {
    let second = launch().node_of(2, endpoint, id).shell("echo ran").run();
    second.expect_exit(0).expect_stdout("ran");
    first.finish().expect_exit(0).expect_stdout("ran");
}

fn runtime() -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime")
}

#[test]
fn a_host_without_the_token_or_with_another_one_learns_nothing() {
    let mut daemon = Daemon::start();
    let endpoint = daemon.endpoint.clone();
    let first = half_a_job(&mut daemon, "guarded");
    // Without TLS.
    let mut plain = connect(&endpoint);
    plain.write_all(PREFACE).expect("written");
    let answer = read_to_end(&mut plain);
    assert!(
        answer.len() <= 7 && answer.first() != Some(&0),
        "an alert at most: {answer:?}"
    );
    daemon.wait_for("refused a connection from 127.0.0.1: it speaks no TLS");
    // Later refusals are reported together within 10 s, even if no other caller comes.
    for _ in 0..2 {
        let mut plain = connect(&endpoint);
        plain.write_all(PREFACE).expect("written");
        read_to_end(&mut plain);
    }
    daemon.wait_for("it speaks no TLS (2 since the last such line, 3 in all)");
    // With another token.
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let stranger = Access::Token(Token::random());
    let refused = runtime().block_on(Client::connect(&endpoint, &stranger, deadline));
    let error = refused.expect_err("another token");
    assert!(matches!(error, ClientError::Untrusted { .. }), "{error:?}");
    assert_eq!(error.exit_code(), exit::REFUSED);
    // As launchers.
    let other = temp_dir();
    let other = other.path().join("token");
    let intruder = || launch().node_of(2, &endpoint, "guarded").shell("echo ran");
    std::fs::write(&other, Token::random().reveal()).expect("writable");
    Command::new("chmod")
        .arg("600")
        .arg(&other)
        .status()
        .expect("chmod");
    intruder()
        .env("DDP_TOKEN_FILE", &other)
        .run()
        .expect_exit(77)
        .expect_stderr("it has a different token, or is no rendezvous")
        .expect_stderr("hint: give all nodes of the job the same token");
    let plain = intruder()
        .flag("--rdzv-conf", "is_host=0,connect_timeout=1")
        .words(["--insecure"])
        .run();
    plain
        .expect_exit(69)
        .expect_stderr("the daemon there expects TLS, and this node was started with `--insecure`");
    assert!(plain.stdout().is_empty(), "{}", plain.transcript());
    let absent = temp_dir().path().join("token").display().to_string();
    intruder()
        .flag("--rdzv-conf", "is_host=0,connect_timeout=0.5")
        .env("DDP_TOKEN_FILE", &absent)
        .run()
        .expect_exit(77)
        .expect_stderr(&format!("there is no token at `{absent}` after "));
    expect_unharmed(first, &endpoint, "guarded");
    let log = daemon.stop();
    log.expect_exit(0).expect_stderr("in all)");
    let joined = log.stderr().matches("` joined from ").count();
    assert_eq!(joined, 2, "{}", log.transcript());
}

#[test]
fn the_token_is_not_given_to_workers() {
    let token = Token::random();
    let port = ReservedPort::new();
    let script = "env; tr '\\0' '\\n' </proc/$$/environ; echo done";
    let finished = launch()
        .node_of(1, &port.endpoint, "scrubbed")
        .env("DDP_TOKEN", token.reveal())
        .shell(script)
        .run();
    finished.expect_exit(0).expect_stdout("done");
    let said = finished.transcript();
    assert!(
        !said.contains(token.reveal()) && !said.contains("DDP_TOKEN"),
        "{said}"
    );
    let shown = launch()
        .node_of(2, &port.endpoint, "scrubbed")
        .env("DDP_TOKEN", token.reveal())
        .words(["--dry-run"])
        .target("true")
        .run();
    assert!(
        !shown.transcript().contains(token.reveal()),
        "{}",
        shown.transcript()
    );
}

/// Stands between a launcher and the daemon, and writes down what the launcher says.
fn recorder(daemon: String) -> (String, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let endpoint = listener.local_addr().expect("bound").to_string();
    let record = Arc::new(Mutex::new(Vec::new()));
    let kept = record.clone();
    std::thread::spawn(move || {
        let (near, _) = listener.accept().expect("a launcher");
        let far = TcpStream::connect(daemon).expect("a daemon");
        let (mut back_in, mut back_out) = (
            far.try_clone().expect("a socket"),
            near.try_clone().expect("a socket"),
        );
        std::thread::spawn(move || std::io::copy(&mut back_in, &mut back_out));
        let (mut near, mut far, mut buffer) = (near, far, [0; 4096]);
        while let Ok(count @ 1..) = near.read(&mut buffer) {
            kept.lock().expect("no panic").extend_from_slice(&buffer[..count]);
            if far.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = far.shutdown(std::net::Shutdown::Both);
    });
    (endpoint, record)
}

#[test]
fn replayed_truncated_and_slow_handshakes_come_to_nothing() {
    let mut daemon = Daemon::start();
    let (recorded, record) = recorder(daemon.endpoint.clone());
    launch()
        .node_of(1, &recorded, "recorded")
        .flag("--rdzv-conf", "is_host=0")
        .target("true")
        .run()
        .expect_exit(0);
    let first = half_a_job(&mut daemon, "unharmed");
    let record = record.lock().expect("no panic").clone();
    assert!(record.len() > 500, "a whole session was recorded");
    let mut replay = connect(&daemon.endpoint);
    // The daemon may have closed it by then.
    let _ = replay.write_all(&record);
    read_to_end(&mut replay);
    for length in [1, 5, 100] {
        let mut truncated = connect(&daemon.endpoint);
        truncated.write_all(&record[..length]).expect("written");
        truncated.shutdown(std::net::Shutdown::Write).expect("open");
        read_to_end(&mut truncated);
    }
    let begun = Instant::now();
    let mut slow = connect(&daemon.endpoint);
    slow.write_all(&record[..20]).expect("written");
    read_to_end(&mut slow);
    assert!(begun.elapsed() >= Duration::from_secs(4), "it had its time");
    expect_unharmed(first, &daemon.endpoint.clone(), "unharmed");
    let log = daemon.stop();
    log.expect_exit(0)
        .expect_stderr("refused a connection from 127.0.0.1: ");
    let joined = log.stderr().matches("` joined from ").count();
    assert_eq!(joined, 3, "the replay has joined nothing: {}", log.transcript());
}

/// All of them were open after 50 s.
#[test]
fn silent_connections_expire() {
    let mut daemon = Daemon::start();
    let first = half_a_job(&mut daemon, "unharmed");
    let mut silent: Vec<TcpStream> = (0..300).map(|_| connect(&daemon.endpoint)).collect();
    for stream in &mut silent {
        assert_eq!(read_to_end(stream), b"");
    }
    expect_unharmed(first, &daemon.endpoint.clone(), "unharmed");
    daemon.stop().expect_exit(0);
}

/// A launch on the daemon's machine ended with 69 at once.
#[test]
fn half_open_connections_do_not_keep_a_launch_out() {
    let daemon = Daemon::start();
    let silent: Vec<TcpStream> = (0..1100).map(|_| connect(&daemon.endpoint)).collect();
    launch()
        .node_of(1, &daemon.endpoint, "meanwhile")
        .target("true")
        .run()
        .expect_exit(0);
    drop(silent);
    daemon.stop().expect_exit(0);
}

/// They took 48 MB, for ever.
#[test]
fn streams_without_a_node_are_few_and_expire() {
    const STREAMS: usize = 3000;
    let daemon = Daemon::start_with("127.0.0.1:0", &["--insecure"]);
    let endpoint = daemon.endpoint.clone();
    let opened = runtime().block_on(async {
        let channel = open_channel(&endpoint, &Access::Open)
            .await
            .expect("a connection");
        let status = StatusRequest::default();
        let mut client = RendezvousClient::new(channel);
        client.status(status).await.expect_err("a stranger");
        let mut streams = Vec::new();
        for _ in 0..STREAMS {
            let silence = tokio_stream::pending::<AgentMessage>();
            if let Ok(stream) = client.agent(silence).await {
                streams.push(stream.into_inner());
            }
        }
        let opened = streams.len();
        for mut stream in streams {
            let ended = tokio::time::timeout(EXPIRY, stream.message())
                .await
                .expect("it expires");
            assert!(matches!(ended, Ok(None) | Err(_)), "{ended:?}");
        }
        opened
    });
    assert!((1..STREAMS / 4).contains(&opened), "{opened} streams");
    launch()
        .node_of(1, &endpoint, "unharmed")
        .words(["--insecure"])
        .target("true")
        .run()
        .expect_exit(0);
    daemon.stop().expect_exit(0);
}

/// Many connections on which nothing is said.
fn idle_connections(endpoint: &str) -> Vec<TcpStream> {
    let idle: Vec<TcpStream> = (0..400)
        .filter_map(|_| TcpStream::connect(endpoint).ok())
        .collect();
    // The last one is turned away, so all before it have been looked at.
    let mut last = idle.last().expect("connected");
    last.set_read_timeout(Some(PATIENCE)).expect("a socket");
    assert!(last.read(&mut [0]).is_ok_and(|read| read == 0), "it is closed");
    idle
}

/// The launcher could not restart its workers: "cannot make pipes", exit code 70.
#[test]
fn idle_connections_leave_a_launcher_its_files() {
    let (port, page) = (ReservedPort::new(), ReservedPort::new());
    let (_, page_port) = page.endpoint.split_once(':').expect("an address");
    let dir = temp_dir();
    let go = dir.path().join("go");
    let script = format!(
        "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; echo up; while [ ! -e {} ]; do sleep 0.1; done; exit 1",
        go.display()
    );
    let limited = "ulimit -n 256 && exec \"$0\" \"$@\"";
    let words = [
        "-c",
        limited,
        env!("CARGO_BIN_EXE_ddp-run"),
        "--nproc-per-node",
        "16",
        "--max-restarts",
        "1",
        "--status-port",
        page_port,
    ];
    let words = words
        .into_iter()
        .chain(["--rdzv-endpoint", &port.endpoint, "--", "sh", "-c", &script]);
    let mut job = Program::new("/bin/sh").args(words).start();
    for _ in 0..16 {
        job.wait_for("up");
    }
    let idle = [&port, &page].map(|port| idle_connections(&port.endpoint));
    let open = || std::fs::read_dir(format!("/proc/{}/fd", job.pid())).map_or(0, Iterator::count);
    assert!(open() < 256 - 64, "{} descriptors are open", open());
    std::fs::write(&go, "").expect("writable");
    job.finish().expect_exit(0);
    drop(idle);
}
