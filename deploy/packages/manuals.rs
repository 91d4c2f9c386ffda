//! Writes what is generated from the command lines and the table of keys:
//!
//!     cargo run --example manuals -- target/packages      # manual pages and completions of shells
//!     cargo run --example manuals -- docs/reference.md    # all flags and all keys

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use clap::{Arg, Command};
use clap_complete::{Shell, generate_to};
use ddp_run::cli::launch::args;
use ddp_run::cli::native::key_reference;
use ddp_run::cli::{serve, train};

/// The shells that distributions have folders for.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

fn main() -> io::Result<()> {
    let target = PathBuf::from(
        env::args_os()
            .nth(1)
            .expect("a folder, or a file that ends in `.md`"),
    );
    if target.extension().is_some_and(|extension| extension == "md") {
        return fs::write(target, reference());
    }
    let (man, completions) = (target.join("man"), target.join("completions"));
    for folder in [&man, &completions] {
        fs::create_dir_all(folder)?;
    }
    for program in programs() {
        clap_mangen::generate_to(program.clone(), &man)?;
        for shell in SHELLS {
            complete(program.clone(), shell, &completions)?;
        }
    }
    Ok(())
}

fn programs() -> [Command; 3] {
    [args::command(), serve::command(), train::command()]
}

fn complete(mut program: Command, shell: Shell, folder: &Path) -> io::Result<()> {
    let name = program.get_name().to_owned();
    generate_to(shell, &mut program, name, folder).map(drop)
}

/// `docs/reference.md`: the flags of each program and subcommand, then the keys of `train.yaml`.
fn reference() -> String {
    let mut text = "# Reference: flags and keys\n\n\
        `cargo run --example manuals -- docs/reference.md` writes this page.\n"
        .to_owned();
    for mut program in programs() {
        program.build();
        flags(&program, program.get_name(), 2, &mut text);
    }
    text.push_str("\n## Keys of `train.yaml`\n");
    text + &key_reference()
}

/// The flags of a command, and of its subcommands below it.
fn flags(command: &Command, name: &str, depth: usize, text: &mut String) {
    let _ = write!(text, "\n{} `{name}`\n", "#".repeat(depth));
    if let Some(about) = command.get_about().filter(|_| depth > 2) {
        let _ = write!(text, "\n{about}.\n");
    }
    let args = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str()));
    let rows: Vec<String> = args.map(row).collect();
    if !rows.is_empty() {
        let _ = write!(
            text,
            "\n| flag | default | meaning |\n|---|---|---|\n{}",
            rows.concat()
        );
    }
    let subcommands = command.get_subcommands();
    for below in subcommands.filter(|below| !below.is_hide_set() && below.get_name() != "help") {
        flags(below, &format!("{name} {}", below.get_name()), 3, text);
    }
}

fn row(arg: &Arg) -> String {
    let values: Vec<&str> = arg
        .get_value_names()
        .unwrap_or_default()
        .iter()
        .map(|name| name.as_str())
        .collect();
    let takes_value = arg.get_action().takes_values();
    let value = if takes_value {
        values.join(" ")
    } else {
        String::new()
    };
    let flag = match (arg.get_long(), arg.get_short()) {
        (Some(long), Some(short)) => format!("-{short}, --{long} {value}"),
        (Some(long), None) => format!("--{long} {value}"),
        (None, Some(short)) => format!("-{short} {value}"),
        (None, None) => value,
    };
    let defaults: Vec<String> = arg
        .get_default_values()
        .iter()
        .filter(|_| takes_value)
        .map(|default| format!("`{}`", default.to_string_lossy()))
        .collect();
    let default = if arg.is_required_set() {
        "required".to_owned()
    } else {
        defaults.join(" ")
    };
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    format!(
        "| `{}` | {default} | {} |\n",
        flag.trim(),
        help.replace('|', "\\|")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_has_all_flags_and_keys() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference.md");
        assert!(
            fs::read_to_string(path).is_ok_and(|page| page == reference()),
            "run `cargo run --example manuals -- docs/reference.md`"
        );
    }
}
