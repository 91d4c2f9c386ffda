//! Where this process stands in the control groups of the machine.
//!
//! The mount table says where a hierarchy is to be seen, and which part of it: a container sees its own part only. A
//! group that is not below that part cannot be seen, and nothing is said of it.

use std::fs;
use std::path::{Path, PathBuf};

use ddp_proto::mounts::SeenGroup;

/// What the kernel says of mounts and groups of this process, read once.
#[derive(Clone, Debug, Default)]
pub(crate) struct CgroupMembership {
    /// `/proc/self/mountinfo`
    mounts: String,
    /// `/proc/self/cgroup`
    membership: String,
}

impl CgroupMembership {
    /// Of this process, now; nothing where `/proc` says nothing.
    pub(crate) fn of_this_process() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self {
            mounts: read("/proc/self/mountinfo"),
            membership: read("/proc/self/cgroup"),
        }
    }

    /// The folder of this process's group of version 2.
    pub(crate) fn unified(&self) -> Option<PathBuf> {
        self.unified_levels().next()
    }

    /// Folders of this process's group of version 2 and of those above it, nearest first.
    pub(crate) fn unified_levels(&self) -> impl Iterator<Item = PathBuf> {
        let mut lines = self.membership.lines();
        let own = lines.find_map(|line| line.strip_prefix("0::"));
        self.levels(own, |kind, _| kind == "cgroup2")
    }

    /// Folders of this process's group and of those above it in the hierarchy of version 1 that has `controller`,
    /// nearest first; none where that is not mounted.
    pub(crate) fn levels_of(&self, controller: &str) -> impl Iterator<Item = PathBuf> {
        let has = |list: &str| list.split(',').any(|name| name == controller);
        let own = self.membership.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            has(controllers).then_some(path)
        });
        self.levels(own, |kind, options| kind == "cgroup" && has(options))
    }

    /// Folders of the group `own` and of those above it, as far as they can be seen, nearest first, in the first
    /// hierarchy with this type and these options of its file system.
    fn levels(&self, own: Option<&str>, is_it: impl Fn(&str, &str) -> bool) -> std::vec::IntoIter<PathBuf> {
        let seen = own.and_then(|own| SeenGroup::find(&self.mounts, own, is_it));
        let levels = |SeenGroup { mount, below }| -> Vec<PathBuf> {
            let levels = below.ancestors();
            levels.map(|level| in_folder(&mount, level)).collect()
        };
        seen.map(levels).unwrap_or_default().into_iter()
    }
}

/// Joined without a slash at the end.
fn in_folder(mount: &Path, below: &Path) -> PathBuf {
    if below.as_os_str().is_empty() {
        mount.to_owned()
    } else {
        mount.join(below)
    }
}

/// The least memory in bytes that a control group of this process, or one above it, leaves it; none without a limit.
pub fn memory_limit() -> Option<u64> {
    least_memory(&CgroupMembership::of_this_process())
}

fn least_memory(membership: &CgroupMembership) -> Option<u64> {
    let limit = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let v2 = membership.unified_levels().map(|level| level.join("memory.max"));
    let v1 = membership.levels_of("memory");
    let v1 = v1.map(|level| level.join("memory.limit_in_bytes"));
    // Version 1 writes a number of pages beyond all memory where there is no limit.
    v2.chain(v1)
        .filter_map(limit)
        .filter(|bytes| *bytes < NO_LIMIT)
        .min()
}

/// The least that version 1 writes for "no limit": the largest number of bytes, rounded down to the largest pages.
const NO_LIMIT: u64 = (i64::MAX as u64) & !((64 << 10) - 1);

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const MOUNTS: &str = "\
24 1 0:22 / / rw,relatime - ext4 /dev/vda rw
30 24 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
33 30 0:29 /docker/7 /sys/fs/cgroup/cpu,cpuacct rw shared:3 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 /slice/pod /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate
";

    fn membership(membership: &str) -> CgroupMembership {
        CgroupMembership {
            mounts: MOUNTS.to_owned(),
            membership: membership.to_owned(),
        }
    }

    /// A machine whose hierarchies, of version 2 and of the memory and cpu controllers of version 1, lie in `root`.
    pub(crate) fn machine(root: &Path, membership: &str) -> CgroupMembership {
        let mounts = ["v2", "memory", "cpu"].map(|name| {
            let kind = if name == "v2" { "cgroup2" } else { "cgroup" };
            format!(
                "9 1 0:1 / {}/{name} rw - {kind} {kind} rw,{name}\n",
                root.display()
            )
        });
        CgroupMembership {
            mounts: mounts.concat(),
            membership: membership.to_owned(),
        }
    }

    #[test]
    fn the_own_group_is_found_below_the_mount() {
        let found = |groups| membership(groups).unified();
        let at = |path: &str| Some(PathBuf::from(path));
        assert_eq!(
            found("4:memory:/x\n0::/slice/pod/job\n"),
            at("/sys/fs/cgroup/unified/job")
        );
        assert_eq!(found("0::/slice/pod\n"), at("/sys/fs/cgroup/unified"));
        assert_eq!(found("0::/elsewhere\n"), None, "the mount does not show it");
        assert_eq!(
            found("0::/slice/pod/../other\n"),
            None,
            "outside of the namespace"
        );
        assert_eq!(found("4:memory:/x\n"), None, "version 1 only");
        assert_eq!(CgroupMembership::default().unified(), None);
    }

    #[test]
    fn groups_and_mounts_may_have_spaces_in_their_names() {
        let mounts =
            r"32 30 0:28 /my\040pod /mnt/control\040groups\134v2 rw - cgroup2 cgroup rw".to_owned() + "\n";
        let membership = CgroupMembership {
            mounts,
            membership: "0::/my pod/a job\n".to_owned(),
        };
        assert_eq!(
            membership.unified(),
            Some(PathBuf::from(r"/mnt/control groups\v2/a job"))
        );
    }

    #[test]
    fn version_1_is_found_by_its_controller() {
        let levels =
            |groups, controller| -> Vec<PathBuf> { membership(groups).levels_of(controller).collect() };
        let membership = "5:cpu,cpuacct:/docker/7/a/b\n4:memory:/x\n0::/\n";
        let cpu = ["a/b", "a", ""]
            .map(|below| in_folder(Path::new("/sys/fs/cgroup/cpu,cpuacct"), Path::new(below)));
        assert_eq!(levels(membership, "cpu"), cpu);
        assert_eq!(
            levels(membership, "memory"),
            ["/sys/fs/cgroup/memory/x", "/sys/fs/cgroup/memory"].map(PathBuf::from)
        );
        assert!(levels(membership, "pids").is_empty());
        assert!(
            levels("5:cpu,cpuacct:/docker/8\n", "cpu").is_empty(),
            "another container's"
        );
    }

    #[test]
    fn the_least_limit_of_memory_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let membership = machine(root.path(), "4:memory:/docker\n0::/job/step\n");
        assert_eq!(least_memory(&membership), None);
        write("memory/docker/memory.limit_in_bytes", "9223372036854771712\n");
        write("v2/job/step/memory.max", "max\n");
        assert_eq!(
            least_memory(&membership),
            None,
            "two ways to say that there is none"
        );
        write("v2/job/memory.max", "5000\n");
        assert_eq!(least_memory(&membership), Some(5000));
        write("memory/docker/memory.limit_in_bytes", "4096\n");
        assert_eq!(least_memory(&membership), Some(4096));
    }
}
