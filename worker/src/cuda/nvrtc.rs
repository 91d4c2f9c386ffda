//! NVRTC: from CUDA C to machine code, on the machine that runs it, for its architecture. Needs no GPU.
//!
//! Compiled kernels are kept on disk, so that only the first start on a machine compiles. One file a unit, named for the
//! hash of all that decides its contents. Files are written under a name of their writer and renamed, so processes and
//! threads that compile the same unit at once do not disturb each other, and each begins with the hash of the rest, so a
//! damaged file is compiled anew. A cache that cannot be written costs time, not the run.
#![allow(unsafe_code, reason = "calls of NVRTC")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::{fmt, ptr};

use crate::libraries::{Library, LibraryError, LibraryKind, Version, table};
use crate::memory::DeviceError;

/// `NVRTC_SUCCESS`
const SUCCESS: c_int = 0;

type Program = *mut c_void;

table! {
    /// What of NVRTC is called; a result is 0 or an error's number. Signatures as `nvrtc.h` of CUDA 12.0 to 13.2
    /// has them.
    struct Functions {
        count_archs: fn(*mut c_int) -> c_int = "nvrtcGetNumSupportedArchs";
        archs: fn(*mut c_int) -> c_int = "nvrtcGetSupportedArchs";
        error_string: fn(c_int) -> *const c_char = "nvrtcGetErrorString";
        create: fn(
            *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> c_int = "nvrtcCreateProgram";
        destroy: fn(*mut Program) -> c_int = "nvrtcDestroyProgram";
        compile: fn(Program, c_int, *const *const c_char) -> c_int = "nvrtcCompileProgram";
        log_size: fn(Program, *mut usize) -> c_int = "nvrtcGetProgramLogSize";
        log: fn(Program, *mut c_char) -> c_int = "nvrtcGetProgramLog";
        cubin_size: fn(Program, *mut usize) -> c_int = "nvrtcGetCUBINSize";
        cubin: fn(Program, *mut c_char) -> c_int = "nvrtcGetCUBIN";
    }
}

/// Machine code of one architecture, as the driver loads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin(pub Vec<u8>);

/// A file of CUDA C, embedded in the program. Its kernels are `extern "C" __global__`; it includes only what is
/// listed here, for there are no CUDA headers.
#[derive(Debug)]
pub struct KernelSource {
    /// File name, for the compiler's messages.
    pub file: &'static str,
    /// Its contents.
    pub text: &'static str,
    /// Files that it includes, by name, with their contents.
    pub headers: &'static [(&'static str, &'static str)],
}

/// A macro that is defined when a source is compiled: an element type, a tile's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Define {
    /// `-D name=word`
    Word(&'static str, &'static str),
    /// `-D name=number`
    Number(&'static str, i64),
}

impl fmt::Display for Define {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(name, word) => write!(f, "{name}={word}"),
            Self::Number(name, number) => write!(f, "{name}={number}"),
        }
    }
}

/// What is compiled at once: a source with its definitions.
#[derive(Clone, Debug)]
pub struct CompileUnit {
    /// The text.
    pub source: &'static KernelSource,
    /// What is defined.
    pub defines: Vec<Define>,
}

impl CompileUnit {
    /// Options of the compiler.
    pub fn options(&self, arch: Arch) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={arch}"),
            "--std=c++17".to_owned(),
            "--device-as-default-execution-space".to_owned(),
            "--generate-line-info".to_owned(),
        ];
        options.extend(
            self.defines
                .iter()
                .map(|define| format!("--define-macro={define}")),
        );
        options
    }
}

impl fmt::Display for CompileUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.source.file)?;
        for define in &self.defines {
            write!(f, " {define}")?;
        }
        Ok(())
    }
}

/// The compiler.
#[derive(Clone, Debug)]
pub struct Nvrtc {
    library: Library,
    functions: Functions,
    version: Version,
    archs: Vec<u32>,
}

impl Nvrtc {
    /// The compiler that discovery finds.
    pub fn open() -> Result<Self, LibraryError> {
        let library = Library::open(LibraryKind::Nvrtc)?;
        let functions = Functions::load(&library)?;
        let version = library.version()?;
        let silent = || library.unusable("does not report its architectures".to_owned());
        let mut count = 0;
        // SAFETY: the function writes one integer.
        if unsafe { (functions.count_archs)(&raw mut count) } != SUCCESS {
            return Err(silent());
        }
        let mut archs = vec![0; count.max(0) as usize];
        // SAFETY: the function writes as many integers as it counted.
        if unsafe { (functions.archs)(archs.as_mut_ptr()) } != SUCCESS {
            return Err(silent());
        }
        Ok(Self {
            library,
            functions,
            version,
            archs: archs.into_iter().map(|arch| arch as u32).collect(),
        })
    }

    /// `13.2`
    pub const fn version(&self) -> Version {
        self.version
    }

    /// The file that it was loaded from.
    pub const fn library(&self) -> &Library {
        &self.library
    }

    /// The architecture to compile for, so that the code runs on `card`.
    pub fn arch_for(&self, card: Arch) -> Result<Arch, LibraryError> {
        card.best_of(&self.archs).ok_or_else(|| {
            let version = self.version;
            self.library.unusable(format!(
                "(NVRTC {version}) supports no architecture that runs on {card}"
            ))
        })
    }

    /// Compiles one unit for one architecture.
    pub fn compile(&self, unit: &CompileUnit, arch: Arch) -> Result<Cubin, DeviceError> {
        let unusable = |code| {
            let problem = format!("(NVRTC {}) failed: {}", self.version, self.words(code));
            self.library.unusable(problem)
        };
        let program = OpenProgram::new(self, unit).map_err(unusable)?;
        let options = strings(unit.options(arch));
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive, and so are `options`, to which the array points.
        let outcome =
            unsafe { (self.functions.compile)(program.raw, pointers.len() as c_int, pointers.as_ptr()) };
        if outcome != SUCCESS {
            return Err(DeviceError::Compile {
                unit: unit.to_string(),
                arch: arch.to_string(),
                version: self.version.to_string(),
                log: program.log().unwrap_or_else(|code| self.words(code)),
            });
        }
        let cubin = program.read(self.functions.cubin_size, self.functions.cubin);
        Ok(Cubin(cubin.map_err(unusable)?))
    }

    fn words(&self, code: c_int) -> String {
        // SAFETY: the function gives a constant string for every number.
        let text = unsafe { (self.functions.error_string)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: not null, and ends in a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A program of NVRTC, destroyed at the end.
struct OpenProgram<'a> {
    nvrtc: &'a Nvrtc,
    raw: Program,
}

impl<'a> OpenProgram<'a> {
    fn new(nvrtc: &'a Nvrtc, unit: &CompileUnit) -> Result<Self, c_int> {
        let source = unit.source;
        let [text, file] = [c_string(source.text), c_string(source.file)];
        let names = strings(source.headers.iter().map(|(name, _)| *name));
        let texts = strings(source.headers.iter().map(|(_, text)| *text));
        let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (names, texts) = (pointers(&names), pointers(&texts));
        let mut raw = ptr::null_mut();
        // SAFETY: all strings end in a zero and are alive; the function copies them. The arrays have as many
        // elements as the count that is passed.
        let outcome = unsafe {
            (nvrtc.functions.create)(
                &raw mut raw,
                text.as_ptr(),
                file.as_ptr(),
                texts.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        if outcome == SUCCESS {
            Ok(Self { nvrtc, raw })
        } else {
            Err(outcome)
        }
    }

    fn log(&self) -> Result<String, c_int> {
        let functions = &self.nvrtc.functions;
        let log = self.read(functions.log_size, functions.log)?;
        let text = String::from_utf8_lossy(&log);
        Ok(text.trim_end_matches('\0').trim_end().to_owned())
    }

    fn read(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, c_int> {
        let mut length = 0;
        let answer = |code| if code == SUCCESS { Ok(()) } else { Err(code) };
        // SAFETY: the program is alive; the function writes one number.
        answer(unsafe { size(self.raw, &raw mut length) })?;
        let mut bytes = vec![0_u8; length];
        // SAFETY: the function writes as many bytes as its sibling counted.
        answer(unsafe { fill(self.raw, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for OpenProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { (self.nvrtc.functions.destroy)(&raw mut self.raw) };
    }
}

/// Sources and options are constants without zero bytes.
fn c_string(text: impl Into<Vec<u8>>) -> CString {
    CString::new(text).expect("no zero byte in a source or option")
}

fn strings<S: Into<Vec<u8>>>(list: impl IntoIterator<Item = S>) -> Vec<CString> {
    list.into_iter().map(c_string).collect()
}

/// A GPU architecture: `sm_80`, `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// Compute capability.
    major: u32,
    minor: u32,
    /// With the instructions that only this very architecture has (`wgmma`, tensor memory).
    specific: bool,
}

impl Arch {
    /// Ampere: A100.
    pub const SM_80: Self = Self::portable(8, 0);
    /// Kernels are written for cards from this one on: bf16 on tensor cores, copies that do not hold up their thread.
    pub const OLDEST: Self = Self::SM_80;
    /// Hopper: H100, H200.
    pub const SM_90A: Self = Self::of_capability(9, 0);

    /// Without instructions that later ones lack.
    pub const fn portable(major: u32, minor: u32) -> Self {
        Self {
            major,
            minor,
            specific: false,
        }
    }

    /// What a card of this compute capability is compiled for.
    pub const fn of_capability(major: u32, minor: u32) -> Self {
        Self {
            major,
            minor,
            // Kernels have a version for Hopper's own instructions; none for those of others.
            specific: major == 9 && minor == 0,
        }
    }

    /// `80`, `90`, `100`: how NVRTC numbers it.
    pub const fn number(self) -> u32 {
        self.major * 10 + self.minor
    }

    /// The newest of `supported` (numbers as NVRTC's) whose code runs on this one: itself, or an earlier one of
    /// the same major number.
    pub fn best_of(self, supported: &[u32]) -> Option<Self> {
        if supported.contains(&self.number()) {
            return Some(self);
        }
        let family = supported
            .iter()
            .filter(|n| **n / 10 == self.major && **n < self.number());
        family.max().map(|n| Self::portable(n / 10, n % 10))
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.specific { "a" } else { "" };
        write!(f, "sm_{}{suffix}", self.number())
    }
}

/// Part of every name: change it with the format of the files.
const FORMAT: &str = "ddp-run cubin 1";

/// Bytes of the hash at the beginning of a file.
const HASH_BYTES: usize = blake3::OUT_LEN;

/// A folder of compiled kernels. Without one, every start compiles them again.
#[derive(Clone, Debug, Default)]
pub struct KernelCache(Option<PathBuf>);

impl KernelCache {
    /// The user's: `$XDG_CACHE_HOME/ddp-run/kernels`, else below `~/.cache`.
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
    pub fn at(folder: PathBuf) -> Self {
        Self(Some(folder))
    }

    /// What was compiled before, or compiles now and keeps it.
    pub fn compile(&self, nvrtc: &Nvrtc, unit: &CompileUnit, arch: Arch) -> Result<Cubin, DeviceError> {
        let Some(folder) = &self.0 else {
            return nvrtc.compile(unit, arch);
        };
        let file = folder.join(file_name(&nvrtc.version().to_string(), unit, arch));
        if let Some(cubin) = read(&file) {
            return Ok(Cubin(cubin));
        }
        let cubin = nvrtc.compile(unit, arch)?;
        if let Err(error) = keep(folder, &file, &cubin.0) {
            tracing::warn!("cannot keep a compiled kernel in `{}`: {error}", folder.display());
        }
        Ok(cubin)
    }
}

/// Everything that decides the machine code, hashed with lengths, so that no two lists of texts run together.
fn file_name(version: &str, unit: &CompileUnit, arch: Arch) -> String {
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

fn read(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (hash, kept) = bytes.split_at_checked(HASH_BYTES)?;
    (blake3::hash(kept).as_bytes() == hash).then(|| kept.to_vec())
}

/// If several processes keep something at once, the first one's stays, where the file system has hard links.
fn keep(folder: &Path, file: &Path, kept: &[u8]) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    // Random: containers that share a cache have processes of the same number.
    let nonce: u64 = rand::random();
    let own = file.with_extension(format!("{nonce:016x}.part"));
    let mut bytes = blake3::hash(kept).as_bytes().to_vec();
    bytes.extend_from_slice(kept);
    let outcome = std::fs::write(&own, bytes).and_then(|()| match std::fs::hard_link(&own, file) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && read(file).is_some() => Ok(()),
        Err(_) => std::fs::rename(&own, file),
        Ok(()) => Ok(()),
    });
    // It may not be there.
    let _ = std::fs::remove_file(&own);
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let names = [Arch::SM_80, Arch::SM_90A, Arch::portable(10, 0)].map(|arch| arch.to_string());
        assert_eq!(names, ["sm_80", "sm_90a", "sm_100"]);
        assert_eq!(Arch::of_capability(8, 9).to_string(), "sm_89");
    }

    #[test]
    fn an_older_compiler_serves_a_newer_card_of_the_same_family() {
        let supported = [75, 80, 86, 90];
        let best = |major, minor| Arch::of_capability(major, minor).best_of(&supported);
        assert_eq!(best(9, 0), Some(Arch::SM_90A));
        assert_eq!(best(8, 9), Some(Arch::portable(8, 6)));
        assert_eq!(best(10, 0), None);
    }

    const fn source(text: &'static str) -> KernelSource {
        KernelSource {
            file: "first.cu",
            text,
            headers: &[],
        }
    }

    static FIRST: KernelSource = source("void first() {}");
    static SECOND: KernelSource = source("void second() {}");

    #[test]
    fn a_name_depends_on_all_that_decides_the_code() {
        let unit = |source, value| CompileUnit {
            source,
            defines: vec![Define::Number("D", value)],
        };
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
        let cubin = b"machine code".to_vec();
        keep(folder.path(), &file, &cubin).unwrap();
        assert_eq!(read(&file), Some(cubin.clone()));
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(read(&file), None);
        std::fs::write(&file, &bytes[..10]).unwrap();
        assert_eq!(read(&file), None);
        keep(folder.path(), &file, &cubin).unwrap();
        assert_eq!(read(&file), Some(cubin));
    }

    #[test]
    fn threads_that_keep_the_same_kernel_at_once_do_not_disturb_each_other() {
        const THREADS: usize = 8;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.cubin");
        let cubin = vec![7; 1 << 16];
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
