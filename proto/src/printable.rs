//! A peer's text without control characters, for a terminal, a page or a log.
//!
//! A peer chooses its host name, role and messages. A control character in them could move a terminal's cursor, change its
//! title or hide other text. Whatever prints such text passes it through this module; a worker's own output stays as it is.

use std::borrow::Cow;
use std::iter::Peekable;

/// Stands for a control character.
const REPLACEMENT: char = '\u{fffd}';

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
    let mut clean = String::with_capacity(words.len());
    let mut chars = words.chars().peekable();
    while let Some(c) = chars.next() {
        if is_good(c) {
            clean.push(c);
        } else if c != '\u{1b}' || !skip_colour(&mut chars) {
            clean.push(REPLACEMENT);
        }
    }
    Cow::Owned(clean)
}

/// C0, DEL and C1; characters that change the direction of text, and those that some terminals take for a line end.
fn is_control(c: char) -> bool {
    let changes_direction =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || changes_direction || matches!(c, '\u{2028}' | '\u{2029}')
}

/// Skips the rest of `ESC [ 1 ; 31 m`, as programs write that colour their messages; false if it is anything else.
fn skip_colour(chars: &mut Peekable<std::str::Chars<'_>>) -> bool {
    let mut ahead = chars.clone();
    if ahead.next() != Some('[') {
        return false;
    }
    let parameter = |c: &char| c.is_ascii_digit() || matches!(c, ';' | ':');
    while ahead.next_if(parameter).is_some() {}
    let is_colour = ahead.next() == Some('m');
    if is_colour {
        *chars = ahead;
    }
    is_colour
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
}
