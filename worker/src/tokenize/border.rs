//! Where a text may be cut without another token.
//!
//! GPT-2 splits a text by a pattern before it merges bytes, and merges nothing across a split. Every alternative of that
//! pattern which holds white space has it at its start, or is nothing else; so a split is at every place where white
//! space follows something else, and what is left of such a place is split as if the text ended there: the pattern looks
//! ahead behind white space only. A text in pieces that begin with the white space has the tokens of the whole.

/// The last place in `bytes` before which a cut changes no token of GPT-2: white space of ASCII that follows a character
/// which is none. None if there is no such place behind the first byte.
pub(super) fn last_border(bytes: &[u8]) -> Option<usize> {
    (1..bytes.len())
        .rev()
        .find(|&at| is_space(bytes[at]) && ends_with_black(&bytes[..at]))
}

/// White space of one byte.
fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// True if the last character of `bytes` is not white space. Bytes that are no UTF-8 have no characters.
fn ends_with_black(bytes: &[u8]) -> bool {
    let last = bytes
        .iter()
        .rposition(|byte| !is_continuation(*byte))
        .unwrap_or(0);
    // Longer ones than any character are not looked through.
    let last = last.max(bytes.len().saturating_sub(4));
    let character = std::str::from_utf8(&bytes[last..]).ok();
    character
        .and_then(|text| text.chars().next_back())
        .is_some_and(|character| !character.is_whitespace())
}

/// A byte in the middle of a character.
fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_border_is_where_white_space_follows_something_else() {
        let table = [
            ("a b", Some(1)),
            ("a  b", Some(1)),
            ("a b c", Some(3)),
            (" ab", None),
            ("ab", None),
            ("a\n", Some(1)),
            ("", None),
            ("漢字 x", Some(6)),
            // An ideographic space and a no-break space are white space of more than one byte.
            ("漢\u{3000} x", None),
            ("a\u{a0} x", None),
        ];
        for (text, expected) in table {
            assert_eq!(last_border(text.as_bytes()), expected, "{text:?}");
        }
        assert_eq!(last_border(b"\xff\xff x"), None);
        assert_eq!(last_border(b"\x80\x80\x80\x80\x80\x80 x"), None);
    }
}
