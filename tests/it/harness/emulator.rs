//! Emulated GPUs: `tests/emulator`, built once, with a cache of kernels that all tests share.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::{Launch, Program, repository};

/// The emulated libraries.
#[derive(Clone, Copy)]
pub(crate) struct Emulator {
    folder: &'static Path,
}

impl Emulator {
    /// Builds what is older than its sources.
    #[track_caller]
    pub(crate) fn built() -> Self {
        static FOLDER: OnceLock<PathBuf> = OnceLock::new();
        let folder = FOLDER.get_or_init(|| {
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
            let output = Command::new(repository("tests/emulator/build.sh"))
                .arg(&folder)
                .output()
                .expect("bash");
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "the emulator was not built:\n{errors}");
            folder
        });
        Self { folder }
    }

    pub(crate) const fn folder(self) -> &'static Path {
        self.folder
    }

    /// What a program must find in its environment.
    fn environment(self) -> [(&'static str, String); 2] {
        let path = |path: &Path| path.to_str().expect("a path of UTF-8").to_owned();
        [
            ("LD_LIBRARY_PATH", path(self.folder)),
            ("XDG_CACHE_HOME", path(&self.folder.join("cache"))),
        ]
    }

    /// A launch that sees emulated GPUs.
    pub(crate) fn launch(self) -> Launch {
        let environment = self.environment();
        environment
            .iter()
            .fold(super::launch(), |launch, (name, value)| launch.env(name, value))
    }

    /// A program that sees them.
    pub(crate) fn program(self, path: &str) -> Program {
        let environment = self.environment();
        environment
            .iter()
            .fold(Program::new(path), |program, (name, value)| {
                program.env(name, value)
            })
    }
}
