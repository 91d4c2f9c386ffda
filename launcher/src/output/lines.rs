//! Cuts a stream of bytes into lines, and lines where they are written over.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A longer line is cut, so that one worker cannot make the launcher keep an endless line in memory.
pub(crate) const MAX_LINE_BYTES: usize = 1 << 20;
/// The same while all streams together keep more than [`MAX_PENDING_BYTES`].
const MAX_LINE_BYTES_WHEN_FULL: usize = 64 << 10;
/// Of all lines that have no end yet.
const MAX_PENDING_BYTES: usize = 64 << 20;
/// Ends the first part of a line that is cut; its other parts follow as lines of their own.
const CUT_MARK: &[u8] = b" [line too long: continued below]";

/// A line, or the part of one between two `\r`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    /// Without what ends it.
    pub(crate) text: &'a [u8],
    /// It is written over what the line showed before: `\r` came in front of it.
    pub(crate) returns: bool,
    /// By `\n`, the end of the stream, or a length that is too much; else by `\r`, and the line goes on from its
    /// beginning.
    pub(crate) ended: bool,
}

/// Cuts at `\n` and `\r`; keeps what has no end yet. A `\r` belongs to what follows: programs write it first, or last.
#[derive(Debug, Default)]
pub(crate) struct LineSplitter {
    pending: Vec<u8>,
    returns: bool,
    /// A part of the present line was passed on already, because of its length.
    is_cut: bool,
    /// What all streams keep, this one included.
    total: Arc<AtomicUsize>,
    /// This one's part in it.
    counted: usize,
}

impl LineSplitter {
    /// For one of the streams that keep `total` together.
    pub(crate) fn new(total: Arc<AtomicUsize>) -> Self {
        Self {
            total,
            ..Self::default()
        }
    }

    /// Passes each line that `bytes` completes to `emit`. That of a `\n` right behind a `\r` is empty, and returns.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut emit: impl FnMut(Line<'_>)) {
        let others = self.total.load(Ordering::Relaxed).saturating_sub(self.counted);
        let longest = if others + self.pending.len() < MAX_PENDING_BYTES {
            MAX_LINE_BYTES
        } else {
            MAX_LINE_BYTES_WHEN_FULL
        };
        while !bytes.is_empty() {
            let room = longest.saturating_sub(self.pending.len());
            let end = bytes
                .iter()
                .take(room + 1)
                .position(|byte| matches!(byte, b'\n' | b'\r'));
            if end.is_none() && bytes.len() <= room {
                self.pending.extend_from_slice(bytes);
                break;
            }
            let (text, rest) = bytes.split_at(end.unwrap_or(room));
            bytes = &rest[usize::from(end.is_some())..];
            let ended = end.is_none() || rest[0] == b'\n';
            let returns = std::mem::replace(&mut self.returns, !ended);
            let mark = if end.is_none() && !self.is_cut {
                CUT_MARK
            } else {
                b""
            };
            self.is_cut = end.is_none() || self.is_cut && !ended;
            if self.pending.is_empty() && mark.is_empty() {
                emit(Line { text, returns, ended });
            } else {
                self.pending.extend_from_slice(text);
                self.pending.extend_from_slice(mark);
                let text = &self.pending;
                emit(Line { text, returns, ended });
                self.pending.clear();
                self.pending.shrink_to(MAX_LINE_BYTES_WHEN_FULL);
            }
        }
        self.count(self.pending.len());
    }

    /// What has no end yet, and whether it is written over something.
    pub(crate) fn unfinished(&self) -> (&[u8], bool) {
        (&self.pending, self.returns)
    }

    /// Passes what is left at the end of the stream.
    pub(crate) fn finish(mut self, emit: impl FnOnce(Line<'_>)) {
        self.count(0);
        if !self.pending.is_empty() || self.returns {
            emit(Line {
                text: &self.pending,
                returns: self.returns,
                ended: true,
            });
        }
    }

    fn count(&mut self, bytes: usize) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
        self.total.fetch_sub(self.counted, Ordering::Relaxed);
        self.counted = bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each segment as it would be written: `\r` in front of one that returns, `\n` where the line ends.
    fn split(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut splitter = LineSplitter::default();
        let mut seen = Vec::new();
        let mut emit = |line: Line<'_>| {
            let mut bytes = Vec::from(if line.returns { &b"\r"[..] } else { b"" });
            bytes.extend_from_slice(line.text);
            bytes.extend_from_slice(if line.ended { b"\n" } else { b"" });
            seen.push(bytes);
        };
        for chunk in chunks {
            splitter.push(chunk, &mut emit);
        }
        splitter.finish(&mut emit);
        seen
    }

    #[test]
    fn lines_are_whole_whatever_the_chunks() {
        let text = b"one\ntwo\r\nthree\r 50%\r100%\n\n\r5%\r6%\nlast";
        let whole = split(&[text]);
        let expected: [&[u8]; 11] = [
            b"one\n",
            b"two",
            b"\r\n",
            b"three",
            b"\r 50%",
            b"\r100%\n",
            b"\n",
            b"",
            b"\r5%",
            b"\r6%\n",
            b"last\n",
        ];
        assert_eq!(whole, expected);
        assert_eq!(
            whole.concat(),
            b"one\ntwo\r\nthree\r 50%\r100%\n\n\r5%\r6%\nlast\n"
        );
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(split(&bytes), whole);
    }

    #[test]
    fn a_line_of_a_mebibyte_stays_whole() {
        let mut line = vec![b'x'; MAX_LINE_BYTES];
        line.push(b'\n');
        for chunks in [vec![&line[..]], line.chunks(1000).collect()] {
            assert!(split(&chunks) == [&line[..]]);
        }
    }

    #[test]
    fn an_endless_line_is_cut_and_marked_once() {
        let endless = vec![b'x'; 3 * MAX_LINE_BYTES + 5];
        for chunks in [vec![&endless[..]], endless.chunks(1000).collect()] {
            let lines = split(&[&chunks[..], &[b"\nnext"]].concat());
            let lengths: Vec<usize> = lines.iter().map(|line| line.len() - 1).collect();
            let (longest, mark) = (MAX_LINE_BYTES, CUT_MARK.len());
            assert_eq!(lengths, [longest + mark, longest, longest, 5, 4]);
            assert!(lines[0].ends_with(&[CUT_MARK, b"\n"].concat()));
        }
    }

    #[test]
    fn what_all_streams_keep_is_bounded() {
        let total = Arc::<AtomicUsize>::default();
        let mut splitter = LineSplitter::new(total.clone());
        let half = vec![b'x'; MAX_LINE_BYTES / 2];
        splitter.push(&half, |_| panic!("there is room"));
        assert_eq!(total.load(Ordering::Relaxed), half.len());
        total.fetch_add(MAX_PENDING_BYTES, Ordering::Relaxed);
        splitter.push(b"y", |line| {
            assert_eq!(line.text.len(), half.len() + CUT_MARK.len());
        });
        assert_eq!(splitter.unfinished().0, b"y");
        splitter.finish(|_| ());
        assert_eq!(total.load(Ordering::Relaxed), MAX_PENDING_BYTES);
    }

    #[test]
    fn what_has_no_end_yet_can_be_seen() {
        let mut splitter = LineSplitter::default();
        splitter.push(b"one\n(Pdb) ", |_| ());
        assert_eq!(splitter.unfinished(), (&b"(Pdb) "[..], false));
        splitter.push(b"c\r", |_| ());
        assert_eq!(splitter.unfinished(), (&b""[..], true));
    }

    #[test]
    fn bytes_that_are_no_text_pass() {
        assert_eq!(split(&[b"\xff\xfe\0\n"]), [b"\xff\xfe\0\n"]);
    }
}
