//! How many cores the control groups leave to this process.

use std::fs;
use std::path::Path;

use ddp_proto::cgroup::CgroupMembership;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

/// Cores that this process may use: those of its affinity mask, within the quota of its control groups rounded up, at
/// least one.
pub fn usable_cores() -> usize {
    let affinity = sched_getaffinity(Pid::from_raw(0)).map_or(1, |set| count(&set));
    cpu_quota().map_or(affinity, |quota| affinity.min(quota.ceil().max(1.0) as usize))
}

/// The tightest quota of processor time in cores, of this process's control group and of all above it; none without
/// one.
pub fn cpu_quota() -> Option<f64> {
    tightest_quota(&CgroupMembership::of_this_process())
}

fn count(set: &CpuSet) -> usize {
    (0..CpuSet::count())
        .filter(|cpu| set.is_set(*cpu).unwrap_or(false))
        .count()
        .max(1)
}

fn tightest_quota(membership: &CgroupMembership) -> Option<f64> {
    let v2 = membership.unified_levels().filter_map(|level| quota_v2(&level));
    let v1 = membership.levels_of("cpu").filter_map(|level| quota_v1(&level));
    v2.chain(v1).reduce(f64::min)
}

fn quota_v2(directory: &Path) -> Option<f64> {
    parse_cpu_max(&fs::read_to_string(directory.join("cpu.max")).ok()?)
}

fn quota_v1(directory: &Path) -> Option<f64> {
    let number =
        |file: &str| -> Option<f64> { fs::read_to_string(directory.join(file)).ok()?.trim().parse().ok() };
    let (quota, period) = (number("cpu.cfs_quota_us")?, number("cpu.cfs_period_us")?);
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

/// `max 100000` or `150000 100000`: microseconds of processor time a period.
fn parse_cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0.0).then_some(quota / period)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A machine whose hierarchies, of version 2 and of the memory and cpu controllers of version 1, lie in `root`.
    pub(crate) fn machine(root: &Path, membership: &str) -> CgroupMembership {
        let mounts = ["v2", "memory", "cpu"].map(|name| {
            let kind = if name == "v2" { "cgroup2" } else { "cgroup" };
            format!(
                "9 1 0:1 / {}/{name} rw - {kind} {kind} rw,{name}\n",
                root.display()
            )
        });
        CgroupMembership::new(mounts.concat(), membership.to_owned())
    }

    #[test]
    fn quotas_are_read_in_cores() {
        assert_eq!(parse_cpu_max("max 100000\n"), None);
        assert_eq!(parse_cpu_max("150000 100000\n"), Some(1.5));
        assert_eq!(parse_cpu_max("nonsense"), None);
    }

    #[test]
    fn the_tightest_quota_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let membership = machine(root.path(), "3:cpu:/docker\n0::/job/step\n");
        assert_eq!(tightest_quota(&membership), None);
        write("v2/job/step/cpu.max", "max 100000\n");
        write("v2/job/cpu.max", "300000 100000\n");
        assert_eq!(tightest_quota(&membership), Some(3.0));
        write("cpu/docker/cpu.cfs_quota_us", "-1\n");
        write("cpu/docker/cpu.cfs_period_us", "100000\n");
        assert_eq!(tightest_quota(&membership), Some(3.0), "-1 is no quota");
        write("cpu/docker/cpu.cfs_quota_us", "150000\n");
        assert_eq!(tightest_quota(&membership), Some(1.5));
    }

    #[test]
    fn there_is_a_core_at_least() {
        assert!(usable_cores() >= 1);
    }
}
