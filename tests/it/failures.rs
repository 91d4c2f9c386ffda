//! All failures of a job, in one order on every node.

use std::path::Path;

use serde_json::Value;

use crate::harness::{Launch, ReservedPort, launch, temp_dir};

/// Works until the file of its rank and start is there, and ends with that file's content as its code.
const SCRIPT: &str = r#"name="$RANK.$TORCHELASTIC_RESTART_COUNT"; echo "at work $name"
    until [ -e "$DIR/$name" ]; do sleep 0.02; done; exit "$(cat "$DIR/$name")""#;

/// Makes a rank end, whole or not at all.
fn end(dir: &Path, name: &str, code: u32) {
    let (draft, file) = (dir.join(format!("{name}.tmp")), dir.join(name));
    std::fs::write(&draft, code.to_string()).expect("writable");
    std::fs::rename(draft, file).expect("the same folder");
}

fn error_file(logs: &Path) -> Value {
    let bytes = std::fs::read(logs.join("error.json")).expect("written");
    serde_json::from_slice(&bytes).expect("JSON")
}

/// The report ends with what failed in the generation before.
fn expect_earlier(report: &str) {
    let is_earlier = |line: &&str| line.contains("]   earlier, in generation 1: rank 1 (node `");
    let earlier = report
        .lines()
        .find(is_earlier)
        .unwrap_or_else(|| panic!("{report}"));
    assert!(
        earlier.contains("exited with code 42") && earlier.ends_with("attempt_0/1/stderr.log"),
        "{earlier}"
    );
}

#[test]
fn both_nodes_tell_the_same_failures_in_the_same_order() {
    let (dir, port) = (temp_dir(), ReservedPort::new());
    let (logs_a, logs_b) = (dir.path().join("a"), dir.path().join("b"));
    let node = |endpoint: &str, rank: &str, logs: &Path| -> Launch {
        launch()
            .node_of(2, endpoint, "order")
            .flag("--node-rank", rank)
            .flag("--max-restarts", "1")
            .flag("--log-dir", &logs)
            .env("DIR", dir.path())
            .shell(SCRIPT)
    };
    let mut b = node(&port.endpoint, "1", &logs_b)
        .nproc(2)
        .flag("--rdzv-conf", "is_host=1")
        .start();
    let mut a = node(&port.endpoint, "0", &logs_a)
        .flag("--rdzv-conf", "is_host=0")
        .start();
    a.wait_for("at work 0.0");
    b.wait_for("at work 1.0");
    b.wait_for("at work 2.0");
    end(dir.path(), "1.0", 42);
    a.wait_for("at work 0.1");
    b.wait_for("at work 1.1");
    b.wait_for("at work 2.1");
    end(dir.path(), "0.1", 7);
    let (a, b) = (a.finish(), b.finish());
    for node in [&a, &b] {
        node.expect_exit(7).expect_stderr("first failure: rank 0");
        expect_earlier(&node.stderr());
    }

    let (a, b) = (error_file(&logs_a), error_file(&logs_b));
    // What the daemon listed; each node's own workers that ended after the verdict follow.
    let listed = |file: &serde_json::Value| {
        let all = file["failures"].as_array().expect("a list").clone();
        let listed = all.into_iter().filter(|one| !one["arrived_ns"].is_null());
        listed.collect::<Vec<_>>()
    };
    let failures = listed(&a);
    assert_eq!(failures, listed(&b));
    let own = b["failures"]
        .as_array()
        .expect("a list")
        .iter()
        .skip(failures.len());
    assert!(
        own.clone().count() <= 2 && own.clone().all(|one| one["generation"] == 2),
        "{b}"
    );
    let by_themselves: Vec<_> = failures
        .iter()
        .filter(|failure| failure["stopped_with"].is_null())
        .map(|failure| (&failure["rank"], &failure["exit_code"], &failure["generation"]))
        .collect();
    let value = |number: u64| Value::from(number);
    assert_eq!(
        by_themselves,
        [
            (&value(1), &value(42), &value(1)),
            (&value(0), &value(7), &value(2))
        ],
        "{a:#}"
    );
    assert_eq!(failures[0]["arrived_ns"], 0);
    assert!(failures[1]["arrived_ns"].as_u64() > Some(0), "{a:#}");
    assert_eq!(a["first_failure"]["rank"], 0);
}

#[test]
fn a_worker_that_changes_its_directory_keeps_its_error_file() {
    let script = r#"cd /; echo '{"message": "no data in /"}' > "$TORCHELASTIC_ERROR_FILE"; exit 3"#;
    let dir = temp_dir();
    let run = |launch: Launch| {
        let finished = launch.dir(dir.path()).shell(script).run();
        finished.expect_exit(3).expect_stderr("no data in /");
    };
    run(launch().flag("--log-dir", "logs"));
    run(launch().env("TMPDIR", "."));
    let left = std::fs::read_dir(dir.path()).expect("readable").flatten();
    let names: Vec<_> = left.map(|entry| entry.file_name()).collect();
    assert_eq!(names, ["logs"], "the folder of error files is removed");
    // Files were asked for, but no place.
    run(launch().env("TMPDIR", ".").words(["-r", "3"]));
}
