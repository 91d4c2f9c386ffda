//! Where this process stands in the control groups of the machine.
//!
//! The mount table says where a hierarchy is to be seen, and which part of it: a container sees its own part only. A
//! group that is not below that part cannot be seen, and nothing is said of it.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

/// What the kernel says of mounts and groups of this process, read once.
#[derive(Clone, Debug, Default)]
pub struct CgroupMembership {
    /// `/proc/self/mountinfo`
    mounts: String,
    /// `/proc/self/cgroup`
    membership: String,
}

impl CgroupMembership {
    /// Of this process, now; nothing where `/proc` says nothing.
    pub fn of_this_process() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self::new(read("/proc/self/mountinfo"), read("/proc/self/cgroup"))
    }

    /// By the text of a process's `mountinfo` and `cgroup`.
    pub fn new(mounts: String, membership: String) -> Self {
        Self { mounts, membership }
    }

    /// The folder of this process's group of version 2.
    pub fn unified(&self) -> Option<PathBuf> {
        self.unified_levels().next()
    }

    /// Folders of this process's group of version 2 and of those above it, nearest first.
    pub fn unified_levels(&self) -> impl Iterator<Item = PathBuf> {
        let mut lines = self.membership.lines();
        let own = lines.find_map(|line| line.strip_prefix("0::"));
        self.levels(own, |kind, _| kind == "cgroup2")
    }

    /// Folders of this process's group and of those above it in the hierarchy of version 1 that has `controller`,
    /// nearest first; none where that is not mounted.
    pub fn levels_of(&self, controller: &str) -> impl Iterator<Item = PathBuf> {
        let has = |list: &str| list.split(',').any(|name| name == controller);
        let own = self.membership.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            has(controllers).then_some(path)
        });
        self.levels(own, |kind, options| kind == "cgroup" && has(options))
    }

    /// The least memory in bytes that these groups leave to the process; none without a limit.
    pub fn memory_limit(&self) -> Option<u64> {
        let limit = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let v2 = self.unified_levels().map(|level| level.join("memory.max"));
        let v1 = self.levels_of("memory");
        let v1 = v1.map(|level| level.join("memory.limit_in_bytes"));
        // Version 1 writes a number of pages beyond all memory where there is no limit.
        v2.chain(v1)
            .filter_map(limit)
            .filter(|bytes| *bytes < NO_LIMIT)
            .min()
    }

    /// Folders of the group `own` and of those above it, as far as they can be seen, nearest first, in the first
    /// hierarchy with this type and these options of its file system.
    fn levels(&self, own: Option<&str>, is_it: impl Fn(&str, &str) -> bool) -> std::vec::IntoIter<PathBuf> {
        let mut mounts = self.mounts.lines();
        let levels = own.and_then(|own| mounts.find_map(|mount| levels_at(mount, own, &is_it)));
        levels.unwrap_or_default().into_iter()
    }
}

/// The least that version 1 writes for "no limit": the largest number of bytes, rounded down to the largest pages.
const NO_LIMIT: u64 = (i64::MAX as u64) & !((64 << 10) - 1);

/// [`CgroupMembership::levels`] by one line of the mount table, if that mount shows the group.
fn levels_at(mount: &str, own: &str, is_it: impl Fn(&str, &str) -> bool) -> Option<Vec<PathBuf>> {
    let (mount, file_system) = mount.split_once(" - ")?;
    let mut file_system = file_system.split(' ');
    let (kind, options) = (file_system.next()?, file_system.nth(1).unwrap_or_default());
    if !is_it(kind, options) {
        return None;
    }
    let mut fields = mount.split(' ').skip(3);
    let (root, point) = (fields.next()?, fields.next()?);
    let below = Path::new(own).strip_prefix(unescaped(root)).ok()?;
    let is_plain = |part| matches!(part, Component::Normal(_));
    let point = unescaped(point);
    let levels = below.ancestors().map(|level| in_folder(&point, level));
    below.components().all(is_plain).then(|| levels.collect())
}

/// As the kernel shows a path in this file: a byte that would end a field is `\` and three octal digits.
fn unescaped(field: &str) -> PathBuf {
    let mut parts = field.split('\\');
    let mut path = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let escaped = part.split_at_checked(3).and_then(|(digits, rest)| {
            let byte = u8::from_str_radix(digits, 8).ok()?;
            Some((byte, rest))
        });
        // The kernel escapes every backslash, so that this is always there.
        if let Some((byte, rest)) = escaped {
            path.push(byte);
            path.extend(rest.as_bytes());
        }
    }
    PathBuf::from(OsString::from_vec(path))
}

/// Joined without a slash at the end.
fn in_folder(mount: &Path, below: &Path) -> PathBuf {
    if below.as_os_str().is_empty() {
        mount.to_owned()
    } else {
        mount.join(below)
    }
}

#[cfg(test)]
mod tests {
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
}
