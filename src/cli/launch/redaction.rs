//! Values that must not be shown: the one place that knows what a secret looks like.
//!
//! Command lines, configurations and environments are shown by `--dry-run`, told to the other nodes of a job, and written
//! to a shared rendezvous' log. A secret among them is replaced by [`HIDDEN`]. Two kinds of rules find one:
//!
//! | where | hidden | shown, though it looks similar |
//! |---|---|---|
//! | a name with a word that ends as one of `SECRETS` does: `--password X`, `PGPASSWORD=X`, `api.password: X` | always | `--password-file F` |
//! | one that ends in `key` behind a word of `KINDS_OF_KEYS`, or is `apikey`: `--api-key X` | always | `--sort-key loss`, `image_key: jpg` |
//! | one that ends in a word of `MAYBE`: `--token X`, `--auth X` | unless `X` is a number, a switch or a special token | `--token-count 5`, `tokenizer: gpt2`, `pad_token: <pad>` |
//! | any other `key=X` | if `X` looks random | `data.key=text` |
//! | `-p X`, as clients of databases have it | unless `X` is a number, a range, a path or a type | `-p 8080`, `-p bf16`, `-p data/` |
//! | `-u USER:X` and `--user USER:X`, as `curl` has it | `X` | `-u buffered` |
//! | `scheme://user:X@host`, and `?token=X` in an address | `X` | `http://host:80/a?page=2` |
//! | behind `Bearer` or `Basic` | always | |
//! | `name: X` and `"name":X`, where the name says it, and words of a word with spaces | as above | `lr: 3` |
//! | what begins with a word of `PREFIXES`, such as `hf_`, wherever it is | if it is long, and has a digit or is one word | `hf_hub` |
//!
//! A hidden value tells nothing, not even its length. Where a rule is unsure it hides: a hidden hyperparameter is a nuisance,
//! a secret in another user's log is not. Only a password may be a number.

use std::borrow::Cow;

/// Stands for a value.
pub const HIDDEN: &str = "…";

/// End of a word in a name whose value is a secret.
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
/// Last word of a name whose value says where a secret is, or how it is to be handled.
const ABOUT_SECRETS: &[&str] = &[
    "dir", "file", "folder", "length", "name", "path", "policy", "prompt", "type", "url",
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
/// How many pairs may be within one another. What is deeper is hidden.
const NESTED: usize = 8;
/// What a random value has at least.
const RANDOM_BYTES: usize = 12;

/// What may be shown of the value of a key, a variable or an option of this name.
pub fn value<'a>(name: &str, value: &'a str) -> Cow<'a, str> {
    value_within(name, value, NESTED)
}

fn value_within<'a>(name: &str, value: &'a str, left: usize) -> Cow<'a, str> {
    if is_secret(name, value) {
        return HIDDEN.into();
    }
    // `--set=key=value`, and lists of such pairs; but no sentence, and no path or address in front of a `=`.
    let name = value.split_once('=').map(|(name, _)| name);
    if name.is_none_or(|name| name.contains([' ', '/'])) {
        return words(value, left);
    }
    let parts: Vec<Cow<'_, str>> = value.split(',').map(|part| pair_within(part, left)).collect();
    let shown = parts.join(",");
    if shown == value {
        value.into()
    } else {
        shown.into()
    }
}

/// What may be shown of `NAME=VALUE`.
pub fn pair(pair: &str) -> Cow<'_, str> {
    pair_within(pair, NESTED)
}

fn pair_within(pair: &str, left: usize) -> Cow<'_, str> {
    match pair.split_once('=') {
        Some((name, found)) if !name.contains("://") && !name.contains(' ') => match left
            .checked_sub(1)
            .map_or(HIDDEN.into(), |left| value_within(name, found, left))
        {
            shown if shown == found => pair.into(),
            shown => format!("{name}={shown}").into(),
        },
        _ => words(pair, left),
    }
}

/// What may be shown of each word of a command line, in order.
pub fn command_line<'a>(line: impl IntoIterator<Item = &'a str>) -> Vec<Cow<'a, str>> {
    command_line_within(line, NESTED)
}

fn command_line_within<'a>(line: impl IntoIterator<Item = &'a str>, left: usize) -> Vec<Cow<'a, str>> {
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
                "-u" | "--user" | "--proxy-user" => user(word, left),
                // `Authorization: Bearer X`
                _ if !name.starts_with('-') && is_scheme_name(word) => word.into(),
                _ if is_secret(name, word) => HIDDEN.into(),
                // `--set key=value`
                _ => pair_within(word, left),
            };
        }
        match short_password(word) {
            Some(shown) => return shown.into(),
            None if word.starts_with('-') && !word.contains('=') => option = Some(word),
            None => option = name_of_value(word),
        }
        pair_within(word, left)
    });
    shown.collect()
}

/// Value of an option: of `-p` by what it looks like, of others by their name.
fn is_secret(name: &str, value: &str) -> bool {
    let words = words_of_name(name);
    let Some((last, others)) = words.split_last().filter(|_| !value.is_empty()) else {
        return false;
    };
    let is_about = ABOUT_SECRETS.contains(&last.as_str());
    if !is_about && !is_switch(value) && words.iter().any(|word| is_word_of_secrets(word)) {
        return true;
    }
    if is_number(value) {
        return false;
    }
    if name == "-p" {
        return !is_plain(value);
    }
    let before = others.last().map_or("", String::as_str);
    match last.as_str() {
        "apikey" | "accesskey" | "secretkey" | "privatekey" => true,
        "key" | "keys" if KINDS_OF_KEYS.contains(&before) => true,
        "key" | "keys" => is_random(value),
        last if MAYBE.contains(&last) => {
            !is_switch(value) && !is_special(value) && !SPECIAL_TOKENS.contains(&before)
        }
        _ => false,
    }
}

/// `password`, `PGPASSWORD` and `password2`.
fn is_word_of_secrets(word: &str) -> bool {
    let word = word.trim_end_matches(|c: char| c.is_ascii_digit());
    SECRETS.iter().any(|secret| word.ends_with(secret))
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

/// A value without a name: addresses and well-known tokens are hidden, and what a command line, a header, a list of pairs or
/// JSON in it would hide.
fn words(value: &str, left: usize) -> Cow<'_, str> {
    let is_separator = |c: char| c.is_whitespace() || ",;{}".contains(c);
    if !value.contains(is_separator) {
        return word(value);
    }
    let words: Vec<&str> = value.split_inclusive(is_separator).collect();
    let bare: Vec<&str> = words
        .iter()
        .map(|word| word.trim_end_matches(is_separator))
        .collect();
    // Those in which nothing stands between two separators have no part in it.
    let shown = command_line_within(bare.iter().copied().filter(|word| !word.is_empty()), left);
    let mut shown = shown.into_iter();
    let mut text = String::with_capacity(value.len());
    for (word, bare) in words.iter().zip(bare) {
        if !bare.is_empty() {
            text.push_str(&shown.next().unwrap_or(HIDDEN.into()));
        }
        text.push_str(&word[bare.len()..]);
    }
    if text == value { value.into() } else { text.into() }
}

/// The name in `name:` and `"name":`, whose value is the next word.
fn name_of_value(word: &str) -> Option<&str> {
    let name = word.strip_suffix(':')?.trim_matches(['"', '\'']);
    (!name.is_empty() && !name.contains("://")).then_some(name)
}

/// `"name":"value"` and `name:value`, where the name says that it is a secret.
fn named(text: &str) -> Option<String> {
    let (name, found) = text.split_once(':')?;
    let bare = found.trim_matches(['"', '\'']);
    let is_hidden =
        !bare.is_empty() && !found.starts_with("//") && is_secret(name.trim_matches(['"', '\'']), bare);
    is_hidden.then(|| format!("{name}:{HIDDEN}"))
}

fn word(text: &str) -> Cow<'_, str> {
    let is_known = PREFIXES.iter().any(|(prefix, rest)| {
        let body = text.strip_prefix(prefix);
        let has_digit = |body: &str| body.chars().any(|c| c.is_ascii_digit());
        let is_one_word = |body: &str| body.chars().all(|c| c.is_ascii_alphanumeric());
        body.is_some_and(|body| body.len() >= *rest && (has_digit(body) || is_one_word(body)))
    });
    if is_known || text.contains("PRIVATE KEY") {
        return HIDDEN.into();
    }
    if let Some(shown) = named(text) {
        return shown.into();
    }
    // A list of addresses is shown one by one.
    let (mut shown, mut rest) = (String::new(), text);
    while let Some(start) = rest.find("://").map(|at| at + 3) {
        let (first, others) = rest.split_at(next_address(rest, start).unwrap_or(rest.len()));
        shown.push_str(&address(first, start));
        rest = others;
    }
    if shown.is_empty() || shown == text {
        return text.into();
    }
    (shown + rest).into()
}

/// Where the scheme of the next address begins, in a list of addresses. One in a query is that query's.
fn next_address(word: &str, from: usize) -> Option<usize> {
    let at = from + word[from..].find("://")?;
    let is_of_scheme = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    let scheme = word[from..at].trim_end_matches(is_of_scheme);
    (!scheme.contains('?')).then_some(from + scheme.len())
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
    format!("{name}={}", word(value)).into()
}

/// `name:password`
fn user(word: &str, left: usize) -> Cow<'_, str> {
    match word.split_once(':') {
        Some((name, _)) => format!("{name}:{HIDDEN}").into(),
        None => words(word, left),
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
    is_scheme_name(word.rsplit([' ', '\'', '"', ':', '=']).next().unwrap_or_default())
}

fn is_scheme_name(word: &str) -> bool {
    word.eq_ignore_ascii_case("bearer") || word.eq_ignore_ascii_case("basic")
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
