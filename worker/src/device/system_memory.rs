//! How much memory the system can still give: the machine's, and that of the control groups around this process.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use ddp_proto::mounts::SeenGroup;

/// What a version of control groups calls its files.
#[derive(Debug, PartialEq, Eq)]
struct CgroupVersion {
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat` on cached files, those of the groups below included.
    cached: [&'static str; 2],
}

const V2: CgroupVersion = CgroupVersion {
    limit: "memory.max",
    used: "memory.current",
    cached: ["active_file", "inactive_file"],
};

const V1: CgroupVersion = CgroupVersion {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_active_file", "total_inactive_file"],
};

/// The group of this process in one hierarchy, as far as it can be seen from here.
#[derive(Debug, PartialEq, Eq)]
struct MemoryCgroup {
    version: &'static CgroupVersion,
    /// Where the hierarchy is mounted.
    mount: PathBuf,
    /// The group's path below that.
    below: PathBuf,
}

/// Bytes that can be allocated before somebody is killed; none if the system does not say.
pub(super) fn available_bytes() -> Option<u64> {
    least("MemAvailable:", MemoryCgroup::least_headroom)
}

/// Bytes that could be allocated if nobody else had any: more are never to be had here. None if the system does not say.
pub(super) fn most_bytes() -> Option<u64> {
    least("MemTotal:", MemoryCgroup::least_limit)
}

/// The least of what the machine says in a line of `/proc/meminfo` and what its control groups say.
fn least(line: &str, of_group: impl Fn(&MemoryCgroup) -> Option<u64>) -> Option<u64> {
    let text = |path| read_to_string(path).unwrap_or_default();
    let groups = groups(&text("/proc/self/mountinfo"), &text("/proc/self/cgroup"));
    let machine = kernels_count(&text("/proc/meminfo"), line);
    machine
        .into_iter()
        .chain(groups.iter().filter_map(of_group))
        .min()
}

/// All memory of the machine, that which it swaps out included; none if the system does not say.
pub(super) fn machine_bytes() -> Option<u64> {
    let meminfo = read_to_string("/proc/meminfo").ok()?;
    let swap = kernels_count(&meminfo, "SwapTotal:").unwrap_or(0);
    Some(kernels_count(&meminfo, "MemTotal:")? + swap)
}

/// A line of `/proc/meminfo`, in bytes.
fn kernels_count(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The groups that may limit memory: of version 2, and of the memory controller of version 1.
fn groups(mounts: &str, membership: &str) -> Vec<MemoryCgroup> {
    let has_memory = |list: &str| list.split(',').any(|name| name == "memory");
    let of_line = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, own) = rest.split_once(':')?;
        if controllers.is_empty() {
            seen(&V2, mounts, own, |kind, _| kind == "cgroup2")
        } else if has_memory(controllers) {
            seen(&V1, mounts, own, |kind, options| {
                kind == "cgroup" && has_memory(options)
            })
        } else {
            None
        }
    };
    membership.lines().filter_map(of_line).collect()
}

/// The group `own` in the first hierarchy of this type and with these options that shows it.
fn seen(
    version: &'static CgroupVersion,
    mounts: &str,
    own: &str,
    is_it: impl Fn(&str, &str) -> bool,
) -> Option<MemoryCgroup> {
    let SeenGroup { mount, below } = SeenGroup::find(mounts, own, is_it)?;
    Some(MemoryCgroup {
        version,
        mount,
        below,
    })
}

impl MemoryCgroup {
    /// The least of limit minus use over the group and all above it; cached files give way, and count as free.
    fn least_headroom(&self) -> Option<u64> {
        let headroom = |group: &Path| {
            let group = self.mount.join(group);
            let number = |name| read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
            let (limit, used) = (number(self.version.limit)?, number(self.version.used)?);
            let stat = read_to_string(group.join("memory.stat")).unwrap_or_default();
            Some(limit.saturating_sub(used.saturating_sub(self.cached(&stat))))
        };
        self.below.ancestors().filter_map(headroom).min()
    }

    /// The least limit over the group and all above it.
    fn least_limit(&self) -> Option<u64> {
        let limit = |group: &Path| {
            let text = read_to_string(self.mount.join(group).join(self.version.limit)).ok()?;
            text.trim().parse::<u64>().ok()
        };
        self.below.ancestors().filter_map(limit).min()
    }

    fn cached(&self, stat: &str) -> u64 {
        let lines = stat.lines().filter_map(|line| line.split_once(' '));
        let cached = lines.filter(|(name, _)| self.version.cached.contains(name));
        cached.filter_map(|(_, bytes)| bytes.parse::<u64>().ok()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both versions, mounted elsewhere than usual, as a container sees them.
    fn mounts(root: &Path) -> String {
        let root = root.display();
        format!(
            "24 1 0:22 / / rw,relatime - ext4 /dev/vda rw\n\
             33 30 0:29 /docker/7 {root}/cpu rw shared:3 - cgroup cgroup rw,cpu,cpuacct\n\
             31 30 0:27 /docker/7 {root}/v1 rw - cgroup cgroup rw,memory\n\
             32 30 0:28 /pod {root}/v2 rw,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate\n"
        )
    }

    #[test]
    fn the_kernel_files_are_read() {
        let meminfo = "MemTotal:       24000000 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(kernels_count(meminfo, "MemAvailable:"), Some(1 << 20));
        assert_eq!(kernels_count(meminfo, "MemTotal:"), Some(24_576_000_000));
        assert_eq!(kernels_count(meminfo, "SwapTotal:"), None);
        let at = |version, mount: &str, below: &str| MemoryCgroup {
            version,
            mount: Path::new("/mnt").join(mount),
            below: below.into(),
        };
        let found = |membership| groups(&mounts(Path::new("/mnt")), membership);
        assert_eq!(found("0::/pod/job/step\n"), [at(&V2, "v2", "job/step")]);
        assert_eq!(
            found("5:cpu,cpuacct:/docker/7\n4:memory:/docker/7\n0::/pod\n"),
            [at(&V1, "v1", ""), at(&V2, "v2", "")]
        );
        for hidden in [
            "0::/elsewhere\n",
            "0::/pod/../other\n",
            "4:memory:/docker/8\n",
            "",
        ] {
            assert_eq!(found(hidden), [], "`{hidden}`");
        }
    }

    #[test]
    fn groups_and_mounts_may_have_spaces_in_their_names() {
        let mounts =
            r"32 30 0:28 /my\040pod /mnt/control\040groups\134v2 rw - cgroup2 cgroup rw".to_owned() + "\n";
        let expected = MemoryCgroup {
            version: &V2,
            mount: r"/mnt/control groups\v2".into(),
            below: "a job".into(),
        };
        assert_eq!(groups(&mounts, "0::/my pod/a job\n"), [expected]);
    }

    #[test]
    fn the_tightest_group_counts_wherever_it_is_mounted() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| std::fs::write(root.path().join(path), text).unwrap();
        for folder in ["v2/job/step", "v1/job"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let headroom = || -> Vec<Option<u64>> {
            let found = groups(&mounts(root.path()), "4:memory:/docker/7/job\n0::/pod/job/step\n");
            found.iter().map(MemoryCgroup::least_headroom).collect()
        };
        assert_eq!(headroom(), [None, None]);
        write("v2/job/memory.max", "1000\n");
        write("v2/job/memory.current", "450\n");
        write(
            "v2/job/memory.stat",
            "anon 400\ninactive_file 30\nactive_file 20\n",
        );
        write("v2/job/step/memory.max", "max\n");
        write("v2/job/step/memory.current", "300\n");
        write("v1/job/memory.limit_in_bytes", "2000\n");
        write("v1/job/memory.usage_in_bytes", "500\n");
        write("v1/job/memory.stat", "active_file 7\ntotal_active_file 100\n");
        assert_eq!(headroom(), [Some(1600), Some(600)]);
        let found = groups(&mounts(root.path()), "4:memory:/docker/7/job\n0::/pod/job/step\n");
        let limits: Vec<Option<u64>> = found.iter().map(MemoryCgroup::least_limit).collect();
        assert_eq!(limits, [Some(2000), Some(1000)], "whatever is in use");
    }
}
