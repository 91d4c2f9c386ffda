//! Whether the kernel's OOM killer may have ended a worker: the control group counts its victims.
//!
//! The count grows before the victim dies, so it can be read when the death is seen. Whom it counted is not told: a
//! worker that died of a SIGKILL of unknown origin is *possibly* a victim.

use std::fs;
use std::path::{Path, PathBuf};

use ddp_proto::cgroup::CgroupMembership;

use crate::supervise::ending::Ending;

/// The file of version 2, which counts the groups below too.
const EVENTS: &str = "memory.events";
/// The file of version 1.
const OOM_CONTROL: &str = "memory.oom_control";

/// The count of one control group since this was made.
#[derive(Debug)]
pub(crate) struct OomCounter {
    /// None where nothing counts: no control group, or an old kernel.
    file: Option<PathBuf>,
    before: u64,
}

impl OomCounter {
    /// The workers' own group, if it counts: then no other process's death is taken for theirs. Otherwise the nearest
    /// group that counts, from this process's own upwards: workers are in it, or below.
    pub(crate) fn of_workers(group: Option<&Path>) -> Self {
        let file = group.map(|group| group.join(EVENTS));
        if let Some(before) = file.as_deref().and_then(kills) {
            return Self { file, before };
        }
        Self::nearest(&CgroupMembership::of_this_process())
    }

    /// As [`OomCounter::of_workers`] without a group of their own. One hierarchy at most has the memory controller.
    fn nearest(membership: &CgroupMembership) -> Self {
        let v2 = membership.unified_levels().map(|level| level.join(EVENTS));
        let v1 = membership
            .levels_of("memory")
            .map(|level| level.join(OOM_CONTROL));
        let file = v2.chain(v1).find(|file| kills(file).is_some());
        let before = file.as_deref().and_then(kills).unwrap_or(0);
        Self { file, before }
    }

    /// True for a worker that died of a SIGKILL other than `sent` by us, if the count has grown.
    pub(crate) fn explains(&self, ending: Ending, sent: Option<i32>) -> bool {
        let killed = matches!(
            ending,
            Ending::Signal {
                signal: libc::SIGKILL,
                ..
            }
        );
        let now = || self.file.as_deref().and_then(kills);
        killed && sent != Some(libc::SIGKILL) && now().is_some_and(|now| now > self.before)
    }
}

/// Deaths for want of memory, over the generations of a launch: the farthest step at which there was one.
#[derive(Debug, Default)]
pub(crate) struct OomHistory(Option<u64>);

impl OomHistory {
    /// A worker died of it at this step. True if one has before, and the job has got no further since: it would not get
    /// further the next time either.
    pub(crate) fn repeats(&mut self, step: u64) -> bool {
        let repeats = self.0.is_some_and(|last| step <= last);
        self.0 = self.0.max(Some(step));
        repeats
    }
}

/// Processes that the OOM killer ended, as `file` counts them.
fn kills(file: &Path) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "))?;
    count.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::machine;

    const KILLED: Ending = Ending::Signal {
        signal: libc::SIGKILL,
        core_dumped: false,
    };

    fn write(root: &Path, file: &str, kills: u64) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(
            path,
            format!("low 0\nmax 7\noom 3\noom_kill {kills}\noom_group_kill 9\n"),
        )
        .unwrap();
    }

    #[test]
    fn a_kill_that_was_counted_meanwhile_explains_a_death() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "v2/slurm/job/memory.events", 2);
        let counter = OomCounter::nearest(&machine(root.path(), "0::/slurm/job\n"));
        assert!(!counter.explains(KILLED, None), "two were killed before our time");
        write(root.path(), "v2/slurm/job/memory.events", 3);
        assert!(counter.explains(KILLED, None));
        assert!(
            counter.explains(KILLED, Some(libc::SIGTERM)),
            "we asked it to end, no more"
        );
        assert!(!counter.explains(KILLED, Some(libc::SIGKILL)), "it was us");
        assert!(!counter.explains(Ending::Code(137), None));
        let crashed = Ending::Signal {
            signal: libc::SIGSEGV,
            core_dumped: true,
        };
        assert!(!counter.explains(crashed, None));
    }

    /// A job over its limit was started three times more, and each time came to the same end.
    #[test]
    fn the_second_death_without_progress_is_the_last() {
        let mut history = OomHistory::default();
        assert!(!history.repeats(0), "the machine may have been busy");
        assert!(history.repeats(0));
        let mut history = OomHistory::default();
        assert!(!history.repeats(19));
        assert!(!history.repeats(25), "it got further");
        assert!(history.repeats(25));
        assert!(history.repeats(3));
    }

    #[test]
    fn the_nearest_group_that_counts_is_asked() {
        let root = tempfile::tempdir().unwrap();
        // Without the memory controller, a group has no such file.
        fs::create_dir_all(root.path().join("v2/user/session")).unwrap();
        write(root.path(), "v2/user/memory.events", 0);
        let counter = OomCounter::nearest(&machine(root.path(), "0::/user/session\n"));
        write(root.path(), "v2/user/memory.events", 1);
        assert!(counter.explains(KILLED, None));
    }

    #[test]
    fn version_1_counts_in_another_file() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "memory/docker/memory.oom_control", 0);
        let membership = "5:cpu,cpuacct:/other\n4:memory:/docker\n0::/\n";
        let counter = OomCounter::nearest(&machine(root.path(), membership));
        assert!(!counter.explains(KILLED, None));
        write(root.path(), "memory/docker/memory.oom_control", 1);
        assert!(counter.explains(KILLED, None));
    }

    #[test]
    fn the_workers_own_group_is_asked_first() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "ddp-1/memory.events", 4);
        let counter = OomCounter::of_workers(Some(&root.path().join("ddp-1")));
        assert!(!counter.explains(KILLED, None));
        write(root.path(), "ddp-1/memory.events", 5);
        assert!(counter.explains(KILLED, None));
    }

    #[test]
    fn where_nothing_counts_nothing_is_claimed() {
        let root = tempfile::tempdir().unwrap();
        assert!(!OomCounter::nearest(&machine(root.path(), "0::/a\n")).explains(KILLED, None));
        assert!(!OomCounter::nearest(&machine(root.path(), "")).explains(KILLED, None));
    }
}
