//! `--dry-run`: what would be started, and where each value comes from.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::time::Duration;

use ddp_launcher::{CoreSet, LaunchPlan, SpawnError, Variable, WorkerCommand, parent_of_workers};
use ddp_proto::ids::NodeRank;
use ddp_proto::words::{counted, quoted};

use super::agreement::{shown_value, shown_words};
use super::host::{HostFacts, HostRole, host_role, is_own_address};
use super::layers::Given;
use super::plan::{Launch, range};
use crate::cli::settings::DECIDED;

/// Columns of values, at least and at most; a source follows a longer value at once.
const VALUE_WIDTH: std::ops::RangeInclusive<usize> = 32..=48;

/// The same for variables with their names, so that sources stand in one column.
const VARIABLE_WIDTH: usize = 51;

/// The whole answer, several lines. `missing` is why the workers could not be started.
pub fn describe(launch: &Launch, missing: Option<&SpawnError>) -> String {
    let Launch {
        plan,
        checked,
        found_run,
        ..
    } = launch;
    let workers = counted(plan.workers, "worker");
    let nodes = match plan.nodes.max {
        1 => String::new(),
        _ => format!(", one of {}", range(plan.nodes)),
    };
    let mut text = format!("ddp-run would start {workers} on this node{nodes}:\n");
    let rows = rows(launch);
    let lengths = rows.iter().map(|(_, value)| value.chars().count());
    let width = lengths
        .max()
        .unwrap_or_default()
        .clamp(*VALUE_WIDTH.start(), *VALUE_WIDTH.end());
    for (name, value) in rows {
        let source = source_of(name, launch).unwrap_or("default");
        let _ = writeln!(text, "  {name:<18} {value:<width$}  {source}");
    }
    let group = match parent_of_workers() {
        Ok(parent) => format!("new, in {}", parent.display()),
        Err(why) => format!("not available: {why}"),
    };
    let _ = writeln!(text, "control group of the workers: {group}");
    if plan.output.direct {
        text.push_str("input and output of the worker: this terminal\n");
    }
    let _ = writeln!(text, "{}", ranks_here(plan));
    if let Some(file) = checked {
        let _ = writeln!(
            text,
            "configuration: {file} is valid, and its data files can be read"
        );
    }
    if let Some(found) = found_run {
        let _ = writeln!(text, "{found}");
    }
    let _ = writeln!(text, "command of each: {}", command_line(&plan.command));
    text.push_str("environment set for local rank 0:\n");
    for variable in &launch.environment {
        let line = format!("{}={}", variable.name, value_of(variable, plan));
        let source = source_of_variable(variable, launch);
        let _ = writeln!(
            text,
            "{}",
            format!("  {line:<VARIABLE_WIDTH$}  {source}").trim_end()
        );
    }
    text.push_str("nothing was started.");
    if let Some(error) = missing {
        let code = error.exit_code();
        let _ = write!(
            text,
            "\nthe workers could not be started, and the job would end with exit code {code}: {error}"
        );
    }
    text
}

/// Where a setting comes from that was given.
fn source_of<'a>(name: &str, launch: &'a Launch) -> Option<&'a str> {
    let given = launch.given.iter().find(|given| given.name == name);
    given.map(|given| given.source.as_str())
}

/// Settings that every job has, as they are decided, and those that were given.
fn rows(launch: &Launch) -> Vec<(&'static str, String)> {
    let Launch { plan, host, .. } = launch;
    let alone = plan.nodes.max == 1;
    let rank = plan.node_rank.map(|rank| rank.to_string());
    let local_addr = plan.local_addr.clone();
    let log_dir = plan.log_dir.as_ref().map(|dir| dir.display().to_string());
    let job_id = if !alone || source_of("rdzv_id", launch).is_some() {
        plan.job_id.clone()
    } else {
        format!("new for each run, such as {}", plan.job_id)
    };
    let either =
        |alone_says: &str, several_say: &str| if alone { alone_says } else { several_say }.to_owned();
    let mut rows = vec![
        ("nnodes", range(plan.nodes)),
        ("node_rank", rank.unwrap_or_else(|| either("0", "by host name"))),
        ("nproc_per_node", plan.workers.to_string()),
        ("rdzv_endpoint", rendezvous(host)),
        ("rdzv_id", job_id),
        ("max_restarts", plan.max_restarts.to_string()),
        (
            "shutdown_timeout",
            format!("{} s", plan.shutdown_timeout.as_secs_f64()),
        ),
        (
            "local_addr",
            local_addr.unwrap_or_else(|| either("not needed", "as seen by the rendezvous")),
        ),
        ("role", plan.role.clone()),
        ("log_dir", log_dir.unwrap_or_else(|| "no log files".into())),
    ];
    if !plan.cores.is_empty() {
        rows.push(("numa_binding", cores(plan)));
    }
    for Given { name, words, .. } in &launch.given {
        if rows.iter().all(|(shown, _)| shown != name) {
            let value = match *name {
                "rdzv_conf" => conf(launch),
                _ => shown_value(name, words).into_owned(),
            };
            rows.push((name, value));
        }
    }
    rows
}

/// Ranks follow from the workers of all nodes before this one, which may have other numbers of them.
fn ranks_here(plan: &LaunchPlan) -> String {
    let workers = plan.workers;
    let (if_so, node) = match plan.node_rank {
        Some(rank) if rank.0 > 0 => (
            format!(
                " if each lower-ranked node also has {}",
                counted(workers, "worker")
            ),
            rank.0,
        ),
        None if plan.nodes.max > 1 => (" if its node rank is 0".to_owned(), 0),
        _ => (String::new(), 0),
    };
    let first = u64::from(node) * u64::from(workers);
    let last = first + u64::from(workers) - 1;
    if first == last {
        format!("rank of this node{if_so}: {first}")
    } else {
        format!("ranks of this node{if_so}: {first} to {last}")
    }
}

/// `--rdzv-conf` as it takes effect, and what has no default where it was given.
fn conf(launch: &Launch) -> String {
    let Launch { plan, host, .. } = launch;
    let seconds = |key: &str, time: Duration| format!("{key}={}", time.as_secs_f64());
    let is_host = host.is_host.map(|is_host| format!("is_host={is_host}"));
    let takeover = plan.takeover.map(|time| seconds("takeover_timeout", time));
    let last_call = plan.last_call.map(|time| seconds("last_call_timeout", time));
    [
        is_host,
        Some(seconds("join_timeout", plan.join_timeout)),
        Some(seconds("connect_timeout", plan.connect_timeout)),
        Some(seconds("outage_timeout", plan.outage_timeout)),
        takeover,
        last_call,
    ]
    .into_iter()
    .flatten()
    .collect::<Vec<_>>()
    .join(",")
}

/// The cores of each worker: `0: 0-3,8; 1: 4-7`.
fn cores(plan: &LaunchPlan) -> String {
    let of = |(rank, set): (usize, &CoreSet)| format!("{rank}: {}", ranges(&set.0));
    plan.cores
        .iter()
        .enumerate()
        .map(of)
        .collect::<Vec<_>>()
        .join("; ")
}

/// `0-3,8`, as `taskset` takes it.
fn ranges(numbers: &BTreeSet<usize>) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => ranges.push((*number, *number)),
        }
    }
    let word = |(first, last): &(usize, usize)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    };
    ranges.iter().map(word).collect::<Vec<_>>().join(",")
}

fn rendezvous(host: &HostFacts) -> String {
    let endpoint = host
        .endpoint
        .as_ref()
        .map_or_else(String::new, ToString::to_string);
    let literal = (host.endpoint.as_ref()).and_then(|endpoint| endpoint.host.parse::<IpAddr>().ok());
    let is_foreign = literal.is_some_and(|ip| !is_own_address(ip));
    match host_role(host) {
        HostRole::Alone => "private, on this node".to_owned(),
        HostRole::Host if is_foreign && host.is_host.is_none() => {
            format!("{endpoint}, on the node with that address: this one lacks it")
        }
        HostRole::Host => format!("{endpoint}, on this node"),
        HostRole::HostIfLocal => format!("{endpoint}, on the node with that address"),
        HostRole::Join => format!("{endpoint}, on a different node"),
    }
}

fn command_line(command: &WorkerCommand) -> String {
    let program = match &command.arg0 {
        Some(arg0) => arg0.to_string_lossy().into_owned(),
        None => command.program.display().to_string(),
    };
    let args: Vec<_> = command.args.iter().map(|arg| arg.to_string_lossy()).collect();
    let args = shown_words(args.iter().map(AsRef::as_ref));
    let args = args.iter().map(|arg| quoted(arg));
    std::iter::once(program).chain(args).collect::<Vec<_>>().join(" ")
}

/// The value of a variable of the first worker; one that is decided when the nodes have met says so.
fn value_of<'a>(variable: &'a Variable, plan: &LaunchPlan) -> Cow<'a, str> {
    let is_later = match variable.name.as_str() {
        "TORCHELASTIC_ERROR_FILE" | "DDP_CONTROL" | "DDP_RUN_TOKEN" => true,
        "MASTER_PORT" => plan.master_port.is_none(),
        "MASTER_ADDR" => plan.nodes.max > 1 && plan.master_addr.is_none(),
        "WORLD_SIZE" | "GROUP_WORLD_SIZE" | "ROLE_WORLD_SIZE" => plan.nodes.max > 1,
        "RANK" | "GROUP_RANK" | "ROLE_RANK" => plan.nodes.max > 1 && plan.node_rank != Some(NodeRank(0)),
        _ => false,
    };
    if is_later {
        "(decided at startup)".into()
    } else {
        shown_value(&variable.name, &variable.value)
    }
}

/// Where the value of a variable comes from, if that is not plain from what it stands for.
fn source_of_variable(variable: &Variable, launch: &Launch) -> String {
    let decided = DECIDED.iter().find(|(name, _)| *name == variable.name);
    if let Some((_, setting)) = decided {
        let source = source_of(setting, launch);
        return source.map_or_else(String::new, |source| format!("`{setting}`: {source}"));
    }
    match variable.name.as_str() {
        _ if variable.inherited => "inherited".to_owned(),
        "OMP_NUM_THREADS" => "cores per worker".to_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rendezvous_is_shown_where_it_will_be() {
        let of_first_node = |endpoint: &str, is_host| HostFacts {
            protection: super::super::host::Protection::Insecure,
            patience: std::time::Duration::ZERO,
            endpoint: Some(crate::cli::values::endpoint(endpoint).expect("valid")),
            is_host,
            node_rank: Some(0),
            job_id: "job".to_owned(),
            status_port: None,
            metrics_file: None,
            one_node: false,
        };
        let shown = |endpoint, is_host| rendezvous(&of_first_node(endpoint, is_host));
        assert_eq!(shown("127.0.0.1:29400", None), "127.0.0.1:29400, on this node");
        assert_eq!(
            shown("192.0.2.1:29400", None),
            "192.0.2.1:29400, on the node with that address: this one lacks it"
        );
        assert_eq!(
            shown("192.0.2.1:29400", Some(true)),
            "192.0.2.1:29400, on this node",
            "address translation"
        );
    }

    #[test]
    fn cores_are_shown_as_ranges() {
        let ranges = |numbers: &[usize]| ranges(&numbers.iter().copied().collect());
        assert_eq!(ranges(&[0, 1, 2, 5, 8, 9]), "0-2,5,8-9");
        assert_eq!(ranges(&[]), "");
    }
}
