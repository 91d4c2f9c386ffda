//! Reads what the workers write: to the log files as it is, to the console line by line, the end of it kept for
//! the failure report. What has no end yet, a prompt for instance, is shown a moment later.
//!
//! It has a thread with a runtime of its own. A log directory that hangs, or a console that is slow, holds up this
//! thread and with it the workers' output, but never supervision.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

use ddp_proto::ids::GlobalRank;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};

use crate::output::console::{Console, Source, Stream};
use crate::output::feed::Feed;
use crate::output::lines::{Line, LineSplitter};
use crate::output::repeated_errors::RankErrors;

/// Lines of stderr kept for the failure report.
const TAIL_LINES: usize = 20;
/// Longest line kept for the failure report.
const TAIL_LINE_BYTES: usize = 1000;
/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;
/// Pipes that may wait to be taken up by the thread: two for each worker that is being started.
const TAP_QUEUE: usize = 4096;

/// One stream of one worker.
pub(crate) struct Tap {
    pub(crate) rank: GlobalRank,
    pub(crate) stream: Stream,
    pub(crate) pipe: OwnedFd,
    pub(crate) log: Option<File>,
    pub(crate) tail: TailWriter,
    /// Precedes its lines on the console; none: they are not shown.
    pub(crate) prefix: Option<String>,
    /// Knows the errors that need not be shown again; none: all are.
    pub(crate) errors: Option<RankErrors>,
    /// Takes the lines that contain one of the words.
    pub(crate) duplicate: Option<Duplicate>,
}

/// A file that lines of all workers go to if they contain one of some words.
#[derive(Clone)]
pub(crate) struct Duplicate {
    pub(crate) words: Vec<String>,
    /// Opened for appending: a line is one write, so that lines of several workers do not mix.
    pub(crate) file: Arc<File>,
}

impl Duplicate {
    fn take(&self, line: &[u8]) -> io::Result<()> {
        let text = String::from_utf8_lossy(line);
        if self.words.iter().any(|word| text.contains(word.as_str())) {
            let mut whole = text.trim_end().as_bytes().to_vec();
            whole.push(b'\n');
            (&*self.file).write_all(&whole)?;
        }
        Ok(())
    }
}

/// Handle to the reading thread.
#[derive(Clone)]
pub(crate) struct Pump {
    taps: mpsc::Sender<Tap>,
}

impl Pump {
    /// Starts the thread.
    pub(crate) fn start(console: Console) -> io::Result<Self> {
        let (taps, mut queue) = mpsc::channel::<Tap>(TAP_QUEUE);
        let (runtime, handed_over) = std::sync::mpsc::channel::<Runtime>();
        std::thread::Builder::new()
            .name("pump".into())
            .stack_size(512 << 10)
            .spawn(move || {
                let Ok(runtime) = handed_over.recv() else {
                    return;
                };
                runtime.block_on(async move {
                    let pending = Arc::<AtomicUsize>::default();
                    while let Some(tap) = queue.recv().await {
                        let splitter = LineSplitter::new(pending.clone());
                        tokio::spawn(read(tap, splitter, console.clone()));
                    }
                });
            })?;
        // Made when there is a thread for it: here, on the agent's own runtime, it could not even be dropped.
        let made = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.send(made).expect("a thread that waits for it");
        Ok(Self { taps })
    }

    /// Begins to read; false if far too many streams wait to be taken up.
    pub(crate) fn add(&self, tap: Tap) -> bool {
        self.taps.try_send(tap).is_ok()
    }
}

async fn read(tap: Tap, mut splitter: LineSplitter, console: Console) {
    let Tap {
        rank,
        stream,
        pipe,
        mut log,
        mut tail,
        prefix,
        mut errors,
        mut duplicate,
    } = tap;
    let Ok(mut pipe) = pipe::Receiver::from_owned_fd(pipe) else {
        return;
    };
    let id = u64::from(rank.0);
    let mut feed = prefix.map(|prefix| Feed::new(console.clone(), Source { stream, id }, &prefix));
    let mut take = |line: Line<'_>, feed: &mut Option<Feed>| {
        tail.push(&line);
        if let Some(feed) = feed {
            let is_whole = line.ended && !line.returns && !feed.is_within_line();
            match &mut errors {
                Some(errors) => errors.say(line.text, is_whole, |text| feed.take(&Line { text, ..line })),
                None => feed.take(&line),
            }
        }
        let duplicated = duplicate.as_ref().map_or(Ok(()), |file| file.take(line.text));
        if let Err(error) = duplicated {
            console.say(&format!("stopped copying filtered lines of rank {rank}: {error}"));
            duplicate = None;
        }
    };
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let reading = pipe.read(&mut buffer);
        let read = match feed.as_mut().and_then(|feed| Some((feed.deadline()?, feed))) {
            // Cancel safe: a read that is given up has taken nothing.
            Some((deadline, feed)) => {
                let Ok(read) = timeout_at(deadline, reading).await else {
                    feed.show(splitter.unfinished(), Instant::now());
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
        if let Some(file) = &mut log
            && let Err(error) = file.write_all(bytes)
        {
            console.say(&format!("stopped writing the log files of rank {rank}: {error}"));
            log = None;
        }
        splitter.push(bytes, |line| take(line, &mut feed));
        if let Some(feed) = &mut feed {
            feed.flush(splitter.unfinished(), Instant::now());
        }
    }
    splitter.finish(|line| take(line, &mut feed));
    if let Some(feed) = feed {
        feed.finish();
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

/// Filled by the pump; dropping it says that the stream has ended.
pub(crate) struct TailWriter {
    lines: Arc<Mutex<VecDeque<String>>>,
    /// The last line may be written over by the next update.
    overwritten: bool,
    _open: watch::Sender<()>,
}

impl TailWriter {
    /// Keeps what a terminal would still show: of a progress bar its last state.
    fn push(&mut self, line: &Line<'_>) {
        let text = &line.text[..line.text.len().min(TAIL_LINE_BYTES)];
        let text = String::from_utf8_lossy(text).trim_end().to_owned();
        let goes_on = !line.ended;
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

    #[test]
    fn lines_with_a_word_are_written_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("filtered");
        let duplicate = Duplicate {
            words: vec!["loss".into(), "error".into()],
            file: Arc::new(File::create(&path).unwrap()),
        };
        for line in ["step 1\n", "loss 2.5\r\n", "no errors"] {
            duplicate.take(line.as_bytes()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "loss 2.5\nno errors\n");
    }

    #[tokio::test]
    async fn the_tail_keeps_the_last_lines() {
        let (mut writer, mut reader) = tail();
        let mut splitter = LineSplitter::default();
        for line in 0..100 {
            let text = format!("line {line}\r\n\r 1%\r 2%\n");
            splitter.push(text.as_bytes(), |line| writer.push(&line));
        }
        splitter.push(b"\n", |line| writer.push(&line));
        drop(writer);
        reader.ended().await;
        let lines = reader.lines();
        assert_eq!(lines.len(), TAIL_LINES);
        assert_eq!(lines[TAIL_LINES - 2..], ["line 99", " 2%"]);
    }
}
