//! Links of Markdown files to other files of the repository, and to the headings in them.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use crate::{Breach, assert_none, tree};

/// `[text](target)` outside of code, as (line, target).
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut in_fence = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let is_fence = line.trim_start().starts_with("```");
        in_fence ^= is_fence;
        if in_fence || is_fence || line.starts_with("    ") {
            continue;
        }
        for (at, _) in line.match_indices("](") {
            let rest = &line[at + 2..];
            let end = rest.find(')').unwrap_or(rest.len());
            found.push((index + 1, &rest[..end]));
        }
    }
    found
}

/// The anchors that GitHub and mdbook give to the headings of a file.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut in_fence = false;
    let mut found = BTreeSet::new();
    for line in text.lines() {
        in_fence ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if in_fence || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let letters = heading.trim().to_lowercase();
        let kept = letters
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        found.insert(kept.map(|c| if c == ' ' { '-' } else { c }).collect());
    }
    found
}

/// A path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    path.components()
        .fold(PathBuf::new(), |mut whole, part| match part {
            Component::ParentDir => {
                whole.pop();
                whole
            }
            Component::CurDir => whole,
            part => whole.join(part),
        })
}

/// Links of a document that lead nowhere. `text_of` has the text of a path, or none if nothing is there.
fn dead_links(path: &str, text: &str, text_of: impl Fn(&str) -> Option<String>) -> Vec<Breach> {
    let folder = Path::new(path).parent().unwrap_or(Path::new(""));
    let is_external = |target: &str| target.contains("://") || target.starts_with("mailto:");
    let mut breaches = Vec::new();
    for (line, target) in links(text).into_iter().filter(|(_, target)| !is_external(target)) {
        let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
        let named = normal(&folder.join(file));
        let named = if file.is_empty() { Path::new(path) } else { &named };
        let found = text_of(&named.to_string_lossy());
        let has_anchor = |text: &String| anchor.is_empty() || anchors(text).contains(anchor);
        if !found.as_ref().is_some_and(has_anchor) {
            breaches.push(Breach::new(
                path,
                line,
                format!("the link `{target}` leads nowhere"),
            ));
        }
    }
    breaches
}

#[test]
fn links_lead_somewhere() {
    let files = tree::files();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text_of = |path: &str| {
        let known = files.iter().find(|file| file.path == path);
        let text = known.map(|file| file.text.clone());
        // A folder, or a file that is no text.
        text.or_else(|| root.join(path).exists().then(String::new))
    };
    let markdown = files.iter().filter(|file| file.is_markdown());
    let breaches: Vec<_> = markdown
        .flat_map(|file| dead_links(&file.path, &file.text, text_of))
        .collect();
    assert_none(&breaches);
}

#[test]
fn links_that_lead_nowhere_are_caught() {
    let text_of = |path: &str| match path {
        "docs/a.md" => Some("# A b\n```\n# Not one\n```\n## What `x` is: (1)\n".to_owned()),
        "README.md" | "docs" => Some(String::new()),
        _ => None,
    };
    let good = "[1](a.md#a-b) [2](#here) [3](../README.md) [4](https://x.y/#z) [5](a.md#what-x-is-1) [6](..)\n# Here\n";
    let text_of_this = |path: &str| {
        let this = (path == "docs/b.md").then(|| good.to_owned());
        this.or_else(|| (path.is_empty()).then(String::new).or_else(|| text_of(path)))
    };
    assert_eq!(dead_links("docs/b.md", good, text_of_this), []);
    let bad = "`x`\n[1](b.md)\n[2](a.md#not-one)\n    [3](code.md)\n";
    let lines: Vec<_> = dead_links("docs/c.md", bad, text_of)
        .iter()
        .map(|breach| breach.line)
        .collect();
    assert_eq!(lines, [2, 3]);
}
