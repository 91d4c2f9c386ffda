//! Files and functions that fit a reader's head.

use crate::rust_text::{closing, code_only, is_word_at, line_of};
use crate::{Breach, assert_none, tree};

/// Without blank lines, comments and the tests within the file.
const MAX_FILE_LINES: usize = 700;
const MAX_FUNCTION_LINES: usize = 70;

/// Names under which code gathers that belongs nowhere.
const NAMELESS: [&str; 6] = ["util", "utils", "common", "helper", "helpers", "misc"];

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

fn file_length(path: &str, text: &str) -> Option<Breach> {
    let code = code_only(text);
    let lines = without_tests(&code)
        .lines()
        .filter(|line| !line.trim().is_empty())
        .count();
    let what = format!("{lines} lines of code, at most {MAX_FILE_LINES}: split it by its concepts");
    (lines > MAX_FILE_LINES).then(|| Breach::new(path, lines, what))
}

fn file_name(path: &str) -> Option<Breach> {
    let stem = path
        .split('/')
        .next_back()
        .unwrap_or(path)
        .trim_end_matches(".rs");
    let folder = path.split('/').rev().nth(1).unwrap_or_default();
    let bad = NAMELESS.iter().find(|name| **name == stem || **name == folder)?;
    Some(Breach::new(path, 1, format!("`{bad}` names no noun")))
}

fn function_lengths(path: &str, text: &str) -> Vec<Breach> {
    let code = code_only(text);
    let starts = code
        .match_indices("fn ")
        .filter(|(at, _)| is_word_at(&code, *at, "fn"));
    starts
        .filter_map(|(start, _)| {
            let signature_end = start + code[start..].find(['{', ';'])?;
            // A semicolon first: a declaration without a body, or an array in the signature, which is short.
            if code.as_bytes()[signature_end] == b';' {
                return None;
            }
            let (first, last) = (
                line_of(&code, start),
                line_of(&code, closing(&code, signature_end)?),
            );
            let lines = last - first + 1;
            let name: String = code[start + 3..]
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            let what = format!("`{name}` has {lines} lines, at most {MAX_FUNCTION_LINES}");
            (lines > MAX_FUNCTION_LINES).then(|| Breach::new(path, first, what))
        })
        .collect()
}

#[test]
fn files_are_short() {
    let breaches: Vec<_> = tree::rust_files()
        .iter()
        .filter_map(|f| file_length(&f.path, &f.text))
        .collect();
    assert_none(&breaches);
}

#[test]
fn functions_are_short() {
    let breaches: Vec<_> = tree::rust_files()
        .iter()
        .flat_map(|f| function_lengths(&f.path, &f.text))
        .collect();
    assert_none(&breaches);
}

#[test]
fn files_are_named_for_a_noun() {
    let breaches: Vec<_> = tree::rust_files()
        .iter()
        .filter_map(|f| file_name(&f.path))
        .collect();
    assert_none(&breaches);
}

#[test]
fn long_files_are_caught() {
    let code = "f();\n".repeat(MAX_FILE_LINES);
    assert_eq!(file_length("a.rs", &code), None);
    assert_eq!(file_length("a.rs", &format!("// A comment.\n\n{code}")), None);
    let tests = "#[cfg(test)]\nmod tests {\n    fn f() {}\n}\n";
    assert_eq!(file_length("a.rs", &format!("{code}{tests}")), None);
    assert!(file_length("a.rs", &format!("{tests}{code}f();\n")).is_some());
    assert!(file_length("a.rs", &format!("#[cfg(test)]\nmod tests;\n{code}")).is_some());
}

#[test]
fn long_functions_are_caught() {
    let function = |body: usize| {
        format!(
            "// fn {{\nfn short() {{}}\n\nfn long() {{\n{}}}\n",
            "    f(\"}\");\n".repeat(body)
        )
    };
    assert_eq!(function_lengths("a.rs", &function(MAX_FUNCTION_LINES - 2)), []);
    let breaches = function_lengths("a.rs", &function(MAX_FUNCTION_LINES - 1));
    assert_eq!(breaches.len(), 1);
    assert_eq!(
        (breaches[0].line, breaches[0].what.starts_with("`long`")),
        (4, true)
    );
}

#[test]
fn nameless_files_are_caught() {
    assert!(file_name("src/utils.rs").is_some());
    assert!(file_name("src/common/mod.rs").is_some());
    assert!(file_name("src/command.rs").is_none());
}
