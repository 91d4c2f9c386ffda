//! What the console writes to: standard output and standard error, which may lead to one place.
//!
//! A line is usually written whole. A prompt, or a progress bar, is shown before its line has an end: then that line is
//! open, and the next writer either goes on with it or begins a new one.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;

use crate::output::console::{OWN_PREFIX, Piece, Source, Stream};

const BOTH: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

/// What a stream of the console leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SinkKind {
    /// People watch it.
    Terminal,
    /// A reader may wait at the other end.
    Pipe,
    /// It is read later.
    File,
}

/// Standard output and standard error, in this order, and where their last lines stand.
pub(crate) struct Sinks {
    writers: [Box<dyn Write + Send>; 2],
    kinds: [SinkKind; 2],
    /// One for both, or one for each.
    pens: Vec<Pen>,
    /// It was said that a stream takes nothing.
    complained: [bool; 2],
}

impl Sinks {
    /// The process's own streams.
    pub(crate) fn standard() -> Self {
        let (stdout, stderr) = (io::stdout(), io::stderr());
        let kinds = [kind_of(&stdout), kind_of(&stderr)];
        let together = kinds == [SinkKind::Terminal; 2] || is_same_file(&stdout, &stderr);
        let writers = BOTH.map(|stream| -> Box<dyn Write + Send> { Box::new(Unbuffered(stream)) });
        Self::new(writers, kinds, together)
    }

    /// With `together`, what is written to one follows what was written to the other.
    pub(crate) fn new(writers: [Box<dyn Write + Send>; 2], kinds: [SinkKind; 2], together: bool) -> Self {
        let pens = if together { 1 } else { 2 };
        Self {
            writers,
            kinds,
            pens: (0..pens).map(|_| Pen::default()).collect(),
            complained: [false; 2],
        }
    }

    pub(crate) fn kinds(&self) -> [SinkKind; 2] {
        self.kinds
    }

    /// Whose lines have no end yet.
    pub(crate) fn open(&self) -> [Option<Source>; 2] {
        BOTH.map(|stream| self.pens[self.pen_of(stream)].open)
    }

    fn pen_of(&self, stream: Stream) -> usize {
        (stream as usize).min(self.pens.len() - 1)
    }

    /// Neighbouring pieces of one stream go out together.
    pub(crate) fn write(&mut self, pieces: &[Piece]) {
        for run in pieces.chunk_by(|a, b| a.source.stream == b.source.stream) {
            let (stream, mut bytes) = (run[0].source.stream, Vec::new());
            let pen = self.pen_of(stream);
            for piece in run {
                self.pens[pen].write(piece, &mut bytes);
            }
            self.put(stream, &bytes);
        }
    }

    /// Ends the lines that are open.
    pub(crate) fn end_lines(&mut self) {
        for stream in BOTH {
            let (pen, mut end) = (self.pen_of(stream), Vec::new());
            self.pens[pen].end_line(&mut end);
            self.put(stream, &end);
        }
    }

    /// What a stream does not take is lost. That is said once, on the other one.
    fn put(&mut self, stream: Stream, bytes: &[u8]) {
        let Err(error) = self.writers[stream as usize].write_all(bytes) else {
            return;
        };
        // The reader closed it on purpose: the job goes on.
        if error.kind() == io::ErrorKind::BrokenPipe || self.complained[stream as usize] {
            return;
        }
        self.complained[stream as usize] = true;
        let (name, other) = match stream {
            Stream::Stdout => ("standard output", Stream::Stderr),
            Stream::Stderr => ("standard error", Stream::Stdout),
        };
        let (pen, mut words) = (self.pen_of(other), Vec::new());
        self.pens[pen].end_line(&mut words);
        let text = format!(
            "{OWN_PREFIX}cannot write to {name}: {error}; its output is lost, and the job continues\n\
             {OWN_PREFIX}  hint: `--log-dir` also writes all output to files\n"
        );
        words.extend_from_slice(text.as_bytes());
        // Should this one fail too, there is no place left to complain.
        let _ = self.writers[other as usize].write_all(&words);
    }
}

/// Where the last line of a place stands.
#[derive(Debug, Default)]
struct Pen {
    /// Whose line has no end yet.
    open: Option<Source>,
}

impl Pen {
    /// Adds what the piece comes to, after all that was written before it, to `out`.
    fn write(&mut self, piece: &Piece, out: &mut Vec<u8>) {
        let (prefix, mut bytes) = (piece.prefix.as_bytes(), piece.bytes.as_slice());
        let goes_on = piece.continues && self.open == Some(piece.source);
        if piece.continues && !goes_on {
            // The piece in between has ended the line, or the part of it.
            let mut ends = [&b"\n"[..], b"\r\n", b"\r"].into_iter();
            bytes = ends.find_map(|end| bytes.strip_prefix(end)).unwrap_or(bytes);
            if bytes.is_empty() {
                return;
            }
        }
        if !goes_on {
            self.end_line(out);
        }
        let (mut begins, mut returned) = (!goes_on, false);
        for part in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            match part {
                b"\n" if returned => {}
                b"\n" if begins => out.extend_from_slice(prefix.trim_ascii_end()),
                _ if begins => out.extend_from_slice(prefix),
                _ => {}
            }
            out.extend_from_slice(part);
            returned = part.ends_with(b"\r");
            begins = returned || part.ends_with(b"\n");
        }
        self.open = (!bytes.ends_with(b"\n")).then_some(piece.source);
    }

    /// Ends the line, if it is open.
    fn end_line(&mut self, out: &mut Vec<u8>) {
        if self.open.take().is_some() {
            out.push(b'\n');
        }
    }
}

fn kind_of(stream: &(impl AsFd + IsTerminal)) -> SinkKind {
    use nix::sys::stat::{SFlag, fstat};
    let is_file = |mode| SFlag::from_bits_truncate(mode) & SFlag::S_IFMT == SFlag::S_IFREG;
    if stream.is_terminal() {
        SinkKind::Terminal
    } else if fstat(stream).is_ok_and(|status| is_file(status.st_mode)) {
        SinkKind::File
    } else {
        SinkKind::Pipe
    }
}

fn is_same_file(one: impl AsFd, other: impl AsFd) -> bool {
    use nix::sys::stat::fstat;
    match (fstat(one), fstat(other)) {
        (Ok(one), Ok(other)) => (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino),
        // At least one of them is closed.
        _ => false,
    }
}

/// Writes straight to the descriptor, waiting where it is non-blocking: std's own streams would be locked by a
/// writer that is blocked, and then block the exit of the process.
struct Unbuffered(Stream);

impl Write for Unbuffered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
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

    /// Takes what it is given, or nothing.
    enum Sink {
        Open(mpsc::Sender<String>),
        Full,
        Closed,
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match self {
                Self::Open(sender) => sender
                    .send(String::from_utf8_lossy(bytes).into_owned())
                    .map_err(io::Error::other)?,
                Self::Full => return Err(io::Error::from_raw_os_error(libc::ENOSPC)),
                Self::Closed => return Err(io::ErrorKind::BrokenPipe.into()),
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn piece(stream: Stream, id: u64, text: &str) -> Piece {
        let (text, continues) = text.strip_prefix('+').map_or((text, false), |text| (text, true));
        Piece {
            source: Source { stream, id },
            prefix: format!("[{id}] ").into(),
            bytes: text.into(),
            continues,
        }
    }

    /// What pieces come to; those that go on with a line begin with a plus sign.
    fn written(pieces: &[(u64, &str)]) -> String {
        let (mut pen, mut out) = (Pen::default(), Vec::new());
        for (id, text) in pieces {
            pen.write(&piece(Stream::Stdout, *id, text), &mut out);
        }
        String::from_utf8(out).unwrap()
    }

    /// What arrives on standard error when three lines are written to a standard output of this kind.
    fn stderr_beside(stdout: Sink) -> String {
        let (sender, stderr) = mpsc::channel();
        let mut sinks = Sinks::new(
            [Box::new(stdout), Box::new(Sink::Open(sender))],
            [SinkKind::Pipe; 2],
            false,
        );
        sinks.write(&[piece(Stream::Stderr, 0, "asks:")]);
        for _ in 0..3 {
            sinks.write(&[piece(Stream::Stdout, 0, "line\n")]);
        }
        sinks.end_lines();
        drop(sinks);
        stderr.iter().collect()
    }

    #[test]
    fn what_a_stream_does_not_take_is_told_once_on_the_other() {
        insta::assert_snapshot!(stderr_beside(Sink::Full), @r"
        [0] asks:
        [ddp-run] cannot write to standard output: No space left on device (os error 28); its output is lost, and the job continues
        [ddp-run]   hint: `--log-dir` also writes all output to files
        ");
        assert_eq!(stderr_beside(Sink::Closed), "[0] asks:\n");
    }

    #[test]
    fn streams_of_one_place_end_each_others_lines() {
        for (together, expected) in [(true, "[0] asks:\n[0] line\n"), (false, "[0] asks:[0] line\n")] {
            let (sender, place) = mpsc::channel();
            let writers: [Box<dyn Write + Send>; 2] =
                [Box::new(Sink::Open(sender.clone())), Box::new(Sink::Open(sender))];
            let mut sinks = Sinks::new(writers, [SinkKind::Terminal; 2], together);
            sinks.write(&[
                piece(Stream::Stderr, 0, "asks:"),
                piece(Stream::Stdout, 0, "line\n"),
            ]);
            drop(sinks);
            assert_eq!(place.iter().collect::<String>(), expected);
        }
    }

    #[test]
    fn a_line_goes_on_where_it_stopped() {
        let pieces = [(0, "(Pdb) "), (0, "+x = 1\n\n(Pdb) ")];
        assert_eq!(written(&pieces), "[0] (Pdb) x = 1\n[0]\n[0] (Pdb) ");
    }

    #[test]
    fn a_line_in_between_begins_anew_and_so_does_what_it_interrupted() {
        let pieces = [(0, "loading ..."), (1, "ready\n"), (0, "+ done\n"), (1, "go\n")];
        assert_eq!(
            written(&pieces),
            "[0] loading ...\n[1] ready\n[0]  done\n[1] go\n"
        );
    }

    #[test]
    fn a_line_that_was_ended_by_others_is_not_ended_again() {
        for end in ["+\n", "+\r\n"] {
            let pieces = [(0, "100%"), (1, "7%"), (0, end), (1, "+\n")];
            assert_eq!(written(&pieces), "[0] 100%\n[1] 7%\n");
        }
        let with_more = [(0, "100%"), (1, "ready\n"), (0, "+\nmore\n")];
        assert_eq!(written(&with_more), "[0] 100%\n[1] ready\n[0] more\n");
    }

    #[test]
    fn a_bar_is_drawn_over_itself_and_never_over_another_one() {
        let pieces = [(0, "1%"), (0, "+\r2%"), (1, "1%"), (0, "+\r3%"), (0, "+\r4%\r\n")];
        assert_eq!(written(&pieces), "[0] 1%\r[0] 2%\n[1] 1%\n[0] 3%\r[0] 4%\r\n");
    }
}
