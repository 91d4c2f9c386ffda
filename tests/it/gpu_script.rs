//! `tests/gpu/run.sh` on a pretended GPU: its limits, its order and what it leaves, not what it measures.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;

use crate::harness::{Program, repository, temp_dir};

/// The calls that the documentation tells people to make.
const CALLS: [&str; 2] = [
    "losses kernels speed peers",
    "ranks kill9 overlap nccl ops device",
];

/// A packed folder: a machine with a GPU, on which no training run succeeds and every test passes.
fn packed() -> TempDir {
    let folder = temp_dir();
    let doctor = "#!/bin/sh\necho '  device 0 pretended'\n";
    write(folder.path(), "ddp-train", doctor);
    write(folder.path(), "ddp-run", "#!/bin/sh\nexit 1\n");
    for name in ["gpu_kernels", "gpu_nccl", "gpu_ops", "gpu_device"] {
        write(folder.path(), name, "#!/bin/sh\necho \"ran: $*\"\n");
    }
    folder
}

fn write(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), text).expect("writable");
    fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).expect("ours");
}

fn script(packed: &Path, logs: &Path, sections: &str) -> Program {
    let folders = [packed, logs].map(|path| path.as_os_str().to_owned());
    let sections = sections.split_whitespace().map(OsString::from);
    Program::new(repository("tests/gpu/run.sh")).args(folders.into_iter().chain(sections))
}

#[test]
fn the_calls_of_the_documentation_have_the_time_that_their_sections_may_take() {
    let packed = packed();
    let documentation = fs::read_to_string(repository("docs/GPU.md")).expect("readable");
    for sections in CALLS {
        assert!(documentation.contains(sections), "docs/GPU.md: `{sections}`");
        let logs = temp_dir();
        let finished = script(packed.path(), logs.path(), sections).run();
        let notes = finished.stdout().iter().filter(|line| line.starts_with("note:"));
        assert_eq!(notes.count(), 0, "{}", finished.transcript());
    }
}

#[test]
fn a_call_without_the_time_for_its_sections_says_so_and_names_the_calls_that_have_it() {
    let (packed, logs) = (packed(), temp_dir());
    let finished = script(packed.path(), logs.path(), "nccl device")
        .env("GPU_BUDGET_S", "120")
        .run();
    finished
        .expect_exit(0)
        .expect_stdout("note: these sections may take 155 s, and GPU_BUDGET_S is 120");
    for sections in CALLS {
        finished.expect_stdout(&format!("`{sections}`"));
    }
}

#[test]
fn the_sizes_of_training_are_a_check_of_their_own_and_the_logs_are_packed() {
    let (packed, logs) = (packed(), temp_dir());
    script(packed.path(), logs.path(), "ops nccl")
        .run()
        .expect_exit(0);
    let log = |name: &str| fs::read_to_string(logs.path().join(name)).expect("a log");
    assert_eq!(log("gpu_ops.log"), "ran: --skip sizes_of_training\n");
    assert_eq!(log("gpu_ops-training.log"), "ran: sizes_of_training\n");
    assert_eq!(log("gpu_nccl.log"), "ran: --test-threads 1\n");
    let archive = logs.path().join("logs.tgz");
    let listed = Program::new("tar").args(["-tzf".into(), archive.into()]).run();
    listed.expect_exit(0).expect_stdout("./gpu_ops.log");
}
