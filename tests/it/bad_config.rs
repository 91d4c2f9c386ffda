//! What a user can get wrong in a configuration: one message with file, line and key, exit code 2, and
//! nothing half-written is left.

use crate::harness::{Program, ReservedPort, TinyJob, metrics, parameters};

/// The message for a job that is refused before a worker starts.
#[track_caller]
fn refused(job: &TinyJob) -> String {
    let finished = job.launch().nproc(2).run();
    finished.expect_exit(2);
    let errors = finished.stderr().matches("error:").count();
    assert_eq!(errors, 1, "one message, not one a rank:\n{}", finished.stderr());
    finished.errors()
}

#[track_caller]
fn expect_nothing_written(job: &TinyJob) {
    assert!(
        !job.out().exists(),
        "`{}` was made for a run that never was",
        job.out().display()
    );
}

/// A job of several nodes finds out only in its workers what is in the folder.
#[test]
fn a_folder_that_holds_a_run_is_never_resumed_by_a_restart() {
    let job = TinyJob::new();
    job.launch().nproc(2).run().expect_exit(0);
    let before = (parameters(&job.out()), metrics(&job.out()));
    let port = ReservedPort::new();
    let finished = job
        .launch()
        .nproc(2)
        .flag("--nnodes", "1:2")
        .flag("--rdzv-endpoint", &port.endpoint)
        .flag("--rdzv-conf", "last_call_timeout=0.1")
        .flag("--max-restarts", "3")
        .set("train.steps=50")
        .run();
    finished.expect_exit(2).expect_stderr("already holds a run");
    finished.expect_no_stderr("; restart ");
    let words = finished.stderr();
    assert_eq!(words.matches("first failure:").count(), 1, "{words}");
    assert!(
        before == (parameters(&job.out()), metrics(&job.out())),
        "the run was touched"
    );
}

#[test]
fn an_unknown_key() {
    let job = TinyJob::with(|yaml| yaml.replace("  micro_batch: 2", "  microbatch: 2"));
    insta::assert_snapshot!(refused(&job), @r"
        [ddp-run] error: tiny.yaml:6: unknown key `train.microbatch`
        [ddp-run]   hint: did you mean `train.micro_batch`?
        ");
    expect_nothing_written(&job);
}

#[test]
fn an_unknown_key_of_the_launch_section() {
    let job = TinyJob::with(|yaml| format!("{yaml}launch: {{nproc_per_node: 2, nodes: 5}}\n"));
    insta::assert_snapshot!(refused(&job), @"[ddp-run] error: tiny.yaml:10: `launch.nodes`: unknown key, did you mean `nnodes`?");
    expect_nothing_written(&job);
}

#[test]
fn an_out_dir_that_cannot_be_written() {
    // Below a file, not below a read-only folder: the tests may run as root.
    let job = TinyJob::with(|yaml| yaml.replace("out_dir: out", "out_dir: text.txt/out"));
    insta::assert_snapshot!(refused(&job), @r"
        [ddp-run] error: tiny.yaml:1: cannot create `text.txt/out`: Not a directory (os error 20)
        [ddp-run]   hint: a file exists where a directory is needed; set a different `run.out_dir`
        ");
}

#[test]
fn a_run_to_resume_that_is_not_there() {
    let job = TinyJob::with(|yaml| yaml.replace("seed: 7", "resume: require"));
    insta::assert_snapshot!(refused(&job), @r"
        [ddp-run] error: tiny.yaml:1: `run.resume` is `require`, but `out` holds no checkpoint
        [ddp-run]   hint: set `run.out_dir` to the directory of the run to continue, or `run.resume: auto` to start a new one
        ");
    expect_nothing_written(&job);
}

/// Only the workers can know, as more nodes may come.
#[test]
fn what_all_ranks_say_alike_is_shown_once() {
    let job = TinyJob::new();
    let port = ReservedPort::new();
    let finished = job
        .launch()
        .nproc(7)
        .flag("--nnodes", "1:2")
        .flag("--rdzv-endpoint", &port.endpoint)
        .flag("--rdzv-conf", "last_call_timeout=0.1")
        .flag("--log-dir", "logs")
        .set("parallel.strategy=zero2")
        .set("parallel.shard_group=2")
        .run();
    let words = "`parallel.shard_group` is 2, but 7 data-parallel ranks cannot be divided into groups of 2";
    finished
        .expect_exit(2)
        .expect_stderr("first failure: rank ")
        .expect_stderr(&format!("message: {words}"));
    let said = finished.stderr();
    assert_eq!(said.matches(&format!("] error: {words}")).count(), 1, "{said}");
    assert_eq!(
        said.matches("]   hint: all groups must have").count(),
        1,
        "{said}"
    );
    let in_file = |rank: u32| {
        let log = job.dir().join(format!("logs/attempt_0/{rank}/stderr.log"));
        std::fs::read_to_string(log).is_ok_and(|text| text.contains(words) && text.contains("hint: "))
    };
    assert!((0..7).any(in_file), "a rank's own file has all of it");
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_for_good() {
    let job = TinyJob::new();
    let finished = job.launch().nproc(2).set("train.optimizer.lr=1e38").run();
    finished
        .expect_exit(93)
        .expect_stderr("hint: lower `train.optimizer.lr`");
    finished.expect_no_stderr("; restart ");
}

#[test]
fn a_parameter_group_without_parameters_is_refused_at_its_place() {
    let job = TinyJob::new();
    job.launch()
        .set("train.optimizer.groups=[{params: \"h.*.mpl.*\"}]")
        .run()
        .expect_exit(2)
        .expect_stderr(
            "`train.optimizer.groups[0].params` is `h.*.mpl.*`, which matches none of the 28 parameters",
        );
}

#[test]
fn exhausted_shared_memory() {
    // The limit on file sizes holds for memory segments too, and can be set for one process.
    let job = TinyJob::with(|yaml| yaml.replace("n_embd: 32", "n_embd: 256"));
    let script = "ulimit -f 8192; exec \"$0\" --nproc-per-node 2 tiny.yaml";
    let finished = Program::new("/bin/sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_ddp-run")])
        .dir(job.dir())
        .run();
    finished
        .expect_exit(93)
        .expect_stderr(
            "for `gradients`: the limit on file sizes, which also applies to shared memory, is 4.0 MiB",
        )
        .expect_stderr("hint: raise it with `ulimit -f unlimited`");
    finished.expect_no_stderr("; restart ");
    assert!(!job.out().join("checkpoints").exists());
    assert!(!job.out().join("summary.json").exists());
}

#[test]
fn memory_that_a_limit_refuses_is_not_asked_for_again() {
    // 800 MB of parameters, of which the first do not fit beside what a process maps anyway.
    let job = TinyJob::with(|yaml| {
        yaml.replace("n_embd: 32", "n_embd: 2048")
            .replace("n_layer: 2", "n_layer: 4")
    });
    let script = "ulimit -v 700000; exec \"$0\" run tiny.yaml";
    let finished = Program::new("/bin/sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_ddp-train")])
        .dir(job.dir())
        .run();
    finished
        .expect_exit(93)
        .expect_stderr("this process may map 683.6 MiB (`ulimit -v`) and has already mapped ")
        .expect_stderr("hint: ");
}
