//! `ddp-train doctor` on whatever machine this is.

use crate::harness::Program;

fn ddp_train(args: &[&str]) -> Program {
    Program::new(env!("CARGO_BIN_EXE_ddp-train")).args(args.iter().map(Into::into))
}

#[test]
fn it_reports_without_a_gpu_and_with_one() {
    let finished = ddp_train(&["doctor"]).run();
    finished.expect_exit(0);
    for section in [
        "processor",
        "memory",
        "processes",
        "GPU",
        "libraries loaded at run time",
        "libnccl.so",
        "searched",
    ] {
        finished.expect_stdout(section);
    }
    assert_eq!(finished.stderr(), "");
}

#[test]
fn a_hidden_gpu_is_not_counted() {
    let finished = ddp_train(&["doctor"]).env("CUDA_VISIBLE_DEVICES", "").run();
    finished.expect_exit(0);
    assert!(!finished.stdout().iter().any(|line| line.contains("device 0")));
}
