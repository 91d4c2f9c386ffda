//! What a batch system, MPI or Kubernetes says of a job: the layer that is asked last, where flags, variables and the
//! YAML are silent.
//!
//! | from | number of nodes | rank of the node | rendezvous | name |
//! |---|---|---|---|---|
//! | `srun`, one `ddp-run` a node | `SLURM_STEP_NUM_NODES` | `SLURM_NODEID`, else `SLURM_PROCID` | first of `SLURM_STEP_NODELIST`, a port that follows from the name | `SLURM_JOB_ID.SLURM_STEP_ID` |
//! | Slurm, with `--rdzv-endpoint` | `SLURM_NNODES` | the same | | the same, if the step has exactly the job's nodes |
//! | `srun` on one node | | | | `SLURM_JOB_ID.SLURM_STEP_ID`, if a run is continued in the folder of that name |
//! | `mpirun`, one `ddp-run` a node | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_RANK` | first of `PBS_NODEFILE`, `LSB_MCPU_HOSTS`, `SLURM_JOB_NODELIST`, a port that follows from the name | `PMIX_NAMESPACE`, which each `mpirun` has anew |
//! | another PMIx launcher, with `--nnodes` and `--rdzv-endpoint` | | `PMIX_RANK` | | |
//! | an indexed Kubernetes job, with `--rdzv-endpoint` | | `JOB_COMPLETION_INDEX` | | |
//!
//! `SLURM_PROCID` is the number of a task, and that of its node only where each node has one.
//!
//! A batch script that starts `ddp-run` itself, without `srun`, runs it on one node, whatever was allocated.

use std::net::IpAddr;

use crate::cli::error::CliError;
use crate::cli::settings::Settings;
use crate::cli::values;

/// Below the ports that systems give to outgoing connections (`ip_local_port_range`), and below the default port.
const STEP_PORTS: std::ops::Range<u16> = 20_000..29_000;

/// `SLURM_STEP_ID` of the shell that `salloc` starts on the first node, with `LaunchParameters=use_interactive_step`.
const INTERACTIVE_STEP: &str = "4294967290";

const MPI_SIZE: &str = "OMPI_COMM_WORLD_SIZE";
const MPI_RANK: &str = "OMPI_COMM_WORLD_RANK";

/// What the batch system says, and where.
#[derive(Debug, Default)]
pub struct Layer {
    /// The settings that follow.
    pub settings: Settings,
    /// Setting and variable.
    variables: Vec<(&'static str, &'static str)>,
    /// A message, if nodes of the allocation stay unused.
    pub unused: Option<String>,
}

impl Layer {
    /// The variable from which a setting of this layer comes.
    pub fn variable(&self, setting: &str) -> Option<&'static str> {
        let mut given = self.variables.iter().rev();
        given
            .find(|(name, _)| *name == setting)
            .map(|(_, variable)| *variable)
    }

    fn set(
        &mut self,
        name: &'static str,
        variable: &'static str,
        value: Option<String>,
    ) -> Result<(), CliError> {
        let Some(value) = value else {
            return Ok(());
        };
        self.variables.push((name, variable));
        self.settings
            .set(name, &value)
            .map_err(|message| CliError::bad_variable(variable, &value, &message))
    }
}

/// The layer below `upper`, from the variables that `get` reads. `resumes_by_id`: a job of one node needs its id again
/// when it is requeued. Others get a new one each time, since one step may start several.
pub fn layer(
    upper: &Settings,
    resumes_by_id: bool,
    get: impl Fn(&str) -> Option<String>,
) -> Result<Layer, CliError> {
    let get = |name: &str| get(name).filter(|value| !value.is_empty());
    let mut layer = Layer::default();
    if upper.standalone == Some(true) {
        return Ok(layer);
    }
    let in_step = get("SLURM_STEP_NUM_NODES").is_some_and(|count| count != "1");
    match (&upper.rdzv_endpoint, &upper.master_addr) {
        // One node alone, which meets no other.
        (Some(endpoint), _) if endpoint.port == 0 => return Ok(layer),
        (Some(endpoint), _) => {
            layer.set("node_rank", "JOB_COMPLETION_INDEX", get("JOB_COMPLETION_INDEX"))?;
            // Other nodes cannot meet on a loopback address, whatever was allocated.
            if in_step || !is_loopback(&endpoint.host) {
                of_known_meeting(&mut layer, upper, &get)?;
            }
        }
        // Without a step it is an address for one node's own workers, as likely as not.
        (None, Some(_)) if in_step => of_known_meeting(&mut layer, upper, &get)?,
        (None, None) if upper.nnodes.is_none_or(|nodes| nodes.max > 1) && is_of_mpirun(&get) => {
            of_mpirun(&mut layer, &get)?;
            meet_at_first_host(&mut layer, &get)?;
        }
        (None, None) if upper.nnodes.is_none_or(|nodes| nodes.max > 1) => {
            of_srun(&mut layer, resumes_by_id, &get)?;
            layer.unused = unused_nodes(&get);
        }
        _ => {}
    }
    // A rank that the number of nodes does not allow belongs to something else, and is left alone.
    let settings = &mut layer.settings;
    let nodes = upper.nnodes.or(settings.nnodes).map_or(1, |nodes| nodes.max);
    settings.node_rank = settings.node_rank.filter(|rank| *rank < nodes);
    Ok(layer)
}

/// A name or an address that other machines cannot reach.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Where nodes meet is given: who they are may still be left to the batch system.
fn of_known_meeting(
    layer: &mut Layer,
    upper: &Settings,
    get: &impl Fn(&str) -> Option<String>,
) -> Result<(), CliError> {
    if is_of_mpirun(get) {
        return match upper.nnodes {
            Some(nodes) if nodes.max == 1 || upper.node_rank.is_some() => Ok(()),
            _ => of_mpirun(layer, get),
        };
    }
    layer.set("nnodes", "SLURM_NNODES", get("SLURM_NNODES"))?;
    set_slurm_rank(layer, get)?;
    if layer.settings.node_rank.is_none() && get("SLURM_NNODES").is_none() {
        layer.set("node_rank", "PMIX_RANK", get("PMIX_RANK"))?;
    }
    let step_nodes = get("SLURM_STEP_NUM_NODES").and_then(|count| count.parse().ok());
    let nodes = upper.nnodes.or(layer.settings.nnodes);
    // Any other step may be a part of a job only.
    if nodes.is_some_and(|nodes| nodes.min > 1 && nodes.min == nodes.max && step_nodes == Some(nodes.max)) {
        one_launcher_a_node(get)?;
        layer.set("rdzv_id", "SLURM_JOB_ID", step_name(get))?;
    }
    Ok(())
}

/// A step that `srun` started.
fn of_srun(
    layer: &mut Layer,
    resumes_by_id: bool,
    get: &impl Fn(&str) -> Option<String>,
) -> Result<(), CliError> {
    let (Some(count), Some(list)) = (get("SLURM_STEP_NUM_NODES"), get("SLURM_STEP_NODELIST")) else {
        return Ok(());
    };
    one_launcher_a_node(get)?;
    if count == "1" {
        let name = step_name(get).filter(|_| resumes_by_id);
        return layer.set("rdzv_id", "SLURM_JOB_ID", name);
    }
    layer.set("nnodes", "SLURM_STEP_NUM_NODES", Some(count))?;
    set_slurm_rank(layer, get)?;
    let name = step_name(get);
    let port = name.as_deref().map_or(values::DEFAULT_PORT, port_of_step);
    let first = format!("{}:{port}", first_host(&list));
    layer.set("rdzv_endpoint", "SLURM_STEP_NODELIST", Some(first))?;
    layer.set("rdzv_id", "SLURM_JOB_ID", name)
}

/// Open MPI's `mpirun`, or `jsrun`, started several copies.
fn is_of_mpirun(get: &impl Fn(&str) -> Option<String>) -> bool {
    get(MPI_SIZE).is_some_and(|size| size != "1")
}

/// The copies that `mpirun` started are the nodes.
fn of_mpirun(layer: &mut Layer, get: &impl Fn(&str) -> Option<String>) -> Result<(), CliError> {
    if let Some(copies) = get("OMPI_COMM_WORLD_LOCAL_SIZE").filter(|copies| copies != "1") {
        return Err(CliError::Conflict {
            problem: format!("mpirun starts {copies} copies of ddp-run on this node, expected one per node"),
            hint: "pass `-N 1` to mpirun: each ddp-run starts the workers of its node".to_owned(),
        });
    }
    layer.set("nnodes", MPI_SIZE, get(MPI_SIZE))?;
    layer.set("node_rank", MPI_RANK, get(MPI_RANK))
}

/// `mpirun` starts rank 0 on the first host of the batch system.
fn meet_at_first_host(layer: &mut Layer, get: &impl Fn(&str) -> Option<String>) -> Result<(), CliError> {
    let Some((variable, first)) = first_host_of_job(get) else {
        return Err(CliError::Conflict {
            problem: "mpirun does not say where rank 0 runs, and no batch system does".to_owned(),
            hint: format!(
                "give the address of rank 0's node on all nodes: `--rdzv-endpoint node0:{}`",
                values::DEFAULT_PORT
            ),
        });
    };
    let namespace = get("PMIX_NAMESPACE").map(|namespace| format!("mpi-{}", as_job_id(&namespace)));
    let port = namespace.as_deref().map_or(values::DEFAULT_PORT, port_of_step);
    layer.set("rdzv_endpoint", variable, Some(format!("{first}:{port}")))?;
    layer.set("rdzv_id", "PMIX_NAMESPACE", namespace)
}

fn first_host_of_job(get: &impl Fn(&str) -> Option<String>) -> Option<(&'static str, String)> {
    let first_word = |text: &str| Some(text.split_whitespace().next()?.to_owned());
    let node_file = || std::fs::read_to_string(get("PBS_NODEFILE")?).ok();
    let in_file = || Some(("PBS_NODEFILE", first_word(&node_file()?)?));
    // `host1 slots host2 slots`. Under `jsrun` host1 is the batch node, on which it starts nothing.
    let lsf_hosts = || get("LSB_MCPU_HOSTS").filter(|_| get("JSM_NAMESPACE_SIZE").is_none());
    let of_lsf = || Some(("LSB_MCPU_HOSTS", first_word(&lsf_hosts()?)?));
    let of_slurm = || Some(("SLURM_JOB_NODELIST", first_host(&get("SLURM_JOB_NODELIST")?)));
    in_file().or_else(of_lsf).or_else(of_slurm)
}

/// What the name of a job may contain, of the end of `name`, which differs most.
fn as_job_id(name: &str) -> String {
    let allowed = |c: char| {
        if c.is_ascii_alphanumeric() || "._-@".contains(c) {
            c
        } else {
            '_'
        }
    };
    let end = name.len().saturating_sub(100);
    name.char_indices()
        .filter(|(at, _)| *at >= end)
        .map(|(_, c)| allowed(c))
        .collect()
}

/// An allocation of several nodes, and a `ddp-run` that no `srun` started: it runs on one of them.
fn unused_nodes(get: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let nodes: u32 = get("SLURM_NNODES")?.parse().ok()?;
    let is_interactive = get("SLURM_STEP_ID").as_deref() == Some(INTERACTIVE_STEP);
    let by_srun = get("SLURM_STEP_NUM_NODES").is_some() && !is_interactive;
    if nodes < 2 || by_srun {
        return None;
    }
    let job = get("SLURM_JOB_ID").map_or_else(String::new, |job| format!(" {job}"));
    Some(format!(
        "running on 1 of the {nodes} nodes of Slurm job{job}; the others are unused\n  \
         hint: use `srun --ntasks-per-node=1 ddp-run …` to run on all of them, or `--nnodes 1` if one node is intended"
    ))
}

/// Tasks and nodes of the step, as far as Slurm says both.
fn tasks_and_nodes(get: &impl Fn(&str) -> Option<String>) -> Option<(String, String)> {
    const NAMES: &[(&str, &str)] = &[
        ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
        ("SLURM_NTASKS", "SLURM_NNODES"),
    ];
    NAMES.iter().find_map(|(tasks, nodes)| get(tasks).zip(get(nodes)))
}

fn one_launcher_a_node(get: &impl Fn(&str) -> Option<String>) -> Result<(), CliError> {
    match get("SLURM_STEP_NUM_TASKS").zip(get("SLURM_STEP_NUM_NODES")) {
        Some((tasks, nodes)) if tasks != nodes => Err(CliError::Conflict {
            problem: format!(
                "srun starts {tasks} copies of ddp-run on {}, expected one per node",
                counted_nodes(&nodes)
            ),
            hint: "pass `--ntasks-per-node=1` to srun: each ddp-run starts the workers of its node"
                .to_owned(),
        }),
        _ => Ok(()),
    }
}

fn counted_nodes(nodes: &str) -> String {
    match nodes {
        "1" => "1 node".to_owned(),
        several => format!("{several} nodes"),
    }
}

fn set_slurm_rank(layer: &mut Layer, get: &impl Fn(&str) -> Option<String>) -> Result<(), CliError> {
    let node = get("SLURM_NODEID");
    if node.is_none() && tasks_and_nodes(get).is_some_and(|(tasks, nodes)| tasks == nodes) {
        return layer.set("node_rank", "SLURM_PROCID", get("SLURM_PROCID"));
    }
    layer.set("node_rank", "SLURM_NODEID", node)
}

/// What only this step of this job is called, on all of its nodes.
fn step_name(get: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let job = get("SLURM_JOB_ID")?;
    let step = get("SLURM_STEP_ID").map_or_else(String::new, |step| format!(".{step}"));
    Some(format!("slurm-{job}{step}"))
}

/// Where the nodes of a step meet: the same port on all of them, most likely another one for another step, whose first
/// node may be the same.
fn port_of_step(name: &str) -> u16 {
    let hash = blake3::hash(name.as_bytes());
    let number = u16::from_le_bytes([hash.as_bytes()[0], hash.as_bytes()[1]]);
    STEP_PORTS.start + number % (STEP_PORTS.end - STEP_PORTS.start)
}

/// First name of a Slurm host list: `gpu[07-09,12],cpu1` gives `gpu07`. Nested brackets are resolved likewise.
fn first_host(list: &str) -> String {
    let mut name = String::new();
    let mut chars = list.chars();
    while let Some(c) = chars.next() {
        match c {
            ',' => break,
            '[' => {
                let mut inside = chars.by_ref().take_while(|c| *c != ']');
                let first: String = inside.by_ref().take_while(|c| !matches!(c, '-' | ',')).collect();
                // The rest of the bracket is other hosts.
                inside.for_each(drop);
                name.push_str(&first);
            }
            c => name.push(c),
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(upper: &Settings, vars: &[(&str, &str)]) -> (Option<u32>, Option<u32>, Option<String>) {
        let get = |name: &str| {
            vars.iter()
                .find(|(n, _)| *n == name)
                .map(|(_, value)| (*value).to_owned())
        };
        let layer = layer(upper, false, get).expect("valid");
        let all = upper.clone().or(layer.settings);
        let endpoint = all.rdzv_endpoint.map(|endpoint| endpoint.to_string());
        (all.nnodes.map(|nodes| nodes.max), all.node_rank, endpoint)
    }

    fn meeting() -> Settings {
        Settings {
            rdzv_endpoint: values::endpoint("node0").ok(),
            ..Settings::default()
        }
    }

    #[test]
    fn the_batch_system_is_asked_last_and_only_where_nodes_meet() {
        let slurm = [("SLURM_NNODES", "4"), ("SLURM_NODEID", "3")];
        let at_node0 = Some("node0:29400".to_owned());
        assert_eq!(
            places(&Settings::default(), &slurm),
            (None, None, None),
            "no step: one node alone"
        );
        assert_eq!(places(&meeting(), &slurm), (Some(4), Some(3), at_node0.clone()));
        let standalone = Settings {
            standalone: Some(true),
            ..meeting()
        };
        assert_eq!(places(&standalone, &slurm), (None, None, at_node0.clone()));
        let asked = Settings {
            nnodes: values::node_range("8").ok(),
            node_rank: Some(7),
            ..meeting()
        };
        assert_eq!(
            places(&asked, &slurm),
            (Some(8), Some(7), at_node0.clone()),
            "flags win"
        );
        let fewer = Settings {
            nnodes: values::node_range("2").ok(),
            ..meeting()
        };
        assert_eq!(
            places(&fewer, &slurm),
            (Some(2), None, at_node0.clone()),
            "rank 3 is none of this job's"
        );
        assert_eq!(
            places(&fewer, &[("JOB_COMPLETION_INDEX", "1")]),
            (Some(2), Some(1), at_node0)
        );
        let broken = |name: &str| (name == "SLURM_NNODES").then(|| "many".to_owned());
        let error = layer(&meeting(), false, broken).expect_err("no number");
        assert!(error.to_string().contains("`SLURM_NNODES` is `many`"), "{error}");
    }

    #[test]
    fn a_loopback_address_is_no_meeting_of_an_allocation_but_of_a_step() {
        let allocation = [("SLURM_NNODES", "4"), ("SLURM_NODEID", "0")];
        let step = [&allocation[..], &[("SLURM_STEP_NUM_NODES", "4")]].concat();
        for host in ["localhost", "127.0.0.2", "[::1]"] {
            let at = Settings {
                rdzv_endpoint: values::endpoint(host).ok(),
                ..Settings::default()
            };
            assert_eq!(places(&at, &allocation).0, None, "{host}");
            assert_eq!(places(&at, &step).0, Some(4), "{host}");
        }
        let master = Settings {
            master_addr: Some("node0".to_owned()),
            ..Settings::default()
        };
        assert_eq!(
            places(&master, &allocation).0,
            None,
            "an address for its own workers"
        );
        assert_eq!(places(&master, &step), (Some(4), Some(0), None));
    }

    #[test]
    fn a_step_of_several_nodes_needs_no_flags() {
        let step = [
            ("SLURM_STEP_NUM_NODES", "3"),
            ("SLURM_STEP_NUM_TASKS", "3"),
            ("SLURM_STEP_NODELIST", "gpu[07-09]"),
            ("SLURM_NODEID", "2"),
            ("SLURM_JOB_ID", "1234"),
            ("SLURM_STEP_ID", "0"),
        ];
        let found = places(&Settings::default(), &step);
        let port = port_of_step("slurm-1234.0");
        assert_eq!(found, (Some(3), Some(2), Some(format!("gpu07:{port}"))));
        let alone = Settings {
            nnodes: values::node_range("1").ok(),
            ..Settings::default()
        };
        assert_eq!(
            places(&alone, &step),
            (Some(1), None, None),
            "one node was asked for"
        );
        let eight_tasks = |name: &str| match name {
            "SLURM_STEP_NUM_TASKS" => Some("24".to_owned()),
            _ => step
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, value)| (*value).to_owned()),
        };
        insta::assert_snapshot!(layer(&Settings::default(), false, eight_tasks).expect_err("too many"), @r"
        srun starts 24 copies of ddp-run on 3 nodes, expected one per node
          hint: pass `--ntasks-per-node=1` to srun: each ddp-run starts the workers of its node
        ");
    }

    #[test]
    fn copies_of_mpirun_need_no_flags_in_a_batch_system() {
        let mpi = [
            (MPI_SIZE, "4"),
            (MPI_RANK, "3"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("PMIX_NAMESPACE", "prterun-a-17@1"),
        ];
        let with = |further: &[(&'static str, &'static str)]| [&mpi[..], further].concat();
        let port = port_of_step("mpi-prterun-a-17@1");
        let lsf = with(&[("LSB_MCPU_HOSTS", "a1 40 a2 40")]);
        let found = (Some(4), Some(3), Some(format!("a1:{port}")));
        assert_eq!(places(&Settings::default(), &lsf), found);
        let slurm = with(&[("SLURM_JOB_NODELIST", "a[1-4]"), ("SLURM_STEP_NUM_NODES", "3")]);
        assert_eq!(
            places(&Settings::default(), &slurm),
            found,
            "mpirun's own step is another one"
        );
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("nodes");
        std::fs::write(&file, "a1\na1\na2\n").expect("written");
        let pbs = [&mpi[..], &[("PBS_NODEFILE", file.to_str().expect("text"))]].concat();
        assert_eq!(places(&Settings::default(), &pbs), found);
        let at_node0 = Some("node0:29400".to_owned());
        assert_eq!(places(&meeting(), &mpi), (Some(4), Some(3), at_node0.clone()));
        assert_eq!(places(&meeting(), &[("PMIX_RANK", "0")]).1, Some(0));
        assert_eq!(
            places(&Settings::default(), &[(MPI_SIZE, "1")]),
            (None, None, None)
        );
        let error_of = |vars: &[(&str, &str)]| {
            let of = |name: &str| {
                vars.iter()
                    .find(|(n, _)| *n == name)
                    .map(|(_, value)| (*value).to_owned())
            };
            layer(&Settings::default(), false, of)
                .expect_err("refused")
                .to_string()
        };
        let jsrun = with(&[("LSB_MCPU_HOSTS", "batch 1 a1 40"), ("JSM_NAMESPACE_SIZE", "4")]);
        assert_eq!(error_of(&jsrun), error_of(&mpi), "the batch node runs no copy");
        let shared = [(MPI_SIZE, "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
        for (nodes, node_rank) in [(2, Some(0)), (1, None)] {
            let given = Settings {
                nnodes: values::node_range(&nodes.to_string()).ok(),
                node_rank,
                ..meeting()
            };
            let found = (Some(nodes), node_rank, at_node0.clone());
            assert_eq!(places(&given, &shared), found, "flags come first");
        }
        insta::assert_snapshot!(error_of(&mpi), @r"
        mpirun does not say where rank 0 runs, and no batch system does
          hint: give the address of rank 0's node on all nodes: `--rdzv-endpoint node0:29400`
        ");
        insta::assert_snapshot!(error_of(&[(MPI_SIZE, "8"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]), @r"
        mpirun starts 2 copies of ddp-run on this node, expected one per node
          hint: pass `-N 1` to mpirun: each ddp-run starts the workers of its node
        ");
    }

    #[test]
    fn the_number_of_a_task_is_its_nodes_where_each_node_has_one() {
        let task = [("SLURM_NNODES", "2"), ("SLURM_PROCID", "1")];
        let rank = |further: &[(&str, &str)]| places(&meeting(), &[&task[..], further].concat()).1;
        let (one, two) = (("SLURM_NTASKS", "2"), ("SLURM_NTASKS", "4"));
        assert_eq!(rank(&[one]), Some(1));
        assert_eq!(
            rank(&[one, ("SLURM_NODEID", "0")]),
            Some(0),
            "the node's own number wins"
        );
        assert_eq!(rank(&[two]), None, "two tasks on some node");
        assert_eq!(rank(&[]), None, "who knows");
        let step = [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_NUM_NODES", "2")];
        assert_eq!(
            rank(&[&step[..], &[two]].concat()),
            Some(1),
            "the step's numbers win over the job's"
        );
        let nodes = [("SLURM_STEP_NODELIST", "gpu[7-8]"), ("SLURM_PROCID", "1")];
        let found = places(&Settings::default(), &[&step[..], &nodes].concat());
        assert_eq!((found.0, found.1), (Some(2), Some(1)), "no other flag");
    }

    #[test]
    fn nodes_of_an_allocation_that_stay_unused_are_told() {
        let unused = |upper: &Settings, vars: &[(&str, &str)]| {
            let get = |name: &str| {
                let found = vars.iter().find(|(n, _)| *n == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            layer(upper, false, get).expect("valid").unused
        };
        let batch = [
            ("SLURM_NNODES", "4"),
            ("SLURM_NODEID", "0"),
            ("SLURM_JOB_ID", "12"),
        ];
        insta::assert_snapshot!(unused(&Settings::default(), &batch).expect("told"), @r"
        running on 1 of the 4 nodes of Slurm job 12; the others are unused
          hint: use `srun --ntasks-per-node=1 ddp-run …` to run on all of them, or `--nnodes 1` if one node is intended
        ");
        let one = Settings {
            nnodes: values::node_range("1").ok(),
            ..Settings::default()
        };
        let standalone = Settings {
            standalone: Some(true),
            ..Settings::default()
        };
        for asked in [one, standalone, meeting()] {
            assert_eq!(unused(&asked, &batch), None, "{asked:?}");
        }
        let step = [("SLURM_STEP_NUM_NODES", "1"), ("SLURM_STEP_NODELIST", "gpu7")];
        assert_eq!(unused(&Settings::default(), &[&batch[..], &step].concat()), None);
        let shell = [&batch[..], &step, &[("SLURM_STEP_ID", INTERACTIVE_STEP)]].concat();
        assert_eq!(
            unused(&Settings::default(), &shell),
            unused(&Settings::default(), &batch),
            "the shell of `salloc`"
        );
        assert_eq!(unused(&Settings::default(), &[("SLURM_NNODES", "1")]), None);
    }

    #[test]
    fn each_value_knows_its_variable() {
        let get = |name: &str| match name {
            "SLURM_NNODES" | "SLURM_NTASKS" => Some("2".to_owned()),
            "JOB_COMPLETION_INDEX" | "SLURM_PROCID" => Some("1".to_owned()),
            _ => None,
        };
        let layer = layer(&meeting(), false, get).expect("valid");
        assert_eq!(layer.variable("nnodes"), Some("SLURM_NNODES"));
        assert_eq!(layer.variable("node_rank"), Some("SLURM_PROCID"));
        assert_eq!(layer.variable("rdzv_id"), None);
    }

    #[test]
    fn steps_that_share_a_node_do_not_meet() {
        let ports: std::collections::BTreeSet<u16> = (0..20)
            .map(|step| port_of_step(&format!("slurm-1234.{step}")))
            .collect();
        assert_eq!(ports.len(), 20, "{ports:?}");
        assert!(ports.iter().all(|port| STEP_PORTS.contains(port)), "{ports:?}");
    }

    #[test]
    fn a_step_names_the_job_that_it_is() {
        let name = |nodes: &str, endpoint: &str| {
            let upper = Settings {
                rdzv_endpoint: values::endpoint(endpoint).ok(),
                nnodes: values::node_range(nodes).ok(),
                ..Settings::default()
            };
            let get = |name: &str| match name {
                "SLURM_STEP_NUM_NODES" => Some("3".to_owned()),
                "SLURM_JOB_ID" => Some("1234".to_owned()),
                "SLURM_STEP_ID" => Some("5".to_owned()),
                _ => None,
            };
            layer(&upper, false, get).expect("valid").settings.rdzv_id
        };
        assert_eq!(name("3", "node0").as_deref(), Some("slurm-1234.5"));
        assert_eq!(name("4", "node0"), None, "other steps may be of this job");
        assert_eq!(name("1:3", "node0"), None);
        assert_eq!(name("1", "node0:0"), None);
    }

    #[test]
    fn a_step_of_one_node_names_a_job_that_is_continued_by_its_id() {
        let name = |tasks: &str, resumes_by_id: bool| {
            let get = |name: &str| match name {
                "SLURM_STEP_NUM_NODES" => Some("1".to_owned()),
                "SLURM_STEP_NUM_TASKS" => Some(tasks.to_owned()),
                "SLURM_STEP_NODELIST" => Some("gpu07".to_owned()),
                "SLURM_JOB_ID" => Some("1234".to_owned()),
                "SLURM_STEP_ID" => Some("0".to_owned()),
                _ => None,
            };
            layer(&Settings::default(), resumes_by_id, get).map(|layer| layer.settings)
        };
        let named = name("1", true).expect("valid");
        assert_eq!(named.rdzv_id.as_deref(), Some("slurm-1234.0"));
        assert_eq!(
            (named.nnodes, named.rdzv_endpoint),
            (None, None),
            "one node meets no other"
        );
        assert_eq!(name("1", false).expect("valid").rdzv_id, None);
        insta::assert_snapshot!(name("4", false).expect_err("four jobs on one node"), @r"
        srun starts 4 copies of ddp-run on 1 node, expected one per node
          hint: pass `--ntasks-per-node=1` to srun: each ddp-run starts the workers of its node
        ");
    }

    #[test]
    fn host_lists_are_read() {
        for (list, first) in [
            ("node1", "node1"),
            ("a,b", "a"),
            ("gpu[07-09,12],cpu1", "gpu07"),
            ("r[1,3]n[5-6]", "r1n5"),
            ("n[3]-ib", "n3-ib"),
        ] {
            assert_eq!(first_host(list), first);
        }
    }
}
