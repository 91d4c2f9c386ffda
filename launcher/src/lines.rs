//! Cuts a stream of bytes into lines, and lines where they are written over.

/// A longer line is cut, so that one worker cannot make the launcher keep an endless line in memory.
pub(crate) const MAX_LINE_BYTES: usize = 64 << 10;

/// A line, or the part of one between two `\r`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment<'a> {
    /// Without what ends it.
    pub(crate) text: &'a [u8],
    /// It is written over what the line showed before: `\r` came in front of it.
    pub(crate) returns: bool,
    pub(crate) end: End,
}

/// What ends a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// `\n`, the end of the stream, or a length that is too much.
    Newline,
    /// `\r`: the line goes on from its beginning.
    Return,
}

/// Cuts at `\n` and `\r`; keeps what has no end yet. A `\r` belongs to what follows: programs write it first, or last.
#[derive(Debug, Default)]
pub(crate) struct LineSplitter {
    pending: Vec<u8>,
    returns: bool,
}

impl LineSplitter {
    /// Passes each segment that `bytes` completes to `emit`. That of a `\n` right behind a `\r` is empty, and returns.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut emit: impl FnMut(Segment<'_>)) {
        while !bytes.is_empty() {
            let room = MAX_LINE_BYTES - self.pending.len();
            let found = bytes
                .iter()
                .take(room)
                .position(|byte| matches!(byte, b'\n' | b'\r'));
            let (text, rest) = bytes.split_at(found.unwrap_or_else(|| bytes.len().min(room)));
            let end = match found {
                Some(_) if rest[0] == b'\r' => End::Return,
                None if text.len() < room => {
                    self.pending.extend_from_slice(text);
                    return;
                }
                _ => End::Newline,
            };
            bytes = &rest[usize::from(found.is_some())..];
            let returns = std::mem::replace(&mut self.returns, end == End::Return);
            if self.pending.is_empty() {
                emit(Segment { text, returns, end });
            } else {
                self.pending.extend_from_slice(text);
                let text = &self.pending;
                emit(Segment { text, returns, end });
                self.pending.clear();
            }
        }
    }

    /// What has no end yet, and whether it is written over something.
    pub(crate) fn unfinished(&self) -> (&[u8], bool) {
        (&self.pending, self.returns)
    }

    /// Passes what is left at the end of the stream.
    pub(crate) fn finish(self, emit: impl FnOnce(Segment<'_>)) {
        if !self.pending.is_empty() || self.returns {
            emit(Segment {
                text: &self.pending,
                returns: self.returns,
                end: End::Newline,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each segment as it would be written: `\r` in front of one that returns, `\n` where the line ends.
    fn split(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut splitter = LineSplitter::default();
        let mut seen = Vec::new();
        let mut emit = |segment: Segment<'_>| {
            let mut bytes = Vec::from(if segment.returns { &b"\r"[..] } else { b"" });
            bytes.extend_from_slice(segment.text);
            bytes.extend_from_slice(if segment.end == End::Newline { b"\n" } else { b"" });
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
    fn endless_lines_are_cut() {
        let endless = vec![b'x'; 3 * MAX_LINE_BYTES + 5];
        for chunks in [vec![&endless[..]], endless.chunks(1000).collect()] {
            let lines = split(&chunks);
            assert_eq!(lines.len(), 4);
            let fits = |line: &Vec<u8>| line.len() <= MAX_LINE_BYTES + 1 && line.ends_with(b"\n");
            assert!(lines.iter().all(fits));
            let total: usize = lines.iter().map(|line| line.len() - 1).sum();
            assert_eq!(total, endless.len());
        }
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
