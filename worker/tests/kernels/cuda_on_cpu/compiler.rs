//! The system's C++ compiler, and the functions that come of it.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ddp_worker::ops::cuda::Call;
use libloading::{Library, Symbol};

/// Runs a grid: addresses of the arguments, blocks, threads, bytes of dynamic shared memory, the order; null or an
/// error's words.
type Launch =
    unsafe extern "C" fn(*mut *mut c_void, *const c_uint, *const c_uint, c_uint, c_uint) -> *const c_char;

/// Most parameters of a kernel.
const MAX_PARAMETERS: usize = 32;

/// A kernel as a function of this process.
pub(crate) struct Kernel {
    library: Library,
    name: &'static str,
    /// One launch at a time: the fibers of a kernel are statics of its library.
    running: Mutex<()>,
}

/// Compiled kernels, by what they were compiled of.
static KERNELS: Mutex<Option<HashMap<String, Arc<OnceLock<Kernel>>>>> = Mutex::new(None);

/// The kernel of a call, compiled when it is first asked for.
pub(crate) fn kernel(call: &Call) -> Arc<OnceLock<Kernel>> {
    let text = translation_unit(call);
    let slot = {
        let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
        kernels
            .get_or_insert_default()
            .entry(text.clone())
            .or_default()
            .clone()
    };
    slot.get_or_init(|| Kernel::compile(call, &text));
    slot
}

/// What the C++ compiler is given: definitions, the imitation of CUDA, the source with what it includes, the kernel.
fn translation_unit(call: &Call) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    for define in &call.unit.defines {
        let define = define.to_string();
        let (name, value) = define.split_once('=').expect("a definition is NAME=VALUE");
        writeln!(text, "#define {name} {value}").unwrap();
    }
    text.push_str(include_str!("cuda.hpp"));
    text.push_str(&included(call.unit.source.file, call.unit.source.text, call));
    writeln!(text, "\nCUDA_ON_CPU_KERNEL({})", call.kernel).unwrap();
    text
}

/// A file with its `#include "…"` replaced by the files.
fn included(name: &str, text: &str, call: &Call) -> String {
    let mut lines = vec![format!("\n#line 1 \"{name}\"")];
    for (index, line) in text.lines().enumerate() {
        if let Some(rest) = line.strip_prefix("#include \"") {
            let wanted = rest.trim_end_matches('"');
            let header = call.unit.source.headers.iter().find(|(name, _)| *name == wanted);
            let (header, contents) = header.unwrap_or_else(|| panic!("`{name}` includes `{wanted}`"));
            lines.push(included(header, contents, call));
            lines.push(format!("#line {} \"{name}\"", index + 2));
        } else {
            lines.push(line.to_owned());
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

impl Kernel {
    /// The library stays in the target folder under a name made of its contents: it is compiled once.
    fn compile(call: &Call, text: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_on_cpu");
        std::fs::create_dir_all(&folder).unwrap();
        let hash = blake3::hash(text.as_bytes()).to_hex();
        let library = folder.join(format!("{}-{}.so", call.kernel, &hash[..16]));
        if !library.exists() {
            build(&folder, &library, text, call.kernel);
        }
        // SAFETY: compiled above, or by an earlier run, from a text that runs nothing when it is loaded but the
        // initialisation of the standard library.
        let library = unsafe { Library::new(&library) }.unwrap_or_else(|error| panic!("{error}"));
        Self {
            library,
            name: call.kernel,
            running: Mutex::new(()),
        }
    }

    /// Sizes of the parameters in bytes.
    pub(crate) fn parameters(&self) -> Vec<usize> {
        let mut sizes = [0; MAX_PARAMETERS];
        // SAFETY: `cuda.hpp` defines it with this type, and it writes one number a parameter of the kernel.
        let count = unsafe {
            let function: Symbol<unsafe extern "C" fn(*mut c_uint) -> c_uint> = self
                .library
                .get(format!("{}_parameters", self.name).as_bytes())
                .unwrap();
            function(sizes.as_mut_ptr())
        };
        sizes[..count as usize]
            .iter()
            .map(|size| *size as usize)
            .collect()
    }

    /// Runs a grid. `values` has what each argument points to, the lowest byte first.
    pub(crate) fn launch(&self, values: &mut [Vec<u64>], call: &Call, schedule: u32) -> Result<(), String> {
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|v| v.as_mut_ptr().cast()).collect();
        let _running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `cuda.hpp` defines it with this type; the caller compared the arguments with the parameters, and
        // buffers are fenced, so that a wild access ends in an error.
        unsafe {
            let name = format!("{}_launch", self.name);
            let function: Symbol<Launch> = self.library.get(name.as_bytes()).unwrap();
            let error = function(
                pointers.as_mut_ptr(),
                call.grid.blocks.as_ptr(),
                call.grid.threads.as_ptr(),
                call.grid.shared_bytes as c_uint,
                schedule,
            );
            if error.is_null() {
                Ok(())
            } else {
                Err(CStr::from_ptr(error).to_string_lossy().into_owned())
            }
        }
    }
}

fn build(folder: &Path, library: &Path, text: &str, kernel: &str) {
    let work = tempfile::Builder::new()
        .prefix(kernel)
        .tempdir_in(folder)
        .unwrap();
    let source: PathBuf = work.path().join("kernel.cpp");
    let object = work.path().join("kernel.so");
    std::fs::write(&source, text).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let output = Command::new(&compiler)
        .args(["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-w"])
        .args([
            "-fsanitize=alignment,bounds",
            "-fsanitize-undefined-trap-on-error",
        ])
        .arg("-o")
        .args([&object, &source])
        .output()
        .unwrap_or_else(|error| panic!("the C++ compiler `{compiler}` does not start: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "`{kernel}` is no C++:\n{errors}");
    // Another test process may have been first: the contents are the same.
    std::fs::rename(&object, library).unwrap();
}
