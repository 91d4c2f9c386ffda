//! Writes what packages contain beside the programs: manual pages, and completions of shells.
//!
//!     cargo run --release --example manuals -- target/packages

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use clap_complete::{Shell, generate_to};
use ddp_run::cli::launch::args;
use ddp_run::cli::{serve, train};

/// The shells that distributions have folders for.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

fn main() -> io::Result<()> {
    let folder = PathBuf::from(env::args_os().nth(1).expect("the folder to write to"));
    let (man, completions) = (folder.join("man"), folder.join("completions"));
    for folder in [&man, &completions] {
        fs::create_dir_all(folder)?;
    }
    for program in [args::command(), serve::command(), train::command()] {
        clap_mangen::generate_to(program.clone(), &man)?;
        for shell in SHELLS {
            complete(program.clone(), shell, &completions)?;
        }
    }
    Ok(())
}

fn complete(mut program: clap::Command, shell: Shell, folder: &Path) -> io::Result<()> {
    let name = program.get_name().to_owned();
    generate_to(shell, &mut program, name, folder).map(drop)
}
