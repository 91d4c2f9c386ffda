//! Starts a launcher as a process of its own, and looks at it from outside.
//!
//! The launcher is this test binary, started again: [`crate::child`] is its `main`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use ddp_launcher::{
    BoundPlan, Guardian, LaunchPlan, NodeRange, OutputPlan, SignalPlan, SignalScope, WorkerCommand,
};
use ddp_proto::client::Access;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::daemon::{DEADLINE, Daemon};

const PLAN: &str = "DDP_TEST_PLAN";
/// Which part of [`crate::ROLES`] a worker plays.
pub(crate) const ROLE: &str = "DDP_TEST_ROLE";
/// Arguments with which this binary runs [`crate::child`].
const CHILD: [&str; 4] = ["child", "--exact", "--ignored", "--nocapture"];

/// A launch in the making; passed to the launcher's process as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the launch")]
pub(crate) struct Launch {
    endpoint: String,
    workers: u32,
    max_restarts: u32,
    program: PathBuf,
    args: Vec<String>,
    env: BTreeMap<String, String>,
    native: bool,
    agent_store: bool,
    progress_bar: bool,
    log_dir: Option<PathBuf>,
    stdout_filter: Option<String>,
    connect_timeout: Duration,
    outage_timeout: Duration,
    shutdown_timeout: Duration,
    hang_timeout: Option<Duration>,
    signals_ranks_only: bool,
}

pub(crate) fn launch(daemon: &Daemon) -> Launch {
    launch_at(daemon.endpoint())
}

pub(crate) fn launch_at(endpoint: String) -> Launch {
    Launch {
        endpoint,
        workers: 1,
        max_restarts: 0,
        program: "true".into(),
        args: Vec::new(),
        env: BTreeMap::new(),
        native: false,
        agent_store: false,
        progress_bar: false,
        log_dir: None,
        stdout_filter: None,
        connect_timeout: Duration::from_secs(10),
        outage_timeout: Duration::from_secs(10),
        shutdown_timeout: Duration::from_secs(20),
        hang_timeout: None,
        signals_ranks_only: false,
    }
}

impl Launch {
    pub(crate) fn workers(mut self, workers: u32) -> Self {
        self.workers = workers;
        self
    }

    pub(crate) fn max_restarts(mut self, max_restarts: u32) -> Self {
        self.max_restarts = max_restarts;
        self
    }

    pub(crate) fn program(mut self, program: impl Into<PathBuf>, args: &[&str]) -> Self {
        self.program = program.into();
        self.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self
    }

    pub(crate) fn sh(self, script: &str) -> Self {
        self.program("sh", &["-c", script])
    }

    /// Workers are this binary too, and play a part of [`crate::ROLES`].
    pub(crate) fn role(self, role: &str) -> Self {
        self.program(std::env::current_exe().unwrap(), &CHILD)
            .env(ROLE, role)
    }

    /// Workers learn the path of the named pipe.
    pub(crate) fn meet(self, meeting: &Meeting) -> Self {
        self.env("FIFO", &meeting.fifo)
    }

    /// Workers are launchers themselves.
    pub(crate) fn launcher(self, inner: &Launch) -> Self {
        let binary = std::env::current_exe().unwrap();
        let plan = serde_json::to_string(inner).unwrap();
        self.program(binary, &CHILD).env(PLAN, plan)
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<Path>) -> Self {
        self.env.insert(name.into(), value.as_ref().display().to_string());
        self
    }

    pub(crate) fn native(mut self) -> Self {
        self.native = true;
        self
    }

    pub(crate) fn agent_store(mut self) -> Self {
        self.agent_store = true;
        self
    }

    pub(crate) fn progress_bar(mut self) -> Self {
        self.progress_bar = true;
        self
    }

    pub(crate) fn log_dir(mut self, log_dir: &Path) -> Self {
        self.log_dir = Some(log_dir.to_owned());
        self
    }

    /// Lines with this word go to a file of their own.
    pub(crate) fn stdout_filter(mut self, word: &str) -> Self {
        self.stdout_filter = Some(word.into());
        self
    }

    pub(crate) fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    pub(crate) fn outage_timeout(mut self, timeout: Duration) -> Self {
        self.outage_timeout = timeout;
        self
    }

    pub(crate) fn shutdown_timeout(mut self, timeout: Duration) -> Self {
        self.shutdown_timeout = timeout;
        self
    }

    /// `--signal-scope rank`
    pub(crate) fn signals_ranks_only(mut self) -> Self {
        self.signals_ranks_only = true;
        self
    }

    pub(crate) fn hang_timeout(mut self, timeout: Duration) -> Self {
        self.hang_timeout = Some(timeout);
        self
    }

    pub(crate) fn start(self) -> Launcher {
        self.start_with(|command| command)
    }

    /// Starts the launcher and waits for its end.
    pub(crate) fn run(self) -> End {
        self.start().wait()
    }

    pub(crate) fn start_with(self, change: impl FnOnce(&mut Command) -> &mut Command) -> Launcher {
        let command = Command::new(std::env::current_exe().unwrap());
        self.start_as(command, change)
    }

    /// Started by a shell's script, which has to execute its arguments.
    pub(crate) fn start_through(self, script: &str) -> Launcher {
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(std::env::current_exe().unwrap());
        self.start_as(command, |command| command)
    }

    fn start_as(self, mut command: Command, change: impl FnOnce(&mut Command) -> &mut Command) -> Launcher {
        command
            .args(CHILD)
            .env(PLAN, serde_json::to_string(&self).unwrap())
            .env("RANK", "inherited by mistake")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        Launcher {
            child,
            stdout: Lines::read_any(stdout),
            stderr: Lines::read_any(stderr),
        }
    }

    fn plan(self) -> BoundPlan {
        let plan = LaunchPlan {
            job_id: "test-job".into(),
            run_id: "test-job".into(),
            nodes: NodeRange { min: 1, max: 1 },
            node_rank: None,
            workers: self.workers,
            max_restarts: self.max_restarts,
            local_addr: None,
            agreed: BTreeMap::new(),
            join_timeout: DEADLINE,
            last_call: None,
            takeover: None,
            hang_timeout: self.hang_timeout,
            connect_timeout: self.connect_timeout,
            outage_timeout: self.outage_timeout,
            shutdown_timeout: self.shutdown_timeout,
            log_dir: self.log_dir,
            resume_hint: None,
            command: WorkerCommand {
                program: self.program,
                arg0: None,
                args: self.args.into_iter().map(Into::into).collect(),
                display_name: "the program".into(),
                native: self.native,
                agent_store: self.agent_store,
                macros: false,
            },
            progress_bar: self.progress_bar,
            output: OutputPlan {
                stdout_filters: self.stdout_filter.into_iter().collect(),
                ..OutputPlan::default()
            },
            role: "default".into(),
            master_addr: None,
            master_port: None,
            worker_ports: None,
            virtual_local_rank: false,
            signals: SignalPlan {
                scope: if self.signals_ranks_only {
                    SignalScope::Rank
                } else {
                    SignalScope::Group
                },
                ..SignalPlan::default()
            },
            cores: Vec::new(),
            event_log: None,
        };
        BoundPlan {
            plan,
            endpoint: self.endpoint,
            access: Access::Open,
            incarnation: format!("test-{}", std::process::id()),
            open_files: None,
        }
    }
}

/// The launcher's process: runs the plan in the environment, if there is one.
pub(crate) fn run_launcher() {
    let Ok(plan) = std::env::var(PLAN) else {
        return;
    };
    // The tests send SIGHUP, which stays ignored where they run under `nohup`.
    // SAFETY: the default disposition runs no code of ours.
    unsafe { nix::sys::signal::signal(Signal::SIGHUP, nix::sys::signal::SigHandler::SigDfl) }.unwrap();
    let launch: Launch = serde_json::from_str(&plan).unwrap();
    for (name, value) in &launch.env {
        // Workers inherit it.
        // SAFETY: no other thread of this process looks at the environment now.
        unsafe { std::env::set_var(name, value) };
    }
    let guardian = Guardian::fork().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let guardian_pid = guardian.pid();
    let outcome = runtime.block_on(ddp_launcher::run(launch.plan(), guardian));
    assert!(
        !Path::new(&format!("/proc/{guardian_pid}")).exists(),
        "the guardian is still there, or a zombie"
    );
    std::process::exit(outcome.exit_code.into());
}

/// A launcher that runs. Killed when dropped, and then its guardian kills the rest.
pub(crate) struct Launcher {
    child: Child,
    pub(crate) stdout: Lines,
    pub(crate) stderr: Lines,
}

/// How a launcher ended, and all that it wrote.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl End {
    #[track_caller]
    pub(crate) fn expect_code(&self, code: i32) {
        assert_eq!(self.code, code, "{}\n{}", self.stdout, self.stderr);
    }

    #[track_caller]
    pub(crate) fn expect_stdout(&self, text: impl AsRef<str>) {
        assert!(self.stdout.contains(text.as_ref()), "{}", self.stdout);
    }

    #[track_caller]
    pub(crate) fn expect_stderr(&self, text: impl AsRef<str>) {
        assert!(self.stderr.contains(text.as_ref()), "{}", self.stderr);
    }

    #[track_caller]
    pub(crate) fn expect_no_stderr(&self, text: &str) {
        assert!(!self.stderr.contains(text), "{}", self.stderr);
    }
}

impl Launcher {
    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Sends a signal until standard error has a line with `text`: one that comes at once after the one before does not
    /// count.
    pub(crate) fn insist(&mut self, signal: Signal, text: &str) {
        let deadline = Instant::now() + DEADLINE;
        while Instant::now() < deadline {
            self.signal(signal);
            if self
                .stderr
                .comes(text, Instant::now() + Duration::from_millis(200))
            {
                return;
            }
        }
        panic!("no line with `{text}` in:\n{}", self.stderr.seen);
    }

    /// Waits for the end. Both streams end too: no process that was left behind holds them.
    pub(crate) fn wait(mut self) -> End {
        let (stdout, stderr) = (self.stdout.rest(), self.stderr.rest());
        let status = self.child.wait().unwrap();
        let code = status
            .code()
            .unwrap_or_else(|| 1000 + status.signal().unwrap_or(0));
        End { code, stdout, stderr }
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // Ended already, if all went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lines of a stream, read by a thread.
pub(crate) struct Lines {
    lines: Receiver<String>,
    seen: String,
}

impl Lines {
    pub(crate) fn read(stream: impl Read + Send + 'static) -> Self {
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            while let Ok(1..) = stream.read_until(b'\n', &mut line) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
                line.clear();
            }
        });
        Self {
            lines,
            seen: String::new(),
        }
    }

    /// Without a stream, if the test gave one of its own.
    fn read_any(stream: Option<impl Read + Send + 'static>) -> Self {
        match stream {
            Some(stream) => Self::read(stream),
            None => Self::read(std::io::empty()),
        }
    }

    /// Waits for a line that contains `text`, and returns it.
    pub(crate) fn expect(&mut self, text: &str) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push_str(&line);
                    if line.contains(text) {
                        return line;
                    }
                }
                Err(error) => panic!("no line with `{text}` ({error}) in:\n{}", self.seen),
            }
        }
    }

    /// True if a line that contains `text` comes before `deadline`.
    pub(crate) fn comes(&mut self, text: &str, deadline: Instant) -> bool {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                return false;
            };
            self.seen.push_str(&line);
            if line.contains(text) {
                return true;
            }
        }
    }

    /// Waits for the end of the stream, and returns all of it.
    pub(crate) fn rest(&mut self) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => self.seen.push_str(&line),
                Err(mpsc::RecvTimeoutError::Disconnected) => return std::mem::take(&mut self.seen),
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("the stream never ended:\n{}", self.seen),
            }
        }
    }
}

/// A directory with a named pipe, with which workers tell the test, or each other, how far they are.
pub(crate) struct Meeting {
    _dir: tempfile::TempDir,
    pub(crate) fifo: PathBuf,
}

impl Meeting {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        Self { _dir: dir, fifo }
    }

    /// Lets the worker go on that waits for the pipe to be opened.
    pub(crate) fn open(&self) {
        drop(std::fs::File::create(&self.fifo).unwrap());
    }

    /// Reads the pipe, until no process has it open for writing any more.
    pub(crate) fn lines(&self) -> Lines {
        let fifo = self.fifo.clone();
        // Opening waits for a writer: done by the thread that reads.
        Lines::read(LateFile {
            path: fifo,
            file: None,
        })
    }
}

struct LateFile {
    path: PathBuf,
    file: Option<std::fs::File>,
}

impl Read for LateFile {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.file.is_none() {
            self.file = Some(std::fs::File::open(&self.path)?);
        }
        self.file.as_mut().map_or(Ok(0), |file| file.read(buffer))
    }
}
