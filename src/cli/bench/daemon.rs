//! The daemon that is measured: a process of its own, and what the system says of it.

use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ddp_proto::client::Access;
use ddp_proto::env::DDP_TOKEN;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, SysconfVar, sysconf};

/// A daemon of this program's build. It ends with this value.
#[derive(Debug)]
pub(super) struct Daemon {
    process: Child,
    endpoint: String,
}

impl Daemon {
    /// Starts it at a free port of the loopback, with the token that the agents have or with `--insecure`. What it
    /// reports is formatted and thrown away.
    pub(super) fn start(access: &Access) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["serve", "--listen", "127.0.0.1:0"]);
        match access.token() {
            Some(token) => command.env(DDP_TOKEN, token.reveal()),
            None => command.arg("--insecure"),
        };
        let mut process = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut endpoint = String::new();
        if let Some(stdout) = process.stdout.take() {
            BufReader::new(stdout).read_line(&mut endpoint)?;
        }
        let endpoint = endpoint.trim().to_owned();
        let daemon = Self { process, endpoint };
        if daemon.endpoint.is_empty() {
            return Err(io::Error::other("the daemon did not start"));
        }
        Ok(daemon)
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The most memory that it has had so far, in bytes.
    pub(super) fn peak_bytes(&self) -> io::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = peak.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.map(|kib| kib * 1024).ok_or_else(unreadable)
    }

    /// The processor time that it has taken so far, of all of its threads.
    pub(super) fn cpu_time(&self) -> io::Result<Duration> {
        cpu_time_of(&self.process.id().to_string())
    }
}

/// The same of this process, which plays all agents.
pub(super) fn own_cpu_time() -> io::Result<Duration> {
    cpu_time_of("self")
}

fn cpu_time_of(process: &str) -> io::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name, in brackets, may contain anything. After it: utime and stime are the 12th and 13th field.
    let (_, fields) = stat.rsplit_once(") ").ok_or_else(unreadable)?;
    let ticks = fields.split(' ').skip(11).take(2).map(str::parse::<u64>);
    let ticks: u64 = ticks.sum::<Result<_, _>>().map_err(|_| unreadable())?;
    let ticks_a_second = sysconf(SysconfVar::CLK_TCK)?.unwrap_or(100);
    Ok(Duration::from_secs_f64(ticks as f64 / ticks_a_second as f64))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It has nothing to lose. The wait is short: a killed process runs no code of its own.
        let _ = kill(Pid::from_raw(self.process.id() as i32), Signal::SIGKILL);
        let _ = self.process.wait();
    }
}

fn unreadable() -> io::Error {
    io::Error::other("/proc does not show what the daemon takes")
}
