//! Reads the output of the workers: writes it to the log files unchanged and to the console line by line, and keeps
//! its end for the failure report. Text without an end, a prompt for instance, is shown [`QUIET`] later.
//!
//! The thread `reader` has a runtime of its own. A log directory that hangs holds up this thread, a console that is slow
//! the streams that it shows: both hold up workers that print, but never supervision.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ddp_proto::ids::GlobalRank;
use ddp_proto::printable::Look;
use ddp_proto::utc::now;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};

use crate::output::console::Console;
use crate::output::lines::{End, LineBuffer, Segment};
use crate::output::logs::LogFile;
use crate::output::plan::TIME;
use crate::output::repeated_errors::RankErrors;
use crate::output::streams::{Chunk, Source, Stream};
use crate::threads;

/// Lines of stderr kept for the failure report.
const TAIL_LINES: usize = 20;
/// Longest line kept for the failure report.
const TAIL_LINE_BYTES: usize = 1000;
/// Stack of the reading thread.
const STACK_BYTES: usize = 512 << 10;
/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;
/// Pipes that may wait for the thread: two for each worker that is being started.
const PIPE_QUEUE: usize = 4096;
/// Times that a stream is read while the console has no room: the last words of a worker reach log files and report.
const READ_AHEAD: usize = 64;
/// Time from the first byte of unfinished text until it is shown.
const QUIET: Duration = Duration::from_millis(100);
/// Time after the last line of an error until it counts as whole, if nothing follows.
const ERROR_QUIET: Duration = Duration::from_secs(1);
/// Longer text is no prompt: it is shown when nothing has come for [`QUIET`], so that a long line that arrives in parts
/// stays whole.
const PROMPT_BYTES: usize = 4 << 10;

/// One stream of one worker.
pub(crate) struct WorkerStream {
    pub(crate) rank: GlobalRank,
    pub(crate) stream: Stream,
    pub(crate) pipe: OwnedFd,
    pub(crate) log: Option<LogFile>,
    pub(crate) tail: TailWriter,
    /// Precedes its lines on the console, if it is shown there. A worker that is kept may get another rank.
    pub(crate) prefix: Option<watch::Receiver<String>>,
    /// Leaves out errors that another rank has printed.
    pub(crate) errors: RankErrors,
    /// Gets a copy of the lines that contain certain words.
    pub(crate) duplicate: Option<Duplicate>,
}

/// A file for lines of all workers that contain one of some words.
#[derive(Clone)]
pub(crate) struct Duplicate {
    pub(crate) words: Vec<String>,
    /// Opened for appending: a line is one write, so that lines of several workers do not mix.
    pub(crate) file: Arc<File>,
}

impl Duplicate {
    fn copy(&self, line: &[u8]) -> io::Result<()> {
        let text = String::from_utf8_lossy(line);
        if self.words.iter().any(|word| text.contains(word.as_str())) {
            let whole = format!("{}\n", text.trim_end());
            (&*self.file).write_all(whole.as_bytes())?;
        }
        Ok(())
    }
}

/// Exists until a stream has been read to its end, and the console has its last line.
type Unread = watch::Receiver<()>;

/// Handle to the reading thread.
#[derive(Clone)]
pub(crate) struct OutputReader {
    streams: mpsc::Sender<(WorkerStream, Unread)>,
    unread: Arc<watch::Sender<()>>,
    merges: bool,
}

impl OutputReader {
    /// Starts the thread.
    pub(crate) fn start(console: Console) -> io::Result<Self> {
        let (streams, mut queue) = mpsc::channel::<(WorkerStream, Unread)>(PIPE_QUEUE);
        let merges = console.is_one_place();
        threads::start_runtime("reader", STACK_BYTES, move || {
            Ok(async move {
                while let Some((stream, unread)) = queue.recv().await {
                    tokio::spawn(read(stream, console.clone(), unread));
                }
            })
        })?;
        Ok(Self {
            streams,
            unread: Arc::default(),
            merges,
        })
    }

    /// The console shows both streams in one place: their lines stay in order if they come through one pipe.
    pub(crate) fn merges(&self) -> bool {
        self.merges
    }

    /// Begins to read; false if too many streams wait for the thread.
    pub(crate) fn add(&self, stream: WorkerStream) -> bool {
        self.streams.try_send((stream, self.unread.subscribe())).is_ok()
    }

    /// Returns when the console has the last line of all streams. Cancel safe.
    pub(crate) async fn ended(&self) {
        self.unread.closed().await;
    }
}

async fn read(mut worker: WorkerStream, console: Console, unread: Unread) {
    let Ok(mut pipe) = pipe::Receiver::from_owned_fd(worker.pipe) else {
        return;
    };
    let rank = worker.rank;
    let source = Source {
        stream: worker.stream,
        id: u64::from(rank.0),
    };
    let new = |prefix| ShownStream::new(console.clone(), source, prefix, worker.errors, unread);
    let mut shown = worker.prefix.map(new);
    let mut take = |segment: &Segment<'_>, shown: &mut Option<ShownStream>| {
        worker.tail.push(segment);
        if let Some(shown) = shown {
            shown.take(segment);
        }
        if let Some(file) = &worker.duplicate
            && let Err(error) = file.copy(segment.text)
        {
            console.say(&format!("stopped copying filtered lines of rank {rank}: {error}"));
            worker.duplicate = None;
        }
    };
    let (mut lines, mut buffer) = (LineBuffer::default(), vec![0; READ_BYTES]);
    loop {
        let reading = pipe.read(&mut buffer);
        let read = match shown.as_mut().and_then(|shown| Some((shown.deadline?, shown))) {
            // Cancel safe: a cancelled read has taken nothing.
            Some((deadline, shown)) => {
                let Ok(read) = timeout_at(deadline, reading).await else {
                    shown.show(&mut lines).await;
                    continue;
                };
                read
            }
            None => reading.await,
        };
        let Ok(read @ 1..) = read else {
            break;
        };
        let bytes = &buffer[..read];
        if let Some(file) = &mut worker.log
            && let Err(error) = file.write(bytes)
        {
            console.say(&format!("stopped writing the log files of rank {rank}: {error}"));
            worker.log = None;
        }
        lines.push(bytes, |segment| take(segment, &mut shown));
        if let Some(shown) = &mut shown {
            shown.send().await;
            shown.set_deadline(lines.unseen(), Instant::now());
        }
    }
    lines.finish(|segment| take(segment, &mut shown));
    if let Some(shown) = &mut shown {
        shown.show(&mut LineBuffer::default()).await;
    }
}

/// A stream that the console shows.
struct ShownStream {
    console: Console,
    prefix: watch::Receiver<String>,
    errors: RankErrors,
    /// How lines of a native worker look, behind a prefix of so many columns.
    own: Option<(Look, usize)>,
    /// Hands over what was read to the console, in order.
    forward: mpsc::Sender<Chunk>,
    /// What the console gets next.
    next: Chunk,
    /// When the unfinished text is shown.
    deadline: Option<Instant>,
}

impl ShownStream {
    fn new(
        console: Console,
        source: Source,
        prefix: watch::Receiver<String>,
        errors: RankErrors,
        unread: Unread,
    ) -> Self {
        let (forward, mut read) = mpsc::channel(READ_AHEAD);
        let (place, look) = (console.clone(), console.looks[source.stream as usize]);
        tokio::spawn(async move {
            let _unread = unread;
            while let Some(chunk) = read.recv().await {
                place.put(chunk).await;
            }
        });
        Self {
            console,
            own: errors.is_native.then(|| (look, prefix.borrow().chars().count())),
            errors,
            forward,
            next: Chunk {
                source,
                prefix: "".into(),
                bytes: Vec::new(),
                continues: false,
            },
            deadline: None,
            prefix,
        }
    }

    fn take(&mut self, segment: &Segment<'_>) {
        if segment.end != End::Unfinished {
            self.deadline = None;
        }
        let is_line = segment.end == End::Line && !segment.continues();
        if is_line && self.errors.hold(segment.text) {
            return;
        }
        if self.next.bytes.is_empty() {
            self.next.continues = segment.continues();
        }
        self.next.bytes.extend(self.errors.rest());
        self.next.bytes.extend_from_slice(&segment.text[segment.shown..]);
        self.next.bytes.extend_from_slice(segment.end.bytes());
    }

    /// `unseen` is the length of the unfinished text behind what was read.
    fn set_deadline(&mut self, unseen: Option<usize>, now: Instant) {
        if self.errors.is_holding() {
            self.deadline = Some(now + ERROR_QUIET);
            return;
        }
        // Nobody waits for a prompt in a file.
        let unseen = unseen.filter(|_| !self.console.is_file(self.next.source.stream));
        self.deadline = unseen.map(|length| match self.deadline {
            Some(deadline) if length <= PROMPT_BYTES => deadline,
            _ => now + QUIET,
        });
    }

    /// Shows the unfinished text, and the error that is held back.
    async fn show(&mut self, lines: &mut LineBuffer) {
        self.deadline = None;
        self.take(&lines.show());
        self.send().await;
    }

    /// Hands over what was read, once there is room for it.
    async fn send(&mut self) {
        let mut bytes = std::mem::take(&mut self.next.bytes);
        if bytes.is_empty() {
            return;
        }
        if let Some((look, prefix)) = self.own {
            bytes = look.apply(&String::from_utf8_lossy(&bytes), prefix).into_bytes();
        }
        let Source { stream, id } = self.next.source;
        let prefix = self.prefix.borrow().replace(TIME, &now());
        let prefix = self.console.looks[stream as usize].prefix(&prefix, Some(id as u32));
        let chunk = Chunk {
            bytes,
            prefix: prefix.into(),
            ..self.next.clone()
        };
        // It is open as long as this stream is.
        let _ = self.forward.send(chunk).await;
    }
}

/// The last lines of a stream, and whether it has ended.
pub(crate) fn tail() -> (TailWriter, TailReader) {
    let lines = Arc::new(Mutex::new(VecDeque::new()));
    let (open, ended) = watch::channel(());
    let writer = TailWriter {
        lines: lines.clone(),
        overwritten: false,
        _open: open,
    };
    (writer, TailReader { lines, ended })
}

/// Filled by the reader; dropping it says that the stream has ended.
pub(crate) struct TailWriter {
    lines: Arc<Mutex<VecDeque<String>>>,
    /// The next update may overwrite the last line.
    overwritten: bool,
    _open: watch::Sender<()>,
}

impl TailWriter {
    /// Keeps what a terminal would still show: the last update of a progress bar.
    fn push(&mut self, segment: &Segment<'_>) {
        let text = &segment.text[..segment.text.len().min(TAIL_LINE_BYTES)];
        let text = String::from_utf8_lossy(text).trim_end().to_owned();
        let goes_on = segment.end == End::Update;
        if text.is_empty() {
            self.overwritten &= goes_on;
            return;
        }
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut self.overwritten, goes_on) {
            lines.pop_back();
        } else if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(text);
    }
}

/// Read by the failure report.
#[derive(Clone, Debug)]
pub(crate) struct TailReader {
    lines: Arc<Mutex<VecDeque<String>>>,
    ended: watch::Receiver<()>,
}

impl TailReader {
    /// Both are of one pipe.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.lines, &other.lines)
    }

    /// Returns when the stream has ended. Cancel safe.
    pub(crate) async fn ended(&mut self) {
        // Nothing is ever sent: an error means that the writer is gone.
        while self.ended.changed().await.is_ok() {}
    }

    /// The last lines so far, oldest first.
    pub(crate) fn lines(&self) -> Vec<String> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::repeated_errors::RepeatedErrors;
    use crate::output::streams::Output;

    #[test]
    fn lines_with_a_word_are_copied() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("filtered");
        let duplicate = Duplicate {
            words: vec!["loss".into(), "error".into()],
            file: Arc::new(File::create(&path).unwrap()),
        };
        for line in ["step 1\n", "loss 2.5\r\n", "no errors"] {
            duplicate.copy(line.as_bytes()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "loss 2.5\nno errors\n");
    }

    #[tokio::test]
    async fn the_tail_keeps_the_last_lines() {
        let (mut writer, mut reader) = tail();
        let mut buffer = LineBuffer::default();
        for line in 0..100 {
            let text = format!("line {line}\r\n\r 1%\r 2%\n");
            buffer.push(text.as_bytes(), |segment| writer.push(segment));
        }
        buffer.push(b"\n", |segment| writer.push(segment));
        drop(writer);
        reader.ended().await;
        let lines = reader.lines();
        assert_eq!(lines.len(), TAIL_LINES);
        assert_eq!(lines[TAIL_LINES - 2..], ["line 99", " 2%"]);
    }

    const SOURCE: Source = Source {
        stream: Stream::Stdout,
        id: 0,
    };

    struct Screen(std::sync::mpsc::Sender<Vec<u8>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// One stream of a worker, and the console that shows it.
    struct Play {
        lines: LineBuffer,
        shown: ShownStream,
        console: Console,
        unread: watch::Sender<()>,
        screen: std::sync::mpsc::Receiver<Vec<u8>>,
        begin: Instant,
    }

    impl Play {
        fn on(is_file: bool) -> Self {
            let (sender, screen) = std::sync::mpsc::channel();
            let output = Output {
                writers: [Box::new(Screen(sender)), Box::new(io::sink())],
                is_file: [is_file; 2],
                is_one_place: false,
                looks: [ddp_proto::printable::Look::default(); 2],
            };
            let console = Console::start(output, false).unwrap();
            let (unread, reads) = watch::channel(());
            Self {
                lines: LineBuffer::default(),
                shown: ShownStream::new(
                    console.clone(),
                    SOURCE,
                    watch::channel("[0] ".to_owned()).1,
                    RepeatedErrors::default().of_rank(GlobalRank(0), false),
                    reads,
                ),
                console,
                unread,
                screen,
                begin: Instant::now(),
            }
        }

        /// The worker writes `text` at this time after the beginning.
        async fn write(&mut self, ms: u64, text: &str) {
            let shown = &mut self.shown;
            self.lines.push(text.as_bytes(), |segment| shown.take(segment));
            shown.send().await;
            shown.set_deadline(self.lines.unseen(), self.begin + Duration::from_millis(ms));
        }

        /// The worker writes nothing until its text is due. Gives that time, in milliseconds after the beginning.
        async fn wait(&mut self) -> Option<u64> {
            let due = self.shown.deadline?;
            self.shown.show(&mut self.lines).await;
            Some((due - self.begin).as_millis() as u64)
        }

        async fn end(self) -> String {
            let mut shown = self.shown;
            self.lines.finish(|segment| shown.take(segment));
            let last = async {
                shown.show(&mut LineBuffer::default()).await;
                drop(shown);
                self.unread.closed().await;
            };
            assert!(self.console.drained(last, Duration::from_secs(20)).await);
            self.console.close().await;
            String::from_utf8(self.screen.try_iter().flatten().collect()).unwrap()
        }
    }

    /// Takes nothing until the test is over.
    struct Stalled(std::sync::mpsc::Receiver<()>);

    impl Write for Stalled {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Another rank has filled all room.
    #[tokio::test]
    async fn the_last_words_of_a_worker_are_read_while_the_console_takes_nothing() {
        let (_open, gate) = std::sync::mpsc::channel();
        let output = Output {
            writers: [Box::new(Stalled(gate)), Box::new(io::sink())],
            is_file: [false; 2],
            is_one_place: false,
            looks: [ddp_proto::printable::Look::default(); 2],
        };
        let console = Console::start(output, false).unwrap();
        let flood = Chunk {
            source: SOURCE,
            prefix: "".into(),
            bytes: vec![b'x'; 1 << 20],
            continues: false,
        };
        let full = async {
            loop {
                console.put(flood.clone()).await;
            }
        };
        let until_full = Duration::from_millis(100);
        assert!(tokio::time::timeout(until_full, full).await.is_err());

        let (mut worker, pipe) = std::io::pipe().map(|(read, write)| (write, read)).unwrap();
        let (writer, mut reader) = tail();
        let stream = WorkerStream {
            rank: GlobalRank(1),
            stream: Stream::Stdout,
            pipe: pipe.into(),
            log: None,
            tail: writer,
            prefix: Some(watch::channel(String::new()).1),
            errors: RepeatedErrors::default().of_rank(GlobalRank(1), false),
            duplicate: None,
        };
        let (_unread, reads) = watch::channel(());
        tokio::spawn(read(stream, console, reads));
        for line in ["Traceback\n", "ValueError\n"] {
            worker.write_all(line.as_bytes()).unwrap();
            tokio::task::yield_now().await;
        }
        drop(worker);
        let patience = Duration::from_secs(20);
        tokio::time::timeout(patience, reader.ended()).await.unwrap();
        assert_eq!(reader.lines(), ["Traceback", "ValueError"]);
    }

    #[tokio::test]
    async fn a_prompt_is_shown_a_moment_after_it_was_written() {
        let mut play = Play::on(false);
        play.write(0, "breakpoint\n(Pdb) ").await;
        assert_eq!(play.wait().await, Some(100));
        assert_eq!(play.wait().await, None);
        // Counted from the first byte: dots that come one by one are seen.
        play.write(500, "1\n.").await;
        play.write(550, ".").await;
        play.write(590, ".").await;
        assert_eq!(play.wait().await, Some(600));
        play.write(700, ".\n").await;
        play.write(710, "x").await;
        play.write(720, "y\nz").await;
        assert_eq!(
            play.wait().await,
            Some(820),
            "the time of a line is not that of the one before"
        );
        assert_eq!(
            play.end().await,
            "[0] breakpoint\n[0] (Pdb) 1\n[0] ....\n[0] xy\n[0] z\n"
        );
    }

    #[tokio::test]
    async fn a_long_line_is_shown_when_it_is_whole_or_nothing_more_comes() {
        let mut play = Play::on(false);
        let part = "x".repeat(PROMPT_BYTES);
        play.write(0, &part).await;
        play.write(90, &part).await;
        play.write(180, &part).await;
        assert_eq!(play.shown.deadline, Some(play.begin + Duration::from_millis(280)));
        play.write(270, "y\n").await;
        play.write(300, &part).await;
        play.write(390, "z").await;
        assert_eq!(play.wait().await, Some(490));
        assert_eq!(
            play.end().await,
            format!("[0] {part}{part}{part}y\n[0] {part}z\n")
        );
    }

    #[tokio::test]
    async fn a_file_gets_whole_lines() {
        let mut play = Play::on(true);
        play.write(0, "loading ...").await;
        assert_eq!(play.wait().await, None);
        play.write(900, " done\n").await;
        play.write(910, "1%\r2%\r").await;
        assert_eq!(play.wait().await, None);
        assert_eq!(play.end().await, "[0] loading ... done\n[0] 1%\r[0] 2%\r\n");
    }

    #[tokio::test]
    async fn a_pipe_gets_every_update_of_a_bar() {
        let mut play = Play::on(false);
        play.write(0, "\r1%\r2%\r3").await;
        play.write(10, "%\rdone\n").await;
        assert_eq!(play.end().await, "[0] 1%\r[0] 2%\r[0] 3%\r[0] done\n");
    }
}
