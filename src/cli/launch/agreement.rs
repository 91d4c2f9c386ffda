//! What all nodes of a job must have alike: the target, flags and the keys of its configuration. Other nodes receive a
//! hash of each value; this launcher prints its own values where nodes disagree, without those of secret names.

use std::borrow::Cow;
use std::collections::BTreeMap;

use ddp_launcher::AgreedValue;
use ddp_proto::rendezvous::{ARGUMENTS, agreed_hash};

use super::target::{Target, TargetKind};

/// Bytes of a value that are printed.
const SHOWN_BYTES: usize = 160;

impl Target {
    /// The values that all nodes must have alike, with the keys of the configuration and further `flags`. A program's own
    /// contents are not among them: they may differ between machines.
    pub fn agreed(
        &self,
        entries: &[(String, String)],
        flags: &[(&str, String)],
    ) -> BTreeMap<String, AgreedValue> {
        let kind = match self.kind {
            TargetKind::Module => "module",
            TargetKind::Native | TargetKind::Python | TargetKind::Program => "target",
        };
        let mut all = BTreeMap::new();
        let mut add = |key: &str, value: &str, shown: &str| {
            let shown = &shown[..shown.floor_char_boundary(SHOWN_BYTES)];
            let value = AgreedValue {
                hash: agreed_hash(key, value),
                shown: shown.to_owned(),
            };
            all.insert(key.to_owned(), value);
        };
        let name = self.display_name();
        add(kind, &name, &name);
        for (key, value) in entries {
            add(key, value, &shown_value(key, value));
        }
        for (flag, value) in flags {
            add(flag, value, value);
        }
        if !self.args.is_empty() {
            let args: Vec<_> = self.args.iter().map(|arg| arg.to_string_lossy()).collect();
            let shown = shown_words(args.iter().map(AsRef::as_ref));
            add(ARGUMENTS, &args.join("\0"), &shown.join(" "));
        }
        all
    }
}

/// Stands for a hidden value.
pub const HIDDEN: &str = "…";

/// Ends of the names of secrets, whatever their case: `--hf-token`, `WANDB_API_KEY`, `db.password`.
const SECRETS: [&str; 5] = ["credentials", "key", "password", "secret", "token"];

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRETS.iter().any(|end| name.ends_with(end))
}

/// The value of a flag, a variable or a key of this name, as it may be shown.
pub fn shown_value<'a>(name: &str, value: &'a str) -> Cow<'a, str> {
    if is_secret(name) && !value.is_empty() {
        return HIDDEN.into();
    }
    shown_words(value.split(' ')).join(" ").into()
}

/// The words of a command line, as they may be shown: `--password X`, `--password=X`, `a.password=X` and
/// `https://user:X@host` hide X.
pub fn shown_words<'a>(line: impl IntoIterator<Item = &'a str>) -> Vec<Cow<'a, str>> {
    let mut is_next_secret = false;
    let shown = line.into_iter().map(|word| {
        if std::mem::take(&mut is_next_secret) {
            return HIDDEN.into();
        }
        // `--set=api.key=X`: each name before a `=` counts.
        if let Some((at, _)) = word.match_indices('=').find(|(at, _)| is_secret(&word[..*at])) {
            return format!("{}={HIDDEN}", &word[..at]).into();
        }
        is_next_secret = word.starts_with('-') && is_secret(word);
        without_password(word).map_or(word.into(), Cow::from)
    });
    shown.collect()
}

/// An address whose password is hidden; none if it has no password.
fn without_password(word: &str) -> Option<String> {
    let (scheme, rest) = word.split_once("://")?;
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (user, host) = authority.rsplit_once('@')?;
    let (user, _) = user.split_once(':')?;
    Some(format!("{scheme}://{user}:{HIDDEN}@{host}{path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(args: &[&str]) -> Target {
        Target {
            name: "dir/train.yaml".into(),
            kind: TargetKind::Native,
            args: args.iter().map(Into::into).collect(),
            overrides: vec![],
            yaml: Some("x: 1".into()),
        }
    }

    #[test]
    fn every_key_flag_and_argument_counts() {
        let entries = |x: &str| {
            [
                ("x".to_owned(), x.to_owned()),
                ("db.password".to_owned(), "hunter2".to_owned()),
            ]
        };
        let flags = [("--max-restarts", "3".to_owned())];
        let first = target(&["--auth-token", "hunter2"]).agreed(&entries("1"), &flags);
        let keys: Vec<_> = first.keys().map(String::as_str).collect();
        assert_eq!(keys, ["--max-restarts", ARGUMENTS, "db.password", "target", "x"]);
        let shown: Vec<_> = first.values().map(|value| value.shown.as_str()).collect();
        assert_eq!(shown, ["3", "--auth-token …", "…", "train.yaml", "1"]);
        let second = target(&[]).agreed(&entries(&"2".repeat(1 << 20)), &flags);
        assert_ne!(first["x"].hash, second["x"].hash);
        assert_eq!(second["x"].shown.len(), SHOWN_BYTES);
        assert_eq!(first["db.password"].hash, second["db.password"].hash);
    }

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
            ("--from=https://me:a@b@host/c", "--from=https://me:…@host/c"),
        ] {
            assert_eq!(shown_words(line.split(' ')).join(" "), shown);
        }
        assert_eq!(shown_value("HF_TOKEN", "hunter2"), HIDDEN);
        assert_eq!(shown_value("set", "db.secret=a x=1"), "db.secret=… x=1");
        assert_eq!(shown_value("OMP_NUM_THREADS", "2"), "2");
    }
}
