//! What all nodes of a job must agree on: as a hash that tells whether they do, and in words that tell where they do
//! not.
//!
//! Other nodes, other users of a shared rendezvous and its log see the words. None of them needs a password for that, so
//! what looks like one is hidden ([`redaction`]).

use std::borrow::Cow;
use std::fmt::Write as _;

use super::redaction;
use super::target::{Target, TargetKind};

/// Most bytes of target and keys that a description takes; the daemon takes some more.
const DESCRIPTION_BYTES: usize = 8 << 10;
/// Most bytes of the value of one key in a description; of a longer one the hash tells whether it differs.
const VALUE_BYTES: usize = 512;
/// Most bytes of the words of a command line in a description.
const WORDS_BYTES: usize = 2 << 10;
/// Settings that must be the same on all nodes of a job. The number of workers may differ.
#[derive(Clone, Copy, Debug)]
pub struct AgreedSettings {
    /// Lower end of `--nnodes`.
    pub min_nodes: u32,
    /// Upper end of `--nnodes`.
    pub max_nodes: u32,
    /// `--max-restarts`.
    pub max_restarts: u32,
}

impl Target {
    /// Hash of what the nodes of one job must agree on. A program's own contents
    /// are not part of it: they may rightly differ between machines, a configuration may not.
    pub fn signature(&self, settings: &AgreedSettings) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut field = |bytes: &[u8]| {
            // Lengths keep `["ab"]` and `["a", "b"]` apart.
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        let name = self.display_name();
        field(name.as_bytes());
        field(&[
            u8::from(self.kind == TargetKind::Native),
            u8::from(self.kind == TargetKind::Module),
        ]);
        field(self.yaml.as_deref().unwrap_or_default().as_bytes());
        self.overrides.iter().for_each(|pair| field(pair.as_bytes()));
        field(&settings.min_nodes.to_le_bytes());
        field(&settings.max_nodes.to_le_bytes());
        field(&settings.max_restarts.to_le_bytes());
        hasher.finalize().to_hex().to_string()
    }

    /// The same for people, as lines `key: value`, without the flags that nodes exchange anyway.
    /// `entries` are the keys of the configuration. After an empty line follows what says less: a configuration's text
    /// may differ where no value does, and arguments may differ rightly.
    pub fn describe(&self, entries: &[(String, String)]) -> String {
        let kind = match self.kind {
            TargetKind::Module => "module",
            TargetKind::Native | TargetKind::Python | TargetKind::Program => "target",
        };
        let mut words = String::new();
        let mut room = DESCRIPTION_BYTES;
        let mut add = |key: &str, value: &str| {
            let line = format!("{key}: {}\n", one_line(value));
            // What has no room is in the hash of the text.
            if line.len() <= room {
                room -= line.len();
                words.push_str(&line);
            }
        };
        add(kind, &self.display_name());
        for (key, value) in entries {
            add(key, &short(&redaction::value(key, value)));
        }
        words.push('\n');
        if let Some(yaml) = &self.yaml {
            let hash = blake3::hash(yaml.as_bytes()).to_hex();
            let _ = writeln!(
                words,
                "the text of the configuration: {} bytes, hash {}",
                yaml.len(),
                &hash[..8]
            );
        }
        for (key, values) in [("--set", self.overrides()), ("arguments", self.arguments())] {
            if !values.is_empty() {
                let _ = writeln!(words, "{key}: {}", clip(&one_line(&values)));
            }
        }
        words
    }

    fn overrides(&self) -> String {
        let shown = self.overrides.iter().map(|pair| redaction::pair(pair));
        shown.collect::<Vec<_>>().join(" ")
    }

    fn arguments(&self) -> String {
        let args: Vec<_> = self.args.iter().map(|arg| arg.to_string_lossy()).collect();
        redaction::command_line(args.iter().map(AsRef::as_ref)).join(" ")
    }
}

/// A value that leaves room for the others: one that is left out would be taken for one that is not set.
fn short(value: &str) -> Cow<'_, str> {
    if value.len() <= VALUE_BYTES {
        return value.into();
    }
    let hash = blake3::hash(value.as_bytes()).to_hex();
    let start = &value[..value.floor_char_boundary(VALUE_BYTES)];
    format!("{start}… ({} bytes, hash {})", value.len(), &hash[..8]).into()
}

/// As much of a list of words as a description takes.
fn clip(words: &str) -> &str {
    &words[..words.floor_char_boundary(WORDS_BYTES)]
}

/// Lines are what tells the entries of a description apart.
fn one_line(value: &str) -> String {
    value.replace(|c: char| c.is_control(), " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGREED: AgreedSettings = AgreedSettings {
        min_nodes: 1,
        max_nodes: 2,
        max_restarts: 3,
    };

    fn native(yaml: &str, overrides: &[&str]) -> Target {
        Target {
            name: "dir/train.yaml".into(),
            kind: TargetKind::Native,
            args: vec![],
            overrides: overrides.iter().map(ToString::to_string).collect(),
            yaml: Some(yaml.into()),
        }
    }

    #[test]
    fn signatures_differ_where_the_jobs_do() {
        let base = native("x: 1", &[]).signature(&AGREED);
        assert_eq!(base, native("x: 1", &[]).signature(&AGREED));
        let other_restarts = AgreedSettings {
            max_restarts: 0,
            ..AGREED
        };
        for other in [
            native("x: 2", &[]).signature(&AGREED),
            native("x: 1", &["a.b=1"]).signature(&AGREED),
            native("x: 1", &[]).signature(&other_restarts),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn a_description_has_a_line_for_each_key() {
        let entries = [("x", "1"), ("data.val", "two\nlines")].map(|(key, value)| (key.into(), value.into()));
        insta::assert_snapshot!(native("x: 1", &["a.b=1"]).describe(&entries), @r"
        target: train.yaml
        x: 1
        data.val: two lines

        the text of the configuration: 4 bytes, hash 5c86c9ef
        --set: a.b=1
        ");
        let huge = [
            ("a".to_owned(), "v".repeat(1 << 20)),
            ("b".to_owned(), "1".to_owned()),
        ];
        let words = native("x: 1", &[&"s".repeat(1 << 20)]).describe(&huge);
        assert!(
            words.len() < 16 << 10 && words.contains("b: 1\n"),
            "{}",
            words.len()
        );
        let other = [("a".to_owned(), format!("{}w", "v".repeat(1 << 20)))];
        let of_a = |words: &str| {
            words
                .lines()
                .find(|line| line.starts_with("a: vv"))
                .map(str::to_owned)
        };
        let (one, other) = (of_a(&words), of_a(&native("x: 1", &[]).describe(&other)));
        assert!(one.is_some() && one != other, "{one:?}");
    }

    #[test]
    fn the_nodes_of_a_job_may_have_other_arguments_of_a_program() {
        let script = |folder: &str| Target {
            name: "t.py".into(),
            kind: TargetKind::Python,
            args: vec![folder.into()],
            overrides: vec![],
            yaml: None,
        };
        let (one, other) = (script("/scratch/a"), script("/scratch/b"));
        assert_eq!(one.signature(&AGREED), other.signature(&AGREED));
        insta::assert_snapshot!(one.describe(&[]), @r"
        target: t.py

        arguments: /scratch/a
        ");
    }

    #[test]
    fn no_secret_is_told_to_other_nodes() {
        let secret = "https://me:hunter2@host/a";
        let entries = [("data.train".to_owned(), secret.to_owned())];
        let target = Target {
            args: vec!["--auth".into(), "hunter2".into()],
            ..native("x: 1", &["logger.api_key=hunter2"])
        };
        let words = target.describe(&entries);
        assert!(!words.contains("hunter2"), "{words}");
        for shown in [
            "data.train: https://me:…@host/a",
            "--set: logger.api_key=…",
            "arguments: --auth …",
        ] {
            assert!(words.contains(shown), "{words}");
        }
    }
}
