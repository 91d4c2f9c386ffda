//! What every worker runs: the kinds of target, and their commands.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use ddp_launcher::WorkerCommand;
use nix::unistd::{AccessFlags, access};

use crate::cli::error::CliError;

/// First argument of the invocation by which `ddp-run` runs its own native worker.
pub const WORKER_SUBCOMMAND: &str = "__worker";

/// What a target is, told by the end of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    /// `.yaml`, `.yml`: a configuration for the native worker.
    Native,
    /// `.py`: a script for the Python interpreter.
    Python,
    /// `-m`: a module for the Python interpreter.
    Module,
    /// Anything else, run verbatim.
    Program,
}

impl TargetKind {
    /// The kind of the target called `name`.
    pub fn of(name: &OsStr) -> Self {
        let extension = Path::new(name).extension().and_then(OsStr::to_str);
        match extension.map(str::to_ascii_lowercase).as_deref() {
            Some("yaml" | "yml") => Self::Native,
            Some("py") => Self::Python,
            _ => Self::Program,
        }
    }

    /// Restarts without `--max-restarts`: a native worker resumes from its checkpoint, other programs may not.
    pub fn default_max_restarts(self) -> u32 {
        match self {
            Self::Native => 3,
            Self::Python | Self::Module | Self::Program => 0,
        }
    }
}

/// A descriptor of this very program, so that a later generation starts the same build even when the file
/// on disk was replaced meanwhile. It must outlive every spawn.
#[derive(Debug)]
pub struct SelfExe(File);

impl SelfExe {
    /// Opens `/proc/self/exe`. The descriptor closes on exec; `execve` has resolved the path before that.
    pub fn open() -> Result<Self, CliError> {
        File::open("/proc/self/exe")
            .map(Self)
            .map_err(CliError::machine("cannot open `/proc/self/exe`"))
    }

    /// A path that is valid in this process and, between fork and exec, in its children.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

/// The interpreter of scripts and modules: `$PYTHON_EXEC`, else, where no environment is activated, that of the environment
/// in which `exe` is installed, else the one that a shell would find.
pub fn python(get_env: impl Fn(&str) -> Option<String>, exe: &Path) -> PathBuf {
    let given = get_env("PYTHON_EXEC").filter(|value| !value.is_empty());
    let is_activated = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .into_iter()
        .any(|name| get_env(name).is_some());
    let found = given
        .map(PathBuf::from)
        .or_else(|| in_environment_of(exe).filter(|_| !is_activated))
        .or_else(|| in_path(&["python3", "python"], &get_env));
    found.unwrap_or_else(|| "python3".into())
}

fn in_environment_of(exe: &Path) -> Option<PathBuf> {
    let folder = exe.parent()?;
    let is_environment = ["pyvenv.cfg", "conda-meta"].map(|mark| folder.with_file_name(mark).exists());
    Some(folder.join("python3")).filter(|python| is_environment.contains(&true) && is_program(python))
}

fn is_program(path: &PathBuf) -> bool {
    path.is_file() && access(path, AccessFlags::X_OK).is_ok()
}

/// The first program in `PATH` with one of the names, of which the first is preferred.
pub(super) fn in_path(names: &[&str], get_env: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let search_path = get_env("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&search_path).collect();
    let mut all = (names.iter()).flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    all.find(is_program)
}

/// A target that was found and read.
#[derive(Debug)]
pub struct Target {
    /// As it was typed.
    pub name: OsString,
    /// Its kind.
    pub kind: TargetKind,
    /// Its own arguments.
    pub args: Vec<OsString>,
    /// `--set` values; only native targets have them.
    pub overrides: Vec<String>,
    /// Contents of the YAML; none for other kinds.
    pub yaml: Option<String>,
}

impl Target {
    /// Looks at the target: a YAML or script must be readable, `--set` and arguments must make sense for it.
    pub fn read(
        kind: TargetKind,
        name: OsString,
        args: Vec<OsString>,
        overrides: Vec<String>,
    ) -> Result<Self, CliError> {
        let display = name.to_string_lossy().into_owned();
        if kind == TargetKind::Native && !args.is_empty() {
            return Err(CliError::Conflict {
                problem: format!(
                    "`{display}` is a configuration and accepts no arguments, but `{}` follows it",
                    args[0].to_string_lossy()
                ),
                hint: format!("override values with `--set`: `ddp-run {display} --set key=value`"),
            });
        }
        if kind != TargetKind::Native && !overrides.is_empty() {
            return Err(CliError::Conflict {
                problem: format!(
                    "`--set {}` needs a YAML target, but the target is `{display}`",
                    overrides[0]
                ),
                hint: format!("pass arguments of a program after its name: `ddp-run {display} ARGS`"),
            });
        }
        let unreadable = |source| CliError::Target {
            hint: hint_for(Path::new(&name)).to_owned(),
            path: PathBuf::from(&name),
            source,
        };
        let is_program = || in_path(&[display.as_str()], |name| std::env::var(name).ok()).is_some();
        if kind == TargetKind::Program && Path::new(&name).is_dir() && !is_program() {
            return Err(unreadable(io::ErrorKind::IsADirectory.into()));
        }
        let yaml = match kind {
            // The configuration's own check refuses what is not text.
            TargetKind::Native => {
                let bytes = fs::read(&name).map_err(unreadable)?;
                Some(String::from_utf8_lossy(&bytes).into_owned())
            }
            TargetKind::Python => {
                File::open(&name).map_err(unreadable)?;
                None
            }
            TargetKind::Module | TargetKind::Program => None,
        };
        Ok(Self {
            name,
            kind,
            args,
            overrides,
            yaml,
        })
    }

    /// The command of every worker, verbatim and without PyTorch's store. Scripts and modules are run by `python`.
    pub fn command(&self, exe: &SelfExe, python: PathBuf) -> WorkerCommand {
        let (program, arg0, args) = match self.kind {
            TargetKind::Native => {
                let overrides = self
                    .overrides
                    .iter()
                    .flat_map(|pair| ["--set".into(), pair.into()]);
                let args = [WORKER_SUBCOMMAND.into(), self.name.clone()]
                    .into_iter()
                    .chain(overrides);
                (exe.path(), Some("ddp-run".into()), args.collect())
            }
            TargetKind::Python | TargetKind::Module => {
                let module = (self.kind == TargetKind::Module).then(|| OsString::from("-m"));
                let args = std::iter::once("-u".into())
                    .chain(module)
                    .chain(std::iter::once(self.name.clone()))
                    .chain(self.args.iter().cloned());
                (python, None, args.collect())
            }
            TargetKind::Program => (PathBuf::from(&self.name), None, self.args.clone()),
        };
        WorkerCommand {
            program,
            arg0,
            args,
            display_name: self.display_name(),
            native: self.kind == TargetKind::Native,
            agent_store: false,
            macros: false,
        }
    }

    /// The file's name without its folders.
    pub fn display_name(&self) -> String {
        let path = Path::new(&self.name);
        path.file_name()
            .unwrap_or(&self.name)
            .to_string_lossy()
            .into_owned()
    }
}

/// The hint for a target that cannot be read.
fn hint_for(path: &Path) -> &'static str {
    if path.is_dir() {
        "a directory counts as a script only with a `__main__.py`; give the path of a file in it"
    } else {
        "give the path of a `.yaml` configuration, of a `.py` script, or a program"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn native(yaml: &str, overrides: &[&str]) -> Target {
        Target {
            name: "dir/train.yaml".into(),
            kind: TargetKind::Native,
            args: vec![],
            overrides: overrides.iter().map(ToString::to_string).collect(),
            yaml: Some(yaml.into()),
        }
    }

    #[test]
    fn kinds_follow_the_end_of_the_name() {
        for (name, kind) in [
            ("a/train.yaml", TargetKind::Native),
            ("TRAIN.YML", TargetKind::Native),
            ("train.py", TargetKind::Python),
            ("true", TargetKind::Program),
            ("./py", TargetKind::Program),
            (".yaml", TargetKind::Program),
        ] {
            assert_eq!(TargetKind::of(OsStr::new(name)), kind, "{name}");
        }
    }

    #[test]
    fn commands_of_the_kinds() {
        let exe = SelfExe::open().expect("proc is mounted");
        let command = native("x: 1", &["train.steps=2"]).command(&exe, "python3".into());
        assert!(command.native && command.program.starts_with("/proc/self/fd"));
        assert_eq!(
            command.args,
            ["__worker", "dir/train.yaml", "--set", "train.steps=2"]
        );
        assert_eq!(command.display_name, "train.yaml");
        let script = Target {
            name: "t.py".into(),
            kind: TargetKind::Python,
            args: vec!["--lr".into()],
            overrides: vec![],
            yaml: None,
        };
        let command = script.command(&exe, "/opt/python".into());
        assert_eq!(command.program, Path::new("/opt/python"));
        assert_eq!(command.args, ["-u", "t.py", "--lr"]);
        let module = Target {
            kind: TargetKind::Module,
            name: "pkg.train".into(),
            ..script
        };
        assert_eq!(
            module.command(&exe, "python3".into()).args,
            ["-u", "-m", "pkg.train", "--lr"]
        );
    }

    #[test]
    fn arguments_must_fit_the_kind() {
        let error = Target::read(TargetKind::Python, "t.py".into(), vec![], vec!["a.b=1".into()])
            .expect_err("no YAML");
        insta::assert_snapshot!(error, @r"
        `--set a.b=1` needs a YAML target, but the target is `t.py`
          hint: pass arguments of a program after its name: `ddp-run t.py ARGS`
        ");
        let error = Target::read(
            TargetKind::Native,
            "t.yaml".into(),
            vec!["train.steps=5".into()],
            vec![],
        )
        .expect_err("arguments");
        insta::assert_snapshot!(error, @r"
        `t.yaml` is a configuration and accepts no arguments, but `train.steps=5` follows it
          hint: override values with `--set`: `ddp-run t.yaml --set key=value`
        ");
        let dir = tempfile::tempdir().expect("a directory");
        let error = Target::read(
            TargetKind::Native,
            dir.path().join("t.yaml").into(),
            vec![],
            vec![],
        )
        .expect_err("no such file");
        let error = error
            .to_string()
            .replace(&dir.path().display().to_string(), "[folder]");
        insta::assert_snapshot!(error, @r"
        cannot read target `[folder]/t.yaml`: No such file or directory (os error 2)
          hint: give the path of a `.yaml` configuration, of a `.py` script, or a program
        ");
    }

    #[test]
    fn a_folder_without_a_main_is_no_script() {
        let dir = tempfile::tempdir().expect("a directory");
        let read = |path: &Path| Target::read(TargetKind::Program, path.into(), vec![], vec![]);
        let error = read(dir.path()).expect_err("a folder");
        assert_eq!(error.exit_code(), ddp_proto::exit::USAGE);
        let words = error
            .to_string()
            .replace(dir.path().to_str().expect("unicode"), "DIR");
        insta::assert_snapshot!(words, @r"
        cannot read target `DIR`: is a directory
          hint: a directory counts as a script only with a `__main__.py`; give the path of a file in it
        ");
        read(Path::new(".")).expect_err("a folder");
        read(Path::new("sh")).expect("a program");
    }
}
