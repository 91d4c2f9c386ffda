//! Pieces of the workers' output, and how they are joined on the console.
//!
//! A line is usually written whole. A prompt, or a progress bar, is shown before its line has an end: then that line is
//! open, and the next writer either goes on with it or begins a new one. Only the writer of the console knows which,
//! for only it knows what came last.

use std::sync::Arc;

/// A stream of a worker, by an arbitrary number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source(pub(crate) u64);

/// How a piece begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// With a line of its own; the prefix is among its bytes.
    Fresh,
    /// Behind what the same source has shown of its line.
    Continued,
    /// Over what the same source has shown of its line.
    Returned,
}

/// Some bytes of one source: any number of whole lines, then perhaps a line without its end.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) source: Source,
    /// Precedes its lines. Needed where a line is continued that others have come in between of.
    pub(crate) prefix: Arc<str>,
    pub(crate) start: Start,
    pub(crate) bytes: Vec<u8>,
    /// The last line has no end yet.
    pub(crate) open: bool,
}

impl Piece {
    /// How many lines it is of, the last one with its end or without.
    pub(crate) fn lines(&self) -> u64 {
        self.bytes.split_inclusive(|byte| *byte == b'\n').count() as u64
    }
}

/// Where the last line of the console stands.
#[derive(Debug, Default)]
pub(crate) struct Pen {
    /// Whose line has no end yet.
    open: Option<Source>,
}

impl Pen {
    /// Whose line has no end yet, so that it can go on.
    pub(crate) fn open(&self) -> Option<Source> {
        self.open
    }

    /// Adds what the piece comes to, after all that was written before it, to `out`.
    pub(crate) fn write(&mut self, piece: &Piece, out: &mut Vec<u8>) {
        let goes_on = self.open == Some(piece.source);
        let mut bytes = piece.bytes.as_slice();
        match piece.start {
            Start::Continued if goes_on => {}
            Start::Returned if goes_on => {
                out.push(b'\r');
                out.extend_from_slice(piece.prefix.as_bytes());
            }
            Start::Fresh => self.end_line(out),
            Start::Continued | Start::Returned => {
                // The piece in between has ended the line already.
                let end = [&b"\n"[..], b"\r\n"]
                    .into_iter()
                    .find_map(|end| bytes.strip_prefix(end));
                match end {
                    Some(b"") => return,
                    Some(rest) => {
                        bytes = rest;
                        self.end_line(out);
                    }
                    None => {
                        self.end_line(out);
                        out.extend_from_slice(piece.prefix.as_bytes());
                    }
                }
            }
        }
        out.extend_from_slice(bytes);
        self.open = piece.open.then_some(piece.source);
    }

    /// Ends the line, if it is open.
    pub(crate) fn end_line(&mut self, out: &mut Vec<u8>) {
        if self.open.take().is_some() {
            out.push(b'\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(rank: u64, start: Start, text: &str) -> Piece {
        Piece {
            source: Source(rank),
            prefix: format!("[{rank}] ").into(),
            start,
            bytes: text.into(),
            open: !text.ends_with('\n'),
        }
    }

    fn written(pieces: &[Piece]) -> String {
        let (mut pen, mut out) = (Pen::default(), Vec::new());
        for piece in pieces {
            pen.write(piece, &mut out);
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_line_goes_on_where_it_stopped() {
        let prompt = piece(0, Start::Fresh, "[0] (Pdb) ");
        let answer = piece(0, Start::Continued, "x = 1\n[0] (Pdb) ");
        assert_eq!(written(&[prompt, answer]), "[0] (Pdb) x = 1\n[0] (Pdb) ");
    }

    #[test]
    fn a_line_in_between_begins_anew_and_so_does_what_it_interrupted() {
        let pieces = [
            piece(0, Start::Fresh, "[0] loading ..."),
            piece(1, Start::Fresh, "[1] ready\n"),
            piece(0, Start::Continued, " done\n"),
            piece(1, Start::Fresh, "[1] go\n"),
        ];
        assert_eq!(
            written(&pieces),
            "[0] loading ...\n[1] ready\n[0]  done\n[1] go\n"
        );
    }

    #[test]
    fn a_line_that_was_ended_by_others_is_not_ended_again() {
        for end in ["\n", "\r\n"] {
            let pieces = [
                piece(0, Start::Fresh, "[0] 100%"),
                piece(1, Start::Fresh, "[1] 7%"),
                piece(0, Start::Continued, end),
                piece(1, Start::Continued, "\n"),
            ];
            assert_eq!(written(&pieces), "[0] 100%\n[1] 7%\n");
        }
        let with_more = [
            piece(0, Start::Fresh, "[0] 100%"),
            piece(1, Start::Fresh, "[1] ready\n"),
            piece(0, Start::Continued, "\n[0] more\n"),
        ];
        assert_eq!(written(&with_more), "[0] 100%\n[1] ready\n[0] more\n");
    }

    #[test]
    fn a_bar_is_drawn_over_itself_and_never_over_another_one() {
        let pieces = [
            piece(0, Start::Fresh, "[0] 1%"),
            piece(0, Start::Returned, "2%"),
            piece(1, Start::Fresh, "[1] 1%"),
            piece(0, Start::Returned, "3%"),
            piece(0, Start::Returned, "4%\n"),
        ];
        assert_eq!(written(&pieces), "[0] 1%\r[0] 2%\n[1] 1%\n[0] 3%\r[0] 4%\n");
    }
}
