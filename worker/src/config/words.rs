//! What was found and what is expected, in words: serde names types of Rust, and users of the file know none.

use serde::de::{Expected, Unexpected};

/// Whole numbers that begin with 1, by their keys; all others begin with 0. [`super::check`] refuses what is below.
const FROM_ONE: &[&str] = &[
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.block_size",
    "model.vocab_size",
    "train.steps",
    "train.micro_batch",
    "train.grad_accumulation",
    "train.max_skips",
    "train.base_batch",
    "train.threads",
    "train.checkpoint_keep.last",
    "train.checkpoint_keep.every",
];

/// What serde calls a whole number.
const WHOLE: &str = "a whole number";

/// A value, as people would write or call it.
pub(super) fn found_words(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(v) => format!("`{v}`"),
        Unexpected::Unsigned(v) => format!("the number `{v}`"),
        Unexpected::Signed(v) => format!("the number `{v}`"),
        // `2.0` is not `2`.
        Unexpected::Float(v) => format!("the number `{v:?}`"),
        Unexpected::Str(v) => format!("the string `{v}`"),
        Unexpected::Unit => "empty".into(),
        Unexpected::Seq => "a list".into(),
        Unexpected::Map => "a section".into(),
        other => other.to_string(),
    }
}

/// YAML has numbers that are not finite, and makes one of what is too large; no key takes them.
pub(super) fn not_finite_words(value: f64) -> &'static str {
    match value {
        v if v.is_nan() => "`.nan`",
        v if v > 0.0 => "`.inf`, or too large",
        _ => "`-.inf`, or too far below 0",
    }
}

/// What a type takes.
pub(super) fn expected_words(expected: &dyn Expected) -> String {
    let words = expected.to_string();
    match words.as_str() {
        "u8" | "u16" | "u32" | "u64" | "usize" => WHOLE.into(),
        "f32" | "f64" => "a number".into(),
        "a boolean" => "`true` or `false`".into(),
        "path string" => "a path (a string)".into(),
        "an array of length 2" => "a list of 2 numbers".into(),
        "a map" => "a section with keys".into(),
        _ if words.starts_with("struct ") => "a section with keys".into(),
        _ => words,
    }
}

/// What the key at `path` takes, where that is more than its type says.
pub(super) fn expected_at(path: &str, expected: &str) -> String {
    match expected {
        WHOLE if FROM_ONE.contains(&path) => format!("{WHOLE}, 1 or more"),
        WHOLE => format!("{WHOLE}, 0 or more"),
        words => words.to_owned(),
    }
}

/// The next step for a value of another type than `expected`, where there is an obvious one.
pub(super) fn hint(found: Unexpected<'_>, expected: &str) -> Option<String> {
    match (found, expected) {
        (
            Unexpected::Unsigned(_) | Unexpected::Signed(_) | Unexpected::Float(_),
            "a string" | "a path (a string)" | "a path (a string), or a list of them",
        ) => Some("put the value in quotes to make it a string".into()),
        (Unexpected::Float(v), WHOLE) if v >= u64::MAX as f64 => {
            Some(format!("there is none above {}", u64::MAX))
        }
        (Unexpected::Float(v), WHOLE) if v >= 0.0 && v.fract() == 0.0 => {
            Some(format!("write it without a point or an exponent: `{v}`"))
        }
        (Unexpected::Str(v), WHOLE) if v.parse::<u64>().is_ok() => {
            Some("leave out the quotes to make it a number".into())
        }
        _ => None,
    }
}

/// "`a` or `b`".
pub(super) fn one_of(words: &[&str]) -> String {
    let names: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    names.join(" or ")
}

#[cfg(test)]
mod tests {
    use super::super::keys;
    use super::super::tests::load_good;
    use super::*;

    /// Only the check knows what it refuses, and only the words are read by those who typed a word.
    #[test]
    fn the_least_number_in_words_is_the_least_that_is_taken() {
        // Keys that others need.
        let base = [
            "train.lr_scaling=linear",
            "train.base_batch=8",
            "train.checkpoint_keep={last: 1, every: 10}",
            "train.checkpoint_every=10",
        ];
        let message = |text: &str| {
            load_good(&[&base[..], &[text]].concat())
                .err()
                .unwrap_or_default()
        };
        let mut seen = 0;
        for key in keys::all() {
            let words = message(&format!("{key}=word"));
            if words.contains(WHOLE) {
                seen += 1;
                let is_refused = message(&format!("{key}=0")).contains("expected at least");
                let expected = if is_refused { "1 or more" } else { "0 or more" };
                assert!(words.contains(&format!("{WHOLE}, {expected}")), "{words}");
            }
        }
        assert!(seen > FROM_ONE.len(), "only {seen} whole numbers");
    }
}
