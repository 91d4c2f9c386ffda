//! Finds and kills what workers leave behind.
//!
//! One pass looks at every process once. Processes that fork while the pass runs may slip through, so a
//! sweep repeats until two passes in a row find nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::cgroup;
use crate::supervise::proc_table::{self, ProcessEntry};

/// Pause between two passes: a killed process needs a moment to go.
const BETWEEN_PASSES: Duration = Duration::from_millis(3);

/// Which processes a sweep is after.
pub(crate) enum KillTargets<'a> {
    /// Used by the guardian, when the tree of processes is gone with the launcher: everything that is in one of
    /// these sessions or process groups, or carries the launcher's marker in its environment.
    Launcher {
        sessions: &'a BTreeSet<i32>,
        launcher_id: &'a str,
    },
    /// Used by the launcher itself: all its descendants but these and their children. As the launcher is a
    /// child subreaper, orphans are its children and nothing escapes.
    Descendants { spared: &'a [i32] },
    /// The members of these sessions but their leaders, which are dead and hold the numbers; with a control group,
    /// those of them that are in it.
    Sessions {
        sessions: &'a BTreeSet<i32>,
        group: Option<&'a Path>,
    },
}

impl KillTargets<'_> {
    /// Those that the table of processes tells.
    fn select(&self, processes: &[ProcessEntry]) -> Vec<i32> {
        let of = |wanted: &dyn Fn(&ProcessEntry) -> bool| -> Vec<i32> {
            let found = alive(processes).filter(|entry| wanted(entry));
            found.map(|entry| entry.pid).collect()
        };
        match self {
            Self::Launcher { sessions, .. } => {
                of(&|entry| sessions.contains(&entry.session) || sessions.contains(&entry.group))
            }
            Self::Descendants { spared } => descendants(processes, Pid::this().as_raw(), spared),
            Self::Sessions { sessions, .. } => {
                of(&|entry| sessions.contains(&entry.session) && !sessions.contains(&entry.pid))
            }
        }
    }

    /// Kills those that the table tells, then those of the others that carry a marker; returns all of them.
    ///
    /// Looking for a marker may block for ever: to read the environment of a process takes a lock that it holds
    /// while it is stuck in a driver. So all are killed before that can be known to be ours without it.
    fn kill_found(
        &self,
        processes: &[ProcessEntry],
        carries_marker: impl Fn(i32, &str) -> bool,
        mut kill: impl FnMut(i32),
    ) -> Vec<i32> {
        let mut found = self.select(processes);
        for pid in &found {
            kill(*pid);
        }
        if let Self::Launcher { launcher_id, .. } = self {
            let known: BTreeSet<i32> = found.iter().copied().collect();
            for entry in alive(processes).filter(|entry| !known.contains(&entry.pid)) {
                if carries_marker(entry.pid, launcher_id) {
                    kill(entry.pid);
                    found.push(entry.pid);
                }
            }
        }
        found
    }

    /// Kills what is found in one look at the machine, and returns it.
    pub(crate) fn kill_once(&self) -> Vec<i32> {
        if let Self::Launcher { sessions, .. } = self {
            for session in *sessions {
                // Without a table of processes, nothing else can be found.
                let _ = killpg(Pid::from_raw(*session), Signal::SIGKILL);
            }
        }
        let processes = match self {
            Self::Sessions {
                group: Some(group), ..
            } => cgroup::members(group)
                .into_iter()
                .filter_map(proc_table::process)
                .collect(),
            _ => proc_table::processes(),
        };
        self.kill_found(&processes, proc_table::carries_marker, |pid| {
            // It may be gone already, or belong to another user: neither can be helped here.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        })
    }

    /// Kills until nothing is found any more; returns the processes that are left at the deadline.
    pub(crate) fn kill_all(&self, bound: Duration) -> Vec<i32> {
        let deadline = Instant::now() + bound;
        let mut clean_passes = 0;
        loop {
            let found = self.kill_once();
            clean_passes = if found.is_empty() { clean_passes + 1 } else { 0 };
            if clean_passes == 2 || Instant::now() >= deadline {
                return found;
            }
            if !found.is_empty() {
                std::thread::sleep(BETWEEN_PASSES);
            }
        }
    }
}

/// All but the dead and this process itself.
fn alive(processes: &[ProcessEntry]) -> impl Iterator<Item = &ProcessEntry> {
    let me = Pid::this().as_raw();
    processes
        .iter()
        .filter(move |entry| !entry.zombie && entry.pid != me)
}

fn descendants(processes: &[ProcessEntry], root: i32, spared: &[i32]) -> Vec<i32> {
    let mut children: BTreeMap<i32, Vec<&ProcessEntry>> = BTreeMap::new();
    for entry in processes {
        children.entry(entry.parent).or_default().push(entry);
    }
    let mut found = Vec::new();
    let mut open = vec![root];
    while let Some(parent) = open.pop() {
        // Removed, so that even a table that changed under the reader cannot send it in circles.
        for child in children.remove(&parent).unwrap_or_default() {
            if spared.contains(&child.pid) {
                continue;
            }
            open.push(child.pid);
            if !child.zombie {
                found.push(child.pid);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn entry(pid: i32, parent: i32, session: i32) -> ProcessEntry {
        ProcessEntry {
            pid,
            parent,
            group: session,
            session,
            zombie: false,
        }
    }

    #[test]
    fn descendants_are_found_across_sessions_but_not_below_the_spared() {
        let mut table = vec![
            entry(10, 1, 10),
            entry(11, 10, 11),
            entry(12, 11, 12),
            entry(13, 10, 13),
            entry(14, 13, 13),
            entry(20, 1, 20),
        ];
        table[1].zombie = true;
        let mut found = descendants(&table, 10, &[13]);
        found.sort_unstable();
        assert_eq!(
            found,
            [12],
            "12 is below a zombie; 13 and 14 are spared; 20 is a stranger"
        );
    }

    #[test]
    fn no_environment_is_read_before_all_announced_sessions_are_killed() {
        let table = [
            entry(10, 1, 10),
            entry(11, 1, 11),
            entry(12, 1, 12),
            entry(13, 12, 10),
        ];
        let sessions = BTreeSet::from([10]);
        let targets = KillTargets::Launcher {
            sessions: &sessions,
            launcher_id: "me",
        };
        let acts = RefCell::new(Vec::new());
        let carries_marker = |pid, launcher_id: &str| {
            acts.borrow_mut().push(format!("read {pid}"));
            pid == 12 && launcher_id == "me"
        };
        let kill = |pid| acts.borrow_mut().push(format!("kill {pid}"));
        assert_eq!(targets.kill_found(&table, carries_marker, kill), [10, 13, 12]);
        assert_eq!(
            acts.into_inner(),
            ["kill 10", "kill 13", "read 11", "read 12", "kill 12"]
        );
    }

    #[test]
    fn a_session_is_swept_without_its_leader() {
        let table = [entry(10, 1, 10), entry(11, 10, 10), entry(12, 1, 12)];
        let sessions = BTreeSet::from([10]);
        let targets = KillTargets::Sessions {
            sessions: &sessions,
            group: None,
        };
        assert_eq!(targets.select(&table), [11]);
    }
}
