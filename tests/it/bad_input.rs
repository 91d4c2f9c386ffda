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
    let text = message(launch().words(["--nproc-per-nide", "2"]).target("true"), 2);
    insta::assert_snapshot!(text, @r"
        [ddp-run] error: unexpected argument '--nproc-per-nide' found

          hint: a similar argument exists: '--nproc-per-node'

        Usage: ddp-run --nproc-per-node <N|auto|cpu|gpu> <TARGET>...

        For more information, try '--help'.
        ");
}

#[test]
fn values_out_of_range() {
    insta::assert_snapshot!(message(launch().flag("--nproc_per_node", "0").target("true"), 2), @r"
        [ddp-run] error: invalid value '0' for '--nproc-per-node <N|auto|cpu|gpu>': expected a whole number from 1 to 4096, `auto`, `cpu` or `gpu`

        For more information, try '--help'.
        ");
    insta::assert_snapshot!(message(launch().flag("--nproc-per-node", "-1").target("true"), 2), @r"
        [ddp-run] error: invalid value '-1' for '--nproc-per-node <N|auto|cpu|gpu>': expected a whole number from 1 to 4096, `auto`, `cpu` or `gpu`

        For more information, try '--help'.
        ");
    insta::assert_snapshot!(message(launch().flag("--rdzv-endpoint", "fd00::1").target("true"), 2), @r"
        [ddp-run] error: invalid value 'fd00::1' for '--rdzv-endpoint <HOST[:PORT]>': expected `host[:port]`, an IPv6 address in brackets, for example `node0:29400` or `[fd00::1]:29400`

        For more information, try '--help'.
        ");
}

#[test]
fn no_target() {
    insta::assert_snapshot!(message(launch().nproc(2), 2), @r"
        [ddp-run] error: the following required arguments were not provided:
          <TARGET>...

        Usage: ddp-run --nproc-per-node <N|auto|cpu|gpu> <TARGET>...

        For more information, try '--help'.
        ");
}

#[test]
fn bad_variables() {
    insta::assert_snapshot!(message(launch().env("PET_MAX_RESTARTS", "many").target("true"), 2), @"[ddp-run] error: environment variable `PET_MAX_RESTARTS` is `many`: expected a whole number from 0");
}

#[test]
fn flags_without_effect_are_taken() {
    launch()
        .words(["--use_env"])
        .target("true")
        .run()
        .expect_exit(0)
        .expect_stderr("[ddp-run] ignored `--use-env`: it has no effect here");
}

#[test]
fn a_temporary_directory_that_cannot_be_written_is_named() {
    let text = message(
        launch()
            .env("TMPDIR", "/proc/1")
            .words(["-r", "3"])
            .target("true"),
        2,
    );
    assert!(
        text.starts_with("[ddp-run] error: cannot create a directory for log files in `/proc/1`: ")
            && text.contains("hint: set `--log-dir`"),
        "{text}"
    );
}

#[test]
fn several_nodes_without_an_endpoint() {
    insta::assert_snapshot!(message(launch().flag("--nnodes", "2").target("true"), 2), @r"
        [ddp-run] error: 2 nodes need a rendezvous, but `--rdzv-endpoint` is not set
        [ddp-run]   hint: give the address of one node on all nodes: `--rdzv-endpoint node0:29400`
        ");
}

#[test]
fn a_missing_target_file() {
    insta::assert_snapshot!(message(launch().target("absent.yaml"), 2), @r"
        [ddp-run] error: cannot read target `absent.yaml`: No such file or directory (os error 2)
        [ddp-run]   hint: give the path of a `.yaml` configuration, of a `.py` script, or a program
        ");
    insta::assert_snapshot!(message(launch().target("absent.py"), 2), @r"
        [ddp-run] error: cannot read target `absent.py`: No such file or directory (os error 2)
        [ddp-run]   hint: give the path of a `.yaml` configuration, of a `.py` script, or a program
        ");
}

#[test]
fn overrides_without_a_configuration() {
    insta::assert_snapshot!(message(launch().set("train.steps=3").target("true"), 2), @r"
        [ddp-run] error: `--set train.steps=3` needs a YAML target, but the target is `true`
        [ddp-run]   hint: pass arguments of a program after its name: `ddp-run true ARGS`
        ");
}

#[test]
fn a_port_in_use_by_a_stranger() {
    let stranger = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = stranger.local_addr().expect("bound");
    // Closes each connection at once, as a program with another protocol does. It ends with the process.
    std::thread::spawn(move || stranger.incoming().for_each(drop));
    let text = message(launch().node_of(2, &address.to_string(), "j").target("true"), 69);
    insta::assert_snapshot!(text.replace(&address.port().to_string(), "PORT"), @r"
        [ddp-run] error: port PORT of rendezvous endpoint `127.0.0.1:PORT` is in use by a program that is not a ddp-run rendezvous: it does not speak TLS as a rendezvous does
        [ddp-run]   hint: choose a different port with `--rdzv-endpoint 127.0.0.1:PORT` on all nodes, or stop the program that uses it (`ss -ltnp 'sport = :PORT'`); if it is a rendezvous, give both the same token; or both `--insecure`, in a network that you trust entirely
        ");
}

#[test]
fn a_port_in_use_by_a_silent_stranger() {
    // Accepts nothing, answers nothing: the kernel completes the connection, then nothing comes.
    let stranger = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = stranger.local_addr().expect("bound");
    let text = message(launch().node_of(2, &address.to_string(), "j").target("true"), 69);
    insta::assert_snapshot!(text.replace(&address.port().to_string(), "PORT"), @r"
        [ddp-run] error: port PORT of rendezvous endpoint `127.0.0.1:PORT` is in use by a program that is not a ddp-run rendezvous: it did not answer within 5 s
        [ddp-run]   hint: choose a different port with `--rdzv-endpoint 127.0.0.1:PORT` on all nodes, or stop the program that uses it (`ss -ltnp 'sport = :PORT'`); if it is a rendezvous, give both the same token; or both `--insecure`, in a network that you trust entirely
        ");
}

#[test]
fn a_log_directory_that_is_a_file() {
    let dir = temp_dir();
    let file = dir.path().join("log");
    std::fs::write(&file, "").expect("ours");
    let file = file.display().to_string();
    let text = message(launch().flag("--log-dir", &file).target("true"), 2);
    insta::assert_snapshot!(text.replace(&file, "FILE"), @r"
        [ddp-run] error: cannot write `FILE`: Not a directory (os error 20)
        [ddp-run]   hint: choose a writable directory: `--log-dir` for log files, TMPDIR for other files
        ");
}
