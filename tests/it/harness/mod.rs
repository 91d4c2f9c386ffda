//! Starts the built binaries as a user does and reads like a script:
//!
//! ```text
//! launch().nproc(2).shell("exit 42").run().expect_exit(42);
//! ```
//!
//! Nothing here waits without a deadline, and only [`deadline`] waits without an event.

mod deadline;
mod emulator;
mod launch;
mod processes;
mod program;
mod proxy;
mod rendezvous;
mod screen;
mod sentinel;
mod training;

pub(crate) use deadline::{PATIENCE, eventually};
pub(crate) use emulator::Emulator;
pub(crate) use launch::{Launch, ROLE, launch, launch_from};
pub(crate) use processes::{
    children, descendants, environment_of, groups_made_by, hangup_is_ignored, processes, worker,
};
pub(crate) use program::{Finished, Program, Running, ddp_rendezvous, ddp_train, token_file};
pub(crate) use proxy::Proxy;
pub(crate) use rendezvous::{Daemon, ReservedPort};
pub(crate) use screen::Screen;
pub(crate) use sentinel::Sentinel;
pub(crate) use training::{
    TinyJob, expect_same_losses, losses, metrics, parameters, parameters_of, run_dir, wait_for_step,
};

/// A file of the repository.
pub(crate) fn repository(path: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The folder with the built programs.
pub(crate) fn binaries() -> &'static std::path::Path {
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_ddp-run"));
    program.parent().expect("a folder of binaries")
}

/// An empty folder, removed with its owner.
pub(crate) fn temp_dir() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Python is not among what the tests may ask of a machine.
pub(crate) fn python_is_missing() -> bool {
    let missing = std::process::Command::new("python3")
        .arg("--version")
        .output()
        .is_err();
    if missing {
        eprintln!("skipped: there is no `python3` on this machine");
    }
    missing
}
