//! What Slurm and Kubernetes say of a job: the layer that is asked last, where flags, variables and the YAML are silent.
//!
//! | from | number of nodes | rank of the node | rendezvous | name |
//! |---|---|---|---|---|
//! | `srun`, one `ddp-run` a node | `SLURM_STEP_NUM_NODES` | `SLURM_NODEID` | first of `SLURM_STEP_NODELIST`, a port that follows from the name | `SLURM_JOB_ID.SLURM_STEP_ID` |
//! | Slurm, with `--rdzv-endpoint` | `SLURM_NNODES` | `SLURM_NODEID` | | the same, if the step has exactly the job's nodes |
//! | an indexed Kubernetes job, with `--rdzv-endpoint` | | `JOB_COMPLETION_INDEX` | | |
//!
//! A batch script that starts `ddp-run` itself, without `srun`, runs it on one node, whatever was allocated.

use super::error::CliError;
use super::settings::Settings;
use super::values;

/// Below the ports that systems give to outgoing connections (`ip_local_port_range`), and below the default port.
const STEP_PORTS: std::ops::Range<u16> = 20_000..29_000;

/// With a rendezvous given: a setting and its variable, the one that is believed last of each kind first.
const WITH_ENDPOINT: &[(&str, &str)] = &[
    ("nnodes", "SLURM_NNODES"),
    ("node_rank", "JOB_COMPLETION_INDEX"),
    ("node_rank", "SLURM_NODEID"),
];

/// The layer below `upper`, from the variables that `get` reads.
pub fn layer(upper: &Settings, get: impl Fn(&str) -> Option<String>) -> Result<Settings, CliError> {
    let get = |name: &str| get(name).filter(|value| !value.is_empty());
    if upper.standalone == Some(true) {
        return Ok(Settings::default());
    }
    let mut layer = Settings::default();
    if let Some(endpoint) = &upper.rdzv_endpoint {
        if endpoint.port == 0 {
            // One node alone, which meets nobody.
            return Ok(layer);
        }
        for (name, variable) in WITH_ENDPOINT {
            set(&mut layer, name, variable, get(variable))?;
        }
        let step_nodes = get("SLURM_STEP_NUM_NODES").and_then(|count| count.parse().ok());
        let nodes = upper.nnodes.or(layer.nnodes);
        // Any other step may be a part of a job only.
        if nodes.is_some_and(|nodes| nodes.min > 1 && nodes.min == nodes.max && step_nodes == Some(nodes.max))
        {
            set(&mut layer, "rdzv_id", "SLURM_JOB_ID", step_name(&get))?;
        }
    } else if upper.nnodes.is_none_or(|nodes| nodes.max > 1) && upper.master_addr.is_none() {
        of_srun(&mut layer, &get)?;
    }
    // A rank that the number of nodes does not allow belongs to something else, and is left alone.
    let nodes = upper.nnodes.or(layer.nnodes).map_or(1, |nodes| nodes.max);
    layer.node_rank = layer.node_rank.filter(|rank| *rank < nodes);
    Ok(layer)
}

/// A step of several nodes that `srun` started.
fn of_srun(layer: &mut Settings, get: &impl Fn(&str) -> Option<String>) -> Result<(), CliError> {
    let (Some(count), Some(list)) = (get("SLURM_STEP_NUM_NODES"), get("SLURM_STEP_NODELIST")) else {
        return Ok(());
    };
    if count == "1" {
        return Ok(());
    }
    if let Some(tasks) = get("SLURM_STEP_NUM_TASKS").filter(|tasks| *tasks != count) {
        return Err(CliError::Conflict {
            problem: format!("srun starts {tasks} copies of ddp-run on {count} nodes, expected one a node"),
            hint: "give srun `--ntasks-per-node=1`: ddp-run starts the workers of its node itself".to_owned(),
        });
    }
    set(layer, "nnodes", "SLURM_STEP_NUM_NODES", Some(count))?;
    set(layer, "node_rank", "SLURM_NODEID", get("SLURM_NODEID"))?;
    let name = step_name(get);
    let port = name.as_deref().map_or(values::DEFAULT_PORT, port_of_step);
    let first = format!("{}:{port}", first_host(&list));
    set(layer, "rdzv_endpoint", "SLURM_STEP_NODELIST", Some(first))?;
    set(layer, "rdzv_id", "SLURM_JOB_ID", name)
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

fn set(layer: &mut Settings, name: &str, variable: &str, value: Option<String>) -> Result<(), CliError> {
    let Some(value) = value else {
        return Ok(());
    };
    layer.set(name, &value).map_err(|message| CliError::BadVariable {
        variable: variable.to_owned(),
        value,
        message,
    })
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
        let layer = layer(upper, get).expect("valid");
        let all = upper.clone().or(layer);
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
        let error = layer(&meeting(), broken).expect_err("no number");
        assert!(error.to_string().contains("`SLURM_NNODES` is `many`"), "{error}");
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
        insta::assert_snapshot!(layer(&Settings::default(), eight_tasks).expect_err("too many"), @r"
        srun starts 24 copies of ddp-run on 3 nodes, expected one a node
          hint: give srun `--ntasks-per-node=1`: ddp-run starts the workers of its node itself
        ");
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
            layer(&upper, get).expect("valid").rdzv_id
        };
        assert_eq!(name("3", "node0").as_deref(), Some("slurm-1234.5"));
        assert_eq!(name("4", "node0"), None, "other steps may be of this job");
        assert_eq!(name("1:3", "node0"), None);
        assert_eq!(name("1", "node0:0"), None);
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
