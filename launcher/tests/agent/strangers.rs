//! Who answers at the endpoint and is no daemon, or is one no more.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Word;
use ddp_proto::rendezvous::refused::Code;
use ddp_proto::rendezvous::{Failure, JobOver, Refused, WorkerExit};

use crate::daemon::{Daemon, Policy};
use crate::harness::{launch, launch_at};

/// Types of HTTP/2 frames.
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
/// What a connection begins with.
const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
/// `:status: 404` and `:status: 500` in the static table of HPACK.
const NOT_FOUND: u8 = 0x80 + 13;
const SERVER_ERROR: u8 = 0x80 + 14;

/// Answers every request over HTTP/2 with this status and nothing else, until the test ends.
fn web_server(status: u8) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            // The client ends it when it likes.
            std::thread::spawn(move || answer_all(&mut connection.unwrap(), status));
        }
    });
    address
}

fn answer_all(connection: &mut TcpStream, status: u8) -> std::io::Result<()> {
    connection.read_exact(&mut [0; PREFACE])?;
    connection.write_all(&[0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])?;
    loop {
        let mut head = [0; 9];
        connection.read_exact(&mut head)?;
        let [a, b, c, kind, flags, stream @ ..] = head;
        let length = u32::from_be_bytes([0, a, b, c]);
        std::io::copy(&mut connection.take(length.into()), &mut std::io::sink())?;
        match (kind, flags) {
            (SETTINGS, 0) => connection.write_all(&[0, 0, 0, SETTINGS, 1, 0, 0, 0, 0])?,
            (HEADERS, _) => {
                // The end of the headers, and of the stream.
                connection.write_all(&[0, 0, 1, HEADERS, 0x4 | 0x1])?;
                connection.write_all(&stream)?;
                connection.write_all(&[status])?;
            }
            _ => {}
        }
    }
}

#[test]
fn a_web_server_is_named_as_no_rendezvous() {
    let end = launch_at(web_server(NOT_FOUND).to_string()).run();
    end.expect_code(69);
    end.expect_stderr("is not a rendezvous daemon");
    end.expect_stderr("404");
    end.expect_no_stderr("reconnected");
}

#[test]
fn answers_that_are_no_daemons_count_against_the_time_out() {
    let patience = Duration::from_secs(1);
    let end = launch_at(web_server(SERVER_ERROR).to_string())
        .connect_timeout(patience)
        .run();
    end.expect_code(69);
    assert_eq!(end.stderr.matches("broke: ").count(), 1, "{}", end.stderr);
    end.expect_stderr("cannot reach the rendezvous at");
    end.expect_stderr("500");
    end.expect_no_stderr("reconnected");
}

/// What moves a terminal's cursor, changes its title, or the direction of a text.
const CONTROLS: [char; 5] = ['\u{1b}', '\u{9b}', '\u{7}', '\u{202e}', '\r'];

fn assert_is_clean(text: &str) {
    assert!(text.contains("hostile"), "{text}");
    assert!(!text.contains(CONTROLS), "{text:?}");
}

#[test]
fn a_refusal_of_a_hostile_daemon_controls_no_terminal() {
    let daemon = Daemon::with(Policy {
        refuses: Some(Refused {
            code: Code::Invalid.into(),
            reason: "hostile\u{1b}[2J\u{1b}]0;title\u{7}\u{9b}5A \u{202e}txet\r".into(),
            ..Refused::default()
        }),
        ..Policy::default()
    });
    let end = launch(&daemon).run();
    end.expect_code(2);
    assert_is_clean(&end.stderr);
}

#[test]
fn names_and_words_of_other_nodes_control_no_terminal_and_no_log() {
    let hostile = "hostile\u{1b}[2J\u{202e}\u{9b}5A";
    let exit = WorkerExit {
        rank: 1,
        exit_code: Some(3),
        message: hostile.into(),
        stderr_tail: vec![hostile.into()],
        log_file: hostile.into(),
        ..WorkerExit::default()
    };
    let daemon = Daemon::with(Policy {
        failures: vec![Failure {
            generation: 1,
            hostname: hostile.into(),
            exit: Some(exit.clone()),
            ..Failure::default()
        }],
        ..Policy::default()
    });
    let mut launcher = launch(&daemon)
        .sh(r"printf 'own \033[1m words\n'; exec sleep 1000")
        .start();
    // What this node's own workers write stays as it is.
    launcher.stdout.expect("own \u{1b}[1m words");
    daemon.say(Word::JobOver(JobOver {
        exit_code: 3,
        reason: hostile.into(),
        no_restart: hostile.into(),
        first_failure: Some(exit),
        first_failure_host: hostile.into(),
        ..JobOver::default()
    }));
    let end = launcher.wait();
    end.expect_code(3);
    assert_is_clean(&end.stderr);
}
