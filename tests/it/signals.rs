//! Which signals stop a job, which ones pass through, and which ones do nothing.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    Program, Running, Sentinel, TinyJob, descendants, hangup_is_ignored, launch, parameters, wait_for_step,
    worker,
};

/// Says when it is ready, when it is asked to stop, and when it gets a hangup.
const WORKER: &str =
    "trap 'echo saved; exit 0' TERM USR1; trap 'echo received' HUP; echo ready; while :; do sleep 0.05; done";

#[track_caller]
fn ready(mut running: Running) -> Running {
    running.wait_for("[0] ready");
    running.wait_for("[1] ready");
    running
}

#[test]
fn a_signal_that_was_asked_for_stops_the_job() {
    let launch = launch().nproc(2).flag("--signals-to-handle", "USR1,SIGTERM");
    let running = ready(launch.shell(WORKER).start());
    running.signal(Signal::SIGUSR1);
    running
        .finish()
        .expect_exit(128 + Signal::SIGUSR1 as i32)
        .expect_stdout("[0] saved")
        .expect_stdout("[1] saved")
        .expect_stderr("stopped by SIGUSR1");
}

#[test]
fn a_signal_that_was_not_asked_for_ends_the_launcher_as_any_program() {
    if hangup_is_ignored() {
        eprintln!("SKIPPED: SIGHUP is ignored here, as under nohup");
        return;
    }
    let sentinel = Sentinel::new();
    let script = format!("{}; {WORKER}", sentinel.join_script());
    let launch = launch().nproc(2).flag("--signals-to-handle", "TERM");
    let running = ready(launch.shell(&script).start());
    running.signal(Signal::SIGHUP);
    let finished = running.finish();
    finished.expect_killed_by(Signal::SIGHUP);
    let shown = finished.stdout().join("\n");
    assert!(
        !shown.contains("saved") && !shown.contains("received"),
        "no orderly stop: {shown}"
    );
    sentinel.expect_all_gone();
}

#[test]
fn a_hangup_stays_ignored_under_nohup_whatever_is_asked_for() {
    for asked in ["TERM", "TERM,HUP"] {
        let line = r#"trap "" HUP; exec "$@""#;
        let shell = Program::new("sh").args(["-c", line, "sh", env!("CARGO_BIN_EXE_ddp-run")]);
        let flags = shell.args(["--nproc-per-node=2", "--signals-to-handle", asked]);
        let running = ready(flags.args(["sh", "-c", WORKER]).start());
        running.signal(Signal::SIGHUP);
        // A hangup that counted would have come first.
        running.signal(Signal::SIGTERM);
        running
            .finish()
            .expect_exit(143)
            .expect_stderr("stopped by SIGTERM");
    }
}

#[test]
fn a_signal_that_is_forwarded_does_not_stop_the_job_although_it_would() {
    if hangup_is_ignored() {
        eprintln!("SKIPPED: SIGHUP is ignored here, as under nohup");
        return;
    }
    let launch = launch().nproc(2).flag("--forward-signals", "HUP");
    let mut running = ready(launch.shell(WORKER).start());
    running.signal(Signal::SIGHUP);
    running.wait_for("[0] received");
    running.wait_for("[1] received");
    running.signal(Signal::SIGTERM);
    running
        .finish()
        .expect_exit(143)
        .expect_stdout("[0] saved")
        .expect_stdout("[1] saved");
}

#[test]
fn a_signal_cannot_stop_the_job_and_leave_it_running() {
    launch()
        .flag("--signals-to-handle", "TERM,USR1")
        .flag("--forward-signals", "USR1")
        .target("true")
        .run()
        .expect_exit(2)
        .expect_stderr("SIGUSR1 is in both `--signals-to-handle` and `--forward-signals`");
}

/// As Slurm's `proctrack/linuxproc` and systemd's `KillMode=control-group` do it.
#[test]
fn native_workers_save_when_every_process_of_the_job_is_signalled() {
    let job = TinyJob::with(|yaml| {
        let yaml = yaml.replace("checkpoint_every: 5", "checkpoint_every: 0");
        yaml.replace("steps: 40", "steps: 1000000")
    });
    let running = job.launch().nproc(2).start();
    let workers = ["0", "1"].map(|rank| worker(running.pid(), rank));
    let signal_workers = |signal| {
        for pid in workers {
            kill(Pid::from_raw(pid), signal).expect("a living worker");
        }
    };
    // Before they have begun, and while they train.
    signal_workers(Signal::SIGTERM);
    wait_for_step(&job.out(), 2);
    signal_workers(Signal::SIGINT);
    signal_workers(Signal::SIGTERM);
    for pid in descendants(running.pid()) {
        kill(Pid::from_raw(pid), Signal::SIGTERM).expect("a living process");
    }
    running.signal(Signal::SIGTERM);
    running
        .finish()
        .expect_exit(143)
        .expect_stdout("the checkpoint is saved")
        .expect_stderr("resume with `--set run.resume=auto");
    parameters(&job.out());
}

/// A native worker without a launcher, with these settings.
fn alone(job: &TinyJob, program: &str, words: &[&str], settings: &[&str]) -> Running {
    let run = ["run", "tiny.yaml"];
    let settings = settings.iter().flat_map(|setting| ["--set", setting]);
    let words = words.iter().copied().chain(run).chain(settings);
    Program::new(program).args(words).dir(job.dir()).start()
}

#[test]
fn a_worker_without_a_launcher_saves_at_a_signal() {
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let job = TinyJob::new();
        let endless = ["train.steps=1000000", "train.checkpoint_every=0"];
        let running = alone(&job, env!("CARGO_BIN_EXE_ddp-train"), &[], &endless);
        wait_for_step(&job.out(), 2);
        running.signal(signal);
        running
            .finish()
            .expect_exit(code)
            .expect_stderr(&format!(
                "stopped by {signal}: finishing and saving the current step"
            ))
            .expect_stdout("the checkpoint is saved")
            .expect_stdout("resume with `--set run.resume=auto --set run.out_dir=out`");
        parameters(&job.out());
    }
}

#[test]
fn a_worker_without_a_launcher_dies_of_the_second_signal() {
    let job = TinyJob::new();
    // One step that takes hours.
    let settings = ["train.grad_accumulation=10000000"];
    let mut running = alone(&job, env!("CARGO_BIN_EXE_ddp-train"), &[], &settings);
    running.wait_for("memory per rank");
    running.signal(Signal::SIGINT);
    running.wait_for("stopped by SIGINT");
    running.signal(Signal::SIGTERM);
    running.finish().expect_killed_by(Signal::SIGTERM);
}

/// As in the background of a shell without job control.
#[test]
fn a_worker_without_a_launcher_ignores_what_its_starter_had_ignored() {
    let job = TinyJob::new();
    let ignoring = [
        "-c",
        r#"trap "" INT; exec "$@""#,
        "sh",
        env!("CARGO_BIN_EXE_ddp-train"),
    ];
    let running = alone(&job, "sh", &ignoring, &["train.steps=1000000"]);
    wait_for_step(&job.out(), 2);
    running.signal(Signal::SIGINT);
    // An interrupt that counted would have come first.
    running.signal(Signal::SIGTERM);
    let finished = running.finish();
    finished.expect_exit(143);
    finished.expect_no_stderr("SIGINT");
}
