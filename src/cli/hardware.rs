//! How many workers a node should run: cores and GPUs that this process may use.

use std::io::Read;
use std::os::fd::AsFd;
use std::process::{ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::error::CliError;
use super::native::cuda;
use super::values::ProcCount;

/// First argument of the invocation that asks the CUDA driver for its devices.
pub const GPU_PROBE_SUBCOMMAND: &str = "__count-gpus";

/// Longest wait for the driver: the first use after boot initialises all devices.
const GPU_PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// The number of workers that `count` stands for on this machine.
pub fn workers(count: ProcCount) -> Result<u32, CliError> {
    match count {
        ProcCount::Fixed(n) => Ok(n),
        ProcCount::Cpu => Ok(usable_cores()),
        ProcCount::Gpu => visible_gpus().map_err(|why| CliError::NoGpu { why }),
        ProcCount::Auto => Ok(visible_gpus().unwrap_or_else(|_| usable_cores())),
    }
}

/// Cores in the affinity mask, bounded by the control groups' quota, rounded up.
pub fn usable_cores() -> u32 {
    ddp_launcher::usable_cores() as u32
}

/// GPUs that the driver shows to this process, `CUDA_VISIBLE_DEVICES` respected; why, where there are none.
///
/// The driver is asked in a process of its own: the launcher stays free of its threads and memory, and a
/// driver that panics or hangs is one reason among others.
pub fn visible_gpus() -> Result<u32, String> {
    if !has_device_nodes() {
        return Err("there is no `/dev/nvidia0` or other device file of a GPU".to_owned());
    }
    if std::env::var("CUDA_VISIBLE_DEVICES").is_ok_and(|list| list.trim().is_empty()) {
        return Err("`CUDA_VISIBLE_DEVICES` is set and empty".to_owned());
    }
    let answer = ask_in_child(GPU_PROBE_SUBCOMMAND, GPU_PROBE_TIMEOUT)
        .map_err(|error| format!("the CUDA driver could not be asked: {error}"))?;
    match answer.trim().parse::<u32>() {
        Ok(0) => Err("the CUDA driver sees none".to_owned()),
        Ok(n) => Ok(n),
        Err(_) => Err("the CUDA driver does not start".to_owned()),
    }
}

/// The probe's own main: prints the number of devices, or ends with a failure.
pub fn probe_gpus() -> std::process::ExitCode {
    // A driver that lacks a function makes its bindings panic. That is an answer here, not a bug.
    std::panic::set_hook(Box::new(|_| ()));
    let count = std::panic::catch_unwind(cuda::count_devices);
    if let Ok(Ok(count)) = count {
        println!("{count}");
        return std::process::ExitCode::SUCCESS;
    }
    std::process::ExitCode::FAILURE
}

/// WSL shows its GPUs through `/dev/dxg`.
fn has_device_nodes() -> bool {
    let Ok(entries) = std::fs::read_dir("/dev") else {
        return false;
    };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let number = name.strip_prefix("nvidia");
        name == "dxg" || number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// Standard output of this program's own invocation with `subcommand`, which must come within `timeout`.
pub(super) fn ask_in_child(subcommand: &str, timeout: Duration) -> std::io::Result<String> {
    let mut child = Command::new("/proc/self/exe")
        .arg(subcommand)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let answer = child
        .stdout
        .take()
        .map_or(Ok(String::new()), |stdout| read_within(stdout, timeout));
    if answer.is_err() {
        child.kill()?;
    }
    // Where SIGCHLD is ignored, the system has reaped it already.
    let _ = child.wait();
    answer
}

/// Reads to the end of `stdout`. Children write one short line and end, so waiting for its start is enough.
fn read_within(mut stdout: ChildStdout, timeout: Duration) -> std::io::Result<String> {
    let mut fds = [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)];
    let limit = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
    if poll(&mut fds, limit)? == 0 {
        let message = format!("no answer within {} s", timeout.as_secs());
        return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, message));
    }
    let mut answer = String::new();
    stdout.read_to_string(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_taken_as_it_is() {
        assert_eq!(workers(ProcCount::Fixed(3)).ok(), Some(3));
    }

    #[test]
    fn cores_are_at_least_one() {
        assert!(workers(ProcCount::Cpu).is_ok_and(|n| n >= 1));
    }
}
