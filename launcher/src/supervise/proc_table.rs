//! What `/proc` says of the processes of this machine. In a PID namespace without a `/proc` of its own it says nothing: the
//! numbers there are those of other processes.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use ddp_proto::env::DDP_JOB_MARKER;

/// More of an environment than this is not searched: the kernel's own limit for one `execve` is 2 MiB by default.
const MAX_ENVIRON_BYTES: u64 = 4 << 20;

/// The fields of `/proc/<pid>/stat` that supervision needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessEntry {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
    pub(crate) group: i32,
    pub(crate) session: i32,
    /// Dead, waiting to be reaped: it holds nothing but its number.
    pub(crate) zombie: bool,
}

/// All processes that can be seen, in no particular order; those that vanish meanwhile are left out.
pub(crate) fn processes() -> Vec<ProcessEntry> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(process)
        .collect()
}

/// Where a file of this process lies.
pub(crate) fn path(pid: i32, file: &str) -> Option<PathBuf> {
    let own = fs::read_link("/proc/self").ok()?;
    let is_ours = own == Path::new(&std::process::id().to_string());
    is_ours.then(|| format!("/proc/{pid}/{file}").into())
}

/// One process; none if it does not exist.
pub(crate) fn process(pid: i32) -> Option<ProcessEntry> {
    parse_stat(pid, &fs::read(path(pid, "stat")?).ok()?)
}

/// A process that should be gone, in words: ``77 (`python3`, state D in nfs_wait)``.
pub(crate) fn describe(pid: i32) -> String {
    let read = |file| path(pid, file).and_then(|path| fs::read_to_string(path).ok());
    let read = |file| read(file).unwrap_or_default();
    let (name, stat) = (read("comm"), read("stat"));
    if name.is_empty() {
        return pid.to_string();
    }
    let name = name.trim_end();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    let place = match read("wchan").as_str() {
        "" | "0" => String::new(),
        place => format!(" in {place}"),
    };
    match state {
        Some(state) => format!("{pid} (`{name}`, state {state}{place})"),
        None => format!("{pid} (`{name}`)"),
    }
}

/// True if the process was started, directly or through others, by the launcher called `launcher_id`.
pub(crate) fn carries_marker(pid: i32, launcher_id: &str) -> bool {
    let mut environ = Vec::new();
    let Some(file) = path(pid, "environ").and_then(|path| fs::File::open(path).ok()) else {
        return false;
    };
    file.take(MAX_ENVIRON_BYTES).read_to_end(&mut environ).is_ok() && environ_carries(&environ, launcher_id)
}

/// A marker is the path of launchers from the outermost to the innermost: `outer/inner`.
fn environ_carries(environ: &[u8], launcher_id: &str) -> bool {
    environ
        .split(|byte| *byte == 0)
        .filter_map(|entry| entry.strip_prefix(DDP_JOB_MARKER.as_bytes())?.strip_prefix(b"="))
        .any(|marker| {
            marker
                .split(|byte| *byte == b'/')
                .any(|id| id == launcher_id.as_bytes())
        })
}

fn parse_stat(pid: i32, stat: &[u8]) -> Option<ProcessEntry> {
    // The program's name is in parentheses and may itself contain parentheses and spaces.
    let end_of_name = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(stat.get(end_of_name + 1..)?).ok()?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    let mut number = || fields.next()?.parse().ok();
    Some(ProcessEntry {
        pid,
        parent: number()?,
        group: number()?,
        session: number()?,
        zombie: matches!(state, "Z" | "X"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let entry = parse_stat(7, b"7 (a) S 1 (b) Z 3 4 5 0 -1").unwrap();
        assert_eq!(
            entry,
            ProcessEntry {
                pid: 7,
                parent: 3,
                group: 4,
                session: 5,
                zombie: true
            }
        );
        assert_eq!(parse_stat(7, b"7 (a S 1"), None);
    }

    #[test]
    fn this_process_is_in_the_table() {
        let me = i32::try_from(std::process::id()).unwrap();
        let found = processes().into_iter().find(|entry| entry.pid == me).unwrap();
        assert_eq!(found.parent, nix::unistd::getppid().as_raw());
        assert!(!found.zombie);
    }

    /// The sweep took processes of the same numbers for the workers' own.
    #[test]
    fn the_table_of_another_pid_namespace_is_empty() {
        const INSIDE: &str = "DDP_TEST_INSIDE";
        if std::env::var_os(INSIDE).is_some() {
            let me = std::process::id() as i32;
            assert_eq!(
                (processes().len(), process(me), describe(me)),
                (0, None, me.to_string())
            );
            return;
        }
        let unshare = |program: &Path| {
            let mut unshare = std::process::Command::new("unshare");
            unshare.args(["--map-root-user", "--pid", "--fork"]).arg(program);
            unshare
        };
        if !unshare(Path::new("true"))
            .status()
            .is_ok_and(|status| status.success())
        {
            println!("SKIPPED: this system makes no PID namespace");
            return;
        }
        let test = std::thread::current().name().unwrap().to_owned();
        let mut inside = unshare(&std::env::current_exe().unwrap());
        let ended = inside.args(["--exact", &test]).env(INSIDE, "1").output().unwrap();
        assert!(
            ended.status.success(),
            "{}",
            String::from_utf8_lossy(&ended.stdout)
        );
    }

    #[test]
    fn processes_are_described() {
        let me = std::process::id() as i32;
        let words = describe(me);
        assert!(words.starts_with(&format!("{me} (`")), "{words}");
        assert!(words.contains("`, state "), "{words}");
        assert_eq!(describe(i32::MAX), i32::MAX.to_string(), "no such process");
    }

    #[test]
    fn a_marker_is_found_at_any_depth_and_never_by_part() {
        let environ = b"HOME=/\0DDP_JOB_MARKER=outer/inner\0X=outer\0";
        assert!(environ_carries(environ, "outer"));
        assert!(environ_carries(environ, "inner"));
        assert!(!environ_carries(environ, "inn"));
        assert!(!environ_carries(b"XDDP_JOB_MARKER=outer\0", "outer"));
    }
}
