//! The table of keys as Markdown, for `docs/reference.md`.

use std::fmt::Write as _;

use super::schema::keys;
use super::table::{Allowed, Key};

/// A table for each section: key, default, values and meaning; then the meaning of each word.
pub fn reference() -> String {
    let mut text = String::new();
    let mut section = "";
    let (mut words, mut explained) = (String::new(), &[][..]);
    for key in keys() {
        let own = key.path.split('.').next().unwrap_or_default();
        if own != section {
            text.push_str(&std::mem::take(&mut words));
            section = own;
            let _ = write!(
                text,
                "\n### `{section}`\n\n| key | default | values | meaning |\n|---|---|---|---|\n"
            );
        }
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} |",
            key.path,
            default(key),
            values(&key.allowed),
            key.about.trim()
        );
        // Neighbours may share them.
        if let Allowed::Word(all) = &key.allowed
            && std::mem::replace(&mut explained, *all) != *all
        {
            let _ = write!(words, "\n`{}`:\n\n", key.path);
            for (word, about) in *all {
                let _ = writeln!(words, "- `{word}`: {}", about.trim());
            }
        }
    }
    text + &words
}

fn default(key: &Key) -> String {
    match key.default {
        Some(default) if default.starts_with('"') => default.replace('"', "`"),
        Some("true" | "false") => format!("`{}`", key.default.unwrap_or_default()),
        Some(default) => default.to_owned(),
        None if key.is_required() => "required".to_owned(),
        None => String::new(),
    }
}

fn values(allowed: &Allowed) -> String {
    match allowed {
        Allowed::Whole(range) if *range.end() == u64::MAX => format!("{} or more", range.start()),
        Allowed::Whole(range) => format!("{} to {}", range.start(), range.end()),
        Allowed::Flag => "`true`, `false`".to_owned(),
        Allowed::Word(words) => {
            let words: Vec<String> = words.iter().map(|(word, _)| format!("`{word}`")).collect();
            words.join(", ")
        }
        other => other.to_string(),
    }
}
