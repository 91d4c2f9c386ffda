//! The examples `three-d`, `llama`, `long-context` and `moe`: a few steps of each, and, on demand, all that their READMEs say.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::harness::{Finished, Launch, ddp_train, launch, losses, metrics, repository, run_dir, temp_dir};

fn example(name: &str, ranks: u32, dir: &Path) -> Launch {
    let path = repository("examples").join(name).join("train.yaml");
    launch().nproc(ranks).dir(dir).target(path)
}

fn train(words: impl IntoIterator<Item: AsRef<OsStr>>, dir: &Path) -> Finished {
    let program = ddp_train();
    program.args(words).dir(dir).run()
}

/// What the README of `three-d` sets for one rank.
const ONE_RANK: &str = "parallel.pipeline.stages=1 parallel.tensor=1 parallel.sequence=false parallel.strategy=ddp train.grad_accumulation=8";

#[test]
fn the_three_d_example_has_the_losses_of_one_rank() {
    let dir = temp_dir();
    let few = |launch: Launch, out: &str| launch.set("train.steps=4").set(&format!("run.out_dir={out}"));
    few(example("three-d", 8, dir.path()), "eight")
        .run()
        .expect_exit(0)
        .expect_stdout("1F1B: 2 stages with 2 + 2 layers on 2 ranks, 4 micro-batches")
        .expect_stdout("zero1: optimizer state sharded over 2 ranks");
    let alone = few(example("three-d", 1, dir.path()), "one");
    let alone = ONE_RANK.split(' ').fold(alone, Launch::set);
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
        .expect_stdout("llama, 4 layers, 8 heads, width 128");
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

/// By the plan with the positions of the README, and by what a rank holds with an eighth of them.
#[test]
fn the_long_context_example_fits_eight_ranks_and_not_one() {
    let dir = temp_dir();
    let yaml = repository("examples/long-context/train.yaml")
        .display()
        .to_string();
    let plan = |ranks: &str, said: &str| {
        let context = format!("parallel.context={ranks}");
        let words = ["plan", &yaml, "--nproc-per-node", ranks, "--set", &context];
        let long = [
            "model.block_size=65536",
            "--set",
            "parallel.backend=cpu",
            "--memory",
            "512MiB",
        ];
        train(words.into_iter().chain(["--set"]).chain(long), dir.path())
            .expect_exit(0)
            .expect_stdout(said);
    };
    plan("1", "No strategy fits into 512.0 MiB");
    plan("8", "Of the strategies that fit");
    let [one, eight] = [1, 8].map(|ranks| {
        let launch = example("long-context", ranks, dir.path()).set("train.steps=1");
        let launch = launch
            .set("model.block_size=8192")
            .set(&format!("parallel.context={ranks}"));
        launch
            .set(&format!("run.out_dir=on-{ranks}"))
            .run()
            .expect_exit(0);
        metrics(&dir.path().join(format!("on-{ranks}")))[0].clone()
    });
    assert_eq!(one["loss"], eight["loss"], "forward adds up in one order");
    for (kind, part) in [("activations", 4), ("pss", 2)] {
        let [one, eight] = [&one, &eight].map(|line| line["memory"][kind].as_u64().expect("bytes"));
        assert!(0 < eight && eight < one / part, "{kind}: {eight} and {one}");
    }
}

#[test]
fn the_moe_example_has_the_losses_of_all_experts_on_each_rank() {
    let dir = temp_dir();
    let [divided, whole] = [2, 1].map(|ranks| {
        let launch = example("moe", 2, dir.path()).set("train.steps=4");
        let launch = launch.set(&format!("parallel.expert={ranks}"));
        launch
            .set(&format!("run.out_dir=on-{ranks}"))
            .run()
            .expect_exit(0);
        dir.path().join(format!("on-{ranks}"))
    });
    for (step, (found, expected)) in losses(&divided).iter().zip(losses(&whole)).enumerate() {
        let error = (found - expected).abs() / expected;
        assert!(error < 1e-5, "step {step}: {found} and {expected}");
    }
    let [divided, whole] = [divided, whole].map(|out| metrics(&out).pop().expect("a line"));
    let [held, all] = [&divided, &whole].map(|line| line["memory"]["params"].as_u64().expect("bytes"));
    assert!(
        held < all * 2 / 3,
        "{held} bytes of parameters, and {all} with all experts"
    );
    let sent = divided["wire_bytes"]["activations"].as_u64();
    assert!(sent.is_some_and(|bytes| bytes > 0), "{divided}");
}

const DOCUMENT: &str = "docs/parallelism.md";

/// Bytes in a sentence, behind its last `=` if there is one, as the document writes them: in groups of three digits.
fn numbers(text: &str) -> Vec<u64> {
    let sentence = text.split_inclusive(". ").next().unwrap_or_default();
    let sentence = sentence.split_inclusive(".\n").next().unwrap_or_default();
    let result = sentence.rsplit('=').next().unwrap_or_default();
    let words = result.split_whitespace();
    let words = words.map(|word| word.trim_matches(|c: char| !c.is_ascii_digit()));
    let grouped = words.filter(|word| word.contains(','));
    grouped
        .filter_map(|word| word.replace(',', "").parse().ok())
        .collect()
}

/// `wire_bytes.X` and `memory.X` of a section, each with the numbers right behind it, if there are any.
fn figures(section: &str) -> Vec<(&str, Vec<u64>)> {
    let paragraphs = section.split("\n\n").flat_map(|text| text.split("\n- "));
    let figures = paragraphs.flat_map(|paragraph| {
        let code_and_words: Vec<&str> = paragraph.split('`').skip(1).collect();
        let pairs = code_and_words
            .chunks_exact(2)
            .map(|pair| (pair[0], numbers(pair[1])));
        pairs.collect::<Vec<_>>()
    });
    let is_figure = |(key, numbers): &(&str, Vec<u64>)| {
        (key.starts_with("wire_bytes.") || key.starts_with("memory.")) && !numbers.is_empty()
    };
    figures.filter(is_figure).collect()
}

/// The losses of the steps of a command of the document, and its numbers of the last one.
fn tried(command: &str, settings: &[&str], dir: &Path) -> (Vec<f64>, serde_json::Value) {
    let words: Vec<&str> = command.split_whitespace().collect();
    let ranks = words[0].parse().expect("a number of ranks");
    let launch = launch().nproc(ranks).words(&words[1..]).dir(dir);
    let launch = launch.set("run.out_dir=try").set("run.overwrite=true");
    let launch = settings
        .iter()
        .fold(launch, |launch, setting| launch.set(setting));
    let example = repository("examples/single-node/train.yaml");
    launch.target(example).run().expect_exit(0);
    let out = dir.join("try");
    (losses(&out), metrics(&out).pop().expect("a line"))
}

/// All of them train on the samples of its first command, or, with experts, as all experts on each rank do, and what its sections say of them is what they send and hold.
#[test]
fn every_command_of_the_document_on_parallelism_has_the_losses_and_numbers_that_it_says() {
    let text = std::fs::read_to_string(repository(DOCUMENT)).expect("readable");
    let dir = temp_dir();
    let val = dir.path().join("val.txt");
    std::fs::write(&val, "The body of a compound statement.\n".repeat(20)).expect("writable");
    let few = ["train.steps=3", &format!("data.val={}", val.display())];
    let mut expected: Vec<f64> = Vec::new();
    let (mut commands, mut compared) = (0, 0);
    let pipe = text.lines().find_map(|line| {
        line.strip_prefix("    pipe() { try ")?
            .strip_suffix(r#" "$@"; }"#)
    });
    let pipe = pipe.expect("the command of pipelines");
    for section in text.split("\n## ").flat_map(|text| text.split("\n### ")) {
        let figures = figures(section);
        let mut tries = section
            .lines()
            .filter_map(|line| match line.strip_prefix("    pipe") {
                Some(settings) if !settings.starts_with("()") => Some(format!("{pipe}{settings}")),
                _ => line.strip_prefix("    try ").map(ToOwned::to_owned),
            });
        let Some(command) = &tries.next() else {
            assert!(figures.is_empty(), "of which command? {figures:?}");
            continue;
        };
        assert_eq!(tries.next(), None, "one command a section: {section}");
        let (found, line) = tried(command, &few, dir.path());
        if expected.is_empty() {
            // As the document has it: without validation data of its own a run reads other samples.
            let first = &tried(command, &["train.steps=20"], dir.path()).0[..3];
            let said: Vec<String> = first.iter().map(|loss| format!("{loss:.4}")).collect();
            assert!(text.contains(&said.join(", ")), "{said:?} is not in {DOCUMENT}");
            expected.clone_from(&found);
        }
        let of_experts = (command.contains("parallel.expert=2")).then(|| {
            tried(
                &command.replace("parallel.expert=2", "parallel.expert=1"),
                &few,
                dir.path(),
            )
            .0
        });
        for (found, expected) in found.iter().zip(of_experts.as_ref().unwrap_or(&expected)) {
            let error = (found - expected).abs();
            assert!(error < 1e-5 * expected, "{command}: {found} and {expected}");
        }
        for (key, said) in &figures {
            let pointer = format!("/{}", key.replace('.', "/"));
            let measured = line.pointer(&pointer).and_then(serde_json::Value::as_u64);
            let is_said = measured.is_some_and(|measured| said.contains(&measured));
            assert!(
                is_said,
                "{command}: {key} is {measured:?}, and {DOCUMENT} says {said:?}"
            );
        }
        commands += 1;
        compared += figures.len();
    }
    assert!(
        commands >= 16 && compared >= 21,
        "{commands} commands, {compared} numbers"
    );
}

/// Validation loss at the end of a whole run, in nats per byte.
fn validation_loss(name: &str, ranks: u32) -> f64 {
    let dir = temp_dir();
    example(name, ranks, dir.path()).run().expect_exit(0);
    let out: PathBuf = run_dir(dir.path(), name);
    let summary = std::fs::read(out.join("summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_slice(&summary).expect("JSON");
    summary["val_loss"].as_f64().expect("a number")
}

#[test]
#[ignore = "minutes of training: .ci/run examples"]
fn what_the_readme_of_the_examples_says_of_three_d_is_reached() {
    let loss = validation_loss("three-d", 8);
    assert!((loss - 1.90).abs() < 0.02, "{loss}");
}

#[test]
#[ignore = "minutes of training: .ci/run examples"]
fn what_the_readme_of_the_examples_says_of_long_context_and_moe_is_reached() {
    for (name, said) in [("long-context", 2.11), ("moe", 1.31)] {
        let loss = validation_loss(name, 2);
        assert!((loss - said).abs() < 0.02, "{name}: {loss}");
    }
}

#[test]
#[ignore = "minutes of training: .ci/run examples"]
fn what_the_readme_of_the_examples_says_of_llama_is_reached() {
    let loss = validation_loss("llama", 2);
    assert!((loss - 1.32).abs() < 0.02, "{loss}");
}
