//! Which worker a connected process belongs to.

use ddp_proto::ids::LocalRank;

use crate::supervise::proc_table::{self, ProcessEntry};

/// Deeper trees of processes are not climbed.
const MAX_DEPTH: usize = 64;

/// The worker that is `pid`, leads its session, or is among its ancestors.
pub(crate) fn owner(pid: i32, workers: &[Option<i32>]) -> Option<LocalRank> {
    owner_in(pid, workers, proc_table::process)
}

fn owner_in(
    pid: i32,
    workers: &[Option<i32>],
    look: impl Fn(i32) -> Option<ProcessEntry>,
) -> Option<LocalRank> {
    let rank_of = |pid| {
        let rank = workers.iter().position(|worker| *worker == Some(pid))?;
        Some(LocalRank(rank as u32))
    };
    let mut pid = pid;
    for _ in 0..MAX_DEPTH {
        if let Some(rank) = rank_of(pid) {
            return Some(rank);
        }
        let entry = look(pid)?;
        if let Some(rank) = rank_of(entry.session) {
            return Some(rank);
        }
        pid = entry.parent;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_and_members_of_the_session_belong_to_the_worker() {
        let look = |pid: i32| {
            let (parent, session) = match pid {
                100 => (50, 100),
                // A child in a session of its own, and an orphan that stayed in the session.
                101 => (100, 101),
                102 => (1, 100),
                200 => (50, 200),
                50 => (1, 50),
                _ => return None,
            };
            Some(ProcessEntry {
                pid,
                parent,
                group: session,
                session,
                zombie: false,
            })
        };
        let workers = [Some(200), Some(100), None];
        let owner = |pid| owner_in(pid, &workers, look);
        assert_eq!(owner(200), Some(LocalRank(0)));
        assert_eq!(owner(100), Some(LocalRank(1)));
        assert_eq!(owner(101), Some(LocalRank(1)));
        assert_eq!(owner(102), Some(LocalRank(1)));
        assert_eq!(owner(50), None, "the launcher itself is no worker");
        assert_eq!(owner(999), None);
    }
}
