//! Words that have no place in the repository. They are spelled in two parts here, so that this file passes.

use crate::rust_text::{closing, code_only, is_name_byte, line_of};
use crate::tree::SourceFile;
use crate::{Breach, assert_none, tree};

/// Marks of unfinished work, and beginnings of paths that exist on one person's machine only.
const ANYWHERE: [&str; 7] = [
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("HA", "CK"),
    concat!("/wo", "rk/"),
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/Us", "ers/"),
];

/// Names of types for which the field has a term; glossary.md has the terms.
const PRIVATE_TYPES: [&str; 9] = [
    concat!("Ros", "ter"),
    concat!("Isol", "ation"),
    concat!("Exc", "use"),
    concat!("Sigh", "ting"),
    concat!("Meeting", "Point"),
    concat!("Aud", "ience"),
    concat!("Blue", "print"),
    concat!("Ma", "il"),
    concat!("Spe", "ech"),
];

/// Phrases of which a reader has to guess the meaning, looked for in what the programs print.
const RIDDLES: [&str; 9] = [
    "bit by bit",
    "by itself",
    "is a spare",
    "makes no sense",
    "nobody",
    "stands still",
    "stopped by us",
    "unasked",
    "whoever",
];

/// A call that waits and hopes, looked for in tests.
const SLEEP: &str = concat!("sle", "ep(");

/// The test file that may wait without an event.
const SLEEPER: &str = "tests/it/harness/deadline.rs";

/// Where `word` starts in `text`, not in the middle of a longer name.
fn word_positions<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let starts_word = |at: usize| at == 0 || !is_name_byte(text.as_bytes()[at - 1]);
    text.match_indices(word)
        .map(|(at, _)| at)
        .filter(move |at| starts_word(*at))
}

fn words_of_no_file(path: &str, text: &str) -> Vec<Breach> {
    let found = ANYWHERE.iter().flat_map(|word| {
        let is_longer = |at: usize| {
            text.as_bytes()
                .get(at + word.len())
                .is_some_and(|byte| is_name_byte(*byte))
        };
        let positions = word_positions(text, word).filter(move |at| word.starts_with('/') || !is_longer(*at));
        positions.map(move |at| (at, word))
    });
    found
        .map(|(at, word)| Breach::new(path, line_of(text, at), format!("`{word}` has no place here")))
        .collect()
}

/// Types of production code that have a private name as a part of theirs.
fn private_types(path: &str, text: &str) -> Vec<Breach> {
    let code = code_only(text);
    let mut breaches = Vec::new();
    for keyword in ["struct ", "enum ", "trait ", "type "] {
        for at in word_positions(&code, keyword) {
            let name = &code[at + keyword.len()..];
            let end = name
                .bytes()
                .position(|byte| !is_name_byte(byte))
                .unwrap_or(name.len());
            let name = &name[..end];
            if PRIVATE_TYPES.iter().any(|private| has_part(name, private)) {
                let what = format!("`{name}` is a private name: take the field's term");
                breaches.push(Breach::new(path, line_of(&code, at), what));
            }
        }
    }
    breaches
}

/// Whether a name in camel case has `part` as whole words.
fn has_part(name: &str, part: &str) -> bool {
    let mut found = name.match_indices(part);
    found.any(|(at, _)| !name[at + part.len()..].starts_with(char::is_lowercase))
}

/// Riddles in the strings of production code.
fn riddles(path: &str, text: &str) -> Vec<Breach> {
    let (code, tests_at) = (code_only(text), text.find("#[cfg(test)]"));
    let production = &text[..tests_at.unwrap_or(text.len())];
    let is_printed = |at: usize| {
        let line = text[..at].rfind('\n').map_or(0, |end| end + 1);
        code.as_bytes()[at] == b' ' && !text[line..at].contains("//")
    };
    let found = RIDDLES.iter().flat_map(|phrase| production.match_indices(phrase));
    found
        .filter(|(at, _)| is_printed(*at))
        .map(|(at, phrase)| {
            Breach::new(
                path,
                line_of(text, at),
                format!("`{phrase}`: say it in plain English"),
            )
        })
        .collect()
}

/// Sleeps in files below a `tests` folder, and in the test modules of others.
fn sleeping_tests(path: &str, text: &str) -> Vec<Breach> {
    let code = code_only(text);
    let in_tests_folder = path.starts_with("tests/") || path.contains("/tests/");
    let module_at = |(at, _): (usize, &str)| {
        let open = at + code[at..].find('{')?;
        Some(open..closing(&code, open)?)
    };
    let test_modules: Vec<_> = text.match_indices("#[cfg(test)]").filter_map(module_at).collect();
    let is_test = |at: usize| in_tests_folder || test_modules.iter().any(|module| module.contains(&at));
    word_positions(&code, SLEEP)
        // A method of that name is the test's own, and an event ends it.
        .filter(|at| is_test(*at) && !code[..*at].ends_with('.'))
        .map(|at| {
            Breach::new(
                path,
                line_of(&code, at),
                "a test that sleeps and hopes: wait for an event",
            )
        })
        .collect()
}

/// Fails if `rule` finds anything in the files that `applies` chooses.
fn assert_in(rule: fn(&str, &str) -> Vec<Breach>, applies: impl Fn(&SourceFile) -> bool) {
    let files = tree::files();
    let chosen = files.iter().filter(|file| applies(file));
    assert_none(
        &chosen
            .flat_map(|file| rule(&file.path, &file.text))
            .collect::<Vec<_>>(),
    );
}

fn is_production(file: &SourceFile) -> bool {
    file.is_rust() && file.path.contains("src/") && !file.path.contains("test")
}

#[test]
fn no_unfinished_work_and_no_path_of_one_machine() {
    assert_in(words_of_no_file, |_| true);
}

#[test]
fn names_are_the_fields() {
    assert_in(private_types, is_production);
}

#[test]
fn programs_speak_plain_english() {
    assert_in(riddles, is_production);
}

#[test]
fn tests_wait_for_events() {
    assert_in(sleeping_tests, |file| file.is_rust() && file.path != SLEEPER);
    assert!(
        !sleeping_tests(SLEEPER, &tree::text_of(SLEEPER)).is_empty(),
        "`{SLEEPER}` no longer sleeps"
    );
}

#[test]
fn each_rule_bites() {
    let (word, name, phrase) = (ANYWHERE[0], PRIVATE_TYPES[0], RIDDLES[0]);
    let marked = |text: &str| words_of_no_file("a.md", text).len();
    assert_eq!(
        (marked(&format!("a {word} b")), marked(&format!("a{word}b"))),
        (1, 0)
    );
    let private = |text: &str| private_types("a.rs", text).len();
    assert_eq!(private(&format!("struct Big{name};")), 1);
    assert_eq!(
        private(&format!("let {name}; // struct {name}\nenum {name}s;")),
        0
    );
    let spoken = |text: &str| riddles("a.rs", text).len();
    assert_eq!(spoken(&format!("fn f() {{ say(\"the job {phrase}\"); }}")), 1);
    assert_eq!(
        spoken(&format!(
            "// {phrase}\n#[cfg(test)]\nmod tests {{ \"{phrase}\" }}"
        )),
        0
    );
    let call = format!("thread::{SLEEP}x);");
    let module = format!("fn real() {{ {call} }}\n#[cfg(test)]\nmod tests {{\n    fn t() {{ {call} }}\n}}\n");
    let lines = |path| {
        sleeping_tests(path, &module)
            .iter()
            .map(|breach| breach.line)
            .collect::<Vec<_>>()
    };
    assert_eq!(lines("src/a.rs"), [4]);
    assert_eq!(lines("tests/it/a.rs"), [1, 4]);
    assert_eq!(
        sleeping_tests("tests/it/a.rs", &format!("fn t() {{ gate.{SLEEP}1); }}")),
        []
    );
}
