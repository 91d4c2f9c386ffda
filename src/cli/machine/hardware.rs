//! How many workers a node should run, and which GPUs they have: cores and GPUs that this process may use.

use std::cell::OnceCell;
use std::fmt;
use std::io::Read as _;
use std::process::{ChildStdout, Command, ExitCode, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ddp_proto::env::SECRETS;
use serde::{Deserialize, Serialize};

use crate::cli::answer::give;
use crate::cli::error::CliError;
use crate::cli::native::cuda;
use crate::cli::values::ProcCount;

/// First argument of the invocation that asks the CUDA driver for its devices.
pub const GPU_PROBE_SUBCOMMAND: &str = "__list-gpus";

const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// Longest wait for the driver: the first use after boot initialises all devices.
const GPU_PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a process that was asked may take to end after its answer.
const REAP_BOUND: Duration = Duration::from_secs(1);
/// Pause between two looks whether it has ended.
const REAP_PAUSE: Duration = Duration::from_millis(1);
/// Longest answer.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// PCI address of each GPU that CUDA shows to this process, by its number there; empty where the driver does not say.
type Gpus = Result<Vec<String>, NoGpus>;

/// Why there are no GPUs to count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NoGpus {
    /// There is none, or none is to be used.
    Absent(String),
    /// There may be some, but the driver does not show them.
    Driver(String),
}

impl fmt::Display for NoGpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(why) | Self::Driver(why) => f.write_str(why),
        }
    }
}

/// This machine. Its driver is asked on the first use, and only once.
#[derive(Debug, Default)]
pub struct Hardware {
    gpus: OnceCell<Gpus>,
}

impl Hardware {
    /// The number of workers that `count` stands for.
    pub fn workers(&self, count: ProcCount) -> Result<u32, CliError> {
        match count {
            ProcCount::Fixed(n) => Ok(n),
            ProcCount::Cpu => Ok(usable_cores()),
            ProcCount::Gpu | ProcCount::Auto => match (count, self.gpus()) {
                (_, Ok(gpus)) => Ok(gpus.len() as u32),
                (ProcCount::Auto, Err(NoGpus::Absent(_))) => Ok(usable_cores()),
                (_, Err(why)) => Err(CliError::NoGpu { why: why.to_string() }),
            },
        }
    }

    /// PCI addresses of the GPUs, at least one, in the order in which CUDA numbers them for the workers:
    /// `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` are in it, by the driver's own reading of them.
    pub fn gpus(&self) -> Result<&[String], &NoGpus> {
        self.gpus.get_or_init(|| ask_driver(None)).as_deref()
    }

    /// The same where each of `workers` workers sees its own entry of `CUDA_VISIBLE_DEVICES` only. CUDA shows one MIG
    /// device to a process, so these are asked for one by one.
    pub fn gpus_apart(&self, workers: u32) -> Result<Vec<String>, NoGpus> {
        let list = std::env::var(VISIBLE_DEVICES).unwrap_or_default();
        if !list.contains("MIG-") {
            return self.gpus().map(<[String]>::to_vec).map_err(Clone::clone);
        }
        let devices = list.split(',').map(str::trim).take(workers as usize);
        let parents = devices.map(|device| ask_driver(Some(device)));
        Ok(parents.collect::<Result<Vec<_>, _>>()?.concat())
    }
}

/// Cores in the affinity mask, bounded by the control groups' quota, rounded up.
pub fn usable_cores() -> u32 {
    ddp_launcher::usable_cores() as u32
}

/// Cores of the machine, whether or not this process may use them; 0 where the system does not say.
pub fn machine_cores() -> u32 {
    let described = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    described.matches("processor\t:").count() as u32
}

/// GPUs that the driver shows, to a process with this `CUDA_VISIBLE_DEVICES` if one is given.
///
/// It is asked in a process of its own: the launcher stays free of its threads and memory, and a
/// driver that crashes or hangs is one reason among others.
fn ask_driver(visible: Option<&str>) -> Gpus {
    if !cuda::has_device_nodes() {
        return Err(NoGpus::Absent(
            "no device file of a GPU such as `/dev/nvidia0` exists".into(),
        ));
    }
    if std::env::var(VISIBLE_DEVICES).is_ok_and(|list| list.trim().is_empty()) {
        return Err(NoGpus::Absent("`CUDA_VISIBLE_DEVICES` is set but empty".into()));
    }
    let answer = ask_in_child(GPU_PROBE_SUBCOMMAND, visible, GPU_PROBE_TIMEOUT)
        .map_err(|error| NoGpus::Driver(format!("the CUDA driver could not be queried: {error}")))?;
    read_answer(&answer)
}

/// What [`probe_gpus`] printed.
fn read_answer(answer: &str) -> Gpus {
    match serde_json::from_str::<Gpus>(answer.trim()) {
        Ok(Ok(gpus)) if gpus.is_empty() => Err(NoGpus::Absent("the CUDA driver finds none".into())),
        Ok(answer) => answer,
        Err(_) => Err(NoGpus::Driver(
            "the CUDA driver crashed the process that queried it".to_owned(),
        )),
    }
}

/// The probe's own main: prints the answer as one line of JSON, without what to do about it.
pub fn probe_gpus() -> ExitCode {
    let answer: Gpus = match cuda::count_devices() {
        // What can be counted, but not described, can still be used.
        Ok(count) => Ok(cuda::visible_gpus().map_or_else(
            |_| vec![String::new(); count],
            |gpus| gpus.into_iter().map(|gpu| gpu.pci).collect(),
        )),
        Err(error) => {
            let why = error.to_string().lines().next().unwrap_or_default().to_owned();
            Err(if error.is_absence() {
                NoGpus::Absent(why)
            } else {
                NoGpus::Driver(why)
            })
        }
    };
    serde_json::to_string(&answer).map_or(ExitCode::FAILURE, |line| give(line + "\n"))
}

/// Standard output of this program's own invocation with `subcommand`, which must come within `timeout`. It sees the
/// `visible` GPU alone, if one is named.
pub(in crate::cli) fn ask_in_child(
    subcommand: &str,
    visible: Option<&str>,
    timeout: Duration,
) -> std::io::Result<String> {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(subcommand)
        .envs(visible.map(|device| (VISIBLE_DEVICES, device)));
    answer_of(command, timeout)
}

fn answer_of(mut command: Command, timeout: Duration) -> std::io::Result<String> {
    for name in SECRETS {
        command.env_remove(name);
    }
    let mut child = command
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
    // One that hangs inside its driver does not even die, or closes its output and stays. Where SIGCHLD is ignored, the
    // system has reaped it already.
    let deadline = Instant::now() + REAP_BOUND;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
        std::thread::sleep(REAP_PAUSE);
    }
    answer
}

/// Reads to the end of `stdout`, which must come within `timeout`.
fn read_within(stdout: ChildStdout, timeout: Duration) -> std::io::Result<String> {
    let (answer, answered) = channel();
    // Its read ends with the child, which is killed if it does not answer.
    std::thread::Builder::new().spawn(move || {
        let mut text = String::new();
        let read = stdout.take(MAX_ANSWER_BYTES).read_to_string(&mut text);
        // The caller has gone on if the answer is late.
        let _ = answer.send(read.map(|_| text));
    })?;
    answered.recv_timeout(timeout).unwrap_or_else(|_| {
        let message = format!("no answer within {} s", timeout.as_secs());
        Err(std::io::Error::new(std::io::ErrorKind::TimedOut, message))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(answer: &str) -> Hardware {
        Hardware {
            gpus: OnceCell::from(read_answer(answer)),
        }
    }

    #[test]
    fn a_child_that_stops_in_the_middle_of_its_answer_is_given_up() {
        let mut child = Command::new("sh");
        child.args(["-c", "printf '{\"Ok\":'; exec sleep 1000"]);
        let error = answer_of(child, Duration::from_millis(300)).expect_err("no end of the answer");
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_number_is_taken_as_it_is() {
        assert_eq!(machine("").workers(ProcCount::Fixed(3)).ok(), Some(3));
    }

    #[test]
    fn cores_are_at_least_one() {
        assert!(machine("").workers(ProcCount::Cpu).is_ok_and(|n| n >= 1));
    }

    #[test]
    fn gpus_are_counted_where_the_driver_shows_some() {
        let two = machine("{\"Ok\":[\"0000:3B:00.0\",\"\"]}\n");
        assert_eq!(two.workers(ProcCount::Gpu).ok(), Some(2));
        assert_eq!(two.workers(ProcCount::Auto).ok(), Some(2));
        for (answer, why, on_cores) in [
            ("{\"Ok\":[]}", "finds none", Some(usable_cores())),
            (
                r#"{"Err":{"Absent":"it is a stub"}}"#,
                "no GPU is visible: it is a stub\n  hint: ",
                Some(usable_cores()),
            ),
            (r#"{"Err":{"Driver":"it is broken"}}"#, "it is broken", None),
            ("", "crashed", None),
        ] {
            let none = machine(answer);
            assert_eq!(none.workers(ProcCount::Auto).ok(), on_cores, "{why}");
            let error = none.workers(ProcCount::Gpu).expect_err("none");
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
