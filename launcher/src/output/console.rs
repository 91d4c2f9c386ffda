//! The console: standard output and error of the launcher, and the thread that writes to them.
//!
//! The reader of this output may stop reading. So only the thread `console` writes; other threads put chunks into a
//! bounded queue. [`Console::put`] holds the whole policy for slow readers: while the reader is merely slow, the thread
//! that reads the workers' pipes waits for room, as the workers themselves would; a reader that took nothing for
//! [`STALL`] costs lines, which are counted. The agent never waits for the console: its messages have room of their own.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ddp_proto::control::Progress;
use ddp_proto::printable;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::streams::{Chunk, OWN_PREFIX, Output, Source, Stream};

/// Bytes of workers that may wait to be written.
const QUEUE_BYTES: usize = 4 << 20;
/// Bytes that may wait when the launcher adds its own messages.
const QUEUE_BYTES_WITH_OWN: usize = QUEUE_BYTES + (2 << 20);
/// Bytes that each chunk counts beyond its text, so that the number of short ones is bounded too.
const CHUNK_COST: usize = 128;
/// A console that takes nothing for this long is blocked.
const STALL: Duration = Duration::from_millis(500);
/// Longest wait for a slow reader at the end.
const CLOSE_BOUND: Duration = Duration::from_secs(30);
/// Most bytes written in one go.
const WRITE_BYTES: usize = 64 << 10;
/// Most redraws of the progress bar in a second.
const REDRAW_HZ: u8 = 10;
/// The launcher itself, which only prints whole lines.
const OWN: Source = Source {
    stream: Stream::Stderr,
    id: u64::MAX,
};

/// Handle to the writer thread; cheap to clone.
#[derive(Clone)]
pub(crate) struct Console {
    shared: Arc<Shared>,
    is_file: [bool; 2],
}

struct Shared {
    state: Mutex<State>,
    /// The queue has something to write, or is closing.
    filled: Condvar,
    /// The writer took something.
    drained: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Chunk>,
    queued_bytes: usize,
    /// The newest numbers for the progress bar.
    progress: Option<(u64, Progress)>,
    dropped_lines: u64,
    /// Grows whenever the console took something.
    written: u64,
    /// The console took nothing for [`STALL`] while a thread waited for room.
    blocked: bool,
    closing: bool,
    closed: bool,
}

impl Console {
    /// Starts the writer thread.
    pub(crate) fn start(output: Output, progress_bar: bool) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            filled: Condvar::new(),
            drained: Condvar::new(),
        });
        let console = Self {
            shared: shared.clone(),
            is_file: output.is_file(),
        };
        let bar = progress_bar.then(new_bar);
        std::thread::Builder::new()
            .name("console".into())
            .stack_size(256 << 10)
            .spawn(move || Writer { output, bar }.run(&shared))?;
        Ok(console)
    }

    /// True if the stream leads to a regular file, so that prompts need not be shown early.
    pub(crate) fn is_file(&self, stream: Stream) -> bool {
        self.is_file[stream as usize]
    }

    /// Queues output of a worker. Waits for a slow console, but not for a blocked one.
    pub(crate) fn put(&self, chunk: Chunk) {
        let has_no_room = |state: &State| state.queued_bytes >= QUEUE_BYTES && !state.blocked;
        let mut state = self.wait_while(self.shared.lock(), STALL, None, has_no_room);
        let is_blocked = has_no_room(&state);
        state.blocked |= is_blocked;
        self.enqueue(state, chunk, QUEUE_BYTES);
    }

    /// Queues a message of the launcher itself, each of its lines prefixed. Control characters of peers' text are escaped.
    /// Never waits.
    pub(crate) fn say(&self, text: &str) {
        let text = printable::text(text);
        let lines: String = text.lines().flat_map(|line| [line, "\n"]).collect();
        self.enqueue(self.shared.lock(), own(lines), QUEUE_BYTES_WITH_OWN);
    }

    /// Shows the numbers of a step on the progress bar, if there is one. Never waits.
    pub(crate) fn progress(&self, step: u64, progress: Progress) {
        self.shared.lock().progress = Some((step, progress));
        self.shared.filled.notify_one();
    }

    /// Grows whenever the console took something: a console that writes nothing is blocked, or has nothing to do.
    pub(crate) fn written(&self) -> u64 {
        self.shared.lock().written
    }

    /// Ends the bar and the thread; returns when all is written, when the console has taken nothing for `patience`,
    /// or after [`CLOSE_BOUND`]. Lines put later are lost.
    pub(crate) fn close(&self, patience: Duration) {
        let mut state = self.shared.lock();
        state.closing = true;
        self.shared.filled.notify_one();
        let last = Instant::now() + CLOSE_BOUND;
        self.wait_while(state, patience, Some(last), |_| true).closed = true;
    }

    /// Waits while the condition holds, the console is not closed, it took something within `patience`, and `last` has
    /// not come.
    fn wait_while<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        patience: Duration,
        last: Option<Instant>,
        condition: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let bounded = |deadline: Instant| last.map_or(deadline, |last| last.min(deadline));
        let (mut deadline, mut seen) = (bounded(Instant::now() + patience), state.written);
        while condition(&state) && !state.closed {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.shared.drained.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.written != seen {
                seen = state.written;
                deadline = bounded(Instant::now() + patience);
            }
        }
        state
    }

    fn enqueue(&self, mut state: MutexGuard<'_, State>, chunk: Chunk, bound: usize) {
        if state.queued_bytes >= bound || state.closed {
            let lines = chunk.bytes.split_inclusive(|byte| *byte == b'\n');
            state.dropped_lines += lines.count() as u64;
            return;
        }
        state.queued_bytes += chunk.bytes.len() + CHUNK_COST;
        state.queue.push_back(chunk);
        drop(state);
        self.shared.filled.notify_one();
    }
}

impl Shared {
    /// The state is consistent at every point, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something to write.
    fn next_batch(&self) -> Batch {
        let is_idle =
            |state: &mut State| state.queue.is_empty() && state.progress.is_none() && !state.closing;
        let filled = self.filled.wait_while(self.lock(), is_idle);
        let mut state = filled.unwrap_or_else(PoisonError::into_inner);
        let mut batch = Batch {
            chunks: Vec::new(),
            progress: state.progress.take(),
            is_last: false,
        };
        let mut bytes = 0;
        while bytes < WRITE_BYTES
            && let Some(chunk) = state.queue.pop_front()
        {
            bytes += chunk.bytes.len();
            state.queued_bytes -= chunk.bytes.len() + CHUNK_COST;
            batch.chunks.push(chunk);
        }
        if state.queue.is_empty() {
            if state.dropped_lines > 0 {
                let dropped = std::mem::take(&mut state.dropped_lines);
                let notice = format!("{dropped} lines not shown: the console was blocked\n");
                batch.chunks.push(own(notice));
            }
            batch.is_last = state.closing;
        }
        batch
    }
}

/// Lines of the launcher itself.
fn own(lines: String) -> Chunk {
    Chunk {
        source: OWN,
        prefix: OWN_PREFIX.into(),
        bytes: lines.into_bytes(),
        continues: false,
    }
}

/// What the writer does next.
struct Batch {
    chunks: Vec<Chunk>,
    progress: Option<(u64, Progress)>,
    is_last: bool,
}

struct Writer {
    output: Output,
    /// One line at the bottom of the terminal, fed by the heartbeats of rank 0. It has a length once it has numbers.
    bar: Option<ProgressBar>,
}

impl Writer {
    fn run(mut self, shared: &Shared) {
        loop {
            let batch = shared.next_batch();
            if let (Some(bar), Some((step, progress))) = (&self.bar, &batch.progress) {
                bar.set_length(progress.steps);
                bar.set_message(progress.to_string());
                bar.set_position(*step);
            }
            if let Some(bar) = self.bar.take_if(|_| batch.is_last) {
                // The last numbers stay on the terminal.
                match bar.length() {
                    Some(_) => bar.abandon(),
                    None => bar.finish_and_clear(),
                }
            }
            if !batch.chunks.is_empty() {
                self.write(&batch.chunks);
            }
            if batch.is_last {
                self.output.end_lines();
            }
            let mut state = shared.lock();
            state.written += 1;
            state.blocked = false;
            state.closed |= batch.is_last;
            shared.drained.notify_all();
            if batch.is_last {
                return;
            }
        }
    }

    fn write(&mut self, chunks: &[Chunk]) {
        let Some(bar) = &self.bar else {
            return self.output.write(chunks);
        };
        let output = &mut self.output;
        let mut write_lines = || {
            output.write(chunks);
            // The bar is drawn below whole lines.
            output.end_lines();
        };
        match bar.length() {
            Some(_) => bar.suspend(write_lines),
            None => write_lines(),
        }
    }
}

fn new_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(REDRAW_HZ));
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
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

    /// A console whose standard output takes nothing without a ticket.
    fn gated() -> (Console, mpsc::Sender<()>, mpsc::Receiver<Vec<u8>>) {
        gated_at(Stream::Stdout)
    }

    fn gated_at(stream: Stream) -> (Console, mpsc::Sender<()>, mpsc::Receiver<Vec<u8>>) {
        let (written, output) = mpsc::channel();
        let (ticket, tickets) = mpsc::channel();
        let mut writers: [Box<dyn Write + Send>; 2] = [Box::new(io::sink()), Box::new(io::sink())];
        writers[stream as usize] = Box::new(Gate { written, tickets });
        let streams = Output::new(writers, [false; 2], false);
        (Console::start(streams, false).unwrap(), ticket, output)
    }

    fn lines(stream: Stream, bytes: Vec<u8>) -> Chunk {
        Chunk {
            source: Source { stream, id: 0 },
            prefix: "".into(),
            bytes,
            continues: false,
        }
    }

    #[test]
    fn lines_arrive_in_order_and_whole() {
        let (console, tickets, output) = gated();
        (0..1000).for_each(|_| tickets.send(()).unwrap());
        for line in 0..1000 {
            console.put(lines(Stream::Stdout, format!("line {line}\n").into_bytes()));
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
        let mut line = vec![b'x'; 1 << 20];
        line.extend_from_slice(b"\n\n");
        for _ in 0..10 {
            console.put(lines(Stream::Stdout, line.clone()));
        }
        // Some are in the writer's hands, some in the queue; the rest is lost, and nothing waits again.
        let dropped = console.shared.lock().dropped_lines;
        assert!((8..=12).contains(&dropped), "{dropped} dropped");
        console.close(Duration::ZERO);
        drop(tickets);
        assert_eq!(output.try_iter().count(), 0);
    }

    #[test]
    fn the_launchers_own_words_are_kept_when_the_queue_is_full() {
        let (console, tickets, output) = gated_at(Stream::Stderr);
        let mut line = vec![b'x'; 1 << 20];
        line.push(b'\n');
        for _ in 0..10 {
            console.put(lines(Stream::Stderr, line.clone()));
        }
        console.say("rank 1 failed");
        // They have a bound too.
        let long = "y".repeat(1 << 20);
        for _ in 0..3 {
            console.say(&long);
        }
        (0..1000).for_each(|_| tickets.send(()).unwrap());
        console.close(Duration::from_secs(20));
        let text = String::from_utf8(output.try_iter().flatten().collect()).unwrap();
        assert!(text.contains("[ddp-run] rank 1 failed\n"));
        assert!(text.matches(&long).count() < 3);
        assert!(text.contains("lines not shown"));
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
        let mut line = vec![b'x'; (1 << 20) - 1];
        line.push(b'\n');
        for _ in 0..20 {
            console.put(lines(Stream::Stdout, line.clone()));
        }
        assert_eq!(reader.join().unwrap(), 20 << 20);
        assert_eq!(console.shared.lock().dropped_lines, 0);
        console.close(Duration::from_secs(20));
    }
}
