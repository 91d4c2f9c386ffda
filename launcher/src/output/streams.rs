//! Standard output and standard error of the launcher, which may lead to one place.
//!
//! A line is usually written whole. A prompt, or a progress bar, is shown before its line has an end. Then the line is
//! open: its worker continues it, and any other writer ends it first.

use std::fmt;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;

use ddp_proto::printable::Look;
use nix::sys::stat::{FileStat, SFlag, fstat};

/// Prefix of the launcher's own messages.
pub(crate) const OWN_PREFIX: &str = "[ddp-run] ";

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
    /// The stream that shows it.
    pub(crate) stream: Stream,
    /// The global rank, or `u64::MAX` for the launcher.
    pub(crate) id: u64,
}

/// Whole lines and updates of one source, then perhaps a line without its end.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub(crate) source: Source,
    /// Precedes each line and update.
    pub(crate) prefix: Arc<str>,
    /// `\n` ends a line; `\r` ends an update, which the next one overwrites.
    pub(crate) bytes: Vec<u8>,
    /// The first bytes belong to a line whose beginning was in an earlier chunk.
    pub(crate) continues: bool,
}

impl Stream {
    pub(crate) const BOTH: [Self; 2] = [Self::Stdout, Self::Stderr];

    pub(crate) const fn other(self) -> Self {
        Self::BOTH[1 - self as usize]
    }

    /// In names of files.
    pub(crate) const fn name(self) -> &'static str {
        ["stdout", "stderr"][self as usize]
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "standard {}", ["output", "error"][*self as usize])
    }
}

/// Standard output and standard error, in this order.
pub(crate) struct Output {
    pub(crate) writers: [Box<dyn Write + Send>; 2],
    /// Which of them lead to a regular file.
    pub(crate) is_file: [bool; 2],
    /// Both lead to the same file, pipe or terminal.
    pub(crate) is_one_place: bool,
    /// How our own text looks there.
    pub(crate) looks: [Look; 2],
}

impl Output {
    /// The process's own streams.
    pub(crate) fn standard() -> Self {
        let (stdout, stderr) = (io::stdout(), io::stderr());
        Self {
            writers: [
                Box::new(Unbuffered(io::stdout())),
                Box::new(Unbuffered(io::stderr())),
            ],
            is_file: [is_file(&stdout), is_file(&stderr)],
            is_one_place: is_same_file(&stdout, &stderr),
            looks: [Look::of(&stdout), Look::of(&stderr)],
        }
    }
}

/// Position in the last line that was written.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    /// The source of the line that has no end yet.
    open: Option<Source>,
    /// The last byte was `\r`.
    returned: bool,
}

impl Cursor {
    /// Appends what `chunk` adds behind everything written before.
    pub(crate) fn write(&mut self, chunk: &Chunk, out: &mut Vec<u8>) {
        let (prefix, mut bytes) = (chunk.prefix.as_bytes(), chunk.bytes.as_slice());
        let goes_on = chunk.continues && self.open == Some(chunk.source);
        if chunk.continues && !goes_on {
            // The chunk in between already ended this line.
            let mut ends = [&b"\n"[..], b"\r\n", b"\r"].into_iter();
            bytes = ends.find_map(|end| bytes.strip_prefix(end)).unwrap_or(bytes);
            if bytes.is_empty() {
                return;
            }
        }
        if !goes_on {
            self.end_line(out);
        }
        let mut begins = !goes_on || self.returned;
        for part in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            match part {
                b"\n" if self.returned => {}
                b"\n" if begins => out.extend_from_slice(prefix.trim_ascii_end()),
                _ if begins => out.extend_from_slice(prefix),
                _ => {}
            }
            out.extend_from_slice(part);
            self.returned = part.ends_with(b"\r");
            begins = self.returned || part.ends_with(b"\n");
        }
        self.open = (!bytes.ends_with(b"\n")).then_some(chunk.source);
    }

    /// Ends the line if it is open.
    pub(crate) fn end_line(&mut self, out: &mut Vec<u8>) {
        self.returned = false;
        if self.open.take().is_some() {
            out.push(b'\n');
        }
    }
}

fn is_file(stream: impl AsFd) -> bool {
    let is_file = |mode| SFlag::from_bits_truncate(mode) & SFlag::S_IFMT == SFlag::S_IFREG;
    fstat(stream).is_ok_and(|status| is_file(status.st_mode))
}

fn is_same_file(one: impl AsFd, other: impl AsFd) -> bool {
    let id = |status: FileStat| (status.st_dev, status.st_ino);
    let (one, other) = (fstat(one).map(id), fstat(other).map(id));
    // One that is closed has no status.
    one.is_ok() && one == other
}

/// Writes straight to the descriptor, waiting where it is non-blocking: std's own streams would be locked by a
/// writer that is blocked, and then block the exit of the process.
struct Unbuffered<F>(F);

impl<F: AsFd> Write for Unbuffered<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let fd = self.0.as_fd();
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
    use super::*;

    fn chunk(id: u64, text: &str) -> Chunk {
        let (text, continues) = text.strip_prefix('+').map_or((text, false), |text| (text, true));
        let stream = Stream::Stdout;
        Chunk {
            source: Source { stream, id },
            prefix: format!("[{id}] ").into(),
            bytes: text.into(),
            continues,
        }
    }

    /// Writes chunks; a plus sign marks one that continues a line.
    fn written(chunks: &[(u64, &str)]) -> String {
        let (mut cursor, mut out) = (Cursor::default(), Vec::new());
        for (id, text) in chunks {
            cursor.write(&chunk(*id, text), &mut out);
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_line_goes_on_where_it_stopped() {
        let chunks = [(0, "(Pdb) "), (0, "+x = 1\n\n(Pdb) ")];
        assert_eq!(written(&chunks), "[0] (Pdb) x = 1\n[0]\n[0] (Pdb) ");
    }

    #[test]
    fn a_line_in_between_begins_anew_and_so_does_what_it_interrupted() {
        let chunks = [(0, "loading ..."), (1, "ready\n"), (0, "+ done\n"), (1, "go\n")];
        assert_eq!(
            written(&chunks),
            "[0] loading ...\n[1] ready\n[0]  done\n[1] go\n"
        );
    }

    #[test]
    fn a_line_that_was_ended_by_others_is_not_ended_again() {
        for end in ["+\n", "+\r\n"] {
            let chunks = [(0, "100%"), (1, "7%"), (0, end), (1, "+\n")];
            assert_eq!(written(&chunks), "[0] 100%\n[1] 7%\n");
        }
        let with_more = [(0, "100%"), (1, "ready\n"), (0, "+\nmore\n")];
        assert_eq!(written(&with_more), "[0] 100%\n[1] ready\n[0] more\n");
    }

    #[test]
    fn a_bar_is_drawn_over_itself_and_never_over_another_one() {
        let chunks = [
            (0, "1%\r"),
            (0, "+2%"),
            (1, "1%"),
            (0, "+\r3%"),
            (0, "+\r4%\r"),
            (0, "+\n"),
        ];
        assert_eq!(written(&chunks), "[0] 1%\r[0] 2%\n[1] 1%\n[0] 3%\r[0] 4%\r\n");
    }
}
