//! How GPUs reach each other and other nodes: NVSwitches, InfiniBand, PCI bridges, shared memory.

use std::path::{Path, PathBuf};

/// A reading of the machine.
#[derive(Clone, Debug, Default)]
pub struct Fabric {
    /// Where there are NVSwitches: whether their fabric manager runs.
    pub manager_runs: Option<bool>,
    /// InfiniBand and RoCE devices.
    pub infiniband: Vec<String>,
    /// Size of `/dev/shm`, which NCCL uses.
    pub shm_bytes: Option<u64>,
    /// PCI bridges that send what passes between two GPUs through the processor; none if that cannot be read.
    pub acs_bridges: Option<usize>,
}

impl Fabric {
    /// What cannot be read is absent.
    pub fn gather() -> Self {
        let processes = || {
            entries("/proc")
                .into_iter()
                .map(|process| read(process.join("comm")))
        };
        let has_switches = Path::new("/dev/nvidia-nvswitchctl").exists();
        let devices = entries("/sys/class/infiniband");
        let names = devices.iter().filter_map(|device| device.file_name());
        let shm = nix::sys::statvfs::statvfs("/dev/shm").ok();
        let bridges = entries("/sys/bus/pci/devices").into_iter();
        let bridges = bridges.filter(|device| read(device.join("class")).starts_with(b"0x0604"));
        let redirects = bridges.map(|device| redirects(&read(device.join("config"))));
        Self {
            // The kernel cuts the name.
            manager_runs: has_switches.then(|| processes().any(|name| name.starts_with(b"nv-fabricmanage"))),
            infiniband: names.map(|name| name.to_string_lossy().into_owned()).collect(),
            shm_bytes: shm.map(|shm| shm.blocks() * shm.fragment_size()),
            acs_bridges: redirects.sum::<Option<usize>>(),
        }
    }
}

fn read(path: PathBuf) -> Vec<u8> {
    std::fs::read(path).unwrap_or_default()
}

fn entries(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// 1 if a bridge with this configuration space has access control (ACS) that redirects requests, or 0. Only root reads
/// more than its first 64 bytes.
fn redirects(config: &[u8]) -> Option<usize> {
    /// Source validation, redirection of requests and completions.
    const CONTROLS: u8 = 0b1101;
    let mut at = 0x100;
    // As many capabilities as there is room for: a list may be a ring.
    for _ in 0..config.get(at..)?.len() / 4 {
        let header = u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?);
        if header & 0xffff == 0x0d {
            return Some(usize::from(config.get(at + 6)? & CONTROLS != 0));
        }
        at = (header >> 20) as usize;
        if at < 0x100 {
            break;
        }
    }
    Some(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_control_is_found_in_the_list_of_capabilities() {
        let mut config = vec![0; 4096];
        // Error reporting, then access control.
        config[0x100..0x104].copy_from_slice(&(0x1480_0001_u32.to_le_bytes()));
        config[0x148..0x14c].copy_from_slice(&(0x0001_000d_u32.to_le_bytes()));
        assert_eq!(redirects(&config), Some(0));
        config[0x14e] = 0x1d;
        assert_eq!(redirects(&config), Some(1));
        assert_eq!(redirects(&config[..64]), None, "not root");
        config[0x100..0x104].copy_from_slice(&(0x1000_0001_u32.to_le_bytes()));
        assert_eq!(redirects(&config), Some(0), "a ring");
    }
}
