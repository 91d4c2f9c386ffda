//! `--numa-binding`, as far as any machine can tell.

use std::collections::BTreeSet;
use std::fs;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::harness::{Launch, launch};

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
    let shown = finished.expect_exit(0).stdout();
    let of = |rank: u32| {
        let prefix = format!("[{rank}] {rank}: ");
        let line = shown.iter().find_map(|line| line.strip_prefix(&prefix));
        numbers(line.unwrap_or_else(|| panic!("nothing of rank {rank}: {shown:?}")))
    };
    let (first, second) = (of(0), of(1));
    assert!(first.is_disjoint(&second), "{first:?} {second:?}");
    assert!(
        first.is_subset(&mask) && second.is_subset(&mask),
        "{first:?} {second:?}"
    );

    let dry = two_workers("exclusive")
        .words(&["--dry-run"])
        .target("true")
        .run();
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
