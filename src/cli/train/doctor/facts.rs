//! What can be seen of this machine without changing it.

use std::path::{Path, PathBuf};

use ddp_proto::cgroup::CgroupMembership;

use super::fabric::Fabric;
use super::gpus::{self, Described};
use crate::cli::machine::hardware;

/// A reading of the machine.
#[derive(Clone, Debug)]
pub struct Facts {
    /// `model name` of the first processor.
    pub cpu_model: String,
    /// Instruction sets that kernels choose among, present ones.
    pub cpu_features: Vec<&'static str>,
    /// Processors of the machine.
    pub cores_online: u32,
    /// Processors in this process's affinity mask, bounded by the quota.
    pub cores_usable: u32,
    /// Cores that the cgroup allows, if it has a limit.
    pub cgroup_quota_cores: Option<f64>,
    /// Memory that is free for programs, and all of it.
    pub memory_bytes: Option<(u64, u64)>,
    /// Bytes that the cgroup allows, if it has a limit.
    pub cgroup_memory_bytes: Option<u64>,
    /// Where the workers' control group is made, or why there is none.
    pub worker_group: Result<PathBuf, String>,
    /// Why `memfd_create` fails, where it does.
    pub memfd: Result<(), String>,
    /// Soft limit of locked memory, if there is one.
    pub memlock_bytes: Option<u64>,
    /// Soft limit of open files, if there is one.
    pub open_files: Option<u64>,
    /// `/dev/nvidia*` is there.
    pub driver_version: Option<String>,
    /// `CUDA_VISIBLE_DEVICES`.
    pub cuda_visible_devices: Option<String>,
    /// The answers of the driver and the libraries, if one of them exists.
    pub described: Option<Described>,
    /// How GPUs reach each other.
    pub fabric: Fabric,
}

impl Facts {
    /// Looks at the machine. Never fails: what cannot be read is absent.
    pub fn gather() -> Self {
        Self {
            cpu_model: cpu_model(&read("/proc/cpuinfo")),
            cpu_features: cpu_features(),
            cores_online: hardware::machine_cores(),
            cores_usable: hardware::usable_cores(),
            cgroup_quota_cores: ddp_launcher::cpu_quota(),
            memory_bytes: memory(&read("/proc/meminfo")),
            cgroup_memory_bytes: CgroupMembership::of_this_process().memory_limit(),
            worker_group: ddp_launcher::parent_of_workers().map_err(|why| why.to_string()),
            memfd: try_memfd(),
            memlock_bytes: soft_limit(nix::sys::resource::Resource::RLIMIT_MEMLOCK),
            open_files: soft_limit(nix::sys::resource::Resource::RLIMIT_NOFILE),
            driver_version: driver_version(&read("/proc/driver/nvidia/version")),
            cuda_visible_devices: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
            described: gpus::ask(),
            fabric: Fabric::gather(),
        }
    }
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn cpu_model(cpuinfo: &str) -> String {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"));
    let name = line
        .and_then(|line| line.split_once(':'))
        .map(|(_, name)| name.trim());
    name.unwrap_or("unknown CPU").to_owned()
}

fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let present = [
            ("avx2", std::arch::is_x86_feature_detected!("avx2")),
            ("fma", std::arch::is_x86_feature_detected!("fma")),
            ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
            ("avx512bf16", std::arch::is_x86_feature_detected!("avx512bf16")),
        ];
        present
            .into_iter()
            .filter(|(_, there)| *there)
            .map(|(name, _)| name)
            .collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        Vec::new()
    }
}

fn memory(meminfo: &str) -> Option<(u64, u64)> {
    let kib = |name: &str| {
        let rest = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        rest.trim_start_matches(':')
            .trim()
            .strip_suffix(" kB")?
            .parse::<u64>()
            .ok()
    };
    Some((kib("MemAvailable")? << 10, kib("MemTotal")? << 10))
}

fn soft_limit(resource: nix::sys::resource::Resource) -> Option<u64> {
    let (soft, _) = nix::sys::resource::getrlimit(resource).ok()?;
    (soft != nix::libc::RLIM_INFINITY).then_some(soft)
}

/// Shared memory is a memfd with its pages reserved: tries one page.
fn try_memfd() -> Result<(), String> {
    use nix::fcntl::{FallocateFlags, fallocate};
    use nix::sys::memfd::{MFdFlags, memfd_create};
    let fd = memfd_create("ddp-doctor", MFdFlags::MFD_CLOEXEC)
        .map_err(|e| format!("memfd_create: {}", e.desc()))?;
    fallocate(&fd, FallocateFlags::empty(), 0, 4096).map_err(|e| format!("fallocate: {}", e.desc()))
}

/// The version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  …`.
fn driver_version(text: &str) -> Option<String> {
    let looks_like_version = |word: &&str| {
        word.contains('.')
            && word
                .split('.')
                .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    let line = text.lines().next()?;
    line.split_whitespace()
        .find(looks_like_version)
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_are_parsed() {
        let meminfo = "MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(memory(meminfo), Some((1 << 20, 2 << 20)));
        assert_eq!(
            cpu_model("processor\t: 0\nmodel name\t: A B @ 2 GHz\n"),
            "A B @ 2 GHz"
        );
        let version =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n";
        assert_eq!(driver_version(version).as_deref(), Some("550.54.14"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n";
        assert_eq!(driver_version(open).as_deref(), Some("580.95.05"));
    }

    #[test]
    fn this_machine_can_share_memory() {
        assert_eq!(try_memfd(), Ok(()));
    }
}
