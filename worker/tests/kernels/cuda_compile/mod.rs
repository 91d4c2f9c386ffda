//! Kernels are compiled by the real NVRTC on machines without a GPU, and the results are compared with the limits of
//! cards: for sm_90a, or for every architecture with `DDP_CUDA_ARCHS=all`.
//!
//! Where there is no NVRTC the tests say so and pass, unless `DDP_REQUIRE_NVRTC=1` says that it must be there.
//!
//! | module | what it is |
//! |---|---|
//! | `compiled` | the compiler, and what it made |
//! | `cubin` | registers, memory and parameters of a compiled kernel |
//! | `card` | what a card refuses of a launch |
//! | `paper` | a [`ddp_worker::device::Device`] that carries nothing out, and what its operations would launch |
//! | `training` | all that a step of training launches, for several models |
//! | `launches` | every launch on every card; `--nocapture` shows a table |
//! | `op_cases` | operations, shared with the tests that run them |

mod card;
mod compiled;
mod cubin;
mod launches;
mod paper;
mod training;

use compiled::nvrtc;
use ddp_worker::cuda::{Arch, CompileUnit, Define, KernelCache, KernelSource};
use ddp_worker::device::DeviceError;

static GOOD: KernelSource = KernelSource {
    file: "good.cu",
    text: "#include \"scale.cuh\"\nextern \"C\" __global__ void scale(REAL *x) { x[threadIdx.x] *= factor(); }\n",
    headers: &[(
        "scale.cuh",
        "static __device__ REAL factor() { return (REAL)FACTOR; }\n",
    )],
};

static BAD: KernelSource = KernelSource {
    file: "bad.cu",
    text: "extern \"C\" __global__ void broken(float *x) {\n    x[0] = undefined;\n}\n",
    headers: &[],
};

fn bad() -> CompileUnit {
    CompileUnit {
        source: &BAD,
        defines: Vec::new(),
    }
}

fn good(factor: i64) -> CompileUnit {
    CompileUnit {
        source: &GOOD,
        defines: vec![Define::Word("REAL", "float"), Define::Number("FACTOR", factor)],
    }
}

#[test]
fn a_unit_becomes_machine_code() {
    let Some(nvrtc) = nvrtc() else { return };
    for arch in [Arch::SM_80, Arch::SM_90A, Arch::of_capability(10, 0)] {
        let cubin = nvrtc.compile(&good(3), arch).unwrap();
        assert!(cubin.0.starts_with(b"\x7fELF"), "not an object file");
        let name = b"scale";
        assert!(
            cubin.0.windows(name.len()).any(|bytes| bytes == name),
            "the kernel is not in it"
        );
    }
}

#[test]
fn an_error_shows_the_file_and_its_line() {
    let Some(nvrtc) = nvrtc() else { return };
    let error = nvrtc.compile(&bad(), Arch::SM_80).unwrap_err();
    assert!(matches!(error, DeviceError::Compile { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("bad.cu(2): error: identifier \"undefined\" is undefined"),
        "{text}"
    );
}

#[test]
fn the_cache_gives_what_was_compiled() {
    let Some(nvrtc) = nvrtc() else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = KernelCache::at(folder.path().join("kernels"));
    let files = || {
        let entries = std::fs::read_dir(folder.path().join("kernels")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let compiled = cache.compile(&nvrtc, &good(3), Arch::SM_80).unwrap();
    let [file] = files().try_into().expect("one file");
    // The second time it comes from the file: its time of change stays.
    let written = std::fs::metadata(&file).unwrap().modified().unwrap();
    assert_eq!(cache.compile(&nvrtc, &good(3), Arch::SM_80), Ok(compiled.clone()));
    assert_eq!(std::fs::metadata(&file).unwrap().modified().unwrap(), written);
    cache.compile(&nvrtc, &good(4), Arch::SM_80).unwrap();
    assert_eq!(files().len(), 2);
    // A file that was cut short is compiled anew.
    std::fs::write(&file, b"cut short").unwrap();
    assert_eq!(cache.compile(&nvrtc, &good(3), Arch::SM_80), Ok(compiled));
}
