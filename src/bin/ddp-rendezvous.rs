//! The rendezvous daemon; see [`ddp_run::cli::serve`].

fn main() -> std::process::ExitCode {
    ddp_run::cli::serve::main(std::env::args_os().collect())
}
