//! `tests/gpu/run.sh` on a pretended GPU: its lanes, its limits, its order and what it leaves, not what it measures.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tempfile::TempDir;

use crate::harness::{Finished, Program, environment_of, eventually, processes, repository, temp_dir};

/// What all processes of a test have in their environment, beside a folder of its own.
const MARK: &str = "GPU_SCRIPT_TEST";

/// A test that stands still, deaf to what asks it to end, as does a process of its own in another session. It says so
/// with a file of its name.
const STUCK: &str = "trap '' TERM\nsetsid sh -c 'trap \"\" TERM; exec tail -f /dev/null' &\n\
                     touch \"$0.began\"\nexec tail -f /dev/null\n";

/// A packed folder: a machine with a GPU, on which no training run succeeds and every test passes.
fn packed() -> TempDir {
    let folder = temp_dir();
    write(folder.path(), "ddp-train", "echo '  device 0 pretended'\n");
    write(folder.path(), "ddp-run", "exit 1\n");
    for name in ["gpu_kernels", "gpu_nccl", "gpu_ops", "gpu_device"] {
        write(folder.path(), name, "echo \"ran: $*\"\n");
    }
    folder
}

/// A shell script of this name.
fn write(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), format!("#!/bin/sh\n{text}")).expect("writable");
    fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).expect("ours");
}

fn script(packed: &Path, logs: &Path, sections: &str) -> Program {
    let folders = [packed, logs].map(|path| path.as_os_str().to_owned());
    let sections = sections.split_whitespace().map(OsString::from);
    Program::new(repository("tests/gpu/run.sh"))
        .env(MARK, packed.to_str().expect("UTF-8"))
        .args(folders.into_iter().chain(sections))
}

/// The names of the checks, as `results.txt` has them.
fn checks(logs: &Path) -> Vec<String> {
    let text = fs::read_to_string(logs.join("results.txt")).expect("results");
    let names = text.lines().filter_map(|line| line.split("  ").next());
    names.map(|name| name.trim().to_owned()).collect()
}

#[track_caller]
fn expect_nothing_left(packed: &Path) {
    let ours = |pid: &i32| {
        environment_of(*pid).get(MARK).map(String::as_str) == Some(packed.to_str().expect("UTF-8"))
    };
    let left: Vec<_> = processes().into_iter().filter(ours).collect();
    assert_eq!(left, [0; 0]);
}

#[track_caller]
fn expect_line(finished: &Finished, check: &str, outcome: &str) {
    let is_it = |line: &&String| line.starts_with(&format!("{check} ")) && line.contains(outcome);
    let found = finished.stdout().iter().find(is_it);
    assert!(
        found.is_some(),
        "no `{check}` with `{outcome}`; {}",
        finished.transcript()
    );
}

#[test]
fn one_call_has_the_time_that_all_sections_may_take() {
    let (packed, logs) = (packed(), temp_dir());
    let finished = script(packed.path(), logs.path(), "").run();
    let notes = finished.stdout().iter().filter(|line| line.starts_with("note:"));
    assert_eq!(notes.count(), 0, "{}", finished.transcript());
    for check in ["loss-cpu", "loss-bf16", "ranks-2", "kill9", "speed-124m", "peers"] {
        expect_line(&finished, check, "FAILED");
    }
    for check in ["gpu_ops", "gpu_device", "gpu_nccl", "gpu_kernels"] {
        expect_line(&finished, check, "ok");
    }
}

#[test]
fn a_call_without_the_time_for_its_sections_says_so() {
    let (packed, logs) = (packed(), temp_dir());
    script(packed.path(), logs.path(), "nccl device")
        .env("GPU_BUDGET_S", "60")
        .run()
        .expect_exit(0)
        .expect_stdout("note: these sections may take 70 s, and GPU_BUDGET_S is 60");
}

#[test]
fn an_unknown_section_is_refused_with_those_that_there_are() {
    let (packed, logs) = (packed(), temp_dir());
    script(packed.path(), logs.path(), "ops nccll")
        .run()
        .expect_exit(2)
        .expect_stderr("unknown section `nccll`, known are: losses ops device ranks kill9 nccl kernels");
}

#[test]
fn each_part_of_the_tests_is_a_check_of_its_own_and_the_logs_are_packed() {
    let (packed, logs) = (packed(), temp_dir());
    script(packed.path(), logs.path(), "ops nccl")
        .run()
        .expect_exit(0);
    let log = |name: &str| fs::read_to_string(logs.path().join(name)).expect("a log");
    assert_eq!(log("gpu_ops.log"), "ran: --skip sizes_of_training\n");
    assert_eq!(log("gpu_ops-training.log"), "ran: sizes_of_training\n");
    assert_eq!(
        log("gpu_nccl.log"),
        "ran: --test-threads 1 --skip collectives_run_beside_kernels\n"
    );
    let archive = logs.path().join("logs.tgz");
    let listed = Program::new("tar").args(["-tzf".into(), archive.into()]).run();
    listed.expect_exit(0).expect_stdout("./gpu_ops.log");
}

/// Each of two tests waits for the other, which only runs beside it; the one that measures finds all others gone.
#[test]
fn lanes_run_beside_each_other_and_what_measures_runs_alone() {
    let (packed, logs) = (packed(), temp_dir());
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    for name in ["there", "back"] {
        mkfifo(&packed.path().join(name), mode).expect("a pipe with a name");
    }
    let in_its_folder = |text: &str| format!("set -e\ncd \"$(dirname \"$0\")\"\n{text}");
    let meeting = |text: &str| in_its_folder(&format!("touch running-$$\n{text}rm running-$$\n"));
    let first = "case $1 in --skip) echo there >there; cat back;; esac\n";
    write(packed.path(), "gpu_ops", &meeting(first));
    write(
        packed.path(),
        "gpu_nccl",
        &meeting("cat there; echo back >back\n"),
    );
    let alone = "for other in running-*; do test ! -e \"$other\"; done\n";
    write(packed.path(), "gpu_kernels", &in_its_folder(alone));
    script(packed.path(), logs.path(), "kernels nccl ops")
        .env("GPU_BUDGET_S", "40")
        .run()
        .expect_exit(0);
    let expected = ["doctor", "gpu_ops", "gpu_ops-training", "gpu_nccl", "gpu_kernels"];
    assert_eq!(checks(logs.path()), expected, "in order, whoever ended first");
}

#[test]
fn a_stopped_script_leaves_no_process_and_still_comes_to_its_table() {
    let (packed, logs) = (packed(), temp_dir());
    for name in ["gpu_device", "gpu_nccl"] {
        write(packed.path(), name, STUCK);
    }
    let running = script(packed.path(), logs.path(), "ops device nccl kernels").start();
    for name in ["gpu_device.began", "gpu_nccl.began"] {
        eventually(name, || packed.path().join(name).exists().then_some(()));
    }
    running.signal(Signal::SIGTERM);
    let finished = running.finish();
    expect_nothing_left(packed.path());
    finished.expect_exit(1);
    for (check, outcome) in [
        ("gpu_ops", "ok"),
        ("gpu_device", "FAILED (stopped)"),
        ("gpu_nccl", "FAILED (stopped)"),
        ("kernels", "NOT RUN: stopped"),
    ] {
        expect_line(&finished, check, outcome);
    }
    let packed_logs = logs.path().join("logs.tgz");
    assert!(packed_logs.exists(), "the logs are packed");
}

#[test]
fn what_is_over_the_budget_is_killed_with_all_its_processes_and_the_rest_is_said() {
    let (packed, logs) = (packed(), temp_dir());
    write(packed.path(), "gpu_nccl", STUCK);
    let finished = script(packed.path(), logs.path(), "nccl device kernels")
        .env("GPU_BUDGET_S", "4")
        .run();
    expect_nothing_left(packed.path());
    finished.expect_exit(1);
    expect_line(&finished, "gpu_device", "ok");
    expect_line(&finished, "gpu_nccl", "FAILED after");
    expect_line(&finished, "gpu_kernels", "NOT RUN: no time left");
}
