//! Cuts a stream of bytes into lines for the console.

/// A longer line is cut, so that one worker cannot make the launcher keep an endless line in memory.
pub(crate) const MAX_LINE_BYTES: usize = 64 << 10;

/// Cuts at `\n` and `\r`; keeps what has no end yet.
#[derive(Debug, Default)]
pub(crate) struct LineSplitter {
    pending: Vec<u8>,
    /// The last piece ended with `\r`: a `\n` that follows belongs to it.
    after_return: bool,
}

impl LineSplitter {
    /// Passes each line that `bytes` completes to `emit`, its terminator included. A line that was cut for its
    /// length gets a `\n`. The `\n` of a `\r\n` is passed as an empty slice: it ends the line passed before.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut emit: impl FnMut(&[u8])) {
        while let Some(&first) = bytes.first() {
            if std::mem::take(&mut self.after_return) && first == b'\n' {
                emit(b"");
                bytes = &bytes[1..];
                continue;
            }
            let room = MAX_LINE_BYTES - self.pending.len();
            let end = bytes
                .iter()
                .take(room)
                .position(|byte| matches!(byte, b'\n' | b'\r'));
            let taken = end.map_or_else(|| bytes.len().min(room), |end| end + 1);
            self.pending.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if let Some(&last @ (b'\n' | b'\r')) = self.pending.last() {
                self.after_return = last == b'\r';
                emit(&self.pending);
                self.pending.clear();
            } else if self.pending.len() == MAX_LINE_BYTES {
                self.flush(&mut emit);
            }
        }
    }

    /// Passes what is left at the end of the stream as a line of its own.
    pub(crate) fn flush(&mut self, mut emit: impl FnMut(&[u8])) {
        if !self.pending.is_empty() {
            self.pending.push(b'\n');
            emit(&self.pending);
            self.pending.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        for chunk in chunks {
            splitter.push(chunk, |line| lines.push(line.to_vec()));
        }
        splitter.flush(|line| lines.push(line.to_vec()));
        lines
    }

    #[test]
    fn lines_are_whole_whatever_the_chunks() {
        let text = b"one\ntwo\r\nthree\r 50%\r100%\n\nlast";
        let whole = split(&[text]);
        let expected: [&[u8]; 8] = [
            b"one\n", b"two\r", b"", b"three\r", b" 50%\r", b"100%\n", b"\n", b"last\n",
        ];
        assert_eq!(whole, expected);
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(split(&bytes), whole);
    }

    #[test]
    fn endless_lines_are_cut() {
        let endless = vec![b'x'; 3 * MAX_LINE_BYTES + 5];
        let lines = split(&[&endless]);
        assert_eq!(lines.len(), 4);
        assert!(
            lines
                .iter()
                .all(|line| line.len() <= MAX_LINE_BYTES + 1 && line.ends_with(b"\n"))
        );
        let total: usize = lines.iter().map(|line| line.len() - 1).sum();
        assert_eq!(total, endless.len());
    }

    #[test]
    fn bytes_that_are_no_text_pass() {
        assert_eq!(split(&[b"\xff\xfe\0\n"]), [b"\xff\xfe\0\n"]);
    }
}
