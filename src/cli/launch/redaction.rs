//! Hides secrets in what the launcher prints: the values of flags, variables and keys whose names say that they are one.

use std::borrow::Cow;

/// Stands for a hidden value.
pub const HIDDEN: &str = "…";

/// Ends of the names of secrets, whatever their case: `--hf-token`, `WANDB_API_KEY`, `db.password`.
const SECRETS: [&str; 5] = ["credentials", "key", "password", "secret", "token"];

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRETS.iter().any(|end| name.ends_with(end))
}

/// The value of a flag, a variable or a key of this name, as it may be shown.
pub fn value<'a>(name: &str, value: &'a str) -> Cow<'a, str> {
    if is_secret(name) && !value.is_empty() {
        return HIDDEN.into();
    }
    match value.contains(['=', ' ']) {
        true => command_line(value.split(' ')).join(" ").into(),
        false => value.into(),
    }
}

/// The words of a command line, as they may be shown: `--password X`, `--password=X` and `a.password=X` hide X.
pub fn command_line<'a>(line: impl IntoIterator<Item = &'a str>) -> Vec<Cow<'a, str>> {
    let mut is_next_secret = false;
    let shown = line.into_iter().map(|word| {
        let is_value = std::mem::take(&mut is_next_secret);
        if is_value {
            return HIDDEN.into();
        }
        // `--set=api.key=X`: each name before a `=` counts.
        if let Some((at, _)) = word.match_indices('=').find(|(at, _)| is_secret(&word[..*at])) {
            return format!("{}={HIDDEN}", &word[..at]).into();
        }
        is_next_secret = word.starts_with('-') && is_secret(word);
        word.into()
    });
    shown.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_of_secret_names_are_hidden() {
        for (line, shown) in [
            ("--password=hunter2 --lr 3", "--password=… --lr 3"),
            ("--hf-token hunter2 --lr 3", "--hf-token … --lr 3"),
            ("--password -hunter2 x", "--password … x"),
            (
                "WANDB_API_KEY=a=b PGPASSWORD=hunter2",
                "WANDB_API_KEY=… PGPASSWORD=…",
            ),
            (
                "--set logger.api_key=a --set=db.password=b",
                "--set logger.api_key=… --set=db.password=…",
            ),
            ("--token-count 5 tokenizer=gpt2", "--token-count 5 tokenizer=gpt2"),
        ] {
            assert_eq!(command_line(line.split(' ')).join(" "), shown);
        }
        assert_eq!(value("HF_TOKEN", "hunter2"), HIDDEN);
        assert_eq!(value("set", "db.secret=a x=1"), "db.secret=… x=1");
        assert_eq!(value("OMP_NUM_THREADS", "2"), "2");
    }
}
