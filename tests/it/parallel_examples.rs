//! The examples `three-d` and `llama`: a few steps of each, and, on demand, all that their READMEs say.

use std::path::{Path, PathBuf};

use crate::harness::{Finished, Launch, Program, launch, losses, metrics, repository, run_dir, temp_dir};

fn example(name: &str, ranks: u32, dir: &Path) -> Launch {
    let path = repository("examples").join(name).join("train.yaml");
    launch().nproc(ranks).dir(dir).target(path)
}

fn train(words: &[&str], dir: &Path) -> Finished {
    let program = Program::new(env!("CARGO_BIN_EXE_ddp-train"));
    program.args(words.iter().map(Into::into)).dir(dir).run()
}

/// What the README of `three-d` sets for one rank.
const ONE_RANK: [&str; 5] = [
    "parallel.pipeline.stages=1",
    "parallel.tensor=1",
    "parallel.sequence=false",
    "parallel.strategy=ddp",
    "train.grad_accumulation=8",
];

#[test]
fn the_three_d_example_has_the_losses_of_one_rank() {
    let dir = temp_dir();
    let few = |launch: Launch, out: &str| launch.set("train.steps=4").set(&format!("run.out_dir={out}"));
    few(example("three-d", 8, dir.path()), "eight")
        .run()
        .expect_exit(0)
        .expect_stdout("1F1B: 2 stages of 2, 2 layers on 2 ranks, 4 micro-batches")
        .expect_stdout("zero1: optimizer state sharded over 2 ranks");
    let alone = few(example("three-d", 1, dir.path()), "one");
    let alone = ONE_RANK.iter().fold(alone, |launch, word| launch.set(word));
    alone.run().expect_exit(0);
    let (eight, one) = (dir.path().join("eight"), dir.path().join("one"));
    assert_eq!(losses(&one).len(), 4);
    for (step, (found, expected)) in losses(&eight).iter().zip(losses(&one)).enumerate() {
        let error = (found - expected).abs() / expected;
        assert!(error < 1e-5, "step {step}: {found} and {expected}");
    }
    let line = &metrics(&eight)[3];
    assert_eq!(line["world_size"], 8);
    for kind in ["grads", "params", "activations"] {
        let bytes = line["wire_bytes"][kind].as_u64();
        assert!(bytes.is_some_and(|bytes| bytes > 0), "{kind}: {line}");
    }
}

#[test]
fn the_llama_example_trains_and_is_exported_as_a_llama() {
    let dir = temp_dir();
    example("llama", 2, dir.path())
        .set("train.steps=4")
        .set("run.out_dir=out")
        .run()
        .expect_exit(0)
        .expect_stdout("llama, 4 layers, 4 heads, width 128");
    let losses = losses(&dir.path().join("out"));
    let uniform = 256_f64.ln();
    assert!(
        (losses[0] - uniform).abs() < 0.5,
        "an untrained model guesses evenly: {losses:?}"
    );
    assert!(losses[3] < losses[0], "{losses:?}");
    train(&["ckpt", "export", "out", "--to", "hf"], dir.path()).expect_exit(0);
    let config = std::fs::read(dir.path().join("hf/config.json")).expect("a configuration");
    let config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    assert_eq!(config["model_type"], "llama");
    assert_eq!(config["num_key_value_heads"], 4);
}

const DOCUMENT: &str = "docs/parallelism.md";

/// A number as the document writes it.
fn grouped(bytes: u64) -> String {
    let digits = bytes.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    let groups: Vec<_> = groups.map(|group| String::from_utf8_lossy(group)).collect();
    groups.join(",")
}

/// All of them train on the samples of its first command, and what they send is in the text.
#[test]
fn every_command_of_the_document_on_parallelism_has_the_losses_of_one_rank() {
    let text = std::fs::read_to_string(repository(DOCUMENT)).expect("readable");
    let commands = text.lines().filter_map(|line| line.strip_prefix("    try "));
    let dir = temp_dir();
    let held_out = dir.path().join("val.txt");
    std::fs::write(&held_out, "The body of a compound statement.\n".repeat(20)).expect("writable");
    let mut expected: Vec<f64> = Vec::new();
    let mut seen = 0;
    for command in commands {
        let words: Vec<&str> = command.split_whitespace().collect();
        let ranks = words[0].parse().expect("a number of ranks");
        let launch = launch().nproc(ranks).words(&words[1..]).dir(dir.path());
        let launch = launch
            .set("train.steps=2")
            .set("run.out_dir=try")
            .set("run.overwrite=true");
        let launch = launch.set(&format!("data.val={}", held_out.display()));
        launch
            .target(repository("examples/single-node/train.yaml"))
            .run()
            .expect_exit(0);
        let found = losses(&dir.path().join("try"));
        if expected.is_empty() {
            expected.clone_from(&found);
        }
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 1e-5 * expected,
                "{command}: {found} and {expected}"
            );
        }
        let sent = &metrics(&dir.path().join("try"))[1]["wire_bytes"];
        // Of the layouts on eight ranks the document has the formulas only.
        for kind in ["grads", "activations"] {
            let bytes = grouped(sent[kind].as_u64().expect("a number"));
            let is_said = ranks > 2 || text.contains(&bytes);
            assert!(is_said, "{command}: {kind} {bytes} is not in {DOCUMENT}");
        }
        seen += 1;
    }
    assert!(seen >= 14, "{seen} commands");
}

/// Nats per byte at the end of a whole run: of the text's pairs of bytes, and of the model.
fn bigram_and_validation(name: &str, ranks: u32) -> [f64; 2] {
    let dir = temp_dir();
    example(name, ranks, dir.path()).run().expect_exit(0);
    let out: PathBuf = run_dir(dir.path(), name);
    let summary = std::fs::read(out.join("summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_slice(&summary).expect("JSON");
    ["/entropies/bigram", "/val_loss"].map(|pointer| {
        let number = summary.pointer(pointer).and_then(serde_json::Value::as_f64);
        number.expect("a number")
    })
}

#[test]
#[ignore = "minutes of training: .ci/run examples"]
fn what_the_readme_of_the_examples_says_of_three_d_is_reached() {
    let [bigram, loss] = bigram_and_validation("three-d", 8);
    assert!(loss < bigram - 0.5, "{loss} against {bigram}");
    assert!((loss - 1.90).abs() < 0.02, "{loss}");
}

#[test]
#[ignore = "minutes of training: .ci/run examples"]
fn what_the_readme_of_the_examples_says_of_llama_is_reached() {
    let [bigram, loss] = bigram_and_validation("llama", 2);
    assert!(loss < bigram - 1.0, "{loss} against {bigram}");
    assert!((loss - 1.32).abs() < 0.02, "{loss}");
}
