//! A terminal with a program on it, and a person who reads and types.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::pty::{Winsize, openpty};
use nix::sys::termios::{LocalFlags, tcgetattr};

use super::PATIENCE;

/// A program whose input and output are one terminal, which controls it: Ctrl-C is a signal. Killed when dropped.
pub(crate) struct Screen {
    child: Child,
    keyboard: File,
    output: Receiver<Vec<u8>>,
    seen: String,
    /// All before is known to the test.
    read: usize,
}

impl Screen {
    /// Starts the program on a new terminal of 24 rows and 100 columns.
    #[track_caller]
    pub(crate) fn start(program: &Command) -> Self {
        let size = Winsize {
            ws_row: 24,
            ws_col: 100,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let terminal = openpty(&size, None).expect("a terminal");
        // What another test starts meanwhile would have it open, and keep it so.
        for end in [&terminal.master, &terminal.slave] {
            fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).expect("our own");
        }
        let end = || terminal.slave.try_clone().expect("a descriptor");
        let mut command = Command::new("setsid");
        command
            .arg("--ctty")
            .arg(program.get_program())
            .args(program.get_args());
        command.env_clear();
        for (name, value) in program.get_envs() {
            command.env(name, value.expect("none is removed"));
        }
        if let Some(dir) = program.get_current_dir() {
            command.current_dir(dir);
        }
        command.stdin(end()).stdout(end()).stderr(end());
        let child = command.spawn().expect("`setsid` of util-linux");
        let keyboard = File::from(terminal.master);
        let mut screen = keyboard.try_clone().expect("a descriptor");
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // It is an error to read a terminal that no process has open any more.
            while let Ok(bytes @ 1..) = screen.read(&mut buffer) {
                if sender.send(buffer[..bytes].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            keyboard,
            output,
            seen: String::new(),
            read: 0,
        }
    }

    /// Waits until the screen shows `text` after all that was waited for before.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.seen[self.read..].find(text) {
                self.read += at + text.len();
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.seen.push_str(&String::from_utf8_lossy(&bytes)),
                Err(error) => panic!("no `{text}` ({error}); the screen shows:\n{}", self.seen),
            }
        }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn type_in(&mut self, text: &str) {
        self.keyboard
            .write_all(text.as_bytes())
            .expect("a terminal takes it");
    }

    /// Types `text` until the screen shows `answer`: a launcher does not count a signal that comes at once after the one
    /// before.
    pub(crate) fn insist(&mut self, text: &str, answer: &str) {
        let last = Instant::now() + PATIENCE;
        while Instant::now() < last {
            self.type_in(text);
            let deadline = Instant::now() + Duration::from_millis(200);
            while let Ok(bytes) = self
                .output
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                self.seen.push_str(&String::from_utf8_lossy(&bytes));
                if self.seen[self.read..].contains(answer) {
                    return;
                }
            }
        }
        panic!("no `{answer}`; the screen shows:\n{}", self.seen);
    }

    /// True if the terminal shows what is typed.
    pub(crate) fn echoes(&self) -> bool {
        let settings = tcgetattr(&self.keyboard).expect("a terminal");
        settings.local_flags.contains(LocalFlags::ECHO)
    }

    /// Waits until no process has the terminal open any more; the exit code, and all that the screen showed.
    #[track_caller]
    pub(crate) fn finish(mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + PATIENCE;
        let mut seen = std::mem::take(&mut self.seen);
        while let Ok(bytes) = self
            .output
            .recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            seen.push_str(&String::from_utf8_lossy(&bytes));
        }
        assert!(Instant::now() < deadline, "the terminal is still in use:\n{seen}");
        let status = self.child.wait().expect("a child that is waited for once");
        (status.code(), seen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Ended already, if all went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
