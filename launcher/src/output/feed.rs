//! What one stream of a worker gives to the console, and when.
//!
//! Whole lines go at once. A line without an end is shown [`QUIET`] after its first byte that is not shown yet, so that
//! a prompt can be read. On a terminal a progress bar is shown as often as that; where its line is not the last one,
//! each update takes a line of its own, so that it is shown every [`CALM`] only. What an update would hide is left out.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::output::console::{Console, Piece, Source};
use crate::output::lines::Line;
use crate::output::sinks::SinkKind;

/// From the first byte of something unfinished until it is shown.
const QUIET: Duration = Duration::from_millis(100);
/// From one update to the next of a bar that others write below.
const CALM: Duration = Duration::from_secs(1);
/// What is longer is no prompt and no bar: it is shown when nothing has come for [`QUIET`], so that a long line that
/// arrives in parts stays whole.
const PROMPT_BYTES: usize = 4 << 10;
/// More than this is not gathered, but for one line.
const BATCH_BYTES: usize = 64 << 10;

/// Gathers pieces of one stream.
pub(crate) struct Feed {
    console: Console,
    source: Source,
    prefix: Arc<str>,
    kind: SinkKind,
    /// What the console has not got yet: whole lines, and behind them what belongs to the current one.
    out: Vec<u8>,
    /// Length of the whole lines in `out`.
    whole: usize,
    /// `out` begins within a line that the console has the beginning of.
    continues: bool,
    /// Something of the current line is in `out` or on the console.
    begun: bool,
    /// Bytes of the current text that the console has.
    shown: usize,
    /// Where the text in `out` begins that the next update may replace.
    replaceable: Option<usize>,
    /// When what is unfinished is to be shown.
    deadline: Option<Instant>,
    last_shown: Option<Instant>,
}

impl Feed {
    pub(crate) fn new(console: Console, source: Source, prefix: &str) -> Self {
        Self {
            kind: console.kind(source.stream),
            console,
            source,
            prefix: prefix.into(),
            out: Vec::new(),
            whole: 0,
            continues: false,
            begun: false,
            shown: 0,
            replaceable: None,
            deadline: None,
            last_shown: None,
        }
    }

    /// True if something of the current line is shown, or about to be.
    pub(crate) fn is_within_line(&self) -> bool {
        self.begun
    }

    /// Takes what was ended, by `\n` or by `\r`.
    pub(crate) fn take(&mut self, line: &Line<'_>) {
        self.add(line.text, line.returns);
        if line.ended {
            self.begin();
            let bare = self.begun && line.text.is_empty() && line.returns;
            self.out.extend_from_slice(if bare { b"\r\n" } else { b"\n" });
            self.whole = self.out.len();
            self.begun = false;
            self.replaceable = None;
            self.deadline = None;
        }
        self.shown = 0;
        if self.out.len() >= BATCH_BYTES {
            self.send(self.out.len());
        }
    }

    /// After all lines of what was read: `unfinished` is the text behind the last one, and whether it returns.
    pub(crate) fn flush(&mut self, unfinished: (&[u8], bool), now: Instant) {
        self.send(match self.kind {
            SinkKind::Terminal => self.whole,
            SinkKind::Pipe | SinkKind::File => self.out.len(),
        });
        // A file asks no questions: no reader waits for the end of its line.
        let is_new = unfinished.0.len() > self.shown && self.kind != SinkKind::File;
        if !is_new && self.out.is_empty() {
            self.deadline = None;
            return;
        }
        let deadline = match self.deadline {
            Some(deadline) if unfinished.0.len() <= PROMPT_BYTES => deadline,
            _ => self
                .not_before(unfinished.1)
                .map_or(now + QUIET, |calm| calm.max(now + QUIET)),
        };
        self.deadline = Some(deadline);
        if deadline <= now {
            self.show(unfinished, now);
        }
    }

    /// An update that needs a line of its own, as others have written below the last one, has time.
    fn not_before(&self, returns: bool) -> Option<Instant> {
        let is_update = self.kind == SinkKind::Terminal && (returns || !self.out.is_empty());
        let last = self.last_shown.filter(|_| is_update)?;
        (!self.console.is_open(self.source)).then_some(last + CALM)
    }

    /// When [`Feed::show`] is to be called, if nothing comes before.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Shows what has no end yet, unless others have written meanwhile and it has time now.
    pub(crate) fn show(&mut self, unfinished: (&[u8], bool), now: Instant) {
        let (text, returns) = unfinished;
        self.deadline = self.not_before(returns).filter(|calm| *calm > now);
        if self.deadline.is_some() {
            return;
        }
        self.add(text, returns);
        self.shown = text.len();
        self.last_shown = Some(now);
        self.send(self.out.len());
    }

    /// Gives all that is left to the console.
    pub(crate) fn finish(mut self) {
        self.send(self.out.len());
    }

    /// Adds text of the current line, of which the console may have the beginning.
    fn add(&mut self, text: &[u8], returns: bool) {
        // A line that was held back as a repeated error can be shorter than what was shown of the line after it.
        let fresh = text.get(self.shown..).unwrap_or(text);
        if fresh.is_empty() {
            return;
        }
        self.begin();
        if self.shown > 0 {
            self.replaceable = None;
        } else if let Some(at) = self.hidden_by(fresh) {
            self.out.truncate(at);
        } else {
            let is_update = self.begun && returns;
            self.out.extend_from_slice(if is_update { b"\r" } else { b"" });
            self.replaceable = Some(self.out.len());
        }
        self.begun = true;
        self.out.extend_from_slice(fresh);
    }

    /// Where the text begins that `update` will be written over, and hide, on a terminal.
    fn hidden_by(&self, update: &[u8]) -> Option<usize> {
        let at = self.replaceable.filter(|_| self.kind == SinkKind::Terminal)?;
        (characters(&self.out[at..]) <= characters(update)).then_some(at)
    }

    fn begin(&mut self) {
        if self.out.is_empty() {
            self.continues = self.begun;
        }
    }

    fn send(&mut self, length: usize) {
        if length == 0 {
            return;
        }
        let all = length == self.out.len();
        let rest = self.out.split_off(length);
        let piece = Piece {
            source: self.source,
            prefix: self.prefix.clone(),
            bytes: std::mem::replace(&mut self.out, rest),
            continues: std::mem::take(&mut self.continues),
        };
        self.whole = self.whole.saturating_sub(length);
        self.replaceable = self
            .replaceable
            .and_then(|at| at.checked_sub(length))
            .filter(|_| !all);
        self.console.put(piece);
    }
}

/// Of UTF-8: all bytes but those that go on with a character.
fn characters(text: &[u8]) -> usize {
    text.iter().filter(|byte| *byte & 0xc0 != 0x80).count()
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::mpsc;

    use super::*;
    use crate::output::console::Stream;
    use crate::output::lines::LineSplitter;
    use crate::output::sinks::Sinks;

    const SOURCE: Source = Source {
        stream: Stream::Stdout,
        id: 0,
    };

    struct Screen(mpsc::Sender<Vec<u8>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// One stream of a worker, and the console that it feeds.
    struct Play {
        splitter: LineSplitter,
        feed: Feed,
        console: Console,
        screen: mpsc::Receiver<Vec<u8>>,
        begin: Instant,
    }

    impl Play {
        fn on(kind: SinkKind) -> Self {
            let (sender, screen) = mpsc::channel();
            let writers: [Box<dyn Write + Send>; 2] = [Box::new(Screen(sender)), Box::new(io::sink())];
            let console = Console::start(Sinks::new(writers, [kind; 2], false), false).unwrap();
            Self {
                splitter: LineSplitter::default(),
                feed: Feed::new(console.clone(), SOURCE, "[0] "),
                console,
                screen,
                begin: Instant::now(),
            }
        }

        /// The worker writes this, so many milliseconds after the beginning.
        fn write(&mut self, ms: u64, text: &str) -> &mut Self {
            let feed = &mut self.feed;
            self.splitter.push(text.as_bytes(), |line| feed.take(&line));
            let now = self.begin + Duration::from_millis(ms);
            feed.flush(self.splitter.unfinished(), now);
            self
        }

        /// It writes nothing until what it wrote is due; when that is, in milliseconds after the beginning.
        fn wait(&mut self) -> Option<u64> {
            let due = self.feed.deadline()?;
            self.feed.show(self.splitter.unfinished(), due);
            self.until_open(true);
            Some((due - self.begin).as_millis() as u64)
        }

        /// Waits until the writer of the console has noted whose line the last one is.
        fn until_open(&self, open: bool) {
            let deadline = Instant::now() + Duration::from_secs(20);
            while self.console.is_open(SOURCE) != open {
                assert!(Instant::now() < deadline, "the console writes nothing");
                std::thread::yield_now();
            }
        }

        fn end(self) -> String {
            let mut feed = self.feed;
            self.splitter.finish(|line| feed.take(&line));
            feed.finish();
            self.console.close(Duration::from_secs(20));
            String::from_utf8(self.screen.try_iter().flatten().collect()).unwrap()
        }
    }

    #[test]
    fn a_prompt_is_shown_a_moment_after_it_was_written() {
        let mut play = Play::on(SinkKind::Pipe);
        play.write(0, "breakpoint\n(Pdb) ");
        assert_eq!(play.wait(), Some(100));
        assert_eq!(play.wait(), None);
        // Counted from the first byte: dots that come one by one are seen.
        play.write(500, "1\n.").write(550, ".").write(590, ".");
        assert_eq!(play.wait(), Some(600));
        play.write(700, ".\n").write(710, "x").write(720, "y\nz");
        assert_eq!(
            play.wait(),
            Some(820),
            "the time of a line is not that of the one before"
        );
        assert_eq!(
            play.end(),
            "[0] breakpoint\n[0] (Pdb) 1\n[0] ....\n[0] xy\n[0] z\n"
        );
    }

    #[test]
    fn a_long_line_is_shown_when_it_is_whole_or_nothing_more_comes() {
        let mut play = Play::on(SinkKind::Pipe);
        let part = "x".repeat(PROMPT_BYTES);
        play.write(0, &part).write(90, &part).write(180, &part);
        assert_eq!(
            play.feed.deadline(),
            Some(play.begin + Duration::from_millis(280))
        );
        play.write(270, "y\n").write(300, &part).write(390, "z");
        assert_eq!(play.wait(), Some(490));
        assert_eq!(play.end(), format!("[0] {part}{part}{part}y\n[0] {part}z\n"));
    }

    #[test]
    fn a_file_gets_whole_lines() {
        let mut play = Play::on(SinkKind::File);
        play.write(0, "loading ...");
        assert_eq!(play.wait(), None);
        play.write(900, " done\n").write(910, "1%\r2%\r");
        assert_eq!(play.wait(), None);
        assert_eq!(play.end(), "[0] loading ... done\n[0] 1%\r[0] 2%\r\n");
    }

    #[test]
    fn a_pipe_gets_every_update_of_a_bar() {
        let mut play = Play::on(SinkKind::Pipe);
        play.write(0, "\r1%\r2%\r3").write(10, "%\rdone\n");
        assert_eq!(play.end(), "[0] 1%\r[0] 2%\r[0] 3%\r[0] done\n");
    }

    #[test]
    fn a_terminal_gets_the_last_of_the_updates_that_come_together() {
        for leading in [true, false] {
            let update = |text: &str| {
                if leading {
                    format!("\r{text}")
                } else {
                    format!("{text}\r")
                }
            };
            let mut play = Play::on(SinkKind::Terminal);
            for percent in 10..15 {
                play.write(percent, &update(&format!("{percent}%")));
            }
            assert_eq!(play.wait(), Some(110));
            play.write(200, &update("98%")).write(210, &update("99%"));
            assert_eq!(
                play.feed.deadline(),
                Some(play.begin + Duration::from_millis(300))
            );
            play.write(220, &(update("100%") + "\n"));
            let end = if leading { "\n" } else { "\r\n" };
            assert_eq!(play.end(), format!("[0] 14%\r[0] 100%{end}"));
        }
    }

    #[test]
    fn what_an_update_does_not_hide_stays() {
        let mut play = Play::on(SinkKind::Terminal);
        play.write(0, "  loading\r|").write(10, "\r/\r-");
        assert_eq!(play.wait(), Some(100));
        assert_eq!(play.end(), "[0]   loading\r[0] -\n");
    }

    #[test]
    fn a_bar_that_others_write_below_is_shown_now_and_then() {
        let mut play = Play::on(SinkKind::Terminal);
        play.write(0, "\r1%");
        assert_eq!(play.wait(), Some(100), "at first as soon as any");
        play.write(150, "\r2%");
        assert_eq!(
            play.feed.deadline(),
            Some(play.begin + Duration::from_millis(250))
        );
        let other = Feed::new(play.console.clone(), Source { id: 1, ..SOURCE }, "[1] ");
        let mut other = Play {
            feed: other,
            ..Play::on(SinkKind::Terminal)
        };
        other.write(0, "line\n");
        play.until_open(false);
        // It was due while the line was its own.
        play.feed.show(
            play.splitter.unfinished(),
            play.begin + Duration::from_millis(250),
        );
        play.write(400, "\r3%");
        assert_eq!(play.wait(), Some(1100));
        assert_eq!(play.end(), "[0] 1%\n[1] line\n[0] 3%\n");
    }
}
