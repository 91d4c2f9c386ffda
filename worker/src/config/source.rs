//! A configuration's source, the YAML and its overrides (`--set key=value`), as a tree in which each value knows where
//! it came from.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::problem::{ConfigError, Problem};

/// A file and its overrides.
#[derive(Clone, Debug)]
pub struct Source {
    path: PathBuf,
    overrides: Vec<String>,
    root: Node,
}

impl Source {
    /// Reads the text of the file at `path`, and applies the overrides in order.
    pub(super) fn parse(path: &Path, text: &str, overrides: &[String]) -> Result<Self, ConfigError> {
        let not_valid = |error: SyntaxError| ConfigError {
            place: place_in(path, error.line),
            problem: Problem::new("", format!("not valid YAML: {}", error.what))
                .with_optional_hint(error.hint.map(ToOwned::to_owned)),
        };
        // The parser takes a tab in front of the first key for a part of a value, and one after a line with a value for a
        // part of that line.
        let tab = tab_of_indentation(text);
        if let Some((line, true)) = tab {
            return Err(not_valid(tab_error(line)));
        }
        let mut root = Node::parse(text).map_err(|error| match tab {
            Some((line, _)) if line <= error.line + 1 => not_valid(tab_error(line)),
            _ => not_valid(error),
        })?;
        if let Value::Map(entries) = &mut root.value {
            // Sections that only hold anchors for others are named so in Compose (`x-common`) and GitLab (`.common`).
            entries.retain(|entry| !entry.key.starts_with("x-") && !entry.key.starts_with('.'));
        }
        let mut source = Self {
            path: path.to_owned(),
            overrides: overrides.to_vec(),
            root,
        };
        for (index, text) in overrides.iter().enumerate() {
            let applied = source.root.apply(index, text);
            applied.map_err(|what| source.error_at(Origin::Set(index), Problem::new("", what)))?;
        }
        Ok(source)
    }

    pub(super) fn root(&self) -> &Node {
        &self.root
    }

    /// The problem, with the place that the value of its key came from. For a key that is not set, this is the section
    /// around it.
    pub fn locate(&self, problem: Problem) -> ConfigError {
        self.error_at(self.root.origin_of(&problem.key), problem)
    }

    pub(super) fn error_at(&self, origin: Origin, problem: Problem) -> ConfigError {
        ConfigError {
            place: self.place_of(origin),
            problem,
        }
    }

    /// True if the file or an override has the key.
    pub(super) fn has(&self, key: &str) -> bool {
        self.root.find(key).1
    }

    /// True if the key's value comes from an override.
    pub(super) fn is_set(&self, key: &str) -> bool {
        matches!(self.root.origin_of(key), Origin::Set(_))
    }

    /// Where the value of a dotted key came from: `train.yaml:12`, or the `--set`. For a key that is not set, the
    /// section around it.
    pub fn place(&self, key: &str) -> String {
        self.place_of(self.root.origin_of(key))
    }

    /// The dotted keys that file and overrides set, and their values as YAML would have them in one line.
    pub fn entries(&self) -> Vec<(String, String)> {
        self.root.entries()
    }

    /// The place of an unknown key, without its value, which may be a secret.
    pub(super) fn place_without_value(&self, origin: Origin) -> String {
        match origin {
            Origin::Set(index) => {
                let text = &self.overrides[index];
                format!(
                    "`--set {}`",
                    text.split_once('=').map_or(text.as_str(), |(key, _)| key)
                )
            }
            Origin::Line(_) => self.place_of(origin),
        }
    }

    fn place_of(&self, origin: Origin) -> String {
        match origin {
            Origin::Line(line) => place_in(&self.path, line),
            Origin::Set(index) => format!("`--set {}`", self.overrides[index]),
        }
    }
}

fn place_in(path: &Path, line: u64) -> String {
    match line {
        0 => path.display().to_string(),
        line => format!("{}:{line}", path.display()),
    }
}

/// The first line that is indented with a tab, from 1, and whether it is the first that is not empty or a comment. Lists
/// and maps in brackets may be.
fn tab_of_indentation(text: &str) -> Option<(u64, bool)> {
    let content = |line: &str| line.trim_start().chars().next().filter(|&c| c != '#');
    let mut lines = (1..)
        .zip(text.lines())
        .filter(|(_, line)| content(line).is_some());
    let has_tab = |line: &str| line[..line.len() - line.trim_start().len()].contains('\t');
    let (first, line) = lines.next()?;
    if has_tab(line) {
        return Some((first, !matches!(content(line), Some('{' | '['))));
    }
    lines
        .find(|(_, line)| has_tab(line))
        .map(|(number, _)| (number, false))
}

/// Text that is no YAML.
struct SyntaxError {
    /// From 1, or 0 where it is not known.
    line: u64,
    what: String,
    hint: Option<&'static str>,
}

fn tab_error(line: u64) -> SyntaxError {
    SyntaxError {
        line,
        what: "a tab in the indentation".into(),
        hint: Some("use spaces: YAML allows no tabs there"),
    }
}

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A line of the file, from 1; 0 is the file as a whole.
    Line(u64),
    /// An override, by its index.
    Set(usize),
}

/// A value and its origin.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) origin: Origin,
}

/// A YAML value.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    /// A whole number, 0 or more.
    Unsigned(u64),
    /// A negative whole number.
    Signed(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A key of a map, its origin, and its value.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) origin: Origin,
    pub(super) node: Node,
}

impl Value {
    /// As JSON; a number that is not finite becomes `null`.
    pub(super) fn json(&self) -> serde_json::Value {
        use serde_json::Value as Json;
        match self {
            Self::Null => Json::Null,
            Self::Bool(v) => (*v).into(),
            Self::Unsigned(v) => (*v).into(),
            Self::Signed(v) => (*v).into(),
            Self::Float(v) => (*v).into(),
            Self::Text(v) => v.as_str().into(),
            Self::List(nodes) => nodes.iter().map(|node| node.value.json()).collect(),
            Self::Map(entries) => {
                let entries = entries.iter();
                entries.map(|e| (e.key.clone(), e.node.value.json())).collect()
            }
        }
    }
}

impl Node {
    /// Reads one YAML document.
    fn parse(text: &str) -> Result<Self, SyntaxError> {
        let options = serde_saphyr::options! {
            with_snippet: false,
            strict_booleans: true,
            // Refused where the key is known.
            non_finite_float_policy: serde_saphyr::options::NonFiniteFloatPolicy::PassThrough,
        };
        match serde_saphyr::from_str_with_options::<Spanned<Raw>>(text, options) {
            Ok(spanned) => {
                let mut root = from_spanned(spanned);
                if matches!(root.value, Value::Map(_) | Value::Null) {
                    root.origin = Origin::Line(0);
                }
                Ok(root)
            }
            Err(error) => {
                let line = error.location().map_or(0, |l| l.line());
                let (what, hint) = message_of(&error);
                Err(SyntaxError { line, what, hint })
            }
        }
    }

    /// Replaces the value at the key of `text`, the override with index `index`, by its value, which is read as
    /// YAML: `--set train.steps=20`, `--set 'train.optimizer.betas=[0.9, 0.99]'`.
    fn apply(&mut self, index: usize, text: &str) -> Result<(), String> {
        let Some((path, value)) = text.split_once('=') else {
            return Err("expected `key=value`, for example `train.steps=20`".into());
        };
        let path = path.trim();
        if path.split('.').any(str::is_empty) {
            return Err(format!(
                "`{path}` is not a key: expected names separated by dots, for example `train.steps`"
            ));
        }
        if value.trim().is_empty() {
            return Err(format!(
                "the value after `=` is missing; `{path}=null` sets no value"
            ));
        }
        let origin = Origin::Set(index);
        let mut node =
            Self::parse(value).map_err(|error| format!("the value is not valid YAML: {}", error.what))?;
        node.set_origin(origin);
        *self.entry(path, origin)? = node;
        Ok(())
    }

    /// The node at `path`, with the sections above it, made where they do not exist.
    fn entry(&mut self, path: &str, origin: Origin) -> Result<&mut Self, String> {
        let mut node = self;
        let mut above = String::new();
        for key in path.split('.') {
            if matches!(node.value, Value::Null) {
                node.value = Value::Map(Vec::new());
            }
            let Value::Map(entries) = &mut node.value else {
                return Err(format!("`{above}` is not a section, so it has no key `{key}`"));
            };
            let at = entries.iter().position(|e| e.key == key).unwrap_or_else(|| {
                let node = Node {
                    value: Value::Null,
                    origin,
                };
                entries.push(Entry {
                    key: key.to_owned(),
                    origin,
                    node,
                });
                entries.len() - 1
            });
            node = &mut entries[at].node;
            if !above.is_empty() {
                above.push('.');
            }
            above.push_str(key);
        }
        Ok(node)
    }

    /// The node of the longest part of `path` that exists, and whether that is all of it.
    fn find(&self, path: &str) -> (&Self, bool) {
        let mut node = self;
        for key in path.split('.') {
            match node.get(key) {
                Some(next) => node = next,
                None => return (node, false),
            }
        }
        (node, true)
    }

    fn origin_of(&self, path: &str) -> Origin {
        self.find(path).0.origin
    }

    /// Gives the whole tree another origin.
    fn set_origin(&mut self, origin: Origin) {
        self.origin = origin;
        match &mut self.value {
            Value::List(nodes) => nodes.iter_mut().for_each(|node| node.set_origin(origin)),
            Value::Map(entries) => {
                for entry in entries {
                    entry.origin = origin;
                    entry.node.set_origin(origin);
                }
            }
            _ => {}
        }
    }

    /// The dotted path and the value of everything that is no section.
    fn entries(&self) -> Vec<(String, String)> {
        let Value::Map(entries) = &self.value else {
            return vec![(String::new(), self.value.to_string())];
        };
        let mut all = Vec::new();
        for entry in entries {
            for (below, value) in entry.node.entries() {
                let dot = if below.is_empty() { "" } else { "." };
                all.push((format!("{}{dot}{below}", entry.key), value));
            }
        }
        all
    }

    /// The value of a key, or of an element of a list: `groups[1]`.
    fn get(&self, key: &str) -> Option<&Node> {
        let Value::Map(entries) = &self.value else {
            return None;
        };
        let of = |key: &str| {
            let mut entries = entries.iter();
            entries.find(|entry| entry.key == key).map(|entry| &entry.node)
        };
        let Some((list, index)) = key.strip_suffix(']').and_then(|key| key.split_once('[')) else {
            return of(key);
        };
        match &of(list)?.value {
            Value::List(nodes) => nodes.get(index.parse::<usize>().ok()?),
            _ => None,
        }
    }
}

/// The value as YAML in one line, without quotes.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(v) => f.write_str(v),
            Self::List(nodes) => {
                let items: Vec<String> = nodes.iter().map(|node| node.value.to_string()).collect();
                write!(f, "[{}]", items.join(", "))
            }
            Self::Map(entries) => {
                let entry = |e: &Entry| format!("{}: {}", e.key, e.node.value);
                let items: Vec<String> = entries.iter().map(entry).collect();
                write!(f, "{{{}}}", items.join(", "))
            }
            scalar => scalar.json().fmt(f),
        }
    }
}

/// The parser's words, without the place, which is reported in our own form, and without advice to programmers; and where
/// to look: a parser notices a wrong indentation only on the line after it.
fn message_of(error: &serde_saphyr::Error) -> (String, Option<&'static str>) {
    if let Some(words) = own_words(error) {
        return (words, None);
    }
    let rendered = error.render_with_formatter(&serde_saphyr::UserMessageFormatter);
    let first = rendered.lines().next().unwrap_or("the parser gives no reason");
    let first = first.trim_start_matches("error: ");
    let first = match first.strip_prefix("line ").and_then(|rest| rest.split_once(": ")) {
        Some((_, message)) => message,
        None => first,
    };
    let end = [" at line ", ", set ", "; use "]
        .iter()
        .filter_map(|cut| first.find(cut))
        .min();
    let hint = "check indentation, brackets and the space after each colon, here and on the line before";
    (first[..end.unwrap_or(first.len())].to_owned(), Some(hint))
}

/// Our words where the parser's are meant for programmers.
fn own_words(error: &serde_saphyr::Error) -> Option<String> {
    use serde_saphyr::Error;
    let words = match error {
        Error::AliasError { error, .. } => return own_words(error),
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            return Some(format!("`{key}` is given more than once"));
        }
        Error::InvalidScalar { .. } => "a value does not match its tag (such as `!!int`)",
        // Nothing but keys has to be text here.
        Error::NullIntoString { .. } => "a key is empty",
        Error::Unexpected { .. } => "a key is a list or a section, expected a name",
        Error::MergeValueNotMapOrSeqOfMaps { .. } => "`<<` requires a section or a list of sections",
        Error::RecursiveReferencesRequireWeakTypes { .. } => "a value contains itself",
        Error::MultipleDocuments { .. } => {
            "`---` starts a second document, but a configuration is a single one"
        }
        Error::AliasReplayCounterOverflow { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. }
        | Error::Budget { .. } => "too many values, or nested too deeply",
        _ => return None,
    };
    Some(words.to_owned())
}

/// A value as the parser hands it out.
struct Raw(Value);

fn from_spanned(spanned: Spanned<Raw>) -> Node {
    Node {
        value: spanned.value.0,
        origin: Origin::Line(spanned.referenced.line()),
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor).map(Raw)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Unsigned(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(u64::try_from(v).map_or(Value::Signed(v), Value::Unsigned))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(Value::Float(v))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::Text(v.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut nodes = Vec::new();
        while let Some(spanned) = seq.next_element::<Spanned<Raw>>()? {
            nodes.push(from_spanned(spanned));
        }
        Ok(Value::List(nodes))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let origin = Origin::Line(key.referenced.line());
            let mut node = from_spanned(map.next_value()?);
            // A section is where its name stands, not where its first key does.
            if matches!(node.value, Value::Map(_)) {
                node.origin = origin;
            }
            entries.push(Entry {
                key: key.value,
                origin,
                node,
            });
        }
        Ok(Value::Map(entries))
    }
}
