//! `ddp-rendezvous` as a program.

use std::fs::File;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;

use crate::harness::{Daemon, Program, ReservedPort, ddp_rendezvous, eventually, launch, temp_dir};

fn daemon(listen: &str) -> Program {
    ddp_rendezvous().args(["serve", "--listen", listen])
}

#[test]
fn it_says_where_it_listens_and_stops_cleanly() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut running = daemon("127.0.0.1:0").start();
        let line = running.wait_for("127.0.0.1:");
        let port: u16 = line
            .strip_prefix("127.0.0.1:")
            .and_then(|port| port.parse().ok())
            .expect("an address");
        assert_ne!(port, 0);
        running.signal(signal);
        running.finish().expect_exit(0);
    }
}

#[test]
fn a_port_in_use_is_one_clear_message() {
    let holder = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = holder.local_addr().expect("bound").to_string();
    let finished = daemon(&address).run();
    finished.expect_exit(69);
    insta::assert_snapshot!(finished.stderr().replace(&address, "ADDRESS"), @r"
        error: cannot listen on `ADDRESS`: Address already in use (os error 98)
          hint: another program uses the port: choose a different one, or 0 for a free port
        ");
}

#[test]
fn a_token_file_that_is_made_is_named() {
    let dir = temp_dir();
    let at = |path: &str| dir.path().join(path).to_str().expect("unicode").to_owned();
    let (token, typo) = (at("token"), at("typo/token"));
    let mut running = daemon("127.0.0.1:0").env("DDP_TOKEN_FILE", &token).start();
    running.wait_for(&format!("made a new token: {token}"));
    running.wait_for("127.0.0.1:");
    running.signal(Signal::SIGTERM);
    running.finish().expect_exit(0);
    // In a folder that is not there.
    daemon("127.0.0.1:0")
        .env("DDP_TOKEN_FILE", &typo)
        .run()
        .expect_exit(77)
        .expect_stderr(&format!("cannot make the token file `{typo}`: No such file"))
        .expect_stderr("hint: set DDP_TOKEN_FILE to a file in a directory that is there");
    assert!(!dir.path().join("typo").exists());
    // A launcher that hosts says so too.
    let port = ReservedPort::new();
    let other = at("other");
    launch()
        .node_of(1, &port.endpoint, "first")
        .env("DDP_TOKEN_FILE", &other)
        .shell("true")
        .run()
        .expect_exit(0)
        .expect_stderr(&format!("[ddp-run] made a new token: {other}"));
}

#[test]
fn its_help_lists_the_exit_codes() {
    let help = ddp_rendezvous().args(["--help"]);
    help.run().expect_exit(0).expect_stdout("Exit codes: 0 ");
}

/// A look-up that takes as long as the test likes: the C library's resolver reads a file of aliases before it asks
/// anybody, and this one is a pipe.
#[test]
fn a_signal_during_the_look_up_of_its_name_ends_it_at_once() {
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let dir = temp_dir();
        let aliases = dir.path().join("aliases");
        mkfifo(&aliases, Mode::S_IRWXU).expect("a pipe");
        let mut running = daemon("node-of-nobody:0").env("HOSTALIASES", &aliases).start();
        let held = eventually("the daemon reads the aliases, or ends", || {
            let opened = File::options()
                .write(true)
                .custom_flags(OFlag::O_NONBLOCK.bits())
                .open(&aliases);
            match opened {
                Ok(held) => Some(Some(held)),
                Err(_) => running.ended_within(Duration::ZERO).then_some(None),
            }
        });
        if held.is_none() {
            eprintln!("SKIPPED: names are looked up here without a file of aliases");
            return;
        }
        running.signal(signal);
        running.finish().expect_exit(code).expect_silence();
    }
}

#[test]
fn each_decision_is_logged_with_its_time() {
    let daemon = Daemon::start();
    launch()
        .flag("--rdzv-endpoint", &daemon.endpoint)
        .flag("--rdzv-id", "logged")
        .target("true")
        .run()
        .expect_exit(0);
    let finished = daemon.stop();
    let log = finished.stderr();
    let decision = log
        .lines()
        .find(|line| line.contains(" joined"))
        .expect("a decision");
    let time = decision.split(' ').next().unwrap_or_default();
    let form: String = time
        .chars()
        .map(|c| if c.is_ascii_digit() { '0' } else { c })
        .collect();
    assert_eq!(form, "0000-00-00T00:00:00.000000Z", "{decision}");
    assert!(
        decision.contains(" INFO ") && !log.contains("ddp_run::"),
        "no names of modules: {log}"
    );
}

#[test]
fn json_logs_have_job_generation_and_node() {
    let daemon = Daemon::start_with("127.0.0.1:0", &["--log-format", "json"]);
    let nodes = ["0", "1"].map(|rank| {
        let node = launch().nproc(1).node_of(2, &daemon.endpoint, "logged");
        let node = node
            .flag("--node-rank", rank)
            .flag("--rdzv-conf", "is_host=false");
        node.shell("[ $RANK = 0 ] || exit 3; sleep 60").start()
    });
    for node in nodes {
        node.finish().expect_exit(3);
    }
    let args = ["serve", "--log-format=json", "--listen", &daemon.endpoint];
    let second = ddp_rendezvous().args(args);
    let second = second.run().expect_exit(69).stderr();
    let log = [daemon.stop().stderr(), second].join("\n");
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in `{line}`")))
        .collect();
    let find = |words: &str| {
        let line = lines
            .iter()
            .find(|line| line["message"].as_str().is_some_and(|m| m.contains(words)));
        line.unwrap_or_else(|| panic!("no line has `{words}`:\n{log}"))
    };
    let first = (Some("logged"), Some(1));
    let end = find("ended: ");
    for line in [find("all 2 nodes joined"), end] {
        assert_eq!((line["job"].as_str(), line["generation"].as_u64()), first);
    }
    let host = nix::unistd::gethostname()
        .expect("a name")
        .into_string()
        .expect("unicode");
    assert_eq!(end["node"].as_str(), Some(host.as_str()), "{end}");
    find("stopping");
    assert_eq!(find("cannot listen on")["level"], "ERROR");
    for line in &lines {
        let time = line["timestamp"].as_str().expect("a time");
        assert!(time.ends_with('Z') && time.contains('T'), "{line}");
    }
}
