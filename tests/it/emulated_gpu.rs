//! Training on GPUs from end to end, without one: the built programs on the libraries of `tests/emulator`, whose
//! streams run late and apart, and whose kernels are the real ones, compiled as C++.
//!
//! Minutes of work, so not part of `cargo test`: `.ci/run emulated_gpu` runs them, as does
//! `cargo test --test it -- --ignored emulated_gpu`.
//!
//! Not shown by this: that NVIDIA's libraries do the same, and anything about speed. `tests/gpu/run.sh` is for that. Of
//! ranks that survive another one's death, only cards can tell:
//!
//! - that an abort ends every kernel of NCCL, also over NVLink SHARP and networks, within `RECOVERY_PATIENCE`, and leaves
//!   no error in the context;
//! - that an aborted gather in place leaves alone the part that the rank gives;
//! - that new communicators, also over NVLink SHARP and a network, get the memory and the connections of those that were
//!   aborted, and how much memory NCCL keeps from one generation to the next;
//! - that a stream reads page-locked memory when it comes to a copy: `worker/tests/gpu_device.rs` checks it;
//! - that a process which has lost its state opens its card once more, beside NCCL's hold on it.

mod cards;
mod inference;
mod libraries;
mod script;

use std::sync::OnceLock;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    Daemon, Emulator, Finished, Launch, TinyJob, eventually, expect_same_losses, launch, losses, metrics,
    parameters, wait_for_step, worker,
};
use crate::timeline::{Trace, bytes_of};

/// Microseconds by which the work of streams is late.
const LATE: &str = "300";

/// Heads of 32 channels, which tensor cores take; whole chunks for two ranks. Four samples a step.
fn job() -> TinyJob {
    TinyJob::with(yaml_of_job)
}

fn yaml_of_job(yaml: &str) -> String {
    yaml.replace("n_embd: 32", "n_embd: 64")
        .replace("steps: 40", "steps: 4")
        .replace(
            "checkpoint_every: 5",
            "checkpoint_every: 2\n  grad_accumulation: 2\n  grad_clip: 1.0\n  schedule: { kind: constant }",
        )
}

/// The emulator, with all kernels in its cache: one short run in each precision, which no test's patience must cover.
fn emulator() -> Emulator {
    static WARM: OnceLock<()> = OnceLock::new();
    let emulator = Emulator::built();
    WARM.get_or_init(|| {
        for precision in ["f32", "bf16"] {
            let job = job();
            let launch = gpus(emulator, &job, 1).set("train.steps=1");
            launch
                .set(&format!("train.precision={precision}"))
                .target("tiny.yaml")
                .run()
                .expect_exit(0);
        }
    });
    emulator
}

fn gpus(emulator: Emulator, job: &TinyJob, ranks: u32) -> Launch {
    emulator
        .launch()
        .nproc(ranks)
        .dir(job.dir())
        .env("EMULATOR_GPUS", "8")
        // As many hardware queues as CUDA gives without the launcher.
        .env("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        .set("parallel.backend=nccl")
        .set(&format!("train.micro_batch={}", 4 / ranks))
        .set("train.grad_accumulation=1")
}

/// Trains so, and gives the losses.
#[track_caller]
fn train(launch: Launch, job: &TinyJob, settings: &[&str]) -> Vec<f64> {
    let launch = settings
        .iter()
        .fold(launch, |launch, setting| launch.set(setting));
    launch.target("tiny.yaml").run().expect_exit(0);
    losses(&job.out())
}

/// What one rank on the processor makes of the same four samples a step.
fn expected() -> &'static [f64] {
    static LOSSES: OnceLock<Vec<f64>> = OnceLock::new();
    LOSSES.get_or_init(|| {
        let job = job();
        let losses = train(launch().nproc(1).dir(job.dir()), &job, &["parallel.backend=cpu"]);
        assert_eq!(losses.len(), 4);
        losses
    })
}

/// To the precision of factors that are rounded so often.
#[track_caller]
fn expect_close(how: &str, found: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected().len(), "{how}");
    for (found, expected) in found.iter().zip(expected()) {
        let relative = (found - expected).abs() / expected;
        assert!(relative <= tolerance, "{how}: {found} against {expected}");
    }
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn the_doctor_finds_nothing_missing() {
    let doctor = Emulator::built().program(env!("CARGO_BIN_EXE_ddp-train"));
    let finished = doctor.args(["doctor"]).run();
    finished
        .expect_exit(0)
        .expect_stdout("device 0             Emulated GPU, sm_90, 1.0 GiB")
        .expect_stdout("device 1")
        .expect_stdout("libnccl.so.2, 2.30.7")
        .expect_stdout("no problems found");
    let doctor = Emulator::built().program(env!("CARGO_BIN_EXE_ddp-train"));
    let doctor = doctor.args(["doctor"]).env("EMULATOR_NCCL", "22809");
    doctor.run().expect_exit(0).expect_stdout("libnccl.so.2, 2.28.9");
}

/// Code 802: after a reboot of a machine with NVSwitches, until its fabric manager runs.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_driver_that_does_not_start_is_not_taken_for_no_gpu() {
    let job = job();
    let launch = gpus(Emulator::built(), &job, 2).set("parallel.backend=auto");
    launch
        .env("EMULATOR_CUINIT", "802")
        .target("tiny.yaml")
        .run()
        .expect_exit(2)
        .expect_stderr("hint: the fabric manager of the GPUs does not run");
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn losses_are_those_of_the_processor() {
    let emulator = emulator();
    for (precision, tolerance) in [("f32", 1e-5), ("tf32", 1e-3), ("bf16", 2e-3)] {
        let job = job();
        let setting = format!("train.precision={precision}");
        let found = train(gpus(emulator, &job, 1), &job, &[&setting]);
        expect_close(precision, &found, tolerance);
    }
    let job = job();
    let found = train(
        gpus(emulator, &job, 1),
        &job,
        &["train.precision=bf16", "train.recompute=nothing"],
    );
    expect_close("bf16 with kept norms and GELUs", &found, 2e-3);
}

/// With work that is late: whatever does not wait for what it needs comes too early.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn ranks_on_nccl_train_as_one_on_the_processor() {
    let emulator = emulator();
    for (ranks, settings) in [
        (2, "parallel.strategy=ddp"),
        (4, "parallel.strategy=ddp"),
        (2, "parallel.strategy=zero1"),
        (2, "parallel.strategy=zero2"),
        (2, "parallel.strategy=zero3"),
        (2, "parallel.strategy=zero3 parallel.overlap=false"),
        (2, "parallel.strategy=zero3 train.recompute=full"),
        (2, "parallel.sync=per-parameter"),
        (4, "parallel.strategy=zero3 parallel.shard_group=2"),
        (2, "parallel.strategy=zero2 train.offload.optimizer=host"),
        (
            2,
            "parallel.strategy=zero3 train.offload.optimizer=host train.offload.parameters=host",
        ),
        (
            2,
            "parallel.strategy=zero1 train.micro_batch=1 train.grad_accumulation=2",
        ),
    ] {
        let job = job();
        let late = gpus(emulator, &job, ranks).env("EMULATOR_DELAY_US", LATE);
        let settings: Vec<_> = settings.split(' ').collect();
        let found = train(late, &job, &settings);
        expect_same_losses(&format!("{ranks} ranks, {settings:?}"), &found, expected());
    }
    let job = job();
    let late = gpus(emulator, &job, 2).env("EMULATOR_DELAY_US", LATE);
    let found = train(late, &job, &["parallel.strategy=zero2", "train.precision=bf16"]);
    expect_close("two ranks in bf16", &found, 2e-3);
}

/// CUDA may wait for the device where a module is loaded or memory is allocated: for ever, if a collective is there that
/// waits for another rank.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn nothing_is_loaded_or_allocated_behind_the_first_collective() {
    let emulator = emulator();
    for (strategy, precision) in [("ddp", "f32"), ("zero2", "bf16"), ("zero3", "f32")] {
        let job = job();
        let finished = gpus(emulator, &job, 2)
            .env("EMULATOR_STATISTICS", "1")
            .env("EMULATOR_WAITS", "1")
            .set("train.checkpoint_every=0")
            .set(&format!("parallel.strategy={strategy}"))
            .set(&format!("train.precision={precision}"))
            .target("tiny.yaml")
            .run();
        finished.expect_exit(0);
        let said = finished.transcript();
        let lines = |words: &str| -> Vec<String> {
            let found = said.lines().filter(|line| line.contains(words));
            found.map(str::to_owned).collect()
        };
        assert_eq!(lines("the first collective comes after").len(), 2, "{said}");
        assert_eq!(lines(" after the first collective"), [""; 0], "{strategy}");
        expect_close(strategy, &losses(&job.out()), 2e-3);
    }
}

/// Matrices over ranks, and layers: exchanges and messages have streams of their own, which are late.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn tensor_ranks_and_stages_on_nccl_train_as_one_rank_on_the_processor() {
    let emulator = emulator();
    let deeper = || TinyJob::with(|yaml| yaml_of_job(yaml).replace("n_layer: 2", "n_layer: 4"));
    let (one, passes) = (deeper(), "train.micro_batch=1 train.grad_accumulation=4");
    let passes: Vec<_> = passes.split(' ').collect();
    let alone = launch().nproc(1).dir(one.dir()).set("parallel.backend=cpu");
    let expected = train(alone, &one, &passes);
    for layout in [
        "parallel.tensor=2",
        "parallel.tensor=2 parallel.sequence=true",
        "parallel.pipeline.stages=2 parallel.pipeline.schedule=zbv",
    ] {
        let job = deeper();
        let late = gpus(emulator, &job, 2).env("EMULATOR_DELAY_US", LATE);
        let settings: Vec<_> = layout.split(' ').chain(passes.iter().copied()).collect();
        expect_same_losses(layout, &train(late, &job, &settings), &expected);
    }
}

/// CUDA may run all streams of a GPU in one queue, in the order of their launches. Nothing may wait there for what its own
/// rank launches later.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn pipelines_train_on_gpus_with_one_queue_for_all_streams() {
    let emulator = emulator();
    let deeper = || TinyJob::with(|yaml| yaml_of_job(yaml).replace("n_layer: 2", "n_layer: 6"));
    let eight_samples = [
        "train.micro_batch=1",
        "train.grad_accumulation=8",
        "train.steps=2",
    ];
    let one = deeper();
    let alone = launch().nproc(1).dir(one.dir()).set("parallel.backend=cpu");
    let expected = train(alone, &one, &eight_samples);
    for (ranks, layout) in [
        (4, "stages=4 schedule=gpipe"),
        (4, "stages=2 schedule=1f1b strategy=zero3 grad_accumulation=4"),
        (3, "stages=3 schedule=interleaved"),
        (8, "stages=2 schedule=zb-h1 tensor=2 grad_accumulation=4"),
        (4, "stages=2 schedule=zbv strategy=zero1 grad_accumulation=4"),
        (2, "stages=2 schedule=greedy"),
    ] {
        let job = deeper();
        let in_one_queue = gpus(emulator, &job, 1)
            .nproc(ranks)
            .env("CUDA_DEVICE_MAX_CONNECTIONS", "1");
        let key = |setting: &str| {
            let name = setting.split('=').next().expect("a name");
            match name {
                "stages" | "schedule" => format!("parallel.pipeline.{setting}"),
                "grad_accumulation" => format!("train.{setting}"),
                _ => format!("parallel.{setting}"),
            }
        };
        let keys: Vec<String> = layout.split(' ').map(key).collect();
        let keys = keys.iter().map(String::as_str);
        let settings: Vec<_> = eight_samples.into_iter().chain(keys).collect();
        expect_same_losses(layout, &train(in_one_queue, &job, &settings), &expected);
    }
}

/// Each with a GPU of its own, as two machines have.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn two_nodes_train_as_one_rank_on_the_processor() {
    let emulator = emulator();
    let (daemon, job) = (Daemon::start(), job());
    let node = |gpu: &str| {
        gpus(emulator, &job, 2)
            // Of several, the last counts.
            .nproc(1)
            .node_of(2, &daemon.endpoint, "gpus")
            .env("CUDA_VISIBLE_DEVICES", gpu)
            .target("tiny.yaml")
            .start()
    };
    for node in [node("0"), node("1")] {
        node.finish().expect_exit(0);
    }
    expect_same_losses("two nodes", &losses(&job.out()), expected());
    daemon.stop().expect_exit(0);
}

/// How late each stream is, and in which order the threads of kernels run, changes no bit.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn timing_changes_no_bit() {
    let emulator = emulator();
    let run = |seed: &str, late: &str| {
        let job = job();
        let launch = gpus(emulator, &job, 2)
            .env("EMULATOR_SEED", seed)
            .env("EMULATOR_DELAY_US", late);
        train(launch, &job, &["parallel.strategy=zero3"]);
        parameters(&job.out())
    };
    let first = run("1", "0");
    for (seed, late) in [("2", LATE), ("3", "2000")] {
        assert!(run(seed, late) == first, "seed {seed}, {late} µs");
    }
}

/// The device, which is slow here, never waits for the host within a step, nor between two: work that finds the
/// computing stream idle does not become more with more steps. With several micro-batches a step the host does wait,
/// for the copy of tokens of two micro-batches before: not so long that the device would.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn the_host_runs_ahead_of_the_device() {
    for (micro_batches, few, more) in [(1, 4, 12), (8, 2, 12)] {
        // A machine that is busy with something else may hold up the host.
        let mut tries = (0..3).map(|_| is_ahead(micro_batches, few, more));
        assert!(tries.any(|is_ahead| is_ahead), "{micro_batches} micro-batches");
    }
}

/// Whether `more` steps behind the first ones add less than one moment each in which the device is idle.
fn is_ahead(micro_batches: u64, few: u64, more: u64) -> bool {
    let emulator = emulator();
    let idle = |steps: u64| {
        let job = job();
        // As little as can be after the last step, where the host waits.
        std::fs::write(job.dir().join("val.txt"), "0123456789".repeat(7)).expect("writable");
        let finished = gpus(emulator, &job, 2)
            .env("EMULATOR_DELAY_US", LATE)
            .env("EMULATOR_STATISTICS", "1")
            .set("data.val=val.txt")
            .set("parallel.strategy=zero2")
            .set("train.checkpoint_every=0")
            .set(&format!("train.grad_accumulation={micro_batches}"))
            .set(&format!("train.steps={steps}"))
            .target("tiny.yaml")
            .run();
        finished.expect_exit(0);
        let text = finished.transcript();
        // The stream with the most work computes.
        let counts = text.lines().filter_map(|line| {
            let (work, idle) = line
                .split_once("[0] emulated GPU: stream ends: ")?
                .1
                .split_once(" pieces of work, ")?;
            let count = |text: &str| text.split(' ').next()?.parse::<u64>().ok();
            Some((count(work)?, count(idle)?))
        });
        counts.max().expect("a stream that ends")
    };
    let ((little, idle_at_first), (much, idle_at_last)) = (idle(few), idle(few + more));
    assert!(much > 2 * little, "{little} and {much} pieces of work");
    eprintln!("{micro_batches}: {idle_at_first} of {little} found it idle, {idle_at_last} of {much}");
    idle_at_last < idle_at_first + more
}

/// The host, a step ahead, meets most of a step's communication when it has ended, in the middle of another one.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn communication_is_told_of_the_step_that_it_was_in() {
    let emulator = emulator();
    for settings in [
        "parallel.strategy=ddp",
        "parallel.strategy=zero3",
        "parallel.strategy=zero3 train.recompute=full",
    ] {
        let job = job();
        let late = gpus(emulator, &job, 2)
            .env("EMULATOR_DELAY_US", LATE)
            .set("train.checkpoint_every=0")
            .set("train.steps=8");
        let settings: Vec<_> = settings.split(' ').collect();
        train(late, &job, &settings);
        let lines = metrics(&job.out());
        assert_eq!(lines.len(), 8);
        let of = |key: &str| -> Vec<f64> {
            let number = |line: &serde_json::Value| line[key].as_f64().expect("a number");
            lines.iter().map(number).collect()
        };
        let [step, comm, exposed] = ["step_ms", "comm_ms", "comm_exposed_ms"].map(of);
        let what = format!("{settings:?}: of {step:.1?} ms {comm:.1?}, exposed {exposed:.1?}");
        assert!(comm.iter().all(|&ms| ms > 0.0), "{what}");
        let sum = |ms: &[f64]| ms.iter().sum::<f64>();
        // One stream computes, and one each is for gradients and for parameters.
        assert!(sum(&exposed) > 0.0 && sum(&exposed) <= sum(&step), "{what}");
        assert!(sum(&comm) <= 2.0 * sum(&step), "{what}");
    }
}

/// Points in the device's streams, which the host reads when the steps are over.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_timeline_has_what_ran_on_the_device() {
    let emulator = emulator();
    let job = job();
    let late = gpus(emulator, &job, 2).env("EMULATOR_DELAY_US", LATE);
    let settings = [
        "run.timeline=2-3",
        "parallel.strategy=zero3",
        "train.precision=bf16",
    ];
    train(late, &job, &settings);
    let trace = Trace::of(&job.out());
    assert_eq!(trace.steps, [2, 3]);
    trace.expect_sense();
    for spans in trace.ranks.values() {
        for kind in ["gradients", "parameters"] {
            assert!(bytes_of(spans, kind) > 0, "{kind}");
        }
        // The host tells the device of a pass, in less time than that takes.
        let length = |lane: &str| -> f64 {
            let passes = spans
                .iter()
                .filter(|span| span.lane == lane && span.name == "backward");
            passes.map(|span| span.end - span.start).sum()
        };
        assert!(0.0 < length("host") && length("host") < length("compute"));
    }
}

/// NCCL within a node does not notice a death: an operation with the dead never ends. Over a network it says so.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_killed_rank_changes_nothing_in_the_result() {
    let emulator = emulator();
    for (strategy, deaths) in [("zero2", &["hang", "error"][..]), ("zero3", &["hang"])] {
        let strategy = format!("parallel.strategy={strategy}");
        let settings = |launch: Launch| launch.set(&strategy).set("train.steps=12");
        let undisturbed = job();
        settings(gpus(emulator, &undisturbed, 2))
            .target("tiny.yaml")
            .run()
            .expect_exit(0);
        for death in deaths {
            let job = job();
            let running = settings(gpus(emulator, &job, 2))
                .env("EMULATOR_NCCL_DEATH", death)
                .target("tiny.yaml")
                .start();
            wait_for_step(&job.out(), 3);
            kill(Pid::from_raw(worker(running.pid(), "1")), Signal::SIGKILL).expect("a living worker");
            let finished = running.finish();
            finished.expect_exit(0).expect_stderr("SIGKILL");
            expect_clean_aborts(&finished);
            assert!(
                parameters(&job.out()) == parameters(&undisturbed.out()),
                "{strategy}, {death}"
            );
            let steps = metrics(&job.out()).len();
            assert_eq!(steps, 12, "{strategy}, {death}: each step once");
        }
    }
}

/// Bytes of rank 0's GPU at the end of a run.
fn taken(job: &TinyJob) -> u64 {
    let summary = std::fs::read(job.out().join("summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_slice(&summary).expect("JSON");
    summary["device_taken"].as_u64().expect("a number")
}

/// Aborted collectives leave numbers behind, and the streams go on.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn survivors_of_a_killed_rank_keep_their_processes_and_their_state() {
    let emulator = emulator();
    for (ranks, settings) in [
        (2, "parallel.strategy=ddp"),
        (2, "parallel.strategy=zero2 train.recovery=buddy"),
        (4, "parallel.strategy=zero2 parallel.shard_group=2"),
        (
            4,
            "parallel.strategy=zero3 parallel.shard_group=2 train.precision=bf16",
        ),
    ] {
        let start = |job: &TinyJob, memory: u64| {
            let launch = gpus(emulator, job, ranks).env("EMULATOR_DELAY_US", LATE);
            let launch = launch.env("EMULATOR_MEMORY_MIB", memory.to_string());
            let launch = launch.set("train.steps=40").set("train.checkpoint_every=0");
            settings
                .split(' ')
                .fold(launch, Launch::set)
                .target("tiny.yaml")
                .start()
        };
        let undisturbed = job();
        start(&undisturbed, 1024).finish().expect_exit(0);
        let job = job();
        // No more than one generation needs.
        let running = start(&job, taken(&undisturbed) / (1 << 20) + 2);
        for (victim, generation) in (0..2).zip(2..) {
            let workers = || -> Vec<i32> {
                let ranks = (0..ranks).map(|rank| worker(running.pid(), &rank.to_string()));
                ranks.collect()
            };
            let step = metrics(&job.out()).len() as u64 + 3;
            wait_for_step(&job.out(), step);
            let before = workers();
            kill(Pid::from_raw(before[victim]), Signal::SIGKILL).expect("a living worker");
            eventually("the next generation to train", || {
                let lines = metrics(&job.out());
                (lines.last()?["generation"].as_u64() == Some(generation)).then_some(())
            });
            let after = workers();
            let kept = (0..before.len()).filter(|&rank| before[rank] == after[rank]);
            let others = (0..before.len()).filter(|&rank| rank != victim);
            assert!(kept.eq(others), "{settings}: {before:?}, then {after:?}");
        }
        let finished = running.finish();
        finished.expect_exit(0).expect_stderr("kept:");
        expect_clean_aborts(&finished);
        let said = finished.transcript();
        assert!(!said.contains("the run goes on from"), "{settings}: {said}");
        assert!(
            parameters(&job.out()) == parameters(&undisturbed.out()),
            "{settings}: {said}"
        );
        let lines = metrics(&job.out());
        assert_eq!(lines.len(), 40, "{settings}: each step once");
        assert_eq!(lines[0]["generation"], 1, "{settings}: no step is done again");
    }
}

/// A node joins, and is lost. The state is read from the checkpoint, since another number of ranks pads it otherwise.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_rank_keeps_its_process_when_a_node_joins_and_is_lost() {
    let emulator = emulator();
    let (daemon, job) = (Daemon::start(), job());
    let start = |card: &str| {
        let launch = gpus(emulator, &job, 1)
            .env("EMULATOR_DELAY_US", LATE)
            .env("CUDA_VISIBLE_DEVICES", card)
            .flag("--nnodes", "1:2")
            .flag("--rdzv-endpoint", &daemon.endpoint)
            .flag("--rdzv-id", "grows")
            .flag("--rdzv-conf", "last_call_timeout=0.3")
            .set("train.micro_batch=2")
            .set("train.grad_accumulation=2")
            .set("train.checkpoint_async=false")
            .set("train.checkpoint_every=5")
            .set("train.steps=60");
        launch.target("tiny.yaml").start()
    };
    let mut first = start("0");
    wait_for_step(&job.out(), 7);
    let pid = worker(first.pid(), "0");
    let second = start("1");
    first.wait_for("kept: rank 0");
    first.wait_for("GPUs keep no state when the number of ranks changes");
    first.wait_for("continuing with 2 ranks instead of 1");
    let joined_at = metrics(&job.out()).len() as u64;
    wait_for_step(&job.out(), joined_at + 7);
    second.signal(Signal::SIGKILL);
    first.wait_for("was lost: its launcher died");
    first.wait_for("continuing with 1 rank instead of 2");
    assert_eq!(worker(first.pid(), "0"), pid, "its process was kept");
    first.finish().expect_exit(0);
    let lines = metrics(&job.out());
    let worlds: Vec<u64> = lines
        .iter()
        .filter_map(|line| line["world_size"].as_u64())
        .collect();
    assert_eq!((worlds.len(), worlds[0], worlds[59]), (60, 1, 1), "{worlds:?}");
    assert!(worlds.contains(&2), "{worlds:?}");
    let undisturbed = self::job();
    let settings = [
        "train.micro_batch=2",
        "train.grad_accumulation=2",
        "train.steps=60",
    ];
    let expected = train(gpus(emulator, &undisturbed, 1), &undisturbed, &settings);
    expect_same_losses("a node came and went", &losses(&job.out()), &expected);
}

/// Also where it holds up several communicators, of which none can be freed before all are given up.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_rank_that_stands_still_is_named() {
    let emulator = emulator();
    for (ranks, settings) in [
        (2, "parallel.strategy=ddp"),
        (2, "parallel.strategy=zero3"),
        (4, "parallel.strategy=zero3 parallel.shard_group=2"),
    ] {
        let job = job();
        let launch = gpus(emulator, &job, ranks)
            .flag("--max-restarts", "0")
            .set("train.steps=100000")
            .set("parallel.timeout_s=20");
        let launch = settings.split(' ').fold(launch, Launch::set);
        let running = launch.target("tiny.yaml").start();
        wait_for_step(&job.out(), 2);
        kill(Pid::from_raw(worker(running.pid(), "1")), Signal::SIGSTOP).expect("a living worker");
        let finished = running.finish();
        assert_ne!(finished.code(), Some(0));
        finished.expect_stderr("is abandoned").expect_stderr("rank 1");
        expect_clean_aborts(&finished);
    }
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_call_of_nccl_that_fails_is_named_and_so_is_a_library_that_is_too_old() {
    let emulator = emulator();
    for (setting, expected) in [
        (
            ("EMULATOR_NCCL_FAIL", "5"),
            "internal error - please report this issue to the NCCL developers: ",
        ),
        (
            ("EMULATOR_NCCL", "21701"),
            "is NCCL 2.17.1, but at least 2.18 is required",
        ),
    ] {
        let job = job();
        let finished = refused(gpus(emulator, &job, 2).env(setting.0, setting.1));
        assert_ne!(finished.code(), Some(0));
        finished.expect_stderr(expected);
        expect_clean_aborts(&finished);
    }
}

/// A communicator is aborted on its GPU: from elsewhere NCCL makes a context on the first one, in memory that
/// a successor of its rank needs. And its process ends without exit handlers, of which it would die.
#[track_caller]
fn expect_clean_aborts(finished: &Finished) {
    let said = finished.transcript();
    assert!(!said.contains("not on the communicator's GPU"), "{said}");
    assert!(!said.contains("SIGSEGV"), "{said}");
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn checkpoints_go_from_gpus_to_the_processor() {
    let emulator = emulator();
    let job = job();
    train(
        gpus(emulator, &job, 2),
        &job,
        &["parallel.strategy=zero3", "train.steps=2"],
    );
    let resumed = launch().nproc(1).dir(job.dir());
    let found = train(resumed, &job, &["parallel.backend=cpu", "run.resume=require"]);
    expect_same_losses("two steps on GPUs, two on the processor", &found, expected());
}

#[track_caller]
fn refused(launch: Launch) -> Finished {
    launch.flag("--max-restarts", "0").target("tiny.yaml").run()
}

/// The error comes from the next call, with a hint how to find the operation itself.
#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_kernel_that_fails_is_an_error_and_is_named_where_launches_block() {
    let job = job();
    let failing = || gpus(emulator(), &job, 1).env("EMULATOR_FAIL_LAUNCH", "150");
    let finished = refused(failing());
    assert_ne!(finished.code(), Some(0));
    finished
        .expect_stderr("CUDA_ERROR_ILLEGAL_ADDRESS")
        .expect_stderr("CUDA_LAUNCH_BLOCKING=1");
    let finished = refused(
        failing()
            .set("run.overwrite=true")
            .env("CUDA_LAUNCH_BLOCKING", "1"),
    );
    assert_ne!(finished.code(), Some(0));
    finished
        .expect_stderr("operation `")
        .expect_stderr("was not launched on stream `compute`");
}
