//! What all nodes of a job must have alike: the target, flags and the keys of its configuration. Other nodes receive a
//! hash of each value; this launcher prints its own values where nodes disagree.

use std::collections::BTreeMap;

use ddp_launcher::AgreedValue;
use ddp_proto::agreed::{self, ARGUMENTS};

use super::redaction;
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
                hash: agreed::hash(key, value),
                shown: shown.to_owned(),
            };
            all.insert(key.to_owned(), value);
        };
        let name = self.display_name();
        add(kind, &name, &name);
        for (key, value) in entries {
            add(key, value, &redaction::value(key, value));
        }
        for (flag, value) in flags {
            add(flag, value, value);
        }
        if !self.args.is_empty() {
            let args: Vec<_> = self.args.iter().map(|arg| arg.to_string_lossy()).collect();
            let shown = redaction::command_line(args.iter().map(AsRef::as_ref));
            add(ARGUMENTS, &args.join("\0"), &shown.join(" "));
        }
        all
    }
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
}
