//! From texts to token files, and training on them.

use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use crate::harness::{
    Finished, Launch, Program, TinyJob, binaries, ddp_train, launch, losses, repository, temp_dir,
};

/// Enough of a text for a few steps.
const TEXT_BYTES: usize = 24 << 10;

fn tokenize(dir: &Path, args: impl IntoIterator<Item: AsRef<OsStr>>) -> Finished {
    ddp_train().dir(dir).args(["tokenize"]).args(args).run()
}

/// Eight steps of two ranks on GPT-2's tokens of `train`, whose learning rate does not know how many there are.
fn job(train: &str) -> TinyJob {
    let job = TinyJob::with(|yaml| {
        yaml.replace("n_embd: 32, block_size: 32", "n_embd: 8, block_size: 16")
            .replace("train: text.txt", &format!("train: {train}, tokenizer: gpt2"))
            .replace("steps: 40", "steps: 8\n  schedule: { kind: constant }")
            .replace("checkpoint_every: 5", "checkpoint_every: 4")
    });
    let text = std::fs::read(repository("examples/data/python-reference.txt")).expect("readable");
    std::fs::write(job.dir().join("a.txt"), &text[..TEXT_BYTES]).expect("writable");
    std::fs::write(job.dir().join("b.txt"), &text[TEXT_BYTES..2 * TEXT_BYTES]).expect("writable");
    job
}

fn make(job: &TinyJob, name: &str, texts: &[&str]) {
    let args = [&["--tokenizer", "gpt2", "-o", name], texts].concat();
    tokenize(job.dir(), &args).expect_exit(0);
}

fn train(job: &TinyJob, settings: &str) -> Finished {
    let launch = launch().nproc(2).dir(job.dir());
    settings
        .split_whitespace()
        .fold(launch, Launch::set)
        .target("tiny.yaml")
        .run()
}

/// The tokens of our own file, by the offset that its header says.
fn tokens_of(path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).expect("a token file");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    bytes[8 + header as usize..].to_vec()
}

/// A shard as llm.c writes it.
fn llm_c(tokens: &[u8]) -> Vec<u8> {
    let header = [20_240_520, 1, (tokens.len() / 2) as i32];
    let mut bytes: Vec<u8> = header.iter().flat_map(|number| number.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend(tokens);
    bytes
}

/// How often `work`, which succeeds, opens a file.
fn openings(path: &Path, work: Program) -> usize {
    let watch = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).expect("inotify");
    // With the closings between them, the kernel does not merge openings.
    inotify::add_watch(&watch, path, WatchFlags::OPEN | WatchFlags::CLOSE).expect("a file");
    work.run().expect_exit(0);
    let mut buffer = [MaybeUninit::uninit(); 4 << 10];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    let kinds = std::iter::from_fn(|| Some(events.next().ok()?.events()));
    kinds.filter(|kind| kind.contains(ReadFlags::OPEN)).count()
}

/// It is a large file, and a plan of layouts makes the model hundreds of times.
#[test]
fn a_process_reads_its_tokenizer_once() {
    let job = TinyJob::with(|yaml| {
        yaml.replace(
            "train: text.txt",
            "train: tokens.bin, dtype: uint16, tokenizer: tokenizer.json",
        )
        .replace("steps: 40", "steps: 2")
    });
    let tokens: Vec<u8> = (0..8192_u16).flat_map(|i| (i % 61).to_le_bytes()).collect();
    std::fs::write(job.dir().join("tokens.bin"), tokens).expect("writable");
    let vocabulary: Vec<String> = (0..64).map(|id| format!("\"t{id}\": {id}")).collect();
    let tokenizer = job.dir().join("tokenizer.json");
    let json = format!("{{\"model\": {{\"vocab\": {{{}}}}}}}", vocabulary.join(", "));
    std::fs::write(&tokenizer, json).expect("writable");
    let openings = |line: &str| openings(&tokenizer, ddp_train().dir(job.dir()).args(line.split(' ')));
    assert_eq!(openings("run tiny.yaml"), 1);
    let plan = "plan tiny.yaml --gpu h100 --nproc-per-node 8 --nnodes 2 --network 400Gb/s --mfu 0.4";
    assert_eq!(openings(plan), 1);
}

#[test]
fn the_script_of_the_gpt2_tokens_example_runs() {
    let dir = temp_dir();
    // Little to validate on, in a list.
    let val = format!("data.val=[{}]", dir.path().join("val.safetensors").display());
    std::fs::write(
        dir.path().join("val.txt"),
        "The body of a compound statement.\n".repeat(20),
    )
    .expect("writable");
    tokenize(
        dir.path(),
        "--tokenizer gpt2 -o val.safetensors val.txt".split(' '),
    )
    .expect_exit(0);
    let script = Program::new(repository("examples/gpt2-tokens/run.sh"))
        .args("--set train.steps=2 --set run.out_dir=out --set".split(' '))
        .args([val])
        .env("DDP_BIN", binaries())
        .dir(dir.path());
    script
        .run()
        .expect_exit(0)
        .expect_stdout("1 document, 398868 bytes of text: ")
        .expect_stdout("1 document, 67405 bytes of text: ")
        .expect_stdout("  tokenizer: gpt2")
        .expect_stdout("gpt2, 50,257 tokens, ")
        .expect_stdout(" nats/token, ")
        .expect_stdout(" nats/byte");
    let uniform = 50_304_f64.ln();
    let loss = losses(&dir.path().join("out"))[0];
    assert!(
        (loss - uniform).abs() < 0.5,
        "an untrained model guesses evenly: {loss} against {uniform}"
    );
    let summary = std::fs::read(dir.path().join("out/summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_slice(&summary).expect("JSON");
    assert!(
        summary["bytes_per_token"]
            .as_f64()
            .is_some_and(|bytes| (3.0..8.0).contains(&bytes)),
        "{summary}"
    );
}

/// The file of the example on made shards, at a tiny size; and its README has the figures of `plan`.
#[test]
fn the_gpt2_124m_example_trains_on_shards_of_its_format() {
    let dir = temp_dir();
    let shard = |name: &str, first: u16| {
        let tokens: Vec<u8> = (0..4000_u16)
            .flat_map(|i| (first + i % 997 * 50).to_le_bytes())
            .collect();
        std::fs::write(dir.path().join(name), llm_c(&tokens)).expect("writable");
    };
    shard("fineweb_train_000001.bin", 0);
    shard("fineweb_train_000002.bin", 1);
    shard("fineweb_val_000000.bin", 2);
    let pattern = |part: &str| {
        let files = dir.path().join(format!("fineweb_{part}_*.bin"));
        format!("data.{part}={}", files.display())
    };
    let yaml = repository("examples/gpt2-124m/train.yaml");
    let sizes = [
        "model.n_layer=1",
        "model.n_head=2",
        "model.n_embd=16",
        "model.block_size=16",
    ];
    let steps = ["train.steps=3", "train.micro_batch=2", "run.out_dir=out"];
    let launch = launch().nproc(2).dir(dir.path());
    let launch = (sizes.into_iter().chain(steps)).fold(launch, Launch::set);
    let launch = launch.set(&pattern("train")).set(&pattern("val"));
    launch
        .target(&yaml)
        .run()
        .expect_exit(0)
        .expect_stdout("8,000 tokens in 2 files for training, 4,000 for validation")
        .expect_stdout("val loss ");
    assert_eq!(losses(&dir.path().join("out")).len(), 3);

    let readme = std::fs::read_to_string(repository("examples/gpt2-124m/README.md")).expect("readable");
    let flags = ["--gpu", "h100", "--nproc-per-node", "8", "--mfu", "0.4"];
    let plan = ddp_train()
        .args(["plan".as_ref(), yaml.as_os_str()])
        .args(flags)
        .run();
    plan.expect_exit(0);
    let rows = [" on the device ", " step time  ", " tokens/s  "];
    for row in rows {
        let line = plan
            .stdout()
            .iter()
            .find(|line| line.starts_with(row))
            .expect("a row");
        assert!(readme.contains(line.trim()), "{line}");
    }
}

/// As its README says: the loss is well below that of a model that knows the frequencies only.
#[test]
#[ignore = "a minute of training: .ci/run examples"]
fn what_the_readme_of_the_examples_says_of_gpt2_tokens_is_reached() {
    let dir = temp_dir();
    Program::new(repository("examples/gpt2-tokens/run.sh"))
        .args(["--set", "run.out_dir=out"])
        .env("DDP_BIN", binaries())
        .dir(dir.path())
        .run()
        .expect_exit(0);
    let summary = std::fs::read(dir.path().join("out/summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_slice(&summary).expect("JSON");
    let number = |pointer| summary.pointer(pointer).and_then(serde_json::Value::as_f64);
    let [loss, bytes] = ["/val_loss", "/bytes_per_token"].map(|pointer| number(pointer).expect("a number"));
    assert!((loss / bytes - 1.46).abs() < 0.03, "{summary}");
}

#[test]
fn shards_of_llm_c_train_as_one_file_does() {
    let job = job("ours.safetensors");
    make(&job, "ours.safetensors", &["a.txt", "b.txt"]);
    train(&job, "").expect_exit(0);
    let tokens = tokens_of(&job.dir().join("ours.safetensors"));
    // Three shards, none of which ends with a block.
    let (first, rest) = tokens.split_at(2 * 1001);
    let (second, third) = rest.split_at(2 * 2003);
    for (name, shard) in [
        ("train_1.bin", first),
        ("train_2.bin", second),
        ("train_3.bin", third),
    ] {
        std::fs::write(job.dir().join(name), llm_c(shard)).expect("writable");
    }
    train(&job, "data.train=train_*.bin run.out_dir=shards")
        .expect_exit(0)
        .expect_stdout(" in 3 files for training")
        .expect_stdout("a file does not record its tokenizer");
    let shards = job.dir().join("shards");
    assert_eq!(losses(&shards), losses(&job.out()));
    // One of them is another one when the run goes on.
    std::fs::write(
        job.dir().join("train_2.bin"),
        llm_c(&second.iter().map(|byte| byte & 0x3f).collect::<Vec<_>>()),
    )
    .expect("writable");
    train(
        &job,
        "data.train=train_*.bin run.out_dir=shards run.resume=require train.steps=9",
    )
    .expect_exit(2)
    .expect_stderr("`training text of `data.train`` is ");
}

#[test]
fn a_text_where_tokens_are_needed_is_refused_with_the_command_that_makes_them() {
    let job = job("a.txt");
    let finished = train(&job, "");
    finished.expect_exit(2);
    insta::assert_snapshot!(finished.stderr(), @r"
    [ddp-run] error: tiny.yaml:3: `data.train` is `a.txt`, which is not a token file, but `data.tokenizer: gpt2` needs one
    [ddp-run]   hint: create one and use it instead: `ddp-train tokenize --tokenizer gpt2 -o a.gpt2.safetensors a.txt`
    ");
    assert!(!job.out().exists());
    // The command, as it stands there.
    let words = finished.stderr();
    let command = words
        .split('`')
        .find(|part| part.starts_with("ddp-train tokenize "))
        .expect("a command");
    let args: Vec<&str> = command.split(' ').skip(2).collect();
    tokenize(job.dir(), &args)
        .expect_exit(0)
        .expect_stdout("  train: a.gpt2.safetensors ");
    train(&job, "data.train=a.gpt2.safetensors train.steps=1").expect_exit(0);
}
