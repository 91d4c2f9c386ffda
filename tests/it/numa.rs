//! `--numa-binding`: on this machine, and on a pretended one with two NUMA nodes and two GPUs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::harness::{Finished, Launch, Program, TinyJob, launch, repository, temp_dir};

/// Says which cores the kernel lets it run on.
const CORES: &str = r#"while read -r name value; do
    if [ "$name" = Cpus_allowed_list: ]; then echo "$RANK: $value"; fi
done </proc/self/status"#;

/// Cores that this thread, and so a launcher that it starts, may use.
fn mask() -> BTreeSet<usize> {
    let set = sched_getaffinity(Pid::from_raw(0)).expect("readable");
    let is_set = |core: &usize| set.is_set(*core).unwrap_or(false);
    (0..CpuSet::count()).filter(is_set).collect()
}

/// How many physical cores they are.
fn physical(cores: &BTreeSet<usize>) -> usize {
    let siblings = |core: &usize| {
        let file = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
        fs::read_to_string(file).unwrap_or_else(|_| core.to_string())
    };
    cores.iter().map(siblings).collect::<BTreeSet<_>>().len()
}

/// `0-3,8`
fn numbers(list: &str) -> BTreeSet<usize> {
    let number = |word: &str| word.parse::<usize>().expect("a number");
    let range = |part: &str| match part.split_once('-') {
        Some((first, last)) => number(first)..=number(last),
        None => number(part)..=number(part),
    };
    list.split(',').flat_map(range).collect()
}

/// What [`CORES`] said of a rank.
#[track_caller]
fn cores_of(finished: &Finished, rank: u32) -> BTreeSet<usize> {
    let prefix = format!("[{rank}] {rank}: ");
    let line = finished
        .stdout()
        .iter()
        .find_map(|line| line.strip_prefix(&prefix));
    numbers(line.unwrap_or_else(|| panic!("nothing of rank {rank}: {}", finished.transcript())))
}

fn two_workers(binding: &str) -> Launch {
    launch()
        .nproc(2)
        .flag("--numa-binding", binding)
        .env("CUDA_VISIBLE_DEVICES", "")
}

#[test]
fn exclusive_workers_share_no_core() {
    let mask = mask();
    if physical(&mask) < 2 {
        eprintln!("SKIPPED: one physical core cannot be shared out");
        return;
    }
    let finished = two_workers("exclusive").shell(CORES).run();
    finished.expect_exit(0);
    let (first, second) = (cores_of(&finished, 0), cores_of(&finished, 1));
    assert!(first.is_disjoint(&second), "{first:?} {second:?}");
    assert!(
        first.is_subset(&mask) && second.is_subset(&mask),
        "{first:?} {second:?}"
    );

    let dry = two_workers("exclusive").words(["--dry-run"]).target("true").run();
    let shown = dry.expect_exit(0).stdout();
    let row = shown
        .iter()
        .find_map(|line| line.trim().strip_prefix("numa_binding"));
    let (cores, _) = row
        .expect("a row")
        .rsplit_once("command line")
        .expect("its source");
    let cores: Vec<_> = cores
        .split(';')
        .map(|part| numbers(part.split_once(": ").expect("a rank").1.trim()))
        .collect();
    assert_eq!(cores, [first, second], "a dry run says the same");
}

#[test]
fn a_core_that_would_have_to_be_shared_is_refused() {
    let only = *mask().first().expect("a core");
    let mut set = CpuSet::new();
    set.set(only).expect("a core's number");
    // This thread's mask only, which what it starts inherits.
    sched_setaffinity(Pid::from_raw(0), &set).expect("one of ours");
    two_workers("exclusive")
        .shell(CORES)
        .run()
        .expect_exit(2)
        .expect_stderr("`--numa-binding`: `exclusive` needs a physical core for each worker")
        .expect_stderr("has 1 for 2 workers")
        .expect_stderr("hint: start fewer workers");
    let shared = two_workers("node").shell(CORES).run();
    shared
        .expect_exit(0)
        .expect_stdout(&format!("[0] 0: {only}"))
        .expect_stdout(&format!("[1] 1: {only}"));
}

/// A machine with two NUMA nodes and a GPU on each; the first one of the bus is on the second node.
struct Pretended {
    nodes: [BTreeSet<usize>; 2],
    folder: tempfile::TempDir,
}

impl Pretended {
    /// None where the kernel does not allow it, or there are too few cores for two nodes.
    fn new() -> Option<Self> {
        let mut first = mask();
        let cut = *first.iter().nth(1)?;
        let second = first.split_off(&cut);
        let mut pretending = Command::new("unshare");
        let pretending = pretending.args(["-rm", "true"]).stderr(Stdio::null()).status();
        let directories = ["/sys/devices/system/node", "/sys/bus/pci"];
        if !pretending.is_ok_and(|status| status.success())
            || !directories.iter().all(|path| Path::new(path).is_dir())
        {
            return None;
        }
        let folder = temp_dir();
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(folder.path().join("libcuda.so.1"))
            .arg(repository("tests/it/numa/driver.c"))
            .status();
        assert!(compiled.is_ok_and(|status| status.success()), "cc compiles it");
        Some(Self {
            nodes: [first, second],
            folder,
        })
    }

    /// A launch of two workers on it.
    fn run(&self, words: &[&str], visible: Option<&str>) -> Finished {
        let scratch = tempfile::tempdir_in(self.folder.path()).expect("a folder");
        let list = |node: usize| {
            let numbers: Vec<_> = self.nodes[node].iter().map(ToString::to_string).collect();
            numbers.join(",")
        };
        let script = repository("tests/it/numa/machine.sh").display().to_string();
        let launcher = [env!("CARGO_BIN_EXE_ddp-run"), "--nproc-per-node", "2"];
        let words = [&["-rm", "bash", &script], &launcher[..], words].concat();
        let mut program = Program::new("unshare")
            .args(words)
            .env("SCRATCH", scratch.path())
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("NODE0", list(0))
            .env("NODE1", list(1));
        if let Some(visible) = visible {
            program = program.env("CUDA_VISIBLE_DEVICES", visible);
        }
        program.run()
    }
}

#[test]
fn workers_run_where_the_gpus_are_that_cuda_gives_them() {
    let Some(machine) = Pretended::new() else {
        eprintln!("SKIPPED: this machine has one core, or does not let us pretend that it has GPUs");
        return;
    };
    let [first, second] = &machine.nodes;
    let alone = &["--virtual-local-rank"][..];
    for (visible, flags, expected) in [
        (None, &[][..], [second, first]),
        (Some("1,0"), &[], [first, second]),
        (Some("1,0"), alone, [first, second]),
        (Some("MIG-1,MIG-0"), alone, [first, second]),
        (Some("MIG-0,MIG-1"), alone, [second, first]),
    ] {
        let words = [&["--numa-binding", "node"], flags, &["sh", "-c", CORES]].concat();
        let finished = machine.run(&words, visible);
        finished.expect_exit(0);
        let found = [cores_of(&finished, 0), cores_of(&finished, 1)];
        assert_eq!([&found[0], &found[1]], expected, "{visible:?} {flags:?}");
        assert_eq!(finished.stderr().lines().count(), 2, "there is no doubt");
    }
    // Without `--virtual-local-rank` both workers would see the first MIG device, and only that.
    let words = ["--numa-binding", "node", "sh", "-c", CORES];
    let finished = machine.run(&words, Some("MIG-0,MIG-1"));
    finished
        .expect_exit(0)
        .expect_stderr("`--numa-binding`: the driver reports 1 GPU for 2 workers");
}

#[test]
fn native_workers_on_gpus_are_bound_unless_asked_otherwise() {
    let Some(machine) = Pretended::new() else {
        eprintln!("SKIPPED: this machine has one core, or does not let us pretend that it has GPUs");
        return;
    };
    let job = TinyJob::new();
    let file = job.dir().join("tiny.yaml").display().to_string();
    let bound = |words: &[&str]| {
        let finished = machine.run(&[&["--dry-run", &file], words].concat(), None);
        finished
            .expect_exit(0)
            .stdout()
            .iter()
            .any(|line| line.contains("numa_binding") && line.contains("0: "))
    };
    assert!(bound(&[]));
    assert!(!bound(&["--set", "parallel.backend=cpu"]));
}
