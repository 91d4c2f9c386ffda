//! What a user can get wrong before anything runs: one clear message, exit code 2 or 69, nothing started.

use std::net::TcpListener;

use crate::harness::{Finished, Launch, launch, temp_dir};

/// The message with what differs between runs taken out.
#[track_caller]
fn message(launch: Launch, code: i32) -> String {
    let finished: Finished = launch.run();
    finished.expect_exit(code);
    assert!(finished.stdout().is_empty(), "{:?}", finished.stdout());
    finished.stderr()
}

#[test]
fn unknown_flags() {
    let text = message(launch().words(&["--nproc-per-nod", "2"]).target("true"), 2);
    insta::assert_snapshot!(text, @"");
}

#[test]
fn values_out_of_range() {
    insta::assert_snapshot!(message(launch().flag("--nproc_per_node", "0").target("true"), 2), @"");
    insta::assert_snapshot!(message(launch().flag("--rdzv-endpoint", "fd00::1").target("true"), 2), @"");
    insta::assert_snapshot!(message(launch().flag("--rdzv-conf", "colour=red").target("true"), 2), @"");
}

#[test]
fn no_target() {
    insta::assert_snapshot!(message(launch().nproc(2), 2), @"");
}

#[test]
fn bad_variables() {
    insta::assert_snapshot!(message(launch().env("PET_MAX_RESTARTS", "many").target("true"), 2), @"");
}

#[test]
fn several_nodes_without_an_endpoint() {
    insta::assert_snapshot!(message(launch().flag("--nnodes", "2").target("true"), 2), @"");
}

#[test]
fn a_missing_target_file() {
    insta::assert_snapshot!(message(launch().target("absent.yaml"), 2), @"");
    insta::assert_snapshot!(message(launch().target("absent.py"), 2), @"");
}

#[test]
fn overrides_without_a_configuration() {
    insta::assert_snapshot!(message(launch().set("train.steps=3").target("true"), 2), @"");
}

#[test]
fn an_unknown_key_of_the_launch_section() {
    let dir = temp_dir();
    let yaml = "model: {kind: mlp}\nlaunch:\n  nproc_per_node: 2\n  nodes: 5\n";
    std::fs::write(dir.path().join("t.yaml"), yaml).expect("writable");
    insta::assert_snapshot!(message(launch().dir(dir.path()).target("t.yaml"), 2), @"");
}

#[test]
fn a_port_in_use_by_a_stranger() {
    let stranger = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = stranger.local_addr().expect("bound");
    // Closes each connection at once, as a program with another protocol does. It ends with the process.
    std::thread::spawn(move || stranger.incoming().for_each(drop));
    let text = message(launch().node_of(2, &address.to_string(), "j").target("true"), 69);
    insta::assert_snapshot!(text.replace(&address.port().to_string(), "PORT"), @"");
}

#[test]
fn a_port_in_use_by_a_silent_stranger() {
    // Accepts nothing, answers nothing: the kernel completes the connection, then nothing comes.
    let stranger = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = stranger.local_addr().expect("bound");
    let text = message(launch().node_of(2, &address.to_string(), "j").target("true"), 69);
    insta::assert_snapshot!(text.replace(&address.port().to_string(), "PORT"), @"");
}
