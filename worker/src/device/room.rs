//! How much memory the system can still give: the machine's, and that of the control groups around this process.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// Bytes that can be allocated before somebody is killed; none if the system does not say.
pub(super) fn available_bytes() -> Option<u64> {
    let machine = read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| mem_available(&text));
    let groups = read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|text| control_group(&text));
    let group = groups.and_then(|path| least_headroom(Path::new("/sys/fs/cgroup"), &path));
    machine.into_iter().chain(group).min()
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The path of this process in the unified hierarchy.
fn control_group(cgroup: &str) -> Option<PathBuf> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(PathBuf::from(path))
}

/// Bytes of cached files, which give way.
fn file_cache(stat: &str) -> u64 {
    let lines = stat.lines().filter_map(|line| line.split_once(' '));
    let cached = lines.filter(|(name, _)| matches!(*name, "active_file" | "inactive_file"));
    cached.filter_map(|(_, bytes)| bytes.parse::<u64>().ok()).sum()
}

/// The least of limit minus use over a group and all above it.
fn least_headroom(root: &Path, group: &Path) -> Option<u64> {
    let number = |path: PathBuf| read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let headroom = |group: &Path| {
        let group = root.join(group);
        let limit = number(group.join("memory.max"))?;
        let used = number(group.join("memory.current"))?;
        let cache = read_to_string(group.join("memory.stat")).map_or(0, |stat| file_cache(&stat));
        Some(limit.saturating_sub(used.saturating_sub(cache)))
    };
    group.ancestors().filter_map(headroom).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_files_are_read() {
        let meminfo = "MemTotal:       24000000 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(mem_available(meminfo), Some(1 << 20));
        assert_eq!(control_group("0::/job/step\n"), Some(PathBuf::from("job/step")));
    }

    #[test]
    fn the_tightest_group_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| std::fs::write(root.path().join(path), text).unwrap();
        std::fs::create_dir_all(root.path().join("job/step")).unwrap();
        write("job/memory.max", "1000\n");
        write("job/memory.current", "450\n");
        write("job/memory.stat", "anon 400\ninactive_file 30\nactive_file 20\n");
        write("job/step/memory.max", "max\n");
        write("job/step/memory.current", "300\n");
        assert_eq!(least_headroom(root.path(), Path::new("job/step")), Some(600));
    }
}
