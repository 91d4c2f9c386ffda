//! The program of the workers: found as `exec` does, or an error that says what to do.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::ids::LocalRank;

/// Exit code of shells for a program that was not found.
const NOT_FOUND: u8 = 127;
/// Exit code of shells for a program that cannot be executed.
const NOT_EXECUTABLE: u8 = 126;
/// Variable that names the Python interpreter, as torchrun has it.
const PYTHON_EXEC: &str = "PYTHON_EXEC";
/// How much of a first line the kernel reads.
const LONGEST_LINE: u64 = 256;

/// A program cannot be started. Trying again would not help, so no restart is spent on it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpawnError {
    /// There is no such file.
    #[error("program `{program}` was not found\n  hint: {hint}")]
    NotFound {
        /// As given.
        program: String,
        /// What to do.
        hint: String,
    },
    /// The file exists, but not what its `#!` line names.
    #[error("program `{program}` cannot be started: {cause}\n  hint: {hint}")]
    NoInterpreter {
        /// As given.
        program: String,
        /// What is wrong with that line.
        cause: String,
        /// What to do.
        hint: String,
    },
    /// The file exists but cannot be executed.
    #[error("program `{program}` cannot be executed: {cause}\n  hint: {hint}")]
    NotExecutable {
        /// As given.
        program: String,
        /// The system's words.
        cause: String,
        /// What to do.
        hint: &'static str,
    },
    /// The system does not let a worker run on the cores chosen for it.
    #[error(
        "worker {local_rank} of this node cannot be bound to its cores: {cause}\n  hint: the cores that this process may use have changed: start again, or omit `--numa-binding`"
    )]
    Cores {
        /// Local rank of the worker.
        local_rank: LocalRank,
        /// The system's words.
        cause: String,
    },
    /// The program is there, but the system has not begun it.
    #[error(
        "program `{program}` did not start on worker {local_rank} of this node within {} s\n  hint: check that the program's file system responds",
        .waited.as_secs_f64()
    )]
    Stuck {
        /// As given.
        program: String,
        /// Local rank of the worker.
        local_rank: LocalRank,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The machine refused another process.
    #[error(
        "worker {local_rank} of this node cannot be started: {cause}\n  hint: check `ulimit -u`, the memory and the pids limit of the cgroup"
    )]
    Machine {
        /// Local rank of the worker.
        local_rank: LocalRank,
        /// The system's words.
        cause: String,
    },
}

impl SpawnError {
    /// Exit code of the launcher, as shells do it.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound { .. } | Self::NoInterpreter { .. } => NOT_FOUND,
            Self::NotExecutable { .. } => NOT_EXECUTABLE,
            Self::Cores { .. } | Self::Stuck { .. } | Self::Machine { .. } => exit::INTERNAL,
        }
    }

    /// The error of a worker that was to be bound to cores, if the cores are its reason: of all that happens before the
    /// program runs, only this can be invalid.
    pub(super) fn of_binding(error: &io::Error, local_rank: LocalRank) -> Option<Self> {
        let cause = error.to_string();
        (error.raw_os_error() == Some(libc::EINVAL)).then_some(Self::Cores { local_rank, cause })
    }

    pub(super) fn of(error: &io::Error, program: &Path, local_rank: LocalRank) -> Self {
        let name = program.display().to_string();
        let hint = match error.raw_os_error() {
            // The system says the same of a program whose loader is missing.
            Some(libc::ENOENT) if program.components().count() > 1 && program.is_file() => {
                "its interpreter or dynamic loader is missing: see `file` and `ldd`"
            }
            Some(libc::ENOENT | libc::ENOTDIR) => {
                let hint = what_is_there(program);
                return Self::NotFound { program: name, hint };
            }
            Some(libc::EACCES | libc::EPERM) => "make it executable with `chmod +x`, or name its interpreter",
            Some(libc::ENOEXEC) => "is it built for this machine, or a script without a `#!` line?",
            Some(libc::EISDIR | libc::ELOOP | libc::ENAMETOOLONG) => "is the path right?",
            Some(libc::E2BIG) => "the arguments and the environment together are too long",
            _ => {
                return Self::Machine {
                    local_rank,
                    cause: error.to_string(),
                };
            }
        };
        Self::NotExecutable {
            program: name,
            cause: error.to_string(),
            hint,
        }
    }
}

/// What to write instead of the name of a program that is not there.
fn what_is_there(program: &Path) -> String {
    if std::env::var_os(PYTHON_EXEC).is_some_and(|python| python == program) {
        format!("{PYTHON_EXEC} names it: set that variable to an interpreter, or unset it")
    } else {
        "give a path, such as `./train.py`, or a name that is in `PATH`".to_owned()
    }
}

/// Finds the program before the node joins, so that a typing error costs the other nodes nothing. A name without a folder
/// is looked for in `search_path`, the value of `PATH`.
pub(crate) fn check_program(program: &Path, search_path: Option<&OsString>) -> Result<(), SpawnError> {
    use nix::unistd::{AccessFlags, access};
    let executable = |path: &Path| path.is_file() && access(path, AccessFlags::X_OK).is_ok();
    let candidates: Vec<PathBuf> = if program.as_os_str().is_empty() {
        Vec::new()
    } else if program.components().count() > 1 || program.is_absolute() {
        vec![program.to_owned()]
    } else {
        let Some(search_path) = search_path else {
            // The system's own default applies: left to `exec`.
            return Ok(());
        };
        std::env::split_paths(search_path)
            .map(|directory| directory.join(program))
            .collect()
    };
    if let Some(found) = candidates.iter().find(|path| executable(path)) {
        return find_interpreter(found);
    }
    let errno = match candidates.iter().find(|path| path.exists()) {
        Some(path) if path.is_dir() => libc::EISDIR,
        Some(_) => libc::EACCES,
        None => libc::ENOENT,
    };
    Err(SpawnError::of(
        &io::Error::from_raw_os_error(errno),
        program,
        LocalRank(0),
    ))
}

/// Looks for the interpreter of a script. What cannot be read, or names none, is left to `exec`.
fn find_interpreter(script: &Path) -> Result<(), SpawnError> {
    let mut line = Vec::new();
    let read = File::open(script).and_then(|file| file.take(LONGEST_LINE).read_to_end(&mut line));
    if read.is_err() || !line.starts_with(b"#!") {
        return Ok(());
    }
    let line = line[2..].split(|&byte| byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let name = script.display();
    let interpreter = line.trim_start_matches([' ', '\t']).split([' ', '\t']).next();
    let interpreter = interpreter.unwrap_or_default();
    let (cause, hint) = if line.ends_with('\r') {
        (
            "its first line ends as on Windows".to_owned(),
            format!("remove the carriage returns with `sed -i 's/\\r$//' {name}`"),
        )
    } else if interpreter.is_empty() || Path::new(interpreter).exists() {
        return Ok(());
    } else {
        (
            format!("its interpreter `{interpreter}` was not found"),
            format!("correct the first line of `{name}`, or install the interpreter"),
        )
    };
    let program = name.to_string();
    Err(SpawnError::NoInterpreter { program, cause, hint })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use nix::sched::{CpuSet, sched_setaffinity};
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn a_program_is_looked_up_as_exec_does() {
        let path = OsString::from("/dev/null/absent:/bin:/usr/bin");
        assert_eq!(check_program(Path::new("sh"), Some(&path)), Ok(()));
        assert_eq!(check_program(Path::new("/bin/sh"), None), Ok(()));
        let missing = check_program(Path::new("no-such-program"), Some(&path)).unwrap_err();
        assert_eq!(missing.exit_code(), 127);
        let nothing = check_program(Path::new(""), Some(&path)).unwrap_err();
        assert_eq!(nothing.exit_code(), 127, "not the first folder of the path");
        let directory = check_program(Path::new("/usr/bin"), Some(&path)).unwrap_err();
        assert_eq!(directory.exit_code(), 126);
    }

    #[test]
    fn a_script_whose_interpreter_is_missing_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("train");
        let of = |text: &str| {
            std::fs::write(&script, text).unwrap();
            std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
            let found = check_program(&script, None);
            found.map_err(|error| {
                assert_eq!(error.exit_code(), 127);
                error.to_string().replace(dir.path().to_str().unwrap(), "DIR")
            })
        };
        insta::assert_snapshot!(of("#!/usr/bin/pyton3 -u\n").unwrap_err(), @r"
        program `DIR/train` cannot be started: its interpreter `/usr/bin/pyton3` was not found
          hint: correct the first line of `DIR/train`, or install the interpreter
        ");
        insta::assert_snapshot!(of("#! /usr/bin/env python3\r\nprint()\r\n").unwrap_err(), @r"
        program `DIR/train` cannot be started: its first line ends as on Windows
          hint: remove the carriage returns with `sed -i 's/\r$//' DIR/train`
        ");
        for good in ["#!/bin/sh\n", "#! /bin/sh -e\n", "#!\n", "echo\r\n", ""] {
            assert_eq!(of(good), Ok(()), "{good:?}");
        }
    }

    #[test]
    fn cores_that_are_no_more_are_named() {
        let mut set = CpuSet::new();
        set.set(CpuSet::count() - 1).unwrap();
        let errno = sched_setaffinity(Pid::from_raw(0), &set).unwrap_err();
        let error = SpawnError::of_binding(&errno.into(), LocalRank(3)).unwrap();
        insta::assert_snapshot!(error, @r"
        worker 3 of this node cannot be bound to its cores: Invalid argument (os error 22)
          hint: the cores that this process may use have changed: start again, or omit `--numa-binding`
        ");
        let busy = io::Error::from_raw_os_error(libc::EAGAIN);
        assert_eq!(SpawnError::of_binding(&busy, LocalRank(3)), None);
    }

    #[test]
    fn messages_say_what_to_do() {
        let of = |errno| {
            SpawnError::of(
                &io::Error::from_raw_os_error(errno),
                Path::new("./train"),
                LocalRank(3),
            )
        };
        insta::assert_snapshot!(of(libc::ENOENT), @r"
        program `./train` was not found
          hint: give a path, such as `./train.py`, or a name that is in `PATH`
        ");
        insta::assert_snapshot!(of(libc::EACCES), @r"
        program `./train` cannot be executed: Permission denied (os error 13)
          hint: make it executable with `chmod +x`, or name its interpreter
        ");
        insta::assert_snapshot!(of(libc::EAGAIN), @r"
        worker 3 of this node cannot be started: Resource temporarily unavailable (os error 11)
          hint: check `ulimit -u`, the memory and the pids limit of the cgroup
        ");
        let stuck = SpawnError::Stuck {
            program: "./train".into(),
            local_rank: LocalRank(3),
            waited: Duration::from_mins(10),
        };
        insta::assert_snapshot!(stuck, @r"
        program `./train` did not start on worker 3 of this node within 600 s
          hint: check that the program's file system responds
        ");
    }
}
