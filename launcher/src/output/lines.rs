//! Cuts a stream of bytes into lines, and lines into the updates of a progress bar.

/// A longer line is cut, so that one worker cannot make the launcher keep an endless line in memory.
pub(crate) const MAX_LINE_BYTES: usize = 1 << 20;
/// Ends the first part of a line that is cut; its other parts follow as lines of their own.
const CUT_MARK: &[u8] = b" [line too long: continued below]";

/// What ends a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// `\n`, the end of the stream, or the length limit.
    Line,
    /// `\r`: the next segment overwrites this one.
    Update,
    /// Nothing yet.
    Unfinished,
}

impl End {
    /// The byte that ends the segment, if any.
    pub(crate) fn bytes(self) -> &'static [u8] {
        match self {
            Self::Line => b"\n",
            Self::Update => b"\r",
            Self::Unfinished => b"",
        }
    }
}

/// A line, an update within one, or the beginning of either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment<'a> {
    /// Without what ends it.
    pub(crate) text: &'a [u8],
    /// Bytes at the beginning of `text` that were passed on before, as unfinished.
    pub(crate) shown: usize,
    /// An update of the same line precedes it.
    pub(crate) overwrites: bool,
    pub(crate) end: End,
}

impl Segment<'_> {
    /// Something of its line was passed on before.
    pub(crate) fn continues(&self) -> bool {
        self.overwrites || self.shown > 0
    }
}

/// Cuts at `\n` and `\r`; keeps the text that has no end yet. A `\r` with nothing before it is left out.
#[derive(Debug, Default)]
pub(crate) struct LineBuffer {
    pending: Vec<u8>,
    /// Bytes of `pending` that were passed on as unfinished.
    shown: usize,
    /// The last segment was an update.
    overwrites: bool,
    /// The length limit already cut the present line.
    is_cut: bool,
}

impl LineBuffer {
    /// Passes each segment that `bytes` completes to `emit`.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut emit: impl FnMut(&Segment<'_>)) {
        while !bytes.is_empty() {
            let room = MAX_LINE_BYTES.saturating_sub(self.pending.len());
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
            self.pending.extend_from_slice(text);
            if end.is_none() && !std::mem::replace(&mut self.is_cut, true) {
                self.pending.extend_from_slice(CUT_MARK);
            }
            let is_update = end.is_some() && rest[0] == b'\r';
            self.is_cut &= end.is_none() || is_update;
            if !is_update {
                self.emit(End::Line, &mut emit);
            } else if !self.pending.is_empty() {
                self.emit(End::Update, &mut emit);
            }
        }
    }

    fn emit(&mut self, end: End, emit: &mut impl FnMut(&Segment<'_>)) {
        emit(&Segment {
            text: &self.pending,
            shown: std::mem::take(&mut self.shown),
            overwrites: std::mem::replace(&mut self.overwrites, end == End::Update),
            end,
        });
        self.pending.clear();
    }

    /// Length of the unfinished text, if some of it was not passed on yet.
    pub(crate) fn unseen(&self) -> Option<usize> {
        (self.pending.len() > self.shown).then_some(self.pending.len())
    }

    /// The unfinished text, which then counts as passed on.
    pub(crate) fn show(&mut self) -> Segment<'_> {
        Segment {
            text: &self.pending,
            shown: std::mem::replace(&mut self.shown, self.pending.len()),
            overwrites: self.overwrites,
            end: End::Unfinished,
        }
    }

    /// Passes on what is left at the end of the stream.
    pub(crate) fn finish(mut self, mut emit: impl FnMut(&Segment<'_>)) {
        if !self.pending.is_empty() || self.overwrites {
            self.emit(End::Line, &mut emit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each segment with its end.
    fn split(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut buffer = LineBuffer::default();
        let mut seen = Vec::new();
        let mut emit = |segment: &Segment<'_>| seen.push([segment.text, segment.end.bytes()].concat());
        for chunk in chunks {
            buffer.push(chunk, &mut emit);
        }
        buffer.finish(&mut emit);
        seen
    }

    #[test]
    fn lines_are_whole_whatever_the_chunks() {
        let text = b"one\ntwo\r\nthree\r 50%\r100%\n\n\r5%\r6%\nlast";
        let whole = split(&[text]);
        let expected: [&[u8]; 10] = [
            b"one\n", b"two\r", b"\n", b"three\r", b" 50%\r", b"100%\n", b"\n", b"5%\r", b"6%\n", b"last\n",
        ];
        assert_eq!(whole, expected);
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
    fn unfinished_text_is_passed_on_once() {
        let mut buffer = LineBuffer::default();
        buffer.push(b"one\n(Pdb) ", |_| ());
        assert_eq!(buffer.unseen(), Some(6));
        assert_eq!(buffer.show().text, b"(Pdb) ");
        assert_eq!(buffer.unseen(), None);
        buffer.push(b"c\r", |segment| {
            assert_eq!((segment.text, segment.shown), (&b"(Pdb) c"[..], 6));
            assert!(segment.continues() && !segment.overwrites);
        });
        assert_eq!(buffer.unseen(), None);
    }

    #[test]
    fn bytes_that_are_no_text_pass() {
        assert_eq!(split(&[b"\xff\xfe\0\n"]), [b"\xff\xfe\0\n"]);
    }
}
