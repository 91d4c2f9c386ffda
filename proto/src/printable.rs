//! Text for people: a peer's without control characters, and our own as wide and as colourful as its terminal allows.
//!
//! A peer chooses its host name, role and messages. A control character in them could move a terminal's cursor, change its
//! title or hide other text. Whatever prints such text passes it through this module; a worker's own output stays as it is.

use std::borrow::Cow;
use std::os::fd::AsFd;

use anstream::stream::RawStream;
use anstream::{AutoStream, ColorChoice};
use terminal_size::terminal_size_of;

/// Stands for a control character.
const REPLACEMENT: &str = "\u{fffd}";
/// Words of our own text, and their colours: those of the parser of the command line. All but the last begin a line.
const MARKS: [(&str, &str); 4] = [
    ("error:", "1;31"),
    ("warning:", "1;33"),
    ("hint:", "32"),
    (RESTART, "1;33"),
];
const RESTART: &str = "restarting";
/// Colours of ranks.
const RANKS: [&str; 6] = ["36", "35", "32", "94", "96", "95"];

/// How our own text looks where a stream leads; by default as it is, as for a pipe or a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Look {
    /// Columns of the terminal.
    pub columns: Option<usize>,
    /// Colours are shown: not with `NO_COLOR`, for instance.
    pub has_colours: bool,
}

impl Look {
    /// For the place where this stream leads.
    pub fn of(stream: &(impl RawStream + AsFd)) -> Self {
        Self {
            columns: terminal_size_of(stream).map(|(width, _)| width.0.into()),
            has_colours: AutoStream::choice(stream) != ColorChoice::Never,
        }
    }

    /// Lines that stand behind a prefix of so many columns: broken between words, their marks in colour.
    pub fn apply(self, text: &str, prefix: usize) -> String {
        let width = self.columns.unwrap_or(usize::MAX).saturating_sub(prefix);
        let lines = text.split('\n').map(|line| self.marked(wrapped(line, width)));
        lines.collect::<Vec<_>>().join("\n")
    }

    fn marked(self, line: String) -> String {
        let has = |mark: &str| mark == RESTART || line.trim_start().starts_with(mark);
        match MARKS.into_iter().find(|(mark, _)| has(mark)) {
            Some((mark, colour)) => line.replacen(mark, &self.painted(mark, colour), 1),
            None => line,
        }
    }

    /// A prefix in the colour of its rank; the launcher's own has none, and is bold.
    pub fn prefix(self, prefix: &str, rank: Option<u32>) -> String {
        let text = prefix.trim_end();
        let colour = rank.map_or("1", |rank| RANKS[rank as usize % RANKS.len()]);
        self.painted(text, colour) + &prefix[text.len()..]
    }

    fn painted(self, text: &str, colour: &str) -> String {
        if !self.has_colours || text.is_empty() {
            return text.to_owned();
        }
        format!("\x1b[{colour}m{text}\x1b[0m")
    }
}

/// A line, broken between words where it would be longer than `width`. The rest hangs below the value of a row
/// (`name   value`), or else two columns further in. A line with flags stays whole, to be copied.
fn wrapped(line: &str, width: usize) -> String {
    let text = line.trim_start();
    let has_flags = text.starts_with("--") || text.contains(" --");
    let value = text.split_once("  ").map_or("", |(_, value)| value.trim_start());
    let hang = Some(line.len() - value.len()).filter(|hang| *hang < width / 2);
    let hang = hang.unwrap_or(line.len() - text.len() + 2);
    let (mut wrapped, mut column) = (String::new(), 0);
    for word in line.split_inclusive(' ') {
        let end = column + word.trim_end().chars().count();
        if end > width && column > hang && !has_flags {
            wrapped.truncate(wrapped.trim_end().len());
            wrapped.extend(["\n", &" ".repeat(hang)]);
            column = hang;
        }
        wrapped.push_str(word);
        column += word.chars().count();
    }
    wrapped
}

/// Text of several lines: keeps line ends and tabs, drops colours, replaces every other control character.
pub fn text(words: &str) -> Cow<'_, str> {
    printable(words, |c| matches!(c, '\n' | '\t'))
}

/// A name or a part of a line: replaces line ends too.
pub fn line(words: &str) -> Cow<'_, str> {
    printable(words, |c| c == '\t')
}

/// True if the text is fit for a name: it has no control character.
pub fn is_name(text: &str) -> bool {
    !text.chars().any(is_control)
}

fn printable(words: &str, stays: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_good = |c: char| stays(c) || !is_control(c);
    if words.chars().all(is_good) {
        return Cow::Borrowed(words);
    }
    let mut parts = words.split('\u{1b}');
    let mut clean = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match after_colour(part) {
            Some(text) => clean.push_str(text),
            None => clean.extend([REPLACEMENT, part]),
        }
    }
    let is_bad = |c: char| !is_good(c);
    Cow::Owned(clean.replace(is_bad, REPLACEMENT))
}

/// C0, DEL and C1; characters that change the direction of text, and those that some terminals take for a line end.
fn is_control(c: char) -> bool {
    let changes_direction =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || changes_direction || matches!(c, '\u{2028}' | '\u{2029}')
}

/// What follows `[1;31m`, which programs that colour their messages write behind ESC; none for anything else.
fn after_colour(part: &str) -> Option<&str> {
    let is_parameter = |c: char| c.is_ascii_digit() || matches!(c, ';' | ':');
    part.strip_prefix('[')?
        .trim_start_matches(is_parameter)
        .strip_prefix('m')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced_and_words_are_not() {
        for (words, as_text, as_line) in [
            ("node-1", "node-1", "node-1"),
            ("größe 模型 🚀", "größe 模型 🚀", "größe 模型 🚀"),
            ("a\nb\tc", "a\nb\tc", "a\u{fffd}b\tc"),
            ("a\r\x1b[2Jb", "a\u{fffd}\u{fffd}[2Jb", "a\u{fffd}\u{fffd}[2Jb"),
            ("\x1b[1;31mred\x1b[0m", "red", "red"),
            (
                "\x1b]0;title\x07",
                "\u{fffd}]0;title\u{fffd}",
                "\u{fffd}]0;title\u{fffd}",
            ),
            (
                "\u{9b}2J\u{7f}\0",
                "\u{fffd}2J\u{fffd}\u{fffd}",
                "\u{fffd}2J\u{fffd}\u{fffd}",
            ),
            ("exe\u{202e}gpj", "exe\u{fffd}gpj", "exe\u{fffd}gpj"),
            ("\x1b[", "\u{fffd}[", "\u{fffd}["),
        ] {
            assert_eq!((&*text(words), &*line(words)), (as_text, as_line), "{words:?}");
            assert_eq!(
                is_name(words),
                words == as_line && !words.contains('\t'),
                "{words:?}"
            );
        }
    }

    #[test]
    fn own_text_is_as_wide_as_its_terminal_and_breaks_between_words() {
        let look = |columns| Look {
            columns,
            has_colours: false,
        };
        let row = "memory per rank   parameters 3.1 MiB, gradients 3.1 MiB, optimizer 6.2 MiB\nerror: no /a/long/path/that/nobody/breaks/in/two/pieces\n  hint: make it, or choose another path\n";
        assert_eq!(
            look(Some(44)).apply(row, 4),
            "memory per rank   parameters 3.1 MiB,\n                  gradients 3.1 MiB,\n                  \
             optimizer 6.2 MiB\nerror: no\n  /a/long/path/that/nobody/breaks/in/two/pieces\n  hint: make it, or \
             choose another path\n"
        );
        assert_eq!(look(None).apply(row, 4), row, "in a pipe");
    }

    #[test]
    fn marks_restarts_and_prefixes_have_colours() {
        let look = Look {
            columns: None,
            has_colours: true,
        };
        let text = "error: no data\n  hint: add some\nrank 0 failed; restarting now (1/3)\nno hint: here";
        assert_eq!(
            look.apply(text, 0),
            "\x1b[1;31merror:\x1b[0m no data\n  \x1b[32mhint:\x1b[0m add some\nrank 0 failed; \
             \x1b[1;33mrestarting\x1b[0m now (1/3)\nno hint: here"
        );
        assert_eq!(look.prefix("[7] ", Some(7)), "\x1b[35m[7]\x1b[0m ");
        assert_eq!(look.prefix("", Some(7)), "");
        assert_eq!(Look::default().prefix("[7] ", Some(7)), "[7] ");
    }
}
