//! `tests/gpu/run.sh` on a pretended GPU: its lanes, its limits, its order and what it leaves, not what it measures. And
//! `archive.sh`, which makes one file of what it takes.

mod report;

use std::ffi::OsString;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use tempfile::TempDir;

use crate::harness::{
    Program, Screen, environment_of, eventually, processes, python_is_missing, repository, temp_dir,
};

/// What all processes of a test have in their environment, beside a folder of its own.
const MARK: &str = "GPU_SCRIPT_TEST";

const CTRL_C: &str = "\x03";

/// A test that hangs, and says so with a file of its name.
const STANDING: &str = "touch \"$0.began\"\nexec tail -f /dev/null\n";

/// The same, deaf to what asks it to end, as is a process of its own in another session.
const DEAF: &str = "trap '' TERM\nsetsid tail -f /dev/null &\ntouch \"$0.began\"\nexec tail -f /dev/null\n";

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
    write_program(folder, name, &format!("#!/bin/sh\n{text}"));
}

fn write_program(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), text).expect("writable");
    fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).expect("ours");
}

fn script(packed: &Path, logs: &Path, sections: &str) -> Program {
    script_of(&repository("tests/gpu"), packed, logs, sections)
}

/// The script of this folder.
fn script_of(folder: &Path, packed: &Path, logs: &Path, sections: &str) -> Program {
    // A shell cannot trap what was ignored when it began: under `nohup`, or in the background of a shell, that is so.
    let as_from_a_terminal = OsString::from("--default-signal=HUP,INT");
    let path = OsString::from(folder.join("run.sh"));
    let folders = [packed, logs].map(|path| path.as_os_str().to_owned());
    let sections = sections.split_whitespace().map(OsString::from);
    Program::new("env").env(MARK, &packed).args(
        [as_from_a_terminal, path]
            .into_iter()
            .chain(folders)
            .chain(sections),
    )
}

/// A line a check, as the script ends with.
fn results(logs: &Path) -> String {
    fs::read_to_string(logs.join("results.txt")).expect("results")
}

#[track_caller]
fn expect_nothing_left(packed: &Path) {
    let ours = |pid: &i32| {
        environment_of(*pid).get(MARK).map(String::as_str) == Some(packed.to_str().expect("UTF-8"))
    };
    let left: Vec<_> = processes().into_iter().filter(ours).collect();
    assert_eq!(left, [0; 0]);
}

/// `results` has a line of this check with this outcome.
#[track_caller]
fn expect_line(results: &str, check: &str, outcome: &str) {
    let is_it = |line: &str| line.starts_with(&format!("{check} ")) && line.contains(outcome);
    assert!(
        results.lines().any(is_it),
        "no `{check}` with `{outcome}`:\n{results}"
    );
}

/// No check whose name begins so has a line.
#[track_caller]
fn expect_no_line(results: &str, prefix: &str) {
    let is_there = results.lines().any(|line| line.starts_with(prefix));
    assert!(!is_there, "`{prefix}` was not asked for:\n{results}");
}

/// A log of the script, or a file that a pretended program leaves.
#[track_caller]
fn text(folder: &Path, name: &str) -> String {
    fs::read_to_string(folder.join(name)).unwrap_or_else(|error| panic!("no `{name}`: {error}"))
}

/// Stops the script when a test hangs in each lane, and looks at what it leaves.
#[track_caller]
fn expect_clean_end(test: &str, stop: impl FnOnce(&mut Screen)) {
    let (packed, logs) = (packed(), temp_dir());
    for name in ["gpu_device", "gpu_nccl"] {
        write(packed.path(), name, test);
    }
    let mut screen = script(packed.path(), logs.path(), "ops device nccl kernels").on_screen();
    for name in ["gpu_device.began", "gpu_nccl.began"] {
        eventually(name, || packed.path().join(name).exists().then_some(()));
    }
    stop(&mut screen);
    let (code, shown) = screen.finish();
    expect_nothing_left(packed.path());
    assert_eq!(code, Some(1), "{shown}");
    for (check, outcome) in [
        ("gpu_ops", "ok"),
        ("gpu_device", "FAILED (stopped)"),
        ("gpu_nccl", "FAILED (stopped)"),
        ("kernels", "NOT RUN: stopped"),
    ] {
        expect_line(&shown, check, outcome);
    }
    assert!(logs.path().join("logs.tgz").exists(), "the logs are packed");
}

#[test]
fn one_call_has_the_time_that_all_sections_may_take() {
    let (packed, logs) = (packed(), temp_dir());
    let finished = script(packed.path(), logs.path(), "").run();
    let notes = finished.stdout().iter().filter(|line| line.starts_with("note:"));
    assert_eq!(notes.count(), 0, "{}", finished.transcript());
    let results = results(logs.path());
    for check in [
        "loss-cpu",
        "ranks-cpu",
        "loss-bf16",
        "ranks-2",
        "kill9-named",
        "kill9-restart",
        "speed-124m",
        "compile",
        "peers",
    ] {
        expect_line(&results, check, "FAILED");
    }
    for check in ["gpu_ops", "gpu_device", "gpu_nccl", "gpu_kernels"] {
        expect_line(&results, check, "ok");
    }
    expect_line(&results, "sanitizer-memcheck", "");
    expect_no_line(&results, "overlap");
}

#[test]
fn two_calls_have_all_sections_between_them() {
    let lines_of = |call: &str| {
        let (packed, logs) = (packed(), temp_dir());
        let finished = script(packed.path(), logs.path(), call).run();
        assert!(
            !finished.transcript().contains("note:"),
            "{}",
            finished.transcript()
        );
        results(logs.path())
    };
    let (first, second) = (lines_of("call-1"), lines_of("call-2"));
    for check in [
        "loss-bf16",
        "gpu_ops",
        "gpu_device",
        "compile",
        "gpu_kernels",
        "speed-124m",
        "peers",
    ] {
        expect_line(&first, check, "");
        expect_no_line(&second, check);
    }
    for check in ["ranks-2", "kill9-named", "gpu_nccl", "sanitizer-racecheck"] {
        expect_line(&second, check, "");
        expect_no_line(&first, check);
    }
    for results in [first, second] {
        expect_no_line(&results, "overlap");
    }
}

#[test]
fn overlap_is_measured_where_each_rank_has_a_card_or_by_name() {
    let sections = |cards: usize, sections: &str| {
        let (packed, logs) = (packed(), temp_dir());
        let devices: Vec<String> = (0..cards)
            .map(|card| format!("echo '  device {card} pretended'\n"))
            .collect();
        let doctor = devices.concat();
        write(packed.path(), "ddp-train", &doctor);
        let told = "echo \"$* ctas=$NCCL_MAX_CTAS\"\n";
        write(packed.path(), "ddp-run", told);
        script(packed.path(), logs.path(), sections).run();
        logs
    };
    // Rules for a shared card are not for these, and a rank alone is what they are compared with.
    let apart = sections(4, "call-2");
    let log = |name: &str| text(apart.path(), name);
    assert!(log("overlap-true.log").contains("--nproc-per-node 4 "));
    assert!(log("overlap-true.log").ends_with(" ctas=\n"));
    assert!(log("overlap-alone.log").contains("--nproc-per-node 1 "));
    assert!(log("overlap-ctas.log").contains("--nproc-per-node 4 "));
    assert!(log("overlap-ctas.log").ends_with(" ctas=8\n"));
    assert!(log("ranks-2.log").ends_with(" ctas=2\n"));
    let shared = sections(1, "overlap");
    let log = |name: &str| text(shared.path(), name);
    // Without an NCCL that lets them share a card, ranks are started by a script of their own.
    assert!(log("overlap-true.log").contains("--nproc-per-node 2 -- "));
    assert!(log("overlap-true.log").ends_with(" ctas=2\n"));
}

/// The one waits until the compiler has begun, the other until that one is done; what measures finds it ended.
#[test]
fn the_compiler_of_pytorch_runs_beside_checks_and_is_gone_before_what_measures() {
    if python_is_missing() {
        return;
    }
    let (packed, logs) = (packed(), temp_dir());
    fs::write(packed.path().join("gpt2_gpu.py"), PRETENDED_PYTORCH).expect("writable");
    let device = "cd \"$(dirname \"$0\")\"\nuntil test -e compiling; do sleep 0.05; done\ntouch checked\n";
    write(packed.path(), "gpu_device", device);
    write(
        packed.path(),
        "gpu_kernels",
        "cd \"$(dirname \"$0\")\"\ntest -e compiled\n",
    );
    script(packed.path(), logs.path(), "device kernels peers")
        .run()
        .expect_exit(0);
    let cache = logs.path().join("cache/inductor");
    for (check, argument) in [("compile", "--compile-only"), ("peers", "--out")] {
        let log = text(logs.path(), &format!("{check}.log"));
        assert!(log.contains(argument), "{log}");
        assert!(
            log.contains(cache.to_str().expect("UTF-8")),
            "one cache for both: {log}"
        );
    }
    assert!(!cache.exists(), "not among the logs");
}

/// Takes until it is told to end, when it compiles.
const PRETENDED_PYTORCH: &str = "\
import os, pathlib, sys, time
here = pathlib.Path(__file__).parent
print(sys.argv[1:], os.environ['TORCHINDUCTOR_CACHE_DIR'])
os.makedirs(os.environ['TORCHINDUCTOR_CACHE_DIR'], exist_ok=True)
if '--compile-only' in sys.argv:
    (here / 'compiling').touch()
    while not (here / 'checked').exists():
        time.sleep(0.05)
    (here / 'compiled').touch()
";

/// Of a copy of the scripts with one more entry in the list.
#[test]
fn each_switch_is_trained_with_once_and_a_new_one_is_an_entry_of_a_list() {
    let (packed, logs, scripts) = (packed(), temp_dir(), temp_dir());
    for name in ["run.sh", "lanes.sh", "sections.sh"] {
        let script = text(&repository("tests/gpu"), name);
        let entry = "switches=(\"other DDP_OTHER=2\" ";
        let changed = script.replace("switches=(", entry);
        assert_eq!(changed != script, name == "sections.sh", "{name}");
        write_program(scripts.path(), name, &changed);
    }
    let told = "echo \"$* timed=$DDP_TIMED_PRODUCTS other=$DDP_OTHER\"\n";
    write(packed.path(), "ddp-run", told);
    script_of(scripts.path(), packed.path(), logs.path(), "speed")
        .run()
        .expect_exit(0);
    for (run, switches) in [
        ("124m", "timed= other="),
        ("350m", "timed= other="),
        ("124m-timed", "timed=1 other="),
        ("124m-kept", "timed= other="),
        ("124m-other", "timed= other=2"),
    ] {
        let log = text(logs.path(), &format!("speed-{run}.log"));
        assert!(log.trim_end().ends_with(switches), "{run}: {log}");
        let steps = if run.contains('-') { "30" } else { "100" };
        assert!(log.contains(&format!("train.steps={steps} ")), "{run}: {log}");
        let kept = log.contains(" train.recompute=nothing ");
        assert_eq!(kept, run.contains("kept"), "{run}: {log}");
    }
}

#[test]
fn a_sanitizer_looks_at_operations_where_the_machine_has_one() {
    let (packed, logs, tools) = (packed(), temp_dir(), temp_dir());
    let findings = "echo \"$*\"\ncase $* in *racecheck*) exit 3;; esac\n";
    write(tools.path(), "compute-sanitizer", findings);
    let path = std::env::var("PATH").expect("a path");
    script(packed.path(), logs.path(), "sanitizer")
        .env("PATH", &format!("{}:{path}", tools.path().display()))
        .run()
        .expect_exit(1);
    let found = results(logs.path());
    expect_line(&found, "sanitizer-memcheck", "ok");
    expect_line(&found, "sanitizer-racecheck", "FAILED (3)");
    let log = text(logs.path(), "sanitizer-memcheck.log");
    // Without the first, the tool ends as the program does, whatever it has found.
    for argument in ["--error-exitcode 3", "--tool memcheck", "/gpu_kernels --sanitize"] {
        assert!(log.contains(argument), "{log}");
    }
}

#[test]
fn a_machine_without_a_sanitizer_is_told_so() {
    let has_one = |folder: std::path::PathBuf| folder.join("compute-sanitizer").exists();
    if std::env::split_paths(&std::env::var_os("PATH").expect("a path")).any(has_one) {
        eprintln!("skipped: this machine has `compute-sanitizer`");
        return;
    }
    let (packed, logs) = (packed(), temp_dir());
    script(packed.path(), logs.path(), "sanitizer")
        .env("CUDA_HOME", packed.path())
        .run()
        .expect_exit(1);
    let results = results(logs.path());
    for check in ["sanitizer-memcheck", "sanitizer-racecheck"] {
        expect_line(&results, check, "NOT RUN: compute-sanitizer was not found");
    }
}

#[test]
fn a_pack_that_is_too_large_to_be_carried_is_refused_with_its_largest_files() {
    let folder = temp_dir();
    let packed = folder.path().join("packed");
    fs::create_dir(&packed).expect("a folder");
    fs::write(packed.join("small"), "x").expect("writable");
    let archive = || {
        let path = repository("tests/gpu/archive.sh");
        Program::new(path).args([&packed]).run()
    };
    archive()
        .expect_exit(0)
        .expect_stdout("MiB of at most 50, unpacked");
    // What cannot be compressed.
    let noise = fs::File::open("/dev/urandom").expect("a device");
    let mut large = Vec::new();
    noise.take(51 << 20).read_to_end(&mut large).expect("noise");
    fs::write(packed.join("large"), large).expect("writable");
    archive()
        .expect_exit(1)
        .expect_stderr("52428800 may be carried; its largest files")
        .expect_stderr("    53477376  large");
}

#[test]
fn a_call_without_the_time_for_its_sections_says_so() {
    let (packed, logs) = (packed(), temp_dir());
    script(packed.path(), logs.path(), "nccl device")
        .env("GPU_BUDGET_S", "50")
        .run()
        .expect_exit(0)
        .expect_stdout("note: these sections may take 60 s, and GPU_BUDGET_S is 50");
}

#[test]
fn micro_batches_are_what_the_memory_of_the_card_allows_or_what_is_asked_for() {
    for (card, asked, expected) in [
        (
            "NVIDIA H200, sm_90, 139.8 GiB, PCI 0000:01:00.0",
            "",
            ["64", "32"],
        ),
        ("NVIDIA A100, sm_80, 39.4 GiB, PCI 0000:01:00.0", "", ["16", "8"]),
        (
            "NVIDIA A100, sm_80, 39.4 GiB, PCI 0000:01:00.0",
            "5 3",
            ["5", "3"],
        ),
    ] {
        let (packed, logs) = (packed(), temp_dir());
        write(
            packed.path(),
            "ddp-train",
            &format!("echo '  device 0             {card}'\n"),
        );
        write(packed.path(), "ddp-run", "echo \"$*\"\n");
        script(packed.path(), logs.path(), "speed")
            .env("GPU_BATCHES", asked)
            .run();
        for (size, batch) in ["124m", "350m"].iter().zip(expected) {
            let told = fs::read_to_string(logs.path().join(format!("speed-{size}.log"))).expect("a log");
            assert!(
                told.contains(&format!("train.micro_batch={batch} ")),
                "{card}: {told}"
            );
        }
    }
}

#[test]
fn an_unknown_section_is_refused_with_those_that_there_are() {
    let (packed, logs) = (packed(), temp_dir());
    script(packed.path(), logs.path(), "ops nccll")
        .run()
        .expect_exit(2)
        .expect_stderr(
            "unknown section `nccll`, known are: losses ops device ranks kill9 nccl sanitizer kernels",
        );
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
    let listed = Program::new("tar")
        .args([OsString::from("-tzf"), archive.into()])
        .run();
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
    let results = results(logs.path());
    let names: Vec<_> = results
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    let expected = ["doctor", "gpu_ops", "gpu_ops-training", "gpu_nccl", "gpu_kernels"];
    assert_eq!(names, expected, "in order, whichever ended first");
}

#[test]
fn a_stopped_script_leaves_no_process_and_still_comes_to_its_table() {
    expect_clean_end(DEAF, |screen| {
        kill(Pid::from_raw(screen.pid()), Signal::SIGTERM).expect("a child of ours");
    });
    expect_clean_end(STANDING, |screen| screen.type_in(CTRL_C));
    // As from a terminal that is closed, to all that runs on it.
    expect_clean_end(STANDING, |screen| {
        killpg(Pid::from_raw(screen.pid()), Signal::SIGHUP).expect("a session of its own");
    });
}

#[test]
fn what_is_over_the_budget_is_killed_with_all_its_processes_and_the_rest_is_said() {
    let (packed, logs) = (packed(), temp_dir());
    write(packed.path(), "gpu_nccl", DEAF);
    let finished = script(packed.path(), logs.path(), "nccl device kernels")
        .env("GPU_BUDGET_S", "8")
        .run();
    expect_nothing_left(packed.path());
    finished.expect_exit(1);
    let results = results(logs.path());
    expect_line(&results, "gpu_device", "ok");
    expect_line(&results, "gpu_nccl", "FAILED after");
    expect_line(&results, "gpu_kernels", "NOT RUN: no time left");
}
