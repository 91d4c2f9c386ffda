//! A control group (version 2) that holds all workers of one launcher, where the system allows to make one.
//!
//! Whatever a worker starts is born in its group, and cannot leave it without rights that it usually lacks: not by a
//! session of its own, not by clearing its environment. One write to `cgroup.kill` then ends all of them at once.
//! The group lies below the launcher's own. Where none can be made, the guardian and the sweep work as they do
//! without: sessions, markers, descendants.
#![expect(
    unsafe_code,
    reason = "a trial child, and a descriptor used between fork and exec"
)]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{AccessFlags, ForkResult, access, fork};

/// Members of a group, one process id a line; `0` is the writer itself.
const MEMBERS: &str = "cgroup.procs";
/// `1` ends all members, those of groups below too.
const KILL: &str = "cgroup.kill";
/// How long a group whose members were killed may take to become empty.
const EMPTY_BOUND: Duration = Duration::from_secs(1);
/// Between two attempts to remove it: there is no event for the last member's last moment.
const REMOVE_INTERVAL: Duration = Duration::from_millis(2);
/// Groups below groups that are removed; a worker makes no deeper ones.
const MAX_DEPTH: u32 = 16;

/// Why workers get no group of their own. Nothing is lost that a user has to see to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoGroup {
    /// Version 2 is not mounted, or not where this process's own group can be seen.
    #[error("control groups of version 2 are not mounted here")]
    NotMounted,
    /// Not delegated to this user, or mounted read-only.
    #[error("`{path}` cannot be written to")]
    NotWritable {
        /// Of the launcher's own group.
        path: PathBuf,
    },
}

/// The folder of the launcher's own control group, if groups can be made below it. Nothing is made.
///
/// # Errors
/// When a group of their own for the workers is impossible, and why.
pub fn parent_of_workers() -> Result<PathBuf, NoGroup> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let own =
        own_group(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup")).ok_or(NoGroup::NotMounted)?;
    // Moving a process needs the right to write to the members of the nearest group above both places: this one.
    for path in [own.clone(), own.join(MEMBERS)] {
        if access(&path, AccessFlags::W_OK).is_err() {
            return Err(NoGroup::NotWritable { path });
        }
    }
    Ok(own)
}

/// The folder of this process's group, from `/proc/self/mountinfo` and `/proc/self/cgroup`.
fn own_group(mounts: &str, membership: &str) -> Option<PathBuf> {
    let own = membership.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        if file_system.split(' ').next() != Some("cgroup2") {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        // A mount of a part of the tree shows only what is below its root.
        let below = Path::new(own).strip_prefix(root).ok()?;
        let plain = below
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
        plain.then(|| Path::new(point).join(below))
    })
}

/// The group of one launcher's workers.
#[derive(Debug)]
pub(crate) struct WorkerGroup {
    dir: PathBuf,
    members: File,
}

impl WorkerGroup {
    /// Makes the group, and tries with a child that processes can be moved into it.
    pub(crate) fn create(dir: &Path) -> io::Result<Self> {
        fs::create_dir(dir)?;
        let open = || {
            // Absent before Linux 5.14.
            fs::metadata(dir.join(KILL))?;
            let members = File::options().write(true).open(dir.join(MEMBERS))?;
            try_door(Door(members.as_raw_fd()))?;
            Ok(members)
        };
        match open() {
            Ok(members) => Ok(Self {
                dir: dir.to_owned(),
                members,
            }),
            Err(error) => {
                // Nobody is in it.
                let _ = fs::remove_dir(dir);
                Err(error)
            }
        }
    }

    /// The way into the group, valid as long as the group.
    pub(crate) fn door(&self) -> Door {
        Door(self.members.as_raw_fd())
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }
}

/// Lets a process into a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Door(RawFd);

impl Door {
    /// Moves the calling process. Async-signal-safe; true if it is in.
    pub(crate) fn enter(self) -> bool {
        // SAFETY: the buffer is valid for its length. A bad descriptor gives an error.
        unsafe { libc::write(self.0, b"0".as_ptr().cast(), 1) == 1 }
    }
}

/// The kernel's rules on who may be moved where are many: a child finds out.
fn try_door(door: Door) -> io::Result<()> {
    // SAFETY: the child makes two async-signal-safe calls and never returns.
    match unsafe { fork() }? {
        ForkResult::Child => {
            let code = i32::from(!door.enter());
            // SAFETY: plain system call.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => match waitpid(child, None)? {
            WaitStatus::Exited(_, 0) => Ok(()),
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        },
    }
}

/// Kills all members of a group, and those of the groups below; quietly none where there is no such group.
pub(crate) fn kill_members(group: &Path) {
    // Without `create`: a folder that is no control group gets no such file.
    let _ = File::options()
        .write(true)
        .open(group.join(KILL))
        .and_then(|mut file| io::Write::write_all(&mut file, b"1"));
}

/// Kills what is left in a group, and removes it with the groups below; gives up on members that cannot be killed.
pub(crate) fn remove(group: &Path) -> io::Result<()> {
    let deadline = Instant::now() + EMPTY_BOUND;
    loop {
        kill_members(group);
        match remove_tree(group, MAX_DEPTH) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                std::thread::sleep(REMOVE_INTERVAL);
            }
            outcome => return outcome,
        }
    }
}

/// The files of a group cannot be removed, and go with it: only folders count.
fn remove_tree(group: &Path, depth: u32) -> io::Result<()> {
    for entry in fs::read_dir(group)?.flatten() {
        if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path(), depth - 1)?;
        }
    }
    fs::remove_dir(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
24 1 0:22 / / rw,relatime - ext4 /dev/vda rw
30 24 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 30 0:28 /slice/pod /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate
";

    #[test]
    fn the_own_group_is_found_below_the_mount() {
        let found = |membership| own_group(MOUNTS, membership);
        let at = |path: &str| Some(PathBuf::from(path));
        assert_eq!(
            found("4:memory:/x\n0::/slice/pod/job\n"),
            at("/sys/fs/cgroup/unified/job")
        );
        assert_eq!(found("0::/slice/pod\n"), at("/sys/fs/cgroup/unified/"));
        assert_eq!(found("0::/elsewhere\n"), None, "the mount does not show it");
        assert_eq!(
            found("0::/slice/pod/../other\n"),
            None,
            "outside of the namespace"
        );
        assert_eq!(found("4:memory:/x\n"), None, "version 1 only");
        assert_eq!(own_group("", "0::/\n"), None);
    }

    #[test]
    fn a_folder_that_is_no_control_group_is_refused_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("ddp-1");
        let error = WorkerGroup::create(&dir).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(!dir.exists());
    }

    #[test]
    fn killing_writes_to_an_existing_group_only() {
        let root = tempfile::tempdir().unwrap();
        kill_members(&root.path().join("none"));
        kill_members(root.path());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        fs::write(root.path().join(KILL), "").unwrap();
        kill_members(root.path());
        assert_eq!(fs::read(root.path().join(KILL)).unwrap(), b"1");
    }

    #[test]
    fn a_group_goes_with_those_below_it() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("ddp-1");
        fs::create_dir_all(group.join("inner/innermost")).unwrap();
        remove(&group).unwrap();
        assert!(!group.exists());
        remove(&group).expect("it is gone already");
    }

    #[test]
    fn members_are_held_and_killed_together() {
        let Ok(own) = parent_of_workers() else {
            eprintln!("SKIPPED: no control group can be made here");
            return;
        };
        let dir = own.join(format!("ddp-test-{}", std::process::id()));
        let group = WorkerGroup::create(&dir).unwrap();
        let door = group.door();
        let mut sleep = std::process::Command::new("sleep");
        sleep.arg("1000");
        // SAFETY: `enter` is async-signal-safe.
        unsafe {
            std::os::unix::process::CommandExt::pre_exec(&mut sleep, move || {
                door.enter()
                    .then_some(())
                    .ok_or_else(|| io::ErrorKind::PermissionDenied.into())
            });
        };
        let mut child = sleep.spawn().unwrap();
        let members = fs::read_to_string(group.dir().join(MEMBERS)).unwrap();
        assert_eq!(members.trim(), child.id().to_string());
        kill_members(&dir);
        let status = child.wait().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(libc::SIGKILL)
        );
        remove(&dir).unwrap();
        assert!(!dir.exists());
    }
}
