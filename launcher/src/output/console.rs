//! The launcher's standard output and error, written by a thread of their own.
//!
//! The reader of our output may stop reading. So only the writer thread ever writes: the others put lines
//! into a bounded queue. While the reader is merely slow, the threads that read the workers' pipes wait for
//! room, as the workers themselves would; once it has not read for [`STALL`], lines are dropped and counted until
//! it reads again. The agent never waits for the console; what it says has room of its own, for the report of a failure
//! comes when the workers' last words have just filled the queue.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ddp_proto::control::Progress;
use ddp_proto::printable;

use crate::output::progress::Bar;
use crate::output::sinks::{SinkKind, Sinks};

/// Bytes of workers that may wait to be written.
const QUEUE_BYTES: usize = 4 << 20;
/// Bytes of the launcher's own that may wait besides.
const OWN_BYTES: usize = 1 << 20;
/// What one piece costs beyond its bytes, so that short ones are bounded too.
const PIECE_COST: usize = 128;
/// A console that takes nothing for this long is blocked.
const STALL: Duration = Duration::from_millis(500);
/// How long even a slow reader is waited for at the end.
const CLOSE_BOUND: Duration = Duration::from_secs(30);
/// Most bytes written in one go.
const WRITE_BYTES: usize = 64 << 10;
/// Prefix of the launcher's own messages.
pub(crate) const OWN_PREFIX: &str = "[ddp-run] ";
/// The launcher itself, whose lines always have their ends.
const OWN: Source = Source {
    stream: Stream::Stderr,
    id: u64::MAX,
};

/// One of the two standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Descriptor 1.
    Stdout,
    /// Descriptor 2.
    Stderr,
}

/// A stream of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// Where it is shown.
    pub(crate) stream: Stream,
    /// The rank, for one.
    pub(crate) id: u64,
}

/// What one source has written: any number of whole lines, then perhaps a line without its end. In front of an update
/// of a line there is `\r`.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) source: Source,
    /// Precedes its lines and updates.
    pub(crate) prefix: Arc<str>,
    pub(crate) bytes: Vec<u8>,
    /// It goes on with a line that the console has the beginning of.
    pub(crate) continues: bool,
}

/// Handle to the writer thread; cheap to clone.
#[derive(Clone)]
pub(crate) struct Console {
    shared: Arc<Shared>,
    kinds: [SinkKind; 2],
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
    pieces: VecDeque<Piece>,
    /// Of workers.
    queued_bytes: usize,
    /// Of the launcher itself.
    own_bytes: usize,
    /// The newest numbers for the bar; older ones are of no interest.
    progress: Option<(u64, Progress)>,
    dropped_lines: u64,
    /// Grows whenever the console took something.
    written: u64,
    /// Whose line on standard output and standard error has no end yet.
    open: [Option<Source>; 2],
    /// Nothing was taken for [`STALL`] while a thread waited for room.
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
            kinds: sinks.kinds(),
        };
        std::thread::Builder::new()
            .name("console".into())
            .stack_size(256 << 10)
            .spawn(move || Writer::new(sinks, progress_bar).run(&shared))?;
        Ok(console)
    }

    /// What a stream leads to.
    pub(crate) fn kind(&self, stream: Stream) -> SinkKind {
        self.kinds[stream as usize]
    }

    /// True if the last line is this one's, and can go on.
    pub(crate) fn is_open(&self, source: Source) -> bool {
        self.lock().open[source.stream as usize] == Some(source)
    }

    /// Writes lines of a worker. Waits for room, but not for a blocked console.
    pub(crate) fn put(&self, piece: Piece) {
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
        self.enqueue(state, piece);
    }

    /// Writes a message of the launcher itself, each of its lines prefixed. Peers' text in it controls no terminal. Never
    /// waits.
    pub(crate) fn say(&self, text: &str) {
        let text = printable::text(text);
        let lines: String = text.lines().flat_map(|line| [line, "\n"]).collect();
        self.enqueue(self.lock(), own(lines));
    }

    /// Shows the numbers of a step on the bar, if one is drawn. Never waits.
    pub(crate) fn progress(&self, step: u64, progress: Progress) {
        self.lock().progress = Some((step, progress));
        self.shared.filled.notify_one();
    }

    /// Grows whenever the console took something: a console that writes nothing is blocked, or has nothing to do.
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

    fn enqueue(&self, mut state: MutexGuard<'_, State>, piece: Piece) {
        let (waiting, bound) = state.waiting_beside(&piece);
        let is_full = *waiting >= bound;
        if is_full || state.closed {
            let lines = piece.bytes.split_inclusive(|byte| *byte == b'\n');
            state.dropped_lines += lines.count() as u64;
            return;
        }
        *state.waiting_beside(&piece).0 += piece.bytes.len() + PIECE_COST;
        state.pieces.push_back(piece);
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

impl State {
    /// What waits of the piece's kind, in bytes, and how much of it may.
    fn waiting_beside(&mut self, piece: &Piece) -> (&mut usize, usize) {
        if piece.source == OWN {
            (&mut self.own_bytes, OWN_BYTES)
        } else {
            (&mut self.queued_bytes, QUEUE_BYTES)
        }
    }
}

impl Shared {
    /// The state is consistent at every point, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lines of the launcher itself.
fn own(lines: String) -> Piece {
    Piece {
        source: OWN,
        prefix: OWN_PREFIX.into(),
        bytes: lines.into_bytes(),
        continues: false,
    }
}

/// What the writer does next.
struct Work {
    pieces: Vec<Piece>,
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
            if !work.pieces.is_empty() {
                self.write(&work.pieces);
            }
            if work.last {
                self.sinks.end_lines();
            }
            let mut state = shared.lock();
            state.open = self.sinks.open();
            state.written += 1;
            state.blocked = false;
            state.closed |= work.last;
            shared.drained.notify_all();
            if work.last {
                return;
            }
        }
    }

    fn write(&mut self, pieces: &[Piece]) {
        let sinks = &mut self.sinks;
        match &self.bar {
            // It is drawn below whole lines.
            Some(bar) => bar.above(|| {
                sinks.write(pieces);
                sinks.end_lines();
            }),
            None => sinks.write(pieces),
        }
    }
}

fn next_work(shared: &Shared) -> Work {
    let mut state = shared.lock();
    while state.pieces.is_empty() && state.progress.is_none() && !state.closing {
        state = shared.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    let mut work = Work {
        pieces: Vec::new(),
        progress: state.progress.take(),
        last: false,
    };
    let mut bytes = 0;
    while bytes < WRITE_BYTES
        && let Some(piece) = state.pieces.pop_front()
    {
        bytes += piece.bytes.len();
        *state.waiting_beside(&piece).0 -= piece.bytes.len() + PIECE_COST;
        work.pieces.push(piece);
    }
    if state.pieces.is_empty() {
        if state.dropped_lines > 0 {
            let dropped = std::mem::take(&mut state.dropped_lines);
            let notice = format!("{dropped} lines not shown: the console was blocked\n");
            work.pieces.push(own(notice));
        }
        work.last = state.closing;
    }
    work
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
        let sinks = Sinks::new(writers, [SinkKind::Pipe; 2], false);
        (Console::start(sinks, false).unwrap(), ticket, output)
    }

    fn lines(stream: Stream, bytes: Vec<u8>) -> Piece {
        Piece {
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
        let dropped = console.lock().dropped_lines;
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
        assert_eq!(console.lock().dropped_lines, 0);
        console.close(Duration::from_secs(20));
    }
}
