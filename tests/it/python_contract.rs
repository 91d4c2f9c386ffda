//! An unmodified Python script sees what torchrun would tell it.

use std::collections::BTreeSet;

use crate::harness::{Finished, launch, python_is_missing, repository, temp_dir};

const SCRIPT: &str = "examples/python-script/show_contract.py";

fn contracts(finished: &Finished) -> Vec<serde_json::Value> {
    let parse = |line: &String| {
        let (_, json) = line.split_once("] ").expect("a rank in front");
        serde_json::from_str(json).expect("a line of JSON")
    };
    finished.stdout().iter().map(parse).collect()
}

#[test]
fn an_unmodified_script_sees_the_contract() {
    if python_is_missing() {
        return;
    }
    let launched = launch()
        .nproc(2)
        .flag("--max-restarts", "4")
        .flag("--rdzv-id", "job-7")
        // What an outer launcher left behind must not reach the script.
        .env("RANK", "77")
        .env("TORCHELASTIC_ERROR_FILE", "/nonexistent")
        .target(repository(SCRIPT))
        .target_args(&["--lr", "3e-4", "--nnodes"])
        .run();
    launched.expect_exit(0);
    let seen = contracts(&launched);
    let ranks: BTreeSet<_> = seen
        .iter()
        .filter_map(|s| s["contract"]["RANK"].as_str())
        .collect();
    assert_eq!(ranks, BTreeSet::from(["0", "1"]));
    for one in &seen {
        assert_eq!(one["argv"], serde_json::json!(["--lr", "3e-4", "--nnodes"]));
        let contract = &one["contract"];
        assert_eq!(contract["LOCAL_RANK"], contract["RANK"]);
        assert_eq!(contract["ROLE_RANK"], contract["RANK"]);
        for (name, value) in [
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("ROLE_WORLD_SIZE", "2"),
            ("GROUP_WORLD_SIZE", "1"),
            ("GROUP_RANK", "0"),
            ("ROLE_NAME", "default"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "4"),
            ("TORCHELASTIC_RUN_ID", "job-7"),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ] {
            assert_eq!(contract[name], value, "{name}");
        }
        let number = |name: &str| contract[name].as_str().and_then(|text| text.parse::<u32>().ok());
        assert!(number("MASTER_PORT").is_some_and(|port| (1..=65_535).contains(&port)));
        assert!(number("OMP_NUM_THREADS").is_some_and(|threads| threads >= 1));
        assert_ne!(contract["TORCHELASTIC_ERROR_FILE"], "/nonexistent");
    }
    let ports: BTreeSet<_> = seen
        .iter()
        .map(|s| s["contract"]["MASTER_PORT"].to_string())
        .collect();
    assert_eq!(ports.len(), 1, "all ranks must meet at one port");
}

#[test]
fn values_that_the_user_set_are_kept() {
    if python_is_missing() {
        return;
    }
    let launched = launch()
        .env("OMP_NUM_THREADS", "3")
        .target(repository(SCRIPT))
        .run();
    launched.expect_exit(0);
    assert_eq!(contracts(&launched)[0]["contract"]["OMP_NUM_THREADS"], "3");
}

#[test]
fn output_arrives_line_by_line_and_in_log_files() {
    if python_is_missing() {
        return;
    }
    let dir = temp_dir();
    let script = dir.path().join("talk.py");
    let text = "import sys\nprint('to out')\nprint('to err', file=sys.stderr)\nprint('no newline', end='')\n";
    std::fs::write(&script, text).expect("writable");
    let logs = dir.path().join("logs");
    let launched = launch()
        .flag("--log-dir", &logs.display().to_string())
        .target(script)
        .run();
    launched.expect_exit(0).expect_stderr("[0] to err");
    assert_eq!(launched.stdout(), ["[0] to out", "[0] no newline"]);
    let read = |name: &str| std::fs::read_to_string(logs.join("attempt_0/0").join(name)).expect("a log file");
    assert_eq!(read("stdout.log"), "to out\nno newline");
    assert_eq!(read("stderr.log"), "to err\n");
}

#[test]
fn the_heartbeats_of_the_pytorch_example_tell_a_script_that_hangs() {
    if python_is_missing() {
        return;
    }
    let dir = temp_dir();
    let script = dir.path().join("hangs.py");
    let text = "import os, threading
from heartbeat import Heartbeat
heartbeat = Heartbeat()
for step in range(3):
    heartbeat.beat(step)
if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
    threading.Event().wait()
heartbeat.beat(3, phase='saving')
print('finished')
";
    std::fs::write(&script, text).expect("writable");
    let launched = launch()
        .nproc(2)
        .env(
            "PYTHONPATH",
            repository("examples/pytorch").to_str().expect("unicode"),
        )
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .flag("--hang-timeout", "1")
        .flag("--max-restarts", "1")
        .target(script)
        .run();
    launched
        .expect_exit(0)
        .expect_stderr("rank 1 is lost: hung, no heartbeat for")
        .expect_stderr("(phase training, step 2)")
        .expect_stderr("died of SIGABRT; restart 1 of 1")
        .expect_stdout("[1] finished");
}
