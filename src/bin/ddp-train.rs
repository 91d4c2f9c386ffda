//! Trains without the launcher, and examines the machine; see [`ddp_run::cli::train`].

fn main() -> std::process::ExitCode {
    ddp_run::cli::init_tracing(ddp_run::cli::native::WORKER_EVENTS);
    ddp_run::cli::train::main(std::env::args_os().collect())
}
