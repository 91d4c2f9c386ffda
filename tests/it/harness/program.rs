//! A child process: started, watched line by line, signalled, finished.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{LazyLock, Once};
use std::time::{Duration, Instant};

use ddp_proto::trust::token::Token;
use nix::sys::signal::{SigHandler, Signal, kill, signal};
use nix::unistd::Pid;

use super::{PATIENCE, Screen};

/// A program with its arguments, not started yet. Its environment is empty but for what is needed to run.
pub(crate) struct Program {
    command: Command,
    name: String,
}

/// A shell starts what is in the background with Ctrl-C ignored, which everything below inherits: there the tests
/// would wait for ends that are never reported.
#[expect(unsafe_code, reason = "the disposition of a signal")]
fn catch_interrupts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for interrupt in [Signal::SIGINT, Signal::SIGQUIT] {
            // SAFETY: the default disposition runs no code of ours.
            unsafe { signal(interrupt, SigHandler::SigDfl) }.expect("a signal that can be handled");
        }
    });
}

/// A file that no other run of the tests knows. It is there already, so no host of a rendezvous says that it made it.
pub(crate) fn token_file() -> &'static Path {
    static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(super::temp_dir);
    static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
        let path = FOLDER.path().join("token");
        let made = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        made.expect("a new file")
            .write_all(Token::random().reveal().as_bytes())
            .expect("written");
        path
    });
    &FILE
}

/// `ddp-train`, to which arguments are added.
pub(crate) fn ddp_train() -> Program {
    Program::new(env!("CARGO_BIN_EXE_ddp-train"))
}

/// `ddp-rendezvous`, to which arguments are added.
pub(crate) fn ddp_rendezvous() -> Program {
    Program::new(env!("CARGO_BIN_EXE_ddp-rendezvous"))
}

impl Program {
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        catch_interrupts();
        let path = path.into();
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let mut command = Command::new(&path);
        command
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // The nodes of a test share a home, and no test sees that of the machine.
        command.env("DDP_TOKEN_FILE", token_file());
        for inherited in ["PATH", "TMPDIR", "LD_LIBRARY_PATH"] {
            if let Some(value) = std::env::var_os(inherited) {
                command.env(inherited, value);
            }
        }
        Self { command, name }
    }

    pub(crate) fn args(mut self, args: impl IntoIterator<Item: AsRef<OsStr>>) -> Self {
        self.command.args(args);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// What it reads from its standard input.
    pub(crate) fn input(mut self, text: &str) -> Self {
        use std::io::Seek;
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(text.as_bytes()).expect("written");
        file.rewind().expect("rewound");
        self.command.stdin(file);
        self
    }

    pub(crate) fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.command.current_dir(dir.into());
        self
    }

    /// Where its standard output goes, instead of to the test.
    pub(crate) fn stdout_to(mut self, file: File) -> Self {
        self.command.stdout(file);
        self
    }

    /// Starts it on a terminal of its own.
    #[track_caller]
    pub(crate) fn on_screen(self) -> Screen {
        Screen::start(&self.command)
    }

    #[track_caller]
    pub(crate) fn start(mut self) -> Running {
        let mut child = self
            .command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start `{}`: {error}", self.name));
        let pid = child.id() as i32;
        let (events_in, events) = channel();
        let mut open_streams = 1;
        if let Some(stdout) = child.stdout.take() {
            watch(stdout, Stream::Stdout, events_in.clone());
            open_streams += 1;
        }
        watch(
            child.stderr.take().expect("piped"),
            Stream::Stderr,
            events_in.clone(),
        );
        std::thread::spawn(move || {
            let status = child.wait().expect("a child that is waited for once");
            // The test may have failed and gone.
            let _ = events_in.send(Event::Exit(status));
        });
        Running {
            name: self.name,
            pid,
            events,
            seen: Vec::new(),
            taken: BTreeSet::new(),
            status: None,
            open_streams,
        }
    }

    #[track_caller]
    pub(crate) fn run(self) -> Finished {
        self.start().finish()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    Stdout,
    Stderr,
}

enum Event {
    Line(Stream, String),
    Closed,
    Exit(ExitStatus),
}

fn watch(stream: impl Read + Send + 'static, which: Stream, events: Sender<Event>) {
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
            let text = String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned();
            line.clear();
            if events.send(Event::Line(which, text)).is_err() {
                return;
            }
        }
        let _ = events.send(Event::Closed);
    });
}

/// A program that runs. One that a failed test leaves behind is killed.
pub(crate) struct Running {
    name: String,
    pid: i32,
    events: Receiver<Event>,
    seen: Vec<(Stream, String)>,
    /// Lines that answered a call of [`Running::wait_for`].
    taken: BTreeSet<usize>,
    status: Option<ExitStatus>,
    open_streams: u32,
}

impl Running {
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits for a line of its output that contains `pattern`, and returns the line. Each line answers one
    /// call, whatever the order in which lines came: workers race.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, pattern: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let fresh = |index: &usize| !self.taken.contains(index) && self.seen[*index].1.contains(pattern);
            if let Some(index) = (0..self.seen.len()).find(fresh) {
                self.taken.insert(index);
                return self.seen[index].1.clone();
            }
            let came = self.next_event(deadline);
            assert!(
                came,
                "`{}` never wrote `{pattern}`; it wrote:\n{}",
                self.name,
                self.transcript()
            );
        }
    }

    #[track_caller]
    pub(crate) fn signal(&self, signal: Signal) {
        assert!(self.status.is_none(), "`{}` has ended already", self.name);
        kill(Pid::from_raw(self.pid), signal).expect("a child of ours");
    }

    /// Sends a signal until it writes a line that contains `pattern`: a launcher does not count one that comes at once
    /// after the one before.
    #[track_caller]
    pub(crate) fn insist(&mut self, signal: Signal, pattern: &str) {
        let last = Instant::now() + PATIENCE;
        let mut known = self.seen.len();
        while Instant::now() < last {
            self.signal(signal);
            let deadline = Instant::now() + Duration::from_millis(200);
            while self.next_event(deadline) {
                let is_new = self.seen[known..].iter().any(|(_, line)| line.contains(pattern));
                if is_new {
                    return;
                }
                known = self.seen.len();
            }
        }
        panic!(
            "`{}` never wrote `{pattern}`; it wrote:\n{}",
            self.name,
            self.transcript()
        );
    }

    /// Watches it for `time`, less if it ends before; true if it has ended.
    pub(crate) fn ended_within(&mut self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        while self.status.is_none() && self.next_event(deadline) {}
        self.status.is_some()
    }

    /// Waits until the program has ended and no process holds its output open any more.
    #[track_caller]
    pub(crate) fn finish(mut self) -> Finished {
        let deadline = Instant::now() + PATIENCE;
        while self.status.is_none() || self.open_streams > 0 {
            if !self.next_event(deadline) && (self.status.is_none() || self.open_streams > 0) {
                let state = match self.status {
                    None => "did not end",
                    Some(_) => "ended, but its output is held open",
                };
                panic!(
                    "`{}` {state} within {} s; it wrote:\n{}",
                    self.name,
                    PATIENCE.as_secs(),
                    self.transcript()
                );
            }
        }
        let of = |which: Stream| {
            let lines = self.seen.iter().filter(move |(stream, _)| *stream == which);
            lines.map(|(_, line)| line.clone()).collect()
        };
        Finished {
            name: self.name.clone(),
            status: self.status.expect("checked above"),
            stdout: of(Stream::Stdout),
            stderr: of(Stream::Stderr),
        }
    }

    /// Takes one event; false when none came before the deadline or none will come.
    fn next_event(&mut self, deadline: Instant) -> bool {
        let left = deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        match self.events.recv_timeout(left) {
            Ok(Event::Line(stream, line)) => self.seen.push((stream, line)),
            Ok(Event::Closed) => self.open_streams -= 1,
            Ok(Event::Exit(status)) => self.status = Some(status),
            Err(_) => return false,
        }
        true
    }

    fn transcript(&self) -> String {
        let lines = self
            .seen
            .iter()
            .map(|(stream, line)| format!("  {stream:?}: {line}"));
        lines.collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.status.is_none() {
            // It may end at this very moment; then there is nothing to kill.
            let _ = kill(Pid::from_raw(self.pid), Signal::SIGKILL);
        }
    }
}

/// A program that has ended, with all that it wrote.
#[derive(Debug)]
pub(crate) struct Finished {
    name: String,
    status: ExitStatus,
    stdout: Vec<String>,
    stderr: Vec<String>,
}

impl Finished {
    #[track_caller]
    pub(crate) fn expect_exit(&self, code: i32) -> &Self {
        assert_eq!(
            self.status.code(),
            Some(code),
            "exit code of `{}`; {}",
            self.name,
            self.transcript()
        );
        self
    }

    #[track_caller]
    pub(crate) fn expect_killed_by(&self, signal: Signal) -> &Self {
        assert_eq!(self.status.signal(), Some(signal as i32), "{}", self.transcript());
        self
    }

    #[track_caller]
    pub(crate) fn expect_stdout(&self, pattern: &str) -> &Self {
        assert!(
            self.stdout.iter().any(|line| line.contains(pattern)),
            "no `{pattern}`; {}",
            self.transcript()
        );
        self
    }

    #[track_caller]
    pub(crate) fn expect_stderr(&self, pattern: &str) -> &Self {
        assert!(
            self.stderr.iter().any(|line| line.contains(pattern)),
            "no `{pattern}`; {}",
            self.transcript()
        );
        self
    }

    #[track_caller]
    pub(crate) fn expect_no_stderr(&self, pattern: &str) -> &Self {
        let is_there = self.stderr.iter().any(|line| line.contains(pattern));
        assert!(!is_there, "`{pattern}`; {}", self.transcript());
        self
    }

    #[track_caller]
    pub(crate) fn expect_silence(&self) -> &Self {
        assert!(
            self.stdout.is_empty() && self.stderr.is_empty(),
            "{}",
            self.transcript()
        );
        self
    }

    /// Its exit code; none if a signal killed it.
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    pub(crate) fn stdout(&self) -> &[String] {
        &self.stdout
    }

    /// Its stderr as one text, without line ends at the end.
    pub(crate) fn stderr(&self) -> String {
        self.stderr.join("\n")
    }

    /// Standard error from the first error on: without what a launcher says of the machine before.
    pub(crate) fn errors(&self) -> String {
        let first = self.stderr.iter().position(|line| line.contains("error:"));
        self.stderr[first.unwrap_or(self.stderr.len())..].join("\n")
    }

    /// All there is to say of it, for messages.
    pub(crate) fn transcript(&self) -> String {
        let status = self.status;
        format!(
            "{status}\nstdout:\n{}\nstderr:\n{}",
            self.stdout.join("\n"),
            self.stderr.join("\n")
        )
    }
}
