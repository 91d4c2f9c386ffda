//! The control socket, and the stream to the daemon.

use std::io::{BufRead, BufReader, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use ddp_proto::control::{PROTOCOL, PeerWait, Phase, Progress, Sizes, ToAgent, ToWorker};
use ddp_proto::env::WorkerEnv;
use ddp_proto::rendezvous::agent_message::Body as Report;
use nix::sys::signal::Signal;

use crate::daemon::{DEADLINE, Daemon};
use crate::harness::{End, Launch, Meeting, launch};

/// A worker's side of the control socket.
pub(crate) struct Session {
    pub(crate) env: WorkerEnv,
    pub(crate) socket: BufReader<UnixStream>,
}

impl Session {
    pub(crate) fn open() -> Self {
        Self::open_as(own_env(), true)
    }

    /// A session of a worker that reads no messages.
    pub(crate) fn open_to_send() -> Self {
        Self::open_as(own_env(), false)
    }

    fn open_as(env: WorkerEnv, listens: bool) -> Self {
        let name = env.control.clone().unwrap();
        let address = SocketAddr::from_abstract_name(name.strip_prefix('@').unwrap()).unwrap();
        let socket = UnixStream::connect_addr(&address).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut session = Self {
            env,
            socket: BufReader::new(socket),
        };
        session.say(&ToAgent::Hello {
            protocol: PROTOCOL,
            local_rank: session.env.local_rank.0,
            generation: session.env.generation,
            pid: std::process::id(),
            listens,
            outlives: false,
        });
        session
    }

    /// The other side has closed the connection.
    fn is_ended(&mut self) -> bool {
        self.socket
            .read_line(&mut String::new())
            .map_or(true, |read| read == 0)
    }

    pub(crate) fn say(&mut self, message: &ToAgent) {
        let mut line = serde_json::to_vec(message).unwrap();
        line.push(b'\n');
        self.socket.get_mut().write_all(&line).unwrap();
    }

    pub(crate) fn receive(&mut self) -> ToWorker {
        let mut line = String::new();
        self.socket.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: `{line}`"))
    }
}

fn own_env() -> WorkerEnv {
    WorkerEnv::parse(|name| std::env::var(name).ok()).unwrap()
}

/// Waits until the test, or another worker, opens the named pipe.
pub(crate) fn wait_for_opening() {
    std::fs::read(std::env::var("FIFO").unwrap()).unwrap();
}

/// A heartbeat of a worker that trains.
pub(crate) fn heartbeat(step: u64) -> ToAgent {
    heartbeat_of(step, Phase::Training, None, None)
}

/// A heartbeat with more to tell; a worker that waits for a peer has been quiet since.
fn heartbeat_of(step: u64, phase: Phase, progress: Option<Progress>, wait: Option<PeerWait>) -> ToAgent {
    ToAgent::Heartbeat {
        step,
        phase,
        quiet_ms: wait.as_ref().map_or(0, |wait| wait.waited_ms),
        progress,
        waits: wait.into_iter().collect(),
        activity: String::new(),
        loss: None,
        waited_s: None,
    }
}

/// Writes an entry of the key-value store.
pub(crate) fn put(call: u64, key: &str, value: &str) -> ToAgent {
    let (key, value) = (key.to_owned(), value.to_owned());
    ToAgent::KvPut { call, key, value }
}

/// Reads an entry of the key-value store.
pub(crate) fn get(call: u64, key: &str, timeout_ms: u64) -> ToAgent {
    let key = key.to_owned();
    ToAgent::KvGet {
        call,
        key,
        timeout_ms,
    }
}

/// Rank 1 kills itself when rank 0 listens; rank 0 prints what it learns.
pub(crate) fn sibling_dies() {
    let fifo = std::env::var("FIFO").unwrap();
    if std::env::var("RANK").unwrap() == "1" {
        std::fs::read(&fifo).unwrap();
        nix::sys::signal::raise(Signal::SIGKILL).unwrap();
    }
    let mut session = Session::open();
    let assignment = session.receive();
    assert!(
        matches!(assignment, ToWorker::Assignment { .. }),
        "{assignment:?}"
    );
    drop(std::fs::File::create(fifo).unwrap());
    let over = session.receive();
    println!("received: {over:?}");
    session.say(&ToAgent::Failure {
        message: "all-reduce 17 failed".into(),
        hint: None,
        consequence: true,
    });
    std::process::exit(1);
}

#[test]
fn survivors_learn_from_their_own_agent_who_died() {
    // The daemon says nothing: the survivor's message comes from its own agent.
    let daemon = Daemon::undecided();
    let meeting = Meeting::new();
    let launch = launch(&daemon)
        .workers(2)
        .meet(&meeting)
        .role("sibling_dies")
        .native();
    let mut launcher = launch.start();
    let over = launcher.stdout.expect("received: ");
    assert!(
        over.contains("rank 1 (node `") && over.contains("died of SIGKILL"),
        "{over}"
    );
    let exit = daemon.expect("a worker's exit", |message| match message.body {
        Some(Report::WorkerExit(exit)) => Some(exit),
        _ => None,
    });
    assert_eq!((exit.rank, exit.signal), (1, Some(9)));
    launcher.signal(Signal::SIGTERM);
    let end = launcher.wait();
    end.expect_stderr(": all-reduce 17 failed");
}

#[test]
fn workers_outlive_a_broken_stream() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let mut launcher = launch(&daemon)
        .meet(&meeting)
        .sh(r#"echo ready; cat "$FIFO""#)
        .start();
    launcher.stdout.expect("[0] ready");
    let join = |message: ddp_proto::rendezvous::AgentMessage| {
        matches!(message.body, Some(Report::Join(_))).then_some((message.incarnation, message.generation))
    };
    let first = daemon.expect("the first join", join);
    daemon.break_streams();
    let again = daemon.expect("a join on the new stream", join);
    assert_eq!((first.0, first.1), (again.0.clone(), 0));
    assert_eq!(again.1, 1, "it did not tell that its generation still runs");
    launcher.stderr.expect("reconnected to the rendezvous daemon");
    meeting.open();
    let end = launcher.wait();
    end.expect_code(0);
    assert_eq!(end.stdout.matches("ready").count(), 1, "{}", end.stdout);
}

/// Writes an entry, and waits for the end.
pub(crate) fn writes() {
    let mut session = Session::open();
    session.receive();
    session.say(&put(1, "k", "c2VjcmV0"));
    session.receive();
    println!("written");
    wait_for_opening();
}

#[test]
fn what_workers_wrote_is_written_again_when_the_daemon_has_lost_it() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let mut launcher = launch(&daemon).meet(&meeting).role("writes").start();
    launcher.stdout.expect("written");
    daemon.lose_store();
    daemon.break_streams();
    assert_eq!(daemon.read("k"), b"secret");
    meeting.open();
    assert_eq!(launcher.wait().code, 0);
}

/// Says that its data connection to a rank of another node broke, and waits for the end.
pub(crate) fn loses_a_peer() {
    let mut session = Session::open();
    session.receive();
    session.say(&ToAgent::PeerLost { rank: 7 });
    wait_for_opening();
}

#[test]
fn a_heartbeat_names_the_rank_to_which_a_workers_connection_broke() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let launcher = launch(&daemon).meet(&meeting).role("loses_a_peer").start();
    let lost = daemon.expect("a heartbeat that names the lost rank", |message| {
        match message.body {
            Some(Report::Heartbeat(beat)) => beat.lost_rank,
            _ => None,
        }
    });
    assert_eq!((lost.rank, lost.witness), (7, 0));
    meeting.open();
    assert_eq!(launcher.wait().code, 0);
}

/// Tells its place to the test, and waits for the end.
pub(crate) fn waits() {
    let fifo = std::env::var("FIFO").unwrap();
    println!("place {}", serde_json::to_string(&own_env().to_vars()).unwrap());
    std::fs::read(fifo).unwrap();
    // An endless line ends the connection, but nothing else.
    let mut session = Session::open();
    session.receive();
    let endless = vec![b'x'; ddp_proto::control::MAX_LINE_BYTES + 1];
    // The other side may close it before all is written.
    let _ = session.socket.get_mut().write_all(&endless);
    assert!(session.is_ended());
    let mut again = Session::open();
    assert!(matches!(again.receive(), ToWorker::Assignment { .. }));
    println!("all is well");
}

#[test]
fn only_workers_are_listened_to() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let mut launcher = launch(&daemon).meet(&meeting).role("waits").start();
    let line = launcher.stdout.expect("place {");
    let place = line.split_once("place ").unwrap().1;
    let vars: std::collections::BTreeMap<String, String> = serde_json::from_str(place).unwrap();
    // This process has all that a worker has, but is none.
    let env = WorkerEnv::parse(|name| vars.get(name).cloned()).unwrap();
    let mut stranger = Session::open_as(env, true);
    assert!(stranger.is_ended(), "a stranger was listened to");
    meeting.open();
    let end = launcher.wait();
    assert_eq!(end.code, 0, "{}", end.stdout);
    end.expect_stdout("all is well");
}

/// Claims to be another local rank, twice.
pub(crate) fn claims_to_be_another() {
    for _ in 0..2 {
        let mut env = own_env();
        env.local_rank.0 += 1;
        assert!(Session::open_as(env, false).is_ended());
    }
    let mut session = Session::open();
    assert!(matches!(session.receive(), ToWorker::Assignment { .. }));
}

#[test]
fn a_worker_whose_hello_does_not_fit_is_told_of_once() {
    let daemon = Daemon::start();
    let end = launch(&daemon).role("claims_to_be_another").run();
    end.expect_code(0);
    let told = "rank 0: its control connection was closed: `local_rank` of its hello is 1, expected 0";
    assert_eq!(end.stderr.matches(told).count(), 1, "{}", end.stderr);
}

/// Reports progress, and writes a line meanwhile.
pub(crate) fn reports_progress() {
    assert_eq!(std::env::var("DDP_PROGRESS").as_deref(), Ok("bar"));
    let mut session = Session::open();
    session.receive();
    eprintln!("a line before");
    let progress = Progress {
        steps: 10,
        loss: 2.5,
        tokens_per_s: 1234.0,
        seconds_left: 61.0,
        val_loss: None,
        val_step: None,
        lr: Some(1e-3),
        model_flops_per_s: None,
        mfu: None,
    };
    session.say(&heartbeat_of(3, Phase::Training, Some(progress), None));
    // Answered after the heartbeat was passed on.
    session.say(&put(1, "k", ""));
    session.receive();
    eprintln!("a line meanwhile");
}

#[test]
fn progress_is_drawn_on_a_terminal() {
    let daemon = Daemon::start();
    let size = nix::pty::Winsize {
        ws_row: 24,
        ws_col: 100,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let terminal = nix::pty::openpty(&size, None).unwrap();
    let mut screen = crate::harness::Lines::read(std::fs::File::from(terminal.master));
    let launch = launch(&daemon).progress_bar().role("reports_progress").native();
    let launcher = launch.start_with(|command| command.env("TERM", "xterm").stderr(terminal.slave));
    let end = launcher.wait();
    assert_eq!(end.code, 0, "{}", end.stdout);
    let screen = screen.rest();
    assert!(
        screen.contains("3/10 loss 2.500  lr 1.0e-3  1.23k tok/s  1:01 left"),
        "{screen:?}"
    );
    assert!(screen.contains("[0]\x1b[0m a line before"), "{screen:?}");
    assert!(screen.contains("[0]\x1b[0m a line meanwhile"), "{screen:?}");
    assert!(!screen.contains("0/0"), "a bar without numbers: {screen:?}");
}

/// Asks and asks, and never reads an answer.
pub(crate) fn never_reads() {
    let mut session = Session::open();
    for call in 0..20_000 {
        session.say(&ToAgent::KvGet {
            call,
            key: format!("no rank writes {call}"),
            timeout_ms: 60_000,
        });
    }
    println!("flooded");
    // Until it is stopped.
    wait_for_opening();
}

#[test]
fn a_worker_that_never_reads_holds_up_nobody() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let launch = launch(&daemon).workers(2).meet(&meeting).role("never_reads");
    let mut launcher = launch.start();
    launcher.stdout.expect("flooded");
    launcher.stdout.expect("flooded");
    launcher.signal(Signal::SIGTERM);
    let end = launcher.wait();
    end.expect_code(143);
}

#[test]
fn a_daemon_that_is_gone_for_good_ends_the_launch() {
    let daemon = Daemon::start();
    let script = r"trap 'echo stopped; exit 0' TERM; echo ready; while :; do tail -f /dev/null & wait; done";
    let launch = launch(&daemon)
        .sh(script)
        .outage_timeout(std::time::Duration::from_millis(500));
    let mut launcher = launch.start();
    launcher.stdout.expect("[0] ready");
    let endpoint = daemon.endpoint();
    drop(daemon);
    let end = launcher.wait();
    end.expect_code(69);
    end.expect_stdout("[0] stopped");
    let gone = format!("error: cannot reach the rendezvous at `{endpoint}`");
    end.expect_stderr(&gone);
    let hint = "; if a node hosted the rendezvous, that node may be gone: resume from the last checkpoint";
    end.expect_stderr(hint);
}

#[test]
fn workers_that_run_outlast_the_time_in_which_a_daemon_has_to_be_found() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let mut launcher = launch(&daemon)
        .connect_timeout(Duration::from_secs(5))
        .outage_timeout(Duration::from_mins(10))
        .meet(&meeting)
        .sh(r#"echo ready; cat "$FIFO"; exit 3"#)
        .start();
    launcher.stdout.expect("[0] ready");
    drop(daemon);
    launcher
        .stderr
        .expect("the workers keep running; retrying for 600 s, then exiting with code 69");
    meeting.open();
    let failed = launcher.stderr.expect("a worker of this node failed");
    assert!(
        failed.contains("the rendezvous daemon is still unreachable; retrying for"),
        "{failed}"
    );
    // A launcher that waits for a decision gives up earlier than one whose workers run.
    let end = launcher.wait();
    end.expect_code(69);
    end.expect_stderr("exited with code 3");
    end.expect_stderr("cannot reach the rendezvous at `");
}

/// Writes more lines `sizes` than wait in any queue when it is asked to, and ends with success.
pub(crate) fn changes_sizes() {
    let mut session = Session::open();
    session.receive();
    println!("ready");
    wait_for_opening();
    for ranks_divide in 1..=2000 {
        session.say(&ToAgent::Sizes(Sizes {
            ranks_divide: Some(ranks_divide),
            ..Sizes::default()
        }));
    }
    // Answered after all lines before it were passed on.
    let nobodys = get(1, "k", 0);
    session.say(&nobodys);
    session.receive();
}

#[test]
fn a_success_is_reported_however_much_the_workers_said_while_the_daemon_was_stalled() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let launch = launch(&daemon)
        .meet(&meeting)
        .outage_timeout(DEADLINE * 4)
        .role("changes_sizes");
    let mut launcher = launch.start();
    launcher.stdout.expect("ready");
    daemon.stand_still();
    launcher.stderr.expect("broke: ");
    meeting.open();
    launcher.stderr.expect("the workers of this node succeeded");
    daemon.go_on();
    daemon.expect("its success", |message| {
        matches!(message.body, Some(Report::NodeSucceeded(_))).then_some(())
    });
    assert_eq!(launcher.wait().code, 0);
}

/// How often a worker says the same.
const REPEATED: u64 = 200;

/// Says the same sizes again and again, each time when the daemon has answered something else, and ends with success.
pub(crate) fn repeats_sizes() {
    let mut session = Session::open();
    session.receive();
    for call in 0..REPEATED {
        session.say(&ToAgent::Sizes(Sizes {
            ranks_divide: Some(12),
            ..Sizes::default()
        }));
        session.say(&ToAgent::KvPut {
            call,
            key: format!("k{call}"),
            value: String::new(),
        });
        session.receive();
    }
}

#[test]
fn sizes_that_are_repeated_are_no_news_to_the_daemon() {
    let daemon = Daemon::start();
    let launcher = launch(&daemon).role("repeats_sizes").start();
    let mut heartbeats = 0;
    daemon.expect("its success", |message| match message.body {
        Some(Report::NodeSucceeded(_)) => Some(()),
        Some(Report::Heartbeat(_)) => {
            heartbeats += 1;
            None
        }
        _ => None,
    });
    assert_eq!(launcher.wait().code, 0);
    // One a second, whatever workers say, and one for the news.
    assert!(heartbeats < REPEATED / 2, "{heartbeats} heartbeats");
}

/// A daemon that goes away as soon as it knows that the node has succeeded, and what becomes of the node.
fn without_a_verdict(change: impl FnOnce(Launch) -> Launch) -> End {
    let daemon = Daemon::undecided();
    let launcher = change(launch(&daemon))
        .outage_timeout(Duration::from_millis(500))
        .start();
    daemon.expect("its success", |message| {
        matches!(message.body, Some(Report::NodeSucceeded(_))).then_some(())
    });
    drop(daemon);
    launcher.wait()
}

/// Ends with success in the phase that is given.
pub(crate) fn ends_in_a_phase() {
    let mut session = Session::open();
    session.receive();
    let phase = std::env::var("PHASE").unwrap();
    let phase = serde_json::from_value(phase.into()).unwrap();
    session.say(&heartbeat_of(3, phase, None, None));
}

#[test]
fn work_that_is_done_is_a_success_though_the_daemon_is_gone_at_the_end() {
    let end = without_a_verdict(|launch| launch);
    end.expect_code(0);
    end.expect_stderr("then exiting with code 0");
    let said = "the workers of this node succeeded; assuming that the job succeeded too: cannot reach the rendezvous at `";
    end.expect_stderr(said);
    end.expect_no_stderr("error: ");

    let native =
        |phase: &str| without_a_verdict(|launch| launch.native().env("PHASE", phase).role("ends_in_a_phase"));
    let end = native("finishing");
    end.expect_code(0);
    // Stopped with the ranks of another node, which had been told to save.
    let end = native("saving");
    end.expect_code(69);
}

/// Gives a sign of life, then none; rank 0 does not even listen to SIGABRT.
pub(crate) fn hangs() {
    let mut session = Session::open();
    session.receive();
    if std::env::var("RANK").as_deref() == Ok("0") {
        nix::sys::signal::sigprocmask(
            nix::sys::signal::SigmaskHow::SIG_BLOCK,
            Some(&nix::sys::signal::SigSet::all()),
            None,
        )
        .unwrap();
    }
    session.say(&heartbeat(3));
    loop {
        std::thread::park();
    }
}

#[test]
fn a_worker_without_heartbeats_has_failed() {
    let daemon = Daemon::start();
    let launch = launch(&daemon)
        .workers(2)
        .role("hangs")
        .hang_timeout(std::time::Duration::from_millis(300));
    let end = launch.run();
    assert!(matches!(end.code, 134 | 137), "{} {}", end.code, end.stderr);
    end.expect_stderr("hung: no heartbeat for");
    end.expect_stderr("phase training, step 3");
}

/// Waits for a rank of another node, until the test lets it go; it does not even answer.
pub(crate) fn waits_for_a_peer() {
    let fifo = std::env::var("FIFO").unwrap();
    let mut session = Session::open();
    session.receive();
    let (let_go, is_let_go) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        std::fs::read(fifo).unwrap();
        let_go.send(()).unwrap();
    });
    let began = std::time::Instant::now();
    while is_let_go
        .recv_timeout(std::time::Duration::from_millis(20))
        .is_err()
    {
        let waited_ms = began.elapsed().as_millis() as u64;
        let wait = PeerWait {
            operation: "all-reduce #7 of `world`".into(),
            waited_ms,
            peers: "rank 9".into(),
        };
        session.say(&heartbeat_of(3, Phase::Training, None, Some(wait)));
    }
}

#[test]
fn a_worker_that_waits_for_a_rank_of_another_node_is_not_ended() {
    let (daemon, meeting) = (Daemon::start(), Meeting::new());
    let logs = tempfile::tempdir().unwrap();
    let launch = launch(&daemon)
        .role("waits_for_a_peer")
        .native()
        .meet(&meeting)
        .log_dir(logs.path())
        // More than the 5 s after which a wait is reported.
        .hang_timeout(std::time::Duration::from_secs(6));
    let mut launcher = launch.start();
    launcher
        .stderr
        .expect("rank 0: all-reduce #7 of `world` has waited ");
    let kept = "rank 0 makes no progress but is not stopped: all-reduce #7 of `world` has waited ";
    let kept = launcher.stderr.expect(kept);
    assert!(kept.contains(" for rank 9, "), "{kept}");
    meeting.open();
    let end = launcher.wait();
    end.expect_code(0);
    let file = logs.path().join("attempt_0/0/hang.txt");
    let written = std::fs::read_to_string(file).unwrap();
    assert!(
        written.contains("all-reduce #7 of `world` has waited "),
        "{written}"
    );
    assert!(
        written.contains("threads, as the kernel reports them:\nthread "),
        "{written}"
    );
}
