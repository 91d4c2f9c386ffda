//! GPUs as the CUDA driver describes them, and versions of libraries, asked in a process of its own.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cli::answer::give;
use crate::cli::machine::hardware;
use crate::cli::native::cuda::{GpuFacts, visible_gpus};
use crate::cli::native::libraries::{Library, LibraryKind, Version};

/// First argument of the invocation that describes the GPUs.
pub const GPU_DESCRIBE_SUBCOMMAND: &str = "__describe-gpus";

/// Longest wait: the driver starts all devices, and large libraries are read from a disk.
const DESCRIBE_TIMEOUT: Duration = Duration::from_mins(1);

/// What only loading the libraries tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Described {
    /// The visible devices, or why there are none, as an error says it: with its hint, if it has one.
    pub gpus: Result<Vec<GpuFacts>, String>,
    /// Each library in order of [`LibraryKind::ALL`], or the error of loading it; None if it was not found.
    pub libraries: Vec<Option<Result<LoadedLibrary, String>>>,
}

/// A library that was loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedLibrary {
    /// Its file.
    pub path: PathBuf,
    /// Its version, or why it reports none.
    pub version: Result<Version, String>,
}

impl Described {
    /// Nothing could be asked.
    pub(super) fn failed(why: &str) -> Self {
        Self {
            gpus: Err(why.to_owned()),
            libraries: vec![None; LibraryKind::ALL.len()],
        }
    }

    /// Each kind of library with what was found of it.
    pub fn all(&self) -> impl Iterator<Item = (LibraryKind, Option<&Result<LoadedLibrary, String>>)> {
        let libraries = self.libraries.iter().map(Option::as_ref);
        LibraryKind::ALL.into_iter().zip(libraries)
    }

    /// The devices, none if the driver did not start.
    pub fn gpus(&self) -> &[GpuFacts] {
        self.gpus.as_deref().unwrap_or_default()
    }

    /// What was found of a library.
    pub fn get(&self, kind: LibraryKind) -> Option<&Result<LoadedLibrary, String>> {
        self.all().find(|(known, _)| *known == kind)?.1
    }

    /// Version of a library, if it reports one.
    pub fn version(&self, kind: LibraryKind) -> Option<Version> {
        self.get(kind)?.as_ref().ok()?.version.clone().ok()
    }
}

/// The child's main: prints the answer as one line of JSON.
pub fn describe_main() -> ExitCode {
    serde_json::to_string(&describe()).map_or(ExitCode::FAILURE, |line| give(line + "\n"))
}

fn describe() -> Described {
    let load = |kind| match Library::open(kind) {
        Ok(library) => Some(Ok(LoadedLibrary {
            path: library.path().to_owned(),
            version: library.version().map_err(|error| error.to_string()),
        })),
        Err(error) if error.is_absence() => None,
        Err(error) => Some(Err(error.to_string())),
    };
    Described {
        gpus: visible_gpus().map_err(|error| error.to_string()),
        libraries: LibraryKind::ALL.into_iter().map(load).collect(),
    }
}

/// Asks, with a deadline; None if no library was found.
pub fn ask() -> Option<Described> {
    let answer = match hardware::ask_in_child(GPU_DESCRIBE_SUBCOMMAND, None, DESCRIBE_TIMEOUT) {
        Ok(line) => serde_json::from_str::<Described>(line.trim())
            .map_err(|_| "the driver crashed the process that queried it".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    match answer {
        Ok(described) => Some(described).filter(|described| described.libraries.iter().any(Option::is_some)),
        Err(why) => Some(Described::failed(&why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_survives_its_way_between_processes() {
        let mut answer = Described::failed("no driver");
        answer.libraries[0] = Some(Err("cannot be loaded".to_owned()));
        let line = serde_json::to_string(&answer).expect("it serialises");
        assert_eq!(serde_json::from_str::<Described>(&line).ok(), Some(answer));
    }
}
