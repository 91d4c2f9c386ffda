//! The launcher's standard output and error, written by a thread of their own.
//!
//! Whoever reads our output may stop reading. So nobody but the writer thread ever writes: the others put lines
//! into a bounded queue. While the reader is merely slow, the threads that read the workers' pipes wait for
//! room, as the workers themselves would; once it has not read for [`STALL`], lines are dropped and counted until
//! it reads again. The agent never waits for the console.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ddp_proto::control::Progress;

use crate::progress::Bar;

/// Bytes that may wait to be written.
const QUEUE_BYTES: usize = 4 << 20;
/// What one line costs beyond its bytes, so that empty lines are bounded too.
const LINE_COST: usize = 64;
/// A console that takes nothing for this long is blocked.
const STALL: Duration = Duration::from_millis(500);
/// How long even a slow reader is waited for at the end.
const CLOSE_BOUND: Duration = Duration::from_secs(30);
/// Most bytes written in one go.
const WRITE_BYTES: usize = 64 << 10;
/// Prefix of the launcher's own messages.
const OWN_PREFIX: &str = "[ddp-run] ";

/// One of the two standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Descriptor 1.
    Stdout,
    /// Descriptor 2.
    Stderr,
}

/// Where the console writes to; the tests give their own.
pub(crate) struct Sinks {
    pub(crate) stdout: Box<dyn Write + Send>,
    pub(crate) stderr: Box<dyn Write + Send>,
}

impl Sinks {
    /// The process's own streams.
    pub(crate) fn standard() -> Self {
        Self {
            stdout: Box::new(Unbuffered(Stream::Stdout)),
            stderr: Box::new(Unbuffered(Stream::Stderr)),
        }
    }
}

/// Handle to the writer thread; cheap to clone.
#[derive(Clone)]
pub(crate) struct Console {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Something to write, or the end.
    filled: Condvar,
    /// Room in the queue, or all is written.
    drained: Condvar,
}

#[derive(Default)]
struct State {
    lines: VecDeque<(Stream, Vec<u8>)>,
    queued_bytes: usize,
    /// The newest numbers for the bar; older ones are of no interest.
    progress: Option<(u64, Progress)>,
    dropped_lines: u64,
    /// Grows whenever the console took something.
    written: u64,
    /// Nothing was taken for [`STALL`] while somebody waited for room.
    blocked: bool,
    closing: bool,
    closed: bool,
}

impl Console {
    /// Starts the writer thread.
    pub(crate) fn start(sinks: Sinks, progress_bar: bool) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            filled: Condvar::new(),
            drained: Condvar::new(),
        });
        let console = Self {
            shared: shared.clone(),
        };
        std::thread::Builder::new()
            .name("console".into())
            .stack_size(256 << 10)
            .spawn(move || Writer::new(sinks, progress_bar).run(&shared))?;
        Ok(console)
    }

    /// Writes one line of a worker, its terminator included. Waits for room, but not for a blocked console.
    pub(crate) fn put(&self, stream: Stream, line: Vec<u8>) {
        let mut state = self.lock();
        let (mut deadline, mut seen) = (Instant::now() + STALL, state.written);
        while state.queued_bytes >= QUEUE_BYTES && !state.blocked && !state.closed {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.blocked = true;
                break;
            }
            state = self.wait(state, left);
            if state.written != seen {
                seen = state.written;
                deadline = Instant::now() + STALL;
            }
        }
        self.enqueue(state, stream, line);
    }

    /// Writes a message of the launcher itself, each of its lines prefixed. Never waits.
    pub(crate) fn say(&self, text: &str) {
        let mut lines = Vec::with_capacity(text.len() + 2 * OWN_PREFIX.len());
        for line in text.lines() {
            lines.extend_from_slice(OWN_PREFIX.as_bytes());
            lines.extend_from_slice(line.as_bytes());
            lines.push(b'\n');
        }
        self.enqueue(self.lock(), Stream::Stderr, lines);
    }

    /// Shows the numbers of a step on the bar, if one is drawn. Never waits.
    pub(crate) fn progress(&self, step: u64, progress: Progress) {
        self.lock().progress = Some((step, progress));
        self.shared.filled.notify_one();
    }

    /// Grows whenever the console took something: a console that stands still is blocked, or has nothing to do.
    pub(crate) fn written(&self) -> u64 {
        self.lock().written
    }

    /// Ends the bar and the thread; returns when all is written, when the console has taken nothing for `patience`,
    /// or after [`CLOSE_BOUND`]. Lines put later are lost.
    pub(crate) fn close(&self, patience: Duration) {
        let mut state = self.lock();
        state.closing = true;
        self.shared.filled.notify_one();
        let last = Instant::now() + CLOSE_BOUND;
        let (mut deadline, mut seen) = (Instant::now() + patience, state.written);
        while !state.closed {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.closed = true;
                return;
            }
            state = self.wait(state, left);
            if state.written != seen {
                seen = state.written;
                deadline = last.min(Instant::now() + patience);
            }
        }
    }

    fn enqueue(&self, mut state: MutexGuard<'_, State>, stream: Stream, line: Vec<u8>) {
        if state.queued_bytes >= QUEUE_BYTES || state.closed {
            state.dropped_lines += 1;
            return;
        }
        state.queued_bytes += line.len() + LINE_COST;
        state.lines.push_back((stream, line));
        drop(state);
        self.shared.filled.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, bound: Duration) -> MutexGuard<'a, State> {
        let waited = self.shared.drained.wait_timeout(state, bound);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Shared {
    /// The state is consistent at every point, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the writer does next.
struct Work {
    lines: Vec<(Stream, Vec<u8>)>,
    progress: Option<(u64, Progress)>,
    last: bool,
}

struct Writer {
    sinks: Sinks,
    bar: Option<Bar>,
}

impl Writer {
    fn new(sinks: Sinks, progress_bar: bool) -> Self {
        Self {
            sinks,
            bar: progress_bar.then(Bar::new),
        }
    }

    fn run(mut self, shared: &Shared) {
        loop {
            let work = next_work(shared);
            if let (Some(bar), Some((step, progress))) = (&mut self.bar, &work.progress) {
                bar.show(*step, progress);
            }
            if work.last
                && let Some(bar) = self.bar.take()
            {
                bar.finish();
            }
            if !work.lines.is_empty() {
                self.write(&work.lines);
            }
            let mut state = shared.lock();
            state.written += 1;
            state.blocked = false;
            state.closed |= work.last;
            shared.drained.notify_all();
            if work.last {
                return;
            }
        }
    }

    /// Neighbouring lines of one stream go out in one piece.
    fn write(&mut self, lines: &[(Stream, Vec<u8>)]) {
        let sinks = &mut self.sinks;
        let mut write = || {
            for run in lines.chunk_by(|a, b| a.0 == b.0) {
                let bytes: Vec<u8> = run.iter().flat_map(|(_, line)| line).copied().collect();
                let sink = match run[0].0 {
                    Stream::Stdout => &mut sinks.stdout,
                    Stream::Stderr => &mut sinks.stderr,
                };
                // Nobody reads any more: training goes on, and there is no place left to complain.
                let _ = sink.write_all(&bytes);
            }
        };
        match &self.bar {
            Some(bar) => bar.above(write),
            None => write(),
        }
    }
}

fn next_work(shared: &Shared) -> Work {
    let mut state = shared.lock();
    while state.lines.is_empty() && state.progress.is_none() && !state.closing {
        state = shared.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    let mut work = Work {
        lines: Vec::new(),
        progress: state.progress.take(),
        last: false,
    };
    let mut bytes = 0;
    while bytes < WRITE_BYTES
        && let Some((stream, line)) = state.lines.pop_front()
    {
        bytes += line.len();
        state.queued_bytes -= line.len() + LINE_COST;
        work.lines.push((stream, line));
    }
    if state.lines.is_empty() {
        if state.dropped_lines > 0 {
            let dropped = std::mem::take(&mut state.dropped_lines);
            let notice = format!("{OWN_PREFIX}{dropped} lines are not shown: the console was blocked\n");
            work.lines.push((Stream::Stderr, notice.into_bytes()));
        }
        work.last = state.closing;
    }
    work
}

/// Writes straight to the descriptor, waiting where it is non-blocking: std's own streams would be locked by a
/// writer that is blocked, and then block the exit of the process.
struct Unbuffered(Stream);

impl Write for Unbuffered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        use std::os::fd::AsFd;
        let (stdout, stderr) = (io::stdout(), io::stderr());
        let fd = match self.0 {
            Stream::Stdout => stdout.as_fd(),
            Stream::Stderr => stderr.as_fd(),
        };
        loop {
            match nix::unistd::write(fd, bytes) {
                Err(nix::errno::Errno::EAGAIN) => {
                    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
                    // Only this thread waits here, and it may do so for as long as the reader likes.
                    poll(&mut [PollFd::new(fd, PollFlags::POLLOUT)], PollTimeout::NONE)?;
                }
                Err(nix::errno::Errno::EINTR) => {}
                written => return Ok(written?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Passes each write on, and takes the next one only when told to.
    struct Gate {
        written: mpsc::Sender<Vec<u8>>,
        tickets: mpsc::Receiver<()>,
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.tickets.recv().map_err(|_| io::ErrorKind::BrokenPipe)?;
            self.written
                .send(bytes.to_vec())
                .map_err(|_| io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn gated() -> (Console, mpsc::Sender<()>, mpsc::Receiver<Vec<u8>>) {
        let (written, output) = mpsc::channel();
        let (ticket, tickets) = mpsc::channel();
        let sinks = Sinks {
            stdout: Box::new(Gate { written, tickets }),
            stderr: Box::new(io::sink()),
        };
        (Console::start(sinks, false).unwrap(), ticket, output)
    }

    #[test]
    fn lines_arrive_in_order_and_whole() {
        let (console, tickets, output) = gated();
        (0..1000).for_each(|_| tickets.send(()).unwrap());
        for line in 0..1000 {
            console.put(Stream::Stdout, format!("line {line}\n").into_bytes());
        }
        console.close(Duration::from_secs(20));
        let text: Vec<u8> = output.try_iter().flatten().collect();
        let expected: Vec<u8> = (0..1000)
            .flat_map(|line| format!("line {line}\n").into_bytes())
            .collect();
        assert_eq!(text, expected);
    }

    #[test]
    fn a_blocked_console_drops_lines_and_counts_them() {
        let (console, tickets, output) = gated();
        let line = vec![b'x'; 1 << 20];
        for _ in 0..10 {
            console.put(Stream::Stdout, line.clone());
        }
        // Some are in the writer's hands, some in the queue; the rest is lost, and nothing waits again.
        let dropped = console.lock().dropped_lines;
        assert!((4..=6).contains(&dropped), "{dropped} dropped");
        console.close(Duration::ZERO);
        drop(tickets);
        assert_eq!(output.try_iter().count(), 0);
    }

    #[test]
    fn a_slow_console_loses_nothing() {
        let (console, tickets, output) = gated();
        let reader = std::thread::spawn(move || {
            let mut bytes = 0;
            while bytes < 20 << 20 {
                tickets.send(()).unwrap();
                bytes += output.recv_timeout(Duration::from_secs(20)).unwrap().len();
            }
            let _ = tickets.send(());
            bytes
        });
        for _ in 0..20 {
            console.put(Stream::Stdout, vec![b'x'; 1 << 20]);
        }
        assert_eq!(reader.join().unwrap(), 20 << 20);
        assert_eq!(console.lock().dropped_lines, 0);
        console.close(Duration::from_secs(20));
    }
}
