//! A worker that the kernel's OOM killer ends, in a control group with a limit that the test sets.

use std::path::{Path, PathBuf};

use crate::harness::{Program, eventually, temp_dir};

/// Enough for the launcher and idle workers, and filled in moments.
const LIMIT_BYTES: &str = "134217728";

/// A control group with a limit of memory; removed when it is dropped.
struct SmallGroup(PathBuf);

impl SmallGroup {
    /// Below this process's own group, in whichever hierarchy has the memory controller; otherwise why not.
    fn make(name: &str) -> Result<Self, String> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let (mounts, membership) = (read("/proc/self/mounts"), read("/proc/self/cgroup"));
        let own = |is_it: fn(&str) -> bool| {
            let line = membership.lines().find(|line| is_it(line))?;
            Some(line.rsplit(':').next()?.trim_start_matches('/').to_owned())
        };
        let v1 = own(|line| line.contains(":memory:"));
        let (kind, own) = match v1 {
            Some(path) => ("cgroup", path),
            None => (
                "cgroup2",
                own(|line| line.starts_with("0::")).ok_or("no control groups")?,
            ),
        };
        let point = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (point, found, options) = (fields.next()?, fields.next()?, fields.next()?);
            let has_memory = kind == "cgroup2" || options.split(',').any(|option| option == "memory");
            (found == kind && has_memory).then_some(point)
        });
        let point = point.ok_or_else(|| format!("{kind} with the memory controller is not mounted"))?;
        let dir = Path::new(point)
            .join(own)
            .join(format!("test-of-ddp-{}-{name}", std::process::id()));
        std::fs::create_dir(&dir).map_err(|error| format!("`{}`: {error}", dir.display()))?;
        let group = Self(dir);
        // Memory that is swapped out has a limit of its own, where the kernel counts it.
        let (limit, swap, swap_limit) = match kind {
            "cgroup" => (
                "memory.limit_in_bytes",
                "memory.memsw.limit_in_bytes",
                LIMIT_BYTES,
            ),
            _ => ("memory.max", "memory.swap.max", "0"),
        };
        std::fs::write(group.0.join(limit), LIMIT_BYTES).map_err(|error| format!("`{limit}`: {error}"))?;
        let _ = std::fs::write(group.0.join(swap), swap_limit);
        Ok(group)
    }

    /// `ddp-run` in the group.
    fn launch(&self, words: &[&str]) -> Program {
        let enter = format!("echo $$ > '{}/cgroup.procs' && exec \"$@\"", self.0.display());
        let shell = ["-c", &enter, "sh", env!("CARGO_BIN_EXE_ddp-run")];
        Program::new("sh").args(shell.iter().chain(words))
    }
}

impl Drop for SmallGroup {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // The last member is gone some moments after it was waited for.
            eventually("an empty control group", || std::fs::remove_dir(&self.0).ok());
        }
    }
}

#[test]
fn a_worker_that_needs_more_memory_than_there_is_is_named_for_it() {
    let group = match SmallGroup::make("small") {
        Ok(group) => group,
        Err(why) => {
            eprintln!("SKIPPED: no control group with a limit of memory can be made: {why}");
            return;
        }
    };
    let logs = temp_dir();
    let logs = logs.path().to_str().expect("unicode");
    // `tail` keeps all of a line that never ends.
    let script = "if [ $RANK = 1 ]; then exec tail /dev/zero; else exec sleep 1000; fi";
    let launch = group.launch(&["--nproc-per-node", "2", "--log-dir", logs]);
    let finished = launch.args(["--no-python", "sh", "-c", script]).run();
    finished
        .expect_exit(137)
        .expect_stderr("first failure: rank 1")
        .expect_stderr(
            "possibly out of memory: the kernel's OOM killer killed a process of this control group",
        );
    let text = std::fs::read_to_string(Path::new(logs).join("error.json")).expect("an error file");
    let cause: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(cause["first_failure"]["out_of_memory"], true, "{text}");
    assert_eq!(cause["first_failure"]["rank"], 1, "{text}");
}

#[test]
fn a_kill_where_memory_suffices_is_not_taken_for_a_lack_of_it() {
    let group = match SmallGroup::make("enough") {
        Ok(group) => group,
        Err(why) => {
            eprintln!("SKIPPED: no control group with a limit of memory can be made: {why}");
            return;
        }
    };
    let words = ["sh", "-c", "kill -9 $$"];
    let finished = group.launch(&words).run();
    finished
        .expect_exit(137)
        .expect_stderr("a `kill -9` by a person or program");
    finished.expect_no_stderr("possibly out of memory");
}
