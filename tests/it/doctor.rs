//! `ddp-train doctor` on whatever machine this is.

use crate::harness::{Program, ddp_train};

#[test]
fn it_reports_without_a_gpu_and_with_one() {
    let finished = ddp_train().args(["doctor"]).run();
    finished.expect_exit(0);
    for section in [
        "CPU",
        "memory",
        "processes",
        "GPU",
        "libraries loaded at run time",
        "libnccl.so",
    ] {
        finished.expect_stdout(section);
    }
    assert_eq!(finished.stderr(), "");
}

#[test]
fn a_hidden_gpu_is_not_counted() {
    let finished = ddp_train().args(["doctor"]).env("CUDA_VISIBLE_DEVICES", "").run();
    finished.expect_exit(0);
    assert!(!finished.stdout().iter().any(|line| line.contains("device 0")));
}

#[test]
fn an_answer_that_nobody_reads_to_its_end_is_no_failure_and_one_that_is_lost_is() {
    let asked = [
        (env!("CARGO_BIN_EXE_ddp-train"), &["doctor"][..]),
        (env!("CARGO_BIN_EXE_ddp-run"), &["--dry-run", "true"]),
        (env!("CARGO_BIN_EXE_ddp-run"), &["--completions", "bash"]),
        (env!("CARGO_BIN_EXE_ddp-run"), &["--help"]),
        (env!("CARGO_BIN_EXE_ddp-run"), &["-h"]),
        (env!("CARGO_BIN_EXE_ddp-run"), &["--version"]),
        (env!("CARGO_BIN_EXE_ddp-train"), &["run", "--help"]),
        (env!("CARGO_BIN_EXE_ddp-rendezvous"), &["help", "serve"]),
    ];
    for (program, args) in asked {
        let ask = |out: std::fs::File| {
            let program = Program::new(program).args(args.iter());
            program.stdout_to(out).run()
        };
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        ask(std::os::fd::OwnedFd::from(writer).into())
            .expect_exit(0)
            .expect_silence();
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .expect("a device");
        ask(full)
            .expect_exit(70)
            .expect_stderr("error: cannot write the answer to standard output: No space left");
    }
}
