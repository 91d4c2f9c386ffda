//! A control group (version 2) that holds all workers of one launcher, where the system allows to make one.
//!
//! Whatever a worker starts is born in its group, and cannot leave it without rights that it usually lacks: not by a
//! session of its own, not by clearing its environment. One write to `cgroup.kill` then ends all of them at once.
//! The group lies below the launcher's own. Where none can be made, the guardian and the sweep work as they do
//! without: sessions, markers, descendants.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ddp_proto::cgroup::CgroupMembership;
use nix::unistd::{AccessFlags, access};

use super::entry::CgroupEntry;

/// Members of a group, one process id a line; `0` is the writer itself.
const MEMBERS: &str = "cgroup.procs";
/// `1` ends all members, those of groups below too.
const KILL: &str = "cgroup.kill";
/// Whether there is a process in it, among other things.
const EVENTS: &str = "cgroup.events";
/// How long a group whose members were killed may take to become empty.
const EMPTY_BOUND: Duration = Duration::from_secs(1);
/// Between two attempts to remove it: there is no event for the last member's last moment.
const REMOVE_INTERVAL: Duration = Duration::from_millis(2);
/// Attempts to make a group before another launcher removes it.
const MAKE_ATTEMPTS: u32 = 3;
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
    let own = CgroupMembership::of_this_process()
        .unified()
        .ok_or(NoGroup::NotMounted)?;
    // To be born in a group below needs the right to write to the members of the nearest group above both places: this
    // one.
    for path in [own.clone(), own.join(MEMBERS)] {
        if access(&path, AccessFlags::W_OK).is_err() {
            return Err(NoGroup::NotWritable { path });
        }
    }
    Ok(own)
}

/// The group of one launcher's workers.
#[derive(Debug)]
pub(crate) struct WorkerCgroup {
    dir: PathBuf,
    /// Its lock says that the launcher lives.
    folder: File,
    members: File,
    /// The way into it, until a process in it was killed.
    entry: Mutex<Option<CgroupEntry>>,
}

impl WorkerCgroup {
    /// Makes the group, and tries with a child that processes get into it.
    pub(crate) fn create(dir: &Path) -> io::Result<Self> {
        fs::create_dir(dir)?;
        Self::open(dir).inspect_err(|_| {
            // No process is in it.
            let _ = fs::remove_dir(dir);
        })
    }

    /// As [`WorkerCgroup::create`], after the leftovers of dead launchers are removed beside it. Another launcher that
    /// does the same may take a group that is not held yet for one of these and remove it, so it is tried again.
    pub(crate) fn create_among_leftovers(dir: &Path) -> io::Result<Self> {
        if let Some(own) = dir.parent() {
            remove_leftovers(own);
        }
        let mut attempts = (1..MAKE_ATTEMPTS).map(|_| Self::create(dir));
        attempts.find(Result::is_ok).unwrap_or_else(|| Self::create(dir))
    }

    fn open(dir: &Path) -> io::Result<Self> {
        let folder = hold_own(dir)?;
        // Absent before Linux 5.14.
        fs::metadata(dir.join(KILL))?;
        let members = File::options().write(true).open(dir.join(MEMBERS))?;
        let entry = CgroupEntry::find(folder.as_raw_fd(), members.as_raw_fd())?;
        Ok(Self {
            dir: dir.to_owned(),
            folder,
            members,
            entry: Mutex::new(Some(entry)),
        })
    }

    /// The way into the group, valid as long as the group, and its folder; none if there is no way any more: then no new
    /// process is in it, and none must be looked for there.
    pub(crate) fn entry(&self) -> Option<(CgroupEntry, &Path)> {
        let mut entry = self.entry.lock().unwrap_or_else(PoisonError::into_inner);
        if entry.is_none() {
            *entry = CgroupEntry::find(self.folder.as_raw_fd(), self.members.as_raw_fd()).ok();
        }
        Some(((*entry)?, self.dir()))
    }

    /// Kills all members, and those of the groups below.
    pub(crate) fn kill(&self) {
        kill_members(&self.dir);
        // Linux 6.18 compares how often the group was killed with how often the launcher's own was, and kills whom it
        // takes for a child of the dead: whether processes can be born in a group has to be tried anew.
        *self.entry.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }
}

/// Processes of a group and of the groups below it, those that this process can see; none if there is no such group.
pub(crate) fn members(group: &Path) -> Vec<i32> {
    let members_of = |group: PathBuf| {
        let text = fs::read_to_string(group.join(MEMBERS)).unwrap_or_default();
        let pids = text.lines().filter_map(|line| line.parse().ok());
        // A process of another container has no number here.
        pids.filter(|pid| *pid > 0).collect::<Vec<i32>>()
    };
    tree(group).into_iter().flat_map(members_of).collect()
}

/// True if there is a process in the group or in one below it.
fn is_populated(group: &Path) -> bool {
    let events = fs::read_to_string(group.join(EVENTS)).unwrap_or_default();
    events.lines().any(|line| line == "populated 1")
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
        match remove_tree(group) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                std::thread::sleep(REMOVE_INTERVAL);
            }
            outcome => return outcome,
        }
    }
}

/// Removes a group and those below it, if no process is in them.
fn remove_tree(group: &Path) -> io::Result<()> {
    tree(group).iter().try_for_each(fs::remove_dir)
}

/// A group and those below it, the innermost first.
fn tree(group: &Path) -> Vec<PathBuf> {
    let mut groups = Vec::new();
    add_tree(group, MAX_DEPTH, &mut groups);
    groups
}

fn add_tree(group: &Path, depth: u32, groups: &mut Vec<PathBuf>) {
    // The files of a group cannot be removed, and go with it: only folders count.
    for below in groups_in(group).filter(|_| depth > 0) {
        add_tree(&below, depth - 1, groups);
    }
    groups.push(group.to_owned());
}

fn groups_in(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
}

/// Begins the names of the groups that launchers make.
const PREFIX: &str = "ddp-";

/// Longest wait for another launcher that looks whether a group is a leftover.
const LOOK_BOUND: Duration = Duration::from_millis(200);
/// Between two looks whether it is through: a lock has no event with a deadline.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Opens the folder of a group, and holds its lock until the file is closed. A launcher that removes a group holds its
/// lock.
///
/// # Errors
/// When there is no such folder, or another process holds it.
fn hold(group: &Path) -> io::Result<File> {
    lock(File::open(group)?, group)
}

fn lock(folder: File, group: &Path) -> io::Result<File> {
    folder.try_lock()?;
    // The one that was opened may have been removed before it was locked, and another have come to its place.
    let (held, there) = (folder.metadata()?, fs::metadata(group)?);
    if (held.dev(), held.ino()) != (there.dev(), there.ino()) {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(folder)
}

/// As [`hold`], for the group of this launcher, which others may just be looking at.
fn hold_own(group: &Path) -> io::Result<File> {
    let deadline = Instant::now() + LOOK_BOUND;
    loop {
        match hold(group) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(LOOK_INTERVAL);
            }
            outcome => return outcome,
        }
    }
}

/// Removes the empty groups of dead launchers below `own`; returns their number. A group stays behind when a process in
/// it could not be killed, or when launcher and guardian were both killed. Groups that hold a process stay.
///
/// Each launcher holds a lock on the folder of its group while it lives. A process id would not do: the system reuses
/// it, and it differs between containers. A lock ends with its holder.
fn remove_leftovers(own: &Path) -> usize {
    let is_ours = |group: &PathBuf| {
        let name = group.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with(PREFIX)
    };
    groups_in(own)
        .filter(is_ours)
        .filter(|group| {
            let lock = hold(group);
            // A process that comes in now, or a group that is made below, makes the removal fail.
            lock.is_ok() && !is_populated(group) && remove_tree(group).is_ok()
        })
        .count()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::wait::WaitStatus;

    use super::*;
    use crate::cgroup::wait_for;
    use crate::spawn::process::{self, Image, Start};

    #[test]
    fn a_folder_that_is_no_control_group_is_refused_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("ddp-1");
        let error = WorkerCgroup::create(&dir).unwrap_err();
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

    /// Starts a process that succeeds if it is in the group, and returns how it ended.
    fn start_in(group: &WorkerCgroup, entry: CgroupEntry) -> WaitStatus {
        let name = group.dir().file_name().unwrap().to_str().unwrap();
        let script = format!("grep -q '^0::.*/{name}$' /proc/self/cgroup");
        let argv = ["sh", "-c", &script].map(std::ffi::OsStr::new);
        let image = Image::new(Path::new("/bin/sh"), argv.into_iter(), &[]).unwrap();
        let null = File::options().write(true).open("/dev/null").unwrap();
        let streams = [null.as_fd(); 3].map(Some);
        let start = Start {
            image,
            streams,
            entry: Some(entry),
            patience: Duration::from_mins(1),
            ignored: &[],
        };
        let child = process::start(&start, || {
            entry.enter().then_some(()).ok_or(nix::errno::Errno::EPERM)
        });
        wait_for(child.unwrap()).unwrap()
    }

    #[test]
    fn a_group_whose_members_were_killed_takes_new_ones() {
        let Ok(own) = parent_of_workers() else {
            eprintln!("SKIPPED: no control group can be made here");
            return;
        };
        let dir = own.join(format!("ddp-test-{}-again", std::process::id()));
        let group = WorkerCgroup::create(&dir).unwrap();
        for _ in 0..3 {
            let ways = [
                group.entry().unwrap().0,
                CgroupEntry::Move(group.members.as_raw_fd()),
            ];
            for entry in ways {
                assert!(
                    matches!(start_in(&group, entry), WaitStatus::Exited(_, 0)),
                    "{entry:?}"
                );
            }
            group.kill();
        }
        remove(&dir).unwrap();
    }

    #[test]
    fn a_group_without_a_way_in_is_none() {
        let root = tempfile::tempdir().unwrap();
        let members = root.path().join(MEMBERS);
        fs::write(&members, "").unwrap();
        let open = |options: &fs::OpenOptions| WorkerCgroup {
            dir: root.path().to_owned(),
            folder: File::open(root.path()).unwrap(),
            members: options.open(&members).unwrap(),
            entry: Mutex::new(None),
        };
        // No folder to be born in, and the list of members cannot be written.
        assert!(open(File::options().read(true)).entry().is_none());
        let group = open(File::options().write(true));
        let entry = group.entry().expect("a way in");
        assert!(matches!(entry, (CgroupEntry::Move(_), dir) if dir == root.path()));
    }

    #[test]
    fn members_are_held_and_killed_together() {
        let Ok(own) = parent_of_workers() else {
            eprintln!("SKIPPED: no control group can be made here");
            return;
        };
        let dir = own.join(format!("ddp-test-{}", std::process::id()));
        let group = WorkerCgroup::create(&dir).unwrap();
        let mut child = std::process::Command::new("cat");
        child.stdin(std::process::Stdio::piped());
        let mut child = child.spawn().unwrap();
        fs::write(dir.join(MEMBERS), child.id().to_string()).unwrap();
        assert_eq!(members(&dir), [child.id() as i32]);
        assert!(is_populated(&dir));
        assert!(remove_tree(&dir).is_err(), "a process is in it");
        group.kill();
        let status = child.wait().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(libc::SIGKILL)
        );
        remove(&dir).unwrap();
        assert!(!dir.exists());
    }

    #[test]
    fn only_what_nobody_holds_is_removed() {
        let own = tempfile::tempdir().unwrap();
        for name in ["ddp-1-dead", "ddp-1-dead/inner", "ddp-1-alive", "other"] {
            fs::create_dir(own.path().join(name)).unwrap();
        }
        let alive = own.path().join("ddp-1-alive");
        let lock = hold(&alive).unwrap();
        assert_eq!(remove_leftovers(own.path()), 1);
        assert!(!own.path().join("ddp-1-dead").exists());
        assert!(own.path().join("other").exists());
        assert!(alive.exists(), "its launcher lives");
        drop(lock);
        // A process that another test has just forked holds the lock too, until its program runs.
        let deadline = Instant::now() + Duration::from_secs(20);
        while remove_leftovers(own.path()) == 0 {
            assert!(Instant::now() < deadline, "the lock is free");
            std::thread::yield_now();
        }
        assert!(!alive.exists());
    }

    #[test]
    fn a_group_that_came_to_the_place_of_another_is_not_held_by_the_others_lock() {
        let own = tempfile::tempdir().unwrap();
        let group = own.path().join("ddp-1-new");
        fs::create_dir(&group).unwrap();
        let before = File::open(&group).unwrap();
        fs::remove_dir(&group).unwrap();
        // Keeps the number of the old one from being used again.
        fs::create_dir(own.path().join("between")).unwrap();
        assert!(
            lock(before.try_clone().unwrap(), &group).is_err(),
            "nothing is there"
        );
        fs::create_dir(&group).unwrap();
        assert!(lock(before, &group).is_err(), "another one is there");
        assert!(hold_own(&group).is_ok());
    }

    #[test]
    fn a_launcher_waits_for_those_who_only_look() {
        let own = tempfile::tempdir().unwrap();
        let group = own.path().join("ddp-1-new");
        fs::create_dir(&group).unwrap();
        let looking = hold(&group).unwrap();
        std::thread::scope(|scope| {
            let held = scope.spawn(|| hold_own(&group).is_ok());
            drop(looking);
            assert!(held.join().unwrap());
        });
    }

    #[test]
    fn a_group_with_a_process_stays_with_all_below_it() {
        let own = tempfile::tempdir().unwrap();
        let group = own.path().join("ddp-1-stuck");
        fs::create_dir_all(group.join("ddp-2-inner")).unwrap();
        fs::write(group.join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        assert_eq!(remove_leftovers(own.path()), 0);
        assert!(
            group.join("ddp-2-inner").exists(),
            "its launcher lives, in the group above"
        );
    }
}
