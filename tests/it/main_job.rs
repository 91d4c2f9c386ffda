//! The command of the README, with few steps.

use crate::harness::{
    Daemon, Launch, Program, ReservedPort, TinyJob, binaries, expect_same_losses, launch, losses, metrics,
    parameters, repository, run_dir, temp_dir,
};

fn main_job() -> Launch {
    launch()
        .nproc(2)
        .set("train.steps=20")
        .target(repository("examples/single-node/train.yaml"))
}

#[test]
fn the_readmes_command_trains() {
    let dir = temp_dir();
    main_job().dir(dir.path()).run().expect_exit(0);
    let out = run_dir(dir.path(), "single-node");
    let lines = metrics(&out);
    assert_eq!(lines.len(), 20);
    for (index, line) in lines.iter().enumerate() {
        assert_eq!(
            line["step"].as_u64(),
            Some(index as u64 + 1),
            "steps are counted from 1 when they are done"
        );
        assert_eq!(line["world_size"], 2);
        assert!(
            line["tokens_per_s"].as_f64().is_some_and(|speed| speed > 0.0),
            "{line}"
        );
        // Of 4 layers of width 128, a head of 256 bytes, and attention to 64.5 positions on average.
        let arithmetic = 3.0 * (2.0 * (4.0 * 12.0 * 16384.0 + 256.0 * 128.0) + 4.0 * 4.0 * 128.0 * 64.5);
        let rate = |key: &str| line[key].as_f64().expect("a rate");
        let found = rate("model_flops_per_s") / rate("tokens_per_s");
        assert!((found / arithmetic - 1.0).abs() < 1e-12, "{found}: {line}");
        assert_eq!(line["mfu"], serde_json::Value::Null, "a CPU has no data sheet");
        assert!(
            line["wire_bytes"]["grads"]
                .as_u64()
                .is_some_and(|bytes| bytes > 0),
            "{line}"
        );
    }
    let loss = |index: usize| lines[index]["loss"].as_f64().expect("a loss");
    let uniform = 256_f64.ln();
    assert!(
        (loss(0) - uniform).abs() < 0.5,
        "an untrained model guesses evenly: {} against {uniform}",
        loss(0)
    );
    assert!(
        loss(19) < loss(0) - 0.5,
        "from {} to {}: it does not learn",
        loss(0),
        loss(19)
    );
    assert!(out.join("summary.json").is_file());
    assert!(!parameters(&out).is_empty());
    assert!(out.join("logs/attempt_0/0/stdout.log").is_file());
}

#[test]
fn the_script_of_the_two_nodes_example_runs() {
    let dir = temp_dir();
    let port = ReservedPort::new();
    let script = repository("examples/two-nodes/run.sh");
    for first in [
        &["--set", "train.steps=2"][..],
        &["--set", "train.steps=2", "--separate-daemon"],
    ] {
        let script = Program::new(&script)
            .args(first.iter())
            .env("DDP_BIN", binaries())
            .env("DDP_PORT", port.endpoint.rsplit(':').next().unwrap_or_default())
            .dir(dir.path());
        script.run().expect_exit(0);
    }
    let runs = std::fs::read_dir(dir.path().join("runs/two-nodes")).expect("a folder of runs");
    assert_eq!(runs.count(), 2);
}

#[test]
fn the_script_of_the_elastic_example_runs() {
    let dir = temp_dir();
    let script = Program::new(repository("examples/elastic/run.sh"))
        .env("DDP_BIN", binaries())
        .env("DDP_OUT", "out")
        .args(["--set", "train.steps=60"])
        .dir(dir.path());
    script
        .run()
        .expect_exit(0)
        .expect_stdout("the first node finished alone");
    let lines = metrics(&dir.path().join("out"));
    let mut worlds: Vec<_> = lines.iter().map(|line| line["world_size"].as_u64()).collect();
    worlds.dedup();
    assert_eq!(worlds, [Some(2), Some(4), Some(2)]);
    for (index, line) in lines.iter().enumerate() {
        // 16 samples of 128 tokens a step, whichever nodes took part.
        assert_eq!(line["tokens"].as_u64(), Some(2048 * (index as u64 + 1)));
    }
}

#[test]
fn two_nodes_train_as_one() {
    let one_node = TinyJob::new();
    one_node.launch().nproc(4).run().expect_exit(0);
    let expected = losses(&one_node.out());
    assert_eq!(expected.len(), 40);

    let daemon = Daemon::start();
    expect_same_losses(
        "a daemon of its own",
        &train_on_two_nodes(&daemon.endpoint),
        &expected,
    );
    daemon.stop().expect_exit(0);
    let port = ReservedPort::new();
    expect_same_losses("one node hosts", &train_on_two_nodes(&port.endpoint), &expected);
}

/// Losses of two nodes of two ranks that meet at `endpoint`.
#[track_caller]
fn train_on_two_nodes(endpoint: &str) -> Vec<f64> {
    let job = TinyJob::new();
    let node = |rank: &str| {
        let node = launch()
            .nproc(2)
            .node_of(2, endpoint, "two")
            .flag("--node-rank", rank);
        node.dir(job.dir()).target("tiny.yaml").start()
    };
    let (one, other) = (node("0"), node("1"));
    one.finish().expect_exit(0);
    other.finish().expect_exit(0);
    losses(&job.out())
}

/// The products of these ranks round in other places.
#[test]
fn muon_keeps_ranks_on_unlike_processors_equal() {
    let job = TinyJob::new();
    let port = ReservedPort::new();
    let node = |rank: &str, isa: &str| {
        let node = launch().nproc(1).node_of(2, &port.endpoint, "unlike");
        let node = node.flag("--node-rank", rank).env("DDP_ISA", isa).dir(job.dir());
        let muon = node
            .flag("--set", "train.optimizer.kind=muon")
            .flag("--set", "train.verify_every=1");
        muon.target("tiny.yaml").start()
    };
    let (one, other) = (node("0", ""), node("1", "baseline"));
    one.finish().expect_exit(0);
    other.finish().expect_exit(0);
}

#[test]
fn an_instruction_set_can_be_named_and_one_that_is_missing_is_refused() {
    let with = |isa: &str| {
        let job = TinyJob::new();
        let run = job.launch().nproc(1).env("DDP_ISA", isa).run();
        (run, losses(&job.out()))
    };
    let refused = with("avx9").0;
    refused
        .expect_exit(2)
        .expect_stderr("DDP_ISA is `avx9`, but this machine has `baseline`");
    let job = TinyJob::new();
    job.launch().nproc(1).run().expect_exit(0);
    let best = losses(&job.out());
    let (run, baseline) = with("baseline");
    run.expect_exit(0);
    assert_eq!(baseline.len(), best.len());
    for (step, (found, expected)) in baseline.iter().zip(&best).enumerate() {
        assert!(
            (found / expected - 1.0).abs() < 1e-3,
            "step {step}: {found}, {expected}"
        );
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        assert_ne!(
            baseline, best,
            "products without fused multiply-add round in other places"
        );
    }
}
