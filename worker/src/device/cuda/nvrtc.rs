//! NVRTC: from CUDA C to machine code, on the machine that runs it. Needs no GPU.
#![allow(unsafe_code, reason = "calls of NVRTC")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

use super::{Arch, Unit};
use crate::libraries::{Kind, Library, LibraryError, table};

/// `NVRTC_SUCCESS`
const SUCCESS: c_int = 0;

type Program = *mut c_void;

table! {
    /// What of NVRTC is called; a result is 0 or an error's number. Signatures as `nvrtc.h` of CUDA 12.0 to 13.2
    /// has them.
    struct Functions {
        version: fn(*mut c_int, *mut c_int) -> c_int = "nvrtcVersion";
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

/// Why a kernel was not compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// The compiler is not there, or not usable.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The compiler refused the text.
    #[error("`{unit}` does not compile for {arch} with NVRTC {version}:\n{log}")]
    Refused {
        /// File and definitions.
        unit: String,
        /// What it was compiled for.
        arch: String,
        /// Of the compiler.
        version: String,
        /// The compiler's words.
        log: String,
    },
}

/// The compiler.
#[derive(Clone, Debug)]
pub struct Nvrtc {
    library: Library,
    functions: Functions,
    version: (u32, u32),
    archs: Vec<u32>,
}

impl Nvrtc {
    /// The compiler that discovery finds.
    pub fn open() -> Result<Self, LibraryError> {
        Self::of(Library::open(Kind::Nvrtc)?)
    }

    /// The compiler in this library.
    pub fn of(library: Library) -> Result<Self, LibraryError> {
        let functions = Functions::load(&library)?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the functions write one integer to each address.
        let counted = unsafe {
            (functions.version)(&raw mut major, &raw mut minor) == SUCCESS
                && (functions.count_archs)(&raw mut count) == SUCCESS
        };
        let mut archs = vec![0; count.max(0) as usize];
        // SAFETY: the function writes as many integers as it counted.
        if !counted || unsafe { (functions.archs)(archs.as_mut_ptr()) } != SUCCESS {
            return Err(LibraryError::Unusable {
                kind: Kind::Nvrtc,
                path: library.path().to_owned(),
                problem: "does not say its version and architectures".to_owned(),
            });
        }
        Ok(Self {
            library,
            functions,
            version: (major as u32, minor as u32),
            archs: archs.into_iter().map(|arch| arch as u32).collect(),
        })
    }

    /// `13.2`
    #[must_use]
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The file that it was loaded from.
    #[must_use]
    pub const fn library(&self) -> &Library {
        &self.library
    }

    /// The architecture to compile for, so that the code runs on `card`.
    pub fn arch_for(&self, card: Arch) -> Result<Arch, LibraryError> {
        card.best_of(&self.archs).ok_or_else(|| LibraryError::Unusable {
            kind: Kind::Nvrtc,
            path: self.library.path().to_owned(),
            problem: format!(
                "(NVRTC {}) knows no architecture that runs on {card}",
                self.version()
            ),
        })
    }

    /// Compiles one unit for one architecture.
    pub fn compile(&self, unit: &Unit, arch: Arch) -> Result<Cubin, CompileError> {
        let unusable = |code| CompileError::Library(self.unusable(code));
        let program = OpenProgram::new(self, unit).map_err(unusable)?;
        let options = strings(unit.options(arch));
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive, and so are `options`, to which the array points.
        let outcome =
            unsafe { (self.functions.compile)(program.raw, pointers.len() as c_int, pointers.as_ptr()) };
        if outcome != SUCCESS {
            return Err(CompileError::Refused {
                unit: unit.to_string(),
                arch: arch.to_string(),
                version: self.version(),
                log: program.log().unwrap_or_else(|code| self.words(code)),
            });
        }
        program.cubin().map_err(unusable)
    }

    fn unusable(&self, code: c_int) -> LibraryError {
        LibraryError::Unusable {
            kind: Kind::Nvrtc,
            path: self.library.path().to_owned(),
            problem: format!("(NVRTC {}) failed: {}", self.version(), self.words(code)),
        }
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
    fn new(nvrtc: &'a Nvrtc, unit: &Unit) -> Result<Self, c_int> {
        let source = unit.source;
        let [text, file] = [c_string(source.text), c_string(source.file)];
        let names = strings(source.headers.iter().map(|(name, _)| *name));
        let texts = strings(source.headers.iter().map(|(_, text)| *text));
        let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (names, texts) = (pointers(&names), pointers(&texts));
        let mut raw = ptr::null_mut();
        // SAFETY: all strings end in a zero and are alive; the function copies them. The arrays have as many
        // elements as it is told.
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

    fn cubin(&self) -> Result<Cubin, c_int> {
        let functions = &self.nvrtc.functions;
        self.read(functions.cubin_size, functions.cubin).map(Cubin)
    }

    fn read(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, c_int> {
        let mut length = 0;
        // SAFETY: the program is alive; the function writes one number.
        match unsafe { size(self.raw, &raw mut length) } {
            SUCCESS => {}
            code => return Err(code),
        }
        let mut bytes = vec![0_u8; length];
        // SAFETY: the function writes as many bytes as its sibling said.
        match unsafe { fill(self.raw, bytes.as_mut_ptr().cast()) } {
            SUCCESS => Ok(bytes),
            code => Err(code),
        }
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
