//! `ddp-train generate` and `ddp-train eval` on the checkpoints of real runs.

use std::io::Read as _;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{Finished, Program, Running, TinyJob, ddp_train, repository, temp_dir};

/// The command in `line`, whose words are separated by spaces.
fn program(dir: &Path, line: &str) -> Program {
    ddp_train().dir(dir).args(line.split(' '))
}

fn run(dir: &Path, line: &str) -> Finished {
    program(dir, line).run()
}

fn json(finished: &Finished) -> Value {
    finished.expect_exit(0);
    serde_json::from_str(&finished.stdout().join("\n")).expect("JSON")
}

/// Two ranks learn the 61 characters that follow each other in the tiny text.
fn trained() -> TinyJob {
    let job = TinyJob::with(|yaml| {
        yaml.replace("steps: 40", "steps: 150")
            .replace("micro_batch: 2", "micro_batch: 8")
            .replace("checkpoint_every: 5", "checkpoint_every: 50")
            .replace("lr: 1.0e-3", "lr: 1.0e-2")
    });
    job.launch().nproc(2).run().expect_exit(0);
    job
}

/// So many characters from one on.
fn sequence(first: u8, count: usize) -> String {
    let first = u32::from(first - b'0');
    let nth = |i: usize| char::from(b'0' + ((first as usize + i) % 61) as u8);
    (0..count).map(nth).collect()
}

#[test]
fn a_trained_model_continues_its_text() {
    let job = trained();
    let words = "generate out --prompt 012345 --temperature 0";
    let made = run(job.dir(), &format!("{words} --max-tokens 120"));
    made.expect_exit(0).expect_stderr("120 tokens, ");
    made.expect_stderr(" tokens/s, the first after ");
    assert_eq!(made.stdout().concat(), sequence(b'0', 126));
    // From standard input, and of an earlier step, which knows less.
    let made = program(job.dir(), "generate out --prompt - --temperature 0");
    let made = made.input("ABC").run();
    made.expect_exit(0);
    assert_eq!(made.stdout().concat(), sequence(b'A', 203));
    let words = format!("{words} --step 50 --json --max-tokens 20");
    let shown = json(&run(job.dir(), &words));
    assert_eq!(
        (&shown["prompt"], &shown["tokens"]),
        (&"012345".into(), &20.into())
    );
    assert_eq!(shown["ended_by"], "max_tokens");
    assert!(shown["first_token_ms"].as_f64() > Some(0.0) && shown["tokens_per_s"].as_f64() > Some(0.0));
}

#[test]
fn a_text_can_be_made_again_by_the_seed_that_is_shown() {
    let job = trained_for_a_step();
    let words = "generate out --prompt 0 --temperature 3";
    let made = run(job.dir(), words);
    made.expect_exit(0);
    let report = made.stderr();
    let seed = report.trim().rsplit(' ').next().expect("a seed");
    let again = run(job.dir(), &format!("{words} --seed {seed}"));
    assert_eq!(again.stdout(), made.stdout());
}

#[test]
fn evaluation_says_what_the_run_said() {
    let job = trained();
    let summary = std::fs::read(job.out().join("summary.json")).expect("a summary");
    let summary: Value = serde_json::from_slice(&summary).expect("JSON");
    let expected = summary["val_loss"].as_f64().expect("a loss");
    let shown = json(&run(job.dir(), "eval out --json"));
    let loss = shown["loss"].as_f64().expect("a loss");
    assert!((loss - expected).abs() < 1e-12, "{loss}, the run said {expected}");
    assert_eq!(
        (&shown["step"], &shown["bytes_per_token"]),
        (&150.into(), &1.0.into())
    );
    // A tenth of 8192 bytes is 819, of which the last 19 make no sample of 32 and a target.
    assert_eq!(shown["tokens"], 800);
    let shown = run(job.dir(), "eval out");
    shown
        .expect_exit(0)
        .expect_stdout("text.txt: its last tenth, held out of training")
        .expect_stdout(&format!("loss           {expected:.4} nats/byte"))
        .expect_stdout(&format!("perplexity     {:.4}", expected.exp()))
        .expect_stdout(&format!("bits per byte  {:.4}", expected / 2_f64.ln()))
        .expect_stdout("tokens         800, in samples of 32");
    // The same text by its name, in other portions, and a part of it.
    let words = "eval out/checkpoints/step_00000150 --json --data text.txt";
    let whole = json(&run(job.dir(), words));
    assert_eq!(
        (&whole["tokens"], &whole["held_out"]),
        (&8160.into(), &false.into())
    );
    let part = json(&run(job.dir(), &format!("{words} --tokens 100 --micro-batch 3")));
    assert_eq!(part["tokens"], 128);
    // Another text is another matter.
    std::fs::write(job.dir().join("other.txt"), "zyx".repeat(50)).expect("writable");
    let other = json(&run(job.dir(), "eval out --json --data other.txt text.txt"));
    assert!(other["loss"].as_f64() > whole["loss"].as_f64());
    assert_eq!(other["files"], 2);
}

/// A run that is there.
fn trained_for_a_step() -> TinyJob {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 1"));
    job.launch().nproc(1).run().expect_exit(0);
    job
}

#[test]
fn what_cannot_be_done_is_refused_in_words() {
    let job = trained_for_a_step();
    let refused = |line: &str, said: &str| {
        run(job.dir(), line).expect_exit(2).expect_stderr(said);
    };
    refused("generate nowhere --prompt a", "error: `nowhere` does not exist");
    refused("eval .", "error: `.` holds no checkpoint");
    refused(
        "eval .",
        "hint: pass one of the runs in this directory, newest first: `./out`",
    );
    refused("eval out --step 7", "holds no checkpoint");
    refused("generate out", "--prompt <TEXT>");
    refused(
        "generate out --prompt=",
        "error: the prompt has 0 tokens, and the model takes 1 to 32",
    );
    refused(
        "generate out --prompt a --temperature -1",
        "invalid value '-1' for '--temperature <T>': expected a number of at least 0, such as 0.8",
    );
    let long = "x".repeat(33);
    refused(
        &format!("generate out --prompt {long}"),
        "error: the prompt has 33 tokens, and the model takes 1 to 32",
    );
    let share = "expected a number above 0 and at most 1, such as 0.9";
    let temperature = "expected a number of at least 0, such as 0.8";
    for (flag, value, said) in [
        ("--top-p", "0", share),
        ("--top-p", "1.5", share),
        ("--top-p", "nan", share),
        ("--temperature", "-1", temperature),
        ("--temperature", "inf", temperature),
        ("--top-k", "0", "expected a whole number, 1 or more"),
        ("--max-tokens", "0", "expected a whole number, 1 or more"),
        (
            "--tokenizer",
            "words",
            "expected `bytes`, `gpt2` or the path of a `tokenizer.json`",
        ),
        ("--device", "tpu", "[possible values: cpu, gpu]"),
        ("--precision", "int4", "expected `f32` or `bf16`"),
    ] {
        let flag = format!("{flag}={value}");
        refused(&format!("generate out --prompt a {flag}"), said);
    }
}

#[test]
fn data_and_tokenizers_that_do_not_fit_are_refused_in_words() {
    let job = trained_for_a_step();
    let refused = |line: &str, said: &str| {
        run(job.dir(), line).expect_exit(2).expect_stderr(said);
    };
    // A tokenizer with more tokens than the model: the first one that it does not know is named.
    let words = ["--prompt", "Hello world", "--tokenizer", "gpt2"];
    let unknown = program(job.dir(), "generate out").args(words).run();
    unknown
        .expect_exit(2)
        .expect_stderr("error: token 15496 is outside of the model's vocabulary of 256");
    std::fs::write(job.dir().join("short.txt"), "too short").expect("writable");
    refused(
        "eval out --data short.txt",
        "error: `short.txt` has 9 tokens, a sample of this model needs 33",
    );
    refused(
        "eval out --data none.txt",
        "error: `none.txt` cannot be read: No such file or directory",
    );
    refused(
        "eval out --data none.txt",
        "hint: relative paths after `--data` are resolved from the current directory",
    );
    // Tokens that the model does not know are met in a file, too.
    std::fs::write(job.dir().join("words.txt"), "Hello world ".repeat(50)).expect("writable");
    let made = "tokenize --tokenizer gpt2 -o words.safetensors words.txt";
    run(job.dir(), made).expect_exit(0);
    refused(
        "eval out --tokenizer gpt2 --data words.safetensors",
        "error: token 50256 is outside of the model's vocabulary of 256",
    );
    // The run's own data, changed and gone.
    let text = job.dir().join("text.txt");
    let changed = std::fs::read_to_string(&text)
        .expect("readable")
        .replace('7', "8");
    std::fs::write(&text, changed).expect("writable");
    refused(
        "eval out",
        "text.txt` has changed since the run was trained on it",
    );
    std::fs::remove_file(&text).expect("ours");
    refused("eval out", "hint: pass the text or the token files with `--data`");
}

#[test]
fn validation_data_that_has_changed_is_refused() {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 1"));
    let val = job.dir().join("val.txt");
    std::fs::write(&val, "0123456789".repeat(20)).expect("writable");
    job.launch().nproc(1).set("data.val=val.txt").run().expect_exit(0);
    assert_eq!(json(&run(job.dir(), "eval out --json"))["tokens"], 192);
    std::fs::write(&val, "0123456788".repeat(20)).expect("writable");
    run(job.dir(), "eval out")
        .expect_exit(2)
        .expect_stderr("val.txt` has changed since the run validated on it: it has 200 tokens, hash ");
    let named = "eval out --data val.txt";
    run(job.dir(), named).expect_exit(0);
}

#[test]
fn a_model_that_has_diverged_is_refused() {
    let job = TinyJob::with(|yaml| {
        yaml.replace("steps: 40", "steps: 1")
            .replace("lr: 1.0e-3", "lr: 1.0e+38")
    });
    job.launch().nproc(1).run().expect_exit(0);
    for (words, what) in [("eval out", "losses"), ("generate out --prompt 0", "logits")] {
        run(job.dir(), words)
            .expect_exit(2)
            .expect_stderr(&format!("error: the model's {what} are not finite"))
            .expect_stderr("hint: training had diverged before this checkpoint");
    }
}

/// A run of two steps with a tokenizer of four words, whose file is in the job's directory.
fn trained_on_words() -> TinyJob {
    let job = TinyJob::with(|yaml| {
        yaml.replace("n_embd: 32, block_size: 32", "n_embd: 8, block_size: 8")
            .replace(
                "train: text.txt",
                "train: words.safetensors, tokenizer: words.json",
            )
            .replace("steps: 40", "steps: 2")
    });
    let words = r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "red": 1, "green": 2, "blue": 3}, "unk_token": "[UNK]"}}"#;
    std::fs::write(job.dir().join("words.json"), words).expect("writable");
    std::fs::write(job.dir().join("words.txt"), "red green blue ".repeat(100)).expect("writable");
    let made = "tokenize --tokenizer words.json -o words.safetensors words.txt";
    run(job.dir(), made).expect_exit(0);
    job.launch().nproc(1).run().expect_exit(0);
    job
}

#[test]
fn a_word_that_is_named_ends_the_text() {
    let job = trained_on_words();
    let ended = |word: &str| {
        let words = format!("generate out --prompt red --json --seed 1 --end-of-text {word}");
        run(job.dir(), &words)
    };
    let shown = json(&ended("blue"));
    assert_eq!(shown["ended_by"], "end_of_text", "{shown}");
    assert!(
        !shown["text"].as_str().expect("a text").contains("blue"),
        "{shown}"
    );
    ended("grey")
        .expect_exit(2)
        .expect_stderr("error: `--end-of-text grey`: `");
}

#[test]
fn a_tokenizer_of_a_file_is_found_again() {
    let job = trained_on_words();
    let file = job.dir().join("words.json");
    let elsewhere = temp_dir();
    let out = job.out().display().to_string();
    let words = format!("generate {out} --json --max-tokens 20 --prompt red");
    let shown = json(&run(elsewhere.path(), &words));
    let text = shown["text"].as_str().expect("a text");
    assert!(
        text.split_whitespace()
            .all(|word| ["[UNK]", "red", "green", "blue"].contains(&word)),
        "{text}"
    );
    // Gone, it has to be named.
    let moved = job.dir().join("moved.json");
    std::fs::rename(&file, &moved).expect("ours");
    run(elsewhere.path(), &words)
        .expect_exit(2)
        .expect_stderr("error: the run's tokenizer is not available")
        .expect_stderr("hint: set it with `--tokenizer bytes`");
    let moved = moved.display().to_string();
    let shown = run(elsewhere.path(), &format!("{words} --tokenizer {moved}"));
    json(&shown);
    // Another one in its place is none.
    let other = std::fs::read_to_string(&moved)
        .expect("readable")
        .replace("blue", "grey");
    std::fs::write(&file, other).expect("writable");
    run(elsewhere.path(), &words)
        .expect_exit(2)
        .expect_stderr("words.json` has changed since the run, which used a file with hash ");
}

/// A text without an end.
fn endless(job: &TinyJob, stdout: std::io::PipeWriter) -> Running {
    let words = "generate out --prompt 012 --max-tokens 1000000000";
    program(job.dir(), words)
        .stdout_to(std::os::fd::OwnedFd::from(stdout).into())
        .start()
}

#[test]
fn the_text_streams_and_ends_quietly_with_its_reader_or_by_an_interrupt() {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 1"));
    job.launch().nproc(1).run().expect_exit(0);
    for is_interrupted in [false, true] {
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let running = endless(&job, writer);
        let mut begun = [0; 40];
        reader.read_exact(&mut begun).expect("text, while it is made");
        assert_eq!(&begun[..3], b"012");
        if is_interrupted {
            running.signal(Signal::SIGINT);
        } else {
            drop(reader);
        }
        let ended = running.finish();
        assert!(ended.stderr().is_empty(), "{:?}", ended.stderr());
        if is_interrupted {
            ended.expect_killed_by(Signal::SIGINT);
        } else {
            ended.expect_exit(0);
        }
    }
}

#[test]
fn gpt2s_tokens_come_back_as_text() {
    let job = TinyJob::with(|yaml| {
        yaml.replace("n_embd: 32, block_size: 32", "n_embd: 8, block_size: 16")
            .replace("train: text.txt", "train: a.safetensors, tokenizer: gpt2")
            .replace("steps: 40", "steps: 1\n  schedule: { kind: constant }")
    });
    let text = std::fs::read(repository("examples/data/python-reference.txt")).expect("readable");
    std::fs::write(job.dir().join("a.txt"), &text[..24 << 10]).expect("writable");
    let made = "tokenize --tokenizer gpt2 -o a.safetensors a.txt";
    run(job.dir(), made).expect_exit(0);
    job.launch().nproc(1).run().expect_exit(0);
    let made = program(job.dir(), "generate out --json --max-tokens 30 --top-k 40");
    let shown = json(&made.args(["--prompt", "Hello world"]).run());
    assert_eq!(shown["prompt_tokens"], 2);
    assert!(!shown["text"].as_str().expect("a text").is_empty());
    // A held-out tenth of a token file does not know its bytes; the whole file does.
    let shown = json(&run(job.dir(), "eval out --json"));
    assert_eq!(shown["bits_per_byte"], Value::Null);
    let shown = json(&run(job.dir(), "eval out --json --data a.safetensors"));
    let number = |key: &str| shown[key].as_f64().expect("a number");
    let expected = number("loss") / 2_f64.ln() / number("bytes_per_token");
    assert!((number("bits_per_byte") - expected).abs() < 1e-12);
}
