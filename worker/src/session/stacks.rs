//! The stacks of all threads of this process: the last words of a rank that hangs.
//!
//! Each thread is interrupted by a signal of our own and notes its return addresses; names are looked up by the
//! thread that asks. Unwinding is not among the calls that POSIX allows in a signal handler: it takes no lock of ours
//! and allocates nothing, and is done only while the launcher believes that a worker of this node hangs.
#![expect(unsafe_code, reason = "a signal handler, and a signal for one thread")]

use std::ffi::c_int;
use std::fmt::Write as _;
use std::fs;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;

/// Frames of one thread that are noted.
const MAX_FRAMES: usize = 48;
/// Threads that are asked; the rest are counted.
const MAX_THREADS: usize = 64;
/// How long one thread may take to answer: one that waits in the kernel where no signal reaches it never does.
const ANSWER_BOUND: Duration = Duration::from_millis(50);
/// Between two looks for the answer: a signal handler cannot wake a thread.
const LOOK_INTERVAL: Duration = Duration::from_micros(100);
/// Beyond `SIGRTMIN`: a real-time signal that neither libc, CUDA nor Python use.
const SIGNAL_OFFSET: c_int = 13;
/// Functions below the first one of interest.
const BEGINNINGS: [&str; 6] = [
    "__rust_begin_short_backtrace",
    "__libc_start",
    "lang_start",
    "start_thread",
    "thread_start",
    "clone3",
];
/// No answer yet.
const PENDING: usize = usize::MAX;
/// No thread has this number.
const ANSWERING: i32 = -1;

/// The thread that is asked, by its number in the kernel; 0: none; [`ANSWERING`]: it fills [`FRAMES`].
static ASKED: AtomicI32 = AtomicI32::new(0);
/// Frames in [`FRAMES`] that count, or [`PENDING`].
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Return addresses, the innermost first.
static FRAMES: [AtomicUsize; MAX_FRAMES] = [const { AtomicUsize::new(0) }; MAX_FRAMES];
/// One asks at a time.
static ASKING: Mutex<()> = Mutex::new(());

/// All threads but the calling one, with their stacks, as text.
pub(super) fn capture() -> String {
    let _asking = ASKING.lock().unwrap_or_else(PoisonError::into_inner);
    let signal = libc::SIGRTMIN() + SIGNAL_OFFSET;
    if !listen(signal) {
        return "cannot capture the stacks: no signal is free for it\n".to_owned();
    }
    let me = this_thread();
    let mut threads: Vec<i32> = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|thread| *thread != me)
        .collect();
    threads.sort_unstable();
    let mut text = String::new();
    for thread in threads.iter().take(MAX_THREADS) {
        let name = fs::read_to_string(format!("/proc/self/task/{thread}/comm")).unwrap_or_default();
        let _ = writeln!(text, "thread {thread} ({})", name.trim_end());
        match ask(*thread, signal) {
            Some(frames) => describe(&frames, &mut text),
            None => text.push_str("  no answer: the thread waits inside the kernel, or has exited\n"),
        }
    }
    if threads.len() > MAX_THREADS {
        let _ = writeln!(text, "and {} more threads", threads.len() - MAX_THREADS);
    }
    text
}

/// Installs the handler; false if the system refuses.
fn listen(signal: c_int) -> bool {
    // SAFETY: all zeroes is a valid `sigaction`; handler and flags are set below.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = note as *const () as usize;
    // Calls that the signal interrupts go on.
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the action is valid, the old one is not asked for.
    unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) == 0 }
}

/// The handler: notes where this thread is.
extern "C" fn note(_signal: c_int) {
    // Whatever it interrupts may be about to read it.
    let errno = Errno::last_raw();
    note_place();
    Errno::set_raw(errno);
}

fn note_place() {
    let me = this_thread();
    let (mut frames, mut count) = ([0; MAX_FRAMES], 0);
    let keep = |frame: &backtrace::Frame| {
        frames[count] = frame.ip() as usize;
        count += 1;
        count < MAX_FRAMES
    };
    // SAFETY: the unwinder reads this thread's stack only; what it caches is the thread's or atomic.
    unsafe { backtrace::trace_unsynchronized(keep) };
    // A thread that answers too late must not write into another one's frames.
    let mine = ASKED.compare_exchange(me, ANSWERING, Ordering::AcqRel, Ordering::Relaxed);
    if mine.is_ok() {
        for (place, frame) in FRAMES.iter().zip(&frames[..count]) {
            place.store(*frame, Ordering::Relaxed);
        }
        COUNT.store(count, Ordering::Release);
    }
}

/// The number of this thread in the kernel. Not through glibc, which has a function for it since 2.30 only.
fn this_thread() -> i32 {
    // SAFETY: plain system call without arguments.
    unsafe { libc::syscall(libc::SYS_gettid) as i32 }
}

/// The return addresses of one thread; `None` if it does not answer.
fn ask(thread: i32, signal: c_int) -> Option<Vec<usize>> {
    COUNT.store(PENDING, Ordering::Relaxed);
    ASKED.store(thread, Ordering::Release);
    // SAFETY: plain system call; a thread that has ended meanwhile gives an error.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal) } == 0;
    let deadline = Instant::now() + ANSWER_BOUND;
    let mut count = COUNT.load(Ordering::Acquire);
    while sent && count == PENDING && Instant::now() < deadline {
        std::thread::sleep(LOOK_INTERVAL);
        count = COUNT.load(Ordering::Acquire);
    }
    if ASKED
        .compare_exchange(thread, 0, Ordering::AcqRel, Ordering::Relaxed)
        .is_err()
    {
        // It answers this very moment, which takes it a few dozen stores.
        while count == PENDING {
            std::hint::spin_loop();
            count = COUNT.load(Ordering::Acquire);
        }
        ASKED.store(0, Ordering::Release);
    }
    (count != PENDING).then(|| {
        FRAMES[..count]
            .iter()
            .map(|ip| ip.load(Ordering::Relaxed))
            .collect()
    })
}

/// A line a function, without the frames of the handler itself and of the thread's beginning.
fn describe(frames: &[usize], text: &mut String) {
    let functions: Vec<(String, String)> = frames.iter().flat_map(|frame| functions_at(*frame)).collect();
    // What is nearer than the handler is its own doing.
    let first = functions
        .iter()
        .rposition(|(name, place)| is_handler(name, place))
        .map_or(0, |handler| handler + 1);
    for (name, place) in &functions[first..] {
        if !BEGINNINGS.iter().any(|begin| name.contains(begin)) {
            let _ = writeln!(text, "  {name}{place}");
        }
    }
}

/// Whether a frame is [`note`]'s. With line tables the name is short and the file is known; a program without them has
/// the whole path in its symbols.
fn is_handler(name: &str, place: &str) -> bool {
    name.ends_with("session::stacks::note") || name.ends_with("note") && place.contains("session/stacks.rs")
}

/// The function that an address is in, preceded by those that were inlined there; none without symbols. Each with
/// ` at file:line`, where that is known.
fn functions_at(address: usize) -> Vec<(String, String)> {
    let mut functions = Vec::new();
    backtrace::resolve(address as *mut _, |symbol| {
        let Some(name) = symbol.name() else {
            return;
        };
        let place = match (symbol.filename(), symbol.lineno()) {
            (Some(file), Some(line)) => format!(" at {}:{line}", file.display()),
            _ => String::new(),
        };
        functions.push((format!("{name:#}"), place));
    });
    functions
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn the_handler_is_known_with_and_without_line_tables() {
        assert!(is_handler("note", " at worker/src/session/stacks.rs:92"));
        assert!(is_handler("ddp_worker::session::stacks::note", ""));
        assert!(!is_handler("note", " at src/main.rs:1"));
        assert!(!is_handler("ddp_worker::session::stacks::note_place", ""));
    }

    #[inline(never)]
    fn wait_in_a_function_with_this_name(gate: &std::sync::mpsc::Receiver<()>) {
        // The test lets go.
        let _ = gate.recv();
        // Not a tail call, which would leave no frame of this function.
        std::hint::black_box(gate);
    }

    #[test]
    fn a_thread_that_waits_is_found_where_it_waits() {
        let (open, gate) = channel();
        let (begun, begins) = channel();
        let thread = std::thread::Builder::new().name("waits-for-test".into());
        let thread = thread
            .spawn(move || {
                begun.send(()).unwrap();
                wait_in_a_function_with_this_name(&gate);
            })
            .unwrap();
        begins.recv().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let text = loop {
            let text = capture();
            // It may have been caught on its way to the function.
            if text.contains("wait_in_a_function_with_this_name") || Instant::now() > deadline {
                break text;
            }
        };
        drop(open);
        thread.join().unwrap();
        assert!(text.contains("wait_in_a_function_with_this_name"), "{text}");
        assert!(text.contains("(waits-for-test)"), "{text}");
        assert!(!text.contains("trace_unsynchronized"), "{text}");
    }
}
