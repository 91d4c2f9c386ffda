//! Words that have no place in the repository. They are spelled in two parts here, so that this file passes.

use crate::rust_text::{closing, code_only, is_name_byte, line_of};
use crate::{Breach, assert_none, tree};

/// Macros that mark unfinished work, looked for in code.
const UNFINISHED: [&str; 3] = [
    concat!("to", "do!"),
    concat!("un", "implemented!"),
    concat!("d", "bg!"),
];

/// Marks of unfinished work, looked for everywhere, as whole words.
const MARKS: [&str; 3] = [concat!("FIX", "ME"), concat!("XX", "X"), concat!("HA", "CK")];

/// Beginnings of paths that exist on one person's machine only.
const MACHINE_PATHS: [&str; 4] = [
    concat!("/wo", "rk/"),
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/Us", "ers/"),
];

/// Names of this repository's past for which the field has terms, in snake case: no identifier has one as whole words.
///
/// Ordinary English is not listed.
const PRIVATE_NAMES: [&str; 9] = [
    concat!("bl", "ow"),
    concat!("cho", "rus"),
    concat!("cr", "ew"),
    concat!("happen", "ing"),
    concat!("man", "ner"),
    concat!("qua", "rry"),
    concat!("se", "at"),
    concat!("stand", "still"),
    concat!("wi", "sh"),
];

/// The same for names of types: these words are ordinary English elsewhere.
const PRIVATE_TYPES: [&str; 11] = [
    concat!("As", "ide"),
    concat!("Conclu", "sion"),
    concat!("Do", "or"),
    concat!("Fore", "cast"),
    concat!("Ha", "nd"),
    concat!("Out", "look"),
    concat!("Reme", "dy"),
    concat!("Resi", "dence"),
    concat!("Shard", "Groups"),
    concat!("Str", "ike"),
    concat!("To", "uch"),
];

/// Phrases of which a reader has to guess the meaning, looked for in what the programs print.
const RIDDLES: [&str; 14] = [
    "bit by bit",
    "by itself",
    "generation is over",
    "goes on",
    "going on with",
    "is a spare",
    "makes no sense",
    "nobody",
    "says the same",
    "stands still",
    "stood still",
    "stopped by us",
    "unasked",
    "whoever",
];

/// A call that waits and hopes, looked for in tests.
const SLEEP: &str = concat!("sle", "ep(");

/// Tests that may wait without an event, each for a reason that its line states in a comment.
const SLEEPERS: [&str; 1] = ["tests/it/harness/deadline.rs"];

fn unfinished(path: &str, text: &str) -> Vec<Breach> {
    let code = code_only(text);
    let found = |word: &str| {
        word_positions(&code, word)
            .map(|at| (at, word.to_owned()))
            .collect::<Vec<_>>()
    };
    let breaches = UNFINISHED.iter().flat_map(|word| found(word));
    breaches
        .map(|(at, word)| Breach::new(path, line_of(&code, at), format!("`{word}` is unfinished")))
        .collect()
}

fn marks(path: &str, text: &str) -> Vec<Breach> {
    let found = MARKS
        .iter()
        .flat_map(|word| word_positions(text, word).map(move |at| (at, *word)));
    found
        .filter(|(at, word)| {
            text.as_bytes()
                .get(at + word.len())
                .is_none_or(|byte| !is_name_byte(*byte))
        })
        .map(|(at, word)| {
            Breach::new(
                path,
                line_of(text, at),
                format!("`{word}`: do it, or open an issue"),
            )
        })
        .collect()
}

fn machine_paths(path: &str, text: &str) -> Vec<Breach> {
    let found = MACHINE_PATHS.iter().flat_map(|word| text.match_indices(word));
    found
        .map(|(at, word)| Breach::new(path, line_of(text, at), format!("`{word}` exists on one machine")))
        .collect()
}

/// `TokenFile2` and `token_file2` are both `_token_file2_`: whole words are found between underscores.
fn snake_case(identifier: &str) -> String {
    let mut snake = String::from("_");
    let mut before = '_';
    for c in identifier.chars() {
        if c.is_uppercase() && before != '_' && !before.is_uppercase() {
            snake.push('_');
        }
        snake.extend(c.to_lowercase());
        before = c;
    }
    snake.push('_');
    snake
}

/// Identifiers of code that have a private name as whole words.
fn private_names(path: &str, text: &str) -> Vec<Breach> {
    let (names, types) = (PRIVATE_NAMES.map(snake_case), PRIVATE_TYPES.map(snake_case));
    let code = code_only(text);
    let mut breaches = Vec::new();
    let mut start = 0;
    for identifier in code.split(|c: char| !c.is_alphanumeric() && c != '_') {
        let at = start;
        start += identifier.len() + 1;
        if identifier.is_empty() {
            continue;
        }
        let snake = snake_case(identifier);
        let is_type = identifier.starts_with(char::is_uppercase) && identifier.contains(char::is_lowercase);
        let has = |name: &&String| snake.contains(name.as_str());
        let found = names.iter().find(has);
        if let Some(name) = found.or_else(|| types.iter().find(|name| is_type && has(name))) {
            let name = name.trim_matches('_');
            let what = format!("`{identifier}`: `{name}` is a private name, take the field's term");
            breaches.push(Breach::new(path, line_of(&code, at), what));
        }
    }
    breaches
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
    let test_modules: Vec<(usize, usize)> = text
        .match_indices("#[cfg(test)]")
        .filter_map(|(at, _)| {
            let open = at + code[at..].find('{')?;
            Some((open, closing(&code, open)?))
        })
        .collect();
    let is_test =
        |at: usize| in_tests_folder || test_modules.iter().any(|(from, to)| (*from..*to).contains(&at));
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

/// Where `word` starts in `text`, not in the middle of a longer name.
fn word_positions<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let starts_word = |at: usize| at == 0 || !is_name_byte(text.as_bytes()[at - 1]);
    text.match_indices(word)
        .map(|(at, _)| at)
        .filter(move |at| starts_word(*at))
}

#[test]
fn nothing_is_unfinished() {
    let breaches: Vec<_> = tree::rust_files()
        .iter()
        .flat_map(|f| unfinished(&f.path, &f.text))
        .collect();
    assert_none(&breaches);
    let breaches: Vec<_> = tree::files()
        .iter()
        .flat_map(|f| marks(&f.path, &f.text))
        .collect();
    assert_none(&breaches);
}

#[test]
fn no_path_of_one_machine() {
    let breaches: Vec<_> = tree::files()
        .iter()
        .flat_map(|f| machine_paths(&f.path, &f.text))
        .collect();
    assert_none(&breaches);
}

#[test]
fn names_are_the_fields() {
    let breaches: Vec<_> = tree::rust_files()
        .iter()
        .flat_map(|f| private_names(&f.path, &f.text))
        .collect();
    assert_none(&breaches);
}

#[test]
fn programs_speak_plain_english() {
    let is_production = |path: &str| path.contains("src/") && !path.contains("test");
    let breaches: Vec<_> = tree::rust_files()
        .iter()
        .filter(|f| is_production(&f.path))
        .flat_map(|f| riddles(&f.path, &f.text))
        .collect();
    assert_none(&breaches);
}

#[test]
fn tests_wait_for_events() {
    let files = tree::rust_files();
    let awake = files.iter().filter(|f| !SLEEPERS.contains(&f.path.as_str()));
    assert_none(
        &awake
            .flat_map(|f| sleeping_tests(&f.path, &f.text))
            .collect::<Vec<_>>(),
    );
    for path in SLEEPERS {
        let sleeps = files
            .iter()
            .any(|f| f.path == path && !sleeping_tests(path, &f.text).is_empty());
        assert!(sleeps, "`{path}` no longer needs its place in the list");
    }
}

#[test]
fn unfinished_work_is_caught() {
    let sample = |line: &str| format!("fn f() {{\n    {line}\n}}\n");
    for word in UNFINISHED {
        assert_eq!(
            unfinished("a.rs", &sample(&format!("{word}(x);"))).len(),
            1,
            "{word}"
        );
        assert_eq!(
            unfinished("a.rs", &sample(&format!("\"{word}\""))),
            [],
            "in a string"
        );
    }
    for word in MARKS {
        assert_eq!(marks("a.md", &format!("a {word}: b")).len(), 1, "{word}");
        assert_eq!(marks("a.md", &format!("a{word}b")), [], "in a longer word");
    }
}

#[test]
fn paths_of_one_machine_are_caught() {
    for path in MACHINE_PATHS {
        assert_eq!(machine_paths("a.md", &format!("see {path}x")).len(), 1, "{path}");
    }
}

#[test]
fn private_names_are_caught() {
    let found = |code: &str| private_names("a.rs", code).len();
    for name in PRIVATE_NAMES {
        let capital = name[..1].to_uppercase() + &name[1..];
        assert_eq!(found(&format!("let {name} = 1;")), 1, "{name}");
        assert_eq!(found(&format!("fn the_{name}_of() {{}}")), 1, "{name}");
        assert_eq!(found(&format!("struct Big{capital}List;")), 1, "{name}");
        assert_eq!(
            found(&format!("let {name}x = \"{name}\"; // {name}")),
            0,
            "{name}"
        );
    }
    for name in PRIVATE_TYPES {
        assert_eq!(found(&format!("struct {name};")), 1, "{name}");
        assert_eq!(found(&format!("struct Big{name}Of;")), 1, "{name}");
        assert_eq!(found(&format!("let {} = 1;", name.to_lowercase())), 0, "{name}");
    }
    assert_eq!(
        found(&format!("struct {}le;", PRIVATE_TYPES[3])),
        0,
        "a longer word"
    );
    assert_eq!(
        private_names("a.rs", &format!("\n\nlet {}: u8;", PRIVATE_NAMES[2]))[0].line,
        3
    );
}

#[test]
fn riddles_are_caught() {
    let found = |code: &str| riddles("src/a.rs", code).len();
    for phrase in RIDDLES {
        assert_eq!(
            found(&format!("fn f() {{ say(\"the job {phrase}\"); }}")),
            1,
            "{phrase}"
        );
        assert_eq!(found(&format!("// the job {phrase}\nfn f() {{}}")), 0, "{phrase}");
        assert_eq!(
            found(&format!("#[cfg(test)]\nmod tests {{ \"{phrase}\" }}")),
            0,
            "{phrase}"
        );
    }
    assert_eq!(found("fn signal_unasked() {}"), 0, "a name");
}

#[test]
fn sleeping_tests_are_caught() {
    let call = format!("thread::{SLEEP}x);");
    let module = format!("fn real() {{ {call} }}\n#[cfg(test)]\nmod tests {{\n    fn t() {{ {call} }}\n}}\n");
    let breaches = sleeping_tests("src/a.rs", &module);
    assert_eq!(breaches.iter().map(|b| b.line).collect::<Vec<_>>(), [4]);
    assert_eq!(sleeping_tests("tests/it/a.rs", &module).len(), 2);
    assert_eq!(
        sleeping_tests("tests/it/a.rs", &format!("fn t() {{ gate.{SLEEP}1); }}")),
        []
    );
    assert_eq!(sleeping_tests("src/a.rs", &format!("fn real() {{ {call} }}")), []);
}
