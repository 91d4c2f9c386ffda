//! An unmodified Python script sees what torchrun would tell it.

use std::collections::BTreeSet;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::harness::{Finished, launch, launch_from, python_is_missing, repository, temp_dir};

const SCRIPT: &str = "examples/python-script/show_contract.py";

fn contracts(finished: &Finished) -> Vec<serde_json::Value> {
    let parse = |line: &String| {
        let (_, json) = line.split_once("] ").expect("a rank in front");
        serde_json::from_str(json).expect("a line of JSON")
    };
    finished.stdout().iter().map(parse).collect()
}

#[test]
fn an_unmodified_script_sees_the_contract() {
    if python_is_missing() {
        return;
    }
    let launched = launch()
        .nproc(2)
        .flag("--max-restarts", "4")
        .flag("--rdzv-id", "job-7")
        // What an outer launcher left behind must not reach the script.
        .env("RANK", "77")
        .env("TORCHELASTIC_ERROR_FILE", "/dev/null/error.json")
        .target(repository(SCRIPT))
        .target_args(["--lr", "3e-4", "--nnodes"])
        .run();
    launched.expect_exit(0);
    let seen = contracts(&launched);
    let ranks: BTreeSet<_> = seen
        .iter()
        .filter_map(|s| s["contract"]["RANK"].as_str())
        .collect();
    assert_eq!(ranks, BTreeSet::from(["0", "1"]));
    for one in &seen {
        assert_eq!(one["argv"], serde_json::json!(["--lr", "3e-4", "--nnodes"]));
        let contract = &one["contract"];
        assert_eq!(contract["LOCAL_RANK"], contract["RANK"]);
        assert_eq!(contract["ROLE_RANK"], contract["RANK"]);
        // The launcher's own tests show the other variables.
        assert_eq!(contract["WORLD_SIZE"], "2");
        assert_eq!(contract["TORCHELASTIC_RUN_ID"], "job-7");
        let number = |name: &str| contract[name].as_str().and_then(|text| text.parse::<u32>().ok());
        assert!(number("MASTER_PORT").is_some_and(|port| (1..=65_535).contains(&port)));
        assert!(number("OMP_NUM_THREADS").is_some_and(|threads| threads >= 1));
        assert_ne!(contract["TORCHELASTIC_ERROR_FILE"], "/dev/null/error.json");
    }
    let ports: BTreeSet<_> = seen
        .iter()
        .map(|s| s["contract"]["MASTER_PORT"].to_string())
        .collect();
    assert_eq!(ports.len(), 1, "all ranks must meet at one port");
}

/// Writes a program that stands for an interpreter.
fn interpreter(path: PathBuf, script: &str) -> PathBuf {
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("writable");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("ours");
    path
}

/// Folders with an interpreter each, a copy of `ddp-run` beside two, of which one is a virtual environment, and a script.
fn environments(dir: &Path) {
    for name in ["exec", "venv", "conda", "beside", "environment", "path"] {
        interpreter(dir.join(name).join("bin/python3"), &format!("echo {name}"));
    }
    interpreter(dir.join("old/bin/python"), "echo old");
    for folder in ["beside", "environment"] {
        let copy = dir.join(folder).join("bin/ddp-run");
        std::fs::copy(env!("CARGO_BIN_EXE_ddp-run"), copy).expect("a copy of the program");
    }
    std::fs::write(dir.join("environment/pyvenv.cfg"), "").expect("writable");
    std::fs::write(dir.join("t.py"), "").expect("writable");
}

#[test]
fn a_script_runs_under_the_python3_of_its_environment_or_that_a_shell_finds() {
    let dir = temp_dir();
    environments(dir.path());
    let below = |name: &str| dir.path().join(name).display().to_string();
    let (built, beside) = (env!("CARGO_BIN_EXE_ddp-run"), &below("beside/bin/ddp-run"));
    let environment = &below("environment/bin/ddp-run");
    // The program, which of its places are named, which folder is in `PATH`, and whose interpreter runs.
    for (program, named, path, expected) in [
        (beside.as_str(), "exec venv conda", "path", "exec"),
        (beside, "venv conda", "path", "path"),
        (environment, "exec venv", "path", "exec"),
        (environment, "venv", "path", "path"),
        (environment, "conda", "path", "path"),
        (environment, "", "path", "environment"),
        (built, "conda", "path", "path"),
        (built, "", "path", "path"),
        (built, "", "old", "old"),
    ] {
        let mut launch = launch_from(program).env("PATH", below(&format!("{path}/bin")));
        for (name, variable, value) in [
            ("exec", "PYTHON_EXEC", "exec/bin/python3"),
            ("venv", "VIRTUAL_ENV", "venv"),
            ("conda", "CONDA_PREFIX", "conda"),
        ] {
            if named.split(' ').any(|word| word == name) {
                launch = launch.env(variable, below(value));
            }
        }
        launch
            .target(dir.path().join("t.py"))
            .run()
            .expect_exit(0)
            .expect_stdout(&format!("[0] {expected}"));
    }
}

#[test]
fn a_missing_module_is_reported_with_the_interpreter_that_lacks_it() {
    let dir = temp_dir();
    let words = "ModuleNotFoundError: No module named 'torch'";
    let python = interpreter(
        dir.path().join("bin/python3"),
        &format!("echo \"{words}\" >&2; exit 1"),
    );
    std::fs::write(dir.path().join("t.py"), "").expect("writable");
    launch()
        .env("PYTHON_EXEC", &python)
        .target(dir.path().join("t.py"))
        .run()
        .expect_exit(1)
        .expect_stderr(&format!("hint: the interpreter was `{}`", python.display()));
}

#[test]
fn a_folder_with_a_main_module_is_a_script() {
    let dir = temp_dir();
    let python = interpreter(dir.path().join("bin/python3"), r#"echo "$@""#);
    let package = dir.path().join("package");
    std::fs::create_dir(&package).expect("writable");
    std::fs::write(package.join("__main__.py"), "").expect("writable");
    launch()
        .env("PYTHON_EXEC", &python)
        .target(&package)
        .target_args(["--", "--lr", "1"])
        .run()
        .expect_exit(0)
        .expect_stdout(&format!("[0] -u {} --lr 1", package.display()));
}
