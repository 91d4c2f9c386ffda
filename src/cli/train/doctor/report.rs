//! The report as text: the inventory, then the problems with their hints.

use std::fmt::Write;

use super::facts::Facts;
use super::gpus::Described;
use crate::cli::native::libraries::{LibraryError, LibraryKind, Version};

/// Fewest open files that a node with 8 workers is comfortable with.
const FEW_OPEN_FILES: u64 = 1024;

/// Bytes of `/dev/shm` that NCCL takes for a GPU, and some.
const SMALL_SHM: u64 = 64 << 20;
/// Locked memory with which RDMA works; what it registers is less.
const SMALL_MEMLOCK: u64 = 1 << 30;

/// Oldest NCCL with communicators that are initialised without blocking and split.
const OLDEST_NCCL: Version = Version {
    major: 2,
    minor: 18,
    patch: 0,
};

/// The whole report, ending in a newline.
pub fn render(facts: &Facts) -> String {
    let mut out = String::new();
    cpu_section(facts, &mut out);
    memory_section(facts, &mut out);
    process_section(facts, &mut out);
    gpu_section(facts, &mut out);
    fabric_section(facts, &mut out);
    library_section(facts, &mut out);
    let missing = findings(facts);
    if missing.is_empty() {
        push(&mut out, "\nno problems found");
    } else {
        push(&mut out, "\nproblems found");
        for finding in missing {
            push(
                &mut out,
                &format!("  - {}\n    hint: {}", finding.problem, finding.hint),
            );
        }
    }
    if !may_have_gpus(facts) {
        push(&mut out, "  note: no GPU found: training runs on the CPU");
    }
    out
}

fn push(out: &mut String, line: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{line}");
}

fn row(out: &mut String, name: &str, value: &str) {
    push(out, &format!("  {name:<20} {value}"));
}

fn cpu_section(facts: &Facts, out: &mut String) {
    push(out, "CPU");
    row(out, "model", &facts.cpu_model);
    let features = if facts.cpu_features.is_empty() {
        "none".into()
    } else {
        facts.cpu_features.join(" ")
    };
    row(out, "instruction sets", &features);
    let quota = match facts.cgroup_quota_cores {
        Some(quota) => format!("cgroup quota {quota:.1}"),
        None => "no quota".to_owned(),
    };
    row(
        out,
        "cores",
        &format!(
            "{} usable of {} ({quota})",
            facts.cores_usable, facts.cores_online
        ),
    );
}

/// How what workers start is held together.
fn process_section(facts: &Facts, out: &mut String) {
    push(out, "processes");
    let group = match &facts.worker_group {
        Ok(parent) => format!("available for workers, in {}", parent.display()),
        Err(why) => format!("not available for workers: {why}; using sessions and markers instead"),
    };
    row(out, "control group", &group);
    row(
        out,
        "open files",
        &facts.open_files.map_or("unlimited".to_owned(), |n| n.to_string()),
    );
}

fn memory_section(facts: &Facts, out: &mut String) {
    push(out, "memory");
    let free = match facts.memory_bytes {
        Some((free, all)) => format!("{} free of {}", gib(free), gib(all)),
        None => "unknown".to_owned(),
    };
    row(out, "main memory", &free);
    row(
        out,
        "cgroup limit",
        &facts.cgroup_memory_bytes.map_or("none".to_owned(), gib),
    );
    let memfd = match &facts.memfd {
        Ok(()) => "memfd works; neither /dev/shm nor kernel.shmmax is used".to_owned(),
        Err(error) => format!("not available: {error}"),
    };
    row(out, "shared memory", &memfd);
    let locked = facts
        .memlock_bytes
        .map_or("unlimited".to_owned(), |bytes| format!("{} KiB", bytes >> 10));
    row(out, "lockable", &locked);
}

fn gpu_section(facts: &Facts, out: &mut String) {
    push(out, "GPU");
    row(
        out,
        "kernel driver",
        facts.driver_version.as_deref().unwrap_or("none"),
    );
    let visible = facts.cuda_visible_devices.as_deref().unwrap_or("not set");
    row(out, "visible devices", &format!("CUDA_VISIBLE_DEVICES {visible}"));
    match facts.described.as_ref().map(|described| &described.gpus) {
        None => row(out, "devices", "none"),
        Some(Err(error)) => row(
            out,
            "devices",
            &format!("none: {}", Finding::of(error, "").problem),
        ),
        Some(Ok(gpus)) if gpus.is_empty() => row(out, "devices", "none"),
        Some(Ok(gpus)) => {
            for (ordinal, gpu) in gpus.iter().enumerate() {
                let (major, minor) = gpu.compute_capability;
                let value = format!(
                    "{}, sm_{major}{minor}, {}, {} multiprocessors, {} KiB shared per block, PCI {}",
                    gpu.name,
                    gib(gpu.memory_bytes as u64),
                    gpu.multiprocessors,
                    gpu.shared_per_block >> 10,
                    gpu.pci
                );
                row(out, &format!("device {ordinal}"), &value);
            }
        }
    }
}

/// Nothing, on a machine without GPUs.
fn fabric_section(facts: &Facts, out: &mut String) {
    if !may_have_gpus(facts) {
        return;
    }
    let fabric = &facts.fabric;
    let manager = match fabric.manager_runs {
        Some(true) => "runs",
        Some(false) => "does not run",
        None => "not needed: no NVSwitch",
    };
    row(out, "fabric manager", manager);
    let infiniband = match &fabric.infiniband[..] {
        [] => "none".to_owned(),
        devices => devices.join(" "),
    };
    row(out, "InfiniBand", &infiniband);
    row(
        out,
        "/dev/shm",
        &fabric.shm_bytes.map_or("unknown".to_owned(), gib),
    );
    let acs = match fabric.acs_bridges {
        Some(0) => "off".to_owned(),
        Some(bridges) => format!("on, at {bridges} bridges"),
        None => "unknown: only root can read it".to_owned(),
    };
    row(out, "PCI access control", &acs);
}

fn fabric_findings(facts: &Facts, gpus: usize) -> Vec<Finding> {
    let fabric = &facts.fabric;
    let is_small = fabric
        .shm_bytes
        .is_some_and(|bytes| bytes < SMALL_SHM * gpus as u64);
    let cases = [
        (
            facts.memlock_bytes.is_some_and(|bytes| bytes < SMALL_MEMLOCK) && !fabric.infiniband.is_empty(),
            "the limit on locked memory is too low for InfiniBand",
            "`ulimit -l unlimited`; in a container, `--ulimit memlock=-1`",
        ),
        (
            gpus > 1 && is_small,
            "`/dev/shm` is too small for NCCL",
            "in a container, `--shm-size=1g` or `--ipc=host`",
        ),
        (
            gpus > 1 && fabric.acs_bridges.is_some_and(|bridges| bridges > 0),
            "PCI access control (ACS) makes GPUs reach each other through the processor: NCCL is slow, or hangs",
            "switch ACS off in the firmware, except where virtual machines need it",
        ),
    ];
    let found = cases.into_iter().filter(|(is_so, ..)| *is_so);
    found
        .map(|(_, problem, hint)| Finding::new(problem, hint))
        .collect()
}

fn library_section(facts: &Facts, out: &mut String) {
    push(out, "libraries loaded at run time");
    for kind in LibraryKind::ALL {
        let place = match facts.described.as_ref().and_then(|described| described.get(kind)) {
            Some(Ok(library)) => {
                let version = match &library.version {
                    Ok(version) if kind == LibraryKind::Cuda => format!(", for CUDA {version}"),
                    Ok(version) => format!(", {version}"),
                    Err(_) => String::new(),
                };
                format!("{}{version}", library.path.display())
            }
            Some(Err(_)) => "cannot be loaded".to_owned(),
            None => "not found".to_owned(),
        };
        row(
            out,
            kind.facts().stem,
            &format!("{place}: {}", kind.facts().purpose),
        );
    }
}

/// One thing that is missing, and what to do about it.
struct Finding {
    problem: String,
    hint: String,
}

impl Finding {
    fn new(problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            problem: problem.into(),
            hint: hint.into(),
        }
    }

    /// What an error says; `hint` if it has none of its own.
    fn of(error: &str, hint: &str) -> Self {
        let (problem, hint) = error.split_once("\n  hint: ").unwrap_or((error, hint));
        Self::new(problem, hint)
    }
}

fn findings(facts: &Facts) -> Vec<Finding> {
    let mut found = host_findings(facts);
    if !may_have_gpus(facts) {
        return found;
    }
    let gpus = facts.described.as_ref().map_or(&[][..], Described::gpus);
    if gpus.is_empty() {
        let why = match facts.described.as_ref().map(|described| &described.gpus) {
            Some(Err(error)) => error.as_str(),
            _ => "the driver reports no device",
        };
        let why = Finding::of(why, "check `nvidia-smi`, and CUDA_VISIBLE_DEVICES above");
        found.push(Finding::new(
            format!("no usable device: {}", why.problem),
            why.hint,
        ));
    }
    let served = gpus
        .iter()
        .enumerate()
        .map(|(ordinal, gpu)| gpu.expect_served(ordinal));
    found.extend(
        served
            .filter_map(Result::err)
            .map(|error| Finding::of(&error.to_string(), "")),
    );
    found.extend(fabric_findings(facts, gpus.len()));
    found.extend(library_findings(facts));
    found
}

/// False if there is no part of a driver: most likely the machine has no GPU.
fn may_have_gpus(facts: &Facts) -> bool {
    let driver = facts.described.as_ref().map(|described| &described.libraries[0]);
    facts.driver_version.is_some() || driver.is_some_and(Option::is_some)
}

fn host_findings(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    if let Err(error) = &facts.memfd {
        found.push(Finding::new(
            format!("ranks of one node cannot share memory: {error}"),
            "allow memfd_create (seccomp profile) and give the cgroup enough memory",
        ));
    }
    if let Some(limit) = facts.open_files.filter(|limit| *limit < FEW_OPEN_FILES) {
        found.push(Finding::new(
            format!("the limit on open files is low (`{limit}`)"),
            "`ulimit -n 4096`",
        ));
    }
    if !facts.cpu_features.contains(&"avx2") && cfg!(target_arch = "x86_64") {
        found.push(Finding::new(
            "the CPU has no AVX2",
            "training works, but several times slower",
        ));
    }
    found
}

/// What GPUs need and do not have.
fn library_findings(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let nothing = Described::failed("");
    let described = facts.described.as_ref().unwrap_or(&nothing);
    for (kind, library) in described.all() {
        match library {
            None => {
                let problem = format!("`{}` not found ({})", kind.facts().stem, kind.facts().purpose);
                found.push(Finding::new(problem, kind.facts().hint));
            }
            Some(Err(why)) => found.push(Finding::of(why, kind.facts().hint)),
            Some(Ok(library)) => match (&library.version, described.version(LibraryKind::Cuda)) {
                (Err(why), _) => found.push(Finding::of(why, kind.facts().hint)),
                (Ok(version), Some(driver)) => {
                    let newer = LibraryError::newer(kind, &library.path, *version, driver);
                    found.extend(newer.map(|newer| Finding::of(&newer.to_string(), "")));
                }
                (Ok(_), None) => {}
            },
        }
    }
    if let Some(nccl) = described
        .version(LibraryKind::Nccl)
        .filter(|nccl| *nccl < OLDEST_NCCL)
    {
        found.push(Finding::new(
            format!("NCCL {nccl} is older than {OLDEST_NCCL}, which several GPUs need"),
            LibraryKind::Nccl.facts().hint,
        ));
    }
    found
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::super::fabric::Fabric;
    use super::super::gpus::LoadedLibrary;
    use super::*;
    use crate::cli::native::cuda::GpuFacts;

    fn machine() -> Facts {
        Facts {
            cpu_model: "A Processor".into(),
            cpu_features: vec!["avx2", "fma"],
            cores_online: 8,
            cores_usable: 2,
            cgroup_quota_cores: Some(2.0),
            memory_bytes: Some((3 << 30, 4 << 30)),
            cgroup_memory_bytes: None,
            worker_group: Ok("/sys/fs/cgroup/job".into()),
            memfd: Ok(()),
            memlock_bytes: Some(8 << 20),
            open_files: Some(1_048_576),
            driver_version: None,
            cuda_visible_devices: None,
            described: None,
            fabric: Fabric::default(),
        }
    }

    fn one_gpu() -> Described {
        let gpu = GpuFacts {
            name: "A GPU".into(),
            compute_capability: (9, 0),
            memory_bytes: 80 << 30,
            multiprocessors: 132,
            shared_per_block: 227 << 10,
            pci: "0000:65:00.0".into(),
        };
        let library = |stem: &str, major, minor| {
            let version = Version {
                major,
                minor,
                patch: 0,
            };
            Some(Ok(LoadedLibrary {
                path: format!("/x/{stem}.1").into(),
                version: Ok(version),
            }))
        };
        Described {
            gpus: Ok(vec![gpu]),
            libraries: vec![
                library("libcuda.so", 12, 8),
                library("libcublasLt.so", 12, 9),
                library("libnvrtc.so", 13, 0),
                None,
            ],
        }
    }

    #[test]
    fn a_machine_without_a_gpu() {
        insta::assert_snapshot!(render(&machine()), @r"
        CPU
          model                A Processor
          instruction sets     avx2 fma
          cores                2 usable of 8 (cgroup quota 2.0)
        memory
          main memory          3.0 GiB free of 4.0 GiB
          cgroup limit         none
          shared memory        memfd works; neither /dev/shm nor kernel.shmmax is used
          lockable             8192 KiB
        processes
          control group        available for workers, in /sys/fs/cgroup/job
          open files           1048576
        GPU
          kernel driver        none
          visible devices      CUDA_VISIBLE_DEVICES not set
          devices              none
        libraries loaded at run time
          libcuda.so           not found: the driver
          libcublasLt.so       not found: matrix products on GPUs
          libnvrtc.so          not found: kernels compiled on the machine
          libnccl.so           not found: collectives between GPUs

        no problems found
          note: no GPU found: training runs on the CPU
        ");
    }

    #[test]
    fn a_machine_with_a_gpu_and_a_missing_library() {
        let mut facts = machine();
        facts.driver_version = Some("550.54.14".into());
        facts.described = Some(one_gpu());
        let report = render(&facts);
        for part in [
            "device 0             A GPU, sm_90, 80.0 GiB, 132 multiprocessors, 227 KiB shared per block, PCI 0000:65:00.0",
            "/x/libnvrtc.so.1, 13.0: kernels compiled",
            "/x/libcuda.so.1, for CUDA 12.8: the driver",
        ] {
            assert!(report.contains(part), "{part} is not in\n{report}");
        }
        let (_, missing) = report.split_once("problems found").expect("one finding");
        insta::assert_snapshot!(missing, @r"

        - `/x/libnvrtc.so.1` (NVRTC 13.0) is newer than the driver, which supports CUDA 12.8
          hint: `pip install nvidia-cuda-nvrtc-cu12` in an active Python environment, or a driver for CUDA 13
        - `libnccl.so` not found (collectives between GPUs)
          hint: the package `libnccl2`, or `pip install nvidia-nccl-cu12` and its folder `nvidia/nccl/lib` in LD_LIBRARY_PATH
        ");
    }

    #[test]
    fn what_stands_between_gpus_is_named() {
        let mut facts = machine();
        facts.driver_version = Some("550.54.14".into());
        let mut described = one_gpu();
        let gpus = described.gpus.as_mut().expect("one GPU");
        gpus.push(gpus[0].clone());
        facts.described = Some(described);
        facts.fabric = Fabric {
            manager_runs: Some(false),
            infiniband: vec!["mlx5_0".into()],
            shm_bytes: Some(64 << 20),
            acs_bridges: Some(2),
        };
        let report = render(&facts);
        for part in [
            "fabric manager       does not run",
            "InfiniBand           mlx5_0",
            "/dev/shm             0.1 GiB",
            "PCI access control   on, at 2 bridges",
            "- the limit on locked memory is too low for InfiniBand",
            "- `/dev/shm` is too small for NCCL",
            "- PCI access control (ACS) makes GPUs",
        ] {
            assert!(report.contains(part), "{part} is not in\n{report}");
        }
        facts.fabric = Fabric {
            manager_runs: Some(true),
            shm_bytes: Some(8 << 30),
            ..Fabric::default()
        };
        let (_, problems) = render(&facts)
            .split_once("problems found")
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
            .expect("libraries");
        assert!(
            !problems.contains("fabric") && !problems.contains("shm"),
            "{problems}"
        );
    }

    #[test]
    fn a_gpu_that_is_too_old_is_named() {
        let mut facts = machine();
        facts.driver_version = Some("550.54.14".into());
        let mut described = one_gpu();
        let gpus = described.gpus.as_mut().expect("one GPU");
        let mut old = gpus[0].clone();
        (old.name, old.compute_capability) = ("Tesla T4".into(), (7, 5));
        gpus.push(old);
        facts.described = Some(described);
        let report = render(&facts);
        let (_, missing) = report.split_once("problems found").expect("one finding");
        let (missing, _) = missing.split_once("\n  - `").expect("a library is newer");
        insta::assert_snapshot!(missing, @r"

        - GPU 1 (Tesla T4) is sm_75, but the kernels need sm_80 or later
          hint: choose other GPUs with CUDA_VISIBLE_DEVICES, or train on the CPU (`parallel.backend: cpu`)
        ");
    }

    #[test]
    fn a_driver_that_fails_is_named() {
        let mut facts = machine();
        facts.driver_version = Some("550.54.14".into());
        facts.described = Some(Described {
            gpus: Err("CUDA_ERROR_NO_DEVICE".into()),
            libraries: vec![None; 4],
        });
        assert!(render(&facts).contains("- no usable device: CUDA_ERROR_NO_DEVICE\n"));
    }

    #[test]
    fn a_stub_in_place_of_the_driver_is_told_with_what_to_change() {
        let mut facts = machine();
        let path = "/cuda/lib64/stubs/libcuda.so";
        let stub = LibraryError::Stub { path: path.into() };
        let mut described = Described {
            gpus: Err(stub.to_string()),
            libraries: vec![None; 4],
        };
        described.libraries[0] = Some(Ok(LoadedLibrary {
            path: path.into(),
            version: Err("does not report its version".into()),
        }));
        facts.described = Some(described);
        let report = render(&facts);
        let (found, missing) = report.split_once("problems found").expect("one finding");
        assert!(
            found.contains("devices              none: `/cuda/lib64/stubs/libcuda.so` is not the driver")
        );
        let (stub, _) = missing.split_once("\n  - does not").expect("more is missing");
        insta::assert_snapshot!(stub, @r"

        - no usable device: `/cuda/lib64/stubs/libcuda.so` is not the driver but a stub of the CUDA toolkit, for linking only
          hint: remove `/cuda/lib64/stubs` from LD_LIBRARY_PATH, and install the NVIDIA driver; in a container, start it with `--gpus all`; `ldconfig -p | grep libcuda` shows where the driver's library is
        ");
    }
}
