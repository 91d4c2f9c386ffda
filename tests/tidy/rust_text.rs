//! Just enough of Rust's lexical structure to tell code from comments and strings.

/// `text` with the contents of comments, strings and character literals blanked, line by line the same.
pub(crate) fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = skip_literal(bytes, at);
        if end > at {
            code.extend(
                bytes[at..end]
                    .iter()
                    .map(|byte| if *byte == b'\n' { '\n' } else { ' ' }),
            );
            at = end;
        } else {
            code.push(if bytes[at].is_ascii() {
                char::from(bytes[at])
            } else {
                ' '
            });
            at += 1;
        }
    }
    code
}

/// End of the comment, string or character that starts at `at`; `at` itself if none does.
fn skip_literal(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let follows_name = at > 0 && is_name_byte(bytes[at - 1]);
    if rest.starts_with(b"//") {
        return at + rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
    }
    if rest.starts_with(b"/*") {
        return at + block_comment(rest);
    }
    match rest[0] {
        b'"' => at + quoted(rest, b'"'),
        b'\'' => at + character(rest),
        b'r' | b'b' | b'c' if !follows_name => at + prefixed(rest),
        _ => at,
    }
}

/// Length of a block comment; they nest.
fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Length of a literal with escapes, from its opening to its closing quote.
fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// Length of a character literal; 0 for a lifetime.
fn character(rest: &[u8]) -> usize {
    let text = String::from_utf8_lossy(&rest[1..rest.len().min(8)]).into_owned();
    let mut chars = text.chars();
    match (chars.next(), chars.next()) {
        (Some('\\'), _) => quoted(rest, b'\''),
        (Some(one), Some('\'')) => 2 + one.len_utf8(),
        _ => 0,
    }
}

/// Length of `r"…"`, `r#"…"#`, `b"…"`, `br"…"`, `c"…"`, `b'…'`; 0 for a name that starts with such a letter.
fn prefixed(rest: &[u8]) -> usize {
    let letters = rest
        .iter()
        .take_while(|b| matches!(b, b'r' | b'b' | b'c'))
        .count()
        .min(2);
    let raw = rest[..letters].contains(&b'r');
    let hashes = rest[letters..].iter().take_while(|b| **b == b'#').count();
    match rest.get(letters + hashes) {
        Some(b'"') if raw => {
            let body = letters + hashes + 1;
            let close = [b"\"", &b"#".repeat(hashes)[..]].concat();
            let found = rest[body..]
                .windows(close.len())
                .position(|window| window == close);
            found.map_or(rest.len(), |position| body + position + close.len())
        }
        Some(b'"') if hashes == 0 => letters + quoted(&rest[letters..], b'"'),
        Some(b'\'') if hashes == 0 && rest.starts_with(b"b'") => 1 + quoted(&rest[1..], b'\''),
        _ => 0,
    }
}

pub(crate) fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Whether `code` has `name` as a whole word at `at`.
pub(crate) fn is_word_at(code: &str, at: usize, name: &str) -> bool {
    let bytes = code.as_bytes();
    let before = at == 0 || !is_name_byte(bytes[at - 1]);
    let after = bytes.get(at + name.len()).is_none_or(|byte| !is_name_byte(*byte));
    code[at..].starts_with(name) && before && after
}

/// The line, from 1, of a byte offset.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

/// Offset of the bracket that closes the one at `open`.
pub(crate) fn closing(code: &str, open: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// The code of a file without its `#[cfg(test)] mod … { … }`.
pub(crate) fn without_tests(code: &str) -> String {
    let attribute = code.find("#[cfg(test)]\nmod ");
    let block = attribute.and_then(|start| {
        let open = start + code[start..].find(['{', ';'])?;
        let in_this_file = code.as_bytes()[open] == b'{';
        in_this_file.then_some((start, closing(code, open)? + 1))
    });
    block.map_or_else(
        || code.to_owned(),
        |(start, end)| code[..start].to_owned() + &code[end..],
    )
}

#[test]
fn literals_and_comments_are_blanked() {
    for (text, expected) in [
        ("a // {\nb", "a     \nb"),
        ("a /* { /* } */ */ b", "a                 b"),
        (r#"f("{", x)"#, "f(   , x)"),
        (r#"f("\"{", x)"#, "f(     , x)"),
        (r##"r#"{"}"# + y"##, "         + y"),
        ("'{' + 'a' + &'a str", "    +     + &'a str"),
        (r"b'\'' + b'{'", "      +     "),
        ("rate + bar", "rate + bar"),
        ("\"a\nb\" c", "  \n   c"),
    ] {
        assert_eq!(code_only(text), expected, "{text}");
    }
}
