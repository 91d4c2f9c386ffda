//! One new process, from `fork` to `exec`.
//!
//! The standard library's `Command` cannot start a process in a control group, and leaves the launcher's signal
//! handlers in force for the moments in which the new process still is a copy of the launcher. Here all signals are
//! blocked from before the fork until the program is about to run, with default dispositions or ignored. All that needs
//! memory is made before the fork.
#![expect(unsafe_code, reason = "fork, and code between fork and exec")]

use std::ffi::{CString, OsStr, OsString, c_char};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::unistd::{ForkResult, Pid, pipe2};

use crate::cgroup::{self, CgroupEntry};

/// Searched for programs where there is no `PATH`, as shells do.
const DEFAULT_PATH: &str = "/bin:/usr/bin";
/// Runs executable text that does not begin with `#!`.
const SHELL: &str = "/bin/sh";

/// A program with its arguments and environment, as `execve` takes them.
pub(crate) struct Image {
    /// Where it may lie; the first that can be executed is.
    places: Vec<CString>,
    argv: Vec<CString>,
    envp: Vec<CString>,
}

impl Image {
    /// `argv` begins with the program's own name. A program without a slash is looked for in the `PATH` of `env`.
    ///
    /// # Errors
    /// If a word contains a zero byte.
    pub(crate) fn new<'a>(
        program: &Path,
        argv: impl Iterator<Item = &'a OsStr>,
        env: &[(OsString, OsString)],
    ) -> io::Result<Self> {
        let text = |bytes: &[u8]| CString::new(bytes).map_err(io::Error::from);
        let path = env.iter().find(|(name, _)| name == "PATH");
        let path = path.map_or(OsStr::new(DEFAULT_PATH), |(_, path)| path);
        let places = if program.as_os_str().as_bytes().contains(&b'/') {
            vec![text(program.as_os_str().as_bytes())?]
        } else {
            std::env::split_paths(path)
                .map(|folder| text(folder.join(program).as_os_str().as_bytes()))
                .collect::<io::Result<_>>()?
        };
        Ok(Self {
            places,
            argv: argv.map(|arg| text(arg.as_bytes())).collect::<io::Result<_>>()?,
            envp: env
                .iter()
                .map(|(name, value)| text(&[name.as_bytes(), b"=", value.as_bytes()].concat()))
                .collect::<io::Result<_>>()?,
        })
    }
}

/// What a new process begins with.
pub(crate) struct Start<'a> {
    pub(crate) image: Image,
    /// Standard input, output and error; the launcher's own stream for each that is none.
    pub(crate) streams: [Option<BorrowedFd<'a>>; 3],
    /// The way into its control group, if there is one.
    pub(crate) entry: Option<CgroupEntry>,
    /// How long its program may take to begin.
    pub(crate) patience: Duration,
    /// Signals that it ignores from its first instruction on.
    pub(crate) ignored: &'a [i32],
}

/// Why a program does not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// There is no new process.
    #[error(transparent)]
    NotBorn(#[from] io::Error),
    /// `prepare` or `execve` failed. The process is to be reaped once its number may be used by others.
    #[error("{cause}")]
    Ended { child: Pid, cause: io::Error },
    /// It has not begun in time. The process was killed, and is to be reaped when it goes.
    #[error("its program did not start within {} s", .waited.as_secs_f64())]
    Stuck { waited: Duration },
}

impl From<Errno> for StartError {
    fn from(errno: Errno) -> Self {
        Self::NotBorn(errno.into())
    }
}

/// Starts a process; returns when its program runs.
///
/// `prepare` runs in the new process. It may make async-signal-safe calls only, and may not allocate.
pub(crate) fn start(given: &Start<'_>, prepare: impl Fn() -> Result<(), Errno>) -> Result<Pid, StartError> {
    let mut pointers = Pointers::of(&given.image);
    let (report, report_end) = pipe2(OFlag::O_CLOEXEC)?;
    let mut before = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut before))?;
    // SAFETY: the child only makes async-signal-safe calls, does not allocate, and ends in `execve` or `_exit`.
    let forked = unsafe { cgroup::fork(given.entry) };
    if let Ok(ForkResult::Child) = forked {
        let outcome = redirect(given.streams)
            .and_then(|()| prepare())
            .and_then(|()| reset_signals(given.ignored));
        let errno = match outcome {
            Ok(()) => pointers.execute(),
            Err(errno) => errno,
        };
        let number = (errno as i32).to_ne_bytes();
        // SAFETY: the buffer is valid for its length, and the two calls are async-signal-safe.
        unsafe {
            libc::write(report_end.as_raw_fd(), number.as_ptr().cast(), number.len());
            libc::_exit(1)
        }
    }
    let unblocked = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&before), None);
    drop(report_end);
    // Without its number: there is no process, so it says nothing about the program.
    let forked = forked.map_err(|error| io::Error::other(format!("no new process: {error}")))?;
    let ForkResult::Parent { child } = forked else {
        unreachable!("the child has ended above");
    };
    let report = File::from(report);
    if unblocked.is_err() || !is_readable(&report, given.patience) {
        // It holds the launcher's files, and may come to life when it is no longer expected.
        let _ = kill(child, Signal::SIGKILL);
        return Err(StartError::Stuck {
            waited: given.patience,
        });
    }
    let mut number = [0; size_of::<i32>()];
    // The other end is closed by the program's start.
    if (&report).read_exact(&mut number).is_err() {
        return Ok(child);
    }
    let cause = io::Error::from_raw_os_error(i32::from_ne_bytes(number));
    Err(StartError::Ended { child, cause })
}

/// Waits until there is something to read, or nothing will come any more; false if that takes longer than `patience`, or
/// cannot be waited for.
fn is_readable(file: &File, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLIN)], left) {
            Ok(0) if Instant::now() >= deadline => return false,
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
}

/// Arrays of pointers into an [`Image`], each with a null pointer at its end.
struct Pointers {
    places: Vec<*const c_char>,
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    /// The same arguments after those of the shell, the second of which is the place of the script.
    shell: Vec<*const c_char>,
    shell_path: CString,
}

impl Pointers {
    fn of(image: &Image) -> Self {
        let ended = |words: &[CString]| -> Vec<*const c_char> {
            let pointers = words.iter().map(|word| word.as_ptr());
            pointers.chain([ptr::null()]).collect()
        };
        let argv = ended(&image.argv);
        let shell_path = CString::new(SHELL).unwrap_or_default();
        let arguments = argv.iter().skip(1);
        Self {
            places: image.places.iter().map(|place| place.as_ptr()).collect(),
            shell: [shell_path.as_ptr(), ptr::null()]
                .iter()
                .chain(arguments)
                .copied()
                .collect(),
            argv,
            envp: ended(&image.envp),
            shell_path,
        }
    }

    /// Becomes the program, in the way of `execvp`; returns only why it could not. Async-signal-safe.
    fn execute(&mut self) -> Errno {
        let mut failure = Errno::ENOENT;
        for place in &self.places {
            // SAFETY: the strings end with zero bytes, the arrays with null pointers; the image outlives this.
            unsafe { libc::execve(*place, self.argv.as_ptr(), self.envp.as_ptr()) };
            let mut errno = Errno::last();
            if errno == Errno::ENOEXEC {
                self.shell[1] = *place;
                // SAFETY: as above.
                unsafe { libc::execve(self.shell_path.as_ptr(), self.shell.as_ptr(), self.envp.as_ptr()) };
                errno = Errno::last();
            }
            match errno {
                // One that may not be executed is the better answer than one that is not there.
                Errno::EACCES => failure = errno,
                Errno::ENOENT | Errno::ENOTDIR | Errno::ESTALE | Errno::ENODEV | Errno::ETIMEDOUT => {}
                _ => return errno,
            }
        }
        failure
    }
}

/// Async-signal-safe.
fn redirect(streams: [Option<BorrowedFd<'_>>; 3]) -> Result<(), Errno> {
    for (target, source) in streams.into_iter().enumerate() {
        if let Some(source) = source {
            // The runtime of Rust keeps 0 to 2 taken, so no source is a target, and each copy survives `exec`.
            // SAFETY: plain system call.
            Errno::result(unsafe { libc::dup2(source.as_raw_fd(), target as RawFd) })?;
        }
    }
    Ok(())
}

/// Default dispositions but for what is `ignored`, and nothing blocked, whatever the launcher has or inherited.
/// Async-signal-safe.
fn reset_signals(ignored: &[i32]) -> Result<(), Errno> {
    for signal in 1..=libc::SIGRTMAX() {
        let disposition = if ignored.contains(&signal) {
            libc::SIG_IGN
        } else {
            libc::SIG_DFL
        };
        // SAFETY: both are valid for every signal; SIGKILL, SIGSTOP and libc's own give an error, ignored.
        unsafe { libc::signal(signal, disposition) };
    }
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::PermissionsExt;

    use nix::sys::wait::WaitStatus;

    use super::*;

    const PATIENCE: Duration = Duration::from_mins(1);

    fn image_of(program: &str) -> Image {
        Image::new(Path::new(program), std::iter::once(OsStr::new("x")), &[]).unwrap()
    }

    /// Starts `argv`, and returns how it ended and what it wrote.
    fn run(program: &Path, argv: &[&str], path: &Path) -> Result<(WaitStatus, String), StartError> {
        let env = [
            ("PATH".into(), path.as_os_str().to_owned()),
            ("X".into(), "y".into()),
        ];
        let image = Image::new(program, argv.iter().map(OsStr::new), &env)?;
        let (mut output, end) = pipe2(OFlag::O_CLOEXEC).map(|(read, write)| (File::from(read), write))?;
        let nothing = OwnedFd::from(File::open("/dev/null")?);
        let streams = [nothing.as_fd(), end.as_fd(), end.as_fd()].map(Some);
        let given = Start {
            image,
            streams,
            entry: None,
            patience: PATIENCE,
            ignored: &[],
        };
        let child = start(&given, || Ok(()))?;
        drop(end);
        let mut text = String::new();
        output.read_to_string(&mut text)?;
        Ok((cgroup::wait_for(child)?, text))
    }

    fn errno_of(error: &StartError) -> Option<i32> {
        match error {
            StartError::Ended { cause, .. } => cause.raw_os_error(),
            _ => None,
        }
    }

    fn executable(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn a_program_gets_its_arguments_and_nothing_but_its_environment() {
        let (status, text) = run(
            Path::new("/bin/sh"),
            &["me", "-c", "echo $0 $1; env", "a", "b"],
            Path::new("/bin:/usr/bin"),
        )
        .unwrap();
        assert!(matches!(status, WaitStatus::Exited(_, 0)));
        assert!(text.starts_with("a b\n"), "{text}");
        assert!(text.contains("X=y\n") && !text.contains("CARGO"), "{text}");
    }

    #[test]
    fn programs_are_found_in_the_path_of_the_new_process() {
        let dir = tempfile::tempdir().unwrap();
        let (forbidden, right) = (dir.path().join("a"), dir.path().join("b"));
        for folder in [&forbidden, &right] {
            fs::create_dir(folder).unwrap();
        }
        let path = std::env::join_paths([&dir.path().join("absent"), &forbidden, &right]).unwrap();
        let run = || run(Path::new("mine"), &["mine", "x"], Path::new(&path));
        assert_eq!(errno_of(&run().unwrap_err()), Some(libc::ENOENT));
        fs::write(forbidden.join("mine"), "").unwrap();
        assert_eq!(errno_of(&run().unwrap_err()), Some(libc::EACCES));
        // Without `#!`: the shell's.
        executable(&right.join("mine"), "echo $0 $1");
        let (_, text) = run().unwrap();
        assert_eq!(text, format!("{} x\n", right.join("mine").display()));
    }

    #[test]
    fn what_fails_before_the_program_runs_is_reported() {
        let given = Start {
            image: image_of("/bin/true"),
            streams: [None; 3],
            entry: None,
            patience: PATIENCE,
            ignored: &[],
        };
        let error = start(&given, || Err(Errno::EXDEV)).unwrap_err();
        assert_eq!(errno_of(&error), Some(libc::EXDEV));
        let zero = Image::new(Path::new("/bin/true"), std::iter::once(OsStr::new("a\0b")), &[]);
        assert_eq!(zero.err().unwrap().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_program_that_does_not_begin_is_killed_and_waited_for_no_longer() {
        // As on a file system that does not answer; it says who it is first.
        let (mut number, end) = pipe2(OFlag::O_CLOEXEC)
            .map(|(read, write)| (File::from(read), write))
            .unwrap();
        let given = Start {
            image: image_of("/bin/true"),
            streams: [None; 3],
            entry: None,
            patience: Duration::from_millis(20),
            ignored: &[],
        };
        let error = start(&given, || {
            nix::unistd::write(&end, &Pid::this().as_raw().to_ne_bytes())?;
            loop {
                nix::unistd::pause();
            }
        })
        .unwrap_err();
        assert_eq!(error.to_string(), "its program did not start within 0.02 s");
        drop(end);
        let mut child = [0; size_of::<i32>()];
        number.read_exact(&mut child).unwrap();
        let child = Pid::from_raw(i32::from_ne_bytes(child));
        assert!(is_readable(&number, PATIENCE), "its end lives on with it");
        let status = cgroup::wait_for(child).unwrap();
        assert_eq!(status, WaitStatus::Signaled(child, Signal::SIGKILL, false));
    }
}
