//! The facts in words: what is there, then what is missing and what to do about it.

use std::fmt::Write;

use super::facts::Facts;
use super::gpus::DriverAnswer;

/// Fewest open files that a node with 8 workers is comfortable with.
const FEW_OPEN_FILES: u64 = 1024;

/// The whole report, ending in a newline.
pub fn render(facts: &Facts) -> String {
    let mut out = String::new();
    cpu_section(facts, &mut out);
    memory_section(facts, &mut out);
    gpu_section(facts, &mut out);
    library_section(facts, &mut out);
    let missing = findings(facts);
    if missing.is_empty() {
        push(&mut out, "\nnothing is missing");
    } else {
        push(&mut out, "\nmissing or in the way");
        for finding in missing {
            push(
                &mut out,
                &format!("  - {}\n    hint: {}", finding.problem, finding.hint),
            );
        }
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
    push(out, "processor");
    row(out, "model", &facts.cpu_model);
    let features = if facts.cpu_features.is_empty() {
        "none".into()
    } else {
        facts.cpu_features.join(" ")
    };
    row(out, "instruction sets", &features);
    let quota = match facts.cgroup_quota_cores {
        Some(quota) => format!("quota of the cgroup {quota:.1}"),
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

fn memory_section(facts: &Facts, out: &mut String) {
    push(out, "memory");
    let free = match facts.memory_bytes {
        Some((free, all)) => format!("{} free of {}", gib(free), gib(all)),
        None => "unknown".to_owned(),
    };
    row(out, "main memory", &free);
    row(
        out,
        "limit of the cgroup",
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
    row(
        out,
        "open files",
        &facts.open_files.map_or("unlimited".to_owned(), |n| n.to_string()),
    );
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
    match &facts.driver {
        None => row(out, "devices", "none"),
        Some(DriverAnswer::Failed(words)) => row(out, "devices", &format!("none: {words}")),
        Some(DriverAnswer::Devices(gpus)) if gpus.is_empty() => row(out, "devices", "none"),
        Some(DriverAnswer::Devices(gpus)) => {
            for (ordinal, gpu) in gpus.iter().enumerate() {
                let (major, minor) = gpu.compute_capability;
                let memory = gib(gpu.memory_bytes as u64);
                row(
                    out,
                    &format!("device {ordinal}"),
                    &format!("{}, sm_{major}{minor}, {memory}", gpu.name),
                );
            }
        }
    }
}

fn library_section(facts: &Facts, out: &mut String) {
    push(out, "libraries loaded at run time");
    for library in &facts.libraries {
        let place = match &library.at {
            Some((path, true)) => path.display().to_string(),
            Some((path, false)) => format!("{} (not where the loader looks)", path.display()),
            None => "not found".to_owned(),
        };
        row(
            out,
            library.wanted.stem,
            &format!("{place}: {}", library.wanted.purpose),
        );
    }
    let searched: Vec<_> = facts
        .searched
        .iter()
        .map(|folder| folder.display().to_string())
        .collect();
    row(out, "searched", &searched.join(", "));
}

/// One thing that is missing, and what to do about it.
struct Finding {
    problem: String,
    hint: String,
}

fn findings(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut add = |problem: String, hint: String| found.push(Finding { problem, hint });
    if let Err(error) = &facts.memfd {
        add(
            format!("ranks of one node cannot share memory: {error}"),
            "allow memfd_create (seccomp profile) and give the cgroup enough memory".to_owned(),
        );
    }
    if facts.open_files.is_some_and(|limit| limit < FEW_OPEN_FILES) {
        add(
            format!("few open files are allowed (`{}`)", facts.open_files.unwrap_or(0)),
            "`ulimit -n 4096`".to_owned(),
        );
    }
    if !facts.cpu_features.contains(&"avx2") && cfg!(target_arch = "x86_64") {
        add(
            "the processor has no AVX2".to_owned(),
            "training works, several times slower".to_owned(),
        );
    }
    let has_device = matches!(&facts.driver, Some(DriverAnswer::Devices(gpus)) if !gpus.is_empty());
    if facts.driver_version.is_none() && facts.driver.is_none() {
        add(
            "no GPU: training runs on the processor".to_owned(),
            "nothing to do, unless there should be one".to_owned(),
        );
        return found;
    }
    if !has_device {
        let why = match &facts.driver {
            Some(DriverAnswer::Failed(words)) => words.clone(),
            _ => "the driver shows no device".to_owned(),
        };
        add(
            format!("there is a GPU driver, but no usable device: {why}"),
            "compare `nvidia-smi`, and CUDA_VISIBLE_DEVICES above".to_owned(),
        );
    }
    for library in &facts.libraries {
        match &library.at {
            None => add(
                format!(
                    "`{}` is not found ({})",
                    library.wanted.stem, library.wanted.purpose
                ),
                library.wanted.hint.to_owned(),
            ),
            Some((path, false)) => {
                let folder = path.parent().unwrap_or(path).display();
                add(
                    format!(
                        "`{}` is there, but the loader does not look at its folder",
                        library.wanted.stem
                    ),
                    format!("`export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH`"),
                );
            }
            Some((_, true)) => {}
        }
    }
    found
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::super::gpus::Gpu;
    use super::super::libraries::{Found, WANTED};
    use super::*;

    fn machine() -> Facts {
        Facts {
            cpu_model: "A Processor".into(),
            cpu_features: vec!["avx2", "fma"],
            cores_online: 8,
            cores_usable: 2,
            cgroup_quota_cores: Some(2.0),
            memory_bytes: Some((3 << 30, 4 << 30)),
            cgroup_memory_bytes: None,
            memfd: Ok(()),
            memlock_bytes: Some(8 << 20),
            open_files: Some(1_048_576),
            driver_version: None,
            cuda_visible_devices: None,
            driver: None,
            libraries: WANTED
                .iter()
                .map(|wanted| Found {
                    wanted: *wanted,
                    at: None,
                })
                .collect(),
            searched: vec!["/usr/lib".into()],
        }
    }

    #[test]
    fn a_machine_without_a_gpu() {
        insta::assert_snapshot!(render(&machine()), @r"
        processor
          model                A Processor
          instruction sets     avx2 fma
          cores                2 usable of 8 (quota of the cgroup 2.0)
        memory
          main memory          3.0 GiB free of 4.0 GiB
          limit of the cgroup  none
          shared memory        memfd works; neither /dev/shm nor kernel.shmmax is used
          lockable             8192 KiB
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
          searched             /usr/lib

        missing or in the way
          - no GPU: training runs on the processor
            hint: nothing to do, unless there should be one
        ");
    }

    #[test]
    fn a_machine_with_a_gpu_and_a_hidden_library() {
        let mut facts = machine();
        facts.driver_version = Some("550.54.14".into());
        let gpu = Gpu {
            name: "A GPU".into(),
            compute_capability: (9, 0),
            memory_bytes: 80 << 30,
        };
        facts.driver = Some(DriverAnswer::Devices(vec![gpu]));
        for library in &mut facts.libraries {
            let known = library.wanted.stem != "libnccl.so";
            library.at = Some((format!("/x/{}", library.wanted.stem).into(), known));
        }
        let report = render(&facts);
        assert!(report.contains("A GPU, sm_90, 80.0 GiB"), "{report}");
        let (_, missing) = report.split_once("missing or in the way").expect("one finding");
        insta::assert_snapshot!(missing, @r"

        - `libnccl.so` is there, but the loader does not look at its folder
          hint: `export LD_LIBRARY_PATH=/x:$LD_LIBRARY_PATH`
        ");
    }

    #[test]
    fn a_driver_that_fails_is_named() {
        let mut facts = machine();
        facts.driver = Some(DriverAnswer::Failed("CUDA_ERROR_NO_DEVICE".into()));
        assert!(render(&facts).contains("no usable device: CUDA_ERROR_NO_DEVICE"));
    }
}
