//! Which libraries are taken of those that a machine has, and what is said of those that cannot be.

use std::path::Path;
use std::process::Command;

use super::{emulator, gpus, job};
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
