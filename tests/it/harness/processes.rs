//! Processes as `/proc` shows them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;

use super::eventually;

/// All living processes, with their parents; zombies do not live.
fn parents() -> BTreeMap<i32, i32> {
    let entries = std::fs::read_dir("/proc").expect("a mounted /proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_string_lossy().parse::<i32>().ok());
    pids.filter_map(|pid| Some((pid, living_parent(pid)?))).collect()
}

/// True where the tests themselves ignore SIGHUP, as under `nohup`: what they start inherits that.
pub(crate) fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").expect("a mounted /proc");
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = u64::from_str_radix(mask.expect("a mask").trim(), 16).expect("hexadecimal");
    mask >> (Signal::SIGHUP as u32 - 1) & 1 == 1
}

/// All living processes.
pub(crate) fn processes() -> Vec<i32> {
    parents().into_keys().collect()
}

/// The control groups (version 2) that a launcher with this process id made for its workers, and that still exist.
pub(crate) fn groups_made_by(launcher: i32) -> Vec<PathBuf> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let (mounts, own) = (read("/proc/self/mounts"), read("/proc/self/cgroup"));
    let own = own
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .unwrap_or_default();
    let points = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (point, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| Path::new(point).join(own))
    });
    let groups = points
        .filter_map(|point| std::fs::read_dir(point).ok())
        .flatten()
        .flatten();
    let name = format!("ddp-{launcher}-");
    groups
        .filter(|group| group.file_name().to_string_lossy().starts_with(&name))
        .map(|group| group.path())
        .collect()
}

/// The living children of `parent`.
pub(crate) fn children(parent: i32) -> Vec<i32> {
    let all = parents().into_iter();
    all.filter(|(_, of)| *of == parent).map(|(pid, _)| pid).collect()
}

/// All living processes below `ancestor`, itself not included.
pub(crate) fn descendants(ancestor: i32) -> Vec<i32> {
    let parents = parents();
    let is_below = |mut pid: i32| {
        while let Some(parent) = parents.get(&pid) {
            if *parent == ancestor {
                return true;
            }
            pid = *parent;
        }
        false
    };
    parents.keys().copied().filter(|pid| is_below(*pid)).collect()
}

/// The parent of `pid`; none if it is gone or a zombie.
fn living_parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may hold spaces and brackets of its own.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(parent)
}

/// The environment that `pid` was started with; empty if it is gone.
pub(crate) fn environment_of(pid: i32) -> BTreeMap<String, String> {
    let bytes = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    String::from_utf8_lossy(&bytes)
        .split('\0')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// The process that runs `rank` in the first generation below `launcher`.
pub(crate) fn worker(launcher: i32, rank: &str) -> i32 {
    eventually("the worker to be there", || {
        let is_rank = |pid: &i32| environment_of(*pid).get("RANK").is_some_and(|r| r == rank);
        descendants(launcher).into_iter().find(is_rank)
    })
}
