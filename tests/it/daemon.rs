//! `ddp-rendezvous` as a program.

use std::net::TcpListener;

use nix::sys::signal::Signal;

use crate::harness::{Daemon, Program, launch};

fn daemon(listen: &str) -> Program {
    Program::new(env!("CARGO_BIN_EXE_ddp-rendezvous")).args(["serve", "--listen", listen].map(Into::into))
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
    finished.expect_exit(2);
    insta::assert_snapshot!(finished.stderr().replace(&address, "ADDRESS"), @r"
        error: cannot listen on `ADDRESS`: Address already in use (os error 98)
          hint: another program holds the port: choose another one, or 0 for a free one
        ");
}

#[test]
fn it_outlives_its_jobs() {
    let daemon = Daemon::start();
    for id in ["first", "second"] {
        launch()
            .flag("--rdzv-endpoint", &daemon.endpoint)
            .flag("--rdzv-id", id)
            .target("true")
            .run()
            .expect_exit(0);
    }
    daemon.stop().expect_exit(0);
}
