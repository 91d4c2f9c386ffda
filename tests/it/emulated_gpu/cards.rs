//! What is said of a card that is too small or too old, is missing, or is used by others too.

use super::{emulator, gpus, job, refused};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Daemon, Emulator, Launch, children, environment_of, metrics, wait_for_step};

/// Backward of heads of 256 channels takes more than the 99 KiB of the cards between the large ones.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn too_little_shared_memory_is_said_of_the_card() {
    let job = job();
    let launch = gpus(Emulator::built(), &job, 1)
        .env("EMULATOR_SHARED_KIB", "99")
        .set("model.n_head=1")
        .set("model.n_embd=256");
    refused(launch)
        .expect_stderr("a block needs 135808 bytes of shared memory, but at most 101376 are available")
        .expect_stderr("hint: use narrower heads (a larger `model.n_head`)");
    // What the launch asks for would just fit, were it not for what the kernel declares beside it.
    let job = super::job();
    let launch = gpus(Emulator::built(), &job, 1)
        .env("EMULATOR_SHARED_KIB", "96")
        .set("model.n_head=1")
        .set("model.n_embd=128")
        .set("train.precision=bf16");
    refused(launch).expect_stderr(" bytes of shared memory, but at most 98304 are available");
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_card_that_is_too_old_is_named() {
    const WORDS: &str = "GPU 0 (Emulated GPU) is sm_75, but the kernels need sm_80 or later";
    let doctor = Emulator::built().program(env!("CARGO_BIN_EXE_ddp-train"));
    let old = ("EMULATOR_CAPABILITY", "75");
    let report = doctor.args(["doctor"]).env(old.0, old.1).run();
    report.expect_exit(0).expect_stdout(&format!("- {WORDS}"));
    let job = job();
    let finished = refused(gpus(Emulator::built(), &job, 1).env(old.0, old.1));
    finished
        .expect_exit(2)
        .expect_stderr(WORDS)
        .expect_stderr("hint: choose other GPUs with CUDA_VISIBLE_DEVICES");
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_lack_of_memory_says_what_needs_it_and_what_to_change() {
    // Of two, a collective waits for what could not be allocated.
    for ranks in [1, 2] {
        let job = job();
        let finished = gpus(emulator(), &job, ranks)
            .env("EMULATOR_MEMORY_MIB", "33")
            .target("tiny.yaml")
            .run();
        finished
            .expect_exit(93)
            .expect_stderr("CUDA_ERROR_OUT_OF_MEMORY")
            .expect_stderr("free of 33.0 MiB, this rank holds")
            .expect_stderr("that is more than the whole GPU has, so a retry would fail too")
            .expect_stderr("hint: lower `train.micro_batch`");
        assert!(
            !finished.transcript().contains("; restarting "),
            "it is not tried again"
        );
    }
    let job = job();
    let large = gpus(emulator(), &job, 1).set("train.micro_batch=512");
    let large = large.env("EMULATOR_MEMORY_MIB", "34").target("tiny.yaml").run();
    large.expect_exit(93).expect_stderr("MiB for `activations`");
    assert!(!job.out().join("metrics.jsonl").exists(), "before the first step");
}

/// Memory that others hold is waited for only where it may be that of the last generation: a driver returns it late.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn memory_of_killed_workers_is_waited_for() {
    let job = job();
    let taken = job.dir().join("taken");
    std::fs::write(&taken, "990").expect("writable");
    let mut running = gpus(emulator(), &job, 1)
        .env("EMULATOR_TAKEN_MIB", format!("@{}", taken.display()))
        .flag("--max-restarts", "1")
        .target("tiny.yaml")
        .start();
    running.wait_for("CUDA_ERROR_OUT_OF_MEMORY");
    running.wait_for("waiting up to 60 s for GPU memory that ended processes have not returned yet");
    std::fs::write(&taken, "0").expect("writable");
    let finished = running.finish();
    finished.expect_exit(0).expect_stderr("(1/1)");
    assert!(!finished.transcript().contains("more than the whole GPU has"));
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_run_of_gpus_goes_on_without_them_only_if_told() {
    let job = job();
    let resumed = |gpus: Launch| {
        gpus.set("train.steps=2")
            .set("run.resume=auto")
            .target("tiny.yaml")
            .run()
    };
    resumed(gpus(emulator(), &job, 1)).expect_exit(0);
    let without = || gpus(emulator(), &job, 1).env("EMULATOR_GPUS", "0");
    resumed(without().set("parallel.backend=auto"))
        .expect_exit(2)
        .expect_stderr("this run has trained on cuda:0 (Emulated GPU")
        .expect_stderr("`parallel.backend: cpu` continues it without GPUs");
    resumed(without().set("parallel.backend=cpu")).expect_exit(0);
}

/// A GPU that falls off the bus is its node's failure: the others go on.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_node_whose_gpu_is_gone_leaves_the_job() {
    let (daemon, job) = (Daemon::start(), job());
    let cards = job.dir().join("cards");
    std::fs::write(&cards, "2").expect("writable");
    let node = |gpu: &str, cards: &str| {
        let launch = gpus(emulator(), &job, 2)
            .nproc(1)
            .node_of(2, &daemon.endpoint, "gpus");
        launch
            .flag("--nnodes", "1:2")
            .env("CUDA_VISIBLE_DEVICES", gpu)
            .env("EMULATOR_GPUS", cards)
            .set("parallel.backend=auto")
            .set("train.steps=20")
            .target("tiny.yaml")
            .start()
    };
    let (stays, leaves) = (node("0", "2"), node("1", &format!("@{}", cards.display())));
    wait_for_step(&job.out(), 2);
    std::fs::write(&cards, "0").expect("writable");
    let worker = children(leaves.pid())
        .into_iter()
        .find(|pid| environment_of(*pid).contains_key("RANK"));
    kill(Pid::from_raw(worker.expect("one")), Signal::SIGKILL).expect("it runs");
    leaves
        .finish()
        .expect_exit(71)
        .expect_stderr("it leaves the job: this node cannot train any more: this run has trained on cuda:0");
    stays.finish().expect_exit(0);
    daemon.stop().expect_exit(0);
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn the_table_before_the_first_step_says_what_nccl_takes() {
    let job = job();
    let finished = gpus(emulator(), &job, 2)
        .set("train.steps=1")
        .target("tiny.yaml")
        .run();
    assert!(
        finished.expect_exit(0).transcript().contains(", NCCL 5.0 MiB"),
        "{}",
        finished.transcript()
    );
}

/// Replicas whose kernels are compiled or run by different versions would drift apart.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn nodes_with_different_drivers_are_refused() {
    let (daemon, job) = (Daemon::start(), job());
    let node = |gpu: &str, cuda: &str| {
        let launch = gpus(emulator(), &job, 2)
            .nproc(1)
            .node_of(2, &daemon.endpoint, "gpus");
        let launch = launch.env("CUDA_VISIBLE_DEVICES", gpu).env("EMULATOR_CUDA", cuda);
        launch.target("tiny.yaml").start()
    };
    for node in [node("0", "12080"), node("1", "12090")] {
        node.finish().expect_exit(2).expect_stderr("CUDA driver");
    }
    daemon.stop().expect_exit(0);
}

/// What training has allocated is not all that a card must have. The arithmetic of two ranks is a share of two cards'.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn the_summary_says_what_is_taken_of_the_card_by_whomever_and_the_share_of_its_peak() {
    let job = job();
    gpus(emulator(), &job, 2)
        .env("EMULATOR_TAKEN_MIB", "100")
        .env("EMULATOR_NAME", "NVIDIA H200")
        .set("train.steps=1")
        .target("tiny.yaml")
        .run()
        .expect_exit(0)
        .expect_stdout("FLOP/s, MFU 0.0%");
    let summary = std::fs::read(job.out().join("summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_slice(&summary).expect("a summary of JSON");
    let peak = metrics(&job.out())[0]["memory"]["device_peak"].as_u64();
    let taken = summary["device_taken"].as_u64().zip(peak);
    assert!(
        taken.is_some_and(|(taken, peak)| taken >= peak + (100 << 20)),
        "{taken:?}"
    );
    let number = |key: &str| summary[key].as_f64().expect("a number");
    let share = number("model_flops_per_s") / (2.0 * 67e12);
    assert!((number("mfu") / share - 1.0).abs() < 1e-9, "{summary}");
}
