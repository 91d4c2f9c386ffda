//! `ddp-train ckpt` on the checkpoints of a real run, and runs whose disk takes no checkpoint.

use std::ffi::OsStr;
use std::path::Path;

use nix::sys::stat::Mode;
use serde_json::Value;

use crate::harness::{Finished, Program, TinyJob, ddp_train, metrics};

fn ckpt(dir: &Path, args: impl IntoIterator<Item: AsRef<OsStr>>) -> Finished {
    ddp_train().dir(dir).args(["ckpt"]).args(args).run()
}

/// Two ranks, checkpoints of steps 5 and 10.
fn trained() -> TinyJob {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 10"));
    let train = job.launch().nproc(2);
    train.run().expect_exit(0);
    job
}

#[test]
fn a_checkpoint_is_inspected_and_verified() {
    let job = trained();
    let shown = ckpt(job.dir(), "inspect out".split(' '));
    shown
        .expect_exit(0)
        .expect_stdout("step           10, after 40 samples")
        .expect_stdout("written by     2 ranks, format 3")
        .expect_stdout("n_layer 2, n_head 2, n_embd 32")
        .expect_stdout("optimizer.exp_avg.h.1.mlp.c_proj.weight      f32   [128, 32]");
    ckpt(job.dir(), "inspect out/checkpoints/step_00000005".split(' '))
        .expect_exit(0)
        .expect_stdout("step           5, after 20 samples");
    for path in ["out", "out/checkpoints", "out/checkpoints/step_00000010"] {
        ckpt(job.dir(), &["verify", path])
            .expect_exit(0)
            .expect_stdout("the checkpoint of step 10 is complete: 84 tensors in ");
    }
    ckpt(job.dir(), "verify out --step 7".split(' '))
        .expect_exit(2)
        .expect_stderr("error: `out/checkpoints/step_00000007` holds no checkpoint")
        .expect_stderr("hint: there are checkpoints of steps 5, 10");
    ckpt(job.dir(), "verify .".split(' '))
        .expect_exit(2)
        .expect_stderr("error: `.` holds no checkpoint")
        .expect_stderr("hint: pass one of the runs in this directory, newest first: `./out`");
    ckpt(job.dir(), "inspect outt".split(' '))
        .expect_exit(2)
        .expect_stderr("error: `outt` does not exist")
        .expect_stderr("hint: give a run's `out_dir`");
}

/// Cuts the last bytes from a file of a checkpoint.
fn cut(job: &TinyJob, step: &str) {
    let path = job.out().join("checkpoints").join(step);
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(path.join("parameters-0-of-2.safetensors"))
        .expect("a file of the checkpoint");
    let len = file.metadata().expect("a file").len();
    file.set_len(len - 10).expect("writable");
}

/// `step_00000010`, as `latest` has it.
fn latest(job: &TinyJob) -> String {
    let text = std::fs::read_to_string(job.out().join("checkpoints/latest")).expect("a name");
    text.trim().to_owned()
}

#[test]
fn a_damaged_checkpoint_leads_back_to_an_older_one_that_is_whole() {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 20"));
    let train = job.launch().nproc(2);
    train.run().expect_exit(0);
    cut(&job, "step_00000020");
    // Its size is right, its content is not.
    let part = job
        .out()
        .join("checkpoints/step_00000015/parameters-1-of-2.safetensors");
    let mut bytes = std::fs::read(&part).expect("a file of the checkpoint");
    *bytes.last_mut().expect("not empty") ^= 1;
    std::fs::write(&part, &bytes).expect("writable");
    let hint =
        "hint: restore the file, or go back to the newest complete checkpoint: `ddp-train ckpt rewind out`";
    train_after(&job, &["sh"], "true")
        .expect_exit(2)
        .expect_stderr("truncated or overwritten")
        .expect_stderr(hint);
    for words in ["ckpt verify out", "ckpt inspect out", "eval out"] {
        let program = ddp_train().dir(job.dir());
        let finished = program.args(words.split(' ')).run();
        finished.expect_exit(1).expect_stderr(hint);
    }
    // What is damaged is not gone back to.
    ckpt(job.dir(), "rewind out --step 15".split(' '))
        .expect_exit(1)
        .expect_stderr("does not match its hash")
        .expect_stderr(hint);
    assert_eq!(latest(&job), "step_00000020");
    ckpt(job.dir(), "rewind out".split(' '))
        .expect_exit(0)
        .expect_stdout("the checkpoint of step 10 is complete: ")
        .expect_stdout("`out` now resumes from step 10, not from step 20");
    assert_eq!(latest(&job), "step_00000010");
    let left = job.out().join("checkpoints/.latest.tmp");
    assert!(!left.exists());
    ckpt(job.dir(), "rewind out".split(' '))
        .expect_exit(0)
        .expect_stdout("`out` already resumes from step 10");
    // The steps behind it are trained again, and their checkpoints replaced.
    train_after(&job, &["sh"], "true").expect_exit(0);
    assert_eq!(
        (latest(&job).as_str(), metrics(&job.out()).len()),
        ("step_00000020", 20)
    );
    for step in ["5", "10", "15", "20"] {
        ckpt(job.dir(), &["verify", "out", "--step", step]).expect_exit(0);
    }
}

#[test]
fn a_run_is_rewound_to_any_of_its_checkpoints() {
    let job = trained();
    let hint =
        "hint: restore the file, or go back to the newest complete checkpoint: `ddp-train ckpt rewind out`";
    for (words, done) in [
        (
            &["out/checkpoints/step_00000005"][..],
            "now resumes from step 5, not from step 10",
        ),
        (
            &["out/checkpoints", "--step", "10"],
            "now resumes from step 10, not from step 5",
        ),
        (
            &["out", "--step", "5"],
            "now resumes from step 5, not from step 10",
        ),
    ] {
        ckpt(job.dir(), &[&["rewind"], words].concat())
            .expect_exit(0)
            .expect_stdout(&format!("`out` {done}"));
    }
    cut(&job, "step_00000005");
    ckpt(job.dir(), "rewind out".split(' '))
        .expect_exit(1)
        .expect_stderr(hint);
    // The newest one counts where `latest` names none.
    std::fs::write(job.out().join("checkpoints/latest"), "?").expect("writable");
    ckpt(job.dir(), "rewind out".split(' '))
        .expect_exit(0)
        .expect_stdout("`out` now resumes from step 10");
    let elsewhere = job.dir().join("copy");
    std::fs::rename(job.out().join("checkpoints/step_00000010"), &elsewhere).expect("ours");
    ckpt(job.dir(), "rewind copy".split(' '))
        .expect_exit(2)
        .expect_stderr("error: `copy` is not in the `checkpoints` directory of a run");
    ckpt(job.dir(), "rewind none".split(' '))
        .expect_exit(2)
        .expect_stderr("error: `none` does not exist");
}

/// Puts a pipe in the place of a file.
fn make_pipe(path: &Path) {
    std::fs::remove_file(path).expect("a file");
    nix::unistd::mkfifo(path, Mode::S_IRWXU).expect("a pipe");
}

#[test]
fn a_pipe_in_the_place_of_a_file_is_named() {
    let job = trained();
    let root = job.out().join("checkpoints");
    for (file, place) in [
        ("latest", root.clone()),
        ("manifest.json", root.join("step_00000010")),
        ("parameters-1-of-2.safetensors", root.join("step_00000010")),
    ] {
        let path = place.join(file);
        let good = std::fs::read(&path).expect("a file of the checkpoint");
        make_pipe(&path);
        for words in ["verify out", "inspect out", "export out --to new"] {
            let words: Vec<&str> = words.split(' ').collect();
            let refused = ckpt(job.dir(), &words);
            refused
                .expect_exit(1)
                .expect_stderr(file)
                .expect_stderr(": not a regular file");
        }
        let train = train_after(&job, &["sh"], "true");
        train.expect_exit(2).expect_stderr("not a regular file");
        std::fs::remove_file(&path).expect("ours");
        std::fs::write(&path, good).expect("writable");
    }
    ckpt(job.dir(), "verify out".split(' ')).expect_exit(0);
    assert!(!job.dir().join("new").exists());
}

const NO_HASH: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Changes the manifest in a folder, which then has the right hash of its own.
fn forge(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join("manifest.json");
    let text = std::fs::read_to_string(&path).expect("a manifest");
    let mut manifest: Value = serde_json::from_str(&text).expect("JSON");
    change(&mut manifest);
    manifest["blake3"] = NO_HASH.into();
    let text = format!("{manifest:#}\n");
    let hash = blake3::hash(text.as_bytes()).to_hex();
    std::fs::write(&path, text.replacen(NO_HASH, &hash, 1)).expect("writable");
}

fn tensors(manifest: &mut Value) -> &mut Vec<Value> {
    manifest["tensors"].as_array_mut().expect("tensors")
}

/// What is changed in a manifest.
type Change = fn(&mut Value);

#[test]
fn a_manifest_that_contradicts_itself_is_not_whole() {
    let job = trained();
    let folder = job.out().join("checkpoints/step_00000010");
    let path = folder.join("manifest.json");
    let good = std::fs::read(&path).expect("a manifest");
    let without_one: Change = |manifest| {
        tensors(manifest).retain(|t| t["kind"]["state"] != "exp_avg_sq" || t["key"] != "h.1.ln_1.bias");
    };
    let changes: [(Change, &str); 8] = [
        (without_one, "has no tensor `optimizer.exp_avg_sq.h.1.ln_1.bias`"),
        (
            |manifest| {
                tensors(manifest).retain(|t| !t["key"].as_str().is_some_and(|n| n.ends_with("wpe.weight")));
            },
            "has no tensor `wpe.weight`",
        ),
        (
            |manifest| manifest["config"]["model"]["n_layer"] = 1.into(),
            "has a tensor `h.1.attn.c_attn.bias`, which this model does not have",
        ),
        (
            |manifest| (manifest["step"], manifest["consumed_samples"]) = (11.into(), 44.into()),
            "its directory is `step_00000010`, but it records step 11",
        ),
        (
            |manifest| manifest["consumed_samples"] = 9.into(),
            "step 10 after 9 samples",
        ),
        (
            |manifest| manifest["consumed_samples"] = u64::MAX.into(),
            "18446744073709551615 samples",
        ),
        (
            |manifest| manifest["skipped"] = 11.into(),
            "step 10 after 40 samples, but 11 steps skipped",
        ),
        (
            |manifest| {
                let ranges = tensors(manifest)[0]["regions"][0]["ranges"]
                    .as_array_mut()
                    .expect("ranges");
                ranges.pop();
            },
            "do not cover it exactly",
        ),
    ];
    for (change, said) in changes {
        forge(&folder, change);
        ckpt(job.dir(), "verify out".split(' '))
            .expect_exit(1)
            .expect_stderr(said);
        ckpt(job.dir(), "export out --to new".split(' '))
            .expect_exit(1)
            .expect_stderr(said);
        let train = train_after(&job, &["sh"], "true");
        train.expect_exit(2);
        std::fs::write(&path, &good).expect("writable");
    }
    assert!(!job.dir().join("new").exists());
}

/// Trains the tiny job as one rank in a shell that has first run `prepare`.
fn train_after(job: &TinyJob, shell: &[&str], prepare: &str) -> Finished {
    let script = format!(
        "{prepare} && exec {} run tiny.yaml --set run.resume=auto",
        env!("CARGO_BIN_EXE_ddp-train")
    );
    let words = shell[1..].iter().copied().chain(["-c", &script]);
    Program::new(shell[0]).dir(job.dir()).args(words).run()
}

fn assert_trained_without_its_end(job: &TinyJob, finished: &Finished, cause: &str) {
    finished
        .expect_exit(74)
        .expect_stderr("warning: the checkpoint of step 35 was not saved on rank 0; training continues; the next one is due after step 40")
        .expect_stderr("error: training ended after step 40, but the state after it could not be saved on rank 0")
        .expect_stderr(cause);
    assert_eq!(metrics(&job.out()).len(), 40);
    let summary = std::fs::read(job.out().join("summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_slice(&summary).expect("a summary of JSON");
    assert_eq!(summary["steps"], 40);
    assert_eq!(summary["complete"], false);
    assert!(summary["loss"].is_number(), "{summary}");
}

#[test]
fn a_limit_on_file_sizes_is_an_error_with_a_name_and_leaves_nothing() {
    let job = trained();
    let tool = env!("CARGO_BIN_EXE_ddp-train");
    // 34 thousand parameters take 136 kB; the limit is 100.
    let script = format!("ulimit -f 200 && exec {tool} ckpt export out --to new");
    let shell = Program::new("sh").dir(job.dir());
    let finished = shell.args(["-c", script.as_str()]).run();
    finished
        .expect_exit(1)
        .expect_stderr("File too large (os error 27)");
    assert!(!job.dir().join("new/model.safetensors").exists());
}

#[test]
fn a_folder_that_cannot_be_made_does_not_end_the_training() {
    let job = TinyJob::new();
    std::fs::create_dir(job.out()).expect("writable");
    std::fs::write(job.out().join("checkpoints"), "in the way").expect("writable");
    let finished = train_after(&job, &["sh"], "true");
    assert_trained_without_its_end(
        &job,
        &finished,
        "cannot create `out/checkpoints/.saving_step_00000040.g1`",
    );
}

/// Mounts need a user namespace. Where that is forbidden, the worker's own tests have disks that say the same.
#[test]
fn a_full_disk_and_one_that_is_read_only_do_not_end_the_training() {
    let namespace = ["unshare", "-rm", "sh"];
    let probe = TinyJob::new();
    std::fs::create_dir(probe.out()).expect("writable");
    let mount = "mount -t tmpfs -o size=900k none out/checkpoints";
    let allowed = std::process::Command::new("unshare")
        .args(["-rm", "mount", "-t", "tmpfs", "none"])
        .arg(probe.out())
        .status()
        .is_ok_and(|status| status.success());
    if !allowed {
        eprintln!("SKIPPED, no full and no read-only file system was tested: no user namespace to mount in");
        return;
    }
    for (then, cause) in [
        ("true", "No space left on device (os error 28)"),
        (
            "mount -o remount,ro out/checkpoints",
            "Read-only file system (os error 30)",
        ),
    ] {
        let job = TinyJob::new();
        std::fs::create_dir_all(job.out().join("checkpoints")).expect("writable");
        let finished = train_after(&job, &namespace, &format!("{mount} && {then}"));
        assert_trained_without_its_end(&job, &finished, cause);
    }
}
