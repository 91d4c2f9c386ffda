//! The layers of settings laid upon each other, and what must hold between settings.

use std::path::Path;

use ddp_launcher::NodeRange;

use super::args::ParsedArgs;
use super::dry_run::{Source, Sources};
use super::error::CliError;
use super::settings::Settings;
use super::target::{Target, TargetKind};
use super::values::Endpoint;
use super::{scheduler, values};

/// What the target is: its name says, unless `--module` or `--no-python` does.
pub fn kind(args: &ParsedArgs, variables: &Settings) -> Result<TargetKind, CliError> {
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
        (false, false) => Ok(TargetKind::of(&args.target)),
    }
}

/// All layers in one, and which layer each setting comes from.
pub fn layers(
    typed: Settings,
    variables: Settings,
    target: &Target,
    get_env: &impl Fn(&str) -> Option<String>,
) -> Result<(Settings, Sources), CliError> {
    let mut sources = Sources::new();
    let mut note = |layer: &Settings, source: &dyn Fn(&str) -> Source| {
        for name in layer.given() {
            if sources.iter().all(|(known, _)| *known != name) {
                sources.push((name, source(name)));
            }
        }
    };
    note(&typed, &|_| Source::CommandLine);
    note(&variables, &|name| {
        Source::Variable(format!("PET_{}", name.to_ascii_uppercase()))
    });
    let mut settings = typed.or(variables);
    if let Some(text) = &target.yaml {
        let file = Path::new(&target.name);
        let layer = Settings::from_yaml(file, text)?;
        note(&layer, &|_| Source::Yaml(file.to_owned()));
        settings = settings.or(layer);
    }
    let layer = scheduler::layer(&settings, get_env)?;
    note(&layer, &|_| Source::Scheduler);
    settings = settings.or(layer);
    if settings.standalone == Some(true) {
        settings = Settings {
            nnodes: None,
            rdzv_endpoint: None,
            node_rank: None,
            ..settings
        };
        sources.retain(|(name, _)| !["nnodes", "rdzv_endpoint", "node_rank"].contains(name));
    }
    meet_at_master(&mut settings);
    warn_of_ignored(&settings);
    Ok((settings, sources))
}

/// `--master-addr` and `--master-port` are where the nodes meet, if no rendezvous is given, as with torchrun's `static`.
fn meet_at_master(settings: &mut Settings) {
    let several = settings.nnodes.is_some_and(|nodes| nodes.max > 1);
    if let (true, None, Some(host)) = (several, &settings.rdzv_endpoint, &settings.master_addr) {
        settings.rdzv_endpoint = Some(Endpoint {
            host: host.clone(),
            port: settings.master_port.take().unwrap_or(values::DEFAULT_PORT),
        });
        settings.master_addr = None;
    }
}

/// Flags that are taken for the sake of torchrun's users, and change nothing.
fn warn_of_ignored(settings: &Settings) {
    let ignored = [
        (settings.start_method.is_some(), "--start-method"),
        (settings.run_path == Some(true), "--run-path"),
        (settings.logs_specs.is_some(), "--logs-specs"),
    ];
    for key in settings.rdzv_conf.iter().flat_map(|conf| &conf.ignored) {
        eprintln!("[ddp-run] `--rdzv-conf {key}` changes nothing here, and is ignored");
    }
    for (_, flag) in ignored.iter().filter(|(given, _)| *given) {
        eprintln!("[ddp-run] `{flag}` changes nothing here, and is ignored");
    }
}

/// Settings that make no sense for the target.
pub fn check_target(target: &Target, settings: &Settings) -> Result<(), CliError> {
    if target.kind == TargetKind::Native && settings.virtual_local_rank == Some(true) {
        return Err(CliError::Conflict {
            problem:
                "`--virtual-local-rank` needs a program: the native worker chooses its GPU by its local rank"
                    .to_owned(),
            hint: "leave it out".to_owned(),
        });
    }
    Ok(())
}

/// `--standalone` beats what variables and files say of several nodes, but a command line that asks for
/// both is a mistake.
pub fn refuse_standalone_with_nodes(typed: &Settings) -> Result<(), CliError> {
    let several = typed.nnodes.is_some_and(|nodes| nodes.max > 1);
    let other = match (several, &typed.rdzv_endpoint) {
        (true, _) => "`--nnodes` asks for several nodes",
        (false, Some(_)) => "`--rdzv-endpoint` names a rendezvous",
        (false, None) => return Ok(()),
    };
    if typed.standalone != Some(true) {
        return Ok(());
    }
    Err(CliError::Conflict {
        problem: format!("`--standalone` means one node with a rendezvous of its own, but {other}"),
        hint: "leave one of the two out".to_owned(),
    })
}

/// Several nodes need a place to meet, and their ranks must be below their number.
pub fn check_nodes(nodes: NodeRange, settings: &Settings) -> Result<(), CliError> {
    if nodes.max > 1 && settings.rdzv_endpoint.is_none() {
        return Err(CliError::Conflict {
            problem: format!(
                "{} nodes need a place to meet, but there is no `--rdzv-endpoint`",
                nodes.max
            ),
            hint: format!(
                "give the address of one node on all of them: `--rdzv-endpoint node0:{}`",
                values::DEFAULT_PORT
            ),
        });
    }
    match settings.node_rank {
        Some(rank) if rank >= nodes.max => Err(CliError::Conflict {
            problem: format!(
                "`--node-rank {rank}` is out of range, `--nnodes` allows {} at most",
                nodes.max
            ),
            hint: format!("node ranks go from 0 to {}", nodes.max - 1),
        }),
        _ => Ok(()),
    }
}
