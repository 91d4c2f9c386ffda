//! The program of the workers: found as `exec` does, or an error that says what to do.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::ids::LocalRank;

use crate::plan::WorkerCommand;

/// Exit code of shells for a program that was not found.
const NOT_FOUND: u8 = 127;
/// Exit code of shells for a program that cannot be executed.
const NOT_EXECUTABLE: u8 = 126;
/// Variable that names the Python interpreter, as torchrun has it.
const PYTHON_EXEC: &str = "PYTHON_EXEC";

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
            Self::NotFound { .. } => NOT_FOUND,
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
                let hint = hint_for_missing(program);
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

/// The hint for a program that was not found. Shells do not look for programs in the current folder either.
fn hint_for_missing(program: &Path) -> String {
    if std::env::var_os(PYTHON_EXEC).is_some_and(|python| python == program) {
        return format!("{PYTHON_EXEC} names it: set that variable to an interpreter, or unset it");
    }
    let here = Path::new(".").join(program);
    if program.components().count() == 1 && here.is_file() {
        return format!(
            "did you mean `{}`? Names without a directory are searched for in `PATH`",
            here.display()
        );
    }
    "give a path, or a name that is in `PATH`".to_owned()
}

/// Finds the program before the node joins, so that a typing error costs the other nodes nothing.
pub(crate) fn check_program(
    command: &WorkerCommand,
    inherited_path: Option<&OsString>,
) -> Result<(), SpawnError> {
    let own_path = command.env.get("PATH").map(OsString::from);
    find_program(&command.program, own_path.as_ref().or(inherited_path))
}

fn find_program(program: &Path, search_path: Option<&OsString>) -> Result<(), SpawnError> {
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
    if candidates.iter().any(|path| executable(path)) {
        return Ok(());
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

#[cfg(test)]
mod tests {
    use nix::sched::{CpuSet, sched_setaffinity};
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn a_program_is_looked_up_as_exec_does() {
        let path = OsString::from("/dev/null/absent:/bin:/usr/bin");
        assert_eq!(find_program(Path::new("sh"), Some(&path)), Ok(()));
        assert_eq!(find_program(Path::new("/bin/sh"), None), Ok(()));
        let missing = find_program(Path::new("no-such-program"), Some(&path)).unwrap_err();
        assert_eq!(missing.exit_code(), 127);
        let nothing = find_program(Path::new(""), Some(&path)).unwrap_err();
        assert_eq!(nothing.exit_code(), 127, "not the first folder of the path");
        let directory = find_program(Path::new("/usr/bin"), Some(&path)).unwrap_err();
        assert_eq!(directory.exit_code(), 126);
    }

    #[test]
    fn what_lies_in_the_current_folder_is_pointed_out() {
        let path = OsString::from("/dev/null/absent");
        let words = |name: &str| {
            find_program(Path::new(name), Some(&path))
                .unwrap_err()
                .to_string()
        };
        let file = words("Cargo.toml");
        assert!(file.contains("hint: did you mean `./Cargo.toml`?"), "{file}");
        assert!(words("").contains("hint: give a path"), "{}", words(""));
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
          hint: give a path, or a name that is in `PATH`
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
