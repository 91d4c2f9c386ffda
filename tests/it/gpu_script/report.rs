//! `tests/gpu/report.py` on logs that nothing ran for, and the digest that the script ends with.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::json;
use tempfile::TempDir;

use super::{packed, script, text};
use crate::harness::{Finished, Program, python_is_missing, repository, temp_dir};

/// Lines of a digest at most.
const DIGEST_LINES: usize = 25;

/// Metrics of a run of the script, the same in each step.
fn metrics(logs: &Path, run: &str, ranks: u32, step_ms: f64) {
    let line = json!({
        "step": 1,
        "world_size": ranks,
        "tokens_per_s": 1e6 / step_ms,
        "step_ms": step_ms,
        "comm_ms": 20.0,
        "comm_exposed_ms": 5.0,
        "memory": { "device_peak": 3_u64 << 30 },
    });
    fs::create_dir(logs.join(run)).expect("a folder");
    fs::write(
        logs.join(run).join("metrics.jsonl"),
        format!("{line}\n").repeat(30),
    )
    .expect("writable");
    fs::write(logs.join(format!("{run}.log")), "").expect("writable");
}

/// Logs of `speed`, `peers` and `overlap`.
fn logs() -> TempDir {
    let logs = temp_dir();
    metrics(logs.path(), "speed-124m", 1, 10.0);
    metrics(logs.path(), "speed-124m-fused", 1, 8.0);
    metrics(logs.path(), "overlap-alone", 1, 100.0);
    metrics(logs.path(), "overlap-true", 2, 125.0);
    let peers = json!({ "124m": { "compiled-flash": 60_000.0, "compiled-cudnn": 80_000.0, "eager-flash": 50_000.0 } });
    let kernels = "bf16 product of 8192 × 8192: 700 TFLOP/s\n";
    let doctor = "  device 0  a card\n  device 1  a card\n";
    for (name, text) in [
        ("peers.json", peers.to_string().as_str()),
        ("gpu_kernels.log", kernels),
        ("doctor.log", doctor),
    ] {
        fs::write(logs.path().join(name), text).expect("writable");
    }
    logs
}

fn report(command: &str, logs: &Path) -> Finished {
    let arguments: [OsString; 3] = [
        repository("tests/gpu/report.py").into(),
        command.into(),
        logs.into(),
    ];
    let finished = Program::new("python3").args(arguments).run();
    finished.expect_exit(0);
    finished
}

/// The words of the only line that begins so.
#[track_caller]
fn row<'a>(finished: &'a Finished, beginning: &str) -> Vec<&'a str> {
    let mut lines = finished
        .stdout()
        .iter()
        .filter(|line| line.starts_with(beginning));
    match (lines.next(), lines.next()) {
        (Some(line), None) => line[beginning.len()..].split_whitespace().collect(),
        _ => panic!("not one `{beginning}`: {}", finished.transcript()),
    }
}

#[test]
fn both_back_ends_of_pytorch_are_shown_and_the_better_one_is_compared_with() {
    if python_is_missing() {
        return;
    }
    let logs = logs();
    let table = report("table", logs.path());
    let heading = row(&table, "GPT-2 ");
    let plain = row(&table, "124m ");
    let fused = row(&table, "124m-fused ");
    // `GPU GiB` and `of ceiling` are two words of the heading each.
    assert_eq!(
        heading[heading.len() - 6..],
        [
            "compiled-flash",
            "compiled-cudnn",
            "eager-flash",
            "eager-cudnn",
            "to",
            "best"
        ]
    );
    assert_eq!(
        plain[plain.len() - 5..],
        ["60000", "80000", "50000", "-", "1.250"]
    );
    assert_eq!(fused.last(), Some(&"1.562"), "of the same rate of PyTorch");
    assert_eq!(row(&table, "350m ")[0], "-", "without a run");
}

#[test]
fn steps_of_several_ranks_are_compared_with_that_of_one_beside_their_exposed_communication() {
    if python_is_missing() {
        return;
    }
    let logs = logs();
    let table = report("table", logs.path());
    assert_eq!(
        row(&table, "2 ranks on 2 cards ")[..4],
        ["ms/step", "to", "one", "GPU"]
    );
    assert_eq!(row(&table, "one rank alone ")[..2], ["100.0", "1.000"]);
    assert_eq!(
        row(&table, "as it trains "),
        ["125.0", "1.250", "20.0", "5.0", "75%"]
    );
}

#[test]
fn a_digest_has_failures_first_then_ratios_and_never_more_lines_than_are_read() {
    if python_is_missing() {
        return;
    }
    let logs = logs();
    let digest_of = |failures: usize| {
        let mut results = "doctor                   ok                        1 s\n".to_owned();
        for number in 0..failures {
            writeln!(
                results,
                "check-{number:02}                 FAILED (1)                1 s"
            )
            .expect("a text");
        }
        fs::write(logs.path().join("results.txt"), results).expect("writable");
        report("digest", logs.path()).stdout().to_vec()
    };
    let ratios = [
        "GPT-2 124m: 100000 tokens/s, 12.3% of the measured product ceiling, 1.250 x PyTorch compiled-cudnn",
        "GPT-2 124m-fused: 125000 tokens/s, 15.4% of the measured product ceiling, 1.562 x PyTorch compiled-cudnn, \
         1.250 x 124m without the switch",
        "2 ranks on 2 cards: 1.250 x the step of one GPU, 5.0 ms of it exposed communication",
    ];
    let short = digest_of(1);
    assert_eq!(short[0], "DIGEST: 1 checks ok, 1 not");
    assert!(short[1].starts_with("check-00 "), "{short:?}");
    assert_eq!(short[2..], ratios);
    let long = digest_of(40);
    assert_eq!(long.len(), DIGEST_LINES);
    assert_eq!(long[0], "DIGEST: 1 checks ok, 40 not");
    assert!(long[21].starts_with("and 20 more, in "), "{long:?}");
    assert_eq!(long[22..], ratios);
}

#[test]
fn the_last_lines_of_the_script_are_its_digest() {
    if python_is_missing() {
        return;
    }
    let (packed, logs) = (packed(), temp_dir());
    fs::copy(repository("tests/gpu/report.py"), packed.path().join("report.py")).expect("a copy");
    let finished = script(packed.path(), logs.path(), "").run();
    let digest = text(logs.path(), "digest.txt");
    let digest: Vec<_> = digest.lines().collect();
    assert!(digest[0].starts_with("DIGEST: "), "{}", finished.transcript());
    assert!(digest.len() <= DIGEST_LINES);
    assert!(digest[1].contains("FAILED"), "{digest:?}");
    assert!(
        finished
            .stdout()
            .ends_with(&digest.iter().map(ToString::to_string).collect::<Vec<_>>()),
        "{}",
        finished.transcript()
    );
}
