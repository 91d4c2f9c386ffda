//! `ddp-run` as a script writes it.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use super::{Finished, Program, Running, Screen};

/// Which function of [`crate::ROLES`] a worker runs.
pub(crate) const ROLE: &str = "DDP_TEST_ROLE";

/// A launch to be.
pub(crate) struct Launch {
    program: Program,
    flags: Vec<OsString>,
    target: Vec<OsString>,
}

/// A launch without flags and without a target.
pub(crate) fn launch() -> Launch {
    launch_from(env!("CARGO_BIN_EXE_ddp-run"))
}

/// The same with a copy of the program.
pub(crate) fn launch_from(program: impl Into<PathBuf>) -> Launch {
    Launch {
        program: Program::new(program),
        flags: Vec::new(),
        target: Vec::new(),
    }
}

impl Launch {
    pub(crate) fn nproc(self, workers: u32) -> Self {
        self.flag("--nproc-per-node", workers.to_string())
    }

    /// One of `nodes`, meeting at `endpoint` under the job's name `id`.
    pub(crate) fn node_of(self, nodes: u32, endpoint: &str, id: &str) -> Self {
        self.flag("--nnodes", nodes.to_string())
            .flag("--rdzv-endpoint", endpoint)
            .flag("--rdzv-id", id)
    }

    pub(crate) fn flag(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.flags.extend([name.into(), value.as_ref().to_owned()]);
        self
    }

    /// Words as they are, in front of the target.
    pub(crate) fn words(mut self, words: impl IntoIterator<Item: AsRef<OsStr>>) -> Self {
        let words = words.into_iter().map(|word| word.as_ref().to_owned());
        self.flags.extend(words);
        self
    }

    pub(crate) fn set(self, assignment: &str) -> Self {
        self.flag("--set", assignment)
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.program = self.program.env(name, value);
        self
    }

    pub(crate) fn input(mut self, text: &str) -> Self {
        self.program = self.program.input(text);
        self
    }

    pub(crate) fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.program = self.program.dir(dir);
        self
    }

    pub(crate) fn target(mut self, target: impl Into<OsString>) -> Self {
        self.target = vec![target.into()];
        self
    }

    pub(crate) fn target_args(mut self, args: impl IntoIterator<Item: AsRef<OsStr>>) -> Self {
        let args = args.into_iter().map(|arg| arg.as_ref().to_owned());
        self.target.extend(args);
        self
    }

    /// Workers that run a shell script.
    pub(crate) fn shell(self, script: &str) -> Self {
        self.target("sh").target_args(["-c", script])
    }

    /// Workers that run this test program, whose function `role` of [`crate::ROLES`] is their `main`.
    pub(crate) fn role(self, role: &str) -> Self {
        let binary = std::env::current_exe().expect("this very program");
        let child = ["child", "--exact", "--ignored", "--nocapture"];
        self.env(ROLE, role).target(binary).target_args(child)
    }

    pub(crate) fn stdout_to(mut self, file: std::fs::File) -> Self {
        self.program = self.program.stdout_to(file);
        self
    }

    /// Starts it on a terminal of its own.
    #[track_caller]
    pub(crate) fn on_screen(self) -> Screen {
        self.program.args(self.flags).args(self.target).on_screen()
    }

    #[track_caller]
    pub(crate) fn start(self) -> Running {
        self.program.args(self.flags).args(self.target).start()
    }

    #[track_caller]
    pub(crate) fn run(self) -> Finished {
        self.start().finish()
    }
}
