//! Collects children that ended.
//!
//! The launcher is a child subreaper: besides workers it inherits their orphans. A dead worker is first looked
//! at without being reaped: as long as its number is taken, its session can be killed without hitting a stranger.
#![expect(
    unsafe_code,
    reason = "waitid; nix cannot express deaths by real-time signals"
)]

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::supervise::ending::Ending;
use crate::supervise::sweep::KillTargets;

/// Workers that are dead, with their ends. What lives in their sessions is killed, then they are reaped: `forget` tells
/// the guardian while their numbers are still taken. With a control group of the workers only its members are looked at:
/// a machine may have thousands of other processes.
pub(crate) fn collect_workers(
    pids: impl Iterator<Item = i32>,
    group: Option<&Path>,
    forget: impl Fn(i32),
) -> Vec<(i32, Ending)> {
    let dead: Vec<(i32, Ending)> = pids
        .filter_map(|pid| look(Some(pid), libc::WNOWAIT).ok().flatten())
        .collect();
    if dead.is_empty() {
        return dead;
    }
    let sessions: BTreeSet<i32> = dead.iter().map(|(pid, _)| *pid).collect();
    for pid in &sessions {
        // Usually no process is left in the group.
        let _ = killpg(Pid::from_raw(*pid), Signal::SIGKILL);
    }
    let targets = KillTargets::Sessions {
        sessions: &sessions,
        group,
    };
    targets.kill_once();
    for pid in &sessions {
        forget(*pid);
        // It was dead a moment ago, and only this function reaps it.
        let _ = look(Some(*pid), 0);
    }
    dead
}

/// Reaps every other child that ended: adopted orphans. Must not run while a worker is being spawned, since it
/// would take the spawner's own half-made child. `forget` as above: one may have been a worker of a generation that was
/// given up before it was started.
pub(crate) fn collect_orphans(is_worker: impl Fn(i32) -> bool, forget: impl Fn(i32)) -> Vec<i32> {
    let mut reaped = Vec::new();
    // Left for the next round: it is woken by the same signal.
    while let Ok(Some((pid, _))) = look(None, libc::WNOWAIT) {
        if is_worker(pid) {
            break;
        }
        forget(pid);
        if look(Some(pid), 0).is_err() {
            break;
        }
        reaped.push(pid);
    }
    reaped
}

/// Kills the group of a child, unless it has been reaped: its number may be a stranger's then.
pub(crate) fn kill_child(pid: i32) {
    if look(Some(pid), libc::WNOWAIT).is_ok() {
        // Dead already, if this fails.
        let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

/// `waitid` for this child, or for any, without waiting; with `WNOWAIT` the child stays.
fn look(pid: Option<i32>, flags: i32) -> io::Result<Option<(i32, Ending)>> {
    let (kind, id) = match pid {
        Some(pid) => (libc::P_PID, pid as libc::id_t),
        None => (libc::P_ALL, 0),
    };
    // SAFETY: all zeroes is a valid `siginfo_t`.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is valid for writes.
    if unsafe { libc::waitid(kind, id, &raw mut info, libc::WEXITED | libc::WNOHANG | flags) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `waitid` filled in the fields of SIGCHLD, or left the zeroes.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(None);
    }
    let ending = match info.si_code {
        libc::CLD_EXITED => Ending::Code(status),
        code => Ending::Signal {
            signal: status,
            core_dumped: code == libc::CLD_DUMPED,
        },
    };
    Ok(Some((pid, ending)))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The guardian could kill a stranger's session of the same number.
    #[test]
    fn the_guardian_forgets_a_worker_before_its_number_is_free() {
        #[expect(clippy::zombie_processes, reason = "the function under test reaps it")]
        let child = Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let forgotten = std::cell::Cell::new(false);
        let forget = |session| {
            assert_eq!(session, pid);
            forgotten.set(look(Some(pid), libc::WNOWAIT).is_ok_and(|end| end.is_some()));
        };
        while collect_workers(std::iter::once(pid), None, forget).is_empty() {
            std::thread::yield_now();
        }
        assert!(forgotten.get(), "it is reaped later");
        assert!(look(Some(pid), libc::WNOWAIT).is_err(), "it is reaped");
    }
}
