//! Style that a compiler does not see, enforced as tests. Each rule shows on a bad sample that it bites.
//!
//! | module | rule |
//! |---|---|
//! | [`words`] | no leftovers, no sleeping tests, no paths of one machine, no private names |
//! | [`documents`] | lines of Markdown end before column 120 and name files that exist |
//! | [`links`] | links of Markdown files lead to files and headings that exist |
//! | [`layers`] | packages depend on each other in one direction |
//! | [`imports`] | files of a package do not import each other in a circle |
//! | [`parameters`] | a function has at most five, and none is a tuple |
//! | [`size`] | lines of the product, of a file, files of a folder, short files |
//!
//! [`tree`] lists the files, which are all text; [`rust_text`] tells code from comments and strings.

mod documents;
mod imports;
mod layers;
mod links;
mod parameters;
mod rust_text;
mod size;
mod tree;
mod words;

/// One breach of a rule: where, and what is wrong.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Breach {
    file: String,
    line: usize,
    what: String,
}

impl Breach {
    fn new(file: &str, line: usize, what: impl Into<String>) -> Self {
        Self {
            file: file.to_owned(),
            line,
            what: what.into(),
        }
    }
}

/// Fails with all breaches at once, so that one run shows them all.
#[track_caller]
fn assert_none(breaches: &[Breach]) {
    let lines: Vec<String> = breaches
        .iter()
        .map(|breach| format!("{}:{}: {}", breach.file, breach.line, breach.what))
        .collect();
    assert!(
        lines.is_empty(),
        "{} breaches:\n{}",
        lines.len(),
        lines.join("\n")
    );
}
