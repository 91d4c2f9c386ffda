//! Values that must not be shown: the one place that knows what a secret looks like.
//!
//! Command lines, configurations and environments are shown by `--dry-run`, told to the other nodes of a job, and written
//! to a shared rendezvous' log. A secret among them is replaced by [`HIDDEN`]. Two kinds of rules find one:
//!
//! | where | hidden | shown, though it looks similar |
//! |---|---|---|
//! | a name that ends in a word of `SECRETS`: `--password X`, `DB_PASSWORD=X`, `api.password: X` | always | `--password-file F` |
//! | one that ends in `key` behind a word of `KINDS_OF_KEYS`, or is `apikey`: `--api-key X` | always | `--sort-key loss`, `image_key: jpg` |
//! | one that ends in a word of `MAYBE`: `--token X`, `--auth X` | unless `X` is a number, a switch or a special token | `--token-count 5`, `tokenizer: gpt2`, `pad_token: <pad>` |
//! | any other `key=X` | if `X` looks random | `data.key=text` |
//! | `-p X`, as clients of databases have it | unless `X` is a number, a range, a path or a type | `-p 8080`, `-p bf16`, `-p data/` |
//! | `-u USER:X`, as `curl` has it | `X` | `-u buffered` |
//! | `scheme://user:X@host`, and `?token=X` in an address | `X` | `http://host:80/a?page=2` |
//! | behind `Bearer` or `Basic` | always | |
//! | what begins with a word of `PREFIXES`, such as `hf_`, wherever it is | always | `hf_hub` |
//!
//! A hidden value tells nothing, not even its length. Where a rule is unsure it hides: a hidden hyperparameter is a nuisance,
//! a secret in another user's log is not. Numbers are never secrets here.

use std::borrow::Cow;

/// Stands for a value.
pub const HIDDEN: &str = "…";

/// Last word of a name whose value is a secret.
const SECRETS: &[&str] = &[
    "credential",
    "credentials",
    "passphrase",
    "passwd",
    "password",
    "pwd",
    "secret",
    "secrets",
];
/// Word in front of `key` that says that the key opens something.
const KINDS_OF_KEYS: &[&str] = &[
    "access",
    "account",
    "api",
    "auth",
    "encryption",
    "license",
    "master",
    "private",
    "secret",
    "service",
    "signing",
    "ssh",
    "storage",
    "subscription",
    "write",
];
/// Last word of a name whose value may be a secret.
const MAYBE: &[&str] = &[
    "auth",
    "authorization",
    "bearer",
    "cookie",
    "jwt",
    "pat",
    "token",
    "tokens",
];
/// Word in front of `token` that says that it is one of a vocabulary.
const SPECIAL_TOKENS: &[&str] = &[
    "bos", "cls", "decoder", "end", "eod", "eos", "eot", "fim", "forced", "image", "mask", "max", "min",
    "new", "num", "pad", "per", "sep", "special", "start", "stop", "unk",
];
/// How tokens of well-known services begin, and how many bytes at least follow.
const PREFIXES: &[(&str, usize)] = &[
    ("AKIA", 16),
    ("eyJ", 16),
    ("ghp_", 16),
    ("gho_", 16),
    ("ghs_", 16),
    ("github_pat_", 16),
    ("glpat-", 16),
    ("hf_", 16),
    ("sk-", 16),
    ("xoxb-", 16),
    ("xoxp-", 16),
];
/// Types of numbers, which `-p` may stand for.
const TYPES: &[&str] = &[
    "bf16", "f16", "f32", "f64", "fp16", "fp32", "fp8", "int4", "int8", "tf32",
];
/// What a random value has at least.
const RANDOM_BYTES: usize = 12;

/// What may be shown of the value of a key, a variable or an option of this name.
pub fn value<'a>(name: &str, value: &'a str) -> Cow<'a, str> {
    if is_secret(name, value) {
        return HIDDEN.into();
    }
    if !value.contains('=') || value.contains([' ', '/']) {
        return words(value);
    }
    // `--set=key=value`, and lists of such pairs.
    let parts: Vec<Cow<'_, str>> = value.split(',').map(pair).collect();
    let shown = parts.join(",");
    if shown == value {
        value.into()
    } else {
        shown.into()
    }
}

/// What may be shown of `NAME=VALUE`.
pub fn pair(pair: &str) -> Cow<'_, str> {
    match pair.split_once('=') {
        Some((name, found)) if !name.contains("://") => match value(name, found) {
            shown if shown == found => pair.into(),
            shown => format!("{name}={shown}").into(),
        },
        _ => words(pair),
    }
}

/// What may be shown of each word of a command line, in order.
pub fn command_line<'a>(line: impl IntoIterator<Item = &'a str>) -> Vec<Cow<'a, str>> {
    let mut option: Option<&str> = None;
    let mut is_scheme = false;
    let shown = line.into_iter().map(|word| {
        let of = option.take();
        if std::mem::replace(&mut is_scheme, is_scheme_word(word)) && !word.starts_with('-') {
            return HIDDEN.into();
        }
        if let Some(name) = of
            && (!word.starts_with('-') || is_random(word))
        {
            return match name {
                "-u" => user(word),
                _ if is_secret(name, word) => HIDDEN.into(),
                // `--set key=value`
                _ => pair(word),
            };
        }
        match short_password(word) {
            Some(shown) => return shown.into(),
            None if word.starts_with('-') && !word.contains('=') => option = Some(word),
            None => {}
        }
        pair(word)
    });
    shown.collect()
}

/// Value of an option: of `-p` by what it looks like, of others by their name.
fn is_secret(name: &str, value: &str) -> bool {
    if value.is_empty() || is_number(value) {
        return false;
    }
    if name == "-p" {
        return !is_plain(value);
    }
    let words = words_of_name(name);
    let Some((last, others)) = words.split_last() else {
        return false;
    };
    let before = others.last().map_or("", String::as_str);
    match last.as_str() {
        last if SECRETS.contains(&last) => true,
        "apikey" | "accesskey" | "secretkey" | "privatekey" => true,
        "key" | "keys" if KINDS_OF_KEYS.contains(&before) => true,
        "key" | "keys" => is_random(value),
        last if MAYBE.contains(&last) => {
            !is_switch(value) && !is_special(value) && !SPECIAL_TOKENS.contains(&before)
        }
        _ => false,
    }
}

/// `--hf-token`, `trainer.apiKey` and `WANDB_API_KEY` as words in small letters.
fn words_of_name(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_small = false;
    for c in name.chars() {
        if !c.is_alphanumeric() || (c.is_uppercase() && was_small) {
            words.push(String::new());
        }
        was_small = c.is_lowercase() || c.is_numeric();
        if c.is_alphanumeric() {
            words.last_mut().expect("there is one").extend(c.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// A value in which only addresses and well-known tokens are hidden.
fn words(value: &str) -> Cow<'_, str> {
    let parts: Vec<Cow<'_, str>> = value.split(' ').map(word).collect();
    let mut shown = Vec::with_capacity(parts.len());
    let (mut is_scheme, mut is_changed) = (false, false);
    for (part, original) in parts.into_iter().zip(value.split(' ')) {
        let part = if is_scheme { HIDDEN.into() } else { part };
        is_scheme = is_scheme_word(original);
        is_changed |= part != original;
        shown.push(part);
    }
    if is_changed {
        shown.join(" ").into()
    } else {
        value.into()
    }
}

fn word(word: &str) -> Cow<'_, str> {
    let is_known = PREFIXES.iter().any(|(prefix, rest)| {
        let body = word.strip_prefix(prefix);
        body.is_some_and(|body| body.len() >= *rest && body.chars().any(|c| c.is_ascii_digit()))
    });
    if is_known || word.contains("PRIVATE KEY") {
        return HIDDEN.into();
    }
    match word.find("://") {
        Some(at) => address(word, at + 3),
        None => word.into(),
    }
}

/// An address whose authority begins at `start`: without the password and the secrets of its query.
fn address(word: &str, start: usize) -> Cow<'_, str> {
    let (scheme, rest) = word.split_at(start);
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let authority = match authority.rsplit_once('@') {
        Some((user, host)) => match user.split_once(':') {
            Some((name, _)) => format!("{name}:{HIDDEN}@{host}"),
            // A token alone, as for a repository.
            None if is_random(user) => format!("{HIDDEN}@{host}"),
            None => authority.to_owned(),
        },
        None => authority.to_owned(),
    };
    let path = match path.split_once('?') {
        Some((path, query)) => {
            let parameters: Vec<Cow<'_, str>> = query.split('&').map(parameter).collect();
            format!("{path}?{}", parameters.join("&"))
        }
        None => path.to_owned(),
    };
    let shown = format!("{scheme}{authority}{path}");
    if shown == word { word.into() } else { shown.into() }
}

/// One of an address's query: more is a secret there than among options.
fn parameter(pair: &str) -> Cow<'_, str> {
    let Some((name, value)) = pair.split_once('=') else {
        return pair.into();
    };
    let words = words_of_name(name);
    let is_key = words
        .last()
        .is_some_and(|last| matches!(last.as_str(), "key" | "sig" | "signature"));
    if is_secret(name, value) || is_key && !value.is_empty() {
        return format!("{name}={HIDDEN}").into();
    }
    pair.into()
}

/// `name:password`
fn user(word: &str) -> Cow<'_, str> {
    match word.split_once(':') {
        Some((name, _)) => format!("{name}:{HIDDEN}").into(),
        None => words(word),
    }
}

/// `-phunter2`, as `mysql` has it: with letters and digits, so that `-pv` stays.
fn short_password(word: &str) -> Option<String> {
    let rest = word.strip_prefix("-p")?;
    let is_password = has_letters_and_digits(rest) && !is_plain(rest) && !rest.contains('=');
    is_password.then(|| format!("-p{HIDDEN}"))
}

/// The next word is a secret.
fn is_scheme_word(word: &str) -> bool {
    let last = word.rsplit([' ', '\'', '"', ':', '=']).next().unwrap_or_default();
    last.eq_ignore_ascii_case("bearer") || last.eq_ignore_ascii_case("basic")
}

fn is_number(value: &str) -> bool {
    value.parse::<f64>().is_ok()
}

fn is_switch(value: &str) -> bool {
    let switches = [
        "true", "false", "yes", "no", "on", "off", "none", "null", "auto", "basic",
    ];
    switches.iter().any(|switch| value.eq_ignore_ascii_case(switch))
}

/// A token of a vocabulary.
fn is_special(value: &str) -> bool {
    value.starts_with(['<', '[']) || value.parse::<char>().is_ok()
}

/// What `-p` may stand for, besides a password: a port or more of them, a place, a type.
fn is_plain(value: &str) -> bool {
    let is_range = value.chars().all(|c| c.is_ascii_digit() || ".,:-x%".contains(c));
    is_range || is_switch(value) || TYPES.contains(&value) || value.contains('/') || value.starts_with('.')
}

fn has_letters_and_digits(value: &str) -> bool {
    value.chars().any(char::is_alphabetic) && value.chars().any(|c| c.is_ascii_digit())
}

/// Long, with letters and digits, and no path, sentence or name of a file.
fn is_random(value: &str) -> bool {
    let is_of_words = value.contains(['/', ' ', '.', ',']);
    value.len() >= RANDOM_BYTES && has_letters_and_digits(value) && !is_of_words
}

#[cfg(test)]
#[path = "redaction_tests.rs"]
mod tests;
