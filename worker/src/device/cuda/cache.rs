//! Compiled kernels on disk, so that only the first start on a machine compiles.
//!
//! One file a unit, named for the hash of all that decides its contents. Files are written under a name of their writer
//! and renamed, so processes and threads that compile the same unit at once do not disturb each other, and each begins
//! with the hash of the rest, so a damaged file is compiled anew. A cache that cannot be written costs time, not the run.

use std::path::{Path, PathBuf};

use super::{Arch, CompileError, Cubin, Nvrtc, Unit};

/// Part of every name: change it with the format of the files.
const FORMAT: &str = "ddp-run cubin 1";

/// Bytes of the hash at the beginning of a file.
const HASH_BYTES: usize = blake3::OUT_LEN;

/// A folder of compiled kernels; none: every start compiles.
#[derive(Clone, Debug, Default)]
pub struct CubinCache(Option<PathBuf>);

impl CubinCache {
    /// The user's: `$XDG_CACHE_HOME/ddp-run/kernels`, else below `~/.cache`.
    #[must_use]
    pub fn of_user() -> Self {
        let absolute = |name| {
            std::env::var_os(name)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
        };
        let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
        Self(cache.map(|cache| cache.join("ddp-run").join("kernels")))
    }

    /// In this folder, which is made when the first kernel is kept.
    #[must_use]
    pub fn at(folder: PathBuf) -> Self {
        Self(Some(folder))
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        self.0.as_deref()
    }

    /// What was compiled before, or compiles now and keeps it.
    pub fn compile(&self, nvrtc: &Nvrtc, unit: &Unit, arch: Arch) -> Result<Cubin, CompileError> {
        let Some(folder) = &self.0 else {
            return nvrtc.compile(unit, arch);
        };
        let file = folder.join(file_name(&nvrtc.version(), unit, arch));
        if let Some(cubin) = read(&file) {
            return Ok(cubin);
        }
        let cubin = nvrtc.compile(unit, arch)?;
        if let Err(error) = keep(folder, &file, &cubin) {
            tracing::warn!("cannot keep a compiled kernel in `{}`: {error}", folder.display());
        }
        Ok(cubin)
    }
}

/// Everything that decides the machine code, hashed with lengths, so that no two lists of texts run together.
fn file_name(version: &str, unit: &Unit, arch: Arch) -> String {
    let mut hash = blake3::Hasher::new();
    let mut add = |text: &str| {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    for text in [FORMAT, version, unit.source.file, unit.source.text] {
        add(text);
    }
    for (name, text) in unit.source.headers {
        add(name);
        add(text);
    }
    for option in unit.options(arch) {
        add(&option);
    }
    format!("{}.cubin", hash.finalize().to_hex())
}

fn read(file: &Path) -> Option<Cubin> {
    let bytes = std::fs::read(file).ok()?;
    let (hash, cubin) = bytes.split_at_checked(HASH_BYTES)?;
    (blake3::hash(cubin).as_bytes() == hash).then(|| Cubin(cubin.to_vec()))
}

fn keep(folder: &Path, file: &Path, cubin: &Cubin) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    // Random: containers that share a cache have processes of the same number.
    let nonce: u64 = rand::random();
    let own = file.with_extension(format!("{nonce:016x}.part"));
    let mut bytes = blake3::hash(&cubin.0).as_bytes().to_vec();
    bytes.extend_from_slice(&cubin.0);
    let outcome = std::fs::write(&own, bytes).and_then(|()| std::fs::rename(&own, file));
    if outcome.is_err() {
        // It may not be there.
        let _ = std::fs::remove_file(&own);
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::super::{Define, Source};
    use super::*;

    static FIRST: Source = Source::new("first.cu", "void first() {}");
    static SECOND: Source = Source::new("first.cu", "void second() {}");

    #[test]
    fn a_name_depends_on_all_that_decides_the_code() {
        let unit = |source, value| Unit::new(source, &[Define::number("D", value)]);
        let names = [
            file_name("12.9", &unit(&FIRST, 64), Arch::SM_80),
            file_name("13.0", &unit(&FIRST, 64), Arch::SM_80),
            file_name("12.9", &unit(&FIRST, 32), Arch::SM_80),
            file_name("12.9", &unit(&FIRST, 64), Arch::SM_90A),
            file_name("12.9", &unit(&SECOND, 64), Arch::SM_80),
        ];
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
        assert_eq!(names[0], file_name("12.9", &unit(&FIRST, 64), Arch::SM_80));
    }

    #[test]
    fn a_damaged_file_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.cubin");
        let cubin = Cubin(b"machine code".to_vec());
        keep(folder.path(), &file, &cubin).unwrap();
        assert_eq!(read(&file), Some(cubin));
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(read(&file), None);
        std::fs::write(&file, &bytes[..10]).unwrap();
        assert_eq!(read(&file), None);
    }

    #[test]
    fn threads_that_keep_the_same_kernel_at_once_do_not_disturb_each_other() {
        const THREADS: usize = 8;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.cubin");
        let cubin = Cubin(vec![7; 1 << 16]);
        let together = std::sync::Barrier::new(THREADS);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    together.wait();
                    for _ in 0..20 {
                        keep(folder.path(), &file, &cubin).unwrap();
                        assert_eq!(read(&file).as_ref(), Some(&cubin));
                    }
                });
            }
        });
        let names = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["x.cubin"]);
    }
}
