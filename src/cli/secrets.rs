//! Secrets among the arguments of a program: other nodes, other users of a shared rendezvous and its log see what
//! differs, and none of them needs a password for that.

/// A part of an option's or a variable's name that says that its value must not be shown.
const TELLTALES: &[&str] = &[
    "apikey",
    "credential",
    "credentials",
    "key",
    "passphrase",
    "passwd",
    "password",
    "secret",
    "token",
];
/// Stands for the value of one.
const HIDDEN: &str = "…";

/// The words of a command line in one, without the values of `--api-key=…`, `--token …`, `DB_PASSWORD=…` and the like.
pub fn hide_secrets<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let mut is_value = false;
    let shown = words.into_iter().map(|word| {
        if std::mem::take(&mut is_value) && !word.starts_with('-') {
            return HIDDEN.to_owned();
        }
        match word.split_once('=') {
            Some((name, _)) if is_telltale(name) => format!("{name}={HIDDEN}"),
            None if word.starts_with('-') => {
                is_value = is_telltale(word);
                word.to_owned()
            }
            _ => word.to_owned(),
        }
    });
    shown.collect::<Vec<_>>().join(" ")
}

/// True of a name that has one of the parts: `--max-tokens` and `--tokenizer` have none.
fn is_telltale(name: &str) -> bool {
    let name = name.to_lowercase();
    let mut parts = name.split(|c: char| !c.is_alphanumeric());
    parts.any(|part| TELLTALES.contains(&part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_secrets_are_hidden_and_no_others() {
        for (words, shown) in [
            ("--password=hunter2 --lr 3", "--password=… --lr 3"),
            ("--hf-token hunter2 --lr 3", "--hf-token … --lr 3"),
            (
                "env WANDB_API_KEY=hunter2 python t.py",
                "env WANDB_API_KEY=… python t.py",
            ),
            ("--use-token --lr 3", "--use-token --lr 3"),
            ("trainer.api_key=a=b x", "trainer.api_key=… x"),
            (
                "--max-tokens 5 --tokenizer=gpt2 token",
                "--max-tokens 5 --tokenizer=gpt2 token",
            ),
            ("", ""),
        ] {
            assert_eq!(hide_secrets(words.split(' ')), shown);
        }
    }
}
