//! `tests/gpu/run.sh`, which is for a machine with a GPU, from the doctor to the table: with models of its
//! configurations' form and hardly a size.

use super::{COMPILING, emulator};
use crate::harness::{python_is_missing, repository, temp_dir};

#[test]
fn the_script_for_gpus_comes_to_its_table() {
    if python_is_missing() {
        return;
    }
    let emulator = emulator();
    let (packed, logs) = (temp_dir(), temp_dir());
    let put = |name: &str, text: &str| std::fs::write(packed.path().join(name), text).expect("writable");
    for (name, path) in [
        ("ddp-run", env!("CARGO_BIN_EXE_ddp-run")),
        ("ddp-train", env!("CARGO_BIN_EXE_ddp-train")),
    ] {
        std::os::unix::fs::symlink(path, packed.path().join(name)).expect("a link");
    }
    for name in ["report.py", "small.yaml", "gpt2-124m.yaml", "gpt2-350m.yaml"] {
        let text = std::fs::read_to_string(repository("tests/gpu").join(name)).expect("readable");
        put(name, &shrunk(&text));
    }
    let text = std::fs::read_to_string(repository("examples/data/python-reference.txt")).expect("readable");
    put("python-reference.txt", &text[..20_000]);
    put("val.txt", &text[20_000..21_000]);
    let folders = [packed.path(), logs.path()].map(|path| path.as_os_str().to_owned());
    let sections = ["losses", "speed", "overlap"].map(Into::into);
    let mut running = emulator
        .program(repository("tests/gpu/run.sh").to_str().expect("UTF-8"))
        .env("EMULATOR_GPUS", "1")
        .env("GPU_STEPS", "12")
        .args(folders.into_iter().chain(sections))
        .start();
    assert!(running.ended_within(COMPILING));
    let finished = running.finish();
    finished
        .expect_exit(0)
        .expect_stdout("ranks share it by NCCL_MULTI_RANK_GPU_ENABLE")
        .expect_stdout("MFU: tokens/s x (6 parameters + 12 layers width sequence) FLOP")
        .expect_stdout("as it trains")
        .expect_stdout("all after backward");
    let agrees = finished.stdout().iter().filter(|line| line.contains("-agrees"));
    let ok = agrees.filter(|line| line.contains(" ok "));
    assert_eq!(ok.count(), 4, "{}", finished.transcript());
}

/// A configuration with two narrow blocks, and few tokens to validate on.
fn shrunk(yaml: &str) -> String {
    let lines = yaml.lines().map(|line| {
        if line.starts_with("model:") {
            return "model: { kind: gpt2, n_layer: 2, n_head: 2, n_embd: 64, block_size: 16 }".to_owned();
        }
        let line = line
            .replace("steps: 50", "steps: 6")
            .replace("micro_batch: 32", "micro_batch: 4");
        line.replace("data: { ", "data: { val: val.txt, ")
    });
    lines.map(|line| line + "\n").collect()
}
