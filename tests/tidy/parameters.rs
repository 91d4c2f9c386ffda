//! Parameters of functions: at most five, and none is a tuple. Values that belong together are a struct with named fields.

use crate::rust_text::{code_only, is_word_at, line_of, without_tests};
use crate::tree::SourceFile;
use crate::{Breach, assert_none, tree};

/// Most parameters beside `self`.
const MOST: usize = 5;

/// What the first parentheses hold that are not in other brackets, by the commas between.
fn list(code: &str) -> Vec<&str> {
    let (mut depth, mut start, mut before) = (0_usize, None, ' ');
    let mut found = Vec::new();
    for (at, c) in code.char_indices() {
        match c {
            '(' if depth == 0 => (depth, start) = (1, Some(at + 1)),
            '(' | '[' | '<' | '{' => depth += 1,
            '>' if before == '-' => {}
            ')' | ']' | '>' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if let Some(first) = start
            && (depth == 0 || (depth == 1 && c == ','))
        {
            found.push(code[first..at].trim());
            start = Some(at + 1);
            if depth == 0 {
                break;
            }
        }
        before = c;
    }
    found.retain(|part| !part.is_empty());
    found
}

fn is_tuple(parameter: &str) -> bool {
    let (pattern, of) = parameter.split_once(':').unwrap_or((parameter, ""));
    let of = of.trim_start().trim_start_matches('&').trim_start_matches("mut ");
    // One type in parentheses is none.
    pattern.trim_start_matches('&').starts_with('(') || (of.starts_with('(') && list(of).len() > 1)
}

fn breaches(path: &str, text: &str) -> Vec<Breach> {
    let code = without_tests(&code_only(text));
    // Macros declare those of other libraries.
    let is_ours = |at: usize| is_word_at(&code, at, "fn") && !code[at..].starts_with("fn $");
    let functions = code.match_indices("fn ").filter(|(at, _)| is_ours(*at));
    let found = functions.filter_map(|(at, keyword)| {
        let mut parameters = list(&code[at + keyword.len()..]);
        parameters.retain(|parameter| !matches!(*parameter, "self" | "mut self" | "&self" | "&mut self"));
        let what = match parameters.iter().find(|parameter| is_tuple(parameter)) {
            Some(tuple) => format!("`{tuple}` is a tuple: pass its values, or a struct"),
            None if parameters.len() > MOST => format!("{} parameters", parameters.len()),
            None => return None,
        };
        Some(Breach::new(path, line_of(&code, at), what))
    });
    found.collect()
}

#[test]
fn parameters_are_few_and_have_names() {
    let files = tree::rust_files().into_iter();
    let is_product = |file: &SourceFile| {
        let is_source = file.path.starts_with("src/") || file.path.contains("/src/");
        is_source && !file.path.contains("tests")
    };
    let found = files
        .filter(is_product)
        .flat_map(|file| breaches(&file.path, &file.text));
    assert_none(&found.collect::<Vec<_>>());
}

#[test]
fn tuples_and_long_lists_are_caught() {
    for (text, expected) in [
        (
            "fn f<F: Fn(u8) -> u8>(\n    a: F,\n    (b, c): (u8, u8),\n) {}",
            1,
        ),
        ("fn f(&self, a: &mut (u8, u8)) {}", 1),
        ("fn f(self, a: u8, b: u8, c: u8, d: u8, e: u8, g: u8) {}", 1),
        (
            "fn f(&mut self, a: u8, b: u8, c: u8, d: u8, e: [(u8, u8); 2]) {}",
            0,
        ),
        (
            "fn f(a: &(dyn Fn(u8, u8) + Send), b: Vec<(u8, u8)>) -> (u8, u8) { g(|(a, b)| a) }",
            0,
        ),
    ] {
        assert_eq!(breaches("a", text).len(), expected, "{text}");
    }
}
