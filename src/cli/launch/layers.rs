//! The layers of settings laid upon each other, and what must hold between settings.

use std::path::Path;

use ddp_launcher::NodeRange;

use super::args::Args;
use super::scheduler::{self, is_loopback};
use super::target::{Target, TargetKind};
use crate::cli::error::CliError;
use crate::cli::native::Validated;
use crate::cli::settings::{Settings, variable};
use crate::cli::values::{self, Endpoint};

/// A setting that was given.
#[derive(Clone, Debug)]
pub struct Given {
    /// As the YAML spells it.
    pub name: &'static str,
    /// Its value in the words of the source.
    pub words: String,
    /// Where it comes from, such as `command line`, the name of a variable or a file.
    pub source: String,
}

/// What the target is: its name says, unless `--module` or `--no-python` does. A folder with a `__main__.py` is a
/// script to Python.
pub fn kind(args: &Args, variables: &Settings) -> Result<TargetKind, CliError> {
    let asked = |flag: Option<bool>, variable: Option<bool>| flag.or(variable).unwrap_or(false);
    let module = asked(args.settings.module, variables.module);
    let no_python = asked(args.settings.no_python, variables.no_python);
    match (module, no_python) {
        (true, true) => Err(CliError::Conflict {
            problem: "`--module` and `--no-python` exclude each other".to_owned(),
            hint: "a module is run by Python".to_owned(),
        }),
        (true, false) => Ok(TargetKind::Module),
        (false, true) => Ok(TargetKind::Program),
        (false, false) if Path::new(&args.target).join("__main__.py").is_file() => Ok(TargetKind::Python),
        (false, false) => Ok(TargetKind::of(&args.target)),
    }
}

/// All layers in one, and which layer each setting comes from. `config` is the target's, if it has one.
pub fn layers(
    typed: Settings,
    variables: Settings,
    target: &Target,
    config: Option<&Validated>,
    get_env: &impl Fn(&str) -> Option<String>,
) -> Result<(Settings, Vec<Given>), CliError> {
    let mut given = Vec::<Given>::new();
    let mut note = |layer: &Settings, source: &dyn Fn(&str) -> String| {
        for name in layer.given() {
            if given.iter().all(|known| known.name != name) {
                given.push(Given {
                    name,
                    words: layer.words.get(name).cloned().unwrap_or_default(),
                    source: source(name),
                });
            }
        }
    };
    let mut settings = below(&Settings::default(), typed);
    note(&settings, &|_| "command line".to_owned());
    let layer = below(&settings, variables);
    note(&layer, &|name| {
        variable(name, get_env).map_or_else(String::new, |(variable, _)| variable)
    });
    settings = settings.or(layer);
    if let Some(text) = &target.yaml {
        let file = Path::new(&target.name);
        let layer = below(&settings, Settings::from_yaml(file, text)?);
        note(&layer, &|_| format!("`launch` of {}", file.display()));
        settings = settings.or(layer);
    }
    let resumes_by_id = config.is_some_and(Validated::resumes_by_id);
    let layer = scheduler::layer(&settings, resumes_by_id, get_env)?;
    note(&layer.settings, &|name| {
        layer.variable(name).unwrap_or("batch system").to_owned()
    });
    if let Some(words) = &layer.unused {
        eprintln!("[ddp-run] {words}");
    }
    settings = settings.or(layer.settings);
    meet_at_master(&mut settings, &mut given);
    warn_of_ignored(&settings, get_env);
    Ok((settings, given))
}

/// What `layer` still says below the `upper` ones: with `--standalone` there are no other nodes, unless a
/// layer above it has.
fn below(upper: &Settings, layer: Settings) -> Settings {
    let alone = upper.standalone.or(layer.standalone) == Some(true);
    if !alone {
        return layer;
    }
    if upper.standalone.is_none() && asks_for_others(upper).is_some() {
        return Settings {
            standalone: None,
            ..layer
        };
    }
    Settings {
        nnodes: None,
        rdzv_endpoint: None,
        node_rank: None,
        ..layer
    }
}

/// The setting that contradicts one node with a rendezvous of its own, as part of a message.
fn asks_for_others(settings: &Settings) -> Option<&'static str> {
    let several = settings.nnodes.is_some_and(|nodes| nodes.max > 1);
    let meeting = settings.rdzv_endpoint.as_ref();
    if several {
        Some("`--nnodes` asks for several nodes")
    } else if meeting.is_some_and(|endpoint| endpoint.port != 0) {
        Some("`--rdzv-endpoint` names a rendezvous")
    } else {
        None
    }
}

/// `--master-addr` and `--master-port` are where the nodes meet, if no rendezvous is given, as with torchrun's
/// `static`. Where they name the rendezvous itself, whose port no store can have, they are ignored, as with its `c10d`.
fn meet_at_master(settings: &mut Settings, given: &mut Vec<Given>) {
    let several = settings.nnodes.is_some_and(|nodes| nodes.max > 1);
    let (endpoint, host) = (&settings.rdzv_endpoint, &settings.master_addr);
    if let Some(endpoint) = endpoint
        && settings.master_port == Some(endpoint.port)
        && host
            .as_ref()
            .is_none_or(|host| is_same_host(host, &endpoint.host))
    {
        eprintln!(
            "[ddp-run] ignored `--master-port {}`: the rendezvous has this port, so MASTER_PORT is another one",
            endpoint.port
        );
        (settings.master_addr, settings.master_port) = (None, None);
        given.retain(|setting| !matches!(setting.name, "master_addr" | "master_port"));
    } else if let (true, None, Some(host)) = (several, endpoint, host) {
        settings.rdzv_endpoint = Some(Endpoint {
            host: host.clone(),
            port: settings.master_port.take().unwrap_or(values::DEFAULT_PORT),
        });
        settings.master_addr = None;
        given.retain(|setting| setting.name != "master_port");
        for setting in given.iter_mut().filter(|setting| setting.name == "master_addr") {
            setting.name = "rdzv_endpoint";
        }
    }
}

fn is_same_host(a: &str, b: &str) -> bool {
    a.eq_ignore_ascii_case(b) || is_loopback(a) && is_loopback(b)
}

/// Flags that are taken for the sake of torchrun's users, and change nothing.
fn warn_of_ignored(settings: &Settings, get_env: &impl Fn(&str) -> Option<String>) {
    let ignored = [
        (settings.start_method.is_some(), "--start-method"),
        (settings.run_path == Some(true), "--run-path"),
        (settings.use_env == Some(true), "--use-env"),
        (settings.logs_specs.is_some(), "--logs-specs"),
    ];
    for key in settings.rdzv_conf.iter().flat_map(|conf| &conf.ignored) {
        eprintln!(
            "[ddp-run] ignored `--rdzv-conf {key}`: it has no effect here; known keys are {}",
            values::RDZV_CONF_KEYS
        );
    }
    if get_env("TORCHELASTIC_ENABLE_FILE_TIMER").as_deref() == Some("1") {
        eprintln!(
            "[ddp-run] ignored `TORCHELASTIC_ENABLE_FILE_TIMER=1`: use heartbeats and `--hang-timeout` instead"
        );
    }
    for (_, flag) in ignored.iter().filter(|(given, _)| *given) {
        eprintln!("[ddp-run] ignored `{flag}`: it has no effect here");
    }
}

/// Settings that make no sense for the target.
pub fn check_target(target: &Target, settings: &Settings) -> Result<(), CliError> {
    if target.kind == TargetKind::Native && settings.virtual_local_rank == Some(true) {
        return Err(CliError::Conflict {
            problem:
                "`--virtual-local-rank` needs a program: the native worker chooses its GPU by its local rank"
                    .to_owned(),
            hint: "omit the flag".to_owned(),
        });
    }
    Ok(())
}

/// `--standalone` beats what the layers below it say of several nodes, but a command line that asks for
/// both is a mistake.
pub fn refuse_standalone_with_nodes(typed: &Settings) -> Result<(), CliError> {
    match asks_for_others(typed) {
        Some(other) if typed.standalone == Some(true) => Err(CliError::Conflict {
            problem: format!("`--standalone` means one node with a private rendezvous, but {other}"),
            hint: "omit one of the two flags".to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Several nodes need a place to meet, and their ranks must be below their number.
pub fn check_nodes(nodes: NodeRange, settings: &Settings) -> Result<(), CliError> {
    if nodes.max > 1 && settings.rdzv_endpoint.is_none() {
        let job = match nodes.min {
            min if min == nodes.max => format!("{min} nodes need"),
            min => format!("a job of {min} to {} nodes needs", nodes.max),
        };
        return Err(CliError::Conflict {
            problem: format!("{job} a rendezvous, but `--rdzv-endpoint` is not set"),
            hint: format!(
                "give the address of one node on all nodes: `--rdzv-endpoint node0:{}`",
                values::DEFAULT_PORT
            ),
        });
    }
    if let (true, Some(endpoint)) = (nodes.max > 1, &settings.rdzv_endpoint)
        && endpoint.port == 0
    {
        return Err(CliError::Conflict {
            problem: format!(
                "`--rdzv-endpoint {endpoint}` picks a free port, so {} nodes cannot find each other",
                nodes.max
            ),
            hint: "give a port on all nodes; port 0 is for jobs of one node".to_owned(),
        });
    }
    match settings.node_rank {
        Some(rank) if rank >= nodes.max => Err(CliError::Conflict {
            problem: format!(
                "`--node-rank {rank}` is out of range for `--nnodes {}`",
                nodes.max
            ),
            hint: format!("node ranks run from 0 to {}", nodes.max - 1),
        }),
        _ => Ok(()),
    }
}
