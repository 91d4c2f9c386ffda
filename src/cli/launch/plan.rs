//! Stage two: settings from all layers become the plan of one agent, every default filled in.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ddp_launcher::{
    AgreedValue, CoreSet, LaunchPlan, NodeRange, SignalPlan, Variable, WorkerCommand, environment_of,
    signal_name,
};
use ddp_proto::ids::NodeRank;
use ddp_proto::utc;
use ddp_proto::words::counted;

use super::args::Args;
use super::host::{HostFacts, Protection};
use super::layers::{Given, check_nodes, check_target, kind, layers, refuse_standalone_with_nodes};
use super::output::{NewLogs, hand_over_terminal, log_dir, output_plan};
use super::target::{SelfExe, Target, TargetKind, python};
use crate::cli::error::CliError;
use crate::cli::machine::hardware::{Hardware, NoGpus, machine_cores, usable_cores};
use crate::cli::machine::numa::{Binding, bind};
use crate::cli::machine::topology::Topology;
use crate::cli::native::{self, Backend, Validated};
use crate::cli::settings::Settings;
use crate::cli::streams::Signals;
use crate::cli::values::{ProcCount, RdzvConf};
use crate::rendezvous::DEFAULT_JOB_ID;

/// How long to wait for the other nodes, as torchrun.
const JOIN_TIMEOUT: Duration = Duration::from_mins(10);
/// How long the daemon may be unreachable: nodes of one job rarely start further apart.
const CONNECT_TIMEOUT: Duration = Duration::from_mins(1);
/// How long the daemon may be unreachable while workers run.
const OUTAGE_TIMEOUT: Duration = Duration::from_mins(10);
/// Set to `1`, rank 0 opens the store at `MASTER_PORT` itself.
const NO_AGENT_STORE: &str = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE";
/// From SIGTERM to SIGKILL, as torchrun.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// A launch that is fully decided, but for the port of a daemon of its own.
#[derive(Debug)]
pub struct Launch {
    /// For the agent.
    pub plan: LaunchPlan,
    /// For [`super::host::resolve_host`].
    pub host: HostFacts,
    /// Name of the run, for people.
    pub title: String,
    /// The settings that were given.
    pub given: Vec<Given>,
    /// What `plan` comes to for its first worker.
    pub environment: Vec<Variable>,
    /// The configuration of a native target: it and its data files are as the workers need them.
    pub checked: Option<String>,
    /// For a dry run: a message about the run in the folder of a native target.
    pub found_run: Option<String>,
}

/// The target, and what all layers ask for.
struct Merged {
    target: Target,
    /// The configuration of a native target.
    validated: Option<Validated>,
    settings: Settings,
    given: Vec<Given>,
}

/// Reads the target, and merges the layers.
fn merge(args: Args, get_env: &impl Fn(&str) -> Option<String>) -> Result<Merged, CliError> {
    refuse_standalone_with_nodes(&args.settings)?;
    let variables = Settings::from_env(get_env)?;
    let kind = kind(&args, &variables)?;
    let target = Target::read(kind, args.target, args.target_args, args.overrides)?;
    let is_native = target.kind == TargetKind::Native;
    let validated = is_native.then(|| native::validate(Path::new(&target.name), &target.overrides));
    let validated = validated.transpose()?;
    let (settings, given) = layers(args.settings, variables, &target, validated.as_ref(), get_env)?;
    check_nodes(nodes(&settings), &settings)?;
    check_target(&target, &settings)?;
    Ok(Merged {
        target,
        validated,
        settings,
        given,
    })
}

/// As long as a node waits for the rendezvous at the start, or longer.
fn outage_timeout(conf: &RdzvConf) -> Duration {
    let at_the_start = conf.connect_timeout.unwrap_or(CONNECT_TIMEOUT);
    conf.outage_timeout.unwrap_or(OUTAGE_TIMEOUT.max(at_the_start))
}

fn nodes(settings: &Settings) -> NodeRange {
    settings.nnodes.unwrap_or(NodeRange { min: 1, max: 1 })
}

/// `4`, or `1 to 4`.
pub(super) fn range(nodes: NodeRange) -> String {
    if nodes.min == nodes.max {
        nodes.max.to_string()
    } else {
        format!("{} to {}", nodes.min, nodes.max)
    }
}

/// Merges the layers, looks at the target and at the machine.
pub fn resolve(
    args: Args,
    get_env: impl Fn(&str) -> Option<String>,
    exe: &SelfExe,
) -> Result<Launch, CliError> {
    let dry_run = args.dry_run;
    let Merged {
        target,
        validated,
        settings,
        given,
    } = merge(args, &get_env)?;
    let nodes = nodes(&settings);
    let alone = nodes.max == 1;
    let job = job(&settings, &target, validated.as_ref(), nodes);
    let (workers, cores) = places(&settings, validated.as_ref())?;
    if let Some(refusal) = (validated.as_ref()).and_then(|config| config.refusal(workers, nodes)) {
        return Err(refusal);
    }
    let mut output = output_plan(&settings, alone, workers)?;
    check_ports(&settings, &target, alone, workers)?;
    let mut signals = signals(&settings)?;
    let out_dir = claim_out_dir(validated.as_ref(), &job.run_id, alone && !dry_run)?;
    let conf = settings.rdzv_conf.clone().unwrap_or_default();
    let new_logs = NewLogs {
        job: &job.id,
        dry_run,
    };
    let log_dir = log_dir(&settings, out_dir, &output, new_logs)?;
    let native = target.kind == TargetKind::Native;
    if alone && workers == 1 && !native && log_dir.is_none() {
        hand_over_terminal(&mut output, &mut signals);
    }
    let plan = LaunchPlan {
        resume_hint: (validated.as_ref()).map(|config| config.resume_words(&job.run_id)),
        job_id: job.id,
        run_id: job.run_id,
        nodes,
        node_rank: settings.node_rank.map(NodeRank),
        workers,
        max_restarts: job.max_restarts,
        local_addr: settings.local_addr.clone(),
        agreed: job.agreed,
        join_timeout: conf.join_timeout.unwrap_or(JOIN_TIMEOUT),
        last_call: conf.last_call_timeout,
        takeover: conf.takeover_timeout,
        hang_timeout: settings.hang_timeout.filter(|time| !time.is_zero()),
        connect_timeout: conf.connect_timeout.unwrap_or(CONNECT_TIMEOUT),
        outage_timeout: outage_timeout(&conf),
        shutdown_timeout: settings.shutdown_timeout.unwrap_or(SHUTDOWN_TIMEOUT),
        log_dir,
        progress_bar: native && !output.raw && io::stderr().is_terminal(),
        output,
        role: settings.role.clone().unwrap_or_else(|| "default".into()),
        master_addr: settings.master_addr.clone(),
        master_port: settings.master_port,
        worker_ports: settings.worker_ports,
        virtual_local_rank: settings.virtual_local_rank.unwrap_or(false),
        signals,
        cores,
        event_log: settings.event_log_handler.clone().and_then(|log| log.0),
        command: command(&target, &settings, exe, &get_env),
    };
    Ok(Launch {
        environment: environment_of(&plan, &get_env),
        host: host_facts(settings, &plan, &get_env),
        title: (validated.as_ref()).map_or_else(|| plan.command.display_name.clone(), Validated::run_name),
        found_run: found_run(validated.as_ref().filter(|_| dry_run), &plan.run_id, alone)?,
        plan,
        given,
        checked: validated.map(|_| target.name.to_string_lossy().into_owned()),
    })
}

/// The command of every worker. As with torchrun, the agent hosts the store of what Python and `--no-python` run, and
/// replaces macros in their arguments. Other programs run verbatim and have `MASTER_PORT` to themselves.
fn command(
    target: &Target,
    settings: &Settings,
    exe: &SelfExe,
    get_env: &impl Fn(&str) -> Option<String>,
) -> WorkerCommand {
    let is_python = matches!(target.kind, TargetKind::Python | TargetKind::Module);
    let of_torchrun = is_python || settings.no_python == Some(true);
    WorkerCommand {
        agent_store: of_torchrun && get_env(NO_AGENT_STORE).as_deref() != Some("1"),
        macros: of_torchrun,
        ..target.command(exe, python(get_env, &std::env::current_exe().unwrap_or_default()))
    }
}

/// A job, as all of its nodes must describe it.
struct Job {
    id: String,
    /// Names the run's directory.
    run_id: String,
    agreed: BTreeMap<String, AgreedValue>,
    max_restarts: u32,
}

fn job(settings: &Settings, target: &Target, config: Option<&Validated>, nodes: NodeRange) -> Job {
    let max_restarts = settings
        .max_restarts
        .unwrap_or(target.kind.default_max_restarts());
    let flags = [
        ("--nnodes", range(nodes)),
        ("--max-restarts", max_restarts.to_string()),
    ];
    let agreed = target.agreed(&config.map_or_else(Vec::new, Validated::entries), &flags);
    // Without a name, several nodes must mean the same job without having spoken to each other.
    let unnamed = || match nodes.max {
        1 => utc::unique_id(SystemTime::now()),
        _ => DEFAULT_JOB_ID.to_owned(),
    };
    let id = settings.rdzv_id.clone().unwrap_or_else(unnamed);
    let all = agreed
        .values()
        .fold(0, |all: u64, value| all.rotate_left(7) ^ value.hash);
    Job {
        // Runs of different configurations do not share a directory only because neither has a name.
        run_id: match (&settings.rdzv_id, config) {
            (None, Some(_)) if nodes.max > 1 => format!("{id}-{:08x}", all as u32),
            (None, Some(config)) => config.newest_run().unwrap_or_else(|| id.clone()),
            _ => id.clone(),
        },
        id,
        agreed,
        max_restarts,
    }
}

fn host_facts(settings: Settings, plan: &LaunchPlan, get_env: &impl Fn(&str) -> Option<String>) -> HostFacts {
    HostFacts {
        protection: Protection::find(settings.insecure == Some(true), get_env),
        patience: plan.connect_timeout,
        // Port 0 is a free one: only one node alone can meet there, which `check_nodes` has seen to.
        endpoint: settings.rdzv_endpoint.filter(|endpoint| endpoint.port != 0),
        is_host: settings.rdzv_conf.and_then(|conf| conf.is_host),
        node_rank: settings.node_rank,
        job_id: plan.job_id.clone(),
        status_port: settings.status_port,
        metrics_file: (settings.metrics_file)
            .map(|file| file.to_string_lossy().replace("%j", &plan.job_id).into()),
        one_node: plan.nodes.max == 1,
    }
}

/// The number of workers on this node, and the cores of each; `config` is the target's, if it has one.
fn places(settings: &Settings, config: Option<&Validated>) -> Result<(u32, Vec<CoreSet>), CliError> {
    let hardware = Hardware::default();
    let workers = hardware.workers(settings.nproc_per_node.unwrap_or(ProcCount::Fixed(1)))?;
    let [usable, machine] = [usable_cores(), machine_cores()];
    // GPUs are looked for only where it matters.
    let computes_here = workers > usable
        && config.is_some_and(|config| match config.backend() {
            Backend::Cpu => true,
            Backend::Nccl => false,
            Backend::Auto => hardware.gpus().is_err(),
        });
    if let Some(words) = crowding(computes_here, workers, usable, machine) {
        for line in words.lines() {
            eprintln!("[ddp-run] {line}");
        }
    }
    Ok((workers, cores(settings, config, workers, &hardware)?))
}

/// A message where workers share the `cores` that this process may use: native workers that compute on them, or any
/// workers where the `machine` has more cores.
fn crowding(computes_here: bool, workers: u32, cores: u32, machine: u32) -> Option<String> {
    let (who, place) = (counted(workers, "worker"), counted(cores, "core"));
    if computes_here && workers > cores && cores >= machine {
        return Some(format!(
            "{who} compete for {place}: more workers than cores make a step slower\n  \
             hint: `--nproc-per-node cpu` starts one per core"
        ));
    }
    // What programs are asked for is taken as meant: they may compute elsewhere.
    (workers > cores && cores < machine).then(|| {
        format!(
            "{who} compete for {place}: the affinity mask and control group allow no more of the machine's {machine}\n  \
             hint: `srun --cpus-per-task`, `taskset` and container limits set how many cores are available"
        )
    })
}

/// The cores of each worker; none where they are not bound. Native workers on GPUs are bound to the node of theirs. What
/// may make a binding that was asked for a bad one is said once.
fn cores(
    settings: &Settings,
    config: Option<&Validated>,
    workers: u32,
    hardware: &Hardware,
) -> Result<Vec<CoreSet>, CliError> {
    let may_use_gpus = config.is_some_and(|config| config.backend() != Backend::Cpu);
    let by_default = || (may_use_gpus && hardware.gpus().is_ok()).then_some(Binding::Node);
    let is_asked_for = settings.numa_binding.is_some();
    let Some(binding) = settings.numa_binding.or_else(by_default) else {
        return Ok(Vec::new());
    };
    let seen = if settings.virtual_local_rank == Some(true) {
        hardware.gpus_apart(workers)
    } else {
        hardware.gpus().map(<[String]>::to_vec).map_err(Clone::clone)
    };
    let (gpus, unseen) = match seen {
        Ok(gpus) => (gpus, None),
        Err(NoGpus::Absent(_)) => (Vec::new(), None),
        Err(NoGpus::Driver(why)) => (Vec::new(), Some(format!("workers are not bound by GPU: {why}"))),
    };
    let bound = match bind(binding, workers, &Topology::read(&gpus)) {
        Err(_) if !is_asked_for => return Ok(Vec::new()),
        bound => bound.map_err(|problem| CliError::Conflict {
            problem: format!("`--numa-binding`: {problem}"),
            hint: "start fewer workers, or omit the flag".to_owned(),
        })?,
    };
    match unseen.or(bound.doubt) {
        Some(_) if !is_asked_for => return Ok(Vec::new()),
        Some(doubt) => eprintln!("[ddp-run] `--numa-binding`: {doubt}"),
        None => {}
    }
    Ok(bound.cores)
}

/// A signal that is passed on does not stop the job, even if it does so by default.
fn signals(settings: &Settings) -> Result<SignalPlan, CliError> {
    let numbers = |signals: &Option<Signals>| signals.clone().map(|signals| signals.0);
    let forward = numbers(&settings.forward_signals).unwrap_or_default();
    let is_forwarded = |number: &i32| forward.contains(number);
    let asked = numbers(&settings.signals_to_handle);
    if let Some(both) = asked.iter().flatten().copied().find(is_forwarded) {
        return Err(CliError::Conflict {
            problem: format!(
                "{} is in both `--signals-to-handle` and `--forward-signals`",
                signal_name(both)
            ),
            hint: "remove it from one of them: a signal either stops the job or is passed on to the workers"
                .to_owned(),
        });
    }
    let by_default = SignalPlan::default().stop.into_iter();
    let stop = asked.unwrap_or_else(|| by_default.filter(|number| !is_forwarded(number)).collect());
    let scope = settings.signal_scope.unwrap_or_default();
    Ok(SignalPlan { stop, forward, scope })
}

/// Each native worker of a job of several nodes listens at one port at a time.
fn check_ports(settings: &Settings, target: &Target, alone: bool, workers: u32) -> Result<(), CliError> {
    let Some(ports) = settings.worker_ports else {
        return Ok(());
    };
    if alone || target.kind != TargetKind::Native || ports.count() >= workers {
        return Ok(());
    }
    Err(CliError::Conflict {
        problem: format!(
            "`--worker-ports {ports}` is {}, but the {workers} workers of this node need one each",
            counted(ports.count(), "port")
        ),
        hint: "choose a larger range, with a few more than workers: ports that others have are skipped"
            .into(),
    })
}

/// Sees that a native run can begin, makes its folder where no other node could, and says where it is.
fn claim_out_dir(config: Option<&Validated>, job_id: &str, alone: bool) -> Result<Option<PathBuf>, CliError> {
    let Some(config) = config else { return Ok(None) };
    config.check_initial_weights(job_id)?;
    if alone {
        config.claim_out_dir(job_id)?;
    }
    Ok(Some(config.out_dir(job_id)))
}

/// A message about the run in the folder. A launch of one node would fail with this error; of several nodes, the workers
/// find out.
fn found_run(config: Option<&Validated>, run_id: &str, alone: bool) -> Result<Option<String>, CliError> {
    let Some(config) = config else { return Ok(None) };
    match config.found_run(run_id) {
        Err(error) if !alone => {
            let words = error.to_string();
            let reason = words.lines().next().unwrap_or_default();
            Ok(Some(format!("the workers would refuse to begin: {reason}")))
        }
        found => found,
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::super::args;
    use super::*;

    fn resolve_words(words: &[&str], env: &[(&str, &str)]) -> Result<Launch, CliError> {
        let argv = std::iter::once("ddp-run")
            .chain(words.iter().copied())
            .map(OsString::from);
        let args = args::parse(argv).expect("a valid command line");
        let get = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        resolve(args, get, &SelfExe::open().expect("proc is mounted"))
    }

    fn problem(words: &[&str]) -> String {
        resolve_words(words, &[])
            .expect_err("must be refused")
            .to_string()
    }

    #[test]
    fn more_workers_than_cores_are_reported() {
        assert_eq!(crowding(true, 4, 8, 8), None);
        assert_eq!(crowding(false, 16, 8, 8), None, "programs may compute elsewhere");
        insta::assert_snapshot!(crowding(true, 16, 8, 8).unwrap(), @r"
        16 workers compete for 8 cores: more workers than cores make a step slower
          hint: `--nproc-per-node cpu` starts one per core
        ");
        assert_eq!(crowding(true, 1, 1, 64), None);
        insta::assert_snapshot!(crowding(true, 2, 1, 64).unwrap(), @r"
        2 workers compete for 1 core: the affinity mask and control group allow no more of the machine's 64
          hint: `srun --cpus-per-task`, `taskset` and container limits set how many cores are available
        ");
    }

    #[test]
    fn the_command_line_beats_the_environment() {
        let launch = resolve_words(&["--nproc-per-node", "2", "true"], &[("PET_NPROC_PER_NODE", "5")]);
        assert_eq!(launch.expect("valid").plan.workers, 2);
        let launch = resolve_words(
            &["true"],
            &[("PET_NPROC_PER_NODE", "5"), ("PET_MAX_RESTARTS", "7")],
        );
        let plan = launch.expect("valid").plan;
        assert_eq!((plan.workers, plan.max_restarts), (5, 7));
    }

    #[test]
    fn variables_of_the_workers_are_inherited_from_the_environment_that_is_given() {
        let env = [("OMP_NUM_THREADS", "77"), ("RANK", "0"), ("EDITOR", "vi")];
        let launch = resolve_words(&["true"], &env).expect("valid");
        let inherited: Vec<_> = launch.environment.iter().filter(|v| v.inherited).collect();
        assert_eq!(inherited.len(), 1, "{inherited:?}");
        assert_eq!(
            (inherited[0].name.as_str(), inherited[0].value.as_str()),
            ("OMP_NUM_THREADS", "77")
        );
    }

    #[test]
    fn the_agent_hosts_the_store_of_what_torchrun_would_run() {
        let hosts = |words: &[&str], env: &[(&str, &str)]| {
            let launch = resolve_words(words, env).expect("valid");
            launch.plan.command.agent_store
        };
        assert!(hosts(&["-m", "train"], &[]));
        assert!(hosts(&["--no-python", "python3", "train.py"], &[]));
        assert!(hosts(&["python3", "train.py"], &[("PET_NO_PYTHON", "1")]));
        assert!(!hosts(&["./server"], &[]), "it may bind MASTER_PORT itself");
        assert!(!hosts(&["-m", "train"], &[(NO_AGENT_STORE, "1")]));
        let macros = |words: &[&str]| resolve_words(words, &[]).expect("valid").plan.command.macros;
        assert!(macros(&["-m", "train"]) && macros(&["--no-python", "echo", "${local_rank}"]));
        assert!(!macros(&["sh", "-c", "kill $$"]), "other programs run verbatim");
    }

    #[test]
    fn defaults_are_torchruns() {
        let plan = resolve_words(&["true"], &[]).expect("valid").plan;
        assert_eq!((plan.workers, plan.max_restarts), (1, 0));
        assert_eq!(plan.nodes, NodeRange { min: 1, max: 1 });
        assert_eq!(plan.shutdown_timeout, Duration::from_secs(30));
        assert!(plan.log_dir.is_none() && !plan.progress_bar);
        let other = resolve_words(&["true"], &[]).expect("valid").plan;
        assert_ne!(plan.job_id, other.job_id, "two runs must not share a directory");
    }

    #[test]
    fn standalone_beats_the_environment_but_not_the_command_line() {
        let env = [
            ("PET_NNODES", "4"),
            ("PET_RDZV_ENDPOINT", "node0"),
            ("PET_NODE_RANK", "3"),
        ];
        let launch = resolve_words(&["--standalone", "true"], &env).expect("valid");
        assert_eq!(launch.plan.nodes.max, 1);
        assert!(launch.host.endpoint.is_none() && launch.plan.node_rank.is_none());
        let words = ["--nnodes", "2", "--rdzv-endpoint", "a:1", "true"];
        let launch = resolve_words(&words, &[("PET_STANDALONE", "1")]).expect("valid");
        assert_eq!(
            launch.plan.nodes.max, 2,
            "a variable does not beat the command line"
        );
        assert_eq!(launch.host.endpoint.map(|e| e.to_string()), Some("a:1".into()));
        let env = [("PET_STANDALONE", "1"), ("PET_NNODES", "4")];
        let launch = resolve_words(&["--nnodes", "1", "true"], &env).expect("valid");
        assert_eq!(launch.plan.nodes.max, 1);
        insta::assert_snapshot!(problem(&["--standalone", "--nnodes", "2", "true"]), @r"
        `--standalone` means one node with a private rendezvous, but `--nnodes` asks for several nodes
          hint: omit one of the two flags
        ");
    }

    /// The store could not listen there: exit 69.
    #[test]
    fn master_flags_that_name_the_rendezvous_are_ignored() {
        let endpoint = [
            "--nnodes",
            "2",
            "--rdzv-endpoint",
            "node0:5000",
            "--rdzv-backend",
            "c10d",
        ];
        let master = |words: &[&str], env: &[(&str, &str)]| {
            let plan = resolve_words(&[&endpoint, words, &["true"]].concat(), env)
                .expect("valid")
                .plan;
            (plan.master_addr, plan.master_port)
        };
        assert_eq!(
            master(&["--master-addr", "NODE0", "--master-port", "5000"], &[]),
            (None, None)
        );
        let kubeflow = [("PET_MASTER_ADDR", "node0"), ("PET_MASTER_PORT", "5000")];
        assert_eq!(master(&[], &kubeflow), (None, None));
        assert_eq!(master(&[], &kubeflow[1..]), (None, None), "PET_MASTER_PORT alone");
        let elsewhere = (Some("node1".to_owned()), Some(5000));
        assert_eq!(master(&["--master-addr", "node1"], &kubeflow), elsewhere);
        let other_port = (Some("node0".to_owned()), Some(5001));
        assert_eq!(master(&["--master-port", "5001"], &kubeflow), other_port);
        let local = [
            "--rdzv-endpoint",
            "localhost:5",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            "5",
            "true",
        ];
        let plan = resolve_words(&local, &[]).expect("valid").plan;
        assert_eq!((plan.master_addr, plan.master_port), (None, None));
    }

    /// The workers found it after they had started.
    #[test]
    fn a_tensor_group_that_would_span_nodes_is_refused_before_anything_starts() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("text"), "x".repeat(999)).expect("writable");
        let yaml = dir.path().join("t.yaml");
        let model = "model: { kind: gpt2, n_layer: 1, n_head: 2, n_embd: 8, block_size: 8 }";
        let config = format!("{model}\ndata: {{ train: text }}\nparallel: {{ tensor: 2 }}\n");
        std::fs::write(&yaml, config).expect("writable");
        let launch = |nodes: &str, workers: &str| {
            let yaml = yaml.to_str().expect("unicode");
            let meet = ["--rdzv-endpoint", "a:1", yaml];
            resolve_words(
                &[&["--nnodes", nodes, "--nproc-per-node", workers], &meet[..]].concat(),
                &[],
            )
        };
        let refused = launch("2", "1").expect_err("tensor groups of two").to_string();
        assert!(
            refused.contains("t.yaml:3: `parallel.tensor` is 2, but a node has 1 rank: "),
            "{refused}"
        );
        launch("2", "2").expect("a group on each node");
        launch("1:2", "2").expect("a group on each node");
    }

    #[test]
    fn nodes_that_cannot_meet_are_refused() {
        insta::assert_snapshot!(problem(&["--nnodes", "2", "true"]), @r"
        2 nodes need a rendezvous, but `--rdzv-endpoint` is not set
          hint: give the address of one node on all nodes: `--rdzv-endpoint node0:29400`
        ");
        insta::assert_snapshot!(problem(&["--nnodes", "1:2", "true"]), @r"
        a job of 1 to 2 nodes needs a rendezvous, but `--rdzv-endpoint` is not set
          hint: give the address of one node on all nodes: `--rdzv-endpoint node0:29400`
        ");
        insta::assert_snapshot!(problem(&["--nnodes", "2", "--rdzv-endpoint", "a", "--node-rank", "2", "true"]), @r"
        `--node-rank 2` is out of range for `--nnodes 2`
          hint: node ranks run from 0 to 1
        ");
        insta::assert_snapshot!(problem(&["--nnodes", "2", "--rdzv-endpoint", "localhost:0", "true"]), @r"
        `--rdzv-endpoint localhost:0` picks a free port, so 2 nodes cannot find each other
          hint: give a port on all nodes; port 0 is for jobs of one node
        ");
    }

    #[test]
    fn one_node_at_port_0_meets_nobody() {
        let slurm = [("SLURM_NNODES", "4"), ("SLURM_NODEID", "3")];
        let launch = resolve_words(&["--rdzv-endpoint=localhost:0", "true"], &slurm).expect("valid");
        assert_eq!((launch.plan.nodes.max, launch.host.endpoint), (1, None));
    }

    #[test]
    fn several_nodes_keep_what_was_asked() {
        let words = [
            "--nnodes",
            "1:3",
            "--rdzv-endpoint",
            "node0:5",
            "--rdzv-id",
            "j",
            "--rdzv-conf",
        ];
        let words = [
            &words[..],
            &["is_host=0,join_timeout=5", "--node-rank", "1", "true"],
        ]
        .concat();
        let launch = resolve_words(&words, &[]).expect("valid");
        assert_eq!(launch.plan.job_id, "j");
        assert_eq!(launch.plan.join_timeout, Duration::from_secs(5));
        assert_eq!(launch.host.is_host, Some(false));
        assert_eq!(
            launch.host.endpoint.map(|e| e.to_string()),
            Some("node0:5".into())
        );
    }
}
