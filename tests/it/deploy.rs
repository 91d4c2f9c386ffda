//! The files of `deploy/`, as far as a machine without a cluster can tell: their command lines are real ones.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::harness::{Program, ReservedPort, children, launch, repository, temp_dir};

/// Starts its program as the nodes of a step of two, and ends with the largest code, as `srun` does.
const SRUN: &str = r#"#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NNODES=2 SLURM_NODEID=$node "$@" & pids+=($!); done
trap 'kill -TERM "${pids[@]}"' TERM
code=0
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; last=$?; done
    ((last > code)) && code=$last
done
exit "$code"
"#;

/// Remembers what it was told.
const SCONTROL: &str = "#!/bin/sh\necho \"$@\" >\"$ASKED\"\n";

/// The batch script on a pretended Slurm of two nodes, whose workers run a shell script.
fn batch(bin: &Path, port: &ReservedPort, script: &str) -> Program {
    for (name, text) in [("srun", SRUN), ("scontrol", SCONTROL)] {
        fs::write(bin.join(name), text).expect("writable");
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).expect("ours");
    }
    let built = Path::new(env!("CARGO_BIN_EXE_ddp-run"));
    let built = built.parent().expect("a folder of binaries").display();
    let path = std::env::var("PATH").unwrap_or_default();
    Program::new(repository("deploy/slurm/train.sbatch"))
        .args(["--no-python", "sh", "-c", script].map(Into::into))
        .env("PATH", &format!("{}:{built}:{path}", bin.display()))
        .env("ASKED", &bin.join("asked").display().to_string())
        .env("SLURM_JOB_ID", "77")
        .env("PET_RDZV_ENDPOINT", &port.endpoint)
        .env("PET_RDZV_ID", "batch")
        .env("PET_NPROC_PER_NODE", "1")
}

#[test]
fn the_batch_script_of_slurm_starts_a_node_each() {
    let (bin, port) = (temp_dir(), ReservedPort::new());
    let finished = batch(
        bin.path(),
        &port,
        "echo node $GROUP_RANK of $GROUP_WORLD_SIZE; exit $((RANK == 1 ? 42 : 0))",
    )
    .run();
    finished
        .expect_exit(42)
        .expect_stdout("node 0 of 2")
        .expect_stdout("node 1 of 2");
    assert!(!bin.path().join("asked").exists(), "a failure is not requeued");
}

#[test]
fn a_preempted_batch_job_is_requeued() {
    let (bin, port) = (temp_dir(), ReservedPort::new());
    let script = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let mut running = batch(bin.path(), &port, script).start();
    running.wait_for("[0] ready");
    running.wait_for("[1] ready");
    // Slurm signals the step, not the batch script.
    let step = children(running.pid());
    for srun in step {
        kill(Pid::from_raw(srun), Signal::SIGTERM).expect("it runs");
    }
    running.finish().expect_exit(143).expect_stdout("saved");
    let asked = fs::read_to_string(bin.path().join("asked")).expect("scontrol was called");
    assert_eq!(asked, "requeue 77\n");
}

/// The documents of a manifest.
fn manifest(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(repository(name)).expect("readable");
    serde_saphyr::from_multiple(&text).expect("YAML")
}

/// The command of the first container of a pod's template.
fn command(document: &Value) -> Vec<String> {
    let words = document
        .pointer("/spec/template/spec/containers/0/command")
        .and_then(Value::as_array)
        .expect("a command");
    words
        .iter()
        .map(|word| word.as_str().expect("text").to_owned())
        .collect()
}

#[test]
fn the_pods_of_the_kubernetes_job_are_its_nodes() {
    let documents = manifest("deploy/kubernetes/job.yaml");
    let [service, job] = &documents[..] else {
        panic!("expected a service and a job");
    };
    let text = |document: &Value, pointer: &str| document.pointer(pointer).cloned().unwrap_or_default();
    let pods = text(job, "/spec/completions").as_u64().expect("a number");
    assert_eq!(
        text(job, "/spec/parallelism").as_u64(),
        Some(pods),
        "all run at once"
    );
    let (name, domain) = (
        text(job, "/metadata/name"),
        text(job, "/spec/template/spec/subdomain"),
    );
    assert_eq!(domain, text(service, "/metadata/name"));
    assert_eq!(text(service, "/spec/selector/job-name"), name);

    let words = command(job);
    assert_eq!(words[0], "ddp-run");
    let endpoint = format!(
        "{}-0.{}:29400",
        name.as_str().expect("text"),
        domain.as_str().expect("text")
    );
    let config = temp_dir();
    let target = config.path().join("train.yaml");
    let example = fs::read_to_string(repository("examples/single-node/train.yaml")).expect("readable");
    let data = repository("examples/data").display().to_string();
    fs::write(&target, example.replace("../data", &data)).expect("writable");
    let words: Vec<_> = words[1..]
        .iter()
        .map(|word| word.replace("/config/train.yaml", &target.display().to_string()))
        .collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    launch()
        .env("JOB_COMPLETION_INDEX", "3")
        .words(&["--dry-run"])
        .words(&words)
        .run()
        .expect_exit(0)
        .expect_stdout(&endpoint)
        .expect_stdout(&format!("nnodes             {pods} "))
        .expect_stdout("node_rank          3 ");
}

#[test]
fn the_daemons_of_kubernetes_and_systemd_are_started_rightly() {
    let documents = manifest("deploy/kubernetes/rendezvous.yaml");
    let deployment = documents.iter().find(|document| document["kind"] == "Deployment");
    let unit = fs::read_to_string(repository("deploy/systemd/ddp-rendezvous.service")).expect("readable");
    let start = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/"));
    let of_unit = start.expect("a command").split(' ').map(str::to_owned).collect();
    for words in [command(deployment.expect("a deployment")), of_unit] {
        assert_eq!(words[0], "ddp-rendezvous");
        // Any free port instead of the service's.
        let words = words[1..].iter().map(|word| word.replace(":29400", ":0"));
        let mut daemon = Program::new(env!("CARGO_BIN_EXE_ddp-rendezvous"))
            .args(words.map(Into::into))
            .start();
        daemon.wait_for("[::]:");
        daemon.signal(Signal::SIGTERM);
        daemon.finish().expect_exit(0);
    }
}
