//! The launcher; see [`ddp_run::cli::launch`].

fn main() -> std::process::ExitCode {
    ddp_run::cli::launch::main(std::env::args_os().collect())
}
