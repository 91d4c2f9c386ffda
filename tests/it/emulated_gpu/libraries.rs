//! Which libraries are taken of those that a machine has, and what is said of those that cannot be.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{emulator, gpus, job, refused};
use crate::harness::{Emulator, Finished, repository, temp_dir};

/// A toolkit's stub of the driver.
#[track_caller]
fn put_stub(file: &Path) {
    std::fs::create_dir_all(file.parent().expect("a folder")).expect("writable");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(file)
        .arg(repository("tests/it/emulated_gpu/stub.c"))
        .status();
    assert!(compiled.is_ok_and(|status| status.success()), "cc compiles it");
}

/// These folders, and then the emulator's.
fn before_the_emulator(folder: &Path) -> String {
    format!("{}:{}", folder.display(), Emulator::built().folder().display())
}

#[track_caller]
fn doctor(variable: (&str, &str)) -> Finished {
    let doctor = Emulator::built().program(env!("CARGO_BIN_EXE_ddp-train"));
    let finished = doctor.args(["doctor"]).env(variable.0, variable.1).run();
    finished.expect_exit(0);
    finished
}

/// The dynamic loader, asked for `libcuda.so`, would give the stub.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_toolkits_stub_is_passed_over_where_there_is_a_driver() {
    let (emulator, folder, job) = (emulator(), temp_dir(), job());
    put_stub(&folder.path().join("stubs/libcuda.so"));
    let path = before_the_emulator(&folder.path().join("stubs"));
    let driver = emulator.folder().join("libcuda.so.1").display().to_string();
    doctor(("LD_LIBRARY_PATH", &path))
        .expect_stdout(&driver)
        .expect_stdout("device 0             Emulated GPU");
    gpus(emulator, &job, 1)
        .env("LD_LIBRARY_PATH", &path)
        .set("train.steps=1")
        .target("tiny.yaml")
        .run()
        .expect_exit(0);
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_stub_that_is_taken_for_the_driver_is_named_with_the_way_to_the_driver() {
    let (folder, job) = (temp_dir(), job());
    let stub = folder.path().join("libcuda.so.1");
    put_stub(&stub);
    let path = before_the_emulator(folder.path());
    let problem = format!(
        "`{}` is not the driver but a stub of the CUDA toolkit",
        stub.display()
    );
    let hint = format!("hint: remove `{}` from LD_LIBRARY_PATH", folder.path().display());
    doctor(("LD_LIBRARY_PATH", &path))
        .expect_stdout(&format!("- no usable device: {problem}"))
        .expect_stdout(&hint);
    let on_gpus = gpus(Emulator::built(), &job, 1).env("LD_LIBRARY_PATH", &path);
    refused(on_gpus)
        .expect_exit(2)
        .expect_stderr(&problem)
        .expect_stderr(&hint);
    let wherever = gpus(Emulator::built(), &job, 1).env("LD_LIBRARY_PATH", &path);
    let wherever = refused(wherever.set("parallel.backend=auto").set("train.steps=1"));
    wherever
        .expect_exit(0)
        .expect_stderr(&format!("warning: no GPU is used: {problem}"));
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_library_that_is_newer_than_the_driver_is_named_with_what_to_install() {
    const OLD: (&str, &str) = ("EMULATOR_CUDA", "11080");
    let (emulator, job) = (emulator(), job());
    let library = emulator.folder().join("libcublasLt.so.12").display().to_string();
    let words = format!("`{library}` (cuBLASLt 12");
    let behind = "is newer than the driver, which supports CUDA 11.8";
    let hint = "hint: `pip install nvidia-cublas-cu11`";
    let report = doctor(OLD);
    let line = report.stdout().iter().find(|line| line.contains(&words));
    assert!(line.is_some_and(|line| line.contains(behind)), "{line:?}");
    report.expect_stdout(hint);
    let finished = refused(gpus(emulator, &job, 1).env(OLD.0, OLD.1));
    assert_ne!(finished.code(), Some(0));
    finished
        .expect_stderr(&words)
        .expect_stderr(behind)
        .expect_stderr(hint);
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_library_that_is_not_there_is_named_with_the_way_to_get_it() {
    let emulator = Emulator::built();
    let folder = temp_dir();
    for library in [
        "libcuda.so.1",
        "libcuda.so",
        "libnvrtc.so.12",
        "libcublasLt.so.12",
    ] {
        let original: PathBuf = emulator.folder().join(library);
        std::os::unix::fs::symlink(original, folder.path().join(library)).expect("a link");
    }
    let path = folder.path().to_str().expect("UTF-8");
    if !doctor(("LD_LIBRARY_PATH", path))
        .transcript()
        .contains("`libnccl.so` not found")
    {
        eprintln!(
            "SKIPPED: this machine has an NCCL of its own, which is found where the emulated one is not"
        );
        return;
    }
    let job = job();
    let finished = refused(gpus(emulator, &job, 2).env("LD_LIBRARY_PATH", path));
    assert_ne!(finished.code(), Some(0));
    finished
        .expect_stderr("`libnccl.so` not found; it is needed for collectives between GPUs")
        .expect_stderr("pip install nvidia-nccl-cu12");
}
