//! The files of `deploy/`, as far as a machine without a cluster can tell: their command lines are real ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::harness::{Program, binaries, children, ddp_rendezvous, ddp_train, launch, repository, temp_dir};

/// Starts its program as a step of two nodes, which are both this machine, with the variables that Slurm sets for each
/// task, and ends with the largest code, as `srun` does.
const SRUN: &str = r#"#!/bin/bash
echo $$ >"$ASKED.srun"
tasks=1
while [[ $1 == --* ]]; do
    case $1 in
        --ntasks-per-node=*) tasks=${1#*=} ;;
        --ntasks=*) ((${1#*=} == 2)) || exit 1 ;;
    esac
    shift
done
export SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=$((2 * tasks))
export SLURM_STEP_NODELIST='127.0.0.[1-2]' SLURM_STEP_TASKS_PER_NODE="$tasks(x2)" SLURM_NNODES=2 SLURM_NTASKS=$((2 * tasks))
for ((task = 0; task < 2 * tasks; task++)); do
    SLURM_PROCID=$task SLURM_NODEID=$((task / tasks)) SLURM_LOCALID=$((task % tasks)) "$@" & pids+=($!)
done
trap 'kill -TERM "${pids[@]}"' TERM
code=0
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; last=$?; done
    ((last > code)) && code=$last
done
exit "$code"
"#;

/// Remembers its arguments.
const SCONTROL: &str = "#!/bin/sh\necho \"$@\" >\"$ASKED\"\n";

/// Signals the step.
const SCANCEL: &str = "#!/bin/sh\nkill -TERM \"$(cat \"$ASKED.srun\")\"\n";

/// A program that finds a pretended Slurm of two nodes, which has given it a job.
fn under_slurm(bin: &Path, job: &str, program: Program) -> Program {
    for (name, text) in [("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)] {
        fs::write(bin.join(name), text).expect("writable");
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).expect("ours");
    }
    let built = binaries().display();
    let path = std::env::var("PATH").unwrap_or_default();
    program
        .env("PATH", format!("{}:{built}:{path}", bin.display()))
        .env("ASKED", bin.join("asked"))
        .env("SLURM_JOB_ID", job)
}

/// A job whose first step meets at a free port: the port follows from the job's number.
fn job_with_a_free_port() -> String {
    let is_free = |job: &String| {
        let dry = launch()
            .env("SLURM_JOB_ID", job)
            .env("SLURM_STEP_ID", "0")
            .env("SLURM_STEP_NUM_NODES", "2")
            .env("SLURM_STEP_NODELIST", "127.0.0.[1-2]")
            .words(["--dry-run"])
            .target("true")
            .run();
        let shown = dry.expect_exit(0).stdout().join("\n");
        let (_, rest) = shown.split_once("127.0.0.1:").expect("an endpoint");
        let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
        TcpListener::bind(("0.0.0.0", port.parse().expect("a port"))).is_ok()
    };
    // Tests run beside each other, each in a thread of its own, and so do processes of tests.
    let first = u64::from(std::process::id()) * 1000 + NEXT_JOB.fetch_add(10, Ordering::Relaxed);
    let mut jobs = (first..first + 10).map(|job| job.to_string());
    jobs.find(is_free).expect("a port of ten is free")
}

/// What distinguishes the jobs of this process.
static NEXT_JOB: AtomicU64 = AtomicU64::new(0);

/// The batch script, whose workers run a shell script.
fn batch(bin: &Path, job: &str, script: &str) -> Program {
    batch_of(bin, job, &["--no-python", "sh", "-c", script])
}

/// The batch script with these arguments.
fn batch_of(bin: &Path, job: &str, arguments: &[&str]) -> Program {
    let arguments = arguments.iter();
    let program = Program::new(repository("deploy/slurm/train.sbatch")).args(arguments);
    under_slurm(bin, job, program)
        .env("SLURM_JOB_NUM_NODES", "2")
        .env("PET_NPROC_PER_NODE", "1")
}

#[test]
fn the_batch_script_of_slurm_starts_a_node_each() {
    let bin = temp_dir();
    let finished = batch(
        bin.path(),
        &job_with_a_free_port(),
        // None fails before both nodes have printed.
        "echo node $GROUP_RANK of $GROUP_WORLD_SIZE; touch $ASKED.$GROUP_RANK
         until [ -e $ASKED.0 ] && [ -e $ASKED.1 ]; do sleep 0.02; done; exit $((RANK == 1 ? 42 : 0))",
    )
    .run();
    finished
        .expect_exit(42)
        .expect_stdout("node 0 of 2")
        .expect_stdout("node 1 of 2");
    assert!(!bin.path().join("asked").exists(), "a failure is not requeued");
}

/// A worker that saves when it is asked to stop.
const SAVES: &str = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done";

#[test]
fn a_preempted_batch_job_is_requeued() {
    let (bin, job) = (temp_dir(), job_with_a_free_port());
    let mut running = batch(bin.path(), &job, SAVES).start();
    running.wait_for("[0] ready");
    running.wait_for("[1] ready");
    // Slurm signals the step, not the batch script.
    let step = children(running.pid());
    for srun in step {
        kill(Pid::from_raw(srun), Signal::SIGTERM).expect("it runs");
    }
    running.finish().expect_exit(143).expect_stdout("saved");
    let asked = fs::read_to_string(bin.path().join("asked")).expect("scontrol was called");
    assert_eq!(asked, format!("requeue {job}\n"));
}

/// `sbatch --signal=B:USR1@300` signals the script only. Its shell died of that, and so its job.
#[test]
fn a_signal_to_the_batch_script_reaches_the_launchers() {
    let (bin, job) = (temp_dir(), job_with_a_free_port());
    let mut running = batch(bin.path(), &job, SAVES).start();
    running.wait_for("[0] ready");
    running.wait_for("[1] ready");
    kill(Pid::from_raw(running.pid()), Signal::SIGUSR1).expect("it runs");
    running.finish().expect_exit(143).expect_stdout("saved");
    let asked = fs::read_to_string(bin.path().join("asked")).expect("scontrol was called");
    assert_eq!(asked, format!("requeue {job}\n"));
}

/// A worker that dies of SIGTERM each time looks like a job that Slurm stopped.
#[test]
fn a_batch_job_is_requeued_a_limited_number_of_times() {
    // Bash takes `08` for an octal number, which has no digit 8.
    for (count, limit, is_requeued) in [("1", "2", true), ("2", "2", false), ("8", "08", false)] {
        let (bin, job) = (temp_dir(), job_with_a_free_port());
        // `$$` is a dollar sign in the arguments of what torchrun would run.
        let finished = batch(bin.path(), &job, "kill -TERM $$$$")
            .env("SLURM_RESTART_COUNT", count)
            .env("MAX_REQUEUES", limit)
            .run();
        finished.expect_exit(143);
        assert_eq!(bin.path().join("asked").exists(), is_requeued, "after {count}");
        if !is_requeued {
            finished.expect_stderr(&format!(
                "job {job} is not requeued: it was requeued {count} times already (MAX_REQUEUES={count})"
            ));
        }
    }
}

/// A job of one node had a new directory after each requeue otherwise, and began at step 0.
#[test]
fn a_batch_job_of_a_configuration_resumes() {
    let bin = temp_dir();
    let config = repository("examples/single-node/train.yaml")
        .display()
        .to_string();
    let arguments = ["--dry-run", &config, "--set", "run.resume=never"];
    batch_of(bin.path(), &job_with_a_free_port(), &arguments)
        .run()
        .expect_exit(0)
        .expect_stdout("--set run.resume=auto --set run.resume=never");
    let finished = batch_of(
        bin.path(),
        &job_with_a_free_port(),
        &["--dry-run", "true", &config],
    )
    .run();
    let commands = finished.expect_exit(0).stdout().join("\n");
    assert!(
        !commands.contains("--set"),
        "a program has no configuration: {commands}"
    );
}

/// `srun` with its options, and `ddp-run` with two workers a node that print their places.
fn step(bin: &Path, options: &str) -> Program {
    let place = "echo place $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $TORCHELASTIC_RUN_ID";
    let line = format!("exec srun {options} ddp-run --nproc-per-node 2 sh -c '{place}'");
    let job = job_with_a_free_port();
    under_slurm(bin, &job, Program::new("sh").args(["-c", &line]))
}

#[test]
fn a_step_of_slurm_needs_no_other_flag() {
    let bin = temp_dir();
    let finished = step(bin.path(), "--ntasks-per-node=1").run();
    let mut places: Vec<_> = finished
        .expect_exit(0)
        .stdout()
        .iter()
        .filter_map(|line| line.split_once("] place "))
        .map(|(_, place)| place.rsplit_once(' ').expect("a run's id"))
        .collect();
    places.sort_unstable();
    let (places, names): (Vec<_>, Vec<_>) = places.into_iter().unzip();
    assert_eq!(places, ["0 0 0 4", "1 1 0 4", "2 0 1 4", "3 1 1 4"]);
    assert!(
        names
            .iter()
            .all(|name| name.starts_with("slurm-") && *name == names[0]),
        "{names:?}"
    );
}

#[test]
fn a_step_of_several_tasks_a_node_is_refused() {
    let bin = temp_dir();
    let finished = step(bin.path(), "--ntasks-per-node=2").run();
    finished
        .expect_exit(2)
        .expect_stderr("srun starts 4 copies of ddp-run on 2 nodes, expected one per node")
        .expect_stderr("hint: pass `--ntasks-per-node=1` to srun");
    assert!(finished.stdout().is_empty(), "no worker was started");
}

/// The documents of a manifest.
fn manifest(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(repository(name)).expect("readable");
    serde_saphyr::from_multiple(&text).expect("YAML")
}

/// The document of this kind.
fn of_kind<'a>(documents: &'a [Value], kind: &str) -> &'a Value {
    let found = documents.iter().find(|document| document["kind"] == kind);
    found.unwrap_or_else(|| panic!("there is no {kind}"))
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
    let [service, _, job] = &documents[..] else {
        panic!("expected a service, a policy and a job");
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

    // One pod's SIGTERM ends the job on all nodes with 143: what is no failure on one is none on the others.
    let rules = text(job, "/spec/podFailurePolicy/rules");
    let actions_on = |code: u64| -> Vec<Value> {
        let rules = rules.as_array().expect("rules").iter();
        let listed = |rule: &&Value| {
            let codes = rule.pointer("/onExitCodes/values").and_then(Value::as_array);
            codes.is_some_and(|codes| codes.contains(&code.into()))
        };
        rules.filter(listed).map(|rule| rule["action"].clone()).collect()
    };
    assert_eq!(actions_on(93), ["FailJob"]);
    assert_eq!(actions_on(78), ["FailJob"], "closed by an operator");
    assert_eq!(actions_on(143), ["Ignore"]);
    let rules = rules.as_array().expect("rules").iter();
    let conditions: Vec<_> = rules
        .filter_map(|rule| rule["onPodConditions"].as_array())
        .flatten()
        .collect();
    assert!(!conditions.is_empty(), "a drained machine is a condition");
    for condition in conditions {
        // Not a boolean: the API server refuses the whole job.
        assert_eq!(condition["status"], "True", "{condition}");
    }

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
        .words(["--dry-run"])
        .words(&words)
        .run()
        .expect_exit(0)
        .expect_stdout(&endpoint)
        .expect_stdout(&format!("nnodes             {pods} "))
        .expect_stdout("node_rank          3 ");
}

/// Lets only pods with this label connect to pods with it.
fn check_policy(policy: &Value, label: &str, name: &Value) {
    let pods = json!({ "matchLabels": { label: name } });
    assert_eq!(policy["spec"]["podSelector"], pods);
    assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress"]));
    assert_eq!(
        policy["spec"]["ingress"],
        json!([{ "from": [{ "podSelector": pods }] }])
    );
}

#[test]
fn pods_of_the_kubernetes_jobs_accept_their_own_pods_only() {
    let jobset_name = "jobset.sigs.k8s.io/jobset-name";
    for (file, kind, label) in [("job", "Job", "job-name"), ("jobset", "JobSet", jobset_name)] {
        let documents = manifest(&format!("deploy/kubernetes/{file}.yaml"));
        let name = &of_kind(&documents, kind)["metadata"]["name"];
        check_policy(of_kind(&documents, "NetworkPolicy"), label, name);
    }
    // A runtime has none; the guide has one for the job that it shows.
    let guide = fs::read_to_string(repository("docs/kubernetes.md")).expect("readable");
    let blocks = guide.split("```yaml\n").skip(1);
    let documents: Vec<Value> = blocks
        .filter_map(|block| block.split("```").next())
        .filter(|block| block.starts_with("apiVersion"))
        .map(|block| serde_saphyr::from_str(block).expect("YAML"))
        .collect();
    let name = &of_kind(&documents, "TrainJob")["metadata"]["name"];
    check_policy(of_kind(&documents, "NetworkPolicy"), jobset_name, name);
}

/// A JobSet and a runtime of Kubeflow start the same command with the same parts as the plain job.
#[test]
fn a_jobset_and_a_training_runtime_start_the_same_job() {
    let job = &manifest("deploy/kubernetes/job.yaml")[2];
    let documents = manifest("deploy/kubernetes/jobset.yaml");
    let jobset = of_kind(&documents, "JobSet");
    let template = &jobset["spec"]["replicatedJobs"][0]["template"];
    for field in ["completions", "parallelism", "completionMode", "podFailurePolicy"] {
        assert_eq!(template["spec"][field], job["spec"][field], "{field}");
    }
    let (own, of_job) = (command(template), command(job));
    let others: Vec<_> = own.iter().filter(|word| !of_job.contains(word)).collect();
    // `<set>-<job>-<number>-<pod>.<set>`
    assert_eq!(others, ["--rdzv-endpoint=gpt-node-0-0.gpt:29400"]);
    let runtime = &manifest("deploy/kubernetes/training-runtime.yaml")[0];
    let set = &runtime["spec"]["template"]["spec"];
    let of_jobset = &template["spec"];
    let template = &set["replicatedJobs"][0]["template"];
    assert_eq!(set["failurePolicy"], jobset["spec"]["failurePolicy"]);
    assert_eq!(template["spec"]["backoffLimit"], of_jobset["backoffLimit"]);
    assert_eq!(
        of_jobset["backoffLimit"], 0,
        "the set starts its pods again, not the job"
    );
    // Its container has another name.
    let policy = of_jobset["podFailurePolicy"].to_string();
    let policy = policy.replace(r#""containerName":"train""#, r#""containerName":"node""#);
    assert_eq!(template["spec"]["podFailurePolicy"].to_string(), policy);
    assert_eq!(
        template["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"],
        "trainer"
    );
    // The container that Trainer gives its variables.
    assert_eq!(
        template.pointer("/spec/template/spec/containers/0/name"),
        Some(&json!("node"))
    );
    let words = command(template);
    let flags: Vec<_> = words[1..]
        .iter()
        .filter(|word| !word.contains("train.yaml"))
        .map(String::as_str)
        .collect();
    let flags: Vec<_> = flags
        .into_iter()
        .filter(|word| !word.starts_with("--set"))
        .collect();
    launch()
        .env("PET_NNODES", "4")
        .env("PET_NPROC_PER_NODE", "2")
        .env("PET_NODE_RANK", "3")
        .env("PET_MASTER_ADDR", "gpt-node-0-0.gpt")
        .env("PET_MASTER_PORT", "29400")
        .env("PET_RDZV_ID", "gpt")
        .words(["--dry-run"])
        .words(&flags)
        .target("true")
        .run()
        .expect_exit(0)
        .expect_stdout("gpt-node-0-0.gpt:29400")
        .expect_stdout("node_rank          3 ");
}

/// What Kubernetes itself asks of the daemon is what it serves, and nobody else reads its tokens.
#[test]
fn the_daemon_of_kubernetes_is_one_and_has_its_probes() {
    let documents = manifest("deploy/kubernetes/rendezvous.yaml");
    let of_kind = |kind: &str| documents.iter().find(|document| document["kind"] == kind);
    let set = of_kind("StatefulSet").expect("a deployment would run two at a time");
    assert_eq!(set["spec"]["replicas"], 1);
    let service = of_kind("Service").expect("a service");
    assert_eq!(set["spec"]["serviceName"], service["metadata"]["name"]);
    // Else a daemon that recovers waits for nodes that cannot reach it.
    assert_eq!(service["spec"]["publishNotReadyAddresses"], true);
    let container = set
        .pointer("/spec/template/spec/containers/0")
        .expect("a container");
    for (probe, path) in [("livenessProbe", "/livez"), ("readinessProbe", "/readyz")] {
        assert_eq!(
            container[probe]["httpGet"],
            json!({ "path": path, "port": "metrics" })
        );
    }
    assert!(container["resources"]["limits"]["memory"].is_string());
    assert_eq!(
        set["spec"]["volumeClaimTemplates"][0]["metadata"]["name"],
        "state"
    );
    let mounted = container["volumeMounts"].as_array().expect("mounts");
    let tokens = mounted
        .iter()
        .find(|mount| mount["name"] == "token")
        .expect("the tokens");
    let directory = tokens["mountPath"].as_str().expect("a path");
    for variable in container["env"].as_array().expect("variables") {
        let file = variable["value"].as_str().expect("a path");
        assert!(file.starts_with(directory), "`{file}` is mounted");
    }
    for name in ["job", "jobset", "training-runtime", "rendezvous"] {
        let text =
            fs::read_to_string(repository(&format!("deploy/kubernetes/{name}.yaml"))).expect("readable");
        // Readable by the group of `fsGroup`: the launcher refuses what other users can read.
        let secret = "secret: { secretName: ddp-run-token, defaultMode: 0440";
        assert!(
            text.contains(secret) && text.contains("fsGroup: 1000"),
            "{name} has the token"
        );
        let is_for_nodes = text.contains("items: [{ key: token, path: token }]");
        assert_eq!(
            is_for_nodes,
            name != "rendezvous",
            "{name}: nodes have no token of operators"
        );
        assert!(
            !text.contains("kind: Secret"),
            "{name} has no secret of its own, which everyone would share"
        );
    }
}

/// Names of samples, with their labels and the values of these.
type Samples<'a> = BTreeMap<&'a str, BTreeMap<&'a str, BTreeSet<&'a str>>>;

/// Labels and values in the braces with which a text begins, if it does; operators are passed over.
fn labels_and_values(text: &str) -> Vec<(&str, &str)> {
    let inner = text.strip_prefix('{').and_then(|rest| rest.split_once('}'));
    let parts: Vec<&str> = inner.map_or("", |(inner, _)| inner).split('"').collect();
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let pairs = parts.chunks_exact(2);
    pairs
        .map(|pair| (pair[0].trim_matches(|c: char| !is_of_name(c)), pair[1]))
        .collect()
}

/// The samples of an exposition.
fn samples(served: &str) -> Samples<'_> {
    let mut samples = Samples::new();
    for line in served.lines().filter(|line| !line.starts_with('#')) {
        let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap_or(line.len()));
        let labels = samples.entry(name).or_default();
        for (label, value) in labels_and_values(rest) {
            labels.entry(label).or_default().insert(value);
        }
    }
    samples
}

/// Metrics of the source that have no sample yet: those that come with jobs.
fn metrics_that_come_later(samples: &Samples<'_>) -> BTreeSet<String> {
    let source = fs::read_to_string(repository("src/rendezvous/service/metrics.rs")).expect("readable");
    let names = source.split(".register(").skip(1);
    let names = names.filter_map(|rest| rest.split('"').nth(1));
    let has_sample = |name: &String| {
        let suffixes = ["", "_total", "_bucket", "_info"].iter();
        suffixes
            .map(|suffix| format!("{name}{suffix}"))
            .any(|sample| samples.contains_key(sample.as_str()))
    };
    let names = names.map(|name| format!("ddp_{name}"));
    names.filter(|name| !has_sample(name)).collect()
}

/// What a text with PromQL asks for that no sample answers.
fn unanswered(text: &str, samples: &Samples<'_>, later: &BTreeSet<String>) -> Vec<String> {
    // As it is within a string of JSON.
    let text = text.replace("\\\"", "\"");
    let mut unanswered = Vec::new();
    for (at, _) in text.match_indices("ddp_") {
        let rest = &text[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
        let Some(labels) = samples.get(name) else {
            // Of `--metrics-file`, which a test beside it compares.
            let is_of_file = name.starts_with("ddp_job_");
            if !is_of_file && !later.contains(name.trim_end_matches("_total")) {
                unanswered.push(name.to_owned());
            }
            continue;
        };
        for (label, asked) in labels_and_values(rest) {
            // Prometheus adds these.
            if ["instance", "job"].contains(&label) {
                continue;
            }
            let Some(known) = labels.get(label) else {
                unanswered.push(format!("{name}{{{label}}}"));
                continue;
            };
            let is_word = |value: &&str| value.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            let words = asked.split('|').filter(is_word);
            let unknown = words.filter(|value| !known.contains(value));
            unanswered.extend(unknown.map(|value| format!("{name}{{{label}={value}}}")));
        }
    }
    unanswered
}

/// Every metric that alerts and the dashboard ask for is one that the daemon serves.
#[test]
fn alerts_and_dashboard_ask_for_metrics_that_exist() {
    let args = "serve --listen 127.0.0.1:0 --metrics-addr 127.0.0.2:0".split(' ');
    let mut daemon = ddp_rendezvous().args(args).start();
    let line = daemon.wait_for("http://127.0.0.2:");
    let (_, address) = line.split_once("http://").expect("an address");
    let served = crate::operators::get(address.trim_end_matches('/'), "/metrics", "").body;
    let samples = samples(&served);
    let later = metrics_that_come_later(&samples);
    let none: Vec<String> = Vec::new();
    for file in ["alerts.yaml", "dashboard.json"] {
        let text = fs::read_to_string(repository(&format!("deploy/monitoring/{file}"))).expect("readable");
        assert!(text.matches("ddp_").count() > 5, "{file}");
        assert_eq!(
            unanswered(&text, &samples, &later),
            none,
            "{file} asks for them, but this is served:\n{served}"
        );
    }
    serde_json::from_str::<Value>(
        &fs::read_to_string(repository("deploy/monitoring/dashboard.json")).expect("readable"),
    )
    .expect("JSON");
    daemon.signal(Signal::SIGTERM);
    daemon.finish().expect_exit(0);
}

/// The image's user is not root either.
#[test]
fn no_container_runs_as_root() {
    let image = fs::read_to_string(repository("deploy/container/Containerfile")).expect("readable");
    let rust = format!("/rust:{}.", env!("CARGO_PKG_RUST_VERSION"));
    assert!(image.contains(&rust), "an exact version that builds it:\n{image}");
    let user = image.lines().find_map(|line| line.strip_prefix("USER "));
    let user: u64 = user
        .and_then(|user| user.parse().ok())
        .expect("a number, which Kubernetes can check");
    for name in ["deploy/kubernetes/job.yaml", "deploy/kubernetes/rendezvous.yaml"] {
        let documents = manifest(name);
        let pod = documents
            .iter()
            .find_map(|document| document.pointer("/spec/template/spec"));
        let context = &pod.expect("a pod")["securityContext"];
        assert_eq!(context["runAsNonRoot"], true, "{name}");
        assert_eq!(context["runAsUser"], user, "{name}");
    }
}

#[test]
fn the_daemons_of_kubernetes_and_systemd_are_started_rightly() {
    let documents = manifest("deploy/kubernetes/rendezvous.yaml");
    let set = documents
        .iter()
        .find(|document| document["kind"] == "StatefulSet");
    let unit = fs::read_to_string(repository("deploy/systemd/ddp-rendezvous.service")).expect("readable");
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart="));
    assert!(
        unit.contains("\nStateDirectory=ddp-rendezvous\n"),
        "it makes the directory"
    );
    let of_unit = start.expect("a command").split(' ').map(str::to_owned).collect();
    for words in [command(set.expect("a stateful set")), of_unit] {
        assert_eq!(words[0], "ddp-rendezvous");
        // Any free port instead of the service's, and a directory of the test's own.
        let state = temp_dir();
        let state = state.path().to_str().expect("unicode");
        let words = words[1..].iter().map(|word| match word.as_str() {
            "/state" | "/var/lib/ddp-rendezvous" => state.to_owned(),
            word => word.replace(":29400", ":0").replace(":9400", ":0"),
        });
        let mut daemon = ddp_rendezvous().args(words).start();
        daemon.wait_for("[::]:");
        daemon.signal(Signal::SIGTERM);
        daemon.finish().expect_exit(0);
    }
}

#[test]
fn every_program_prints_its_completions() {
    let (run, daemon, train) = (
        Program::new(env!("CARGO_BIN_EXE_ddp-run")),
        ddp_rendezvous(),
        ddp_train(),
    );
    run.args(["--completions", "bash"])
        .run()
        .expect_stdout("--nproc-per-node");
    daemon
        .args(["completions", "bash"])
        .run()
        .expect_stdout("--listen");
    train
        .args(["completions", "bash"])
        .run()
        .expect_stdout("tokenize");
}
