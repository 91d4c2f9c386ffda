//! The console: standard output and error of the launcher, and the threads that write to them.
//!
//! The reader of this output may be slow, or stop. So only the threads `console` write, one for each place that the two
//! streams lead to. Output of workers waits for room in the queue of its place ([`Console::put`]), and the worker waits
//! then too, as without a launcher. The launcher itself never waits: its messages have room of their own. At the end it
//! waits for the reader, and says how many lines were not delivered.

use std::future::ready;
use std::io::{self, ErrorKind, Write};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use ddp_proto::control::Progress;
use ddp_proto::printable::{self, Look};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::timeout;

use crate::output::streams::{Chunk, Cursor, OWN_PREFIX, Output, Source, Stream};

/// Bytes of workers that may wait to be written to one place.
const WORKER_BYTES: usize = 4 << 20;
/// Bytes of the launcher's own messages that may wait.
const OWN_BYTES: usize = 2 << 20;
/// Bytes that each chunk counts beyond its text, so that the number of short ones is bounded too.
const CHUNK_COST: u32 = 128;
/// Most bytes in one write. A slow reader that takes these within the patience of [`Console::drained`] prolongs the wait.
const WRITE_BYTES: usize = 4 << 10;
/// Longest wait for pipes that a process holds open, while everything that came from them is written.
const PIPE_BOUND: Duration = Duration::from_secs(1);
/// Longest wait for the last messages when the reader is not waited for any more.
const CLOSE_BOUND: Duration = Duration::from_secs(1);
/// Most redraws of the progress bar in a second.
const REDRAW_HZ: u8 = 10;
/// The launcher itself, which only prints whole lines.
const OWN: Source = Source {
    stream: Stream::Stderr,
    id: u64::MAX,
};

/// Handle to the writer threads; cheap to clone.
#[derive(Clone)]
pub(crate) struct Console {
    /// By stream; twice the same if both streams lead to one place.
    places: [Arc<Place>; 2],
    /// How our own text looks there.
    pub(crate) looks: [Look; 2],
    /// Changes whenever a place took something; closed when all threads have ended.
    taken: watch::Receiver<()>,
}

/// A file, pipe or terminal.
struct Place {
    queue: mpsc::Sender<Queued>,
    /// For output of workers.
    room: Arc<Semaphore>,
    /// For the launcher's messages.
    own_room: Arc<Semaphore>,
    /// Lines that are not written, and will not be if the place takes nothing more.
    undelivered: AtomicUsize,
    is_file: bool,
}

/// An item, and the room that it takes until it is written.
type Queued = (Item, OwnedSemaphorePermit);

/// What a writer thread does next.
enum Item {
    Write(Chunk),
    /// Shows the numbers of a step on the progress bar.
    Progress(u64, Progress),
    End,
}

impl Console {
    /// Starts the writer threads.
    pub(crate) fn start(output: Output, has_bar: bool) -> io::Result<Self> {
        let (sender, taken) = watch::channel(());
        let queues = output.is_file.map(Place::new);
        let mut places = queues.each_ref().map(|(place, _)| place.clone());
        if output.is_one_place {
            places[0] = places[1].clone();
        }
        let parts = Stream::BOTH.into_iter().zip(output.writers).zip(queues);
        for ((stream, target), (place, queue)) in parts.skip(usize::from(output.is_one_place)) {
            let writer = Writer {
                stream,
                target,
                place,
                beside: places[stream.other() as usize].clone(),
                queue,
                cursor: Cursor::default(),
                bar: (has_bar && stream == Stream::Stderr)
                    .then(|| progress_bar("{wide_bar} {pos}/{len} {msg}")),
                taken: sender.clone(),
                was_refused: false,
            };
            std::thread::Builder::new()
                .name("console".into())
                .stack_size(256 << 10)
                .spawn(|| writer.run())?;
        }
        Ok(Self {
            places,
            looks: output.looks,
            taken,
        })
    }

    /// True if the stream leads to a regular file, so that prompts need not be shown early.
    pub(crate) fn is_file(&self, stream: Stream) -> bool {
        self.places[stream as usize].is_file
    }

    /// Both streams lead to one place.
    pub(crate) fn is_one_place(&self) -> bool {
        Arc::ptr_eq(&self.places[0], &self.places[1])
    }

    /// Queues output of a worker, once there is room.
    pub(crate) async fn put(&self, chunk: Chunk) {
        let place = &self.places[chunk.source.stream as usize];
        place.undelivered.fetch_add(lines(&chunk.bytes), Relaxed);
        // Nothing closes it.
        let room = place.room.clone().acquire_many_owned(cost(&chunk)).await;
        place.push(Item::Write(chunk), room);
    }

    /// Queues a message of the launcher itself, each of its lines prefixed. Control characters of peers' text are escaped.
    /// Never waits.
    pub(crate) fn say(&self, text: &str) {
        let ([_, look], [_, place]) = (self.looks, &self.places);
        let text = look.apply(&printable::text(text), OWN_PREFIX.len());
        place.say(&look.prefix(OWN_PREFIX, None), &text);
    }

    /// Queues a line for programs on standard error. Never waits.
    pub(crate) fn put_event(&self, line: &str) {
        self.places[Stream::Stderr as usize].say("", line);
    }

    /// Shows the numbers of a step on the progress bar, if there is one. Never waits.
    pub(crate) fn progress(&self, step: u64, progress: Progress) {
        let place = &self.places[Stream::Stderr as usize];
        // Without room, newer ones follow.
        let room = place.room.clone().try_acquire_many_owned(CHUNK_COST);
        place.push(Item::Progress(step, progress), room);
    }

    /// Waits until `readers` have put all output of workers, and all is written; false if no place has taken a byte for
    /// `patience` before.
    pub(crate) async fn drained(&self, readers: impl Future<Output = ()>, patience: Duration) -> bool {
        let (mut taken, mut readers, mut has_ended) = (self.taken.clone(), pin!(readers), false);
        let is_all_written = || self.places.iter().all(|place| place.is_written());
        loop {
            let is_written = is_all_written();
            if is_written && has_ended {
                return true;
            }
            let patience = if is_written { PIPE_BOUND } else { patience };
            // Cancel safe: a change that was not seen is kept.
            tokio::select! {
                () = &mut readers, if !has_ended => has_ended = true,
                changed = timeout(patience, taken.changed()) => {
                    if !matches!(changed, Ok(Ok(()))) && is_all_written() == is_written {
                        return is_written;
                    }
                }
            }
        }
    }

    /// Says how many lines were not delivered, and ends the bar and the threads. Lines put later are lost.
    pub(crate) async fn close(&self) {
        // What is about to be written is not lost.
        let _ = timeout(CLOSE_BOUND, self.drained(ready(()), CLOSE_BOUND)).await;
        let lost = self
            .places
            .each_ref()
            .map(|place| place.undelivered.load(Relaxed));
        for stream in Stream::BOTH.into_iter().skip(usize::from(self.is_one_place())) {
            let lost = lost[stream as usize];
            if lost > 0 {
                let text = format!("lines lost because {stream} did not take them: at least {lost}");
                self.places[stream.other() as usize].say(OWN_PREFIX, &text);
            }
        }
        for place in &self.places {
            place.push(Item::End, place.own_room.clone().try_acquire_many_owned(0));
        }
        let mut taken = self.taken.clone();
        let ended = async { while taken.changed().await.is_ok() {} };
        let _ = timeout(CLOSE_BOUND, ended).await;
    }
}

impl Place {
    fn new(is_file: bool) -> (Arc<Self>, mpsc::Receiver<Queued>) {
        // As many items as have room, and what ends the thread.
        let (queue, receiver) = mpsc::channel((WORKER_BYTES + OWN_BYTES) / CHUNK_COST as usize + 2);
        let place = Arc::new(Self {
            queue,
            room: Arc::new(Semaphore::new(WORKER_BYTES)),
            own_room: Arc::new(Semaphore::new(OWN_BYTES)),
            undelivered: AtomicUsize::new(0),
            is_file,
        });
        (place, receiver)
    }

    fn is_written(&self) -> bool {
        self.room.available_permits() == WORKER_BYTES && self.own_room.available_permits() == OWN_BYTES
    }

    /// Queues lines of the launcher itself, if there is room.
    fn say(&self, prefix: &str, text: &str) {
        let chunk = Chunk {
            source: OWN,
            prefix: prefix.into(),
            bytes: format!("{}\n", text.trim_end()).into_bytes(),
            continues: false,
        };
        self.undelivered.fetch_add(lines(&chunk.bytes), Relaxed);
        let room = self.own_room.clone().try_acquire_many_owned(cost(&chunk));
        self.push(Item::Write(chunk), room);
    }

    /// Queues an item if it has room.
    fn push<E>(&self, item: Item, room: Result<OwnedSemaphorePermit, E>) {
        if let Ok(room) = room {
            // It is closed when the thread has ended, and never full.
            let _ = self.queue.try_send((item, room));
        }
    }
}

/// What a chunk takes of the room. A chunk that is longer than all room takes it all.
fn cost(chunk: &Chunk) -> u32 {
    chunk.bytes.len().min(OWN_BYTES - CHUNK_COST as usize) as u32 + CHUNK_COST
}

fn lines(bytes: &[u8]) -> usize {
    bytes.split(|byte| *byte == b'\n').count() - 1
}

/// Writes to one place.
struct Writer {
    stream: Stream,
    target: Box<dyn Write + Send>,
    place: Arc<Place>,
    /// Where the other stream leads.
    beside: Arc<Place>,
    queue: mpsc::Receiver<Queued>,
    cursor: Cursor,
    /// One line at the bottom of the terminal, fed by the heartbeats of rank 0. It has a length once it has numbers.
    bar: Option<ProgressBar>,
    taken: watch::Sender<()>,
    was_refused: bool,
}

impl Writer {
    fn run(mut self) {
        while let Some((item, room)) = self.queue.blocking_recv() {
            match (item, self.bar.clone()) {
                (Item::Write(chunk), Some(bar)) if bar.length().is_some() => {
                    bar.suspend(|| self.write(&chunk));
                }
                (Item::Write(chunk), _) => self.write(&chunk),
                (Item::Progress(step, progress), Some(bar)) => {
                    bar.set_length(progress.steps);
                    bar.set_message(progress.to_string());
                    bar.set_position(step);
                }
                (Item::Progress(..), None) => {}
                (Item::End, _) => break,
            }
            drop(room);
            self.taken.send_replace(());
        }
        if let Some(bar) = self.bar.take() {
            // The last numbers stay on the terminal.
            bar.length()
                .map_or_else(|| bar.finish_and_clear(), |_| bar.abandon());
        }
        let mut end = Vec::new();
        self.cursor.end_line(&mut end);
        self.put(&end, 0);
    }

    fn write(&mut self, chunk: &Chunk) {
        let mut bytes = Vec::new();
        self.cursor.write(chunk, &mut bytes);
        if self.bar.is_some() {
            // The bar is drawn below whole lines.
            self.cursor.end_line(&mut bytes);
        }
        self.put(&bytes, lines(&chunk.bytes));
    }

    /// Writes bytes of which so many lines are counted already. What the place refuses is lost.
    fn put(&mut self, mut bytes: &[u8], counted: usize) {
        let undelivered = &self.place.undelivered;
        // It wraps around where there are fewer.
        undelivered.fetch_add(lines(bytes).wrapping_sub(counted), Relaxed);
        while !bytes.is_empty() {
            // Whole lines, if they are short: another launcher may write to the same place.
            let piece = &bytes[..bytes.len().min(WRITE_BYTES)];
            let line_end = piece.iter().rposition(|byte| *byte == b'\n');
            let whole = line_end.map_or(piece.len(), |end| end + 1);
            let taken = match self.target.write(&piece[..whole]) {
                Ok(taken @ 1..) => taken,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // The reader closed it on purpose: the job goes on.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => bytes.len(),
                refused => {
                    let error = refused.err().unwrap_or_else(|| ErrorKind::WriteZero.into());
                    if !std::mem::replace(&mut self.was_refused, true) {
                        let text = format!(
                            "cannot write to {}: {error}; its output is lost, and the job continues\n  \
                             hint: `--log-dir` also writes all output to files",
                            self.stream
                        );
                        self.beside.say(OWN_PREFIX, &text);
                    }
                    return;
                }
            };
            undelivered.fetch_sub(lines(&bytes[..taken]), Relaxed);
            bytes = &bytes[taken..];
            self.taken.send_replace(());
        }
    }
}

/// How far a command is: one line at the bottom of a terminal, of a template of indicatif, and nothing elsewhere. Clear it
/// before anything else is printed.
pub fn progress_bar(template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(REDRAW_HZ));
    bar.with_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()))
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);
    /// For what must not happen.
    const MOMENT: Duration = Duration::from_millis(50);

    /// Passes each write on, and takes the next one only when told to.
    struct Gate {
        written: Sender<Vec<u8>>,
        tickets: Receiver<()>,
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.tickets.recv().map_err(|_| ErrorKind::BrokenPipe)?;
            self.written
                .send(bytes.to_vec())
                .map_err(|_| ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Refuses everything with this error.
    struct Refusing(i32);

    impl Write for Refusing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::Error::from_raw_os_error(self.0))
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn gate() -> (Box<Gate>, Sender<()>, Receiver<Vec<u8>>) {
        let ((written, output), (ticket, tickets)) = (channel(), channel());
        (Box::new(Gate { written, tickets }), ticket, output)
    }

    fn open(tickets: &Sender<()>) {
        (0..10_000).for_each(|_| tickets.send(()).unwrap());
    }

    fn open_gate() -> (Box<Gate>, Receiver<Vec<u8>>) {
        let (gate, tickets, output) = gate();
        open(&tickets);
        (gate, output)
    }

    fn console(writers: [Box<dyn Write + Send>; 2]) -> Console {
        let output = Output {
            writers,
            is_file: [false; 2],
            is_one_place: false,
            looks: [Look::default(); 2],
        };
        Console::start(output, false).unwrap()
    }

    async fn put(console: &Console, stream: Stream, text: &str) {
        let chunk = Chunk {
            source: Source { stream, id: 0 },
            prefix: "".into(),
            bytes: text.into(),
            continues: false,
        };
        console.put(chunk).await;
    }

    /// With what it costs.
    fn mebibyte() -> String {
        "x".repeat((1 << 20) - CHUNK_COST as usize - 1) + "\n"
    }

    fn text(output: &Receiver<Vec<u8>>) -> String {
        String::from_utf8(output.try_iter().flatten().collect()).unwrap()
    }

    #[tokio::test]
    async fn lines_arrive_in_order_and_whole() {
        let (gate, output) = open_gate();
        let console = console([gate, Box::new(io::sink())]);
        for line in 0..1000 {
            put(&console, Stream::Stdout, &format!("line {line}\n")).await;
        }
        assert!(console.drained(ready(()), PATIENCE).await);
        console.close().await;
        let expected: Vec<String> = (0..1000).map(|line| format!("line {line}")).collect();
        assert_eq!(text(&output).lines().collect::<Vec<_>>(), expected);
    }

    #[tokio::test]
    async fn a_reader_that_pauses_holds_up_the_writers_of_its_stream_and_loses_nothing() {
        let ((stdout_gate, tickets, stdout), (stderr_gate, stderr)) = (gate(), open_gate());
        let console = console([stdout_gate, stderr_gate]);
        let (room, line) = (WORKER_BYTES >> 20, mebibyte());
        let writer = {
            let console = console.clone();
            async move {
                for _ in 0..=room {
                    put(&console, Stream::Stdout, &line).await;
                }
            }
        };
        let mut writer = tokio::spawn(writer);
        assert!(!console.drained(pending(), MOMENT).await);
        assert!(!writer.is_finished(), "the queue has no bound");
        // The other stream leads elsewhere.
        put(&console, Stream::Stderr, "warning\n").await;
        console.say("rank 1 failed");
        assert_eq!(stderr.recv_timeout(PATIENCE).unwrap(), b"warning\n");
        assert_eq!(
            stderr.recv_timeout(PATIENCE).unwrap(),
            b"[ddp-run] rank 1 failed\n"
        );
        open(&tickets);
        let readers = async { (&mut writer).await.unwrap() };
        assert!(console.drained(readers, PATIENCE).await);
        console.close().await;
        assert_eq!(text(&stdout).matches('\n').count(), room + 1);
        assert_eq!(text(&stderr), "");
    }

    #[tokio::test]
    async fn every_few_kilobytes_that_a_reader_takes_prolong_the_wait_for_it() {
        let (gate, tickets, output) = gate();
        let console = console([gate, Box::new(io::sink())]);
        put(&console, Stream::Stdout, &mebibyte()).await;
        let mut taken = console.taken.clone();
        taken.mark_unchanged();
        for _ in 0..mebibyte().len().div_ceil(WRITE_BYTES) {
            tickets.send(()).unwrap();
            timeout(PATIENCE, taken.changed()).await.unwrap().unwrap();
        }
        assert!(console.drained(ready(()), PATIENCE).await);
        assert_eq!(text(&output), mebibyte());
    }

    #[tokio::test]
    async fn lines_that_a_reader_never_takes_are_counted_on_the_other_stream() {
        let ((stuck, tickets, stdout), (gate, stderr)) = (gate(), open_gate());
        let console = console([stuck, gate]);
        let lines = "line\n".repeat(WRITE_BYTES / 5 + 7);
        put(&console, Stream::Stdout, &lines).await;
        put(&console, Stream::Stdout, &lines).await;
        tickets.send(()).unwrap();
        assert!(!console.drained(ready(()), MOMENT).await);
        console.say("rank 1 failed");
        console.close().await;
        let lost = lines.len() / 5 * 2 - text(&stdout).matches('\n').count();
        let expected = format!(
            "[ddp-run] rank 1 failed\n\
             [ddp-run] lines lost because standard output did not take them: at least {lost}\n"
        );
        assert_eq!(text(&stderr), expected);
        drop(tickets);
    }

    #[tokio::test]
    async fn a_pipe_that_a_process_holds_open_is_not_waited_for() {
        let console = console([Box::new(io::sink()), Box::new(io::sink())]);
        let drained = console.drained(pending(), Duration::MAX);
        assert_eq!(timeout(PATIENCE, drained).await, Ok(true));
    }

    #[tokio::test]
    async fn the_launchers_own_messages_have_room_of_their_own_and_a_bound() {
        let (gate, tickets, output) = gate();
        let console = console([Box::new(io::sink()), gate]);
        for _ in 1..WORKER_BYTES >> 20 {
            put(&console, Stream::Stderr, &mebibyte()).await;
        }
        console.say("rank 1 failed");
        let long = "y".repeat(1 << 20);
        (0..3).for_each(|_| console.say(&long));
        open(&tickets);
        assert!(console.drained(ready(()), PATIENCE).await);
        console.close().await;
        let text = text(&output);
        assert!(text.contains("[ddp-run] rank 1 failed\n"));
        assert_eq!(text.matches(&long).count(), 1);
    }

    #[tokio::test]
    async fn what_a_stream_refuses_is_reported_once_and_counted_on_the_other() {
        let full = "asks:\n\
             [ddp-run] cannot write to standard output: No space left on device (os error 28); its output is lost, and the job continues\n\
             [ddp-run]   hint: `--log-dir` also writes all output to files\n\
             [ddp-run] lines lost because standard output did not take them: at least 3\n";
        // The reader of a closed pipe has gone on purpose.
        for (errno, expected) in [(libc::ENOSPC, full), (libc::EPIPE, "asks:\n")] {
            let (gate, stderr) = open_gate();
            let console = console([Box::new(Refusing(errno)), gate]);
            put(&console, Stream::Stderr, "asks:").await;
            assert!(console.drained(ready(()), PATIENCE).await);
            for _ in 0..3 {
                put(&console, Stream::Stdout, "line\n").await;
            }
            assert!(console.drained(ready(()), PATIENCE).await);
            console.close().await;
            assert_eq!(text(&stderr), expected);
        }
    }

    #[tokio::test]
    async fn streams_of_one_place_end_each_others_lines() {
        for (is_one_place, expected) in [(true, "asks:\nline\n"), (false, "asks:line\n\n")] {
            let ((stdout, place), (mut stderr, _)) = (open_gate(), open_gate());
            stderr.written = stdout.written.clone();
            let output = Output {
                writers: [stdout, stderr],
                is_file: [false; 2],
                is_one_place,
                looks: [Look::default(); 2],
            };
            let console = Console::start(output, false).unwrap();
            for (stream, text) in [(Stream::Stderr, "asks:"), (Stream::Stdout, "line\n")] {
                put(&console, stream, text).await;
                assert!(console.drained(ready(()), PATIENCE).await);
            }
            console.close().await;
            assert_eq!(text(&place), expected);
        }
    }
}
