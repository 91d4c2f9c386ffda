//! `tests/gpu/run.sh`, which is for a machine with a GPU, from the doctor to the table: with models of its
//! configurations' form and hardly a size.

use std::path::Path;

use tempfile::TempDir;

use super::emulator;
use crate::harness::{
    Finished, Program, environment_of, processes, python_is_missing, repository, temp_dir, wait_for_step,
};

/// Seconds: many times the limits of a card.
const PATIENT: &str = "4320";

/// The files that `pack.sh` would pack, and a folder for logs in which all kernels are compiled.
fn folders() -> (TempDir, TempDir) {
    let (packed, logs) = (temp_dir(), temp_dir());
    let put = |name: &str, text: &str| std::fs::write(packed.path().join(name), text).expect("writable");
    let link = |from: &Path, to: &Path| std::os::unix::fs::symlink(from, to).expect("a link");
    for (name, path) in [
        ("ddp-run", env!("CARGO_BIN_EXE_ddp-run")),
        ("ddp-train", env!("CARGO_BIN_EXE_ddp-train")),
    ] {
        link(Path::new(path), &packed.path().join(name));
    }
    link(
        &repository("tests/gpu/sharing.sh"),
        &packed.path().join("sharing.sh"),
    );
    for name in "report.py kill9.py small.yaml ranks.yaml gpt2-124m.yaml gpt2-350m.yaml".split(' ') {
        let text = std::fs::read_to_string(repository("tests/gpu").join(name)).expect("readable");
        put(name, &shrunk(name, &text));
    }
    let text = std::fs::read_to_string(repository("examples/data/python-reference.txt")).expect("readable");
    put("python-reference.txt", &text[..20_000]);
    put("val.txt", &text[20_000..21_000]);
    // The script removes its cache, of which this is but a name.
    link(&emulator().folder().join("cache"), &logs.path().join("cache"));
    (packed, logs)
}

/// A configuration with narrow blocks, a few steps, bytes as tokens, and few of them to validate on.
fn shrunk(name: &str, yaml: &str) -> String {
    let layers = if name == "ranks.yaml" { 4 } else { 2 };
    let lines = yaml.lines().map(|line| {
        if line.starts_with("model:") {
            return format!(
                "model: {{ kind: gpt2, n_layer: {layers}, n_head: 2, n_embd: 64, block_size: 16 }}"
            );
        }
        line.replace("steps: 50", "steps: 4")
            .replace("steps: 60", "steps: 8")
            .replace("checkpoint_every: 10", "checkpoint_every: 4")
            .replace(".safetensors, tokenizer: gpt2", ".txt, tokenizer: bytes")
            .replace("data: { ", "data: { val: val.txt, ")
    });
    lines.map(|line| line + "\n").collect()
}

fn script(packed: &Path, logs: &Path, sections: &[&str]) -> Program {
    emulator()
        .program(repository("tests/gpu/run.sh").to_str().expect("UTF-8"))
        .env("EMULATOR_GPUS", "1")
        .env("GPU_BUDGET_S", PATIENT)
        .env("GPU_SURVIVORS_S", PATIENT)
        .env("GPU_STEPS", "12")
        .env("GPU_RANKS_STEPS", "4")
        .env("GPU_BATCHES", "2 2")
        .args([packed, logs])
        .args(sections)
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn the_script_for_gpus_comes_to_its_table() {
    if python_is_missing() {
        return;
    }
    let (packed, logs) = folders();
    let sections = [
        "losses", "ranks", "kill9", "layouts", "queues", "speed", "overlap",
    ];
    let finished = script(packed.path(), logs.path(), &sections).start().finish();
    // A test of the worker, which is not built here.
    let missing = "gpu_nccl-overlap         NOT RUN: not packed";
    finished
        .expect_exit(1)
        .expect_stdout("NCCL 2.30.7; ranks share it by NCCL_MULTI_RANK_GPU_ENABLE")
        .expect_stdout("MFU: tokens/s x (6 parameters + 12 layers width sequence) FLOP")
        .expect_stdout("one rank alone")
        .expect_stdout("as it trains")
        .expect_stdout("all after backward")
        .expect_stdout(missing)
        .expect_stdout("DIGEST: ");
    expect_agreement(&finished, logs.path(), 4 + 6 + 1 + 12 + 4, &[missing]);
}

/// So many runs agree with those of the processor, and these checks alone fail.
#[track_caller]
fn expect_agreement(finished: &Finished, logs: &Path, agreeing: usize, failing: &[&str]) {
    let results = std::fs::read_to_string(logs.join("results.txt")).expect("results");
    let failed = |line: &&str| line.contains("FAILED") || line.contains("NOT RUN");
    let failures: Vec<_> = results.lines().filter(failed).collect();
    assert_eq!(failures, failing, "{}", finished.transcript());
    let agrees = |line: &&str| line.contains("-agrees") && line.contains(" ok ");
    assert_eq!(results.lines().filter(agrees).count(), agreeing, "{results}");
}

/// An NCCL that lets no ranks share a card: each rank names a host of its own.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn with_an_older_nccl_ranks_share_the_card_as_if_on_different_hosts() {
    if python_is_missing() {
        return;
    }
    let (packed, logs) = folders();
    let script = script(packed.path(), logs.path(), &["ranks", "kill9"]);
    let finished = script.env("EMULATOR_NCCL", "22809").start().finish();
    finished
        .expect_exit(0)
        .expect_stdout("NCCL 2.28.9; ranks share it by NCCL_HOSTID");
    expect_agreement(&finished, logs.path(), 6 + 1, &[]);
}

/// Ctrl-C, while one lane trains on one card and another trains with two ranks, below a program that watches them.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_script_that_is_interrupted_leaves_no_process_on_the_gpu() {
    if python_is_missing() {
        return;
    }
    let (packed, logs) = folders();
    let sections = ["losses", "kill9", "overlap"];
    let mut screen = script(packed.path(), logs.path(), &sections).on_screen();
    wait_for_step(&logs.path().join("kill9-restart"), 1);
    screen.type_in("\x03");
    let (code, shown) = screen.finish();
    let logs = logs.path().to_str().expect("UTF-8");
    let ours = |pid: &i32| {
        environment_of(*pid)
            .get("XDG_CACHE_HOME")
            .is_some_and(|cache| cache.starts_with(logs))
    };
    let left: Vec<_> = processes().into_iter().filter(ours).collect();
    assert_eq!(left, [0; 0], "{shown}");
    assert_eq!(code, Some(1), "{shown}");
    for line in [
        "kill9-restart            FAILED (stopped)",
        "overlap                  NOT RUN: stopped",
        "MFU: tokens/s",
    ] {
        assert!(shown.contains(line), "no `{line}`:\n{shown}");
    }
}
